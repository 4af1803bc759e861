//! Pre-tokenisers: how text is cut into the pieces that byte pairs are merged in.
//!
//! A GGUF only names its pre-tokeniser (`tokenizer.ggml.pre`); the patterns are facts of the published tokenizers,
//! kept here as a table. Patterns apply one after another: each cuts the pieces left by the one before into its
//! matches and the gaps between them, so every byte of the text ends up in exactly one piece.
//!
//! The one look-ahead that the published patterns need, `\s+(?!\S)`, is done by hand, so that matching takes linear
//! time and can't fail on any text.

use regex::Regex;

use super::TokenizerError;

/// What a pre-tokeniser name stands for.
struct Family {
    names: &'static [&'static str],
    patterns: &'static [&'static str],
    /// The published tokenizer normalises text to NFC first.
    nfc: bool,
    /// A piece that is a token as a whole is taken as it is, even if no sequence of merges forms it.
    whole_pieces: bool,
}

const GPT2: &str = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+";

const LLAMA3: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";

const QWEN2: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";

/// Qwen2's with combining marks counted as parts of words and not as punctuation.
const QWEN35: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";

const GPT4O: &str = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+";

const TEKKEN: &str = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+";

const DEEPSEEK3: &str = r##"[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"##;

/// The cased letters that DeepSeek-LLM's tokenizer lists one by one.
const DEEPSEEK_LLM_WORDS: &str = concat!(
    r"\s?[",
    r"A-Za-z\x{B5}\x{C0}-\x{D6}\x{D8}-\x{F6}\x{F8}-\x{1BA}\x{1BC}-\x{1BF}\x{1C4}-\x{293}",
    r"\x{295}-\x{2AF}\x{370}-\x{373}\x{376}\x{377}\x{37B}-\x{37D}\x{37F}\x{386}\x{388}-\x{38A}\x{38C}",
    r"\x{38E}-\x{3A1}\x{3A3}-\x{3F5}\x{3F7}-\x{481}\x{48A}-\x{52F}\x{531}-\x{556}\x{10A0}-\x{10C5}",
    r"\x{13A0}-\x{13F5}\x{13F8}-\x{13FD}\x{1C90}-\x{1CBA}\x{1CBD}-\x{1CBF}\x{1D00}-\x{1D2B}",
    r"\x{1D6B}-\x{1D77}\x{1D79}-\x{1D9A}\x{1E00}-\x{1F15}\x{1F18}-\x{1F1D}\x{1F20}-\x{1F45}",
    r"\x{1F48}-\x{1F4D}\x{1F50}-\x{1F57}\x{1F59}\x{1F5B}\x{1F5D}\x{1F5F}-\x{1F7D}\x{1F80}-\x{1FB4}",
    r"\x{1FB6}-\x{1FBC}\x{1FBE}\x{1FC2}-\x{1FC4}\x{1FC6}-\x{1FCC}\x{1FD0}-\x{1FD3}\x{1FD6}-\x{1FDB}",
    r"\x{1FE0}-\x{1FEC}\x{1FF2}-\x{1FF4}\x{1FF6}-\x{1FFC}\x{2102}\x{2107}\x{210A}-\x{2113}\x{2115}",
    r"\x{2119}-\x{211D}\x{2124}\x{2126}\x{2128}\x{212A}-\x{212D}\x{212F}-\x{2134}\x{2139}",
    r"\x{213C}-\x{213F}\x{2145}-\x{2149}\x{214E}\x{2183}\x{2184}\x{2C00}-\x{2C7B}\x{2C7E}-\x{2CE4}",
    r"\x{2CEB}-\x{2CEE}\x{2CF2}\x{2CF3}\x{A640}-\x{A66D}\x{A680}-\x{A69B}\x{A722}-\x{A76F}",
    r"\x{A771}-\x{A787}\x{A78B}-\x{A78E}\x{AB70}-\x{ABBF}\x{FB00}-\x{FB06}\x{FB13}-\x{FB17}",
    r"\x{FF21}-\x{FF3A}\x{FF41}-\x{FF5A}\x{10400}-\x{1044F}\x{104B0}-\x{104D3}\x{104D8}-\x{104FB}",
    r"\x{10C80}-\x{10CB2}\x{10CC0}-\x{10CF2}\x{118A0}-\x{118DF}\x{1E900}-\x{1E943}",
    r"]+",
);

/// Every known pre-tokeniser. Sources: the `pre_tokenizer` and `normalizer` fields of the models' published
/// `tokenizer.json`; for `default`, the fallback that GGUF tools agreed on for files without a name.
const FAMILIES: &[Family] = &[
    Family { names: &["qwen35"], patterns: &[QWEN35], nfc: true, whole_pieces: false },
    Family { names: &["qwen2", "deepseek-r1-qwen"], patterns: &[QWEN2], nfc: true, whole_pieces: false },
    Family {
        names: &["llama3", "llama-v3", "llama-bpe"],
        patterns: &[LLAMA3],
        nfc: false,
        whole_pieces: true,
    },
    Family { names: &["glm4", "chatglm-bpe"], patterns: &[LLAMA3], nfc: false, whole_pieces: false },
    Family { names: &["gpt-4o"], patterns: &[GPT4O], nfc: false, whole_pieces: false },
    Family { names: &["tekken"], patterns: &[TEKKEN], nfc: false, whole_pieces: true },
    Family {
        names: &["deepseek-v3"],
        patterns: &[r"\p{N}{1,3}", "[一-龥぀-ゟ゠-ヿ]+", DEEPSEEK3],
        nfc: false,
        whole_pieces: false,
    },
    Family {
        names: &["deepseek-llm"],
        patterns: &[
            r"[\r\n]",
            DEEPSEEK_LLM_WORDS,
            r"\s?[!-/:-~！-／：-～‘-‟　-。]+",
            r"\s+$",
            "[一-龥ࠀ-一가-퟿]+",
            r"\p{N}",
        ],
        nfc: false,
        whole_pieces: false,
    },
    Family {
        names: &["deepseek-coder"],
        patterns: &[r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-퟿]+", r"\p{N}"],
        nfc: false,
        whole_pieces: false,
    },
    Family { names: &["gpt-2", "phi-2"], patterns: &[GPT2], nfc: false, whole_pieces: false },
    Family {
        names: &["starcoder", "refact", "smollm"],
        patterns: &[r"\p{N}", GPT2],
        nfc: false,
        whole_pieces: false,
    },
    Family {
        names: &["default"],
        patterns: &[r"[\p{P}\$\+<=>\^~\|]+", GPT2, r"\p{N}+", "[0-9][0-9][0-9]"],
        nfc: false,
        whole_pieces: false,
    },
];

/// The end of patterns that leave a word its leading space: a run of white space gives its last character back if
/// something else follows, but keeps at least one.
const SPACES_BEFORE_WORDS: &str = r"|\s+(?!\S)|\s+";

/// One compiled pattern.
struct Pattern {
    /// With [`SPACES_BEFORE_WORDS`] reduced to `|\s+`.
    regex: Regex,
    /// Whether matches of that last branch give a character back.
    yields: bool,
    /// Whether runs of white space up to a line break belong to a branch before it.
    lines: bool,
}

impl Pattern {
    fn compile(published: &str) -> Result<Self, regex::Error> {
        let stem = published.strip_suffix(SPACES_BEFORE_WORDS);
        let regex = match stem {
            Some(stem) => Regex::new(&format!(r"{stem}|\s+"))?,
            None => Regex::new(published)?,
        };
        Ok(Self { regex, yields: stem.is_some(), lines: stem.is_some_and(|s| s.ends_with(r"|\s*[\r\n]+")) })
    }

    /// The first match at or after `at`, as start and end.
    fn find(&self, text: &str, at: usize) -> Option<(usize, usize)> {
        let found = self.regex.find_at(text, at)?;
        let (start, mut end) = (found.start(), found.end());
        if self.yields && end < text.len() && found.as_str().chars().all(char::is_whitespace) {
            let last = found.as_str().chars().next_back()?;
            if !(self.lines && matches!(last, '\r' | '\n')) && start + last.len_utf8() < end {
                end -= last.len_utf8();
            }
        }
        Some((start, end))
    }
}

/// A compiled pre-tokeniser.
pub(super) struct PreTokenizer {
    patterns: Vec<Pattern>,
    pub(super) nfc: bool,
    pub(super) whole_pieces: bool,
}

impl PreTokenizer {
    /// The pre-tokeniser called `name` in `tokenizer.ggml.pre`.
    pub(super) fn named(name: &str) -> Result<Self, TokenizerError> {
        let family = FAMILIES.iter().find(|f| f.names.contains(&name)).ok_or_else(|| {
            let known: Vec<&str> = FAMILIES.iter().flat_map(|f| f.names).copied().collect();
            TokenizerError::UnknownPre { name: name.to_owned(), known: known.join(", ") }
        })?;
        let compile = |&pattern: &&str| {
            Pattern::compile(pattern)
                .map_err(|source| TokenizerError::Pattern { name: name.to_owned(), source: Box::new(source) })
        };
        Ok(Self {
            patterns: family.patterns.iter().map(compile).collect::<Result<_, _>>()?,
            nfc: family.nfc,
            whole_pieces: family.whole_pieces,
        })
    }

    /// Calls `piece` with the pieces of `text`, in order. They are not empty and join to `text`.
    pub(super) fn split<'t>(
        &self,
        text: &'t str,
        piece: &mut dyn FnMut(&'t str) -> Result<(), TokenizerError>,
    ) -> Result<(), TokenizerError> {
        cut(&self.patterns, text, piece)
    }
}

fn cut<'t>(
    patterns: &[Pattern],
    text: &'t str,
    piece: &mut dyn FnMut(&'t str) -> Result<(), TokenizerError>,
) -> Result<(), TokenizerError> {
    if text.is_empty() {
        return Ok(());
    }
    let Some((pattern, rest)) = patterns.split_first() else { return piece(text) };
    let mut done = 0;
    while let Some((start, end)) = pattern.find(text, done) {
        cut(rest, &text[done..start], piece)?;
        cut(rest, &text[start..end], piece)?;
        done = end;
    }
    cut(rest, &text[done..], piece)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pieces<'t>(name: &str, text: &'t str) -> Vec<&'t str> {
        let mut out = Vec::new();
        let pre = PreTokenizer::named(name).expect("a known name");
        pre.split(text, &mut |p| {
            out.push(p);
            Ok(())
        })
        .expect("splits");
        assert_eq!(out.concat(), text, "{name} lost text");
        out
    }

    /// Oracle: the cuts of the published tokenizers' own pre-tokenisers (PyPI tokenizers 0.23.3: the `tokenizer.json`
    /// of Qwen3, Llama 3.1, GPT-4o and DeepSeek-V3, its own GPT-2 cut, Qwen3.5's pattern).
    #[test]
    fn cuts_like_the_published_tokenizers() {
        let text = "I've 1234 cafe\u{301}s!!\n\n  x\t\n";
        assert_eq!(
            pieces("qwen35", text),
            ["I", "'ve", " ", "1", "2", "3", "4", " cafe\u{301}s", "!!\n\n", " ", " x", "\t\n"]
        );
        assert_eq!(
            pieces("qwen2", text),
            ["I", "'ve", " ", "1", "2", "3", "4", " cafe", "\u{301}s", "!!\n\n", " ", " x", "\t\n"]
        );
        assert_eq!(
            pieces("llama-bpe", text),
            ["I", "'ve", " ", "123", "4", " cafe", "\u{301}s", "!!\n\n", " ", " x", "\t\n"]
        );
        assert_eq!(
            pieces("gpt-2", text),
            ["I", "'ve", " 1234", " cafe", "\u{301}", "s", "!!", "\n\n ", " x", "\t\n"]
        );
        assert_eq!(
            pieces("deepseek-v3", text),
            ["I", "'ve", " ", "123", "4", " cafe\u{301}s", "!!\n\n", " ", " x", "\t\n"]
        );
        assert_eq!(
            pieces("gpt-4o", text),
            ["I've", " ", "123", "4", " cafe\u{301}s", "!!\n\n", " ", " x", "\t\n"]
        );
        assert_eq!(
            pieces("smollm", text),
            ["I", "'ve", " ", "1", "2", "3", "4", " cafe", "\u{301}", "s", "!!", "\n\n ", " x", "\t\n"]
        );
    }

    /// Oracle: every pattern compiles, and no family loses or repeats a byte.
    #[test]
    fn every_family_keeps_the_text() {
        let text = "Straße 12345 'Re don'T  ıſ\u{85}\u{2028}漢字かな한글 \u{0301}x ~~$+ \r\n\r\n \u{a0}\u{3000}end   ";
        for name in FAMILIES.iter().flat_map(|f| f.names) {
            pieces(name, text);
        }
    }

    /// Oracle: the definition. Long runs must neither fail nor take more than linear time.
    #[test]
    fn long_runs_are_cut_whole() {
        let spaces = " ".repeat(3_000_000);
        assert_eq!(pieces("qwen35", &spaces).len(), 1);
        let before_a_word = format!("{spaces}x");
        assert_eq!(pieces("qwen35", &before_a_word), [&spaces[1..], " x"]);
        let letters = "a".repeat(3_000_000);
        assert_eq!(pieces("qwen35", &letters).len(), 1);
        let dashes = "-".repeat(1_000_000);
        assert_eq!(pieces("deepseek-v3", &dashes).len(), 1);
    }

    /// Oracle: the error's own promise.
    #[test]
    fn unknown_names_are_refused_with_a_sentence() {
        let Err(error) = PreTokenizer::named("klingon") else { panic!("accepted") };
        assert!(error.to_string().contains("`klingon`"), "{error}");
        assert!(error.to_string().contains("qwen35"), "{error}");
    }
}
