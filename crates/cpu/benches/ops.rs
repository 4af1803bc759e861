//! What ops cost at the demo model's geometry: one row (decode, position 500) and 512 rows (a prompt).
//!
//! `cargo bench -p strata-cpu --bench ops`; `STRATA_BENCH_THREADS` sets the threads (2), `STRATA_BENCH_GRAIN` the least
//! work worth another task.

use divan::Bencher;
use divan::counter::ItemsCount;
use strata_backend::{GdnShape, KvFormat, MoeShape, NgramShape, Op, QsaShape, Shape, Window};
use strata_quant::{Format, Isa};
use strata_topology::{Role, Topology, spawn};

#[allow(dead_code)]
#[path = "../tests/ops/rig.rs"]
mod rig;
use rig::*;

fn main() {
    // The calling thread is one of the pool's: it belongs on a CPU of its own.
    let assignment = Topology::read().assign(Some(threads())).unwrap();
    eprint!("{assignment}");
    spawn(Role::Driver, assignment.set(Role::Driver), "driver", divan::main).unwrap().join().unwrap();
}

fn threads() -> usize {
    number("STRATA_BENCH_THREADS").unwrap_or(2)
}

fn number(name: &str) -> Option<usize> {
    std::env::var(name).ok().and_then(|n| n.parse().ok())
}

/// The demo model's widths and formats; one layer of each kind.
fn pebble() -> Recipe {
    Recipe {
        shape: Shape {
            hidden: 256,
            streams: 4,
            mixer_rank: 32,
            vocab: 12_288,
            norm_eps: 1e-6,
            gdn: Some(GdnShape { key_heads: 4, value_heads: 8, key_dim: 32, value_dim: 32, conv_kernel: 4 }),
            qsa: Some(QsaShape {
                heads: 4,
                kv_heads: 2,
                head_dim: 64,
                rotary: 16,
                rope_base: 1e7,
                index_heads: 2,
                index_dim: 32,
                budget: 64,
            }),
            moe: MoeShape { experts: 64, used: 4, width: 96, shared_width: 96 },
            ngram: Some(NgramShape { heads: 8, row: 32, conv_kernel: 4, dilation: 3 }),
        },
        block: 4,
        format: Format::Q8_0,
        experts: Some([Format::Iq4Xs, Format::Iq4Xs, Format::Iq4Nl]),
        kv: KvFormat::F16,
        context: 1024,
        window: 512,
        sequences: 1,
        threads: threads(),
        isa: Isa::detect(),
        grain: number("STRATA_BENCH_GRAIN"),
        seed: 1,
    }
}

/// One row at position 500, or a prompt from position 0.
fn prepared(rows: usize) -> (Rig, Window) {
    let mut rig = Rig::new(pebble());
    let start = if rows == 1 { 500 } else { 0 };
    let tokens = rig.tokens(start + rows, 3);
    if start > 0 {
        rig.step(&window(0, 0, &tokens[..start]));
    }
    let window = window(0, start, &tokens[start..]);
    rig.enter(&window);
    rig.backend.begin_step();
    (rig, window)
}

fn measure(bencher: Bencher, rows: usize, mut op: impl FnMut(&mut Rig, &Window)) {
    let (mut rig, window) = prepared(rows);
    bencher.counter(ItemsCount::new(rows)).bench_local(|| op(&mut rig, &window));
    rig.backend.end_step();
}

#[divan::bench(args = [1, 512])]
fn mixer_read(bencher: Bencher, rows: usize) {
    measure(bencher, rows, |rig, _| {
        rig.submit(Op::MixerRead { weights: rig.mixer, rows, x: X, u: U, inject: INJECT });
    });
}

#[divan::bench(args = [1, 512])]
fn mixer_write(bencher: Bencher, rows: usize) {
    measure(bencher, rows, |rig, _| rig.submit(Op::MixerWrite { rows, y: Y, inject: INJECT, x: X }));
}

#[divan::bench(args = [1, 512])]
fn gdn(bencher: Bencher, rows: usize) {
    measure(bencher, rows, |rig, window| rig.gdn(&window.spans));
}

#[divan::bench(args = [1, 512])]
fn qsa(bencher: Bencher, rows: usize) {
    measure(bencher, rows, |rig, window| rig.qsa(QSA, &window.spans));
}

#[divan::bench(args = [1, 512])]
fn ngram(bencher: Bencher, rows: usize) {
    let (mut rig, window) = prepared(rows);
    let (bytes, _) = rig.table_rows(&window.tokens);
    bencher.counter(ItemsCount::new(rows)).bench_local(|| {
        rig.submit(Op::Ngram {
            layer: GDN,
            weights: rig.ngram,
            format: rig.recipe.format,
            scale: None,
            table_rows: &bytes,
            spans: &window.spans,
            x: X,
        });
    });
}

#[divan::bench(args = [1, 512])]
fn route(bencher: Bencher, rows: usize) {
    measure(bencher, rows, |rig, _| {
        rig.submit(Op::Route { layer: QSA, router: rig.router, rows, u: U });
        rig.submit(Op::Group { rows });
    });
}

#[divan::bench(args = [1, 512])]
fn experts(bencher: Bencher, rows: usize) {
    let (mut rig, _) = prepared(rows);
    rig.moe(rows);
    bencher.counter(ItemsCount::new(rows)).bench_local(|| {
        rig.submit(Op::Experts { layer: QSA, weights: rig.experts, rows, u: U });
    });
}

#[divan::bench(args = [1, 512])]
fn combine(bencher: Bencher, rows: usize) {
    let (mut rig, _) = prepared(rows);
    rig.moe(rows);
    bencher.counter(ItemsCount::new(rows)).bench_local(|| {
        rig.submit(Op::Combine { shared: rig.shared, rows, u: U, y: Y });
    });
}

#[divan::bench(args = [1, 64])]
fn head(bencher: Bencher, rows: usize) {
    let chosen: Vec<u32> = (0..rows as u32).collect();
    measure(bencher, rows, |rig, _| {
        rig.submit(Op::Head {
            mixer: rig.final_mixer,
            output: rig.output,
            rows: &chosen,
            x: X,
            logits: LOGITS,
        });
    });
}

#[divan::bench(args = [1, 512])]
fn embed(bencher: Bencher, rows: usize) {
    measure(bencher, rows, |rig, window| {
        rig.submit(Op::Embed { table: rig.table, tokens: &window.tokens, x: X })
    });
}
