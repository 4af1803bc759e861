//! Experts of which memory holds a part, the others being read from the file.

use std::fs::{File, OpenOptions};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use strata_backend::{Backend, BackendError, Build, Op, Spec, Takers, WeightData};
use strata_cpu::Cpu;
use strata_engine::{BEYOND, Engine, EngineConfig, Event, ExpertHome, Reason, Request, Sampling, Wants};
use strata_plan::{Arena, Limits, Place, Plan};
use strata_residency::{ExpertId, ExpertStore, LayerSource, Tier};
use strata_testkit::golden;
use tempfile::TempDir;

use crate::copy::Parts;
use crate::rig::{Rig, bits, ids, logits};

fn config(bytes: u64) -> EngineConfig {
    EngineConfig {
        context: Some(256),
        window: Some(32),
        sequences: 2,
        experts: ExpertHome::Budget(bytes),
        ..Default::default()
    }
}

fn open(path: &Path, config: EngineConfig) -> Engine {
    Rig { config, ..Rig::default() }.open(path)
}

/// A copy of the bundled model with the last layer's experts at its end, and their bytes.
fn model(folder: &TempDir) -> (PathBuf, Vec<u8>) {
    let mut parts = Parts::of(&golden::pebble());
    let mut last = Vec::new();
    for tensor in ["gate", "up", "down"] {
        last.push(parts.remove(&format!("blk.7.ffn_{tensor}_exps.weight")));
    }
    let bytes = last.iter().map(|part| part.bytes.len()).sum::<usize>();
    parts.tensors.extend(last);
    let path = parts.write(folder);
    let whole = std::fs::read(&path).unwrap();
    let end = whole[whole.len() - bytes..].to_vec();
    (path, end)
}

/// Runs until nothing is left to do: the tokens, and why answers ended.
fn run(engine: &mut Engine) -> (Vec<u32>, Vec<Reason>) {
    let (mut tokens, mut reasons) = (vec![], vec![]);
    while engine.is_busy() {
        for event in engine.step() {
            match event {
                Event::Token { token, .. } => tokens.push(token),
                Event::Done { reason, .. } => reasons.push(reason),
                Event::Read { .. } => {}
            }
        }
    }
    (tokens, reasons)
}

/// Oracle: the sentence, and an engine whose file is whole. The file is cut off in the middle of a window, prompt or step: that window's answer fails,
/// naming file, tensor and expert; nothing of it is the sequence's, and with the file whole again everything goes on.
#[test]
fn a_file_cut_off_in_a_window_fails_the_window() {
    let folder = tempfile::tempdir().unwrap();
    let (path, end) = model(&folder);
    let ids = ids();
    let file = OpenOptions::new().write(true).open(&path).unwrap();
    let found = file.metadata().unwrap();
    let (whole, modified) = (found.len(), found.modified().unwrap());
    let greedy =
        |ids: &[u32]| Request { max_tokens: Some(5), ..Request::new(ids.to_vec(), Sampling::greedy(), &[]) };

    let mut engine = open(&path, config(1 << 20));
    let (seq, twin) = (engine.open().unwrap(), engine.open().unwrap());
    for s in [seq, twin] {
        logits(&mut engine, s, &ids[..13], Wants::Nothing);
    }
    for prompt in [&ids[13..50], &ids[13..14]] {
        let cut = File::options().write(true).open(&path).unwrap();
        let (mut groups, left) = (0, whole - end.len() as u64);
        engine.set_probe(Some(Box::new(move |op: &Op<'_>, _: &mut dyn Backend| {
            groups += usize::from(matches!(op, Op::Group { .. }));
            // In the second layer; the dense weights, which are mapped, lie before.
            if groups == 2 {
                cut.set_len(left).unwrap();
            }
        })));
        engine.submit(seq, greedy(prompt)).unwrap();
        let (said, reasons) = run(&mut engine);
        let [Reason::Failed(why)] = &reasons[..] else { panic!("{said:?} {reasons:?}") };
        for part in
            ["expert ", " of layer 7 could not be read: tensor `blk.7.ffn_", "changed.gguf became shorter"]
        {
            assert!(why.contains(part), "no `{part}` in {why}");
        }
        assert_eq!(engine.tokens(seq).unwrap(), &ids[..13]);
        engine.set_probe(None);
        file.write_all_at(&end, left).unwrap();
        file.set_modified(modified).unwrap();
    }
    engine.submit(seq, greedy(&ids[13..14])).unwrap();
    let got = run(&mut engine);
    engine.submit(twin, greedy(&ids[13..14])).unwrap();
    assert_eq!(got, run(&mut engine));
    assert_eq!(got.0.len(), 5);
    // A file that was written to is refused before it is read.
    file.set_modified(modified + std::time::Duration::from_secs(1)).unwrap();
    engine.submit(seq, greedy(&ids[13..14])).unwrap();
    let (_, reasons) = run(&mut engine);
    assert!(matches!(&reasons[..], [Reason::Failed(why)] if why.contains("was written to")), "{reasons:?}");
}

/// Oracle: the counts, and the same logits. What steps taught is kept, and the next start has it in memory: fewer experts are read for the same answer.
#[test]
fn what_steps_use_is_in_memory_next_time() {
    let folder = tempfile::tempdir().unwrap();
    let path = golden::pebble();
    let ranking = folder.path().join("pebble.gguf.experts");
    let ids = ids();
    let once = |ranking: Option<PathBuf>| {
        let mut engine = open(&path, EngineConfig { ranking, ..config(2 << 20) });
        engine.take_counters();
        let seq = engine.open().unwrap();
        let mut rows = Vec::new();
        ids[..40].iter().for_each(|id| rows.extend(logits(&mut engine, seq, &[*id], Wants::All)));
        let reads = engine.take_counters().reads().unwrap();
        assert!(reads.read > 0 && reads.read < reads.used && reads.bytes > 0, "{reads:?}");
        (bits(&rows), reads.read)
    };
    let (want, unknown) = once(None);
    assert!(!ranking.exists());
    let (first, learning) = once(Some(ranking.clone()));
    assert!(ranking.exists());
    let (second, known) = once(Some(ranking.clone()));
    assert!(first == want && second == want);
    assert_eq!(unknown, learning);
    assert!(known < learning, "{known} experts read after {learning}");
    // What is no ranking is nothing.
    std::fs::write(&ranking, b"no ranking").unwrap();
    assert_eq!(once(Some(ranking)).1, unknown);
}

/// The CPU as a device that has no room for any expert, and would use them in this order; and the store that it was given.
struct Beside {
    cpu: Cpu,
    order: Vec<ExpertId>,
    store: Arc<Mutex<Option<Arc<ExpertStore>>>>,
}

impl Build for Beside {
    type Described = <Cpu as Build>::Described;

    fn device_limits(&self) -> Option<Limits> {
        Some(Limits { available: 1 << 30, total: 1 << 30, source: "the test's device".into() })
    }

    fn describe(
        &self,
        spec: &Spec,
        weights: &[WeightData],
        experts: &[(u16, LayerSource)],
        plan: &mut Plan,
    ) -> Result<Self::Described, BackendError> {
        self.cpu.describe(spec, weights, experts, plan)
    }

    fn experts_in_memory(&self, _: &Self::Described) -> Option<Vec<ExpertId>> {
        Some(self.order.clone())
    }

    fn takers(&self) -> Takers {
        Takers { stagers: 3, computes: true }
    }

    fn build(
        self,
        spec: Spec,
        described: Self::Described,
        arena: Arena,
        weights: Vec<WeightData>,
        store: Arc<ExpertStore>,
    ) -> Result<Box<dyn Backend>, BackendError> {
        *self.store.lock().unwrap() = Some(Arc::clone(&store));
        self.cpu.build(spec, described, arena, weights, store)
    }
}

/// Oracle: the same engine without a device, and the device's order. Experts that it can't have are copied into memory as far as the budget goes, those used most
/// first, and stay there; the others are read, whatever the window; and the ranking is the device's business.
#[test]
fn a_device_has_the_most_used_in_memory() {
    let ids = ids();
    let path = golden::pebble();
    let folder = tempfile::tempdir().unwrap();
    let ranking = folder.path().join("pebble.gguf.experts");
    let want = {
        let mut engine = open(&path, EngineConfig { experts: ExpertHome::Mapped, ..config(0) });
        let seq = engine.open().unwrap();
        bits(&logits(&mut engine, seq, &ids, Wants::All))
    };
    let mut order: Vec<ExpertId> =
        (0..8).flat_map(|layer| (0..64).map(move |expert| ExpertId { layer, expert })).collect();
    order.sort_by_key(|id| (id.expert * 29 % 64, id.layer * 5 % 8));
    for (bytes, window) in [(1, 32), (4 << 20, 7), (8 << 20, 1), (1 << 40, 32)] {
        let experts = ExpertHome::Budget(bytes);
        let config =
            EngineConfig { window: Some(window), experts, ranking: Some(ranking.clone()), ..config(0) };
        let store = Arc::new(Mutex::new(None));
        let device = |cpu| Beside { cpu, order: order.clone(), store: Arc::clone(&store) };
        let mut engine = Rig { config, ..Rig::default() }.load(&path, device).unwrap();
        let store = store.lock().unwrap().take().unwrap();
        let in_memory = || order.iter().map(|id| store.tier(*id).unwrap() == Tier::Heap).collect::<Vec<_>>();
        let before = in_memory();
        let copies = before.iter().filter(|copied| **copied).count();
        // All are equally long here, but for those of a layer or two.
        assert!(before[..copies * 9 / 10].iter().all(|copied| *copied), "{bytes}: {before:?}");
        let of = |place, name: &str| -> u64 {
            let items = engine.planned().items().iter();
            items.filter(|item| item.place == place && item.name == name).map(|item| item.bytes).sum()
        };
        let taken = ["resident experts", "experts being read", "experts being staged"]
            .map(|name| of(Place::Heap, name));
        match bytes {
            1 => assert!(copies == 0 && taken[0] == 0),
            _ if bytes < 1 << 30 => {
                assert!(copies > 0 && taken.iter().sum::<u64>() <= bytes, "{taken:?} of {bytes}")
            }
            _ => assert!(copies == order.len() && taken == [0; 3] && of(Place::File, BEYOND) == 0),
        }
        let seq = engine.open().unwrap();
        assert!(bits(&logits(&mut engine, seq, &ids, Wants::All)) == want, "{bytes}, window {window}");
        assert!(in_memory().iter().zip(&before).all(|(now, copied)| *now || !copied));
        let reads = engine.take_counters().reads();
        assert_eq!(reads.is_some_and(|reads| reads.read > 0), copies < order.len(), "{reads:?}");
        drop(engine);
        assert!(!ranking.exists());
    }
}

/// Oracle: by hand. Of 32 experts of three parts of 8 KiB, each with 12 KiB of a slot, those that have no slot stay in the file, as long as they are there.
#[test]
fn what_stays_in_the_file_is_counted_by_experts() {
    for (budget, kept) in [(1, 0), (5 * (36 << 10), 5), (6 * (36 << 10) - 1, 5), (1 << 30, 32)] {
        let config = EngineConfig { experts: ExpertHome::Budget(budget), ..EngineConfig::default() };
        let engine = open(&golden::dir().join("tiny/tiny.gguf"), config);
        let items = engine.planned().items().iter();
        let beyond: u64 = items.filter(|item| item.name == BEYOND).map(|item| item.bytes).sum();
        assert_eq!(beyond, (32 - kept) * (24 << 10), "{budget}");
    }
}
