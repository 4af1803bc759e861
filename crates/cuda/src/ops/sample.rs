//! The largest values of rows: `kernels/sample.cu`.

use strata_backend::{BackendError, Buffer, Largest, MOST_LARGEST, Spec};

use super::{OpError, module};
use crate::backend::CudaBackend;
use crate::driver::{Context, DeviceSlice, DriverError, Grid, Kernel, Stream};
use crate::scratch::Scratch;
use crate::{Failed, failed};

/// Values that a block sorts.
const CHUNK: usize = 2048;

#[repr(C)]
#[derive(Clone, Copy)]
struct LargestParams {
    values: u64,
    from: u64,
    to: u64,
    width: u32,
    keep: u32,
    zeros_alike: u32,
    padding: u32,
}

/// Finds the largest values of rows.
pub struct Sorter(Kernel<LargestParams>);

/// Room for ranks, for rounds that take turns.
pub(crate) struct Room([DeviceSlice<u64>; 2]);

impl Room {
    /// For the logits of every sequence.
    pub(crate) fn new(spec: &Spec, room: &mut Scratch) -> Room {
        let ranks = Sorter::ranks(spec.shape.vocab, spec.sequences, MOST_LARGEST);
        Room(ranks.map(|ranks| room.take(ranks)))
    }
}

impl Sorter {
    /// Loads the kernel.
    pub fn new(context: &Context) -> Result<Sorter, OpError> {
        Ok(Sorter(module(context, "sample")?.kernel("strata_largest")?))
    }

    /// Ranks that the first round leaves, and the second.
    pub fn ranks(width: usize, rows: usize, keep: usize) -> [usize; 2] {
        let first = width.div_ceil(CHUNK) * keep;
        [first * rows, first.div_ceil(CHUNK) * keep * rows]
    }

    /// Queues finding the `keep` largest of each row of `width` values, and returns where their ranks will be, `[rows][keep]`.
    ///
    /// # Panics
    /// If `room` is smaller than [`Sorter::ranks`] says, or `keep` is larger than a row or than half a chunk.
    pub fn queue(
        &self,
        stream: &Stream,
        values: DeviceSlice<f32>,
        [rows, mut width, keep]: [usize; 3],
        zeros_alike: bool,
        room: [DeviceSlice<u64>; 2],
    ) -> Result<DeviceSlice<u64>, DriverError> {
        assert!(values.len() == rows * width && (1..=width.min(CHUNK / 2)).contains(&keep));
        let (mut from, mut round) = (None::<DeviceSlice<u64>>, 0);
        loop {
            let chunks = width.div_ceil(CHUNK);
            let to = room[round % 2].range(0..rows * chunks * keep);
            let p = LargestParams {
                values: from.map_or(values.address(), |_| 0),
                from: from.map_or(0, DeviceSlice::address),
                to: to.address(),
                width: width as u32,
                keep: keep as u32,
                zeros_alike: zeros_alike.into(),
                padding: 0,
            };
            let grid = Grid { blocks: [chunks as u32, rows as u32, 1], threads: CHUNK as u32 / 2 };
            // SAFETY: the sizes were compared above; each round reads what the one before left in the other place.
            unsafe { self.0.launch(stream, grid, &p) }?;
            if chunks == 1 {
                return Ok(to);
            }
            (from, width, round) = (Some(to), chunks * keep, round + 1);
        }
    }

    /// What a rank is of: an index, and its value; NaN for one that isn't finite.
    pub fn value(rank: u64) -> (u32, f32) {
        let order = (rank >> 32) as u32;
        let bits = if order >> 31 == 1 { order & 0x7fff_ffff } else { !order };
        (!(rank as u32), f32::from_bits(bits))
    }
}

impl CudaBackend {
    /// See [`strata_backend::Backend::largest`].
    pub(crate) fn largest_of(
        &mut self,
        buffer: Buffer,
        wanted: Largest,
        out: &mut [(u32, f32)],
    ) -> Result<bool, BackendError> {
        let Largest { rows, width, count, zeros_alike } = wanted;
        if count > MOST_LARGEST
            || rows > self.spec.sequences
            || width > self.spec.shape.vocab
            || count > width
        {
            return Ok(false);
        }
        let (values, mut room) = (self.buffer(buffer, rows, width)?, self.room());
        let Room(room) = Room::new(&self.spec, &mut room);
        let size = [rows, width, count];
        let found = self.kernels.sorter.queue(&self.stream, values, size, zeros_alike, room);
        self.stream.fetch(found.map_err(Failed::from)?, &mut self.ranks).map_err(Failed::from)?;
        out.iter_mut().zip(self.ranks.iter()).for_each(|(out, rank)| *out = Sorter::value(*rank));
        match out.iter().find(|(at, _)| *at as usize >= width) {
            Some((at, _)) => Err(failed(format!("it found a largest value at {at} of {width}"))),
            None => Ok(true),
        }
    }
}
