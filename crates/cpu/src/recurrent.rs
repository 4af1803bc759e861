//! Recurrent state: GDN columns and the rows that convolutions look back at, two versions of each per sequence.
//!
//! Owns the layouts. In a sequence's GDN state the columns of the value heads that share a key head follow each other
//! ([`place`]), and a column has its two versions side by side: `[key head][value head of it][value_dim][version][key_dim]`, so
//! that a worker's part is one slice that it reads and writes. [`Recurrent::read`] and [`Recurrent::write`] go through a version in the
//! order of `Spec`: `[value_heads, value_dim, key_dim]`, GDN history, n-gram history.

use strata_backend::{GdnShape, NgramShape, Spec};
use strata_plan::Block;

/// Where value head `h` has its columns, counted in value heads.
pub(crate) fn place(shape: &GdnShape, h: usize) -> usize {
    let per_key = shape.value_heads / shape.key_heads;
    h % shape.key_heads * per_key + h / shape.key_heads
}

/// Rows that a causal convolution looks back at: `[sequences][version][rows][width]`, oldest row first.
pub(crate) struct History {
    data: Block<f32>,
    rows: usize,
    width: usize,
}

impl History {
    /// One version of a sequence's.
    pub(crate) fn get(&self, slot: usize, version: usize) -> &[f32] {
        &self.data[self.at(slot, version)..][..self.rows * self.width]
    }

    fn get_mut(&mut self, slot: usize, version: usize) -> &mut [f32] {
        let at = self.at(slot, version);
        &mut self.data[at..][..self.rows * self.width]
    }

    /// Makes version `to` what version `from`, maybe the same, becomes by the rows `new`.
    pub(crate) fn advance(&mut self, slot: usize, from: usize, to: usize, new: &[f32]) {
        let len = self.rows * self.width;
        let fresh = len.min(new.len());
        let (from, to) = (self.at(slot, from), self.at(slot, to));
        self.data.copy_within(from + fresh..from + len, to);
        self.data[to + len - fresh..to + len].copy_from_slice(&new[new.len() - fresh..]);
    }

    fn at(&self, slot: usize, version: usize) -> usize {
        (slot * 2 + version) * self.rows * self.width
    }
}

/// A row of a convolution's input, counted from a span's first row; negative ones lie in its history.
#[inline(always)]
pub(crate) fn look_back<'a>(history: &'a [f32], rows: &'a [f32], width: usize, at: isize) -> &'a [f32] {
    let kept = (history.len() / width) as isize;
    let (from, at) = if at < 0 { (history, at + kept) } else { (rows, at) };
    &from[at as usize * width..][..width]
}

/// GDN state of all sequences.
pub(crate) struct GdnState {
    /// See the module.
    pub(crate) columns: Block<f32>,
    /// Rows of convolution input.
    pub(crate) history: History,
    shape: GdnShape,
}

impl GdnState {
    /// Floats of one sequence's columns, both versions.
    pub(crate) fn each(&self) -> usize {
        2 * self.shape.state_floats()
    }

    /// Where version `version` of column `c` of value head `h` starts.
    fn at(&self, slot: usize, version: usize, h: usize, c: usize) -> usize {
        let column = place(&self.shape, h) * self.shape.value_dim + c;
        slot * self.each() + (2 * column + version) * self.shape.key_dim
    }

    fn columns(&self) -> impl Iterator<Item = (usize, usize)> + use<> {
        let shape = self.shape;
        (0..shape.value_heads).flat_map(move |h| (0..shape.value_dim).map(move |c| (h, c)))
    }
}

/// Which op a part of the recurrent state belongs to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    Gdn,
    Ngram,
}

/// One layer's recurrent state, of all sequences.
pub(crate) struct Recurrent {
    pub(crate) gdn: Option<GdnState>,
    pub(crate) ngram: Option<History>,
}

impl Recurrent {
    /// Floats of one version of one sequence's: GDN columns, GDN history, n-gram history.
    pub(crate) fn floats(spec: &Spec, index: usize) -> [usize; 3] {
        let layer = &spec.layers[index];
        let gdn = spec.shape.gdn.as_ref().filter(|_| layer.gdn);
        let ngram = spec.shape.ngram.as_ref().filter(|_| layer.ngram);
        let wide = spec.shape.streams * spec.shape.hidden;
        [
            gdn.map_or(0, GdnShape::state_floats),
            gdn.map_or(0, GdnShape::conv_floats),
            ngram.map_or(0, |n| n.history() * wide),
        ]
    }

    /// Over memory of `2 * sequences` times these floats.
    pub(crate) fn new(spec: &Spec, index: usize, [columns, conv, ngram]: [Block<f32>; 3]) -> Self {
        let layer = &spec.layers[index];
        let gdn = spec.shape.gdn.filter(|_| layer.gdn).map(|shape| {
            let history = History { data: conv, rows: shape.conv_kernel - 1, width: shape.channels() };
            GdnState { columns, history, shape }
        });
        let width = spec.shape.streams * spec.shape.hidden;
        let history = |shape: NgramShape| History { data: ngram, rows: shape.history(), width };
        Recurrent { gdn, ngram: spec.shape.ngram.filter(|_| layer.ngram).map(history) }
    }

    /// Calls `f` with the pieces of one kind of one version of a sequence's state, in order.
    pub(crate) fn read(&self, slot: usize, version: usize, kind: Kind, f: &mut dyn FnMut(&[f32])) {
        match kind {
            Kind::Gdn => {
                let Some(gdn) = &self.gdn else { return };
                for (h, c) in gdn.columns() {
                    f(&gdn.columns[gdn.at(slot, version, h, c)..][..gdn.shape.key_dim]);
                }
                f(gdn.history.get(slot, version));
            }
            Kind::Ngram => {
                let Some(history) = &self.ngram else { return };
                f(history.get(slot, version));
            }
        }
    }

    /// Calls `f` with the pieces of one version of a sequence's state, in order, to fill them.
    pub(crate) fn write(&mut self, slot: usize, version: usize, f: &mut dyn FnMut(&mut [f32])) {
        if let Some(gdn) = &mut self.gdn {
            for (h, c) in gdn.columns() {
                let at = gdn.at(slot, version, h, c);
                f(&mut gdn.columns[at..][..gdn.shape.key_dim]);
            }
            f(gdn.history.get_mut(slot, version));
        }
        if let Some(history) = &mut self.ngram {
            f(history.get_mut(slot, version));
        }
    }

    /// Copies one `(slot, version)` to another.
    pub(crate) fn copy(&mut self, from: (usize, usize), to: (usize, usize)) {
        if let Some(gdn) = &mut self.gdn {
            for (h, c) in gdn.columns() {
                let (from, to) = (gdn.at(from.0, from.1, h, c), gdn.at(to.0, to.1, h, c));
                gdn.columns.copy_within(from..from + gdn.shape.key_dim, to);
            }
        }
        let histories = [self.gdn.as_mut().map(|gdn| &mut gdn.history), self.ngram.as_mut()];
        for history in histories.into_iter().flatten() {
            let (len, from, to) =
                (history.rows * history.width, history.at(from.0, from.1), history.at(to.0, to.1));
            history.data.copy_within(from..from + len, to);
        }
    }
}
