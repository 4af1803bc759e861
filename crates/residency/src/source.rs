//! The homes of a layer's experts: which bytes of which tensor belong to which expert.
//!
//! Expert tensors have the experts outermost, so an expert's part of one is contiguous and all parts are equally long.
//! Gate and up rows come as two tensors or as one, in which an expert's gate rows come before its up rows.

use std::ops::Range;

use strata_plan::DEVICE_ALIGNMENT;

use crate::reads::{MOST_PIECES, Piece, most_room, skew};
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

/// Where in files a tensor is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TensorPlace {
    /// The tensor's name, for messages.
    pub name: String,
    /// Which file.
    pub file: u16,
    /// Where it starts there, bytes.
    pub offset: u64,
}

/// A layer's expert tensors in their home.
#[derive(Debug, Clone)]
pub struct LayerSource {
    experts: u16,
    gate: Part,
    up: Part,
    down: Part,
    /// Where gate, up and down rows are in files, for a layer whose experts are read from there ([`LayerSource::read_from`]).
    places: Option<Box<[TensorPlace; MOST_PIECES]>>,
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
            places: None,
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
        Ok(LayerSource { experts, gate, up, down: Part::whole(Tensor::Down, down, experts)?, places: None })
    }

    /// The same experts, to be read from files: their gate, up and down rows are in these tensors. Slots that they are read to have room for what
    /// direct reads bring, and experts lie there as such reads leave them. Copies that are made otherwise are shorter, and lie as all do
    /// ([`LayerSource::copy_layout`]): the length tells which it is.
    pub fn read_from(self, places: [TensorPlace; MOST_PIECES]) -> LayerSource {
        LayerSource { places: Some(Box::new(places)), ..self }
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

    /// Bytes of a slot that one of these experts is read to, always more than its copy takes; of that where they are read from no file.
    pub fn slot_bytes(&self) -> usize {
        match self.places {
            None => self.copy_layout().bytes,
            Some(_) => self.rooms().iter().fold(0, |sum, room| sum.saturating_add(*room)),
        }
    }

    /// Whether a slot of so many bytes can hold one of these experts: as a copy, or as it was read.
    pub(crate) fn fits(&self, slot: usize) -> bool {
        slot == self.copy_layout().bytes || (self.is_read() && slot >= self.slot_bytes())
    }

    /// Whether they are read from files.
    pub(crate) fn is_read(&self) -> bool {
        self.places.is_some()
    }

    /// What brings an expert to a slot, and the names of the tensors: gate, up, down. None for a layer that isn't read from files.
    pub(crate) fn pieces(&self, expert: u16) -> Option<[(Piece, &TensorPlace); MOST_PIECES]> {
        let places = self.places.as_deref()?;
        let rooms = self.rooms();
        let starts = [0, rooms[0], rooms[0] + rooms[1]];
        let parts = self.parts();
        Some(std::array::from_fn(|i| {
            let (part, place) = (parts[i].range(expert), &places[i]);
            let offset = place.offset.saturating_add(part.start as u64);
            (Piece { file: place.file, offset, bytes: part.len(), at: starts[i] }, place)
        }))
    }

    fn parts(&self) -> [&Part; MOST_PIECES] {
        [&self.gate, &self.up, &self.down]
    }

    /// The rooms of a slot that is read to.
    fn rooms(&self) -> [usize; MOST_PIECES] {
        self.parts().map(|part| most_room(part.len))
    }

    /// Where an expert's parts lie in a slot of so many bytes.
    #[inline]
    fn in_slot(&self, expert: u16, slot: usize) -> [Range<usize>; MOST_PIECES] {
        let CopyLayout { up, down, bytes } = self.copy_layout();
        let starts = match self.pieces(expert).filter(|_| slot != bytes) {
            Some(pieces) => pieces.map(|(piece, _)| piece.at + skew(piece.offset)),
            None => [0, up, down],
        };
        let parts = self.parts();
        std::array::from_fn(|i| starts[i]..starts[i] + parts[i].len)
    }

    /// The parts of an expert's copy in a slot.
    #[inline]
    pub(crate) fn cut<'a>(&self, expert: u16, slot: &'a [u8]) -> Blob<'a> {
        let [gate, up, down] = self.in_slot(expert, slot.len()).map(|part| &slot[part]);
        Blob { gate, up, down }
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
