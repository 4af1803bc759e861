//! Two stages in one region: what the first makes of an item, in parts, the second reads as a whole.
//!
//! Owns the cutting of both stages into tasks, and the memory between them while the region runs. Does not know what is
//! computed.
//!
//! Invariant: an item's memory is written in disjoint parts until all are done ([`Latch`]); then by the one who did the last
//! of them; and is only read once the latch is open.

#![allow(unsafe_code)]

use std::ops::Range;

use strata_topology::{Latch, Pool};

/// Memory of equally long items, end to end, cut into pieces whatever item they are of.
pub(crate) struct Pieces<'a> {
    pub(crate) data: &'a mut [f32],
    /// Floats of an item.
    pub(crate) each: usize,
    /// Floats of a piece; the last may be shorter.
    pub(crate) grain: usize,
}

impl Pieces<'_> {
    fn count(&self, items: usize) -> usize {
        assert!(self.grain > 0 && self.data.len() == items * self.each, "no {items} items of {}", self.each);
        self.data.len().div_ceil(self.grain)
    }
}

/// What there is for each item.
pub(crate) struct Items<'a, S> {
    /// At least as many as there are items.
    pub(crate) latches: &'a mut [Latch],
    /// What becomes of an item between its stages.
    pub(crate) states: &'a mut [S],
}

/// Where memory starts that the tasks of a region share.
struct Start<T>(*mut T);

// SAFETY: only `relay` looks behind the pointer, by the module's invariant; what it hands to threads is `Send`, what several
// of them read at a time is `Sync`.
unsafe impl<T: Send + Sync> Sync for Start<T> {}

/// For every item: `begin(item, range, part)` for its `range` of `first`, in parts; then once
/// `between(item, whole, state)`; then `end(item, range, whole, state, part)` for its `range` of `second`, in parts. One
/// region on `pool`, or all of it here without one.
pub(crate) fn relay<S: Send + Sync>(
    pool: Option<&Pool>,
    Items { latches, states }: Items<'_, S>,
    first: Pieces<'_>,
    second: Pieces<'_>,
    begin: impl Fn(usize, Range<usize>, &mut [f32]) + Sync,
    between: impl Fn(usize, &mut [f32], &mut S) + Sync,
    end: impl Fn(usize, Range<usize>, &[f32], &S, &mut [f32]) + Sync,
) {
    let items = states.len();
    let counts = [first.count(items), second.count(items)];
    let latches = &mut latches[..items];
    latches.iter_mut().for_each(|latch| latch.close(first.each as u32));
    let latches = &*latches;
    let (each, grain) = ([first.each, second.each], [first.grain, second.grain]);
    let (first, second) = (Start(first.data.as_mut_ptr()), Start(second.data.as_mut_ptr()));
    let states = Start(states.as_mut_ptr());
    // The memory behind the pointers is borrowed exclusively until this function returns.
    let (first, second, states) = (&first, &second, &states);
    let call = |task: usize, _: usize| {
        if task < counts[0] {
            for (item, range) in parts(task, items, each[0], grain[0]) {
                let part = Part { latch: &latches[item], len: range.len() };
                let start = item * each[0] + range.start;
                // SAFETY: inside of `first`. Parts of different tasks don't overlap, each task is called once, and before this
                // part is done nobody has the whole.
                let floats = unsafe { std::slice::from_raw_parts_mut(first.0.add(start), range.len()) };
                begin(item, range, floats);
                if let Some(_last) = part.done() {
                    // SAFETY: all parts of the item are done and their slices gone, and until `_last` is dropped nobody else
                    // gets at it; states are by item.
                    let (whole, state) = unsafe {
                        let whole = std::slice::from_raw_parts_mut(first.0.add(item * each[0]), each[0]);
                        (whole, &mut *states.0.add(item))
                    };
                    between(item, whole, state);
                }
            }
            return;
        }
        for (item, range) in parts(task - counts[0], items, each[1], grain[1]) {
            match pool {
                Some(pool) => pool.wait_for(&latches[item]),
                None => assert!(latches[item].is_open(), "a second stage before the first"),
            }
            // SAFETY: the latch is open and isn't closed again in this region, so the item's memory and state are only read.
            // Of `second`, parts of different tasks don't overlap.
            unsafe {
                let whole = std::slice::from_raw_parts(first.0.add(item * each[0]), each[0]);
                let start = second.0.add(item * each[1] + range.start);
                let part = std::slice::from_raw_parts_mut(start, range.len());
                end(item, range, whole, &*states.0.add(item), part);
            }
        }
    };
    let tasks = counts[0] + counts[1];
    match pool {
        Some(pool) => pool.run(tasks, &call),
        None => (0..tasks).for_each(|task| call(task, 0)),
    }
}

/// A part that is being made. Counts as done by a panic too: nobody would come otherwise, for those who wait.
struct Part<'a> {
    latch: &'a Latch,
    len: usize,
}

impl<'a> Part<'a> {
    fn done(self) -> Option<strata_topology::Last<'a>> {
        let last = self.latch.done(self.len as u32);
        std::mem::forget(self);
        last
    }
}

impl Drop for Part<'_> {
    fn drop(&mut self) {
        drop(self.latch.done(self.len as u32));
    }
}

/// What piece `piece` has of which items.
fn parts(
    piece: usize,
    items: usize,
    each: usize,
    grain: usize,
) -> impl Iterator<Item = (usize, Range<usize>)> {
    let (from, to) = (piece * grain, (items * each).min((piece + 1) * grain));
    (from / each..to.div_ceil(each))
        .map(move |item| (item, from.max(item * each) - item * each..to.min((item + 1) * each) - item * each))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::panic::{AssertUnwindSafe, catch_unwind};
    use strata_topology::Topology;

    /// Oracle: the same in two loops. However both stages are cut, on any number of threads.
    #[test]
    fn stages_follow_each_other() {
        for threads in [1, 2, 3] {
            let pool = Pool::new(&Topology::read(), threads).unwrap();
            for (items, cuts) in [(1, [3, 4]), (3, [7, 10]), (2, [5, 1]), (4, [100, 100])] {
                let mut latches: Vec<Latch> = (0..items).map(|_| Latch::new()).collect();
                let (mut first, mut second) = (vec![0.0; items * 10], vec![0.0; items * 6]);
                for pool in [Some(&pool), None] {
                    for _ in 0..20 {
                        let mut sums = vec![0.0; items];
                        relay(
                            pool,
                            Items { latches: &mut latches, states: &mut sums },
                            Pieces { data: &mut first, each: 10, grain: cuts[0] },
                            Pieces { data: &mut second, each: 6, grain: cuts[1] },
                            |item, range, part| {
                                part.iter_mut().zip(range).for_each(|(x, i)| *x = (item * 100 + i) as f32)
                            },
                            |_, whole, sum| {
                                *sum = whole.iter().sum();
                                whole.reverse();
                            },
                            |_, range, whole, sum, part| {
                                part.iter_mut().zip(range).for_each(|(x, i)| *x = sum + whole[i])
                            },
                        );
                        for (i, &x) in second.iter().enumerate() {
                            let item = i / 6 * 100;
                            let sum: usize = (item..item + 10).sum();
                            assert_eq!(x, (sum + item + 9 - i % 6) as f32, "{i} of {items} items");
                        }
                        second.fill(0.0);
                    }
                }
            }
        }
    }

    /// Oracle: it returns. A part that panics keeps nobody waiting, and the panic is the caller's.
    #[test]
    fn a_panic_keeps_nobody_waiting() {
        let pool = Pool::new(&Topology::read(), 3).unwrap();
        let mut latches = [Latch::new(), Latch::new()];
        for which in 0..8 {
            let (mut first, mut second) = ([0.0; 8], [0.0; 8]);
            let outcome = catch_unwind(AssertUnwindSafe(|| {
                relay(
                    Some(&pool),
                    Items { latches: &mut latches, states: &mut [(), ()] },
                    Pieces { data: &mut first, each: 4, grain: 1 },
                    Pieces { data: &mut second, each: 4, grain: 1 },
                    |item, range, _| assert!(item * 4 + range.start != which, "part {which}"),
                    |_, _, ()| {},
                    |_, _, _, (), _| {},
                );
            }));
            assert!(outcome.is_err());
        }
    }
}
