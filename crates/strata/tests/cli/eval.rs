//! `strata eval`.

use serde_json::Value;
use strata_testkit::golden::{self, large_model};

use crate::program::{Place, pebble};

fn text(name: &str) -> String {
    golden::dir().join("pebble/val").join(name).display().to_string()
}

fn eval(args: &[&str]) -> Value {
    Place::new().run(&[&["eval", "--json"], args].concat()).json()
}

/// Oracle: another engine's perplexity tool on the same file and text, 40 windows of 512; not more than 1 % worse.
#[test]
fn perplexity_is_that_of_another_engine() {
    let json = eval(&[&pebble(), &text("dict.txt"), "--windows", "40"]);
    let found = json["perplexity"].as_f64().unwrap();
    assert!((found / 14.48 - 1.0).abs() < 0.01, "{found}");
    assert_eq!((&json["tokens"], &json["windows"]), (&(40 * 255).into(), &40.into()));
    let error = json["perplexity_error"].as_f64().unwrap();
    assert!(error > 0.05 && error < 1.0, "{error}");
}

/// Oracle: a model is not different from itself, whatever the window and the threads.
#[test]
fn a_model_agrees_with_itself() {
    let model = pebble();
    let flags = [&model, &text("docs.txt"), "--context", "64", "--windows", "3"];
    let alone = eval(&[&flags[..], &["--window", "5", "--threads", "1"]].concat());
    let both = eval(&[&flags[..], &["--against", &model]].concat());
    let other = &both["against"];
    assert_eq!(both["perplexity"], alone["perplexity"]);
    assert_eq!(both["perplexity"], other["perplexity"]);
    assert_eq!(both["tokens"], 3 * 31);
    assert_eq!(other["top1_agreement"], 1.0);
    assert_eq!(other["kl"]["max"], 0.0);
}

/// Oracle: the figures of the description: a coarser file is a little, not a lot, away from a finer one.
#[test]
fn a_coarser_model_is_a_little_away() {
    let Some(fine) = large_model("pebble-q8_0.gguf") else { return };
    let fine = fine.display().to_string();
    let json =
        eval(&[&pebble(), &text("chat.txt"), "--windows", "4", "--context", "256", "--against", &fine]);
    let (kl, agreement) = (&json["against"]["kl"], json["against"]["top1_agreement"].as_f64().unwrap());
    let of = |name: &str| kl[name].as_f64().unwrap();
    assert!(
        of("median") < of("mean") && of("mean") < of("percentile_99") && of("percentile_99") <= of("max"),
        "{kl}"
    );
    assert!(of("mean") > 1e-5 && of("mean") < 0.15, "{kl}");
    assert!(agreement > 0.9, "{agreement}");
}

/// Oracle: the text form says what the JSON form says.
#[test]
fn says_it_in_words() {
    let flags = [&pebble(), &text("docs.txt"), "--context", "64", "--windows", "2"];
    let words = Place::new().run(&[&["eval"], &flags[..]].concat()).well();
    let value = eval(&flags)["perplexity"].as_f64().unwrap();
    assert!(words.starts_with(&format!("perplexity    {value:.4} ± ")), "{words}");
    assert!(words.contains("62 tokens in 2 windows of 64"), "{words}");
}

/// Oracle: a single token has no spread, so no error: none is said, and null in JSON. A path steers no terminal.
#[test]
fn a_single_token_has_no_error() {
    let place = Place::new();
    let other = place.name("other\u{1b}[2J.gguf");
    std::fs::copy(pebble(), &other).unwrap();
    let text = text("docs.txt");
    let args = ["eval", &pebble(), &text, "--context", "3", "--windows", "1", "--against", &other];
    let said = place.run(&args).well();
    assert!(!said.contains('±') && !said.contains("NaN") && said.contains("1 token in 1 window"), "{said}");
    assert!(said.contains("other?[2J.gguf"), "{said}");
    let json = place.run(&[&args[..], &["--json"]].concat()).json();
    assert!(json["perplexity_error"].is_null() && json["against"]["kl"]["error"].is_null(), "{json}");
}
