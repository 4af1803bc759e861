//! Synthetic traces of routing, the same on every run.

use strata_residency::{ExpertId, LayerExperts, Roster};

/// Layers of a trace.
pub const LAYERS: u16 = 4;
/// Experts of a layer, as the real model has.
pub const EXPERTS: u16 = 512;
/// Experts that a token uses in a layer.
pub const USED: usize = 10;
/// Bytes of one expert.
pub const BYTES: u64 = 2 << 20;

pub fn roster() -> Roster {
    Roster::new((0..LAYERS).map(|_| LayerExperts { experts: EXPERTS, bytes: BYTES }))
}

/// What happens, one after the other.
#[derive(Clone)]
pub enum Event {
    /// A decode step and the experts that it uses.
    Step(Vec<ExpertId>),
    /// A prompt of so many tokens, and how many of them chose each expert.
    Prompt(u64, Vec<(ExpertId, u64)>),
}

/// SplitMix64.
pub struct Random(pub u64);

impl Random {
    pub fn word(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let x = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        let x = (x ^ (x >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        x ^ (x >> 31)
    }

    pub fn below(&mut self, end: u64) -> u64 {
        self.word() % end
    }

    /// Above 0, at most 1.
    fn unit(&mut self) -> f64 {
        ((self.word() >> 11) + 1) as f64 / (1u64 << 53) as f64
    }
}

/// A model whose routers prefer some experts: by Zipf's law over ranks, which depend half on the topic.
pub struct Model {
    /// By layer and topic, each expert's weight.
    weights: Vec<Vec<Vec<f64>>>,
    random: Random,
}

impl Model {
    /// With an exponent of 1.2 the experts used last serve what was published of the real model: see the test
    /// `the_trace_is_skewed_as_published`. Zero is uniform.
    pub fn new(exponent: f64, topics: usize, seed: u64) -> Model {
        let mut random = Random(seed);
        let mut weights = Vec::new();
        for _ in 0..LAYERS {
            let shared: Vec<f64> = (0..EXPERTS).map(|_| random.unit()).collect();
            let by_topic = (0..topics).map(|_| {
                let mut draws: Vec<(f64, usize)> =
                    shared.iter().enumerate().map(|(e, shared)| (shared + random.unit(), e)).collect();
                draws.sort_by(|a, b| b.0.total_cmp(&a.0));
                let mut weights = vec![0.0; draws.len()];
                for (rank, (_, expert)) in draws.into_iter().enumerate() {
                    weights[expert] = ((rank + 1) as f64).powf(-exponent);
                }
                weights
            });
            weights.push(by_topic.collect());
        }
        Model { weights, random }
    }

    /// The experts of one token.
    pub fn token(&mut self, topic: usize) -> Vec<ExpertId> {
        let mut chosen = Vec::new();
        for (layer, by_topic) in (0u16..).zip(&self.weights) {
            // The least of exponentials with the weights as rates: a draw without replacement.
            let mut keys: Vec<(f64, u16)> = (0u16..)
                .zip(&by_topic[topic])
                .map(|(expert, weight)| (-self.random.unit().ln() / weight, expert))
                .collect();
            keys.select_nth_unstable_by(USED, |a, b| a.0.total_cmp(&b.0));
            keys.truncate(USED);
            keys.sort_by_key(|key| key.1);
            chosen.extend(keys.into_iter().map(|(_, expert)| ExpertId { layer, expert }));
        }
        chosen
    }

    /// Steps in one topic.
    pub fn steps(&mut self, topic: usize, count: usize) -> Vec<Event> {
        (0..count).map(|_| Event::Step(self.token(topic))).collect()
    }

    /// Steps whose topic changes every 128 steps on average.
    pub fn drifting(&mut self, topics: usize, count: usize) -> Vec<Event> {
        let mut topic = 0;
        let step = |_| {
            if self.random.below(128) == 0 {
                topic = self.random.below(topics as u64) as usize;
            }
            Event::Step(self.token(topic))
        };
        (0..count).map(step).collect()
    }

    /// A prompt of a topic.
    pub fn prompt(&mut self, topic: usize, tokens: u64) -> Event {
        let mut counts = std::collections::BTreeMap::new();
        for _ in 0..tokens {
            self.token(topic).into_iter().for_each(|id| *counts.entry(id).or_insert(0) += 1);
        }
        Event::Prompt(tokens, counts.into_iter().collect())
    }
}

/// Steps that go through all experts, in order, again and again.
pub fn scan(count: usize) -> Vec<Event> {
    let step = |step: usize| {
        let experts = (0..USED).map(move |i| ((step * USED + i) % usize::from(EXPERTS)) as u16);
        (0..LAYERS).flat_map(move |layer| experts.clone().map(move |expert| ExpertId { layer, expert }))
    };
    (0..count).map(|i| Event::Step(step(i).collect())).collect()
}
