//! Values that aren't finite: where they begin, and which tensor brings them in.
//!
//! A broken weight is found in two ways. Those that can be NaN and leave no trace are looked at before the first token ([`check_weights`]):
//! a router's row of NaN is an expert that nobody is sent to, the indexer's are blocks that nobody sees, an n-gram key is a gate that stands
//! half open. All others poison the residual, so the last row of every window is looked at, or its logits; if they aren't finite, the window is computed once more with a look at
//! what each op leaves ([`Engine::blame`]), and the tensors of the first layer that leaves such values are decoded.
//!
//! Not found: a weight that is wrong but finite, and one that no token so far had to do with.

use std::cell::Cell;

use strata_backend::{Buffer, Op};
use strata_model::Model;
use strata_quant::{Format, dequantise};

use crate::engine::Engine;
use crate::error::EngineError;
use crate::flight::Flight;
use crate::graph::Mixing;
use crate::lower::Lowered;

/// Float tensors up to this size are decoded before the first token. All vectors, and routers, are far below.
const SMALL: usize = 16 << 20;
/// Values that are decoded at a time: whole blocks of every format.
const PIECE: usize = 1 << 18;

/// Whether all of them are numbers.
pub(crate) fn finite(values: &[f32]) -> bool {
    // Without a way out in the middle, so that it is one pass of vector instructions.
    values.iter().fold(true, |all, value| all & value.is_finite())
}

/// Whether all values of whole blocks are numbers.
fn blocks_are_finite(format: Format, bytes: &[u8], decoded: &mut Vec<f32>) -> bool {
    let piece = PIECE / format.block_len() * format.block_bytes();
    bytes.chunks(piece).all(|bytes| {
        decoded.resize(bytes.len() / format.block_bytes() * format.block_len(), 0.0);
        dequantise(format, bytes, decoded);
        finite(decoded)
    })
}

/// Refuses a model of which a router, a part of an indexer, an n-gram block's key, or a float tensor that is small has values that aren't
/// finite.
pub(crate) fn check_weights(model: &Model, lowered: &Lowered) -> Result<(), EngineError> {
    let graph = &lowered.graph;
    let layers = graph.layers.iter().chain(graph.draft.as_ref().map(|draft| &draft.layer));
    let mut silent = Vec::new();
    for layer in layers {
        silent.push(layer.router);
        silent.extend(layer.ngram.map(|ngram| ngram.weights.key));
        if let Mixing::Qsa(qsa) = &layer.mixing {
            silent.extend([qsa.index_q, qsa.index_k, qsa.index_q_norm, qsa.index_k_norm]);
        }
    }
    let mut decoded = Vec::new();
    for (at, weight) in lowered.weights.iter().enumerate() {
        let small = weight.format.is_float() && weight.bytes.len() <= SMALL;
        let looked_at = small || silent.iter().any(|silent| silent.0 as usize == at);
        let scale = weight.scale.is_none_or(f32::is_finite);
        if scale && (!looked_at || blocks_are_finite(weight.format, &weight.bytes, &mut decoded)) {
            continue;
        }
        let file = model.gguf.path().to_owned();
        return Err(EngineError::BrokenTensor { file, tensor: weight.name.clone() });
    }
    Ok(())
}

/// Where values that aren't finite begin.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Site {
    Embedding,
    /// A layer, and what of it.
    Layer(usize, &'static str),
    Head,
    Draft,
}

impl Site {
    /// In words.
    fn name(self) -> String {
        match self {
            Site::Embedding => "the token embedding".into(),
            Site::Layer(layer, part) => format!("layer {layer}, {part}"),
            Site::Head => "the head".into(),
            Site::Draft => "the draft block".into(),
        }
    }

    /// Whether a tensor of the file is part of it.
    fn has(self, name: &str, layers: usize) -> bool {
        let of_layer = |layer: usize| name.starts_with(&format!("blk.{layer}."));
        match self {
            Site::Embedding => name.starts_with("token_embd."),
            Site::Layer(layer, _) => of_layer(layer),
            Site::Draft => of_layer(layers),
            // Its mixer, and the matrix, which may be the embedding's.
            Site::Head => !name.starts_with("blk.") && !name.starts_with("per_layer_token_embd."),
        }
    }
}

/// What an op is of, and the buffers that it leaves with the length of a row; nothing for those whose results stay in the backend.
fn leaves(op: &Op<'_>, [wide, hidden]: [usize; 2]) -> (&'static str, Option<(Buffer, usize)>) {
    match *op {
        Op::Embed { x, .. } => ("embedding", Some((x, wide))),
        Op::Ngram { x, .. } => ("the n-gram block", Some((x, wide))),
        Op::MixerRead { u, .. } => ("a mixer's read", Some((u, hidden))),
        Op::MixerWrite { x, .. } => ("a mixer's write", Some((x, wide))),
        Op::Gdn { y, .. } => ("Gated DeltaNet", Some((y, hidden))),
        Op::Qsa { y, .. } => ("attention", Some((y, hidden))),
        Op::Combine { y, .. } => ("the experts", Some((y, hidden))),
        Op::DraftJoin { out, .. } => ("the draft block's input", Some((out, wide))),
        Op::Route { .. } | Op::Group { .. } | Op::Experts { .. } | Op::Head { .. } => ("", None),
    }
}

impl Engine {
    /// The spans of a window whose last row is not finite in the residual. For rows whose logits nobody asked for.
    pub(crate) fn broken_ends(
        &mut self,
        flight: &Flight,
        spans: impl Iterator<Item = usize>,
    ) -> Result<Vec<usize>, EngineError> {
        let wide = self.spec.shape.streams * self.spec.shape.hidden;
        let mut broken = Vec::new();
        for at in spans {
            let span = &flight.window.spans[at];
            let row = &mut self.logits[..wide];
            self.machine.backend.read(flight.x, (span.row + span.rows - 1) * wide, row)?;
            if !finite(row) {
                broken.push(at);
            }
        }
        Ok(broken)
    }

    /// Why the last row of a span, or one of its rows' logits, isn't finite: computes the window once more and looks where it begins.
    /// Its ops must be the last that were submitted, and none of it committed.
    pub(crate) fn blame(&mut self, flight: &Flight, span: usize, row: usize) -> EngineError {
        let position = flight.window.spans[span].start + row - flight.window.spans[span].row;
        let site = match self.first_broken(flight, span, row) {
            Ok(site) => site,
            Err(error) => return error,
        };
        self.not_finite(site, position)
    }

    /// Why the draft block's logits aren't finite, where the trunk's are.
    pub(crate) fn blame_draft(&self, position: usize) -> EngineError {
        self.not_finite(Some(Site::Draft), position)
    }

    fn not_finite(&self, site: Option<Site>, position: usize) -> EngineError {
        let file = self.model.gguf.path().to_owned();
        let Some(site) = site else {
            return EngineError::Unsteady { file, position, backend: self.backend() };
        };
        match self.broken_tensors(site) {
            Ok(tensors) if tensors.is_empty() => EngineError::Overflow { file, position, place: site.name() },
            Ok(tensors) => EngineError::Broken { file, position, place: site.name(), tensors },
            Err(error) => error,
        }
    }

    /// The first op after which rows of the span aren't finite; nothing if this time all are.
    fn first_broken(
        &mut self,
        flight: &Flight,
        span: usize,
        row: usize,
    ) -> Result<Option<Site>, EngineError> {
        let span = &flight.window.spans[span];
        let shape = &self.spec.shape;
        let widths = [shape.streams * shape.hidden, shape.hidden];
        let (run, backend) = (flight.run(&self.lookup), &mut self.machine.backend);
        let (mut values, first) = (vec![0.0; (span.rows * widths[0]).max(shape.vocab)], Cell::new(None));
        let mut submit = |op: &Op<'_>| {
            backend.submit(op)?;
            if let (None, (part, Some((buffer, width)))) = (first.get(), leaves(op, widths)) {
                let values = &mut values[..span.rows * width];
                backend.read(buffer, span.row * width, values)?;
                first.set((!finite(values)).then_some(part));
            }
            Ok(())
        };
        self.graph.embed(run, &mut submit)?;
        if first.get().is_some() {
            return Ok(Some(Site::Embedding));
        }
        for (at, layer) in self.graph.layers.iter().enumerate() {
            layer.forward(run, &mut submit)?;
            if let Some(part) = first.get() {
                return Ok(Some(Site::Layer(at, part)));
            }
        }
        self.graph.head(&[row as u32], run, &mut submit)?;
        let logits = &mut values[..shape.vocab];
        backend.read(run.work.logits, 0, logits)?;
        Ok((!finite(logits)).then_some(Site::Head))
    }

    /// The tensors of a part of the model with values that aren't finite.
    fn broken_tensors(&self, site: Site) -> Result<Vec<String>, EngineError> {
        let (gguf, layers) = (&self.model.gguf, self.model.hyper.layers.len());
        let (mut bytes, mut decoded, mut broken) = (Vec::new(), Vec::new(), Vec::new());
        for tensor in gguf.tensors().iter().filter(|tensor| site.has(&tensor.name, layers)) {
            let Ok(format) = Format::try_from(tensor.ty) else { continue };
            let piece = (PIECE / format.block_len() * format.block_bytes()) as u64;
            for first in (0..tensor.bytes).step_by(piece as usize) {
                bytes.resize((tensor.bytes - first).min(piece) as usize, 0);
                gguf.read_at(tensor, first, &mut bytes)?;
                if !blocks_are_finite(format, &bytes, &mut decoded) {
                    broken.push(tensor.name.clone());
                    break;
                }
            }
        }
        Ok(broken)
    }
}
