//! A whole model in f64: the ops' oracles put together as docs/qwen4exp.md, section 2 says, over a file's own tensors.

use strata_model::roles::{self, GateUp};
use strata_model::{LayerKind, Model, TensorRef};
use strata_quant::{Format, dequantise};
use strata_testkit::oracle::{self, Rows, mul, rows};

/// A model's tensors, decoded, with their scale factors.
pub struct Whole<'m>(pub &'m Model);

impl Whole<'_> {
    /// The values of the tensor at `index`, whatever its shape.
    fn values(&self, index: usize) -> Vec<f32> {
        let info = &self.0.gguf.tensors()[index];
        let mut bytes = vec![0; info.bytes as usize];
        self.0.gguf.read_at(info, 0, &mut bytes).unwrap();
        let mut values = vec![0.0; info.shape.iter().product::<u64>() as usize];
        dequantise(Format::try_from(info.ty).unwrap(), &bytes, &mut values);
        values
    }

    /// A matrix per expert.
    fn stack(&self, tensor: &TensorRef) -> Vec<Rows> {
        let all = rows(&self.values(tensor.index), tensor.k);
        let mut stack: Vec<Rows> = all.chunks(tensor.rows).map(<[_]>::to_vec).collect();
        let scales = tensor.scale.map_or(vec![1.0], |index| self.values(index));
        for (i, matrix) in stack.iter_mut().enumerate() {
            let scale = f64::from(scales[i.min(scales.len() - 1)]);
            matrix.iter_mut().flatten().for_each(|value| *value *= scale);
        }
        stack
    }

    fn rows(&self, tensor: &TensorRef) -> Rows {
        self.stack(tensor).swap_remove(0)
    }

    fn vector(&self, tensor: &TensorRef) -> Vec<f64> {
        self.rows(tensor).concat()
    }

    fn eps(&self) -> f64 {
        f64::from(self.0.hyper.norm_eps)
    }

    fn mixer(&self, mixer: &roles::Mixer) -> oracle::Mixer {
        oracle::Mixer {
            norm: self.vector(&mixer.norm),
            down: self.rows(&mixer.down),
            up: self.rows(&mixer.up),
            inject: mixer.inject.as_ref().map_or(vec![], |inject| self.rows(inject)),
        }
    }

    fn gdn(&self, w: &roles::Gdn) -> oracle::Gdn {
        let g = &self.0.hyper.gdn;
        oracle::Gdn {
            key_heads: g.key_heads,
            value_heads: g.value_heads,
            key_dim: g.key_dim,
            value_dim: g.value_dim,
            qkv: self.rows(&w.qkv),
            gate: self.rows(&w.gate),
            conv: self.rows(&w.conv1d),
            dt_bias: self.vector(&w.dt_bias),
            a: self.vector(&w.a),
            alpha: self.rows(&w.alpha),
            beta: self.rows(&w.beta),
            norm: self.vector(&w.norm),
            out: self.rows(&w.out),
        }
    }

    fn qsa(&self, w: &roles::Qsa, block: usize) -> oracle::Qsa {
        let (a, indexer) = (&self.0.hyper.attention, &self.0.hyper.indexer);
        oracle::Qsa {
            heads: a.heads,
            kv_heads: a.kv_heads,
            head_dim: a.head_dim,
            rotary: a.rotary,
            rope_base: f64::from(a.rope_base),
            index_heads: indexer.heads,
            budget: indexer.budget,
            block,
            q: self.rows(&w.q),
            k: self.rows(&w.k),
            v: self.rows(&w.v),
            out: self.rows(&w.output),
            q_norm: self.vector(&w.q_norm),
            k_norm: self.vector(&w.k_norm),
            index_q: self.rows(&w.index_q),
            index_k: self.rows(&w.index_k),
            index_q_norm: self.vector(&w.index_q_norm),
            index_k_norm: self.vector(&w.index_k_norm),
        }
    }

    fn moe(&self, w: &roles::Moe) -> oracle::Moe {
        let (gates, ups) = match &w.gate_up {
            GateUp::Split { gate, up } => (self.stack(gate), self.stack(up)),
            GateUp::Fused(both) => {
                let split = self.stack(both).into_iter().map(|mut gate| {
                    let up = gate.split_off(both.rows / 2);
                    (gate, up)
                });
                split.unzip()
            }
        };
        let experts = gates.into_iter().zip(ups).zip(self.stack(&w.down));
        let [gate, up, down] = [&w.shared.gate, &w.shared.up, &w.shared.down].map(|w| self.rows(w));
        oracle::Moe {
            router: self.rows(&w.router),
            used: self.0.hyper.moe.used,
            experts: experts.map(|((gate, up), down)| oracle::Swiglu { gate, up, down }).collect(),
            shared: oracle::Swiglu { gate, up, down },
            scalar: self.vector(&w.shared.weight),
        }
    }

    /// The n-gram block number `block` over the residual `x` of `ids`.
    fn ngram(&self, w: &roles::Ple, block: usize, ids: &[u32], x: &mut Rows) {
        let (ple, table) = (self.0.hyper.ple.as_ref().unwrap(), self.0.trunk.ngram_table.as_ref().unwrap());
        let (mut places, table) = (Vec::new(), self.rows(table));
        ple.hashes[block].rows(&[], ids, &mut places);
        let embedded = places.chunks(ple.heads);
        let embedded = embedded.map(|rows| rows.iter().flat_map(|&r| table[r as usize].clone()).collect());
        let oracle = oracle::Ngram {
            streams: self.0.hyper.streams,
            dilation: ple.ngram_size,
            key: self.rows(&w.key),
            value: self.rows(&w.value),
            norm_key: self.vector(&w.norm_key),
            norm_query: self.vector(&w.norm_query),
            norm_conv: self.vector(&w.norm_conv),
            conv: self.rows(&w.conv1d),
        };
        let delta = oracle.run(x, &embedded.collect(), self.eps());
        x.iter_mut().flatten().zip(delta.iter().flatten()).for_each(|(x, delta)| *x += delta);
    }

    /// Reads `x` through a mixer, and adds what `f` makes of it.
    fn mixed(&self, mixer: &roles::Mixer, x: &mut Rows, f: impl FnOnce(&Rows) -> Rows) {
        let (mixer, d) = (self.mixer(mixer), self.0.hyper.width);
        let read = x.iter().map(|x| mixer.read(x, self.0.hyper.streams, self.eps()));
        let (u, inject): (Rows, Rows) = read.unzip();
        for ((x, y), inject) in x.iter_mut().zip(f(&u)).zip(inject) {
            x.iter_mut().enumerate().for_each(|(i, x)| *x += inject[i / d] * y[i % d]);
        }
    }

    fn layer(&self, layer: &roles::Layer, kind: LayerKind, x: &mut Rows) {
        let eps = self.eps();
        self.mixed(&layer.attn_mixer, x, |u| match (&layer.attention, kind) {
            (roles::Attention::Gdn(w), LayerKind::Gdn) => self.gdn(w).run(u, eps).0,
            (roles::Attention::Qsa(w), LayerKind::Qsa { ratio }) => self.qsa(w, ratio).run(u, eps),
            _ => panic!("tensors of another kind than the metadata says"),
        });
        let moe = self.moe(&layer.moe);
        self.mixed(&layer.ffn_mixer, x, |u| u.iter().map(|u| moe.run(u)).collect());
    }

    fn head(&self, mixer: &roles::Mixer, output: &TensorRef, x: &Rows) -> Rows {
        let (mixer, output) = (self.mixer(mixer), self.rows(output));
        x.iter().map(|x| mul(&output, &mixer.read(x, self.0.hyper.streams, self.eps()).0)).collect()
    }

    /// The logits of a sequence's first tokens, and those of the draft block, if there is one, for all but the last.
    pub fn logits(&self, ids: &[u32]) -> (Rows, Rows) {
        let Model { hyper, trunk, mtp, .. } = self.0;
        let table = self.rows(&trunk.token_embd);
        let mut x: Rows = ids.iter().map(|&id| table[id as usize].repeat(hyper.streams)).collect();
        for (at, (layer, &kind)) in trunk.layers.iter().zip(&hyper.layers).enumerate() {
            if let Some(ple) = &layer.ple {
                self.ngram(ple, hyper.ple_slot(at).unwrap(), ids, &mut x);
            }
            self.layer(layer, kind, &mut x);
        }
        let logits = self.head(&trunk.head_mixer, &trunk.output, &x);
        let (Some(mtp), Some(draft)) = (mtp, hyper.draft) else { return (logits, vec![]) };
        let (eh, e_norm, h_norm) =
            (self.rows(&mtp.eh_proj), self.vector(&mtp.enorm), self.vector(&mtp.hnorm));
        let join = |(x, &next): (&Vec<f64>, &u32)| {
            oracle::draft_join(&eh, &e_norm, &h_norm, &table[next as usize], x, self.eps())
        };
        let mut x: Rows = x.iter().zip(&ids[1..]).map(join).collect();
        self.layer(&mtp.layer, LayerKind::Qsa { ratio: draft.ratio }, &mut x);
        (logits, self.head(&mtp.head_mixer, &trunk.output, &x))
    }
}
