//! Makes a model: every tensor's bytes, in pieces, by all threads, each to its place in the file.
//!
//! Owns the pieces and who makes them. Bytes are made in a buffer of about a megabyte per thread and written at once, so memory
//! doesn't grow with the model. The container's writer reserves the space before, gives the files their names at the end,
//! and leaves nothing behind when anything fails between.
//!
//! Invariant: a piece's bytes depend on the options and its place only, never on threads or on what was made before.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use strata_gguf::write::{Outline, Writer};
use strata_quant::Format;
use strata_topology::{Pool, Topology};

use crate::blocks::{Weights, encode};
use crate::directions::Directions;
use crate::error::SynthError;
use crate::layout::{Layout, Options, Planned, layout};
use crate::recipe::{Recipe, Spread};
use crate::stream::Stream;
use crate::tensors::Role;

/// About how large a piece is: it stays in a core's own cache until it is written.
const PIECE: u64 = 1 << 20;
/// How often progress is told, about.
const TELL: Duration = Duration::from_millis(200);

/// How far a model is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Progress {
    /// Bytes of tensors that are written.
    pub written: u64,
    /// Bytes of all tensors.
    pub total: u64,
}

/// What was made.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Summary {
    /// The files, in the order of their numbers.
    pub files: Vec<PathBuf>,
    /// Tensors in them.
    pub tensors: usize,
    /// Bytes of all tensors.
    pub bytes: u64,
}

/// Makes the model that `options` ask for at `out` (`NAME.gguf`; if it is split, `NAME-00001-of-0000N.gguf` and so on).
///
/// `progress` is told now and then, from the calling thread, at last that all is written. Setting `cancel` stops it at the next
/// piece.
///
/// # Errors
/// As [`layout`]; if the files are there already and may not be replaced; if they can't be written (a full disk among that);
/// [`SynthError::Cancelled`]. Nothing is left behind.
pub fn write(
    options: &Options,
    out: &Path,
    progress: &mut dyn FnMut(Progress),
    cancel: &AtomicBool,
) -> Result<Summary, SynthError> {
    let layout = layout(options)?;
    let pool = Pool::new(&Topology::read(), options.threads)?;
    check_room(layout.bytes(), out)?;
    let writer = create(options, &layout, out)?;
    let works = works(options, &layout, &pool);
    let pieces = pieces(&layout);
    let buffers: Vec<Mutex<Vec<u8>>> = (0..pool.threads()).map(|_| Mutex::default()).collect();
    let failed: Mutex<Option<SynthError>> = Mutex::new(None);
    let stop = AtomicBool::new(false);

    let total = layout.bytes();
    let mut progress_at = |written| progress(Progress { written, total });
    progress_at(0);
    // As many pieces at a time as take about the time between two tellings.
    let (mut done, mut batch, mut written) = (0, 4 * pool.threads(), 0);
    while done < pieces.len() {
        let now = &pieces[done..pieces.len().min(done + batch)];
        let begin = Instant::now();
        pool.run(now.len(), &|task, worker| {
            if cancel.load(Ordering::Relaxed) || stop.load(Ordering::Relaxed) {
                return;
            }
            let piece = &now[task];
            let mut buffer = buffers[worker].lock().unwrap_or_else(PoisonError::into_inner);
            buffer.resize(piece.bytes as usize, 0);
            works[piece.tensor].fill(piece.at, &mut buffer);
            if let Err(error) = writer.write_at(piece.tensor, piece.at, &buffer) {
                stop.store(true, Ordering::Relaxed);
                failed.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(error.into());
            }
        });
        if let Some(error) = failed.lock().unwrap_or_else(PoisonError::into_inner).take() {
            return Err(error);
        }
        if cancel.load(Ordering::Relaxed) {
            return Err(SynthError::Cancelled(out.to_owned()));
        }
        done += now.len();
        written += now.iter().map(|piece| piece.bytes).sum::<u64>();
        progress_at(written);
        let took = begin.elapsed();
        if took < TELL / 2 {
            batch *= 2;
        } else if took > TELL * 2 {
            batch = (batch / 2).max(pool.threads());
        }
    }
    let files = writer.finish()?;
    Ok(Summary { files, tensors: layout.tensors.len(), bytes: total })
}

/// That the disk has room, before anything is written to it. What stands in the way and may be replaced stays until the end.
fn check_room(needed: u64, out: &Path) -> Result<(), SynthError> {
    let folder = out.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let is_device = std::fs::metadata(out).is_ok_and(|there| !there.is_file());
    // A folder that isn't there is an error of its own, later.
    let Some(disk) = rustix::fs::statvfs(folder).ok().filter(|_| !is_device) else { return Ok(()) };
    let free = disk.f_bavail.saturating_mul(disk.f_frsize);
    if needed > free {
        return Err(SynthError::Room { out: out.to_owned(), needed, free });
    }
    Ok(())
}

fn create(options: &Options, layout: &Layout, out: &Path) -> Result<Writer, SynthError> {
    let mut outline = Outline::new(layout.metadata.clone());
    for tensor in &layout.tensors {
        outline.tensor(&tensor.name, &tensor.shape, tensor.tensor_type())?;
    }
    if let Some(bytes) = options.shard_bytes {
        outline.split_at(bytes);
    }
    outline.overwrite(options.overwrite);
    Ok(outline.create(out)?)
}

/// A part of a tensor: whole blocks, and whole rows where rows have a structure.
struct Piece {
    tensor: usize,
    at: u64,
    bytes: u64,
}

fn pieces(layout: &Layout) -> Vec<Piece> {
    let mut pieces = Vec::new();
    for (number, tensor) in layout.tensors.iter().enumerate() {
        let unit = match tensor.role {
            Role::Embedding | Role::Head | Role::Router => tensor.row_bytes(),
            // Pieces of random bytes best begin at a whole word.
            _ => 8 * tensor.format.block_bytes() as u64,
        };
        let step = unit * (PIECE / unit).max(1);
        let cuts = (0..tensor.bytes).step_by(step as usize);
        pieces.extend(cuts.map(|at| Piece { tensor: number, at, bytes: step.min(tensor.bytes - at) }));
    }
    pieces
}

/// How the bytes of a tensor are made.
enum Work {
    /// Random blocks.
    Weights(Format, Weights),
    /// Random blocks, some of which are repeated, in rows of so many bytes.
    Rows { role: Role, row_bytes: usize, format: Format, weights: Weights, directions: Arc<Directions> },
    /// Floats spread evenly.
    Even { format: Format, stream: Stream, from: f32, to: f32 },
    /// Router rows that see directions.
    Router { layer: u32, hidden: usize, stream: Stream, directions: Arc<Directions> },
}

impl Work {
    fn fill(&self, at: u64, out: &mut [u8]) {
        match self {
            Work::Weights(format, weights) => weights.fill(at / format.block_bytes() as u64, out),
            Work::Rows { role, row_bytes, format, weights, directions } => {
                weights.fill(at / format.block_bytes() as u64, out);
                directions.repeat(*role, at / *row_bytes as u64, *row_bytes, out);
            }
            &Work::Even { format, stream, from, to } => {
                let first = at / format.block_bytes() as u64;
                encode(format, first, out, |first, values| {
                    for (i, value) in (first..).zip(values) {
                        *value = from + (to - from) * (stream.half(i) >> 8) as f32 / (1u32 << 24) as f32;
                    }
                });
            }
            Work::Router { layer, hidden, stream, directions } => {
                directions.router(*layer, *stream).fill(at / (4 * *hidden as u64), *hidden, out);
            }
        }
    }
}

/// The work of every tensor.
fn works(options: &Options, layout: &Layout, pool: &Pool) -> Vec<Work> {
    let spread = Spread::of(&options.geometry);
    let stream = |tensor: &Planned| Stream::new(options.seed, &tensor.name);
    let directions = options.skew_and_cut().and_then(|(skew, cut)| {
        let random = |role| {
            let tensor = layout.tensors.iter().find(|t| t.role == role)?;
            let Recipe::Noise(std) = spread.recipe(role) else { return None };
            Some((tensor.format, Weights::new(tensor.format, stream(tensor), std)))
        };
        let ((_, embedding), (_, head)) = (random(Role::Embedding)?, random(Role::Head)?);
        let join = random(Role::Join);
        let join = join.as_ref().map(|(format, weights)| (*format, weights));
        Some(Arc::new(Directions::new(&options.geometry, cut, skew, [&embedding, &head], join, pool)))
    });
    let work = |tensor: &Planned| {
        let (format, stream) = (tensor.format, stream(tensor));
        let std = match spread.recipe(tensor.role) {
            Recipe::Even(from, to) => return Work::Even { format, stream, from, to },
            Recipe::Gamma(std) => return Work::Weights(format, Weights::around(format, stream, 1.0, std)),
            Recipe::Noise(std) => std,
        };
        let weights = Weights::new(format, stream, std);
        match (tensor.role, &directions) {
            (role @ (Role::Embedding | Role::Head), Some(directions)) => {
                let (row_bytes, directions) = (tensor.row_bytes() as usize, directions.clone());
                Work::Rows { role, row_bytes, format, weights, directions }
            }
            (Role::Router, Some(directions)) => {
                let (layer, hidden) = (tensor.layer.unwrap_or(0), options.geometry.hidden as usize);
                Work::Router { layer, hidden, stream, directions: directions.clone() }
            }
            _ => Work::Weights(format, weights),
        }
    };
    layout.tensors.iter().map(work).collect()
}
