//! The homes of a layer's experts: which bytes of which tensor belong to which expert.
//!
//! Expert tensors have the experts outermost, so an expert's part of one is contiguous and all parts are equally long.
//! Gate and up rows come as two tensors or as one, in which an expert's gate rows come before its up rows.

use std::ops::Range;

use strata_plan::DEVICE_ALIGNMENT;

use crate::{Bytes, LayerError};

/// An expert's bytes, all of its rows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Blob<'a> {
    /// The gate rows.
    pub gate: &'a [u8],
    /// The up rows.
    pub up: &'a [u8],
    /// The down rows.
    pub down: &'a [u8],
}

/// One of the tensors that a layer's experts lie in.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Tensor {
    /// Gate rows.
    Gate,
    /// Up rows.
    Up,
    /// Down rows.
    Down,
    /// Per expert the gate rows, then the up rows.
    GateUp,
}

impl Tensor {
    /// The name in messages.
    pub fn name(self) -> &'static str {
        match self {
            Tensor::Gate => "gate",
            Tensor::Up => "up",
            Tensor::Down => "down",
            Tensor::GateUp => "fused gate and up",
        }
    }
}

/// Where a part of an expert is inside a tensor.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Extent {
    /// Which tensor of the layer.
    pub tensor: Tensor,
    /// Which of the tensor's bytes.
    pub range: Range<usize>,
}

/// How a copy of an expert lies, in whatever memory: the gate rows first, then the up and the down rows, each from a multiple of
/// [`DEVICE_ALIGNMENT`] on, so that copies are moved as they are and computed with where they lie.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CopyLayout {
    /// Where the up rows start, bytes.
    pub up: usize,
    /// Where the down rows start, bytes.
    pub down: usize,
    /// The copy's length, bytes.
    pub bytes: usize,
}

/// A layer's expert tensors in their home.
#[derive(Debug, Clone)]
pub struct LayerSource {
    experts: u16,
    gate: Part,
    up: Part,
    down: Part,
}

/// What every expert has of a tensor: `len` bytes, `skip` bytes into the expert's `stride`.
#[derive(Debug, Clone)]
struct Part {
    tensor: Tensor,
    bytes: Bytes,
    stride: usize,
    skip: usize,
    len: usize,
}

impl LayerSource {
    /// Experts in three tensors, each `[experts, ..]`.
    pub fn split(experts: u16, gate: Bytes, up: Bytes, down: Bytes) -> Result<LayerSource, LayerError> {
        Ok(LayerSource {
            experts,
            gate: Part::whole(Tensor::Gate, gate, experts)?,
            up: Part::whole(Tensor::Up, up, experts)?,
            down: Part::whole(Tensor::Down, down, experts)?,
        })
    }

    /// Experts in two tensors, each `[experts, ..]`, the first with an expert's gate rows before its up rows, equally
    /// many bytes of each.
    pub fn fused(experts: u16, gate_up: Bytes, down: Bytes) -> Result<LayerSource, LayerError> {
        let both = Part::whole(Tensor::GateUp, gate_up, experts)?;
        let half = both.stride / 2;
        if half * 2 != both.stride {
            return Err(LayerError::Odd { bytes: both.stride });
        }
        let gate = Part { len: half, ..both };
        let up = Part { skip: half, ..gate.clone() };
        Ok(LayerSource { experts, gate, up, down: Part::whole(Tensor::Down, down, experts)? })
    }

    /// How many experts.
    pub fn experts(&self) -> u16 {
        self.experts
    }

    /// Bytes of one expert.
    pub fn expert_bytes(&self) -> usize {
        self.gate.len + self.up.len + self.down.len
    }

    /// Where an expert's gate, up and down bytes are, in this order.
    pub fn extents(&self, expert: u16) -> [Extent; 3] {
        [&self.gate, &self.up, &self.down]
            .map(|part| Extent { tensor: part.tensor, range: part.range(expert) })
    }

    /// An expert's bytes in their home. `expert` must be below [`LayerSource::experts`].
    #[inline]
    pub fn blob(&self, expert: u16) -> Blob<'_> {
        Blob { gate: self.gate.of(expert), up: self.up.of(expert), down: self.down.of(expert) }
    }

    /// How a copy of an expert lies.
    pub fn copy_layout(&self) -> CopyLayout {
        let [up, down, bytes] = [self.gate.len, self.up.len, self.down.len].map({
            let mut end = 0usize;
            move |len| {
                end = (end + len).next_multiple_of(DEVICE_ALIGNMENT);
                end
            }
        });
        CopyLayout { up, down, bytes }
    }

    /// The parts of a copy.
    #[inline]
    pub(crate) fn cut<'a>(&self, copy: &'a [u8]) -> Blob<'a> {
        let CopyLayout { up, down, .. } = self.copy_layout();
        Blob {
            gate: &copy[..self.gate.len],
            up: &copy[up..up + self.up.len],
            down: &copy[down..down + self.down.len],
        }
    }

    /// The parts of a copy that is to be made: gate, up, down.
    pub(crate) fn cut_mut<'a>(&self, copy: &'a mut [u8]) -> [&'a mut [u8]; 3] {
        let CopyLayout { up, down, .. } = self.copy_layout();
        let (gate, rest) = copy.split_at_mut(up);
        let (up, down) = rest.split_at_mut(down - up);
        [&mut gate[..self.gate.len], &mut up[..self.up.len], &mut down[..self.down.len]]
    }
}

impl Part {
    fn whole(tensor: Tensor, bytes: Bytes, experts: u16) -> Result<Part, LayerError> {
        let stride = bytes.len().checked_div(usize::from(experts)).unwrap_or(0);
        if stride == 0 || stride * usize::from(experts) != bytes.len() {
            return Err(LayerError::Uneven { tensor: tensor.name(), bytes: bytes.len(), experts });
        }
        Ok(Part { tensor, bytes, stride, skip: 0, len: stride })
    }

    #[inline]
    fn of(&self, expert: u16) -> &[u8] {
        &self.bytes[self.range(expert)]
    }

    #[inline]
    fn range(&self, expert: u16) -> Range<usize> {
        let start = usize::from(expert) * self.stride + self.skip;
        start..start + self.len
    }
}
