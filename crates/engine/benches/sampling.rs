//! `cargo bench -p strata-engine --bench sampling`: what a choice costs on the host, from all logits of a large vocabulary, and from the
//! largest that a device found.

use std::hint::black_box;
use std::time::Instant;

use strata_backend::mass;
use strata_engine::Sampling;
use strata_engine::sampling::{Sampler, Scratch, uniform};

const VOCABULARY: usize = 248_320;
const CHOICES: usize = 200;

fn main() {
    // About normal, as logits are: sums of four draws.
    let draw = |i: usize| (0..4).map(|j| uniform(7, (4 * i + j) as u64)).sum::<f64>();
    let logits: Vec<f32> = (0..VOCABULARY).map(|i| 6.0 * (draw(i) - 2.0) as f32).collect();
    let mut order: Vec<u32> = (0..VOCABULARY as u32).collect();
    order.sort_by(|&a, &b| logits[b as usize].total_cmp(&logits[a as usize]));
    let largest: Vec<(u32, f32)> = order[..128].iter().map(|&t| (t, logits[t as usize])).collect();
    let seen: Vec<u32> = (0..4096).collect();
    let few = Sampling { top_k: 20, top_p: 0.8, temperature: 0.7, ..Sampling::default() };
    let kinds = [
        ("greedy", Sampling::greedy()),
        ("top-k 20, top-p 0.8", few.clone()),
        ("top-p 0.95", Sampling { top_p: 0.95, ..Sampling::default() }),
        ("min-p 0.05", Sampling { min_p: 0.05, ..Sampling::default() }),
        ("top-k 20, repetition penalty", Sampling { repetition_penalty: 1.1, ..few.clone() }),
        ("top-k 20, 5 log-probabilities", Sampling { logprobs: Some(5), ..few.clone() }),
    ];
    let mut scratch = Scratch::new(VOCABULARY);
    let report = |name: &str, choose: &mut dyn FnMut(usize)| {
        let mut times: Vec<f64> = (0..CHOICES)
            .map(|position| {
                let started = Instant::now();
                choose(position);
                started.elapsed().as_secs_f64() * 1e6
            })
            .collect();
        times.sort_by(f64::total_cmp);
        println!(
            "{name:<32} {:>8.1} us   ({:.1} to {:.1})",
            times[CHOICES / 2],
            times[0],
            times[CHOICES - 1]
        );
    };
    for (name, sampling) in kinds {
        let mut sampler = Sampler::new(sampling, &seen);
        report(name, &mut |position| {
            black_box(sampler.choose(&logits, position, None, &mut scratch)).expect("a token");
        });
    }
    let mut sampler = Sampler::new(few, &seen);
    report("top-k 20, the largest given", &mut |position| {
        black_box(sampler.choose_of(&largest, 0, position)).expect("a token");
    });
    // As if nearly all of the mass were theirs.
    let mass: u64 = largest.iter().map(|(_, logit)| mass(*logit, largest[0].1, 1.0)).sum();
    let mut sampler = Sampler::new(Sampling { top_p: 0.95, ..Sampling::default() }, &seen);
    report("top-p 0.95, the largest given", &mut |position| {
        black_box(sampler.choose_of(&largest, mass + mass / 100, position)).expect("a token");
    });
}
