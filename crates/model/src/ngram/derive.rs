//! How the hash constants of a new model come about: primes for the heads, multipliers from a seed.
//!
//! A finished model carries its constants in the file; this is for making models, and shows that the files' constants
//! are what the rule gives. Source: spec, sections 1 and 2.5.

use super::Head;

/// What the constants follow from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Geometry {
    /// Tokens in the vocabulary, padding included.
    pub vocab: usize,
    /// Longest n-gram, in tokens.
    pub ngram_size: usize,
    /// Heads for each n-gram length from 2 up.
    pub heads_per_ngram: usize,
    /// The smallest head has the first prime at or above this many rows.
    pub vocab_base: u64,
    /// The table's rows are padded to a multiple of this.
    pub divisor: u64,
    /// Seed of the multipliers.
    pub seed: u64,
}

/// The constants of one n-gram layer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Constants {
    /// One odd multiplier per context position.
    pub multipliers: Vec<u64>,
    /// The heads, in the order of the embedding.
    pub heads: Vec<Head>,
}

/// The constants of all n-gram layers, which share one table.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Table {
    /// By n-gram layer.
    pub layers: Vec<Constants>,
    /// Rows of the table, padding included.
    pub rows: u64,
}

/// The constants for `layers` n-gram layers. A further layer continues the sequence of primes and the table.
pub fn derive(geometry: &Geometry, layers: usize) -> Table {
    let heads_per_layer = geometry.heads_per_ngram * geometry.ngram_size.saturating_sub(1);
    let mut primes = (geometry.vocab_base..).filter(|&n| is_prime(n));
    let mut free = 0;
    let layers = (0..layers as u64)
        .map(|layer| Constants {
            multipliers: multipliers(geometry, layer),
            heads: primes
                .by_ref()
                .take(heads_per_layer)
                .map(|rows| {
                    let head = Head { offset: free, rows };
                    free += rows;
                    head
                })
                .collect(),
        })
        .collect();
    Table { layers, rows: free.next_multiple_of(geometry.divisor.max(1)) }
}

/// The largest multiplier with which products of token ids stay below 2^63.
pub(super) fn multiplier_limit(vocab: usize) -> u64 {
    i64::MAX as u64 / (vocab as u64).max(1)
}

const GOLDEN_GAMMA: u64 = 0x9E37_79B9_7F4A_7C15;

/// The odd multipliers of n-gram layer `layer` (counted among the n-gram layers).
fn multipliers(geometry: &Geometry, layer: u64) -> Vec<u64> {
    let half = (multiplier_limit(geometry.vocab) / 2).max(1);
    (1..=geometry.ngram_size as u64)
        .map(|position| {
            let state = geometry
                .seed
                .wrapping_add(layer.wrapping_mul(10_007))
                .wrapping_add(position.wrapping_mul(GOLDEN_GAMMA));
            2 * (splitmix64(state) % half) + 1
        })
        .collect()
}

/// One step of the generator splitmix64 from `state`.
fn splitmix64(state: u64) -> u64 {
    let mut z = state.wrapping_add(GOLDEN_GAMMA);
    z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ (z >> 31)
}

fn is_prime(n: u64) -> bool {
    n >= 2 && (2..).take_while(|d| d * d <= n).all(|d| !n.is_multiple_of(d))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Oracle: the constants that the spec gives for the real model (section 1).
    #[test]
    fn real_constants() {
        let real = Geometry {
            vocab: 248_320,
            ngram_size: 3,
            heads_per_ngram: 8,
            vocab_base: 20_000_000,
            divisor: 128,
            seed: 1234,
        };
        let table = derive(&real, 1);
        assert_eq!(table.layers[0].multipliers, [23_703_573_157_769, 20_109_073_645_365, 8_052_911_324_071]);
        let ends = [3, 23, 33, 47, 59, 63, 69, 77, 81, 93, 107, 147, 153, 159, 161, 171];
        assert!(table.layers[0].heads.iter().map(|h| h.rows - 20_000_000).eq(ends));
        let last = table.layers[0].heads[15];
        assert_eq!(last.offset + last.rows, 320_001_446);
        assert_eq!(table.rows, 320_001_536);

        let two = derive(&real, 2);
        assert_eq!(two.layers[0], table.layers[0]);
        assert_eq!(two.layers[1].heads[0].offset, 320_001_446);
        assert!(two.layers[1].heads[0].rows > 20_000_171);
        assert_ne!(two.layers[1].multipliers, two.layers[0].multipliers);
    }

    /// Oracle: the definition, by sieve.
    #[test]
    fn primes() {
        let mut sieve = vec![true; 2000];
        sieve[..2].fill(false);
        for i in 2..2000 {
            if sieve[i] {
                (2 * i..2000).step_by(i).for_each(|j| sieve[j] = false);
            }
        }
        assert!((0..2000).all(|n| is_prime(n as u64) == sieve[n]));
    }
}
