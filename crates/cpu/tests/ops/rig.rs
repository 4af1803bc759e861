//! A small model of random weights with one layer of every kind, and a backend that runs its ops.

use std::sync::Arc;

use strata_backend::{
    Backend, Buffer, BufferSpec, Build, BuildHostExperts, ExpertWeights, GdnShape, GdnWeights, HostExperts,
    KvFormat, Layer, LayerState, MixerWeights, MoeShape, NgramShape, NgramWeights, Op, QsaShape, QsaWeights,
    Shape, SharedWeights, Span, Spec, Weight, WeightData, Window,
};
use strata_cpu::{Cpu, CpuHostExperts};
use strata_plan::{Arena, Plan};
use strata_quant::{Format, Isa, dequantise};
use strata_residency::{ExpertStore, LayerSource};
use strata_testkit::oracle::{Rows, rows};
use strata_topology::Topology;

/// Random numbers: splitmix64.
pub struct Random(pub u64);

impl Random {
    pub fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let x = (self.0 ^ self.0 >> 30).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        let x = (x ^ x >> 27).wrapping_mul(0x94D0_49BB_1331_11EB);
        x ^ x >> 31
    }

    /// Between -1 and 1.
    pub fn unit(&mut self) -> f32 {
        (self.bits() >> 40) as f32 / (1 << 23) as f32 - 1.0
    }

    pub fn floats(&mut self, n: usize, scale: f32) -> Vec<f32> {
        (0..n).map(|_| self.unit() * scale).collect()
    }
}

/// What a rig is made of.
#[derive(Clone)]
pub struct Recipe {
    pub shape: Shape,
    /// Tokens of a block of the attention layer; the draft block's layer has half as many.
    pub block: usize,
    /// Of the matrices that may be in a block format; the others are F32.
    pub format: Format,
    /// Of the experts' gate, up and down rows, if others.
    pub experts: Option<[Format; 3]>,
    pub kv: KvFormat,
    pub context: usize,
    pub window: usize,
    pub sequences: usize,
    pub threads: usize,
    pub isa: Isa,
    /// The least work worth another task; none for the backend's own.
    pub grain: Option<usize>,
    pub seed: u64,
}

/// Odd on purpose: three streams, no width a multiple of 32, key heads and value heads that differ.
pub fn odd() -> Recipe {
    Recipe {
        shape: Shape {
            hidden: 40,
            streams: 3,
            mixer_rank: 10,
            vocab: 77,
            norm_eps: 1e-6,
            gdn: Some(GdnShape { key_heads: 2, value_heads: 6, key_dim: 12, value_dim: 20, conv_kernel: 4 }),
            qsa: Some(QsaShape {
                heads: 6,
                kv_heads: 2,
                head_dim: 20,
                rotary: 8,
                rope_base: 1e4,
                index_heads: 3,
                index_dim: 12,
                budget: 12,
            }),
            moe: MoeShape { experts: 7, used: 3, width: 24, shared_width: 18 },
            ngram: Some(NgramShape { heads: 4, row: 10, conv_kernel: 3, dilation: 2 }),
        },
        block: 2,
        format: Format::F32,
        experts: None,
        kv: KvFormat::F32,
        context: 96,
        window: 96,
        sequences: 3,
        threads: 2,
        isa: Isa::detect(),
        grain: None,
        seed: 1,
    }
}

/// Widths as real models have them, in block formats.
pub fn even() -> Recipe {
    Recipe {
        shape: Shape {
            hidden: 64,
            streams: 4,
            mixer_rank: 32,
            vocab: 96,
            norm_eps: 1e-6,
            gdn: Some(GdnShape { key_heads: 2, value_heads: 4, key_dim: 32, value_dim: 32, conv_kernel: 4 }),
            qsa: Some(QsaShape {
                heads: 4,
                kv_heads: 2,
                head_dim: 32,
                rotary: 16,
                rope_base: 1e7,
                index_heads: 2,
                index_dim: 32,
                budget: 16,
            }),
            moe: MoeShape { experts: 8, used: 2, width: 32, shared_width: 32 },
            ngram: Some(NgramShape { heads: 2, row: 32, conv_kernel: 4, dilation: 3 }),
        },
        block: 4,
        format: Format::Q8_0,
        ..odd()
    }
}

/// Buffers, in the order of the spec.
pub const X: Buffer = Buffer(0);
pub const U: Buffer = Buffer(1);
pub const Y: Buffer = Buffer(2);
pub const INJECT: Buffer = Buffer(3);
pub const LOGITS: Buffer = Buffer(4);
pub const OUT: Buffer = Buffer(5);

pub struct Rig {
    pub recipe: Recipe,
    pub spec: Spec,
    pub store: Arc<ExpertStore>,
    pub backend: Box<dyn Backend>,
    /// Reads a counter, whose growth in `submit` is added to `counted`.
    pub counter: fn() -> u64,
    pub counted: u64,
    pub table: Weight,
    pub mixer: MixerWeights,
    pub final_mixer: MixerWeights,
    pub gdn: GdnWeights,
    pub qsa: QsaWeights,
    pub ngram: NgramWeights,
    pub router: Weight,
    pub shared: SharedWeights,
    pub experts: ExpertWeights,
    pub output: Weight,
    pub eh_proj: Weight,
    pub e_norm: Weight,
    pub h_norm: Weight,
    /// Every weight's values, by handle.
    values: Vec<Rows>,
    /// Gate, up and down of every expert.
    pub expert_values: Vec<[Rows; 3]>,
}

/// The layer with the n-gram block and GDN.
pub const GDN: Layer = Layer(0);
/// The attention layer.
pub const QSA: Layer = Layer(1);
/// A draft block's layer.
pub const DRAFT: Layer = Layer(2);

struct Maker {
    random: Random,
    list: Vec<WeightData>,
    values: Vec<Rows>,
    format: Format,
}

impl Maker {
    fn add(&mut self, format: Format, n: usize, k: usize, scale: f32, offset: f32) -> Weight {
        let (bytes, values) = matrix(&mut self.random, format, n, k, scale, offset);
        let name = format!("w{}", self.list.len());
        self.list.push(WeightData { name, format, rows: n, k, bytes: bytes.into(), scale: None });
        self.values.push(rows(&values, k));
        Weight(self.list.len() as u32 - 1)
    }

    /// A matrix in the recipe's format.
    fn matrix(&mut self, n: usize, k: usize) -> Weight {
        self.add(self.format, n, k, 2.0 / (k as f32).sqrt(), 0.0)
    }

    /// A float matrix.
    fn float(&mut self, n: usize, k: usize) -> Weight {
        self.add(Format::F32, n, k, 2.0 / (k as f32).sqrt(), 0.0)
    }

    /// Gammas about 1.
    fn gamma(&mut self, n: usize) -> Weight {
        self.add(Format::F32, 1, n, 0.4, 1.0)
    }
}

/// Random weights: bytes, and the values they decode to.
pub fn matrix(
    random: &mut Random,
    format: Format,
    n: usize,
    k: usize,
    scale: f32,
    offset: f32,
) -> (Vec<u8>, Vec<f32>) {
    let mut values: Vec<f32> = random.floats(n * k, scale).into_iter().map(|x| x + offset).collect();
    let bytes: Vec<u8> = match format {
        Format::F32 => values.iter().flat_map(|x| x.to_le_bytes()).collect(),
        Format::F16 => values.iter().flat_map(|&x| strata_quant::math::f32_to_f16(x).to_le_bytes()).collect(),
        // Formats whose blocks start with an f16 scale: that, then anything.
        _ => (0..n * k / format.block_len())
            .flat_map(|_| {
                let d = strata_quant::math::f32_to_f16(scale / 64.0).to_le_bytes();
                let rest = (2..format.block_bytes()).map(|_| random.bits() as u8).collect::<Vec<u8>>();
                [d.to_vec(), rest].concat()
            })
            .collect(),
    };
    dequantise(format, &bytes, &mut values);
    (bytes, values)
}

fn cpu(recipe: &Recipe) -> Cpu {
    let assignment = Topology::read().assign(Some(recipe.threads)).unwrap();
    let cpu = Cpu::new(assignment, recipe.isa);
    match recipe.grain {
        Some(grain) => cpu.with_grain(grain),
        None => cpu,
    }
}

impl Rig {
    pub fn new(recipe: Recipe) -> Rig {
        Rig::build(recipe, |_, build| build())
    }

    /// As `new`; `around` is given the plan and builds the backend.
    pub fn build(
        recipe: Recipe,
        around: impl FnOnce(&Plan, &mut dyn FnMut() -> Box<dyn Backend>) -> Box<dyn Backend>,
    ) -> Rig {
        let shape = recipe.shape.clone();
        let (d, wide, rank) = (shape.hidden, shape.streams * shape.hidden, shape.mixer_rank);
        let mut m = Maker {
            random: Random(recipe.seed),
            list: Vec::new(),
            values: Vec::new(),
            format: recipe.format,
        };
        let g = shape.gdn.unwrap();
        let q = shape.qsa.clone().unwrap();
        let n = shape.ngram.unwrap();
        let moe = shape.moe;
        let table = m.matrix(shape.vocab, d);
        let mixer = MixerWeights {
            norm: m.gamma(wide),
            down: m.matrix(rank, wide),
            up: m.matrix(wide, rank),
            inject: Some(m.matrix(shape.streams, wide)),
        };
        let final_mixer = MixerWeights {
            norm: m.gamma(wide),
            down: m.matrix(rank, wide),
            up: m.matrix(wide, rank),
            inject: None,
        };
        let gdn = GdnWeights {
            qkv: m.matrix(g.channels(), d),
            gate: m.matrix(g.value_width(), d),
            conv: m.add(Format::F32, g.channels(), g.conv_kernel, 1.0, 0.0),
            dt_bias: m.add(Format::F32, 1, g.value_heads, 1.0, -2.0),
            a: m.add(Format::F32, 1, g.value_heads, 0.5, -1.0),
            alpha: m.matrix(g.value_heads, d),
            beta: m.matrix(g.value_heads, d),
            norm: m.gamma(g.value_dim),
            out: m.matrix(d, g.value_width()),
        };
        let qsa = QsaWeights {
            q: m.matrix(q.heads * 2 * q.head_dim, d),
            k: m.matrix(q.kv_heads * q.head_dim, d),
            v: m.matrix(q.kv_heads * q.head_dim, d),
            out: m.matrix(d, q.heads * q.head_dim),
            q_norm: m.gamma(q.head_dim),
            k_norm: m.gamma(q.head_dim),
            index_q: m.float(q.index_heads * q.index_dim, d),
            index_k: m.float(q.index_dim, d),
            index_q_norm: m.gamma(q.index_dim),
            index_k_norm: m.gamma(q.index_dim),
        };
        let ngram = NgramWeights {
            key: m.matrix(wide, n.heads * n.row),
            value: m.matrix(d, n.heads * n.row),
            norm_key: m.gamma(wide),
            norm_query: m.gamma(wide),
            norm_conv: m.gamma(wide),
            conv: m.add(Format::F16, wide, n.conv_kernel, 1.0, 0.0),
        };
        let router = m.float(moe.experts, d);
        let shared = SharedWeights {
            gate: m.matrix(moe.shared_width, d),
            up: m.matrix(moe.shared_width, d),
            down: m.matrix(d, moe.shared_width),
            scalar: m.add(Format::F32, 1, d, 0.3, 0.0),
        };
        let output = m.matrix(shape.vocab, d);
        let (eh_proj, e_norm, h_norm) = (m.matrix(d, 2 * d), m.gamma(d), m.gamma(wide));

        let mut expert_values = vec![[vec![], vec![], vec![]]; moe.experts];
        let formats = recipe.experts.unwrap_or([recipe.format; 3]);
        let mut tensor = |at: usize, n: usize, k: usize| {
            let mut all = Vec::new();
            for expert in &mut expert_values {
                let scale = 2.0 / (k as f32).sqrt();
                let (bytes, values) = matrix(&mut m.random, formats[at], n, k, scale, 0.0);
                all.extend(bytes);
                expert[at] = rows(&values, k);
            }
            strata_residency::Bytes::from(all)
        };
        let (gate, up, down) = (tensor(0, moe.width, d), tensor(1, moe.width, d), tensor(2, d, moe.width));
        let mut store = ExpertStore::new(vec![], Box::new(|| Ok(())));
        for layer in 0..3 {
            let source =
                LayerSource::split(moe.experts as u16, gate.clone(), up.clone(), down.clone()).unwrap();
            store.add_layer(layer, source).unwrap();
        }

        let buffer = |name, width| BufferSpec { name, rows: recipe.window, width };
        let spec = Spec {
            shape: shape.clone(),
            layers: vec![
                LayerState { gdn: true, qsa: None, ngram: true },
                LayerState { gdn: false, qsa: Some(recipe.block), ngram: false },
                LayerState { gdn: false, qsa: Some(recipe.block / 2), ngram: false },
            ],
            sequences: recipe.sequences,
            checkpoints: 2,
            context: recipe.context,
            kv: recipe.kv,
            window: recipe.window,
            buffers: vec![
                buffer("x", wide),
                buffer("u", d),
                buffer("y", d),
                buffer("inject", shape.streams),
                buffer("logits", shape.vocab),
                buffer("out", wide),
            ],
        };
        let cpu = cpu(&recipe);
        let mut plan = Plan::new();
        let described = cpu.describe(&spec, &m.list, &[], &mut plan).unwrap();
        let arena = Arena::new(&plan).unwrap();
        let store = Arc::new(store);
        let mut parts = Some((cpu, spec.clone(), described, arena, m.list, Arc::clone(&store)));
        let backend = around(&plan, &mut || {
            let (cpu, spec, described, arena, weights, store) = parts.take().unwrap();
            cpu.build(spec, described, arena, weights, store).unwrap()
        });
        let [gate, up, down] = formats;
        let experts = ExpertWeights { gate, up, down, scales: [None; 3] };
        Rig {
            spec,
            store,
            backend,
            counter: || 0,
            counted: 0,
            table,
            mixer,
            final_mixer,
            gdn,
            qsa,
            ngram,
            router,
            shared,
            experts,
            output,
            eh_proj,
            e_norm,
            h_norm,
            values: m.values,
            expert_values,
            recipe,
        }
    }

    /// Somebody who computes the same experts for a device.
    pub fn host(&self) -> Box<dyn HostExperts> {
        self.host_with(&self.store)
    }

    /// The same, with experts from another store.
    pub fn host_with(&self, store: &Arc<ExpertStore>) -> Box<dyn HostExperts> {
        let host = Box::new(CpuHostExperts(cpu(&self.recipe)));
        let mut plan = Plan::new();
        let region = host.describe(&self.spec, &mut plan);
        let mut arena = Arena::new(&plan).unwrap();
        let built = host.build(&self.spec, region, &mut arena, Arc::clone(store)).unwrap();
        assert_eq!(arena.taken_bytes(), plan.arena_bytes());
        built
    }

    pub fn submit(&mut self, op: Op<'_>) {
        let before = (self.counter)();
        self.backend.submit(&op).unwrap();
        self.counted += (self.counter)() - before;
    }

    /// A weight's values.
    pub fn rows(&self, w: Weight) -> Rows {
        self.values[w.0 as usize].clone()
    }

    /// A vector's values.
    pub fn vector(&self, w: Weight) -> Vec<f64> {
        self.values[w.0 as usize].concat()
    }

    /// The first `rows` rows of a buffer.
    pub fn read(&mut self, buffer: Buffer, rows: usize) -> Vec<f32> {
        let mut out = vec![0.0; rows * self.spec.buffer(buffer).width];
        self.backend.read(buffer, 0, &mut out).unwrap();
        out
    }

    /// Table rows of a window's tokens: a function of the token only.
    pub fn table_rows(&self, tokens: &[u32]) -> (Vec<u8>, Vec<f32>) {
        let n = self.recipe.shape.ngram.unwrap();
        let per_token = tokens.iter().map(|&token| {
            matrix(&mut Random(u64::from(token) + 99), self.recipe.format, n.heads, n.row, 1.0, 0.0)
        });
        let (bytes, values): (Vec<_>, Vec<_>) = per_token.unzip();
        (bytes.concat(), values.concat())
    }

    /// Embeds the window into X, reads the mixer into U and INJECT.
    pub fn enter(&mut self, window: &Window) {
        self.submit(Op::Embed { table: self.table, tokens: &window.tokens, x: X });
        self.submit(Op::MixerRead { weights: self.mixer, rows: window.rows(), x: X, u: U, inject: INJECT });
    }

    pub fn gdn(&mut self, spans: &[Span]) {
        self.submit(Op::Gdn { layer: GDN, weights: self.gdn, spans, u: U, y: Y });
    }

    pub fn qsa(&mut self, layer: Layer, spans: &[Span]) {
        self.submit(Op::Qsa { layer, weights: self.qsa, spans, u: U, y: Y });
    }

    pub fn moe(&mut self, rows: usize) {
        self.submit(Op::Route { layer: QSA, router: self.router, rows, u: U });
        self.submit(Op::Group { rows });
        self.submit(Op::Experts { layer: QSA, weights: self.experts, rows, u: U });
        self.submit(Op::Combine { shared: self.shared, rows, u: U, y: Y });
    }

    pub fn ngram(&mut self, window: &Window) {
        let (bytes, _) = self.table_rows(&window.tokens);
        self.submit(Op::Ngram {
            layer: GDN,
            weights: self.ngram,
            format: self.recipe.format,
            scale: None,
            table_rows: &bytes,
            spans: &window.spans,
            x: X,
        });
    }

    /// All layers and the head over a window, without commit: the logits of all rows.
    pub fn forward(&mut self, window: &Window) -> Vec<f32> {
        let rows = window.rows();
        self.submit(Op::Embed { table: self.table, tokens: &window.tokens, x: X });
        self.ngram(window);
        for layer in [GDN, QSA, DRAFT] {
            self.submit(Op::MixerRead { weights: self.mixer, rows, x: X, u: U, inject: INJECT });
            if layer == GDN {
                self.gdn(&window.spans)
            } else {
                self.qsa(layer, &window.spans)
            }
            self.submit(Op::MixerWrite { rows, y: Y, inject: INJECT, x: X });
            self.submit(Op::MixerRead { weights: self.mixer, rows, x: X, u: U, inject: INJECT });
            self.moe(rows);
            self.submit(Op::MixerWrite { rows, y: Y, inject: INJECT, x: X });
        }
        let all: Vec<u32> = (0..rows as u32).collect();
        let (mixer, output) = (self.final_mixer, self.output);
        self.submit(Op::Head { mixer, output, rows: &all, x: X, logits: LOGITS });
        self.read(LOGITS, rows)
    }

    /// `forward`, then commit.
    pub fn step(&mut self, window: &Window) -> Vec<f32> {
        let logits = self.forward(window);
        self.backend.commit(&window.spans).unwrap();
        logits
    }

    /// Random tokens.
    pub fn tokens(&self, n: usize, seed: u64) -> Vec<u32> {
        let mut random = Random(seed);
        (0..n).map(|_| (random.bits() % self.recipe.shape.vocab as u64) as u32).collect()
    }
}

/// A window of one sequence.
pub fn window(slot: u32, start: usize, tokens: &[u32]) -> Window {
    let mut window = Window::default();
    window.push(strata_backend::SeqSlot(slot), start, tokens);
    window
}
