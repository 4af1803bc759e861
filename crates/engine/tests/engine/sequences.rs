//! Sequences: windows are transactions, states can be kept, copied, saved and gone back to.

use strata_backend::{Backend, Op};
use strata_engine::{Engine, EngineConfig, EngineError, Event, Reason, Request, Sampling, SeqId, Wants};
use strata_testkit::golden::{self, Npz};

use crate::rig::{Rig, bits, logits};

fn engine(config: EngineConfig) -> Engine {
    let config = EngineConfig { context: config.context.or(Some(256)), ..config };
    Rig { config, ..Rig::default() }.open(&golden::dir().join("tiny/tiny.gguf"))
}

fn ids() -> Vec<u32> {
    Npz::golden("tiny/ref.npz").ids("ids")
}

fn run(engine: &mut Engine) -> (Vec<u32>, Vec<Reason>) {
    let (mut said, mut ends) = (Vec::new(), Vec::new());
    while engine.is_busy() {
        for event in engine.step() {
            match event {
                Event::Token { token, .. } => said.push(token),
                Event::Done { reason, .. } => ends.push(reason),
                Event::Read { .. } => {}
            }
        }
    }
    (said, ends)
}

fn answer(engine: &mut Engine, seq: SeqId, prompt: &[u32], tokens: usize) -> Vec<u32> {
    let request =
        Request { max_tokens: Some(tokens), ..Request::new(prompt.to_vec(), Sampling::greedy(), &[]) };
    engine.submit(seq, request).unwrap();
    run(engine).0
}

/// Oracle: the sequence that was never disturbed.
#[test]
fn a_fork_goes_its_own_way() {
    let ids = ids();
    let mut engine = engine(EngineConfig { sequences: 3, ..Default::default() });
    let (a, alone) = (engine.open().unwrap(), engine.open().unwrap());
    logits(&mut engine, alone, &ids, Wants::Nothing);
    let want = logits(&mut engine, alone, &[5, 9], Wants::All);
    logits(&mut engine, a, &ids, Wants::Nothing);
    let b = engine.fork(a).unwrap();
    logits(&mut engine, a, &[7, 7, 7], Wants::All);
    assert_eq!(engine.tokens(b).unwrap(), ids);
    assert!(bits(&logits(&mut engine, b, &[5, 9], Wants::All)) == bits(&want));
    assert!(matches!(engine.fork(a), Err(EngineError::NoSequence(3))));
}

/// Oracle: reading everything again. A checkpoint is taken in the middle of a window, and gone back to.
#[test]
fn going_back_to_a_checkpoint_equals_reading_again() {
    let ids = ids();
    for (window, cut) in [(61, 30), (7, 30), (7, 28), (1, 61)] {
        let config = EngineConfig { window: Some(window), ..Default::default() };
        let mut engine = engine(EngineConfig { sequences: 2, ..config });
        let seq = engine.open().unwrap();
        let request = Request {
            max_tokens: Some(6),
            checkpoints: vec![cut],
            ..Request::new(ids.clone(), Sampling::greedy(), &[])
        };
        engine.submit(seq, request).unwrap();
        run(&mut engine);
        let mut other = ids[..cut].to_vec();
        other.extend([4, 8, 15, 16, 23, 42]);
        assert_eq!(engine.rewind(seq, &other).unwrap(), cut, "window {window}");
        let got = logits(&mut engine, seq, &other[cut..], Wants::All);
        let fresh = engine.open().unwrap();
        let want = logits(&mut engine, fresh, &other, Wants::All);
        assert!(bits(&got) == bits(&want[cut..]), "window {window}, cut {cut}");
    }
}

/// Oracle: the prefix that was asked for. Without a checkpoint there is nothing but the start to go back to.
#[test]
fn rewinding_says_how_much_is_kept() {
    let ids = ids();
    let mut engine = engine(EngineConfig::default());
    let seq = engine.open().unwrap();
    logits(&mut engine, seq, &ids[..20], Wants::Nothing);
    assert_eq!(engine.rewind(seq, &ids).unwrap(), 20, "what is held is a prefix");
    assert_eq!(engine.rewind(seq, &ids[..20]).unwrap(), 0, "something must be left to read");
    assert!(engine.tokens(seq).unwrap().is_empty());
}

/// Oracle: the sequence before the cancelled prompt, bit for bit.
#[test]
fn a_cancelled_prompt_changes_nothing() {
    let ids = ids();
    let mut engine = engine(EngineConfig { sequences: 2, window: Some(64), ..Default::default() });
    let (seq, twin) = (engine.open().unwrap(), engine.open().unwrap());
    for s in [seq, twin] {
        logits(&mut engine, s, &ids[..13], Wants::Nothing);
    }
    // Cancelled from inside the window, after its second layer: the window is given up at the next layer boundary.
    let canceller = engine.canceller(seq).unwrap();
    let mut writes = 0;
    engine.set_probe(Some(Box::new(move |op: &Op<'_>, _: &mut dyn Backend| {
        if matches!(op, Op::MixerWrite { .. }) {
            writes += 1;
            if writes == 4 {
                canceller.cancel();
            }
        }
    })));
    engine.submit(seq, Request::new(ids[13..60].to_vec(), Sampling::greedy(), &[])).unwrap();
    assert_eq!(run(&mut engine), (vec![], vec![Reason::Cancelled]));
    engine.set_probe(None);
    assert_eq!(engine.tokens(seq).unwrap(), &ids[..13]);
    let (got, want) = (answer(&mut engine, seq, &[3], 8), answer(&mut engine, twin, &[3], 8));
    assert_eq!(got, want);
}

/// Oracle: the sequence that was not saved.
#[test]
fn saved_bytes_bring_a_sequence_back() {
    let ids = ids();
    let mut first = engine(EngineConfig { sequences: 2, ..Default::default() });
    let seq = first.open().unwrap();
    logits(&mut first, seq, &ids, Wants::Nothing);
    let bytes = first.save(seq).unwrap();
    let want = answer(&mut first, seq, &[3], 10);

    let mut second = engine(EngineConfig::default());
    let seq = second.load_sequence(&bytes).unwrap();
    assert_eq!(second.tokens(seq).unwrap(), ids);
    assert_eq!(answer(&mut second, seq, &[3], 10), want);

    let f32_cache = EngineConfig { kv: strata_backend::KvFormat::F32, ..Default::default() };
    let refused = engine(f32_cache).load_sequence(&bytes).unwrap_err();
    assert!(refused.to_string().contains("another cache format"), "{refused}");
    let pebble = Rig::default().open(&golden::pebble()).load_sequence(&bytes).unwrap_err();
    assert!(pebble.to_string().contains("another model"), "{pebble}");
}

/// Oracle: the documented end of each answer.
#[test]
fn answers_end_where_they_should() {
    let ids = ids();
    let mut engine = engine(EngineConfig { context: Some(70), ..Default::default() });
    let seq = engine.open().unwrap();
    let all = answer(&mut engine, seq, &ids, 8);
    let stop = all[3];
    assert_eq!(engine.rewind(seq, &ids).unwrap(), 0);
    engine.submit(seq, Request::new(ids.clone(), Sampling::greedy(), &[stop])).unwrap();
    let first = all.iter().position(|&t| t == stop).unwrap();
    assert_eq!(run(&mut engine), (all[..first].to_vec(), vec![Reason::Stop(stop)]));
    let seq2 = {
        engine.close(seq).unwrap();
        engine.open().unwrap()
    };
    engine.submit(seq2, Request::new(ids.clone(), Sampling::greedy(), &[])).unwrap();
    let (said, ends) = run(&mut engine);
    assert_eq!(ends, [Reason::Context]);
    // The last token chosen stands at the position after the last that fits.
    assert_eq!(ids.len() + said.len(), engine.context() + 1);
    assert!(matches!(engine.tokens(seq), Err(EngineError::Closed)));
}

/// Oracle: one sentence each.
#[test]
fn bad_requests_are_refused() {
    let mut engine = engine(EngineConfig::default());
    let seq = engine.open().unwrap();
    let mut refuse = |prompt: Vec<u32>, sampling: Sampling| {
        engine.submit(seq, Request::new(prompt, sampling, &[])).unwrap_err().to_string()
    };
    assert!(refuse(vec![], Sampling::greedy()).contains("prompt is empty"));
    assert!(refuse(vec![384], Sampling::greedy()).contains("token id 384 is out of range"));
    assert!(refuse(vec![3; 257], Sampling::greedy()).contains("257 tokens don't fit the context of 256"));
    assert!(refuse(vec![3], Sampling { top_p: 0.0, ..Sampling::default() }).contains("top_p is 0"));
}

/// Oracle: the same answer without the interruption. A prompt window pauses while another sequence decodes, and a third is read at once.
#[test]
fn reading_at_once_gives_a_paused_window_up() {
    let ids = ids();
    let config = EngineConfig { sequences: 3, window: Some(64), ..Default::default() };
    let mut engine = engine(config);
    engine.set_prompt_slice(std::time::Duration::ZERO);
    let [talker, reader, other] = [0; 3].map(|_| engine.open().unwrap());
    let request = |prompt: &[u32], n| Request {
        max_tokens: Some(n),
        checkpoints: vec![prompt.len()],
        ..Request::new(prompt.to_vec(), Sampling::greedy(), &[])
    };
    engine.submit(talker, request(&ids[..9], 40)).unwrap();
    engine.step();
    engine.submit(reader, request(&ids, 6)).unwrap();
    engine.step();
    let want = logits(&mut engine, other, &ids[5..50], Wants::Last);
    let mut said = Vec::new();
    while engine.is_busy() {
        for event in engine.step() {
            if let Event::Token { seq, token, .. } = event
                && seq == reader
            {
                said.push(token);
            }
        }
    }
    for s in [reader, other] {
        engine.rewind(s, &[1]).unwrap();
    }
    assert_eq!(answer(&mut engine, reader, &ids, 6), said);
    assert!(bits(&logits(&mut engine, other, &ids[5..50], Wants::Last)) == bits(&want));
}
