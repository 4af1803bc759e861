//! The n-gram table's rows for a window: hashed on the host, read from the file on demand, and read ahead.
//!
//! Owns the rows of the two windows that may be in flight at once, as large from the start as those windows can be.

use strata_backend::Spec;
use strata_model::Model;
use strata_model::hyper::Ple;
use strata_model::ngram::{NgramHash, NgramRows, ReadAhead};
use strata_plan::{Category, Place, Plan};

use crate::error::EngineError;
use crate::flight::Lane;
use crate::load::Readers;

/// Looks up table rows, if the model has a table.
pub(crate) struct Lookup {
    table: Option<NgramRows>,
    ids: Vec<u64>,
    /// Per lane and n-gram block the rows' numbers; and whether they are still to be read.
    wanted: [Vec<Vec<u64>>; 2],
    unread: [bool; 2],
    /// Per lane and n-gram block `[tokens, heads]` rows, as stored.
    rows: [Vec<Vec<u8>>; 2],
}

/// Rows of the table that the longest window of each lane looks up in one n-gram block.
fn most_rows(spec: &Spec, ple: &Ple) -> [usize; 2] {
    [spec.window, spec.sequences].map(|tokens| tokens.saturating_mul(ple.heads))
}

/// Row numbers of the longest window, and of the tokens before it that its own depend on.
fn most_ids(spec: &Spec, ple: &Ple) -> usize {
    (spec.window.max(spec.sequences).saturating_add(ple.ngram_size)).saturating_mul(ple.heads)
}

impl Lookup {
    /// Adds what [`Lookup::new`] allocates to the plan, and the most that reading and reading ahead take beside it.
    pub fn describe(model: &Model, spec: &Spec, plan: &mut Plan) {
        let (Some(table), Some(ple)) = (&model.trunk.ngram_table, &model.hyper.ple) else { return };
        let rows = most_rows(spec, ple).into_iter().fold(0, usize::saturating_add);
        let wanted = rows.saturating_mul(ple.hashes.len());
        let rows = wanted.saturating_mul(table.row_bytes());
        let ids = most_ids(spec, ple);
        let numbers = ids
            .saturating_add(wanted)
            .saturating_mul(size_of::<u64>())
            .saturating_add(NgramRows::working_bytes(ids, table.row_bytes()));
        plan.item(Category::Window, "n-gram rows on the host", Place::Heap, rows as u64);
        plan.item(Category::Window, "n-gram row numbers", Place::Heap, numbers as u64);
    }

    /// Opens the model's table. A thread reads ahead, if there is a table.
    pub fn new(model: &Model, spec: &Spec, readers: &Readers) -> Result<Self, EngineError> {
        let (Some(tensor), Some(ple)) = (&model.trunk.ngram_table, &model.hyper.ple) else {
            return Ok(Lookup {
                table: None,
                ids: Vec::new(),
                wanted: Default::default(),
                unread: [false; 2],
                rows: Default::default(),
            });
        };
        let table = NgramRows::new(model.gguf.clone(), tensor, |work| (readers.spawn)("n-gram rows", work))?;
        let block = |rows: usize| Vec::with_capacity(rows * table.row_bytes());
        let most = most_rows(spec, ple);
        let rows = most.map(|rows| ple.hashes.iter().map(|_| block(rows)).collect());
        let wanted = most.map(|rows| ple.hashes.iter().map(|_| Vec::with_capacity(rows)).collect());
        let ids = Vec::with_capacity(most_ids(spec, ple));
        Ok(Lookup { table: Some(table), ids, wanted, unread: [false; 2], rows })
    }

    /// Says which rows the tokens of a lane's next window want. `parts` are the sequences' tokens before the window and in it.
    pub fn ask<'t>(
        &mut self,
        model: &Model,
        lane: Lane,
        parts: impl Iterator<Item = (&'t [u32], &'t [u32])> + Clone,
    ) {
        let Some(ple) = &model.hyper.ple else { return };
        for (hash, ids) in ple.hashes.iter().zip(&mut self.wanted[lane as usize]) {
            ids.clear();
            parts.clone().for_each(|(before, tokens)| hash.rows(before, tokens, ids));
        }
        self.unread[lane as usize] = self.table.is_some();
    }

    /// Reads them, unless that was done: as late as it can be, while the backend computes what comes before.
    pub fn read(&mut self, lane: Lane) -> Result<(), EngineError> {
        let Some(table) = self.table.as_mut().filter(|_| self.unread[lane as usize]) else { return Ok(()) };
        for (ids, rows) in self.wanted[lane as usize].iter().zip(&mut self.rows[lane as usize]) {
            rows.resize(ids.len() * table.row_bytes(), 0);
            table.read(ids, rows)?;
        }
        self.unread[lane as usize] = false;
        Ok(())
    }

    /// What was read for a lane's window.
    pub fn rows(&self, lane: Lane) -> &[Vec<u8>] {
        &self.rows[lane as usize]
    }

    /// What became of the rows asked for ahead.
    pub fn read_ahead(&self) -> Option<ReadAhead> {
        self.table.as_ref().map(NgramRows::read_ahead_counts)
    }

    /// Asks for the rows of the tokens from `from` on, so that reading them later doesn't wait for the disk. `tokens` are a
    /// sequence's next ones, behind those it holds.
    pub fn ahead(&mut self, model: &Model, held: &[u32], tokens: &[u32], from: usize) {
        let (Some(table), Some(ple)) = (&self.table, &model.hyper.ple) else { return };
        for hash in &ple.hashes {
            coming(hash, held, tokens, from, &mut self.ids);
            table.read_ahead(&self.ids);
        }
    }
}

/// The rows of `tokens[from..]`, which follow `held` and the tokens before them.
fn coming(hash: &NgramHash, held: &[u32], tokens: &[u32], from: usize, ids: &mut Vec<u64>) {
    ids.clear();
    if from >= hash.context_len() {
        return hash.rows(&tokens[..from], &tokens[from..], ids);
    }
    hash.rows(held, tokens, ids);
    ids.drain(..from * hash.heads().len());
}

#[cfg(test)]
mod tests {
    use super::*;
    use strata_model::ngram::Head;

    /// Oracle: the rows of the whole sequence. The 4-grams of tokens to come reach into what is read now, and behind it.
    #[test]
    fn rows_to_come_know_the_tokens_before_them() {
        let heads = [(0, 1009), (1009, 1013), (2022, 1019)].map(|(offset, rows)| Head { offset, rows });
        let hash = NgramHash::new(vec![3, 5, 9, 17], heads.to_vec(), 1, 1, 100).unwrap();
        let tokens: Vec<u32> = (0..30).map(|i| i * i % 67 + 2).collect();
        let (mut whole, mut ids) = (Vec::new(), Vec::new());
        hash.rows(&[], &tokens, &mut whole);
        for held in [0, 1, 2, 3, 9] {
            for part in [1, 2, 3, 4, 8] {
                coming(&hash, &tokens[..held], &tokens[held..], part, &mut ids);
                assert_eq!(ids, whole[(held + part) * 3..], "{held} tokens held, {part} being read");
            }
        }
    }
}
