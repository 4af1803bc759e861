//! A block of weights as exact integers, and the two plain things that follow from it: decoding and the
//! scalar dot.
//!
//! Owns [`Term`], the common meaning of all block formats, and the slow definitions written once over it.
//! Each format ([`formats`](crate::formats)) only says how its bytes become terms. The vector paths have
//! their own decoders; this is what they are compared with.
//!
//! Invariant: the value of weight `i` of a term, half `h = i / 16`, is
//! `(d[h] * s[h]) * w[i] + sign * (d_min * m[h])` with every product rounded to f32, and the integers of a term
//! times 32 activations stay below 2^24.

/// 32 consecutive weights.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Term {
    /// The weights, without any scale.
    pub w: [i8; 32],
    /// Integer sub-scale of each half of 16; equal where the format has one per 32, 1 where it has none.
    pub s: [i32; 2],
    /// Float scale of each half; equal in all formats but NVFP4.
    pub d: [f32; 2],
    /// Integer minimum of each half; 0 where the format has none.
    pub m: [i32; 2],
    /// Float scale of the minimums.
    pub d_min: f32,
}

impl Term {
    /// A term with one scale and nothing else.
    pub fn plain(d: f32, w: [i8; 32]) -> Term {
        Term { w, s: [1; 2], d: [d; 2], m: [0; 2], d_min: 0.0 }
    }
}

/// What a format does with its minimums.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Minimum {
    /// There are none: no second FMA.
    None,
    /// Value = scaled weight + minimum (Q4_1, Q5_1).
    Added,
    /// Value = scaled weight - minimum (K-quants).
    Subtracted,
}

/// A block format.
pub(crate) trait BlockFormat {
    /// Values in a block: a multiple of 32.
    const LEN: usize;
    /// Bytes of a block.
    const BYTES: usize;
    /// Its minimums.
    const MINIMUM: Minimum = Minimum::None;
    /// Two float scales per 32 (NVFP4): a term is two, one FMA each.
    const SPLIT: bool = false;

    /// The `i`-th 32 weights of `block`, which has `BYTES` bytes; `i < LEN / 32`.
    fn term(block: &[u8], i: usize) -> Term;
}

/// Decodes whole blocks of format `F`: `out.len()` values.
pub(crate) fn decode<F: BlockFormat>(bytes: &[u8], out: &mut [f32]) {
    for (block, out) in bytes.chunks_exact(F::BYTES).zip(out.chunks_exact_mut(F::LEN)) {
        for (i, out) in out.chunks_exact_mut(32).enumerate() {
            let t = F::term(block, i);
            for (half, out) in out.chunks_exact_mut(16).enumerate() {
                let scale = t.d[half] * t.s[half] as f32;
                let minimum = t.d_min * t.m[half] as f32;
                for (out, &w) in out.iter_mut().zip(&t.w[half * 16..]) {
                    let value = scale * f32::from(w);
                    *out = match F::MINIMUM {
                        Minimum::None => value,
                        Minimum::Added => value + minimum,
                        Minimum::Subtracted => value - minimum,
                    };
                }
            }
        }
    }
}

/// One quantised column: `q` per value, `d` per 32, `sums` of `q` per 16.
#[derive(Clone, Copy)]
pub(crate) struct Column<'a> {
    pub q: &'a [i8],
    pub d: &'a [f32],
    pub sums: &'a [i32],
}

/// The dot product of a row of format `F` and a quantised column, by the arithmetic contract.
pub(crate) fn dot<F: BlockFormat>(row: &[u8], x: Column<'_>) -> f32 {
    let per_block = F::LEN / 32;
    let mut total = 0.0f32;
    for segment in (0..x.d.len()).step_by(SEGMENT) {
        let mut acc = 0.0f32;
        for k in segment..x.d.len().min(segment + SEGMENT) {
            let t = F::term(&row[k / per_block * F::BYTES..][..F::BYTES], k % per_block);
            let half = |h: usize| -> i32 {
                let products = t.w[h * 16..][..16].iter().zip(&x.q[k * 32 + h * 16..][..16]);
                t.s[h] * products.map(|(&w, &a)| i32::from(w) * i32::from(a)).sum::<i32>()
            };
            let d_a = x.d[k];
            if F::SPLIT {
                acc = (half(0) as f32).mul_add(t.d[0] * d_a, acc);
                acc = (half(1) as f32).mul_add(t.d[1] * d_a, acc);
            } else {
                acc = ((half(0) + half(1)) as f32).mul_add(t.d[0] * d_a, acc);
            }
            let minimum = t.m[0] * x.sums[2 * k] + t.m[1] * x.sums[2 * k + 1];
            match F::MINIMUM {
                Minimum::None => {}
                Minimum::Added => acc = (minimum as f32).mul_add(t.d_min * d_a, acc),
                Minimum::Subtracted => acc = (minimum as f32).mul_add(-(t.d_min * d_a), acc),
            }
        }
        total += acc;
    }
    total
}

/// Blocks of 32 values whose products accumulate from zero before they are added to the row's sum.
pub(crate) const SEGMENT: usize = 64;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Format;
    use crate::formats::{grids, with_block_format};

    /// Oracle: the container's table of sizes.
    #[test]
    fn sizes_are_the_containers() {
        for format in Format::ALL {
            with_block_format!(format, F => {
                assert_eq!((F::LEN, F::BYTES), (format.block_len(), format.block_bytes()), "{format}");
            }, float => assert!(format.is_float()));
        }
    }

    /// The largest sum over 32 weights of |s * w|, and over 32 of |m|, of any block: taken from the terms of
    /// blocks that put every code into every place, since each code of a term is chosen freely and apart from
    /// the scales.
    fn largest<F: BlockFormat>() -> (i32, i32) {
        let (mut w, mut s, mut m) = ([0i32; 32], [0i32; 2], [0i32; 2]);
        let mut block = vec![0u8; F::BYTES];
        let mut state = 1u64;
        for round in 0..20_000u32 {
            for (i, byte) in block.iter_mut().enumerate() {
                state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                // First all bytes alike, then random ones.
                *byte = if round < 256 { round as u8 } else { (state >> 56) as u8 ^ (i as u8) };
            }
            for i in 0..F::LEN / 32 {
                let t = F::term(&block, i);
                for (most, w) in w.iter_mut().zip(t.w) {
                    *most = (*most).max(i32::from(w).abs());
                }
                for h in 0..2 {
                    s[h] = s[h].max(t.s[h].abs());
                    m[h] = m[h].max(t.m[h].abs());
                }
            }
        }
        let half = |h: usize| s[h] * w[16 * h..][..16].iter().sum::<i32>();
        // A term of NVFP4 is 16 wide.
        let i = if F::SPLIT { half(0).max(half(1)) } else { half(0) + half(1) };
        (i, 16 * (m[0] + m[1]))
    }

    /// Oracle: the arithmetic contract, "Block formats": |I| and |M| stay below 2^24 against activations of
    /// at most 127, so that f32(I) and f32(M) are exact. The tightest bounds are the ones stated there.
    #[test]
    fn integers_are_exact_in_f32() {
        for format in Format::ALL {
            with_block_format!(format, F => {
                let (i, m) = largest::<F>();
                assert!(i * 127 < 1 << 24 && m * 127 < 1 << 24, "{format}: {i} {m}");
                match format {
                    Format::Q6K => assert_eq!(i * 127, 16_646_144),
                    Format::Iq4Xs => assert_eq!(i * 127, 16_516_096),
                    Format::Q4K | Format::Q5K => assert_eq!(m * 127, 63 * 32 * 127),
                    _ => {}
                }
            }, float => {});
        }
    }

    /// Oracle: the sizes in the formats' names, and the values that the contract's bounds assume.
    #[test]
    fn grids_hold_what_the_bounds_assume() {
        let bytes = |rows: &[u64]| rows.iter().flat_map(|r| r.to_le_bytes()).collect::<Vec<_>>();
        let words = |rows: &[u32]| rows.iter().flat_map(|r| r.to_le_bytes()).collect::<Vec<_>>();
        for rows in [&grids::IQ2_XXS[..], &grids::IQ2_XS, &grids::IQ2_S] {
            assert!(bytes(rows).iter().all(|b| [8, 25, 43].contains(b)));
        }
        assert!(words(&grids::IQ3_XXS).iter().all(|&b| (4..=62).contains(&b)));
        assert!(words(&grids::IQ3_S).iter().all(|&b| (1..=15).contains(&b) && b % 2 == 1));
        assert!(bytes(&grids::IQ1).iter().all(|&b| [0xff, 0, 1].contains(&b)));
    }
}
