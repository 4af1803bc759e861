//! Text to token ids and back, from the vocabulary inside a GGUF.
//!
//! Byte-level BPE: special tokens are cut out first, the rest is normalised (where the tokenizer family does so), cut
//! into pieces by the pre-tokeniser (`pre`), spelled in the byte alphabet (`alphabet`) and merged by the `tokenizers`
//! crate's BPE. Cutting is done here because the crate's own pipeline can't ignore control tokens per call, and its
//! backtracking patterns silently stop cutting inside a run of a million spaces.
//!
//! Invariant: encoding loses nothing. Either the ids decode to the (normalised) text, or there is an error.

mod alphabet;
mod pre;
mod stream;
mod vocabulary;

use std::borrow::Cow;
use std::collections::BTreeSet;

use ahash::AHashMap;
use strata_gguf::Metadata;
use tokenizers::Model as _;
use tokenizers::models::bpe::BPE;
use unicode_normalization_alignments::{IsNormalized, UnicodeNormalization, is_nfc_quick};

use crate::warning::Warning;
use pre::PreTokenizer;
use vocabulary::{Segment, SpecialFinder, TokenTable, named_byte};

pub use stream::{DecodeStream, Utf8Stream};
pub use vocabulary::TokenKind;

/// Why a tokenizer can't be built or used.
#[derive(Debug, thiserror::Error)]
pub enum TokenizerError {
    /// A metadata key is missing or of another type.
    #[error(transparent)]
    Metadata(#[from] strata_gguf::Error),
    /// The vocabulary isn't byte-level BPE.
    #[error(
        "tokenizer.ggml.model is `{found}`, but only byte-level BPE vocabularies (`gpt2`) can be read; use a model with one"
    )]
    Algorithm {
        /// The name in the file.
        found: String,
    },
    /// The pre-tokeniser isn't in the table.
    #[error(
        "tokenizer.ggml.pre is `{name}`, a pre-tokeniser that is not known here (known: {known}); guessing one would give other tokens"
    )]
    UnknownPre {
        /// The name in the file.
        name: String,
        /// The names in the table.
        known: String,
    },
    /// A pattern of the table doesn't compile.
    #[error("the pre-tokeniser `{name}` does not compile: {source}")]
    Pattern {
        /// The pre-tokeniser.
        name: String,
        /// The regex engine's reason.
        source: Box<regex::Error>,
    },
    /// The automaton that finds special tokens can't be built.
    #[error("the special tokens of the vocabulary cannot be searched for: {source}")]
    Specials {
        /// The automaton's reason.
        source: Box<aho_corasick::BuildError>,
    },
    /// The vocabulary has no tokens, or too many.
    #[error("tokenizer.ggml.tokens has {len} entries; a vocabulary has between 1 and 2^31")]
    Size {
        /// Entries found.
        len: usize,
    },
    /// The kinds don't match the tokens.
    #[error(
        "tokenizer.ggml.token_type has {kinds} entries for {tokens} tokens; the file is damaged, convert it again"
    )]
    Lengths {
        /// Entries of `tokenizer.ggml.token_type`.
        kinds: usize,
        /// Entries of `tokenizer.ggml.tokens`.
        tokens: usize,
    },
    /// A kind that doesn't exist.
    #[error("tokenizer.ggml.token_type of token {id} is {code}; kinds are 0 to 6, the file is damaged")]
    Kind {
        /// The token.
        id: u32,
        /// The kind's code.
        code: i64,
    },
    /// A merge that doesn't join two tokens to a third.
    #[error(
        "merge {rank} of tokenizer.ggml.merges (`{text}`) {problem}; the vocabulary is damaged, convert the model again"
    )]
    Merge {
        /// Its place in the array.
        rank: usize,
        /// Its text.
        text: String,
        /// What is wrong with it.
        problem: &'static str,
    },
    /// The merge table was refused.
    #[error("the merges cannot be used: {reason}")]
    Bpe {
        /// The BPE model's reason.
        reason: String,
    },
    /// A special id outside the vocabulary.
    #[error("{key} is {id}, but the vocabulary has only {len} tokens")]
    SpecialId {
        /// The metadata key.
        key: &'static str,
        /// Its value.
        id: u64,
        /// Size of the vocabulary.
        len: usize,
    },
    /// A text with a byte that no token can express.
    #[error("the text holds the byte 0x{byte:02X}, which the model's vocabulary cannot express; remove it")]
    NoTokenFor {
        /// The byte.
        byte: u8,
    },
    /// An id outside the vocabulary.
    #[error("token id {id} is out of range: the vocabulary has {len} tokens (0 to {})", .len - 1)]
    UnknownId {
        /// The id.
        id: u32,
        /// Size of the vocabulary.
        len: usize,
    },
}

/// The arrays and settings that a tokenizer is built from, borrowed from wherever they lie.
#[derive(Debug, Clone, Copy)]
pub struct Vocabulary<'a> {
    /// Name of the pre-tokeniser (`tokenizer.ggml.pre`).
    pub pre: &'a str,
    /// Token texts by id; normal tokens in the byte alphabet.
    pub tokens: &'a [String],
    /// Kinds by id, as GGUF codes.
    pub kinds: &'a [i64],
    /// Merges by rank, each two token texts with a space between.
    pub merges: &'a [String],
    /// The token that begins a sequence.
    pub bos: Option<u32>,
    /// The token that ends a sequence.
    pub eos: Option<u32>,
    /// Whether sequences begin with `bos`.
    pub add_bos: bool,
    /// Further tokens that end generation.
    pub stops: &'a [u32],
}

/// How a byte gets into the ids.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Route {
    /// By merging, as every byte of a complete byte-level vocabulary.
    Merge,
    /// As a `<0xNN>` token of its own.
    Token(u32),
    Missing,
}

/// Texts that end generation wherever a vocabulary has them as special tokens, whatever `eos_token_id` says: files
/// disagree on which of a model's two ends they name.
const END_TEXTS: &[&str] = &["<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<|end_of_text|>", "<|eom_id|>"];

/// A byte-level BPE tokenizer.
pub struct Tokenizer {
    bpe: BPE,
    pre: PreTokenizer,
    table: TokenTable,
    /// All special tokens.
    specials: SpecialFinder,
    /// The special tokens that are text too, read even where control tokens are not.
    user_defined: SpecialFinder,
    /// The texts of the control tokens.
    controls: Vec<String>,
    routes: Box<[Route; 256]>,
    bos: Option<u32>,
    eos: Option<u32>,
    add_bos: bool,
    eog: BTreeSet<u32>,
}

impl std::fmt::Debug for Tokenizer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Tokenizer").field("tokens", &self.table.len()).finish_non_exhaustive()
    }
}

impl Tokenizer {
    /// Builds the tokenizer that `tokenizer.ggml.*` describes. A missing `tokenizer.ggml.pre` is read as `default`,
    /// with a warning.
    ///
    /// # Errors
    /// A missing key, an unknown algorithm or pre-tokeniser, or arrays that contradict each other.
    pub fn from_metadata(metadata: &Metadata, warnings: &mut Vec<Warning>) -> Result<Self, TokenizerError> {
        let algorithm = metadata.str("tokenizer.ggml.model")?;
        if algorithm != "gpt2" {
            return Err(TokenizerError::Algorithm { found: algorithm.to_owned() });
        }
        let pre = metadata.opt_str("tokenizer.ggml.pre")?.unwrap_or_else(|| {
            warnings.push(Warning::NoPreTokenizer);
            "default"
        });
        let tokens = metadata.strs("tokenizer.ggml.tokens")?;
        let special = |key: &'static str| -> Result<Option<u32>, TokenizerError> {
            let Some(id) = metadata.opt_u64(key)? else { return Ok(None) };
            match u32::try_from(id) {
                Ok(small) if (small as usize) < tokens.len() => Ok(Some(small)),
                _ => Err(TokenizerError::SpecialId { key, id, len: tokens.len() }),
            }
        };
        let mut stops = Vec::new();
        for key in ["tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id"] {
            stops.extend(special(key)?);
        }
        Self::new(&Vocabulary {
            pre,
            tokens,
            kinds: &metadata.i64s("tokenizer.ggml.token_type")?,
            merges: metadata.strs("tokenizer.ggml.merges")?,
            bos: special("tokenizer.ggml.bos_token_id")?,
            eos: special("tokenizer.ggml.eos_token_id")?,
            add_bos: metadata.opt_bool("tokenizer.ggml.add_bos_token")?.unwrap_or(false),
            stops: &stops,
        })
    }

    /// Builds a tokenizer from plain arrays. Where two normal tokens share a text, encoding uses the lower id.
    ///
    /// # Errors
    /// An unknown pre-tokeniser, or arrays that contradict each other.
    pub fn new(vocabulary: &Vocabulary<'_>) -> Result<Self, TokenizerError> {
        let Vocabulary { tokens, .. } = *vocabulary;
        if tokens.is_empty() || tokens.len() > i32::MAX as usize {
            return Err(TokenizerError::Size { len: tokens.len() });
        }
        if vocabulary.kinds.len() != tokens.len() {
            return Err(TokenizerError::Lengths { kinds: vocabulary.kinds.len(), tokens: tokens.len() });
        }
        let named = [("bos", vocabulary.bos), ("eos", vocabulary.eos)].into_iter();
        for (key, id) in named.chain(vocabulary.stops.iter().map(|&id| ("stop", Some(id)))) {
            if let Some(id) = id.filter(|&id| id as usize >= tokens.len()) {
                return Err(TokenizerError::SpecialId { key, id: id.into(), len: tokens.len() });
            }
        }
        let kinds = (0..)
            .zip(vocabulary.kinds)
            .map(|(id, &code)| TokenKind::from_gguf(id, code))
            .collect::<Result<Vec<_>, _>>()?;
        let of_kind = |wanted: &'static [TokenKind]| {
            (0..)
                .zip(tokens.iter().zip(&kinds))
                .filter(|(_, (_, kind))| wanted.contains(kind))
                .map(|(id, (text, _))| (id, text))
        };
        let owned = |(id, text): (u32, &String)| (id, text.clone());

        let mut vocab = AHashMap::with_capacity(tokens.len());
        for (id, text) in of_kind(&[TokenKind::Normal]).filter(|(_, text)| !text.is_empty()) {
            vocab.entry(text.clone()).or_insert(id);
        }
        // Some vocabularies also form user-defined tokens by merges. Those never apply, because the tokens are cut out
        // of the text first, but they are no mistake.
        for (id, text) in of_kind(&[TokenKind::UserDefined]).filter(|(_, text)| !text.is_empty()) {
            let mut spelled = String::new();
            alphabet::spell(text.as_bytes(), &mut spelled);
            vocab.entry(spelled).or_insert(id);
        }
        let mut routes = Box::new([Route::Missing; 256]);
        for (id, text) in of_kind(&[TokenKind::Byte]) {
            if let Some(byte) = named_byte(text) {
                routes[usize::from(byte)] = Route::Token(id);
            }
        }
        for byte in 0..=255u8 {
            if vocab.contains_key(alphabet::char_of(byte).encode_utf8(&mut [0; 4]) as &str) {
                routes[usize::from(byte)] = Route::Merge;
            }
        }
        let specials = SpecialFinder::new(
            of_kind(&[TokenKind::Control, TokenKind::UserDefined, TokenKind::Unknown]).map(owned),
        )?;
        let user_defined = SpecialFinder::new(of_kind(&[TokenKind::UserDefined]).map(owned))?;
        let controls = of_kind(&[TokenKind::Control]).map(|(_, text)| text.clone()).collect();
        let mut eog: BTreeSet<u32> = vocabulary.stops.iter().copied().chain(vocabulary.eos).collect();
        eog.extend(
            of_kind(&[TokenKind::Control, TokenKind::UserDefined])
                .filter(|(_, text)| END_TEXTS.contains(&text.as_str()))
                .map(|(id, _)| id),
        );

        let pre = PreTokenizer::named(vocabulary.pre)?;
        let merges = split_merges(vocabulary.merges, &vocab)?;
        let bpe = BPE::builder()
            .vocab_and_merges(vocab, merges)
            .ignore_merges(pre.whole_pieces)
            .build()
            .map_err(|e| TokenizerError::Bpe { reason: e.to_string() })?;
        let table = TokenTable::new(tokens, kinds);
        Ok(Self {
            bpe,
            pre,
            table,
            specials,
            user_defined,
            controls,
            routes,
            bos: vocabulary.bos,
            eos: vocabulary.eos,
            add_bos: vocabulary.add_bos && vocabulary.bos.is_some(),
            eog,
        })
    }

    /// The ids of `text`, without anything added. With `parse_special`, control tokens written in the text become
    /// those tokens; without, they are read as text (user-defined tokens are tokens either way).
    ///
    /// # Errors
    /// If the vocabulary can't express the text, which a complete byte-level vocabulary always can.
    pub fn encode(&self, text: &str, parse_special: bool) -> Result<Vec<u32>, TokenizerError> {
        self.encode_by(if parse_special { &self.specials } else { &self.user_defined }, text, None)
    }

    /// As [`Tokenizer::encode`]; `mark` is taken out of what is text.
    fn encode_by(
        &self,
        finder: &SpecialFinder,
        text: &str,
        mark: Option<char>,
    ) -> Result<Vec<u32>, TokenizerError> {
        let mut ids = Vec::with_capacity(text.len() / 3);
        finder.segments(text, |segment| {
            match (segment, mark) {
                (Segment::Special(id, _), _) => ids.push(id),
                (Segment::Text(range), None) => self.encode_text(&text[range], &mut ids)?,
                (Segment::Text(range), Some(mark)) => {
                    self.encode_text(&text[range].replace(mark, ""), &mut ids)?;
                }
            }
            Ok(())
        })?;
        Ok(ids)
    }

    /// The ids that begin a sequence with `text`: like [`Tokenizer::encode`], after the beginning-of-sequence token
    /// if the model wants one ([`Tokenizer::add_bos`]) and the text doesn't already begin with it.
    ///
    /// # Errors
    /// As [`Tokenizer::encode`].
    pub fn encode_start(&self, text: &str, parse_special: bool) -> Result<Vec<u32>, TokenizerError> {
        Ok(self.started(self.encode(text, parse_special)?))
    }

    fn started(&self, mut ids: Vec<u32>) -> Vec<u32> {
        if let Some(bos) = self.bos.filter(|&bos| self.add_bos && ids.first() != Some(&bos)) {
            ids.insert(0, bos);
        }
        ids
    }

    /// `text` with `mark` around every character of a control token, and between it and what could complete the part of
    /// one with which it begins or ends, white space aside: none can be found in it any more, nor in what it is joined to.
    pub(crate) fn without_control(&self, text: &str, mark: char) -> String {
        let mut out = String::with_capacity(text.len());
        // No segment fails.
        let _ = self.specials.segments(text, |segment| {
            match segment {
                Segment::Special(id, range) if self.is_control(id) => {
                    out.push(mark);
                    out.extend(text[range].chars().flat_map(|c| [c, mark]));
                }
                Segment::Special(_, range) | Segment::Text(range) => out.push_str(&text[range]),
            }
            Ok(())
        });
        let end = out.trim_end().len();
        if self.control_cuts().any(|(begin, _)| out[..end].ends_with(begin)) {
            out.insert(end, mark);
        }
        let start = out.len() - out.trim_start().len();
        if self.control_cuts().any(|(_, rest)| out[start..].starts_with(rest)) {
            out.insert(start, mark);
        }
        out
    }

    /// Every way to cut a control token in two.
    fn control_cuts(&self) -> impl Iterator<Item = (&str, &str)> {
        self.controls.iter().flat_map(|text| text.char_indices().skip(1).map(|(at, _)| text.split_at(at)))
    }

    /// The ids that begin a sequence with `text`, whose control tokens are those that no `mark` breaks up. Marks are no
    /// part of the text.
    pub(crate) fn encode_marked(&self, text: &str, mark: char) -> Result<Vec<u32>, TokenizerError> {
        Ok(self.started(self.encode_by(&self.specials, text, Some(mark))?))
    }

    fn encode_text(&self, text: &str, ids: &mut Vec<u32>) -> Result<(), TokenizerError> {
        let text = if self.pre.nfc { nfc(text) } else { Cow::Borrowed(text) };
        let mut spelled = String::new();
        self.pre.split(&text, &mut |piece| {
            let mut rest = piece.as_bytes();
            while let Some(&first) = rest.first() {
                let merged = rest.iter().take_while(|&&b| self.route(b) == Route::Merge).count();
                let (run, after) = rest.split_at(merged);
                if run.is_empty() {
                    match self.route(first) {
                        Route::Token(id) => ids.push(id),
                        _ => return Err(TokenizerError::NoTokenFor { byte: first }),
                    }
                    rest = &rest[1..];
                    continue;
                }
                spelled.clear();
                alphabet::spell(run, &mut spelled);
                let tokens =
                    self.bpe.tokenize(&spelled).map_err(|e| TokenizerError::Bpe { reason: e.to_string() })?;
                ids.extend(tokens.iter().map(|t| t.id));
                rest = after;
            }
            Ok(())
        })
    }

    fn route(&self, byte: u8) -> Route {
        self.routes[usize::from(byte)]
    }

    /// The text of `ids`, control tokens as they are written in the vocabulary. Bytes that aren't UTF-8 become
    /// U+FFFD.
    ///
    /// # Errors
    /// If an id is not in the vocabulary.
    pub fn decode(&self, ids: &[u32]) -> Result<String, TokenizerError> {
        let mut bytes = Vec::with_capacity(ids.len() * 4);
        for &id in ids {
            bytes.extend_from_slice(self.token_bytes(id)?);
        }
        Ok(String::from_utf8(bytes).unwrap_or_else(|e| String::from_utf8_lossy(e.as_bytes()).into_owned()))
    }

    /// The bytes that token `id` stands for; not always whole characters.
    ///
    /// # Errors
    /// If `id` is not in the vocabulary.
    pub fn token_bytes(&self, id: u32) -> Result<&[u8], TokenizerError> {
        self.table.bytes(id).ok_or(TokenizerError::UnknownId { id, len: self.table.len() })
    }

    /// What token `id` is for; `None` outside the vocabulary.
    pub fn kind(&self, id: u32) -> Option<TokenKind> {
        self.table.kind(id)
    }

    /// Whether `id` is a control token.
    pub fn is_control(&self, id: u32) -> bool {
        self.kind(id) == Some(TokenKind::Control)
    }

    /// The special token (control or user-defined) written `text`.
    pub fn special(&self, text: &str) -> Option<u32> {
        self.specials.exact(text)
    }

    /// Number of tokens.
    pub fn vocab_size(&self) -> usize {
        self.table.len()
    }

    /// The token that begins a sequence.
    pub fn bos(&self) -> Option<u32> {
        self.bos
    }

    /// The token that ends a sequence, as the file names it; see [`Tokenizer::eog`] for all that do.
    pub fn eos(&self) -> Option<u32> {
        self.eos
    }

    /// Whether sequences begin with [`Tokenizer::bos`].
    pub fn add_bos(&self) -> bool {
        self.add_bos
    }

    /// The tokens that end generation, ascending.
    pub fn eog(&self) -> impl Iterator<Item = u32> + '_ {
        self.eog.iter().copied()
    }
}

/// `text` in Unicode normalisation form C, by the same tables as the published tokenizers.
fn nfc(text: &str) -> Cow<'_, str> {
    if text.is_ascii() || is_nfc_quick(text.chars()) == IsNormalized::Yes {
        return Cow::Borrowed(text);
    }
    text.nfc().map(|(c, _)| c).collect::<String>().into()
}

/// Splits every merge into its two tokens and checks that both and their join exist.
fn split_merges(
    merges: &[String],
    vocab: &AHashMap<String, u32>,
) -> Result<Vec<(String, String)>, TokenizerError> {
    let mut joined = String::new();
    let mut split = Vec::with_capacity(merges.len());
    for (rank, merge) in merges.iter().enumerate() {
        let wrong = |problem| TokenizerError::Merge { rank, text: merge.chars().take(60).collect(), problem };
        // The separator is the first space after the first character: a token may itself begin with a space in
        // vocabularies that don't spell it `Ġ`.
        let first = merge.chars().next().map_or(0, char::len_utf8);
        let space = merge[first..].find(' ').ok_or_else(|| wrong("has no space between its two tokens"))?;
        let (left, right) = (&merge[..first + space], &merge[first + space + 1..]);
        joined.clear();
        joined.push_str(left);
        joined.push_str(right);
        if !vocab.contains_key(left) || !vocab.contains_key(right) {
            return Err(wrong("names a token that the vocabulary does not have"));
        }
        if !vocab.contains_key(&joined) {
            return Err(wrong("joins to a token that the vocabulary does not have"));
        }
        split.push((left.to_owned(), right.to_owned()));
    }
    Ok(split)
}
