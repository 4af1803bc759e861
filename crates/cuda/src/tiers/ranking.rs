//! What was learned of a model's experts, in a file across restarts.
//!
//! Owns when it is read (once, before the first experts are placed) and written (once, at the end, if steps were counted). Whatever is wrong with
//! the file is said in a sentence, and nothing else comes of it.

use std::path::PathBuf;
use std::sync::OnceLock;
use std::time::{SystemTime, UNIX_EPOCH};

use strata_residency::{Heat, Ranking, Roster};

/// The file of one model.
pub(crate) struct RankingFile {
    path: PathBuf,
    /// Tells the model from others.
    identity: Vec<u8>,
    read: OnceLock<Option<Ranking>>,
}

impl RankingFile {
    /// The file at `path`, of the model that `identity` names, whether it is there or not.
    pub(crate) fn new(path: PathBuf, identity: Vec<u8>) -> RankingFile {
        RankingFile { path, identity, read: OnceLock::new() }
    }

    /// Has the heat know what is in the file.
    pub(super) fn recall(&self, roster: &Roster, heat: &mut Heat) {
        let read = || {
            Ranking::load(&self.path, roster, &self.identity).unwrap_or_else(|why| {
                tracing::warn!("{why}");
                None
            })
        };
        if let Some(ranking) = self.read.get_or_init(read) {
            heat.recall(ranking);
        }
    }

    /// Writes what the heat knows, in place of what is there.
    pub(super) fn save(&self, roster: &Roster, heat: &Heat) {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
        if let Err(why) = Ranking::of(heat, now).save(&self.path, roster, &self.identity) {
            tracing::warn!("{why}");
        }
    }
}

#[cfg(test)]
mod tests {
    use strata_residency::{ExpertId, LayerExperts, Pace};

    use super::*;

    /// Oracle: the heat that was saved, and one that knows nothing. What another model left, or nobody, is as nothing.
    #[test]
    fn what_was_saved_is_known_again() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("model.gguf.experts");
        let file = |identity: &[u8]| RankingFile::new(path.clone(), identity.to_vec());
        let roster = Roster::new([LayerExperts { experts: 4, bytes: 256 }; 2]);
        let fresh = Heat::new(&roster, Pace::default());
        let known = |file: &RankingFile| {
            let mut heat = fresh.clone();
            file.recall(&roster, &mut heat);
            heat
        };
        assert!(known(&file(b"one")) == fresh);
        let mut heat = fresh.clone();
        (0..9).for_each(|_| heat.decode(&roster, [ExpertId { layer: 1, expert: 2 }]));
        file(b"one").save(&roster, &heat);
        let learned = known(&file(b"one"));
        let hottest = learned.all_uses().enumerate().max_by_key(|(_, uses)| *uses).unwrap();
        assert!(hottest.0 == 6 && hottest.1 > 0);
        assert!(known(&file(b"two")) == fresh);
        std::fs::write(&path, b"strataRK, but cut off").unwrap();
        assert!(known(&file(b"one")) == fresh);
        // It is read once, whatever becomes of it.
        let read = file(b"one");
        file(b"one").save(&roster, &heat);
        assert!(known(&read) == learned);
        std::fs::remove_file(&path).unwrap();
        assert!(known(&read) == learned);
        // A folder that isn't there.
        RankingFile::new(folder.path().join("nowhere/x"), vec![]).save(&roster, &heat);
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0);
    }
}
