//! A window in flight: prepared, taken through the layers one by one, then committed or dropped.
//!
//! Dropping one before its commit changes no sequence: its pending state is overwritten by the next window.

use strata_backend::{Backend, BackendError, Buffer, Checkpoint, Op, Window};

use crate::error::EngineError;
use crate::graph::{Graph, Run, Work};

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

/// A window in flight.
pub(crate) struct Flight {
    pub window: Window,
    /// Which sequences the spans belong to, as engine slots, in span order.
    pub slots: Vec<usize>,
    pub passing: Vec<Passing>,
    table_rows: Vec<Vec<u8>>,
    x: Buffer,
    work: Work,
    next_layer: usize,
}

impl Flight {
    pub fn new(window: Window, slots: Vec<usize>, table_rows: Vec<Vec<u8>>, x: Buffer, work: Work) -> Self {
        Flight { window, slots, passing: Vec::new(), table_rows, x, work, next_layer: 0 }
    }

    pub fn run(&self) -> Run<'_> {
        Run { window: &self.window, x: self.x, table_rows: &self.table_rows, work: self.work }
    }

    /// Computes the next layer. False once all are done.
    pub fn advance(&mut self, graph: &Graph, machine: &mut Machine) -> Result<bool, EngineError> {
        let run = Run { window: &self.window, x: self.x, table_rows: &self.table_rows, work: self.work };
        let mut submit = |op: &Op<'_>| machine.submit(op);
        if self.next_layer == 0 {
            graph.embed(run, &mut submit)?;
        }
        let Some(layer) = graph.layers.get(self.next_layer) else { return Ok(false) };
        layer.forward(run, &mut submit)?;
        self.next_layer += 1;
        Ok(self.next_layer < graph.layers.len())
    }
}
