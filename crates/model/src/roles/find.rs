//! Looking tensors up by name, and checking what is found.

use std::collections::HashMap;

use strata_gguf::Gguf;
use strata_quant::Format;

use super::layer::{Attention, GateUp, Gdn, Layer, Mixer, Moe, Ple, Qsa, SharedExpert};
use super::{Mtp, RoleError, TensorRef, Trunk};
use crate::hyper::{Draft, Hyper, LayerKind};

/// What a tensor must be.
#[derive(Clone, Copy)]
struct Wanted {
    /// What it is for.
    role: &'static str,
    k: usize,
    rows: usize,
    experts: usize,
    /// A vector or convolution: read whole as floats, never in block products.
    float: bool,
    /// Another way in which files write the same bytes: extents, row length first.
    also: Option<[usize; 2]>,
}

impl Wanted {
    fn matrix(role: &'static str, rows: usize, k: usize) -> Self {
        Self { role, k, rows, experts: 1, float: false, also: None }
    }

    fn vector(role: &'static str, k: usize) -> Self {
        Self { float: true, ..Self::matrix(role, 1, k) }
    }

    fn taps(role: &'static str, channels: usize, kernel: usize) -> Self {
        Self { float: true, ..Self::matrix(role, channels, kernel) }
    }

    fn stacked(role: &'static str, experts: usize, rows: usize, k: usize) -> Self {
        Self { experts, ..Self::matrix(role, rows, k) }
    }
}

/// Drops the trailing ones, which files write or leave out.
fn trimmed(shape: &[u64]) -> &[u64] {
    let len = shape.iter().rposition(|&n| n != 1).map_or(1, |last| last + 1);
    &shape[..len.min(shape.len())]
}

pub(super) struct Finder<'a> {
    gguf: &'a Gguf,
    hyper: &'a Hyper,
    by_name: HashMap<&'a str, usize>,
    used: Vec<bool>,
}

impl<'a> Finder<'a> {
    pub(super) fn new(gguf: &'a Gguf, hyper: &'a Hyper) -> Self {
        let by_name = gguf.tensors().iter().enumerate().map(|(i, t)| (t.name.as_str(), i)).collect();
        Self { gguf, hyper, by_name, used: vec![false; gguf.tensors().len()] }
    }

    /// Names of the tensors that were not asked for, in the order of the file.
    pub(super) fn unused(&self) -> Vec<String> {
        let all = self.gguf.tensors().iter().zip(&self.used);
        all.filter(|(_, used)| !**used).map(|(t, _)| t.name.clone()).collect()
    }

    fn has(&self, name: &str) -> bool {
        self.by_name.contains_key(name)
    }

    fn take(&mut self, name: &str, wanted: Wanted) -> Result<TensorRef, RoleError> {
        let Wanted { role, k, rows, experts, float, also } = wanted;
        let tensor = || name.to_owned();
        let &index = self.by_name.get(name).ok_or_else(|| RoleError::Missing { tensor: tensor(), role })?;
        let info = &self.gguf.tensors()[index];
        let shape = [k, rows, experts].map(|n| n as u64);
        let other = also.map(|extents| extents.map(|n| n as u64));
        let found = trimmed(&info.shape);
        if found != trimmed(&shape) && other.as_ref().is_none_or(|other| found != trimmed(other)) {
            let mut expected = format!("{:?}", trimmed(&shape));
            if let Some(other) = &other {
                expected += &format!(" or {other:?}");
            }
            return Err(RoleError::Shape { tensor: tensor(), role, found: info.shape.clone(), expected });
        }
        let format =
            Format::try_from(info.ty).map_err(|source| RoleError::Format { tensor: tensor(), source })?;
        if float && !format.is_float() {
            return Err(RoleError::NotFloat { tensor: tensor(), role, format: format.name() });
        }
        if format.row_bytes(k).is_none() {
            return Err(RoleError::Blocks { tensor: tensor(), k, format: format.name() });
        }
        self.used[index] = true;
        let scale = if format == Format::Nvfp4 { self.scale(name, experts)? } else { None };
        Ok(TensorRef { index, format, rows, k, experts, scale })
    }

    fn take_opt(&mut self, name: &str, wanted: Wanted) -> Result<Option<TensorRef>, RoleError> {
        if self.has(name) { self.take(name, wanted).map(Some) } else { Ok(None) }
    }

    /// The factors that belong to the NVFP4 tensor `name`: one, or one per expert.
    fn scale(&mut self, name: &str, experts: usize) -> Result<Option<usize>, RoleError> {
        let Some(stem) = name.strip_suffix(".weight") else { return Ok(None) };
        let name = format!("{stem}.scale");
        let one =
            self.by_name.get(name.as_str()).is_some_and(|&i| trimmed(&self.gguf.tensors()[i].shape) == [1]);
        let factors = Wanted::vector("scale factors", if one { 1 } else { experts });
        Ok(self.take_opt(&name, factors)?.map(|found| found.index))
    }

    /// A grouped norm over all streams; some files keep the streams as rows.
    fn grouped(&mut self, name: &str, role: &'static str) -> Result<TensorRef, RoleError> {
        let also = Some([self.hyper.width, self.hyper.streams]);
        self.take(name, Wanted { also, ..Wanted::vector(role, self.hyper.residual()) })
    }

    fn mixer(&mut self, prefix: &str, injects: bool) -> Result<Mixer, RoleError> {
        let Hyper { mixer_rank: rank, streams, .. } = *self.hyper;
        let residual = self.hyper.residual();
        let inject = Wanted::matrix("a mixer's scatter weights", streams, residual);
        Ok(Mixer {
            norm: self.grouped(&format!("{prefix}_norm.weight"), "a mixer's norm")?,
            down: self
                .take(&format!("{prefix}_down.weight"), Wanted::matrix("a mixer's gates", rank, residual))?,
            up: self
                .take(&format!("{prefix}_up.weight"), Wanted::matrix("a mixer's gates", residual, rank))?,
            inject: injects.then(|| self.take(&format!("{prefix}_inject.weight"), inject)).transpose()?,
        })
    }

    pub(super) fn trunk(&mut self) -> Result<Trunk, RoleError> {
        let Hyper { vocab, width, .. } = *self.hyper;
        let token_embd =
            self.take("token_embd.weight", Wanted::matrix("the token embedding", vocab, width))?;
        let output = self.take_opt("output.weight", Wanted::matrix("the head", vocab, width))?;
        let head_mixer = self.mixer("output_hc", false)?;
        let ngram_table = self.ngram_table()?;
        let layers = self.hyper.layers.clone();
        let layers = layers.iter().enumerate().map(|(block, &kind)| self.layer(block, kind));
        Ok(Trunk {
            token_embd,
            layers: layers.collect::<Result<_, _>>()?,
            head_mixer,
            output: output.unwrap_or(token_embd),
            ngram_table,
        })
    }

    /// The table may have more rows than the hash reaches: it is padded.
    fn ngram_table(&mut self) -> Result<Option<TensorRef>, RoleError> {
        let Some(ple) = &self.hyper.ple else { return Ok(None) };
        let name = "per_layer_token_embd.weight";
        let stored = self.by_name.get(name).and_then(|&i| self.gguf.tensors()[i].shape.get(1).copied());
        let found = stored.unwrap_or(1);
        let rows = usize::try_from(found).unwrap_or(usize::MAX);
        let table = self.take(name, Wanted::matrix("the n-gram table", rows, ple.row_width))?;
        let needed = ple.table_rows();
        if found < needed {
            return Err(RoleError::TableRows { found, needed });
        }
        Ok(Some(table))
    }

    fn layer(&mut self, block: usize, kind: LayerKind) -> Result<Layer, RoleError> {
        let p = format!("blk.{block}");
        let ple = self.hyper.ple_slot(block).map(|_| self.ple(&p)).transpose()?;
        let attn_mixer = self.mixer(&format!("{p}.hc_attn"), true)?;
        let attention = match kind {
            LayerKind::Gdn => Attention::Gdn(self.gdn(&p)?),
            LayerKind::Qsa { .. } => Attention::Qsa(self.qsa(&p)?),
        };
        let ffn_mixer = self.mixer(&format!("{p}.hc_ffn"), true)?;
        Ok(Layer { ple, attn_mixer, attention, ffn_mixer, moe: self.moe(&p)? })
    }

    fn gdn(&mut self, p: &str) -> Result<Gdn, RoleError> {
        let Hyper { width, gdn, .. } = *self.hyper;
        let (channels, inner, heads) = (gdn.channels(), gdn.inner(), gdn.value_heads);
        let mut take = |name: &str, wanted| self.take(&format!("{p}.{name}"), wanted);
        Ok(Gdn {
            qkv: take("attn_qkv.weight", Wanted::matrix("a recurrent layer's projection", channels, width))?,
            gate: take("attn_gate.weight", Wanted::matrix("a recurrent layer's output gate", inner, width))?,
            conv1d: take(
                "ssm_conv1d.weight",
                Wanted::taps("a recurrent layer's convolution", channels, gdn.conv_kernel),
            )?,
            dt_bias: take("ssm_dt.bias", Wanted::vector("a recurrent layer's decay bias", heads))?,
            a: take("ssm_a", Wanted::vector("a recurrent layer's decay rate", heads))?,
            alpha: take("ssm_alpha.weight", Wanted::matrix("a recurrent layer's decay", heads, width))?,
            beta: take(
                "ssm_beta.weight",
                Wanted::matrix("a recurrent layer's write strength", heads, width),
            )?,
            norm: take("ssm_norm.weight", Wanted::vector("a recurrent layer's norm", gdn.value_dim))?,
            out: take("ssm_out.weight", Wanted::matrix("a recurrent layer's output", width, inner))?,
        })
    }

    fn qsa(&mut self, p: &str) -> Result<Qsa, RoleError> {
        let Hyper { width, attention, indexer, .. } = *self.hyper;
        let queries = attention.heads * attention.head_dim;
        let keys = attention.kv_heads * attention.head_dim;
        let mut take = |name: &str, wanted| self.take(&format!("{p}.{name}"), wanted);
        Ok(Qsa {
            q: take("attn_q.weight", Wanted::matrix("attention queries and gates", 2 * queries, width))?,
            k: take("attn_k.weight", Wanted::matrix("attention keys", keys, width))?,
            v: take("attn_v.weight", Wanted::matrix("attention values", keys, width))?,
            output: take("attn_output.weight", Wanted::matrix("attention output", width, queries))?,
            q_norm: take("attn_q_norm.weight", Wanted::vector("attention query norm", attention.head_dim))?,
            k_norm: take("attn_k_norm.weight", Wanted::vector("attention key norm", attention.head_dim))?,
            index_q: take(
                "indexer.q_proj.weight",
                Wanted::matrix("indexer queries", indexer.heads * indexer.dim, width),
            )?,
            index_k: take("indexer.k_proj.weight", Wanted::matrix("the indexer key", indexer.dim, width))?,
            index_q_norm: take("indexer.q_norm.weight", Wanted::vector("indexer query norm", indexer.dim))?,
            index_k_norm: take("indexer.k_norm.weight", Wanted::vector("indexer key norm", indexer.dim))?,
        })
    }

    fn moe(&mut self, p: &str) -> Result<Moe, RoleError> {
        let Hyper { width, moe, .. } = *self.hyper;
        let name = |name: &str| format!("{p}.{name}.weight");
        let stacked = |rows, k| Wanted::stacked("the experts", moe.experts, rows, k);
        let fused = name("ffn_gate_up_exps");
        let gate_up = if self.has(&fused) {
            GateUp::Fused(self.take(&fused, stacked(2 * moe.ffn, width))?)
        } else {
            GateUp::Split {
                gate: self.take(&name("ffn_gate_exps"), stacked(moe.ffn, width))?,
                up: self.take(&name("ffn_up_exps"), stacked(moe.ffn, width))?,
            }
        };
        let shared = |rows, k| Wanted::matrix("the shared expert", rows, k);
        Ok(Moe {
            router: self.take(&name("ffn_gate_inp"), Wanted::matrix("the router", moe.experts, width))?,
            gate_up,
            down: self.take(&name("ffn_down_exps"), stacked(width, moe.ffn))?,
            shared: SharedExpert {
                gate: self.take(&name("ffn_gate_shexp"), shared(moe.shared_ffn, width))?,
                up: self.take(&name("ffn_up_shexp"), shared(moe.shared_ffn, width))?,
                down: self.take(&name("ffn_down_shexp"), shared(width, moe.shared_ffn))?,
                weight: self.take(&name("ffn_gate_inp_shexp"), shared(1, width))?,
            },
        })
    }

    fn ple(&mut self, p: &str) -> Result<Ple, RoleError> {
        let (embedding, kernel) =
            self.hyper.ple.as_ref().map_or((0, 0), |ple| (ple.embedding(), ple.conv_kernel));
        let (width, residual) = (self.hyper.width, self.hyper.residual());
        let name = |name: &str| format!("{p}.{name}.weight");
        Ok(Ple {
            key: self.take(&name("ple_key"), Wanted::matrix("n-gram keys", residual, embedding))?,
            value: self.take(&name("ple_value"), Wanted::matrix("n-gram values", width, embedding))?,
            norm_key: self.grouped(&name("ple_norm_key"), "n-gram key norm")?,
            norm_query: self.grouped(&name("ple_norm_query"), "n-gram query norm")?,
            norm_conv: self.grouped(&name("ple_norm_conv"), "n-gram convolution norm")?,
            conv1d: self
                .take(&name("ple_conv1d"), Wanted::taps("the n-gram convolution", residual, kernel))?,
        })
    }

    pub(super) fn mtp(&mut self, draft: Draft) -> Result<Mtp, RoleError> {
        let Hyper { vocab, width, .. } = *self.hyper;
        let p = format!("blk.{}.nextn", draft.block);
        let name = |name: &str| format!("{p}.{name}.weight");
        Ok(Mtp {
            eh_proj: self.take(&name("eh_proj"), Wanted::matrix("the draft's join", width, 2 * width))?,
            enorm: self.take(&name("enorm"), Wanted::vector("the draft's embedding norm", width))?,
            hnorm: self.grouped(&name("hnorm"), "the draft's hidden norm")?,
            head_mixer: self.mixer(&format!("{p}.hc_head"), false)?,
            layer: self.layer(draft.block, LayerKind::Qsa { ratio: draft.ratio })?,
            embed_tokens: self
                .take_opt(&name("embed_tokens"), Wanted::matrix("the draft's embedding", vocab, width))?,
            shared_head_head: self
                .take_opt(&name("shared_head_head"), Wanted::matrix("the draft's head", vocab, width))?,
        })
    }
}
