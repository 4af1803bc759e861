//! `strata run`: answers, continued texts, conversations through a pipe.

use std::io::{BufRead, BufReader, Read, Write};

use crate::program::{Ended, Place, pebble};

const QUESTION: &str = "What is the capital of Italy?";
const ANSWER: &str = "The capital of Italy is Rome.\n";

/// Oracle: what the model's description says that it answers.
#[test]
fn answers_a_question() {
    let place = Place::new();
    let ended = place.run(&["run", &pebble(), QUESTION, "--greedy", "--think", "off"]);
    let speed = ended.err.clone();
    assert_eq!(ended.well(), ANSWER);
    assert!(
        speed.starts_with("strata: prompt: ") && speed.contains(" tokens/s; answer: 7 tokens, "),
        "{speed}"
    );
    assert_eq!(speed.lines().count(), 1, "{speed}");
}

/// Oracle: the same answer, however it is asked for and given.
#[test]
fn answers_alike_in_every_form() {
    let place = Place::new();
    let flags = ["--greedy", "--think", "off", "--quiet"];
    let piped = place.run_with(&[&["run", &pebble(), "-"], &flags[..]].concat(), QUESTION.as_bytes());
    assert_eq!(piped.err, "");
    assert_eq!(piped.well(), ANSWER);

    let json = place.run(&[&["run", &pebble(), QUESTION, "--json"], &flags[..]].concat()).json();
    assert_eq!(json["text"], ANSWER.trim_end());
    assert_eq!(json["reasoning"], "");
    assert_eq!(json["finish_reason"], "stop");
    assert_eq!(json["answer_tokens"], 7);
    assert_eq!(json["tokens"].as_array().unwrap().len(), 7);
    assert!(json["prompt_tokens"].as_u64().unwrap() > 7);
    assert!(json["seed"].is_u64());
    assert!(json["timings"]["prompt_tokens_per_second"].as_f64().unwrap() > 0.0);
    assert!(json["timings"]["answer_tokens_per_second"].as_f64().unwrap() > 0.0);
    assert!(json["timings"]["answer"]["families"].as_array().unwrap().len() >= 8);

    let timed = place.run(&[&["run", &pebble(), QUESTION, "--prompt-timing"], &flags[..]].concat());
    let of = |what: &str| timed.err.find(what).unwrap_or_else(|| panic!("{what}: {}", timed.err));
    assert!(of(": prompt\n") < of("  head ") && of("  head ") < of(": answer\n"), "{}", timed.err);
    assert_eq!(timed.well(), ANSWER);
}

/// Oracle: the seed's promise, and that different seeds do differ.
#[test]
fn a_seed_decides_the_answer() {
    let place = Place::new();
    let say = |seed: &str| {
        let flags = ["--temperature", "1.5", "--top-k", "0", "--raw", "-n", "12", "--json", "--seed", seed];
        place.run(&[&["run", &pebble(), "The sea"], &flags[..]].concat()).json()
    };
    let (one, again, other) = (say("1"), say("1"), say("2"));
    assert_eq!(one["tokens"], again["tokens"]);
    assert_ne!(one["tokens"], other["tokens"]);
    assert_eq!((&one["seed"], &one["finish_reason"]), (&1.into(), &"length".into()));
    assert_eq!(one["answer_tokens"], 12);
}

/// Oracle: a bias that leaves one token.
#[test]
fn a_bias_moves_the_choice() {
    let flags = ["--greedy", "--raw", "-n", "3", "--json", "--logit-bias", "77=1000"];
    let json = Place::new().run(&[&["run", &pebble(), "The sea"], &flags[..]].concat()).json();
    assert_eq!(json["tokens"], serde_json::json!([77, 77, 77]));
}

/// Oracle: the single answers; a question asked again after /reset is answered as the first time.
#[test]
fn a_conversation_through_a_pipe() {
    let place = Place::new();
    let input = format!("{QUESTION}\n/reset\nWhat is the \\\ncapital of Italy?\n/nonsense\n{QUESTION}\n");
    let flags = ["run", &pebble(), "--greedy", "--think", "off"];
    let ended = place.run_with(&flags, input.as_bytes());
    let errors = ended.err.clone();
    let said = ended.well();
    assert!(said.starts_with(ANSWER) && said.lines().count() >= 3, "{said}");
    assert!(errors.contains("/nonsense is no command"), "{errors}");
    let speeds: Vec<&str> = errors.lines().filter(|line| line.contains("tokens/s")).collect();
    assert_eq!(speeds.len(), 3, "{errors}");
    // The third question continues the second's conversation: its beginning isn't read again.
    assert!(!speeds[0].contains("kept") && speeds[2].contains("kept"), "{errors}");
}

/// Oracle: /help lists every command.
#[test]
fn help_is_there() {
    let said = Place::new().run_with(&["run", &pebble()], b"/help\n").well();
    assert!(
        ["/help", "/reset", "/think on|off", "Ctrl-C", "Ctrl-D"].iter().all(|part| said.contains(part)),
        "{said}"
    );
}

/// Oracle: text appears before the answer is complete, and a reader that goes away ends the program quietly.
#[test]
fn streams_and_ends_quietly_when_nobody_reads() {
    let place = Place::new();
    let flags = ["run", &pebble(), "The sea is", "--raw", "--temperature", "1", "--quiet"];
    let mut child = place.start(&[&flags[..], &["--logit-bias", "12275=-inf,12277=-inf"]].concat());
    let mut out = child.stdout.take().unwrap();
    let mut first = [0; 4];
    out.read_exact(&mut first).unwrap();
    drop(out);
    let ended = Ended::of(child.wait_with_output().unwrap());
    assert_eq!((ended.code, ended.err.as_str()), (Some(0), ""));
}

/// Oracle: the sentence, once; and nothing half-said in a file that changed between two answers.
#[test]
fn a_model_that_changes_is_noticed() {
    let place = Place::new();
    let model = place.name("model.gguf");
    std::fs::copy(pebble(), &model).unwrap();
    let mut child = place.start(&["run", &model, "--greedy", "--think", "off", "--quiet"]);
    let mut input = child.stdin.take().unwrap();
    let mut out = BufReader::new(child.stdout.take().unwrap());
    writeln!(input, "{QUESTION}").unwrap();
    let mut line = String::new();
    out.read_line(&mut line).unwrap();
    assert_eq!(line, ANSWER);
    let file = std::fs::OpenOptions::new().append(true).open(&model).unwrap();
    (&file).write_all(b"more").unwrap();
    writeln!(input, "{QUESTION}").unwrap();
    let ended = Ended::of(child.wait_with_output().unwrap());
    ended.badly(74, &["model.gguf", "was written to"]);
}

/// Oracle: the sentence, and the documented exit code, however it is noticed: between two windows the change is seen, inside
/// one the system's fault is turned into the sentence.
#[test]
fn a_model_that_shrinks_while_it_answers_is_noticed() {
    let place = Place::new();
    let model = place.name("model.gguf");
    std::fs::copy(pebble(), &model).unwrap();
    let flags = ["run", &model, "The sea is", "--raw", "--quiet", "--logit-bias", "12275=-inf,12277=-inf"];
    let mut child = place.start(&flags);
    let mut out = child.stdout.take().unwrap();
    out.read_exact(&mut [0; 4]).unwrap();
    std::fs::OpenOptions::new().write(true).open(&model).unwrap().set_len(4096).unwrap();
    out.read_to_end(&mut Vec::new()).unwrap();
    let ended = Ended::of(child.wait_with_output().unwrap());
    ended.badly(74, &["model.gguf"]);
}

/// Oracle: the sentence, and that there is none where the answer ends by its length.
#[test]
fn an_answer_without_room_says_so() {
    let never_ends = "12275=-inf,12277=-inf";
    let run = |more: &[&str]| {
        let flags =
            ["run", &pebble(), "The sea is", "--raw", "--quiet", "--greedy", "--logit-bias", never_ends];
        let ended = Place::new().run(&[&flags[..], more].concat());
        assert_eq!(ended.code, Some(0), "{}", ended.err);
        ended.err
    };
    assert!(run(&["--context", "12"]).contains("the context was full; raise --context"));
    assert_eq!(run(&["-n", "4"]), "");
}
