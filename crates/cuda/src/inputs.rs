//! What a window brings from the host: tokens, rows, table rows. Small, new every step, and always in the same place on the device, so that
//! recorded work can be replayed.

use bytemuck::{Pod, Zeroable};
use strata_backend::{BackendError, Checkpoint, LogitRow, Span, Spec, check_spans};
use strata_plan::{Category, Place, Plan, Region};

use crate::driver::{Context, DeviceMemory, DeviceSlice, DriverError, Stream, Turns};
use crate::ops::{Item, Logits};
use crate::state::State;
use crate::{Failed, failed};

/// A row of the window. Twin: `kernels/window.cuh`.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Pod, Zeroable)]
pub(crate) struct Row {
    /// Whose.
    pub(crate) slot: u32,
    /// Where in its sequence.
    pub(crate) position: u32,
}

/// Rows of one sequence that pass through its recurrent state together. Twin: `kernels/window.cuh`.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Pod, Zeroable)]
pub(crate) struct Portion {
    /// Whose.
    pub(crate) slot: u32,
    /// The first row in the window.
    pub(crate) row: u32,
    /// How many.
    pub(crate) rows: u32,
    /// 0 for a span's first rows, which start from the committed version; 1 for those behind a cut, which go on from the pending one.
    pub(crate) goes_on: u32,
}

/// A window on the device.
#[derive(Clone)]
pub(crate) struct OnDevice {
    /// Rows.
    pub(crate) count: usize,
    /// `[rows]`
    pub(crate) rows: DeviceSlice<Row>,
    /// `[layers][sequences]`: committed versions.
    pub(crate) versions: DeviceSlice<u32>,
    /// The portions, in rounds: those of a round belong to different sequences; after it the cuts are taken.
    pub(crate) rounds: Vec<Round>,
}

/// Portions that may be computed at once, and the checkpoints to copy their pending state to.
#[derive(Clone)]
pub(crate) struct Round {
    pub(crate) portions: DeviceSlice<Portion>,
    pub(crate) cuts: Vec<(u32, Checkpoint)>,
    /// The most rows of a portion.
    pub(crate) longest: usize,
}

/// Regions of the inputs.
pub(crate) struct InputRegions {
    ids: [Region; 3],
    table: Region,
    rows: Region,
    versions: Region,
    portions: Region,
    logit_items: Region,
}

/// Bytes of a row of an n-gram table, at most: f32.
fn table_bytes(spec: &Spec) -> usize {
    spec.shape.ngram.as_ref().map_or(0, |n| n.heads * n.row * 4)
}

fn portions(spec: &Spec) -> usize {
    // Every cut goes to a checkpoint of its own.
    spec.sequences + spec.checkpoints
}

impl InputRegions {
    /// Lays out the inputs.
    pub(crate) fn describe(spec: &Spec, plan: &mut Plan) -> InputRegions {
        let rows = spec.window.max(spec.sequences);
        let before = plan.device_bytes();
        let mut region =
            |each: usize, count: usize| plan.device(Category::Window, "inputs", each.saturating_mul(count));
        let regions = InputRegions {
            ids: [region(4, rows), region(4, rows), region(4, rows)],
            table: region(table_bytes(spec), rows),
            rows: region(size_of::<Row>(), rows),
            versions: region(4 * spec.layers.len(), spec.sequences),
            portions: region(size_of::<Portion>(), portions(spec)),
            logit_items: region(size_of::<Item>(), spec.sequences * Logits::most_items(spec.shape.vocab)),
        };
        // Two pinned buffers each, and what was brought last; and items to be brought.
        let on_host = (3 * (plan.device_bytes() - before) + regions.logit_items.bytes()) as u64;
        plan.item(Category::Window, "inputs on the host", Place::Heap, on_host);
        regions
    }
}

/// Copies to one place on the device.
struct Upload<T> {
    turns: Turns<T>,
    place: DeviceSlice<T>,
    /// What is there.
    held: Vec<T>,
}

impl<T: Pod + PartialEq> Upload<T> {
    fn new(context: &Context, place: DeviceSlice<T>) -> Result<Upload<T>, DriverError> {
        let turns = Turns::new(context, place.len())?;
        Ok(Upload { turns, place, held: Vec::with_capacity(place.len()) })
    }

    /// Queues a copy of the values, unless they are there already, and returns their place.
    ///
    /// # Panics
    /// If there are more than there is room for.
    fn put(&mut self, stream: &Stream, values: &[T]) -> Result<DeviceSlice<T>, DriverError> {
        let place = self.place.range(0..values.len());
        if self.held == values {
            return Ok(place);
        }
        self.held.clear();
        self.turns.upload(stream, values, place)?;
        self.held.extend_from_slice(values);
        Ok(place)
    }
}

/// What ids are of: each has a place of its own, so that a whole step's can be there at once.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Ids {
    Tokens,
    Next,
    HeadRows,
}

/// All inputs.
pub(crate) struct Inputs {
    ids: [Upload<u32>; 3],
    table: Upload<u8>,
    rows: Upload<Row>,
    versions: Upload<u32>,
    portions: Upload<Portion>,
    logit_items: Upload<Item>,
    /// The items of rows of logits, to be copied.
    items: Vec<Item>,
    /// What is there: the spans, and the state's epoch.
    held: Option<(Vec<Span>, u64, OnDevice)>,
}

impl Inputs {
    /// Takes the memory.
    pub(crate) fn new(
        context: &Context,
        regions: &InputRegions,
        memory: &DeviceMemory,
    ) -> Result<Inputs, DriverError> {
        fn upload<T: Pod + PartialEq>(
            context: &Context,
            region: Region,
            memory: &DeviceMemory,
        ) -> Result<Upload<T>, DriverError> {
            Upload::new(context, memory.part(region.offset(), region.bytes() / size_of::<T>()))
        }
        Ok(Inputs {
            ids: [
                upload(context, regions.ids[0], memory)?,
                upload(context, regions.ids[1], memory)?,
                upload(context, regions.ids[2], memory)?,
            ],
            table: upload(context, regions.table, memory)?,
            rows: upload(context, regions.rows, memory)?,
            versions: upload(context, regions.versions, memory)?,
            portions: upload(context, regions.portions, memory)?,
            logit_items: upload(context, regions.logit_items, memory)?,
            items: Vec::new(),
            held: None,
        })
    }

    /// Token ids, or row numbers.
    pub(crate) fn ids(
        &mut self,
        stream: &Stream,
        what: Ids,
        ids: &[u32],
    ) -> Result<DeviceSlice<u32>, BackendError> {
        Ok(self.ids[what as usize].put(stream, ids).map_err(Failed::from)?)
    }

    /// Rows of an n-gram table.
    pub(crate) fn table_rows(
        &mut self,
        stream: &Stream,
        bytes: &[u8],
    ) -> Result<DeviceSlice<u8>, BackendError> {
        Ok(self.table.put(stream, bytes).map_err(Failed::from)?)
    }

    /// What happens to rows of `width` logits.
    pub(crate) fn logit_items(
        &mut self,
        stream: &Stream,
        rows: &[LogitRow<'_>],
        width: usize,
    ) -> Result<DeviceSlice<Item>, BackendError> {
        Logits::items(rows, width, &mut self.items);
        Ok(self.logit_items.put(stream, &self.items).map_err(Failed::from)?)
    }

    /// The window, copied unless it is there already.
    pub(crate) fn window(
        &mut self,
        stream: &Stream,
        (spec, state): (&Spec, &State),
        spans: &[Span],
    ) -> Result<OnDevice, BackendError> {
        match &self.held {
            Some((held, epoch, window)) if held == spans && *epoch == state.epoch => {
                return Ok(window.clone());
            }
            _ => {}
        }
        check_spans(spec, spans).map_err(failed)?;
        let window = self.put(stream, spans, state).map_err(Failed::from)?;
        self.held = Some((spans.to_vec(), state.epoch, window.clone()));
        Ok(window)
    }

    fn put(&mut self, stream: &Stream, spans: &[Span], state: &State) -> Result<OnDevice, DriverError> {
        self.held = None;
        let row = |span: &Span, i| Row { slot: span.slot.0, position: (span.start + i) as u32 };
        let rows: Vec<Row> =
            spans.iter().flat_map(|span| (0..span.rows).map(move |i| row(span, i))).collect();
        let rows = self.rows.put(stream, &rows)?;
        let versions: Vec<u32> = state.committed().collect();
        let versions = self.versions.put(stream, &versions)?;
        // Portion `round` of a span lies between its cuts `round - 1` and `round`.
        let portion = |span: &Span, round: usize| {
            let start = if round == 0 { 0 } else { span.cuts.get(round - 1)?.after };
            let end = span.cuts.get(round).map_or(span.rows, |cut| cut.after);
            let (row, rows) = ((span.row + start) as u32, (end - start) as u32);
            let cut = span.cuts.get(round).map(|cut| (span.slot.0, cut.to));
            (rows > 0)
                .then_some((Portion { slot: span.slot.0, row, rows, goes_on: u32::from(round > 0) }, cut))
        };
        let count = spans.iter().map(|span| span.cuts.len() + 1).max().unwrap_or(0);
        let in_rounds: Vec<Vec<_>> =
            (0..count).map(|round| spans.iter().filter_map(|span| portion(span, round)).collect()).collect();
        let all: Vec<Portion> = in_rounds.iter().flatten().map(|(portion, _)| *portion).collect();
        let all = self.portions.put(stream, &all)?;
        let mut first = 0;
        let rounds = in_rounds.iter().filter(|round| !round.is_empty()).map(|round| {
            let portions = all.range(first..first + round.len());
            first += round.len();
            Round {
                portions,
                cuts: round.iter().filter_map(|(_, cut)| *cut).collect(),
                longest: round.iter().map(|(portion, _)| portion.rows as usize).max().unwrap_or(0),
            }
        });
        Ok(OnDevice { count: rows.len(), rows, versions, rounds: rounds.collect() })
    }
}
