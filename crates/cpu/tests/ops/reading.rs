//! Experts for a device of which memory has a part: the others are read from a file.

use std::fs::File;
use std::io::ErrorKind;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;
use std::thread;

use strata_plan::{Arena, Block, Category, Plan};
use strata_residency::{
    ExpertId, ExpertStore, FileTier, Heat, HostCopy, LayerExperts, LayerSource, Pace, ReadFile, Reader,
    ReaderOptions, Roster, Slots, Tensor, TensorPlace, Way,
};

use crate::oracle::recipes;
use crate::rig::{QSA, Random, Recipe, Rig};

/// Experts that are read at once.
const MOST: usize = 2;

/// The rig's experts of a layer in a file, whose bytes these are, and a store that reads them there into `slots` slots, but for those that it has copies of.
/// What they are mapped from is zeros.
fn reading(rig: &Rig, folder: &Path, copied: &[u16], slots: usize) -> (ExpertStore, Vec<u8>) {
    let count = rig.recipe.shape.moe.experts as u16;
    let id = |expert| ExpertId { layer: QSA.0, expert };
    let (mut bytes, mut offsets, mut zeros) = (vec![1; 77], Vec::new(), Vec::new());
    for part in 0..3 {
        offsets.push(bytes.len());
        for expert in 0..count {
            let pinned = rig.store.pin_current(id(expert)).unwrap();
            let blob = pinned.blob();
            bytes.extend([blob.gate, blob.up, blob.down][part]);
        }
        zeros.push(strata_residency::Bytes::from(vec![0; bytes.len() - offsets[part]]));
    }
    let path = folder.join("model");
    std::fs::write(&path, &bytes).unwrap();
    let place =
        |part: usize, name: &str| TensorPlace { name: name.into(), file: 0, offset: offsets[part] as u64 };
    let source = LayerSource::split(count, zeros[0].clone(), zeros[1].clone(), zeros[2].clone()).unwrap();
    let source = source.read_from([place(0, "gate"), place(1, "up"), place(2, "down")]);

    let mut plan = Plan::new();
    let regions = [(slots, source.slot_bytes()), (copied.len(), source.copy_layout().bytes)]
        .map(|(count, each)| (plan.heap(Category::Experts, "experts", count * each), each));
    let mut arena = Arena::new(&plan).unwrap();
    let [memory, copies] = regions.map(|(region, each)| -> Vec<Block<u8>> {
        region.parts(each).map(|part| arena.take(part).unwrap()).collect()
    });
    let mut store = ExpertStore::new(copies, Box::new(|| Ok(())));
    let bytes_of = source.slot_bytes() as u64;
    store.add_layer(QSA.0, source).unwrap();
    let none = LayerExperts { experts: 0, bytes: 0 };
    let before = std::iter::repeat_n(none, QSA.0.into());
    let roster = Roster::new(before.chain([LayerExperts { experts: count, bytes: bytes_of }]));
    let slots = Slots::cut(roster, 0, 0).with_spare(slots);
    let direct = Err(ErrorKind::Unsupported.into());
    let file = ReadFile { name: "model".into(), file: File::open(&path).unwrap(), direct };
    let spawn = &mut |_, work: Box<dyn FnOnce() + Send>| thread::Builder::new().spawn(work);
    let options = ReaderOptions { way: Way::Positioned, direct: false, jobs: MOST, threads: 1, spawn };
    let (reader, heat) =
        (Reader::new(vec![file], options).unwrap(), Heat::new(slots.roster(), Pace::default()));
    store.read_with(FileTier::new(slots, memory, reader, heat, MOST), vec![]).unwrap();
    let whole = bytes.clone();
    let copy = HostCopy::new(Box::new(move |_, extent, to| {
        let part = [Tensor::Gate, Tensor::Up, Tensor::Down].iter().position(|part| *part == extent.tensor);
        to.copy_from_slice(&whole[offsets[part.unwrap()]..][extent.range.clone()]);
        Ok(())
    }));
    copied.iter().for_each(|expert| store.promote(id(*expert), &copy).unwrap());
    (store, bytes)
}

/// Oracle: the bits of whoever has all experts in memory. Whichever of a row's have copies, are in slots or are read, and in whatever order they are asked
/// for; one that can't be read is named, and after that all goes on.
#[test]
fn experts_that_are_read_have_the_same_bits() {
    for (recipe, _) in recipes() {
        let (used, d) = (recipe.shape.moe.used, recipe.shape.hidden);
        let count = recipe.shape.moe.experts as u32;
        let rig = Rig::new(Recipe { threads: 2, grain: Some(1), ..recipe });
        let folder = tempfile::tempdir().unwrap();
        let (store, bytes) = reading(&rig, folder.path(), &[1, 4], 2 * MOST);
        let store = Arc::new(store);
        let (mut whole, mut part) = (rig.host(), rig.host_with(&store));
        let mut random = Random(11);
        let mut both = |experts: &[u32]| {
            let u = random.floats(d, 1.0);
            let mut out = [(); 2].map(|()| vec![f32::NAN; experts.len() * d]);
            whole.outputs(QSA, &rig.experts, experts, &u, &mut out[0]).unwrap();
            part.outputs(QSA, &rig.experts, experts, &u, &mut out[1])?;
            let [want, got] = out.map(|out| out.into_iter().map(f32::to_bits).collect::<Vec<_>>());
            assert!(want == got, "{experts:?}");
            Ok::<_, strata_backend::BackendError>(())
        };
        let mut order = Random(3);
        for step in 0..40 {
            let mut experts: Vec<u32> = (0..count).collect();
            experts.sort_by_cached_key(|_| order.bits());
            both(&experts[..step % (used + 1)]).unwrap();
        }
        let reads = store.take_file_count().unwrap();
        assert!(reads.read > 0 && reads.read < reads.used, "{reads:?}");
        let file = File::options().write(true).open(folder.path().join("model")).unwrap();
        file.set_len(100).unwrap();
        let mut said = None;
        for expert in (0..count).rev().filter(|expert| ![1, 4].contains(expert)) {
            said = said.or(both(&[1, expert]).err());
            both(&[1]).unwrap();
        }
        let said = said.unwrap().to_string();
        assert!(
            said.contains("could not be read: tensor `") && said.contains("model became shorter"),
            "{said}"
        );
        file.write_all_at(&bytes, 0).unwrap();
        (0..count).for_each(|expert| both(&[expert, (expert + 1) % count]).unwrap());
    }
}
