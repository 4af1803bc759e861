//! Conversations: what is kept of them changes nothing, and reasoning is told from answers.

use std::sync::Arc;

use strata_engine::chat::{Answer, Asked, Chat, Manner, Part};
use strata_engine::{Engine, EngineConfig, Event, Reason, Sampling};
use strata_model::Model;
use strata_testkit::golden;

use crate::rig::Rig;

fn manner(think: bool) -> Manner {
    Manner { sampling: Sampling::greedy(), max_tokens: Some(40), think: Some(think), cancel: None }
}

fn finish(engine: &mut Engine, asked: &mut Asked) -> Reason {
    loop {
        for event in engine.step() {
            match event {
                Event::Token { token, .. } => drop(asked.answer.push(token).unwrap()),
                Event::Done { reason, .. } => {
                    asked.answer.finish();
                    return reason;
                }
                Event::Read { .. } => {}
            }
        }
    }
}

fn pebble() -> (Arc<Model>, Engine) {
    let config = EngineConfig { context: Some(1024), ..EngineConfig::default() };
    let engine = Rig { config, ..Rig::default() }.open(&golden::pebble());
    (engine.model().clone(), engine)
}

/// Says something in turn; returns the answers' tokens and how much of each prompt was kept.
fn converse(engine: &mut Engine, questions: &[&str], think: bool, forget: bool) -> Vec<(Vec<u32>, usize)> {
    let model = engine.model().clone();
    let template = model.template.as_ref().unwrap();
    let seq = engine.open().unwrap();
    let mut chat = Chat::new(model.tokenizer.clone(), seq, Some("You know a little.".into()));
    let mut said = Vec::new();
    for question in questions {
        if forget {
            // Nothing is shared with a prompt of one other token: the whole conversation has to be read again.
            assert_eq!(engine.rewind(seq, &[0]).unwrap(), 0);
        }
        let mut asked = chat.ask(template, engine, question, &manner(think)).unwrap();
        finish(engine, &mut asked);
        chat.answered(&asked.answer);
        said.push((asked.answer.tokens().to_vec(), asked.kept));
    }
    engine.close(seq).unwrap();
    said
}

/// Oracle: the same conversation with every prompt read as a whole.
#[test]
fn keeping_a_prefix_changes_nothing() {
    let questions = ["What is the capital of Italy?", "Define courage", "Who are you?"];
    let (_, mut engine) = pebble();
    for think in [false, true] {
        let kept = converse(&mut engine, &questions, think, false);
        let read = converse(&mut engine, &questions, think, true);
        for (i, (kept, read)) in kept.iter().zip(&read).enumerate() {
            assert_eq!(kept.0, read.0, "answer {i}, thinking {think}");
            assert_eq!(read.1, 0);
            assert_eq!(kept.1 > 0, i > 0, "answer {i}, thinking {think}");
        }
    }
}

/// Oracle: a refused question leaves the conversation as it was.
#[test]
fn a_question_too_long_is_forgotten() {
    let (model, mut engine) = pebble();
    let template = model.template.as_ref().unwrap();
    let seq = engine.open().unwrap();
    let mut chat = Chat::new(model.tokenizer.clone(), seq, None);
    assert!(chat.ask(template, &mut engine, &"the sea ".repeat(2000), &manner(false)).is_err());
    let mut asked = chat.ask(template, &mut engine, "What is the capital of Italy?", &manner(false)).unwrap();
    assert!(matches!(finish(&mut engine, &mut asked), Reason::Stop(_)));
    assert_eq!(asked.answer.text(), "The capital of Italy is Rome.");
    assert_eq!(asked.kept, 0);
}

/// Oracle: an answer that was cancelled before its first token takes the question with it.
#[test]
fn a_question_without_an_answer_is_forgotten() {
    let (model, mut engine) = pebble();
    let template = model.template.as_ref().unwrap();
    let seq = engine.open().unwrap();
    let mut chat = Chat::new(model.tokenizer.clone(), seq, None);
    let asked = chat.ask(template, &mut engine, "Define courage", &manner(false)).unwrap();
    engine.canceller(seq).unwrap().cancel();
    let mut asked = asked;
    assert_eq!(finish(&mut engine, &mut asked), Reason::Cancelled);
    chat.answered(&asked.answer);
    let first = chat.ask(template, &mut engine, "What is the capital of Italy?", &manner(false)).unwrap();
    let mut alone = Chat::new(model.tokenizer.clone(), seq, None);
    engine.canceller(seq).unwrap().cancel();
    engine.step();
    let again = alone.ask(template, &mut engine, "What is the capital of Italy?", &manner(false)).unwrap();
    assert_eq!(first.kept + first.new, again.kept + again.new);
}

/// Oracle: the text between the marks and behind them, whatever the model's tokens are.
#[test]
fn reasoning_is_told_from_the_answer() {
    let (model, _) = pebble();
    let tokenizer = &model.tokenizer;
    let encode = |text: &str| tokenizer.encode(text, true).unwrap();
    let read = |prompt: &str, answer: &str| {
        let mut reader = Answer::new(tokenizer, &encode(prompt));
        let mut pieces = String::new();
        for token in encode(answer) {
            let (part, text) = reader.push(token).unwrap();
            pieces.extend(
                text.chars().map(|c| if part == Part::Reasoning { c.to_ascii_uppercase() } else { c }),
            );
        }
        reader.finish();
        (reader.reasoning().to_owned(), reader.text().to_owned(), pieces)
    };
    let open = "<|im_start|>assistant\n<think>\n";
    let shut = "<|im_start|>assistant\n<think>\n\n</think>\n\n";
    let owned = |a: &str, b: &str, c: &str| (a.to_owned(), b.to_owned(), c.to_owned());
    assert_eq!(read(open, "so so\n</think>\n\nyes\n\nno"), owned("so so", "yes\n\nno", "SO SO\nyes\n\nno"));
    assert_eq!(read(shut, "yes"), owned("", "yes", "yes"));
    assert_eq!(read("raw text", "a<think>b</think>c"), owned("b", "ac", "aBc"));
    assert_eq!(read(open, "never done"), owned("never done", "", "NEVER DONE"));
    assert_eq!(read(open, "snow \u{2603}</think>\u{2603}").1, "\u{2603}");
}
