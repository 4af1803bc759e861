//! Experts of which memory holds a part: as many as a budget has room for, the most used ones; the others are read from the model's files when a window
//! uses them.
//!
//! Without a device, all of the budget is slots, and which expert is in which changes. A device reads memory by itself at any time: so beside one the most used
//! experts that it has no room for have copies that stay, and slots are only for the others.
//!
//! Owns what follows from the budget: slots, the memory of experts that are being read, and who reads.
//! Which expert is where, and when it is read, is the store's business.

use std::ops::ControlFlow;
use std::sync::Arc;

use strata_backend::Takers;
use strata_model::Model;
use strata_plan::{Arena, Block, Category, Place, Plan, Region};
use strata_residency::{
    ExpertId, ExpertStore, FileTier, Heat, LayerExperts, LayerSource, Pace, RankingFile, ReadFile, Reader,
    ReaderOptions, Roster, SlotId, Slots, Way,
};

use crate::error::EngineError;
use crate::load::{Progress, Readers};
use crate::lower::Lowered;

/// Experts that are read at once: so many times what a row uses, so that the disk has enough to do and a row's are all asked for together.
const READ_TOGETHER: usize = 2;

/// What a budget makes of a model's experts.
pub(crate) struct Budgeted {
    slots: Slots,
    /// Whether they are filled at the start. Beside a device they are not, which has the most used ones.
    filled: bool,
    /// Experts that are read at once, on tours.
    most: usize,
    /// Memory of slots, by their length, in the order of the slots.
    regions: Vec<(u64, Region)>,
    /// Memory of experts that others read at once, each of so many bytes.
    rooms: Option<(Region, usize)>,
}

/// The plan's name for experts that stay in the file and are read.
pub const BEYOND: &str = "experts beyond the budget";

/// Experts of the longest layer, as they are read.
fn longest(lowered: &Lowered) -> usize {
    lowered.experts.iter().map(|(_, source, _)| source.slot_bytes()).max().unwrap_or(0)
}

/// Experts that are read at once, on tours.
fn most(lowered: &Lowered) -> usize {
    (READ_TOGETHER * lowered.shape.moe.used).max(1)
}

/// Slots for `read` experts beside a device, if anybody computes with them: one half is computed with, the other is read to, and of a few more others may
/// keep the experts for a moment.
fn working(lowered: &Lowered, takers: Takers, read: usize) -> usize {
    let wanted = if takers.computes { (2 * most(lowered)).saturating_add(takers.stagers) } else { 0 };
    wanted.min(read)
}

/// Cuts a device's experts in host memory, the most used first, into those that `budget` bytes have room for beside what reading takes, and those that are
/// read; none are where it has room for all.
pub(crate) fn cut(
    lowered: &Lowered,
    experts: Vec<ExpertId>,
    budget: u64,
    takers: Takers,
) -> (Vec<ExpertId>, Vec<ExpertId>) {
    let copies = roster(lowered, |source| source.copy_layout().bytes);
    if experts.iter().map(|id| copies.bytes(*id)).sum::<u64>() <= budget {
        return (experts, Vec::new());
    }
    let read = working(lowered, takers, experts.len()).saturating_add(takers.stagers);
    let mut left = budget.saturating_sub((read as u64).saturating_mul(longest(lowered) as u64));
    experts.into_iter().partition(|id| {
        let fits = copies.bytes(*id) <= left;
        left -= if fits { copies.bytes(*id) } else { 0 };
        fits
    })
}

/// The experts of all layers, each of `bytes` bytes.
fn roster(lowered: &Lowered, bytes: impl Fn(&LayerSource) -> usize) -> Roster {
    let mut layers = vec![LayerExperts { experts: 0, bytes: 0 }; lowered.states.len()];
    for (layer, source, _) in &lowered.experts {
        layers[usize::from(*layer)] = LayerExperts { experts: source.experts(), bytes: bytes(source) as u64 };
    }
    Roster::new(layers)
}

impl Budgeted {
    /// Cuts `budget` bytes into slots, and lays them out, with what reading takes beside them.
    pub(crate) fn describe(lowered: &Lowered, budget: u64, plan: &mut Plan) -> Budgeted {
        let roster = roster(lowered, LayerSource::slot_bytes);
        let experts = roster.len();
        let slots = Slots::cut(roster, budget, experts);
        let kept = slots.ids().count();
        let all = lowered.experts.iter().map(|(_, of, _)| u64::from(of.experts()) * of.expert_bytes() as u64);
        // A slot is longer than what it holds: an expert of a layer that has such slots.
        let held = |slot: u64| lowered.experts.iter().find(|(_, of, _)| of.slot_bytes() as u64 == slot);
        let held = |slot: u64| held(slot).map_or(0, |(_, of, _)| of.expert_bytes() as u64);
        let left = all.sum::<u64>().saturating_sub(slots.ids().map(|slot| held(slots.bytes(slot))).sum());
        // One half is computed with, the other is read to.
        let slots = slots.with_spare((2 * most(lowered)).min(experts - kept));
        let budgeted = Budgeted::lay(lowered, slots, kept, plan);
        plan.item(Category::Experts, BEYOND, Place::File, left);
        budgeted
    }

    /// Lays out slots for these experts, which have no room on a device or in its memory on the host, and what takes them there.
    pub(crate) fn beside(lowered: &Lowered, read: &[ExpertId], takers: Takers, plan: &mut Plan) -> Budgeted {
        let of = roster(lowered, LayerSource::expert_bytes);
        let slots = Slots::cut(roster(lowered, LayerSource::slot_bytes), 0, 0);
        let slots = slots.with_spare(working(lowered, takers, read.len()));
        let budgeted = Budgeted::lay(lowered, slots, 0, plan);
        let each = longest(lowered);
        let rooms = plan.heap(Category::Experts, "experts being staged", takers.stagers.saturating_mul(each));
        plan.item(Category::Experts, BEYOND, Place::File, read.iter().map(|id| of.bytes(*id)).sum());
        Budgeted { filled: false, rooms: Some((rooms, each)), ..budgeted }
    }

    /// Lays out slots, of which the first `kept` ones hold experts from the start.
    fn lay(lowered: &Lowered, slots: Slots, kept: usize, plan: &mut Plan) -> Budgeted {
        let mut regions: Vec<(u64, Region)> = Vec::new();
        let mut lay = |name: &str, slots_of: &mut dyn Iterator<Item = SlotId>| {
            let mut counts = std::collections::BTreeMap::<u64, usize>::new();
            slots_of.for_each(|slot| *counts.entry(slots.bytes(slot)).or_default() += 1);
            for (length, count) in counts {
                let bytes = usize::try_from(length).unwrap_or(usize::MAX).saturating_mul(count);
                regions.push((length, plan.heap(Category::Experts, name, bytes)));
            }
        };
        lay("resident experts", &mut slots.ids().take(kept));
        lay("experts being read", &mut slots.ids().skip(kept));
        plan.item(Category::Scratch, "experts' use", Place::Heap, FileTier::bytes(&slots));
        Budgeted { slots, filled: true, most: most(lowered), regions, rooms: None }
    }

    /// Has the store read experts, and fills the slots. Whoever is told of the progress may end it.
    pub(crate) fn load(
        self,
        model: &Model,
        lowered: &Lowered,
        arena: &mut Arena,
        ranking: Option<RankingFile>,
        (store, readers): (&mut ExpertStore, &Readers),
        progress: &mut dyn FnMut(Progress) -> ControlFlow<()>,
    ) -> Result<Option<(RankingFile, Roster)>, EngineError> {
        let Budgeted { slots, filled, most, regions, rooms } = self;
        let mut memory: Vec<(u64, std::vec::IntoIter<Block<u8>>)> = Vec::new();
        for (length, region) in regions {
            // A system that has none costs speed only.
            let _ = arena.ask_for_huge_pages(region);
            let blocks: Result<Vec<_>, _> =
                region.parts(length as usize).map(|part| arena.take(part)).collect();
            memory.push((length, blocks?.into_iter()));
        }
        let block = |slot| {
            let fitting = memory.iter_mut().filter(|(length, _)| *length == slots.bytes(slot));
            fitting.flat_map(|(_, blocks)| blocks.next()).next().expect("a region has room for its slots")
        };
        let memory: Vec<_> = slots.ids().map(block).collect();
        let known = roster(lowered, |source| source.copy_layout().bytes);
        let mut heat = Heat::new(&known, Pace::default());
        if let Some(Err(why)) = ranking.as_ref().map(|file| file.recall(&known, &mut heat)) {
            tracing::warn!("{why}");
        }
        let reader = reader(model, most, readers)?;
        let rooms = rooms.map(|(region, each)| region.parts(each).map(|room| arena.take(room)).collect());
        let rooms: Vec<Block<u8>> = rooms.unwrap_or(Ok(Vec::new()))?;
        store.read_with(FileTier::new(slots, memory, reader, heat, most), rooms)?;
        if filled && !store.fill(|done, of| progress(Progress { bytes: done.bytes, of }))? {
            return Err(EngineError::Cancelled);
        }
        Ok(ranking.map(|file| (file, known)))
    }
}

/// What reads a model's files.
fn reader(model: &Model, jobs: usize, readers: &Readers) -> Result<Reader, EngineError> {
    let file = |shard: &strata_gguf::Shard| {
        let (name, direct) = (shard.path.display().to_string(), shard.reopen_direct());
        Ok(ReadFile { name, file: shard.file.try_clone()?, direct })
    };
    let files: std::io::Result<Vec<ReadFile>> = model.gguf.shards().iter().map(file).collect();
    let spawn = &mut |number, work| (readers.spawn)(&format!("reader-{number}"), work);
    let options = ReaderOptions { way: Way::Auto, direct: true, jobs, threads: readers.most, spawn };
    let reader = files.and_then(|files| Reader::new(files, options)).map_err(EngineError::Thread)?;
    match reader.fallback() {
        Some(why) => tracing::warn!("{why}"),
        None => tracing::info!("experts are read by {reader}"),
    }
    Ok(reader)
}

/// Writes what steps taught when it is dropped, if there were any.
pub(crate) struct Keeper {
    pub(crate) file: RankingFile,
    pub(crate) roster: Roster,
    pub(crate) store: Arc<ExpertStore>,
}

impl Drop for Keeper {
    fn drop(&mut self) {
        if let Err(why) = self.file.save(&self.roster, |now| self.store.learned(now)) {
            tracing::warn!("{why}");
        }
    }
}
