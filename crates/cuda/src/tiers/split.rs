//! How many of a row's experts that are not on the GPU the host computes.
//!
//! The link takes so long for each of them; the host takes so long for any at all and so long for each, which is learned from its answers: they are
//! late when something else has its cores or its memory. It gets as many as let both end together. No such model knows everything, so whole steps are compared
//! now and then with steps for which the link brings all, and the faster way goes on.
//!
//! Plain data, without a clock.

use std::time::Duration;

/// Sixteenths of which all is.
pub(super) const ALL: u32 = 16;
/// How many the host gets, by how many of a row's experts are not on the GPU.
pub(super) type Table = [u8; 64];
/// Answers that the past counts like, at most.
const REMEMBERED: f64 = 512.0;
/// What is presumed of the host before it has answered: nanoseconds for any at all. For each it takes as long as the link.
const START: f64 = 50e3;
/// Steps in which the other way is tried, and as many before are compared with them; the first of them doesn't count.
const TRIED: u32 = 8;
/// Steps between two tries, at most; and after a change, from which on they double.
const STAYS: [u32; 2] = [400, 40];
/// What is seen counts as so many times what was expected at most: first answers, of threads and memory that are cold, say little of the next.
const LATE: f64 = 3.0;
/// In one step of so many, and while it is tried again, a host that would get nothing gets an expert of a row all the same: what is known of it may be old.
const LOOKS: u32 = 32;
/// The other way must be so much faster.
const BETTER: f64 = 0.99;

/// A straight line through what was seen, where what is long past counts little.
#[derive(Debug, Clone, Default)]
pub(super) struct Line {
    weight: f64,
    n: f64,
    t: f64,
    nn: f64,
    nt: f64,
}

impl Line {
    pub(super) fn add(&mut self, n: f64, t: f64) {
        let stays = 1.0 - 1.0 / REMEMBERED;
        for (sum, new) in [
            (&mut self.weight, 1.0),
            (&mut self.n, n),
            (&mut self.t, t),
            (&mut self.nn, n * n),
            (&mut self.nt, n * t),
        ] {
            *sum = *sum * stays + new;
        }
    }

    /// Adds what was seen, as far as it can be believed.
    pub(super) fn learn(&mut self, n: f64, t: f64) {
        let (any, each) = self.fit();
        self.add(n, t.min(LATE * (any + each * n)));
    }

    /// What there is for any at all, and for each: neither is negative.
    pub(super) fn fit(&self) -> (f64, f64) {
        let (n, t) = (self.n / self.weight, self.t / self.weight);
        let (spread, both) = (self.nn / self.weight - n * n, self.nt / self.weight - n * t);
        // Where all were alike, nothing is known of any at all.
        let each = if spread > 0.02 { both / spread } else { t / n };
        let each = each.clamp(0.0, t / n);
        (t - each * n, each)
    }
}

/// Which way a step goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Way {
    /// Host and link.
    Both,
    /// The link alone.
    Link,
}

/// The controller.
#[derive(Debug, Clone)]
pub(super) struct Split {
    host: Line,
    /// What the link takes for an expert, nanoseconds.
    link: f64,
    /// Always this share, in sixteenths.
    fixed: Option<u32>,
    /// Steps so far.
    all: u32,
    /// The way that is faster, and that of the next step.
    better: Way,
    way: Way,
    /// Steps since the way changed, how many it goes on, and the shortest of the latest.
    steps: u32,
    stays: u32,
    shortest: f64,
    /// How many the better way went on before the other was tried.
    stayed: u32,
    /// The shortest of the better way's, while the other is tried.
    to_beat: f64,
}

impl Split {
    /// For a link that takes `link` for an expert; with a fixed share, if that is wanted.
    pub(super) fn new(link: Duration, fixed: Option<u32>) -> Split {
        let link = link.as_nanos() as f64;
        let mut host = Line::default();
        [1.0, 8.0].into_iter().for_each(|n| host.add(n, START + link * n));
        Split {
            host,
            link,
            fixed,
            all: 0,
            better: Way::Both,
            way: Way::Both,
            steps: 0,
            stays: STAYS[1],
            stayed: STAYS[1],
            shortest: f64::INFINITY,
            to_beat: f64::INFINITY,
        }
    }

    /// What the host gets in the next step.
    pub(super) fn table(&self) -> Table {
        let (any, each) = self.host.fit();
        let least = usize::from(self.all.is_multiple_of(LOOKS) || self.better == Way::Link);
        std::array::from_fn(|missing| match (self.fixed, self.way) {
            (Some(share), _) => ((missing as u32 * share.min(ALL) + ALL / 2) / ALL) as u8,
            (None, Way::Link) => 0,
            (None, Way::Both) => {
                // When the later of both ends.
                let ends = |gets: usize| {
                    let host = if gets == 0 { 0.0 } else { any + each * gets as f64 };
                    host.max(self.link * (missing - gets) as f64)
                };
                (least.min(missing)..=missing).min_by(|a, b| ends(*a).total_cmp(&ends(*b))).unwrap_or(0) as u8
            }
        })
    }

    /// The host took so long for so many.
    pub(super) fn answered(&mut self, experts: usize, took: Duration) {
        if experts > 0 {
            self.host.learn(experts as f64, took.as_nanos() as f64);
        }
    }

    /// A step took so long.
    pub(super) fn learn(&mut self, step: Duration) {
        self.steps += 1;
        self.all = self.all.wrapping_add(1);
        // Of the first step of a way, and of those long before the next try, nothing is wanted.
        if self.steps == 1 || self.steps + TRIED == self.stays {
            self.shortest = f64::INFINITY;
        }
        if self.steps > 1 {
            self.shortest = self.shortest.min(step.as_secs_f64());
        }
        if self.steps < self.stays {
            return;
        }
        let other = |way| if way == Way::Both { Way::Link } else { Way::Both };
        if self.way == self.better {
            self.stayed = self.stays;
            (self.way, self.stays, self.to_beat) = (other(self.better), TRIED, self.shortest);
        } else {
            self.stays = (2 * self.stayed).min(STAYS[0]);
            if self.shortest < BETTER * self.to_beat {
                (self.better, self.stays) = (self.way, STAYS[1]);
            }
            self.way = self.better;
        }
        self.steps = 0;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LINK: Duration = Duration::from_micros(40);

    /// Steps of 48 layers with these experts missing, of a host that takes `any` and `each`, in microseconds; the share of steps that went by the
    /// link alone.
    fn run(split: &mut Split, steps: u32, (any, each): (f64, f64), beside: impl Fn(f64) -> f64) -> f64 {
        let mut alone = 0;
        for step in 0..steps {
            let table = split.table();
            alone += u32::from(split.way == Way::Link);
            let mut time = 0.0;
            for layer in 0..48 {
                let missing = 6 + (step + layer) % 5;
                let gets = u32::from(table[missing as usize]);
                assert!(gets <= missing);
                let host = if gets == 0 { 0.0 } else { any + each * f64::from(gets) };
                if gets > 0 {
                    split.answered(gets as usize, Duration::from_secs_f64(host * 1e-6));
                }
                time += host.max(40.0 * f64::from(missing - gets));
            }
            let took = if split.way == Way::Both { beside(time) } else { time };
            split.learn(Duration::from_secs_f64(took * 1e-6));
        }
        f64::from(alone) / f64::from(steps)
    }

    /// What is best, by trying all.
    fn best(missing: u32, any: f64, each: f64) -> f64 {
        let ends = |gets: u32| {
            let host = if gets == 0 { 0.0 } else { any + each * f64::from(gets) };
            host.max(40.0 * f64::from(missing - gets))
        };
        (0..=missing).map(ends).fold(f64::INFINITY, f64::min)
    }

    /// Oracle: the best of all splits, of hosts that are fast, slow, slow to begin; found anew when the host has become another.
    #[test]
    fn both_end_together() {
        let mut split = Split::new(LINK, None);
        for (any, each) in [(50.0, 40.0), (10.0, 15.0), (90.0, 60.0), (0.0, 200.0), (30.0, 30.0)] {
            run(&mut split, 300, (any, each), |time| time);
            split.way = Way::Both;
            for missing in 6..11u32 {
                let gets = u32::from(split.table()[missing as usize]);
                let host = if gets == 0 { 0.0 } else { any + each * f64::from(gets) };
                let ends = host.max(40.0 * f64::from(missing - gets));
                assert!(ends < 1.15 * best(missing, any, each), "{missing}: {gets} end at {ends}");
            }
        }
    }

    /// Oracle: the times that the test makes. A host that slows the steps down by what its answers don't show is left out, and comes back when it doesn't.
    #[test]
    fn the_faster_way_goes_on() {
        let mut split = Split::new(LINK, None);
        assert!(run(&mut split, 2000, (50.0, 40.0), |time| time + 9000.0) > 0.9);
        run(&mut split, 1000, (50.0, 40.0), |time| time);
        let alone = run(&mut split, 2000, (50.0, 40.0), |time| time);
        assert!((0.005..0.05).contains(&alone), "{alone}");
    }

    /// Oracle: the times that the test makes. A host whose first answers are a hundred times as late as later ones, or that is slow for its first steps, has its share
    /// soon after.
    #[test]
    fn a_slow_start_is_forgotten() {
        let mut cold = Split::new(LINK, None);
        (0..20).for_each(|_| cold.answered(3, Duration::from_millis(20)));
        run(&mut cold, 400, (50.0, 40.0), |time| time);
        assert!(run(&mut cold, 200, (50.0, 40.0), |time| time) < 0.3);
        assert!((2..6).contains(&cold.table()[8]), "{:?}", cold.table());
        let mut slow = Split::new(LINK, None);
        run(&mut slow, 60, (900.0, 400.0), |time| time + 9000.0);
        run(&mut slow, 150, (50.0, 40.0), |time| time);
        assert!(run(&mut slow, 200, (50.0, 40.0), |time| time) < 0.3);
        assert!((2..6).contains(&slow.table()[8]), "{:?}", slow.table());
    }

    /// Oracle: by hand: rounded to the nearest, halves up.
    #[test]
    fn a_fixed_share_stays() {
        let mut split = Split::new(LINK, Some(5));
        run(&mut split, 100, (500.0, 400.0), |time| time);
        assert_eq!(split.table()[..9], [0, 0, 1, 1, 1, 2, 2, 2, 3]);
        assert_eq!(Split::new(LINK, Some(16)).table()[32], 32);
    }
}
