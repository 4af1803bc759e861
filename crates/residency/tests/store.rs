//! The store against a model of it: random moves and readers, failing and late copies, files, accounting.
#![cfg(not(loom))]

mod common;

use std::io::Write;
use std::ops::ControlFlow;
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

use common::{COPY, EXPERTS, expected, host, id, pattern, room_left, slots, source, store};
use proptest::prelude::*;
use strata_residency::*;

/// What a caller does to the store.
#[derive(Debug, Clone)]
enum Step {
    Handle(ExpertId),
    Pin(prop::sample::Index),
    Unpin(prop::sample::Index),
    Promote(ExpertId),
    Demote(ExpertId),
    Take(ExpertId),
    /// Fills a slot that was taken with this expert, and puts it back.
    Put(ExpertId, prop::sample::Index),
    /// Drops one.
    Drop(prop::sample::Index),
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let expert = || (0u16..2, 0..EXPERTS).prop_map(|(layer, expert)| ExpertId { layer: layer * 2, expert });
    let step = prop_oneof![
        expert().prop_map(Step::Handle),
        any::<prop::sample::Index>().prop_map(Step::Pin),
        any::<prop::sample::Index>().prop_map(Step::Unpin),
        expert().prop_map(Step::Promote),
        expert().prop_map(Step::Demote),
        expert().prop_map(Step::Take),
        (expert(), any::<prop::sample::Index>()).prop_map(|(expert, which)| Step::Put(expert, which)),
        any::<prop::sample::Index>().prop_map(Step::Drop),
    ];
    prop::collection::vec(step, 0..120)
}

/// The model's expert.
#[derive(Debug, Clone, Copy, Default)]
struct Expert {
    heap: bool,
    moves: usize,
    pins: usize,
}

proptest! {
    /// Oracle: three fields per expert. Handles are good until their expert moves, pinned experts don't move, the tier holds
    /// its budget with the slots that were taken, every pin shows its expert's bytes whatever happens, and bytes are counted where they are.
    #[test]
    fn the_store_does_what_its_model_does(steps in steps(), room in 0usize..6) {
        let store = store(&[0, 2], room);
        let engine = host();
        let mut model = [[Expert::default(); EXPERTS as usize]; 2];
        let mut handles: Vec<(ExpertHandle, usize)> = Vec::new();
        let mut pins: Vec<(ExpertId, Pinned<'_>)> = Vec::new();
        let mut taken: Vec<HeapSlot> = Vec::new();
        for step in steps {
            match step {
                Step::Handle(id) => {
                    let moves = model[id.layer as usize / 2][id.expert as usize].moves;
                    handles.push((store.handle(id).unwrap(), moves));
                }
                Step::Pin(_) if handles.is_empty() => {}
                Step::Pin(which) => {
                    let (handle, moves) = handles[which.index(handles.len())];
                    let id = handle.id();
                    let expert = &mut model[id.layer as usize / 2][id.expert as usize];
                    match store.pin(&handle) {
                        Ok(pinned) => {
                            prop_assert_eq!(moves, expert.moves, "a stale handle was accepted");
                            expert.pins += 1;
                            pins.push((id, pinned));
                        }
                        Err(StoreError::Stale { id: named }) => {
                            prop_assert_eq!(named, id);
                            prop_assert!(moves < expert.moves, "a good handle was refused");
                        }
                        Err(other) => prop_assert!(false, "{}", other),
                    }
                }
                Step::Unpin(_) if pins.is_empty() => {}
                Step::Unpin(which) => {
                    let (id, _) = pins.swap_remove(which.index(pins.len()));
                    model[id.layer as usize / 2][id.expert as usize].pins -= 1;
                }
                Step::Promote(id) => {
                    let used = model.iter().flatten().filter(|expert| expert.heap).count() + taken.len();
                    let expert = &mut model[id.layer as usize / 2][id.expert as usize];
                    match store.promote(id, &engine) {
                        Ok(()) if expert.heap => {}
                        Ok(()) => {
                            prop_assert!(expert.pins == 0 && used < room);
                            *expert = Expert { heap: true, moves: expert.moves + 1, pins: 0 };
                        }
                        Err(StoreError::HeapFull { .. }) => prop_assert!(!expert.heap && used == room),
                        Err(StoreError::Pinned { .. }) => prop_assert!(!expert.heap && expert.pins > 0),
                        Err(other) => prop_assert!(false, "{}", other),
                    }
                }
                Step::Demote(id) => {
                    let expert = &mut model[id.layer as usize / 2][id.expert as usize];
                    match store.demote(id) {
                        Ok(()) if !expert.heap => {}
                        Ok(()) => {
                            prop_assert_eq!(expert.pins, 0);
                            *expert = Expert { heap: false, moves: expert.moves + 1, pins: 0 };
                        }
                        Err(StoreError::Pinned { .. }) => prop_assert!(expert.heap && expert.pins > 0),
                        Err(other) => prop_assert!(false, "{}", other),
                    }
                }
                Step::Take(id) => {
                    let expert = &mut model[id.layer as usize / 2][id.expert as usize];
                    match store.take(id) {
                        Ok(None) => prop_assert!(!expert.heap),
                        Ok(Some(slot)) => {
                            prop_assert!(expert.heap && expert.pins == 0);
                            let (CopyLayout { up, down, .. }, parts) =
                                (source(id.layer).copy_layout(), expected(id));
                            let Blob { gate: of_gate, up: of_up, down: of_down } = parts.as_blob();
                            prop_assert!(slot.starts_with(of_gate) && slot[up..].starts_with(of_up));
                            prop_assert!(slot[down..].starts_with(of_down));
                            *expert = Expert { heap: false, moves: expert.moves + 1, pins: 0 };
                            taken.push(slot);
                        }
                        Err(StoreError::Pinned { .. }) => prop_assert!(expert.heap && expert.pins > 0),
                        Err(other) => prop_assert!(false, "{}", other),
                    }
                }
                Step::Put(..) | Step::Drop(_) if taken.is_empty() => {}
                Step::Put(id, which) => {
                    let slot = taken.swap_remove(which.index(taken.len()));
                    let slot = engine.copy(id, &source(id.layer), slot).unwrap();
                    let expert = &mut model[id.layer as usize / 2][id.expert as usize];
                    match store.put(id, slot) {
                        Ok(()) => {
                            prop_assert!(!expert.heap && expert.pins == 0);
                            *expert = Expert { heap: true, moves: expert.moves + 1, pins: 0 };
                        }
                        Err((refused, slot)) => {
                            match refused {
                                StoreError::Held { .. } => prop_assert!(expert.heap),
                                StoreError::Pinned { .. } => prop_assert!(!expert.heap && expert.pins > 0),
                                other => prop_assert!(false, "{}", other),
                            }
                            taken.push(slot);
                        }
                    }
                }
                Step::Drop(which) => drop(taken.swap_remove(which.index(taken.len()))),
            }
            for (id, pinned) in &pins {
                assert_eq!(pinned.blob(), expected(*id).as_blob());
            }
            for (layer, experts) in [0u16, 2].into_iter().zip(&model) {
                for (expert, state) in (0..).zip(experts) {
                    let tier = if state.heap { Tier::Heap } else { Tier::Mapped };
                    prop_assert_eq!(store.tier(ExpertId { layer, expert }).unwrap(), tier);
                }
            }
        }
        let used = model.iter().flatten().filter(|expert| expert.heap).count();
        drop((pins, taken));
        prop_assert_eq!(room_left(&store, &[0, 2]), room - used);
    }

    /// Oracle: `slice::get`.
    #[test]
    fn bytes_slice_like_slices(len in 0usize..20, a in 0usize..25, b in 0usize..25, c in 0usize..25, d in 0usize..25) {
        let plain = pattern(7, len);
        let bytes = Bytes::from(plain.clone());
        assert_eq!(bytes.slice(a..b).as_deref(), plain.get(a..b));
        let twice = bytes.slice(a..b).and_then(|part| part.slice(c..d)).map(|part| part.to_vec());
        prop_assert_eq!(twice.as_deref(), plain.get(a..b).and_then(|part| part.get(c..d)));
        prop_assert!(bytes.slice(usize::MAX - 1..usize::MAX).is_none());
    }
}

/// Oracle: the bytes of each expert, cut by hand. A fused tensor gives the same blobs as two.
#[test]
fn fused_experts_are_halves() {
    let gate_up: Vec<u8> = (0..24).collect();
    let source = LayerSource::fused(3, gate_up.into(), pattern(1, 15).into()).unwrap();
    assert_eq!(source.expert_bytes(), 13);
    let blob = source.blob(1);
    assert_eq!((blob.gate, blob.up), (&[8, 9, 10, 11][..], &[12, 13, 14, 15][..]));
    assert_eq!(blob.down, &pattern(1, 15)[5..10]);
    let [gate, up, down] = source.extents(2);
    assert_eq!(gate, Extent { tensor: Tensor::GateUp, range: 16..20 });
    assert_eq!(up, Extent { tensor: Tensor::GateUp, range: 20..24 });
    assert_eq!(down, Extent { tensor: Tensor::Down, range: 10..15 });
}

/// Oracle: the layout's sentence, by hand.
#[test]
fn parts_of_a_copy_start_where_devices_want_them() {
    let tensor = |len: usize| Bytes::from(vec![0; 2 * len]);
    let layout =
        |gate, up, down| LayerSource::split(2, tensor(gate), tensor(up), tensor(down)).unwrap().copy_layout();
    assert_eq!(layout(256, 256, 512), CopyLayout { up: 256, down: 512, bytes: 1024 });
    assert_eq!(layout(1, 300, 257), CopyLayout { up: 256, down: 768, bytes: 1280 });
}

/// Oracle: arithmetic. What can't be cut into experts is refused with its name.
#[test]
fn uneven_layers_are_refused() {
    let bytes = |len| Bytes::from(vec![0; len]);
    let error = LayerSource::split(4, bytes(8), bytes(9), bytes(8)).unwrap_err();
    assert_eq!(error.to_string(), "the up tensor of 9 bytes can't be cut into 4 equal experts");
    for refused in [
        LayerSource::split(0, bytes(0), bytes(0), bytes(0)),
        LayerSource::split(2, bytes(2), bytes(2), bytes(0)),
        LayerSource::split(2, bytes(1), bytes(2), bytes(2)),
        LayerSource::fused(2, bytes(6), bytes(2)),
        LayerSource::fused(2, bytes(4), bytes(3)),
    ] {
        refused.unwrap_err();
    }
}

/// Oracle: the sentences.
#[test]
fn errors_name_the_expert() {
    let mut store = store(&[1], 0);
    let sentence = |result: Result<(), StoreError>| result.unwrap_err().to_string();
    let nowhere = ExpertId { layer: 0, expert: 0 };
    assert_eq!(sentence(store.handle(nowhere).map(drop)), "layer 0 has no experts in the store");
    assert_eq!(sentence(store.demote(id(9, 0))), "layer 9 has no experts in the store");
    assert_eq!(sentence(store.tier(id(1, EXPERTS)).map(drop)), "layer 1 has no expert 4: it has 4");
    assert_eq!(sentence(store.add_layer(1, source(1))), "the experts of layer 1 are in the store already");
    assert_eq!(
        sentence(store.promote(id(1, 2), &host())),
        "expert 2 of layer 1 needs a slot of 768 bytes in the heap tier, and none of those that were planned is free"
    );
}

/// Oracle: the sentence of whoever watches the file.
#[test]
fn a_changed_file_is_reported() {
    let changed = Arc::new(AtomicBool::new(false));
    let watched = changed.clone();
    let store = ExpertStore::new(
        vec![],
        Box::new(move || if watched.load(Ordering::Relaxed) { Err("it shrank".into()) } else { Ok(()) }),
    );
    store.check().unwrap();
    changed.store(true, Ordering::Relaxed);
    assert_eq!(store.check().unwrap_err().to_string(), "it shrank");
}

/// Oracle: the file. Experts are promoted by positioned reads of exactly their extents.
#[test]
fn experts_are_read_from_the_file() {
    let mut file = tempfile::tempfile().unwrap();
    let home = source(0);
    let mut offsets = std::collections::HashMap::new();
    let mut end = 0u64;
    for (index, tensor) in [Tensor::Gate, Tensor::Up, Tensor::Down].into_iter().enumerate() {
        offsets.insert(tensor, end);
        for expert in 0..EXPERTS {
            let blob = home.blob(expert);
            let part = [blob.gate, blob.up, blob.down][index];
            file.write_all(part).unwrap();
            end += part.len() as u64;
        }
    }
    let engine = HostCopy::new(Box::new(move |_, extent, to| {
        let offset = offsets[&extent.tensor] + extent.range.start as u64;
        file.read_exact_at(to, offset).map_err(|error| format!("model.gguf: {error}"))
    }));
    let store = store(&[0, 2], 100);
    let mut seen = Vec::new();
    let done = store
        .promote_all((0..EXPERTS).map(|expert| id(0, expert)), &engine, |progress| {
            seen.push(progress.experts);
            if progress.experts == 3 { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
        })
        .unwrap();
    // Cancelled after the third; what was promoted stays.
    assert_eq!(seen, [1, 2, 3]);
    assert_eq!(done, Progress { experts: 3, bytes: 3 * home.expert_bytes() as u64 });
    let tiers: Vec<Tier> = (0..EXPERTS).map(|expert| store.tier(id(0, expert)).unwrap()).collect();
    assert_eq!(tiers, [Tier::Heap, Tier::Heap, Tier::Heap, Tier::Mapped]);
    for expert in 0..EXPERTS {
        let pinned = store.pin_current(id(0, expert)).unwrap();
        assert_eq!(pinned.blob(), expected(id(0, expert)).as_blob());
    }
}

/// Writes its slot only when waited for, as a copy engine of a device does.
struct Late;

impl CopyEngine for Late {
    type Slot = HeapSlot;
    type Fence = (HeapSlot, LayerSource, ExpertId);

    fn copy(&self, id: ExpertId, home: &LayerSource, mut to: HeapSlot) -> Result<Self::Fence, CopyError> {
        to.fill(0xEE);
        Ok((to, home.clone(), id))
    }

    fn wait(&self, (to, home, id): Self::Fence) -> Result<HeapSlot, CopyError> {
        host().copy(id, &home, to)
    }
}

/// Mutant: a store that reads a slot before its copy's fence would show the poison.
#[test]
fn a_late_copy_is_waited_for() {
    let store = store(&[0], 4);
    store.promote(id(0, 1), &Late).unwrap();
    let pinned = store.pin_current(id(0, 1)).unwrap();
    assert_eq!((pinned.tier(), pinned.blob()), (Tier::Heap, expected(id(0, 1)).as_blob()));
}

/// Keeps the slot that it was given, and gives back the one before if there is one.
#[derive(Default)]
struct Wrong(Mutex<Option<HeapSlot>>);

impl CopyEngine for Wrong {
    type Slot = HeapSlot;
    type Fence = Option<HeapSlot>;

    fn copy(&self, _: ExpertId, _: &LayerSource, slot: HeapSlot) -> Result<Self::Fence, CopyError> {
        Ok(self.0.lock().unwrap().replace(slot))
    }

    fn wait(&self, before: Self::Fence) -> Result<HeapSlot, CopyError> {
        before.ok_or_else(|| CopyError::Read("kept".into()))
    }
}

/// A slot of `bytes` bytes, enough for a copy, that belongs to another store.
fn foreign(bytes: usize) -> HeapSlot {
    let mut store = ExpertStore::new(slots(1, bytes), Box::new(|| Ok(())));
    let [gate, up, down] = [bytes - 512, 1, 1].map(|len| Bytes::from(vec![0; len]));
    store.add_layer(0, LayerSource::split(1, gate, up, down).unwrap()).unwrap();
    let thief = Wrong::default();
    store.promote(id(0, 0), &thief).unwrap_err();
    thief.0.into_inner().unwrap().unwrap()
}

/// Oracle: nothing happened. A failed copy leaves the expert, its handles and the accounting as they were.
#[test]
fn a_failed_copy_changes_nothing() {
    let store = store(&[0], 1);
    let handle = store.handle(id(0, 0)).unwrap();
    let broken = HostCopy::new(Box::new(|_, _, _| Err("model.gguf: can't be read at byte 7".into())));
    let error = store.promote(id(0, 0), &broken).unwrap_err();
    assert_eq!(
        error.to_string(),
        "expert 0 of layer 0 could not be copied: model.gguf: can't be read at byte 7"
    );
    let wrong = Wrong(Mutex::new(Some(foreign(1024))));
    let error = store.promote(id(0, 0), &wrong).unwrap_err();
    assert!(
        error.to_string().ends_with("the destination has 1024 bytes where the expert's copy has 768"),
        "{error}"
    );
    // What an engine keeps is not free.
    assert!(matches!(store.promote(id(0, 0), &host()), Err(StoreError::HeapFull { needed: COPY, .. })));
    drop(wrong);
    assert_eq!(store.pin(&handle).unwrap().tier(), Tier::Mapped);
    let short = host().copy(id(0, 0), &source(0), foreign(1280));
    assert!(matches!(short, Err(CopyError::Length { expected: COPY, found: 1280 })));
    // The room of the failed copies is free again.
    store.promote(id(0, 0), &host()).unwrap();
}

/// Oracle: addresses. An expert lies in a slot of exactly its length, never in another's, and a slot that an expert left
/// takes the next one, whatever its layer.
#[test]
fn slots_are_used_again() {
    let mut blocks = slots(2, COPY);
    blocks.extend(slots(1, 1024));
    let starts: Vec<usize> = blocks.iter().map(|block| block.as_ptr().addr()).collect();
    let mut store = ExpertStore::new(blocks, Box::new(|| Ok(())));
    for layer in [0, 2] {
        store.add_layer(layer, source(layer)).unwrap();
    }
    let [gate, up, down] = [300, 20, 10].map(|len| Bytes::from(vec![0; 2 * len]));
    store.add_layer(5, LayerSource::split(2, gate, up, down).unwrap()).unwrap();
    let nines = HostCopy::new(Box::new(|_, _, to| {
        to.fill(9);
        Ok(())
    }));
    let at = |id| {
        let start = store.pin_current(id).unwrap().blob().gate.as_ptr().addr();
        starts.iter().position(|&slot| slot == start)
    };
    let full = |id, bytes| match store.promote(id, &nines) {
        Err(StoreError::HeapFull { needed, .. }) => assert_eq!(needed, bytes),
        other => panic!("{other:?}"),
    };

    assert_eq!(at(id(0, 0)), None);
    store.promote(id(0, 0), &host()).unwrap();
    store.promote(id(2, 1), &host()).unwrap();
    let (left, stays) = (at(id(0, 0)).unwrap(), at(id(2, 1)).unwrap());
    assert!(left != stays && left < 2 && stays < 2, "{left} and {stays}");
    full(id(2, 3), COPY);
    store.promote(id(5, 1), &nines).unwrap();
    assert_eq!(at(id(5, 1)), Some(2));
    full(id(5, 0), 1024);

    store.demote(id(0, 0)).unwrap();
    store.promote(id(2, 3), &host()).unwrap();
    assert_eq!((at(id(0, 0)), at(id(2, 1)), at(id(2, 3))), (None, Some(stays), Some(left)));
    for id in [id(0, 0), id(2, 1), id(2, 3)] {
        assert_eq!(store.pin_current(id).unwrap().blob(), expected(id).as_blob());
    }
    let pinned = store.pin_current(id(5, 1)).unwrap();
    assert_eq!(pinned.blob(), Blob { gate: &[9; 300], up: &[9; 20], down: &[9; 10] });
}

/// Oracle: the experts' own bytes. Readers beside threads that move the same experts never see others.
#[test]
fn readers_beside_movers() {
    let store = store(&[0, 2], 3);
    let all = || [0, 2].into_iter().flat_map(|layer| (0..EXPERTS).map(move |expert| id(layer, expert)));
    let done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let readers: Vec<_> = (0..2)
            .map(|_| {
                scope.spawn(|| {
                    loop {
                        // Asked first: the last round is after the movers' last move.
                        let last = done.load(Ordering::Acquire);
                        let mut seen = [0usize; 2];
                        for id in all() {
                            let pinned = store.pin_current(id).unwrap();
                            assert_eq!(pinned.blob(), expected(id).as_blob());
                            seen[usize::from(pinned.tier() == Tier::Heap)] += 1;
                        }
                        if last {
                            break seen;
                        }
                    }
                })
            })
            .collect();
        let movers: Vec<_> = (0..2)
            .map(|mover: u16| {
                let store = &store;
                scope.spawn(move || {
                    for round in 0..400u16 {
                        let id = id((round + mover) % 2 * 2, round / 3 % EXPERTS);
                        let moved = if (round + mover).is_multiple_of(3) {
                            store.demote(id)
                        } else {
                            store.promote(id, &host())
                        };
                        match moved {
                            Ok(()) | Err(StoreError::Pinned { .. } | StoreError::HeapFull { .. }) => {}
                            Err(other) => panic!("{other}"),
                        }
                    }
                })
            })
            .collect();
        let moved: Vec<_> = movers.into_iter().map(|mover| mover.join()).collect();
        // Whatever the movers left, both tiers are there to be seen.
        let settle = |attempt: &dyn Fn() -> Result<(), StoreError>| {
            while matches!(attempt(), Err(StoreError::Pinned { .. })) {
                std::thread::yield_now();
            }
        };
        settle(&|| store.demote(id(0, 0)));
        settle(&|| store.demote(id(0, 1)));
        settle(&|| store.promote(id(0, 1), &host()));
        done.store(true, Ordering::Release);
        moved.into_iter().for_each(|mover| mover.unwrap());
        for reader in readers {
            let [mapped, heap] = reader.join().unwrap();
            assert!(mapped > 0 && heap > 0, "{mapped} mapped, {heap} in the heap tier");
        }
    });
    let held = all().filter(|&id| store.tier(id).unwrap() == Tier::Heap).count();
    assert!(held <= 3);
    assert_eq!(room_left(&store, &[0, 2]), 3 - held);
}

/// Oracle: the experts' own bytes. Experts are staged from the tier they are in.
#[test]
fn experts_are_staged_from_any_tier() {
    #[derive(Default)]
    struct Collects(Mutex<Vec<(ExpertId, Vec<u8>)>>);
    impl TransferEngine for Collects {
        type Buffer = Vec<u8>;
        type Place = ();
        fn submit(&self, transfer: Transfer<Vec<u8>>, (): ()) {
            let copy = &transfer.buffer()[..transfer.bytes()];
            let parts = [&copy[..24], &copy[256..][..32], &copy[512..][..20]].concat();
            self.0.lock().unwrap().push((transfer.id(), parts));
            transfer.retire(Ok(()));
        }
    }
    fn stage(from: Arc<impl Source>) -> Result<(), RingError> {
        let engine = Arc::new(Collects::default());
        let spawn = &mut |_, life: Box<dyn FnOnce() + Send>| Ok(std::thread::spawn(life));
        let mut ring = Ring::new(vec![vec![0; COPY]; 2], 2, from, engine.clone(), spawn)?;
        let experts: Vec<ExpertId> = (0..EXPERTS).map(|expert| id(2, expert)).collect();
        ring.begin(experts.iter().map(|&id| (id, ())))?.finish()?;
        let wanted = |&id: &ExpertId| {
            let expected = expected(id);
            let blob = expected.as_blob();
            (id, [blob.gate, blob.up, blob.down].concat())
        };
        assert_eq!(*engine.0.lock().unwrap(), experts.iter().map(wanted).collect::<Vec<_>>());
        Ok(())
    }
    let store = Arc::new(store(&[2], 2));
    store.promote(id(2, 1), &host()).unwrap();
    stage(store.clone()).unwrap();
}
