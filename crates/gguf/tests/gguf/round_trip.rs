//! Whatever is written is read back.

use proptest::collection::{btree_map, vec};
use proptest::prelude::*;
use strata_gguf::write::Outline;
use strata_gguf::{Array, Gguf, Metadata, TensorType, Value};

/// The keys that only shards have.
const SPLIT_KEYS: [&str; 3] = ["split.no", "split.count", "split.tensors.count"];

fn text() -> impl Strategy<Value = String> {
    prop_oneof!["\\PC{0,12}", Just(String::new()), Just("\0\n\u{10ffff}".to_owned())]
}

/// Floats by bits: NaNs with payloads and negative zeros included.
fn f32s() -> impl Strategy<Value = f32> {
    any::<u32>().prop_map(f32::from_bits)
}

fn f64s() -> impl Strategy<Value = f64> {
    any::<u64>().prop_map(f64::from_bits)
}

fn scalars() -> impl Strategy<Value = Value> {
    prop_oneof![
        any::<u8>().prop_map(Value::U8),
        any::<i8>().prop_map(Value::I8),
        any::<u16>().prop_map(Value::U16),
        any::<i16>().prop_map(Value::I16),
        any::<u32>().prop_map(Value::U32),
        any::<i32>().prop_map(Value::I32),
        any::<u64>().prop_map(Value::U64),
        any::<i64>().prop_map(Value::I64),
        f32s().prop_map(Value::F32),
        f64s().prop_map(Value::F64),
        any::<bool>().prop_map(Value::Bool),
        text().prop_map(Value::String),
    ]
}

fn flat_arrays() -> impl Strategy<Value = Array> {
    // 3000 exceeds what one piece of a numeric array holds.
    let len = prop_oneof![8 => 0..6usize, 1 => Just(3000)];
    let of = |len: usize| {
        prop_oneof![
            vec(any::<u8>(), len).prop_map(Array::U8),
            vec(any::<i8>(), len).prop_map(Array::I8),
            vec(any::<u16>(), len).prop_map(Array::U16),
            vec(any::<i16>(), len).prop_map(Array::I16),
            vec(any::<u32>(), len).prop_map(Array::U32),
            vec(any::<i32>(), len).prop_map(Array::I32),
            vec(any::<u64>(), len).prop_map(Array::U64),
            vec(any::<i64>(), len).prop_map(Array::I64),
            vec(f32s(), len).prop_map(Array::F32),
            vec(f64s(), len).prop_map(Array::F64),
            vec(any::<bool>(), len).prop_map(Array::Bool),
            vec(text(), len.min(20)).prop_map(Array::String),
        ]
    };
    len.prop_flat_map(of)
}

fn arrays() -> impl Strategy<Value = Array> {
    // At most four levels of arrays above the flat ones.
    flat_arrays().prop_recursive(4, 24, 4, |inner| vec(inner, 0..4).prop_map(Array::Array))
}

fn metadata() -> impl Strategy<Value = Metadata> {
    let value = prop_oneof![2 => scalars(), 1 => arrays().prop_map(Value::Array)];
    (btree_map("[a-z_.]{1,20}|\\PC{1,8}", value, 0..12), prop_oneof![Just(None), (3..13u32).prop_map(Some)])
        .prop_map(|(pairs, alignment)| {
            let mut metadata: Metadata = pairs.into_iter().collect();
            for key in SPLIT_KEYS.into_iter().chain(["general.alignment"]) {
                metadata.remove(key);
            }
            if let Some(power) = alignment {
                metadata.insert("general.alignment", 1u32 << power);
            }
            metadata
        })
}

#[derive(Clone, Debug)]
struct Tensor {
    name: String,
    ty: TensorType,
    shape: Vec<u64>,
    seed: u8,
    cut: bool,
}

fn tensors() -> impl Strategy<Value = Vec<Tensor>> {
    let ty = proptest::sample::select(TensorType::ALL);
    let one = (ty, 1..3u64, vec(1..4u64, 0..4), any::<u8>(), proptest::bool::weighted(0.2));
    btree_map("[a-z.0-9]{1,24}|\\PC{1,6}", one, 0..10).prop_map(|tensors| {
        let tensors = tensors.into_iter().map(|(name, (ty, blocks, mut shape, seed, cut))| {
            shape.insert(0, blocks * ty.block_len() as u64);
            Tensor { name, ty, shape, seed, cut }
        });
        tensors.collect()
    })
}

fn content(tensor: &Tensor, bytes: u64) -> Vec<u8> {
    (0..bytes).map(|i| (i as u8).wrapping_mul(tensor.seed | 1).wrapping_add(tensor.seed)).collect()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(96))]

    /// Oracle: what was written. Metadata of every type and depth, tensors of every type, any alignment, cut into
    /// shards by hand and by size, opened from any shard.
    #[test]
    fn what_is_written_is_read(
        metadata in metadata(),
        tensors in tensors(),
        split in prop_oneof![Just(None), (2000..9000u64).prop_map(Some)],
        from in any::<prop::sample::Index>(),
    ) {
        let folder = tempfile::tempdir().unwrap();
        let mut outline = Outline::new(metadata.clone());
        for tensor in &tensors {
            if tensor.cut {
                outline.cut();
            }
            outline.tensor(&tensor.name, &tensor.shape, tensor.ty).unwrap();
        }
        if let Some(bytes) = split {
            outline.split_at(bytes);
        }
        let writer = outline.create(&folder.path().join("m.gguf")).unwrap();
        for (i, tensor) in tensors.iter().enumerate() {
            writer.write_at(i, 0, &content(tensor, writer.tensors()[i].bytes)).unwrap();
        }
        let declared = writer.tensors().to_vec();
        let paths = writer.finish().unwrap();

        let gguf = Gguf::open(&paths[from.index(paths.len())]).unwrap();
        prop_assert_eq!(gguf.shards().len(), paths.len());
        let mut read = gguf.metadata().clone();
        if paths.len() > 1 {
            for key in SPLIT_KEYS {
                prop_assert!(read.remove(key).is_some(), "no {}", key);
            }
        }
        prop_assert_eq!(&read, &metadata);
        prop_assert_eq!(gguf.tensors(), &declared[..]);
        let mapping = gguf.map().unwrap();
        for (tensor, found) in tensors.iter().zip(gguf.tensors()) {
            prop_assert_eq!((&found.name, &found.shape, found.ty), (&tensor.name, &tensor.shape, tensor.ty));
            prop_assert_eq!(mapping.bytes(found), content(tensor, found.bytes));
            prop_assert!(found.offset.is_multiple_of(gguf.shards()[found.shard].alignment));
        }
    }
}
