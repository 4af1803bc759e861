//! What can go wrong with a GGUF file, as one sentence each.
//!
//! Every message is a single line that names the file, the offset and the tensor or key where there is one, and
//! says what to do when that isn't obvious. Names come from untrusted files, so they are escaped and cut
//! ([`printable`]) before they reach a message.

use std::io;
use std::path::Path;

/// Any failure of reading, mapping or writing GGUF.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The operating system refused something.
    #[error("{file}: cannot {action}: {source}")]
    Io {
        /// The file.
        file: String,
        /// What was tried, as the rest of "cannot ...".
        action: &'static str,
        /// Why not.
        source: io::Error,
    },
    /// A folder, pipe or device where a file is needed.
    #[error("{file}: not a regular file; give the path of a .gguf file")]
    NotAFile {
        /// The path.
        file: String,
    },
    /// The file doesn't begin with the magic.
    #[error("{file}: not a GGUF file (it begins with {found} instead of \"GGUF\")")]
    NotGguf {
        /// The file.
        file: String,
        /// The first bytes, printable.
        found: String,
    },
    /// A big-endian file.
    #[error("{file}: this GGUF is big-endian, which is not supported; convert it to little-endian")]
    BigEndian {
        /// The file.
        file: String,
    },
    /// A version that isn't 2 or 3.
    #[error(
        "{file}: GGUF version {version} is not supported (2 and 3 are); convert the model again with a current converter"
    )]
    Version {
        /// The file.
        file: String,
        /// The version found.
        version: u32,
    },
    /// The file ends inside its header.
    #[error(
        "{file}: {what} at offset {offset} needs {need} bytes, but the file has only {left} more; it is damaged or only partly downloaded, fetch it again"
    )]
    Truncated {
        /// The file.
        file: String,
        /// Where the item begins.
        offset: u64,
        /// The item.
        what: String,
        /// Bytes it takes, at least.
        need: u64,
        /// Bytes left in the file from `offset`.
        left: u64,
    },
    /// The header is longer than any real one.
    #[error("{file}: {what} at offset {offset} needs {need} bytes, which makes the header longer than {limit} bytes; the file is damaged", limit = crate::header::MAX_HEADER)]
    HeaderTooLong {
        /// The file.
        file: String,
        /// Where the item begins.
        offset: u64,
        /// The item.
        what: String,
        /// Bytes it takes, at least.
        need: u64,
    },
    /// A key-value pair that can't be right.
    #[error("{file}: metadata key `{key}` at offset {offset} {problem}")]
    Key {
        /// The file.
        file: String,
        /// Where the pair begins.
        offset: u64,
        /// The key.
        key: String,
        /// What is wrong.
        problem: KeyProblem,
    },
    /// An entry of the tensor index that can't be right.
    #[error("{file}: tensor `{tensor}` (index entry at offset {offset}) {problem}")]
    Tensor {
        /// The file.
        file: String,
        /// Where the entry begins.
        offset: u64,
        /// The tensor's name.
        tensor: String,
        /// What is wrong.
        problem: TensorProblem,
    },
    /// A key that is needed is absent.
    #[error("{file}: metadata key `{key}` is missing")]
    MissingKey {
        /// The file.
        file: String,
        /// The key.
        key: String,
    },
    /// A key holds a value of another type than asked for.
    #[error("{file}: metadata key `{key}` should be {expected}, but it is {found}")]
    KeyType {
        /// The file.
        file: String,
        /// The key.
        key: String,
        /// The type asked for.
        expected: &'static str,
        /// The type stored, and for integers the value that doesn't fit.
        found: String,
    },
    /// One of a set of split files can't be right.
    #[error("{file}: {problem}")]
    Shard {
        /// The file.
        file: String,
        /// What is wrong.
        problem: ShardProblem,
    },
    /// Two tensors of one model have the same name.
    #[error("{file}: tensor `{tensor}` is also in {other}; the shards do not belong together")]
    TensorTwice {
        /// The file that has it second.
        file: String,
        /// The tensor's name.
        tensor: String,
        /// The file that has it first.
        other: String,
    },
    /// The file isn't what it was when it was opened.
    #[error(
        "{file}: the file {what} while in use; leave model files alone while they are open, and start again"
    )]
    Changed {
        /// The file.
        file: String,
        /// What happened to it, as the rest of "the file ...".
        what: &'static str,
    },
    /// A range that is not inside the tensor it should be read from.
    #[error("{file}: tensor `{tensor}` has {bytes} bytes; {len} bytes from {offset} are outside of it")]
    OutOfTensor {
        /// The file.
        file: String,
        /// The tensor.
        tensor: String,
        /// First byte asked for, from the tensor's begin.
        offset: u64,
        /// Bytes asked for.
        len: u64,
        /// Bytes it has.
        bytes: u64,
    },
    /// More files are mapped at once than the fault guard can watch.
    #[error("{file}: too many mapped files (at most {limit} at once)")]
    TooManyMappings {
        /// The file.
        file: String,
        /// The limit.
        limit: usize,
    },
    /// A file that would be written exists.
    #[error("{file}: already exists; remove it or choose another name")]
    Exists {
        /// The file.
        file: String,
    },
    /// What was to be written isn't a valid file, or isn't complete.
    #[error("{file}: {problem}")]
    Write {
        /// The file.
        file: String,
        /// What is wrong.
        problem: WriteProblem,
    },
}

/// What is wrong with a key-value pair, as the rest of "metadata key `..` at offset .. ...".
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs)]
pub enum KeyProblem {
    #[error("is empty")]
    Empty,
    #[error("is {0} bytes long (at most {max} are allowed)", max = crate::header::MAX_KEY)]
    TooLong(u64),
    #[error("is not UTF-8")]
    NotUtf8,
    #[error("occurs twice")]
    Twice,
    #[error("has unknown value type {0}")]
    ValueType(u32),
    #[error("is a string that is not UTF-8")]
    ValueNotUtf8,
    #[error("is an array whose element {0} is a string that is not UTF-8")]
    ElementNotUtf8(u64),
    #[error("is a boolean stored as {0} instead of 0 or 1")]
    Bool(u8),
    #[error("is an array of arrays more than {max} deep", max = crate::Array::MAX_DEPTH)]
    Depth,
    #[error("is an array of {count} {of}, which cannot fit into the {left} bytes left in the file")]
    Count { count: u64, of: &'static str, left: u64 },
    #[error("is {0}, but the data alignment must be a power of two from 8 to {max}", max = crate::header::MAX_ALIGNMENT)]
    Alignment(String),
}

/// What is wrong with an entry of the tensor index, as the rest of "tensor `..` ...".
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs)]
pub enum TensorProblem {
    #[error("has an empty name")]
    Empty,
    #[error("has a name of {0} bytes (at most {max} are allowed)", max = crate::header::MAX_TENSOR_NAME)]
    TooLong(u64),
    #[error("has a name that is not UTF-8")]
    NotUtf8,
    #[error("occurs twice")]
    Twice,
    #[error("has {0} dimensions (1 to {max} are allowed)", max = crate::header::MAX_DIMENSIONS)]
    Dimensions(u32),
    #[error("has a dimension of length 0")]
    ZeroDimension,
    #[error("has unknown type id {0}; it needs a newer version of this program, or the file is damaged")]
    Type(u32),
    #[error("has rows of {row} values, which is not a multiple of the {block} of a {ty} block")]
    Row { row: u64, block: usize, ty: &'static str },
    #[error("has more values than can be counted")]
    Overflow,
    #[error("has its data at {offset}, which is not a multiple of the alignment {alignment}")]
    Misaligned { offset: u64, alignment: u64 },
    #[error(
        "ends at byte {end}, but the file has only {len}; it is damaged or only partly downloaded, fetch it again"
    )]
    OutOfFile { end: u64, len: u64 },
    #[error("overlaps the data of tensor `{0}`")]
    Overlap(String),
}

/// What is wrong with a set of split files.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs)]
pub enum ShardProblem {
    #[error("shard {number} of {count} is missing; put it beside {beside}")]
    Missing { number: u64, count: u64, beside: String },
    #[error(
        "this is shard {number} of {count}, but it is not named ...-{number:05}-of-{count:05}.gguf, so the others cannot be found; give it its name back"
    )]
    Unnamed { number: u64, count: u64 },
    #[error(
        "is named shard {number} of {count}, but it has no metadata key `{key}`; it is not part of a split model"
    )]
    NoKey { number: u64, count: u64, key: &'static str },
    #[error(
        "is named shard {number} of {count}, but its metadata says shard {found_number} of {found_count}; give it its name back or fetch it again"
    )]
    Misnamed { number: u64, count: u64, found_number: u64, found_count: u64 },
    #[error("metadata key `split.no` is {no}, which is not below `split.count` = {count}")]
    Number { no: u64, count: u64 },
    #[error("metadata key `{key}` differs from that in {other}; the shards belong to two models")]
    OtherModel { key: String, other: String },
    #[error(
        "the {count} shards hold {found} tensors together, but `split.tensors.count` says {expected}; a shard is from another model or an older split"
    )]
    TensorCount { count: u64, found: u64, expected: u64 },
}

/// Why something can't be written.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs)]
pub enum WriteProblem {
    #[error("tensor `{tensor}` {problem}")]
    Tensor { tensor: String, problem: TensorProblem },
    #[error("metadata key `{key}` {problem}")]
    Key { key: String, problem: KeyProblem },
    #[error("{0} shards are more than the 65535 that a split model can have; allow larger files")]
    TooManyShards(usize),
    #[error("{0} tensors are more than a split model can have")]
    TooManyTensors(usize),
    #[error("tensor `{tensor}` was given {written} of its {bytes} bytes")]
    Incomplete { tensor: String, written: u64, bytes: u64 },
    #[error("there is no tensor number {0} among those declared")]
    NoTensor(usize),
    #[error("is the name of one shard of a split model; give the name of the whole, without the numbers")]
    ShardName,
    #[error("its header would have {0} bytes (at most {max} are allowed)", max = crate::header::MAX_HEADER)]
    HeaderTooLong(u64),
    #[error("the path has no file name; give the name of the file to write")]
    NoFileName,
    #[error("is {0}; give the name of a file to write")]
    NotAFile(&'static str),
}

/// A text from a file as it may stand in a one-line message: control characters escaped, long texts cut.
pub(crate) fn printable(text: &str) -> String {
    const MOST: usize = 120;
    let mut out = String::new();
    for (i, c) in text.chars().enumerate() {
        if i == MOST {
            out.push_str("...");
            break;
        }
        if c.is_control() || matches!(c, '\u{2028}' | '\u{2029}') {
            out.extend(c.escape_unicode());
        } else {
            out.push(c);
        }
    }
    out
}

/// A path as it may stand in a message: never cut, but on one line.
pub(crate) fn printable_path(path: &Path) -> String {
    path.display().to_string().replace(|c: char| c.is_control(), "?")
}
