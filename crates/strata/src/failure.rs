//! How the program ends: one sentence on standard error, and an exit code.
//!
//! Every command returns a [`Failure`] or nothing. What an error says is the library's that made it; its message is
//! complete, so sources are not printed behind it.

use std::error::Error;
use std::fmt;
use std::io::Write;

use strata_model::ModelError;

use crate::interrupt;

/// Exit codes, as `--help` documents them.
pub const FAILED: u8 = 1;
pub const USAGE: u8 = 2;
pub const CHANGED: u8 = strata_gguf::sigbus::EXIT_CODE as u8;

/// Why a command did not do what was asked.
#[derive(Debug)]
pub enum Failure {
    /// Flags, variables or the configuration file make no sense.
    Usage(String),
    /// The work could not be done.
    Failed(Box<dyn Error + Send + Sync>),
    /// A file of the model is not what it was when it was opened.
    Changed(Box<dyn Error + Send + Sync>),
    /// Somebody pressed Ctrl-C, or sent another signal that ends programs.
    Interrupted,
    /// The reader of standard output has gone: nobody is left to tell anything.
    PipeClosed,
}

impl Failure {
    pub fn usage(message: impl Into<String>) -> Failure {
        Failure::Usage(message.into())
    }

    pub fn failed(message: impl Into<String>) -> Failure {
        Failure::Failed(message.into().into())
    }

    pub fn code(&self) -> u8 {
        match self {
            Failure::Usage(_) => USAGE,
            Failure::Failed(_) => FAILED,
            Failure::Changed(_) => CHANGED,
            Failure::Interrupted => interrupt::code(),
            Failure::PipeClosed => 0,
        }
    }
}

impl<E: Error + Send + Sync + 'static> From<E> for Failure {
    fn from(error: E) -> Failure {
        let error = Box::new(error);
        if tells_of_change(&*error) { Failure::Changed(error) } else { Failure::Failed(error) }
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Failure::Usage(message) => f.write_str(message),
            Failure::Failed(error) => error.fmt(f),
            Failure::Changed(error) => error.fmt(f),
            Failure::Interrupted => f.write_str("interrupted"),
            Failure::PipeClosed => f.write_str("the reader of the output has gone"),
        }
    }
}

/// Whether an error says that a file is not what it was. What happens to a model in use is found by looking at it again;
/// this is for files that change while they are opened.
fn tells_of_change(error: &(dyn Error + 'static)) -> bool {
    let file = error.downcast_ref::<strata_gguf::Error>().or_else(|| match error.downcast_ref()? {
        ModelError::Gguf(error) => Some(error),
        _ => None,
    });
    matches!(file, Some(strata_gguf::Error::Changed { .. }))
}

/// Says a sentence on standard error, on one line; nothing in it (a path, say) steers the terminal. That nobody may be there to read it is no failure.
pub fn say(sentence: impl fmt::Display) {
    let line = sentence.to_string().replace(['\n', '\r'], " ").replace(|c: char| c.is_control(), "?");
    let _ = writeln!(std::io::stderr(), "strata: {line}");
}

/// Says something that is odd but not fatal.
pub fn warn(sentence: impl fmt::Display) {
    say(format_args!("warning: {sentence}"));
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Oracle: the documented exit codes.
    #[test]
    fn codes_are_as_documented() {
        let changed = || strata_gguf::Error::Changed { file: "m.gguf".into(), what: "became shorter" };
        assert_eq!(Failure::from(changed()).code(), 74);
        assert_eq!(Failure::from(ModelError::Gguf(changed())).code(), 74);
        let missing = strata_gguf::Error::MissingKey { file: "m.gguf".into(), key: "k".into() };
        assert_eq!(Failure::from(missing).code(), 1);
        assert_eq!(Failure::usage("x").code(), 2);
        assert_eq!(Failure::from(std::io::Error::other("x")).code(), 1);
        assert_eq!(Failure::Interrupted.code(), 130);
        assert_eq!(Failure::PipeClosed.code(), 0);
    }
}
