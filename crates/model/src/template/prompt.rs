//! A conversation as tokens: control tokens come from the template only, whatever the messages say.
//!
//! In what messages say, every control token's text is broken up by a mark before the template sees it. In the rendering
//! such a token can't be found, wherever the template has put it and whatever it has cut off; the marks go when the
//! text around them is encoded. Text without control tokens reaches the template as it is.

use std::borrow::Cow;

use serde_json::Value;

use super::{Content, Message, RenderOptions, Template, TemplateError};
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
        let mut messages = Cow::Borrowed(messages);
        let mut mark = None;
        if messages.iter().flat_map(texts).any(|text| tokenizer.has_control(text)) {
            // A text that holds all of them loses the first.
            let said = |mark: &char| messages.iter().flat_map(texts).any(|text| text.contains(*mark));
            let free = MARKS.into_iter().find(|mark| !said(mark)).unwrap_or(*MARKS.start());
            mark = Some(free);
            messages.to_mut().iter_mut().for_each(|message| {
                for text in texts_mut(message) {
                    *text = tokenizer.without_control(text, free);
                }
            });
        }
        let text = self.render(&messages, options)?;
        Ok(tokenizer.encode_marked(&text, mark)?)
    }
}

/// What a message says.
fn texts(message: &Message) -> impl Iterator<Item = &str> {
    let (whole, parts) = match &message.content {
        Some(Content::Text(text)) => (Some(text), None),
        Some(Content::Parts(parts)) => (None, Some(parts)),
        None => (None, None),
    };
    let parts = parts.into_iter().flatten().filter_map(|part| part.get("text")?.as_str());
    whole.into_iter().chain(&message.reasoning_content).map(String::as_str).chain(parts)
}

fn texts_mut(message: &mut Message) -> impl Iterator<Item = &mut String> {
    let (whole, parts) = match &mut message.content {
        Some(Content::Text(text)) => (Some(text), None),
        Some(Content::Parts(parts)) => (None, Some(parts)),
        None => (None, None),
    };
    let parts = parts.into_iter().flatten().filter_map(|part| match part.get_mut("text")? {
        Value::String(text) => Some(text),
        _ => None,
    });
    whole.into_iter().chain(&mut message.reasoning_content).chain(parts)
}
