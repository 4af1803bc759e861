//! An answer on its way to a person: steps the engine, shows what comes, measures how fast.

use std::io::IsTerminal;
use std::time::Duration;

use strata_engine::chat::{Answer, Part};
use strata_engine::{Engine, Event, Reason};

use crate::commands::counted;
use crate::config::Environment;
use crate::costs::{Costs, Stopwatch};
use crate::failure::Failure;
use crate::output::print;

/// How an answer came.
#[derive(Debug)]
pub struct Outcome {
    /// Why it ended; never [`Reason::Failed`].
    pub reason: Reason,
    /// Prompt tokens read.
    pub read: usize,
    /// How long that took, up to the first token of the answer.
    pub reading: Duration,
    /// Steps after that, each for one token.
    pub steps: usize,
    /// How long they took.
    pub stepping: Duration,
    /// Where the time of both went.
    pub costs: [Costs; 2],
}

fn rate(tokens: usize, time: Duration) -> Option<f64> {
    (tokens > 0 && !time.is_zero()).then(|| tokens as f64 / time.as_secs_f64())
}

impl Outcome {
    /// Prompt tokens per second.
    pub fn reading_rate(&self) -> Option<f64> {
        rate(self.read, self.reading)
    }

    /// Answered tokens per second.
    pub fn stepping_rate(&self) -> Option<f64> {
        rate(self.steps, self.stepping)
    }

    /// The reason's name in JSON.
    pub fn finish_reason(&self) -> &'static str {
        match self.reason {
            Reason::Stop(_) => "stop",
            Reason::Length => "length",
            Reason::Context => "context",
            Reason::Cancelled | Reason::Failed(_) => "cancelled",
        }
    }

    /// One line about the speed. `kept` prompt tokens had been read before.
    pub fn speed(&self, kept: usize, answered: usize) -> String {
        let per_second =
            |rate: Option<f64>| rate.map_or(String::new(), |rate| format!(", {rate:.1} tokens/s"));
        let before = if kept > 0 { format!(" (and {kept} kept)") } else { String::new() };
        format!(
            "prompt: {}{before}{}; answer: {}{}",
            counted(self.read as u64, "token"),
            per_second(self.reading_rate()),
            counted(answered as u64, "token"),
            per_second(self.stepping_rate())
        )
    }

    /// A table of where the time went.
    pub fn timing(&self) -> String {
        let [reading, stepping] = &self.costs;
        format!("prompt\n{}answer\n{}", reading.as_text(), stepping.as_text()).trim_end().to_owned()
    }
}

/// Steps until the only sequence that is answering is done; `show` gets every piece of text as it completes.
pub fn deliver(
    engine: &mut Engine,
    answer: &mut Answer,
    show: &mut dyn FnMut(Part, &str) -> Result<(), Failure>,
) -> Result<Outcome, Failure> {
    let started = Stopwatch::start(engine);
    let mut outcome = Outcome {
        reason: Reason::Length,
        read: 0,
        reading: Duration::ZERO,
        steps: 0,
        stepping: Duration::ZERO,
        costs: Default::default(),
    };
    let mut read_at: Option<Stopwatch> = None;
    loop {
        let events = engine.step();
        outcome.steps += usize::from(read_at.is_some());
        let mut ended = None;
        for event in events {
            match event {
                Event::Read { read, of, .. } => {
                    outcome.read = read;
                    outcome.reading = started.elapsed();
                    if read == of {
                        outcome.costs[0] = Costs::new(&started.stop(engine), 1, read);
                        read_at = Some(Stopwatch::start(engine));
                    }
                }
                Event::Token { token, .. } => {
                    let (part, text) = answer.push(token)?;
                    show(part, &text)?;
                }
                Event::Done { reason, .. } => ended = Some(reason),
            }
        }
        if let Some(reason) = ended {
            outcome.stepping = read_at.as_ref().map_or(Duration::ZERO, Stopwatch::elapsed);
            let spent = read_at.as_ref().unwrap_or(&started).stop(engine);
            outcome.costs[usize::from(read_at.is_some())] = Costs::new(&spent, 1, outcome.steps.max(1));
            let (part, text) = answer.finish();
            show(part, &text)?;
            return match reason {
                Reason::Failed(why) => Err(Failure::failed(why)),
                reason => Ok(Outcome { reason, ..outcome }),
            };
        }
    }
}

/// Prints an answer piece by piece. On a terminal its reasoning is shown, dimmed where that is possible; elsewhere the
/// answer stands alone.
pub struct Printer {
    terminal: bool,
    style: bool,
    part: Part,
    /// Whether anything was printed of the current part, and whether it ended its line.
    begun: bool,
    line_ended: bool,
}

const DIM: &str = "\x1b[2m";
const PLAIN: &str = "\x1b[0m";

impl Printer {
    pub fn new(environment: &Environment) -> Printer {
        let terminal = std::io::stdout().is_terminal();
        Printer::with(terminal, terminal && environment.allows_style())
    }

    fn with(terminal: bool, style: bool) -> Printer {
        Printer { terminal, style, part: Part::Text, begun: false, line_ended: true }
    }

    /// Prints a piece.
    pub fn show(&mut self, part: Part, text: &str) -> Result<(), Failure> {
        print(&self.dressed(part, text))
    }

    /// Ends the answer's last line and returns to plain text.
    pub fn finish(&mut self) -> Result<(), Failure> {
        let mut out = self.closing();
        if !self.line_ended {
            out.push('\n');
            self.line_ended = true;
        }
        print(&out)
    }

    fn closing(&mut self) -> String {
        let reasoned = self.part == Part::Reasoning && std::mem::take(&mut self.begun);
        let (end, mark) = if self.style { (PLAIN, "") } else { ("", "</think>\n") };
        match (reasoned, self.line_ended) {
            (false, _) => String::new(),
            (true, true) => format!("{end}{mark}"),
            (true, false) => {
                self.line_ended = true;
                format!("{end}\n{mark}")
            }
        }
    }

    fn dressed(&mut self, part: Part, text: &str) -> String {
        if text.is_empty() || (part == Part::Reasoning && !self.terminal) {
            return String::new();
        }
        let mut out = String::new();
        if part != self.part {
            let closed = self.closing();
            if !closed.is_empty() {
                out.push_str(&closed);
                out.push('\n');
            }
            (self.part, self.begun) = (part, false);
        }
        if part == Part::Reasoning && !self.begun {
            out.push_str(if self.style { DIM } else { "<think>\n" });
        }
        self.begun = true;
        self.line_ended = text.ends_with('\n');
        if self.terminal {
            // What a model says must not steer the terminal.
            out.extend(text.chars().map(|c| match c {
                '\n' | '\t' => c,
                c if c.is_control() => char::REPLACEMENT_CHARACTER,
                c => c,
            }));
        } else {
            out.push_str(text);
        }
        out
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn printed(terminal: bool, style: bool, pieces: &[(Part, &str)]) -> String {
        let mut printer = Printer::with(terminal, style);
        let mut out: String = pieces.iter().map(|(part, text)| printer.dressed(*part, text)).collect();
        out.push_str(&printer.closing());
        out
    }

    const PIECES: [(Part, &str); 4] =
        [(Part::Reasoning, "Hm"), (Part::Reasoning, "m."), (Part::Text, "Yes\u{1b}[2J"), (Part::Text, ".")];

    /// Oracle: what a person should see, and what a file should hold.
    #[test]
    fn reasoning_is_told_apart() {
        assert_eq!(printed(true, true, &PIECES), "\x1b[2mHmm.\x1b[0m\n\nYes\u{fffd}[2J.");
        assert_eq!(printed(true, false, &PIECES), "<think>\nHmm.\n</think>\n\nYes\u{fffd}[2J.");
        assert_eq!(printed(false, false, &PIECES), "Yes\u{1b}[2J.");
    }

    /// Oracle: an answer that ends inside its reasoning leaves a plain terminal.
    #[test]
    fn cut_reasoning_is_closed() {
        assert_eq!(printed(true, true, &PIECES[..2]), "\x1b[2mHmm.\x1b[0m\n");
        assert_eq!(
            printed(true, true, &[(Part::Reasoning, "a\n"), (Part::Text, "b")]),
            "\x1b[2ma\n\x1b[0m\nb"
        );
    }

    /// Oracle: tokens divided by seconds; nothing where nothing was measured.
    #[test]
    fn speeds_are_tokens_per_second() {
        let outcome = Outcome {
            reason: Reason::Length,
            read: 50,
            reading: Duration::from_millis(500),
            steps: 0,
            stepping: Duration::ZERO,
            costs: Default::default(),
        };
        assert_eq!(outcome.speed(0, 1), "prompt: 50 tokens, 100.0 tokens/s; answer: 1 token");
        let outcome = Outcome { steps: 9, stepping: Duration::from_secs(3), ..outcome };
        assert_eq!(
            outcome.speed(7, 10),
            "prompt: 50 tokens (and 7 kept), 100.0 tokens/s; answer: 10 tokens, 3.0 tokens/s"
        );
    }
}
