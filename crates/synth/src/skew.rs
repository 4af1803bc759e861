//! Routers that prefer some experts: the law, the topics, and which expert has which rank.
//!
//! Owns the model of skewed routing as numbers; what weights produce it is [`directions`](crate::directions).
//!
//! # The law
//! There is no router bias in the architecture: the logit of expert `e` is `w_e . u`. If, over tokens, logits are normally
//! distributed around means `m_e` with spread 1, and the `k` largest of many are taken, the border that a logit must cross
//! hardly moves from token to token; so expert `e` is used by a share `P(m_e + z > border) = N(m_e - border)` of the tokens,
//! where `N` is the normal distribution. For a wanted use `p_r` by rank the means are therefore `N^-1(p_r)`, up to a
//! constant. The wanted use is Zipf's law, `p_r = min(C r^-alpha, 0.95)`, with `C` such that the uses sum to `k`
//! ([`expected_use`]).
//!
//! # The topics
//! The same few experts for every text would make any fixed choice of residents perfect. So ranks depend on the topic:
//! tokens belong to topics by ranges of ids ([`Topics::of`]), and each layer orders its experts anew for each topic. An
//! expert's place is decided half by a draw that all topics share and half by the topic's own ([`RouterSkew::order`]), so
//! a long mixture of topics is skewed too, but less. In generated text the topic drifts slowly: the head favours tokens of
//! the current topic, and one token in 128 leads to another topic ([`Topics::leads_to`]). [`Topics::text`] makes prompts of the same kind.
//!
//! What a cache sees of it: with 512 experts of which 10 are used, the 64 experts per layer used last serve 39, 54 and 67 % of the uses
//! at exponents of 0.8, 1.0 and 1.2, and the last 128 serve 54, 68 and 79 %. Of the real Flash-Next, 67 and 81 % were published: 1.2 is
//! nearest to it. Even use gives 12 and 25 %.
//!
//! Invariant: everything here is a function of the seed, the geometry and the exponent.

use crate::geometry::Geometry;
use crate::stream::Stream;

/// No expert is used by more tokens than this by the law.
const MOST_USED: f64 = 0.95;
/// One token in so many leads to another topic.
const BRIDGES: u64 = 128;
/// The most topics.
const MOST_TOPICS: u32 = 16;

/// The share of tokens that use the expert of each rank, the most used first: `min(C r^-alpha, 0.95)`, summing to `used`.
///
/// `used` from 1 to `experts`; where nearly all experts are used, the cap rises to `used / experts`.
pub fn expected_use(experts: u32, used: u32, alpha: f64) -> Vec<f64> {
    let wanted = f64::from(used.min(experts));
    let cap = MOST_USED.max(wanted / f64::from(experts));
    let law = |c: f64| (1..=experts).map(move |r| (c * f64::from(r).powf(-alpha)).min(cap));
    // Uses only grow with C; at the upper end every expert has the cap.
    let (mut low, mut high) = (0.0, cap * f64::from(experts).powf(alpha));
    for _ in 0..100 {
        let middle = 0.5 * (low + high);
        if law(middle).sum::<f64>() < wanted { low = middle } else { high = middle }
    }
    law(high).collect()
}

/// The mean logit of each rank, in units of the logits' spread, the mean over ranks taken off.
pub(crate) fn mean_logits(experts: u32, used: u32, alpha: f64) -> Vec<f32> {
    let mut means: Vec<f64> =
        expected_use(experts, used, alpha).iter().map(|&p| quantile(p.clamp(1e-6, 0.99))).collect();
    let mean = means.iter().sum::<f64>() / means.len() as f64;
    // Rounded, so that the last bits of a platform's functions don't show in files.
    means.iter_mut().for_each(|m| *m = ((*m - mean) * 1024.0).round() / 1024.0);
    means.iter().map(|&m| m as f32).collect()
}

/// The normal distribution's quantile, by bisection.
fn quantile(p: f64) -> f64 {
    let (mut low, mut high) = (-8.0, 8.0);
    for _ in 0..60 {
        let middle = 0.5 * (low + high);
        if normal(middle) < p { low = middle } else { high = middle }
    }
    0.5 * (low + high)
}

/// The normal distribution: `1/2 + density(x) (x + x^3/3 + x^5/(3 5) + ...)`.
fn normal(x: f64) -> f64 {
    let (mut term, mut sum) = (x, x);
    for n in 1..200 {
        term *= x * x / f64::from(2 * n + 1);
        sum += term;
    }
    0.5 + sum * (-0.5 * x * x).exp() / (2.0 * std::f64::consts::PI).sqrt()
}

/// Which tokens belong together.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Topics {
    /// Tokens below padding.
    tokens: u32,
    count: u32,
    special: Vec<u32>,
    stream: Stream,
}

impl Topics {
    /// The topics of a geometry whose embedding rows have room for `room` of them.
    pub(crate) fn new(geometry: &Geometry, room: u32, seed: u64) -> Self {
        let tokens = geometry.padding_from();
        let mut special: Vec<u32> = geometry.special_tokens.values().copied().collect();
        special.sort_unstable();
        let count = MOST_TOPICS.min(room).min(tokens / 64).max(1);
        Self { tokens, count, special, stream: Stream::new(seed, "topics") }
    }

    /// How many topics there are.
    pub fn count(&self) -> u32 {
        self.count
    }

    /// The topic of a token: ids are cut into ranges of one size.
    pub fn of(&self, token: u32) -> u32 {
        (u64::from(token.min(self.tokens - 1)) * u64::from(self.count) / u64::from(self.tokens)) as u32
    }

    /// The topic in which the head makes a token likely: its own, but for one token in 128.
    pub fn leads_to(&self, token: u32) -> u32 {
        let own = self.of(token);
        let others = u64::from(self.count - 1);
        if others == 0 || self.stream.below(2 * u64::from(token), BRIDGES) != 0 {
            return own;
        }
        let step = 1 + self.stream.below(2 * u64::from(token) + 1, others) as u32;
        (own + step) % self.count
    }

    /// An endless text: a topic for 128 tokens on average, then another; in a topic, few tokens are frequent and most rare.
    pub fn text(&self, seed: u64) -> impl Iterator<Item = u32> + '_ {
        let stream = self.stream.nth(seed);
        let mut topic = stream.below(0, self.count.into()) as u32;
        (0u64..).map(move |i| {
            let word = |k: u64| 1 + 4 * i + k;
            if stream.below(word(0), BRIDGES) == 0 {
                topic = stream.below(word(1), self.count.into()) as u32;
            }
            let range = |t: u32| (u64::from(t) * u64::from(self.tokens)).div_ceil(self.count.into()) as u32;
            let (first, size) = (range(topic), range(topic + 1) - range(topic));
            // Ranks with frequencies in inverse proportion to them, then spread over the topic.
            let rank = f64::from(size).powf(stream.unit(word(2))) as u64 - 1;
            let place = rank * 7919 % u64::from(size);
            // The next ordinary token; there is one unless the topic has none.
            let mut token = first + place as u32;
            for _ in 0..size {
                if self.special.binary_search(&token).is_err() {
                    break;
                }
                token = first + (token - first + 1) % size;
            }
            token
        })
    }
}

/// How a model's routers are skewed.
#[derive(Clone, Debug, PartialEq)]
pub struct RouterSkew {
    /// The exponent of Zipf's law.
    alpha: f64,
    experts: u32,
    used: u32,
    topics: Topics,
    stream: Stream,
}

impl RouterSkew {
    pub(crate) fn new(geometry: &Geometry, topics: Topics, alpha: f64, seed: u64) -> Self {
        let stream = Stream::new(seed, "expert ranks");
        Self { alpha, experts: geometry.moe.experts, used: geometry.moe.used, topics, stream }
    }

    /// Where the model's other random choices for the skew come from.
    pub(crate) fn stream(&self) -> Stream {
        self.stream
    }

    /// The topics.
    pub fn topics(&self) -> &Topics {
        &self.topics
    }

    /// The share of a topic's tokens that use the expert of each rank: see [`expected_use`].
    pub fn expected_use(&self) -> Vec<f64> {
        expected_use(self.experts, self.used, self.alpha)
    }

    /// The experts of a layer (the draft block being one past the trunk's) by their rank in a topic, the most used first.
    pub fn order(&self, layer: u32, topic: u32) -> Vec<u32> {
        // Both draws have the same distribution; ties, which don't happen in practice, go to the lower number.
        let draw = |stream: Stream, expert: u32| {
            let word = stream.word(expert.into());
            (word & 0xFFFF_FFFF) + (word >> 32)
        };
        let layer = self.stream.nth(layer.into());
        let (shared, own) = (layer.nth(0), layer.nth(1 + u64::from(topic)));
        let mut order: Vec<u32> = (0..self.experts).collect();
        order.sort_by_key(|&e| std::cmp::Reverse(draw(shared, e) + draw(own, e)));
        order
    }

    /// The mean logits of every expert of a layer: `[experts][1 + topics]`, what all topics have in common first, then what
    /// each adds to it. Their sums are the law's means for the expert's rank in the topic.
    pub(crate) fn means(&self, layer: u32) -> Vec<Vec<f32>> {
        let by_rank = mean_logits(self.experts, self.used, self.alpha);
        let topics = self.topics.count as usize;
        let mut means = vec![vec![0.0; 1 + topics]; self.experts as usize];
        for topic in 0..topics {
            for (&expert, &mean) in self.order(layer, topic as u32).iter().zip(&by_rank) {
                means[expert as usize][1 + topic] = mean;
            }
        }
        for means in &mut means {
            let common = means[1..].iter().sum::<f32>() / topics as f32;
            means[1..].iter_mut().for_each(|m| *m -= common);
            means[0] = common;
        }
        means
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Oracle: the law's definition. Uses sum to the experts used, fall with the rank as a power of it, and respect the cap.
    #[test]
    fn uses_follow_zipf() {
        for (experts, used, alpha) in [
            (512, 10, 0.4),
            (512, 10, 1.0),
            (512, 10, 2.0),
            (64, 4, 0.8),
            (8, 2, 1.0),
            (8, 8, 1.0),
            (4, 3, 3.0),
        ] {
            let uses = expected_use(experts, used, alpha);
            assert!(
                (uses.iter().sum::<f64>() - f64::from(used)).abs() < 1e-9,
                "{experts} {used} {alpha}: {uses:?}"
            );
            assert!(uses.is_sorted_by(|a, b| a >= b) && uses.iter().all(|&p| p > 0.0 && p <= 1.0));
            let free: Vec<(usize, f64)> =
                uses.iter().copied().enumerate().filter(|&(_, p)| p < 0.949).collect();
            for pair in free.windows(2) {
                let (r, s) = ((pair[0].0 + 1) as f64, (pair[1].0 + 1) as f64);
                assert!((pair[0].1 / pair[1].1 - (s / r).powf(alpha)).abs() < 1e-9);
            }
        }
    }

    /// Oracle: known values of the normal distribution.
    #[test]
    fn the_normal_distribution_is_right() {
        for (x, p) in [
            (0.0, 0.5),
            (1.0, 0.841_344_746_068_5),
            (-1.959_963_984_540_05, 0.025),
            (3.0, 0.998_650_101_968_4),
        ] {
            assert!((normal(x) - p).abs() < 1e-12, "{x}: {}", normal(x));
            assert!((quantile(p) - x).abs() < 1e-9);
        }
    }

    /// Oracle: the definitions. Topics are ranges, nearly all tokens lead to their own, an order is a permutation, orders of
    /// two topics agree more than chance and less than fully, and those of two layers don't.
    #[test]
    fn orders_differ_by_topic_and_layer() {
        let geometry = Geometry::flash_next();
        let topics = Topics::new(&geometry, 100, 1);
        assert_eq!((topics.count(), topics.of(0), topics.of(248_069), topics.of(248_319)), (16, 0, 15, 15));
        let bridges = (0..248_070).filter(|&t| topics.leads_to(t) != topics.of(t)).count() as f64;
        assert!((bridges / 248_070.0 * 128.0 - 1.0).abs() < 0.1, "{bridges}");
        let skew = RouterSkew::new(&geometry, topics, 1.0, 1);
        let order = skew.order(3, 0);
        let mut sorted = order.clone();
        sorted.sort_unstable();
        assert_eq!(sorted, (0..512).collect::<Vec<_>>());
        let agreement = |a: &[u32], b: &[u32]| a[..64].iter().filter(|e| b[..64].contains(e)).count();
        let same_layer: usize = (1..9).map(|t| agreement(&order, &skew.order(3, t))).sum();
        let other_layers: usize = (4..12).map(|l| agreement(&order, &skew.order(l, 0))).sum();
        // By chance 8 of 64, 64 in eight comparisons.
        assert!((120..400).contains(&same_layer), "{same_layer}");
        assert!((30..100).contains(&other_layers), "{other_layers}");
    }

    /// Oracle: the law's means; what is common and what a topic adds give every expert the mean of its rank.
    #[test]
    fn means_add_up_to_the_law() {
        let geometry = Geometry::pebble();
        let skew = RouterSkew::new(&geometry, Topics::new(&geometry, 8, 5), 0.8, 5);
        let (means, law) = (skew.means(2), mean_logits(64, 4, 0.8));
        for topic in 0..8 {
            for (rank, &expert) in skew.order(2, topic).iter().enumerate() {
                let parts = &means[expert as usize];
                assert!((parts[0] + parts[1 + topic as usize] - law[rank]).abs() < 1e-5);
            }
        }
    }

    /// Oracle: what was published of the real model's routing: of the experts used last, 64 per layer serve 67 % of the uses and 128
    /// serve 81 %. Normal logits around the law's means, for the topics of a text, come near it at the exponent that is said to.
    #[test]
    fn caches_see_the_real_models_hit_rates() {
        let geometry = Geometry::flash_next();
        let (experts, used) = (geometry.moe.experts, geometry.moe.used);
        let skew = RouterSkew::new(&geometry, Topics::new(&geometry, 16, 1), 1.2, 1);
        let (law, stream) = (mean_logits(experts, used, 1.2), Stream::new(4, "logits"));
        let orders: Vec<Vec<u32>> = (0..16).map(|topic| skew.order(7, topic)).collect();
        for (kept, served) in [(64, 0.67), (128, 0.80)] {
            let (mut cache, mut hits, mut uses): (Vec<u32>, _, _) = (Vec::new(), 0, 0);
            for (i, token) in skew.topics().text(1).take(3000).enumerate() {
                // Eight bounded draws for a normal one.
                let mut draws = vec![0.0; 8 * experts as usize];
                crate::blocks::noise(stream, (i as u64) << 16, 0.0, 0.125f32.sqrt(), &mut draws);
                let noise = draws.chunks(8).map(|eight| eight.iter().sum::<f32>());
                let order = &orders[skew.topics().of(token) as usize];
                let mut logits: Vec<(f32, u32)> =
                    law.iter().zip(noise).zip(order).map(|((mean, noise), &e)| (mean + noise, e)).collect();
                logits.sort_by(|a, b| b.0.total_cmp(&a.0));
                for &(_, expert) in &logits[..used as usize] {
                    uses += 1;
                    if let Some(place) = cache.iter().position(|&e| e == expert) {
                        hits += 1;
                        cache.remove(place);
                    }
                    cache.push(expert);
                    if cache.len() > kept {
                        cache.remove(0);
                    }
                }
            }
            let share = f64::from(hits) / f64::from(uses);
            assert!((share - served).abs() < 0.05, "the last {kept} serve {share}");
        }
    }

    /// Oracle: counting. Texts keep to ordinary tokens, stay in a topic for about 128 tokens, and repeat frequent tokens.
    #[test]
    fn texts_drift_slowly() {
        for name in Geometry::PRESETS {
            let geometry = Geometry::preset(name).unwrap();
            let topics = Topics::new(&geometry, 4, 2);
            let text: Vec<u32> = topics.text(1).take(50_000).collect();
            assert!(text.iter().all(|&t| t < geometry.padding_from()));
            assert!(text.iter().all(|t| !geometry.special_tokens.values().any(|s| s == t)), "{name}");
            let changes = text.windows(2).filter(|w| topics.of(w[0]) != topics.of(w[1])).count();
            // Three of four draws of a new topic differ.
            assert!((180..420).contains(&changes), "{name}: {changes}");
            assert_ne!(text[..100], topics.text(2).take(100).collect::<Vec<_>>()[..]);
        }
    }
}
