//! What commands take of memory at most, mapped pages counted. Oracle: the kernel's own count.
#![cfg(unix)]

use std::fs::{self, File};
use std::io::Write;
use std::path::Path;
use std::process::{Command, Stdio};

use assert_cmd::cargo::cargo_bin;
use nix::sys::resource::{UsageWho, getrusage};
use strata_gguf::write::Outline;
use strata_synth::{Geometry, Mix, Options, layout};

/// What the hungriest child so far took, bytes.
fn most() -> u64 {
    getrusage(UsageWho::RUSAGE_CHILDREN).unwrap().max_rss() as u64 * 1024
}

/// Runs the program, which must take less than `limit` bytes, like all that ran before.
fn run(args: &[&str], limit: u64) {
    let mut command = Command::new(cargo_bin!("strata"));
    let output = command.args(args).env_clear().stdin(Stdio::null()).output().unwrap();
    assert!(output.status.success(), "{args:?}: {output:?}");
    println!("{}: {:.1} MB", args[0], most() as f64 / 1e6);
    assert!(most() < limit, "{args:?} took {} bytes of {limit}", most());
}

/// A model of the large geometry without the blocks of its weights: the header, and a hole.
fn hollow(path: &Path) -> u64 {
    let options =
        Options::new(Geometry::named("flash-next").unwrap(), "ud-iq3_xxs".parse::<Mix>().unwrap(), 1);
    let layout = layout(&options).unwrap();
    Outline::new(layout.metadata.clone()).create(path).unwrap().finish().unwrap();
    let mut header = fs::read(path).unwrap();
    // Behind magic and version.
    header[8..16].copy_from_slice(&(layout.tensors.len() as u64).to_le_bytes());
    let mut data = 0u64;
    for tensor in &layout.tensors {
        header.extend((tensor.name.len() as u64).to_le_bytes());
        header.extend(tensor.name.as_bytes());
        header.extend((tensor.shape.len() as u32).to_le_bytes());
        tensor.shape.iter().for_each(|length| header.extend(length.to_le_bytes()));
        header.extend(tensor.tensor_type().id().to_le_bytes());
        header.extend(data.to_le_bytes());
        data = (data + tensor.bytes).next_multiple_of(32);
    }
    header.resize(header.len().next_multiple_of(32), 0);
    let mut file = File::create(path).unwrap();
    file.write_all(&header).unwrap();
    file.set_len(header.len() as u64 + data).unwrap();
    header.len() as u64 + data
}

/// One test, from the smallest limit to the largest: the count is that of the hungriest child of all. Each limit is below the
/// size of the file that is read or written, so that nothing can hold it whole.
#[test]
fn commands_stay_within_their_memory() {
    if !cfg!(target_os = "linux") {
        eprintln!("SKIPPED: the unit of the count is another one here");
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let name = |name: &str| folder.path().join(name).display().to_string();
    let hollow_file = name("hollow.gguf");
    assert!(hollow(hollow_file.as_ref()) > 50 << 30);
    run(&["inspect", &hollow_file, "--tensors"], 200_000_000);
    run(&["plan", &hollow_file, "--context", "4096"], 200_000_000);

    let mut geometry = Geometry::pebble();
    geometry.moe.experts = 1024;
    let (sizes, model) = (name("sizes.json"), name("model.gguf"));
    fs::write(&sizes, serde_json::to_string(&geometry).unwrap()).unwrap();
    run(&["synth", &model, "--geometry", &sizes, "--formats", "q8_0"], 200_000_000);
    let limit = 400_000_000;
    assert!(fs::metadata(&model).unwrap().len() > limit);
    // All experts pass through a part of the memory that they would take, and nothing of them is touched where it is mapped.
    let long = "The sea is wide, the mountain high. ".repeat(60);
    run(
        &["run", &model, &long, "--raw", "-n", "8", "--device", "cpu", "--resident-budget", "50M"],
        200_000_000,
    );
    // A few tokens, so that their experts are a part of all.
    run(&["run", &model, "Hello", "--raw", "-n", "8"], limit);
    // That the limit is below what a copy of the experts takes.
    run(&["run", &model, "Hello", "--raw", "-n", "1", "--experts", "heap"], u64::MAX);
    assert!(most() > limit, "{} bytes of {limit}", most());
}
