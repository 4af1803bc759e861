//! The byte form of a sequence: everything to go on from, bound to the model and the configuration it came from.
//!
//! Little-endian: magic, version, model fingerprint, configuration fingerprint, token count, tokens, state (as
//! [`strata_backend::Backend::export`] writes it), and the XXH3 checksum of all that comes before it.

use strata_backend::Spec;
use strata_model::{Model, ModelError};
use xxhash_rust::xxh3::xxh3_64;

const MAGIC: &[u8; 8] = b"STRATASQ";
const VERSION: u32 = 1;
const HEADER: usize = 8 + 4 + 8 + 8 + 8;

/// Why saved bytes can't be used.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum SnapshotError {
    /// Something else.
    #[error("these bytes are not a saved sequence")]
    NotOne,
    /// Of another format version.
    #[error(
        "the saved sequence has version {0}, this program reads version {VERSION}: read the prompt again"
    )]
    Version(u32),
    /// Damaged or cut off.
    #[error("the saved sequence is damaged or cut off: its checksum does not match")]
    Damaged,
    /// Of another model.
    #[error("the saved sequence belongs to another model")]
    OtherModel,
    /// Of another configuration.
    #[error("the saved sequence was made with another cache format: use the same --kv")]
    OtherConfig,
}

/// A sequence's tokens and state.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Snapshot<'a> {
    /// The tokens read.
    pub tokens: Vec<u32>,
    /// The backend's exported state.
    pub state: &'a [u8],
}

/// What a snapshot is bound to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Binding {
    /// Of the model.
    pub model: u64,
    /// Of the configuration that shapes the state.
    pub config: u64,
}

impl Binding {
    /// Of a model, and of what shapes a sequence's state besides it: how keys and values are stored.
    pub fn of(model: &Model, spec: &Spec) -> Result<Binding, ModelError> {
        Ok(Binding { model: model.fingerprint()?, config: u64::from(spec.kv as u8) })
    }
}

/// Writes the byte form; `state` appends the state's bytes.
pub fn write<E>(
    binding: Binding,
    tokens: &[u32],
    state: impl FnOnce(&mut Vec<u8>) -> Result<(), E>,
) -> Result<Vec<u8>, E> {
    let mut out = Vec::new();
    out.extend_from_slice(MAGIC);
    out.extend_from_slice(&VERSION.to_le_bytes());
    out.extend_from_slice(&binding.model.to_le_bytes());
    out.extend_from_slice(&binding.config.to_le_bytes());
    out.extend_from_slice(&(tokens.len() as u64).to_le_bytes());
    for token in tokens {
        out.extend_from_slice(&token.to_le_bytes());
    }
    state(&mut out)?;
    let sum = xxh3_64(&out);
    out.extend_from_slice(&sum.to_le_bytes());
    Ok(out)
}

/// Reads the byte form back, or says why it can't be used.
pub fn read(binding: Binding, bytes: &[u8]) -> Result<Snapshot<'_>, SnapshotError> {
    if !bytes.starts_with(MAGIC) {
        return Err(SnapshotError::NotOne);
    }
    let (body, sum) = bytes.split_last_chunk::<8>().ok_or(SnapshotError::Damaged)?;
    if body.len() < HEADER {
        return Err(SnapshotError::Damaged);
    }
    let version = u32::from_le_bytes(body[8..12].try_into().map_err(|_| SnapshotError::Damaged)?);
    if version != VERSION {
        return Err(SnapshotError::Version(version));
    }
    if xxh3_64(body) != u64::from_le_bytes(*sum) {
        return Err(SnapshotError::Damaged);
    }
    let word =
        |at: usize| body[at..at + 8].iter().rev().fold(0u64, |word, &byte| word << 8 | u64::from(byte));
    if word(12) != binding.model {
        return Err(SnapshotError::OtherModel);
    }
    if word(20) != binding.config {
        return Err(SnapshotError::OtherConfig);
    }
    let rest = &body[HEADER..];
    let ids = usize::try_from(word(28)).ok().and_then(|n| n.checked_mul(4)).filter(|&n| n <= rest.len());
    let (ids, state) = rest.split_at(ids.ok_or(SnapshotError::Damaged)?);
    let tokens = ids.as_chunks::<4>().0.iter().map(|id| u32::from_le_bytes(*id)).collect();
    Ok(Snapshot { tokens, state })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const BINDING: Binding = Binding { model: 0x1234_5678_9abc_def0, config: 7 };

    fn written(tokens: &[u32], state: &[u8]) -> Vec<u8> {
        write(BINDING, tokens, |out| {
            out.extend_from_slice(state);
            Ok::<(), ()>(())
        })
        .unwrap()
    }

    proptest! {
        /// Oracle: what was written.
        #[test]
        fn reads_back(tokens: Vec<u32>, state: Vec<u8>) {
            let bytes = written(&tokens, &state);
            prop_assert_eq!(read(BINDING, &bytes), Ok(Snapshot { tokens, state: &state }));
        }

        /// Oracle: any change of any byte, and any cut, is refused.
        #[test]
        fn refuses_what_was_changed(at: prop::sample::Index, flip in 1u8.., cut: prop::sample::Index) {
            let mut bytes = written(&[1, 2, 3], b"state");
            prop_assert!(read(BINDING, &bytes[..cut.index(bytes.len())]).is_err());
            let at = at.index(bytes.len());
            bytes[at] ^= flip;
            prop_assert!(read(BINDING, &bytes).is_err());
        }
    }

    /// Oracle: the sentence for each kind of stranger.
    #[test]
    fn refuses_strangers_by_name() {
        let bytes = written(&[1], b"");
        assert_eq!(read(Binding { model: 1, ..BINDING }, &bytes), Err(SnapshotError::OtherModel));
        assert_eq!(read(Binding { config: 1, ..BINDING }, &bytes), Err(SnapshotError::OtherConfig));
        assert_eq!(read(BINDING, b"hello"), Err(SnapshotError::NotOne));
    }
}
