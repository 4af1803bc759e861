//! Layers whose bytes are told by (layer, tensor, expert, place), so that a test knows what it must read.

use strata_plan::{ALIGNMENT, Arena, Block, Category, Plan};
use strata_residency::{Blob, ExpertId, ExpertStore, HostCopy, LayerSource, StoreError, Tensor, Tier};

/// Experts per layer.
pub const EXPERTS: u16 = 4;
/// Bytes of an expert's gate, up and down part.
const PARTS: [usize; 3] = [24, 32, 20];
/// Bytes of a copy of an expert, whose parts each start at a multiple of 256.
pub const COPY: usize = 768;

/// An expert's bytes as they must be.
pub struct Expected {
    parts: [Vec<u8>; 3],
}

impl Expected {
    pub fn as_blob(&self) -> Blob<'_> {
        let [gate, up, down] = &self.parts;
        Blob { gate, up, down }
    }
}

pub fn id(layer: u16, expert: u16) -> ExpertId {
    ExpertId { layer, expert }
}

/// `len` bytes that differ from those of another `seed`.
pub fn pattern(seed: usize, len: usize) -> Vec<u8> {
    (0..len).map(|place| (seed * 37 + place * 11 + (seed + place) / 5) as u8).collect()
}

pub fn expected(id: ExpertId) -> Expected {
    let seed = |part| (usize::from(id.layer) * 3 + part) * usize::from(EXPERTS) + usize::from(id.expert);
    Expected { parts: [0, 1, 2].map(|part| pattern(seed(part), PARTS[part])) }
}

/// The experts of a layer side by side, as in a file.
pub fn source(layer: u16) -> LayerSource {
    let tensor = |part: usize| -> Vec<u8> {
        (0..EXPERTS).flat_map(|expert| expected(id(layer, expert)).parts[part].clone()).collect()
    };
    LayerSource::split(EXPERTS, tensor(0).into(), tensor(1).into(), tensor(2).into()).unwrap()
}

/// So many slots for experts of `bytes` bytes.
pub fn slots(room: usize, bytes: usize) -> Vec<Block<u8>> {
    let mut plan = Plan::new();
    let region = plan.heap(Category::Experts, "experts", room * bytes.next_multiple_of(ALIGNMENT));
    let mut arena = Arena::new(&plan).unwrap();
    let slots = region.parts(bytes).map(|part| arena.take(part).unwrap()).collect();
    assert_eq!(arena.taken_bytes(), plan.arena_bytes());
    slots
}

/// A store of these layers with room for so many experts in its heap tier.
pub fn store(layers: &[u16], room: usize) -> ExpertStore {
    let mut store = ExpertStore::new(slots(room, COPY), Box::new(|| Ok(())));
    for &layer in layers {
        store.add_layer(layer, source(layer)).unwrap();
    }
    store
}

/// A copy engine that reads these layers' bytes.
pub fn host() -> HostCopy {
    HostCopy::new(Box::new(|id, extent, to| {
        let part = match extent.tensor {
            Tensor::Gate => 0,
            Tensor::Up => 1,
            Tensor::Down => 2,
            Tensor::GateUp => return Err("these layers have none".into()),
        };
        to.copy_from_slice(&expected(id).parts[part]);
        Ok(())
    }))
}

/// What the heap tier has left, in experts: found by asking for more than there is. It is full afterwards.
pub fn room_left(store: &ExpertStore, layers: &[u16]) -> usize {
    let mut promoted = 0;
    for id in layers.iter().flat_map(|&layer| (0..EXPERTS).map(move |expert| id(layer, expert))) {
        match store.tier(id).unwrap() {
            Tier::Heap => {}
            Tier::Mapped => match store.promote(id, &host()) {
                Ok(()) => promoted += 1,
                Err(StoreError::HeapFull { .. }) => return promoted,
                Err(other) => panic!("{other}"),
            },
        }
    }
    panic!("there is room for all");
}
