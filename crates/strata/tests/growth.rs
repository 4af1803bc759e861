//! Host memory while tokens are decoded. Oracle: the kernel's own count of the process's pages, files not counted.

use std::process::{Command, Stdio};

use assert_cmd::cargo::cargo_bin;
use serde_json::Value;

/// More than 10,000 tokens in rounds of 500: after the first 1,000 nothing is kept of any.
#[test]
fn memory_is_flat_while_tokens_are_decoded() {
    if !cfg!(target_os = "linux") {
        eprintln!("SKIPPED: the system does not say what a process has");
        return;
    }
    let model = strata_testkit::golden::dir().join("tiny/tiny.gguf");
    let mut command = Command::new(cargo_bin!("strata"));
    let args = ["--prompt", "0", "--gen", "500", "--reps", "20", "--json", "--quiet", "--device", "cpu"];
    command.arg("bench").arg(model).args(args).env_clear().stdin(Stdio::null());
    let output = command.output().unwrap();
    assert!(output.status.success(), "{output:?}");
    let memory = &serde_json::from_slice::<Value>(&output.stdout).unwrap()["host_memory"];
    assert_eq!(memory["tokens"], 10_500);
    let own = |when: &str| memory[when]["own"].as_u64().unwrap();
    let (settled, end) = (own("after_1000"), own("end"));
    assert!(end < settled + (512 << 10), "{settled} bytes after 1,000 tokens, {end} after 10,500");
}
