//! Activations as block-format products want them: quantised per 32 values, once, for all matrices they meet.
//!
//! Owns the quantisation rule and the layouts: columns one after the other, and, where there are at least
//! [`WIDE_FROM`] and the build has vector paths, the same packed in groups for kernels whose lanes are
//! columns. Keeps no f32 copy: float weights take f32 columns ([`Columns::Float`](crate::Columns)).
//!
//! Invariant: nothing is allocated after [`Activations::new`]; in every block either all `q` are 0 and `d` is
//! 0 or NaN, or `d >= 2^-107` and some `q` is 127 or -127. Padding, of columns and of groups, is zero.

use crate::aligned::Aligned;
use crate::block::Column;
use crate::{Isa, dispatch};

/// A block whose largest magnitude is below this is zeros.
pub(crate) const TINY: f32 = f32::from_bits((127 - 100) << 23);

/// Adding and subtracting it rounds a float of magnitude below 2^22 to an integer, ties to even.
const ROUND: f32 = 12_582_912.0;

/// Columns in a packed group.
pub(crate) const GROUP: usize = 16;

/// The fewest columns that are packed.
pub(crate) const WIDE_FROM: usize = 6;

/// Columns start at multiples of this many values, so that a vector of two blocks may be read at the last
/// one.
const STRIDE: usize = 64;

/// Quantised columns (tokens) of one length. Reused from product to product; see [`Activations::quantise`].
pub struct Activations {
    k_max: usize,
    cols_max: usize,
    k: usize,
    cols: usize,
    /// `[col][k, up to a multiple of STRIDE]`
    q: Aligned<i8>,
    /// `[col][k / 32]`
    d: Aligned<f32>,
    /// `[col][k / 16]`
    sums: Aligned<i32>,
    packed: Packed,
}

/// Groups of [`GROUP`] columns, a lane each.
struct Packed {
    /// `[group][k / 4][lane][4]`
    q: Aligned<i8>,
    /// `[group][k / 32][lane]`
    d: Aligned<f32>,
    /// `[group][k / 16][lane]`
    sums: Aligned<i32>,
}

/// The most elements of `q`, `d` and `sums`, and of the packed ones.
fn lengths(k_max: usize, cols_max: usize) -> [usize; 6] {
    let plain = [k_max.next_multiple_of(STRIDE), k_max / 32, k_max / 16].map(|n| n * cols_max);
    let groups = if cfg!(x86_paths) && cols_max >= WIDE_FROM { cols_max.div_ceil(GROUP) } else { 0 };
    let packed = [k_max, k_max / 32, k_max / 16].map(|n| n * GROUP * groups);
    [plain[0], plain[1], plain[2], packed[0], packed[1], packed[2]]
}

impl Activations {
    /// Bytes that [`Activations::new`] allocates for the same arguments.
    pub fn bytes_for(k_max: usize, cols_max: usize) -> usize {
        let [q, d, sums, packed_q, packed_d, packed_sums] = lengths(k_max, cols_max);
        let (bytes, floats, ints) =
            (Aligned::<i8>::bytes_for, Aligned::<f32>::bytes_for, Aligned::<i32>::bytes_for);
        bytes(q) + floats(d) + ints(sums) + bytes(packed_q) + floats(packed_d) + ints(packed_sums)
    }

    /// Room for `cols_max` columns of `k_max` values; holds no column yet.
    ///
    /// # Panics
    /// If `k_max` is no multiple of 32.
    pub fn new(k_max: usize, cols_max: usize) -> Activations {
        assert!(k_max.is_multiple_of(32), "activations are quantised per 32 values, not {k_max}");
        let [q, d, sums, packed_q, packed_d, packed_sums] = lengths(k_max, cols_max);
        let packed =
            Packed { q: Aligned::new(packed_q), d: Aligned::new(packed_d), sums: Aligned::new(packed_sums) };
        let (q, d, sums) = (Aligned::new(q), Aligned::new(d), Aligned::new(sums));
        Activations { k_max, cols_max, k: 0, cols: 0, q, d, sums, packed }
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
        &self.q[col * self.stride()..][..self.k]
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

    /// Replaces the columns by `x`, `[cols][k]`. Contract: "Activations"; in a block that isn't finite, `q`
    /// is 0.
    ///
    /// # Panics
    /// If `k` is no multiple of 32, `x` isn't `cols * k` long, or either exceeds what `new` made room for.
    pub fn quantise(&mut self, isa: Isa, x: &[f32], k: usize, cols: usize) {
        self.reshape(k, cols);
        assert_eq!(x.len(), cols * k, "{cols} columns of {k} values expected");
        let stride = self.stride();
        for (col, x) in x.chunks_exact(k.max(1)).enumerate() {
            let (q, padding) = self.q[col * stride..][..stride].split_at_mut(k);
            padding.fill(0);
            let (d, sums) =
                (&mut self.d[col * (k / 32)..][..k / 32], &mut self.sums[col * (k / 16)..][..k / 16]);
            quantise_blocks(isa, x, q, d, sums);
        }
        self.pack();
    }

    /// Replaces the columns by the columns `cols` of `from`, in that order (the tokens of one expert, say).
    ///
    /// # Panics
    /// If a column isn't in `from`, or they exceed what `new` made room for.
    pub fn gather(&mut self, from: &Activations, cols: &[u32]) {
        self.reshape(from.k, cols.len());
        let (k, stride) = (self.k, self.stride());
        for (to, &col) in cols.iter().enumerate() {
            let col = col as usize;
            assert!(col < from.cols, "column {col} of {}", from.cols);
            self.q[to * stride..][..stride].copy_from_slice(&from.q[col * stride..][..stride]);
            self.d[to * (k / 32)..][..k / 32].copy_from_slice(from.d(col));
            self.sums[to * (k / 16)..][..k / 16].copy_from_slice(from.sums(col));
        }
        self.pack();
    }

    pub(crate) fn column(&self, col: usize) -> Column<'_> {
        Column { q: self.q(col), d: self.d(col), sums: self.sums(col) }
    }

    /// Both layouts, for the vector kernels.
    #[cfg(x86_paths)]
    pub(crate) fn pointers(&self) -> crate::x86::Columns {
        crate::x86::Columns {
            k: self.k,
            cols: self.cols,
            q: self.q.as_ptr(),
            q_stride: self.stride(),
            d: self.d.as_ptr(),
            sums: self.sums.as_ptr(),
            packed_q: self.packed.q.as_ptr(),
            packed_d: self.packed.d.as_ptr(),
            packed_sums: self.packed.sums.as_ptr(),
        }
    }

    fn stride(&self) -> usize {
        self.k.next_multiple_of(STRIDE)
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

    /// Makes the packed copy, if there are enough columns for a kernel that wants it.
    fn pack(&mut self) {
        if !cfg!(x86_paths) || self.cols < WIDE_FROM {
            return;
        }
        let (k, cols, stride) = (self.k, self.cols, self.stride());
        for group in 0..cols.div_ceil(GROUP) {
            let first = group * GROUP;
            let members = GROUP.min(cols - first);
            let q = &self.q[first * stride..][..members * stride];
            let to = &mut self.packed.q[group * k * GROUP..][..k * GROUP];
            lanes(bytemuck::cast_slice(q), stride / 4, members, k / 4, bytemuck::cast_slice_mut(to));
            let n = k / 32;
            let d = &self.d[first * n..][..members * n];
            let to = &mut self.packed.d[group * n * GROUP..][..n * GROUP];
            lanes(bytemuck::cast_slice(d), n, members, n, bytemuck::cast_slice_mut(to));
            let n = k / 16;
            let sums = &self.sums[first * n..][..members * n];
            let to = &mut self.packed.sums[group * n * GROUP..][..n * GROUP];
            lanes(bytemuck::cast_slice(sums), n, members, n, bytemuck::cast_slice_mut(to));
        }
    }
}

/// `members` columns of `stride` elements, of which `len` count, to `len` rows of [`GROUP`] lanes. Lanes
/// without a column become zero.
fn lanes(columns: &[u32], stride: usize, members: usize, len: usize, to: &mut [u32]) {
    #[cfg(x86_paths)]
    if crate::x86::pack(columns, stride, members, len, to) {
        return;
    }
    for (i, row) in to.chunks_exact_mut(GROUP).enumerate().take(len) {
        for (lane, to) in row.iter_mut().enumerate() {
            *to = if lane < members { columns[lane * stride + i] } else { 0 };
        }
    }
}

/// Quantises blocks of 32, as many as `d` has.
fn quantise_blocks(isa: Isa, x: &[f32], q: &mut [i8], d: &mut [f32], sums: &mut [i32]) {
    #[cfg(x86_paths)]
    if crate::x86::quantise(isa, x, q, d, sums) {
        return;
    }
    quantise_plainly(isa, x, q, d, sums);
}

dispatch! {
    fn quantise_plainly(isa, x: &[f32], q: &mut [i8], d: &mut [f32], sums: &mut [i32]) {
        let blocks = x.chunks_exact(32).zip(q.chunks_exact_mut(32));
        for ((x, q), (d, sums)) in blocks.zip(d.iter_mut().zip(sums.chunks_exact_mut(2))) {
            // As integers, magnitudes compare like the floats they are, and everything not finite is above
            // them.
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
