//! What the machine lets this process have.
//!
//! Reads `/proc/meminfo` and the memory controllers of the control groups above this process (version 2 and 1) from a
//! root folder, so that a test can show it another machine. The tightest of them is the limit.
//!
//! File pages count as available: the kernel gives them back under pressure, and a model just downloaded or read
//! once sits in them entirely.

use std::fs;
use std::path::{Path, PathBuf};

use serde::Serialize;

/// What the machine lets this process have.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Limits {
    /// Bytes that can still be taken.
    pub available: u64,
    /// Bytes that there are in all.
    pub total: u64,
    /// Which limit that is, e.g. `MemAvailable` or `cgroup memory.max`.
    pub source: String,
}

/// Why the limits could not be read.
#[derive(Debug, thiserror::Error)]
pub enum LimitsError {
    /// A file that every Linux system has is missing.
    #[error("{path}: can't be read ({source}), so the memory of this machine is unknown")]
    Unreadable {
        /// The file.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// A line is missing or no number.
    #[error("{path}: has no number for {key}, so the memory of this machine is unknown")]
    Missing {
        /// The file.
        path: PathBuf,
        /// The line.
        key: &'static str,
    },
}

impl Limits {
    /// This machine's.
    pub fn read() -> Result<Limits, LimitsError> {
        Limits::read_from(Path::new("/"))
    }

    /// Those of a machine whose `/proc` and `/sys` lie under `root`.
    pub fn read_from(root: &Path) -> Result<Limits, LimitsError> {
        let host = host(root)?;
        Ok(groups(root).into_iter().fold(host, |a, b| if b.available < a.available { b } else { a }))
    }
}

fn host(root: &Path) -> Result<Limits, LimitsError> {
    let path = root.join("proc/meminfo");
    let text =
        fs::read_to_string(&path).map_err(|source| LimitsError::Unreadable { path: path.clone(), source })?;
    let line = |key: &'static str| {
        field(&text, &format!("{key}:"))
            .and_then(|kib| kib.checked_mul(1024))
            .ok_or_else(|| LimitsError::Missing { path: path.clone(), key })
    };
    Ok(Limits { available: line("MemAvailable")?, total: line("MemTotal")?, source: "MemAvailable".into() })
}

/// The number that follows `key` at the start of a line.
fn field(text: &str, key: &str) -> Option<u64> {
    text.lines().find_map(|line| {
        let mut words = line.split_ascii_whitespace();
        (words.next() == Some(key)).then(|| words.next()?.parse().ok())?
    })
}

/// The files of one version of the memory controller.
struct Controller {
    mount: &'static str,
    limit: &'static str,
    usage: &'static str,
    file_pages: [&'static str; 2],
}

const V2: Controller = Controller {
    mount: "sys/fs/cgroup",
    limit: "memory.max",
    usage: "memory.current",
    file_pages: ["inactive_file", "active_file"],
};
const V1: Controller = Controller {
    mount: "sys/fs/cgroup/memory",
    limit: "memory.limit_in_bytes",
    usage: "memory.usage_in_bytes",
    file_pages: ["total_inactive_file", "total_active_file"],
};

/// The limit of each control group that this process is in, from its own up to the root. Groups without one, and files
/// that this process may not see (it may have been moved, or look from inside a container), don't count.
fn groups(root: &Path) -> Vec<Limits> {
    let Ok(membership) = fs::read_to_string(root.join("proc/self/cgroup")) else { return Vec::new() };
    let mut found = Vec::new();
    for line in membership.lines() {
        // `hierarchy:controllers:path`; version 2 has no controllers there.
        let mut parts = line.splitn(3, ':');
        let (Some(_), Some(controllers), Some(path)) = (parts.next(), parts.next(), parts.next()) else {
            continue;
        };
        let controller = match controllers {
            "" => &V2,
            list if list.split(',').any(|name| name == "memory") => &V1,
            _ => continue,
        };
        let mount = root.join(controller.mount);
        let own = mount.join(path.trim_start_matches('/'));
        found.extend(
            own.ancestors().take_while(|dir| dir.starts_with(&mount)).filter_map(|dir| controller.read(dir)),
        );
    }
    found
}

impl Controller {
    fn read(&self, dir: &Path) -> Option<Limits> {
        let number = |name: &str| fs::read_to_string(dir.join(name)).ok()?.trim().parse::<u64>().ok();
        // "max", or no such file, is no limit.
        let total = number(self.limit)?;
        let used = number(self.usage)?;
        let stat = fs::read_to_string(dir.join("memory.stat")).unwrap_or_default();
        let droppable: u64 = self.file_pages.iter().filter_map(|key| field(&stat, key)).sum();
        let available = total.saturating_sub(used.saturating_sub(droppable));
        Some(Limits { available, total, source: format!("cgroup {}", self.limit) })
    }
}
