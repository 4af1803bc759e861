//! Metadata values: the thirteen value types of GGUF, kept as they were stored.
//!
//! Nothing is widened or rounded here: a `u64` array stays a `u64` array. Equality is equality of what is
//! stored, so floats compare by bits (a NaN equals itself, `-0.0` differs from `0.0`).

use crate::error::printable;
use std::fmt;

/// The id of a value type in the file (`gguf_metadata_value_type`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ValueType {
    U8,
    I8,
    U16,
    I16,
    U32,
    I32,
    F32,
    Bool,
    String,
    Array,
    U64,
    I64,
    F64,
}

impl ValueType {
    pub(crate) fn from_id(id: u32) -> Option<Self> {
        use ValueType::*;
        const BY_ID: [ValueType; 13] = [U8, I8, U16, I16, U32, I32, F32, Bool, String, Array, U64, I64, F64];
        BY_ID.get(usize::try_from(id).ok()?).copied()
    }

    pub(crate) fn id(self) -> u32 {
        self as u32
    }

    /// The fewest bytes that a value of this type takes in a file (the length or header alone for a string or
    /// an array).
    pub(crate) fn min_bytes(self) -> u64 {
        use ValueType::*;
        match self {
            U8 | I8 | Bool => 1,
            U16 | I16 => 2,
            U32 | I32 | F32 => 4,
            U64 | I64 | F64 | String => 8,
            Array => 12,
        }
    }

    pub(crate) fn name(self) -> &'static str {
        use ValueType::*;
        match self {
            U8 => "u8",
            I8 => "i8",
            U16 => "u16",
            I16 => "i16",
            U32 => "u32",
            I32 => "i32",
            F32 => "f32",
            Bool => "bool",
            String => "string",
            Array => "array",
            U64 => "u64",
            I64 => "i64",
            F64 => "f64",
        }
    }
}

/// One metadata value, of the type that the file stores.
#[derive(Clone, Debug)]
#[allow(missing_docs)]
pub enum Value {
    U8(u8),
    I8(i8),
    U16(u16),
    I16(i16),
    U32(u32),
    I32(i32),
    U64(u64),
    I64(i64),
    F32(f32),
    F64(f64),
    Bool(bool),
    String(String),
    Array(Array),
}

/// An array value: elements of one type; arrays nest up to [`Array::MAX_DEPTH`] deep.
#[derive(Clone, Debug)]
#[allow(missing_docs)]
pub enum Array {
    U8(Vec<u8>),
    I8(Vec<i8>),
    U16(Vec<u16>),
    I16(Vec<i16>),
    U32(Vec<u32>),
    I32(Vec<i32>),
    U64(Vec<u64>),
    I64(Vec<i64>),
    F32(Vec<f32>),
    F64(Vec<f64>),
    Bool(Vec<bool>),
    String(Vec<String>),
    Array(Vec<Array>),
}

/// The body `$body` for whichever vector an array holds, bound to `$items`.
macro_rules! with_items {
    ($array:expr, $items:ident => $body:expr) => {
        match $array {
            Array::U8($items) => $body,
            Array::I8($items) => $body,
            Array::U16($items) => $body,
            Array::I16($items) => $body,
            Array::U32($items) => $body,
            Array::I32($items) => $body,
            Array::U64($items) => $body,
            Array::I64($items) => $body,
            Array::F32($items) => $body,
            Array::F64($items) => $body,
            Array::Bool($items) => $body,
            Array::String($items) => $body,
            Array::Array($items) => $body,
        }
    };
}

impl Value {
    pub(crate) fn value_type(&self) -> ValueType {
        match self {
            Value::U8(_) => ValueType::U8,
            Value::I8(_) => ValueType::I8,
            Value::U16(_) => ValueType::U16,
            Value::I16(_) => ValueType::I16,
            Value::U32(_) => ValueType::U32,
            Value::I32(_) => ValueType::I32,
            Value::U64(_) => ValueType::U64,
            Value::I64(_) => ValueType::I64,
            Value::F32(_) => ValueType::F32,
            Value::F64(_) => ValueType::F64,
            Value::Bool(_) => ValueType::Bool,
            Value::String(_) => ValueType::String,
            Value::Array(_) => ValueType::Array,
        }
    }

    /// What the value is, for people: `u32`, `string`, `array of 3 f32`.
    pub fn type_name(&self) -> String {
        match self {
            Value::Array(array) => format!("array of {} {}", array.len(), array.element_type().name()),
            other => other.value_type().name().to_owned(),
        }
    }

    /// The value as an integer, if it is one of any width. Booleans are not integers.
    pub fn as_integer(&self) -> Option<i128> {
        Some(match *self {
            Value::U8(v) => v.into(),
            Value::I8(v) => v.into(),
            Value::U16(v) => v.into(),
            Value::I16(v) => v.into(),
            Value::U32(v) => v.into(),
            Value::I32(v) => v.into(),
            Value::U64(v) => v.into(),
            Value::I64(v) => v.into(),
            _ => return None,
        })
    }
}

impl Array {
    /// How deep arrays may nest: an array of scalars has depth 1.
    pub const MAX_DEPTH: usize = 8;

    /// Number of elements.
    pub fn len(&self) -> usize {
        with_items!(self, items => items.len())
    }

    /// Whether there are no elements.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    pub(crate) fn element_type(&self) -> ValueType {
        match self {
            Array::U8(_) => ValueType::U8,
            Array::I8(_) => ValueType::I8,
            Array::U16(_) => ValueType::U16,
            Array::I16(_) => ValueType::I16,
            Array::U32(_) => ValueType::U32,
            Array::I32(_) => ValueType::I32,
            Array::U64(_) => ValueType::U64,
            Array::I64(_) => ValueType::I64,
            Array::F32(_) => ValueType::F32,
            Array::F64(_) => ValueType::F64,
            Array::Bool(_) => ValueType::Bool,
            Array::String(_) => ValueType::String,
            Array::Array(_) => ValueType::Array,
        }
    }

    /// The elements as integers, if they are integers of any width.
    pub fn integers(&self) -> Option<Box<dyn Iterator<Item = i128> + '_>> {
        Some(match self {
            Array::U8(v) => Box::new(v.iter().map(|&x| x.into())),
            Array::I8(v) => Box::new(v.iter().map(|&x| x.into())),
            Array::U16(v) => Box::new(v.iter().map(|&x| x.into())),
            Array::I16(v) => Box::new(v.iter().map(|&x| x.into())),
            Array::U32(v) => Box::new(v.iter().map(|&x| x.into())),
            Array::I32(v) => Box::new(v.iter().map(|&x| x.into())),
            Array::U64(v) => Box::new(v.iter().map(|&x| x.into())),
            Array::I64(v) => Box::new(v.iter().map(|&x| x.into())),
            _ => return None,
        })
    }
}

fn same_f32(a: &[f32], b: &[f32]) -> bool {
    a.len() == b.len() && a.iter().zip(b).all(|(x, y)| x.to_bits() == y.to_bits())
}

fn same_f64(a: &[f64], b: &[f64]) -> bool {
    a.len() == b.len() && a.iter().zip(b).all(|(x, y)| x.to_bits() == y.to_bits())
}

impl PartialEq for Value {
    fn eq(&self, other: &Self) -> bool {
        match (self, other) {
            (Value::U8(a), Value::U8(b)) => a == b,
            (Value::I8(a), Value::I8(b)) => a == b,
            (Value::U16(a), Value::U16(b)) => a == b,
            (Value::I16(a), Value::I16(b)) => a == b,
            (Value::U32(a), Value::U32(b)) => a == b,
            (Value::I32(a), Value::I32(b)) => a == b,
            (Value::U64(a), Value::U64(b)) => a == b,
            (Value::I64(a), Value::I64(b)) => a == b,
            (Value::F32(a), Value::F32(b)) => same_f32(&[*a], &[*b]),
            (Value::F64(a), Value::F64(b)) => same_f64(&[*a], &[*b]),
            (Value::Bool(a), Value::Bool(b)) => a == b,
            (Value::String(a), Value::String(b)) => a == b,
            (Value::Array(a), Value::Array(b)) => a == b,
            _ => false,
        }
    }
}

impl Eq for Value {}

impl PartialEq for Array {
    fn eq(&self, other: &Self) -> bool {
        match (self, other) {
            (Array::U8(a), Array::U8(b)) => a == b,
            (Array::I8(a), Array::I8(b)) => a == b,
            (Array::U16(a), Array::U16(b)) => a == b,
            (Array::I16(a), Array::I16(b)) => a == b,
            (Array::U32(a), Array::U32(b)) => a == b,
            (Array::I32(a), Array::I32(b)) => a == b,
            (Array::U64(a), Array::U64(b)) => a == b,
            (Array::I64(a), Array::I64(b)) => a == b,
            (Array::F32(a), Array::F32(b)) => same_f32(a, b),
            (Array::F64(a), Array::F64(b)) => same_f64(a, b),
            (Array::Bool(a), Array::Bool(b)) => a == b,
            (Array::String(a), Array::String(b)) => a == b,
            (Array::Array(a), Array::Array(b)) => a == b,
            _ => false,
        }
    }
}

impl Eq for Array {}

macro_rules! from {
    ($($ty:ty => $variant:ident),+) => {$(
        impl From<$ty> for Value {
            fn from(value: $ty) -> Self {
                Value::$variant(value)
            }
        }

        impl From<Vec<$ty>> for Value {
            fn from(values: Vec<$ty>) -> Self {
                Value::Array(Array::$variant(values))
            }
        }
    )+};
}

from! { u8 => U8, i8 => I8, u16 => U16, i16 => I16, u32 => U32, i32 => I32, u64 => U64, i64 => I64, f32 => F32,
f64 => F64, bool => Bool, String => String, Array => Array }

impl From<&str> for Value {
    fn from(value: &str) -> Self {
        Value::String(value.to_owned())
    }
}

/// How many array elements [`Value`]'s `Display` shows before it says how many more there are.
const SHOWN: usize = 6;

fn quoted(f: &mut fmt::Formatter<'_>, text: &str) -> fmt::Result {
    write!(f, "\"{}\"", printable(text).replace('"', "\\\""))
}

impl fmt::Display for Value {
    /// One line for people: strings quoted and cut, arrays shortened.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Value::U8(v) => v.fmt(f),
            Value::I8(v) => v.fmt(f),
            Value::U16(v) => v.fmt(f),
            Value::I16(v) => v.fmt(f),
            Value::U32(v) => v.fmt(f),
            Value::I32(v) => v.fmt(f),
            Value::U64(v) => v.fmt(f),
            Value::I64(v) => v.fmt(f),
            Value::F32(v) => write!(f, "{v:?}"),
            Value::F64(v) => write!(f, "{v:?}"),
            Value::Bool(v) => v.fmt(f),
            Value::String(v) => quoted(f, v),
            Value::Array(v) => v.fmt(f),
        }
    }
}

impl fmt::Display for Array {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fn list<T>(
            f: &mut fmt::Formatter<'_>,
            items: &[T],
            show: impl Fn(&mut fmt::Formatter<'_>, &T) -> fmt::Result,
        ) -> fmt::Result {
            f.write_str("[")?;
            for (i, item) in items.iter().take(SHOWN).enumerate() {
                if i > 0 {
                    f.write_str(", ")?;
                }
                show(f, item)?;
            }
            if items.len() > SHOWN {
                write!(f, ", ... {} more", items.len() - SHOWN)?;
            }
            f.write_str("]")
        }
        match self {
            Array::String(v) => list(f, v, |f, s| quoted(f, s)),
            Array::Array(v) => list(f, v, |f, a| a.fmt(f)),
            Array::U8(v) => list(f, v, |f, x| write!(f, "{x}")),
            Array::I8(v) => list(f, v, |f, x| write!(f, "{x}")),
            Array::U16(v) => list(f, v, |f, x| write!(f, "{x}")),
            Array::I16(v) => list(f, v, |f, x| write!(f, "{x}")),
            Array::U32(v) => list(f, v, |f, x| write!(f, "{x}")),
            Array::I32(v) => list(f, v, |f, x| write!(f, "{x}")),
            Array::U64(v) => list(f, v, |f, x| write!(f, "{x}")),
            Array::I64(v) => list(f, v, |f, x| write!(f, "{x}")),
            Array::F32(v) => list(f, v, |f, x| write!(f, "{x:?}")),
            Array::F64(v) => list(f, v, |f, x| write!(f, "{x:?}")),
            Array::Bool(v) => list(f, v, |f, x| write!(f, "{x}")),
        }
    }
}
