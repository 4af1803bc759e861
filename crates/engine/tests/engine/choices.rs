//! Choosing tokens from the few logits that decide, as a backend with memory of its own finds them.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::Ordering::SeqCst;

use strata_engine::sampling::TokenMask;
use strata_engine::{Constraint, EngineConfig, Event, Request, Sampling};
use strata_testkit::faulty::{Faults, Faulty};
use strata_testkit::golden;

use crate::rig::{Rig, ids};

/// Every other token, then those between, in turns.
struct EveryOther(Vec<u32>);

impl Constraint for EveryOther {
    fn mask(&mut self) -> TokenMask<'_> {
        TokenMask(&self.0)
    }

    fn accept(&mut self, _: u32) {
        self.0.iter_mut().for_each(|word| *word = !*word);
    }
}

/// Sampling of all kinds, for neighbours in one window: those that need all logits among them.
fn requests() -> Vec<Request> {
    let penalised = Sampling {
        temperature: 0.8,
        seed: 5,
        repetition_penalty: 1.3,
        presence_penalty: 0.4,
        frequency_penalty: 0.2,
        ..Sampling::default()
    };
    let kinds = [
        Sampling { repetition_penalty: 1.3, ..Sampling::greedy() },
        Sampling { top_k: 20, top_p: 0.9, ..penalised.clone() },
        Sampling { top_p: 0.9, logit_bias: vec![(7, 3.0), (9, f32::NEG_INFINITY)], ..penalised.clone() },
        Sampling { min_p: 0.05, ..penalised.clone() },
        Sampling { logprobs: Some(3), ..penalised.clone() },
        Sampling { temperature: 1.5, ..penalised },
    ];
    let all = ids();
    let request = |(at, sampling): (usize, &Sampling)| Request {
        max_tokens: Some(20),
        // More bits than tokens.
        constraint: (at % 2 == 1).then(|| Box::new(EveryOther(vec![0x5555_5555; 4096])) as _),
        ..Request::new(all[at..at + 9].to_vec(), sampling.clone(), &[])
    };
    kinds.iter().enumerate().map(request).collect()
}

/// Oracle: the same engine, where all logits are read. Penalties and constraints change from token to token.
#[test]
fn few_logits_decide_as_all_do() {
    let answers = |finds: bool| {
        let faults = Arc::new(Faults::default());
        faults.finds.store(finds, SeqCst);
        let config = EngineConfig { context: Some(64), sequences: 6, ..Default::default() };
        let rig = Rig { config, ..Rig::default() };
        let mut engine = rig.load(&golden::pebble(), |cpu| Faulty(cpu, Arc::clone(&faults))).unwrap();
        for request in requests() {
            let seq = engine.open().unwrap();
            engine.submit(seq, request).unwrap();
        }
        let mut said = BTreeMap::<_, Vec<_>>::new();
        while engine.is_busy() {
            for event in engine.step() {
                if let Event::Token { seq, token, logprob, top } = event {
                    said.entry(format!("{seq:?}")).or_default().push((token, logprob, top));
                }
            }
        }
        (said, faults.found.load(SeqCst), faults.reads.load(SeqCst))
    };
    let (of_all, found, read) = answers(false);
    assert!(found == 0 && of_all.values().all(|said| said.len() == 20) && of_all.len() == 6);
    let (of_few, found, read_still) = answers(true);
    assert_eq!(of_few, of_all);
    // The row whose log-probabilities are asked for is read, and a few more.
    assert!(
        found >= 6 * 20 && (20..60).contains(&read_still),
        "{found} rows found, {read_still} reads, {read} before"
    );
}
