//! A mapped file that shrinks. The faults happen in a child process: this test binary, run again.

use std::os::unix::process::ExitStatusExt;
use std::path::PathBuf;
use std::process::{Command, Output};
use std::sync::Barrier;
use strata_gguf::{Gguf, WholeFile, sigbus};
use tempfile::TempDir;

const CHILD: &str = "STRATA_GGUF_FAULT_TEST";

/// How many threads fault together.
const THREADS: usize = 16;

/// Runs the test `child` of this binary again with `what` to do on a copy of the tiny model.
fn child(what: &str) -> (Output, PathBuf) {
    let folder = tempfile::tempdir().unwrap();
    child_in(&folder, what)
}

fn child_in(folder: &TempDir, what: &str) -> (Output, PathBuf) {
    let path = folder.path().join("shrinking.gguf");
    std::fs::copy(strata_testkit::golden::dir().join("tiny/tiny.gguf"), &path).unwrap();
    let output = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "fault::child_process", "--nocapture", "--test-threads=1"])
        .env(CHILD, format!("{what} {}", path.display()))
        .output()
        .unwrap();
    (output, path)
}

/// Not a test of its own: what the child does when the variable is set.
#[test]
fn child_process() {
    let Ok(task) = std::env::var(CHILD) else { return };
    let (what, path) = task.split_once(' ').unwrap();
    let gguf = Gguf::open(path.as_ref()).unwrap();
    let mapping = gguf.map().unwrap();
    let tensor = gguf.tensors().last().unwrap();
    if what != "unguarded" {
        sigbus::install().unwrap();
    }
    match what {
        "elsewhere" => {
            drop((mapping, gguf));
            fault_elsewhere();
        }
        "sent" => {
            rustix::process::kill_process(rustix::process::getpid(), rustix::process::Signal::BUS).unwrap();
        }
        "together" => {
            std::fs::File::options().write(true).open(path).unwrap().set_len(4096).unwrap();
            let (data, barrier) = (mapping.bytes(tensor), Barrier::new(THREADS));
            std::thread::scope(|scope| {
                for _ in 0..THREADS {
                    scope.spawn(|| {
                        barrier.wait();
                        println!("survived {}", std::hint::black_box(data)[0]);
                    });
                }
            });
        }
        "writing" => {
            let half = |name: &str| {
                let name = std::path::Path::new(path).with_file_name(name);
                let mut file = WholeFile::create(&name, false).unwrap();
                file.write(b"half").unwrap();
                file
            };
            let _being_written: Vec<WholeFile> = (0..100).map(|i| half(&format!("half {i}"))).collect();
            half("complete").finish().unwrap();
            std::fs::File::options().write(true).open(path).unwrap().set_len(4096).unwrap();
            println!("survived {}", mapping.bytes(tensor)[0]);
        }
        _ => {
            std::fs::File::options().write(true).open(path).unwrap().set_len(4096).unwrap();
            println!("survived {}", mapping.bytes(tensor).iter().map(|&b| u32::from(b)).sum::<u32>());
        }
    }
}

/// Reads from a map that the guard doesn't know, of a file that has been truncated to nothing.
fn fault_elsewhere() {
    let file = tempfile::tempfile().unwrap();
    file.set_len(4096).unwrap();
    // SAFETY: only this process has the file. It is truncated on purpose: the fault is what the test wants.
    let map = unsafe { memmap2::Mmap::map(&file) }.unwrap();
    file.set_len(0).unwrap();
    println!("survived {}", std::hint::black_box(map[0]));
}

/// Oracle: the sentence and the exit code that the module promises.
#[test]
fn a_shrinking_file_ends_with_a_sentence() {
    let (output, path) = child("guarded");
    let stderr = String::from_utf8(output.stderr).unwrap();
    let sentence = format!(
        "strata: {} was truncated or became unreadable while in use; \
         leave model files alone while they are open, and start again\n",
        path.display()
    );
    assert!(stderr.ends_with(&sentence), "{stderr}");
    assert_eq!(output.status.code(), Some(sigbus::EXIT_CODE));
}

/// Oracle: the module's promise: one line, however many threads touch the file.
#[test]
fn many_faults_are_one_sentence() {
    for _ in 0..8 {
        let (output, path) = child("together");
        let stderr = String::from_utf8(output.stderr).unwrap();
        assert_eq!(stderr.matches(&*path.to_string_lossy()).count(), 1, "{stderr}");
        assert_eq!(output.status.code(), Some(sigbus::EXIT_CODE));
    }
}

/// Oracle: the files that are there afterwards: no half ones, and the complete one.
#[test]
fn half_written_files_are_removed() {
    let folder = tempfile::tempdir().unwrap();
    let (output, _) = child_in(&folder, "writing");
    assert_eq!(output.status.code(), Some(sigbus::EXIT_CODE));
    let mut names: Vec<_> = folder.path().read_dir().unwrap().map(|file| file.unwrap().file_name()).collect();
    names.sort();
    assert_eq!(names, ["complete", "shrinking.gguf"]);
}

/// Without the guard the same read is a bare SIGBUS: the test above shows the guard's work and nothing else's.
#[test]
fn without_the_guard_it_is_a_bare_signal() {
    let (output, _) = child("unguarded");
    assert_eq!(output.status.signal(), Some(7), "{output:?}");
}

/// Faults of other maps, and signals that somebody sends, take the default action.
#[test]
fn other_faults_are_left_alone() {
    for what in ["elsewhere", "sent"] {
        let (output, path) = child(what);
        assert_eq!(output.status.signal(), Some(7), "{what}: {output:?}");
        let stderr = String::from_utf8_lossy(&output.stderr);
        assert!(!stderr.contains(&*path.to_string_lossy()), "{what}: {stderr}");
    }
}
