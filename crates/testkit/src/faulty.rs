//! A backend with faults: it computes as another one does, and fails or errs when it is told to.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::SeqCst};

use strata_backend::{
    Backend, BackendError, Buffer, Build, Checkpoint, Counters, Fence, Largest, Op, SeqSlot, Span, Spec,
    WeightData,
};
use strata_plan::{Arena, Limits, Plan};
use strata_residency::{ExpertStore, LayerSource};

/// When a backend fails, and what it was asked for so far. Ops and reads are counted from 1; 0 is never.
#[derive(Debug, Default)]
pub struct Faults {
    /// Ops submitted.
    pub ops: AtomicU64,
    /// The op that fails.
    pub fails: AtomicU64,
    /// Whether everything fails from then on, as on a device whose context is lost.
    pub lasting: AtomicBool,
    /// Reads done.
    pub reads: AtomicU64,
    /// The read whose first value comes back with its last bit flipped.
    pub spoils: AtomicU64,
    /// The read whose first value comes back as NaN.
    pub nans: AtomicU64,
    /// Whether it finds the largest logits itself, as backends with memory of their own do.
    pub finds: AtomicBool,
    /// Rows whose largest logits it found.
    pub found: AtomicU64,
}

impl Faults {
    /// Fails at the op after the next `ops`, once or from then on.
    pub fn fail_after(&self, ops: u64, lasting: bool) {
        self.lasting.store(lasting, SeqCst);
        self.fails.store(self.ops.load(SeqCst) + ops + 1, SeqCst);
    }

    /// Computes again.
    pub fn heal(&self) {
        self.fails.store(0, SeqCst);
    }

    fn lost(&self) -> Result<(), BackendError> {
        let (fails, ops) = (self.fails.load(SeqCst), self.ops.load(SeqCst));
        if fails > 0 && ops >= fails && self.lasting.load(SeqCst) { Err(failure()) } else { Ok(()) }
    }
}

/// What the faulty backend says.
fn failure() -> BackendError {
    BackendError::Device { device: "faulty".into(), reason: "it fell off".into() }
}

/// A backend, or one not yet built, with faults.
pub struct Faulty<T>(pub T, pub Arc<Faults>);

impl<B: Build> Build for Faulty<B> {
    type Described = B::Described;

    fn window(&self) -> usize {
        self.0.window()
    }

    fn device_limits(&self) -> Option<Limits> {
        self.0.device_limits()
    }

    fn describe(
        &self,
        spec: &Spec,
        weights: &[WeightData],
        experts: &[(u16, LayerSource)],
        plan: &mut Plan,
    ) -> Result<Self::Described, BackendError> {
        self.0.describe(spec, weights, experts, plan)
    }

    fn build(
        self,
        spec: Spec,
        described: Self::Described,
        arena: Arena,
        weights: Vec<WeightData>,
        store: Arc<ExpertStore>,
    ) -> Result<Box<dyn Backend>, BackendError> {
        Ok(Box::new(Faulty(self.0.build(spec, described, arena, weights, store)?, self.1)))
    }
}

impl Backend for Faulty<Box<dyn Backend>> {
    fn name(&self) -> String {
        self.0.name()
    }

    fn begin_step(&mut self) {
        self.0.begin_step();
    }

    fn end_step(&mut self) {
        self.0.end_step();
    }

    fn submit(&mut self, op: &Op<'_>) -> Result<(), BackendError> {
        let at = self.1.ops.fetch_add(1, SeqCst) + 1;
        if at == self.1.fails.load(SeqCst) {
            return Err(failure());
        }
        self.1.lost()?;
        self.0.submit(op)
    }

    fn fence(&mut self) -> Result<Fence, BackendError> {
        self.0.fence()
    }

    fn wait(&mut self, fence: Fence) -> Result<(), BackendError> {
        self.1.lost()?;
        self.0.wait(fence)
    }

    fn read(&mut self, buffer: Buffer, first: usize, out: &mut [f32]) -> Result<(), BackendError> {
        self.1.lost()?;
        self.0.read(buffer, first, out)?;
        let at = self.1.reads.fetch_add(1, SeqCst) + 1;
        if at == self.1.spoils.load(SeqCst) {
            out[0] = f32::from_bits(out[0].to_bits() ^ 1);
        }
        if at == self.1.nans.load(SeqCst) {
            out[0] = f32::NAN;
        }
        Ok(())
    }

    fn largest(
        &mut self,
        buffer: Buffer,
        wanted: Largest<'_>,
        out: &mut [(u32, f32)],
        masses: &mut [u64],
    ) -> Result<bool, BackendError> {
        self.1.lost()?;
        if !self.1.finds.load(SeqCst) {
            return self.0.largest(buffer, wanted, out, masses);
        }
        let mut logits = vec![0.0; wanted.rows.len() * wanted.width];
        self.0.read(buffer, 0, &mut logits)?;
        wanted.find(&logits, out, masses);
        self.1.found.fetch_add(wanted.rows.len() as u64, SeqCst);
        Ok(true)
    }

    fn commit(&mut self, spans: &[Span]) -> Result<(), BackendError> {
        self.1.lost()?;
        self.0.commit(spans)
    }

    fn clear(&mut self, slot: SeqSlot) -> Result<(), BackendError> {
        self.1.lost()?;
        self.0.clear(slot)
    }

    fn fork(&mut self, from: SeqSlot, to: SeqSlot, tokens: usize) -> Result<(), BackendError> {
        self.1.lost()?;
        self.0.fork(from, to, tokens)
    }

    fn restore(&mut self, from: Checkpoint, slot: SeqSlot) -> Result<(), BackendError> {
        self.1.lost()?;
        self.0.restore(from, slot)
    }

    fn export(&mut self, slot: SeqSlot, tokens: usize, out: &mut Vec<u8>) -> Result<(), BackendError> {
        self.1.lost()?;
        self.0.export(slot, tokens, out)
    }

    fn import(&mut self, slot: SeqSlot, tokens: usize, bytes: &[u8]) -> Result<(), BackendError> {
        self.1.lost()?;
        self.0.import(slot, tokens, bytes)
    }

    fn take_counters(&mut self) -> Counters {
        self.0.take_counters()
    }
}
