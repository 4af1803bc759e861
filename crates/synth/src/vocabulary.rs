//! A made-up vocabulary of any size for a byte-level tokenizer, and a chat template that uses its special tokens.
//!
//! Owns the tokens' texts, kinds and merges. Special tokens stand at the ids that the geometry gives them, padding above the
//! highest of them; the ids between are, in this order: the 256 bytes, pairs that merging finds, and words made of
//! syllables that it doesn't find (they only ever come out of the model).
//!
//! Invariant: every token's text is unique, and every merge's two parts and its result are tokens.

use crate::geometry::Geometry;

/// Kinds, as `tokenizer.ggml.token_type` codes them.
const NORMAL: i32 = 1;
const CONTROL: i32 = 3;
const USER_DEFINED: i32 = 4;
const UNUSED: i32 = 5;

/// The tokens of a model by id, and the merges by rank.
pub(crate) struct Vocabulary {
    pub(crate) tokens: Vec<String>,
    pub(crate) kinds: Vec<i32>,
    pub(crate) merges: Vec<String>,
}

/// Turns of `<|im_start|>role ... <|im_end|>`, an answer that may begin by thinking; what came before the last thought of
/// earlier answers is left out.
pub(crate) const CHAT_TEMPLATE: &str = "\
{%- for message in messages %}
    {%- set text = message.content if message.content is string else '' %}
    {%- if message.role == 'assistant' and '</think>' in text %}
        {%- set text = text.split('</think>')[-1] | trim %}
    {%- endif %}
    {{- '<|im_start|>' + message.role + '\\n' + text + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and not enable_thinking %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}
";

/// The letters that pairs are made of.
const FREQUENT: [char; 12] = ['e', 't', 'a', 'o', 'i', 'n', 's', 'r', 'h', 'l', 'd', 'u'];
/// How a space is written in a byte-level vocabulary.
const SPACE: char = '\u{120}';

impl Vocabulary {
    /// The vocabulary of a geometry that has passed its check.
    pub(crate) fn new(geometry: &Geometry) -> Self {
        let size = geometry.vocabulary as usize;
        let padding = geometry.padding_from() as usize;
        let mut tokens: Vec<Option<String>> = vec![None; size];
        let mut kinds = vec![NORMAL; size];
        for (name, &id) in &geometry.special_tokens {
            let id = id as usize;
            kinds[id] = if name.starts_with("<|") { CONTROL } else { USER_DEFINED };
            tokens[id] = Some(name.clone());
        }
        let plain = padding - geometry.special_tokens.len();
        // Half of what the bytes leave, at the most, for pairs.
        let pairs = pairs((plain - 256) / 2);
        let words = plain - 256 - pairs.len();
        let pair_texts = pairs.iter().map(|&[a, b]| format!("{a}{b}"));
        let texts = byte_texts().map(String::from).into_iter().chain(pair_texts).chain(Words::new(words));
        let free = tokens[..padding].iter_mut().filter(|slot| slot.is_none());
        for (slot, text) in free.zip(texts) {
            *slot = Some(text);
        }
        kinds[padding..].fill(UNUSED);
        let tokens =
            tokens.into_iter().enumerate().map(|(id, text)| text.unwrap_or_else(|| format!("[PAD{id}]")));
        let merges = pairs.iter().map(|[a, b]| format!("{a} {b}"));
        Self { tokens: tokens.collect(), kinds, merges: merges.collect() }
    }
}

/// The character that stands for each byte, in the order in which such vocabularies list them: the printable bytes of
/// Latin-1 as themselves, then the others as the characters from U+0100 on.
fn byte_texts() -> [char; 256] {
    let printable = ('!'..='~').chain('\u{A1}'..='\u{AC}').chain('\u{AE}'..='\u{FF}');
    let mut texts = ['\0'; 256];
    for (text, c) in texts.iter_mut().zip(printable.chain('\u{100}'..'\u{144}')) {
        *text = c;
    }
    texts
}

/// At most `most` pairs: a letter after a space, then two letters.
fn pairs(most: usize) -> Vec<[char; 2]> {
    let after_space = FREQUENT.iter().map(|&c| [SPACE, c]);
    let letters = FREQUENT.iter().flat_map(|&a| FREQUENT.iter().map(move |&b| [a, b]));
    after_space.chain(letters).take(most).collect()
}

/// Words of syllables, all of one length and so all different: every second one after a space.
struct Words {
    syllables: u32,
    next: usize,
    count: usize,
}

const CONSONANTS: &[u8; 14] = b"bdfgklmnprstvz";
const VOWELS: &[u8; 5] = b"aeiou";

impl Words {
    fn new(count: usize) -> Self {
        let most = CONSONANTS.len() * VOWELS.len();
        let syllables = (2..).find(|&n| most.pow(n) >= count).unwrap_or(2);
        Self { syllables, next: 0, count }
    }
}

impl Iterator for Words {
    type Item = String;

    fn next(&mut self) -> Option<String> {
        let (mut rest, after_space) = (self.next, self.next.is_multiple_of(2));
        if self.next == self.count {
            return None;
        }
        self.next += 1;
        let mut word = if after_space { SPACE.to_string() } else { String::new() };
        for _ in 0..self.syllables {
            word.push(char::from(CONSONANTS[rest % 14]));
            word.push(char::from(VOWELS[rest / 14 % 5]));
            rest /= 70;
        }
        Some(word)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;

    /// Oracle: what a byte-level tokenizer requires: unique texts, all bytes, merges between tokens; and the ids at which
    /// the published vocabulary has `!`, newline and space.
    #[test]
    fn vocabularies_are_complete_and_unique() {
        for name in Geometry::PRESETS {
            let geometry = Geometry::preset(name).unwrap();
            let vocabulary = Vocabulary::new(&geometry);
            assert_eq!(vocabulary.tokens.len(), geometry.vocabulary as usize);
            let texts: HashSet<&str> = vocabulary.tokens.iter().map(String::as_str).collect();
            assert_eq!(texts.len(), vocabulary.tokens.len(), "{name}");
            for c in byte_texts() {
                assert!(texts.contains(c.to_string().as_str()), "{name} {c}");
            }
            assert!(!vocabulary.merges.is_empty(), "{name}");
            for merge in &vocabulary.merges {
                let (a, b) = merge.split_once(' ').unwrap();
                assert!([a, b, &format!("{a}{b}")].iter().all(|t| texts.contains(t)), "{name} {merge}");
            }
            for (text, &id) in &geometry.special_tokens {
                assert_eq!(&vocabulary.tokens[id as usize], text);
                assert_ne!(vocabulary.kinds[id as usize], NORMAL);
            }
        }
        let real = Vocabulary::new(&Geometry::flash_next());
        assert_eq!([&real.tokens[0], &real.tokens[198], &real.tokens[220]], ["!", "\u{10A}", "\u{120}"]);
        assert_eq!(real.kinds.iter().filter(|&&kind| kind == UNUSED).count(), 248_320 - 248_070);
        assert_eq!(real.kinds[248_044], CONTROL);
        assert_eq!(real.kinds[248_068], USER_DEFINED);
    }
}
