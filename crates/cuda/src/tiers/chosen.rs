//! Which experts windows chose, brought to the host with what it waits for anyway.
//!
//! Owns the places on the device where routing leaves its choices layer by layer, and knows from the ops how far a window has come
//! ([`Way`]). A short window's choices are `[layers][rows][used]` experts, copied behind its last op before somebody waits for its results; a
//! wide one's are `[layers][experts]`, where each expert's places end among the window's pairs, copied when it is committed. Does not know
//! what the choices are good for.
//!
//! Only where experts are beside the GPU: elsewhere nothing is kept and nothing copied.

use strata_backend::{Buffer, Layer, Op, Span, Spec};
use strata_plan::{Category, Place, Plan, Region};
use strata_residency::ExpertId;

use crate::driver::{Context, DeviceSlice, DriverError, PinnedMemory, Stream};
use crate::recording::{MOST_ROWS, rows};

/// How far a window has come on its way through the layers, by its ops.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
enum Way {
    /// No window of the kind is known from its first op on.
    #[default]
    Elsewhere,
    /// So many layers have routed it.
    Under(Passed),
    /// It came to the head.
    Through(Passed),
    /// Its choices are on their way to the host.
    Coming(Passed),
}

/// What is known of a window.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Passed {
    /// Its residual, by which its ops are told from those of a window that it passes.
    x: Buffer,
    rows: usize,
    layers: usize,
    /// Whether each row is a sequence's next token.
    answers: bool,
}

impl Way {
    /// The window's first op came.
    fn embed(&mut self, x: Buffer, rows: usize) {
        *self = Way::Under(Passed { x, rows, layers: 0, answers: true });
    }

    fn spans(&mut self, spans: &[Span]) {
        if let Way::Under(passed) = self {
            passed.answers &= spans.len() == passed.rows;
        }
    }

    /// A layer routes so many rows: the next one of this window, or of another that has overtaken it.
    fn route(&mut self, layer: Layer, rows: usize) {
        match self {
            Way::Under(passed) if (passed.layers, passed.rows) == (usize::from(layer.0), rows) => {
                passed.layers += 1;
            }
            // What is known to be over is left alone: the draft block routes too.
            Way::Through(_) | Way::Coming(_) => {}
            _ => *self = Way::Elsewhere,
        }
    }

    fn head(&mut self, of: Buffer) {
        if let Way::Under(passed) = *self
            && passed.x == of
        {
            *self = Way::Through(passed);
        }
    }

    fn leave(&mut self, of: Buffer) {
        if let Way::Under(passed) | Way::Through(passed) | Way::Coming(passed) = *self
            && passed.x == of
        {
            *self = Way::Elsewhere;
        }
    }
}

/// The windows under way: a short one may pass a wide one.
#[derive(Debug, Default)]
struct Ways {
    short: Way,
    wide: Way,
    /// Short windows that came to the head since an op of a wide one.
    alone: usize,
}

impl Ways {
    fn see(&mut self, op: &Op<'_>) {
        let wide = rows(op) > MOST_ROWS;
        if wide {
            self.alone = 0;
        }
        let way = if wide { &mut self.wide } else { &mut self.short };
        match *op {
            Op::Embed { tokens, x, .. } => {
                // Its residual is overwritten.
                self.short.leave(x);
                self.wide.leave(x);
                let way = if wide { &mut self.wide } else { &mut self.short };
                way.embed(x, tokens.len());
            }
            Op::Ngram { spans, .. } | Op::Gdn { spans, .. } | Op::Qsa { spans, .. } => way.spans(spans),
            Op::Route { layer, rows, .. } => way.route(layer, rows),
            Op::Head { x, .. } => self.short.head(x),
            // What the draft block routes of a short window lies where the window's own choices do.
            Op::DraftJoin { .. } => self.short = Way::Elsewhere,
            Op::MixerRead { .. }
            | Op::MixerWrite { .. }
            | Op::Group { .. }
            | Op::Experts { .. }
            | Op::Combine { .. } => {}
        }
    }
}

/// What a step chose.
pub(super) struct Step<'c> {
    experts: &'c [u32],
    /// Pairs of a layer.
    pairs: usize,
}

impl<'c> Step<'c> {
    /// For tests of who counts them.
    #[cfg(test)]
    pub(super) fn new(experts: &'c [u32], pairs: usize) -> Step<'c> {
        Step { experts, pairs }
    }

    /// The experts, as often as they were chosen.
    pub(super) fn ids(&self) -> impl Iterator<Item = ExpertId> + '_ {
        let layers = (0u16..).zip(self.experts.chunks_exact(self.pairs));
        layers.flat_map(|(layer, experts)| {
            let known = experts.iter().filter_map(|&expert| u16::try_from(expert).ok());
            known.map(move |expert| ExpertId { layer, expert })
        })
    }
}

/// What a wide window chose.
pub(super) struct Counted<'c> {
    ends: &'c [u32],
    /// Experts of a layer.
    width: usize,
    pub(super) rows: usize,
    /// Whether each row is a sequence's next token.
    pub(super) answers: bool,
}

impl<'c> Counted<'c> {
    /// For tests of who counts them.
    #[cfg(test)]
    pub(super) fn new(ends: &'c [u32], width: usize, rows: usize, answers: bool) -> Counted<'c> {
        Counted { ends, width, rows, answers }
    }

    /// How many rows chose each expert, of those that some did.
    pub(super) fn counts(&self) -> impl Iterator<Item = (ExpertId, u64)> + '_ {
        (0u16..).zip(self.ends.chunks_exact(self.width)).flat_map(|(layer, ends)| {
            let starts = std::iter::once(&0).chain(ends);
            (0u16..).zip(starts.zip(ends)).filter_map(move |(expert, (start, end))| {
                let count = end.saturating_sub(*start);
                (count > 0).then_some((ExpertId { layer, expert }, u64::from(count)))
            })
        })
    }
}

/// Bytes of the device's part.
pub(super) fn device_bytes(spec: &Spec) -> usize {
    let moe = spec.shape.moe;
    4 * spec.layers.len() * (MOST_ROWS * moe.used + moe.experts)
}

/// Adds both parts to the plan.
pub(super) fn describe(spec: &Spec, plan: &mut Plan) -> Region {
    let bytes = device_bytes(spec);
    plan.item(Category::Experts, "experts that were chosen", Place::Heap, bytes as u64);
    plan.device(Category::Experts, "experts that were chosen", bytes)
}

/// The places, and the windows under way.
pub(crate) struct Chosen {
    /// `[layers][rows][used]`, of the short window that was routed last.
    experts: DeviceSlice<u32>,
    /// `[layers][experts]`, of the wide one.
    ends: DeviceSlice<u32>,
    /// Both, as they were brought.
    experts_here: PinnedMemory<u32>,
    ends_here: PinnedMemory<u32>,
    used: usize,
    width: usize,
    ways: Ways,
}

impl Chosen {
    /// Takes the memory.
    pub(super) fn new(context: &Context, spec: &Spec, place: DeviceSlice<u8>) -> Result<Chosen, DriverError> {
        let (moe, layers) = (spec.shape.moe, spec.layers.len());
        let (experts, ends) = (layers * MOST_ROWS * moe.used, layers * moe.experts);
        let all: DeviceSlice<u32> = place.cast();
        Ok(Chosen {
            experts: all.range(0..experts),
            ends: all.range(experts..experts + ends),
            experts_here: PinnedMemory::new(context, experts)?,
            ends_here: PinnedMemory::new(context, ends)?,
            used: moe.used,
            width: moe.experts,
            ways: Ways::default(),
        })
    }

    /// Where a layer's routing of a short window leaves the chosen experts.
    pub(crate) fn experts(&self, layer: Layer, rows: usize) -> Option<DeviceSlice<u32>> {
        let pairs = rows * self.used;
        let first = usize::from(layer.0) * pairs;
        (rows <= MOST_ROWS && first + pairs <= self.experts.len())
            .then(|| self.experts.range(first..first + pairs))
    }

    /// Where a layer's routing of a wide window counts them.
    pub(crate) fn ends(&self, layer: Layer, rows: usize) -> Option<DeviceSlice<u32>> {
        let first = usize::from(layer.0) * self.width;
        (rows > MOST_ROWS && first + self.width <= self.ends.len())
            .then(|| self.ends.range(first..first + self.width))
    }

    /// An op was submitted.
    pub(crate) fn see(&mut self, op: &Op<'_>) {
        self.ways.see(op);
    }

    /// Something of the windows under way failed.
    pub(crate) fn forget(&mut self) {
        (self.ways.short, self.ways.wide) = (Way::Elsewhere, Way::Elsewhere);
    }

    /// Short windows that came to the head since an op of a wide one.
    pub(super) fn alone(&self) -> usize {
        self.ways.alone
    }

    /// Behind all ops that came, and before somebody waits for them: has a short window's choices come, if it is through.
    pub(crate) fn bring(&mut self, stream: &Stream) -> Result<(), DriverError> {
        let Way::Through(passed) = self.ways.short else { return Ok(()) };
        let all = passed.layers * passed.rows * self.used;
        // SAFETY: what comes is looked at after all that is queued was waited for, and the memory is given back behind that too.
        unsafe { stream.queue_download(self.experts.range(0..all), &mut self.experts_here)? };
        self.ways.short = Way::Coming(passed);
        Ok(())
    }

    /// After everything was waited for: what a short window chose, once. A prompt's is none: its rows are many of one sequence.
    pub(super) fn step(&mut self) -> Option<Step<'_>> {
        let Way::Coming(Passed { rows, layers, answers, .. }) = self.ways.short else { return None };
        self.ways.short = Way::Elsewhere;
        self.ways.alone += 1;
        let pairs = rows * self.used;
        (answers && pairs > 0).then(|| Step { experts: &self.experts_here[..layers * pairs], pairs })
    }

    /// A window of so many rows is committed: what it chose, if it is the wide one that is under way. Waits for the copy.
    pub(super) fn committed(
        &mut self,
        rows: usize,
        stream: &Stream,
    ) -> Result<Option<Counted<'_>>, DriverError> {
        if rows <= MOST_ROWS {
            return Ok(None);
        }
        let Way::Under(passed) = std::mem::take(&mut self.ways.wide) else { return Ok(None) };
        if passed.rows != rows {
            return Ok(None);
        }
        let all = passed.layers * self.width;
        stream.fetch(self.ends.range(0..all), &mut self.ends_here)?;
        let ends = &self.ends_here[..all];
        Ok(Some(Counted { ends, width: self.width, rows, answers: passed.answers }))
    }
}

#[cfg(test)]
mod tests {
    use strata_backend::{Buffer, MixerWeights, SeqSlot, Weight};

    use super::*;

    const PROMPT: Buffer = Buffer(0);
    const DECODE: Buffer = Buffer(1);
    const W: Weight = Weight(0);

    fn embed(ways: &mut Ways, x: Buffer, rows: usize) {
        ways.see(&Op::Embed { table: W, tokens: &vec![0; rows], x });
    }

    fn layers(ways: &mut Ways, layers: std::ops::Range<u16>, rows: usize, spans: usize) {
        let weights = strata_backend::GdnWeights {
            qkv: W,
            gate: W,
            conv: W,
            dt_bias: W,
            a: W,
            alpha: W,
            beta: W,
            norm: W,
            out: W,
        };
        let spans: Vec<Span> = (0..spans)
            .map(|at| Span { slot: SeqSlot(at as u32), row: at, rows: rows / spans, start: 3, cuts: vec![] })
            .collect();
        let (u, y) = (Buffer(5), Buffer(6));
        for layer in layers.map(Layer) {
            ways.see(&Op::Gdn { layer, weights, spans: &spans, u, y });
            ways.see(&Op::Route { layer, router: W, rows, u });
        }
    }

    fn head(ways: &mut Ways, x: Buffer) {
        let mixer = MixerWeights { norm: W, down: W, up: W, inject: None };
        ways.see(&Op::Head { mixer, output: W, rows: &[0], x, logits: Buffer(7) });
    }

    fn through(ways: &Ways) -> Option<(usize, usize, bool)> {
        match ways.short {
            Way::Through(Passed { rows, layers, answers, .. }) => Some((rows, layers, answers)),
            _ => None,
        }
    }

    /// Oracle: by hand. A window counts from its first op to the head, as an answer where every row is a sequence's own.
    #[test]
    fn a_step_goes_through_all_layers() {
        let mut ways = Ways::default();
        embed(&mut ways, DECODE, 3);
        layers(&mut ways, 0..4, 3, 3);
        assert_eq!(through(&ways), None);
        head(&mut ways, DECODE);
        assert_eq!(through(&ways), Some((3, 4, true)));
        // A short prompt.
        embed(&mut ways, PROMPT, 6);
        layers(&mut ways, 0..4, 6, 2);
        head(&mut ways, PROMPT);
        assert_eq!(through(&ways), Some((6, 4, false)));
        // The draft block's choices lie where the window's do.
        ways.see(&Op::DraftJoin {
            table: W,
            eh_proj: W,
            e_norm: W,
            h_norm: W,
            next: &[1],
            x: PROMPT,
            out: DECODE,
        });
        assert_eq!(ways.short, Way::Elsewhere);
    }

    /// Oracle: by hand. A step between two layers of a prompt counts; a short prompt that was passed doesn't, a wide one goes on; a window
    /// that was given up is not taken for one that goes on.
    #[test]
    fn windows_that_pass_each_other_are_told_apart() {
        let mut ways = Ways::default();
        embed(&mut ways, PROMPT, 20);
        layers(&mut ways, 0..2, 20, 1);
        embed(&mut ways, DECODE, 1);
        layers(&mut ways, 0..4, 1, 1);
        head(&mut ways, DECODE);
        assert_eq!(through(&ways), Some((1, 4, true)));
        ways.short = Way::Elsewhere;
        layers(&mut ways, 2..4, 20, 1);
        head(&mut ways, PROMPT);
        assert_eq!(through(&ways), None);

        embed(&mut ways, PROMPT, 100);
        layers(&mut ways, 0..2, 100, 1);
        embed(&mut ways, DECODE, 1);
        layers(&mut ways, 0..4, 1, 1);
        head(&mut ways, DECODE);
        layers(&mut ways, 2..4, 100, 1);
        head(&mut ways, PROMPT);
        let Way::Under(Passed { rows: 100, layers: 4, answers: false, .. }) = ways.wide else {
            panic!("{:?}", ways.wide)
        };
        // Given up behind its second layer; then another that begins with it.
        embed(&mut ways, DECODE, 1);
        layers(&mut ways, 0..2, 1, 1);
        embed(&mut ways, PROMPT, 64);
        head(&mut ways, PROMPT);
        assert_eq!(through(&ways), None);
        layers(&mut ways, 1..4, 64, 1);
        assert_eq!(ways.wide, Way::Elsewhere);
    }

    /// Oracle: by hand.
    #[test]
    fn choices_are_read_by_layer() {
        let step = Step { experts: &[1, 5, 5, 2, 70_000, 0], pairs: 3 };
        let ids: Vec<_> = step.ids().map(|id| (id.layer, id.expert)).collect();
        assert_eq!(ids, [(0, 1), (0, 5), (0, 5), (1, 2), (1, 0)]);
        let counted = Counted { ends: &[2, 2, 5, 0, 4, 5], width: 3, rows: 5, answers: false };
        let counts: Vec<_> = counted.counts().map(|(id, count)| (id.layer, id.expert, count)).collect();
        assert_eq!(counts, [(0, 0, 2), (0, 2, 3), (1, 1, 4), (1, 2, 1)]);
    }
}
