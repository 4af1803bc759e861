//! One build, one machine: the same bits whatever the window size, the number of threads, the instruction set and the neighbours.

use strata_engine::{EngineConfig, Event, ExpertHome, Request, Sampling, Wants};
use strata_quant::Isa;
use strata_testkit::golden::{self, Npz};

use crate::rig::{Rig, bits, logits};

/// The bundled model's prompt of 420 tokens, long enough for sparse selection, cut to keep the slow paths' time short.
fn prompt() -> Vec<u32> {
    let mut ids = Npz::golden("pebble/logits.npz").ids("ids3");
    ids.truncate(130);
    ids
}

/// Oracle: one run of the same engine. Window x threads x instruction set x where the experts live.
#[test]
fn logits_have_the_same_bits_everywhere() {
    let ids = prompt();
    let run = |window: usize, threads: usize, isa: Isa, experts: ExpertHome| {
        let config = EngineConfig { window: Some(window), context: Some(256), experts, ..Default::default() };
        let mut engine = Rig { config, threads, isa }.open(&golden::pebble());
        let seq = engine.open().unwrap();
        bits(&logits(&mut engine, seq, &ids, Wants::All))
    };
    let best = Isa::detect();
    let want = run(130, 2, best, ExpertHome::Mapped);
    for (window, threads) in [(1, 1), (1, 2), (7, 3), (64, 1), (130, 4)] {
        assert!(run(window, threads, best, ExpertHome::Mapped) == want, "window {window}, {threads} threads");
    }
    assert!(run(50, 2, best, ExpertHome::Heap) == want, "experts in the heap");
    // From none to all of them in memory; windows of which few, many and all experts come.
    for (budget, window, threads) in
        [(1, 130, 2), (1, 1, 1), (1 << 20, 7, 3), (4 << 20, 64, 1), (u64::MAX, 50, 2)]
    {
        let got = run(window, threads, best, ExpertHome::Budget(budget));
        assert!(got == want, "{budget} bytes of experts in memory, window {window}, {threads} threads");
    }
    for isa in Isa::available() {
        for window in [130, 5] {
            assert!(run(window, 2, isa, ExpertHome::Mapped) == want, "{isa}, window {window}");
        }
    }
}

/// Oracle: each sequence alone. Several decode together, while another's prompt is read between
/// their tokens, layer by layer.
#[test]
fn neighbours_change_nothing() {
    let ids = prompt();
    let prompts = [&ids[..40], &ids[40..57], &ids[..130], &ids[90..91]];
    let request = |i: usize| Request {
        max_tokens: Some(12),
        ..Request::new(prompts[i].to_vec(), Sampling { seed: i as u64, ..Sampling::default() }, &[])
    };
    let config = EngineConfig { window: Some(32), context: Some(256), sequences: 4, ..Default::default() };
    let mut engine = Rig { config, ..Rig::default() }.open(&golden::pebble());
    // Prompt windows pause after every layer while somebody decodes.
    engine.set_prompt_slice(std::time::Duration::ZERO);
    let mut say = |which: &[usize]| -> Vec<Vec<u32>> {
        let seqs: Vec<_> = which.iter().map(|_| engine.open().unwrap()).collect();
        let mut said = vec![Vec::new(); which.len()];
        let mut given = 0;
        while given < which.len() || engine.is_busy() {
            // A new neighbour arrives every other step.
            if given < which.len() {
                engine.submit(seqs[given], request(which[given])).unwrap();
                given += 1;
            }
            for _ in 0..2 {
                for event in engine.step() {
                    if let Event::Token { seq, token, .. } = event {
                        let at = seqs.iter().position(|s| *s == seq).unwrap();
                        said[at].push(token);
                    }
                }
            }
        }
        seqs.into_iter().for_each(|s| engine.close(s).unwrap());
        said
    };
    let together = say(&[0, 1, 2, 3]);
    for (i, said) in together.iter().enumerate() {
        assert_eq!(said.len(), 12);
        assert_eq!(say(&[i])[0], *said, "sequence {i}");
    }
    assert_eq!(say(&[3, 2, 1, 0]), [3, 2, 1, 0].map(|i: usize| together[i].clone()));
}
