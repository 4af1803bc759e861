//! Split models: how shards are named, and what must hold between their headers.
//!
//! Owns the naming scheme `NAME-00001-of-0000N.gguf` and the join of several headers into one model. Does not
//! open files.
//!
//! Invariant of a joined model: its shards agree on their number and on every metadata key that two of them
//! hold, tensor names are unique over all of them, and their tensors are as many as the split announced.
//!
//! That tells shards of two models apart as far as their keys do. Our writer repeats the short ones in every shard; most
//! tools write only `split.*` into later shards, and then a shard of another quantisation that was cut at the same
//! tensors is taken for the right one.

use crate::error::{Error, ShardProblem, printable};
use crate::header::{ALIGNMENT_KEY, Header, TensorInfo};
use crate::metadata::Metadata;
use crate::value::Value;
use std::collections::HashMap;
use std::path::{Path, PathBuf};

pub(crate) const NUMBER_KEY: &str = "split.no";
pub(crate) const COUNT_KEY: &str = "split.count";
pub(crate) const TENSORS_KEY: &str = "split.tensors.count";

/// The name of a shard: `NAME-00002-of-00003.gguf`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct ShardName {
    /// The path up to the number.
    stem: PathBuf,
    /// Counted from 1.
    pub(crate) number: u64,
    pub(crate) count: u64,
}

impl ShardName {
    /// Reads the name of `path`; `None` if it isn't that of a shard.
    pub(crate) fn of(path: &Path) -> Option<Self> {
        let name = path.file_name()?.to_str()?.strip_suffix(".gguf")?;
        let (rest, count) = name.rsplit_once("-of-")?;
        let (stem, number) = rest.rsplit_once('-')?;
        let (number, count) = (digits(number)?, digits(count)?);
        let valid = number >= 1 && number <= count;
        valid.then(|| Self { stem: path.with_file_name(stem), number, count })
    }

    /// The name of the first of `count` shards of what would be called `path` if it were whole.
    pub(crate) fn from_whole(path: &Path, count: u64) -> Self {
        let stem = match path.extension() {
            Some(extension) if extension == "gguf" => path.with_extension(""),
            _ => path.to_owned(),
        };
        Self { stem, number: 1, count }
    }

    /// The path of shard `number` of the same model.
    pub(crate) fn path(&self, number: u64) -> PathBuf {
        let mut name = self.stem.clone().into_os_string();
        name.push(format!("-{number:05}-of-{:05}.gguf", self.count));
        name.into()
    }
}

/// Five digits (or more, without a leading zero), as a number.
fn digits(text: &str) -> Option<u64> {
    let plain = text.bytes().all(|b| b.is_ascii_digit());
    let canonical = text.len() == 5 || (text.len() > 5 && !text.starts_with('0'));
    if plain && canonical { text.parse().ok() } else { None }
}

/// Which shard a file says that it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Split {
    /// Counted from 0.
    pub(crate) no: u64,
    pub(crate) count: u64,
}

impl Split {
    /// The `split.*` keys of a header; `None` if the file isn't split (no keys, or one shard).
    pub(crate) fn of(header: &Header) -> Result<Option<Self>, Error> {
        let Some(count) = header.metadata.opt_u64(COUNT_KEY)? else { return Ok(None) };
        if count <= 1 {
            return Ok(None);
        }
        let no = header.metadata.u64(NUMBER_KEY)?;
        if no >= count {
            return Err(shard_error(header, ShardProblem::Number { no, count }));
        }
        Ok(Some(Self { no, count }))
    }
}

pub(crate) fn shard_error(header: &Header, problem: ShardProblem) -> Error {
    Error::Shard { file: header.file.clone(), problem }
}

/// Whether a key says something about its own file only.
fn is_per_file(key: &str) -> bool {
    key == NUMBER_KEY || key == ALIGNMENT_KEY
}

/// Joins the headers of one model, in the order of its shards (one header for a model that isn't split).
///
/// The metadata is that of the first shard, followed by the keys that only later shards hold; `split.no` and
/// `general.alignment` are those of the first. Tensors keep their order, shard after shard.
///
/// # Errors
/// [`Error::Shard`] if a header isn't the shard its place says, if the number of tensors isn't what the split
/// announced, or if a key differs between shards; [`Error::TensorTwice`] if two shards hold the same tensor.
pub fn join(headers: Vec<Header>) -> Result<(Metadata, Vec<TensorInfo>), Error> {
    let count = headers.len() as u64;
    let files: Vec<String> = headers.iter().map(|header| header.file.clone()).collect();
    let mut metadata = Metadata::new();
    // Shards that brought keys which those before them don't have.
    let mut brought: HashMap<String, usize> = HashMap::new();
    let mut tensors: Vec<TensorInfo> = Vec::new();
    let mut places: HashMap<String, usize> = HashMap::new();
    for (i, header) in headers.into_iter().enumerate() {
        if count > 1 {
            check_place(&header, i as u64, count)?;
        }
        if i == 0 {
            metadata = header.metadata;
        } else {
            for (key, value) in header.metadata.iter().filter(|(key, _)| !is_per_file(key)) {
                match metadata.get(key) {
                    None => {
                        metadata.insert(key, value.clone());
                        brought.insert(key.to_owned(), i);
                    }
                    Some(known) if says_the_same(known, value) => {}
                    Some(_) => {
                        let other = files[brought.get(key).copied().unwrap_or(0)].clone();
                        let problem = ShardProblem::OtherModel { key: printable(key), other };
                        return Err(shard_error(&header, problem));
                    }
                }
            }
        }
        for mut tensor in header.tensors {
            if let Some(&other) = places.get(&tensor.name) {
                return Err(Error::TensorTwice {
                    file: files[i].clone(),
                    tensor: printable(&tensor.name),
                    other: files[other].clone(),
                });
            }
            places.insert(tensor.name.clone(), i);
            tensor.shard = i;
            tensors.push(tensor);
        }
    }
    if count > 1 {
        let (expected, found) = (metadata.u64(TENSORS_KEY)?, tensors.len() as u64);
        if expected != found {
            let problem = ShardProblem::TensorCount { count, found, expected };
            return Err(Error::Shard { file: files[0].clone(), problem });
        }
    }
    Ok((metadata, tensors))
}

fn check_place(header: &Header, place: u64, count: u64) -> Result<(), Error> {
    match Split::of(header)? {
        Some(split) if split.no == place && split.count == count => Ok(()),
        split => Err(misnamed(header, place + 1, count, split)),
    }
}

/// The error of a file whose name says shard `number` of `count`, but whose keys say something else.
pub(crate) fn misnamed(header: &Header, number: u64, count: u64, split: Option<Split>) -> Error {
    let problem = match split {
        Some(Split { no, count: found_count }) => {
            ShardProblem::Misnamed { number, count, found_number: no + 1, found_count }
        }
        None if header.metadata.contains(COUNT_KEY) => {
            ShardProblem::Misnamed { number, count, found_number: 1, found_count: 1 }
        }
        None => ShardProblem::NoKey { number, count, key: COUNT_KEY },
    };
    shard_error(header, problem)
}

/// Equal, or the same integer in another width.
fn says_the_same(a: &Value, b: &Value) -> bool {
    a == b || matches!((a.as_integer(), b.as_integer()), (Some(x), Some(y)) if x == y)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Oracle: the naming scheme, five digits counted from 1.
    #[test]
    fn names_of_shards() {
        let name = |text: &str| ShardName::of(Path::new(text)).map(|n| (n.number, n.count));
        assert_eq!(name("d/m-00001-of-00003.gguf"), Some((1, 3)));
        assert_eq!(name("m-Q4_K-of-x-00012-of-00012.gguf"), Some((12, 12)));
        assert_eq!(name("m-100000-of-100001.gguf"), Some((100_000, 100_001)));
        for other in [
            "m.gguf",
            "m-00001-of-00003",
            "m-00004-of-00003.gguf",
            "m-00000-of-00003.gguf",
            "m-1-of-3.gguf",
            "m-000001-of-000003.gguf",
            "m-+0001-of-00003.gguf",
            "m-99999999999999999999-of-99999999999999999999.gguf",
            "00001-of-00003.gguf",
        ] {
            assert_eq!(name(other), None, "{other}");
        }
        let name = ShardName::of(Path::new("d/m-00002-of-00003.gguf"));
        assert_eq!(name.map(|n| n.path(3)), Some(PathBuf::from("d/m-00003-of-00003.gguf")));
        let whole = |path: &str| ShardName::from_whole(Path::new(path), 2).path(2);
        assert_eq!(whole("d.x/m.v1.gguf"), PathBuf::from("d.x/m.v1-00002-of-00002.gguf"));
        assert_eq!(whole("d.x/m"), PathBuf::from("d.x/m-00002-of-00002.gguf"));
    }
}
