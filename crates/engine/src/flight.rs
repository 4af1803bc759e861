//! A window in flight: prepared, taken through the layers one by one, then committed or dropped.
//!
//! Dropping one before its commit changes no sequence: its pending state is overwritten by the next window.

use strata_backend::{Backend, BackendError, Buffer, Checkpoint, Fence, Op, Window};

use crate::error::EngineError;
use crate::graph::{Graph, Run, Work};
use crate::lookup::Lookup;

/// Sees every op after it was submitted: for traces in tests and tools.
pub type Probe = Box<dyn FnMut(&Op<'_>, &mut dyn Backend) + Send>;

/// The backend, with the probe that watches it.
pub(crate) struct Machine {
    pub backend: Box<dyn Backend>,
    pub probe: Option<Probe>,
}

impl Machine {
    pub fn submit(&mut self, op: &Op<'_>) -> Result<(), BackendError> {
        self.backend.submit(op)?;
        if let Some(probe) = &mut self.probe {
            probe(op, &mut *self.backend);
        }
        Ok(())
    }
}

/// A checkpoint that a window fills in passing.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Passing {
    pub slot: usize,
    pub tokens: usize,
    pub checkpoint: Checkpoint,
}

/// Windows that may be in flight at once: a decode window passes a prompt window that pauses.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Lane {
    Prompt,
    Decode,
}

/// A window in flight.
pub(crate) struct Flight {
    pub window: Window,
    /// Which sequences the spans belong to, as engine slots, in span order.
    pub slots: Vec<usize>,
    pub passing: Vec<Passing>,
    lane: Lane,
    pub x: Buffer,
    work: Work,
    next_layer: usize,
    /// The point after the layer submitted last.
    behind: Option<Fence>,
}

impl Flight {
    pub fn new(window: Window, slots: Vec<usize>, lane: Lane, x: Buffer, work: Work) -> Self {
        Flight { window, slots, passing: Vec::new(), lane, x, work, next_layer: 0, behind: None }
    }

    pub fn run<'a>(&'a self, lookup: &'a Lookup) -> Run<'a> {
        Run { window: &self.window, x: self.x, table_rows: lookup.rows(self.lane), work: self.work }
    }

    /// Submits the next layer. False once all are.
    pub fn advance(
        &mut self,
        graph: &Graph,
        lookup: &mut Lookup,
        machine: &mut Machine,
    ) -> Result<bool, EngineError> {
        if self.next_layer == 0 {
            graph.embed(self.run(lookup), &mut |op| machine.submit(op))?;
        }
        let Some(layer) = graph.layers.get(self.next_layer) else { return Ok(false) };
        if layer.ngram.is_some() {
            lookup.read(self.lane)?;
        }
        layer.forward(self.run(lookup), &mut |op| machine.submit(op))?;
        self.next_layer += 1;
        Ok(self.next_layer < graph.layers.len())
    }

    /// As [`Flight::advance`]; then sleeps until the layer before the submitted one is done. Whoever pauses or gives up between
    /// layers must not find all of them submitted already, and the backend has one to go on with.
    pub fn advance_in_pace(
        &mut self,
        graph: &Graph,
        lookup: &mut Lookup,
        machine: &mut Machine,
    ) -> Result<bool, EngineError> {
        let more = self.advance(graph, lookup, machine)?;
        if let Some(before) = self.behind.replace(machine.backend.fence()?) {
            machine.backend.wait_idly(before)?;
        }
        Ok(more)
    }
}

/// Rows of the next window of a prompt with `left` tokens to read: all windows about alike, for a last one of a few rows costs nearly as
/// much as a whole one. Whole multiples of [`EVEN`], or the whole window, but for the last.
pub(crate) fn rows_of_next(left: usize, window: usize) -> usize {
    let windows = left.div_ceil(window).max(1);
    left.div_ceil(windows).next_multiple_of(EVEN).min(window).min(left)
}

/// What kernels like the rows of a window to be a multiple of.
const EVEN: usize = 64;

#[cfg(test)]
mod tests {
    use super::*;

    /// Oracle: by hand; and for all lengths, as few windows as there can be, none wider than allowed.
    #[test]
    fn windows_of_a_prompt_are_alike() {
        let rows = |mut left: usize, window| {
            let mut rows = Vec::new();
            while left > 0 {
                rows.push(rows_of_next(left, window));
                left -= rows[rows.len() - 1];
            }
            rows
        };
        assert_eq!(rows(4096, 2047), [1408, 1344, 1344]);
        assert_eq!((rows(100, 512), rows(513, 512), rows(10, 4)), (vec![100], vec![320, 193], vec![4, 4, 2]));
        for (left, window) in
            (1..3000).step_by(7).flat_map(|left| [1, 33, 64, 500].map(|window| (left, window)))
        {
            let rows = rows(left, window);
            assert!(
                rows.len() == left.div_ceil(window) && rows.iter().all(|&rows| rows <= window),
                "{left}, {window}"
            );
        }
    }
}
