//! From a model's tensor roles to a graph of handles: which tensor is which [`Weight`], and what the backend must know.
//!
//! Reads no weight: bytes stay behind the mapping.

use std::sync::Arc;

use strata_backend::{
    ExpertWeights, GdnShape, GdnWeights, Layer, LayerState, MixerWeights, MoeShape, NgramShape, NgramWeights,
    QsaShape, QsaWeights, Shape, SharedWeights, Weight, WeightData,
};
use strata_gguf::{Mapping, TensorInfo};
use strata_model::roles::{self, GateUp};
use strata_model::{LayerKind, Model, TensorRef};
use strata_quant::{Format, dequantise};
use strata_residency::{Bytes, ExpertId, LayerError, LayerSource, Tensor, TensorPlace};

use crate::config::{EngineConfig, ExpertHome};
use crate::error::EngineError;
use crate::graph::{Draft, Graph, LayerGraph, Mixing, Ngram};

/// A model as the engine runs it.
pub(crate) struct Lowered {
    pub graph: Graph,
    pub shape: Shape,
    /// State per layer, the draft block's last.
    pub states: Vec<LayerState>,
    /// Dense weights by handle.
    pub weights: Vec<WeightData>,
    /// Routed experts by layer.
    pub experts: Vec<(u16, LayerSource, ExpertTensors)>,
}

impl Lowered {
    /// All routed experts.
    pub fn expert_ids(&self) -> impl Iterator<Item = ExpertId> + '_ {
        self.experts.iter().flat_map(|(layer, source, _)| {
            (0..source.experts()).map(|expert| ExpertId { layer: *layer, expert })
        })
    }
}

/// Which of the file's tensors hold a layer's experts.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ExpertTensors {
    gate: usize,
    up: usize,
    down: usize,
}

impl ExpertTensors {
    /// The index of a tensor in the file.
    pub fn index(&self, tensor: Tensor) -> usize {
        match tensor {
            Tensor::Gate | Tensor::GateUp => self.gate,
            Tensor::Up => self.up,
            Tensor::Down => self.down,
        }
    }
}

/// A tensor's bytes in the mapped file.
struct Mapped {
    mapping: Arc<Mapping>,
    tensor: TensorInfo,
}

impl AsRef<[u8]> for Mapped {
    fn as_ref(&self) -> &[u8] {
        self.mapping.bytes(&self.tensor)
    }
}

/// Lowers a model.
pub(crate) fn lower(model: &Model, config: &EngineConfig) -> Result<Lowered, EngineError> {
    let mapping = Arc::new(model.gguf.map()?);
    let draft = model.mtp.as_ref().filter(|_| config.draft);
    if config.draft && draft.is_none() {
        return Err(EngineError::NoDraft("the file has none".into()));
    }
    let read = matches!(config.experts, ExpertHome::Budget(_));
    let mut lowering = Lowering { model, mapping, read, weights: Vec::new(), experts: Vec::new() };
    let trunk = &model.trunk;
    let embed = lowering.weight(&trunk.token_embd)?;
    let output = lowering.weight(&trunk.output)?;
    let head_mixer = lowering.mixer(&trunk.head_mixer)?;
    let layers: Result<Vec<_>, _> =
        trunk.layers.iter().enumerate().map(|(at, layer)| lowering.layer(at, layer)).collect();
    let layers = layers?;
    let draft = draft.map(|draft| lowering.draft(draft, layers.len(), embed, output)).transpose()?;
    let mut states: Vec<LayerState> = layers
        .iter()
        .zip(&model.hyper.layers)
        .map(|(layer, &kind)| {
            let (gdn, qsa) = match kind {
                LayerKind::Gdn => (true, None),
                LayerKind::Qsa { ratio } => (false, Some(ratio)),
            };
            LayerState { gdn, qsa, ngram: layer.ngram.is_some() }
        })
        .collect();
    let ratio = model.hyper.draft.filter(|_| config.draft).map(|draft| draft.ratio);
    states.extend(ratio.map(|ratio| LayerState { gdn: false, qsa: Some(ratio), ngram: false }));
    Ok(Lowered {
        shape: shape(model, &states),
        states,
        graph: Graph { embed, layers, head_mixer, output, draft },
        weights: lowering.weights,
        experts: lowering.experts,
    })
}

/// The geometry that ops see.
fn shape(model: &Model, states: &[LayerState]) -> Shape {
    let h = &model.hyper;
    Shape {
        hidden: h.width,
        streams: h.streams,
        mixer_rank: h.mixer_rank,
        vocab: h.vocab,
        norm_eps: h.norm_eps,
        gdn: states.iter().any(|state| state.gdn).then_some(GdnShape {
            key_heads: h.gdn.key_heads,
            value_heads: h.gdn.value_heads,
            key_dim: h.gdn.key_dim,
            value_dim: h.gdn.value_dim,
            conv_kernel: h.gdn.conv_kernel,
        }),
        qsa: states.iter().any(|state| state.qsa.is_some()).then_some(QsaShape {
            heads: h.attention.heads,
            kv_heads: h.attention.kv_heads,
            head_dim: h.attention.head_dim,
            rotary: h.attention.rotary,
            rope_base: h.attention.rope_base,
            index_heads: h.indexer.heads,
            index_dim: h.indexer.dim,
            budget: h.indexer.budget,
        }),
        moe: MoeShape {
            experts: h.moe.experts,
            used: h.moe.used,
            width: h.moe.ffn,
            shared_width: h.moe.shared_ffn,
        },
        ngram: h.ple.as_ref().map(|ple| NgramShape {
            heads: ple.heads,
            row: ple.row_width,
            conv_kernel: ple.conv_kernel,
            dilation: ple.ngram_size,
        }),
    }
}

struct Lowering<'m> {
    model: &'m Model,
    mapping: Arc<Mapping>,
    /// Whether experts are read from the files.
    read: bool,
    weights: Vec<WeightData>,
    experts: Vec<(u16, LayerSource, ExpertTensors)>,
}

impl Lowering<'_> {
    fn weight(&mut self, tensor: &TensorRef) -> Result<Weight, EngineError> {
        let bytes = self.bytes(tensor.index);
        let name = self.model.gguf.tensors()[tensor.index].name.clone();
        let TensorRef { format, rows, k, .. } = *tensor;
        let scale = tensor.scale.map(|scale| self.scale(scale)).transpose()?;
        self.weights.push(WeightData { name, format, rows, k, bytes, scale });
        Ok(Weight(self.weights.len() as u32 - 1))
    }

    /// The scale of a whole tensor.
    fn scale(&self, index: usize) -> Result<f32, EngineError> {
        let tensor = &self.model.gguf.tensors()[index];
        let (mut bytes, mut scale) = (vec![0; tensor.bytes as usize], [0.0]);
        self.model.gguf.read_at(tensor, 0, &mut bytes)?;
        dequantise(self.format(index)?, &bytes, &mut scale);
        Ok(scale[0])
    }

    /// The scales of a tensor's experts, as a vector: files have one for all, or one for each.
    fn scales(&mut self, tensor: &TensorRef) -> Result<Option<Weight>, EngineError> {
        let Some(index) = tensor.scale else { return Ok(None) };
        let (TensorInfo { name, shape, .. }, k) = (self.model.gguf.tensors()[index].clone(), tensor.experts);
        let (format, bytes) = match shape.iter().product::<u64>() {
            1 => (Format::F32, Bytes::from(self.scale(index)?.to_le_bytes().repeat(k))),
            _ => (self.format(index)?, self.bytes(index)),
        };
        self.weights.push(WeightData { name, format, rows: 1, k, bytes, scale: None });
        Ok(Some(Weight(self.weights.len() as u32 - 1)))
    }

    /// How the tensor at `index` is stored.
    fn format(&self, index: usize) -> Result<Format, EngineError> {
        let TensorInfo { name, ty, .. } = &self.model.gguf.tensors()[index];
        let path = self.model.gguf.path().display();
        Format::try_from(*ty).map_err(|why| EngineError::Config(format!("{path}: tensor `{name}`: {why}")))
    }

    /// Where the tensor at `index` is in the files.
    fn place(&self, index: usize) -> Result<TensorPlace, EngineError> {
        let TensorInfo { name, shard, offset, .. } = &self.model.gguf.tensors()[index];
        let file = u16::try_from(*shard).map_err(|_| {
            let path = self.model.gguf.path().display();
            EngineError::Config(format!("{path}: {shard} files are more than experts can be read from"))
        })?;
        Ok(TensorPlace { name: name.clone(), file, offset: *offset })
    }

    fn bytes(&self, index: usize) -> Bytes {
        let tensor = self.model.gguf.tensors()[index].clone();
        Bytes::new(Arc::new(Mapped { mapping: Arc::clone(&self.mapping), tensor }))
    }

    fn mixer(&mut self, mixer: &roles::Mixer) -> Result<MixerWeights, EngineError> {
        Ok(MixerWeights {
            norm: self.weight(&mixer.norm)?,
            down: self.weight(&mixer.down)?,
            up: self.weight(&mixer.up)?,
            inject: mixer.inject.as_ref().map(|inject| self.weight(inject)).transpose()?,
        })
    }

    fn layer(&mut self, at: usize, layer: &roles::Layer) -> Result<LayerGraph, EngineError> {
        let ngram = match (&layer.ple, self.model.hyper.ple_slot(at), &self.model.trunk.ngram_table) {
            (Some(ple), Some(block), Some(table)) => {
                let scale = table.scale.map(|scale| self.scale(scale)).transpose()?;
                Some(Ngram { weights: self.ngram(ple)?, format: table.format, scale, block })
            }
            _ => None,
        };
        Ok(LayerGraph {
            layer: Layer(at as u16),
            ngram,
            attn_mixer: self.mixer(&layer.attn_mixer)?,
            mixing: match &layer.attention {
                roles::Attention::Gdn(gdn) => Mixing::Gdn(self.gdn(gdn)?),
                roles::Attention::Qsa(qsa) => Mixing::Qsa(self.qsa(qsa)?),
            },
            ffn_mixer: self.mixer(&layer.ffn_mixer)?,
            router: self.weight(&layer.moe.router)?,
            experts: self.routed(at as u16, &layer.moe)?,
            shared: self.shared(&layer.moe.shared)?,
        })
    }

    fn ngram(&mut self, ple: &roles::Ple) -> Result<NgramWeights, EngineError> {
        Ok(NgramWeights {
            key: self.weight(&ple.key)?,
            value: self.weight(&ple.value)?,
            norm_key: self.weight(&ple.norm_key)?,
            norm_query: self.weight(&ple.norm_query)?,
            norm_conv: self.weight(&ple.norm_conv)?,
            conv: self.weight(&ple.conv1d)?,
        })
    }

    fn gdn(&mut self, gdn: &roles::Gdn) -> Result<GdnWeights, EngineError> {
        Ok(GdnWeights {
            qkv: self.weight(&gdn.qkv)?,
            gate: self.weight(&gdn.gate)?,
            conv: self.weight(&gdn.conv1d)?,
            dt_bias: self.weight(&gdn.dt_bias)?,
            a: self.weight(&gdn.a)?,
            alpha: self.weight(&gdn.alpha)?,
            beta: self.weight(&gdn.beta)?,
            norm: self.weight(&gdn.norm)?,
            out: self.weight(&gdn.out)?,
        })
    }

    fn qsa(&mut self, qsa: &roles::Qsa) -> Result<QsaWeights, EngineError> {
        Ok(QsaWeights {
            q: self.weight(&qsa.q)?,
            k: self.weight(&qsa.k)?,
            v: self.weight(&qsa.v)?,
            out: self.weight(&qsa.output)?,
            q_norm: self.weight(&qsa.q_norm)?,
            k_norm: self.weight(&qsa.k_norm)?,
            index_q: self.weight(&qsa.index_q)?,
            index_k: self.weight(&qsa.index_k)?,
            index_q_norm: self.weight(&qsa.index_q_norm)?,
            index_k_norm: self.weight(&qsa.index_k_norm)?,
        })
    }

    fn shared(&mut self, shared: &roles::SharedExpert) -> Result<SharedWeights, EngineError> {
        Ok(SharedWeights {
            gate: self.weight(&shared.gate)?,
            up: self.weight(&shared.up)?,
            down: self.weight(&shared.down)?,
            scalar: self.weight(&shared.weight)?,
        })
    }

    fn routed(&mut self, layer: u16, moe: &roles::Moe) -> Result<ExpertWeights, EngineError> {
        let experts = self.model.hyper.moe.experts;
        let count = u16::try_from(experts).map_err(|_| {
            let path = self.model.gguf.path().display();
            EngineError::Config(format!(
                "{path}: {experts} experts in a layer are more than can be run (65,535)"
            ))
        })?;
        let down = self.bytes(moe.down.index);
        let (source, gate, up) = match &moe.gate_up {
            GateUp::Split { gate, up } => {
                (LayerSource::split(count, self.bytes(gate.index), self.bytes(up.index), down), gate, up)
            }
            GateUp::Fused(both) => (LayerSource::fused(count, self.bytes(both.index), down), both, both),
        };
        let at = |error: LayerError| EngineError::Config(format!("layer {layer}: {error}"));
        let tensors = ExpertTensors { gate: gate.index, up: up.index, down: moe.down.index };
        let mut source = source.map_err(at)?;
        if self.read {
            let [gate, up, down] = [gate, up, &moe.down].map(|tensor| self.place(tensor.index));
            source = source.read_from([gate?, up?, down?]);
        }
        self.experts.push((layer, source, tensors));
        Ok(ExpertWeights {
            gate: gate.format,
            up: up.format,
            down: moe.down.format,
            scales: [self.scales(gate)?, self.scales(up)?, self.scales(&moe.down)?],
        })
    }

    fn draft(
        &mut self,
        mtp: &roles::Mtp,
        at: usize,
        embed: Weight,
        output: Weight,
    ) -> Result<Draft, EngineError> {
        let own = |tensor: &Option<TensorRef>, this: &mut Self, shared| {
            tensor.as_ref().map_or(Ok(shared), |tensor| this.weight(tensor))
        };
        Ok(Draft {
            embed: own(&mtp.embed_tokens, self, embed)?,
            eh_proj: self.weight(&mtp.eh_proj)?,
            e_norm: self.weight(&mtp.enorm)?,
            h_norm: self.weight(&mtp.hnorm)?,
            layer: self.layer(at, &mtp.layer)?,
            head_mixer: self.mixer(&mtp.head_mixer)?,
            output: own(&mtp.shared_head_head, self, output)?,
        })
    }
}
