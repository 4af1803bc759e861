//! Random bytes by position: a counter, hashed.
//!
//! Owns the generator. Word `i` of a stream is a function of the stream's key and `i` alone (the output function of
//! SplitMix64, which is a bijection of its counter), so any thread can make any part, in any order.
//!
//! Invariant: a stream's key depends on the seed and on the stream's name only.

/// The odd constant by which SplitMix64 steps: 2^64 divided by the golden ratio.
pub(crate) const STEP: u64 = 0x9E37_79B9_7F4A_7C15;

/// SplitMix64's output function.
pub(crate) fn mix(mut x: u64) -> u64 {
    x = (x ^ x >> 30).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    x = (x ^ x >> 27).wrapping_mul(0x94D0_49BB_1331_11EB);
    x ^ x >> 31
}

/// An endless sequence of random words.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Stream {
    key: u64,
}

impl Stream {
    /// The stream called `name` of a model with this `seed`.
    pub(crate) fn new(seed: u64, name: &str) -> Self {
        let start = mix(seed.wrapping_add(STEP)) ^ name.len() as u64;
        let key = name.bytes().fold(start, |key, byte| mix(key.wrapping_add(STEP) ^ u64::from(byte)));
        Self { key }
    }

    /// The stream number `i` below this one.
    pub(crate) fn nth(self, i: u64) -> Self {
        Self { key: mix(self.key ^ mix(i.wrapping_add(STEP))) }
    }

    /// Word `i`.
    #[inline]
    pub(crate) fn word(self, i: u64) -> u64 {
        mix(self.key.wrapping_add(i.wrapping_mul(STEP)))
    }

    /// The 32 bits number `i`: half of word `i / 2`.
    #[inline]
    pub(crate) fn half(self, i: u64) -> u32 {
        (self.word(i / 2) >> (i % 2 * 32)) as u32
    }

    /// A number below `n`, from word `i`; `n > 0`. Uniform to within `n / 2^64`.
    pub(crate) fn below(self, i: u64, n: u64) -> u64 {
        ((u128::from(self.word(i)) * u128::from(n)) >> 64) as u64
    }

    /// A number from 0 to 1 (1 excluded), from word `i`.
    pub(crate) fn unit(self, i: u64) -> f64 {
        (self.word(i) >> 11) as f64 / (1u64 << 53) as f64
    }

    /// The bytes of the stream from `at` on; words are little-endian.
    pub(crate) fn fill(self, at: u64, mut out: &mut [u8]) {
        let mut word = at / 8;
        let inside = (at % 8) as usize;
        if inside > 0 {
            let head = (8 - inside).min(out.len());
            let (first, rest) = out.split_at_mut(head);
            first.copy_from_slice(&self.word(word).to_le_bytes()[inside..inside + head]);
            (out, word) = (rest, word + 1);
        }
        let mut eights = out.chunks_exact_mut(8);
        for eight in &mut eights {
            eight.copy_from_slice(&self.word(word).to_le_bytes());
            word += 1;
        }
        let tail = eights.into_remainder();
        tail.copy_from_slice(&self.word(word).to_le_bytes()[..tail.len()]);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Oracle: the published first outputs of SplitMix64 seeded with 1234567; `mix` of the stepped counter.
    #[test]
    fn mix_is_splitmix64() {
        let outputs: Vec<u64> =
            (1..=3u64).map(|i| mix(1_234_567u64.wrapping_add(i.wrapping_mul(STEP)))).collect();
        assert_eq!(
            outputs,
            [6_457_827_717_110_365_317, 3_203_168_211_198_807_973, 9_817_491_932_198_370_423]
        );
    }

    /// Oracle: the words. A part of the stream is the same whatever it is cut into.
    #[test]
    fn bytes_depend_on_their_place_only() {
        let stream = Stream::new(7, "blk.0.attn_q.weight");
        let whole: Vec<u8> = (0..8).flat_map(|i| stream.word(i).to_le_bytes()).collect();
        for start in 0..20 {
            for end in start..64 {
                let mut part = vec![0; end - start];
                stream.fill(start as u64, &mut part);
                assert_eq!(part, whole[start..end], "{start}..{end}");
            }
        }
    }

    /// Oracle: names, seeds and numbers make different streams, and 2,048 words have no repeated one and half their bits set.
    #[test]
    fn streams_differ() {
        let streams = [
            Stream::new(1, "a"),
            Stream::new(1, "b"),
            Stream::new(2, "a"),
            Stream::new(1, "a").nth(0),
            Stream::new(1, "a").nth(1),
        ];
        let mut words: Vec<u64> = streams.iter().flat_map(|s| (0..2048).map(|i| s.word(i))).collect();
        let ones: u32 = words.iter().map(|w| w.count_ones()).sum();
        let share = f64::from(ones) / (words.len() as f64 * 64.0);
        assert!((share - 0.5).abs() < 0.003, "{share}");
        words.sort_unstable();
        words.dedup();
        assert_eq!(words.len(), 5 * 2048);
    }
}
