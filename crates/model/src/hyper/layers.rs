//! Which layers there are: trunk and draft block, recurrent and full, and the full ones' ratios.

use super::read::Keys;
use super::{Draft, HyperError, LayerKind};
use crate::warning::Warning;

/// The ratio that files with zeroed ratios were trained with.
const REPAIRED_RATIO: usize = 4;

/// Blocks of a file: the trunk's are `0..trunk`.
pub(super) struct Blocks {
    /// As the metadata counts them, draft blocks included.
    declared: usize,
    /// As the tensors count them.
    found: usize,
    pub(super) trunk: usize,
    draft: Option<usize>,
}

impl Blocks {
    /// Tells trunk from draft by metadata and by the presence of the draft's tensors, because either may be wrong:
    /// stripped files keep the key, merged files lack it.
    pub(super) fn read(keys: &Keys<'_>, warnings: &mut Vec<Warning>) -> Result<Self, HyperError> {
        let declared = keys.size("block_count")?;
        if declared > 4096 {
            return Err(keys.wrong("block_count", declared, "at most 4096"));
        }
        let drafts = keys.opt_count("nextn_predict_layers")?.unwrap_or(0);
        let is_draft = |block: usize| keys.has(&format!("blk.{block}.nextn.eh_proj.weight"));
        let (trunk, draft) = if drafts > 0 {
            let trunk = declared.checked_sub(drafts).filter(|&trunk| trunk > 0).ok_or_else(|| {
                keys.wrong("nextn_predict_layers", drafts, &format!("below block_count ({declared})"))
            })?;
            if !is_draft(trunk) {
                warnings.push(Warning::NoDraft);
            }
            (trunk, is_draft(trunk).then_some(trunk))
        } else {
            let trunk = (1..declared + 1).rev().find(|&trunk| !is_draft(trunk - 1)).unwrap_or(declared);
            (trunk, is_draft(trunk).then_some(trunk))
        };
        let drafts = (trunk..).take_while(|&block| is_draft(block)).count();
        if drafts > 1 {
            warnings.push(Warning::ExtraDrafts { found: drafts });
        }
        if draft.is_some() && !keys.has("blk.0.hc_attn_norm.weight") {
            return Err(HyperError::DraftAlone);
        }
        Ok(Self { declared, found: trunk + drafts, trunk, draft })
    }

    /// Whether an array has an entry for every block, or for every trunk layer.
    fn fits(&self, len: usize) -> bool {
        [self.declared, self.found, self.trunk].contains(&len)
    }

    fn check_len(&self, keys: &Keys<'_>, key: &str, len: usize) -> Result<(), HyperError> {
        if self.fits(len) {
            return Ok(());
        }
        Err(HyperError::Contradiction {
            what: format!("`{}` has {len} entries for {} blocks", keys.name(key), self.declared),
        })
    }

    /// The kinds of the trunk's layers, and the draft block.
    pub(super) fn kinds(
        &self,
        keys: &Keys<'_>,
        budget: usize,
        warnings: &mut Vec<Warning>,
    ) -> Result<(Vec<LayerKind>, Option<Draft>), HyperError> {
        let recurrent = self.recurrent(keys)?;
        let full: Vec<usize> = (0..self.trunk).filter(|&layer| !recurrent[layer]).collect();
        let ratios = self.ratios(keys)?;
        let ratio = |block: usize| ratios.get(block).copied().unwrap_or(0);
        if let Some(layer) = (0..self.trunk).find(|&layer| recurrent[layer] && ratio(layer) != 0) {
            return Err(HyperError::Contradiction {
                what: format!(
                    "`{}` is {} on layer {layer}, which is recurrent and has no indexer",
                    keys.name("attention.compress_ratios"),
                    ratio(layer)
                ),
            });
        }
        let zeros = full.iter().filter(|&&layer| ratio(layer) == 0).count();
        let repaired = zeros > 0 && zeros == full.len();
        if repaired {
            let indexer = |&layer: &usize| keys.has(&format!("blk.{layer}.indexer.q_proj.weight"));
            if !full.iter().all(indexer) {
                return Err(HyperError::Unsupported {
                    what: "attention over the whole context without an indexer".to_owned(),
                });
            }
            warnings.push(Warning::RatiosRepaired { ratio: REPAIRED_RATIO });
        } else if zeros > 0 {
            return Err(HyperError::Contradiction {
                what: format!(
                    "`{}` is zero on {zeros} of {} full attention layers and not on the others",
                    keys.name("attention.compress_ratios"),
                    full.len()
                ),
            });
        }
        let ratio = |block: usize| if repaired { REPAIRED_RATIO } else { ratio(block) };
        let kinds: Vec<LayerKind> = (0..self.trunk)
            .map(|layer| match recurrent[layer] {
                true => LayerKind::Gdn,
                false => LayerKind::Qsa { ratio: ratio(layer) },
            })
            .collect();
        // The draft block's own entry is absent or zero in many files; it was trained with the trunk's ratio.
        let own = self.draft.map(|block| ratios.get(block).copied().unwrap_or(0)).filter(|&ratio| ratio > 0);
        let trunks = full.first().map_or(REPAIRED_RATIO, |&layer| ratio(layer));
        let draft = self.draft.map(|block| Draft { block, ratio: own.unwrap_or(trunks) });

        let used = full.iter().map(|&layer| ratio(layer)).chain(draft.map(|draft| draft.ratio));
        for ratio in used {
            if !budget.is_multiple_of(ratio) {
                return Err(HyperError::Contradiction {
                    what: format!(
                        "`{}` is {budget} tokens, which is not a whole number of blocks of {ratio}",
                        keys.name("attention.indexer.top_k")
                    ),
                });
            }
        }
        Ok((kinds, draft))
    }

    fn recurrent(&self, keys: &Keys<'_>) -> Result<Vec<bool>, HyperError> {
        let key = "attention.recurrent_layers";
        let Some(recurrent) = keys.metadata.opt_bools(&keys.name(key))? else {
            let interval = keys.size("full_attention_interval")?;
            return Ok((1..=self.trunk).map(|n| !n.is_multiple_of(interval)).collect());
        };
        self.check_len(keys, key, recurrent.len())?;
        if self.draft.is_some_and(|block| recurrent.get(block) == Some(&true)) {
            return Err(HyperError::Unsupported {
                what: "a draft block with recurrent attention".to_owned(),
            });
        }
        Ok(recurrent[..self.trunk].to_vec())
    }

    /// The ratios as stored; empty if the key is absent.
    fn ratios(&self, keys: &Keys<'_>) -> Result<Vec<usize>, HyperError> {
        let key = "attention.compress_ratios";
        let Some(stored) = keys.metadata.opt_i64s(&keys.name(key))? else { return Ok(Vec::new()) };
        self.check_len(keys, key, stored.len())?;
        stored
            .iter()
            .map(|&ratio| match usize::try_from(ratio) {
                Ok(ratio) if ratio <= 1 << 16 => Ok(ratio),
                _ => Err(keys.wrong(key, ratio, "0 to 65536 on every layer")),
            })
            .collect()
    }
}
