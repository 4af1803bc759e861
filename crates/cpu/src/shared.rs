//! Memory that the workers of a region write at the same time, each in a part of its own.
//!
//! Owns the ways in which memory can be cut ([`Grid`], [`Picked`], [`Job`]s of a product, a [`Bench`] per worker) and the
//! only functions that hand the parts out ([`run`], [`run_on`], [`in_turn`], [`products`]). Does not know what is computed.
//!
//! Invariant: a split exists for one region and is consumed by it; it hands out part `t` to task `t` only, once; and the
//! parts of different tasks don't overlap, by construction or by a check in the constructor.
//!
//! All `unsafe` of this crate is here and in [`relay`](crate::relay), but for what `strata_quant::dispatch!` expands to.

#![allow(unsafe_code)]

use std::marker::PhantomData;
use std::ops::Range;

use strata_quant::{Activations, Columns, Isa, Matrix, Out, matmul};
use strata_topology::Pool;

use crate::bench::{Bench, Scratch};

/// Memory cut into one part per task.
///
/// # Safety
/// Parts of different tasks must not overlap, and must be sound to write from different threads.
pub(crate) unsafe trait Split: Sync {
    /// What a task gets.
    type Part;

    /// How many tasks there are.
    fn tasks(&self) -> usize;

    /// The part of `task`, which must be below `tasks()`.
    ///
    /// # Safety
    /// Called at most once for each task in the life of the split.
    unsafe fn part(&self, task: usize) -> Self::Part;
}

macro_rules! split_tuple {
    ($($name:ident $at:tt),+) => {
        // SAFETY: parts of different tasks don't overlap in any of the members, which borrow different memory.
        unsafe impl<$($name: Split),+> Split for ($($name,)+) {
            type Part = ($($name::Part,)+);
            fn tasks(&self) -> usize {
                let tasks = self.0.tasks();
                assert!($(self.$at.tasks() == tasks)&&+, "parts for different numbers of tasks");
                tasks
            }
            unsafe fn part(&self, task: usize) -> Self::Part {
                // SAFETY: once for each task, by this function's own contract.
                unsafe { ($(self.$at.part(task),)+) }
            }
        }
    };
}
split_tuple!(A 0, B 1);
split_tuple!(A 0, B 1, C 2);
split_tuple!(A 0, B 1, C 2, D 3);
split_tuple!(A 0, B 1, C 2, D 3, E 4);

/// A row-major matrix cut into bands of rows and columns: task `b * cuts + c` has band `b`'s part of cut `c`.
pub(crate) struct Grid<'a, T> {
    start: *mut T,
    width: usize,
    bands: Bands<'a>,
    cut: usize,
    cuts: usize,
    memory: PhantomData<&'a mut [T]>,
}

enum Bands<'a> {
    /// Bands of `grain` rows; the last may be shorter.
    Even { rows: usize, grain: usize },
    /// Band `b` has rows `bounds[b] - bounds[0] .. bounds[b + 1] - bounds[0]`; bounds ascend.
    Bounds(&'a [u32]),
}

// SAFETY: a grid is a `&mut [T]` that is not used as a whole; its parts go to other threads, hence `T: Send`.
unsafe impl<T: Send> Sync for Grid<'_, T> {}

impl<'a, T> Grid<'a, T> {
    /// Bands of `grain` rows of `width` elements, over all columns.
    pub(crate) fn rows(data: &'a mut [T], width: usize, grain: usize) -> Self {
        let rows = data.len() / width.max(1);
        assert!(
            rows * width == data.len() && grain > 0,
            "{} elements are not {rows} rows of {width}",
            data.len()
        );
        Grid::new(data, width, Bands::Even { rows, grain }, width.max(1))
    }

    /// Bands of rows `bounds[b] .. bounds[b + 1]`, counted from `bounds[0]`, cut every `cut` columns.
    pub(crate) fn bands(data: &'a mut [T], width: usize, bounds: &'a [u32], cut: usize) -> Self {
        assert!(bounds.is_sorted() && cut > 0, "bands that descend");
        let rows = bounds.last().map_or(0, |&last| (last - bounds[0]) as usize);
        assert!(rows * width <= data.len(), "{} elements are fewer than {rows} rows of {width}", data.len());
        Grid::new(data, width, Bands::Bounds(bounds), cut)
    }

    fn new(data: &'a mut [T], width: usize, bands: Bands<'a>, cut: usize) -> Self {
        let cuts = width.div_ceil(cut).max(1);
        Grid { start: data.as_mut_ptr(), width, bands, cut, cuts, memory: PhantomData }
    }

    fn band(&self, band: usize) -> Range<usize> {
        match self.bands {
            Bands::Even { rows, grain } => (band * grain).min(rows)..((band + 1) * grain).min(rows),
            Bands::Bounds(bounds) => {
                (bounds[band] - bounds[0]) as usize..(bounds[band + 1] - bounds[0]) as usize
            }
        }
    }
}

// SAFETY: bands are disjoint rows (even ones by arithmetic, bounds because they were checked to ascend), cuts are disjoint
// columns, and (band, cut) is a function of the task that repeats for no other task. All lie inside the borrowed memory.
unsafe impl<'a, T: Send> Split for Grid<'a, T> {
    type Part = Tile<'a, T>;

    fn tasks(&self) -> usize {
        let bands = match self.bands {
            Bands::Even { rows, grain } => rows.div_ceil(grain),
            Bands::Bounds(bounds) => bounds.len().saturating_sub(1),
        };
        bands * self.cuts
    }

    unsafe fn part(&self, task: usize) -> Tile<'a, T> {
        let rows = self.band(task / self.cuts);
        let first = (task % self.cuts * self.cut).min(self.width);
        let cols = self.cut.min(self.width - first);
        // SAFETY: `rows.start` is at most the number of rows, so this is inside the borrowed memory or one past it.
        let start = unsafe { self.start.add(rows.start * self.width) };
        let (top, stride) = (rows.start, self.width);
        Tile { start, stride, top, rows: rows.len(), first, cols, memory: PhantomData }
    }
}

/// A rectangle of a row-major matrix, exclusively its holder's: columns `first .. first + cols` of rows `top .. top + rows`.
pub(crate) struct Tile<'a, T> {
    /// The first row's first element, also where that is not of the rectangle.
    start: *mut T,
    stride: usize,
    top: usize,
    rows: usize,
    first: usize,
    cols: usize,
    memory: PhantomData<&'a mut [T]>,
}

impl<'a, T> Tile<'a, T> {
    /// How many rows.
    pub(crate) fn rows(&self) -> usize {
        self.rows
    }

    /// The first row and column, in the matrix.
    pub(crate) fn place(&self) -> (usize, usize) {
        (self.top, self.first)
    }

    /// The part of row `row`.
    pub(crate) fn row(&mut self, row: usize) -> &mut [T] {
        assert!(row < self.rows, "row {row} of {}", self.rows);
        // SAFETY: the row is inside the rectangle, which is exclusively ours for `'a`.
        unsafe { std::slice::from_raw_parts_mut(self.start.add(row * self.stride + self.first), self.cols) }
    }

    /// All rows as one slice: for rectangles as wide as their matrix.
    pub(crate) fn into_slice(self) -> &'a mut [T] {
        assert!(self.cols == self.stride || self.rows <= 1, "a cut through columns is no slice");
        if self.rows == 0 {
            return &mut [];
        }
        // SAFETY: whole rows follow each other without gaps; all are exclusively ours for `'a`.
        unsafe { std::slice::from_raw_parts_mut(self.start.add(self.first), self.rows * self.cols) }
    }
}

impl Tile<'_, f32> {
    /// Fills the rectangle with products: row `c` of it takes column `c` of `x` times the rows of `w` that the
    /// rectangle's columns stand for.
    pub(crate) fn multiply(&mut self, isa: Isa, w: Matrix<'_>, x: Columns<'_>) {
        // SAFETY: `rows` rows of `stride` elements from `start` on are inside the matrix; of these only the rectangle, which
        // is exclusively ours, is written: its columns are the rows given to `matmul`.
        let out = unsafe { Out::shared(self.start, self.rows * self.stride, self.stride) };
        matmul(isa, w, self.first..self.first + self.cols, x, out);
    }
}

/// Items of equal size, some of which are picked, each cut every `sub` elements: task `i * subs + s` has part `s` of item
/// `order[i]`.
pub(crate) struct Picked<'a, T> {
    start: *mut T,
    each: usize,
    order: &'a [u32],
    sub: usize,
    memory: PhantomData<&'a mut [T]>,
}

// SAFETY: as for `Grid`.
unsafe impl<T: Send> Sync for Picked<'_, T> {}

impl<'a, T> Picked<'a, T> {
    /// Items of `each` elements, of which `order` picks some; no item twice.
    pub(crate) fn new(data: &'a mut [T], each: usize, order: &'a [u32], sub: usize) -> Self {
        let items = data.len() / each.max(1);
        assert!(each > 0 && sub > 0, "empty items");
        for (i, &item) in order.iter().enumerate() {
            assert!(
                (item as usize) < items && !order[..i].contains(&item),
                "item {item} twice or beyond {items}"
            );
        }
        Picked { start: data.as_mut_ptr(), each, order, sub, memory: PhantomData }
    }
}

// SAFETY: items are disjoint and none is picked twice (checked); their parts are disjoint by arithmetic.
unsafe impl<'a, T: Send + 'a> Split for Picked<'a, T> {
    type Part = &'a mut [T];

    fn tasks(&self) -> usize {
        self.order.len() * self.each.div_ceil(self.sub)
    }

    unsafe fn part(&self, task: usize) -> &'a mut [T] {
        let subs = self.each.div_ceil(self.sub);
        let first = task % subs * self.sub;
        let len = self.sub.min(self.each - first);
        let item = self.order[task / subs] as usize;
        // SAFETY: inside item `item`, which lies inside the borrowed memory (checked); nobody else gets this part.
        unsafe { std::slice::from_raw_parts_mut(self.start.add(item * self.each + first), len) }
    }
}

/// Runs a region: `f(task, part)` once for each task of `split`, on the pool or, without one, here.
pub(crate) fn run<S: Split>(pool: Option<&Pool>, split: S, f: impl Fn(usize, S::Part) + Sync) {
    let tasks = split.tasks();
    // SAFETY: a pool (and the loop) calls each task below `tasks` once, and `split` goes with this call.
    let call = |task: usize, _: usize| f(task, unsafe { split.part(task) });
    match pool.filter(|_| tasks > 1) {
        Some(pool) => pool.run(tasks, &call),
        None => (0..tasks).for_each(|task| call(task, 0)),
    }
}

/// Calls `f(task, part)` for one task of `split` after the other, here.
pub(crate) fn in_turn<S: Split>(split: S, mut f: impl FnMut(usize, S::Part)) {
    for task in 0..split.tasks() {
        // SAFETY: each task once, and `split` goes with this call.
        f(task, unsafe { split.part(task) });
    }
}

/// Runs a region whose tasks need scratch: `f(task, part, scratch)` once for each task, with the scratch of the worker that
/// runs it.
pub(crate) fn run_on<S: Split>(
    pool: Option<&Pool>,
    bench: &mut Bench,
    split: S,
    f: impl Fn(usize, S::Part, Scratch<'_>) + Sync,
) {
    let tasks = split.tasks();
    let workers = bench.acts.len();
    assert!(pool.is_none_or(|pool| pool.threads() <= workers), "a bench for {workers} workers");
    let places =
        Places { floats: bench.floats.as_mut_ptr(), acts: bench.acts.as_mut_ptr(), each: bench.each };
    let call = |task: usize, worker: usize| {
        assert!(worker < workers);
        // SAFETY: each task once (see `run`). No two threads have the same worker number at a time and a thread runs one
        // task at a time, so the scratch of `worker` is this call's alone; `bench` is borrowed until the region ends.
        let (part, scratch) = unsafe { (split.part(task), places.scratch(worker)) };
        f(task, part, scratch);
    };
    match pool.filter(|_| tasks > 1) {
        Some(pool) => pool.run(tasks, &call),
        None => (0..tasks).for_each(|task| call(task, 0)),
    }
}

/// Where the workers' scratch lies.
struct Places {
    floats: *mut f32,
    acts: *mut Activations,
    each: usize,
}

// SAFETY: only `scratch` looks behind the pointers, and its contract keeps workers apart.
unsafe impl Sync for Places {}

impl Places {
    /// # Safety
    /// `worker` must exist in the bench behind the pointers, and nobody else may use its scratch while this lives.
    unsafe fn scratch<'s>(&self, worker: usize) -> Scratch<'s> {
        // SAFETY: a bench holds `each` floats and one `Activations` per worker; the caller keeps workers apart.
        unsafe {
            Scratch {
                floats: std::slice::from_raw_parts_mut(self.floats.add(worker * self.each), self.each),
                acts: std::slice::from_raw_parts_mut(self.acts.add(worker), 1),
            }
        }
    }
}

/// One matrix of a product and where its results go: row `r` of column `c` to `out[c * stride + r]`.
pub(crate) struct Job<'a> {
    pub(crate) w: Matrix<'a>,
    start: *mut f32,
    len: usize,
    stride: usize,
    memory: PhantomData<&'a mut [f32]>,
}

// SAFETY: a job is a `&mut [f32]` of which `products` hands out disjoint rows.
unsafe impl Sync for Job<'_> {}

impl<'a> Job<'a> {
    /// All rows of `w`, into `out`.
    pub(crate) fn new(w: Matrix<'a>, out: &'a mut [f32], stride: usize) -> Self {
        assert!(w.rows() <= stride, "{} rows overlap at a stride of {stride}", w.rows());
        Job { w, start: out.as_mut_ptr(), len: out.len(), stride, memory: PhantomData }
    }
}

/// Columns that several matrices multiply: floats, and the same quantised in blocks of [`crate::bench::TILE`] columns.
#[derive(Clone, Copy)]
pub(crate) struct Input<'a> {
    /// `[cols][k]`.
    pub(crate) x: &'a [f32],
    /// Values per column.
    pub(crate) k: usize,
    /// The columns quantised; empty where no matrix wants that.
    pub(crate) acts: &'a [Activations],
}

/// Multiplies: the jobs' rows, end to end, are cut into `tasks` ranges.
pub(crate) fn products(pool: Option<&Pool>, isa: Isa, tasks: usize, input: Input<'_>, jobs: &mut [Job<'_>]) {
    let jobs = &*jobs;
    let total: usize = jobs.iter().map(|job| job.w.rows()).sum();
    // Kernels take several rows at a time; a range should not end inside such a group.
    let grain = total.div_ceil(tasks.max(1)).next_multiple_of(16);
    let call = |task: usize, _: usize| {
        let (mut first, range) = (0, task * grain..total.min((task + 1) * grain));
        for job in jobs {
            let rows = range.start.clamp(first, first + job.w.rows()) - first
                ..range.end.clamp(first, first + job.w.rows()) - first;
            first += job.w.rows();
            if !rows.is_empty() {
                // SAFETY: `jobs` was borrowed exclusively, so each job's memory is ours; ranges of different tasks
                // don't overlap, so neither do the rows of a job that they write; each task is called once.
                unsafe { product(isa, job, rows, input) };
            }
        }
    };
    let tasks = total.div_ceil(grain.max(1));
    match pool.filter(|_| tasks > 1) {
        Some(pool) => pool.run(tasks, &call),
        None => (0..tasks).for_each(|task| call(task, 0)),
    }
}

/// Rows `rows` of a job.
///
/// # Safety
/// Nobody else may read or write these rows of the job's results at the same time.
unsafe fn product(isa: Isa, job: &Job<'_>, rows: Range<usize>, input: Input<'_>) {
    if job.w.format().is_float() {
        // SAFETY: the memory is valid (`Job::new`); the rows are the caller's.
        let out = unsafe { Out::shared(job.start, job.len, job.stride) };
        return matmul(isa, job.w, rows, Columns::Float(input.x), out);
    }
    let mut column = 0;
    for acts in input.acts {
        let at = (column * job.stride).min(job.len);
        // SAFETY: as above, from column `column` on: the pointer stays inside the memory or one past it.
        let out = unsafe { Out::shared(job.start.add(at), job.len - at, job.stride) };
        matmul(isa, job.w, rows.clone(), Columns::Quantised(acts), out);
        column += acts.cols();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use strata_topology::Topology;

    fn pool() -> Pool {
        Pool::new(&Topology::read(), 2).unwrap()
    }

    /// Oracle: every element belongs to exactly one task, by the documented numbering.
    #[test]
    fn parts_cover_a_grid_once() {
        let pool = pool();
        for (rows, width, grain, cut) in [(5, 7, 2, 7), (1, 9, 1, 4), (4, 6, 4, 6), (0, 3, 1, 3)] {
            let all = [0, rows as u32];
            let mut data = vec![0usize; rows * width];
            run(Some(&pool), Grid::rows(&mut data, width, grain), |task, tile| {
                tile.into_slice().iter_mut().for_each(|x| *x += task + 1);
            });
            assert!(data.iter().enumerate().all(|(i, &x)| x == i / width / grain + 1));
            data.fill(0);
            run(Some(&pool), Grid::bands(&mut data, width, &all, cut), |task, mut tile| {
                for row in 0..rows {
                    tile.row(row).iter_mut().for_each(|x| *x += task + 1);
                }
            });
            assert!(data.iter().enumerate().all(|(i, &x)| x == i % width / cut + 1));
        }
        let mut data = vec![0usize; 6 * 5];
        run(Some(&pool), Grid::bands(&mut data, 5, &[2, 3, 3, 8], 3), |task, mut tile| {
            assert_eq!(tile.place(), ([0, 1, 1][task / 2], task % 2 * 3));
            let rows = [1, 0, 5][task / 2];
            (0..rows).for_each(|row| tile.row(row).iter_mut().for_each(|x| *x += task + 1));
        });
        assert!(data.iter().enumerate().all(|(i, &x)| x == if i < 5 { 1 } else { 5 } + i % 5 / 3));
    }

    /// Oracle: the documented numbering; items not picked stay untouched.
    #[test]
    fn picked_items_are_cut() {
        let mut data = vec![0usize; 3 * 5];
        run(Some(&pool()), Picked::new(&mut data, 5, &[2, 0], 2), |task, part| {
            part.iter_mut().for_each(|x| *x += task + 1);
        });
        assert_eq!(data, [4, 4, 5, 5, 6, 0, 0, 0, 0, 0, 1, 1, 2, 2, 3]);
    }

    #[test]
    #[should_panic(expected = "twice")]
    fn no_item_is_picked_twice() {
        Picked::new(&mut [0; 6], 2, &[1, 1], 2);
    }

    #[test]
    #[should_panic(expected = "no slice")]
    fn a_cut_is_no_slice() {
        let mut data = [0; 8];
        run(None, Grid::bands(&mut data, 4, &[0, 2], 2), |_, tile| {
            tile.into_slice();
        });
    }
}
