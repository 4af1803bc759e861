//! `strata eval`: how well a model predicts a text; with another model, how far apart they are.

use std::path::Path;

use serde_json::{Value as Json, json};
use strata_engine::EngineConfig;
use strata_engine::eval::{Comparison, Cut, Observer, Perplexity, compare, perplexity};
use strata_model::Model;

use super::run::{read_stdin, utf8};
use crate::args::EvalArgs;
use crate::config::Config;
use crate::failure::Failure;
use crate::output::{print, print_json};
use crate::progress;
use crate::wiring::{Machine, open};

pub fn run(args: &EvalArgs, config: &Config, machine: &Machine) -> Result<(), Failure> {
    let text = read_text(&args.text)?;
    let cut = Cut { window: args.context, limit: args.windows };
    let model = open(&args.model)?;
    // Control tokens in the text are text, like everything else in it.
    let encode = |model: &Model| model.tokenizer.encode(&text, false);
    let tokens = encode(&model)?;
    let windows = cut.windows(tokens.len())?;
    let other = args.against.as_deref().map(open).transpose()?;
    if let Some(other) = &other
        && encode(other)? != tokens
    {
        let (one, two) = (args.model.display(), other.gguf.path().display());
        let why = format!("{one} and {two} can't be compared: they cut the text into other tokens");
        return Err(Failure::failed(why));
    }
    let wanted = EngineConfig { context: Some(args.context), ..config.engine.clone() };
    let load = |model: Model| machine.load(model, &wanted, config);
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

fn read_text(path: &Path) -> Result<String, Failure> {
    if path == Path::new("-") {
        return read_stdin();
    }
    let name = path.display();
    let bytes =
        std::fs::read(path).map_err(|error| Failure::failed(format!("{name}: cannot read it: {error}")))?;
    utf8(bytes, &name.to_string())
}

fn as_text(args: &EvalArgs, windows: usize, own: &Perplexity, comparison: Option<&Comparison>) -> String {
    let window = args.context;
    let mut out = format!(
        "perplexity    {:.4} ± {:.4}   ({} tokens in {windows} windows of {window})\n",
        own.value, own.error, own.tokens
    );
    if let (Some(Comparison { other, divergence, agreement, agreement_error, .. }), Some(path)) =
        (comparison, &args.against)
    {
        out += &format!("other         {:.4} ± {:.4}   ({})\n", other.value, other.error, path.display());
        out += &format!(
            "divergence    {:.6} ± {:.6} mean, {:.6} median, {:.6} 99 %, {:.6} max   (nats per token)\n",
            divergence.mean, divergence.error, divergence.median, divergence.percentile_99, divergence.max
        );
        out += &format!(
            "agreement     {:.2} ± {:.2} %   (same most probable token)\n",
            100.0 * agreement,
            100.0 * agreement_error
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
