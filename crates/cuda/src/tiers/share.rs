//! How many of the experts without a slot the host computes of a window of many rows.
//!
//! The link brings the others meanwhile: of a wide window all of them, and it is at that before a layer's rows are known; of a shorter one those that have rows.
//! The host begins when the rows are known, takes so long for an expert as its rows make it, and is done with a layer before the next can begin. Both should
//! end together. What the host takes, and the GPU between the experts of one layer and the next, is learned from what they took before; what the link takes
//! was measured.
//!
//! Plain data, without a clock.

use std::time::Duration;

use super::split::{ALL, Line};

/// What is presumed of the GPU before a window has shown it: nanoseconds between two layers' experts, for 32 and for 1,024 rows.
const BETWEEN: [(f64, f64); 2] = [(32.0, 0.5e6), (1024.0, 3e6)];
/// And of the host, for an expert with one row and with ten: in what the link takes for it.
const HOST: [(f64, f64); 2] = [(1.0, 1.0), (10.0, 3.0)];

/// What is known.
#[derive(Debug, Clone)]
pub(super) struct Share {
    /// What the link takes for an expert, nanoseconds.
    link: f64,
    /// Always this share, in sixteenths.
    fixed: Option<u32>,
    /// Experts of a layer, and those of them that a row uses.
    experts: f64,
    used: f64,
    /// What the host takes for an expert, by its rows.
    host: Line,
    /// What the GPU takes between two layers' experts, by the window's rows.
    between: Line,
}

impl Share {
    /// For layers of so many experts, of which a row uses some, and a link that takes `link` for each; with a fixed share, if that is wanted.
    pub(super) fn new([experts, used]: [usize; 2], link: Duration, fixed: Option<u32>) -> Share {
        let link = link.as_nanos() as f64;
        let (mut host, mut between) = (Line::default(), Line::default());
        HOST.iter().for_each(|(rows, links)| host.add(*rows, links * link));
        BETWEEN.iter().for_each(|(rows, nanos)| between.add(*rows, *nanos));
        Share { link, fixed, experts: experts as f64, used: used as f64, host, between }
    }

    /// How many of a layer's `missing` experts the host computes of a window of `rows` rows, of which the others come `ahead` of the layer or when its rows
    /// are known; at least so many, unless the share is fixed.
    pub(super) fn of(&self, rows: usize, ahead: bool, missing: usize, least: usize) -> usize {
        if let Some(share) = self.fixed {
            return (missing * share.min(ALL) as usize + ALL as usize / 2) / ALL as usize;
        }
        let rows = rows as f64;
        // As if a row used any expert as likely as any other.
        let touched = 1.0 - (1.0 - self.used / self.experts).powf(rows);
        let (any, each) = self.host.fit();
        let host = touched * any + each * rows * self.used / self.experts;
        let (start, by_row) = self.between.fit();
        let (start, link) = match ahead {
            true => (start + by_row * rows, self.link),
            false => (0.0, touched * self.link),
        };
        let ends = |gets: usize| (start + host * gets as f64).max(link * (missing - gets) as f64);
        (least.min(missing)..=missing).min_by(|a, b| ends(*a).total_cmp(&ends(*b))).unwrap_or(0)
    }

    /// The host took so long for experts with so many rows together.
    pub(super) fn answered(&mut self, experts: usize, rows: usize, took: Duration) {
        if experts > 0 {
            let each = experts as f64;
            self.host.add(rows as f64 / each, took.as_nanos() as f64 / each);
        }
    }

    /// The GPU took so long from the experts of one layer to those of the next, of a window of so many rows.
    pub(super) fn began(&mut self, rows: usize, took: Duration) {
        self.between.add(rows as f64, took.as_nanos() as f64);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LINK: Duration = Duration::from_micros(40);

    /// What a layer takes on a machine, nanoseconds, of which the link is ahead or not: a host that takes `any` and `each` for an expert with rows and for each of its rows, and a GPU that takes `by_row`
    /// between two layers' experts, in microseconds.
    fn layer((any, each, by_row): (f64, f64, f64), rows: usize, ahead: bool, gets: usize) -> f64 {
        let touched = 1.0 - (1.0f64 - 10.0 / 512.0).powf(rows as f64);
        let host = touched * any + each * rows as f64 * 10.0 / 512.0;
        let (start, rest) = (by_row * rows as f64, 40.0 * (435 - gets) as f64);
        1e3 * match ahead {
            true => (start + host * gets as f64).max(rest),
            false => start + (host * gets as f64).max(touched * rest),
        }
    }

    /// Oracle: the best of all shares, on machines whose hosts and GPUs are fast and slow, one after the other; found from what windows of other lengths took.
    #[test]
    fn both_end_together() {
        let mut share = Share::new([512, 10], LINK, None);
        for machine @ (any, each, by_row) in [(30.0, 6.0, 6.0), (15.0, 2.0, 1.0), (200.0, 40.0, 6.0)] {
            for rows in [100, 700, 300, 1500].repeat(300) {
                let of = 10.0 * rows as f64 / 512.0;
                share.answered(
                    100,
                    (100.0 * of) as usize,
                    Duration::from_secs_f64(100e-6 * (any + each * of)),
                );
                share.began(rows, Duration::from_secs_f64(by_row * rows as f64 * 1e-6));
            }
            for (rows, ahead) in
                [(40, false), (150, false), (205, true), (512, true), (1024, true), (2000, true)]
            {
                let takes = |gets| layer(machine, rows, ahead, gets);
                let best = (0..=435).map(takes).fold(f64::INFINITY, f64::min);
                let gets = share.of(rows, ahead, 435, 0);
                assert!(
                    takes(gets) < 1.1 * best,
                    "{machine:?}, {rows}: {gets} take {} of {best}",
                    takes(gets)
                );
            }
        }
    }

    /// Oracle: by hand: rounded to the nearest, halves up; where nothing is missing nobody gets any, nor does a host that is slow, but for what it must.
    #[test]
    fn a_fixed_share_stays() {
        let fixed = |sixteenths| Share::new([512, 10], LINK, Some(sixteenths));
        assert_eq!([0, 1, 8, 31].map(|missing| fixed(8).of(100, true, missing, 1)), [0, 1, 4, 16]);
        assert_eq!([fixed(16).of(100, true, 31, 0), fixed(0).of(100, false, 31, 1)], [31, 0]);
        let mut slow = Share::new([512, 10], LINK, None);
        (0..600).for_each(|_| slow.answered(1, 2, Duration::from_millis(50)));
        assert_eq!([0, 1].map(|least| slow.of(100, true, 31, least)), [0, 1]);
        assert_eq!(slow.of(100, true, 0, 1), 0);
    }
}
