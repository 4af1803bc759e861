//! The layer graph of `qwen4exp`: docs/qwen4exp.md, section 2.

use strata_backend::{
    BackendError, Buffer, ExpertWeights, GdnWeights, Layer, MixerWeights, NgramWeights, Op, QsaWeights,
    SharedWeights, Weight, Window,
};
use strata_quant::Format;

/// All weights of the trunk, and of the draft block where the file has one.
#[derive(Debug, Clone)]
pub struct Graph {
    /// Token embedding.
    pub embed: Weight,
    /// The trunk's layers, in order.
    pub layers: Vec<LayerGraph>,
    /// The final mixer.
    pub head_mixer: MixerWeights,
    /// The vocabulary head.
    pub output: Weight,
    /// The draft block.
    pub draft: Option<Draft>,
}

/// One layer: an n-gram block in some, a token mixer, the experts, each behind a hyper-connection mixer.
#[derive(Debug, Clone)]
pub struct LayerGraph {
    /// Which state and experts.
    pub layer: Layer,
    /// The n-gram block that comes before the layer.
    pub ngram: Option<Ngram>,
    /// The mixer in front of the token mixer.
    pub attn_mixer: MixerWeights,
    /// The token mixer.
    pub mixing: Mixing,
    /// The mixer in front of the experts.
    pub ffn_mixer: MixerWeights,
    /// The router.
    pub router: Weight,
    /// The routed experts.
    pub experts: ExpertWeights,
    /// The shared expert.
    pub shared: SharedWeights,
}

/// An n-gram block.
#[derive(Debug, Clone, Copy)]
pub struct Ngram {
    /// Its weights.
    pub weights: NgramWeights,
    /// How its table's rows are stored.
    pub format: Format,
    /// What the table's values are multiplied with, in files that scale whole tensors.
    pub scale: Option<f32>,
    /// Which of the model's n-gram blocks it is: the first, the second...
    pub block: usize,
}

/// A layer's token mixer.
#[derive(Debug, Clone, Copy)]
pub enum Mixing {
    /// Gated DeltaNet.
    Gdn(GdnWeights),
    /// Block-sparse attention.
    Qsa(QsaWeights),
}

/// The draft block: one more layer over the trunk's last residual and the next token.
#[derive(Debug, Clone)]
pub struct Draft {
    /// Token embedding, the trunk's unless the block brings its own.
    pub embed: Weight,
    /// `[D, 2 D]`.
    pub eh_proj: Weight,
    /// Gammas of the embedding's norm.
    pub e_norm: Weight,
    /// Gammas of the residual's norm.
    pub h_norm: Weight,
    /// The block's layer.
    pub layer: LayerGraph,
    /// Its final mixer.
    pub head_mixer: MixerWeights,
    /// Vocabulary head, the trunk's unless the block brings its own.
    pub output: Weight,
}

/// Buffers that live inside a layer only; windows that take turns at layer boundaries share them.
#[derive(Debug, Clone, Copy)]
pub struct Work {
    /// A mixer's output, `[rows, D]`.
    pub u: Buffer,
    /// What is written back, `[rows, D]`.
    pub y: Buffer,
    /// Inject weights, `[rows, S]`.
    pub inject: Buffer,
    /// Logits, `[rows, vocab]`.
    pub logits: Buffer,
}

/// A window on its way through the layers.
#[derive(Debug, Clone, Copy)]
pub struct Run<'a> {
    /// Tokens and sequences.
    pub window: &'a Window,
    /// The wide residual, alive from layer to layer.
    pub x: Buffer,
    /// Per n-gram block the table rows of every token.
    pub table_rows: &'a [Vec<u8>],
    /// The shared buffers.
    pub work: Work,
}

/// Whoever takes ops.
pub type Submit<'s> = dyn FnMut(&Op<'_>) -> Result<(), BackendError> + 's;

impl Graph {
    /// Fills the residual with the tokens' embeddings.
    pub fn embed(&self, run: Run<'_>, submit: &mut Submit<'_>) -> Result<(), BackendError> {
        submit(&Op::Embed { table: self.embed, tokens: &run.window.tokens, x: run.x })
    }

    /// The logits of some rows of the residual after the last layer.
    pub fn head(&self, rows: &[u32], run: Run<'_>, submit: &mut Submit<'_>) -> Result<(), BackendError> {
        submit(&Op::Head {
            mixer: self.head_mixer,
            output: self.output,
            rows,
            x: run.x,
            logits: run.work.logits,
        })
    }
}

impl Draft {
    /// Joins the trunk's residual `trunk` with the token after each row, and passes the result through the block's layer.
    pub fn layer(
        &self,
        trunk: Buffer,
        next: &[u32],
        run: Run<'_>,
        submit: &mut Submit<'_>,
    ) -> Result<(), BackendError> {
        submit(&Op::DraftJoin {
            table: self.embed,
            eh_proj: self.eh_proj,
            e_norm: self.e_norm,
            h_norm: self.h_norm,
            next,
            x: trunk,
            out: run.x,
        })?;
        self.layer.forward(run, submit)
    }

    /// The draft logits of some rows.
    pub fn head(&self, rows: &[u32], run: Run<'_>, submit: &mut Submit<'_>) -> Result<(), BackendError> {
        let (mixer, output) = (self.head_mixer, self.output);
        submit(&Op::Head { mixer, output, rows, x: run.x, logits: run.work.logits })
    }
}

impl LayerGraph {
    /// One layer over the whole window.
    pub fn forward(&self, run: Run<'_>, submit: &mut Submit<'_>) -> Result<(), BackendError> {
        let Run { window, x, table_rows, work: Work { u, y, inject, .. } } = run;
        let (rows, spans, layer) = (window.rows(), window.spans.as_slice(), self.layer);
        if let Some(Ngram { weights, format, scale, block }) = self.ngram {
            submit(&Op::Ngram { layer, weights, format, scale, table_rows: &table_rows[block], spans, x })?;
        }
        submit(&Op::MixerRead { weights: self.attn_mixer, rows, x, u, inject })?;
        submit(&match self.mixing {
            Mixing::Gdn(weights) => Op::Gdn { layer, weights, spans, u, y },
            Mixing::Qsa(weights) => Op::Qsa { layer, weights, spans, u, y },
        })?;
        submit(&Op::MixerWrite { rows, y, inject, x })?;

        submit(&Op::MixerRead { weights: self.ffn_mixer, rows, x, u, inject })?;
        submit(&Op::Route { layer, router: self.router, rows, u })?;
        submit(&Op::Group { rows })?;
        submit(&Op::Experts { layer, weights: self.experts, rows, u })?;
        submit(&Op::Combine { shared: self.shared, rows, u, y })?;
        submit(&Op::MixerWrite { rows, y, inject, x })
    }
}
