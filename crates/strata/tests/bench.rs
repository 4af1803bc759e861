//! `strata bench`: what is measured for which flags.

use std::process::{Command, Output, Stdio};

use assert_cmd::cargo::cargo_bin;
use serde_json::Value;

fn bench(args: &[&str]) -> Output {
    let model = strata_testkit::golden::dir().join("tiny/tiny.gguf");
    let mut command = Command::new(cargo_bin!("strata"));
    command.arg("bench").arg(model).args(["--quiet", "--device", "cpu"]).args(args);
    command.env_clear().stdin(Stdio::null()).output().unwrap()
}

/// Oracle: the flags. Prompts come first, then answers behind each depth, of one sequence and of three; tokens are those of all
/// sequences, and all of them were timed.
#[test]
fn answers_have_a_depth_and_companions() {
    let args =
        ["--prompt", "4", "--gen", "3", "--depth", "1,9", "--sequences", "1,3", "--reps", "2", "--json"];
    let output = bench(&args);
    assert!(output.status.success(), "{output:?}");
    let found: Value = serde_json::from_slice(&output.stdout).unwrap();
    let timed = found["host_memory"]["tokens"].as_u64().unwrap();
    let of = |result: &Value| {
        let number = |name: &str| result[name].as_u64().unwrap();
        assert!(result["tokens_per_second"].as_f64().unwrap() > 0.0, "{result}");
        (result["what"].as_str().unwrap().to_owned(), number("tokens"), number("depth"), number("sequences"))
    };
    let found: Vec<_> = found["results"].as_array().unwrap().iter().map(of).collect();
    let answer = |tokens, depth, sequences| ("answer".to_owned(), tokens, depth, sequences);
    let wanted =
        [("prompt".to_owned(), 4, 0, 1), answer(3, 1, 1), answer(9, 1, 3), answer(3, 9, 1), answer(9, 9, 3)];
    assert_eq!(found, wanted);
    assert_eq!(timed, 3 * (3 + 9 + 3 + 9), "a round to warm up and two repetitions of each answer");
}

/// Oracle: what makes no sense is a mistake of usage, named by its flag.
#[test]
fn nothing_to_measure_is_said() {
    for (args, said) in [
        (&["--depth", "0"][..], "--depth is 0"),
        (&["--sequences", "0"], "--sequences is 0"),
        (&["--prompt", "0", "--gen", "0"], "nothing to measure"),
        (&["--gen", "8", "--depth", "100000"], "--gen 8 --depth 100000"),
    ] {
        let output = bench(args);
        let error = String::from_utf8(output.stderr).unwrap();
        assert!(!output.status.success() && error.contains(said), "{args:?}: {error}");
        assert_eq!(error.trim().lines().count(), 1, "{error}");
    }
}
