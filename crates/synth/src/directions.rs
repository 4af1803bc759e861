//! The weights behind a router skew: directions that routers can see, and rows that see them.
//!
//! Owns how [`skew`](crate::skew)'s numbers become weights, whatever the formats. Random blocks can't be given a wanted
//! content, but they can be repeated. So the first eighth of every embedding row's blocks is the same for all tokens, and the
//! next quarter the same for all tokens of a topic; the rest is the token's own. What the repeated blocks decode to are the
//! common direction `c` and the topics' directions `t_k`; the residual of a token is `c + t_k + (own and added later)`, and what
//! a router reads is that over the residual's spread, times the mixer's gates: `a (c + t_k + ...)` with `a = 0.5 / sqrt(variance)`
//! known from [`recipe`](crate::recipe).
//!
//! A router's row is noise plus a combination of the duals of these directions (vectors in their span whose products with
//! them are 1 and 0), such that its product with `c` and with every `t_k` is exactly the mean logit that the law wants, over `a`.
//! The noise sees the token's own part and gives the logits their spread of 1. The rows are float, so this is exact.
//!
//! The head's rows have the blocks of the topic that their token leads to where the embedding has the topic's, so that a token
//! makes tokens of its topic likely. The draft block reads the residual through a random matrix; its routers see the images of the directions
//! under that matrix.
//!
//! Invariant: only whole blocks of rows are repeated, so every format can carry directions; rows depend on their number only.

use std::sync::Mutex;
use strata_quant::{Format, dequantise};
use strata_topology::Pool;

use crate::blocks::{Weights, encode, noise};
use crate::geometry::Geometry;
use crate::recipe::{MIXED, Spread};
use crate::skew::RouterSkew;
use crate::stream::Stream;
use crate::tensors::Role;

/// The fewest blocks that a row must have to be cut into common, topic's and own ones.
const FEWEST_BLOCKS: u64 = 8;

/// How an embedding row is cut, in blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Cut {
    /// The embedding's format, and the head's.
    pub(crate) format: Format,
    common: usize,
    topic: usize,
}

impl Cut {
    /// The cut of rows of `hidden` values whose format was to be `wanted`. Where a row has too few blocks, another format
    /// takes its place: Q8_0, then F32.
    pub(crate) fn new(wanted: Format, hidden: u32) -> Self {
        let blocks = |format: Format| u64::from(hidden) / format.block_len() as u64;
        let fits = |format: &Format| {
            u64::from(hidden).is_multiple_of(format.block_len() as u64) && blocks(*format) >= FEWEST_BLOCKS
        };
        let format = [wanted, Format::Q8_0].into_iter().find(fits).unwrap_or(Format::F32);
        let blocks = blocks(format) as usize;
        Self { format, common: (blocks / 8).max(1), topic: (blocks / 4).max(1) }
    }

    /// How many topics' directions have room to be far from each other.
    pub(crate) fn room(&self) -> u32 {
        (self.topic * self.format.block_len() / 4).max(1) as u32
    }

    /// Values in the repeated blocks.
    fn values(&self) -> usize {
        (self.common + self.topic) * self.format.block_len()
    }
}

/// The repeated blocks and what they decode to.
pub(crate) struct Directions {
    cut: Cut,
    skew: RouterSkew,
    /// The repeated bytes of an embedding row, by topic.
    embedding: Vec<Vec<u8>>,
    /// The topic's bytes of a head row, by topic.
    head: Vec<Vec<u8>>,
    /// What trunk routers see.
    trunk: Basis,
    /// What the draft block's router sees; there if the model has one.
    draft: Option<Basis>,
    /// What the mixers hand on of a direction in the residual, by layer: the draft block last.
    seen: Vec<f32>,
    /// The spread of a router's noise.
    noise: f32,
}

/// Some vectors of one length, and their duals.
struct Basis {
    vectors: Vec<Vec<f32>>,
    duals: Vec<Vec<f32>>,
}

impl Directions {
    /// The directions of a model. `embedding` and `head` are the weights of those tensors, `join` those of the draft
    /// block's input matrix, if there is one.
    pub(crate) fn new(
        geometry: &Geometry,
        cut: Cut,
        skew: RouterSkew,
        [embedding, head]: [&Weights; 2],
        join: Option<(Format, &Weights)>,
        pool: &Pool,
    ) -> Self {
        let block = cut.format.block_bytes();
        let stream = skew.stream().nth(u64::MAX);
        let part = |weights: &Weights, number: u64, blocks: usize| {
            let mut bytes = vec![0; blocks * block];
            weights.with_stream(stream.nth(number)).fill(0, &mut bytes);
            bytes
        };
        let common = part(embedding, 0, cut.common);
        let topics: Vec<Vec<u8>> =
            (1..=skew.topics().count()).map(|k| part(embedding, k.into(), cut.topic)).collect();
        let head = (1..=skew.topics().count()).map(|k| part(head, k.into(), cut.topic)).collect();

        let vector = |bytes: &[u8], at: usize| {
            let mut vector = vec![0.0; cut.values()];
            let values = bytes.len() / block * cut.format.block_len();
            dequantise(cut.format, bytes, &mut vector[at..at + values]);
            vector
        };
        let mut vectors = vec![vector(&common, 0)];
        vectors.extend(topics.iter().map(|bytes| vector(bytes, cut.common * cut.format.block_len())));
        let embedding = topics.iter().map(|topic| [&common[..], topic].concat()).collect();

        let spread = Spread::of(geometry);
        let seen = |layer| MIXED / spread.residual_variance(layer).sqrt();
        let draft = join.map(|(format, weights)| {
            let of_trunk = 1.0 / spread.last_variance().sqrt();
            Basis::new(images(&vectors, geometry.hidden as usize, of_trunk, format, weights, pool))
        });
        // Gates and gammas that vary a little add to the spread of what is read.
        let hidden = geometry.hidden as f32;
        let own = 1.0 - cut.values() as f32 / hidden;
        Self {
            cut,
            skew,
            embedding,
            head,
            trunk: Basis::new(vectors),
            draft,
            seen: (0..=geometry.layers).map(seen).collect(),
            noise: 1.0 / (1.03 * MIXED * (hidden * own).sqrt()),
        }
    }

    /// Puts the repeated blocks into rows of the embedding or the head, from row `first` on.
    pub(crate) fn repeat(&self, role: Role, first: u64, row_bytes: usize, rows: &mut [u8]) {
        let topics = self.skew.topics();
        for (i, row) in rows.chunks_exact_mut(row_bytes).enumerate() {
            let token = u32::try_from(first + i as u64).unwrap_or(u32::MAX);
            let (at, bytes) = match role {
                Role::Embedding => (0, &self.embedding[topics.of(token) as usize]),
                _ => (
                    self.cut.common * self.cut.format.block_bytes(),
                    &self.head[topics.leads_to(token) as usize],
                ),
            };
            row[at..at + bytes.len()].copy_from_slice(bytes);
        }
    }

    /// The rows that see the directions, for the router of one layer.
    pub(crate) fn router(&self, layer: u32, stream: Stream) -> Router<'_> {
        let is_draft = layer as usize + 1 == self.seen.len();
        let basis = self.draft.as_ref().filter(|_| is_draft).unwrap_or(&self.trunk);
        Router {
            basis,
            means: self.skew.means(layer),
            seen: self.seen[layer as usize],
            noise: self.noise,
            stream,
        }
    }
}

/// The router of one layer.
pub(crate) struct Router<'d> {
    basis: &'d Basis,
    means: Vec<Vec<f32>>,
    seen: f32,
    noise: f32,
    stream: Stream,
}

impl Router<'_> {
    /// Writes F32 rows of `hidden` values, from row `first` on.
    pub(crate) fn fill(&self, first: u64, hidden: usize, out: &mut [u8]) {
        let mut row = vec![0.0f32; hidden];
        for (i, out) in out.chunks_exact_mut(4 * hidden).enumerate() {
            let expert = first + i as u64;
            noise(self.stream, expert * hidden as u64, 0.0, self.noise, &mut row);
            let Basis { vectors, duals } = self.basis;
            let means = &self.means[expert as usize];
            let seen: Vec<f32> =
                vectors.iter().map(|v| row.iter().zip(v).map(|(a, b)| a * b).sum()).collect();
            for ((dual, seen), mean) in duals.iter().zip(seen).zip(means) {
                let missing = mean / self.seen - seen;
                row.iter_mut().zip(dual).for_each(|(value, d)| *value += missing * d);
            }
            encode(Format::F32, 0, out, |first, values| {
                values.copy_from_slice(&row[first as usize..][..values.len()]);
            });
        }
    }
}

impl Basis {
    fn new(vectors: Vec<Vec<f32>>) -> Self {
        let n = vectors.len();
        let dot =
            |a: &[f32], b: &[f32]| a.iter().zip(b).map(|(&a, &b)| f64::from(a) * f64::from(b)).sum::<f64>();
        // Gram | identity, made identity | inverse. The Gram matrix of random vectors that are fewer than a quarter of
        // their length is far from singular and positive, so no pivots are looked for.
        let mut rows: Vec<Vec<f64>> = (0..n)
            .map(|i| {
                let gram = (0..n).map(|j| dot(&vectors[i], &vectors[j]));
                gram.chain((0..n).map(|j| f64::from(u8::from(i == j)))).collect()
            })
            .collect();
        for i in 0..n {
            let mut row = std::mem::take(&mut rows[i]);
            let pivot = row[i];
            row.iter_mut().for_each(|v| *v /= pivot);
            for other in rows.iter_mut().filter(|other| !other.is_empty()) {
                let factor = other[i];
                other.iter_mut().zip(&row).for_each(|(o, r)| *o -= factor * r);
            }
            rows[i] = row;
        }
        let dual = |row: &[f64]| {
            let mut sum = vec![0.0f64; vectors[0].len()];
            for (weight, vector) in row[n..].iter().zip(&vectors) {
                sum.iter_mut().zip(vector).for_each(|(s, &v)| *s += weight * f64::from(v));
            }
            sum.into_iter().map(|v| v as f32).collect()
        };
        let duals = rows.iter().map(|row| dual(row)).collect();
        Self { vectors, duals }
    }
}

/// What becomes of directions in the draft block: `W [v ; of_trunk v]`, with the embedding's half of the matrix first.
/// Gammas are taken as 1.
fn images(
    vectors: &[Vec<f32>],
    hidden: usize,
    of_trunk: f32,
    format: Format,
    join: &Weights,
    pool: &Pool,
) -> Vec<Vec<f32>> {
    let images = Mutex::new(vec![vec![0.0f32; hidden]; vectors.len()]);
    pool.run_ranges(hidden, 16, &|range, _| {
        let blocks = 2 * hidden / format.block_len();
        let mut bytes = vec![0; blocks * format.block_bytes()];
        let mut row = vec![0.0f32; 2 * hidden];
        for out in range {
            join.fill((out * blocks) as u64, &mut bytes);
            dequantise(format, &bytes, &mut row);
            let (of_embedding, of_residual) = row.split_at(hidden);
            let products: Vec<f32> = vectors
                .iter()
                .map(|v| {
                    v.iter()
                        .zip(of_embedding)
                        .zip(of_residual)
                        .map(|((v, e), r)| v * (e + of_trunk * r))
                        .sum()
                })
                .collect();
            let mut images = images.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
            images.iter_mut().zip(products).for_each(|(image, product)| image[out] = product);
        }
    });
    images.into_inner().unwrap_or_else(|poisoned| poisoned.into_inner())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::layout::Options;
    use crate::skew::Topics;
    use strata_topology::Topology;

    struct Model {
        geometry: Geometry,
        embedding: Weights,
        directions: Directions,
    }

    fn model(formats: &str, alpha: f64) -> Model {
        let mut geometry = Geometry::pebble();
        (geometry.hidden, geometry.moe.experts, geometry.moe.used) = (1024, 128, 6);
        let mut options = Options::new(geometry.clone(), formats.parse().unwrap(), 3);
        options.router_skew = Some(alpha);
        let (skew, cut) = options.skew_and_cut().unwrap();
        let weights = |name: &str, std| Weights::new(cut.format, Stream::new(3, name), std);
        let (embedding, head) = (weights("embedding", 1.0), weights("head", 4.0 / 32.0));
        let pool = Pool::new(&Topology::read(), 1).unwrap();
        let directions = Directions::new(&geometry, cut, skew, [&embedding, &head], None, &pool);
        Model { geometry, embedding, directions }
    }

    impl Model {
        fn row(&self, weights: &Weights, role: Role, token: u32) -> Vec<f32> {
            let (hidden, format) = (self.geometry.hidden as usize, self.directions.cut.format);
            let blocks = hidden / format.block_len();
            let mut bytes = vec![0; blocks * format.block_bytes()];
            weights.fill(u64::from(token) * blocks as u64, &mut bytes);
            let row_bytes = bytes.len();
            self.directions.repeat(role, token.into(), row_bytes, &mut bytes);
            let mut row = vec![0.0; hidden];
            dequantise(format, &bytes, &mut row);
            row
        }

        /// `[experts][hidden]`.
        fn router(&self, layer: u32) -> Vec<Vec<f32>> {
            let (experts, hidden) = (self.geometry.moe.experts as usize, self.geometry.hidden as usize);
            let mut bytes = vec![0; experts * hidden * 4];
            self.directions
                .router(layer, Stream::new(3, "router").nth(layer.into()))
                .fill(0, hidden, &mut bytes);
            let mut rows = vec![0.0; experts * hidden];
            dequantise(Format::F32, &bytes, &mut rows);
            rows.chunks(hidden).map(<[f32]>::to_vec).collect()
        }
    }

    fn dot(a: &[f32], b: &[f32]) -> f32 {
        a.iter().zip(b).map(|(a, b)| a * b).sum()
    }

    /// Oracle: the law. What routers read is drawn as the architecture's description of the mixers says (embedding rows and
    /// what layers add, over the residual's spread, halved); counting the largest logits of a long text gives each rank its
    /// expected use in the topic, and the even use of other topics' ranks doesn't.
    #[test]
    fn expert_use_follows_the_law() {
        for (formats, alpha) in [("ud-iq3_xxs", 0.9), ("q8_0", 0.5)] {
            let model = model(formats, alpha);
            let (layer, used) = (5, model.geometry.moe.used as usize);
            let variance = Spread::of(&model.geometry).residual_variance(layer);
            let router = model.router(layer);
            let topics = model.directions.skew.topics();
            let orders: Vec<Vec<u32>> =
                (0..topics.count()).map(|t| model.directions.skew.order(layer, t)).collect();
            let tokens = 6000;
            let mut uses = vec![0.0; router.len()];
            let mut added = vec![0.0; model.geometry.hidden as usize];
            for (i, token) in topics.text(1).take(tokens).enumerate() {
                let mut u = model.row(&model.embedding, Role::Embedding, token);
                noise(
                    Stream::new(9, "added"),
                    (i * added.len()) as u64,
                    0.0,
                    (variance - 1.0).sqrt(),
                    &mut added,
                );
                u.iter_mut().zip(&added).for_each(|(u, a)| *u = MIXED * (*u + a) / variance.sqrt());
                let mut logits: Vec<(f32, u32)> =
                    (0..).zip(&router).map(|(e, row)| (dot(row, &u), e)).collect();
                logits.sort_by(|a, b| b.0.total_cmp(&a.0));
                for &(_, expert) in &logits[..used] {
                    let order = &orders[topics.of(token) as usize];
                    uses[order.iter().position(|&e| e == expert).unwrap()] += 1.0 / tokens as f64;
                }
            }
            let law = model.directions.skew.expected_use();
            // By groups of ranks: single experts vary with the frequent tokens that they happen to like.
            for range in [0..1, 1..2, 2..4, 4..8, 8..16, 16..32, 32..64, 64..128] {
                let sum = |uses: &[f64]| uses[range.clone()].iter().sum::<f64>();
                let (found, expected) = (sum(&uses), sum(&law));
                assert!((found / expected - 1.0).abs() < 0.25, "{formats} {range:?}: {found} for {expected}");
            }
        }
    }

    /// Oracle: the definitions. Products of router rows with the directions are the means, and duals are duals.
    #[test]
    fn rows_see_the_directions() {
        let model = model("q8_0", 1.0);
        let Basis { vectors, duals } = &model.directions.trunk;
        for (i, v) in vectors.iter().enumerate() {
            for (j, d) in duals.iter().enumerate() {
                assert!((dot(v, d) - f32::from(u8::from(i == j))).abs() < 1e-4, "{i} {j}");
            }
        }
        let (router, means) = (model.router(2), model.directions.skew.means(2));
        for (row, means) in router.iter().zip(&means) {
            for (vector, mean) in vectors.iter().zip(means) {
                let found = dot(row, vector) * model.directions.seen[2];
                assert!((found - mean).abs() < 1e-3, "{found} for {mean}");
            }
        }
    }

    /// Oracle: the definitions. A token's embedding has more in common with the head rows that lead to its topic than with any other.
    #[test]
    fn heads_favour_the_topic() {
        let model = model("ud-iq3_xxs", 1.0);
        let topics: &Topics = model.directions.skew.topics();
        let head = Weights::new(model.directions.cut.format, Stream::new(3, "head"), 4.0 / 32.0);
        let tokens: Vec<u32> = (0..12_000).step_by(97).collect();
        let heads: Vec<Vec<f32>> = tokens.iter().map(|&t| model.row(&head, Role::Head, t)).collect();
        for &token in tokens.iter().step_by(10) {
            let row = model.row(&model.embedding, Role::Embedding, token);
            for (&other, head) in tokens.iter().zip(&heads) {
                let product = dot(&row, head);
                assert_eq!(
                    product > 15.0,
                    topics.leads_to(other) == topics.of(token),
                    "{token} {other}: {product}"
                );
            }
        }
    }
}
