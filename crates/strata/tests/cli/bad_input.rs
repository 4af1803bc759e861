//! What can't be done is said in one sentence, with an exit code, and leaves nothing behind.

use std::fs;
use std::process::{Command, Stdio};

use assert_cmd::cargo::cargo_bin;

use crate::program::{Ended, Place, golden, pebble, with_template};

/// Oracle: the sentence names the file and what is wrong with it. Each is a file that no command can use.
#[test]
fn files_that_are_no_models() {
    let place = Place::new();
    let whole = fs::read(golden("tiny/tiny.gguf")).unwrap();
    fs::create_dir(place.path("folder.gguf")).unwrap();
    place.write("empty.gguf", "");
    place.write("text.gguf", "hello, I am no model at all");
    place.write("short.gguf", &whole[..whole.len() - 10_000]);
    place.write("header.gguf", &whole[..3000]);
    place.write("part-00001-of-00002.gguf", &whole);
    for (name, part) in [
        ("absent.gguf", "absent.gguf"),
        ("folder.gguf", "not a regular file"),
        ("empty.gguf", "empty.gguf"),
        ("text.gguf", "not a GGUF file"),
        ("short.gguf", "short.gguf"),
        ("header.gguf", "bytes left in the file"),
        ("part-00001-of-00002.gguf", "split"),
    ] {
        let (model, out) = (place.name(name), place.name("out.npy"));
        for args in [
            &["inspect", &model][..],
            &["plan", &model],
            &["run", &model, "hello"],
            &["logits", &model, "--ids", "1", "--out", &out],
            &["bench", &model],
        ] {
            place.run(args).badly(1, &[name, part]);
        }
    }
    assert!(!place.path("out.npy").exists());
}

/// Oracle: the draft block alone is no model.
#[test]
fn a_draft_block_is_no_model() {
    let ended = Place::new().run(&["run", &golden("tiny/tiny-mtp-only.gguf"), "hello"]);
    assert_eq!((ended.code, ended.out.as_str()), (Some(1), ""), "{ended:?}");
    assert!(ended.err.contains("tiny-mtp-only.gguf"), "{ended:?}");
    let place = Place::new();
    let args =
        ["logits", &golden("tiny/tiny-nomtp.gguf"), "--ids", "1,2", "--mtp", "--out", &place.name("x.npy")];
    place.run(&args).badly(1, &["draft"]);
    assert!(place.files().is_empty());
}

/// Oracle: the sentence says what is wrong with the prompt.
#[test]
fn prompts_that_cannot_be_answered() {
    let place = Place::new();
    let model = pebble();
    place.run(&["run", &model, ""]).badly(2, &["empty"]);
    place.run(&["run", &model, " \n"]).badly(2, &["empty"]);
    place.run(&["run", &model, "", "--raw"]).badly(2, &["empty"]);
    place.run_with(&["run", &model, "-"], b"").badly(2, &["empty"]);
    place
        .run_with(&["run", &model, "-"], b"caf\xe9 au lait")
        .badly(1, &["standard input", "UTF-8", "0xE9", "offset 3"]);
    place.run_with(&["run", &model], b"caf\xe9 au lait\n").badly(1, &["standard input", "UTF-8", "0xE9"]);
    let long = "the sea ".repeat(200);
    for raw in [&[][..], &["--raw"]] {
        let args = [&["run", &model, &long, "--context", "64"], raw].concat();
        place.run(&args).badly(1, &["context of 64", "--context"]);
    }
    place.run(&["run", &model, "x", "--logit-bias", "999999=1"]).badly(2, &["--logit-bias", "999999"]);
    place.run(&["run", &model, "x", "--context", "0"]).badly(2, &["--context"]);
    place.run(&["run", &model, "x", "--context", "999999"]).badly(2, &["999999", "8192"]);
    assert!(place.files().is_empty());
}

/// Oracle: the sentence names the id, or the place where it should be.
#[test]
fn ids_that_are_none() {
    let place = Place::new();
    let (model, out) = (golden("tiny/tiny.gguf"), place.name("out.npy"));
    let logits = |ids: &str| place.run(&["logits", &model, "--ids", ids, "--out", &out]);
    logits("384").badly(1, &["384"]);
    logits("1,two").badly(2, &["--ids", "two"]);
    logits("").badly(2, &["--ids", "no token ids"]);
    logits("@absent.txt").badly(1, &["absent.txt"]);
    logits(&"1,".repeat(513)).badly(1, &["513", "512"]);
    place.run(&["logits", &model, "--ids", "1", "--mtp", "--out", &out]).badly(2, &["--mtp", "2"]);
    assert!(place.files().is_empty());
}

/// Oracle: the sentence names the text and what it lacks.
#[test]
fn texts_that_cannot_be_scored() {
    let place = Place::new();
    let model = pebble();
    let short = place.write("short.txt", "A short text.");
    place.run(&["eval", &model, &short]).badly(1, &["short.txt", "512", "fewer"]);
    place.run_with(&["eval", &model, "-"], b"A short text.").badly(1, &["standard input", "512", "fewer"]);
    for window in ["0", "1", "2"] {
        let args = ["eval", &model, &short, "--context", window];
        place.run(&args).badly(2, &["--context", window, "at least 3"]);
    }
    place.run(&["eval", &model, &short, "--windows", "0"]).badly(2, &["--windows", "at least 1"]);
    place.run(&["eval", &model, &short, "--context", "99999"]).badly(1, &["fewer"]);
    let empty = place.write("empty.txt", "");
    place.run(&["eval", &model, &empty]).badly(1, &["empty.txt", "is empty"]);
    place.run_with(&["eval", &model, "-"], b"").badly(1, &["standard input", "is empty"]);
    place.run(&["eval", &model, "absent.txt"]).badly(1, &["absent.txt"]);
    let binary = place.write("binary.txt", b"text \xff\xfe");
    place.run(&["eval", &model, &binary]).badly(1, &["binary.txt", "UTF-8"]);
    let text = golden("pebble/val/docs.txt");
    let tiny = golden("tiny/tiny.gguf");
    place
        .run(&["eval", &model, &text, "--windows", "1", "--against", &tiny])
        .badly(1, &["tiny.gguf", "compared"]);
}

/// A copy of the tiny model whose head is nothing but NaN.
fn broken(place: &Place, name: &str) -> String {
    let whole = golden("tiny/tiny.gguf");
    let json = place.run(&["inspect", &whole, "--json", "--tensors"]).json();
    let tensors = json["tensors"].as_array().unwrap();
    let head = tensors.iter().find(|tensor| tensor["name"] == "output.weight").unwrap();
    let of = |value: &serde_json::Value| value.as_u64().unwrap() as usize;
    let start = of(&head["offset"]);
    let mut bytes = fs::read(&whole).unwrap();
    bytes[start..start + of(&head["bytes"])].fill(0xFF);
    place.write(name, bytes)
}

/// Oracle: the file that is broken, not the whole one beside it.
#[test]
fn broken_values_name_the_model() {
    let place = Place::new();
    let (whole, broken) = (golden("tiny/tiny.gguf"), broken(&place, "broken.gguf"));
    let text = golden("pebble/val/docs.txt");
    let flags = ["--context", "32", "--windows", "1"];
    place.run(&["run", &broken, "x", "--raw", "--json"]).badly(1, &["broken.gguf", "damaged"]);
    place.run(&[&["eval", &broken, &text][..], &flags].concat()).badly(1, &["broken.gguf", "damaged"]);
    for pair in [[&broken, &whole], [&whole, &broken]] {
        let args = [&["eval", pair[0], &text, "--against", pair[1]][..], &flags].concat();
        place.run(&args).badly(1, &["broken.gguf", "damaged"]);
    }
    let flags = ["--prompt", "4", "--gen", "0", "--reps", "1"];
    place.run(&[&["bench", &broken][..], &flags].concat()).badly(1, &["broken.gguf", "damaged"]);
    place.run(&["logits", &broken, "--ids", "3,4", "--out", "no.npy"]).badly(1, &["broken.gguf", "damaged"]);
    assert!(!place.path("no.npy").exists());
}

/// Oracle: the path, and no file of any name in the folder.
#[test]
fn outputs_that_cannot_be_written() {
    let place = Place::new();
    fs::create_dir(place.path("folder")).unwrap();
    let model = golden("tiny/tiny.gguf");
    let logits = |out: &str| place.run(&["logits", &model, "--ids", "1,2,3", "--out", out]);
    logits(&place.name("absent/out.npy")).badly(1, &["absent/out.npy"]);
    logits(&place.name("folder")).badly(1, &["folder"]);
    logits("/dev/full").badly(1, &["/dev/full", "No space left"]);
    // Nobody reads the pipe: to open it would never end.
    assert!(Command::new("mkfifo").arg(place.path("pipe")).status().unwrap().success());
    logits(&place.name("pipe")).badly(1, &["pipe", "is a pipe", "name of a file"]);
    logits("/dev/null").well();
    assert_eq!(place.files(), ["folder", "pipe"]);
}

/// Oracle: a disk that is full in the middle, by a limit on the size of files. The folder stays empty.
#[test]
fn a_disk_that_fills_up() {
    let place = Place::new();
    let (model, out) = (golden("tiny/tiny.gguf"), place.name("out.npy"));
    let limited = |args: &[&str]| {
        let script = "ulimit -f 64; exec \"$0\" \"$@\"";
        let mut shell = Command::new("sh");
        shell.args(["-c", script]).arg(cargo_bin!("strata")).args(args).env_clear();
        Ended::of(shell.stdin(Stdio::null()).output().unwrap())
    };
    let ids = "5,".repeat(500);
    limited(&["logits", &model, "--ids", &ids, "--out", &out]).badly(1, &["out.npy", "too large"]);
    let synthetic = place.name("out.gguf");
    limited(&["synth", &synthetic, "--geometry", "tiny", "--formats", "f32"]).badly(1, &["out.gguf"]);
    assert!(place.files().is_empty(), "{:?}", place.files());
}

/// Oracle: standard output that can't be written is an error like any other.
#[test]
fn a_full_standard_output() {
    let place = Place::new();
    for args in [&["inspect", &pebble()][..], &["run", &pebble(), "hello", "--raw", "-n", "4", "--quiet"]] {
        let full = fs::OpenOptions::new().write(true).open("/dev/full").unwrap();
        let mut command = place.command(args);
        let ended = Ended::of(command.stdout(full).output().unwrap());
        ended.badly(1, &["standard output", "No space left"]);
    }
}

/// Oracle: the sentences name the flag, the model's file, or nothing that isn't so.
#[test]
fn sentences_name_their_cause() {
    let place = Place::new();
    let tiny = golden("tiny/tiny.gguf");
    place.run(&["bench", &tiny, "--prompt", "513", "--gen", "0"]).badly(2, &["--prompt 513", "512"]);
    place.run(&["bench", &tiny, "--prompt", "0", "--gen", "513"]).badly(2, &["--gen 513", "512"]);
    let model = with_template(&place, "{{ nothing.at.all }}");
    place.run(&["run", &model, "hello"]).badly(1, &["template.gguf", "chat template, line 1"]);
    let cut = place.run(&["run", &pebble(), "hello", "-n", "0"]);
    assert!(!cut.err.contains("reasoning"), "{cut:?}");
    cut.well();
    place.run(&["run", "no\u{1b}[2J.gguf", "hello"]).badly(1, &["no?[2J.gguf"]);
    let ids = place.run(&["logits", &tiny, "--ids", "@no\u{1b}[2J", "--out", "x.npy"]);
    ids.badly(1, &["no?[2J"]);
}
