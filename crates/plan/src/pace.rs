//! How fast a plan can be at most: bytes that have to be read, and the rates at which they come.
//!
//! Bounds, no forecasts: computing, and starting to compute, come on top. One token of one answer reads all dense weights and its experts,
//! those beside the device by link and CPU together, at what host memory gives; so does a window of up to 2,048 rows of a prompt, of all experts, and a wider one brings
//! each expert that the device has no room for over the link once.

use std::fmt;

use crate::Bytes;

/// Bytes a second, where they are known.
#[derive(Debug, Clone, Copy, Default, PartialEq, serde::Serialize)]
pub struct Rates {
    /// Of host memory, by all computing threads.
    pub host: Option<f64>,
    /// Of the device's own memory.
    pub device: Option<f64>,
    /// Of the link between them.
    pub link: Option<f64>,
}

/// Where a model's weights are.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, serde::Serialize)]
pub struct Weights {
    /// Bytes that every token reads.
    pub dense: u64,
    /// Bytes of experts in the device's own memory.
    pub inside: u64,
    /// Bytes of experts beside it; of all where there is no device.
    pub beside: u64,
    /// Experts of a layer, and those of them that a token uses.
    pub experts: usize,
    /// See above.
    pub used: usize,
}

/// What a speed is bounded by.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Bound {
    /// The device's memory.
    Device,
    /// The link.
    Link,
    /// Host memory.
    Host,
}

/// A bound.
#[derive(Debug, Clone, Copy, PartialEq, serde::Serialize)]
pub struct Pace {
    /// At most so many.
    pub tokens_per_second: f64,
    /// What takes most of that time.
    pub bound: Bound,
    /// Bytes that are read for a token from the device's memory, and from beside it.
    pub inside: f64,
    /// See above.
    pub beside: f64,
}

impl Bound {
    fn name(self) -> &'static str {
        match self {
            Bound::Device => "the device's memory",
            Bound::Link => "the link",
            Bound::Host => "host memory",
        }
    }
}

impl fmt::Display for Pace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Pace { tokens_per_second, bound, inside, beside } = *self;
        write!(f, "at most {tokens_per_second:.1} tokens/s, most of all by {}: ", bound.name())?;
        let [inside, beside] = [inside, beside].map(|bytes| Bytes(bytes as u64));
        match inside.0 {
            0 => write!(f, "a token reads {beside}"),
            _ => write!(f, "a token reads {inside} of the device's memory and {beside} beside it"),
        }
    }
}

/// Rows of a window for which the CPU computes beside a device, at most. Twin: `WIDEST` in `strata-cuda`'s `tiers/portion.rs`.
const HELPED: usize = 2048;

impl Weights {
    /// One answer, its experts used evenly. Nothing where a rate that matters isn't known.
    pub fn answer(&self, rates: &Rates) -> Option<Pace> {
        let share = self.used as f64 / self.experts.max(1) as f64;
        let [own, others] = [self.inside, self.beside].map(|bytes| bytes as f64 * share);
        let (inside, beside) = match rates.device {
            Some(_) => (self.dense as f64 + own, others),
            None => (0.0, self.dense as f64 + own + others),
        };
        let time = |bytes: f64, rate: Option<f64>| if bytes > 0.0 { Some(bytes / rate?) } else { Some(0.0) };
        let (there, here) = (time(inside, rates.device)?, time(beside, rates.host)?);
        let bound = if there > here { Bound::Device } else { Bound::Host };
        Some(Pace { tokens_per_second: 1.0 / (there + here), bound, inside, beside })
    }

    /// A prompt that is one window of `tokens` tokens, which uses all experts. Nothing where no link is crossed, or its rate isn't known.
    pub fn prompt(&self, rates: &Rates, tokens: usize) -> Option<Pace> {
        rates.device.filter(|_| self.beside > 0)?;
        let (link, host) = (rates.link?, if tokens <= HELPED { rates.host? } else { 0.0 });
        let (rate, bound) = if host > link { (host, Bound::Host) } else { (link, Bound::Link) };
        let seconds = self.beside as f64 / rate;
        let [inside, beside] =
            [self.dense + self.inside, self.beside].map(|bytes| bytes as f64 / tokens as f64);
        Some(Pace { tokens_per_second: tokens as f64 / seconds, bound, inside, beside })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const WEIGHTS: Weights = Weights { dense: 4000, inside: 10_000, beside: 40_000, experts: 500, used: 10 };

    /// Oracle: by hand.
    #[test]
    fn an_answer_reads_from_two_places() {
        let rates = Rates { host: Some(100.0), device: Some(4200.0), link: None };
        let pace = WEIGHTS.answer(&rates).unwrap();
        // 4,000 and 200 bytes there take a second, 800 beside it eight.
        assert_eq!((pace.inside, pace.beside, pace.bound), (4200.0, 800.0, Bound::Host));
        assert!((pace.tokens_per_second - 1.0 / 9.0).abs() < 1e-12);
        let said = pace.to_string();
        let reads = "by host memory: a token reads 4.1 KiB of the device's memory and 800 B beside it";
        assert!(said.ends_with(reads), "{said}");
        let fast = Rates { host: Some(1e6), ..rates };
        assert_eq!(WEIGHTS.answer(&fast).unwrap().bound, Bound::Device);
        // What isn't read needs no rate.
        let all_inside = Weights { inside: 50_000, beside: 0, ..WEIGHTS };
        assert_eq!(all_inside.answer(&Rates { host: None, ..rates }).unwrap().inside, 5000.0);
        assert_eq!(WEIGHTS.answer(&Rates { host: None, ..rates }), None);
    }

    /// Oracle: by hand. Without a device all of it is read here.
    #[test]
    fn an_answer_without_a_device() {
        let pace = WEIGHTS.answer(&Rates { host: Some(5000.0), ..Rates::default() }).unwrap();
        assert_eq!((pace.tokens_per_second, pace.bound, pace.inside), (1.0, Bound::Host, 0.0));
        assert!(pace.to_string().ends_with("a token reads 4.88 KiB"), "{pace}");
    }

    /// Oracle: by hand. A window brings what is beside the device once; the CPU helps with a short one.
    #[test]
    fn a_prompt_crosses_the_link() {
        let rates = Rates { host: None, device: Some(1.0), link: Some(20_000.0) };
        let pace = WEIGHTS.prompt(&rates, 4096).unwrap();
        assert_eq!((pace.tokens_per_second, pace.bound), (2048.0, Bound::Link));
        assert_eq!(WEIGHTS.prompt(&Rates { device: None, ..rates }, 4096), None);
        let helped = WEIGHTS.prompt(&Rates { host: Some(40_000.0), ..rates }, 1024).unwrap();
        assert_eq!((helped.tokens_per_second, helped.bound), (1024.0, Bound::Host));
        let slow = WEIGHTS.prompt(&Rates { host: Some(10_000.0), ..rates }, 1024).unwrap();
        assert_eq!((slow.tokens_per_second, slow.bound), (512.0, Bound::Link));
        assert_eq!(Weights { beside: 0, ..WEIGHTS }.prompt(&rates, 4096), None);
    }
}
