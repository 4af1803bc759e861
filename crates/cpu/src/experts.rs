//! The routed experts' products, the shared expert, and the sum over all: docs/qwen4exp.md, section 2.4.
//!
//! Owns how (row, expert) pairs become work: a *unit* is up to [`TILE`](crate::bench::TILE) rows of one expert. Expert bytes come from the store
//! only, pinned by whoever computes with them and as long as that. Where it reads experts from files, units are done in portions, each once its
//! experts have been read, while those of the next are.
//!
//! Units are done one per task, each through all of an expert, where that keeps all threads busy; otherwise several units share
//! regions, cut by weight rows: two and more small ones for units of several rows, one for the experts of one row. The bits are the same.

use std::ops::Range;
use std::sync::OnceLock;

use strata_backend::{BackendError, Buffer, ExpertWeights, Layer, MoeShape, Shape, SharedWeights};
use strata_quant::{Columns, Format, Isa, Matrix, Out, dispatch, lanes, math, matmul};
use strata_residency::{ExpertId, ExpertStore, Pinned, StoreError, Tier};
use strata_topology::Latch;

use crate::backend::CpuBackend;
use crate::bench::{Bench, Scratch, Spread, Team};
use crate::relay::{Items, Pieces, relay};
use crate::route::Routing;
use crate::shared::{Grid, Job, run, run_on};
use crate::{failed, weights};

/// Floats of a unit: gathered columns, gate and up products.
pub(crate) fn unit_floats(shape: &Shape, tile: usize) -> usize {
    tile * (shape.hidden + 2 * shape.moe.width)
}

/// Floats of a worker's tile in the combination: gate, up, the shared expert's product.
pub(crate) fn combine_floats(shape: &Shape, tile: usize) -> usize {
    tile * (2 * shape.moe.shared_width + shape.hidden)
}

/// What every unit needs.
pub(crate) struct Stage<'a> {
    pub(crate) store: &'a ExpertStore,
    pub(crate) layer: Layer,
    pub(crate) formats: ExpertWeights,
    /// The gate, up and down products' scales by expert, in files that have them.
    pub(crate) scales: [Option<&'a [f32]>; 3],
    pub(crate) d: usize,
    pub(crate) moe: MoeShape,
    /// The window's rows, `[rows][D]`.
    pub(crate) u: &'a [f32],
    pub(crate) order: &'a [u32],
    pub(crate) units: &'a [u32],
    pub(crate) bounds: &'a [u32],
    /// The first thing that went wrong in a task.
    pub(crate) error: OnceLock<BackendError>,
}

/// An expert's matrices.
struct Expert<'a> {
    gate: Matrix<'a>,
    up: Matrix<'a>,
    down: Matrix<'a>,
}

impl CpuBackend {
    /// The grouped experts' products, kept by place; returns the bytes read.
    pub(crate) fn experts(
        &mut self,
        layer: Layer,
        formats: &ExpertWeights,
        rows: usize,
        u: Buffer,
    ) -> Result<usize, BackendError> {
        let (d, moe) = (self.spec.shape.hidden, self.spec.shape.moe);
        grouped(&self.routing, rows)?;
        if rows == 1 && self.store.reads_files() {
            self.routing.put_first(|expert| {
                let id = ExpertId { layer: layer.0, expert: expert as u16 };
                self.store.tier(id).is_ok_and(|tier| tier == Tier::Heap)
            });
        }
        let routing = &self.routing;
        let team = self.crew.team();
        let [u] = self.buffers.get([(u, rows, d)])?;
        let count = routing.unit_count;
        let mut scales = [None; 3];
        for (scale, weight) in scales.iter_mut().zip(formats.scales) {
            *scale = weight.map(|w| self.weights.vector(w, moe.experts)).transpose()?;
        }
        let stage = Stage {
            store: &self.store,
            layer,
            formats: *formats,
            scales,
            d,
            moe,
            u,
            order: &routing.order[..rows * moe.used],
            units: &routing.units[..count],
            bounds: &routing.bounds[..count + 1],
            error: OnceLock::new(),
        };
        let products = &mut self.products[..rows * moe.used * d];
        // A row for each sequence at most: a step, from which their use is learned.
        let step = rows <= self.spec.sequences;
        for units in self.store.tour(layer.0, stage.units, step)? {
            stage.compute(team, units?, products, &mut self.bench, &mut self.latches);
            if stage.error.get().is_some() {
                break;
            }
        }
        if let Some(error) = stage.error.into_inner() {
            return Err(error);
        }
        let active = routing.units[..count].chunk_by(|a, b| a == b).count();
        Ok(active * expert_bytes(formats, d, moe.width))
    }

    /// The experts' products weighed and summed, with the shared expert; returns the bytes read.
    pub(crate) fn combine(
        &mut self,
        w: &SharedWeights,
        rows: usize,
        u: Buffer,
        y: Buffer,
    ) -> Result<usize, BackendError> {
        let Shape { hidden: d, moe, .. } = self.spec.shape;
        let width = moe.shared_width;
        let team = self.crew.team();
        let [gate, up] = [self.weights.matrix(w.gate, width, d)?, self.weights.matrix(w.up, width, d)?];
        let down = self.weights.matrix(w.down, d, width)?;
        let scalar = self.weights.vector(w.scalar, d)?;
        grouped(&self.routing, rows)?;
        let [u, y] = self.buffers.get([(u, rows, d), (y, rows, d)])?;
        let (u, routing, products) = (&*u, &self.routing, &*self.products);
        let bytes = [&gate, &up, &down].map(weights::bytes).iter().sum();
        let by = Spread::new(team, rows, bytes);
        let split = Grid::rows(y, d, by.grain);
        by.run(&mut self.bench, split, |team, rows, y, mut scratch| {
            let n = rows.len();
            let (gated, ups, shared) =
                (scratch.take(n * width), scratch.take(n * width), scratch.take(n * d));
            let x = &u[rows.start * d..rows.end * d];
            let input = team.input(x, d, scratch.acts, &[gate, up]);
            team.products(input, &mut [Job::new(gate, gated, width), Job::new(up, ups, width)]);
            swiglu(team.isa, gated, ups);
            let input = team.input(gated, width, scratch.acts, &[down]);
            team.products(input, &mut [Job::new(down, shared, d)]);
            team.rows(y.into_slice(), d, (moe.used + 2) * d, |part, y| {
                for (i, y) in part.zip(y.chunks_exact_mut(d)) {
                    let pairs = (rows.start + i) * moe.used..(rows.start + i + 1) * moe.used;
                    let chosen = (&routing.shares[pairs.clone()], &routing.places[pairs]);
                    sum(team.isa, chosen, products, scalar, &x[i * d..][..d], &shared[i * d..][..d], y);
                }
            });
        });
        Ok(bytes)
    }
}

dispatch! {
    /// One row's `sum of p_e * product_e, ascending id, + sigmoid(scalar . u) * shared`.
    fn sum(
        isa,
        chosen: (&[f32], &[u32]),
        products: &[f32],
        scalar: &[f32],
        u: &[f32],
        shared: &[f32],
        y: &mut [f32]
    ) {
        y.fill(0.0);
        for (&share, &place) in chosen.0.iter().zip(chosen.1) {
            lanes::axpy(share, &products[place as usize * y.len()..][..y.len()], y);
        }
        lanes::axpy(math::sigmoid(lanes::dot(scalar, u)), shared, y);
    }
}

dispatch! {
    /// `silu(gate) * up` in place of the gate.
    fn swiglu(isa, gate: &mut [f32], up: &[f32]) {
        for (gate, &up) in gate.iter_mut().zip(up) {
            *gate = math::swiglu(*gate, up);
        }
    }
}

/// All of `w` times one column, into `out`.
fn multiply(isa: Isa, w: Matrix<'_>, x: Columns<'_>, out: &mut [f32]) {
    let rows = out.len();
    if rows > 0 {
        matmul(isa, w, 0..rows, x, Out::new(out, rows));
    }
}

impl Stage<'_> {
    /// All of some units, by the whole team; into `products`, `[places][D]`, of all units. `latches` are one for each expert of a row.
    pub(crate) fn compute(
        &self,
        team: Team<'_>,
        units: Range<usize>,
        products: &mut [f32],
        bench: &mut Bench,
        latches: &mut [Latch],
    ) {
        let d = self.d;
        let tasks = units.len().next_multiple_of(team.threads());
        if team.threads() == 1 || 5 * units.len() > 4 * tasks {
            let bounds = &self.bounds[units.start..=units.end];
            let part = &mut products[bounds[0] as usize * d..bounds[units.len()] as usize * d];
            run_on(team.pool, bench, Grid::bands(part, d, bounds, d), |unit, out, scratch| {
                self.note(self.unit(team.alone(), units.start + unit, out.into_slice(), scratch));
            });
        } else if self.u.len() == d {
            let part = &mut products[units.start * d..units.end * d];
            self.one_row(team, units, part, bench.whole(), latches);
        } else {
            // As many units at a time as there are places for their columns.
            let at_once = bench.acts.len();
            for first in units.clone().step_by(at_once) {
                let units = first..units.end.min(first + at_once);
                self.together(team, units, products, bench.whole());
            }
        }
    }

    /// All of an expert for one unit's rows, into `out`, `[rows][D]`.
    fn unit(
        &self,
        team: Team<'_>,
        unit: usize,
        out: &mut [f32],
        mut scratch: Scratch<'_>,
    ) -> Result<(), BackendError> {
        let (d, width) = (self.d, self.moe.width);
        let n = out.len() / d;
        let pinned = self.pin(unit)?;
        let expert = self.expert(unit, &pinned)?;
        let gathered = scratch.take(n * d);
        let (gate, up) = (scratch.take(n * width), scratch.take(n * width));
        let input = team.input(self.columns(unit, gathered), d, scratch.acts, &[expert.gate, expert.up]);
        team.products(input, &mut [Job::new(expert.gate, gate, width), Job::new(expert.up, up, width)]);
        swiglu(team.isa, gate, up);
        let input = team.input(gate, width, scratch.acts, &[expert.down]);
        team.products(input, &mut [Job::new(expert.down, out, d)]);
        Ok(())
    }

    /// All of the experts of some units, all workers on each stage. The bench has a place for each unit's columns.
    fn together(&self, team: Team<'_>, units: Range<usize>, products: &mut [f32], mut scratch: Scratch<'_>) {
        let (d, width, count) = (self.d, self.moe.width, units.len());
        let bounds = &self.bounds[units.start..=units.end];
        let base = bounds[0] as usize;
        let n = bounds[count] as usize - base;
        let gathered = scratch.take(n * d);
        let (gates, ups) = (scratch.take(n * width), scratch.take(n * width));
        let acts = &mut scratch.acts[..count];
        let blocks = self.blocks();
        let isa = team.isa;
        let columns = Grid::bands(gathered, d, bounds, d);
        let pool = |work| team.pool.filter(|_| team.tasks(work) > 1);
        run(pool(4 * n * d), (columns, Grid::rows(acts, 1, 1)), |unit, (columns, acts)| {
            let x = self.columns_into(units.start + unit, columns.into_slice());
            if blocks {
                acts.into_slice()[0].quantise(isa, x, d, x.len() / d);
            }
        });
        let cut = |total: usize, work| {
            let cuts = team.tasks(work).div_ceil(count);
            total.div_ceil(cuts).next_multiple_of(32)
        };

        let work = n * 2 * width * d;
        let split_width = cut(width, work);
        let cuts = width.div_ceil(split_width);
        let split =
            (Grid::bands(gates, width, bounds, split_width), Grid::bands(ups, width, bounds, split_width));
        let (x, quantised) = (&*gathered, &*acts);
        run(pool(work), split, |task, (mut gate, mut up)| {
            let unit = task / cuts;
            let done = self.pin(units.start + unit).and_then(|pinned| {
                let expert = self.expert(units.start + unit, &pinned)?;
                let x = &x[(bounds[unit] as usize - base) * d..(bounds[unit + 1] as usize - base) * d];
                let columns = |w: &Matrix<'_>| match w.format().is_float() {
                    true => Columns::Float(x),
                    false => Columns::Quantised(&quantised[unit]),
                };
                gate.multiply(isa, expert.gate, columns(&expert.gate));
                up.multiply(isa, expert.up, columns(&expert.up));
                for row in 0..gate.rows() {
                    swiglu(isa, gate.row(row), up.row(row));
                }
                Ok(())
            });
            self.note(done);
        });

        if !self.formats.down.is_float() {
            let split = (Grid::bands(gates, width, bounds, width), Grid::rows(acts, 1, 1));
            run(pool(4 * n * width), split, |_, (gate, acts)| {
                let x = &*gate.into_slice();
                acts.into_slice()[0].quantise(isa, x, width, x.len() / width);
            });
        }

        let work = n * d * width;
        let split_d = cut(d, work);
        let cuts = d.div_ceil(split_d);
        let out = &mut products[base * d..(base + n) * d];
        let (x, quantised) = (&*gates, &*acts);
        run(pool(work), Grid::bands(out, d, bounds, split_d), |task, mut out| {
            let unit = task / cuts;
            let done = self.pin(units.start + unit).and_then(|pinned| {
                let expert = self.expert(units.start + unit, &pinned)?;
                let rows = bounds[unit] as usize - base..bounds[unit + 1] as usize - base;
                let columns = match self.formats.down.is_float() {
                    true => Columns::Float(&x[rows.start * width..rows.end * width]),
                    false => Columns::Quantised(&quantised[unit]),
                };
                out.multiply(isa, expert.down, columns);
                Ok(())
            });
            self.note(done);
        });
    }

    /// Units that are experts of one row, all workers on each, in one region; into `products`, `[units][D]`. The bench has a place for each
    /// unit's columns and one for the row's, and `latches` one for each unit.
    pub(crate) fn one_row(
        &self,
        team: Team<'_>,
        units: Range<usize>,
        products: &mut [f32],
        mut scratch: Scratch<'_>,
        latches: &mut [Latch],
    ) {
        let (d, width, count, isa) = (self.d, self.moe.width, units.len(), team.isa);
        let hidden = scratch.take(count * 2 * width);
        let (row, states) = scratch.acts.split_at_mut(1);
        let (row, states) = (&mut row[0], &mut states[..count]);
        if self.blocks() {
            row.quantise(isa, self.u, d, 1);
        }
        let columns = |w: &Matrix<'_>| match w.format().is_float() {
            true => Columns::Float(self.u),
            false => Columns::Quantised(row),
        };
        // Kernels take 16 rows at a time, or 16 times as many as make whole chunks of 256 values together.
        let cut = |rows: usize, k: usize| {
            let strip = 16 * (8 >> (k / 32).trailing_zeros().min(3));
            rows.div_ceil(team.tasks(rows * k)).next_multiple_of(strip)
        };
        let cuts = [cut(count * 2 * width, d), cut(count * d, width)];
        let alone = cuts[0] >= count * 2 * width && cuts[1] >= count * d;
        relay(
            team.pool.filter(|_| !alone),
            Items { latches, states },
            Pieces { data: hidden, each: 2 * width, grain: cuts[0] },
            Pieces { data: products, each: d, grain: cuts[1] },
            |item, rows, out| {
                self.with(units.start + item, |expert| {
                    // Gate rows lie before up rows.
                    let (gates, ups) = out.split_at_mut(width.clamp(rows.start, rows.end) - rows.start);
                    let gate_rows = rows.start.min(width)..rows.end.min(width);
                    let up_rows = rows.start.max(width) - width..rows.end.max(width) - width;
                    multiply(isa, expert.gate.part(gate_rows), columns(&expert.gate), gates);
                    multiply(isa, expert.up.part(up_rows), columns(&expert.up), ups);
                });
            },
            |_, hidden, acts| {
                let (gate, up) = hidden.split_at_mut(width);
                swiglu(isa, gate, up);
                if !self.formats.down.is_float() {
                    acts.quantise(isa, gate, width, 1);
                }
            },
            |item, rows, hidden, acts, out| {
                self.with(units.start + item, |expert| {
                    let columns = match self.formats.down.is_float() {
                        true => Columns::Float(&hidden[..width]),
                        false => Columns::Quantised(acts),
                    };
                    multiply(isa, expert.down.part(rows), columns, out);
                });
            },
        );
    }

    /// Whether gate or up rows want quantised columns.
    fn blocks(&self) -> bool {
        !self.formats.gate.is_float() || !self.formats.up.is_float()
    }

    /// `f` with a unit's expert, which stays where it is meanwhile.
    fn with(&self, unit: usize, f: impl FnOnce(Expert<'_>)) {
        self.note(self.pin(unit).and_then(|pinned| {
            f(self.expert(unit, &pinned)?);
            Ok(())
        }));
    }

    /// A unit's columns, `[rows][D]`: in place where the rows follow each other, else gathered in `room`.
    fn columns<'r>(&'r self, unit: usize, room: &'r mut [f32]) -> &'r [f32] {
        let rows = self.rows(unit);
        let first = rows[0] as usize;
        if rows.iter().zip(first..).all(|(&row, i)| row as usize == i) {
            return &self.u[first * self.d..][..rows.len() * self.d];
        }
        self.columns_into(unit, room)
    }

    /// A unit's columns, `[rows][D]`, gathered in `room`.
    fn columns_into<'r>(&self, unit: usize, room: &'r mut [f32]) -> &'r [f32] {
        for (&row, room) in self.rows(unit).iter().zip(room.chunks_exact_mut(self.d)) {
            room.copy_from_slice(&self.u[row as usize * self.d..][..self.d]);
        }
        room
    }

    fn rows(&self, unit: usize) -> &[u32] {
        &self.order[self.bounds[unit] as usize..self.bounds[unit + 1] as usize]
    }

    /// Keeps the unit's expert where it is, wherever that is.
    fn pin(&self, unit: usize) -> Result<Pinned<'_>, BackendError> {
        let id = ExpertId { layer: self.layer.0, expert: self.units[unit] as u16 };
        let pinned = self.store.pin_current(id)?;
        match pinned.tier() {
            // Never through the mapping where experts are to be read.
            Tier::Mapped if self.store.reads_files() => Err(StoreError::Absent { id }.into()),
            _ => Ok(pinned),
        }
    }

    fn expert<'p>(&self, unit: usize, pinned: &'p Pinned<'_>) -> Result<Expert<'p>, BackendError> {
        let (d, width, blob) = (self.d, self.moe.width, pinned.blob());
        let id = self.units[unit] as usize;
        let matrix = |format, bytes, k, rows, scales: Option<&[f32]>| {
            let matrix = Matrix::new(format, bytes, k, rows)
                .map_err(|e| failed(format!("an expert of layer {}: {e}", self.layer.0)))?;
            Ok::<_, BackendError>(scales.map_or(matrix, |scales| matrix.scaled(scales[id])))
        };
        let [gate, up, down] = self.scales;
        Ok(Expert {
            gate: matrix(self.formats.gate, blob.gate, d, width, gate)?,
            up: matrix(self.formats.up, blob.up, d, width, up)?,
            down: matrix(self.formats.down, blob.down, width, d, down)?,
        })
    }

    /// Remembers the first failure.
    fn note(&self, done: Result<(), BackendError>) {
        if let Err(error) = done {
            // A later one says no more.
            let _ = self.error.set(error);
        }
    }
}

/// Whether the routing is of these rows, and grouped.
fn grouped(routing: &Routing, rows: usize) -> Result<(), BackendError> {
    if routing.grouped && routing.rows == rows {
        return Ok(());
    }
    Err(failed(format!("{rows} rows for the experts where {} were routed", routing.rows)))
}

fn expert_bytes(w: &ExpertWeights, d: usize, width: usize) -> usize {
    let rows = |format: Format, rows: usize, k| rows * format.row_bytes(k).unwrap_or(0);
    rows(w.gate, width, d) + rows(w.up, width, d) + rows(w.down, d, width)
}
