//! The vocabulary: every token's bytes and kind, and where special tokens occur in a text.
//!
//! Owns what a token *is*. Does not know merges or pre-tokenisers.
//!
//! Invariant: `bytes(id)` of a normal token are the bytes its text spells in the byte alphabet; special tokens are
//! their text as it stands.

use std::ops::Range;

use aho_corasick::{AhoCorasick, MatchKind};

use super::{TokenizerError, alphabet};

/// What a token is for, as `tokenizer.ggml.token_type` says.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TokenKind {
    /// A piece of text, found by merging.
    Normal,
    /// Stands for what the vocabulary can't express.
    Unknown,
    /// A mark outside the text (turns, end of text): read only where special tokens are allowed.
    Control,
    /// A piece of text that is always read as one token.
    UserDefined,
    /// A padding entry that never occurs.
    Unused,
    /// One byte, written `<0xNN>`.
    Byte,
}

impl TokenKind {
    pub(super) fn from_gguf(id: u32, code: i64) -> Result<Self, TokenizerError> {
        match code {
            // 0 is "undefined"; files without a better idea use it for plain tokens.
            0 | 1 => Ok(Self::Normal),
            2 => Ok(Self::Unknown),
            3 => Ok(Self::Control),
            4 => Ok(Self::UserDefined),
            5 => Ok(Self::Unused),
            6 => Ok(Self::Byte),
            code => Err(TokenizerError::Kind { id, code }),
        }
    }
}

/// Bytes and kinds by token id.
pub(super) struct TokenTable {
    kinds: Vec<TokenKind>,
    bytes: Vec<u8>,
    /// `ends[id]` is where token `id` ends in `bytes`.
    ends: Vec<usize>,
}

impl TokenTable {
    pub(super) fn new(texts: &[String], kinds: Vec<TokenKind>) -> Self {
        let mut bytes = Vec::with_capacity(texts.iter().map(String::len).sum());
        let mut ends = Vec::with_capacity(texts.len());
        for (text, &kind) in texts.iter().zip(&kinds) {
            append(text, kind, &mut bytes);
            ends.push(bytes.len());
        }
        Self { kinds, bytes, ends }
    }

    pub(super) fn len(&self) -> usize {
        self.kinds.len()
    }

    pub(super) fn kind(&self, id: u32) -> Option<TokenKind> {
        self.kinds.get(id as usize).copied()
    }

    pub(super) fn bytes(&self, id: u32) -> Option<&[u8]> {
        let end = *self.ends.get(id as usize)?;
        let start = if id == 0 { 0 } else { self.ends[id as usize - 1] };
        Some(&self.bytes[start..end])
    }
}

fn append(text: &str, kind: TokenKind, out: &mut Vec<u8>) {
    let start = out.len();
    match kind {
        TokenKind::Byte if named_byte(text).is_some() => out.extend(named_byte(text)),
        TokenKind::Normal => {
            for c in text.chars() {
                match alphabet::byte_of(c) {
                    Some(byte) => out.push(byte),
                    None => {
                        // Not in the alphabet: the entry is plain text.
                        out.truncate(start);
                        out.extend_from_slice(text.as_bytes());
                        return;
                    }
                }
            }
        }
        _ => out.extend_from_slice(text.as_bytes()),
    }
}

/// The byte that a token text like `<0x0A>` names.
pub(super) fn named_byte(text: &str) -> Option<u8> {
    let digits = text.strip_prefix("<0x")?.strip_suffix('>')?;
    (digits.len() == 2).then(|| u8::from_str_radix(digits, 16).ok()).flatten()
}

/// A stretch of text, or a special token in it.
pub(super) enum Segment {
    Text(Range<usize>),
    Special(u32, Range<usize>),
}

/// Finds special tokens in text: leftmost first, the longest of those that begin there.
pub(super) struct SpecialFinder {
    found: Option<(AhoCorasick, Vec<u32>)>,
}

impl SpecialFinder {
    pub(super) fn new(specials: impl Iterator<Item = (u32, String)>) -> Result<Self, TokenizerError> {
        let (ids, texts): (Vec<u32>, Vec<String>) = specials.filter(|(_, text)| !text.is_empty()).unzip();
        if ids.is_empty() {
            return Ok(Self { found: None });
        }
        let finder = AhoCorasick::builder()
            .match_kind(MatchKind::LeftmostLongest)
            .build(&texts)
            .map_err(|source| TokenizerError::Specials { source: Box::new(source) })?;
        Ok(Self { found: Some((finder, ids)) })
    }

    /// The special token that `text` as a whole is.
    pub(super) fn exact(&self, text: &str) -> Option<u32> {
        let (finder, ids) = self.found.as_ref()?;
        let m = finder.find(text)?;
        (m.range() == (0..text.len())).then(|| ids[m.pattern().as_usize()])
    }

    /// Calls `segment` with `text`'s special tokens and the non-empty stretches between them, in order.
    pub(super) fn segments(
        &self,
        text: &str,
        mut segment: impl FnMut(Segment) -> Result<(), TokenizerError>,
    ) -> Result<(), TokenizerError> {
        let mut done = 0;
        if let Some((finder, ids)) = &self.found {
            for m in finder.find_iter(text) {
                if m.start() > done {
                    segment(Segment::Text(done..m.start()))?;
                }
                segment(Segment::Special(ids[m.pattern().as_usize()], m.range()))?;
                done = m.end();
            }
        }
        if done < text.len() { segment(Segment::Text(done..text.len())) } else { Ok(()) }
    }
}
