//! Text out of token bytes, as it becomes complete.
//!
//! A token may end inside a character. The stream holds back the incomplete tail (at most three bytes) and never
//! shows half a character; bytes that can't become valid any more turn into U+FFFD at once.
//!
//! Invariant: what `push` and `flush` return, joined, equals the lossy decoding of all bytes together.

use std::sync::Arc;

use super::{Tokenizer, TokenizerError};

/// UTF-8 decoding of a byte stream that may pause anywhere.
#[derive(Debug, Default, Clone)]
pub struct Utf8Stream {
    /// The beginning of a character that isn't complete yet.
    tail: Vec<u8>,
}

impl Utf8Stream {
    /// Takes the next bytes and returns the text that is complete now.
    pub fn push(&mut self, bytes: &[u8]) -> String {
        self.tail.extend_from_slice(bytes);
        let mut text = String::with_capacity(self.tail.len());
        let mut kept = 0;
        for chunk in self.tail.utf8_chunks() {
            text.push_str(chunk.valid());
            kept += chunk.valid().len();
            let broken = chunk.invalid();
            let at_the_end = kept + broken.len() == self.tail.len();
            if at_the_end && may_continue(broken) {
                break;
            }
            if !broken.is_empty() {
                text.push(char::REPLACEMENT_CHARACTER);
                kept += broken.len();
            }
        }
        self.tail.drain(..kept);
        text
    }

    /// Ends the stream: U+FFFD if it stops inside a character, else nothing.
    pub fn flush(&mut self) -> String {
        let broken = !self.tail.is_empty();
        self.tail.clear();
        if broken { char::REPLACEMENT_CHARACTER.to_string() } else { String::new() }
    }
}

/// Whether more bytes could turn `broken` into a character.
fn may_continue(broken: &[u8]) -> bool {
    std::str::from_utf8(broken).is_err_and(|e| e.error_len().is_none())
}

/// Decodes one sequence's tokens as they are chosen.
#[derive(Clone)]
pub struct DecodeStream {
    tokenizer: Arc<Tokenizer>,
    utf8: Utf8Stream,
    skip_control: bool,
}

impl DecodeStream {
    /// A stream over `tokenizer`'s tokens. With `skip_control`, control tokens (turn marks, end of text) leave no
    /// text; otherwise they show as they are written in the vocabulary.
    pub fn new(tokenizer: Arc<Tokenizer>, skip_control: bool) -> Self {
        Self { tokenizer, utf8: Utf8Stream::default(), skip_control }
    }

    /// Takes the next token and returns the text that is complete now, often none.
    ///
    /// # Errors
    /// If `id` is not in the vocabulary; the stream is unchanged.
    pub fn push(&mut self, id: u32) -> Result<String, TokenizerError> {
        let bytes = self.tokenizer.token_bytes(id)?;
        if self.skip_control && self.tokenizer.is_control(id) {
            return Ok(String::new());
        }
        Ok(self.utf8.push(bytes))
    }

    /// Ends the stream: U+FFFD for a character that stays incomplete, else nothing.
    pub fn flush(&mut self) -> String {
        self.utf8.flush()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        /// Oracle: the standard library's lossy decoding of the whole; any cut into pushes gives the same text, and
        /// no push shows a replacement for bytes that a later push completes.
        #[test]
        fn equals_lossy_decoding(
            parts in prop::collection::vec(
                prop_oneof![
                    prop::collection::vec(any::<u8>(), 0..5),
                    "\\PC{1,3}".prop_map(String::into_bytes),
                    ("\\PC", 0..4usize).prop_map(|(s, n)| s.as_bytes()[..n.min(s.len())].to_vec()),
                ],
                0..12,
            ),
        ) {
            let all = parts.concat();
            let mut stream = Utf8Stream::default();
            let mut text: String = parts.iter().map(|p| stream.push(p)).collect();
            text.push_str(&stream.flush());
            prop_assert_eq!(&text, &String::from_utf8_lossy(&all).into_owned());

            let mut stream = Utf8Stream::default();
            let mut single: String = all.iter().map(|&b| stream.push(&[b])).collect();
            single.push_str(&stream.flush());
            prop_assert_eq!(single, text);
        }
    }

    /// Oracle: the definition.
    #[test]
    fn holds_back_an_incomplete_character() {
        let mut stream = Utf8Stream::default();
        let snowman = "☃".as_bytes();
        assert_eq!(stream.push(&snowman[..1]), "");
        assert_eq!(stream.push(&snowman[1..2]), "");
        assert_eq!(stream.push(&snowman[2..]), "☃");
        assert_eq!(stream.flush(), "");
        assert_eq!(stream.push(&snowman[..2]), "");
        assert_eq!(stream.flush(), "\u{fffd}");
        assert_eq!(stream.flush(), "");
    }
}
