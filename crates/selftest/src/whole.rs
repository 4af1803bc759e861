//! Whole models, on both sides through the engine: what every op leaves, and what comes of steps that nobody watches.

use std::collections::BTreeMap;
use std::ops::ControlFlow;
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use strata_backend::{Backend, BackendError, Build, Family, Op, Span};
use strata_cpu::Cpu;
use strata_engine::{Engine, EngineConfig, EngineError, Event, Readers, Reason, Request, Sampling, Wants};
use strata_model::Model;
use strata_plan::Limits;
use strata_quant::Isa;
use strata_topology::{Role, Topology, spawn};

use crate::{CheckError, Found};

/// The CPU, with two threads.
pub fn cpu() -> Result<Cpu, CheckError> {
    Ok(Cpu::new(Topology::read().assign(Some(2))?, Isa::detect()))
}

/// A model on a backend.
pub fn engine(path: &Path, config: &EngineConfig, builder: impl Build) -> Result<Engine, CheckError> {
    let model = Arc::new(Model::open(path)?);
    let limits = Limits { available: 4 << 30, total: 4 << 30, source: "the check".into() };
    let io = Topology::read().assign(Some(1))?.set(Role::Io).clone();
    let readers = Readers { spawn: Box::new(move |name, work| spawn(Role::Io, &io, name, work)), most: 2 };
    let go_on = &mut |_| ControlFlow::Continue(());
    Ok(Engine::load(model, config, &limits, builder, readers, go_on)?)
}

/// What was found of a family's ops, and how long its ops took on our side, with reading their results and the comparison.
pub type PerFamily = BTreeMap<&'static str, (Found, Duration)>;

/// What an op wrote: its family, and the values.
type Written = (Family, Result<Vec<f32>, BackendError>);

/// What ops write, of `[wide, hidden, vocab]` values in a row. The parts of the expert stage leave nothing to read before the last.
fn written(op: &Op<'_>, backend: &mut dyn Backend, [wide, hidden, vocab]: [usize; 3]) -> Written {
    let rows_of = |spans: &[Span]| spans.iter().map(|span| span.rows).sum::<usize>();
    let buffers = match op {
        Op::Embed { tokens, x, .. } => vec![(*x, tokens.len() * wide)],
        Op::Ngram { spans, x, .. } => vec![(*x, rows_of(spans) * wide)],
        Op::MixerRead { rows, u, inject, .. } => vec![(*u, rows * hidden), (*inject, rows * (wide / hidden))],
        Op::MixerWrite { rows, x, .. } => vec![(*x, rows * wide)],
        Op::Gdn { spans, y, .. } | Op::Qsa { spans, y, .. } => vec![(*y, rows_of(spans) * hidden)],
        Op::Combine { rows, y, .. } => vec![(*y, rows * hidden)],
        Op::Head { rows, logits, .. } => vec![(*logits, rows.len() * vocab)],
        Op::DraftJoin { next, out, .. } => vec![(*out, next.len() * wide)],
        Op::Route { .. } | Op::Group { .. } | Op::Experts { .. } => vec![],
    };
    let mut values = Vec::new();
    let read = buffers.into_iter().try_for_each(|(buffer, len)| {
        let at = values.len();
        values.resize(at + len, 0.0);
        backend.read(buffer, 0, &mut values[at..])
    });
    (op.family(), read.map(|()| values))
}

/// A family's name here: the routed experts show in what combines them.
fn name(family: Family) -> &'static str {
    if family == Family::Combine { "route, experts, combine" } else { family.name() }
}

/// Runs the same tokens on both, the last `decoded` one by one, and compares what every op writes, and the state in the end (`saved state`).
pub fn op_by_op(
    path: &Path,
    config: &EngineConfig,
    tokens: &[u32],
    decoded: usize,
    [ours, theirs]: [Engine; 2],
) -> Result<PerFamily, CheckError> {
    let hyper = &ours.model().hyper;
    let sizes = [hyper.streams * hyper.width, hyper.width, hyper.vocab];
    let file = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
    let what = format!("{file}, windows of {}", config.window.unwrap_or(tokens.len()));
    let run = |mut engine: Engine, mut see: Box<dyn FnMut(Written) + Send>| {
        engine.set_probe(Some(Box::new(move |op, backend| see(written(op, backend, sizes)))));
        let seq = engine.open()?;
        let (prompt, rest) = tokens.split_at(tokens.len() - decoded);
        engine.forward(seq, prompt, if config.draft { Wants::Draft } else { Wants::All }, &mut |_, _| {})?;
        for token in rest.chunks(1) {
            engine.forward(seq, token, Wants::Last, &mut |_, _| {})?;
        }
        engine.save(seq)
    };
    let expected = Arc::new(Mutex::new(Vec::new()));
    let to = Arc::clone(&expected);
    let see = move |written| to.lock().unwrap_or_else(PoisonError::into_inner).push(written);
    let their_state = run(theirs, Box::new(see))?;
    let expected = std::mem::take(&mut *expected.lock().unwrap_or_else(PoisonError::into_inner));

    let found = Arc::new(Mutex::new(PerFamily::new()));
    let (all, to) = (expected.len(), Arc::clone(&found));
    let seen = Arc::new(AtomicUsize::new(0));
    let (mut theirs, mut since) = (expected.into_iter(), Instant::now());
    let see = {
        let (what, seen) = (what.clone(), Arc::clone(&seen));
        move |(family, ours): Written| {
            let op = seen.fetch_add(1, Relaxed);
            let mut found = to.lock().unwrap_or_else(PoisonError::into_inner);
            let (found, time) = found.entry(name(family)).or_default();
            let what = format_args!("{what}, op {op} of {all}, {}", family.name());
            match (ours, theirs.next()) {
                (Ok(ours), Some((_, Ok(theirs)))) if ours.is_empty() && theirs.is_empty() => {}
                (Ok(ours), Some((_, Ok(theirs)))) => found.floats(what, &ours, &theirs),
                (ours, theirs) => {
                    found.exactly(what, &[ours.is_ok()], &[theirs.is_some_and(|(_, read)| read.is_ok())])
                }
            }
            *time += since.elapsed();
            since = Instant::now();
        }
    };
    let our_state = run(ours, Box::new(see))?;
    let mut found = std::mem::take(&mut *found.lock().unwrap_or_else(PoisonError::into_inner));
    found.retain(|_, (found, _)| found.cases > 0);
    let started = Instant::now();
    let (state, time) = found.entry("saved state").or_default();
    state.exactly(format_args!("{what}, saved state"), &our_state, &their_state);
    state.exactly(format_args!("{what}, how many ops there were"), &[seen.load(Relaxed)], &[all]);
    *time += started.elapsed();
    Ok(found)
}

/// Does the same work on both, with nobody looking on, so that steps may be recorded and replayed, and compares what it gives.
pub fn unwatched(
    what: &str,
    [ours, theirs]: [&mut Engine; 2],
    work: impl Fn(&mut Engine) -> Result<Vec<u8>, EngineError>,
) -> Result<Found, CheckError> {
    let mut found = Found::default();
    let (theirs, ours) = (work(theirs)?, work(ours)?);
    found.exactly(what, &ours, &theirs);
    Ok(found)
}

fn bytes(rows: &mut Vec<u8>) -> impl FnMut(usize, &[f32]) {
    |_, row| rows.extend(row.iter().flat_map(|x| x.to_le_bytes()))
}

/// A prompt of two thirds of the tokens with the draft block, where it was asked for; then single steps, a fork, a way back with other
/// tokens: all logits, and both sequences' state. The engine needs two sequences.
pub fn forks_and_rewinds(engine: &mut Engine, tokens: &[u32], draft: bool) -> Result<Vec<u8>, EngineError> {
    let mut rows = Vec::new();
    let prompt = tokens.len() * 2 / 3;
    let seq = engine.open()?;
    let wants = if draft { Wants::Draft } else { Wants::All };
    engine.forward(seq, &tokens[..prompt], wants, &mut bytes(&mut rows))?;
    for token in tokens[prompt..].chunks(1) {
        engine.forward(seq, token, Wants::All, &mut bytes(&mut rows))?;
    }
    let fork = engine.fork(seq)?;
    let other: Vec<u32> = tokens[..prompt - 5].iter().copied().chain([1, 2, 3]).collect();
    let kept = engine.rewind(seq, &other)?;
    engine.forward(seq, &other[kept..], Wants::All, &mut bytes(&mut rows))?;
    for seq in [seq, fork] {
        rows.extend(engine.save(seq)?);
        engine.close(seq)?;
    }
    Ok(rows)
}

/// Several sequences answer together, with seeds of their own, while another's prompt is read between their tokens: what each says. The
/// engine needs a sequence for each prompt.
pub fn neighbours(
    engine: &mut Engine,
    prompts: &[&[u32]],
    sampling: &Sampling,
) -> Result<Vec<u8>, EngineError> {
    engine.set_prompt_slice(Duration::ZERO);
    let seqs = prompts.iter().map(|_| engine.open()).collect::<Result<Vec<_>, _>>()?;
    let (mut said, mut given) = (vec![Vec::new(); prompts.len()], 0);
    while given < prompts.len() || engine.is_busy() {
        if given < prompts.len() {
            let sampling = Sampling { seed: given as u64, ..sampling.clone() };
            let request =
                Request { max_tokens: Some(12), ..Request::new(prompts[given].to_vec(), sampling, &[]) };
            engine.submit(seqs[given], request)?;
            given += 1;
        }
        for event in engine.step() {
            match event {
                Event::Token { seq, token, .. } => {
                    let of = seqs.iter().position(|s| *s == seq);
                    said[of.expect("a sequence of ours")].push(token);
                }
                Event::Done { reason: Reason::Failed(why), .. } => return Err(EngineError::Config(why)),
                _ => {}
            }
        }
    }
    seqs.into_iter().try_for_each(|seq| engine.close(seq))?;
    Ok(said.iter().flatten().flat_map(|token| token.to_le_bytes()).collect())
}
