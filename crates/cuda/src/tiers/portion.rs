//! What the host computes of a window of many rows: in each layer some of the experts that have no slot, while the others are brought.
//!
//! Which ones is settled when a window begins, by how many rows it has ([`Share`]): in each layer the last ones. The ring leaves them out, and nobody
//! fetches them, so that of these only rows and products cross the link. Grouping gives their rows places, but makes no work of them, so kernels know nothing of it. The host sleeps until a
//! layer's rows are there, computes, and has the products brought to their places behind the GPU's own.
//!
//! Invariant: memory that a copy reads or writes is left alone until an event behind it was waited for.

use std::time::{Duration, Instant};

use strata_backend::{BackendError, ExpertWeights, GroupedRows, HostCount, HostExperts, Layer, Spec};
use strata_plan::{Category, Place, Plan};
use strata_residency::ExpertId;

use super::At;
use super::share::Share;
use crate::driver::{Context, DeviceSlice, DriverError, Event, PinnedMemory, PinnedPart, Stream};
use crate::failed;
use crate::ops::Fetch;
use crate::recording::MOST_ROWS;

/// No expert.
const NOBODY: u32 = u32::MAX;
/// In one window of so many the host gets an expert of each layer at least.
const LOOKS: u64 = 16;
/// Rows of a window with which the host helps, at most: for wider ones it would need much memory to be of little use. Twin: `HELPED` in `strata-plan`'s
/// `pace.rs`.
const WIDEST: usize = 2048;

/// Rows that there is room for.
fn most_rows(spec: &Spec) -> usize {
    if spec.window > MOST_ROWS { spec.window.min(WIDEST) } else { 0 }
}

/// Adds its memory to the plan.
pub(crate) fn describe(spec: &Spec, plan: &mut Plan) {
    let (rows, moe) = (most_rows(spec), &spec.shape.moe);
    let lists = spec.layers.len() + 2 * moe.experts + 1 + 2 * rows;
    let bytes = 4 * (rows * (3 * spec.shape.hidden + moe.used + 2) + moe.experts + lists);
    plan.item(Category::Experts, "rows for the host's experts", Place::Heap, bytes as u64);
}

/// Which experts of a layer grouping makes no work of: those from `from` on that have no slot. Part of `Routing` in `kernels/route.cu`; all zero for none.
#[repr(C)]
#[derive(Clone, Copy, Default)]
pub(crate) struct LeftOut {
    pub(crate) slots: u64,
    /// The device's memory.
    pub(crate) first: u64,
    pub(crate) end: u64,
    pub(crate) from: u64,
}

/// Products on their way to the GPU: `[places][D]`, with each one's place there.
struct Products {
    memory: PinnedPart<f32>,
    places: PinnedPart<u32>,
    brought: Event,
}

/// The host's part of windows.
pub(crate) struct Portion {
    share: Share,
    /// Rows of the window that the host's experts were settled for, and rows that there is room for.
    settled: Option<usize>,
    most: usize,
    /// In each layer the first of the host's experts: this one, and those behind it that have no slot either; none at [`NOBODY`]. How often they became others.
    from: Vec<u32>,
    changes: u64,
    windows: u64,
    /// A layer's rows, `[rows][D]`; per place its row; per expert where its places end.
    u: PinnedMemory<f32>,
    order: PinnedMemory<u32>,
    ends: PinnedMemory<u32>,
    /// When these are there, and when the layer before was done with; and whether that is known.
    there: Event,
    done: Event,
    follows: bool,
    /// Each with room for the most rows.
    products: Vec<Products>,
    /// What brings them: behind the other products they would wait for the link.
    stream: Stream,
    part: Part,
    width: usize,
    used: usize,
    count: HostCount,
}

/// What the host computes at a time.
#[derive(Default)]
struct Part {
    experts: Vec<u32>,
    /// Where their places start here, and at last where they end.
    bounds: Vec<u32>,
    /// Per place here its row, and its place in the window.
    order: Vec<u32>,
    places: Vec<u32>,
}

impl Part {
    /// Takes the first of these experts, as many as have at most `most` places together; the others. None where places aren't in order.
    fn take<'e>(
        &mut self,
        experts: &'e [u32],
        (ends, order): (&[u32], &[u32]),
        most: usize,
    ) -> Option<&'e [u32]> {
        self.experts.clear();
        self.bounds.clear();
        self.bounds.push(0);
        self.order.clear();
        self.places.clear();
        for (at, &expert) in experts.iter().enumerate() {
            let end = |expert: usize| ends[expert] as usize;
            let (start, end) = (if expert == 0 { 0 } else { end(expert as usize - 1) }, end(expert as usize));
            let rows = order.get(start..end)?;
            if self.order.len() + rows.len() > most {
                return Some(&experts[at..]);
            }
            if !rows.is_empty() {
                self.experts.push(expert);
                self.order.extend_from_slice(rows);
                self.places.extend(start as u32..end as u32);
                self.bounds.push(self.order.len() as u32);
            }
        }
        Some(&[])
    }
}

/// A layer's experts that are the host's, of all in their order.
fn of_layer(experts: &[(ExpertId, At)], layer: usize, from: u32) -> impl Iterator<Item = u32> {
    let first = |layer| experts.partition_point(|(id, _)| usize::from(id.layer) < layer);
    let experts = &experts[first(layer)..first(layer + 1)];
    let without = experts.iter().filter(|(_, at)| !matches!(at, At::Slot(_)));
    without.map(|(id, _)| u32::from(id.expert)).filter(move |expert| *expert >= from)
}

impl Portion {
    /// For a link that takes `link` for an expert; with a fixed share, if that is wanted.
    pub(super) fn new(
        context: &Context,
        spec: &Spec,
        (link, fixed): (Duration, Option<u32>),
    ) -> Result<Portion, DriverError> {
        let (most, moe, width) = (most_rows(spec), spec.shape.moe, spec.shape.hidden);
        let memory = PinnedMemory::new(context, 2 * most * width)?.parts(most * width);
        let places = PinnedMemory::new(context, 2 * most)?.parts(most);
        let products = memory
            .into_iter()
            .zip(places)
            .map(|(memory, places)| Ok(Products { memory, places, brought: Event::new(context)? }));
        Ok(Portion {
            share: Share::new([moe.experts, moe.used], link, fixed),
            settled: None,
            most,
            from: vec![NOBODY; spec.layers.len()],
            changes: 0,
            windows: 0,
            u: PinnedMemory::new(context, most * width)?,
            order: PinnedMemory::new(context, most * moe.used)?,
            ends: PinnedMemory::new(context, moe.experts)?,
            there: Event::new(context)?,
            done: Event::new(context)?,
            follows: false,
            products: products.collect::<Result<_, DriverError>>()?,
            part: Part {
                experts: Vec::with_capacity(moe.experts),
                bounds: Vec::with_capacity(moe.experts + 1),
                order: Vec::with_capacity(most),
                places: Vec::with_capacity(most),
            },
            stream: Stream::new(context)?,
            width,
            used: moe.used,
            count: HostCount::default(),
        })
    }

    /// Settles which of the experts are the host's in a window of so many rows, of which the others come ahead of their layer or not.
    pub(super) fn choose(&mut self, rows: usize, ahead: bool, experts: &[(ExpertId, At)]) {
        (self.settled, self.follows) = (Some(rows), false);
        self.windows += 1;
        // What is known of a host that gets nothing grows old.
        let least = usize::from(self.windows % LOOKS == 1);
        let mut others = false;
        for layer in 0..self.from.len() {
            let missing = if rows <= self.most { of_layer(experts, layer, 0).count() } else { 0 };
            let gets = self.share.of(rows, ahead, missing, least);
            let from = of_layer(experts, layer, 0).nth(missing - gets).filter(|_| gets > 0).unwrap_or(NOBODY);
            others |= std::mem::replace(&mut self.from[layer], from) != from;
        }
        self.changes += u64::from(others);
    }

    /// How often the host's experts have become others.
    pub(super) fn changes(&self) -> u64 {
        self.changes
    }

    /// What was settled is of no window any more.
    pub(super) fn unsettle(&mut self) {
        self.settled = None;
    }

    /// Whether it was settled for windows of so many rows.
    pub(super) fn is_for(&self, rows: usize) -> bool {
        self.settled == Some(rows)
    }

    /// Something else comes between two layers of a window.
    pub(super) fn pause(&mut self) {
        self.follows = false;
    }

    /// Whether an expert that has no slot is the host's.
    pub(super) fn has(&self, id: ExpertId) -> bool {
        u32::from(id.expert) >= self.from[usize::from(id.layer)]
    }

    /// The first of a layer's experts that are the host's, if it has any.
    pub(super) fn first(&self, layer: Layer) -> Option<u32> {
        Some(self.from[usize::from(layer.0)]).filter(|&from| from != NOBODY)
    }

    /// Has a layer's rows brought, which were grouped: `[rows][D]`, per place its row, per expert where its places end.
    pub(crate) fn bring(
        &mut self,
        stream: &Stream,
        u: DeviceSlice<f32>,
        [order, ends]: [DeviceSlice<u32>; 2],
    ) -> Result<(), DriverError> {
        let order = order.range(0..u.len() / self.width * self.used);
        // SAFETY: nobody looks there before `there` is reached, or everything was waited for.
        unsafe {
            stream.queue_download(u, &mut self.u)?;
            stream.queue_download(order, &mut self.order)?;
            stream.queue_download(ends, &mut self.ends)?;
        }
        self.there.record(stream)
    }

    /// Computes the host's experts of the layer whose rows were brought, and has their products brought to their places, `[places][D]`. Sleeps meanwhile.
    pub(crate) fn compute(
        &mut self,
        host: &mut dyn HostExperts,
        of: (Layer, &ExpertWeights),
        experts: &[(ExpertId, At)],
        to: DeviceSlice<f32>,
        (fetch, stream): (&Fetch, &Stream),
    ) -> Result<(), BackendError> {
        self.there.wait().map_err(failed)?;
        let rows = self.settled.unwrap_or(0);
        if std::mem::take(&mut self.follows) {
            let took = self.there.milliseconds_since(&self.done).map_err(failed)?;
            self.share.began(rows, Duration::from_secs_f32(took.max(0.0) / 1e3));
        }
        let layer = usize::from(of.0.0);
        let experts: Vec<u32> = of_layer(experts, layer, self.from[layer]).collect();
        host.begin_step();
        let done = self.parts(host, of, rows, &experts, (fetch, to));
        host.end_step();
        if done.is_err() {
            // Places are the next window's, too.
            let _ = self.stream.synchronize();
        }
        done?;
        self.products.iter().try_for_each(|products| products.brought.hold(stream)).map_err(failed)?;
        self.done.record(stream).map_err(failed)?;
        self.follows = true;
        Ok(())
    }

    fn parts(
        &mut self,
        host: &mut dyn HostExperts,
        (layer, weights): (Layer, &ExpertWeights),
        rows: usize,
        mut experts: &[u32],
        (fetch, to): (&Fetch, DeviceSlice<f32>),
    ) -> Result<(), BackendError> {
        let (width, mut took) = (self.width, Duration::ZERO);
        let (mut count, mut places) = (0, 0);
        let mut turn = 0;
        while !experts.is_empty() {
            let rest = self.part.take(experts, (&self.ends, &self.order), self.most);
            // What a GPU says that went wrong.
            let wrong =
                || failed(format!("it says wrong rows of expert {} of layer {}", experts[0], layer.0));
            experts = rest.filter(|rest| rest.len() < experts.len()).ok_or_else(wrong)?;
            let Part { experts, bounds, order, places: of_window } = &self.part;
            let products = &mut self.products[turn];
            turn ^= 1;
            products.brought.wait().map_err(failed)?;
            let grouped = GroupedRows { experts, bounds, order, u: &self.u[..rows * width] };
            let Products { memory, places: at, brought } = products;
            let (memory, at) = (&mut memory[..order.len() * width], &mut at[..order.len()]);
            let began = Instant::now();
            host.grouped(layer, weights, grouped, memory)?;
            took += began.elapsed();
            at.copy_from_slice(of_window);
            // SAFETY: pinned, and written again only when `brought` was waited for.
            unsafe { fetch.bring_rows(&self.stream, (memory, at), to, width) }.map_err(failed)?;
            brought.record(&self.stream).map_err(failed)?;
            count += experts.len();
            places += order.len();
        }
        self.share.answered(count, places, took);
        self.count.merge(HostCount { asked: 1, experts: count as u64, nanos: took.as_nanos() as u64 });
        Ok(())
    }

    /// What the host computed since this was last taken.
    pub(crate) fn take_count(&mut self) -> HostCount {
        std::mem::take(&mut self.count)
    }
}

impl Drop for Portion {
    fn drop(&mut self) {
        // What is under way reads memory that goes now.
        let _ = self.stream.synchronize();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(layer: u16, expert: u16, slot: bool) -> (ExpertId, At) {
        (ExpertId { layer, expert }, if slot { At::Slot(1) } else { At::Host(1) })
    }

    /// Oracle: by hand. The host's are the last of each layer that have no slot; wide windows leave it none.
    #[test]
    fn the_last_ones_are_the_hosts() {
        crate::driver::fake::install();
        let context = Context::new(&crate::driver::Device::all().unwrap()[0]).unwrap();
        let spec = super::super::desk::tests::spec();
        let mut portion =
            Portion::new(&context, &Spec { window: 100, ..spec }, (Duration::from_micros(40), Some(8)))
                .unwrap();
        let experts: Vec<_> = (0..16)
            .map(|expert| at(0, expert, expert % 4 == 0))
            .chain((0..16).map(|expert| at(2, expert, expert != 5 && expert != 9)))
            .collect();
        portion.choose(50, true, &experts);
        portion.choose(60, false, &experts);
        assert_eq!(portion.changes(), 1);
        let of = |layer| of_layer(&experts, layer, portion.from[layer]).collect::<Vec<_>>();
        assert_eq!(of(0), [9, 10, 11, 13, 14, 15]);
        assert!(of(1).is_empty() && portion.first(Layer(1)).is_none());
        assert_eq!(of(2), [9]);
        assert!(
            portion.has(ExpertId { layer: 0, expert: 9 }) && !portion.has(ExpertId { layer: 0, expert: 7 })
        );
        portion.choose(101, true, &experts);
        assert_eq!(portion.changes(), 2);
        assert!((0..3).all(|layer| portion.first(Layer(layer)).is_none()));
    }

    /// Oracle: by hand. Parts have all places of their experts once, with their rows and where they go; experts without rows are in none.
    #[test]
    fn parts_have_what_there_is_room_for() {
        // Expert 0 has two places, 1 none, 2 three, 3 one, 4 two, 5 none.
        let (ends, order) = ([2, 2, 5, 6, 8, 8], [10, 11, 20, 21, 22, 30, 40, 41]);
        let mut part = Part::default();
        let rest = part.take(&[0, 1, 2, 4, 5], (&ends, &order), 5).unwrap();
        assert_eq!((&part.experts[..], &part.bounds[..]), (&[0, 2][..], &[0, 2, 5][..]));
        assert_eq!((&part.order[..], &part.places[..]), (&[10, 11, 20, 21, 22][..], &[0, 1, 2, 3, 4][..]));
        assert_eq!(rest, [4, 5]);
        assert!(part.take(rest, (&ends, &order), 5).unwrap().is_empty());
        assert_eq!((&part.order[..], &part.places[..]), (&[40, 41][..], &[6, 7][..]));
        assert!(part.take(&[0, 3], (&ends, &order), 5).unwrap().is_empty());
        assert_eq!((&part.bounds[..], &part.places[..]), (&[0, 2, 3][..], &[0, 1, 5][..]));
        assert_eq!(part.take(&[0, 2, 3], (&ends, &order), 5), Some(&[3][..]));
        assert!(part.take(&[5], (&ends, &order), 5).unwrap().is_empty());
        assert!(
            part.take(&[1], (&[3, 2], &order), 5).is_none() && part.take(&[0], (&[9], &order), 9).is_none()
        );
        assert!(part.experts.is_empty() && part.places.is_empty());
    }
}
