//! A conversation as tokens: control tokens come from the template only, whatever the messages say.
//!
//! In every text that a client gives, messages, calls and tools alike, control tokens are broken up by a mark before the
//! template sees them, and so are the parts of one with which a text begins or ends. In the rendering such a token can't be
//! found, wherever the template has put the text, what it has trimmed of it and what it has joined it to; the marks go when
//! the text around them is encoded. Other text reaches the template as it is.

use std::collections::BTreeSet;

use minijinja::value::{Value, ValueKind};

use super::{Message, RenderOptions, Template, TemplateError, given};
use crate::tokenizer::{Tokenizer, TokenizerError};

/// Why a conversation can't become tokens.
#[derive(Debug, thiserror::Error)]
pub enum PromptError {
    /// The template refuses the messages.
    #[error(transparent)]
    Template(#[from] TemplateError),
    /// The text can't become tokens.
    #[error(transparent)]
    Tokenizer(#[from] TokenizerError),
}

/// Characters that Unicode keeps free for use inside a program.
const MARKS: std::ops::RangeInclusive<char> = '\u{FDD0}'..='\u{FDEF}';

impl Template {
    /// The tokens of the prompt for a conversation, as a sequence begins.
    ///
    /// # Errors
    /// As [`Template::render`] and [`Tokenizer::encode`].
    pub fn prompt(
        &self,
        messages: &[Message],
        options: &RenderOptions,
        tokenizer: &Tokenizer,
    ) -> Result<Vec<u32>, PromptError> {
        let mut given = given(messages, options);
        let mut said = BTreeSet::new();
        for (_, value) in &given {
            for_texts(value, &mut |text| said.extend(text.chars().filter(|c| MARKS.contains(c))));
        }
        // A conversation that holds all of them loses the first.
        let mark = MARKS.into_iter().find(|mark| !said.contains(mark)).unwrap_or(*MARKS.start());
        for (_, value) in &mut given {
            *value = with_texts(value, &|text| tokenizer.without_control(text, mark));
        }
        let text = self.render_given(given, options)?;
        Ok(tokenizer.encode_marked(&text, mark)?)
    }
}

/// Calls `f` with every text of a value, keys of objects too.
fn for_texts(value: &Value, f: &mut impl FnMut(&str)) {
    match value.kind() {
        ValueKind::String => f(value.as_str().unwrap_or_default()),
        ValueKind::Seq => value.try_iter().into_iter().flatten().for_each(|part| for_texts(&part, f)),
        ValueKind::Map => value.try_iter().into_iter().flatten().for_each(|key| {
            for_texts(&key, f);
            for_texts(&value.get_item(&key).unwrap_or_default(), f);
        }),
        _ => {}
    }
}

/// The value with `f` of every text, keys of objects too.
fn with_texts(value: &Value, f: &impl Fn(&str) -> String) -> Value {
    let parts = value.try_iter().into_iter().flatten();
    match value.kind() {
        ValueKind::String => f(value.as_str().unwrap_or_default()).into(),
        ValueKind::Seq => parts.map(|part| with_texts(&part, f)).collect(),
        ValueKind::Map => Value::from_pairs(
            parts.map(|key| (with_texts(&key, f), with_texts(&value.get_item(&key).unwrap_or_default(), f))),
        ),
        _ => value.clone(),
    }
}
