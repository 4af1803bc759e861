//! Copies of a model file with something changed.

use std::path::{Path, PathBuf};

use strata_gguf::write::Outline;
use strata_gguf::{Gguf, Metadata, TensorType};
use strata_testkit::golden;
use tempfile::TempDir;

/// A tensor of a copy.
#[derive(Clone)]
pub struct Part {
    pub name: String,
    pub shape: Vec<u64>,
    pub ty: TensorType,
    pub bytes: Vec<u8>,
}

impl Part {
    /// A tensor of zeros.
    pub fn zeros(name: &str, shape: &[u64], ty: TensorType) -> Self {
        let rows: u64 = shape[1..].iter().product();
        let bytes = rows * ty.row_bytes(shape[0]).expect("whole blocks");
        Self { name: name.to_owned(), shape: shape.to_vec(), ty, bytes: vec![0; bytes as usize] }
    }
}

/// A model in memory, to be changed and written.
pub struct Parts {
    pub metadata: Metadata,
    pub tensors: Vec<Part>,
}

impl Parts {
    pub fn of(path: &Path) -> Self {
        let gguf = Gguf::open(path).expect("opens");
        let part = |t: &strata_gguf::TensorInfo| {
            let mut bytes = vec![0; t.bytes as usize];
            gguf.read_at(t, 0, &mut bytes).expect("reads");
            Part { name: t.name.clone(), shape: t.shape.clone(), ty: t.ty, bytes }
        };
        Self { metadata: gguf.metadata().clone(), tensors: gguf.tensors().iter().map(part).collect() }
    }

    pub fn tiny() -> Self {
        Self::of(&tiny())
    }

    pub fn get(&mut self, name: &str) -> &mut Part {
        self.tensors.iter_mut().find(|t| t.name == name).unwrap_or_else(|| panic!("no {name}"))
    }

    pub fn remove(&mut self, name: &str) -> Part {
        let at = self.tensors.iter().position(|t| t.name == name).unwrap_or_else(|| panic!("no {name}"));
        self.tensors.remove(at)
    }

    pub fn write(&self, folder: &TempDir) -> PathBuf {
        let mut outline = Outline::new(self.metadata.clone());
        outline.overwrite(true);
        for t in &self.tensors {
            outline.tensor(&t.name, &t.shape, t.ty).expect("a valid tensor");
        }
        let path = folder.path().join("changed.gguf");
        let writer = outline.create(&path).expect("creates");
        for (i, t) in self.tensors.iter().enumerate() {
            writer.write_at(i, 0, &t.bytes).expect("writes");
        }
        writer.finish().expect("finishes");
        path
    }
}

pub fn tiny() -> PathBuf {
    golden::dir().join("tiny/tiny.gguf")
}
