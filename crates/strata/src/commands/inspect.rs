//! `strata inspect`: what is inside a GGUF file. Reads headers only.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use serde_json::{Map, Value as Json, json};
use strata_gguf::{Array, Gguf, Metadata, TensorInfo, Value};
use strata_plan::Bytes;

use super::counted;
use crate::args::InspectArgs;
use crate::failure::Failure;
use crate::output::{print, print_json, printable};

/// The longest value shown in the table, characters.
const SHOWN: usize = 72;

pub fn run(args: &InspectArgs) -> Result<(), Failure> {
    let gguf = Gguf::open(&args.model)?;
    if args.json { print_json(&as_json(&gguf, args.tensors)) } else { print(&as_text(&gguf, args.tensors)) }
}

/// Tensors, values and bytes of a kind.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct Share {
    tensors: u64,
    values: u64,
    bytes: u64,
}

impl Share {
    fn add(&mut self, tensor: &TensorInfo) {
        self.tensors += 1;
        self.values = self.values.saturating_add(tensor.values());
        self.bytes = self.bytes.saturating_add(tensor.bytes);
    }

    fn bits(&self) -> f64 {
        if self.values == 0 { 0.0 } else { self.bytes as f64 * 8.0 / self.values as f64 }
    }
}

/// What a tensor is for, by its name in the usual naming of GGUF.
fn role(name: &str) -> &'static str {
    let local = match name.strip_prefix("blk.").and_then(|rest| rest.split_once('.')) {
        Some((_, local)) => local,
        None => name,
    };
    let any = |parts: &[&str]| parts.iter().any(|part| local.starts_with(part));
    if any(&["nextn."]) {
        "draft"
    } else if any(&["per_layer_token_embd"]) {
        "n-gram table"
    } else if any(&["ple_"]) {
        "n-gram block"
    } else if any(&["token_embd"]) {
        "embedding"
    } else if any(&["hc_", "output_hc_"]) {
        "mixers"
    } else if any(&["output."]) {
        "head"
    } else if local.contains("_exps.") || local.ends_with("_exps") {
        "experts"
    } else if local.contains("shexp") {
        "shared expert"
    } else if any(&["ffn_gate_inp"]) {
        "router"
    } else if any(&["ssm_", "attn_qkv", "attn_gate"]) {
        "recurrence"
    } else if any(&["attn_", "indexer."]) {
        "attention"
    } else if any(&["ffn_"]) {
        "dense FFN"
    } else {
        "other"
    }
}

fn shares<'a, K: Ord>(gguf: &'a Gguf, key: impl Fn(&'a TensorInfo) -> K) -> Vec<(K, Share)> {
    let mut by = BTreeMap::<K, Share>::new();
    for tensor in gguf.tensors() {
        by.entry(key(tensor)).or_default().add(tensor);
    }
    let mut sorted: Vec<_> = by.into_iter().collect();
    sorted.sort_by_key(|(_, share)| std::cmp::Reverse(share.bytes));
    sorted
}

fn total(gguf: &Gguf) -> Share {
    let mut total = Share::default();
    gguf.tensors().iter().for_each(|tensor| total.add(tensor));
    total
}

fn file_bytes(gguf: &Gguf) -> u64 {
    gguf.shards().iter().map(|shard| shard.len).fold(0, u64::saturating_add)
}

// ---- text

/// A count for people.
fn count(n: u64) -> String {
    match n {
        0..1_000 => n.to_string(),
        1_000..1_000_000 => format!("{:.1} k", n as f64 / 1e3),
        1_000_000..1_000_000_000 => format!("{:.1} M", n as f64 / 1e6),
        _ => format!("{:.2} B", n as f64 / 1e9),
    }
}

/// Text from a file, on one line, without what could steer a terminal, cut to `SHOWN` characters.
fn one_line(text: &str) -> String {
    let mut line = String::new();
    let mut chars = text.chars();
    for c in chars.by_ref().take(SHOWN) {
        if c.is_control() { line.extend(c.escape_default()) } else { line.push(c) }
    }
    if chars.next().is_some() {
        line.push_str("...");
    }
    line
}

fn shown(value: &Value) -> String {
    match value {
        Value::String(text) => one_line(text),
        Value::Array(array) => shown_array(array),
        other => json_of(other).to_string(),
    }
}

/// The first elements, as many as fit.
fn shown_array(array: &Array) -> String {
    let mut text = String::from("[");
    for at in 0..array.len() {
        let element = element(array, at);
        let element =
            element.as_str().map_or_else(|| element.to_string(), |text| format!("{:?}", one_line(text)));
        let separator = if at == 0 { "" } else { ", " };
        if text.chars().count() + separator.len() + element.chars().count() + 5 > SHOWN && at > 0 {
            text.push_str(", ...");
            break;
        }
        text.push_str(separator);
        text.push_str(&element);
    }
    text.push(']');
    text
}

fn as_text(gguf: &Gguf, tensors: bool) -> String {
    let mut out = String::new();
    // Writing to a string can't fail.
    let _ = write_text(&mut out, gguf, tensors);
    out
}

fn write_text(out: &mut String, gguf: &Gguf, tensors: bool) -> std::fmt::Result {
    let all = total(gguf);
    for shard in gguf.shards() {
        writeln!(out, "{}  {}, GGUF version {}", printable(&shard.path), Bytes(shard.len), shard.version)?;
    }
    writeln!(
        out,
        "{}, {} values, {} of data, {:.2} bits per value",
        counted(all.tensors, "tensor"),
        count(all.values),
        Bytes(all.bytes),
        all.bits()
    )?;

    let metadata = gguf.metadata();
    let width = metadata.iter().map(|(key, _)| one_line(key).chars().count()).max().unwrap_or(0);
    let types = metadata.iter().map(|(_, value)| value.type_name().len()).max().unwrap_or(0);
    writeln!(out, "\nMetadata")?;
    for (key, value) in metadata.iter() {
        writeln!(out, "  {:<width$}  {:<types$}  {}", one_line(key), value.type_name(), shown(value))?;
    }

    let table = |out: &mut String, title: &str, rows: Vec<(String, Share)>| {
        writeln!(
            out,
            "\n{title:<16}{:>8} {:>10} {:>12} {:>7} {:>6}",
            "tensors", "values", "bytes", "share", "bits"
        )?;
        for (name, share) in rows {
            let part = if all.bytes == 0 { 0.0 } else { 100.0 * share.bytes as f64 / all.bytes as f64 };
            writeln!(
                out,
                "  {name:<14}{:>8} {:>10} {:>12} {part:>6.1}% {:>6.2}",
                share.tensors,
                count(share.values),
                Bytes(share.bytes),
                share.bits()
            )?;
        }
        Ok(())
    };
    table(out, "By format", shares(gguf, |t| t.ty.name()).into_iter().map(|(n, s)| (n.into(), s)).collect())?;
    table(out, "By role", shares(gguf, |t| role(&t.name)).into_iter().map(|(n, s)| (n.into(), s)).collect())?;

    if tensors {
        let width = gguf.tensors().iter().map(|t| one_line(&t.name).chars().count()).max().unwrap_or(0);
        writeln!(out, "\nTensors")?;
        for tensor in gguf.tensors() {
            let shape = tensor.shape.iter().map(u64::to_string).collect::<Vec<_>>().join(" x ");
            writeln!(
                out,
                "  {:<width$}  {:<8} {:>12}  {:>3}:{:<14} {shape}",
                one_line(&tensor.name),
                tensor.ty.name(),
                Bytes(tensor.bytes),
                tensor.shard + 1,
                tensor.offset
            )?;
        }
    }
    Ok(())
}

// ---- JSON

/// An f32 as the shortest decimal that is it; JSON has no NaN and no infinity.
fn json_f32(x: f32) -> Json {
    x.to_string().parse::<f64>().ok().and_then(serde_json::Number::from_f64).map_or(Json::Null, Json::Number)
}

fn json_of(value: &Value) -> Json {
    match value {
        Value::U8(x) => json!(x),
        Value::I8(x) => json!(x),
        Value::U16(x) => json!(x),
        Value::I16(x) => json!(x),
        Value::U32(x) => json!(x),
        Value::I32(x) => json!(x),
        Value::U64(x) => json!(x),
        Value::I64(x) => json!(x),
        Value::F32(x) => json_f32(*x),
        Value::F64(x) => json!(x),
        Value::Bool(x) => json!(x),
        Value::String(text) => json!(text),
        Value::Array(array) => (0..array.len()).map(|at| element(array, at)).collect(),
    }
}

fn element(array: &Array, at: usize) -> Json {
    match array {
        Array::U8(items) => json!(items[at]),
        Array::I8(items) => json!(items[at]),
        Array::U16(items) => json!(items[at]),
        Array::I16(items) => json!(items[at]),
        Array::U32(items) => json!(items[at]),
        Array::I32(items) => json!(items[at]),
        Array::U64(items) => json!(items[at]),
        Array::I64(items) => json!(items[at]),
        Array::F32(items) => json_f32(items[at]),
        Array::F64(items) => json!(items[at]),
        Array::Bool(items) => json!(items[at]),
        Array::String(items) => json!(items[at]),
        Array::Array(items) => (0..items[at].len()).map(|inner| element(&items[at], inner)).collect(),
    }
}

fn json_metadata(metadata: &Metadata) -> Json {
    Json::Object(metadata.iter().map(|(key, value)| (key.to_owned(), json_of(value))).collect())
}

fn json_share(share: &Share) -> Json {
    json!({ "tensors": share.tensors, "values": share.values, "bytes": share.bytes })
}

fn as_json(gguf: &Gguf, tensors: bool) -> Json {
    let by = |rows: Vec<(&'static str, Share)>| -> Map<String, Json> {
        rows.into_iter().map(|(name, share)| (name.to_owned(), json_share(&share))).collect()
    };
    let shards: Vec<Json> = gguf
        .shards()
        .iter()
        .map(|shard| {
            json!({
                "path": shard.path.to_string_lossy(),
                "bytes": shard.len,
                "version": shard.version,
                "alignment": shard.alignment,
                "data_offset": shard.data_offset,
            })
        })
        .collect();
    let mut json = json!({
        "shards": shards,
        "file_bytes": file_bytes(gguf),
        "total": json_share(&total(gguf)),
        "by_format": by(shares(gguf, |t| t.ty.name())),
        "by_role": by(shares(gguf, |t| role(&t.name))),
        "metadata": json_metadata(gguf.metadata()),
    });
    if tensors {
        json["tensors"] = gguf
            .tensors()
            .iter()
            .map(|t| {
                json!({
                    "name": t.name,
                    "format": t.ty.name(),
                    "role": role(&t.name),
                    "shape": t.shape,
                    "bytes": t.bytes,
                    "shard": t.shard,
                    "offset": t.offset,
                })
            })
            .collect();
    }
    json
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Oracle: the tensor names of the architecture's description.
    #[test]
    fn roles_follow_names() {
        for (name, expected) in [
            ("token_embd.weight", "embedding"),
            ("output.weight", "head"),
            ("output_hc_norm.weight", "mixers"),
            ("per_layer_token_embd.weight", "n-gram table"),
            ("blk.0.attn_qkv.weight", "recurrence"),
            ("blk.0.ssm_a", "recurrence"),
            ("blk.3.attn_q.weight", "attention"),
            ("blk.3.indexer.k_proj.weight", "attention"),
            ("blk.3.ffn_gate_inp.weight", "router"),
            ("blk.3.ffn_gate_inp_shexp.weight", "shared expert"),
            ("blk.3.ffn_down_exps.weight", "experts"),
            ("blk.3.hc_ffn_up.weight", "mixers"),
            ("blk.1.ple_key.weight", "n-gram block"),
            ("blk.8.nextn.eh_proj.weight", "draft"),
            ("blk.8.ffn_up.weight", "dense FFN"),
        ] {
            assert_eq!(role(name), expected, "{name}");
        }
    }

    /// Oracle: a value that f64 can't hold, and one that f32 has no short binary form for.
    #[test]
    fn numbers_stay_what_they_are() {
        assert_eq!(json_of(&Value::U64(16_304_757_896_083_889)).to_string(), "16304757896083889");
        assert_eq!(json_of(&Value::F32(0.1)).to_string(), "0.1");
        assert_eq!(json_of(&Value::F32(f32::NAN)), Json::Null);
    }

    /// Oracle: no control character survives, and long texts end in dots.
    #[test]
    fn shown_text_is_one_line() {
        assert_eq!(one_line("a\n\u{1b}[2J"), "a\\n\\u{1b}[2J");
        let long = one_line(&"x".repeat(500));
        assert_eq!(long, "x".repeat(SHOWN) + "...");
        let array = shown_array(&Array::U32((0..1000).collect()));
        assert!(
            array.starts_with("[0, 1, 2") && array.ends_with(", ...]") && array.len() <= SHOWN + 1,
            "{array}"
        );
    }

    /// Oracle: powers of 1000.
    #[test]
    fn counts_read_well() {
        assert_eq!((count(999), count(59_100_000)), ("999".into(), "59.1 M".into()));
    }
}
