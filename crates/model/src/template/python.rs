//! How Python writes values: templates are written for Jinja2, so `{{ x }}`, `| string` and `| tojson` must print
//! `True`, `1e-05` and `", "` as Python does, or prompts differ from those in training.

use std::fmt::Write as _;

use minijinja::value::{Kwargs, Value, ValueKind};
use minijinja::{Error, ErrorKind, State};

/// Values nested deeper than this are refused.
const MAX_DEPTH: usize = 200;

/// The filter `tojson`, as `json.dumps` with `ensure_ascii=False` unless asked otherwise: keys in their order, no
/// HTML escaping. Keywords: `indent`, `ensure_ascii`, `separators`, `sort_keys`.
pub(super) fn tojson(state: &mut State, value: &Value, kwargs: Kwargs) -> Result<Value, Error> {
    let indent: Option<Value> = kwargs.get("indent")?;
    let indent = match indent.filter(|v| !v.is_none()) {
        None => None,
        Some(v) => match (v.as_str(), v.as_usize()) {
            (Some(text), _) => Some(text.to_owned()),
            (None, Some(spaces)) if spaces <= 64 => Some(" ".repeat(spaces)),
            _ => return Err(Error::new(ErrorKind::InvalidOperation, "tojson: indent is a text or 0 to 64")),
        },
    };
    let separators: Option<(String, String)> = match kwargs.get::<Option<Value>>("separators")? {
        Some(pair) if !pair.is_none() => {
            let part = |i| pair.get_item_by_index(i).ok().and_then(|v| v.as_str().map(str::to_owned));
            match (part(0), part(1)) {
                (Some(items), Some(keys)) => Some((items, keys)),
                _ => {
                    return Err(Error::new(
                        ErrorKind::InvalidOperation,
                        "tojson: separators is a pair of texts",
                    ));
                }
            }
        }
        _ => None,
    };
    let default_item = if indent.is_some() { "," } else { ", " };
    let (item, key) = separators.unwrap_or_else(|| (default_item.to_owned(), ": ".to_owned()));
    let format = Json {
        indent,
        item,
        key,
        ascii: kwargs.get::<Option<bool>>("ensure_ascii")?.unwrap_or(false),
        sorted: kwargs.get::<Option<bool>>("sort_keys")?.unwrap_or(false),
    };
    kwargs.assert_all_used()?;
    let mut out = String::new();
    format.write(state, &mut out, value, 0)?;
    Ok(Value::from_safe_string(out))
}

struct Json {
    indent: Option<String>,
    item: String,
    key: String,
    ascii: bool,
    sorted: bool,
}

impl Json {
    fn write(&self, state: &State, out: &mut String, value: &Value, depth: usize) -> Result<(), Error> {
        pay(state, value)?;
        if depth > MAX_DEPTH {
            return Err(too_deep());
        }
        match value.kind() {
            ValueKind::None => out.push_str("null"),
            ValueKind::Bool => out.push_str(if value.is_true() { "true" } else { "false" }),
            ValueKind::Number => out.push_str(&number(value, ["NaN", "Infinity", "-Infinity"])),
            ValueKind::String => self.string(out, value.as_str().unwrap_or_default()),
            ValueKind::Seq | ValueKind::Iterable => {
                let mut parts = value.try_iter()?.peekable();
                out.push('[');
                let empty = parts.peek().is_none();
                for (i, part) in parts.enumerate() {
                    self.before(out, i, depth + 1);
                    self.write(state, out, &part, depth + 1)?;
                }
                self.close(out, empty, depth, ']');
            }
            ValueKind::Map => {
                let mut keys: Vec<Value> = value.try_iter()?.collect();
                if self.sorted {
                    keys.sort_by(|a, b| a.as_str().cmp(&b.as_str()));
                }
                out.push('{');
                for (i, key) in keys.iter().enumerate() {
                    self.before(out, i, depth + 1);
                    match key.kind() {
                        ValueKind::String => self.string(out, key.as_str().unwrap_or_default()),
                        ValueKind::Number | ValueKind::Bool | ValueKind::None => {
                            out.push('"');
                            self.write(state, out, key, depth + 1)?;
                            out.push('"');
                        }
                        kind => return Err(refuse(kind)),
                    }
                    out.push_str(&self.key);
                    self.write(state, out, &value.get_item(key)?, depth + 1)?;
                }
                self.close(out, keys.is_empty(), depth, '}');
            }
            kind => return Err(refuse(kind)),
        }
        Ok(())
    }

    fn before(&self, out: &mut String, index: usize, depth: usize) {
        if index > 0 {
            out.push_str(&self.item);
        }
        self.new_line(out, depth);
    }

    fn close(&self, out: &mut String, empty: bool, depth: usize, bracket: char) {
        if !empty {
            self.new_line(out, depth);
        }
        out.push(bracket);
    }

    fn new_line(&self, out: &mut String, depth: usize) {
        if let Some(indent) = &self.indent {
            out.push('\n');
            for _ in 0..depth {
                out.push_str(indent);
            }
        }
    }

    fn string(&self, out: &mut String, text: &str) {
        out.push('"');
        for c in text.chars() {
            match c {
                '"' => out.push_str("\\\""),
                '\\' => out.push_str("\\\\"),
                '\n' => out.push_str("\\n"),
                '\r' => out.push_str("\\r"),
                '\t' => out.push_str("\\t"),
                '\u{8}' => out.push_str("\\b"),
                '\u{c}' => out.push_str("\\f"),
                c if c < ' ' || (self.ascii && c > '~') => {
                    for unit in c.encode_utf16(&mut [0; 2]) {
                        let _ = write!(out, "\\u{unit:04x}");
                    }
                }
                c => out.push(c),
            }
        }
        out.push('"');
    }
}

fn refuse(kind: ValueKind) -> Error {
    Error::new(ErrorKind::BadSerialization, format!("a value of kind {kind} has no JSON form"))
}

fn too_deep() -> Error {
    Error::new(ErrorKind::BadSerialization, "a value is nested too deeply")
}

/// `text.title()`: a letter after another is lowered, any other is raised.
pub(super) fn title(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    let mut inside = false;
    for c in text.chars() {
        if inside {
            out.extend(c.to_lowercase())
        } else {
            out.extend(c.to_uppercase())
        }
        inside = c.is_alphabetic();
    }
    out
}

/// Charges for a value that is written: as an instruction, and for a text also by its bytes. It is due before the value is
/// written, as lists may be far longer than memory.
fn pay(state: &State, value: &Value) -> Result<(), Error> {
    state.consume_fuel(1 + value.as_str().map_or(0, str::len) as u64 / 16)
}

/// `str(value)`: what `{{ value }}` prints.
pub(super) fn str_of(state: &State, value: &Value) -> Result<String, Error> {
    let mut out = String::new();
    match value.kind() {
        ValueKind::Undefined => {}
        ValueKind::String => out.push_str(value.as_str().unwrap_or_default()),
        _ => repr(state, &mut out, value, 0)?,
    }
    Ok(out)
}

fn repr(state: &State, out: &mut String, value: &Value, depth: usize) -> Result<(), Error> {
    pay(state, value)?;
    if depth > MAX_DEPTH {
        return Err(too_deep());
    }
    match value.kind() {
        ValueKind::None => out.push_str("None"),
        ValueKind::Undefined => out.push_str("Undefined"),
        ValueKind::Bool => out.push_str(if value.is_true() { "True" } else { "False" }),
        ValueKind::Number => out.push_str(&number(value, ["nan", "inf", "-inf"])),
        ValueKind::String => repr_text(out, value.as_str().unwrap_or_default()),
        ValueKind::Seq | ValueKind::Iterable => {
            let (open, close) = if value.is_tuple() { ('(', ')') } else { ('[', ']') };
            out.push(open);
            let mut count = 0;
            for part in value.try_iter()? {
                if count > 0 {
                    out.push_str(", ");
                }
                repr(state, out, &part, depth + 1)?;
                count += 1;
            }
            if value.is_tuple() && count == 1 {
                out.push(',');
            }
            out.push(close);
        }
        ValueKind::Map => {
            out.push('{');
            for (i, key) in value.try_iter()?.enumerate() {
                if i > 0 {
                    out.push_str(", ");
                }
                repr(state, out, &key, depth + 1)?;
                out.push_str(": ");
                repr(state, out, &value.get_item(&key)?, depth + 1)?;
            }
            out.push('}');
        }
        _ => {
            let _ = write!(out, "{value}");
        }
    }
    Ok(())
}

/// `repr(text)`; characters beyond Latin-1 are kept as they are.
fn repr_text(out: &mut String, text: &str) {
    let quote = if text.contains('\'') && !text.contains('"') { '"' } else { '\'' };
    out.push(quote);
    for c in text.chars() {
        match c {
            '\n' => out.push_str("\\n"),
            '\r' => out.push_str("\\r"),
            '\t' => out.push_str("\\t"),
            '\\' => out.push_str("\\\\"),
            c if c == quote => out.extend(['\\', c]),
            '\0'..='\x1f' | '\x7f'..='\u{a0}' | '\u{ad}' => {
                let _ = write!(out, "\\x{:02x}", u32::from(c));
            }
            c => out.push(c),
        }
    }
    out.push(quote);
}

/// A number as Python writes it; `special` are its names for NaN and the infinities.
fn number(value: &Value, special: [&str; 3]) -> String {
    if value.is_integer() {
        return value.to_string();
    }
    let Ok(x) = f64::try_from(value.clone()) else { return value.to_string() };
    match x {
        _ if x.is_nan() => special[0].to_owned(),
        f64::INFINITY => special[1].to_owned(),
        f64::NEG_INFINITY => special[2].to_owned(),
        _ => float(x),
    }
}

/// The shortest digits that read back as `x`, with an exponent where Python's `repr` has one.
fn float(x: f64) -> String {
    let scientific = format!("{x:e}");
    let Some((digits, exponent)) = scientific.split_once('e') else { return scientific };
    match exponent.parse::<i32>() {
        Ok(exponent @ (..-4 | 16..)) => {
            let sign = if exponent < 0 { '-' } else { '+' };
            format!("{digits}e{sign}{:02}", exponent.abs())
        }
        _ => format!("{x:?}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Oracle: CPython 3.11's `repr` of the same floats.
    #[test]
    fn floats_print_like_python() {
        let cases: [(f64, &str); 12] = [
            (1.0, "1.0"),
            (-0.0, "-0.0"),
            (0.1, "0.1"),
            (1e-4, "0.0001"),
            (1e-5, "1e-05"),
            (1.5e-7, "1.5e-07"),
            (1e15, "1000000000000000.0"),
            (1e16, "1e+16"),
            (123456789012345680.0, "1.2345678901234568e+17"),
            (1e22, "1e+22"),
            (5e-324, "5e-324"),
            (1.7976931348623157e308, "1.7976931348623157e+308"),
        ];
        for (x, text) in cases {
            assert_eq!(float(x), text);
        }
    }
}
