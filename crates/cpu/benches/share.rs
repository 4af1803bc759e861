//! A layer's share of a device's decode step: experts of one row, at the Flash-Next geometry (640 x 2560, gate and up in
//! IQ2_S, down in IQ4_NL), from memory far beyond the caches.
//!
//!     cargo bench -p strata-cpu --bench share
//!     cargo bench -p strata-cpu --bench share -- 16 15 8
//!
//! Arguments are numbers of threads; without any, as many as there are physical cores. The binary needs nothing else, so it can be
//! copied to another machine. Printed are microseconds, the median and the fastest tenth, of layers right behind one another,
//! as when a step's other work is short; and of layers a pause apart that the workers sleep in, woken a moment before, as
//! when the device computes between them. Beside them: the same rows multiplied by this thread alone, over the threads, which is
//! what a share would take if nothing but products took time.

use std::sync::Arc;
use std::time::{Duration, Instant};

use strata_backend::{BuildHostExperts, ExpertWeights, HostExperts, KvFormat, Layer, MoeShape, Shape, Spec};
use strata_cpu::{Cpu, CpuHostExperts};
use strata_plan::{Arena, Plan};
use strata_quant::{Format, Isa};
use strata_residency::{Bytes, ExpertStore, LayerSource};
use strata_topology::{Role, Topology, spawn};

const HIDDEN: usize = 2560;
const WIDTH: usize = 640;
/// About 2 MB each.
const EXPERTS: usize = 160;
const FORMATS: [Format; 3] = [Format::Iq2S, Format::Iq2S, Format::Iq4Nl];
const LAYERS: usize = 1200;
/// What the device takes between two layers' questions.
const PAUSE: Duration = Duration::from_micros(150);
/// How long before the next question workers are woken.
const AHEAD: Duration = Duration::from_micros(30);

fn main() {
    let asked: Vec<usize> = std::env::args().filter_map(|arg| arg.parse().ok()).collect();
    let asked = if asked.is_empty() { vec![Topology::read().assign(None).unwrap().threads()] } else { asked };
    println!("path: {}", Isa::detect());
    println!("{:>7} {:>7} {:>16} {:>16} {:>8}", "threads", "experts", "together", "apart", "products");
    let store = Arc::new(store());
    let alone = measured(&store, 1);
    for threads in asked {
        let shares = measured(&store, threads);
        for ((experts, together, apart), (_, [alone, _], _)) in shares.iter().zip(&alone) {
            println!(
                "{threads:7} {experts:7} {:8.1} {:7.1} {:8.1} {:7.1} {:8.1}",
                together[0],
                together[1],
                apart[0],
                apart[1],
                alone / threads as f64
            );
        }
    }
}

/// Microseconds of shares of 1, 2 and 4 experts.
fn measured(store: &Arc<ExpertStore>, threads: usize) -> Vec<(usize, [f64; 2], [f64; 2])> {
    let assignment = Topology::read().assign(Some(threads)).unwrap();
    let cpu = Cpu::new(assignment.clone(), Isa::detect());
    let store = Arc::clone(store);
    // The calling thread is one of the pool's: it belongs on a CPU of its own.
    let driver = spawn(Role::Driver, assignment.set(Role::Driver), "driver", move || {
        let mut host = host(cpu, store);
        [1, 2, 4].map(|n| (n, shares(&mut *host, n, None), shares(&mut *host, n, Some(PAUSE)))).to_vec()
    });
    driver.unwrap().join().unwrap()
}

fn shares(host: &mut dyn HostExperts, experts: usize, pause: Option<Duration>) -> [f64; 2] {
    let [gate, up, down] = FORMATS;
    let weights = ExpertWeights { gate, up, down, scales: [None; 3] };
    let u: Vec<f32> = (0..HIDDEN).map(|i| ((i * 7919) % 1009) as f32 / 500.0 - 1.0).collect();
    let mut out = vec![0.0; experts * HIDDEN];
    let mut state = 1u64;
    host.begin_step();
    let mut times: Vec<f64> = (0..LAYERS / experts)
        .map(|_| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            let first = (state >> 33) as usize % (EXPERTS - experts);
            let ids: Vec<u32> = (first..first + experts).map(|id| id as u32).collect();
            if let Some(pause) = pause {
                wait(pause - AHEAD);
                host.rouse();
                wait(AHEAD);
            }
            let start = Instant::now();
            host.outputs(Layer(0), &weights, &ids, &u, &mut out).unwrap();
            start.elapsed().as_secs_f64() * 1e6
        })
        .collect();
    host.end_step();
    assert!(out.iter().all(|x| x.is_finite()));
    times.sort_by(f64::total_cmp);
    [times[times.len() / 2], times[times.len() / 10]]
}

fn wait(time: Duration) {
    let start = Instant::now();
    while start.elapsed() < time {
        std::hint::spin_loop();
    }
}

/// Experts of random bits with ordinary scales.
fn store() -> ExpertStore {
    let mut state = 0x9e37_79b9_7f4a_7c15u64;
    let mut tensor = |format: Format, rows: usize, k: usize| {
        let mut bytes = vec![0; EXPERTS * rows * format.row_bytes(k).unwrap()];
        for word in bytes.chunks_mut(8) {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            word.copy_from_slice(&state.to_le_bytes()[..word.len()]);
        }
        // Both formats begin a block with an f16.
        bytes.chunks_exact_mut(format.block_bytes()).for_each(|block| block[1] = 0x14);
        Bytes::from(bytes)
    };
    let [gate, up, down] = FORMATS;
    let (gate, up, down) =
        (tensor(gate, WIDTH, HIDDEN), tensor(up, WIDTH, HIDDEN), tensor(down, HIDDEN, WIDTH));
    let mut store = ExpertStore::new(vec![], Box::new(|| Ok(())));
    store.add_layer(0, LayerSource::split(EXPERTS as u16, gate, up, down).unwrap()).unwrap();
    store
}

fn host(cpu: Cpu, store: Arc<ExpertStore>) -> Box<dyn HostExperts> {
    let spec = Spec {
        shape: Shape {
            hidden: HIDDEN,
            streams: 4,
            mixer_rank: 320,
            vocab: 32,
            norm_eps: 1e-6,
            gdn: None,
            qsa: None,
            moe: MoeShape { experts: EXPERTS, used: 10, width: WIDTH, shared_width: WIDTH },
            ngram: None,
        },
        layers: vec![],
        sequences: 1,
        checkpoints: 0,
        context: 0,
        kv: KvFormat::F16,
        window: 1,
        buffers: vec![],
    };
    let host = Box::new(CpuHostExperts(cpu));
    let mut plan = Plan::new();
    let region = host.describe(&spec, &mut plan);
    let mut arena = Arena::new(&plan).unwrap();
    host.build(&spec, region, &mut arena, store).unwrap()
}
