//! The metadata of a model: ordered keys with unique names, and typed access to their values.
//!
//! The typed getters never convert silently: an integer getter takes any integer type whose value fits, a float
//! getter takes `f32` and `f64`, everything else is an error that names the file, the key, and both types.

use crate::error::{Error, printable};
use crate::value::{Array, Value};
use std::collections::HashMap;
use std::fmt;
use std::sync::Arc;

/// Key-value pairs in the order of the file; each key occurs once.
#[derive(Clone)]
pub struct Metadata {
    /// The file that errors name.
    file: Arc<str>,
    entries: Vec<(Arc<str>, Value)>,
    index: HashMap<Arc<str>, usize>,
}

macro_rules! getters {
    ($($(#[$doc:meta])* $get:ident, $opt:ident -> $ty:ty, $expected:literal, $convert:expr;)+) => {$(
        $(#[$doc])*
        ///
        /// # Errors
        /// [`Error::MissingKey`] if the key is absent, [`Error::KeyType`] if its value is of another type.
        #[allow(clippy::needless_lifetimes)] // the borrowing getters need the lifetime
        pub fn $get<'a>(&'a self, key: &str) -> Result<$ty, Error> {
            self.$opt(key)?.ok_or_else(|| self.missing(key))
        }

        #[doc = concat!("Like [`Metadata::", stringify!($get), "`], but `None` if the key is absent.")]
        ///
        /// # Errors
        /// [`Error::KeyType`] if the value is of another type.
        #[allow(clippy::needless_lifetimes)]
        pub fn $opt<'a>(&'a self, key: &str) -> Result<Option<$ty>, Error> {
            let Some(value) = self.get(key) else { return Ok(None) };
            let convert: fn(&'a Value) -> Option<$ty> = $convert;
            match convert(value) {
                Some(found) => Ok(Some(found)),
                None => Err(self.wrong_type(key, $expected, value)),
            }
        }
    )+};
}

fn integer<T: TryFrom<i128>>(value: &Value) -> Option<T> {
    value.as_integer().and_then(|v| T::try_from(v).ok())
}

fn integers<T: TryFrom<i128>>(value: &Value) -> Option<Vec<T>> {
    let Value::Array(array) = value else { return None };
    array.integers()?.map(|v| T::try_from(v).ok()).collect()
}

impl Metadata {
    /// No pairs yet.
    pub fn new() -> Self {
        Self::of_file("metadata")
    }

    /// No pairs yet; errors will name `file`.
    pub(crate) fn of_file(file: &str) -> Self {
        Self { file: file.into(), entries: Vec::new(), index: HashMap::new() }
    }

    /// The value of `key`.
    pub fn get(&self, key: &str) -> Option<&Value> {
        self.index.get(key).map(|&at| &self.entries[at].1)
    }

    /// Whether `key` is present.
    pub fn contains(&self, key: &str) -> bool {
        self.index.contains_key(key)
    }

    /// The pairs, in order.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = (&str, &Value)> {
        self.entries.iter().map(|(key, value)| (&**key, value))
    }

    /// Number of pairs.
    pub fn len(&self) -> usize {
        self.entries.len()
    }

    /// Whether there are no pairs.
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// Sets `key`: at its place if it is present (the old value is returned), else at the end.
    pub fn insert(&mut self, key: impl Into<Arc<str>>, value: impl Into<Value>) -> Option<Value> {
        let (key, value) = (key.into(), value.into());
        if let Some(&at) = self.index.get(&key) {
            return Some(std::mem::replace(&mut self.entries[at].1, value));
        }
        self.index.insert(key.clone(), self.entries.len());
        self.entries.push((key, value));
        None
    }

    /// Takes `key` out; the others keep their order.
    pub fn remove(&mut self, key: &str) -> Option<Value> {
        let at = self.index.remove(key)?;
        for place in self.index.values_mut().filter(|place| **place > at) {
            *place -= 1;
        }
        Some(self.entries.remove(at).1)
    }

    fn missing(&self, key: &str) -> Error {
        Error::MissingKey { file: self.file.to_string(), key: printable(key) }
    }

    fn wrong_type(&self, key: &str, expected: &'static str, value: &Value) -> Error {
        let found = match value {
            Value::Array(_) => value.type_name(),
            _ => format!("{} {value}", value.type_name()),
        };
        Error::KeyType { file: self.file.to_string(), key: printable(key), expected, found }
    }

    getters! {
        /// An integer of any stored width that fits `u32`.
        u32, opt_u32 -> u32, "an integer from 0 to 4294967295", |v| integer(v);
        /// An integer of any stored width that fits `u64`.
        u64, opt_u64 -> u64, "an integer that is not negative", |v| integer(v);
        /// An integer of any stored width that fits `i64`.
        i64, opt_i64 -> i64, "an integer of 64 bits", |v| integer(v);
        /// A float; an `f64` is rounded to nearest.
        f32, opt_f32 -> f32, "a float", |v| match *v {
            Value::F32(x) => Some(x),
            Value::F64(x) => Some(x as f32),
            _ => None,
        };
        /// A boolean.
        bool, opt_bool -> bool, "a boolean", |v| match *v {
            Value::Bool(x) => Some(x),
            _ => None,
        };
        /// A string.
        str, opt_str -> &'a str, "a string", |v| match v {
            Value::String(x) => Some(x.as_str()),
            _ => None,
        };
        /// An array of integers that all fit `u32`.
        u32s, opt_u32s -> Vec<u32>, "an array of integers from 0 to 4294967295", |v| integers(v);
        /// An array of integers that all fit `u64`.
        u64s, opt_u64s -> Vec<u64>, "an array of integers that are not negative", |v| integers(v);
        /// An array of integers that all fit `i64`.
        i64s, opt_i64s -> Vec<i64>, "an array of integers of 64 bits", |v| integers(v);
        /// An array of floats; `f64` are rounded to nearest.
        f32s, opt_f32s -> Vec<f32>, "an array of floats", |v| match v {
            Value::Array(Array::F32(x)) => Some(x.clone()),
            Value::Array(Array::F64(x)) => Some(x.iter().map(|&x| x as f32).collect()),
            _ => None,
        };
        /// An array of booleans.
        bools, opt_bools -> Vec<bool>, "an array of booleans", |v| match v {
            Value::Array(Array::Bool(x)) => Some(x.clone()),
            _ => None,
        };
        /// An array of strings.
        strs, opt_strs -> &'a [String], "an array of strings", |v| match v {
            Value::Array(Array::String(x)) => Some(x.as_slice()),
            _ => None,
        };
    }
}

impl Default for Metadata {
    fn default() -> Self {
        Self::new()
    }
}

impl PartialEq for Metadata {
    /// The same pairs in the same order.
    fn eq(&self, other: &Self) -> bool {
        self.entries == other.entries
    }
}

impl Eq for Metadata {}

impl fmt::Debug for Metadata {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_map().entries(self.iter()).finish()
    }
}

impl<K: Into<Arc<str>>, V: Into<Value>> FromIterator<(K, V)> for Metadata {
    fn from_iter<I: IntoIterator<Item = (K, V)>>(pairs: I) -> Self {
        let mut metadata = Self::new();
        for (key, value) in pairs {
            metadata.insert(key, value);
        }
        metadata
    }
}
