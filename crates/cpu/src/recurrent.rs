//! Recurrent state: GDN columns and the rows that convolutions look back at, two versions of each per sequence.
//!
//! Owns the layouts. A GDN state column is a value dimension's `[key_dim]`; columns lie in strips of sixteen ([`crate::strip`]), the last strip
//! of a value head filled up with columns that stay zero. The strips of the value heads that share a key head follow each other
//! ([`place`]), and a strip has its two versions side by side: `[key head][value head of it][strip][version][key_dim][16]`, so that a worker's
//! part is one slice that it reads and writes.
//!
//! [`Recurrent::pieces`] goes through a version as it lies, for copies; [`Recurrent::values`] in the order of `Spec`:
//! `[value_heads, value_dim, key_dim]`, GDN history, n-gram history.

use strata_backend::{GdnShape, NgramShape, Spec};
use strata_plan::Block;

use crate::strip::STRIP;

/// Where value head `h` has its columns, counted in value heads.
pub(crate) fn place(shape: &GdnShape, h: usize) -> usize {
    let per_key = shape.value_heads / shape.key_heads;
    h % shape.key_heads * per_key + h / shape.key_heads
}

/// Strips of a value head.
pub(crate) fn strips(shape: &GdnShape) -> usize {
    shape.value_dim.div_ceil(STRIP)
}

/// Floats of one version of one sequence's columns.
fn column_floats(shape: &GdnShape) -> usize {
    shape.state_floats() / shape.value_dim * strips(shape) * STRIP
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
        2 * column_floats(&self.shape)
    }

    /// Floats of one version of a strip.
    fn strip(&self) -> usize {
        self.shape.key_dim * STRIP
    }

    /// Where version `version` of a sequence's strips start.
    fn starts(&self, slot: usize, version: usize) -> impl Iterator<Item = usize> + use<> {
        let (first, strip) = (slot * self.each(), self.strip());
        (0..self.each() / (2 * strip)).map(move |i| first + (2 * i + version) * strip)
    }

    /// Where every value of a version is, in the order of `Spec`.
    fn places(&self, slot: usize, version: usize) -> impl Iterator<Item = usize> + use<> {
        let (shape, first, strip) = (self.shape, slot * self.each(), self.strip());
        let columns = (0..shape.value_heads).flat_map(move |h| (0..shape.value_dim).map(move |c| (h, c)));
        columns.flat_map(move |(h, c)| {
            let at = place(&shape, h) * strips(&shape) + c / STRIP;
            let start = first + (2 * at + version) * strip + c % STRIP;
            (0..shape.key_dim).map(move |k| start + k * STRIP)
        })
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
    /// Floats of one version of one sequence's, as they lie: GDN columns in whole strips, GDN history, n-gram history.
    pub(crate) fn floats(spec: &Spec, index: usize) -> [usize; 3] {
        let layer = &spec.layers[index];
        let [_, conv, ngram] = spec.recurrent_floats(layer);
        [spec.shape.gdn.as_ref().filter(|_| layer.gdn).map_or(0, column_floats), conv, ngram]
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

    /// Calls `f` with the pieces of one kind of one version of a sequence's state, as they lie.
    pub(crate) fn pieces(&self, slot: usize, version: usize, kind: Kind, f: &mut dyn FnMut(&[f32])) {
        let history = match kind {
            Kind::Gdn => self.gdn.as_ref().map(|gdn| {
                gdn.starts(slot, version).for_each(|at| f(&gdn.columns[at..at + gdn.strip()]));
                &gdn.history
            }),
            Kind::Ngram => self.ngram.as_ref(),
        };
        if let Some(history) = history {
            f(history.get(slot, version));
        }
    }

    /// As [`Recurrent::pieces`], of all kinds, to fill.
    pub(crate) fn pieces_mut(&mut self, slot: usize, version: usize, f: &mut dyn FnMut(&mut [f32])) {
        if let Some(gdn) = &mut self.gdn {
            let strip = gdn.strip();
            gdn.starts(slot, version).for_each(|at| f(&mut gdn.columns[at..at + strip]));
            f(gdn.history.get_mut(slot, version));
        }
        if let Some(history) = &mut self.ngram {
            f(history.get_mut(slot, version));
        }
    }

    /// Calls `f` with every value of one version of a sequence's state, in the order of `Spec`.
    pub(crate) fn values(&self, slot: usize, version: usize, f: &mut dyn FnMut(f32)) {
        if let Some(gdn) = &self.gdn {
            gdn.places(slot, version).for_each(|at| f(gdn.columns[at]));
            gdn.history.get(slot, version).iter().for_each(|&x| f(x));
        }
        if let Some(history) = &self.ngram {
            history.get(slot, version).iter().for_each(|&x| f(x));
        }
    }

    /// Sets every value of one version of a sequence's state to what `f` gives next, in the order of `Spec`.
    pub(crate) fn set_values(&mut self, slot: usize, version: usize, f: &mut dyn FnMut() -> f32) {
        if let Some(gdn) = &mut self.gdn {
            gdn.places(slot, version).for_each(|at| gdn.columns[at] = f());
            gdn.history.get_mut(slot, version).iter_mut().for_each(|x| *x = f());
        }
        if let Some(history) = &mut self.ngram {
            history.get_mut(slot, version).iter_mut().for_each(|x| *x = f());
        }
    }

    /// Copies one `(slot, version)` to another.
    pub(crate) fn copy(&mut self, from: (usize, usize), to: (usize, usize)) {
        if let Some(gdn) = &mut self.gdn {
            let strip = gdn.strip();
            for (from, to) in gdn.starts(from.0, from.1).zip(gdn.starts(to.0, to.1)) {
                gdn.columns.copy_within(from..from + strip, to);
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
