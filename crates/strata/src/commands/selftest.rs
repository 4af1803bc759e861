//! `strata selftest`: whether a GPU computes what the CPU does, told line by line.

use std::ops::ControlFlow;
use std::time::Duration;

use serde_json::json;
use strata_plan::Bytes;
use strata_selftest::Line;

use super::counted;
use crate::args::SelftestArgs;
use crate::config::{Config, Device};
use crate::failure::Failure;
use crate::output::{print, print_json};
use crate::wiring::gpu;

pub fn run(args: &SelftestArgs, config: &Config) -> Result<(), Failure> {
    let number = match config.device {
        Device::Auto => 0,
        Device::Cuda(number) => number,
        Device::Cpu => {
            let name = config.name("device");
            return Err(Failure::usage(format!("{name}: the CPU is what GPUs are held against; name a GPU")));
        }
    };
    let device = gpu(number).map_err(|why| Failure::failed(format!("{}: {why}", config.name("device"))))?;
    if !args.json {
        let memory = Bytes(device.memory);
        print(&format!(
            "cuda:{number}  {}, {memory}: every result held against this machine's CPU, bit by bit\n\n{}",
            device.name, HEAD
        ))?;
    }
    let mut report = Report::default();
    let mut refused = None;
    strata_selftest::run(&device, &mut |line| {
        if !args.json
            && let Err(failure) = print(&row(&line))
        {
            refused = Some(failure);
            return ControlFlow::Break(());
        }
        report.add(line);
        ControlFlow::Continue(())
    })
    .map_err(|error| Failure::failed(format!("cuda:{number} was not checked to the end: {error}")))?;
    if let Some(failure) = refused {
        return Err(failure);
    }
    if args.json {
        print_json(&report.as_json(&device.name))?;
    }
    match report.verdict() {
        Ok(said) if args.json => drop(said),
        Ok(said) => print(&format!("\n{said}\n"))?,
        Err(why) => return Err(Failure::failed(format!("cuda:{number} {why}"))),
    }
    Ok(())
}

const HEAD: &str = "of           what                      cases     values       time  result\n";

fn row(line: &Line) -> String {
    let Line { of, what, found, time } = line;
    let time = 1e3 * time.as_secs_f64();
    format!("{of:<12} {what:<24} {:>6} {:>10} {time:>7.1} ms  {found}\n", found.cases, found.values)
}

/// All lines so far.
#[derive(Default)]
struct Report(Vec<Line>);

impl Report {
    fn add(&mut self, line: Line) {
        self.0.push(line);
    }

    fn time(&self) -> Duration {
        self.0.iter().map(|line| line.time).sum()
    }

    fn as_json(&self, device: &str) -> serde_json::Value {
        let line = |line: &Line| {
            let Line { of, what, found, time } = line;
            json!({
                "of": of,
                "what": what,
                "cases": found.cases,
                "values": found.values,
                "differing": found.differing,
                "worst": found.worst.is_finite().then_some(found.worst),
                "first": found.first,
                "seconds": time.as_secs_f64(),
            })
        };
        let equal = self.0.iter().all(|line| line.found.equal());
        json!({ "device": device, "equal": equal, "checks": self.0.iter().map(line).collect::<Vec<_>>() })
    }

    /// In a sentence: that all is equal, or what isn't.
    fn verdict(&self) -> Result<String, String> {
        let wrong: Vec<&Line> = self.0.iter().filter(|line| !line.found.equal()).collect();
        let Some(first) = wrong.first() else {
            let (cases, time) = (self.0.iter().map(|line| line.found.cases as u64).sum::<u64>(), self.time());
            return Ok(format!("all equal: {} in {:.1} s", counted(cases, "case"), time.as_secs_f64()));
        };
        Err(format!(
            "does not compute what the CPU does, in {} of {}: {} {}: {}; don't trust its answers, give --device cpu, and report this \
             with the whole table",
            wrong.len(),
            counted(self.0.len() as u64, "check"),
            first.of,
            first.what,
            first.found
        ))
    }
}

#[cfg(test)]
mod tests {
    use strata_selftest::Found;

    use super::*;

    fn line(of: &str, ours: &[f32]) -> Line {
        let mut found = Found::default();
        found.floats("a case", ours, &[1.0, 2.0]);
        Line { of: of.into(), what: "Q8_0".into(), found, time: Duration::from_millis(1500) }
    }

    /// Oracle: by hand. One difference anywhere is a failure, and the sentence says where.
    #[test]
    fn one_difference_is_the_verdict() {
        let mut report = Report::default();
        report.add(line("decode", &[1.0, 2.0]));
        assert_eq!(report.verdict().unwrap(), "all equal: 1 case in 1.5 s");
        report.add(line("product", &[1.0, 2.5]));
        let why = report.verdict().unwrap_err();
        assert!(
            why.contains("in 1 of 2 checks: product Q8_0: 1 of 2 values differ, by up to 2.0e-1"),
            "{why}"
        );
        assert!(why.contains("value 1 is 2.5e0, not 2e0") && why.contains("--device cpu"), "{why}");
        let json = report.as_json("a GPU");
        assert_eq!((&json["equal"], &json["checks"][1]["differing"]), (&false.into(), &1.into()));
        assert!(row(&report.0[0]).starts_with("decode       Q8_0") && row(&report.0[0]).ends_with("equal\n"));
    }
}
