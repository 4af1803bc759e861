//! Flags, environment and file, seen through `strata plan`, and the help.

use crate::program::{Place, golden};

fn planned(place: &Place, flags: &[&str]) -> serde_json::Value {
    place.run(&[&["plan", &golden("tiny/tiny.gguf"), "--json"], flags].concat()).json()["config"].clone()
}

/// Oracle: the documented order of the layers.
#[test]
fn flags_win_over_variables_over_the_file() {
    let mut place = Place::new();
    std::fs::create_dir_all(place.path(".config/strata")).unwrap();
    place.write(".config/strata/config.toml", "context = 100\nwindow = 50\nthreads = 1\n");
    let json = planned(&place, &[]);
    assert_eq!((&json["context"], &json["window"], &json["threads"]), (&100.into(), &50.into(), &1.into()));
    place.set("STRATA_CONTEXT", "200");
    place.set("STRATA_WINDOW", "60");
    let json = planned(&place, &["--context", "300"]);
    assert_eq!((&json["context"], &json["window"], &json["threads"]), (&300.into(), &60.into(), &1.into()));
    let other = place.write("other.toml", "threads = 2\n");
    assert_eq!(planned(&place, &["--config", &other])["threads"], 2);
    place.set("STRATA_CONFIG", &other);
    assert_eq!(planned(&place, &[])["threads"], 2);
}

/// Oracle: the sentence names the place.
#[test]
fn mistakes_are_usage_errors() {
    let mut place = Place::new();
    let model = golden("tiny/tiny.gguf");
    let bad = place.write("bad.toml", "threads = 2\ntreads = 1\n");
    place.run(&["plan", &model, "--config", &bad]).badly(2, &["bad.toml", "line 2", "treads"]);
    place.run(&["plan", &model, "--config", "absent.toml"]).badly(2, &["absent.toml"]);
    place.run(&["plan", &model, "--isa", "mmx"]).badly(2, &["--isa", "mmx", "scalar"]);
    place.run(&["plan", &model, "--threads", "99999"]).badly(2, &["--threads", "99999"]);
    place.run(&["run", &model, "x", "--top-p", "2"]).badly(2, &["--top-p", "2"]);
    place.run(&["run", &model, "x", "--temperature", "-1"]).badly(2, &["--temperature", "-1", "at least 0"]);
    place.run(&["run", &model, "x", "--logit-bias", "3=nan"]).badly(2, &["--logit-bias", "token 3"]);
    place
        .run(&["run", &model, "x", "--logit-bias", "384=1"])
        .badly(2, &["--logit-bias", "token 384", "below 384"]);
    let zero = place.write("zero.toml", "context = 0\n");
    place.run(&["plan", &model, "--config", &zero]).badly(2, &["zero.toml", "`context`", "at least 1"]);
    let large = place.write("large.toml", "context = 513\n");
    place.run(&["plan", &model, "--config", &large]).badly(2, &["large.toml", "`context`", "513", "512"]);
    place.run(&["plan", &model, "--config", "/dev/zero"]).badly(2, &["/dev/zero", "regular file"]);
    place.set("STRATA_THREADS", "many");
    place.run(&["plan", &model]).badly(2, &["STRATA_THREADS", "many"]);
}

/// Oracle: the flags. What has no effect on a CPU is said, each once, whatever the number of models; a reserve of nothing is one.
#[test]
fn what_has_no_effect_is_said_once() {
    let mut place = Place::new();
    let (model, text) = (golden("tiny/tiny.gguf"), place.write("text", "the sea is wide ".repeat(40)));
    let flags = [
        "--stagers",
        "2",
        "--ring",
        "1M",
        "--vram-limit",
        "1G",
        "--vram-reserve",
        "0",
        "--cpu-experts",
        "on",
    ];
    let args =
        ["eval", &model, &text, "--windows", "1", "--context", "32", "--against", &model, "--device", "cpu"];
    place.set("STRATA_RANKING", "on");
    let said = place.run(&[&args[..], &flags].concat()).err;
    for name in ["--stagers", "--ring", "--vram-limit", "--vram-reserve", "--cpu-experts", "STRATA_RANKING"] {
        assert_eq!(said.matches(&format!("{name}: it has no effect")).count(), 1, "{name} in {said}");
    }
}

/// Oracle: no escape character where nobody sees colours.
#[test]
fn a_log_in_a_pipe_has_no_colours() {
    let ended = Place::new().run(&["plan", &golden("tiny/tiny.gguf"), "--log", "debug"]);
    assert!(ended.err.contains("INFO") && !ended.err.contains('\u{1b}'), "{ended:?}");
}

/// Oracle: nothing but biases can leave nothing here.
#[test]
fn biases_that_bar_everything_are_named() {
    let place = Place::new();
    let all = (0..384).map(|token| format!("[{token}, -inf]")).collect::<Vec<_>>().join(", ");
    let file = place.write("all.toml", format!("logit_bias = [{all}]\n"));
    let args = ["run", &golden("tiny/tiny.gguf"), "x", "--raw", "--greedy", "--config", &file];
    place.run(&args).badly(1, &["bias"]);
}

/// Oracle: a misspelt variable is said, and does nothing.
#[test]
fn unknown_variables_are_said() {
    let mut place = Place::new();
    place.set("STRATA_CONTXT", "9");
    let ended = place.run(&["plan", &golden("tiny/tiny.gguf"), "--json"]);
    assert!(ended.err.contains("warning") && ended.err.contains("STRATA_CONTXT"), "{ended:?}");
    assert_eq!(ended.json()["config"]["context"], 512);
}

/// Oracle: clap's own exit codes, and that the documented parts are there.
#[test]
fn help_reads() {
    let place = Place::new();
    let help = place.run(&["--help"]).well();
    for part in ["run", "logits", "eval", "bench", "inspect", "plan", "synth", "Exit codes", "130", "STRATA_"]
    {
        assert!(help.contains(part), "no `{part}` in {help}");
    }
    // Wrapped by the terminal's width only: a line is left short where the next word doesn't fit.
    let lines: Vec<&str> = help.lines().skip_while(|line| !line.starts_with("Configuration:")).collect();
    for pair in lines.windows(2).filter(|pair| !pair[0].is_empty() && !pair[1].is_empty()) {
        let word = pair[1].split(' ').next().unwrap();
        assert!(pair[0].len() + 1 + word.len() > 100, "{pair:?}");
    }
    for command in ["run", "logits", "eval", "bench", "inspect", "plan", "synth"] {
        let help = place.run(&[command, "--help"]).well();
        assert!(help.contains("Example") && help.contains(&format!("strata {command}")), "{help}");
    }
    assert!(place.run(&["--version"]).well().starts_with("strata "));
    for args in [&["run"][..], &["run", "m", "--no-such-flag"], &["no-such-command"], &[]] {
        let ended = place.run(args);
        assert_eq!(ended.code, Some(2), "{ended:?}");
    }
}
