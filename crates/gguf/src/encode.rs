//! The bytes of a header: metadata and tensor index as a file stores them (the reverse of `header`).
//!
//! Nothing is checked here; `write` does that before it encodes.

use crate::header::{MAGIC, TensorInfo};
use crate::value::{Array, Value};

/// The version that is written.
const VERSION: u32 = 3;

/// The header without the padding before the data. Tensor offsets are taken as counted from the data's begin.
pub(crate) fn header<'m>(
    pairs: impl ExactSizeIterator<Item = (&'m str, &'m Value)>,
    tensors: &[TensorInfo],
) -> Vec<u8> {
    let mut out = Vec::new();
    out.extend(MAGIC);
    out.extend(VERSION.to_le_bytes());
    out.extend((tensors.len() as u64).to_le_bytes());
    out.extend((pairs.len() as u64).to_le_bytes());
    for (key, value) in pairs {
        string(&mut out, key);
        out.extend(value.value_type().id().to_le_bytes());
        put(&mut out, value);
    }
    for tensor in tensors {
        string(&mut out, &tensor.name);
        out.extend((tensor.shape.len() as u32).to_le_bytes());
        tensor.shape.iter().for_each(|len| out.extend(len.to_le_bytes()));
        out.extend(tensor.ty.id().to_le_bytes());
        out.extend(tensor.offset.to_le_bytes());
    }
    out
}

/// Bytes that a tensor takes in the index.
pub(crate) fn entry_bytes(name: &str, dimensions: usize) -> u64 {
    (8 + name.len() + 4 + 8 * dimensions + 4 + 8) as u64
}

fn string(out: &mut Vec<u8>, text: &str) {
    out.extend((text.len() as u64).to_le_bytes());
    out.extend(text.as_bytes());
}

fn put(out: &mut Vec<u8>, value: &Value) {
    match value {
        Value::U8(v) => out.extend(v.to_le_bytes()),
        Value::I8(v) => out.extend(v.to_le_bytes()),
        Value::U16(v) => out.extend(v.to_le_bytes()),
        Value::I16(v) => out.extend(v.to_le_bytes()),
        Value::U32(v) => out.extend(v.to_le_bytes()),
        Value::I32(v) => out.extend(v.to_le_bytes()),
        Value::U64(v) => out.extend(v.to_le_bytes()),
        Value::I64(v) => out.extend(v.to_le_bytes()),
        Value::F32(v) => out.extend(v.to_le_bytes()),
        Value::F64(v) => out.extend(v.to_le_bytes()),
        Value::Bool(v) => out.push(u8::from(*v)),
        Value::String(v) => string(out, v),
        Value::Array(v) => array(out, v),
    }
}

fn array(out: &mut Vec<u8>, array_value: &Array) {
    out.extend(array_value.element_type().id().to_le_bytes());
    out.extend((array_value.len() as u64).to_le_bytes());
    match array_value {
        Array::U8(v) => out.extend(v),
        Array::I8(v) => v.iter().for_each(|x| out.extend(x.to_le_bytes())),
        Array::U16(v) => v.iter().for_each(|x| out.extend(x.to_le_bytes())),
        Array::I16(v) => v.iter().for_each(|x| out.extend(x.to_le_bytes())),
        Array::U32(v) => v.iter().for_each(|x| out.extend(x.to_le_bytes())),
        Array::I32(v) => v.iter().for_each(|x| out.extend(x.to_le_bytes())),
        Array::U64(v) => v.iter().for_each(|x| out.extend(x.to_le_bytes())),
        Array::I64(v) => v.iter().for_each(|x| out.extend(x.to_le_bytes())),
        Array::F32(v) => v.iter().for_each(|x| out.extend(x.to_le_bytes())),
        Array::F64(v) => v.iter().for_each(|x| out.extend(x.to_le_bytes())),
        Array::Bool(v) => out.extend(v.iter().map(|&x| u8::from(x))),
        Array::String(v) => v.iter().for_each(|x| string(out, x)),
        Array::Array(v) => v.iter().for_each(|x| array(out, x)),
    }
}
