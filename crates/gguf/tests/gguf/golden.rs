//! Committed files, against what another reader (the `gguf` Python package) says about them.

use strata_gguf::{Array, Gguf, TensorType, Value};
use strata_testkit::golden::{self, Npz};

/// Oracle: the `.id` rows of `quants.npz`, [type id, block length, block bytes] of each format by name.
#[test]
fn block_sizes_are_those_of_the_golden_formats() {
    let mut npz = Npz::golden("quants/quants.npz");
    let names: Vec<String> =
        npz.names().iter().filter_map(|name| name.strip_suffix(".id").map(str::to_owned)).collect();
    assert!(names.len() >= 27, "only {} formats in quants.npz", names.len());
    for name in names {
        let id = npz.array::<i64>(&format!("{name}.id")).data;
        let named = TensorType::ALL.iter().find(|ty| ty.name() == name.to_uppercase());
        let ty = named.unwrap_or_else(|| panic!("no type called {name}"));
        assert_eq!([ty.id().into(), ty.block_len() as i64, ty.block_bytes() as i64], *id, "{name}");
    }
}

/// Oracle: the `gguf` Python package 0.19 reading the same files: pairs (without its three header fields), tensors,
/// bytes of data, begin of data, and the last tensor with its first eight bytes.
#[test]
fn tiny_models_read_as_another_reader_reads_them() {
    let facts = [
        ("tiny", 55, 145, 2_306_896, 18_528, "blk.4.nextn.hnorm.weight", 2_324_448, "597e623f3a9f863f"),
        ("tiny-nomtp", 54, 113, 1_837_008, 16_448, "blk.3.attn_v.weight", 1_837_120, "af7dfa3d2f1cc0bd"),
        ("tiny-mtp-only", 45, 34, 666_496, 10_944, "blk.4.nextn.hnorm.weight", 676_416, "597e623f3a9f863f"),
    ];
    for (name, pairs, tensors, bytes, data, last, last_at, begins) in facts {
        let gguf = Gguf::open(&golden::dir().join(format!("tiny/{name}.gguf"))).unwrap();
        assert_eq!(gguf.metadata().len(), pairs, "{name}");
        assert_eq!(gguf.tensors().len(), tensors, "{name}");
        assert_eq!(gguf.tensors().iter().map(|t| t.bytes).sum::<u64>(), bytes, "{name}");
        assert_eq!(gguf.shards()[0].data_offset, data, "{name}");
        assert_eq!(gguf.shards()[0].version, 3);
        assert_eq!(gguf.shards()[0].alignment, 32);
        let tensor = gguf.tensor(last).unwrap();
        assert_eq!(tensor, gguf.tensors().last().unwrap());
        assert_eq!(tensor.offset, last_at, "{name}");
        let mut first = [0; 8];
        gguf.read_at(tensor, 0, &mut first).unwrap();
        assert_eq!(first.map(|b| format!("{b:02x}")).concat(), begins, "{name}");
        gguf.unchanged().unwrap();
    }
}

/// Oracle: reading by position. The map gives the same bytes for every tensor of the demo model, and shapes are in
/// `ne` order (the embedding's row length comes first).
#[test]
fn mapped_bytes_are_the_bytes_read_by_position() {
    let gguf = Gguf::open(&golden::pebble()).unwrap();
    let mapping = gguf.map().unwrap();
    let mut buf = Vec::new();
    for tensor in gguf.tensors() {
        buf.resize(tensor.bytes as usize, 0);
        gguf.read_at(tensor, 0, &mut buf).unwrap();
        assert!(buf == mapping.bytes(tensor), "{}", tensor.name);
        assert_eq!(tensor.ty.row_bytes(tensor.shape[0]), Some(tensor.row_bytes()));
        assert_eq!(tensor.row_bytes() * tensor.rows(), tensor.bytes);
        assert_eq!(tensor.rows() * tensor.shape[0], tensor.values());
    }
    let embedding = gguf.tensor("token_embd.weight").unwrap();
    let width = gguf.metadata().u64("qwen4exp.embedding_length").unwrap();
    assert_eq!(embedding.shape[0], width);
}

/// Models and maps go to other threads.
#[test]
fn models_and_maps_are_shared_between_threads() {
    fn shared<T: Send + Sync>() {}
    shared::<Gguf>();
    shared::<strata_gguf::Mapping>();
    shared::<strata_gguf::write::Writer>();
}

/// Oracle: the constants in the file as the `gguf` Python package prints them. They exceed 2^53: a reader that goes
/// through floats gets them wrong.
#[test]
fn hash_multipliers_stay_exact() {
    let gguf = Gguf::open(&golden::dir().join("tiny/tiny.gguf")).unwrap();
    let key = "qwen4exp.ple.layer_multipliers";
    let exact = vec![16_304_757_896_083_889u64, 11_435_418_644_576_253, 7_275_717_464_594_479];
    assert_eq!(gguf.metadata().get(key), Some(&Value::Array(Array::U64(exact.clone()))));
    assert_eq!(gguf.metadata().u64s(key).unwrap(), exact);
}
