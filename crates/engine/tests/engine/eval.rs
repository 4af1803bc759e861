//! Perplexity and divergence against the same figures computed slowly from whole rows of logits.

use strata_backend::KvFormat;
use strata_engine::eval::{Cut, EvalError, compare, perplexity};
use strata_engine::{Engine, EngineConfig, Wants};
use strata_testkit::golden::{self, Npz};

use crate::rig::{Rig, logits};

fn tiny(kv: KvFormat, window: usize) -> Engine {
    let config = EngineConfig { kv, window: Some(window), context: Some(64), ..EngineConfig::default() };
    Rig { config, ..Rig::default() }.open(&golden::dir().join("tiny/tiny.gguf"))
}

fn ids() -> Vec<u32> {
    Npz::golden("tiny/ref.npz").ids("ids")
}

/// Log-probabilities of a row, the slow way.
fn log_softmax(row: &[f32]) -> Vec<f64> {
    let sum: f64 = row.iter().map(|&l| f64::from(l).exp()).sum();
    row.iter().map(|&l| f64::from(l) - sum.ln()).collect()
}

/// Every window's rows of logits, from one call each.
fn whole_rows(engine: &mut Engine, ids: &[u32], window: usize) -> Vec<Vec<Vec<f32>>> {
    ids.chunks_exact(window)
        .map(|part| {
            let seq = engine.open().unwrap();
            let rows = logits(engine, seq, part, Wants::All);
            engine.close(seq).unwrap();
            rows
        })
        .collect()
}

/// The scored places of a window of 20: logits at 10 to 18.
const SCORED: std::ops::Range<usize> = 10..19;

/// Oracle: the definition, over rows that one call gave each.
#[test]
fn perplexity_is_that_of_the_logits() {
    let ids = ids();
    let mut engine = tiny(KvFormat::F16, 7);
    let cut = Cut { window: 20, limit: None };
    let mut seen = Vec::new();
    let found = perplexity(&mut engine, &ids, cut, &mut |passed| seen.push(passed.windows)).unwrap();
    let nll: Vec<f64> = whole_rows(&mut engine, &ids, 20)
        .iter()
        .zip(ids.chunks_exact(20))
        .flat_map(|(rows, part)| SCORED.map(|at| -log_softmax(&rows[at])[part[at + 1] as usize]))
        .collect();
    let n = nll.len() as f64;
    let mean = nll.iter().sum::<f64>() / n;
    let variance = nll.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / (n - 1.0);
    assert_eq!((found.tokens, seen), (27, vec![1, 2, 3]));
    assert!((found.value / mean.exp() - 1.0).abs() < 1e-9);
    assert!((found.error / (mean.exp() * (variance / n).sqrt()) - 1.0).abs() < 1e-6);
}

/// Oracle: the definition, over rows that one call gave each; two storage formats of the same model's cache.
#[test]
fn divergence_is_that_of_the_logits() {
    let ids = ids();
    let (mut engine, mut other) = (tiny(KvFormat::F16, 64), tiny(KvFormat::F32, 5));
    let cut = Cut { window: 20, limit: Some(2) };
    let found = compare(&mut engine, &mut other, &ids, cut, &mut |_| ()).unwrap();
    let (p, q) = (whole_rows(&mut engine, &ids, 20), whole_rows(&mut other, &ids, 20));
    let mut kl = Vec::new();
    for (p, q) in p.iter().zip(&q).take(2) {
        for at in SCORED {
            let (p, q) = (log_softmax(&p[at]), log_softmax(&q[at]));
            kl.push(p.iter().zip(&q).map(|(p, q)| q.exp() * (q - p)).sum::<f64>());
        }
    }
    let mean = kl.iter().sum::<f64>() / kl.len() as f64;
    let most = kl.iter().copied().fold(0.0, f64::max);
    assert!(most > 1e-12, "the caches should differ a little");
    assert!((found.divergence.mean - mean).abs() < 1e-12 && (found.divergence.max - most).abs() < 1e-12);
    assert_eq!(found.model.tokens, 18);
    assert_eq!(found.model, perplexity(&mut engine, &ids, cut, &mut |_| ()).unwrap());
    assert_eq!(found.other, perplexity(&mut other, &ids, cut, &mut |_| ()).unwrap());
}

/// Oracle: after a failure the sequence is free again.
#[test]
fn a_failure_frees_the_sequence() {
    let mut engine = tiny(KvFormat::F16, 64);
    let mut ids = ids();
    ids[3] = 384;
    let cut = Cut { window: 20, limit: None };
    assert!(matches!(perplexity(&mut engine, &ids, cut, &mut |_| ()), Err(EvalError::Engine(_))));
    assert!(engine.open().is_ok());
}
