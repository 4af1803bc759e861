//! Activations as block-format products want them: quantised per 32 values, once, for all matrices they meet.
//!
//! Owns the quantisation rule and the layout. Keeps no f32 copy: float weights take f32 columns
//! ([`Columns::Float`](crate::Columns)).
//!
//! Invariant: nothing is allocated after [`Activations::new`]; in every block either all `q` are 0 and `d` is 0 or NaN,
//! or `d >= 2^-107` and some `q` is 127 or -127.

use crate::aligned::Aligned;
use crate::block::Column;
use crate::dispatch;

/// A block whose largest magnitude is below this is zeros.
const TINY: f32 = f32::from_bits((127 - 100) << 23);

/// Adding and subtracting it rounds a float of magnitude below 2^22 to an integer, ties to even.
const ROUND: f32 = 12_582_912.0;

/// Quantised columns (tokens) of one length. Reused from product to product; see [`Activations::quantise`].
pub struct Activations {
    k_max: usize,
    cols_max: usize,
    k: usize,
    cols: usize,
    /// `[col][k]`
    q: Aligned<i8>,
    /// `[col][k / 32]`
    d: Aligned<f32>,
    /// `[col][k / 16]`
    sums: Aligned<i32>,
}

impl Activations {
    /// Bytes that [`Activations::new`] allocates for the same arguments.
    pub fn bytes_for(k_max: usize, cols_max: usize) -> usize {
        let n = k_max * cols_max;
        Aligned::<i8>::bytes_for(n) + Aligned::<f32>::bytes_for(n / 32) + Aligned::<i32>::bytes_for(n / 16)
    }

    /// Room for `cols_max` columns of `k_max` values; holds no column yet.
    ///
    /// # Panics
    /// If `k_max` is no multiple of 32.
    pub fn new(k_max: usize, cols_max: usize) -> Activations {
        assert!(k_max.is_multiple_of(32), "activations are quantised per 32 values, not {k_max}");
        let n = k_max * cols_max;
        let (q, d, sums) = (Aligned::new(n), Aligned::new(n / 32), Aligned::new(n / 16));
        Activations { k_max, cols_max, k: 0, cols: 0, q, d, sums }
    }

    /// Length of the columns held.
    pub fn k(&self) -> usize {
        self.k
    }

    /// Number of columns held.
    pub fn cols(&self) -> usize {
        self.cols
    }

    /// The quantised values of a column: `[k]`.
    pub fn q(&self, col: usize) -> &[i8] {
        assert!(col < self.cols, "column {col} of {}", self.cols);
        &self.q[col * self.k..][..self.k]
    }

    /// The scales of a column: `[k / 32]`.
    pub fn d(&self, col: usize) -> &[f32] {
        assert!(col < self.cols, "column {col} of {}", self.cols);
        &self.d[col * (self.k / 32)..][..self.k / 32]
    }

    /// Sums of a column's quantised values: `[k / 16]`.
    pub fn sums(&self, col: usize) -> &[i32] {
        assert!(col < self.cols, "column {col} of {}", self.cols);
        &self.sums[col * (self.k / 16)..][..self.k / 16]
    }

    /// Replaces the columns by `x`, `[cols][k]`. Contract: "Activations"; in a block that isn't finite, `q` is 0.
    ///
    /// # Panics
    /// If `k` is no multiple of 32, `x` isn't `cols * k` long, or either exceeds what `new` made room for.
    pub fn quantise(&mut self, isa: crate::Isa, x: &[f32], k: usize, cols: usize) {
        self.reshape(k, cols);
        assert_eq!(x.len(), cols * k, "{cols} columns of {k} values expected");
        let n = cols * k;
        quantise_blocks(isa, x, &mut self.q[..n], &mut self.d[..n / 32], &mut self.sums[..n / 16]);
    }

    /// Replaces the columns by the columns `cols` of `from`, in that order (the tokens of one expert, say).
    ///
    /// # Panics
    /// If a column isn't in `from`, or they exceed what `new` made room for.
    pub fn gather(&mut self, from: &Activations, cols: &[u32]) {
        self.reshape(from.k, cols.len());
        let k = self.k;
        for (to, &col) in cols.iter().enumerate() {
            let col = col as usize;
            self.q[to * k..][..k].copy_from_slice(from.q(col));
            self.d[to * (k / 32)..][..k / 32].copy_from_slice(from.d(col));
            self.sums[to * (k / 16)..][..k / 16].copy_from_slice(from.sums(col));
        }
    }

    pub(crate) fn column(&self, col: usize) -> Column<'_> {
        Column { q: self.q(col), d: self.d(col), sums: self.sums(col) }
    }

    fn reshape(&mut self, k: usize, cols: usize) {
        assert!(k.is_multiple_of(32), "activations are quantised per 32 values, not {k}");
        assert!(
            k <= self.k_max && cols <= self.cols_max,
            "{cols} columns of {k} values in activations made for {} of {}",
            self.cols_max,
            self.k_max
        );
        (self.k, self.cols) = (k, cols);
    }
}

dispatch! {
    fn quantise_blocks(isa, x: &[f32], q: &mut [i8], d: &mut [f32], sums: &mut [i32]) {
        let blocks = x.chunks_exact(32).zip(q.chunks_exact_mut(32));
        for ((x, q), (d, sums)) in blocks.zip(d.iter_mut().zip(sums.chunks_exact_mut(2))) {
            // As integers, magnitudes compare like the floats they are, and everything not finite is above them.
            let mut largest = 0u32;
            for &x in x {
                largest = largest.max(x.to_bits() & 0x7fff_ffff);
            }
            let amax = f32::from_bits(largest);
            let (scale, factor) = if largest >= 0x7f80_0000 {
                (f32::NAN, 0.0)
            } else if amax < TINY {
                (0.0, 0.0)
            } else {
                (amax / 127.0, 127.0 / amax)
            };
            *d = scale;
            if factor == 0.0 {
                q.fill(0);
                sums.fill(0);
                continue;
            }
            for ((x, q), sum) in x.chunks_exact(16).zip(q.chunks_exact_mut(16)).zip(sums) {
                let mut total = 0;
                for (&x, q) in x.iter().zip(q) {
                    let rounded = ((x * factor).clamp(-127.0, 127.0) + ROUND).to_bits() as i32 - ROUND.to_bits() as i32;
                    *q = rounded as i8;
                    total += rounded;
                }
                *sum = total;
            }
        }
    }
}
