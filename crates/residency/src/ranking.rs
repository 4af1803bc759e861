//! What was learned about a model's experts, kept beside it across restarts.
//!
//! A small file: which model it is of, when it was saved, and per expert the uses that [`Heat`] counts over the long
//! half-life. It appears whole or not at all. A file that is damaged, of another version or of another model is refused
//! with a sentence; the caller says it and starts without history.
//!
//! The format, little-endian: `strataRK`, version (u32), XXH3-128 of the model's identity and its experts' lengths, seconds
//! since 1970 (u64), steps (u64), uses of each expert (u32 each), and XXH3-64 of everything before. Steps and uses are in
//! [`STEP`](crate::STEP)s, whatever half-life they were counted by.
//!
//! Owns no clock: when it is, and how the model is told from others, are arguments.

use std::fs::File;
use std::io::{self, Read};
use std::path::Path;

use strata_gguf::WholeFile;
use xxhash_rust::xxh3::{xxh3_64, xxh3_128};

use crate::{Heat, Roster};

const MAGIC: &[u8; 8] = b"strataRK";
const VERSION: u32 = 1;
/// Bytes of a file but for the uses.
const LENGTH: usize = 8 + 4 + 16 + 8 + 8 + 8;

/// Long-term uses of all experts.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Ranking {
    /// When, in seconds since 1970.
    pub saved_at: u64,
    pub(crate) steps: u64,
    /// By number in the roster.
    pub(crate) uses: Vec<u32>,
}

/// Why a ranking can't be had. Nothing is wrong with starting without one.
#[derive(Debug, thiserror::Error)]
pub enum RankingError {
    /// The file can't be read.
    #[error("{file}: the learned ranking of experts could not be read: {reason}")]
    Read {
        /// The path.
        file: String,
        /// What the operating system says.
        reason: io::Error,
    },
    /// The file can't be written. The error names it.
    #[error("the learned ranking of experts could not be saved: {0}")]
    Write(#[from] strata_gguf::Error),
    /// It is something else.
    #[error("{file}: this is no ranking of experts; it is ignored, and a new one is learned")]
    Other {
        /// The path.
        file: String,
    },
    /// Of another version.
    #[error(
        "{file}: this ranking of experts has version {found}, and this program knows {VERSION}; it is ignored, \
         and a new one is learned"
    )]
    Version {
        /// The path.
        file: String,
        /// Its version.
        found: u32,
    },
    /// Cut off or changed.
    #[error("{file}: this ranking of experts is damaged; it is ignored, and a new one is learned")]
    Damaged {
        /// The path.
        file: String,
    },
    /// Of another model.
    #[error(
        "{file}: this ranking of experts was learned with another model; it is ignored, and a new one is learned"
    )]
    Foreign {
        /// The path.
        file: String,
    },
}

impl Ranking {
    /// What was learned so far, at a time in seconds since 1970.
    pub fn of(heat: &Heat, now: u64) -> Ranking {
        let (steps, uses) = heat.learned();
        Ranking { saved_at: now, steps, uses }
    }

    /// Halves what it counts for every `half_life` seconds since it was saved, so that new steps outweigh it the sooner. The
    /// order of experts stays. A clock that went back, or no half-life, changes nothing.
    pub fn age(&mut self, now: u64, half_life: u64) {
        let halvings = now.saturating_sub(self.saved_at).checked_div(half_life).unwrap_or(0).min(63) as u32;
        self.steps >>= halvings;
        self.uses.iter_mut().for_each(|uses| *uses = uses.checked_shr(halvings).unwrap_or(0));
    }

    /// Saves it for the model that `identity` names, in place of what is at `path`: the new file or the old one, whole.
    ///
    /// # Errors
    /// What the operating system says.
    pub fn save(&self, path: &Path, roster: &Roster, identity: &[u8]) -> Result<(), RankingError> {
        let mut file = WholeFile::create(path, true)?;
        file.write(&self.encode(roster, identity))?;
        Ok(file.finish()?)
    }

    /// Reads the ranking of the model that `identity` names; `None` where there is no file.
    ///
    /// # Errors
    /// A sentence, after which to go on without.
    pub fn load(path: &Path, roster: &Roster, identity: &[u8]) -> Result<Option<Ranking>, RankingError> {
        let name = || path.display().to_string();
        let failed = |reason| RankingError::Read { file: name(), reason };
        let file = match File::open(path) {
            Ok(file) => file,
            Err(reason) if reason.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(reason) => return Err(failed(reason)),
        };
        // No more of a file that is something else than tells so.
        let expected = LENGTH + 4 * roster.len();
        let mut bytes = Vec::with_capacity(expected + 1);
        file.take(expected as u64 + 1).read_to_end(&mut bytes).map_err(failed)?;
        let damaged = || RankingError::Damaged { file: name() };

        let mut rest = &bytes[..];
        if take(&mut rest) != Some(*MAGIC) {
            return Err(RankingError::Other { file: name() });
        }
        let found = take(&mut rest).map(u32::from_le_bytes).ok_or_else(damaged)?;
        if found != VERSION {
            return Err(RankingError::Version { file: name(), found });
        }
        if take(&mut rest).map(u128::from_le_bytes).ok_or_else(damaged)? != key(roster, identity) {
            return Err(RankingError::Foreign { file: name() });
        }
        let sum = bytes.last_chunk().filter(|_| bytes.len() == expected).ok_or_else(damaged)?;
        if u64::from_le_bytes(*sum) != xxh3_64(&bytes[..expected - 8]) {
            return Err(damaged());
        }
        let saved_at = take(&mut rest).map(u64::from_le_bytes).ok_or_else(damaged)?;
        let steps = take(&mut rest).map(u64::from_le_bytes).ok_or_else(damaged)?;
        let uses = (0..roster.len()).map_while(|_| take(&mut rest).map(u32::from_le_bytes)).collect();
        Ok(Some(Ranking { saved_at, steps, uses }))
    }

    fn encode(&self, roster: &Roster, identity: &[u8]) -> Vec<u8> {
        let mut bytes = MAGIC.to_vec();
        bytes.extend(VERSION.to_le_bytes());
        bytes.extend(key(roster, identity).to_le_bytes());
        bytes.extend(self.saved_at.to_le_bytes());
        bytes.extend(self.steps.to_le_bytes());
        bytes.extend(self.uses.iter().flat_map(|uses| uses.to_le_bytes()));
        bytes.extend(xxh3_64(&bytes).to_le_bytes());
        bytes
    }
}

/// Tells models apart: by what the caller knows of the file, and by the experts' numbers and lengths.
fn key(roster: &Roster, identity: &[u8]) -> u128 {
    let mut bytes = (identity.len() as u64).to_le_bytes().to_vec();
    bytes.extend(identity);
    for layer in roster.layers() {
        bytes.extend(layer.experts.to_le_bytes());
        bytes.extend(layer.bytes.to_le_bytes());
    }
    xxh3_128(&bytes)
}

/// The next bytes, if there are so many.
fn take<const N: usize>(rest: &mut &[u8]) -> Option<[u8; N]> {
    let (first, behind) = rest.split_first_chunk()?;
    *rest = behind;
    Some(*first)
}
