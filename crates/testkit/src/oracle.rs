//! Slow float64 oracles of the ops, written from docs/qwen4exp.md section 2 as plainly as it is.
//!
//! They know nothing of the engine: no windows, caches, versions or formats. A sequence is a list of rows from its first token
//! on, a matrix is rows of f64. Rounding plays no part, so results are compared within a tolerance.

/// A matrix as rows.
pub type Rows = Vec<Vec<f64>>;

/// Cuts row-major values into rows.
pub fn rows(values: &[f32], width: usize) -> Rows {
    values.chunks_exact(width).map(|row| row.iter().map(|&x| f64::from(x)).collect()).collect()
}

/// The dot product.
pub fn dot(a: &[f64], b: &[f64]) -> f64 {
    assert_eq!(a.len(), b.len());
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

/// `W x`.
pub fn mul(w: &Rows, x: &[f64]) -> Vec<f64> {
    w.iter().map(|row| dot(row, x)).collect()
}

/// The logistic function.
pub fn sigmoid(x: f64) -> f64 {
    1.0 / (1.0 + (-x).exp())
}

/// `x sigmoid(x)`.
pub fn silu(x: f64) -> f64 {
    x * sigmoid(x)
}

/// `x / sqrt(mean(x^2) + eps) * gamma`.
pub fn rms(x: &[f64], gamma: &[f64], eps: f64) -> Vec<f64> {
    let scale = 1.0 / (dot(x, x) / x.len() as f64 + eps).sqrt();
    x.iter().zip(gamma).map(|(x, gamma)| x * scale * gamma).collect()
}

/// [`rms`] of each group of `width` values.
pub fn grouped(x: &[f64], gamma: &[f64], width: usize, eps: f64) -> Vec<f64> {
    x.chunks(width).zip(gamma.chunks(width)).flat_map(|(x, gamma)| rms(x, gamma, eps)).collect()
}

/// A hyper-connection mixer, section 2.1.
pub struct Mixer {
    /// `[S * D]`
    pub norm: Vec<f64>,
    /// `[r, S * D]`
    pub down: Rows,
    /// `[S * D, r]`
    pub up: Rows,
    /// `[S, S * D]`; empty for the final mixer.
    pub inject: Rows,
}

impl Mixer {
    /// The mixed input `[D]` and the inject weights `[S]` of one row `[S * D]`.
    pub fn read(&self, x: &[f64], streams: usize, eps: f64) -> (Vec<f64>, Vec<f64>) {
        let (d, s) = (x.len() / streams, streams as f64);
        let n = grouped(x, &self.norm, d, eps);
        let low: Vec<f64> = mul(&self.down, &n).into_iter().map(|x| silu(x / s)).collect();
        let gates = mul(&self.up, &low);
        let u =
            (0..d).map(|i| (0..streams).map(|s| sigmoid(gates[s * d + i]) * n[s * d + i]).sum::<f64>() / s);
        (u.collect(), mul(&self.inject, &n).into_iter().map(|x| 2.0 * sigmoid(x / s)).collect())
    }
}

/// Gated DeltaNet, section 2.2.
pub struct Gdn {
    /// Key heads.
    pub key_heads: usize,
    /// Value heads.
    pub value_heads: usize,
    /// Width of a key head.
    pub key_dim: usize,
    /// Width of a value head.
    pub value_dim: usize,
    /// `[channels, D]`
    pub qkv: Rows,
    /// `[value_width, D]`
    pub gate: Rows,
    /// `[channels, kernel]`
    pub conv: Rows,
    /// `[value_heads]`
    pub dt_bias: Vec<f64>,
    /// `[value_heads]`
    pub a: Vec<f64>,
    /// `[value_heads, D]`
    pub alpha: Rows,
    /// `[value_heads, D]`
    pub beta: Rows,
    /// `[value_dim]`
    pub norm: Vec<f64>,
    /// `[D, value_width]`
    pub out: Rows,
}

impl Gdn {
    /// The outputs of a sequence's first rows, and the state after them, `[value_heads][value_dim][key_dim]`.
    pub fn run(&self, u: &Rows, eps: f64) -> (Rows, Vec<f64>) {
        let (hk, hv, dk, dv) = (self.key_heads, self.value_heads, self.key_dim, self.value_dim);
        let qkv: Rows = u.iter().map(|u| mul(&self.qkv, u)).collect();
        let kernel = self.conv[0].len();
        let mut state = vec![0.0; hv * dv * dk];
        let mut outputs = Vec::new();
        for (t, u) in u.iter().enumerate() {
            let channel = |c: usize| {
                let taps = (0..kernel).filter(|j| t + j + 1 >= kernel);
                silu(taps.map(|j| self.conv[c][j] * qkv[t + j + 1 - kernel][c]).sum())
            };
            let mixed: Vec<f64> = (0..qkv[t].len()).map(channel).collect();
            let l2 = |x: &[f64]| x.iter().map(|v| v / (dot(x, x) + eps).sqrt()).collect::<Vec<f64>>();
            let (alpha, beta, z) = (mul(&self.alpha, u), mul(&self.beta, u), mul(&self.gate, u));
            let mut gated = Vec::new();
            for h in 0..hv {
                let key_head = h % hk;
                let q = l2(&mixed[key_head * dk..][..dk]);
                let k = l2(&mixed[(hk + key_head) * dk..][..dk]);
                let v = &mixed[2 * hk * dk + h * dv..][..dv];
                let decay = (self.a[h] * (1.0 + (alpha[h] + self.dt_bias[h]).exp()).ln()).exp();
                let mut o = Vec::new();
                for (c, column) in state[h * dv * dk..][..dv * dk].chunks_mut(dk).enumerate() {
                    column.iter_mut().for_each(|s| *s *= decay);
                    let delta = sigmoid(beta[h]) * (v[c] - dot(column, &k));
                    column.iter_mut().zip(&k).for_each(|(s, k)| *s += delta * k);
                    o.push(dot(column, &q) / (dk as f64).sqrt());
                }
                let z = &z[h * dv..][..dv];
                gated.extend(rms(&o, &self.norm, eps).iter().zip(z).map(|(o, &z)| o * sigmoid(z)));
            }
            outputs.push(mul(&self.out, &gated));
        }
        (outputs, state)
    }
}

/// Block-sparse attention, section 2.3.
pub struct Qsa {
    /// Query heads.
    pub heads: usize,
    /// Key and value heads.
    pub kv_heads: usize,
    /// Width of a head.
    pub head_dim: usize,
    /// Rotated dimensions.
    pub rotary: usize,
    /// Base of the rotary frequencies.
    pub rope_base: f64,
    /// Index query heads.
    pub index_heads: usize,
    /// Tokens to select by blocks.
    pub budget: usize,
    /// Tokens per block.
    pub block: usize,
    /// `[heads * 2 * head_dim, D]`
    pub q: Rows,
    /// `[kv_heads * head_dim, D]`
    pub k: Rows,
    /// `[kv_heads * head_dim, D]`
    pub v: Rows,
    /// `[D, heads * head_dim]`
    pub out: Rows,
    /// `[head_dim]`
    pub q_norm: Vec<f64>,
    /// `[head_dim]`
    pub k_norm: Vec<f64>,
    /// `[index_heads * index_dim, D]`
    pub index_q: Rows,
    /// `[index_dim, D]`
    pub index_k: Rows,
    /// `[index_dim]`
    pub index_q_norm: Vec<f64>,
    /// `[index_dim]`
    pub index_k_norm: Vec<f64>,
}

impl Qsa {
    fn rope(&self, x: &[f64], position: usize) -> Vec<f64> {
        let half = self.rotary / 2;
        let mut out = x.to_vec();
        for i in 0..half {
            let angle = position as f64 * self.rope_base.powf(-2.0 * i as f64 / self.rotary as f64);
            out[i] = x[i] * angle.cos() - x[i + half] * angle.sin();
            out[i + half] = x[i + half] * angle.cos() + x[i] * angle.sin();
        }
        out
    }

    /// Which positions the query at `position` attends to.
    fn selected(&self, u: &Rows, position: usize, eps: f64) -> Vec<usize> {
        let visible = position + 1;
        if visible / self.block <= self.budget / self.block {
            return (0..visible).collect();
        }
        let dim = self.index_k_norm.len();
        let queries: Rows = mul(&self.index_q, &u[position])
            .chunks(dim)
            .map(|q| self.rope(&rms(q, &self.index_q_norm, eps), position))
            .collect();
        let mut ranked: Vec<(f64, usize)> = (0..visible / self.block)
            .map(|block| {
                let members = block * self.block..(block + 1) * self.block;
                let mut mean = vec![0.0; dim];
                for key in members.clone().map(|t| mul(&self.index_k, &u[t])) {
                    mean.iter_mut().zip(key).for_each(|(mean, key)| *mean += key / self.block as f64);
                }
                let key = self.rope(&rms(&mean, &self.index_k_norm, eps), members.start);
                (queries.iter().map(|q| dot(q, &key).max(0.0)).sum(), block)
            })
            .collect();
        ranked.sort_by(|a, b| b.0.total_cmp(&a.0).then(a.1.cmp(&b.1)));
        ranked.truncate(self.budget / self.block);
        let mut blocks: Vec<usize> = ranked.into_iter().map(|(_, block)| block).collect();
        blocks.sort_unstable();
        let tail = visible / self.block * self.block..visible;
        blocks.into_iter().flat_map(|b| b * self.block..(b + 1) * self.block).chain(tail).collect()
    }

    /// The outputs of a sequence's first rows.
    pub fn run(&self, u: &Rows, eps: f64) -> Rows {
        let dim = self.head_dim;
        let per_head = |w: &Rows, norm: Option<&[f64]>| -> Vec<Rows> {
            let rows = u.iter().enumerate();
            let head = |x: &[f64], t| norm.map_or(x.to_vec(), |norm| self.rope(&rms(x, norm, eps), t));
            rows.map(|(t, u)| mul(w, u).chunks(dim).map(|x| head(x, t)).collect()).collect()
        };
        let (keys, values) = (per_head(&self.k, Some(&self.k_norm)), per_head(&self.v, None));
        let mut outputs = Vec::new();
        for (t, row) in u.iter().enumerate() {
            let selected = self.selected(u, t, eps);
            let projected = mul(&self.q, row);
            let mut attended = Vec::new();
            for (h, both) in projected.chunks(2 * dim).enumerate() {
                let kv_head = h / (self.heads / self.kv_heads);
                let query = self.rope(&rms(&both[..dim], &self.q_norm, eps), t);
                let scores: Vec<f64> =
                    selected.iter().map(|&j| dot(&query, &keys[j][kv_head]) / (dim as f64).sqrt()).collect();
                let largest = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
                let weights: Vec<f64> = scores.iter().map(|s| (s - largest).exp()).collect();
                let total: f64 = weights.iter().sum();
                for (i, &gate) in both[dim..].iter().enumerate() {
                    let sum: f64 =
                        weights.iter().zip(&selected).map(|(w, &j)| w * values[j][kv_head][i]).sum();
                    attended.push(sum / total * sigmoid(gate));
                }
            }
            outputs.push(mul(&self.out, &attended));
        }
        outputs
    }
}

/// A SwiGLU: `down(silu(gate x) * (up x))`.
pub struct Swiglu {
    /// `[width, D]`
    pub gate: Rows,
    /// `[width, D]`
    pub up: Rows,
    /// `[D, width]`
    pub down: Rows,
}

impl Swiglu {
    /// One row.
    pub fn run(&self, x: &[f64]) -> Vec<f64> {
        let inner: Vec<f64> =
            mul(&self.gate, x).iter().zip(mul(&self.up, x)).map(|(g, u)| silu(*g) * u).collect();
        mul(&self.down, &inner)
    }
}

/// The expert stage, section 2.4.
pub struct Moe {
    /// `[experts, D]`
    pub router: Rows,
    /// Experts per row.
    pub used: usize,
    /// The routed experts.
    pub experts: Vec<Swiglu>,
    /// The shared expert.
    pub shared: Swiglu,
    /// `[D]`
    pub scalar: Vec<f64>,
}

impl Moe {
    /// One row.
    pub fn run(&self, u: &[f64]) -> Vec<f64> {
        let logits = mul(&self.router, u);
        let largest = logits.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let mut shares: Vec<(f64, usize)> =
            logits.iter().enumerate().map(|(e, x)| ((x - largest).exp(), e)).collect();
        shares.sort_by(|a, b| b.0.total_cmp(&a.0).then(a.1.cmp(&b.1)));
        shares.truncate(self.used);
        let total: f64 = shares.iter().map(|(p, _)| p).sum();
        let gate = sigmoid(dot(&self.scalar, u));
        let mut y: Vec<f64> = self.shared.run(u).into_iter().map(|x| gate * x).collect();
        for (p, e) in shares {
            y.iter_mut().zip(self.experts[e].run(u)).for_each(|(y, x)| *y += p / total * x);
        }
        y
    }
}

/// The n-gram block, section 2.5.
pub struct Ngram {
    /// Streams.
    pub streams: usize,
    /// Dilation of the convolution.
    pub dilation: usize,
    /// `[S * D, heads * row]`
    pub key: Rows,
    /// `[D, heads * row]`
    pub value: Rows,
    /// `[S * D]`
    pub norm_key: Vec<f64>,
    /// `[S * D]`
    pub norm_query: Vec<f64>,
    /// `[S * D]`
    pub norm_conv: Vec<f64>,
    /// `[S * D, kernel]`
    pub conv: Rows,
}

impl Ngram {
    /// What is added to each of a sequence's first rows `x`, whose table rows, side by side, are `e`.
    pub fn run(&self, x: &Rows, e: &Rows, eps: f64) -> Rows {
        let d = self.value.len();
        let mut normed: Rows = Vec::new();
        let mut deltas = Vec::new();
        for (x, e) in x.iter().zip(e) {
            let key = grouped(&mul(&self.key, e), &self.norm_key, d, eps);
            let query = grouped(x, &self.norm_query, d, eps);
            let value = mul(&self.value, e);
            let mut gated = Vec::new();
            for s in 0..self.streams {
                let score = dot(&key[s * d..][..d], &query[s * d..][..d]) / (d as f64).sqrt();
                let root = score.abs().max(1e-6).sqrt();
                let gate = sigmoid(if score == 0.0 { 0.0 } else { score.signum() * root });
                gated.extend(value.iter().map(|v| gate * v));
            }
            normed.push(grouped(&gated, &self.norm_conv, d, eps));
            let (t, kernel) = (normed.len() - 1, self.conv[0].len());
            let convolved = (0..gated.len()).map(|c| {
                let taps = (0..kernel).filter(|j| t >= (kernel - 1 - j) * self.dilation);
                silu(taps.map(|j| self.conv[c][j] * normed[t - (kernel - 1 - j) * self.dilation][c]).sum())
            });
            deltas.push(convolved.zip(&gated).map(|(c, g)| c + g).collect());
        }
        deltas
    }
}

/// The draft block's join, section 2.6: one row's `[S * D]`, from the next token's embedding and the residual.
pub fn draft_join(
    eh_proj: &Rows,
    e_norm: &[f64],
    h_norm: &[f64],
    embedding: &[f64],
    x: &[f64],
    eps: f64,
) -> Vec<f64> {
    let d = embedding.len();
    let e = rms(embedding, e_norm, eps);
    let h = grouped(x, h_norm, d, eps);
    h.chunks(d).flat_map(|h| mul(eh_proj, &[e.as_slice(), h].concat())).collect()
}
