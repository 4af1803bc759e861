//! The tokenizer of the demo model against the published tokenizers, the reference prompts and itself.

use std::sync::{Arc, LazyLock};

use proptest::prelude::*;
use serde::Deserialize;
use strata_gguf::Gguf;
use strata_model::tokenizer::{TokenKind, TokenizerError, Vocabulary};
use strata_model::{DecodeStream, Tokenizer};
use strata_testkit::golden;
use unicode_normalization_alignments::UnicodeNormalization;

static PEBBLE: LazyLock<Arc<Tokenizer>> = LazyLock::new(|| {
    let gguf = Gguf::open(&golden::pebble()).expect("the demo model opens");
    let mut warnings = Vec::new();
    let tokenizer = Tokenizer::from_metadata(gguf.metadata(), &mut warnings).expect("its tokenizer builds");
    assert_eq!(warnings, []);
    Arc::new(tokenizer)
});

fn nfc(text: &str) -> String {
    text.nfc().map(|(c, _)| c).collect()
}

#[derive(Deserialize)]
struct Encoding {
    text: String,
    special: Vec<u32>,
    plain: Option<Vec<u32>>,
}

/// Oracle: PyPI tokenizers 0.23.3 given the same vocabulary, merges, added tokens, NFC and Qwen3.5's published
/// pattern; `plain` (where it differs) with `encode_special_tokens`.
#[test]
fn encodes_like_the_published_library() {
    let cases: Vec<Encoding> =
        serde_json::from_str(include_str!("../data/pebble-encodings.json")).expect("the cases parse");
    assert_eq!(cases.len(), 90);
    for case in cases {
        assert_eq!(PEBBLE.encode(&case.text, true).expect("encodes"), case.special, "{:?}", case.text);
        let plain = case.plain.as_ref().unwrap_or(&case.special);
        assert_eq!(&PEBBLE.encode(&case.text, false).expect("encodes"), plain, "{:?}", case.text);
    }
}

/// Oracle: the token ids that the reference was run on.
#[test]
fn reference_prompts_round_trip() {
    let mut npz = golden::Npz::golden("pebble/logits.npz");
    let mut texts = Vec::new();
    for k in 0..5 {
        let ids = npz.ids(&format!("ids{k}"));
        let text = PEBBLE.decode(&ids).expect("decodes");
        assert_eq!(PEBBLE.encode(&text, true).expect("encodes"), ids, "prompt {k}: {text:?}");
        texts.push(text);
    }
    assert_eq!(
        texts[0],
        "<|im_start|>user\nWhat does \"ocean\" mean?<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
    );
}

/// Oracle: the texts themselves (NFC).
#[test]
fn held_out_texts_round_trip() {
    for name in ["prose", "docs", "chat", "dict"] {
        let path = golden::dir().join(format!("pebble/val/{name}.txt"));
        let text = std::fs::read_to_string(&path).expect("the text is there");
        for parse_special in [false, true] {
            let ids = PEBBLE.encode(&text, parse_special).expect("encodes");
            assert!(ids.len() * 2 < text.len(), "{name}: {} tokens for {} bytes", ids.len(), text.len());
            assert_eq!(PEBBLE.decode(&ids).expect("decodes"), nfc(&text), "{name}");
            let mut stream = DecodeStream::new(PEBBLE.clone(), false);
            let streamed: String = ids.iter().map(|&id| stream.push(id).expect("decodes")).collect();
            assert_eq!(streamed + &stream.flush(), nfc(&text), "{name}");
        }
    }
}

fn any_text() -> impl Strategy<Value = String> {
    let part = prop_oneof![
        any::<String>(),
        "[a-zA-Z0-9 '\n\t.,!<|>_]{0,20}",
        "[\u{300}-\u{340}a-e가-깧ᄀ-하-ᅵᆨ-ᇂ\u{1f300}-\u{1f600}]{0,12}",
        Just("<|im_start|>".to_owned()),
        Just("<think>".to_owned()),
        " {0,9}\r?\n?",
    ];
    prop::collection::vec(part, 0..6).prop_map(|parts| parts.concat())
}

/// What encoding may do to a text: special tokens stay, the stretches between them are normalised.
fn normalised(text: &str, specials: &[&str]) -> String {
    let next = specials.iter().filter_map(|s| text.find(s).map(|at| (at, s.len()))).min();
    match next {
        Some((at, len)) => nfc(&text[..at]) + &text[at..at + len] + &normalised(&text[at + len..], specials),
        None => nfc(text),
    }
}

proptest! {
    /// Oracle: NFC of the text. Byte-level BPE loses nothing else.
    #[test]
    fn any_text_round_trips(text in any_text()) {
        let all: Vec<&str> = vec![
            "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>",
            "<|video_pad|>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>",
            "</think>",
        ];
        let ids = PEBBLE.encode(&text, true).expect("encodes");
        prop_assert_eq!(PEBBLE.decode(&ids).expect("decodes"), normalised(&text, &all));
        let ids = PEBBLE.encode(&text, false).expect("encodes");
        prop_assert_eq!(PEBBLE.decode(&ids).expect("decodes"), normalised(&text, &all[7..]));
        prop_assert!(ids.iter().all(|&id| !PEBBLE.is_control(id)));
    }
}

/// Oracle: the metadata of the demo model and the published stop rule (both ends).
#[test]
fn special_tokens_are_known() {
    let id = |text| PEBBLE.special(text).expect("is special");
    assert_eq!(id("<|endoftext|>"), 12275);
    assert_eq!(PEBBLE.special("<|im_end|>x"), None);
    assert_eq!(PEBBLE.special("the"), None);
    assert_eq!(PEBBLE.eos(), Some(12277));
    assert_eq!(PEBBLE.eog().collect::<Vec<_>>(), [12275, 12277]);
    assert_eq!(PEBBLE.kind(id("<think>")), Some(TokenKind::UserDefined));
    assert_eq!((PEBBLE.bos(), PEBBLE.add_bos()), (None, false));
    assert_eq!(PEBBLE.vocab_size(), 12288);
    let error = PEBBLE.decode(&[12288]).expect_err("out of range");
    assert_eq!(
        error.to_string(),
        "token id 12288 is out of range: the vocabulary has 12288 tokens (0 to 12287)"
    );
}

/// Oracle: the definition. Control tokens leave no text in a chat's stream; a character split over tokens appears
/// once, when it is whole; a broken tail ends as U+FFFD.
#[test]
fn streams_skip_control_tokens_and_wait_for_whole_characters() {
    let ids = PEBBLE.encode("<|im_start|>é☃\u{1f600}", true).expect("encodes");
    let mut stream = DecodeStream::new(PEBBLE.clone(), true);
    let mut text = String::new();
    for &id in &ids {
        let part = stream.push(id).expect("decodes");
        assert!(!part.contains(char::REPLACEMENT_CHARACTER));
        text += &part;
    }
    assert_eq!(text, "é☃\u{1f600}");
    assert_eq!(stream.flush(), "");
    let tail = PEBBLE.encode("\u{1f600}", true).expect("encodes");
    assert!(tail.len() > 1, "the demo vocabulary splits this character");
    let _ = stream.push(tail[0]).expect("decodes");
    assert_eq!(stream.flush(), "\u{fffd}");
    assert!(matches!(stream.push(99_999), Err(TokenizerError::UnknownId { id: 99_999, .. })));
}

fn strings(texts: &[&str]) -> Vec<String> {
    texts.iter().map(|&t| t.to_owned()).collect()
}

/// Oracle: the definition, on a vocabulary without some bytes: those with a `<0xNN>` token use it, others are an
/// error and not silently dropped.
#[test]
fn bytes_fall_back_or_fail() {
    let tokens = strings(&["a", "b", "ab", "<0x21>", "<s>", "漢", "[PAD6]", "<tool>"]);
    let kinds = [1, 1, 1, 6, 3, 1, 5, 4];
    let merges = strings(&["a b"]);
    let vocabulary = Vocabulary {
        pre: "gpt-2",
        tokens: &tokens,
        kinds: &kinds,
        merges: &merges,
        bos: Some(4),
        eos: Some(4),
        add_bos: true,
        stops: &[1],
    };
    let tokenizer = Tokenizer::new(&vocabulary).expect("builds");
    assert_eq!(tokenizer.encode("ab!a!", true).expect("encodes"), [2, 3, 0, 3]);
    assert_eq!(tokenizer.decode(&[2, 3, 0, 3, 5]).expect("decodes"), "ab!a!漢");
    let error = tokenizer.encode("abc", true).expect_err("has no c");
    assert!(error.to_string().contains("0x63"), "{error}");
    assert_eq!(tokenizer.encode_start("ab", true).expect("encodes"), [4, 2]);
    assert_eq!(tokenizer.encode_start("<s>ab", true).expect("encodes"), [4, 2]);
    assert_eq!(tokenizer.encode_start("", true).expect("encodes"), [4]);
    assert_eq!(tokenizer.eog().collect::<Vec<_>>(), [1, 4]);
    assert_eq!(tokenizer.encode("a<tool>b", false).expect("encodes"), [0, 7, 1]);
}

/// Oracle: the sentence each mistake promises; none may panic in the merge builder.
#[test]
fn damaged_vocabularies_are_refused() {
    let tokens = strings(&["a", "b", "ab"]);
    let base = Vocabulary {
        pre: "gpt-2",
        tokens: &tokens,
        kinds: &[1, 1, 1],
        merges: &[],
        bos: None,
        eos: None,
        add_bos: false,
        stops: &[],
    };
    let refused = |v: Vocabulary<'_>| Tokenizer::new(&v).expect_err("refused").to_string();
    let merge = |text: &str| refused(Vocabulary { merges: &strings(&["a b", text]), ..base });
    assert!(merge("ab").contains("no space"));
    assert!(merge("").contains("no space"));
    assert!(merge("a c").contains("names a token"));
    assert!(merge("ab ab").contains("joins to a token"));
    assert!(merge("ab ab").contains("merge 1"));
    assert!(refused(Vocabulary { kinds: &[1, 1], ..base }).contains("2 entries for 3 tokens"));
    assert!(refused(Vocabulary { kinds: &[1, 1, 9], ..base }).contains("token 2 is 9"));
    assert!(refused(Vocabulary { eos: Some(3), ..base }).contains("only 3 tokens"));
    assert!(refused(Vocabulary { tokens: &[], kinds: &[], ..base }).contains("0 entries"));
    assert!(refused(Vocabulary { pre: "nonsense", ..base }).contains("`nonsense`"));
}
