//! `strata run`: one answer, or a text continued. Without a prompt it hands over to [`super::chat`].

use std::io::Read;
use std::time::Instant;

use serde_json::json;
use strata_engine::chat::{Answer, Chat, ChatError, Manner, Part};
use strata_engine::{Engine, Reason, Request, Sampling, SeqId};
use strata_model::Model;
use strata_model::template::{PromptError, TemplateError};

use crate::args::RunArgs;
use crate::commands;
use crate::config::{Config, Environment};
use crate::delivery::{Outcome, Printer, deliver};
use crate::failure::{Failure, say, warn};
use crate::interrupt::{self, Deferred};
use crate::output::print_json;
use crate::wiring::{Asked, Machine};

pub fn run(
    args: &RunArgs,
    config: &Config,
    environment: &Environment,
    machine: &Machine,
) -> Result<(), Failure> {
    let prompt = args.prompt.as_deref().map(|prompt| read_prompt(prompt, args.raw)).transpose()?;
    let model = machine.open(&args.model)?;
    let sampling = config.sampling(Sampling::recommended(model.gguf.metadata())?);
    sampling.validate(model.hyper.vocab).map_err(|why| config.out_of_range(&why))?;
    if !args.raw {
        check_template(&model, config)?;
    }
    let started = Instant::now();
    let mut engine = machine.load(model, &config.engine, config, &Asked::setting(config))?;
    let loading = started.elapsed();

    let seq = engine.open()?;
    interrupt::cancels(engine.canceller(seq)?);
    interrupt::defer(Deferred::Keyboard);
    let manner = Manner { sampling, max_tokens: config.max_tokens, think: config.think, cancel: None };
    let Some(prompt) = prompt else {
        return commands::chat::run(&mut engine, seq, manner, args.prompt_timing, config, environment);
    };

    let mut question = interrupt::or_end(|| ask(args, config, &mut engine, seq, &manner, &prompt))?;
    // To be asked forgets earlier cancellations.
    interrupt::pass_on();
    let mut printer = Printer::new(environment);
    let outcome = deliver(&mut engine, &mut question.answer, &mut |part, text| match args.json {
        true => Ok(()),
        false => printer.show(part, text),
    });
    let outcome = match (outcome, args.json) {
        (outcome, true) => outcome?,
        (Err(Failure::PipeClosed), false) => return Err(Failure::PipeClosed),
        (outcome, false) => {
            printer.finish()?;
            outcome?
        }
    };
    let Question { answer, kept } = question;
    if args.json {
        print_json(&json!({
            "model": args.model.to_string_lossy(),
            "text": answer.text(),
            "reasoning": answer.reasoning(),
            "tokens": answer.tokens(),
            "prompt_tokens": outcome.read,
            "answer_tokens": answer.tokens().len(),
            "finish_reason": outcome.finish_reason(),
            "seed": manner.sampling.seed,
            "timings": {
                "load_seconds": loading.as_secs_f64(),
                "prompt_seconds": outcome.reading.as_secs_f64(),
                "prompt_tokens_per_second": outcome.reading_rate(),
                "answer_seconds": outcome.stepping.as_secs_f64(),
                "answer_tokens_per_second": outcome.stepping_rate(),
                "prompt": outcome.costs[0],
                "answer": outcome.costs[1],
            },
        }))?;
    } else if !config.quiet {
        say(outcome.speed(kept, answer.tokens().len()));
    }
    if args.prompt_timing {
        outcome.timing().lines().for_each(say);
    }
    if !args.json {
        warn_about_the_end(&outcome, &answer);
    }
    if outcome.reason == Reason::Cancelled { Err(Failure::Interrupted) } else { Ok(()) }
}

/// An answer that is all reasoning says nothing, and one that had no room may say too little: that needs a word.
pub fn warn_about_the_end(outcome: &Outcome, answer: &Answer) {
    let cut = matches!(outcome.reason, Reason::Length | Reason::Context);
    if cut && answer.part() == Part::Reasoning && !answer.tokens().is_empty() {
        warn("the answer ended inside its reasoning; raise --max-tokens or --context, or give --think off");
    } else if outcome.reason == Reason::Context {
        warn("the answer ended where the context was full; raise --context");
    }
}

struct Question {
    answer: Answer,
    kept: usize,
}

fn ask(
    args: &RunArgs,
    config: &Config,
    engine: &mut Engine,
    seq: SeqId,
    manner: &Manner,
    prompt: &str,
) -> Result<Question, Failure> {
    let model = engine.model().clone();
    if !args.raw {
        let mut chat = Chat::new(model.tokenizer.clone(), seq, config.system.clone());
        let asked = chat.ask(template(&model)?, engine, prompt, manner);
        let asked = asked.map_err(|error| refused(&model, error))?;
        return Ok(Question { answer: asked.answer, kept: asked.kept });
    }
    let tokens = model.tokenizer.encode_start(prompt, true)?;
    let answer = Answer::new(&model.tokenizer, &tokens);
    let stop: Vec<u32> = model.tokenizer.eog().collect();
    let mut request = Request::new(tokens, manner.sampling.clone(), &stop);
    request.max_tokens = manner.max_tokens;
    engine.submit(seq, request)?;
    Ok(Question { answer, kept: 0 })
}

/// Why a question can't be asked.
pub fn refused(model: &Model, error: ChatError) -> Failure {
    match error {
        ChatError::Prompt(PromptError::Template(TemplateError::Cancelled)) => Failure::Interrupted,
        ChatError::Prompt(error) => Failure::failed(format!("{}: {error}", model.gguf.path().display())),
        error => error.into(),
    }
}

/// The model's chat template.
pub fn template(model: &Model) -> Result<&strata_model::Template, Failure> {
    model.template.as_ref().ok_or_else(|| {
        let file = model.gguf.path().display();
        Failure::failed(format!("{file}: has no chat template; give --raw to continue a text"))
    })
}

/// That there is a template, and that it can do what is asked.
fn check_template(model: &Model, config: &Config) -> Result<(), Failure> {
    let template = template(model)?;
    if config.think.is_some() && !template.source().contains("enable_thinking") {
        warn("--think changes nothing: the model's chat template has no such switch");
    }
    Ok(())
}

/// The prompt itself, or what standard input holds.
fn read_prompt(prompt: &str, raw: bool) -> Result<String, Failure> {
    let text = if prompt == "-" { read_stdin()? } else { prompt.to_owned() };
    let empty = if raw { text.is_empty() } else { text.trim().is_empty() };
    if empty {
        return Err(Failure::usage("the prompt is empty; give a text, or none at all for a chat"));
    }
    Ok(text)
}

/// All of standard input.
pub fn read_stdin() -> Result<String, Failure> {
    let mut bytes = Vec::new();
    std::io::stdin()
        .lock()
        .read_to_end(&mut bytes)
        .map_err(|error| Failure::failed(format!("cannot read standard input: {error}")))?;
    utf8(bytes, "standard input")
}

/// Bytes as text, or where they stop being text.
pub fn utf8(bytes: Vec<u8>, source: &str) -> Result<String, Failure> {
    String::from_utf8(bytes).map_err(|error| {
        let at = error.utf8_error().valid_up_to();
        let byte = error.as_bytes()[at];
        Failure::failed(format!("{source} is not UTF-8 text: byte 0x{byte:02X} at offset {at}"))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Oracle: white space is nothing to answer, but may be continued.
    #[test]
    fn empty_prompts_are_refused() {
        assert!(read_prompt("", true).is_err() && read_prompt(" \n", false).is_err());
        assert_eq!(read_prompt(" ", true).unwrap(), " ");
    }

    /// Oracle: the offset of the first byte that is no text.
    #[test]
    fn bad_bytes_are_located() {
        let message = utf8(b"ab\xffc".to_vec(), "standard input").unwrap_err().to_string();
        assert!(message.contains("0xFF") && message.contains("offset 2"), "{message}");
    }
}
