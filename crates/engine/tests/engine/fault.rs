//! Weights that aren't finite: refused before the first token, or found where they begin.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};

use strata_engine::{Engine, EngineConfig, Event, Reason, Request, Sampling, Wants};
use strata_gguf::TensorType;
use strata_quant::Format;
use strata_synth::{Geometry, Mix, Options, write};
use strata_testkit::faulty::{Faults, Faulty};
use tempfile::TempDir;

use crate::copy::Parts;
use crate::rig::{Rig, logits};

/// A tiny model in Q8_0 with a draft block.
fn model(folder: &TempDir) -> PathBuf {
    let path = folder.path().join("q8_0.gguf");
    let mut options = Options::new(Geometry::tiny(), Mix::pure(Format::Q8_0), 5);
    (options.draft, options.overwrite) = (true, true);
    write(&options, &path, &mut |_| {}, &AtomicBool::new(false)).unwrap();
    path
}

/// A copy of it in which every block of a tensor has this scale, or every value of a float tensor is NaN.
fn broken(folder: &TempDir, name: &str, scale: u16) -> PathBuf {
    let mut parts = Parts::of(&model(folder));
    let part = parts.get(name);
    match part.ty {
        TensorType::Q8_0 => {
            part.bytes.chunks_exact_mut(34).for_each(|block| block[..2].copy_from_slice(&scale.to_le_bytes()))
        }
        _ => part.bytes.fill(0xff),
    }
    parts.write(folder)
}

fn config() -> EngineConfig {
    EngineConfig { context: Some(256), window: Some(16), sequences: 3, draft: true, ..Default::default() }
}

fn open(path: &std::path::Path) -> Engine {
    Rig { config: config(), ..Rig::default() }.open(path)
}

const NAN: u16 = 0x7e00;
const INFINITY: u16 = 0x7c00;

/// Oracle: the tensor that was broken, and the op that reads it, by both ways of asking; nothing of it becomes the sequence's.
#[test]
fn what_is_broken_is_named() {
    let cases = [
        ("token_embd.weight", NAN, "the token embedding"),
        ("blk.1.ple_value.weight", NAN, "layer 1, the n-gram block"),
        ("blk.0.hc_attn_down.weight", INFINITY, "layer 0, a mixer's read"),
        ("blk.2.attn_qkv.weight", NAN, "layer 2, Gated DeltaNet"),
        ("blk.3.attn_v.weight", INFINITY, "layer 3, attention"),
        ("blk.2.ffn_down_exps.weight", NAN, "layer 2, the experts"),
        ("blk.1.ffn_up_shexp.weight", INFINITY, "layer 1, the experts"),
        ("output.weight", NAN, "the head"),
    ];
    let folder = tempfile::tempdir().unwrap();
    for (tensor, scale, place) in cases {
        let mut engine = open(&broken(&folder, tensor, scale));
        let seq = engine.open().unwrap();
        let read =
            engine.forward(seq, &[5, 6, 7], Wants::Last, &mut |_, _| panic!("{tensor}: logits")).unwrap_err();
        let read = read.to_string();
        assert!(read.contains(&format!("in {place}, and `{tensor}` there")), "{tensor}: {read}");
        assert!(read.contains("changed.gguf: at position 2 ") && read.contains("checksum"), "{read}");
        engine.submit(seq, Request::new(vec![5, 6, 7], Sampling::greedy(), &[])).unwrap();
        let ends = engine.step();
        let failed =
            |event: &Event| matches!(event, Event::Done { reason: Reason::Failed(why), .. } if *why == read);
        assert!(ends.iter().any(failed), "{tensor}: {ends:?}");
        assert!(!engine.is_busy() && engine.tokens(seq).unwrap().is_empty());
    }
}

/// Oracle: the draft block's own tensor; the trunk doesn't suffer.
#[test]
fn a_broken_draft_block_is_named() {
    let folder = tempfile::tempdir().unwrap();
    let mut engine = open(&broken(&folder, "blk.4.ffn_down_shexp.weight", NAN));
    let seq = engine.open().unwrap();
    logits(&mut engine, seq, &[5, 6, 7], Wants::All);
    engine.rewind(seq, &[1]).unwrap();
    let why = engine.forward(seq, &[5, 6, 7], Wants::Draft, &mut |_, _| ()).unwrap_err().to_string();
    assert!(why.contains("in the draft block, and `blk.4.ffn_down_shexp.weight` there"), "{why}");
}

/// Oracle: the tensors that can be NaN without a trace in the logits, in whatever format, and all small float ones.
#[test]
fn what_would_leave_no_trace_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let silent = [
        "blk.2.ffn_gate_inp.weight",
        "blk.3.indexer.q_proj.weight",
        "blk.3.indexer.k_norm.weight",
        "blk.4.indexer.k_proj.weight",
        "blk.1.ple_key.weight",
        "blk.0.hc_ffn_norm.weight",
        "blk.1.ssm_conv1d.weight",
    ];
    for tensor in silent {
        let path = broken(&folder, tensor, NAN);
        let rig = Rig { config: config(), ..Rig::default() };
        let why = rig.load(&path, |cpu| cpu).err().unwrap().to_string();
        assert!(why.contains(&format!("changed.gguf: tensor `{tensor}` holds")), "{why}");
    }
}

/// Oracle: the neighbour alone. One token's embedding is broken: only the sequence that has it fails, at its place, also in the middle of a
/// prompt, and whole windows of it are kept.
#[test]
fn a_broken_sequence_fails_alone() {
    let folder = tempfile::tempdir().unwrap();
    let path = model(&folder);
    let say = |engine: &mut Engine, prompts: &[Vec<u32>]| {
        let seqs: Vec<_> = prompts.iter().map(|_| engine.open().unwrap()).collect();
        let mut said = vec![(Vec::new(), String::new()); seqs.len()];
        for (&seq, prompt) in seqs.iter().zip(prompts) {
            let request =
                Request { max_tokens: Some(20), ..Request::new(prompt.clone(), Sampling::greedy(), &[]) };
            engine.submit(seq, Request { checkpoints: vec![prompt.len()], ..request }).unwrap();
        }
        while engine.is_busy() {
            for event in engine.step() {
                let at = |seq| seqs.iter().position(|s| *s == seq).unwrap();
                match event {
                    Event::Token { seq, token, .. } => said[at(seq)].0.push(token),
                    Event::Done { seq, reason: Reason::Failed(why) } => said[at(seq)].1 = why,
                    _ => {}
                }
            }
        }
        let held: Vec<usize> = seqs.iter().map(|&seq| engine.tokens(seq).unwrap().len()).collect();
        seqs.into_iter().for_each(|seq| engine.close(seq).unwrap());
        (said, held)
    };
    let prompts = [vec![5, 6, 7], (20..60).collect(), vec![8, 9]];
    let (alone, _) = say(&mut open(&path), &prompts);
    let victim = alone[2].0[3];
    let quiet = |prompt: &usize| !prompts[*prompt].contains(&victim) && !alone[*prompt].0.contains(&victim);
    assert!([0, 1].iter().all(quiet), "the prompts must not say what is broken: choose others");
    let mut parts = Parts::of(&path);
    let row = parts.get("token_embd.weight").bytes.len() / 384;
    parts.get("token_embd.weight").bytes[victim as usize * row..][..2].copy_from_slice(&NAN.to_le_bytes());
    let mut engine = open(&parts.write(&folder));
    let (said, held) = say(&mut engine, &prompts);
    assert_eq!(said[..2], alone[..2]);
    assert_eq!((&said[2].0[..], held[2]), (&alone[2].0[..4], 5));
    assert!(said[2].1.contains("position 5 ") && said[2].1.contains("token_embd.weight"), "{}", said[2].1);

    // Windows are of 16 tokens: the second has it, and is the first that isn't kept.
    let long: Vec<u32> = (20..60).map(|id| if id == 40 { victim } else { id }).collect();
    let (said, held) = say(&mut engine, &[long]);
    assert!(said[0].0.is_empty() && said[0].1.contains("the token embedding"), "{:?}", said[0]);
    assert_eq!(held, [16]);
}

/// Oracle: the next attempt. A value that was read wrong once is no fault of the file.
#[test]
fn what_errs_once_is_not_blamed_on_the_file() {
    let folder = tempfile::tempdir().unwrap();
    let faults = Arc::new(Faults::default());
    let rig = Rig { config: config(), ..Rig::default() };
    let mut engine = rig.load(&model(&folder), |cpu| Faulty(cpu, Arc::clone(&faults))).unwrap();
    let seq = engine.open().unwrap();
    faults.nans.store(faults.reads.load(SeqCst) + 1, SeqCst);
    let why = engine.forward(seq, &[5, 6, 7], Wants::Last, &mut |_, _| ()).unwrap_err().to_string();
    assert!(why.contains("finite, but are when computed again: cpu") && why.contains("selftest"), "{why}");
    assert_eq!(logits(&mut engine, seq, &[5, 6, 7], Wants::Last).len(), 1);
}
