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

/// Waits until the program has begun to write.
fn wait_for_files(child: &mut Child, place: &Place, count: usize) {
    while place.files().len() < count {
        assert_eq!(child.try_wait().unwrap(), None, "it ended before it wrote anything");
        sleep(Duration::from_millis(2));
    }
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
        "pebble",
        "--formats",
        "f32",
        "--ngram-rows",
        "10000000",
        "--threads",
        "1",
    ];
    let mut child = place.start(&flags);
    wait_for_files(&mut child, &place, 1);
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
    let mut child =
        place.start(&["logits", &pebble(), "--ids", &ids, "--out", &place.name("out.npy"), "--window", "16"]);
    wait_for_files(&mut child, &place, 2);
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
