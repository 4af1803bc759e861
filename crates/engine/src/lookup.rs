//! The n-gram table's rows for a window: hashed on the host, read from the file on demand, and read ahead.

use strata_model::Model;
use strata_model::ngram::NgramRows;

use crate::error::EngineError;
use crate::load::SpawnIo;

/// Looks up table rows, if the model has a table.
pub(crate) struct Lookup {
    table: Option<NgramRows>,
    ids: Vec<u64>,
}

impl Lookup {
    /// Opens the model's table. `spawn` starts the thread that reads ahead, if there is a table.
    pub fn new(model: &Model, spawn: SpawnIo) -> Result<Self, EngineError> {
        let open = |tensor| NgramRows::new(model.gguf.clone(), tensor, spawn);
        let table = model.trunk.ngram_table.as_ref().map(open).transpose()?;
        Ok(Lookup { table, ids: Vec::new() })
    }

    /// The rows of every token of a window, as stored: per n-gram block `[tokens, heads]` rows. `parts` are the sequences' tokens
    /// before the window and in it.
    pub fn rows<'t>(
        &mut self,
        model: &Model,
        parts: impl Iterator<Item = (&'t [u32], &'t [u32])> + Clone,
    ) -> Result<Vec<Vec<u8>>, EngineError> {
        let (Some(table), Some(ple)) = (&self.table, &model.hyper.ple) else { return Ok(Vec::new()) };
        let block = |hash: &strata_model::ngram::NgramHash| {
            self.ids.clear();
            parts.clone().for_each(|(before, tokens)| hash.rows(before, tokens, &mut self.ids));
            let mut bytes = vec![0; self.ids.len() * table.row_bytes()];
            table.read(&self.ids, &mut bytes)?;
            Ok(bytes)
        };
        ple.hashes.iter().map(block).collect()
    }

    /// Asks for the rows of tokens that will come, so that reading them later doesn't wait for the disk.
    pub fn ahead(&mut self, model: &Model, before: &[u32], tokens: &[u32]) {
        let (Some(table), Some(ple)) = (&self.table, &model.hyper.ple) else { return };
        for hash in &ple.hashes {
            self.ids.clear();
            hash.rows(before, tokens, &mut self.ids);
            table.read_ahead(&self.ids);
        }
    }
}
