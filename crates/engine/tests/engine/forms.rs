//! Forms in which files have the same weights.

use std::path::Path;

use strata_engine::{EngineConfig, Wants};
use strata_gguf::write::Outline;
use strata_gguf::{Gguf, TensorInfo};
use strata_testkit::golden::{self, Npz};

use crate::rig::{Rig, logits};

fn bytes(gguf: &Gguf, tensor: &TensorInfo) -> Vec<u8> {
    let mut bytes = vec![0; tensor.bytes as usize];
    gguf.read_at(tensor, 0, &mut bytes).unwrap();
    bytes
}

/// A copy in which each expert's gate rows and up rows are in one tensor.
fn write_fused(from: &Path, to: &Path) {
    let gguf = Gguf::open(from).unwrap();
    let mut outline = Outline::new(gguf.metadata().clone());
    let mut contents = Vec::new();
    for tensor in gguf.tensors().iter().filter(|tensor| !tensor.name.contains("ffn_up_exps")) {
        let own = bytes(&gguf, tensor);
        let (name, mut shape) =
            (tensor.name.replace("ffn_gate_exps", "ffn_gate_up_exps"), tensor.shape.clone());
        contents.push(if name == tensor.name {
            own
        } else {
            let up = bytes(&gguf, gguf.tensor(&tensor.name.replace("gate", "up")).unwrap());
            let each = own.len() / shape[2] as usize;
            shape[1] *= 2;
            own.chunks(each).zip(up.chunks(each)).flat_map(|(gate, up)| [gate, up].concat()).collect()
        });
        outline.tensor(&name, &shape, tensor.ty).unwrap();
    }
    let writer = outline.create(to).unwrap();
    for (at, content) in contents.iter().enumerate() {
        writer.write_at(at, 0, content).unwrap();
    }
    writer.finish().unwrap();
}

/// Oracle: the same weights in three tensors, bit for bit, trunk and draft block.
#[test]
fn fused_experts_are_the_same_experts() {
    let folder = tempfile::tempdir().unwrap();
    let (split, fused) = (golden::dir().join("tiny/tiny.gguf"), folder.path().join("fused.gguf"));
    write_fused(&split, &fused);
    let ids = Npz::golden("tiny/ref.npz").ids("ids");
    for wants in [Wants::All, Wants::Draft] {
        let [split, fused] = [&split, &fused].map(|path| {
            let config = EngineConfig { draft: true, ..EngineConfig::default() };
            let mut engine = Rig { config, ..Rig::default() }.open(path);
            let seq = engine.open().unwrap();
            logits(&mut engine, seq, &ids, wants)
        });
        assert!(split.len() >= 60 && split == fused);
    }
}
