//! Whole models: opened, told apart, refused.

use strata_gguf::{Gguf, Value};
use strata_model::template::{Message, RenderOptions};
use strata_model::{Model, ModelError};
use strata_testkit::golden;
use tempfile::TempDir;

use crate::copy::{Parts, tiny};

/// Oracle: the reference prompt of the demo model: template and tokenizer together give exactly its ids.
#[test]
fn pebble_opens_and_makes_the_reference_prompt() {
    let model = Model::open(&golden::pebble()).expect("opens");
    assert_eq!((model.warnings.len(), model.unused.len(), model.mtp.is_some()), (0, 0, true));
    let template = model.template.as_ref().expect("has a template");
    let options =
        RenderOptions { add_generation_prompt: true, enable_thinking: Some(false), ..Default::default() };
    let text =
        template.render(&[Message::text("user", "What does \"ocean\" mean?")], &options).expect("renders");
    let ids = model.tokenizer.encode_start(&text, true).expect("encodes");
    assert_eq!(ids, golden::Npz::golden("pebble/logits.npz").ids("ids0"));
}

/// Oracle: the definition. Equal files are equal; another model, another value or another weight is not.
#[test]
fn fingerprints_tell_models_apart() {
    let print = |path: &std::path::Path| Model::open(path).expect("opens").fingerprint().expect("reads");
    let folder = TempDir::new().expect("a folder");
    let original = print(&tiny());
    assert_eq!(original, print(&tiny()));
    assert_ne!(original, print(&golden::dir().join("tiny/tiny-nomtp.gguf")));
    let mut parts = Parts::tiny();
    let copied = print(&parts.write(&folder));
    assert_eq!(copied, print(&parts.write(&folder)));
    parts.metadata.insert("general.name", "another");
    let renamed = print(&parts.write(&folder));
    assert_ne!(copied, renamed);
    parts.get("output.weight").bytes.fill(1);
    assert_ne!(renamed, print(&parts.write(&folder)));
}

/// Oracle: the sentence each mistake promises: it names the file.
#[test]
fn what_is_no_model_is_refused() {
    let folder = TempDir::new().expect("a folder");
    let refused = |parts: &Parts| {
        let path = parts.write(&folder);
        let error = Model::open(&path).expect_err("refused").to_string();
        assert!(error.contains("changed.gguf") && !error.contains('\n'), "{error}");
        error
    };
    let alone = Model::open(&golden::dir().join("tiny/tiny-mtp-only.gguf")).expect_err("refused").to_string();
    assert!(alone.contains("tiny-mtp-only.gguf") && alone.contains("draft"), "{alone}");

    let changed = |change: &dyn Fn(&mut Parts)| {
        let mut parts = Parts::tiny();
        change(&mut parts);
        refused(&parts)
    };
    assert!(changed(&|p| drop(p.metadata.insert("general.architecture", "gemma9"))).contains("`gemma9`"));
    assert!(changed(&|p| drop(p.metadata.remove("qwen4exp.embedding_length"))).contains("embedding_length"));
    assert!(changed(&|p| drop(p.metadata.remove("tokenizer.ggml.merges"))).contains("tokenizer.ggml.merges"));
    assert!(changed(&|p| drop(p.metadata.insert("tokenizer.ggml.model", "llama"))).contains("`llama`"));
    assert!(changed(&|p| drop(p.metadata.insert("tokenizer.ggml.eos_token_id", 384u32))).contains("384"));
    assert!(changed(&|p| drop(p.metadata.insert("tokenizer.chat_template", "{% if %}"))).contains("line 1"));
    assert!(changed(&|p| drop(p.remove("token_embd.weight"))).contains("token_embd.weight"));
    assert!(changed(&|p| drop(p.remove("blk.2.ssm_out.weight"))).contains("blk.2.ssm_out.weight"));
    let fewer = changed(&|p| {
        let short = |value: Option<&Value>| match value {
            Some(Value::Array(strata_gguf::Array::String(v))) => Value::from(v[..380].to_vec()),
            Some(Value::Array(strata_gguf::Array::I32(v))) => Value::from(v[..380].to_vec()),
            other => panic!("{other:?}"),
        };
        for key in ["tokenizer.ggml.tokens", "tokenizer.ggml.token_type"] {
            let value = short(p.metadata.get(key));
            p.metadata.insert(key, value);
        }
    });
    assert!(fewer.contains("380 tokens") && fewer.contains("384 rows"), "{fewer}");

    let error = Model::open(&folder.path().join("absent.gguf")).expect_err("refused");
    assert!(matches!(error, ModelError::Gguf(_)) && error.to_string().contains("absent.gguf"), "{error}");
}

/// Oracle: the warning's definition, through the whole opening.
#[test]
fn warnings_are_collected() {
    let folder = TempDir::new().expect("a folder");
    let mut parts = Parts::tiny();
    parts.metadata.remove("tokenizer.ggml.pre");
    parts.metadata.insert("qwen4exp.attention.compress_ratios", vec![0i32; 5]);
    parts.metadata.remove("tokenizer.chat_template");
    let model = Model::open(&parts.write(&folder)).expect("opens");
    assert!(model.template.is_none());
    let said: Vec<String> = model.warnings.iter().map(ToString::to_string).collect();
    assert_eq!(said.len(), 2);
    assert!(said[0].contains("compress_ratios") && said[1].contains("tokenizer.ggml.pre"));
}

/// Oracle: the other GGUFs of the demo model, where present: another format in every layer.
#[test]
fn large_copies_open() {
    for name in ["pebble-zoo.gguf", "pebble-q8_0.gguf"] {
        let Some(path) = golden::large_model(name) else { continue };
        let model = Model::open(&path).expect("opens");
        assert_eq!((model.warnings.len(), model.unused.len()), (0, 0));
        let pebble = Model::open(&golden::pebble()).expect("opens");
        assert_eq!(model.hyper, pebble.hyper);
        assert_ne!(model.fingerprint().expect("reads"), pebble.fingerprint().expect("reads"));
        assert!(Gguf::open(&path).expect("opens").tensors().len() >= 246 - 32);
    }
}
