//! How fast this machine's memory is read.

use std::time::Instant;

use strata_topology::{Assignment, Pool, PoolError};

/// Bytes that [`memory_rate`] reads: more than most caches hold; larger ones make its rate an upper bound.
pub const MEASURED: usize = 96 << 20;
const ROUNDS: usize = 3;

/// Bytes a second that the computing threads read together, the best of a few rounds over [`MEASURED`] bytes, which it takes meanwhile.
/// Nothing if memory can't be had.
///
/// # Errors
/// The system refuses a thread.
pub fn memory_rate(assignment: &Assignment) -> Result<Option<f64>, PoolError> {
    let pool = Pool::with(assignment)?;
    let mut words = Vec::<u64>::new();
    if words.try_reserve_exact(MEASURED / 8).is_err() {
        return Ok(None);
    }
    // Written, so that each page is one of its own.
    words.resize(MEASURED / 8, 1);
    let pieces: Vec<&[u64]> = words.chunks(1 << 17).collect();
    let best = (0..ROUNDS).map(|_| {
        let started = Instant::now();
        pool.run(pieces.len(), &|piece, _| {
            std::hint::black_box(pieces[piece].iter().fold(0u64, |sum, word| sum.wrapping_add(*word)));
        });
        MEASURED as f64 / started.elapsed().as_secs_f64()
    });
    Ok(best.reduce(f64::max))
}
