//! Where workers work: scratch floats and quantised columns, one place per worker or one for all.
//!
//! Owns the memory and the rule how an op's rows are spread over the workers ([`Spread`]). Does not know what an op
//! computes, nor how large its scratch is: each op's file says that, and [`crate::memory`] takes the largest.
//!
//! Two ways of using the same bench, with the same bits:
//! - *by tiles*: each worker takes [`TILE`] rows through all of an op, on its own place. No waiting between the op's stages;
//!   every worker reads all weights, so this is for weights that fit a core's own cache and for windows of many rows.
//! - *together*: all workers share each stage of the op over up to `TILE * threads` rows, on the whole bench. Weights are
//!   read once; a stage too small to share is done by the caller alone.

use std::ops::Range;

use strata_plan::Block;
use strata_quant::{Activations, Isa, Matrix};
use strata_topology::Pool;

use crate::shared::{Grid, Input, Job, Split, Tile, in_turn, products, run, run_on};

/// Rows that a worker takes through an op at a time; columns of one [`Activations`].
pub(crate) const TILE: usize = 32;

/// Most residual streams: a row's streams are columns of one tile.
pub(crate) const MOST_STREAMS: usize = TILE;

/// Weights of an op up to this size stay in a core's own cache while it takes tiles through them, bytes.
const PRIVATE: usize = 2 << 20;

/// The least work worth another task, in products of a block format (about 16 a nanosecond). A region costs 1 to 2 us, most of
/// it for moving what one core has written to the other.
pub(crate) const GRAIN: usize = 36 << 10;

/// Floats to plan on top of what an op takes: see [`Scratch::take`].
pub(crate) const SLACK: usize = 8 * 16;

/// The scratch of all workers.
pub(crate) struct Bench {
    /// `each` floats per worker, end to end.
    pub(crate) floats: Block<f32>,
    /// Floats per worker.
    pub(crate) each: usize,
    /// Per worker, [`TILE`] columns.
    pub(crate) acts: Vec<Activations>,
}

/// A place to work: a worker's own, or the whole bench.
pub(crate) struct Scratch<'s> {
    /// Contents are whatever was left.
    pub(crate) floats: &'s mut [f32],
    /// Each with room for [`TILE`] columns.
    pub(crate) acts: &'s mut [Activations],
}

impl<'s> Scratch<'s> {
    /// Takes the first `len` floats. What is taken next starts on a cache line again, as the whole does: up to
    /// [`SLACK`] floats are lost to that in an op.
    pub(crate) fn take(&mut self, len: usize) -> &'s mut [f32] {
        let (taken, rest) = std::mem::take(&mut self.floats).split_at_mut(len.next_multiple_of(16));
        self.floats = rest;
        &mut taken[..len]
    }
}

impl Bench {
    /// The whole of it.
    pub(crate) fn whole(&mut self) -> Scratch<'_> {
        Scratch { floats: &mut self.floats, acts: &mut self.acts }
    }
}

/// Everyone: the pool, with what it computes by.
pub(crate) struct Crew {
    pub(crate) pool: Pool,
    pub(crate) isa: Isa,
    pub(crate) grain: usize,
}

impl Crew {
    pub(crate) fn team(&self) -> Team<'_> {
        Team { pool: Some(&self.pool), isa: self.isa, grain: self.grain }
    }
}

/// Who computes a stage: this thread alone, or a pool.
#[derive(Clone, Copy)]
pub(crate) struct Team<'p> {
    /// `None`: this thread alone.
    pub(crate) pool: Option<&'p Pool>,
    /// The path through the kernels.
    pub(crate) isa: Isa,
    /// The least work worth another task: see [`GRAIN`].
    pub(crate) grain: usize,
}

impl<'p> Team<'p> {
    /// How many threads.
    pub(crate) fn threads(&self) -> usize {
        self.pool.map_or(1, Pool::threads)
    }

    /// This thread alone.
    pub(crate) fn alone(&self) -> Team<'p> {
        Team { pool: None, ..*self }
    }

    /// Into how many tasks to cut `work`.
    pub(crate) fn tasks(&self, work: usize) -> usize {
        let threads = self.threads();
        if threads == 1 || work < 2 * self.grain {
            return 1;
        }
        // One task each costs least; a few more where there is much to do, so that a worker that is late costs less.
        let most = if work > 64 * threads * self.grain { 4 * threads } else { threads };
        (work / self.grain).min(most)
    }

    /// How many of `rows` rows of `work` each make a task.
    pub(crate) fn grain(&self, rows: usize, work: usize) -> usize {
        rows.div_ceil(self.tasks(rows * work)).max(1)
    }

    /// `f(rows, out)` for chunks of the rows of `out`, `[rows][width]`; a row costs `work`.
    pub(crate) fn rows(
        &self,
        out: &mut [f32],
        width: usize,
        work: usize,
        f: impl Fn(Range<usize>, &mut [f32]) + Sync,
    ) {
        let grain = self.grain(out.len() / width.max(1), work);
        run(self.pool, Grid::rows(out, width, grain), |task, tile| {
            let out = tile.into_slice();
            f(task * grain..task * grain + out.len() / width.max(1), out);
        });
    }

    /// `f(tile)` for parts of `out`, `[rows][width]`: some of the rows, or of the columns where there are too few rows; a row
    /// costs `work`.
    pub(crate) fn tiles(&self, out: &mut [f32], width: usize, work: usize, f: impl Fn(Tile<'_, f32>) + Sync) {
        let rows = out.len() / width;
        let tasks = self.tasks(rows * work);
        if rows >= tasks {
            return run(self.pool, Grid::rows(out, width, self.grain(rows, work)), |_, tile| f(tile));
        }
        let cut = width.div_ceil(tasks).next_multiple_of(16);
        run(self.pool, Grid::bands(out, width, &[0, rows as u32], cut), |_, tile| f(tile));
    }

    /// Quantises columns `[cols][k]` where one of `matrices` wants that.
    pub(crate) fn input<'a>(
        &self,
        x: &'a [f32],
        k: usize,
        acts: &'a mut [Activations],
        matrices: &[Matrix<'_>],
    ) -> Input<'a> {
        if matrices.iter().all(|w| w.format().is_float()) {
            return Input { x, k, acts: &[] };
        }
        let cols = x.len() / k;
        let blocks = cols.div_ceil(TILE);
        let isa = self.isa;
        let acts = &mut acts[..blocks];
        let pool = self.pool.filter(|_| self.tasks(2 * x.len()) > 1);
        run(pool, Grid::rows(acts, 1, 1), |block, tile| {
            let x = &x[block * TILE * k..cols.min((block + 1) * TILE) * k];
            tile.into_slice()[0].quantise(isa, x, k, x.len() / k);
        });
        Input { x, k, acts }
    }

    /// Multiplies every job's matrix with the input.
    pub(crate) fn products(&self, input: Input<'_>, jobs: &mut [Job<'_>]) {
        let cols = input.x.len() / input.k;
        // Float weights have a quarter of the products per register; a byte that comes from beyond a core's own caches, as
        // weights do in a decode step, takes as long as 1.6 products.
        let row = |w: &Matrix<'_>| {
            let bytes = w.format().row_bytes(w.k()).unwrap_or(0);
            (w.k() * cols * if w.format().is_float() { 4 } else { 1 }).max(bytes * 8 / 5)
        };
        let work: usize = jobs.iter().map(|job| job.w.rows() * row(&job.w)).sum();
        products(self.pool, self.isa, self.tasks(work), input, jobs);
    }
}

/// How an op's rows are spread: see the module.
pub(crate) struct Spread<'p> {
    team: Team<'p>,
    rows: usize,
    /// Rows of a tile, or of what is done together.
    pub(crate) grain: usize,
    tiles: bool,
}

impl<'p> Spread<'p> {
    /// For an op over `rows` rows with `weights` bytes of weights.
    pub(crate) fn new(team: Team<'p>, rows: usize, weights: usize) -> Spread<'p> {
        Spread::of_columns(team, rows, 1, weights)
    }

    /// For an op whose products have `columns` columns for each row.
    pub(crate) fn of_columns(team: Team<'p>, rows: usize, columns: usize, weights: usize) -> Spread<'p> {
        let (threads, tile) = (team.threads(), TILE / columns);
        let tiles = threads > 1 && rows >= 8 * threads && weights <= PRIVATE;
        // Tiles: as many for each worker.
        let count = rows.div_ceil(tile).next_multiple_of(threads);
        let grain = if tiles { rows.div_ceil(count) } else { tile * threads };
        Spread { team, rows, grain, tiles }
    }

    /// Takes the rows through `f(team, rows, part, scratch)`; `split` is cut every `grain` rows.
    pub(crate) fn run<S: Split>(
        self,
        bench: &mut Bench,
        split: S,
        f: impl Fn(Team<'_>, Range<usize>, S::Part, Scratch<'_>) + Sync,
    ) {
        let Spread { team, rows, grain, tiles } = self;
        let range = |task: usize| task * grain..rows.min((task + 1) * grain);
        if tiles {
            let alone = team.alone();
            run_on(team.pool, bench, split, |task, part, scratch| f(alone, range(task), part, scratch));
        } else {
            in_turn(split, |task, part| f(team, range(task), part, bench.whole()));
        }
    }
}
