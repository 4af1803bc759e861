//! `strata bench`: how fast prompts are read and tokens are made, and where the time goes.
//!
//! A round reads tokens into an empty sequence (a prompt), or has sequences that hold some answer together, one token each
//! in every step (an answer). Rounds of a kind are repeated; their median is the result.

use serde::Serialize;
use serde_json::json;
use strata_engine::{Engine, EngineConfig, Event, Reason, Request, Sampling, SeqId, Wants};
use strata_model::ngram::ReadAhead;
use strata_plan::Bytes;
use strata_topology::Resident;

use super::counted;
use crate::args::BenchArgs;
use crate::config::Config;
use crate::costs::{Costs, Spent, Stopwatch};
use crate::failure::Failure;
use crate::output::{print, print_json, printable};
use crate::progress;
use crate::wiring::{Asked, Machine};

pub fn run(args: &BenchArgs, config: &Config, machine: &Machine) -> Result<(), Failure> {
    if args.reps == 0 {
        return Err(Failure::usage("--reps is 0, but must be at least 1"));
    }
    let kinds = kinds(args)?;
    let longest = kinds.iter().max_by_key(|kind| kind.context());
    let longest = longest.ok_or_else(|| Failure::usage("--prompt and --gen leave nothing to measure"))?;
    let sequences = kinds.iter().map(Kind::sequences).max().unwrap_or(1);
    let model = machine.open(&args.model)?;
    let vocab = model.hyper.vocab;
    let wanted = EngineConfig { context: Some(longest.context()), sequences, ..config.engine.clone() };
    let asked = Asked::with(&longest.flags(), "lower --prompt, --gen, --depth and --sequences");
    let mut engine = machine.load(model, &wanted, config, &asked)?;

    let tokens = tokens(kinds.iter().map(Kind::prompts).max().unwrap_or(0), vocab);
    let bar = progress::steps(
        config.quiet,
        (args.reps as u64).saturating_add(1).saturating_mul(kinds.len() as u64),
        "",
        "rounds",
    );
    let (mut results, mut watch) = (Vec::new(), Watch::default());
    for kind in kinds {
        bar.set_message(kind.name());
        round(&mut engine, kind, &tokens, &mut watch)?;
        bar.inc(1);
        let mut rounds = Vec::new();
        for _ in 0..args.reps {
            rounds.push(round(&mut engine, kind, &tokens, &mut watch)?);
            bar.inc(1);
        }
        results.push(Measured::new(kind, &rounds));
    }
    bar.finish_and_clear();

    let name = engine.backend();
    let ahead = engine.read_ahead();
    let device = engine.device_bytes();
    if args.json {
        return print_json(&json!({
            "model": args.model.to_string_lossy(),
            "backend": name,
            "threads": machine.threads(),
            "isa": config.isa.name(),
            "window": engine.window(),
            "kv": config.engine.kv,
            "experts": config.engine.experts,
            "repetitions": args.reps,
            "read_ahead": ahead.map(|rows| json!({
                "warmed": rows.warmed,
                "dropped": rows.dropped,
                "failed": rows.failed,
            })),
            "host_memory": watch.as_json(),
            "device_memory": device.map(|(planned, taken)| json!({ "planned": planned, "taken": taken })),
            "results": results,
        }));
    }
    let mut out =
        format!("{}\n{name}, {}\n", printable(&args.model), counted(args.reps as u64, "repetition"));
    results.iter().for_each(|result| out += &result.as_text());
    out += &watch.as_text();
    if let Some((planned, taken)) = device {
        out += &device_text(planned, taken);
    }
    if let Some(ReadAhead { warmed, dropped, failed }) = ahead {
        out += &format!("\nn-gram rows read ahead: {warmed}, dropped {dropped}, failed {failed}\n");
    }
    print(&out)
}

/// What is measured.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    /// Tokens that are read together.
    Prompt(usize),
    /// Sequences that hold `depth` tokens answer `tokens` each.
    Answer { tokens: usize, depth: usize, sequences: usize },
}

/// All that is asked for, prompts first.
fn kinds(args: &BenchArgs) -> Result<Vec<Kind>, Failure> {
    for (flag, counts) in [("--depth", &args.depth), ("--sequences", &args.sequences)] {
        if counts.contains(&0) {
            return Err(Failure::usage(format!("{flag} is 0, but must be at least 1")));
        }
    }
    let prompts = args.prompt.iter().copied().filter(|&tokens| tokens > 0);
    let mut kinds: Vec<Kind> = prompts.map(Kind::Prompt).collect();
    for &depth in args.depth.iter().filter(|_| args.generate > 0) {
        let answer = |&sequences| Kind::Answer { tokens: args.generate, depth, sequences };
        kinds.extend(args.sequences.iter().map(answer));
    }
    Ok(kinds)
}

impl Kind {
    /// Tokens that its time is of.
    fn tokens(&self) -> usize {
        match *self {
            Kind::Prompt(tokens) => tokens,
            Kind::Answer { tokens, sequences, .. } => tokens.saturating_mul(sequences),
        }
    }

    /// Tokens that a sequence holds before.
    fn depth(&self) -> usize {
        match *self {
            Kind::Prompt(_) => 0,
            Kind::Answer { depth, .. } => depth,
        }
    }

    fn sequences(&self) -> usize {
        match *self {
            Kind::Prompt(_) => 1,
            Kind::Answer { sequences, .. } => sequences,
        }
    }

    /// Tokens that are needed for its prompts.
    fn prompts(&self) -> usize {
        match *self {
            Kind::Prompt(tokens) => tokens,
            Kind::Answer { depth, sequences, .. } => depth.saturating_mul(sequences),
        }
    }

    /// Tokens of a sequence in the end.
    fn context(&self) -> usize {
        match *self {
            Kind::Prompt(tokens) => tokens,
            Kind::Answer { tokens, depth, .. } => tokens.saturating_add(depth),
        }
    }

    /// What asked for that much context.
    fn flags(&self) -> String {
        match *self {
            Kind::Prompt(tokens) => format!("--prompt {tokens}"),
            Kind::Answer { tokens, depth: 1, .. } => format!("--gen {tokens}"),
            Kind::Answer { tokens, depth, .. } => format!("--gen {tokens} --depth {depth}"),
        }
    }

    fn name(&self) -> String {
        match *self {
            Kind::Prompt(tokens) => format!("prompt {tokens}"),
            Kind::Answer { tokens, depth, sequences } => {
                let behind = if depth > 1 { format!(" behind {depth}") } else { String::new() };
                let together = if sequences > 1 { format!(", {sequences} together") } else { String::new() };
                format!("answer {tokens}{behind}{together}")
            }
        }
    }
}

/// Arbitrary token ids, the same every time (a linear congruential generator).
fn tokens(count: usize, vocab: usize) -> Vec<u32> {
    let mut state = 1u64;
    let mut next = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        ((state >> 33) % vocab as u64) as u32
    };
    (0..count).map(|_| next()).collect()
}

/// The token of answers after which memory is looked at for the second time: all that comes once has come.
const SETTLED: usize = 1000;

/// This process's memory while it answers.
#[derive(Default)]
struct Watch {
    /// Tokens of answers so far.
    tokens: usize,
    /// Before the first, after [`SETTLED`], and at the end of the last round.
    seen: [Option<Resident>; 3],
}

impl Watch {
    fn begins(&mut self) {
        self.seen[0] = self.seen[0].or_else(Resident::now);
    }

    fn answered(&mut self, tokens: usize) {
        let before = self.tokens;
        self.tokens += tokens;
        if before < SETTLED && self.tokens >= SETTLED {
            self.seen[1] = Resident::now();
        }
    }

    fn ends(&mut self) {
        self.seen[2] = Resident::now();
    }

    fn as_json(&self) -> serde_json::Value {
        let of = |resident: Resident| json!({ "resident": resident.all, "own": resident.own });
        json!({
            "tokens": self.tokens,
            "start": self.seen[0].map(of),
            "after_1000": self.seen[1].map(of),
            "end": self.seen[2].map(of),
            "peak": self.seen[2].map(|resident| resident.peak),
        })
    }

    /// In a line; nothing where the system does not say, or nothing was answered.
    fn as_text(&self) -> String {
        let [Some(start), settled, Some(end)] = self.seen else { return String::new() };
        let mut out = format!("\nhost memory    {} before the first token of an answer, ", Bytes(start.all));
        if let Some(settled) = settled {
            out += &format!("{} after {SETTLED}, ", Bytes(settled.all));
        }
        out += &format!("{} after {}, {} at most", Bytes(end.all), self.tokens, Bytes(end.peak));
        if let Some(settled) = settled {
            let [from, to] = [settled, end].map(|resident| resident.own as i64);
            out += &format!("; grown by {} KiB after {SETTLED}, files not counted", (to - from) >> 10);
        }
        out + "\n"
    }
}

/// The device's memory in a line.
fn device_text(planned: u64, taken: u64) -> String {
    let more = 100.0 * (taken as f64 - planned as f64) / planned.max(1) as f64;
    format!(
        "\ndevice memory  {} planned, {} taken ({more:+.2} %) by the device's own count, without the driver's context\n",
        Bytes(planned),
        Bytes(taken)
    )
}

/// What one round took.
fn round(engine: &mut Engine, kind: Kind, tokens: &[u32], watch: &mut Watch) -> Result<Spent, Failure> {
    let opened: Result<Vec<SeqId>, _> = (0..kind.sequences()).map(|_| engine.open()).collect();
    let opened = opened?;
    let spent = match kind {
        Kind::Prompt(prompt) => {
            let started = Stopwatch::start(engine);
            engine.forward(opened[0], &tokens[..prompt], Wants::Last, &mut |_, _| ())?;
            started.stop(engine)
        }
        Kind::Answer { tokens: answered, depth, .. } => {
            // All but the last of what is held is read before, so that the first tokens of all answers come together.
            for (&seq, held) in opened.iter().zip(tokens.chunks(depth)) {
                let (last, before) = held.split_last().expect("a depth is at least 1");
                if !before.is_empty() {
                    engine.forward(seq, before, Wants::Last, &mut |_, _| ())?;
                }
                let request = Request::new(vec![*last], Sampling::greedy(), &[]);
                engine.submit(seq, Request { max_tokens: Some(answered.saturating_add(1)), ..request })?;
            }
            answer(engine, &opened, watch)?
        }
    };
    for seq in opened {
        engine.close(seq)?;
    }
    Ok(spent)
}

/// Has sequences answer; what it took from when each of them had a first token.
fn answer(engine: &mut Engine, opened: &[SeqId], watch: &mut Watch) -> Result<Spent, Failure> {
    let step = |engine: &mut Engine| -> Result<Vec<SeqId>, Failure> {
        let mut answered = Vec::with_capacity(opened.len());
        for event in engine.step() {
            match event {
                Event::Token { seq, .. } => answered.push(seq),
                Event::Done { reason: Reason::Failed(why), .. } => return Err(Failure::failed(why)),
                Event::Done { .. } | Event::Read { .. } => {}
            }
        }
        Ok(answered)
    };
    let mut silent = opened.to_vec();
    while !silent.is_empty() {
        let answered = step(engine)?;
        silent.retain(|seq| !answered.contains(seq));
    }
    watch.begins();
    let started = Stopwatch::start(engine);
    while engine.is_busy() {
        watch.answered(step(engine)?.len());
    }
    let spent = started.stop(engine);
    watch.ends();
    Ok(spent)
}

/// What the rounds of a kind gave.
#[derive(Debug, Serialize)]
struct Measured {
    what: &'static str,
    /// Of all sequences.
    tokens: usize,
    /// Tokens that each sequence held before, and sequences.
    depth: usize,
    sequences: usize,
    #[serde(skip)]
    name: String,
    tokens_per_second: f64,
    slowest: f64,
    fastest: f64,
    bytes_per_second: f64,
    /// Of a round.
    #[serde(flatten)]
    costs: Costs,
}

impl Measured {
    fn new(kind: Kind, rounds: &[Spent]) -> Measured {
        let mut seconds: Vec<f64> = rounds.iter().map(|round| round.seconds).collect();
        seconds.sort_unstable_by(f64::total_cmp);
        let tokens = kind.tokens();
        let middle = median(&seconds);
        let rate = |seconds: f64| tokens as f64 / seconds;
        let mut all = Spent::default();
        rounds.iter().for_each(|round| all.merge(round));
        let costs = Costs::new(&all, rounds.len(), tokens);
        Measured {
            what: if matches!(kind, Kind::Prompt(_)) { "prompt" } else { "answer" },
            tokens,
            depth: kind.depth(),
            sequences: kind.sequences(),
            name: kind.name(),
            tokens_per_second: rate(middle),
            slowest: rate(seconds[seconds.len() - 1]),
            fastest: rate(seconds[0]),
            bytes_per_second: costs.bytes / middle,
            costs,
        }
    }

    fn as_text(&self) -> String {
        format!(
            "\n{:<13} {:>10.1} tokens/s   ({:.1} to {:.1})   {:.3} GB moved, {:.2} GB/s\n{}",
            self.name,
            self.tokens_per_second,
            self.slowest,
            self.fastest,
            self.costs.bytes / 1e9,
            self.bytes_per_second / 1e9,
            self.costs.as_text()
        )
    }
}

/// The middle of sorted values; between two middles, their mean.
fn median(sorted: &[f64]) -> f64 {
    let (low, high) = ((sorted.len() - 1) / 2, sorted.len() / 2);
    (sorted[low] + sorted[high]) / 2.0
}

#[cfg(test)]
mod tests {
    use strata_backend::Family;

    use super::*;

    /// Oracle: the definition.
    #[test]
    fn medians() {
        assert_eq!((median(&[1.0]), median(&[1.0, 3.0]), median(&[1.0, 2.0, 9.0])), (1.0, 2.0, 2.0));
    }

    /// Oracle: rates are tokens by seconds.
    #[test]
    fn results_are_per_round() {
        let mut rounds = [2.0, 1.0, 4.0].map(|seconds| Spent { seconds, ..Spent::default() });
        rounds[0].counters.add(Family::Experts, 3_000_000, 600);
        rounds[2].counters.add(Family::Head, 1_000_000, 300);
        let measured = Measured::new(Kind::Prompt(10), &rounds);
        assert_eq!((measured.tokens_per_second, measured.slowest, measured.fastest), (5.0, 2.5, 10.0));
        assert_eq!((measured.costs.bytes, measured.bytes_per_second), (300.0, 150.0));
    }

    /// Oracle: by hand. Growth is that of the process's own pages, from the thousandth token on.
    #[test]
    fn memory_is_told() {
        let seen = |all: u64, own: u64| Some(Resident { all: all << 20, own: own << 20, peak: 90 << 20 });
        let watch = Watch { tokens: 3000, seen: [seen(10, 3), seen(40, 4), seen(60, 5)] };
        let said = watch.as_text();
        assert!(
            said.contains("10 MiB before") && said.contains("40 MiB after 1000, 60 MiB after 3000, 90 MiB"),
            "{said}"
        );
        assert!(said.contains("grown by 1024 KiB after 1000"), "{said}");
        assert_eq!(Watch::default().as_text(), "");
        let said = device_text(1000 << 20, 1005 << 20);
        assert!(said.contains("1000 MiB planned, 1005 MiB taken (+0.50 %)"), "{said}");
    }

    /// Oracle: ids below the vocabulary, the same twice, and not all equal.
    #[test]
    fn tokens_are_fixed() {
        let ids = tokens(1000, 12_288);
        assert_eq!(ids, tokens(1000, 12_288));
        assert!(ids.iter().all(|&id| id < 12_288) && ids.iter().any(|&id| id != ids[0]));
    }
}
