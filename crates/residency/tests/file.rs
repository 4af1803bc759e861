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
    CopyLayout, ExpertId, ExpertStore, FileTier, Heat, HostCopy, LayerExperts, LayerSource, Pace, ReadFile,
    Reader, ReaderOptions, Roster, Slots, Source, StoreError, Tensor, TensorPlace, Tier, Way,
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
        self.reader_by(way, true, most)
    }

    fn reader_by(&self, way: Way, past_the_cache: bool, most: usize) -> Reader {
        #[cfg(target_os = "linux")]
        let flags = rustix::fs::OFlags::DIRECT.bits() as i32;
        #[cfg(not(target_os = "linux"))]
        let flags = 0;
        let direct = OpenOptions::new().read(true).custom_flags(flags).open(self.path());
        let file = ReadFile { name: "model".into(), file: File::open(self.path()).unwrap(), direct };
        let spawn =
            &mut |_, work: Box<dyn FnOnce() + Send>| -> io::Result<_> { thread::Builder::new().spawn(work) };
        let options = ReaderOptions { way, direct: past_the_cache, jobs: most, threads: 3, spawn };
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
        let slots = Slots::cut(roster(sources), budget, usize::MAX).with_spare(spare);
        let memory = blocks(slots.ids().map(|slot| slots.bytes(slot) as usize));
        let mut store = ExpertStore::new(vec![], Box::new(|| Ok(())));
        add(&mut store, sources);
        let heat = Heat::new(slots.roster(), Pace::default());
        store.read_with(FileTier::new(slots, memory, self.reader(way, most), heat, most), vec![]).unwrap();
        assert!(store.fill(|_, _| ControlFlow::Continue(())).unwrap());
        store
    }

    /// A store with copies of these experts, `spare` slots for the others, and so many rooms for whoever reads aside.
    fn store_beside(
        &self,
        sources: &[LayerSource],
        copied: &[ExpertId],
        (spare, most): (usize, usize),
        (rooms, past_the_cache): (usize, bool),
    ) -> ExpertStore {
        let slots = Slots::cut(roster(sources), 0, 0).with_spare(spare);
        let source = |id: &ExpertId| &sources[usize::from(id.layer)];
        let copies = blocks(copied.iter().map(|id| source(id).copy_layout().bytes));
        let mut store = ExpertStore::new(copies, Box::new(|| Ok(())));
        add(&mut store, sources);
        let longest = sources.iter().map(LayerSource::slot_bytes).max().unwrap();
        let memory = blocks(slots.ids().map(|_| longest));
        let rooms = blocks((0..rooms).map(|_| longest));
        let heat = Heat::new(slots.roster(), Pace::default());
        let reader = self.reader_by(Way::Auto, past_the_cache, most);
        store.read_with(FileTier::new(slots, memory, reader, heat, most), rooms).unwrap();
        let copy = HostCopy::new(Box::new(|id, extent, to| {
            let [gate, up, _] = PARTS[usize::from(id.layer)];
            let part = match extent.tensor {
                Tensor::Gate => 0,
                Tensor::Up => 1,
                Tensor::Down => 2,
                Tensor::GateUp => usize::from(extent.range.start % (gate + up) > 0),
            };
            (0..).zip(to).for_each(|(place, to)| *to = byte(id.layer, part, id.expert, place));
            Ok(())
        }));
        copied.iter().for_each(|id| store.promote(*id, &copy).unwrap());
        store
    }
}

fn roster(sources: &[LayerSource]) -> Roster {
    Roster::new(
        sources
            .iter()
            .map(|source| LayerExperts { experts: source.experts(), bytes: source.slot_bytes() as u64 }),
    )
}

/// Memory of these lengths; that of whole pages starts at a page if all before it is of whole pages.
fn blocks(lengths: impl Iterator<Item = usize>) -> Vec<Block<u8>> {
    let mut plan = Plan::new();
    let regions: Vec<_> = lengths.map(|bytes| plan.heap(Category::Experts, "slot", bytes)).collect();
    let mut arena = Arena::new(&plan).unwrap();
    regions.into_iter().map(|region| arena.take(region).unwrap()).collect()
}

fn add(store: &mut ExpertStore, sources: &[LayerSource]) {
    (0..).zip(sources).for_each(|(layer, source)| store.add_layer(layer, source.clone()).unwrap());
}

fn all_ids() -> impl Iterator<Item = ExpertId> {
    (0..LAYERS).flat_map(|layer| (0..EXPERTS).map(move |expert| ExpertId { layer, expert }))
}

/// An expert as a copy of it lies, but for what is between its parts; what `read` leaves there.
fn is_copied(source: &LayerSource, id: ExpertId, read: impl FnOnce(&mut [u8])) -> bool {
    let CopyLayout { up, down, bytes } = source.copy_layout();
    let mut copy = vec![0xAA; bytes];
    read(&mut copy);
    (0..).zip([0, up, down]).zip(PARTS[usize::from(id.layer)]).all(|((part, start), bytes)| {
        let right = (0..bytes).map(|place| byte(id.layer, part, id.expert, place));
        copy[start..start + bytes].iter().copied().eq(right)
    })
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

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// Oracle: the bytes and their addresses. Experts that have copies beside the slots are on every tour at once, are never read, and stay where they are,
    /// however few slots there are for the others.
    #[test]
    fn copies_beside_the_slots_stay(
        tours in tours(), copied in prop::collection::btree_set(0..usize::from(LAYERS * EXPERTS), 0..36), spare in 1usize..6
    ) {
        let (model, sources) = Model::new();
        let ids: Vec<ExpertId> = all_ids().collect();
        let copied: Vec<ExpertId> = copied.into_iter().map(|number| ids[number]).collect();
        let store = model.store_beside(&sources, &copied, (spare, 2), (0, true));
        let addresses = || -> Vec<usize> {
            copied.iter().map(|id| store.pin_current(*id).unwrap().blob().gate.as_ptr().addr()).collect()
        };
        let before = addresses();
        prop_assert!(before.iter().all(|at| store.heap_spans().iter().any(|span| span.contains(at))));
        for (layer, experts, step) in &tours {
            go(&store, *layer, experts, *step).unwrap();
            let here = |expert: &u32| copied.contains(&ExpertId { layer: *layer, expert: *expert as u16 });
            if experts.iter().all(here) {
                store.take_file_count();
                go(&store, *layer, experts, *step).unwrap();
                prop_assert_eq!(store.take_file_count().unwrap().read, 0);
            }
        }
        prop_assert_eq!(addresses(), before);
        prop_assert!(copied.iter().all(|id| is_right(&store, *id)));
    }
}

/// Oracle: the bytes that the file was made of; its last expert ends where it does, and no offset is a page's. A file that is cut off names tensor and
/// file, however often, and whole again it is read.
#[test]
fn single_experts_are_read_from_the_file() {
    for past_the_cache in [true, false] {
        let (model, sources) = Model::new();
        let copied = ExpertId { layer: 1, expert: 3 };
        let store = model.store_beside(&sources, &[copied], (2, 1), (1, past_the_cache));
        // One comes to a slot.
        go(&store, 2, &[7], true).unwrap();
        store.take_file_count();
        let all = || {
            all_ids().all(|id| {
                let source = &sources[usize::from(id.layer)];
                assert_eq!(Source::bytes(&store, id).unwrap(), source.copy_layout().bytes);
                is_copied(source, id, |to| Source::read(&store, id, to).unwrap())
            })
        };
        assert!(all());
        let count = store.take_file_count().unwrap();
        assert_eq!((count.used, count.read), (36, 34));
        let file = OpenOptions::new().write(true).open(model.path()).unwrap();
        file.set_len(model.bytes.len() as u64 - 1).unwrap();
        let last = ExpertId { layer: 2, expert: 11 };
        let mut copy = vec![0; sources[2].copy_layout().bytes];
        for _ in 0..3 {
            let why = Source::read(&store, last, &mut copy).unwrap_err();
            assert!(why.contains("tensor `down.2`: the file model became shorter"), "{why}");
        }
        file.write_all_at(&model.bytes, 0).unwrap();
        assert!(all());
    }
    let (model, sources) = Model::new();
    let store = model.store_beside(&sources, &[], (1, 1), (0, true));
    let id = ExpertId { layer: 0, expert: 0 };
    let why = Source::read(&store, id, &mut vec![0; sources[0].copy_layout().bytes]).unwrap_err();
    assert!(why.contains("than was planned"), "{why}");
}

/// Oracle: the bytes, and that nothing fails. Threads take experts, from slots and from the file, while tours read the same ones and push others out: with
/// a slot for each thread and two to go on with, a tour finds one that nobody reads.
#[test]
fn single_experts_are_read_beside_tours() {
    const THREADS: usize = 3;
    let (model, sources) = Model::new();
    let copied: Vec<ExpertId> = all_ids().step_by(5).collect();
    let store = model.store_beside(&sources, &copied, (2 + THREADS, 1), (THREADS, true));
    thread::scope(|scope| {
        for number in 0..THREADS {
            let (store, sources) = (&store, &sources);
            scope.spawn(move || {
                for id in (0..8).flat_map(|round| all_ids().skip(number * round)) {
                    let read = |to: &mut [u8]| Source::read(store, id, to).unwrap();
                    assert!(is_copied(&sources[usize::from(id.layer)], id, read), "{id:?}");
                }
            });
        }
        let all: Vec<u32> = (0..u32::from(EXPERTS)).collect();
        for round in 0..30 {
            go(&store, round % LAYERS, &all, round % 2 == 0).unwrap();
        }
    });
}

/// Oracle: by hand. Of five slots four hold experts that others read: the fifth's goes, whichever it is. And an expert that somebody looks at where it has no
/// copy gets one once nobody does.
#[test]
fn a_tour_finds_what_nobody_reads() {
    let (model, sources) = Model::new();
    let store = model.store_beside(&sources, &[], (5, 2), (0, true));
    let id = |expert: u32| ExpertId { layer: 0, expert: expert as u16 };
    for free in 0..5u32 {
        go(&store, 0, &[0, 1, 2, 3, 4], false).unwrap();
        let read: Vec<_> =
            (0..5).filter(|&expert| expert != free).map(|expert| store.pin_current(id(expert))).collect();
        go(&store, 0, &[7], false).unwrap();
        assert_eq!(store.tier(id(free)).unwrap(), Tier::Mapped);
        drop(read);
    }
    let looked_at = store.pin_current(id(9)).unwrap();
    thread::scope(|scope| {
        let tour = scope.spawn(|| go(&store, 0, &[9], false).unwrap());
        thread::sleep(std::time::Duration::from_millis(50));
        drop(looked_at);
        tour.join().unwrap();
    });
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
    let why = mapped.read_with(tier, vec![]).unwrap_err();
    assert!(why.to_string().contains("layer 0 are in no file"), "{why}");
}

/// Oracle: the counts. Loading can be ended, and a store without a file tier has everything at once.
#[test]
fn loading_ends_when_asked_and_without_a_tier_all_is_there() {
    let (model, sources) = Model::new();
    let mut store = ExpertStore::new(vec![], Box::new(|| Ok(())));
    add(&mut store, &sources);
    {
        let all: Vec<_> = store.tour(1, &[1, 1, 7], true).unwrap().map(Result::unwrap).collect();
        assert!(matches!(&all[..], [range] if *range == (0..3)), "{all:?}");
    }
    assert_eq!(store.take_file_count(), None);
    assert!(store.fill(|_, _| ControlFlow::Break(())).unwrap());
    let slots = Slots::cut(roster(&sources), 0, 0).with_spare(20);
    let memory = blocks(slots.ids().map(|slot| slots.bytes(slot) as usize));
    let heat = Heat::new(slots.roster(), Pace::default());
    store.read_with(FileTier::new(slots, memory, model.reader(Way::Auto, 2), heat, 2), vec![]).unwrap();
    let mut told = 0;
    let ended = store.fill(|done, of| {
        told += 1;
        assert!(done.experts == told && done.bytes < of);
        if told == 3 { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    });
    assert!(!ended.unwrap() && told == 3);
}
