//! Ctrl-C: the documented exit code, and nothing half-written.

use std::io::{BufRead, BufReader, Read};
use std::process::{Child, Command};
use std::thread::sleep;
use std::time::Duration;

use crate::program::{Ended, Place, golden, pebble};

fn interrupt(child: &Child) {
    let sent = Command::new("kill").args(["-INT", &child.id().to_string()]).status().unwrap();
    assert!(sent.success());
}

/// Oracle: the answer so far is shown to its end, and the exit code says why it ended.
#[test]
fn stops_an_answer() {
    let place = Place::new();
    let flags = ["run", &pebble(), "The sea is", "--raw", "--quiet", "--logit-bias", "12275=-inf,12277=-inf"];
    let mut child = place.start(&flags);
    let mut out = child.stdout.take().unwrap();
    let mut first = [0; 4];
    out.read_exact(&mut first).unwrap();
    interrupt(&child);
    let mut rest = String::new();
    BufReader::new(out).read_to_string(&mut rest).unwrap();
    assert!(rest.ends_with('\n'));
    let ended = Ended::of(child.wait_with_output().unwrap());
    assert_eq!((ended.code, ended.err.as_str()), (Some(130), ""));
}

/// Oracle: the folder is as empty as before.
#[test]
fn leaves_no_half_of_a_model() {
    let place = Place::new();
    let out = place.name("big.gguf");
    let flags = [
        "synth",
        &out,
        "--geometry",
        "flash-next",
        "--formats",
        "q2_0",
        "--ngram-rows",
        "100000",
        "--threads",
        "1",
    ];
    let child = place.start(&flags);
    while place.files().is_empty() {
        sleep(Duration::from_millis(5));
    }
    interrupt(&child);
    let ended = Ended::of(child.wait_with_output().unwrap());
    assert_eq!(ended.code, Some(130), "{ended:?}");
    assert!(place.files().is_empty(), "{:?}", place.files());
}

/// Oracle: the folder is as empty as before.
#[test]
fn leaves_no_half_of_an_array() {
    let place = Place::new();
    let ids = (0..8000).map(|i| (i % 12_000).to_string()).collect::<Vec<_>>().join(",");
    let ids = format!("@{}", place.write("ids.txt", ids));
    let child =
        place.start(&["logits", &pebble(), "--ids", &ids, "--out", &place.name("out.npy"), "--window", "16"]);
    while place.files().len() < 2 {
        sleep(Duration::from_millis(5));
    }
    interrupt(&child);
    let ended = Ended::of(child.wait_with_output().unwrap());
    assert_eq!(ended.code, Some(130), "{ended:?}");
    assert_eq!(place.files(), ["ids.txt"]);
}

/// Oracle: a conversation through a pipe ends with its input, not before.
#[test]
fn the_end_of_the_input_is_an_end() {
    let mut child = Place::new().start(&["run", &golden("tiny/tiny.gguf"), "--quiet"]);
    drop(child.stdin.take());
    let mut line = String::new();
    BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
    assert_eq!(line, "");
    assert_eq!(child.wait().unwrap().code(), Some(0));
}
