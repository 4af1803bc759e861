//! How many of the experts that are not on the GPU the host computes: learned from how long whole steps take.
//!
//! Plain data, without a clock. It goes up and down by one sixteenth at a time and stays where steps are fastest: what the host, the link and the
//! GPU can do changes with everything that runs beside, so nothing is measured once and for all.

use std::time::Duration;

/// Sixteenths of which all is.
pub(super) const ALL: u32 = 16;
/// Steps that a share is tried for; the first of them does not count.
const TRIED: u32 = 6;
/// Steps between two tries of a neighbour.
const STAYS: u32 = 48;
/// A neighbour must be so much faster.
const BETTER: f64 = 0.99;

/// The controller.
#[derive(Debug, Clone)]
pub(super) struct Split {
    /// The share that is best so far, and how long a step takes with it, in seconds.
    best: u32,
    time: Option<f64>,
    /// A neighbour that is tried, or the best.
    now: u32,
    /// Steps with it, and the shortest of those that count.
    steps: u32,
    shortest: f64,
    /// Which neighbour is next.
    up: bool,
    fixed: bool,
}

impl Default for Split {
    fn default() -> Split {
        Split {
            best: ALL / 2,
            time: None,
            now: ALL / 2,
            steps: 0,
            shortest: f64::INFINITY,
            up: true,
            fixed: false,
        }
    }
}

impl Split {
    /// Always this share.
    pub(super) fn fixed(share: u32) -> Split {
        Split { now: share.min(ALL), fixed: true, ..Split::default() }
    }

    /// What the host gets, in sixteenths.
    pub(super) fn share(&self) -> u32 {
        self.now
    }

    /// A step with that share took so long.
    pub(super) fn learn(&mut self, step: Duration) {
        if self.fixed {
            return;
        }
        self.steps += 1;
        if self.steps > 1 {
            self.shortest = self.shortest.min(step.as_secs_f64());
        }
        let trying = self.now != self.best;
        if self.steps < TRIED || (!trying && self.time.is_some() && self.steps < STAYS) {
            return;
        }
        let better = self.time.is_none_or(|time| self.shortest < BETTER * time);
        if trying && better {
            // On in the same direction.
            self.best = self.now;
        } else if trying {
            self.up = !self.up;
        }
        // The best's own time is taken anew each time, for it may have become slower.
        if self.now == self.best {
            self.time = Some(self.shortest);
        }
        let next = if self.up { self.best + 1 } else { self.best.wrapping_sub(1) };
        self.now = if trying && !better {
            self.best
        } else if next > ALL {
            self.turn()
        } else {
            next
        };
        (self.steps, self.shortest) = (0, f64::INFINITY);
    }

    /// At an end: the other way.
    fn turn(&mut self) -> u32 {
        self.up = !self.up;
        if self.up { self.best + 1 } else { self.best - 1 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(split: &mut Split, steps: u32, time: impl Fn(u32) -> f64) {
        for _ in 0..steps {
            let share = split.share();
            assert!(share <= ALL);
            split.learn(Duration::from_secs_f64(time(share)));
        }
    }

    /// Oracle: the fastest share, of times with one minimum; found from wherever it starts, and found anew when it has moved.
    #[test]
    fn the_fastest_share_is_found() {
        for best in [0, 3, 8, 13, ALL] {
            let mut split = Split::default();
            run(&mut split, 1000, |share| 0.010 + 0.001 * f64::from(share.abs_diff(best)));
            assert_eq!(split.best, best);
            run(&mut split, 2000, |share| 0.010 + 0.001 * f64::from(share.abs_diff(ALL - best)));
            assert_eq!(split.best, ALL - best);
        }
    }

    /// Oracle: most steps have the best share, though others are tried for ever.
    #[test]
    fn trying_costs_little() {
        let mut split = Split::default();
        run(&mut split, 500, |share| 0.010 + 0.001 * f64::from(share.abs_diff(6)));
        let mut elsewhere = 0;
        for _ in 0..1000 {
            elsewhere += u32::from(split.share() != 6);
            run(&mut split, 1, |share| 0.010 + 0.001 * f64::from(share.abs_diff(6)));
        }
        assert!((50..200).contains(&elsewhere), "{elsewhere} of 1,000 steps");
    }
}
