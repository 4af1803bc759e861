//! Where the facts about a machine come from: a tree of small text files.
//!
//! [`HostTree`] is the machine's own `/proc` and `/sys`; `MemoryTree` is any machine, for tests. Paths have
//! no leading slash. A file that is missing or unreadable is `None`: whether that matters is for the reader
//! to say.

#[cfg(test)]
use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io::Read;
use std::path::PathBuf;

/// A tree of small text files, such as `/proc` and `/sys`.
pub(crate) trait SysTree {
    /// The text of a file, trimmed.
    fn text(&self, path: &str) -> Option<String>;

    /// The names in a directory, in no order; none if there is no such directory.
    fn names(&self, directory: &str) -> Vec<String>;
}

/// The file system below a root, normally `/`.
#[derive(Debug, Clone)]
pub(crate) struct HostTree {
    root: PathBuf,
}

impl HostTree {
    /// The most bytes that are read of a file: beyond what the kernel shows in any file that is read here.
    const MOST_BYTES: u64 = 1 << 20;

    /// The tree below `root`.
    pub(crate) fn new(root: impl Into<PathBuf>) -> Self {
        Self { root: root.into() }
    }
}

impl SysTree for HostTree {
    fn text(&self, path: &str) -> Option<String> {
        let mut bytes = Vec::new();
        File::open(self.root.join(path)).ok()?.take(Self::MOST_BYTES).read_to_end(&mut bytes).ok()?;
        Some(String::from_utf8_lossy(&bytes).trim().to_owned())
    }

    fn names(&self, directory: &str) -> Vec<String> {
        let entries = std::fs::read_dir(self.root.join(directory));
        entries
            .into_iter()
            .flatten()
            .flatten()
            .map(|e| e.file_name().to_string_lossy().into_owned())
            .collect()
    }
}

/// A tree in memory: path to text.
#[cfg(test)]
#[derive(Debug, Clone, Default)]
pub(crate) struct MemoryTree {
    files: BTreeMap<String, String>,
}

#[cfg(test)]
impl MemoryTree {
    /// An empty tree: a machine that tells nothing.
    pub(crate) fn new() -> Self {
        Self::default()
    }

    /// Adds or replaces a file.
    pub(crate) fn put(&mut self, path: impl Into<String>, text: impl ToString) -> &mut Self {
        self.files.insert(path.into(), text.to_string());
        self
    }

    /// The paths of the files.
    pub(crate) fn paths(&self) -> impl Iterator<Item = &str> {
        self.files.keys().map(String::as_str)
    }

    /// Removes a file and everything below that path.
    pub(crate) fn cut(&mut self, path: &str) -> &mut Self {
        self.files
            .retain(|p, _| p != path && !p.strip_prefix(path).is_some_and(|rest| rest.starts_with('/')));
        self
    }
}

#[cfg(test)]
impl SysTree for MemoryTree {
    fn text(&self, path: &str) -> Option<String> {
        self.files.get(path).map(|text| text.trim().to_owned())
    }

    fn names(&self, directory: &str) -> Vec<String> {
        let below = self.files.keys().filter_map(|p| p.strip_prefix(directory)?.strip_prefix('/'));
        let names: BTreeSet<&str> = below.filter_map(|rest| rest.split('/').next()).collect();
        names.into_iter().map(str::to_owned).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Oracle: the same few files on disk and in memory.
    #[test]
    fn host_and_memory_agree() {
        let directory = tempfile::tempdir().unwrap();
        let mut memory = MemoryTree::new();
        for (path, text) in [("a/b/one", "1\n"), ("a/b/two", " 2 "), ("a/c", "")] {
            let file = directory.path().join(path);
            std::fs::create_dir_all(file.parent().unwrap()).unwrap();
            std::fs::write(file, text).unwrap();
            memory.put(path, text);
        }
        let host = HostTree::new(directory.path());
        let sorted = |mut names: Vec<String>| {
            names.sort();
            names
        };
        for path in ["a/b/one", "a/b/two", "a/c", "a/b", "a", "none"] {
            assert_eq!(host.text(path), memory.text(path), "{path}");
            assert_eq!(sorted(host.names(path)), sorted(memory.names(path)), "{path}");
        }
        memory.cut("a/b");
        assert_eq!(memory.paths().collect::<Vec<_>>(), ["a/c"]);
    }
}
