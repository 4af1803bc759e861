//! The expert store's memory, as the GPU reaches it: registered with the driver in stretches, as far as the system lets it be pinned.

use std::ops::Range;
use std::sync::Arc;

use strata_backend::BackendError;
use strata_plan::Bytes;
use strata_residency::{ExpertId, ExpertStore, Tier};

use crate::driver::{Context, DeviceSlice, DriverError, Event, RegisteredMemory, Stream};

/// Host memory is registered in stretches of so many bytes.
const STRETCH: usize = 1 << 30;
/// The rate where a measurement says nothing, in picoseconds a byte: 10 GB/s.
const PRESUMED: u32 = 100;
/// Bytes of the copy by which the link's rate is measured, at most.
const MEASURED: usize = 32 << 20;

/// Where an expert's copy is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum At {
    /// In a slot: its address on the device.
    Slot(u64),
    /// In host memory: its addresses in this process start here.
    Host(usize),
    /// In memory that the GPU can't read.
    Staged,
}

impl At {
    /// What the residency table says of it.
    pub(super) fn entry(self, host: &HostMemory) -> u64 {
        match self {
            At::Slot(address) => address,
            At::Host(start) => host.device(start),
            At::Staged => 0,
        }
    }
}

/// The expert store's memory, as far as the GPU reads it.
pub(super) struct HostMemory {
    /// By their addresses. Given up before the memory is.
    pub(super) stretches: Vec<RegisteredMemory>,
    pub(super) store: Arc<ExpertStore>,
}

impl HostMemory {
    /// Registers the memory of the store's heap tier, if it is wanted. A stretch that the system refuses to pin is left out.
    pub(super) fn register(store: &Arc<ExpertStore>, context: &Context, wanted: bool) -> HostMemory {
        let mut memory = HostMemory { stretches: Vec::new(), store: Arc::clone(store) };
        let spans = if wanted { store.heap_spans() } else { &[] };
        let mut refused: Option<(usize, DriverError)> = None;
        for span in spans {
            let page = rustix::param::page_size();
            let pages = span.start / page * page..span.end.next_multiple_of(page);
            for start in pages.clone().step_by(STRETCH) {
                let stretch = start..pages.end.min(start + STRETCH);
                // SAFETY: pages of the store's memory, which lives as long as this and longer than the registration.
                match unsafe { RegisteredMemory::new(context, stretch.clone()) } {
                    Ok(registered) => memory.stretches.push(registered),
                    Err(error) => {
                        let before = refused.map_or(0, |(bytes, _)| bytes);
                        refused = Some((before + stretch.len(), error));
                    }
                }
            }
        }
        if let Some((bytes, error)) = refused {
            tracing::warn!(
                "{} of experts in memory could not be pinned for the GPU, which gets them through other memory instead; experts don't change places then: {error}",
                Bytes(bytes as u64)
            );
        }
        memory
    }

    /// The stretch that an address is in.
    fn stretch(&self, address: usize) -> Option<&RegisteredMemory> {
        let at = self.stretches.partition_point(|stretch| stretch.host().end <= address);
        self.stretches.get(at).filter(|stretch| stretch.host().contains(&address))
    }

    /// Whether a stretch starts with this address.
    pub(super) fn starts_at(&self, address: usize) -> bool {
        self.stretch(address).is_some_and(|stretch| stretch.host().start == address)
    }

    /// Where an expert is that has no slot.
    pub(super) fn find(&self, id: ExpertId, bytes: usize) -> Result<At, BackendError> {
        let pinned = self.store.pin_current(id)?;
        let start = pinned.blob().gate.as_ptr().expose_provenance();
        let reached = self.pieces(start..start + bytes).try_fold(None, |behind, (stretch, piece)| {
            let (from, to) = (stretch?.device(piece.start)?, piece.len() as u64);
            behind.is_none_or(|behind| behind == from).then_some(Some(from + to))
        });
        Ok(if reached.is_some() && pinned.tier() == Tier::Heap { At::Host(start) } else { At::Staged })
    }

    /// Where the GPU sees an address that was found.
    pub(super) fn device(&self, address: usize) -> u64 {
        self.stretch(address).and_then(|stretch| stretch.device(address)).expect("an address of `find`")
    }

    /// Addresses, cut where stretches meet.
    pub(super) fn pieces(
        &self,
        mut addresses: Range<usize>,
    ) -> impl Iterator<Item = (Option<&RegisteredMemory>, Range<usize>)> {
        std::iter::from_fn(move || {
            let stretch = self.stretch(addresses.start);
            let end = stretch.map_or(addresses.end, |stretch| stretch.host().end.min(addresses.end));
            let piece = addresses.start..end;
            addresses.start = end;
            (!piece.is_empty()).then_some((stretch, piece))
        })
    }

    /// How long the link takes for a byte, in picoseconds: measured with a copy to memory that nobody uses yet.
    pub(super) fn measure(&self, context: &Context, to: DeviceSlice<u8>) -> Result<u32, DriverError> {
        let stretch = self.stretches.iter().map(|stretch| stretch.host()).max_by_key(ExactSizeIterator::len);
        let Some(from) = stretch else { return Ok(PRESUMED) };
        let bytes = from.len().min(to.len()).min(MEASURED);
        let (copies, start, end) = (Stream::new(context)?, Event::new(context)?, Event::new(context)?);
        // The first copy is slower than the others.
        for _ in 0..2 {
            start.record(&copies)?;
            // SAFETY: one registration, which stays; nobody writes there while the model is loaded, and the copy is waited for.
            unsafe { copies.queue_registered(from.start, to.range(0..bytes))? };
            end.record(&copies)?;
            copies.synchronize()?;
        }
        let picoseconds = f64::from(end.milliseconds_since(&start)?) * 1e9 / bytes.max(1) as f64;
        Ok(if picoseconds >= 1.0 { picoseconds as u32 } else { PRESUMED })
    }
}

#[cfg(test)]
mod tests {
    use strata_plan::{Arena, Category, Plan};
    use strata_residency::{HostCopy, LayerSource};

    use super::*;
    use crate::driver::{Device, fake};

    /// Oracle: by hand. Of six copies of which the third begins in memory that was pinned and ends in memory that wasn't, and the fourth is all there, both
    /// are staged; so is one that isn't in memory at all.
    #[test]
    fn what_was_not_pinned_is_staged() {
        const COPY: usize = 768;
        fake::install();
        let context = Context::new(&Device::all().unwrap()[0]).unwrap();
        let mut plan = Plan::new();
        let region = plan.heap(Category::Experts, "experts", 6 * COPY);
        let mut arena = Arena::new(&plan).unwrap();
        let blocks = region.parts(COPY).map(|part| arena.take(part).unwrap()).collect();
        let mut store = ExpertStore::new(blocks, Box::new(|| Ok(())));
        let tensor = |bytes: usize| vec![0u8; bytes * 7].into();
        store.add_layer(0, LayerSource::split(7, tensor(200), tensor(256), tensor(20)).unwrap()).unwrap();
        let id = |expert| ExpertId { layer: 0, expert };
        let copy = HostCopy::new(Box::new(|_, _, _| Ok(())));
        (0..6).for_each(|expert| store.promote(id(expert), &copy).unwrap());
        let start = store.heap_spans()[0].start;
        let pinned = [start..start + 2 * COPY + 100, start + 4 * COPY..start + 6 * COPY];
        // SAFETY: the driver is a fake, which touches nothing.
        let stretches = pinned.map(|pages| unsafe { RegisteredMemory::new(&context, pages) }.unwrap());
        let host = HostMemory { stretches: stretches.into(), store: Arc::new(store) };
        let found: Vec<At> = (0..7).map(|expert| host.find(id(expert), COPY).unwrap()).collect();
        let at = |place: usize| At::Host(start + place * COPY);
        assert_eq!(found, [at(0), at(1), At::Staged, At::Staged, at(4), at(5), At::Staged]);
        assert_eq!(found[6].entry(&host), 0);
    }
}
