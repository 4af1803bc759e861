//! The engine's face: sequences are opened, given tokens, and stepped until their answers are done.
//!
//! Owns the order of windows and what each sequence holds; knows no op (the graph does) and no byte (the backend does).
//!
//! Invariant: a sequence's `tokens` are exactly those whose state is committed in the backend.

use std::sync::Arc;
use std::time::{Duration, Instant};

use strata_backend::{Backend, Buffer, Checkpoint, Counters, Cut, SeqSlot, Spec, Window};
use strata_model::Model;
use strata_model::ngram::ReadAhead;
use strata_plan::Plan;
use strata_residency::ExpertStore;

use crate::budget::Keeper;
use crate::choose::Found;
use crate::error::EngineError;
use crate::event::{Event, Reason, Request, SeqId};
use crate::fault::finite;
use crate::flight::{Flight, Lane, Machine, Passing, Probe, rows_of_next};
use crate::graph::{Graph, Run, Work};
use crate::lookup::Lookup;
use crate::sampling::{Sampler, Scratch};
use crate::sequence::{Canceller, Sequence, Task, common_prefix};
use crate::snapshot::{self, Binding};

/// The engine's activation buffers, as indices into [`Spec::buffers`].
#[derive(Debug, Clone, Copy)]
pub(crate) struct Buffers {
    /// The residual of a prompt window.
    pub prompt: Buffer,
    /// The residual of a decode window, so that it can pass a prompt window that pauses.
    pub decode: Buffer,
    /// The draft block's residual.
    pub draft: Option<Buffer>,
    pub work: Work,
    /// Rows of the logits buffer.
    pub logit_rows: usize,
}

/// Which logits [`Engine::forward`] hands over.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Wants {
    /// None.
    Nothing,
    /// The last token's.
    Last,
    /// Every token's.
    All,
    /// Those of the draft block for every token whose successor is among the tokens given. The sequence must be empty: the
    /// block's own cache has to hold every token.
    Draft,
}

/// Takes logits: the token's index among those given, and its row.
pub type LogitSink<'s> = dyn FnMut(usize, &[f32]) + 's;

/// Takes logits inside: the window's row, and its logits.
type RowSink<'s> = dyn FnMut(u32, &[f32]) -> Result<(), EngineError> + 's;

/// The tokens that a sequence holds.
fn held(sequences: &[Option<Sequence>], slot: usize) -> &[u32] {
    sequences[slot].as_ref().map_or(&[], |sequence| &sequence.tokens)
}

/// Runs one model.
pub struct Engine {
    pub(crate) model: Arc<Model>,
    pub(crate) graph: Graph,
    pub(crate) spec: Spec,
    pub(crate) plan: Plan,
    pub(crate) buffers: Buffers,
    pub(crate) machine: Machine,
    pub(crate) store: Arc<ExpertStore>,
    /// Writes down what was learned of experts' use, at the end.
    pub(crate) _keeper: Option<Keeper>,
    pub(crate) lookup: Lookup,
    pub(crate) sequences: Vec<Option<Sequence>>,
    pub(crate) epochs: u32,
    pub(crate) free: Vec<Checkpoint>,
    pub(crate) reading: Option<Flight>,
    /// How long a prompt window may go on while other sequences wait for their next token.
    pub(crate) prompt_slice: Duration,
    pub(crate) logits: Vec<f32>,
    pub(crate) found: Found,
    pub(crate) scratch: Scratch,
    pub(crate) binding: Option<Binding>,
}

impl Engine {
    /// The model.
    pub fn model(&self) -> &Arc<Model> {
        &self.model
    }

    /// What was planned, and allocated.
    pub fn planned(&self) -> &Plan {
        &self.plan
    }

    /// Tokens a sequence may have.
    pub fn context(&self) -> usize {
        self.spec.context
    }

    /// Rows of a prompt window.
    pub fn window(&self) -> usize {
        self.spec.window
    }

    /// The backend's name.
    pub fn backend(&self) -> String {
        self.machine.backend.name()
    }

    /// Time and bytes per op family since the last call.
    pub fn take_counters(&mut self) -> Counters {
        self.machine.backend.take_counters()
    }

    /// Bytes of the device's own memory: as planned, and as the device counts what was taken since before the model was there.
    pub fn device_bytes(&self) -> Option<(u64, u64)> {
        Some((self.plan.device_bytes() as u64, self.machine.backend.device_bytes()?))
    }

    /// What became of the n-gram rows that were asked for ahead, if the model has a table.
    pub fn read_ahead(&self) -> Option<ReadAhead> {
        self.lookup.read_ahead()
    }

    /// Watches every op.
    pub fn set_probe(&mut self, probe: Option<Probe>) {
        self.machine.probe = probe;
    }

    /// How long a prompt window may go on while other sequences wait for their next token, before it pauses at the next layer
    /// boundary. Bits don't depend on it.
    pub fn set_prompt_slice(&mut self, slice: Duration) {
        self.prompt_slice = slice;
    }

    /// The backend, between windows: for tests and tools that look at state.
    pub fn backend_mut(&mut self) -> &mut dyn Backend {
        &mut *self.machine.backend
    }

    // ---- sequences

    /// Opens an empty sequence.
    pub fn open(&mut self) -> Result<SeqId, EngineError> {
        let slot = self.vacant()?;
        self.machine.backend.clear(SeqSlot(slot as u32))?;
        Ok(self.occupy(slot, Vec::new()))
    }

    /// Opens a sequence that holds what `from` holds.
    pub fn fork(&mut self, from: SeqId) -> Result<SeqId, EngineError> {
        let source = self.index(from)?;
        let tokens = self.sequence(source).tokens.clone();
        let slot = self.vacant()?;
        self.machine.backend.fork(SeqSlot(source as u32), SeqSlot(slot as u32), tokens.len())?;
        Ok(self.occupy(slot, tokens))
    }

    /// Closes a sequence, whatever it is doing.
    pub fn close(&mut self, seq: SeqId) -> Result<(), EngineError> {
        let slot = self.index(seq)?;
        self.ground(slot);
        if let Some(sequence) = self.sequences[slot].take() {
            self.free.extend(sequence.checkpoints.into_iter().map(|(_, checkpoint)| checkpoint));
        }
        Ok(())
    }

    /// The tokens that a sequence holds.
    pub fn tokens(&self, seq: SeqId) -> Result<&[u32], EngineError> {
        Ok(&self.sequence(self.index(seq)?).tokens)
    }

    /// What ends the sequence's answers from another thread.
    pub fn canceller(&self, seq: SeqId) -> Result<Canceller, EngineError> {
        Ok(self.sequence(self.index(seq)?).canceller.clone())
    }

    /// Brings a sequence back to a prefix of `tokens`, as long as can be had without reading again: all it holds, a
    /// checkpoint, or nothing. Returns the prefix's length, which is below that of `tokens`: something is left to read.
    pub fn rewind(&mut self, seq: SeqId, tokens: &[u32]) -> Result<usize, EngineError> {
        let slot = self.idle(seq)?;
        let sequence = self.sequence(slot);
        let held = sequence.tokens.len();
        let common = common_prefix(&sequence.tokens, tokens).min(tokens.len().saturating_sub(1));
        if common == held {
            return Ok(held);
        }
        let at = sequence.checkpoints.iter().rposition(|&(length, _)| length <= common);
        let kept = at.map_or(0, |at| at + 1);
        let length = match at.map(|at| sequence.checkpoints[at]) {
            Some((length, checkpoint)) => {
                self.machine.backend.restore(checkpoint, SeqSlot(slot as u32))?;
                length
            }
            None => {
                self.machine.backend.clear(SeqSlot(slot as u32))?;
                0
            }
        };
        let sequence = self.sequence_mut(slot);
        sequence.tokens.truncate(length);
        let stale: Vec<_> = sequence.checkpoints.drain(kept..).map(|(_, checkpoint)| checkpoint).collect();
        self.free.extend(stale);
        Ok(length)
    }

    /// The byte form of a sequence: its tokens and state, bound to the model and to how keys and values are stored.
    pub fn save(&mut self, seq: SeqId) -> Result<Vec<u8>, EngineError> {
        let slot = self.idle(seq)?;
        let binding = self.binding()?;
        let tokens = self.sequence(slot).tokens.clone();
        let backend = &mut self.machine.backend;
        Ok(snapshot::write(binding, &tokens, |out| backend.export(SeqSlot(slot as u32), tokens.len(), out))?)
    }

    /// Opens a sequence from its byte form.
    pub fn load_sequence(&mut self, bytes: &[u8]) -> Result<SeqId, EngineError> {
        let binding = self.binding()?;
        let saved = snapshot::read(binding, bytes)?;
        self.check_tokens(&saved.tokens)?;
        self.check_length(saved.tokens.len())?;
        let slot = self.vacant()?;
        self.machine.backend.import(SeqSlot(slot as u32), saved.tokens.len(), saved.state)?;
        Ok(self.occupy(slot, saved.tokens))
    }

    // ---- answers

    /// Gives a sequence tokens to read and answer.
    pub fn submit(&mut self, seq: SeqId, request: Request) -> Result<(), EngineError> {
        let slot = self.idle(seq)?;
        if request.prompt.is_empty() {
            return Err(EngineError::EmptyPrompt);
        }
        self.check_tokens(&request.prompt)?;
        request.sampling.validate(self.spec.shape.vocab)?;
        let held = self.sequence(slot).tokens.len();
        self.check_length(held + request.prompt.len())?;
        let mut checkpoints = request.checkpoints;
        checkpoints.sort_unstable();
        checkpoints.dedup();
        checkpoints.retain(|&length| length > held && length <= held + request.prompt.len());

        let sequence = self.sequence_mut(slot);
        let mut all = sequence.tokens.clone();
        all.extend_from_slice(&request.prompt);
        sequence.canceller.renew();
        sequence.task = Some(Task {
            sampler: Sampler::new(request.sampling, &all),
            prompt: request.prompt,
            read: 0,
            checkpoints,
            left: request.max_tokens.unwrap_or(usize::MAX),
            stop: request.stop,
            constraint: request.constraint,
            next: None,
        });
        Ok(())
    }

    /// Whether any sequence has something to do.
    pub fn is_busy(&self) -> bool {
        self.sequences.iter().flatten().any(|s| s.task.is_some())
    }

    /// Does a bounded piece of work: at most one decode window for all answering sequences, and as much of a prompt
    /// window as fits beside it. Returns at once when there is nothing to do. A window that fails ends its sequences' answers
    /// ([`Reason::Failed`]), nothing else.
    pub fn step(&mut self) -> Vec<Event> {
        let mut events = Vec::new();
        self.drop_cancelled(&mut events);
        let decoding = self.slots_where(|task| task.next.is_some());
        if !decoding.is_empty() {
            self.decode(&decoding, &mut events);
        }
        self.read_prompts(&mut events);
        events
    }

    /// Reads tokens into a sequence and hands over logits, window by window. On an error, or when cancelled, the sequence
    /// holds the windows read so far.
    pub fn forward(
        &mut self,
        seq: SeqId,
        tokens: &[u32],
        wants: Wants,
        sink: &mut LogitSink<'_>,
    ) -> Result<(), EngineError> {
        let slot = self.idle(seq)?;
        if tokens.is_empty() {
            return Err(EngineError::EmptyPrompt);
        }
        self.check_tokens(tokens)?;
        self.check_length(self.sequence(slot).tokens.len() + tokens.len())?;
        if wants == Wants::Draft {
            if self.graph.draft.is_none() {
                let why = if self.model.mtp.is_some() { "it was not asked for" } else { "the file has none" };
                return Err(EngineError::NoDraft(why.into()));
            }
            if !self.sequence(slot).tokens.is_empty() {
                return Err(EngineError::DraftGap);
            }
        }
        // A paused prompt window lives in the buffer that this one needs. It is read again.
        if let Some(paused) = self.reading.take() {
            self.abort(paused);
        }
        self.sequence(slot).canceller.renew();
        let mut first = 0;
        while first < tokens.len() {
            let part = &tokens[first..first + rows_of_next(tokens.len() - first, self.spec.window)];
            let flight = self.take_off(&[(slot, part)], Lane::Prompt)?;
            let next = &tokens[first..tokens.len().min(first + part.len() + self.spec.window)];
            self.lookup.ahead(&self.model, held(&self.sequences, slot), next, part.len());
            self.in_step(|engine| engine.read_window(flight, tokens, first, wants, sink))?;
            first += part.len();
        }
        Ok(())
    }

    /// Takes a window of one sequence, which begins with `tokens[first]`, through the layers, and hands over its logits.
    fn read_window(
        &mut self,
        mut flight: Flight,
        tokens: &[u32],
        first: usize,
        wants: Wants,
        sink: &mut LogitSink<'_>,
    ) -> Result<(), EngineError> {
        while flight.advance_in_pace(&self.graph, &mut self.lookup, &mut self.machine)? {
            if self.sequence(flight.slots[0]).canceller.is_cancelled() {
                return Err(EngineError::Cancelled);
            }
        }
        let end = first + flight.window.rows();
        let rows: Vec<u32> = match wants {
            Wants::All => (0..(end - first) as u32).collect(),
            Wants::Last if end == tokens.len() => vec![(end - first) as u32 - 1],
            _ => Vec::new(),
        };
        let mut broken = None;
        let mut give = |row: u32, logits: &[f32]| {
            if broken.is_none() && finite(logits) {
                sink(first + row as usize, logits);
            } else {
                broken.get_or_insert(row as usize);
            }
            Ok(())
        };
        self.logits_of(&flight, &rows, &mut give)?;
        let last = flight.window.rows() - 1;
        if rows.is_empty() && !self.broken_ends(&flight, 0..1)?.is_empty() {
            broken = Some(last);
        }
        if let Some(row) = broken {
            return Err(self.blame(&flight, 0, row));
        }
        if wants == Wants::Draft {
            let mut give = |row: u32, logits: &[f32]| {
                if broken.is_none() && finite(logits) {
                    sink(first + row as usize, logits);
                } else {
                    broken.get_or_insert(row as usize);
                }
                Ok(())
            };
            self.draft(&flight, &tokens[first + 1..tokens.len().min(end + 1)], &mut give)?;
            if let Some(row) = broken {
                return Err(self.blame_draft(flight.window.spans[0].start + row));
            }
        }
        self.land(flight, &[])
    }

    // ---- windows

    /// Does work whose ops follow each other closely. What a window must read from the disk was read when it took off.
    fn in_step<T>(&mut self, work: impl FnOnce(&mut Self) -> T) -> T {
        self.machine.backend.begin_step();
        let done = work(self);
        self.machine.backend.end_step();
        done
    }

    /// Prepares a window of the given sequences' next tokens.
    fn take_off(&mut self, parts: &[(usize, &[u32])], lane: Lane) -> Result<Flight, EngineError> {
        self.store.check()?;
        let mut window = Window::default();
        for &(slot, tokens) in parts {
            window.push(SeqSlot(slot as u32), self.sequence(slot).tokens.len(), tokens);
        }
        let histories = parts.iter().map(|&(slot, tokens)| (held(&self.sequences, slot), tokens));
        self.lookup.ask(&self.model, lane, histories);
        let slots = parts.iter().map(|&(slot, _)| slot).collect();
        let x = match lane {
            Lane::Prompt => self.buffers.prompt,
            Lane::Decode => self.buffers.decode,
        };
        Ok(Flight::new(window, slots, lane, x, self.buffers.work))
    }

    /// Commits a window whose last layer is submitted, once all of it is done, but for the spans of the `broken` slots: what a device
    /// fails to compute, and what isn't finite, is never a sequence's own.
    fn land(&mut self, mut flight: Flight, broken: &[usize]) -> Result<(), EngineError> {
        if !broken.is_empty() {
            let mut sound = flight.slots.iter().map(|slot| !broken.contains(slot));
            flight.window.spans.retain(|_| sound.next() == Some(true));
            flight.slots.retain(|slot| !broken.contains(slot));
            let (kept, given_up) = flight.passing.into_iter().partition(|p| !broken.contains(&p.slot));
            flight.passing = kept;
            self.free.extend(Vec::<Passing>::into_iter(given_up).map(|p| p.checkpoint));
        }
        let backend = &mut self.machine.backend;
        let done = backend.fence().and_then(|last| backend.wait(last));
        if let Err(error) = done.and_then(|()| backend.commit(&flight.window.spans)) {
            self.abort(flight);
            return Err(error.into());
        }
        for (span, &slot) in flight.window.spans.iter().zip(&flight.slots) {
            let tokens = &flight.window.tokens[span.row..span.row + span.rows];
            self.sequence_mut(slot).tokens.extend_from_slice(tokens);
        }
        for Passing { slot, tokens, checkpoint } in flight.passing {
            self.sequence_mut(slot).checkpoints.push((tokens, checkpoint));
        }
        Ok(())
    }

    /// Gives up a window: nothing of it was committed.
    fn abort(&mut self, flight: Flight) {
        self.free.extend(flight.passing.into_iter().map(|p| p.checkpoint));
    }

    /// Logits of some rows after the last layer, as many at a time as the buffer holds.
    fn logits_of(
        &mut self,
        flight: &Flight,
        rows: &[u32],
        sink: &mut RowSink<'_>,
    ) -> Result<(), EngineError> {
        for rows in rows.chunks(self.buffers.logit_rows) {
            self.graph.head(rows, flight.run(&self.lookup), &mut |op| self.machine.submit(op))?;
            self.hand_over(rows, sink)?;
        }
        Ok(())
    }

    fn hand_over(&mut self, rows: &[u32], sink: &mut RowSink<'_>) -> Result<(), EngineError> {
        let vocab = self.spec.shape.vocab;
        let floats = &mut self.logits[..rows.len() * vocab];
        self.machine.backend.read(self.buffers.work.logits, 0, floats)?;
        for (&row, logits) in rows.iter().zip(floats.chunks_exact(vocab)) {
            sink(row, logits)?;
        }
        Ok(())
    }

    /// The draft block over a window of one sequence; `next` holds the token after each row, for the first rows at least.
    fn draft(&mut self, flight: &Flight, next: &[u32], sink: &mut RowSink<'_>) -> Result<(), EngineError> {
        let (Some(draft), Some(x)) = (&self.graph.draft, self.buffers.draft) else { return Ok(()) };
        if next.is_empty() {
            return Ok(());
        }
        let mut window = Window::default();
        let span = &flight.window.spans[0];
        window.push(span.slot, span.start, &flight.window.tokens[..next.len()]);
        // The block has no n-grams of its own.
        let run = Run { window: &window, x, table_rows: &[], work: self.buffers.work };
        draft.layer(flight.x, next, run, &mut |op| self.machine.submit(op))?;
        let rows: Vec<u32> = (0..next.len() as u32).collect();
        for rows in rows.chunks(self.buffers.logit_rows) {
            let Some(draft) = &self.graph.draft else { break };
            draft.head(rows, run, &mut |op| self.machine.submit(op))?;
            self.hand_over(rows, sink)?;
        }
        Ok(())
    }

    /// One token for each of the sequences.
    fn decode(&mut self, slots: &[usize], events: &mut Vec<Event>) {
        let tokens: Vec<(usize, [u32; 1])> = slots
            .iter()
            .filter_map(|&slot| self.sequence(slot).task.as_ref()?.next.map(|token| (slot, [token])))
            .collect();
        let parts: Vec<(usize, &[u32])> = tokens.iter().map(|(slot, token)| (*slot, &token[..])).collect();
        let done = self.take_off(&parts, Lane::Decode).and_then(|mut flight| {
            self.in_step(|engine| {
                while flight.advance(&engine.graph, &mut engine.lookup, &mut engine.machine)? {}
                engine.finish(flight, events)
            })
        });
        if let Err(error) = done {
            self.fail(slots, &error, events);
        }
    }

    /// Goes on with the prompt window in flight, or starts the next one.
    fn read_prompts(&mut self, events: &mut Vec<Event>) {
        let started = Instant::now();
        let flight = match self.reading.take() {
            Some(flight) => Ok(Some(flight)),
            None => self.next_prompt_window(),
        };
        match flight {
            Ok(None) => {}
            Ok(Some(flight)) => self.in_step(|engine| engine.read_on(flight, started, events)),
            Err(error) => {
                let slots = self.slots_where(|task| task.next.is_none());
                self.fail(&slots, &error, events);
            }
        }
    }

    /// Takes a prompt window through the layers, at most until its time since `started` is up.
    fn read_on(&mut self, mut flight: Flight, started: Instant, events: &mut Vec<Event>) {
        loop {
            if flight.slots.iter().any(|&slot| self.sequence(slot).canceller.is_cancelled()) {
                self.abort(flight);
                return self.drop_cancelled(events);
            }
            match flight.advance_in_pace(&self.graph, &mut self.lookup, &mut self.machine) {
                Ok(true) => {
                    let waiting = self
                        .sequences
                        .iter()
                        .flatten()
                        .any(|s| s.task.as_ref().is_some_and(|task| task.next.is_some()));
                    if waiting && started.elapsed() >= self.prompt_slice {
                        self.reading = Some(flight);
                        return;
                    }
                }
                Ok(false) => break,
                Err(error) => {
                    let slots = flight.slots.clone();
                    self.abort(flight);
                    return self.fail(&slots, &error, events);
                }
            }
        }
        let slots = flight.slots.clone();
        if let Err(error) = self.finish(flight, events) {
            self.fail(&slots, &error, events);
        }
    }

    /// The next rows of the prompts, first come first served by slot.
    fn next_prompt_window(&mut self) -> Result<Option<Flight>, EngineError> {
        let mut parts: Vec<(usize, Vec<u32>)> = Vec::new();
        let mut room = self.spec.window;
        for slot in self.slots_where(|task| task.next.is_none()) {
            let Some(task) = &self.sequence(slot).task else { continue };
            let rows = room.min(rows_of_next(task.prompt.len() - task.read, self.spec.window));
            if rows > 0 {
                parts.push((slot, task.prompt[task.read..task.read + rows].to_vec()));
                room -= rows;
            }
        }
        if parts.is_empty() {
            return Ok(None);
        }
        let borrowed: Vec<(usize, &[u32])> = parts.iter().map(|(slot, part)| (*slot, &part[..])).collect();
        let mut flight = self.take_off(&borrowed, Lane::Prompt)?;
        for at in 0..flight.slots.len() {
            self.cut(&mut flight, at);
        }
        for (slot, part) in &parts {
            let Some(Sequence { task: Some(task), tokens, .. }) = &self.sequences[*slot] else { continue };
            let next = &task.prompt[task.read..];
            let next = &next[..next.len().min(part.len() + self.spec.window)];
            self.lookup.ahead(&self.model, tokens, next, part.len());
        }
        Ok(Some(flight))
    }

    /// Adds the checkpoints that the span's sequence wants inside it.
    fn cut(&mut self, flight: &mut Flight, at: usize) {
        let slot = flight.slots[at];
        let span = &flight.window.spans[at];
        let (start, end) = (span.start, span.start + span.rows);
        let Some(task) = &self.sequence(slot).task else { return };
        let wanted: Vec<usize> =
            task.checkpoints.iter().copied().filter(|&length| length > start && length <= end).collect();
        for tokens in wanted {
            let Some(checkpoint) = self.free_checkpoint(slot) else { return };
            flight.passing.push(Passing { slot, tokens, checkpoint });
            flight.window.spans[at].cuts.push(Cut { after: tokens - start, to: checkpoint });
        }
    }

    /// A free checkpoint, or the oldest that the sequence keeps.
    fn free_checkpoint(&mut self, slot: usize) -> Option<Checkpoint> {
        self.free.pop().or_else(|| {
            let kept = &mut self.sequence_mut(slot).checkpoints;
            (!kept.is_empty()).then(|| kept.remove(0).1)
        })
    }

    /// Takes a window's last rows to the head, commits, and chooses tokens.
    fn finish(&mut self, flight: Flight, events: &mut Vec<Event>) -> Result<(), EngineError> {
        // Rows that end a prompt, or are decoded: the others want no logits. At most one per sequence, so they fit the buffer.
        let mut ends = Vec::new();
        for (span, &slot) in flight.window.spans.iter().zip(&flight.slots) {
            let Some(task) = &self.sequence(slot).task else { continue };
            if task.next.is_some() || task.read + span.rows == task.prompt.len() {
                ends.push(((span.row + span.rows - 1) as u32, slot));
            }
        }
        let broken = match self.broken_spans(&flight, &ends) {
            Ok(broken) => broken,
            Err(error) => {
                self.abort(flight);
                return Err(error);
            }
        };
        let spans = flight.window.spans.clone();
        let slots = flight.slots.clone();
        let (broken, why): (Vec<usize>, Vec<EngineError>) = broken.into_iter().unzip();
        self.land(flight, &broken)?;
        for (slot, why) in broken.into_iter().zip(&why) {
            self.fail(&[slot], why, events);
        }
        for (span, &slot) in spans.iter().zip(&slots) {
            let seq = self.id(slot);
            let Some(task) = &mut self.sequence_mut(slot).task else { continue };
            if task.next.take().is_none() {
                task.read += span.rows;
                events.push(Event::Read { seq, read: task.read, of: task.prompt.len() });
            }
        }
        self.choose_all(&ends, events)
    }

    /// Takes the rows in `ends` to the head; which slots of the window have a last row that isn't finite, and why.
    fn broken_spans(
        &mut self,
        flight: &Flight,
        ends: &[(u32, usize)],
    ) -> Result<Vec<(usize, EngineError)>, EngineError> {
        let rows: Vec<u32> = ends.iter().map(|&(row, _)| row).collect();
        let spans = &flight.window.spans;
        let end = |at: usize| (spans[at].row + spans[at].rows - 1) as u32;
        let silent = (0..spans.len()).filter(|&at| !rows.contains(&end(at)));
        // Before the logits, which stay in the same place.
        let mut at = self.broken_ends(flight, silent)?;
        let mut broken = Vec::new();
        self.found.clear();
        if !rows.is_empty() {
            self.graph.head(&rows, flight.run(&self.lookup), &mut |op| self.machine.submit(op))?;
            self.find(ends)?;
        }
        if let Some(found) = self.found.broken() {
            broken.extend(rows.iter().zip(found).filter(|(_, broken)| *broken).map(|(row, _)| *row));
        } else if !rows.is_empty() {
            self.hand_over(&rows, &mut |row, logits| {
                if !finite(logits) {
                    broken.push(row);
                }
                Ok(())
            })?;
        }
        at.extend((0..spans.len()).filter(|&at| broken.contains(&end(at))));
        Ok(at.into_iter().map(|at| (flight.slots[at], self.blame(flight, at, end(at) as usize))).collect())
    }

    pub(crate) fn end(&mut self, slot: usize, reason: Reason, events: &mut Vec<Event>) {
        let seq = self.id(slot);
        self.sequence_mut(slot).task = None;
        events.push(Event::Done { seq, reason });
    }

    fn fail(&mut self, slots: &[usize], error: &EngineError, events: &mut Vec<Event>) {
        for &slot in slots {
            if self.sequences[slot].as_ref().is_some_and(|s| s.task.is_some()) {
                self.end(slot, Reason::Failed(error.to_string()), events);
            }
        }
    }

    fn drop_cancelled(&mut self, events: &mut Vec<Event>) {
        for slot in self.slots_where(|_| true) {
            if self.sequence(slot).canceller.is_cancelled() {
                self.ground(slot);
                self.end(slot, Reason::Cancelled, events);
            }
        }
    }

    /// Gives up the prompt window in flight if the sequence is part of it. The others' rows are read again.
    fn ground(&mut self, slot: usize) {
        if let Some(flight) = self.reading.take_if(|flight| flight.slots.contains(&slot)) {
            self.abort(flight);
        }
    }

    // ---- lookups

    fn slots_where(&self, pick: impl Fn(&Task) -> bool) -> Vec<usize> {
        let task = |slot: &usize| self.sequences[*slot].as_ref().and_then(|s| s.task.as_ref());
        (0..self.sequences.len()).filter(|slot| task(slot).is_some_and(&pick)).collect()
    }

    fn vacant(&self) -> Result<usize, EngineError> {
        let slot = self.sequences.iter().position(Option::is_none);
        slot.ok_or(EngineError::NoSequence(self.sequences.len()))
    }

    fn occupy(&mut self, slot: usize, tokens: Vec<u32>) -> SeqId {
        self.epochs += 1;
        self.sequences[slot] = Some(Sequence::new(self.epochs, tokens));
        self.id(slot)
    }

    pub(crate) fn id(&self, slot: usize) -> SeqId {
        SeqId { slot: slot as u32, epoch: self.sequence(slot).epoch }
    }

    fn index(&self, seq: SeqId) -> Result<usize, EngineError> {
        let slot = seq.slot as usize;
        let held = self.sequences.get(slot).and_then(Option::as_ref);
        held.filter(|s| s.epoch == seq.epoch).map(|_| slot).ok_or(EngineError::Closed)
    }

    fn idle(&self, seq: SeqId) -> Result<usize, EngineError> {
        let slot = self.index(seq)?;
        if self.sequence(slot).task.is_some() { Err(EngineError::Busy) } else { Ok(slot) }
    }

    /// An occupied slot's sequence.
    pub(crate) fn sequence(&self, slot: usize) -> &Sequence {
        self.sequences[slot].as_ref().expect("slots in use come from `index` or `slots_where`")
    }

    pub(crate) fn sequence_mut(&mut self, slot: usize) -> &mut Sequence {
        self.sequences[slot].as_mut().expect("slots in use come from `index` or `slots_where`")
    }

    fn check_tokens(&self, tokens: &[u32]) -> Result<(), EngineError> {
        let vocab = self.spec.shape.vocab;
        match tokens.iter().find(|&&id| id as usize >= vocab) {
            Some(&id) => Err(EngineError::TokenRange { id, vocab }),
            None => Ok(()),
        }
    }

    fn check_length(&self, wanted: usize) -> Result<(), EngineError> {
        let context = self.spec.context;
        if wanted <= context {
            return Ok(());
        }
        Err(EngineError::TooLong { wanted, context, model: self.model.hyper.context })
    }

    fn binding(&mut self) -> Result<Binding, EngineError> {
        if let Some(binding) = self.binding {
            return Ok(binding);
        }
        let binding = Binding::of(&self.model, &self.spec)?;
        self.binding = Some(binding);
        Ok(binding)
    }
}
