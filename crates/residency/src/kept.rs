//! What was learned of a model's experts, in a file across restarts.
//!
//! Owns when it is read (once, before the first experts are placed) and the time that it is written with. What is wrong with the file comes back as a
//! sentence for whoever has somebody to tell, and nothing else comes of it.

use std::path::PathBuf;
use std::sync::OnceLock;
use std::time::{SystemTime, UNIX_EPOCH};

use crate::{Heat, Ranking, RankingError, Roster};

/// The file of one model.
#[derive(Debug)]
pub struct RankingFile {
    path: PathBuf,
    /// Tells the model from others.
    identity: Vec<u8>,
    read: OnceLock<Option<Ranking>>,
}

impl RankingFile {
    /// The file at `path`, of the model that `identity` names, whether it is there or not.
    pub fn new(path: PathBuf, identity: Vec<u8>) -> RankingFile {
        RankingFile { path, identity, read: OnceLock::new() }
    }

    /// Has the heat know what is in the file, which is read the first time only.
    ///
    /// # Errors
    /// What is wrong with it, said once: the heat goes on without.
    pub fn recall(&self, roster: &Roster, heat: &mut Heat) -> Result<(), RankingError> {
        let mut wrong = Ok(());
        let read = || {
            Ranking::load(&self.path, roster, &self.identity).unwrap_or_else(|why| {
                wrong = Err(why);
                None
            })
        };
        if let Some(ranking) = self.read.get_or_init(read) {
            heat.recall(ranking);
        }
        wrong
    }

    /// Writes what was learned, if anything was, in place of what is there. `learned` is told the time, in seconds since 1970.
    ///
    /// # Errors
    /// What the operating system says.
    pub fn save(
        &self,
        roster: &Roster,
        learned: impl FnOnce(u64) -> Option<Ranking>,
    ) -> Result<(), RankingError> {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
        learned(now).map_or(Ok(()), |ranking| ranking.save(&self.path, roster, &self.identity))
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::{ExpertId, LayerExperts, Pace};

    /// Oracle: the heat that was saved, and one that knows nothing. What another model left, or nobody, is as nothing, and what is wrong is said once.
    #[test]
    fn what_was_saved_is_known_again() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("model.gguf.experts");
        let file = |identity: &[u8]| RankingFile::new(path.clone(), identity.to_vec());
        let roster = Roster::new([LayerExperts { experts: 4, bytes: 256 }; 2]);
        let fresh = Heat::new(&roster, Pace::default());
        let known = |file: &RankingFile| {
            let mut heat = fresh.clone();
            let said = file.recall(&roster, &mut heat).map_err(|why| why.to_string());
            assert!(said.is_ok() || file.recall(&roster, &mut heat).is_ok());
            (heat, said)
        };
        let save = |file: &RankingFile, heat: &Heat| file.save(&roster, |now| Some(Ranking::of(heat, now)));
        assert!(known(&file(b"one")) == (fresh.clone(), Ok(())));
        let mut heat = fresh.clone();
        (0..9).for_each(|_| heat.decode(&roster, [ExpertId { layer: 1, expert: 2 }]));
        save(&file(b"one"), &heat).unwrap();
        let (learned, _) = known(&file(b"one"));
        let hottest = learned.all_uses().enumerate().max_by_key(|(_, uses)| *uses).unwrap();
        assert!(hottest.0 == 6 && hottest.1 > 0);
        let wrong = |file: &RankingFile, part: &str| {
            let (heat, said) = known(file);
            assert!(heat == fresh && said.unwrap_err().contains(part));
        };
        wrong(&file(b"two"), "another model");
        std::fs::write(&path, b"strataRK, but cut off").unwrap();
        wrong(&file(b"one"), "model.gguf.experts");
        // It is read once, whatever becomes of it.
        let read = file(b"one");
        save(&file(b"one"), &heat).unwrap();
        assert!(known(&read).0 == learned);
        std::fs::remove_file(&path).unwrap();
        assert!(known(&read).0 == learned);
        // Nothing was learned, and a folder that isn't there.
        file(b"one").save(&roster, |_| None).unwrap();
        let nowhere = RankingFile::new(folder.path().join("nowhere/x"), vec![]);
        assert!(save(&nowhere, &heat).unwrap_err().to_string().contains("could not be saved"));
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0);
    }
}
