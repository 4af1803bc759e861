//! What the choice of a token looks at: `kernels/sample.cu`.

use bytemuck::{cast, cast_slice_mut};
use strata_backend::{BackendError, Buffer, Largest, LogitRow, MOST_ADJUSTMENTS, MOST_LARGEST, Spec};

use super::{OpError, module};
use crate::backend::CudaBackend;
use crate::driver::{Context, DeviceSlice, DriverError, Grid, Kernel, Stream};
use crate::scratch::Scratch;
use crate::{Failed, failed};

/// Values that a block sorts.
const CHUNK: usize = 2048;

/// Rows' adjustments and masks as kernels read them.
pub type Item = [u32; 4];

/// Bits of a mask in an item.
const MASK: usize = 128;

#[repr(C)]
#[derive(Clone, Copy)]
struct LogitsParams {
    values: u64,
    items: u64,
    width: u32,
    padding: u32,
}

#[repr(C)]
#[derive(Clone, Copy)]
struct LargestParams {
    logits: LogitsParams,
    from: u64,
    to: u64,
    width: u32,
    keep: u32,
}

#[repr(C)]
#[derive(Clone, Copy)]
struct MassParams {
    logits: LogitsParams,
    largest: u64,
    masses: u64,
    keep: u32,
    padding: u32,
}

/// Rows of logits on the device, and what happens to them.
#[derive(Clone, Copy)]
pub struct Logits {
    /// `[rows][width]`
    pub values: DeviceSlice<f32>,
    /// As [`Logits::items`] makes them.
    pub items: DeviceSlice<Item>,
    /// Rows.
    pub rows: usize,
    /// Values in a row.
    pub width: usize,
}

impl Logits {
    /// What happens to rows of `width` logits, for the device.
    pub fn items(rows: &[LogitRow<'_>], width: usize, items: &mut Vec<Item>) {
        items.clear();
        items.resize(rows.len(), [0; 4]);
        for (at, row) in rows.iter().enumerate() {
            let mask = row.mask.map_or(0, |mask| {
                let first = items.len();
                items.resize(first + width.div_ceil(MASK), [0; 4]);
                let words: &mut [u32] = cast_slice_mut(&mut items[first..]);
                words.iter_mut().zip(mask).for_each(|(word, mask)| *word = *mask);
                first
            });
            let (first, count) = (items.len() as u32, row.adjustments.len() as u32);
            items[at] = [first, count, row.temperature.to_bits(), mask as u32];
            items.extend(
                row.adjustments.iter().map(|a| [a.token, cast(a.repetition), cast(a.minus), cast(a.plus)]),
            );
        }
    }

    /// The most items that a row of `width` logits takes.
    pub(crate) fn most_items(width: usize) -> usize {
        1 + width.min(MOST_ADJUSTMENTS) + width.div_ceil(MASK)
    }

    fn chunks(&self) -> usize {
        self.width.div_ceil(CHUNK)
    }

    fn params(&self) -> LogitsParams {
        let width = self.width as u32;
        LogitsParams { values: self.values.address(), items: self.items.address(), width, padding: 0 }
    }
}

/// Finds the largest values of rows, and their mass.
pub struct Sorter {
    largest: Kernel<LargestParams>,
    mass: Kernel<MassParams>,
}

/// Room for what rounds leave that take turns, and for what is found.
#[derive(Clone, Copy)]
pub struct SorterRoom {
    rounds: [DeviceSlice<u64>; 2],
    found: DeviceSlice<u64>,
}

impl SorterRoom {
    /// Numbers that it has: of the first round, of the second, and of what is found, for `keep` values of each row.
    pub fn sizes(width: usize, rows: usize, keep: usize) -> [usize; 3] {
        let chunks = width.div_ceil(CHUNK);
        let second = (chunks * keep).div_ceil(CHUNK) * keep;
        [chunks * keep * rows, second * rows, (keep + chunks) * rows]
    }

    /// Of places for so many numbers.
    pub fn new([first, second, found]: [DeviceSlice<u64>; 3]) -> SorterRoom {
        SorterRoom { rounds: [first, second], found }
    }

    /// For the logits of every sequence.
    pub(crate) fn take(spec: &Spec, room: &mut Scratch) -> SorterRoom {
        let sizes = SorterRoom::sizes(spec.shape.vocab, spec.sequences, MOST_LARGEST);
        SorterRoom::new(sizes.map(|len| room.take(len)))
    }
}

impl Sorter {
    /// Loads the kernels.
    pub fn new(context: &Context) -> Result<Sorter, OpError> {
        let module = module(context, "sample")?;
        Ok(Sorter { largest: module.kernel("strata_largest")?, mass: module.kernel("strata_mass")? })
    }

    /// Queues finding the `keep` largest of each row, and the masses if wanted. Returns where the ranks will be, `[rows][keep]`, and behind them
    /// the masses of chunks, `[rows][chunks]`.
    ///
    /// # Panics
    /// If the room is smaller than [`SorterRoom::sizes`] says, or `keep` is larger than a row or than half a chunk.
    pub fn queue(
        &self,
        stream: &Stream,
        logits: &Logits,
        keep: usize,
        masses: bool,
        room: SorterRoom,
    ) -> Result<DeviceSlice<u64>, DriverError> {
        let &Logits { values, items, rows, mut width } = logits;
        assert!(values.len() == rows * width && items.len() >= rows);
        assert!((1..=width.min(CHUNK / 2)).contains(&keep));
        let grid = |chunks| Grid { blocks: [chunks as u32, rows as u32, 1], threads: CHUNK as u32 / 2 };
        let (mut from, mut round) = (None::<DeviceSlice<u64>>, 0);
        loop {
            let chunks = width.div_ceil(CHUNK);
            let to = if chunks == 1 { room.found } else { room.rounds[round % 2] };
            let to = to.range(0..rows * chunks * keep);
            let p = LargestParams {
                logits: logits.params(),
                from: from.map_or(0, DeviceSlice::address),
                to: to.address(),
                width: width as u32,
                keep: keep as u32,
            };
            // SAFETY: the sizes were compared above, and the items say where in them a row's are; each round reads what the one before left in
            // another place.
            unsafe { self.largest.launch(stream, grid(chunks), &p) }?;
            if chunks == 1 {
                break;
            }
            (from, width, round) = (Some(to), chunks * keep, round + 1);
        }
        let (ranks, chunks) = (rows * keep, if masses { logits.chunks() } else { 0 });
        let found = room.found.range(0..ranks + rows * chunks);
        if masses {
            let p = MassParams {
                logits: logits.params(),
                largest: found.address(),
                masses: found.range(ranks..found.len()).address(),
                keep: keep as u32,
                padding: 0,
            };
            // SAFETY: as above; ranks and masses lie side by side.
            unsafe { self.mass.launch(stream, grid(chunks), &p) }?;
        }
        Ok(found)
    }

    /// What was found: indices and their values, NaN for one that isn't finite; and the masses, unless none are wanted.
    pub fn read(found: &[u64], largest: &mut [(u32, f32)], masses: &mut [u64]) {
        let (ranks, of_chunks) = found.split_at(largest.len());
        for (largest, &rank) in largest.iter_mut().zip(ranks) {
            let order = (rank >> 32) as u32;
            let bits = if order >> 31 == 1 { order & 0x7fff_ffff } else { !order };
            *largest = (!(rank as u32), f32::from_bits(bits));
        }
        let chunks = of_chunks.len().checked_div(masses.len()).unwrap_or(0);
        for (mass, of_chunks) in masses.iter_mut().zip(of_chunks.chunks_exact(chunks.max(1))) {
            *mass = of_chunks.iter().sum();
        }
    }
}

impl CudaBackend {
    /// See [`strata_backend::Backend::largest`].
    pub(crate) fn largest_of(
        &mut self,
        buffer: Buffer,
        wanted: Largest<'_>,
        out: &mut [(u32, f32)],
        masses: &mut [u64],
    ) -> Result<bool, BackendError> {
        let (Largest { rows, width, count }, spec) = (wanted, &self.spec);
        let too_long = |row: &LogitRow<'_>| row.adjustments.len() > MOST_ADJUSTMENTS.min(width);
        if count > MOST_LARGEST.min(width)
            || rows.len() > spec.sequences
            || width > spec.shape.vocab
            || rows.iter().any(too_long)
        {
            return Ok(false);
        }
        let room = SorterRoom::take(spec, &mut self.room());
        let values = self.buffer(buffer, rows.len(), width)?;
        let items = self.inputs.logit_items(&self.stream, rows, width)?;
        let logits = Logits { values, items, rows: rows.len(), width };
        let found = self.kernels.sorter.queue(&self.stream, &logits, count, !masses.is_empty(), room);
        let found = found.map_err(Failed::from)?;
        self.stream.fetch(found, &mut self.found).map_err(Failed::from)?;
        Sorter::read(&self.found[..found.len()], out, masses);
        match out.iter().find(|(at, _)| *at as usize >= width) {
            Some((at, _)) => Err(failed(format!("it found a largest value at {at} of {width}"))),
            None => Ok(true),
        }
    }
}

#[cfg(test)]
mod tests {
    use strata_backend::Adjustment;

    use super::*;

    /// Oracle: the layout by hand. Rows come first, then each row's mask, filled up, and its adjustments.
    #[test]
    fn items_say_where_a_rows_are() {
        let adjustments = [Adjustment { token: 9, repetition: 2.0, minus: 0.5, plus: -1.0 }];
        let rows = [
            LogitRow { temperature: 0.5, ..LogitRow::default() },
            LogitRow { adjustments: &adjustments, mask: Some(&[1, 2, 3, 4, 5]), temperature: 0.0 },
        ];
        let mut items = vec![[7; 4]];
        Logits::items(&rows, 160, &mut items);
        let floats = [2.0f32, 0.5, -1.0].map(f32::to_bits);
        let expected = [
            [2, 0, 0.5f32.to_bits(), 0],
            [4, 1, 0, 2],
            [1, 2, 3, 4],
            [5, 0, 0, 0],
            [9, floats[0], floats[1], floats[2]],
        ];
        assert_eq!(items, expected);
        assert!(items.len() <= 2 * Logits::most_items(160));
    }

    /// Oracle: by hand. Values of either sign, one that is no number, and masses of two chunks each.
    #[test]
    fn what_was_found_is_read() {
        let rank = |order: u32, at: u32| u64::from(order) << 32 | u64::from(!at);
        let found =
            [rank(1.5f32.to_bits() | 1 << 31, 3), rank(!(-2.0f32).to_bits(), 4), rank(!0, 0), 0, 1, 2, 3, 4];
        let (mut largest, mut masses) = ([(0, 0.0); 4], [0; 2]);
        Sorter::read(&found, &mut largest, &mut masses);
        assert_eq!((largest[0], largest[1]), ((3, 1.5), (4, -2.0)));
        assert!(largest[2].1.is_nan());
        assert_eq!(masses, [3, 7]);
        Sorter::read(&found[..4], &mut largest, &mut []);
        assert_eq!(largest[0], (3, 1.5));
    }
}
