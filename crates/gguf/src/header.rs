//! The header of one file: version, metadata and tensor index, read and checked.
//!
//! This module owns the meaning of the header's bytes and every check that one file alone allows; what holds
//! between the shards of a split model is `shards`' business. Only the header is read, never tensor data.
//!
//! Invariant of a [`Header`]: names are unique; every tensor's data lies inside the file, aligned, made of whole
//! blocks, and overlaps no other tensor's. Memory is bounded by the length of the file and by [`MAX_HEADER`].
//!
//! Layout (little-endian): magic `GGUF`, u32 version, u64 tensor count, u64 pair count; pairs (string key, u32
//! type, value); index entries (string name, u32 dimension count, u64 dimensions, u32 type, u64 offset); then
//! the data, from the next multiple of the alignment. A string is a u64 length and its bytes; an array is a u32
//! element type, a u64 count and its elements. Versions 2 and 3 differ in nothing that concerns little-endian.

use crate::error::{Error, KeyProblem, TensorProblem, printable};
use crate::metadata::Metadata;
use crate::source::{Cursor, ReadAt};
use crate::types::TensorType;
use crate::value::{Array, Value, ValueType};
use std::collections::HashSet;

/// The longest header that is read. The largest real ones, with 250,000 tokens and merges, have 11 MB.
pub const MAX_HEADER: u64 = 1 << 28;
/// The longest key, in bytes (the format's own limit).
pub const MAX_KEY: u64 = 65_535;
/// The longest tensor name, in bytes.
pub const MAX_TENSOR_NAME: u64 = 65_535;
/// The most dimensions a tensor has (the format's own limit).
pub const MAX_DIMENSIONS: u32 = 4;
/// The largest data alignment that is believed.
pub const MAX_ALIGNMENT: u64 = 1 << 24;
/// The alignment of files that don't name one.
pub const DEFAULT_ALIGNMENT: u64 = 32;
/// The key that names the alignment.
pub(crate) const ALIGNMENT_KEY: &str = "general.alignment";
pub(crate) const MAGIC: [u8; 4] = *b"GGUF";

/// Where a tensor is and what it looks like.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorInfo {
    /// Unique in the model.
    pub name: String,
    /// Lengths in ggml's `ne` order: `[0]` is the row length, the fastest-moving index. 1 to 4 of them, none 0.
    pub shape: Vec<u64>,
    /// Element type.
    pub ty: TensorType,
    /// Which shard holds the data: an index into [`Gguf::shards`](crate::Gguf::shards).
    pub shard: usize,
    /// First byte of the data, from the begin of the shard's file.
    pub offset: u64,
    /// Bytes of data.
    pub bytes: u64,
}

impl TensorInfo {
    /// Number of values: the product of the shape.
    pub fn values(&self) -> u64 {
        self.shape.iter().product()
    }

    /// Bytes of one row of `shape[0]` values.
    pub fn row_bytes(&self) -> u64 {
        self.bytes / self.rows()
    }

    /// Number of rows: the product of the shape but its first length.
    pub fn rows(&self) -> u64 {
        self.shape[1..].iter().product()
    }
}

/// The header of one file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Header {
    /// The file, as errors name it.
    pub file: String,
    /// Length of the file in bytes.
    pub len: u64,
    /// GGUF version: 2 or 3.
    pub version: u32,
    /// What offsets of data are multiples of.
    pub alignment: u64,
    /// Where data begins.
    pub data_offset: u64,
    /// The key-value pairs.
    pub metadata: Metadata,
    /// The tensors in the order of the index; `shard` is 0.
    pub tensors: Vec<TensorInfo>,
}

/// Bytes and number of values of a tensor, or what is wrong with its shape.
pub(crate) fn tensor_bytes(shape: &[u64], ty: TensorType) -> Result<u64, TensorProblem> {
    let dimensions = u32::try_from(shape.len()).unwrap_or(u32::MAX);
    if dimensions == 0 || dimensions > MAX_DIMENSIONS {
        return Err(TensorProblem::Dimensions(dimensions));
    }
    if shape.contains(&0) {
        return Err(TensorProblem::ZeroDimension);
    }
    let row_len = shape[0];
    if !row_len.is_multiple_of(ty.block_len() as u64) {
        return Err(TensorProblem::Row { row: row_len, block: ty.block_len(), ty: ty.name() });
    }
    // Both the values and the bytes must be countable; signed, because ggml's own lengths are.
    let values = shape.iter().try_fold(1u64, |product, &len| product.checked_mul(len));
    let rows = shape[1..].iter().try_fold(1u64, |product, &len| product.checked_mul(len));
    let bytes = rows.zip(ty.row_bytes(row_len)).and_then(|(rows, row)| rows.checked_mul(row));
    match (values, bytes) {
        (Some(values), Some(bytes)) if values <= i64::MAX as u64 && bytes <= i64::MAX as u64 => Ok(bytes),
        _ => Err(TensorProblem::Overflow),
    }
}

/// Whether `alignment` is one that files may name.
pub(crate) fn alignment_is_valid(alignment: u64) -> bool {
    alignment.is_power_of_two() && (8..=MAX_ALIGNMENT).contains(&alignment)
}

/// `offset` rounded up to a multiple of `alignment`, a power of two.
pub(crate) fn align_up(offset: u64, alignment: u64) -> Option<u64> {
    offset.checked_next_multiple_of(alignment)
}

impl Header {
    /// Reads and checks the header of `source`; errors call it `file`.
    ///
    /// # Errors
    /// One sentence about the first thing that is wrong.
    pub fn parse<S: ReadAt + ?Sized>(source: &S, file: &str) -> Result<Header, Error> {
        let mut cursor = Cursor::new(source, file)?;
        let version = preamble(&mut cursor)?;
        let tensor_count = cursor.u64("tensor count")?;
        let pair_count = cursor.u64("metadata count")?;

        let mut metadata = Metadata::of_file(file);
        let mut alignment_at = 0;
        // The shortest pair is a key of 1 byte with a value of 1 byte.
        demand_items(&cursor, pair_count, 8 + 1 + 4 + 1, "metadata")?;
        for _ in 0..pair_count {
            let at = cursor.position();
            cursor.enter(String::new());
            let (key, value) = pair(&mut cursor, at)?;
            if key == ALIGNMENT_KEY {
                alignment_at = at;
            }
            if metadata.contains(&key) {
                return Err(key_error(file, at, &key, KeyProblem::Twice));
            }
            metadata.insert(key, value);
        }
        let alignment = match metadata.get(ALIGNMENT_KEY) {
            None => DEFAULT_ALIGNMENT,
            Some(value) => value
                .as_integer()
                .and_then(|v| u64::try_from(v).ok())
                .filter(|&v| alignment_is_valid(v))
                .ok_or_else(|| {
                    let problem = KeyProblem::Alignment(value.to_string());
                    key_error(file, alignment_at, ALIGNMENT_KEY, problem)
                })?,
        };

        cursor.enter(String::new());
        // The shortest entry has a name of 1 byte and one dimension.
        demand_items(&cursor, tensor_count, 8 + 1 + 4 + 8 + 4 + 8, "tensor index")?;
        let mut entries = Vec::new();
        let mut names = HashSet::new();
        for _ in 0..tensor_count {
            let at = cursor.position();
            cursor.enter(String::new());
            let entry = entry(&mut cursor, at)?;
            if !names.insert(entry.name.clone()) {
                return Err(tensor_error(file, at, &entry.name, TensorProblem::Twice));
            }
            entries.push((at, entry));
        }
        drop(names);
        let data_offset = align_up(cursor.position(), alignment).unwrap_or(u64::MAX);
        let len = cursor.len();
        let tensors = place(file, entries, data_offset, alignment, len)?;
        Ok(Header { file: file.to_owned(), len, version, alignment, data_offset, metadata, tensors })
    }
}

/// Magic and version.
fn preamble<S: ReadAt + ?Sized>(cursor: &mut Cursor<'_, S>) -> Result<u32, Error> {
    let file = cursor.file().to_owned();
    let first: [u8; 4] = match cursor.left() {
        0..4 => {
            let first = cursor.bytes(cursor.left(), "magic")?;
            if !MAGIC.starts_with(&first) || first.is_empty() {
                return Err(Error::NotGguf { file, found: shown(&first) });
            }
            // So short a file can only be a truncated one.
            cursor.take("magic")?
        }
        _ => cursor.take("magic")?,
    };
    if first != MAGIC {
        return Err(Error::NotGguf { file, found: shown(&first) });
    }
    let version = cursor.u32("version")?;
    match version {
        2 | 3 => Ok(version),
        // A small number in the other byte order.
        _ if version & 0xffff == 0 && version != 0 => Err(Error::BigEndian { file }),
        _ => Err(Error::Version { file, version }),
    }
}

/// The first bytes of a file, for a message.
fn shown(bytes: &[u8]) -> String {
    if bytes.is_empty() {
        return "nothing".to_owned();
    }
    format!("\"{}\"", bytes.escape_ascii())
}

/// Refuses a count of items that can't fit into what is left of the file.
fn demand_items<S: ReadAt + ?Sized>(
    cursor: &Cursor<'_, S>,
    count: u64,
    least: u64,
    what: &'static str,
) -> Result<(), Error> {
    cursor.demand(count.saturating_mul(least), what)
}

fn key_error(file: &str, offset: u64, key: &str, problem: KeyProblem) -> Error {
    Error::Key { file: file.to_owned(), offset, key: printable(key), problem }
}

fn tensor_error(file: &str, offset: u64, tensor: &str, problem: TensorProblem) -> Error {
    Error::Tensor { file: file.to_owned(), offset, tensor: printable(tensor), problem }
}

/// A value's reader: where its key is, for errors.
struct Pair<'c, 's, S: ReadAt + ?Sized> {
    cursor: &'c mut Cursor<'s, S>,
    key: &'c str,
    at: u64,
}

/// One key-value pair, beginning at `at`.
fn pair<S: ReadAt + ?Sized>(cursor: &mut Cursor<'_, S>, at: u64) -> Result<(String, Value), Error> {
    let file = cursor.file();
    let len = cursor.u64("length of a metadata key")?;
    if len > MAX_KEY {
        return Err(key_error(file, at, "", KeyProblem::TooLong(len)));
    }
    let bytes = cursor.bytes(len, "metadata key")?;
    let key = String::from_utf8(bytes)
        .map_err(|e| key_error(file, at, &String::from_utf8_lossy(e.as_bytes()), KeyProblem::NotUtf8))?;
    if key.is_empty() {
        return Err(key_error(file, at, "", KeyProblem::Empty));
    }
    cursor.enter(format!(" of metadata key `{}`", printable(&key)));
    let id = cursor.u32("value type")?;
    let ty = ValueType::from_id(id).ok_or_else(|| key_error(file, at, &key, KeyProblem::ValueType(id)))?;
    let value = Pair { cursor, key: &key, at }.value(ty)?;
    Ok((key, value))
}

impl<S: ReadAt + ?Sized> Pair<'_, '_, S> {
    fn problem(&self, problem: KeyProblem) -> Error {
        key_error(self.cursor.file(), self.at, self.key, problem)
    }

    fn value(&mut self, ty: ValueType) -> Result<Value, Error> {
        const WHAT: &str = "value";
        Ok(match ty {
            ValueType::U8 => Value::U8(u8::from_le_bytes(self.cursor.take(WHAT)?)),
            ValueType::I8 => Value::I8(i8::from_le_bytes(self.cursor.take(WHAT)?)),
            ValueType::U16 => Value::U16(u16::from_le_bytes(self.cursor.take(WHAT)?)),
            ValueType::I16 => Value::I16(i16::from_le_bytes(self.cursor.take(WHAT)?)),
            ValueType::U32 => Value::U32(u32::from_le_bytes(self.cursor.take(WHAT)?)),
            ValueType::I32 => Value::I32(i32::from_le_bytes(self.cursor.take(WHAT)?)),
            ValueType::U64 => Value::U64(u64::from_le_bytes(self.cursor.take(WHAT)?)),
            ValueType::I64 => Value::I64(i64::from_le_bytes(self.cursor.take(WHAT)?)),
            ValueType::F32 => Value::F32(f32::from_le_bytes(self.cursor.take(WHAT)?)),
            ValueType::F64 => Value::F64(f64::from_le_bytes(self.cursor.take(WHAT)?)),
            ValueType::Bool => {
                let [byte] = self.cursor.take(WHAT)?;
                Value::Bool(self.boolean(byte)?)
            }
            ValueType::String => Value::String(self.string(KeyProblem::ValueNotUtf8)?),
            ValueType::Array => Value::Array(self.array(1)?),
        })
    }

    fn boolean(&self, byte: u8) -> Result<bool, Error> {
        match byte {
            0 => Ok(false),
            1 => Ok(true),
            other => Err(self.problem(KeyProblem::Bool(other))),
        }
    }

    fn string(&mut self, if_not_utf8: KeyProblem) -> Result<String, Error> {
        let len = self.cursor.u64("string length")?;
        let bytes = self.cursor.bytes(len, "string")?;
        String::from_utf8(bytes).map_err(|_| self.problem(if_not_utf8))
    }

    /// An array at nesting depth `depth` (the outermost is 1).
    fn array(&mut self, depth: usize) -> Result<Array, Error> {
        if depth > Array::MAX_DEPTH {
            return Err(self.problem(KeyProblem::Depth));
        }
        let id = self.cursor.u32("array element type")?;
        let ty = ValueType::from_id(id).ok_or_else(|| self.problem(KeyProblem::ValueType(id)))?;
        let count = self.cursor.u64("array length")?;
        let left = self.cursor.left();
        if count > left / ty.min_bytes() {
            return Err(self.problem(KeyProblem::Count { count, of: ty.name(), left }));
        }
        let c = &mut *self.cursor;
        Ok(match ty {
            ValueType::U8 => Array::U8(c.numbers(count, u8::from_le_bytes)?),
            ValueType::I8 => Array::I8(c.numbers(count, i8::from_le_bytes)?),
            ValueType::U16 => Array::U16(c.numbers(count, u16::from_le_bytes)?),
            ValueType::I16 => Array::I16(c.numbers(count, i16::from_le_bytes)?),
            ValueType::U32 => Array::U32(c.numbers(count, u32::from_le_bytes)?),
            ValueType::I32 => Array::I32(c.numbers(count, i32::from_le_bytes)?),
            ValueType::U64 => Array::U64(c.numbers(count, u64::from_le_bytes)?),
            ValueType::I64 => Array::I64(c.numbers(count, i64::from_le_bytes)?),
            ValueType::F32 => Array::F32(c.numbers(count, f32::from_le_bytes)?),
            ValueType::F64 => Array::F64(c.numbers(count, f64::from_le_bytes)?),
            ValueType::Bool => {
                let bytes = c.numbers(count, u8::from_le_bytes)?;
                Array::Bool(bytes.into_iter().map(|byte| self.boolean(byte)).collect::<Result<_, _>>()?)
            }
            // A string or array takes more memory than its least bytes in the file, so these vectors grow with
            // what is really read.
            ValueType::String => {
                let mut strings = Vec::new();
                for i in 0..count {
                    strings.push(self.string(KeyProblem::ElementNotUtf8(i))?);
                }
                strings.shrink_to_fit();
                Array::String(strings)
            }
            ValueType::Array => {
                let mut arrays = Vec::new();
                for _ in 0..count {
                    arrays.push(self.array(depth + 1)?);
                }
                arrays.shrink_to_fit();
                Array::Array(arrays)
            }
        })
    }
}

/// An entry of the tensor index; its offset still counts from the begin of the data.
fn entry<S: ReadAt + ?Sized>(cursor: &mut Cursor<'_, S>, at: u64) -> Result<TensorInfo, Error> {
    let file = cursor.file();
    let len = cursor.u64("length of a tensor name")?;
    if len > MAX_TENSOR_NAME {
        return Err(tensor_error(file, at, "", TensorProblem::TooLong(len)));
    }
    let bytes = cursor.bytes(len, "tensor name")?;
    let name = String::from_utf8(bytes).map_err(|e| {
        tensor_error(file, at, &String::from_utf8_lossy(e.as_bytes()), TensorProblem::NotUtf8)
    })?;
    let problem = |problem| tensor_error(file, at, &name, problem);
    if name.is_empty() {
        return Err(problem(TensorProblem::Empty));
    }
    cursor.enter(format!(" of tensor `{}`", printable(&name)));
    let dimensions = cursor.u32("dimension count")?;
    if dimensions == 0 || dimensions > MAX_DIMENSIONS {
        return Err(problem(TensorProblem::Dimensions(dimensions)));
    }
    let shape = (0..dimensions).map(|_| cursor.u64("dimension")).collect::<Result<Vec<u64>, Error>>()?;
    let id = cursor.u32("type")?;
    let ty = TensorType::from_id(id).ok_or_else(|| problem(TensorProblem::Type(id)))?;
    let bytes = tensor_bytes(&shape, ty).map_err(problem)?;
    let offset = cursor.u64("data offset")?;
    Ok(TensorInfo { name, shape, ty, shard: 0, offset, bytes })
}

/// Makes offsets count from the begin of the file, and checks that data is aligned, inside, and apart.
fn place(
    file: &str,
    mut entries: Vec<(u64, TensorInfo)>,
    data_offset: u64,
    alignment: u64,
    len: u64,
) -> Result<Vec<TensorInfo>, Error> {
    for (at, tensor) in &mut entries {
        let offset = tensor.offset;
        if !offset.is_multiple_of(alignment) {
            let problem = TensorProblem::Misaligned { offset, alignment };
            return Err(tensor_error(file, *at, &tensor.name, problem));
        }
        let start = data_offset.saturating_add(offset);
        let end = start.saturating_add(tensor.bytes);
        if end > len {
            return Err(tensor_error(file, *at, &tensor.name, TensorProblem::OutOfFile { end, len }));
        }
        tensor.offset = start;
    }
    let mut by_offset: Vec<&(u64, TensorInfo)> = entries.iter().collect();
    by_offset.sort_by_key(|(_, tensor)| tensor.offset);
    for pair in by_offset.windows(2) {
        let ((_, before), (at, tensor)) = (pair[0], pair[1]);
        if before.offset + before.bytes > tensor.offset {
            let problem = TensorProblem::Overlap(printable(&before.name));
            return Err(tensor_error(file, *at, &tensor.name, problem));
        }
    }
    Ok(entries.into_iter().map(|(_, tensor)| tensor).collect())
}
