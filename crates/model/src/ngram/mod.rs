//! The n-gram embedding: which rows of the table a token looks up, and how they get off the disk.
//!
//! [`NgramHash`] turns token ids into row numbers, exactly, in 64-bit integers. [`mod@derive`] makes the constants of that
//! hash for new models. [`NgramRows`] reads rows from the file. None of them decodes a row.
//!
//! Invariant: the rows of a position depend on its own token and the ones before it in the sequence, never on how the
//! sequence is cut into windows.

pub mod derive;
mod readers;
mod rows;

pub use rows::{NgramRows, ReadAhead, RowError};

/// Why hash constants can't be used. The message is the rest of a sentence about the model.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum NgramError {
    /// An array of the wrong length.
    #[error("{what} has {found} entries, but {expected} are needed ({why})")]
    Length {
        /// The array.
        what: &'static str,
        /// Its length.
        found: usize,
        /// What it should be.
        expected: usize,
        /// Where that number comes from.
        why: String,
    },
    /// A multiplier that can't come from the derivation.
    #[error(
        "n-gram multiplier {multiplier} {problem}; the hash constants are damaged (they must never pass through floating point), convert the model again"
    )]
    Multiplier {
        /// Its value.
        multiplier: u64,
        /// What is wrong with it.
        problem: String,
    },
    /// Heads that overlap or are empty.
    #[error("n-gram head {head} has {rows} rows from row {offset}, which {problem}")]
    Head {
        /// The head.
        head: usize,
        /// Its first row.
        offset: u64,
        /// Its rows.
        rows: u64,
        /// What is wrong with it.
        problem: &'static str,
    },
}

/// One head: a range of the table's rows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Head {
    /// First row.
    pub offset: u64,
    /// Number of rows; the hash is taken modulo this, in practice a prime.
    pub rows: u64,
}

/// The hash of one n-gram layer.
///
/// For context tokens `c0` (the token itself), `c1`, `c2`, ..: `h_n = xor of c_s * m_s for s < n`. The first
/// `heads_per_ngram` heads use `h_2`, the next ones `h_3`, and so on; a head's row is `h mod rows + offset`. A context
/// token before the sequence's start, or at or beyond an end-of-text token counted from the current one, is that
/// end-of-text token. Source: spec, section 2.5.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NgramHash {
    multipliers: Vec<u64>,
    heads: Vec<Head>,
    heads_per_ngram: usize,
    end: u32,
}

impl NgramHash {
    /// A hash for a vocabulary of `vocab` tokens with the n-gram order `multipliers.len()`; `end` is the token that
    /// cuts contexts.
    ///
    /// # Errors
    /// Constants whose counts don't fit, multipliers that are even or so large that a product could reach 2^63, empty
    /// or overlapping heads.
    pub fn new(
        multipliers: Vec<u64>,
        heads: Vec<Head>,
        heads_per_ngram: usize,
        end: u32,
        vocab: usize,
    ) -> Result<Self, NgramError> {
        let order = multipliers.len();
        let expected = heads_per_ngram.saturating_mul(order.saturating_sub(1));
        if heads.len() != expected || heads.is_empty() {
            return Err(NgramError::Length {
                what: "the list of n-gram heads",
                found: heads.len(),
                expected: expected.max(1),
                why: format!("{heads_per_ngram} for every n-gram of 2 to {order} tokens"),
            });
        }
        let limit = derive::multiplier_limit(vocab);
        for &multiplier in &multipliers {
            let problem = match multiplier {
                0 => "is zero".to_owned(),
                m if m % 2 == 0 => "is even".to_owned(),
                m if m > limit => {
                    format!("is above {limit}, where products with {vocab} token ids would reach 2^63")
                }
                _ => continue,
            };
            return Err(NgramError::Multiplier { multiplier, problem });
        }
        let mut free = 0;
        for (head, &Head { offset, rows }) in heads.iter().enumerate() {
            let wrong = |problem| NgramError::Head { head, offset, rows, problem };
            if rows == 0 {
                return Err(wrong("is empty"));
            }
            if offset < free {
                return Err(wrong("overlaps the head before it"));
            }
            free = offset.checked_add(rows).ok_or_else(|| wrong("is beyond any table"))?;
        }
        Ok(Self { multipliers, heads, heads_per_ngram, end })
    }

    /// How many tokens before a window its first token's rows depend on.
    pub fn context_len(&self) -> usize {
        self.multipliers.len() - 1
    }

    /// Rows looked up per token.
    pub fn heads(&self) -> &[Head] {
        &self.heads
    }

    /// The token that cuts contexts.
    pub fn end(&self) -> u32 {
        self.end
    }

    /// One past the last row that can be looked up.
    pub fn table_rows(&self) -> u64 {
        self.heads.last().map_or(0, |head| head.offset + head.rows)
    }

    /// Appends the rows of every token of `window`, `[tokens, heads]`, to `out`.
    ///
    /// `before` are the sequence's tokens before the window, oldest first; only the last [`NgramHash::context_len`]
    /// matter, and fewer mean that the sequence begins there.
    pub fn rows(&self, before: &[u32], window: &[u32], out: &mut Vec<u64>) {
        out.reserve(window.len() * self.heads.len());
        for at in 0..window.len() {
            let mut cut = false;
            let mut hash = 0;
            for (back, &multiplier) in self.multipliers.iter().enumerate() {
                let mut token = match at.checked_sub(back) {
                    Some(i) => window[i],
                    None => (before.len() + at).checked_sub(back).map_or(self.end, |i| before[i]),
                };
                // The current token doesn't cut its own context.
                cut |= back > 0 && token == self.end;
                if cut {
                    token = self.end;
                }
                hash ^= u64::from(token).wrapping_mul(multiplier);
                if back > 0 {
                    let heads = (back - 1) * self.heads_per_ngram..back * self.heads_per_ngram;
                    out.extend(self.heads[heads].iter().map(|head| hash % head.rows + head.offset));
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::derive::{Geometry, derive};
    use super::*;
    use proptest::prelude::*;

    fn small() -> NgramHash {
        let heads = [(0, 7), (7, 11), (20, 13), (33, 17)].map(|(offset, rows)| Head { offset, rows });
        NgramHash::new(vec![3, 5, 9], heads.to_vec(), 2, 1, 100).expect("valid")
    }

    proptest! {
        /// Oracle: the whole sequence at once. Any cut into windows gives the same rows.
        #[test]
        fn windows_do_not_matter(ids in prop::collection::vec(0..12u32, 1..40), cut in 0..40usize) {
            let hash = small();
            let cut = cut.min(ids.len());
            let (mut whole, mut parts) = (Vec::new(), Vec::new());
            hash.rows(&[], &ids, &mut whole);
            hash.rows(&[], &ids[..cut], &mut parts);
            hash.rows(&ids[cut.saturating_sub(hash.context_len())..cut], &ids[cut..], &mut parts);
            prop_assert_eq!(&whole, &parts);
            prop_assert_eq!(whole.len(), ids.len() * 4);
            prop_assert!(whole.iter().all(|&row| row < hash.table_rows()));
        }
    }

    /// Oracle: the rows that the spec gives for the real model (section 7), from the constants derived for it.
    #[test]
    fn real_model_rows() {
        let real = Geometry {
            vocab: 248_320,
            ngram_size: 3,
            heads_per_ngram: 8,
            vocab_base: 20_000_000,
            divisor: 128,
            seed: 1234,
        };
        let table = derive(&real, 1);
        let hash = NgramHash::new(
            table.layers[0].multipliers.clone(),
            table.layers[0].heads.clone(),
            8,
            248_044,
            real.vocab,
        )
        .expect("valid");
        let mut rows = Vec::new();
        hash.rows(&[], &[17, 23, 29], &mut rows);
        #[rustfmt::skip]
        let expected = [
            7961118, 35595600, 53154041, 65925962, 86478454, 100794091, 133015820, 144041389,
            176216895, 183261499, 211010573, 235637741, 252030661, 269649351, 289128081, 308564037,
            11680906, 32824225, 53396086, 66196875, 82883471, 115112459, 123455857, 147913839,
            174923579, 181978945, 218694756, 231526020, 258829176, 266491735, 295792702, 302895670,
            12667906, 33401711, 53769445, 78285190, 90728089, 114875957, 131097864, 159394075,
            171380410, 193186418, 211961015, 231322423, 242227407, 273132736, 290101276, 314943813,
        ];
        assert_eq!(rows, expected);
    }

    /// Oracle: the definition. An end-of-text token hides itself and what is older, but not from itself.
    #[test]
    fn end_of_text_cuts_the_context() {
        let hash = small();
        let rows = |before: &[u32], window: &[u32]| {
            let mut out = Vec::new();
            hash.rows(before, window, &mut out);
            out
        };
        assert_eq!(rows(&[8, 1], &[5]), rows(&[], &[5]));
        assert_eq!(rows(&[1, 8], &[5]), rows(&[8], &[5]));
        assert_ne!(rows(&[9, 8], &[5]), rows(&[8], &[5]));
        assert_ne!(rows(&[9], &[1]), rows(&[8], &[1]));
        assert_eq!(rows(&[9, 9, 3, 4], &[5]), rows(&[3, 4], &[5]));
    }

    /// Oracle: the sentence each mistake promises.
    #[test]
    fn bad_constants_are_refused() {
        let heads = |list: &[(u64, u64)]| -> Vec<Head> {
            list.iter().map(|&(offset, rows)| Head { offset, rows }).collect()
        };
        let refused = |multipliers: &[u64], list: &[(u64, u64)]| {
            NgramHash::new(multipliers.to_vec(), heads(list), 1, 1, 1000).expect_err("refused").to_string()
        };
        assert!(refused(&[3, 5, 7], &[(0, 5)]).contains("1 entries, but 2"));
        assert!(refused(&[3], &[]).contains("0 entries"));
        assert!(refused(&[3, 4], &[(0, 5)]).contains("even"));
        assert!(refused(&[3, 0], &[(0, 5)]).contains("zero"));
        assert!(refused(&[3, u64::MAX], &[(0, 5)]).contains("2^63"));
        assert!(refused(&[3, 5], &[(0, 0)]).contains("empty"));
        assert!(refused(&[3, 5, 7], &[(0, 5), (4, 5)]).contains("overlaps"));
        assert!(refused(&[3, 5], &[(u64::MAX, 5)]).contains("beyond"));
    }
}
