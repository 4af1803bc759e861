//! Writes the first inputs of the `gguf` target to `corpus/gguf`: the headers of the committed tiny models, and a
//! few small files with every type of value and tensor, whole and split.

use std::error::Error;
use std::fs;
use std::path::Path;
use strata_gguf::write::Outline;
use strata_gguf::{Array, Gguf, Metadata, TensorType, Value};

fn main() -> Result<(), Box<dyn Error>> {
    let fuzz = Path::new(env!("CARGO_MANIFEST_DIR"));
    let corpus = fuzz.join("corpus/gguf");
    fs::create_dir_all(&corpus)?;
    for name in ["tiny", "tiny-nomtp", "tiny-mtp-only"] {
        let path = fuzz.join(format!("../tests/data/tiny/{name}.gguf"));
        let header = Gguf::open(&path)?.shards()[0].data_offset as usize;
        fs::write(corpus.join(name), &fs::read(path)?[..header])?;
    }

    let scalars: Metadata = [
        ("u8", Value::U8(1)),
        ("i8", Value::I8(-1)),
        ("u16", Value::U16(2)),
        ("i16", Value::I16(-2)),
        ("u32", Value::U32(3)),
        ("i32", Value::I32(-3)),
        ("u64", Value::U64(u64::MAX)),
        ("i64", Value::I64(-4)),
        ("f32", Value::F32(0.5)),
        ("f64", Value::F64(-0.5)),
        ("bool", Value::Bool(true)),
        ("string", Value::String("text".into())),
    ]
    .into_iter()
    .collect();
    seed(&corpus, "scalars", scalars, &[], false)?;

    let nested = Array::Array(vec![Array::U64(vec![1, 2]), Array::Array(vec![Array::Bool(vec![true])])]);
    let mut arrays = Metadata::new();
    arrays.insert("general.alignment", 8u32);
    arrays.insert("tokens", vec!["a".to_owned(), "Ġb".to_owned()]);
    arrays.insert("ids", vec![1i32, -1]);
    arrays.insert("scores", vec![0.25f32, f32::NAN]);
    arrays.insert("nested", nested);
    seed(&corpus, "arrays", arrays, &[TensorType::F32, TensorType::Q4_K], false)?;

    seed(&corpus, "types", Metadata::new(), TensorType::ALL, false)?;
    let named: Metadata = [("general.architecture", "test")].into_iter().collect();
    seed(&corpus, "split", named, &[TensorType::Q8_0, TensorType::BF16, TensorType::I8], true)
}

/// One file; a split model's shards one after the other, as the target reads them.
fn seed(
    corpus: &Path,
    name: &str,
    metadata: Metadata,
    types: &[TensorType],
    cut: bool,
) -> Result<(), Box<dyn Error>> {
    let mut outline = Outline::new(metadata);
    outline.overwrite(true);
    if cut {
        outline.cut();
    }
    for ty in types {
        outline.tensor(ty.name(), &[ty.block_len() as u64, 2], *ty)?;
    }
    let writer = outline.create(&corpus.join(name))?;
    for (i, tensor) in writer.tensors().iter().enumerate() {
        writer.write_at(i, 0, &vec![0; tensor.bytes as usize])?;
    }
    let paths = writer.finish()?;
    if cut {
        let mut whole = Vec::new();
        for path in paths {
            whole.resize(whole.len().next_multiple_of(32), 0);
            whole.extend(fs::read(&path)?);
            fs::remove_file(path)?;
        }
        fs::write(corpus.join(name), whole)?;
    }
    Ok(())
}
