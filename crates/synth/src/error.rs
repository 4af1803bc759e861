//! What can go wrong, each as one sentence that says what to do.

use std::path::PathBuf;

use crate::geometry::GeometryProblem;

/// Why no model can be made.
#[derive(Debug, thiserror::Error)]
pub enum SynthError {
    /// Not the name of a built-in geometry, and no file of that name.
    #[error("there is no geometry `{0}`; give tiny, pebble, flash-next or the path of a JSON file")]
    NoSuchGeometry(String),
    /// A geometry file can't be read.
    #[error("can't read the geometry {}: {source}", .file.display())]
    Read {
        /// The file.
        file: PathBuf,
        /// The system's word.
        source: std::io::Error,
    },
    /// A geometry file isn't a geometry.
    #[error("{} is no geometry: {source}", .file.display())]
    Json {
        /// The file.
        file: PathBuf,
        /// What is wrong, and where.
        source: serde_json::Error,
    },
    /// A geometry that no model can have.
    #[error("geometry `{name}`: {problem}")]
    Geometry {
        /// Its name.
        name: String,
        /// What is wrong with it.
        problem: GeometryProblem,
    },
    /// Not the name of a format mix.
    #[error(
        "there is no format mix `{name}`; give one of {known}, or the name of a block format such as q4_k"
    )]
    NoSuchMix {
        /// The name.
        name: String,
        /// The names of the published mixes.
        known: String,
    },
    /// The exponent of the router skew is out of range.
    #[error("a router skew of {0} makes no sense; give an exponent above 0 and up to 3, such as 0.8")]
    Skew(f64),
    /// The n-gram table can't have so many rows.
    #[error(
        "an n-gram table of {heads} heads can't have {asked} rows; give --ngram-rows from {least} to {most}"
    )]
    TableRows {
        /// What was asked for.
        asked: u64,
        /// Heads of the table.
        heads: u64,
        /// The fewest rows.
        least: u64,
        /// The most rows.
        most: u64,
    },
    /// Rows for a table that the geometry doesn't have.
    #[error("geometry `{0}` has no n-gram table whose rows could be set; leave --ngram-rows out")]
    NoTable(String),
    /// Not a size of files.
    #[error("files can't be split every 0 bytes; give a size, or leave it out for one file")]
    ShardSize,
    /// A model larger than the disk.
    #[error(
        "{}: the model takes {:.1} GB, but its disk has {:.1} GB free; give --ngram-rows, smaller --formats or another disk",
        .out.display(), *.needed as f64 / 1e9, *.free as f64 / 1e9
    )]
    Room {
        /// The file to write.
        out: PathBuf,
        /// Bytes that the model takes.
        needed: u64,
        /// Bytes that the disk has.
        free: u64,
    },
    /// The model can't be written.
    #[error(transparent)]
    Gguf(#[from] strata_gguf::Error),
    /// There are no threads to write it with.
    #[error(transparent)]
    Threads(#[from] strata_topology::PoolError),
    /// Somebody asked to stop.
    #[error("stopped while writing {}; nothing was left behind", .0.display())]
    Cancelled(PathBuf),
}
