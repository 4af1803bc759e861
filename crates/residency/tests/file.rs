//! Experts read from files. What they are mapped from holds other bytes, so that reading there can't go unseen.
#![cfg(not(loom))]

use std::collections::BTreeSet;
use std::fs::{self, File, OpenOptions};
use std::io;
use std::ops::ControlFlow;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::PathBuf;
use std::thread;

use proptest::prelude::*;
use strata_plan::{Arena, Block, Category, Plan};
use strata_residency::{
    ExpertId, ExpertStore, FileTier, Heat, LayerExperts, LayerSource, Pace, ReadFile, Reader, ReaderOptions,
    Roster, Slots, StoreError, TensorPlace, Tier, Way,
};
use tempfile::TempDir;

const LAYERS: u16 = 3;
const EXPERTS: u16 = 12;
/// Bytes of gate, up and down rows by layer; the last layer's gate and up rows are fused.
const PARTS: [[usize; 3]; 3] = [[500, 700, 4100], [9000, 500, 64], [3000, 3000, 5000]];

fn byte(layer: u16, part: usize, expert: u16, place: usize) -> u8 {
    (usize::from(layer) * 89 + part * 31 + usize::from(expert) * 7 + place * 13 + place / 256 * 3) as u8
}

/// A model file, and how its experts are to be read.
struct Model {
    folder: TempDir,
    bytes: Vec<u8>,
}

impl Model {
    fn path(&self) -> PathBuf {
        self.folder.path().join("model")
    }

    fn new() -> (Model, Vec<LayerSource>) {
        let (mut bytes, mut sources) = (vec![0xEE; 1000], Vec::new());
        for layer in 0..LAYERS {
            let parts = PARTS[usize::from(layer)];
            let rows =
                |part: usize, expert| (0..parts[part]).map(move |place| byte(layer, part, expert, place));
            let wrong = |part: usize| vec![0xEE; parts[part] * usize::from(EXPERTS)].into();
            let mut tensor = |name: &str, content: Vec<u8>| {
                bytes.resize(bytes.len().next_multiple_of(32), 0xEE);
                let place =
                    TensorPlace { name: format!("{name}.{layer}"), file: 0, offset: bytes.len() as u64 };
                bytes.extend(content);
                place
            };
            let of = |part: usize| (0..EXPERTS).flat_map(move |expert| rows(part, expert)).collect();
            let source = if layer == 2 {
                let fused = (0..EXPERTS).flat_map(|expert| rows(0, expert).chain(rows(1, expert))).collect();
                let both = tensor("gate_up", fused);
                let wrong_both = vec![0xEE; (parts[0] + parts[1]) * usize::from(EXPERTS)].into();
                let source = LayerSource::fused(EXPERTS, wrong_both, wrong(2)).unwrap();
                source.read_from([both.clone(), both, tensor("down", of(2))])
            } else {
                let source = LayerSource::split(EXPERTS, wrong(0), wrong(1), wrong(2)).unwrap();
                source.read_from([tensor("gate", of(0)), tensor("up", of(1)), tensor("down", of(2))])
            };
            sources.push(source);
        }
        let model = Model { folder: tempfile::tempdir().unwrap(), bytes };
        fs::write(model.path(), &model.bytes).unwrap();
        (model, sources)
    }

    fn reader(&self, way: Way, most: usize) -> Reader {
        #[cfg(target_os = "linux")]
        let flags = rustix::fs::OFlags::DIRECT.bits() as i32;
        #[cfg(not(target_os = "linux"))]
        let flags = 0;
        let direct = OpenOptions::new().read(true).custom_flags(flags).open(self.path());
        let file = ReadFile { name: "model".into(), file: File::open(self.path()).unwrap(), direct };
        let spawn =
            &mut |_, work: Box<dyn FnOnce() + Send>| -> io::Result<_> { thread::Builder::new().spawn(work) };
        let options = ReaderOptions { way, direct: true, jobs: most, threads: 3, spawn };
        Reader::new(vec![file], options).unwrap()
    }

    /// A store that keeps as many experts as `budget` bytes have room for, and `spare` more.
    fn store(
        &self,
        sources: &[LayerSource],
        way: Way,
        budget: u64,
        spare: usize,
        most: usize,
    ) -> ExpertStore {
        let roster = Roster::new(
            sources
                .iter()
                .map(|source| LayerExperts { experts: source.experts(), bytes: source.slot_bytes() as u64 }),
        );
        let slots = Slots::cut(roster.clone(), budget, usize::MAX).with_spare(spare);
        let mut plan = Plan::new();
        let lengths: Vec<usize> = slots.ids().map(|slot| slots.bytes(slot) as usize).collect();
        let regions: Vec<_> =
            lengths.iter().map(|&bytes| plan.heap(Category::Experts, "slot", bytes)).collect();
        let mut arena = Arena::new(&plan).unwrap();
        let memory: Vec<Block<u8>> = regions.into_iter().map(|region| arena.take(region).unwrap()).collect();
        let mut store = ExpertStore::new(vec![], Box::new(|| Ok(())));
        for (layer, source) in (0..).zip(sources) {
            store.add_layer(layer, source.clone()).unwrap();
        }
        let tier =
            FileTier::new(slots, memory, self.reader(way, most), Heat::new(&roster, Pace::default()), most);
        assert!(store.read_with(tier, |_, _| ControlFlow::Continue(())).unwrap());
        store
    }
}

/// Whether an expert is in memory, with its own bytes.
fn is_right(store: &ExpertStore, id: ExpertId) -> bool {
    let pinned = store.pin_current(id).unwrap();
    let blob = pinned.blob();
    let right = |part: usize, bytes: &[u8]| {
        bytes.len() == PARTS[usize::from(id.layer)][part]
            && bytes.iter().enumerate().all(|(place, &found)| found == byte(id.layer, part, id.expert, place))
    };
    pinned.tier() == Tier::Heap && right(0, blob.gate) && right(1, blob.up) && right(2, blob.down)
}

/// Goes through a tour; an error is the tour's.
fn go(store: &ExpertStore, layer: u16, experts: &[u32], step: bool) -> Result<usize, StoreError> {
    let (mut end, mut parts) = (0, 0);
    for range in store.tour(layer, experts, step)? {
        let range = range?;
        assert!(range.start == end && range.end > end, "{range:?} behind {end}");
        for &expert in &experts[range.clone()] {
            assert!(is_right(store, ExpertId { layer, expert: expert as u16 }), "expert {expert} of {layer}");
        }
        (end, parts) = (range.end, parts + 1);
    }
    assert_eq!(end, experts.len());
    Ok(parts)
}

fn tours() -> impl Strategy<Value = Vec<(u16, Vec<u32>, bool)>> {
    let experts = (prop::collection::vec(0u32..u32::from(EXPERTS), 0..30), 1u32..12).prop_map(
        |(mut experts, order)| {
            // In ascending order, and in others.
            experts.sort_unstable_by_key(|expert| expert * order % 13);
            experts
        },
    );
    prop::collection::vec((0..LAYERS, experts, any::<bool>()), 1..20)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// Oracle: the bytes that the file was made of. Any tours, whatever room there is: from one slot to more than there are experts.
    #[test]
    fn experts_on_tour_are_in_memory(
        tours in tours(), budget in 0u64..400_000, spare in 1usize..9, most in 1usize..6, threads in any::<bool>()
    ) {
        let (model, sources) = Model::new();
        let way = if threads { Way::Positioned } else { Way::Auto };
        let store = model.store(&sources, way, budget, spare, most);
        for (layer, experts, step) in &tours {
            go(&store, *layer, experts, *step).unwrap();
        }
        let count = store.take_file_count().unwrap();
        let used = |(_, experts, _): &(u16, Vec<u32>, bool)| experts.iter().collect::<BTreeSet<_>>().len();
        prop_assert_eq!(count.used as usize, tours.iter().map(used).sum::<usize>());
        prop_assert!(count.read <= count.used, "{count:?}");
    }

    /// Oracle: the bytes, and sentences. A file that is cut off anywhere, and whole again: whatever failed, tours go on, and none is wrong.
    #[test]
    fn a_file_that_is_cut_off_fails_what_needs_it(tours in tours(), cut in 0usize..200_000, spare in 1usize..5) {
        let (model, sources) = Model::new();
        let store = model.store(&sources, Way::Auto, 0, spare, 2);
        let file = OpenOptions::new().write(true).open(model.path()).unwrap();
        for (turn, (layer, experts, step)) in tours.iter().enumerate() {
            if turn % 2 == 0 {
                file.set_len((cut % model.bytes.len()) as u64).unwrap();
                if let Err(why) = go(&store, *layer, experts, *step) {
                    let said = why.to_string();
                    prop_assert!(said.contains(&format!("of layer {layer} could not be read: tensor `")), "{}", said);
                    prop_assert!(said.contains("model became shorter"), "{}", said);
                }
                file.set_len(0).unwrap();
                file.write_all_at(&model.bytes, 0).unwrap();
            } else {
                go(&store, *layer, experts, *step).unwrap();
            }
        }
    }
}

/// Oracle: by hand. What steps use stays, whatever a prompt passes through in between; what they don't goes first.
#[test]
fn a_prompt_does_not_push_out_what_steps_use() {
    let (model, sources) = Model::new();
    // Slots for six, and twice as many as a part reads.
    let store = model.store(&sources, Way::Auto, 0, 6 + 6, 3);
    let used = [2, 5, 11];
    for _ in 0..4 {
        (0..LAYERS).for_each(|layer| assert!(go(&store, layer, &used[..2], true).is_ok()));
    }
    let all: Vec<u32> = (0..u32::from(EXPERTS)).collect();
    for _ in 0..3 {
        (0..LAYERS).for_each(|layer| assert!(go(&store, layer, &all, false).unwrap() > 1));
    }
    store.take_file_count();
    (0..LAYERS).for_each(|layer| assert_eq!(go(&store, layer, &used[..2], true).unwrap(), 1));
    let count = store.take_file_count().unwrap();
    assert_eq!((count.used, count.read), (6, 0));
    // What is there comes first, while the last is read.
    assert_eq!(go(&store, 0, &used, true).unwrap(), 2);
    assert_eq!(store.take_file_count().unwrap().read, 1);
}

/// Oracle: the sentences. What isn't there is named; nothing is read and the next tour goes well.
#[test]
fn experts_that_there_are_not_are_refused() {
    let (model, sources) = Model::new();
    let store = model.store(&sources, Way::Auto, 50_000, 2, 2);
    let refused = |layer, expert| store.tour(layer, &[expert], false).err().unwrap().to_string();
    assert!(refused(3, 0).contains("layer 3 has no experts"));
    assert!(refused(1, 12).contains("layer 1 has no expert 12"));
    go(&store, 1, &[11], false).unwrap();
    // A layer that is only mapped can't be read.
    let mut mapped = ExpertStore::new(vec![], Box::new(|| Ok(())));
    let tensor = || vec![0; 24].into();
    mapped.add_layer(0, LayerSource::split(2, tensor(), tensor(), tensor()).unwrap()).unwrap();
    let roster = Roster::new([]);
    let heat = Heat::new(&roster, Pace::default());
    let tier = FileTier::new(Slots::cut(roster, 0, 0), vec![], model.reader(Way::Auto, 1), heat, 1);
    let why = mapped.read_with(tier, |_, _| ControlFlow::Continue(())).unwrap_err();
    assert!(why.to_string().contains("layer 0 are in no file"), "{why}");
}

/// Oracle: the counts. Loading can be ended, and a store without a file tier has everything at once.
#[test]
fn loading_ends_when_asked_and_without_a_tier_all_is_there() {
    let (model, sources) = Model::new();
    let mut store = ExpertStore::new(vec![], Box::new(|| Ok(())));
    (0..).zip(&sources).for_each(|(layer, source)| store.add_layer(layer, source.clone()).unwrap());
    {
        let all: Vec<_> = store.tour(1, &[1, 1, 7], true).unwrap().map(Result::unwrap).collect();
        assert!(matches!(&all[..], [range] if *range == (0..3)), "{all:?}");
    }
    assert_eq!(store.take_file_count(), None);
    let roster = Roster::new(
        sources
            .iter()
            .map(|source| LayerExperts { experts: source.experts(), bytes: source.slot_bytes() as u64 }),
    );
    let slots = Slots::cut(roster.clone(), 0, 0).with_spare(20);
    let each = slots.bytes(slots.ids().next().unwrap()) as usize;
    let mut plan = Plan::new();
    let region = plan.heap(Category::Experts, "slots", 20 * each);
    let mut arena = Arena::new(&plan).unwrap();
    let memory = region.parts(each).map(|part| arena.take(part).unwrap()).collect();
    let tier =
        FileTier::new(slots, memory, model.reader(Way::Auto, 2), Heat::new(&roster, Pace::default()), 2);
    let mut told = 0;
    let ended = store.read_with(tier, |done, of| {
        told += 1;
        assert!(done.experts == told && done.bytes < of);
        if told == 3 { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    });
    assert!(!ended.unwrap() && told == 3);
}
