//! A conversation: messages in, a prompt for the engine out, and the answer's tokens back into messages.
//!
//! Owns the messages, how they become tokens (the model's chat template), how much of them the sequence holds already, and
//! where reasoning ends and the answer begins. Does not step the engine, and knows no terminal and no client.
//!
//! Templates may leave the reasoning of earlier turns out, or write a past answer otherwise than it was generated; then what
//! the sequence holds is no prefix of the next prompt. So each prompt keeps a checkpoint where the user's turn ends, the
//! latest place that any next prompt shares, and [`Engine::rewind`] goes back to it.
//!
//! Invariant: messages alternate; a question whose answer never began is not among them.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use strata_model::template::{Message, PromptError, RenderOptions, Template};
use strata_model::tokenizer::{DecodeStream, Tokenizer, TokenizerError};

use crate::engine::Engine;
use crate::error::EngineError;
use crate::event::{Request, SeqId};
use crate::sampling::Sampling;
use crate::sequence::common_prefix;

/// Why a conversation can't go on.
#[derive(Debug, thiserror::Error)]
pub enum ChatError {
    /// The messages can't become a prompt.
    #[error(transparent)]
    Prompt(#[from] PromptError),
    /// A token can't become text.
    #[error(transparent)]
    Tokenizer(#[from] TokenizerError),
    /// The engine refuses the prompt.
    #[error(transparent)]
    Engine(#[from] EngineError),
}

/// What a piece of an answer is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Part {
    /// Thinking, between the model's marks for it.
    Reasoning,
    /// The answer itself.
    Text,
}

/// An answer as it comes in.
pub struct Answer {
    stream: DecodeStream,
    /// The tokens that begin and end reasoning, where the vocabulary has them.
    marks: Option<(u32, u32)>,
    part: Part,
    /// Nothing but line breaks has come of the current part.
    fresh: bool,
    reasoning: String,
    text: String,
    tokens: Vec<u32>,
}

impl Answer {
    /// The answer to a prompt of these tokens: it begins inside reasoning if the prompt does not end it.
    pub fn new(tokenizer: &Arc<Tokenizer>, prompt: &[u32]) -> Answer {
        let marks = tokenizer.special("<think>").zip(tokenizer.special("</think>"));
        let last = marks.and_then(|(open, close)| prompt.iter().rfind(|&&id| id == open || id == close));
        let part =
            if last.is_some() && last == marks.map(|m| m.0).as_ref() { Part::Reasoning } else { Part::Text };
        Answer {
            stream: DecodeStream::new(Arc::clone(tokenizer), true),
            marks,
            part,
            fresh: true,
            reasoning: String::new(),
            text: String::new(),
            tokens: Vec::new(),
        }
    }

    /// Takes the next token and returns the text that is complete now, often none.
    ///
    /// # Errors
    /// If the token is not in the vocabulary.
    pub fn push(&mut self, token: u32) -> Result<(Part, String), TokenizerError> {
        self.tokens.push(token);
        match self.marks {
            Some((open, _)) if token == open => Ok(self.turn(Part::Reasoning)),
            Some((_, close)) if token == close => Ok(self.turn(Part::Text)),
            _ => {
                let text = self.stream.push(token)?;
                Ok((self.part, self.keep(text)))
            }
        }
    }

    /// Ends the answer: what was held back of a character that stays incomplete.
    pub fn finish(&mut self) -> (Part, String) {
        let rest = self.stream.flush();
        (self.part, self.keep(rest))
    }

    fn turn(&mut self, to: Part) -> (Part, String) {
        let rest = self.finish();
        self.part = to;
        self.fresh = true;
        rest
    }

    /// Line breaks between a mark and what follows it belong to neither part.
    fn keep(&mut self, mut text: String) -> String {
        if self.fresh {
            text.drain(..text.len() - text.trim_start_matches('\n').len());
            self.fresh = text.is_empty();
        }
        match self.part {
            Part::Reasoning => self.reasoning.push_str(&text),
            Part::Text => self.text.push_str(&text),
        }
        text
    }

    /// The thinking so far.
    pub fn reasoning(&self) -> &str {
        self.reasoning.trim_end()
    }

    /// The answer so far.
    pub fn text(&self) -> &str {
        &self.text
    }

    /// The tokens so far.
    pub fn tokens(&self) -> &[u32] {
        &self.tokens
    }

    /// What is coming now.
    pub fn part(&self) -> Part {
        self.part
    }
}

/// How answers are made.
#[derive(Debug, Clone)]
pub struct Manner {
    /// How tokens are chosen.
    pub sampling: Sampling,
    /// Tokens of an answer at most.
    pub max_tokens: Option<usize>,
    /// Whether the model thinks first; the template's own choice when open.
    pub think: Option<bool>,
    /// Ends the work on a prompt that the template is still writing, once it is set.
    pub cancel: Option<Arc<AtomicBool>>,
}

/// A question that the engine is working on.
pub struct Asked {
    /// The answer, empty yet.
    pub answer: Answer,
    /// Tokens of the prompt that the sequence held already.
    pub kept: usize,
    /// Tokens that have to be read.
    pub new: usize,
}

/// A conversation in one sequence.
pub struct Chat {
    tokenizer: Arc<Tokenizer>,
    seq: SeqId,
    system: Option<String>,
    messages: Vec<Message>,
}

impl Chat {
    /// An empty conversation in `seq`, which is this conversation's alone.
    pub fn new(tokenizer: Arc<Tokenizer>, seq: SeqId, system: Option<String>) -> Chat {
        let mut chat = Chat { tokenizer, seq, system, messages: Vec::new() };
        chat.reset();
        chat
    }

    /// Forgets everything but the system message.
    pub fn reset(&mut self) {
        self.messages = self.system.iter().map(|system| Message::text("system", system)).collect();
    }

    /// Submits what the user says. On an error the conversation is what it was.
    ///
    /// # Errors
    /// If the template refuses, or the prompt doesn't fit the context.
    pub fn ask(
        &mut self,
        template: &Template,
        engine: &mut Engine,
        text: &str,
        manner: &Manner,
    ) -> Result<Asked, ChatError> {
        self.messages.push(Message::text("user", text));
        let asked = self.submit(template, engine, manner);
        if asked.is_err() {
            self.messages.pop();
        }
        asked
    }

    fn submit(&self, template: &Template, engine: &mut Engine, manner: &Manner) -> Result<Asked, ChatError> {
        let render = |add_generation_prompt| -> Result<Vec<u32>, ChatError> {
            let options = RenderOptions {
                add_generation_prompt,
                enable_thinking: manner.think,
                cancel: manner.cancel.clone(),
                ..RenderOptions::default()
            };
            Ok(template.prompt(&self.messages, &options, &self.tokenizer)?)
        };
        let prompt = render(true)?;
        let shared = common_prefix(&render(false)?, &prompt);
        let answer = Answer::new(&self.tokenizer, &prompt);
        let kept = engine.rewind(self.seq, &prompt)?;
        let stop: Vec<u32> = self.tokenizer.eog().collect();
        let mut request = Request::new(prompt[kept..].to_vec(), manner.sampling.clone(), &stop);
        request.max_tokens = manner.max_tokens;
        request.checkpoints = vec![shared];
        engine.submit(self.seq, request)?;
        Ok(Asked { answer, kept, new: prompt.len() - kept })
    }

    /// Takes the answer, complete or cut short, into the conversation. One without any token takes its question with it.
    pub fn answered(&mut self, answer: &Answer) {
        if answer.tokens().is_empty() {
            self.messages.pop();
            return;
        }
        let reasoning = answer.reasoning();
        let mut message = Message::text("assistant", answer.text());
        message.reasoning_content = (!reasoning.is_empty()).then(|| reasoning.to_owned());
        self.messages.push(message);
    }
}
