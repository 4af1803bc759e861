//! Short windows as recorded graphs: ops wait in a list until somebody wants their results, and a list that came before is replayed instead of
//! queued again.
//!
//! Owns what makes two lists the same work: ops, weights, buffers, rows and sequences, but not tokens and positions, which lie at the same
//! places on the device every time ([`crate::inputs`]).

use strata_backend::{Family, Op, Span};

use crate::driver::Graph;
use crate::tiers::Asked;

/// Rows of the widest window whose ops wait.
pub(crate) const MOST_ROWS: usize = 32;
/// Ops of the shortest list that is worth a recording.
const FEWEST_OPS: usize = 8;
/// Ops that a step starts with: the GPU works on them while the host lists, and launches, the others.
const START_OPS: usize = 16;
/// Recordings that are kept.
const MOST_RECORDINGS: usize = 64;

/// An op with its data.
#[derive(Clone, PartialEq)]
pub(crate) struct Waiting {
    /// The op without its data.
    bare: Op<'static>,
    /// Token ids, or row numbers.
    pub(crate) ids: Vec<u32>,
    pub(crate) table_rows: Vec<u8>,
    pub(crate) spans: Vec<Span>,
}

impl Waiting {
    /// Takes an op's data.
    pub(crate) fn new(op: &Op<'_>) -> Waiting {
        let (mut ids, mut table_rows, mut spans): (&[u32], &[u8], &[Span]) = (&[], &[], &[]);
        let bare = match *op {
            Op::Embed { table, tokens, x } => {
                ids = tokens;
                Op::Embed { table, tokens: &[], x }
            }
            Op::Ngram { layer, weights, format, scale, table_rows: rows, spans: parts, x } => {
                (table_rows, spans) = (rows, parts);
                Op::Ngram { layer, weights, format, scale, table_rows: &[], spans: &[], x }
            }
            Op::Gdn { layer, weights, spans: parts, u, y } => {
                spans = parts;
                Op::Gdn { layer, weights, spans: &[], u, y }
            }
            Op::Qsa { layer, weights, spans: parts, u, y } => {
                spans = parts;
                Op::Qsa { layer, weights, spans: &[], u, y }
            }
            Op::Head { mixer, output, rows, x, logits } => {
                ids = rows;
                Op::Head { mixer, output, rows: &[], x, logits }
            }
            Op::DraftJoin { table, eh_proj, e_norm, h_norm, next, x, out } => {
                ids = next;
                Op::DraftJoin { table, eh_proj, e_norm, h_norm, next: &[], x, out }
            }
            Op::MixerRead { weights, rows, x, u, inject } => Op::MixerRead { weights, rows, x, u, inject },
            Op::MixerWrite { rows, y, inject, x } => Op::MixerWrite { rows, y, inject, x },
            Op::Route { layer, router, rows, u } => Op::Route { layer, router, rows, u },
            Op::Group { rows } => Op::Group { rows },
            Op::Experts { layer, weights, rows, u } => Op::Experts { layer, weights, rows, u },
            Op::Combine { shared, rows, u, y } => Op::Combine { shared, rows, u, y },
        };
        Waiting { bare, ids: ids.to_vec(), table_rows: table_rows.to_vec(), spans: spans.to_vec() }
    }

    /// The op.
    pub(crate) fn op(&self) -> Op<'_> {
        let Waiting { bare, ids, table_rows, spans } = self;
        match *bare {
            Op::Embed { table, x, .. } => Op::Embed { table, tokens: ids, x },
            Op::Ngram { layer, weights, format, scale, x, .. } => {
                Op::Ngram { layer, weights, format, scale, table_rows, spans, x }
            }
            Op::Gdn { layer, weights, u, y, .. } => Op::Gdn { layer, weights, spans, u, y },
            Op::Qsa { layer, weights, u, y, .. } => Op::Qsa { layer, weights, spans, u, y },
            Op::Head { mixer, output, x, logits, .. } => Op::Head { mixer, output, rows: ids, x, logits },
            Op::DraftJoin { table, eh_proj, e_norm, h_norm, x, out, .. } => {
                Op::DraftJoin { table, eh_proj, e_norm, h_norm, next: ids, x, out }
            }
            Op::MixerRead { weights, rows, x, u, inject } => Op::MixerRead { weights, rows, x, u, inject },
            Op::MixerWrite { rows, y, inject, x } => Op::MixerWrite { rows, y, inject, x },
            Op::Route { layer, router, rows, u } => Op::Route { layer, router, rows, u },
            Op::Group { rows } => Op::Group { rows },
            Op::Experts { layer, weights, rows, u } => Op::Experts { layer, weights, rows, u },
            Op::Combine { shared, rows, u, y } => Op::Combine { shared, rows, u, y },
        }
    }

    /// Whether it can't be in one list with those before it. All inputs of a list are brought before its first op: those of one window, and one
    /// of what has one place on the device. Few ops bring anything, so hardly any has to look at the others: a step has hundreds.
    pub(crate) fn collides(&self, list: &[Waiting]) -> bool {
        // Windows in a list are equal: the latest stands for all.
        let window = list.iter().rev().find(|held| !held.spans.is_empty());
        let other_window = !self.spans.is_empty() && window.is_some_and(|held| held.spans != self.spans);
        let brings = !self.ids.is_empty() || !self.table_rows.is_empty();
        let alike = |held: &Waiting| std::mem::discriminant(&self.bare) == std::mem::discriminant(&held.bare);
        other_window || (brings && list.iter().any(alike))
    }

    /// Whether both are the same work on other tokens.
    fn same_work(&self, other: &Waiting) -> bool {
        let like = |(a, b): (&Span, &Span)| (a.slot, a.row, a.rows) == (b.slot, b.row, b.rows);
        let cut = |waiting: &Waiting| waiting.spans.iter().any(|span| !span.cuts.is_empty());
        self.bare == other.bare
            && self.ids.len() == other.ids.len()
            && self.table_rows.len() == other.table_rows.len()
            && self.spans.len() == other.spans.len()
            && self.spans.iter().zip(&other.spans).all(like)
            && !cut(self)
            && !cut(other)
    }
}

/// Rows of an op's window.
pub(crate) fn rows(op: &Op<'_>) -> usize {
    let of = |spans: &[Span]| spans.iter().map(|span| span.rows).sum();
    match *op {
        Op::Embed { tokens: ids, .. } | Op::Head { rows: ids, .. } | Op::DraftJoin { next: ids, .. } => {
            ids.len()
        }
        Op::Ngram { spans, .. } | Op::Gdn { spans, .. } | Op::Qsa { spans, .. } => of(spans),
        Op::MixerRead { rows, .. }
        | Op::MixerWrite { rows, .. }
        | Op::Route { rows, .. }
        | Op::Group { rows }
        | Op::Experts { rows, .. }
        | Op::Combine { rows, .. } => rows,
    }
}

/// Whether a step's first recording ends with `op`, behind those that wait: with a layer, so that nothing is left to do for the next op.
pub(crate) fn ends_start(waiting: &[Waiting], op: &Op<'_>) -> bool {
    waiting.len() >= START_OPS && matches!(op, Op::Combine { .. })
}

/// What an op costs: its family, its share of the time of the work that it is part of, and the bytes that it reads.
pub(crate) type Cost = (Family, f64, usize);

/// Work that came before.
pub(crate) struct Recording {
    ops: Vec<Waiting>,
    /// Recorded when it comes for the second time; the first time, its ops are timed one by one.
    pub(crate) graph: Option<Graph>,
    /// Per op.
    pub(crate) costs: Vec<Cost>,
    /// What it asks the host for, and whether it uses the ring's memory.
    pub(crate) asked: Vec<Asked>,
    pub(crate) lends: bool,
}

/// The recordings, the latest last.
#[derive(Default)]
pub(crate) struct Recordings(Vec<Recording>);

impl Recordings {
    /// Whether a list is worth a recording.
    pub(crate) fn worth(ops: &[Waiting]) -> bool {
        ops.len() >= FEWEST_OPS && ops.iter().all(|op| op.spans.iter().all(|span| span.cuts.is_empty()))
    }

    /// The recording of the same work, if it came before. It becomes the latest.
    pub(crate) fn find(&mut self, ops: &[Waiting]) -> Option<&mut Recording> {
        let same = |known: &Recording| {
            known.ops.len() == ops.len() && known.ops.iter().zip(ops).all(|(a, b)| a.same_work(b))
        };
        let at = self.0.iter().rposition(same)?;
        self.0[at..].rotate_left(1);
        self.0.last_mut()
    }

    /// Notes work that came for the first time, and what it cost.
    pub(crate) fn note(&mut self, ops: Vec<Waiting>, costs: Vec<Cost>) {
        if self.0.len() == MOST_RECORDINGS {
            self.0.remove(0);
        }
        self.0.push(Recording { ops, graph: None, costs, asked: Vec::new(), lends: false });
    }
}

#[cfg(test)]
mod tests {
    use strata_backend::{Buffer, Layer, MixerWeights, NgramWeights, SeqSlot, Weight};
    use strata_quant::Format;

    use super::*;

    fn ngram(layer: u16, table_rows: &[u8], start: usize) -> Waiting {
        let w = Weight(0);
        let weights = NgramWeights { key: w, value: w, norm_key: w, norm_query: w, norm_conv: w, conv: w };
        let spans = [Span { slot: SeqSlot(0), row: 0, rows: 1, start, cuts: vec![] }];
        let (format, x) = (Format::F32, Buffer(0));
        Waiting::new(&Op::Ngram {
            layer: Layer(layer),
            weights,
            format,
            scale: None,
            table_rows,
            spans: &spans,
            x,
        })
    }

    /// Oracle: each kind of data has one place on the device, so two n-gram blocks can't be in one list, and neither can two windows.
    #[test]
    fn what_cannot_be_in_one_list_is_told() {
        let w = Weight(0);
        let weights = MixerWeights { norm: w, down: w, up: w, inject: None };
        let (x, u, inject) = (Buffer(0), Buffer(1), Buffer(2));
        let read = Waiting::new(&Op::MixerRead { weights, rows: 1, x, u, inject });
        let head = Waiting::new(&Op::Head { mixer: weights, output: w, rows: &[0], x, logits: u });
        let list = [ngram(1, &[1], 0), read.clone(), read.clone()];
        assert!(ngram(5, &[2], 0).collides(&list));
        assert!(ngram(5, &[], 1).collides(&list) && !ngram(5, &[], 0).collides(&list));
        assert!(!head.collides(&list) && head.collides(std::slice::from_ref(&head)));
        assert!(!read.collides(&list) && !ngram(5, &[2], 1).collides(&[]));
    }

    /// Oracle: a layer's last op, once there is enough for the GPU to work on meanwhile.
    #[test]
    fn a_step_starts_with_whole_layers() {
        let w = Weight(0);
        let shared = strata_backend::SharedWeights { gate: w, up: w, down: w, scalar: w };
        let (u, y) = (Buffer(0), Buffer(1));
        let (group, combine) = (Op::Group { rows: 1 }, Op::Combine { shared, rows: 1, u, y });
        let waiting = vec![Waiting::new(&group); START_OPS];
        assert!(ends_start(&waiting, &combine) && !ends_start(&waiting, &group));
        assert!(!ends_start(&waiting[1..], &combine));
    }

    /// Oracle: tokens and positions differ from step to step, layers don't.
    #[test]
    fn the_same_work_is_found_again() {
        let list = |layer, rows: &[u8], start| vec![ngram(layer, rows, start); FEWEST_OPS];
        let mut known = Recordings::default();
        known.note(list(1, &[7], 3), Vec::new());
        assert!(Recordings::worth(&list(1, &[7], 3)) && !Recordings::worth(&list(1, &[7], 3)[1..]));
        assert!(known.find(&list(1, &[9], 4)).is_some());
        assert!(known.find(&list(2, &[7], 3)).is_none() && known.find(&list(1, &[7, 7], 3)).is_none());
    }
}
