//! What GDN and the n-gram block share: a layer's recurrent state as kernels see it, and convolutions over its history. `kernels/recurrent.cuh`.

use strata_backend::{BackendError, Layer};

use crate::Failed;
use crate::backend::CudaBackend;
use crate::driver::{DeviceSlice, Grid};
use crate::inputs::{OnDevice, Round};

/// Where a layer keeps its recurrent state.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct Recurrent {
    data: u64,
    committed: u64,
    floats: u64,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct ConvParams {
    state: Recurrent,
    portions: u64,
    rows: u64,
    taps: u64,
    out: u64,
    history: u64,
    channels: u32,
    kernel: u32,
    dilation: u32,
    padding: u32,
}

/// A causal depthwise convolution: its rows `[rows][channels]`, its taps `[channels][kernel]`, its history `history` floats into a version.
#[derive(Clone, Copy)]
pub(crate) struct Conv {
    pub(crate) rows: DeviceSlice<f32>,
    pub(crate) taps: DeviceSlice<f32>,
    pub(crate) history: usize,
    pub(crate) channels: usize,
    pub(crate) kernel: usize,
    pub(crate) dilation: usize,
}

impl Conv {
    /// As kernels take it; `out` for those that write one.
    pub(crate) fn params(&self, state: Recurrent, round: &Round, out: u64) -> ConvParams {
        ConvParams {
            state,
            portions: round.portions.address(),
            rows: self.rows.address(),
            taps: self.taps.address(),
            out,
            history: self.history as u64,
            channels: self.channels as u32,
            kernel: self.kernel as u32,
            dilation: self.dilation as u32,
            padding: 0,
        }
    }

    /// A thread a channel, over the rows of each portion.
    pub(crate) fn grid(&self, round: &Round) -> Grid {
        let rows = round.longest.min(usize::from(u16::MAX));
        Grid {
            blocks: [self.channels.div_ceil(128) as u32, rows as u32, round.portions.len() as u32],
            threads: 128,
        }
    }
}

impl CudaBackend {
    /// A layer's recurrent state.
    pub(crate) fn recurrent(&self, layer: Layer, window: &OnDevice) -> Result<Recurrent, BackendError> {
        let state = self.state.layer(layer)?;
        let first = usize::from(layer.0) * self.spec.sequences;
        Ok(Recurrent {
            data: state.recurrent.address(),
            committed: window.versions.range(first..first + self.spec.sequences).address(),
            floats: state.floats as u64,
        })
    }

    /// Makes the pending history what the convolution's rows leave, after whatever read the one before.
    pub(crate) fn advance(&self, conv: &Conv, state: Recurrent, round: &Round) -> Result<(), BackendError> {
        let blocks = [conv.channels.div_ceil(128) as u32, round.portions.len() as u32, 1];
        let p = conv.params(state, round, 0);
        // SAFETY: the state is as large as `Spec` says, and the rows are the window's.
        let queued =
            unsafe { self.kernels.gdn.history.launch(&self.stream, Grid { blocks, threads: 128 }, &p) };
        Ok(queued.map_err(Failed::from)?)
    }

    /// Copies some floats of the pending state to the checkpoints of a round's cuts.
    pub(crate) fn save(
        &self,
        layer: Layer,
        round: &Round,
        floats: std::ops::Range<usize>,
    ) -> Result<(), BackendError> {
        let state = self.state.layer(layer)?;
        for &(slot, to) in &round.cuts {
            let from = self.state.pending(strata_backend::SeqSlot(slot), layer)?;
            let copied =
                self.stream.copy(from.range(floats.clone()), state.checkpoint(to).range(floats.clone()));
            copied.map_err(Failed::from)?;
        }
        Ok(())
    }
}
