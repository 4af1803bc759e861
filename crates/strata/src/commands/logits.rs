//! `strata logits`: every token's logits in a `.npy` file, for checking against other engines.

use std::fs;
use std::io::Read;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use strata_engine::{EngineConfig, Wants};
use strata_gguf::{Gguf, WholeFile};

use crate::args::LogitsArgs;
use crate::config::Config;
use crate::failure::Failure;
use crate::interrupt::{self, Deferred};
use crate::output::npy_header;
use crate::progress;
use crate::wiring::{Asked, Machine};

pub fn run(args: &LogitsArgs, config: &Config, machine: &Machine) -> Result<(), Failure> {
    let ids = read_ids(&args.ids)?;
    let rows = if args.mtp { ids.len() - 1 } else { ids.len() };
    if rows == 0 {
        return Err(Failure::usage(
            "--mtp needs at least 2 token ids: the draft block guesses from a token and the next",
        ));
    }
    interrupt::defer(Deferred::All);
    // What can't be written is known before the work for it.
    drop(WholeFile::create(&args.out, true)?);
    let model = machine.open(&args.model)?;
    check_is_not_model(&args.out, &model.gguf)?;
    let vocab = model.hyper.vocab;
    let wanted = EngineConfig { context: Some(ids.len()), draft: args.mtp, ..config.engine.clone() };
    let asked = Asked { with: None, less: "give fewer --ids" };
    let mut engine = machine.load(model, &wanted, config, &asked)?;

    let seq = engine.open()?;
    let canceller = engine.canceller(seq)?;
    interrupt::cancels(canceller.clone());
    let mut out = WholeFile::create(&args.out, true)?;
    out.write(&npy_header(rows, vocab))?;
    let bar = progress::steps(config.quiet, rows as u64, "logits", "tokens");
    let mut failed = None;
    let wants = if args.mtp { Wants::Draft } else { Wants::All };
    let read = engine.forward(seq, &ids, wants, &mut |_, logits| {
        bar.inc(1);
        interrupt::pass_on();
        if failed.is_none()
            && let Err(error) = out.write(&little_endian(logits))
        {
            failed = Some(error);
            canceller.cancel();
        }
    });
    bar.finish_and_clear();
    if interrupt::raised() {
        return Err(Failure::Interrupted);
    }
    if let Some(error) = failed {
        return Err(error.into());
    }
    read?;
    Ok(out.finish()?)
}

/// That the array wouldn't replace a file of the model, under whatever name.
fn check_is_not_model(out: &Path, gguf: &Gguf) -> Result<(), Failure> {
    let Ok(there) = fs::metadata(out) else { return Ok(()) };
    for shard in gguf.shards() {
        let part = shard.file.metadata().map_err(|error| {
            Failure::failed(format!("{}: cannot look at it: {error}", shard.path.display()))
        })?;
        if (part.dev(), part.ino()) == (there.dev(), there.ino()) {
            let (out, model) = (out.display(), shard.path.display());
            let why = format!("--out {out} is the model's own file {model}; give the array another name");
            return Err(Failure::usage(why));
        }
    }
    Ok(())
}

fn little_endian(row: &[f32]) -> Vec<u8> {
    row.iter().flat_map(|x| x.to_le_bytes()).collect()
}

/// Bytes of a file of token ids, at most.
const LONGEST: u64 = 64 << 20;

/// Token ids from the flag itself, or from the file behind `@`.
fn read_ids(flag: &str) -> Result<Vec<u32>, Failure> {
    let Some(path) = flag.strip_prefix('@') else { return parse_ids(flag, "--ids") };
    let failed = |why: String| Failure::failed(format!("{path}: cannot read token ids from it: {why}"));
    let mut text = String::new();
    // Some files have no end.
    let read = fs::File::open(path).and_then(|file| file.take(LONGEST + 1).read_to_string(&mut text));
    match read {
        Err(error) => Err(failed(error.to_string())),
        Ok(bytes) if bytes as u64 > LONGEST => Err(failed(format!("it has more than {} MiB", LONGEST >> 20))),
        Ok(_) => parse_ids(&text, path),
    }
}

fn parse_ids(text: &str, source: &str) -> Result<Vec<u32>, Failure> {
    // A comma may end the list, but not stand for an id that was forgotten.
    let mut between = text.trim_end().strip_suffix(',').unwrap_or(text).split(',');
    if text.contains(',') && between.any(|part| part.trim().is_empty()) {
        return Err(Failure::usage(format!("{source}: an id is missing before a comma")));
    }
    let words = text.split(|c: char| c == ',' || c.is_whitespace()).filter(|word| !word.is_empty());
    let ids: Vec<u32> = words
        .map(|word| {
            word.parse().map_err(|_| {
                let shown: String = word.chars().take(40).collect();
                Failure::usage(format!("{source}: `{}` is no token id", shown.escape_debug()))
            })
        })
        .collect::<Result<_, _>>()?;
    if ids.is_empty() { Err(Failure::usage(format!("{source}: holds no token ids"))) } else { Ok(ids) }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Oracle: the forms that the help shows.
    #[test]
    fn ids_are_separated_by_commas_or_space() {
        assert_eq!(parse_ids("1,2,3", "--ids").unwrap(), [1, 2, 3]);
        assert_eq!(parse_ids("1\n2, 3\n", "--ids").unwrap(), [1, 2, 3]);
        assert_eq!(parse_ids("1, 2,\n", "--ids").unwrap(), [1, 2]);
        for text in ["1,,2", ",1", "1, ,2", "1,2,,"] {
            let message = parse_ids(text, "--ids").unwrap_err().to_string();
            assert!(message.contains("before a comma") && message.contains("--ids"), "{message}");
        }
        for (text, part) in
            [("1,x", "`x`"), ("-1", "`-1`"), ("4294967296", "4294967296"), (" ", "no token ids")]
        {
            let message = parse_ids(text, "--ids").unwrap_err().to_string();
            assert!(message.contains(part) && message.contains("--ids"), "{message}");
        }
        assert!(read_ids("@/no/such/file").unwrap_err().to_string().contains("/no/such/file"));
        let endless = read_ids("@/dev/zero").unwrap_err().to_string();
        assert!(endless.contains("/dev/zero") && endless.contains("64 MiB"), "{endless}");
    }
}
