//! The checks themselves, where there is no GPU: the CPU against itself, and against one that errs.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::Ordering::SeqCst;

use strata_backend::{Largest, LogitRow};
use strata_cpu::Cpu;
use strata_engine::{Engine, EngineConfig, Sampling};
use strata_quant::{Format, Isa};
use strata_selftest::ops::{self, LargestOf, Multiplies, OnCpu, Quantised};
use strata_selftest::{CheckError, Found, ids, whole};
use strata_testkit::faulty::{Faults, Faulty};
use strata_testkit::golden;

/// The CPU, with one bit of what it gives flipped, or something that happens to logits forgotten.
struct Errs(OnCpu, Forgets);

fn flip(values: &mut [f32]) {
    let last = values.last_mut().unwrap();
    *last = f32::from_bits(last.to_bits() ^ 1);
}

impl Multiplies for Errs {
    fn quantise(&mut self, x: &[f32], k: usize, cols: usize) -> Result<Quantised, CheckError> {
        let mut columns = self.0.quantise(x, k, cols)?;
        columns.sums[1] += 1;
        Ok(columns)
    }

    fn decode(&mut self, format: Format, row: &[u8], n: usize) -> Result<Vec<f32>, CheckError> {
        let mut values = self.0.decode(format, row, n)?;
        values.fill(0.5);
        Ok(values)
    }

    fn product(
        &mut self,
        weights: (Format, &[u8], f32),
        x: &[f32],
        size: [usize; 3],
    ) -> Result<Vec<f32>, CheckError> {
        let mut values = self.0.product(weights, x, size)?;
        flip(&mut values);
        Ok(values)
    }

    fn largest(&mut self, values: &[f32], wanted: Largest<'_>) -> Result<LargestOf, CheckError> {
        let rows: Vec<LogitRow<'_>> = wanted.rows.iter().map(|row| (self.1)(*row)).collect();
        self.0.largest(values, Largest { rows: &rows, ..wanted })
    }
}

/// What is got wrong of a row of logits.
type Forgets = fn(LogitRow<'_>) -> LogitRow<'_>;

fn forgets_that_zeros_are_alike(row: LogitRow<'_>) -> LogitRow<'_> {
    LogitRow { temperature: if row.temperature == 0.0 { f32::NAN } else { row.temperature }, ..row }
}

type Check = fn(&mut dyn Multiplies, &mut dyn Multiplies) -> Result<Found, CheckError>;

/// Oracle: the scalar path is the same computation. Mutant: a last bit, a sum, zeros that are never alike, a decoder that knows one number.
#[test]
fn single_ops_agree_with_themselves_and_no_error_passes() {
    let mut fast = OnCpu(Isa::detect());
    let checks: [Check; 4] = [
        ops::quantisation,
        ops::largest,
        |ours, theirs| ops::decoding(Format::Q4K, ours, theirs),
        // A format of which no bytes are a NaN: the last bit would be nobody's.
        |ours, theirs| ops::products(Format::Mxfp4, ours, theirs),
    ];
    for check in checks {
        let found = check(&mut fast, &mut OnCpu(Isa::Scalar)).unwrap();
        assert!(found.equal() && found.cases > 0, "{found}");
        let found = check(&mut Errs(OnCpu(Isa::detect()), forgets_that_zeros_are_alike), &mut fast).unwrap();
        assert!(!found.equal() && found.first.is_some(), "{found}");
    }
}

/// Mutants: a backend that leaves out the last adjustment, the mask, or the temperature.
#[test]
fn what_happens_to_logits_is_checked() {
    let mutants: [Forgets; 3] = [
        |row| LogitRow { adjustments: &row.adjustments[..row.adjustments.len().saturating_sub(1)], ..row },
        |row| LogitRow { mask: None, ..row },
        |row| LogitRow { temperature: row.temperature.min(1.0), ..row },
    ];
    for mutant in mutants {
        let found = ops::largest(&mut Errs(OnCpu(Isa::detect()), mutant), &mut OnCpu(Isa::detect())).unwrap();
        assert!(!found.equal(), "{found}");
    }
}

fn config(window: usize) -> EngineConfig {
    EngineConfig {
        window: Some(window),
        context: Some(96),
        sequences: 4,
        draft: true,
        ..EngineConfig::default()
    }
}

fn tiny() -> PathBuf {
    golden::dir().join("tiny/tiny.gguf")
}

/// The tiny model on the CPU.
fn on_cpu() -> Engine {
    whole::engine(&tiny(), &config(24), whole::cpu().unwrap()).unwrap()
}

/// The same with faults.
fn with(faults: &Arc<Faults>) -> Engine {
    let cpu: Cpu = whole::cpu().unwrap();
    whole::engine(&tiny(), &config(24), Faulty(cpu, Arc::clone(faults))).unwrap()
}

/// Oracle: the model's own parts. Mutant: one bit of one op's result.
#[test]
fn every_family_of_a_model_is_compared() {
    let (tokens, faults) = (ids(384, 50), Arc::new(Faults::default()));
    let found = whole::op_by_op(&tiny(), &config(24), &tokens, 4, [with(&faults), on_cpu()]).unwrap();
    let mut families: Vec<_> = found.keys().copied().collect();
    families.sort_unstable();
    let all =
        ["draft", "embed", "gdn", "head", "mixer", "n-gram", "qsa", "route, experts, combine", "saved state"];
    assert_eq!(families, all);
    for (family, (found, _)) in found {
        assert!(found.equal(), "{family}: {found}");
    }
    let faults = Arc::new(Faults { spoils: (faults.reads.load(SeqCst) / 2).into(), ..Faults::default() });
    let found = whole::op_by_op(&tiny(), &config(24), &tokens, 4, [with(&faults), on_cpu()]).unwrap();
    let differing: u64 = found.values().map(|(found, _)| found.differing).sum();
    assert_eq!(differing, 1);
}

/// Oracle: the same engine. Mutant: one bit of one row of logits.
#[test]
fn unwatched_steps_are_compared() {
    let tokens = ids(384, 60);
    let faults = Arc::new(Faults::default());
    for spoils in [0, 2] {
        faults.reads.store(0, SeqCst);
        faults.spoils.store(spoils, SeqCst);
        let work = |engine: &mut Engine| whole::forks_and_rewinds(engine, &tokens, true);
        let found = whole::unwatched("tiny", [&mut with(&faults), &mut on_cpu()], work).unwrap();
        assert_eq!(found.equal(), spoils == 0, "{found}");
    }
    let prompts = [&tokens[..20], &tokens[3..9], &tokens[..46], &tokens[1..2]];
    let work = |engine: &mut Engine| whole::neighbours(engine, &prompts, &Sampling::default());
    let found = whole::unwatched("tiny", [&mut on_cpu(), &mut on_cpu()], work).unwrap();
    assert!(found.equal() && found.values == 4 * 12 * 4, "{found}");
}
