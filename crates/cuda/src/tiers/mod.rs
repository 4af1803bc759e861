//! Where the GPU finds experts: in slots of its own memory, in host memory that it reads by itself, or where it can't read them: in the mapped
//! file, or in memory that the system wouldn't pin. Those are staged, or the host computes them.
//!
//! Owns the slots, the registration of the expert store's memory, and the residency table on the device, `[layers][experts]` addresses: an
//! expert is found through it, never through an address that was baked into a launch. Windows so wide that nearly every expert has
//! rows don't read host memory from kernels: they get experts through the [`Ring`].
//!
//! Invariant: an address in the table is of a whole copy of its expert, laid out by [`CopyLayout`], that stays where it is; or zero, where the GPU
//! can't read the expert.

mod cache;
mod chosen;
mod desk;
mod exchange;
mod host;
mod link;
mod policy;
mod portion;
mod ring;
mod share;
mod split;
mod staging;

use std::collections::{BTreeMap, HashSet};
use std::sync::Arc;
use std::time::Duration;

use strata_backend::{BackendError, ExpertCount, ExpertWeights, HostCount, Layer, Op, Spec};
use strata_plan::{Bytes, Category, Place, Plan, Region};
use strata_residency::{
    CopyLayout, ExpertId, ExpertStore, FileCount, Heat, LayerExperts, LayerSource, Move, Pace, RankingFile,
    Roster, Slots, Tier,
};

use crate::driver::{Context, DeviceMemory, DeviceSlice, Stream};
use crate::failed;
use crate::ops::{Fetch, Routing, most_fetched};
use crate::weights::Stage;
use staging::Staging;

use cache::Cache;
use chosen::Chosen;
pub(crate) use desk::{Asked, Computes, Desk, DeskParams, WantedParams};
use exchange::Exchanger;
use host::{At, HostMemory};
use link::DeviceLink;
pub use policy::Exchanges;
use policy::Policy;
use portion::Portion;
pub(crate) use portion::{LeftOut, describe as describe_portion};
pub(crate) use ring::Ring;
pub use staging::{SpawnStager, Stagers};

/// Places of the ring: copies are so far ahead of the products, and a layer is taken in about half as many parts.
const PLACES: usize = 8;
/// Spare places for each length of slots, at most: so many exchanges are under way at once.
const SPARES: usize = 8;
/// They take so small a part of the slots' bytes.
const SPARED: u64 = 16;

/// How many experts the device keeps for itself, if not as many as there is room for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum ExpertCache {
    /// What everything else leaves.
    #[default]
    Auto,
    /// So many experts at most.
    Experts(usize),
    /// So many bytes at most.
    Bytes(u64),
}

/// What there is for experts.
#[derive(Clone, Copy)]
pub(crate) struct Budget<'r> {
    /// Bytes that the device leaves for everything.
    pub(crate) available: u64,
    /// What slots may take of it.
    pub(crate) cache: ExpertCache,
    /// How they change what they hold.
    pub(crate) exchanges: Exchanges,
    /// What was learned of them before.
    pub(crate) ranking: Option<&'r RankingFile>,
    /// Bytes of pinned buffers, if experts have to be staged.
    pub(crate) staging: usize,
}

/// A layer's experts, as kernels find them.
#[derive(Debug, Clone, Copy)]
pub(crate) struct LayerTable {
    pub(crate) layout: CopyLayout,
    /// The address of each expert's copy.
    pub(crate) table: DeviceSlice<u64>,
}

/// Regions of everything that has to do with experts.
pub(crate) struct TierRegions {
    /// Per layer how a copy of an expert lies, where the layer has experts.
    layouts: Vec<Option<CopyLayout>>,
    /// Experts of a row of a table.
    width: usize,
    /// Bytes that a few rows' experts take, fetched.
    fetched: usize,
    slots: Slots,
    heat: Heat,
    /// What the slots start with.
    loads: Vec<Move>,
    exchanges: Exchanges,
    /// All slots, one behind the other.
    memory: Region,
    /// Spare places, by their length.
    spares: Vec<(u64, Region)>,
    /// The ring, where slots are too few for all experts.
    ring: Option<Region>,
    /// Where routing leaves its choices, where experts are beside the device.
    chosen: Option<Region>,
    /// Where the host is asked, if it computes experts and some are left to it.
    desk: Option<Region>,
    /// The residency table, and behind it the ring's and that of fetched experts where there is a ring.
    table: Region,
}

impl TierRegions {
    /// Lays out slots for all experts, or for as many as there is room for beside everything planned before; then with a ring.
    pub(crate) fn describe(
        spec: &Spec,
        experts: &[(u16, LayerSource)],
        plan: &mut Plan,
        budget: Budget<'_>,
    ) -> TierRegions {
        let count = spec.layers.len();
        let (mut layouts, mut layers) =
            (vec![None; count], vec![LayerExperts { experts: 0, bytes: 0 }; count]);
        for (layer, source) in experts {
            let (layer, layout) = (usize::from(*layer), source.copy_layout());
            layouts[layer] = Some(layout);
            layers[layer] = LayerExperts { experts: source.experts(), bytes: layout.bytes as u64 };
        }
        let roster = Roster::new(layers);
        let width = spec.shape.moe.experts;
        let (bytes, most) = match budget.cache {
            ExpertCache::Auto => (u64::MAX, usize::MAX),
            ExpertCache::Experts(most) => (u64::MAX, most),
            ExpertCache::Bytes(bytes) => (bytes, usize::MAX),
        };
        let (table, desk) = (8 * width * count, desk::device_bytes(spec));
        let chosen = chosen::device_bytes(spec);
        let beside = (plan.device_bytes() as u64).saturating_add((3 * table + desk + chosen) as u64);
        let left = budget.available.saturating_sub(beside);
        let fits = roster.total_bytes() <= left.min(bytes) && roster.len() <= most;
        let longest = roster.layers().iter().map(|layer| layer.bytes).max().unwrap_or(0);
        let ring = (!fits).then(|| {
            // Two layers, one that is computed with and one that comes; half of a small card.
            let of_layer = |layer: &LayerExperts| u64::from(layer.experts) * layer.bytes;
            let two = 2 * roster.layers().iter().map(of_layer).max().unwrap_or(0);
            two.min(left / 2).max(PLACES as u64 * longest) as usize
        });
        let room = left.saturating_sub(ring.unwrap_or(0) as u64).min(bytes);
        let forced = budget.exchanges != Exchanges::Learned;
        let for_spares = match fits {
            true => 0,
            false => wanted_spares(&roster).min(if forced { room / 2 } else { room / (SPARED + 1) }),
        };
        let slots = Slots::cut(roster, room - for_spares, most);
        let spares = match forced {
            true => spares(&slots, for_spares),
            false => spares(&slots, for_spares.min(slots.total_bytes() / SPARED)),
        };
        let mut heat = Heat::new(slots.roster(), Pace::default());
        if !fits {
            if let Some(Err(why)) = budget.ranking.map(|file| file.recall(slots.roster(), &mut heat)) {
                tracing::warn!("{why}");
            }
            // Where each is, how hot, in which slot, and in what order it is staged; tables on their way to the device.
            let known = 192 * slots.roster().len() + 2 * table;
            plan.item(Category::Experts, "experts' addresses and heat", Place::Heap, known as u64);
            plan.item(
                Category::Experts,
                "staging buffers",
                Place::Heap,
                (budget.staging as u64).max(longest),
            );
            desk::describe(spec, plan);
        }
        TierRegions {
            layouts,
            width,
            fetched: most_fetched(&spec.shape.moe, spec.window.max(spec.sequences)) * longest as usize,
            exchanges: budget.exchanges,
            memory: plan.device(Category::Experts, "expert slots", slots.total_bytes() as usize),
            spares: spares
                .into_iter()
                .map(|(bytes, count)| {
                    (bytes, plan.device(Category::Experts, "spare slots", bytes as usize * count))
                })
                .collect(),
            ring: ring.map(|bytes| plan.device(Category::Experts, "expert ring", bytes)),
            chosen: (!fits).then(|| chosen::describe(spec, plan)),
            desk: (!fits).then(|| plan.device(Category::Experts, "experts asked for", desk)),
            table: plan.device(
                Category::Experts,
                "residency table",
                if fits { table } else { 2 * table + 8 * width },
            ),
            loads: slots.first_loads(&heat),
            heat,
            slots,
        }
    }

    /// Whether some experts have no slot.
    pub(crate) fn reads_host(&self) -> bool {
        self.ring.is_some()
    }

    /// Those that have none, the most used first.
    pub(crate) fn without_slots(&self) -> Vec<ExpertId> {
        let with: HashSet<ExpertId> = self.loads.iter().map(|planned| planned.load).collect();
        self.slots.roster().by_use(&self.heat).into_iter().filter(|id| !with.contains(id)).collect()
    }
}

/// What spare places for all lengths of experts take.
fn wanted_spares(roster: &Roster) -> u64 {
    let mut lengths: Vec<u64> = roster.layers().iter().map(|layer| layer.bytes).collect();
    lengths.sort_unstable();
    lengths.dedup();
    lengths.iter().sum::<u64>() * SPARES as u64
}

/// How many spare places of each length of slots so many bytes are enough for: about equally many, and no more than slots.
fn spares(slots: &Slots, bytes: u64) -> BTreeMap<u64, usize> {
    let mut count = BTreeMap::<u64, usize>::new();
    slots.ids().for_each(|slot| *count.entry(slots.bytes(slot)).or_default() += 1);
    let (mut spares, mut left) = (BTreeMap::new(), bytes);
    for round in 1..=SPARES {
        for (&length, &count) in &count {
            if round <= count && length <= left {
                left -= length;
                *spares.entry(length).or_default() += 1;
            }
        }
    }
    spares
}

/// What stages experts through a ring of `room` bytes, of which a few rows' experts take `fetched`.
fn staging(
    context: &Context,
    copies: &Stream,
    (store, roster): (&Arc<ExpertStore>, &Roster),
    stagers: Option<Stagers>,
    [room, fetched]: [usize; 2],
) -> Result<Staging, BackendError> {
    let Some(stagers) = stagers else {
        return Err(failed("some experts are in memory that it can't read, and nothing stages them"));
    };
    if room < fetched {
        return Err(failed(format!(
            "experts that it can't read need {} of its memory to pass through, of which {} are left: give it more, or --experts heap",
            Bytes(fetched as u64),
            Bytes(room as u64)
        )));
    }
    let longest = roster.layers().iter().map(|layer| layer.bytes as usize).max().unwrap_or(0);
    Staging::new(context, copies.share(), store, longest, stagers)
}

/// Where a layer's routing leaves what it chooses, if not where every layer does.
#[derive(Default)]
pub(crate) struct Choices {
    /// `[rows][used]`
    pub(crate) experts: Option<DeviceSlice<u32>>,
    /// `[experts]`
    pub(crate) ends: Option<DeviceSlice<u32>>,
}

/// The experts of a model, where the GPU finds them.
pub(crate) struct Tiers {
    layers: Vec<Option<LayerTable>>,
    /// For wide windows, where not all experts have slots.
    pub(crate) ring: Option<Ring>,
    /// Where the host is asked, if it computes or brings some.
    pub(crate) desk: Option<Desk>,
    /// What the host computes of windows of many rows, if it does.
    portion: Option<Portion>,
    /// What windows choose, and what is learned of it, where not all experts have slots.
    cache: Option<Cache>,
    /// As of how many changes of places, and of what is left to the host, the ring is cut.
    cut_at: Option<[u64; 2]>,
    /// All memory of the device that is the backend's.
    pub(crate) device: DeviceSlice<u8>,
    host: Arc<HostMemory>,
}

impl Tiers {
    /// Fills the slots, and makes host memory known to the GPU where experts have to be read from there.
    pub(crate) fn load(
        (spec, regions): (&Spec, TierRegions),
        (computes, stagers, ranking): (Option<Computes>, Option<Stagers>, Option<RankingFile>),
        memory: &DeviceMemory,
        store: &Arc<ExpertStore>,
        stage: &mut Stage,
        context: &Context,
        stream: &Stream,
    ) -> Result<Tiers, BackendError> {
        let TierRegions {
            layouts,
            width,
            fetched,
            mut slots,
            heat,
            loads,
            memory: all,
            ring,
            chosen,
            desk,
            table,
            exchanges,
            spares,
        } = regions;
        let place = |region: Region| memory.part::<u8>(region.offset(), region.bytes());
        let roster = slots.roster().clone();
        let average = roster.total_bytes() / roster.len().max(1) as u64;
        let copy = |id: ExpertId| layouts[usize::from(id.layer)].expect("a layer with experts");

        // Gaps between the parts of a copy move with it.
        stream.fill(place(all), 0).map_err(failed)?;
        let mut at = vec![None; roster.len()];
        for first in loads {
            let Move { slot, load: id, .. } = first;
            let (start, CopyLayout { up, down, bytes }) = (slots.start(slot) as usize, copy(id));
            let to = place(all).range(start..start + bytes);
            let pinned = store.pin_current(id)?;
            let blob = pinned.blob();
            for (first, part) in [(0, blob.gate), (up, blob.up), (down, blob.down)] {
                stage.upload(stream, part, to.range(first..first + part.len()))?;
            }
            slots.begin(first).and_then(|()| slots.land(slot)).map_err(failed)?;
            at[roster.number(id).expect("the roster's own")] = Some(At::Slot(to.address()));
        }
        let host = Arc::new(HostMemory::register(store, context, ring.is_some()));
        let homes = roster.ids().zip(at).map(|(id, at)| match at {
            Some(slot) => Ok((id, slot)),
            None => Ok((id, host.find(id, copy(id).bytes)?)),
        });
        let at: Vec<(ExpertId, At)> = homes.collect::<Result<_, BackendError>>()?;

        let count = width * layouts.len();
        let tables: DeviceSlice<u64> = place(table).cast();
        let mut table = |first: usize, addresses: &[u64]| -> Result<_, BackendError> {
            let table = tables.range(first..first + count);
            let rows = rows(count, width, &at, addresses);
            stage.upload(stream, bytemuck::cast_slice(&rows), table.cast())?;
            let row = |layer: usize| table.range(layer * width..(layer + 1) * width);
            let layer = |(layer, layout): (usize, &Option<CopyLayout>)| {
                layout.map(|layout| LayerTable { layout, table: row(layer) })
            };
            Ok(layouts.iter().enumerate().map(layer).collect::<Vec<_>>())
        };
        let layers = table(0, &at.iter().map(|(_, at)| at.entry(&host)).collect::<Vec<_>>())?;
        let staged = at.iter().any(|(_, at)| matches!(at, At::Staged));
        let ring = match ring {
            None => None,
            Some(region) => {
                let copies = Stream::new(context).map_err(failed)?;
                let room = [region.bytes(), fetched];
                let staging = staged.then(|| staging(context, &copies, (store, &roster), stagers, room));
                let staging = staging.transpose()?;
                let (chunks, addresses) =
                    ring::cut(place(region), &host, &at, &|id| copy(id).bytes, &|_| false);
                let room = (place(region), tables.range(2 * count..2 * count + width));
                let (copies, table) =
                    ((copies, staging), (tables.range(count..2 * count), table(count, &addresses)?));
                Some(Ring::new(context, copies, chunks, table, room, &host).map_err(failed)?)
            }
        };
        stream.synchronize().map_err(failed)?;
        let device = memory.slice();
        let rate = match &ring {
            Some(ring) => host.measure(context, ring.room().0).map_err(failed)?,
            None => 0,
        };
        let asks = computes.is_some() || staged;
        let each = Duration::from_nanos(average * u64::from(rate) / 1000);
        let helps = computes.as_ref().filter(|_| !staged).map(|(_, fixed)| (each, *fixed));
        let portion = helps.map(|helps| Portion::new(context, spec, helps)).transpose().map_err(failed)?;
        let desk = desk.filter(|_| asks);
        let desk = desk.map(|region| Desk::new(context, spec, (computes, each), device, place(region)));
        let cache = match (chosen, &ring) {
            (Some(region), Some(ring)) => {
                let chosen = Chosen::new(context, spec, place(region)).map_err(failed)?;
                let slot = |slot| {
                    let start = slots.start(slot) as usize;
                    place(all).range(start..start + slots.bytes(slot) as usize)
                };
                let places: Vec<DeviceSlice<u8>> = slots.ids().map(slot).collect();
                // Where memory has copies of all experts anyway, there is nothing to exchange; nor where some are staged.
                let in_slots = || at.iter().filter(|(_, at)| matches!(at, At::Slot(_)));
                let doubled = in_slots().any(|(id, _)| matches!(store.tier(*id), Ok(Tier::Heap)));
                let parts = |(bytes, region): (u64, Region)| {
                    let (all, each) = (place(region), bytes as usize);
                    (bytes, (0..all.len() / each).map(|at| all.range(at * each..(at + 1) * each)).collect())
                };
                let spares: BTreeMap<u64, Vec<DeviceSlice<u8>>> =
                    spares.into_iter().filter(|_| !doubled && !staged).map(parts).collect();
                let seats = spares.values().map(Vec::len).sum();
                let (table, readers) = (tables.range(0..count), [stream.share(), ring.copies().share()]);
                let link = DeviceLink::new(context, readers, (table, width), (roster, at), &host, seats);
                let link = link.map_err(failed)?;
                let policy = Policy::new(exchanges, heat, &slots, rate, seats);
                let exchanger = Exchanger::new(slots, places, spares);
                Some(Cache { chosen, policy, exchanger, link, exchanges, began: None, ranking })
            }
            _ => None,
        };
        Ok(Tiers {
            layers,
            ring,
            desk: desk.transpose()?,
            portion,
            cache,
            cut_at: Some([0; 2]),
            device,
            host,
        })
    }

    /// Where routing leaves its choices: chosen experts, and counts of them.
    pub(crate) fn choices(&self, layer: Layer, rows: usize) -> Choices {
        self.cache.as_ref().map_or_else(Choices::default, |cache| cache.choices(layer, rows))
    }

    /// A short window begins: experts that have moved are found where they are now.
    pub(crate) fn begin_step(&mut self) -> Result<(), BackendError> {
        self.portion.iter_mut().for_each(Portion::pause);
        self.cache.as_mut().map_or(Ok(()), Cache::begin_step)
    }

    /// An op was submitted.
    pub(crate) fn see(&mut self, op: &Op<'_>) {
        if let Some(cache) = &mut self.cache {
            cache.see(op);
        }
        if matches!(op, Op::Head { .. }) {
            self.portion.iter_mut().for_each(Portion::pause);
        }
    }

    /// Something of the windows under way failed.
    pub(crate) fn forget(&mut self) {
        if let Some(cache) = &mut self.cache {
            cache.forget();
        }
    }

    /// Behind all ops that came, before somebody waits for them.
    pub(crate) fn bring_choices(&mut self, stream: &Stream) -> Result<(), BackendError> {
        self.cache.as_mut().map_or(Ok(()), |cache| cache.bring_choices(stream))
    }

    /// After everything was waited for: counts a step that is over.
    pub(crate) fn end_step(&mut self) -> Result<Option<ExpertCount>, BackendError> {
        self.cache.as_mut().map_or(Ok(None), Cache::end_step)
    }

    /// Counts a window that is committed, if it is a wide one.
    pub(crate) fn count_committed(
        &mut self,
        rows: usize,
        stream: &Stream,
    ) -> Result<Option<ExpertCount>, BackendError> {
        self.cache.as_mut().map_or(Ok(None), |cache| cache.committed(rows, stream))
    }

    /// A window of so many rows begins: settles what the host computes of it. The others come ahead, through the ring, or are fetched when they are known.
    pub(crate) fn begin_window(
        &mut self,
        rows: usize,
        ahead: bool,
        stream: &Stream,
    ) -> Result<(), BackendError> {
        match (&mut self.portion, &self.cache) {
            (Some(portion), Some(cache)) if !ahead => portion.choose(rows, false, cache.experts().0),
            (Some(portion), _) => portion.unsettle(),
            _ => {}
        }
        if ahead {
            self.settle(rows, stream)?;
        }
        let ring = self.ring.as_mut().filter(|_| ahead);
        ring.map_or(Ok(()), |ring| ring.start(stream).map_err(BackendError::from))
    }

    /// Before the ring's copies for a wide window of so many rows, or its next layer: nothing moves, and the ring brings what has no slot now and isn't left
    /// to the host.
    pub(crate) fn settle(&mut self, rows: usize, stream: &Stream) -> Result<(), BackendError> {
        let (Some(cache), Some(ring)) = (&mut self.cache, &mut self.ring) else { return Ok(()) };
        if !cache.is_settled() {
            // Whoever waits for the GPU has answered it before.
            self.desk.as_mut().map_or(Ok(()), |desk| desk.serve(stream, Some(&mut *ring)))?;
            cache.settle()?;
        }
        let (experts, changes) = cache.experts();
        let moved = self.cut_at.is_none_or(|[before, _]| before != changes);
        let anew = |portion: &&mut Portion| moved || !portion.is_for(rows);
        if let Some(portion) = self.portion.as_mut().filter(anew) {
            portion.choose(rows, true, experts);
        }
        let changes = Some([changes, self.portion.as_ref().map_or(0, Portion::changes)]);
        if changes == self.cut_at {
            return Ok(());
        }
        let left_out = |id| self.portion.as_ref().is_some_and(|portion| portion.has(id));
        let bytes = |id| cache.exchanger.slots().roster().bytes(id) as usize;
        let (chunks, addresses) = ring::cut(ring.room().0, &self.host, experts, &bytes, &left_out);
        ring.recut(chunks, experts, &addresses, stream).map_err(failed)?;
        self.cut_at = changes;
        Ok(())
    }

    /// The experts of a layer that are left to the host in a window of so many rows.
    pub(crate) fn left_out(&self, layer: Layer, rows: usize) -> Option<LeftOut> {
        let portion = self.portion.as_ref().filter(|portion| portion.is_for(rows))?;
        let (from, slots) = (portion.first(layer)?, self.layers[usize::from(layer.0)]?);
        let (first, end) = (self.device.address(), self.device.address() + self.device.len() as u64);
        Some(LeftOut { slots: slots.table.address(), first, end, from: u64::from(from) })
    }

    /// Has the rows of a grouped layer brought to the host, if it has some of the experts.
    pub(crate) fn bring_rows(
        &mut self,
        routing: &Routing,
        u: DeviceSlice<f32>,
        stream: &Stream,
    ) -> Result<(), BackendError> {
        let portion = self.portion.as_mut().filter(|_| routing.leaves_out());
        portion.map_or(Ok(()), |portion| portion.bring(stream, u, routing.grouped()).map_err(failed))
    }

    /// Has the host compute its experts of the layer whose rows were brought, behind what was queued of the others.
    pub(crate) fn compute_portion(
        &mut self,
        of: (Layer, &ExpertWeights),
        routing: &Routing,
        (fetch, stream): (&Fetch, &Stream),
    ) -> Result<(), BackendError> {
        let Tiers { portion, desk, cache, .. } = self;
        let host = desk.as_mut().and_then(Desk::host);
        let (Some(portion), Some(host), Some(cache)) = (portion, host, cache) else { return Ok(()) };
        if !routing.leaves_out() {
            return Ok(());
        }
        portion.compute(host, of, cache.experts().0, routing.products, (fetch, stream))
    }

    /// From now on the host computes nothing of windows of many rows, nor of the one under way.
    pub(crate) fn without_portion(&mut self, rows: usize, stream: &Stream) -> Result<(), BackendError> {
        stream.synchronize().map_err(failed)?;
        self.portion = None;
        self.cut_at = None;
        self.settle(rows, stream)
    }

    /// What the host computed since this was last taken.
    pub(crate) fn take_host_count(&mut self) -> HostCount {
        let mut count = self.desk.as_mut().map_or_else(HostCount::default, Desk::take_count);
        self.portion.iter_mut().for_each(|portion| count.merge(portion.take_count()));
        count
    }

    /// What was read from files since this was last asked, if any is.
    pub(crate) fn take_file_count(&self) -> Option<FileCount> {
        self.host.store.take_file_count()
    }

    /// Whether some experts are in memory that the GPU can't read.
    pub(crate) fn stages(&self) -> bool {
        self.ring.as_ref().is_some_and(Ring::stages)
    }

    /// A layer's experts.
    pub(crate) fn layer(&self, layer: u16) -> Result<LayerTable, BackendError> {
        find_layer(&self.layers, layer)
    }
}

/// A table of all layers, `width` addresses each: 0 for experts that there aren't.
fn rows(count: usize, width: usize, experts: &[(ExpertId, At)], addresses: &[u64]) -> Vec<u64> {
    let mut rows = vec![0u64; count];
    for ((id, _), address) in experts.iter().zip(addresses) {
        rows[usize::from(id.layer) * width + usize::from(id.expert)] = *address;
    }
    rows
}

fn find_layer(layers: &[Option<LayerTable>], layer: u16) -> Result<LayerTable, BackendError> {
    let found = layers.get(usize::from(layer)).copied().flatten();
    found.ok_or_else(|| failed(format!("layer {layer} has no experts")))
}
