//! Device memory that an op needs while it runs.
//!
//! Owns the one description that both sizes and places it: an op's pieces are cut in the same order by a [`Scratch`] that only counts and
//! by one that has the memory. Ops run one after the other, so all of them use the same bytes.

use bytemuck::Pod;
use strata_plan::DEVICE_ALIGNMENT;

use crate::driver::DeviceSlice;

/// Room to cut pieces from.
#[derive(Clone)]
pub(crate) struct Scratch {
    /// Absent while only counting.
    memory: Option<DeviceSlice<u8>>,
    used: usize,
}

impl Scratch {
    /// Counts what would be cut.
    pub(crate) fn counting() -> Scratch {
        Scratch { memory: None, used: 0 }
    }

    /// Cuts from `memory`.
    pub(crate) fn of(memory: DeviceSlice<u8>) -> Scratch {
        Scratch { memory: Some(memory), used: 0 }
    }

    /// Room for `len` values.
    ///
    /// # Panics
    /// If more is cut than was counted.
    pub(crate) fn take<T: Pod>(&mut self, len: usize) -> DeviceSlice<T> {
        let first = self.used;
        let bytes = len.saturating_mul(size_of::<T>());
        self.used =
            first.saturating_add(bytes.checked_next_multiple_of(DEVICE_ALIGNMENT).unwrap_or(usize::MAX));
        match self.memory {
            Some(memory) => memory.range(first..first + bytes).cast(),
            None => DeviceSlice::nowhere(len),
        }
    }

    /// Bytes cut so far.
    pub(crate) fn used(&self) -> usize {
        self.used
    }
}
