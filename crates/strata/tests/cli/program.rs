//! Runs the program away from the tester's own configuration.

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};

use assert_cmd::cargo::cargo_bin;
use serde_json::Value;
use tempfile::TempDir;

/// The bundled model, as an argument.
pub fn pebble() -> String {
    strata_testkit::golden::pebble().display().to_string()
}

/// A golden file, as an argument.
pub fn golden(name: &str) -> String {
    strata_testkit::golden::dir().join(name).display().to_string()
}

/// The bundled model with another chat template, which must not be longer than its own.
pub fn with_template(place: &Place, template: &str) -> String {
    const KEY: &[u8] = b"tokenizer.chat_template";
    let mut bytes = std::fs::read(pebble()).unwrap();
    let key = bytes.windows(KEY.len()).position(|window| window == KEY).unwrap();
    // The key is followed by the type of its value (4 bytes) and its length (8).
    let start = key + KEY.len() + 12;
    let len = u64::from_le_bytes(bytes[start - 8..start].try_into().unwrap()) as usize;
    assert!(template.len() <= len);
    bytes[start..start + len].fill(b' ');
    bytes[start..start + template.len()].copy_from_slice(template.as_bytes());
    place.write("template.gguf", bytes)
}

/// A template that never ends, and makes longer and longer lists meanwhile.
pub const ENDLESS: &str =
    "{% set ns=namespace(a=[1]) %}{% for i in range(60) %}{% set ns.a=ns.a+ns.a %}{% endfor %}";

/// Waits until the program has a thread of that name.
pub fn wait_for_thread(child: &mut Child, name: &str) {
    let threads = format!("/proc/{}/task", child.id());
    let is_there = || {
        let threads = std::fs::read_dir(&threads).unwrap().map(|thread| thread.unwrap().path().join("comm"));
        threads.map(std::fs::read_to_string).any(|comm| comm.is_ok_and(|comm| comm.trim() == name))
    };
    while !is_there() {
        assert_eq!(child.try_wait().unwrap(), None, "it ended before it had a thread `{name}`");
        std::thread::sleep(std::time::Duration::from_millis(1));
    }
}

/// A folder of its own for each test, also the home folder of the programs it runs.
pub struct Place {
    folder: TempDir,
    variables: Vec<(String, String)>,
}

impl Place {
    pub fn new() -> Place {
        Place { folder: tempfile::tempdir().unwrap(), variables: Vec::new() }
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// A file in the folder, as an argument.
    pub fn name(&self, name: &str) -> String {
        self.path(name).display().to_string()
    }

    pub fn write(&self, name: &str, bytes: impl AsRef<[u8]>) -> String {
        std::fs::write(self.path(name), bytes).unwrap();
        self.name(name)
    }

    /// Sets a variable for the programs run from now on.
    pub fn set(&mut self, name: &str, value: &str) {
        self.variables.push((name.into(), value.into()));
    }

    /// The names of all files in the folder.
    pub fn files(&self) -> Vec<String> {
        names(self.folder.path())
    }

    pub fn command(&self, args: &[&str]) -> Command {
        let mut command = Command::new(cargo_bin!("strata"));
        command.args(args).env_clear().env("HOME", self.folder.path()).current_dir(self.folder.path());
        command.envs(self.variables.iter().map(|(name, value)| (name, value)));
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        command
    }

    pub fn start(&self, args: &[&str]) -> Child {
        self.command(args).stdin(Stdio::piped()).spawn().unwrap()
    }

    pub fn run(&self, args: &[&str]) -> Ended {
        Ended::of(self.command(args).output().unwrap())
    }

    pub fn run_with(&self, args: &[&str], input: &[u8]) -> Ended {
        use std::io::Write;
        let mut child = self.start(args);
        // A program that doesn't read its input may end first.
        let _ = child.stdin.take().unwrap().write_all(input);
        Ended::of(child.wait_with_output().unwrap())
    }
}

pub fn names(folder: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(folder).unwrap();
    let mut names: Vec<String> = entries.map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

/// How a program ended.
#[derive(Debug)]
pub struct Ended {
    pub code: Option<i32>,
    pub out: String,
    pub err: String,
}

impl Ended {
    pub fn of(output: Output) -> Ended {
        Ended {
            code: output.status.code(),
            out: String::from_utf8(output.stdout).unwrap(),
            err: String::from_utf8(output.stderr).unwrap(),
        }
    }

    /// It ended well; its standard output.
    #[track_caller]
    pub fn well(self) -> String {
        assert_eq!(self.code, Some(0), "{self:?}");
        self.out
    }

    /// It ended well; its standard output as JSON.
    #[track_caller]
    pub fn json(self) -> Value {
        let out = self.well();
        serde_json::from_str(&out).unwrap_or_else(|error| panic!("{error}: {out}"))
    }

    /// It ended with `code` and one line on standard error that holds all `parts`; nothing on standard output.
    #[track_caller]
    pub fn badly(&self, code: i32, parts: &[&str]) {
        assert_eq!(self.code, Some(code), "{self:?}");
        assert_eq!(self.out, "", "{self:?}");
        assert!(self.err.starts_with("strata: ") && self.err.lines().count() == 1, "{self:?}");
        for part in parts {
            assert!(self.err.contains(part), "no `{part}` in {self:?}");
        }
    }
}
