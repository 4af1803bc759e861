//! `strata run` without a prompt: a conversation in the terminal.
//!
//! Lines come from an editor when somebody types, and plainly from a pipe otherwise. A message may take several lines: see
//! [`is_complete`].

use std::borrow::Cow;
use std::io::{BufRead, ErrorKind, IsTerminal};
use std::path::PathBuf;

use rustyline::completion::Completer;
use rustyline::error::ReadlineError;
use rustyline::highlight::Highlighter;
use rustyline::hint::Hinter;
use rustyline::history::FileHistory;
use rustyline::validate::{ValidationContext, ValidationResult, Validator};
use rustyline::{Context, Editor, Helper};
use strata_engine::chat::{Chat, ChatError, Manner};
use strata_engine::{Engine, EngineError, Reason, SeqId};

use super::run::{refused, template, utf8, warn_about_the_end};
use crate::config::{Config, Environment, Switch};
use crate::delivery::{Printer, deliver};
use crate::failure::{Failure, say, warn};
use crate::interrupt;
use crate::output::print;

const HELP: &str = "  /help            this
  /reset           forget the conversation (the system message stays)
  /think on|off    whether the model thinks before it answers
  Ctrl-C           stops an answer, or empties the line
  Ctrl-D           leaves
Several lines: end a line with \\, or put the text between lines of \"\"\" or ```; pasted lines stay together.
";
const COMMANDS: [&str; 4] = ["/help", "/reset", "/think on", "/think off"];

pub fn run(
    engine: &mut Engine,
    seq: SeqId,
    mut manner: Manner,
    timing: bool,
    config: &Config,
    environment: &Environment,
) -> Result<(), Failure> {
    let model = engine.model().clone();
    let template = template(&model)?;
    let mut chat = Chat::new(model.tokenizer.clone(), seq, config.system.clone());
    let mut lines = Lines::open(environment, config)?;
    let typed = lines.is_typed();
    if typed && !config.quiet {
        let name = model.gguf.metadata().opt_str("general.name")?.unwrap_or("this model");
        print(&format!("You are talking to {}. /help shows what else can be done.\n", name.escape_debug()))?;
    }
    if typed {
        manner.cancel = Some(interrupt::flag());
    }
    loop {
        // Through a pipe every signal ends the program, so none is forgotten.
        if typed {
            interrupt::clear();
        }
        let text = match lines.next()? {
            Input::End => return Ok(()),
            Input::Nothing => continue,
            Input::Text(text) => text,
        };
        match Said::of(&text) {
            Said::Nothing => {}
            Said::Help => print(HELP)?,
            Said::Reset => chat.reset(),
            Said::Think(switch) => {
                manner.think = Some(switch.is_on());
                if !template.source().contains("enable_thinking") {
                    warn("/think changes nothing: the model's chat template has no such switch");
                }
            }
            Said::Unknown(command) => {
                warn(format_args!("{command} is no command; /help shows those there are"))
            }
            Said::Question(question) => {
                let mut ask = || chat.ask(template, engine, question, &manner);
                let asked = if typed { ask() } else { interrupt::or_end(ask) };
                let mut asked = match asked {
                    Ok(asked) => asked,
                    Err(ChatError::Engine(error @ EngineError::TooLong { .. })) if typed => {
                        say(format_args!("{error}; or /reset begins anew"));
                        continue;
                    }
                    Err(error @ ChatError::Prompt(_)) if typed => {
                        match refused(&model, error) {
                            Failure::Interrupted => {}
                            failure => say(failure),
                        }
                        continue;
                    }
                    Err(error) => return Err(refused(&model, error)),
                };
                interrupt::pass_on();
                let mut printer = Printer::new(environment);
                let delivered =
                    deliver(engine, &mut asked.answer, &mut |part, text| printer.show(part, text));
                if !matches!(delivered, Err(Failure::PipeClosed)) {
                    printer.finish()?;
                }
                let outcome = delivered?;
                chat.answered(&asked.answer);
                if !config.quiet {
                    say(outcome.speed(asked.kept, asked.answer.tokens().len()));
                }
                if timing {
                    outcome.timing().lines().for_each(say);
                }
                match outcome.reason {
                    Reason::Cancelled if !typed => return Err(Failure::Interrupted),
                    Reason::Context => {
                        say("the context is full; /reset begins anew, --context N makes more room")
                    }
                    _ => warn_about_the_end(&outcome, &asked.answer),
                }
            }
        }
    }
}

/// What a message means.
#[derive(Debug, PartialEq, Eq)]
enum Said<'t> {
    Nothing,
    Help,
    Reset,
    Think(Switch),
    Unknown(&'t str),
    Question(&'t str),
}

impl Said<'_> {
    fn of(text: &str) -> Said<'_> {
        let trimmed = text.trim();
        let mut words = trimmed.split_whitespace();
        let Some(first) = words.next() else { return Said::Nothing };
        let is_command = !trimmed.contains('\n')
            && first.strip_prefix('/').is_some_and(|name| name.chars().all(|c| c.is_ascii_lowercase()));
        if !is_command {
            return Said::Question(text);
        }
        match (first, words.next().map(str::parse), words.next()) {
            ("/help", None, None) => Said::Help,
            ("/reset", None, None) => Said::Reset,
            ("/think", Some(Ok(switch)), None) => Said::Think(switch),
            _ => Said::Unknown(trimmed),
        }
    }
}

// ---- lines

/// Whether a message ends here. It doesn't behind a backslash, nor inside a fence: a line that begins with ``` opens or
/// closes one, and so does `"""`.
fn is_complete(text: &str) -> bool {
    if text.ends_with('\\') {
        return false;
    }
    if let Some(quoted) = text.trim_start().strip_prefix("\"\"\"") {
        return quoted.trim_end().ends_with("\"\"\"");
    }
    text.lines().filter(|line| line.trim_start().starts_with("```")).count().is_multiple_of(2)
}

/// The message without what only told where it ends: backslashes at line ends, and fences of `"""`. Those of ``` stay, the
/// model understands them.
fn message(text: &str) -> Cow<'_, str> {
    let quoted = text.trim().strip_prefix("\"\"\"").and_then(|rest| rest.strip_suffix("\"\"\""));
    if let Some(quoted) = quoted {
        return quoted.trim_matches('\n').into();
    }
    if text.contains("\\\n") { text.replace("\\\n", "\n").into() } else { text.into() }
}

enum Input {
    Text(String),
    /// An emptied line.
    Nothing,
    End,
}

/// Where messages come from.
enum Lines {
    Typed { editor: Box<Editor<Typing, FileHistory>>, history: Option<PathBuf> },
    Piped,
}

impl Lines {
    fn open(environment: &Environment, config: &Config) -> Result<Lines, Failure> {
        if !std::io::stdin().is_terminal() {
            return Ok(Lines::Piped);
        }
        let failed =
            |error: ReadlineError| Failure::failed(format!("cannot read from the terminal: {error}"));
        interrupt::keep_terminal();
        let settings = rustyline::Config::builder().auto_add_history(true).max_history_size(1000);
        let settings = settings.map_err(failed)?.build();
        let mut editor = Editor::with_config(settings).map_err(failed)?;
        editor.set_helper(Some(Typing));
        let history = environment.history_file();
        if let Some(path) = history.as_ref().filter(|path| path.exists())
            && let Err(error) = editor.load_history(path)
            && !config.quiet
        {
            warn(format_args!("{}: what was typed before cannot be read: {error}", path.display()));
        }
        Ok(Lines::Typed { editor: Box::new(editor), history })
    }

    fn is_typed(&self) -> bool {
        matches!(self, Lines::Typed { .. })
    }

    fn next(&mut self) -> Result<Input, Failure> {
        match self {
            Lines::Typed { editor, .. } => match editor.readline("> ") {
                Ok(text) => Ok(Input::Text(message(&text).into_owned())),
                Err(ReadlineError::Interrupted) => Ok(Input::Nothing),
                Err(ReadlineError::Eof) => Ok(Input::End),
                // The editor gives the line up, and the next one is as good as any.
                Err(ReadlineError::Io(error)) if error.kind() == ErrorKind::InvalidData => {
                    warn("what was typed is not UTF-8 text and is forgotten");
                    Ok(Input::Nothing)
                }
                Err(error) => Err(Failure::failed(format!("cannot read from the terminal: {error}"))),
            },
            Lines::Piped => interrupt::or_end(|| piped(&mut std::io::stdin().lock())),
        }
    }
}

impl Drop for Lines {
    /// Remembers what was typed, however the chat ends.
    fn drop(&mut self) {
        let Lines::Typed { editor, history: Some(path) } = self else { return };
        let folder = path.parent().map_or(Ok(()), std::fs::create_dir_all);
        let saved = folder.map_err(ReadlineError::from).and_then(|()| editor.append_history(path));
        if let Err(error) = saved {
            warn(format_args!("{}: what was typed cannot be kept: {error}", path.display()));
        }
    }
}

/// The next message of a pipe.
fn piped(input: &mut dyn BufRead) -> Result<Input, Failure> {
    let mut bytes = Vec::new();
    loop {
        let read = input
            .read_until(b'\n', &mut bytes)
            .map_err(|error| Failure::failed(format!("cannot read standard input: {error}")))?;
        if bytes.is_empty() {
            return Ok(Input::End);
        }
        let text = utf8(bytes, "standard input")?;
        let line =
            text.strip_suffix('\n').map_or(text.as_str(), |line| line.strip_suffix('\r').unwrap_or(line));
        if read == 0 || is_complete(line) {
            return Ok(Input::Text(message(line).into_owned()));
        }
        bytes = text.into_bytes();
    }
}

/// What the editor knows about messages.
struct Typing;

impl Helper for Typing {}
impl Highlighter for Typing {}

impl Hinter for Typing {
    type Hint = String;
}

impl Completer for Typing {
    type Candidate = String;

    fn complete(
        &self,
        line: &str,
        position: usize,
        _: &Context<'_>,
    ) -> rustyline::Result<(usize, Vec<String>)> {
        let typed = &line[..position];
        let fitting = COMMANDS.iter().filter(|command| typed.starts_with('/') && command.starts_with(typed));
        Ok((0, fitting.map(|command| (*command).to_owned()).collect()))
    }
}

impl Validator for Typing {
    fn validate(&self, context: &mut ValidationContext<'_>) -> rustyline::Result<ValidationResult> {
        let complete = is_complete(context.input());
        Ok(if complete { ValidationResult::Valid(None) } else { ValidationResult::Incomplete })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn messages(mut input: &[u8]) -> Vec<String> {
        let mut messages = Vec::new();
        while let Input::Text(text) = piped(&mut input).unwrap() {
            messages.push(text);
        }
        messages
    }

    /// Oracle: the help text's rules for several lines.
    #[test]
    fn messages_may_take_several_lines() {
        assert_eq!(messages(b"one\ntwo\r\nthree"), ["one", "two", "three"]);
        assert_eq!(messages(b"one\\\ntwo\nthree\n"), ["one\ntwo", "three"]);
        assert_eq!(messages(b"\"\"\"\none\n\ntwo\n\"\"\"\nthree\n"), ["one\n\ntwo", "three"]);
        assert_eq!(messages(b"look:\n"), ["look:"]);
        assert_eq!(messages(b"```rust\nfn x()\n```\nnext\n"), ["```rust\nfn x()\n```", "next"]);
        assert_eq!(messages(b"```\nnever closed"), ["```\nnever closed"]);
    }

    /// Oracle: the help text's commands; a path or a fraction is no command.
    #[test]
    fn commands_are_told_from_questions() {
        assert_eq!(Said::of(" /help "), Said::Help);
        assert_eq!(Said::of("/reset"), Said::Reset);
        assert_eq!(Said::of("/think off"), Said::Think(Switch::Off));
        assert_eq!(Said::of("/think"), Said::Unknown("/think"));
        assert_eq!(Said::of("/quit now"), Said::Unknown("/quit now"));
        assert_eq!(Said::of("/etc/fstab is what?"), Said::Question("/etc/fstab is what?"));
        assert_eq!(Said::of("  \n"), Said::Nothing);
        assert_eq!(Said::of("hello"), Said::Question("hello"));
    }

    /// Oracle: the offset of the byte.
    #[test]
    fn a_pipe_must_be_text() {
        let message =
            piped(&mut &b"ab\xff\n"[..]).err().map(|failure| failure.to_string()).unwrap_or_default();
        assert!(message.contains("offset 2"), "{message}");
    }
}
