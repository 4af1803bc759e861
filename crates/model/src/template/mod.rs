//! The chat template: messages to prompt text, by the Jinja program inside a GGUF.
//!
//! Templates are written for Jinja2 as Hugging Face's transformers sets it up, so this sets `minijinja` up the same
//! way: block lines leave no white space, loops can break, strings have Python's methods, values print as in Python
//! (`python`), and `raise_exception`, `strftime_now` and `tojson` exist. `{% generation %}` blocks are transparent.
//!
//! Templates come from downloaded files: how deep one may nest (`depth`) and the work one rendering may do are bounded, and
//! nothing outside the given values can be reached. Rendering has a thread of its own, whose stack is deep enough for values
//! nested as deeply as that work allows, and which is left behind when the caller no longer wants the prompt: one thing
//! is not bounded, lists that a template made for it doubles again and again.

mod depth;
mod message;
mod prompt;
mod python;

use std::panic::resume_unwind;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{RecvTimeoutError, sync_channel};
use std::thread;
use std::time::Duration;

use jiff::ZonedDateTime;
use jiff::fmt::strtime;
use minijinja::syntax::SyntaxConfig;
use minijinja::value::Value;
use minijinja::{Environment, Error, ErrorKind, State};
use serde_json::Map;
use strata_gguf::Metadata;

pub use message::{Content, FunctionCall, Message, ToolCall};
pub use prompt::PromptError;

/// The work one rendering may do: about two million instructions, and 64 bytes of text for each. Thousands of messages take less.
const FUEL: u64 = 2_000_000;

/// The stack of a rendering; what it doesn't use it doesn't have. A list in a list costs an instruction and a
/// half, so values nest less deeply than 4/3 million times, and each level has 200 bytes.
const STACK: usize = 256 << 20;

/// How often a caller that waits for a rendering looks whether it still should.
const LOOK: Duration = Duration::from_millis(20);

const NAME: &str = "chat template";

/// Why a template can't be compiled or rendered.
#[derive(Debug, thiserror::Error)]
pub enum TemplateError {
    /// A metadata key is of the wrong type.
    #[error(transparent)]
    Metadata(#[from] strata_gguf::Error),
    /// The template isn't valid Jinja, or uses what is not known here.
    #[error("chat template, line {line}: {reason}; the template in the file cannot be used")]
    Syntax {
        /// Line of the template.
        line: usize,
        /// What is wrong.
        reason: String,
    },
    /// The template itself refuses the conversation.
    #[error("the model's chat template refuses the conversation: {message} (template line {line})")]
    Raised {
        /// Line of the template.
        line: usize,
        /// The template's own words.
        message: String,
    },
    /// Something failed while rendering.
    #[error("chat template, line {line}: {reason}")]
    Render {
        /// Line of the template.
        line: usize,
        /// What failed.
        reason: String,
    },
    /// The template does more work than any conversation needs.
    #[error("chat template, line {line}: stopped, it takes too much work; the template may loop without end")]
    TooMuchWork {
        /// Line of the template.
        line: usize,
    },
    /// The system gives no thread to render on.
    #[error("chat template: the system refuses a thread to render it on: {0}")]
    Thread(std::io::Error),
    /// Nobody waits for the prompt any more.
    #[error("chat template: stopped while it was rendered")]
    Cancelled,
}

/// What a rendering depends on beside the messages.
#[derive(Debug, Clone, Default)]
pub struct RenderOptions {
    /// Ends the prompt with the beginning of an assistant turn.
    pub add_generation_prompt: bool,
    /// Whether the model should think; `None` leaves it to the template.
    pub enable_thinking: Option<bool>,
    /// The tools the model may call, in OpenAI's form.
    pub tools: Vec<serde_json::Value>,
    /// Further values the template may know (`reasoning_effort`, `documents`, ..). The fields above win.
    pub extra: Map<String, serde_json::Value>,
    /// The time that `strftime_now` tells; the local time now if absent.
    pub now: Option<ZonedDateTime>,
    /// Ends the wait for the rendering once it is set.
    pub cancel: Option<Arc<AtomicBool>>,
}

/// A compiled chat template.
pub struct Template {
    environment: Arc<Environment<'static>>,
    source: String,
    /// Texts of special tokens by their Hugging Face names (`bos_token`, ..).
    specials: Vec<(&'static str, String)>,
}

impl std::fmt::Debug for Template {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Template").field("bytes", &self.source.len()).finish_non_exhaustive()
    }
}

impl Template {
    /// The template in `tokenizer.chat_template`, or `None` if there is none (a base model).
    ///
    /// # Errors
    /// If it doesn't compile.
    pub fn from_metadata(metadata: &Metadata) -> Result<Option<Self>, TemplateError> {
        let Some(source) = metadata.opt_str("tokenizer.chat_template")? else { return Ok(None) };
        let tokens = metadata.opt_strs("tokenizer.ggml.tokens")?.unwrap_or_default();
        let mut specials = Vec::new();
        for (name, key) in [
            ("bos_token", "tokenizer.ggml.bos_token_id"),
            ("eos_token", "tokenizer.ggml.eos_token_id"),
            ("pad_token", "tokenizer.ggml.padding_token_id"),
            ("unk_token", "tokenizer.ggml.unknown_token_id"),
            ("sep_token", "tokenizer.ggml.seperator_token_id"),
            ("cls_token", "tokenizer.ggml.cls_token_id"),
            ("mask_token", "tokenizer.ggml.mask_token_id"),
        ] {
            let id = metadata.opt_u64(key)?.and_then(|id| usize::try_from(id).ok());
            specials.extend(id.and_then(|id| tokens.get(id)).map(|text| (name, text.clone())));
        }
        Self::new(source, specials).map(Some)
    }

    /// Compiles `source`. `specials` are the texts of special tokens under the names that templates use.
    ///
    /// # Errors
    /// If it isn't valid.
    pub fn new(source: &str, specials: Vec<(&'static str, String)>) -> Result<Self, TemplateError> {
        depth::check(source)?;
        let mut environment = Environment::new();
        environment.set_syntax(
            SyntaxConfig::builder()
                .trim_blocks(true)
                .lstrip_blocks(true)
                .build()
                .map_err(|e| explain(&e, true))?,
        );
        environment.set_auto_escape_callback(|_| minijinja::AutoEscape::None);
        environment.set_fuel(Some(FUEL));
        environment.set_unknown_method_callback(|state, value, method, args| {
            match (value.as_str(), method) {
                (Some(text), "title") if args.is_empty() => Ok(python::title(text).into()),
                _ => {
                    // These methods go through the whole value, which only the engine's own are charged for.
                    state.consume_fuel(value.len().unwrap_or_default() as u64 / 2)?;
                    minijinja_contrib::pycompat::unknown_method_callback(state, value, method, args)
                }
            }
        });
        environment.set_formatter(|out, state, value| {
            let written = match value.as_str() {
                Some(text) => out.write_str(text),
                None => out.write_str(&python::str_of(state, value)?),
            };
            written.map_err(|_| Error::new(ErrorKind::WriteFailure, "out of memory"))
        });
        environment.add_filter("tojson", python::tojson);
        environment.add_filter("string", |state: &mut State, value: &Value| -> Result<Value, Error> {
            if value.as_str().is_some() {
                return Ok(value.clone());
            }
            Ok(python::str_of(state, value)?.into())
        });
        environment.add_function(
            "raise_exception",
            |state: &mut State, message: &Value| -> Result<Value, Error> {
                let message = python::str_of(state, message)?;
                Err(Error::new(ErrorKind::InvalidOperation, message.clone()).with_source(Raised(message)))
            },
        );
        environment
            .add_template_owned(NAME, without_generation_marks(source))
            .map_err(|e| explain(&e, true))?;
        Ok(Self { environment: Arc::new(environment), source: source.to_owned(), specials })
    }

    /// The template's text.
    pub fn source(&self) -> &str {
        &self.source
    }

    /// The prompt for a conversation.
    ///
    /// # Errors
    /// If the template refuses the conversation or fails on it; the error names the template's line.
    pub fn render(&self, messages: &[Message], options: &RenderOptions) -> Result<String, TemplateError> {
        self.render_given(given(messages, options), options)
    }

    fn render_given(
        &self,
        given: Vec<(&str, Value)>,
        options: &RenderOptions,
    ) -> Result<String, TemplateError> {
        let mut values: Vec<(&str, Value)> = vec![("documents", Value::from(()))];
        values.extend(self.specials.iter().map(|(name, text)| (*name, Value::from(text.as_str()))));
        values.extend(given);
        let now = options.now.clone();
        let strftime_now = Value::from_function(move |format: &str| -> Result<String, Error> {
            let now = now.clone().unwrap_or_else(ZonedDateTime::now);
            strtime::format(format, &now).map_err(|e| {
                Error::new(ErrorKind::InvalidOperation, format!("strftime_now cannot write `{format}`: {e}"))
            })
        });
        values.extend([
            ("add_generation_prompt", options.add_generation_prompt.into()),
            ("strftime_now", strftime_now),
        ]);
        values.extend(options.enable_thinking.map(|think| ("enable_thinking", think.into())));
        let values = Value::from_pairs(values);
        let environment = Arc::clone(&self.environment);
        on_deep_stack(options.cancel.as_deref(), move || {
            let rendered = environment.get_template(NAME).and_then(|template| template.render(values));
            rendered.map_err(|e| explain(&e, false))
        })
    }
}

/// Does `work` in the caller's stead, on the caller's CPUs, and with a deeper stack.
fn on_deep_stack<T: Send + 'static>(
    cancel: Option<&AtomicBool>,
    work: impl FnOnce() -> Result<T, TemplateError> + Send + 'static,
) -> Result<T, TemplateError> {
    let (give, take) = sync_channel(1);
    let thread = thread::Builder::new().name("template".into()).stack_size(STACK);
    let thread = thread.spawn(move || drop(give.send(work()))).map_err(TemplateError::Thread)?;
    loop {
        match take.recv_timeout(LOOK) {
            Ok(done) => return done,
            Err(RecvTimeoutError::Timeout) => {
                if cancel.is_some_and(|cancel| cancel.load(Ordering::Relaxed)) {
                    return Err(TemplateError::Cancelled);
                }
            }
            Err(RecvTimeoutError::Disconnected) => match thread.join() {
                Err(panic) => resume_unwind(panic),
                Ok(()) => unreachable!("it sends before it ends"),
            },
        }
    }
}

/// What a client gives, by the names that templates know it under; of two of one name the later wins.
fn given<'o>(messages: &[Message], options: &'o RenderOptions) -> Vec<(&'o str, Value)> {
    use minijinja::value::Serde;
    let tools = if options.tools.is_empty() { Value::from(()) } else { Serde(&options.tools).into() };
    let extra = options.extra.iter().map(|(name, value)| (name.as_str(), Serde(value).into()));
    let messages = messages.iter().map(Message::for_template).collect();
    extra.chain([("messages", messages), ("tools", tools)]).collect()
}

/// Marks an error as the template's own.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
struct Raised(String);

/// `{% generation %}` only tells trainers which text is the model's; here it becomes a block that always runs, which
/// keeps the white space control of its tags.
fn without_generation_marks(source: &str) -> String {
    let mut out = String::with_capacity(source.len());
    let mut rest = source;
    while let Some(at) = rest.find("{%") {
        let (before, tag) = rest.split_at(at);
        out.push_str(before);
        let end = tag.find("%}").map_or(tag.len(), |end| end + 2);
        let (tag, after) = tag.split_at(end);
        let word = tag.trim_matches(|c: char| "{%-+}".contains(c) || c.is_whitespace());
        match word {
            "generation" => out.push_str(&tag.replace("generation", "if true")),
            "endgeneration" => out.push_str(&tag.replace("endgeneration", "endif")),
            _ => out.push_str(tag),
        }
        rest = after;
    }
    out.push_str(rest);
    out
}

fn explain(error: &Error, compiling: bool) -> TemplateError {
    let line = error.line().unwrap_or(0);
    let mut reason = error.detail().map_or_else(|| error.kind().to_string(), str::to_owned);
    let mut cause: Option<&(dyn std::error::Error + 'static)> = std::error::Error::source(error);
    while let Some(inner) = cause {
        if let Some(Raised(message)) = inner.downcast_ref() {
            return TemplateError::Raised { line, message: message.clone() };
        }
        if let Some(inner) = inner.downcast_ref::<Error>() {
            if inner.kind() == ErrorKind::OutOfFuel {
                return TemplateError::TooMuchWork { line };
            }
            reason = format!(
                "{reason}: {}",
                inner.detail().map_or_else(|| inner.kind().to_string(), str::to_owned)
            );
        }
        cause = inner.source();
    }
    match error.kind() {
        ErrorKind::OutOfFuel => TemplateError::TooMuchWork { line },
        _ if compiling => TemplateError::Syntax { line, reason },
        _ => TemplateError::Render { line, reason },
    }
}
