//! What happens to a cache: the traces that tests and the bench replay.

use std::ops::Range;

use super::traces::{Event, Model, scan};

/// Which of the traces' laws is nearest to what was published of the real model.
pub const EXPONENT: f64 = 1.3;

/// A trace that is disturbed once.
pub struct Scene {
    pub events: Vec<Event>,
    /// Steps before the disturbance, without the first ones.
    pub before: Range<usize>,
    /// Steps after it.
    pub after: Range<usize>,
}

/// One topic for all steps.
pub fn one_topic(count: usize) -> Vec<Event> {
    Model::new(EXPONENT, 1, 1).steps(0, count)
}

/// 16 topics, which change every 128 steps on average.
pub fn many_topics(count: usize) -> Vec<Event> {
    Model::new(EXPONENT, 16, 2).drifting(16, count)
}

/// Every expert as often as any other.
pub fn uniform(count: usize) -> Vec<Event> {
    Model::new(0.0, 1, 3).steps(0, count)
}

const BEFORE: usize = 700;

/// The same topic before and after something.
fn disturbed(by: impl FnOnce(&mut Model) -> Vec<Event>, topic_after: usize, count: usize) -> Scene {
    let mut model = Model::new(EXPONENT, 16, 4);
    let mut events = model.steps(0, BEFORE);
    events.extend(by(&mut model));
    let after = events.len();
    events.extend(model.steps(topic_after, count));
    Scene { events, before: BEFORE - 300..BEFORE, after: after..after + count }
}

/// Another topic from one step to the next.
pub fn switch() -> Scene {
    disturbed(|_| Vec::new(), 1, 512)
}

/// A pass through all experts.
pub fn scanned() -> Scene {
    disturbed(|_| scan(52), 0, 64)
}

/// A prompt of 2,048 tokens of the topic that goes on.
pub fn prompt() -> Scene {
    disturbed(|model| vec![model.prompt(0, 2048)], 0, 64)
}

/// A prompt of 2,048 tokens of another topic, after which the old one goes on.
pub fn other_prompt() -> Scene {
    disturbed(|model| vec![model.prompt(1, 2048)], 0, 64)
}

/// A prompt of another topic, in which it is also answered.
pub fn prompt_and_answer() -> Scene {
    disturbed(|model| vec![model.prompt(1, 2048)], 1, 64)
}
