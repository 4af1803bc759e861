//! Ctrl-C: the documented exit code, and nothing half-written.

use std::io::{BufRead, BufReader, Read, Write};
use std::process::{Child, Command, Stdio};
use std::thread::sleep;
use std::time::Duration;

use crate::program::{ENDLESS, Ended, Place, golden, pebble, wait_for_thread, with_template};

fn interrupt(child: &Child) {
    send(child, "-INT");
}

/// Sends a signal. What a script runs in its background has Ctrl-C ignored, and so have these tests' programs then, which would never end.
pub fn send(child: &Child, signal: &str) {
    let id = child.id().to_string();
    let send = |signal: &str| Command::new("kill").args([signal, &id]).status().unwrap().success();
    let status = std::fs::read_to_string(format!("/proc/{id}/status")).unwrap_or_default();
    let ignored =
        status.lines().find_map(|line| u64::from_str_radix(line.strip_prefix("SigIgn:")?.trim(), 16).ok());
    // Its bit is its number less one.
    if signal == "-INT" && ignored.is_some_and(|signals| signals & 2 != 0) {
        send("-KILL");
        panic!("Ctrl-C is ignored where these tests run: start them in the foreground");
    }
    assert!(send(signal));
}

/// Waits until the program has begun to write.
pub fn wait_for_files(child: &mut Child, place: &Place, count: usize) {
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

/// Oracle: the documented exit code, while the program waits for a pipe that stays open and says nothing: in the middle of a
/// message and between two.
#[test]
fn ends_a_conversation_that_waits() {
    for input in ["/help\n", "/help\nbegun \\\n"] {
        let mut child = Place::new().start(&["run", &pebble(), "--quiet"]);
        let mut pipe = child.stdin.take().unwrap();
        pipe.write_all(input.as_bytes()).unwrap();
        let mut line = String::new();
        let mut out = BufReader::new(child.stdout.take().unwrap());
        out.read_line(&mut line).unwrap();
        assert!(line.contains("/help"), "{line}");
        interrupt(&child);
        // Only so that a program that goes on waiting fails the test instead of hanging it.
        for _ in 0..3000 {
            if child.try_wait().unwrap().is_some() {
                break;
            }
            sleep(Duration::from_millis(10));
        }
        drop(pipe);
        let ended = Ended::of(child.wait_with_output().unwrap());
        assert_eq!((ended.code, ended.err.as_str()), (Some(130), ""));
    }
}

/// A prompt that takes long to be cut into tokens, and is too long then.
fn long() -> Vec<u8> {
    let mut text = "the sea is wide and the wind is cold, ".repeat(50_000).into_bytes();
    text.push(b'\n');
    text
}

/// Oracle: the documented exit code, not that of a prompt that is too long: nobody waits for the answer any more.
#[test]
fn is_not_lost_while_a_prompt_is_cut() {
    let place = Place::new();
    let mut child = place.start(&["run", &pebble(), "-", "--raw", "--quiet"]);
    child.stdin.take().unwrap().write_all(&long()).unwrap();
    wait_for_thread(&mut child, "signals");
    interrupt(&child);
    let ended = Ended::of(child.wait_with_output().unwrap());
    assert_eq!((ended.code, ended.err.as_str()), (Some(130), ""));

    let mut child = place.start(&["run", &pebble(), "--quiet"]);
    let mut pipe = child.stdin.take().unwrap();
    pipe.write_all(b"/help\n").unwrap();
    child.stdout.as_mut().unwrap().read_exact(&mut [0; 4]).unwrap();
    pipe.write_all(&long()).unwrap();
    interrupt(&child);
    let ended = Ended::of(child.wait_with_output().unwrap());
    assert_eq!((ended.code, ended.err.as_str()), (Some(130), ""));
    drop(pipe);
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

/// Oracle: the documented exit codes, in the middle of a prompt that is never complete.
#[test]
fn ends_a_template_without_end() {
    let place = Place::new();
    let model = with_template(&place, ENDLESS);
    for (signal, code) in [("-INT", 130), ("-TERM", 143), ("-HUP", 129)] {
        let mut child = place.start(&["run", &model, "hello"]);
        wait_for_thread(&mut child, "template");
        send(&child, signal);
        let ended = Ended::of(child.wait_with_output().unwrap());
        assert_eq!((ended.code, ended.err.as_str()), (Some(code), ""));
    }
}

/// Oracle: the convention of `nohup`: what was ignored before stays so. The answer comes to its end.
#[test]
fn ignored_signals_stay_ignored() {
    let mut command = Command::new("sh");
    command.args(["-c", "trap '' HUP; exec \"$0\" \"$@\"", env!("CARGO_BIN_EXE_strata")]);
    command.args(["run", &pebble(), "-", "--raw", "-n", "4", "--greedy", "--quiet"]).env_clear();
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().unwrap();
    wait_for_thread(&mut child, "signals");
    send(&child, "-HUP");
    child.stdin.take().unwrap().write_all(b"The sea").unwrap();
    Ended::of(child.wait_with_output().unwrap()).well();
}
