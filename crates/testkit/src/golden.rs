//! Reads `.npz` archives into typed arrays, and finds the folders they and the models lie in.
//!
//! Everything here panics with a sentence on failure: it is test scaffolding, and a missing vector is a failed test.

use std::fs::File;
use std::io::{BufReader, Write};
use std::path::{Path, PathBuf};

use npyz::{Deserialize, npz::NpzArchive};

/// An array in row-major order.
#[derive(Debug, Clone)]
pub struct Array<T> {
    /// Extents, outermost first.
    pub shape: Vec<usize>,
    /// The elements.
    pub data: Vec<T>,
}

impl<T> Array<T> {
    /// The `i`-th slice along the outermost axis.
    pub fn row(&self, i: usize) -> &[T] {
        let len = self.data.len() / self.shape[0];
        &self.data[i * len..(i + 1) * len]
    }
}

/// An open `.npz` archive.
pub struct Npz {
    path: PathBuf,
    archive: NpzArchive<BufReader<File>>,
}

impl Npz {
    /// Opens a golden archive by its path below the golden folder, e.g. `tiny/ref.npz`.
    pub fn golden(name: &str) -> Npz {
        Npz::open(&dir().join(name))
    }

    /// Opens any archive.
    pub fn open(path: &Path) -> Npz {
        let archive = NpzArchive::open(path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
        Npz { path: path.into(), archive }
    }

    /// The names of all arrays.
    pub fn names(&self) -> Vec<String> {
        self.archive.array_names().map(str::to_owned).collect()
    }

    /// Whether the archive holds `name`.
    pub fn has(&self, name: &str) -> bool {
        self.archive.array_names().any(|n| n == name)
    }

    /// Reads one array; the element type must be the stored one.
    pub fn array<T: Deserialize>(&mut self, name: &str) -> Array<T> {
        let path = self.path.display().to_string();
        let npy = self
            .archive
            .by_name(name)
            .unwrap_or_else(|e| panic!("{path}: {name}: {e}"))
            .unwrap_or_else(|| panic!("{path}: no array `{name}`"));
        let shape: Vec<usize> = npy.shape().iter().map(|&n| n as usize).collect();
        assert!(
            npy.order() == npyz::Order::C || shape.iter().filter(|&&n| n > 1).count() < 2,
            "{path}: {name} is not in row-major order"
        );
        let data = npy.into_vec().unwrap_or_else(|e| panic!("{path}: {name}: {e}"));
        Array { shape, data }
    }

    /// An f32 array.
    pub fn f32(&mut self, name: &str) -> Array<f32> {
        self.array(name)
    }

    /// An i64 array of token ids or rows, as u32.
    pub fn ids(&mut self, name: &str) -> Vec<u32> {
        let ids = self.array::<i64>(name);
        ids.data.iter().map(|&i| u32::try_from(i).unwrap_or_else(|_| panic!("{name} holds {i}"))).collect()
    }
}

/// The folder with the golden vectors.
pub fn dir() -> PathBuf {
    std::env::var_os("STRATA_GOLDEN").map_or_else(|| repository().join("tests/data"), PathBuf::from)
}

/// The bundled demo model.
pub fn pebble() -> PathBuf {
    repository().join("models/pebble.gguf")
}

/// A large model the repository doesn't carry, from the folder that `STRATA_MODELS` names (by default the bundled model's). When
/// absent, says so on stderr and returns `None`: the caller's test is skipped.
pub fn large_model(name: &str) -> Option<PathBuf> {
    let folder = std::env::var_os("STRATA_MODELS").map_or_else(|| repository().join("models"), PathBuf::from);
    let path = folder.join(name);
    if path.is_file() {
        return Some(path);
    }
    // Not `eprintln!`: the test harness would swallow it.
    let note = format!("SKIPPED: {name} is not in {}; name its folder in STRATA_MODELS", folder.display());
    let _ = writeln!(std::io::stderr(), "{note}");
    None
}

fn repository() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Oracle: the shapes that the golden folder's README states.
    #[test]
    fn reads_compressed_archives_of_every_kind() {
        let mut z = Npz::golden("contract/contract.npz");
        assert_eq!(z.f32("x.96").shape, [7, 96]);
        assert_eq!(z.array::<i8>("q.96").shape, [7, 96]);
        assert_eq!(z.array::<u8>("q8_0.96.rows").shape, [4, 102]);
        assert_eq!(z.array::<u16>("f16.96.rows").shape, [4, 96]);
        assert_eq!(z.f32("nvfp4.640.tensor_scale").data.len(), 1);
        assert_eq!(Npz::golden("tiny/ref.npz").ids("ids").len(), 61);
    }
}
