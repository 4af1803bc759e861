//! `strata eval`: how well a model predicts a text; with another model, how far apart they are.

use std::path::Path;
use std::sync::Arc;

use serde_json::{Value as Json, json};
use strata_engine::EngineConfig;
use strata_engine::eval::{Comparison, Cut, EvalError, Observer, Perplexity, compare, perplexity};
use strata_model::Model;

use super::counted;
use super::run::{read_stdin, utf8};
use crate::args::EvalArgs;
use crate::config::Config;
use crate::failure::Failure;
use crate::output::{print, print_json, printable};
use crate::progress;
use crate::wiring::{Asked, Machine};

pub fn run(args: &EvalArgs, config: &Config, machine: &Machine) -> Result<(), Failure> {
    let cut = Cut { window: args.context, limit: args.windows };
    match cut.windows(usize::MAX) {
        Err(EvalError::Window(tokens)) => {
            let why =
                format!("--context is {tokens}, but must be at least 3: a smaller window scores nothing");
            return Err(Failure::usage(why));
        }
        Err(EvalError::NoWindows) => return Err(Failure::usage("--windows is 0, but must be at least 1")),
        _ => {}
    }
    let text = read_text(&args.text)?;
    let model = machine.open(&args.model)?;
    // Control tokens in the text are text, like everything else in it.
    let encode = |model: &Model| model.tokenizer.encode(&text, false);
    let tokens = encode(&model)?;
    let other = args.against.as_deref().map(|path| machine.open(path)).transpose()?;
    let windows = cut.windows(tokens.len()).map_err(|error| match error {
        EvalError::TooShort { tokens, window } => {
            let (text, tokens) = (source(&args.text), counted(tokens as u64, "token"));
            Failure::failed(format!(
                "{text} has {tokens}, fewer than one window of {window}: give a longer text or a smaller --context"
            ))
        }
        error => error.into(),
    })?;
    if let Some(other) = &other
        && encode(other)? != tokens
    {
        let (one, two) = (args.model.display(), other.gguf.path().display());
        let why = format!("{one} and {two} can't be compared: they cut the text into other tokens");
        return Err(Failure::failed(why));
    }
    let wanted = EngineConfig { context: Some(args.context), ..config.engine.clone() };
    let asked = Asked::with("--context", "lower --context");
    let load = |model: Arc<Model>| machine.load(model, &wanted, config, &asked);
    let mut engine = load(model)?;
    let mut other = other.map(load).transpose()?;

    let bar = progress::steps(config.quiet, windows as u64, "", "windows");
    let observer: &mut Observer<'_> = &mut |passed| {
        bar.set_position(passed.windows as u64);
        bar.set_message(format!("perplexity {:.4}", passed.perplexity.value));
    };
    let (own, comparison) = match &mut other {
        None => (perplexity(&mut engine, &tokens, cut, observer)?, None),
        Some(other) => {
            let comparison = compare(&mut engine, other, &tokens, cut, observer)?;
            (comparison.model, Some(comparison))
        }
    };
    bar.finish_and_clear();
    if args.json {
        print_json(&as_json(args, windows, &own, comparison.as_ref()))
    } else {
        print(&as_text(args, windows, &own, comparison.as_ref()))
    }
}

/// What to call the text.
fn source(path: &Path) -> String {
    if path == Path::new("-") { "standard input".into() } else { path.display().to_string() }
}

fn read_text(path: &Path) -> Result<String, Failure> {
    let name = source(path);
    let text = if path == Path::new("-") {
        read_stdin()?
    } else {
        let bytes = std::fs::read(path)
            .map_err(|error| Failure::failed(format!("{name}: cannot read it: {error}")))?;
        utf8(bytes, &name)?
    };
    if text.is_empty() {
        return Err(Failure::failed(format!("{name} is empty: there is nothing to score")));
    }
    Ok(text)
}

/// A standard error. A single token has none.
fn error(error: f64, decimals: usize) -> String {
    if error.is_nan() { String::new() } else { format!(" ± {error:.decimals$}") }
}

fn as_text(args: &EvalArgs, windows: usize, own: &Perplexity, comparison: Option<&Comparison>) -> String {
    let window = args.context;
    let mut out = format!(
        "perplexity    {:.4}{}   ({} in {} of {window})\n",
        own.value,
        error(own.error, 4),
        counted(own.tokens, "token"),
        counted(windows as u64, "window")
    );
    if let (Some(Comparison { other, divergence, agreement, agreement_error, .. }), Some(path)) =
        (comparison, &args.against)
    {
        let error_of_other = error(other.error, 4);
        out += &format!("other         {:.4}{error_of_other}   ({})\n", other.value, printable(path));
        out += &format!(
            "divergence    {:.6}{} mean, {:.6} median, {:.6} 99 %, {:.6} max   (nats per token)\n",
            divergence.mean,
            error(divergence.error, 6),
            divergence.median,
            divergence.percentile_99,
            divergence.max
        );
        out += &format!(
            "agreement     {:.2}{} %   (same most probable token)\n",
            100.0 * agreement,
            error(100.0 * agreement_error, 2)
        );
    }
    out
}

fn as_json(args: &EvalArgs, windows: usize, own: &Perplexity, comparison: Option<&Comparison>) -> Json {
    let mut json = json!({
        "model": args.model.to_string_lossy(),
        "text": args.text.to_string_lossy(),
        "window": args.context,
        "windows": windows,
        "tokens": own.tokens,
        "perplexity": own.value,
        "perplexity_error": own.error,
    });
    if let (Some(comparison), Some(path)) = (comparison, &args.against) {
        json["against"] = json!({
            "model": path.to_string_lossy(),
            "perplexity": comparison.other.value,
            "perplexity_error": comparison.other.error,
            "kl": comparison.divergence,
            "top1_agreement": comparison.agreement,
            "top1_agreement_error": comparison.agreement_error,
        });
    }
    json
}
