//! Every path gives the bits of the scalar one: on arbitrary blocks, arbitrary activations, any number of
//! columns, and any split of the rows.

use proptest::prelude::*;
use proptest::test_runner::TestRunner;
use strata_quant::{Activations, Columns, Format, Isa, Matrix, Out, matmul};

fn product(isa: Isa, w: Matrix<'_>, x: Columns<'_>, cols: usize, splits: &[usize]) -> Vec<u32> {
    let stride = w.rows() + 3;
    let mut out = vec![0.0f32; stride * cols];
    let mut from = 0;
    for to in splits.iter().copied().chain([w.rows()]) {
        let to = to.clamp(from, w.rows());
        matmul(isa, w, from..to, x, Out::new(&mut out, stride));
        from = to;
    }
    let class = |v: f32| {
        if v.is_nan() { f32::NAN.to_bits() } else { v.to_bits() }
    };
    (0..cols)
        .flat_map(|c| out[c * stride..][..w.rows()].iter().map(|&v| class(v)).collect::<Vec<_>>())
        .collect()
}

/// Pseudo-random bytes: all patterns.
fn noise(seed: u64, len: usize) -> Vec<u8> {
    let mut state = seed | 1;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state
    };
    (0..len).map(|_| (next() >> 32) as u8).collect()
}

/// Values of about unit size, with zero blocks, outliers and, if asked, blocks that aren't finite.
fn activations(seed: u64, k: usize, cols: usize, wild: bool) -> Vec<f32> {
    let bytes = noise(seed ^ 0x5eed, 4 * k * cols + k * cols / 32);
    let (values, kinds) = bytes.split_at(4 * k * cols);
    let mut x: Vec<f32> = values
        .chunks(4)
        .map(|b| i32::from_le_bytes([b[0], b[1], b[2], b[3]]) as f32 / f32::powi(2.0, 31))
        .collect();
    for (block, kind) in x.chunks_mut(32).zip(kinds) {
        match kind {
            0..8 => block.fill(0.0),
            8..16 => block[usize::from(*kind)] = 1e4,
            16 if wild => block[3] = f32::NAN,
            17 if wild => block[31] = f32::INFINITY,
            18..24 if wild => block.iter_mut().for_each(|x| *x *= 1e-30),
            24..28 if wild => block.iter_mut().for_each(|x| *x *= 1e30),
            _ => {}
        }
    }
    x
}

/// Turns the scales of half the blocks into ordinary ones: random f16 scales are often huge, and a NaN or an
/// infinity hides everything else in its row.
fn tame(format: Format, bytes: &mut [u8], seed: u64) {
    let at: &[usize] = match format {
        Format::Q4_1 | Format::Q5_1 | Format::Q4K | Format::Q5K => &[0, 2],
        Format::Q2K => &[80, 82],
        Format::Q3K => &[108],
        Format::Q6K => &[208],
        Format::Iq1M | Format::Mxfp4 | Format::Nvfp4 => &[],
        _ => &[0],
    };
    let picks = noise(seed ^ 0x7a3e, bytes.len() / format.block_bytes() * 4);
    for (block, pick) in bytes.chunks_mut(format.block_bytes()).zip(picks.chunks(4)) {
        if pick[0] < 4 {
            continue;
        }
        for (i, &at) in at.iter().enumerate() {
            // Exponent 7..23 of 31: far from infinite, some negative.
            block[at] = pick[1 + i];
            block[at + 1] = (pick[3] & 0x80) | (0x1c + (pick[2] & 0x3f));
        }
        match format {
            Format::Iq1M => block[55] = block[55] & 0x0f | 0x30,
            Format::Mxfp4 => block[0] = 100 + pick[1] % 40,
            _ => {}
        }
    }
}

fn check(format: Format, seed: u64, rows: usize, blocks: usize, cols: usize, wild: bool, splits: &[usize]) {
    let k = if format.is_float() { 8 * blocks + seed as usize % 8 } else { blocks * format.block_len() };
    let mut bytes = noise(seed, format.row_bytes(k).unwrap() * rows);
    if !wild {
        tame(format, &mut bytes, seed);
    }
    let w = Matrix::new(format, &bytes, k, rows).unwrap();
    let x = activations(seed, k, cols, wild);
    let mut a = Activations::new(k.next_multiple_of(32), cols);
    let columns = if format.is_float() {
        Columns::Float(&x)
    } else {
        a.quantise(Isa::Scalar, &x, k, cols);
        Columns::Quantised(&a)
    };
    let want = product(Isa::Scalar, w, columns, cols, &[]);
    for isa in Isa::available() {
        assert_eq!(product(isa, w, columns, cols, splits), want, "{format} {isa} {rows} x {k} x {cols}");
        // One column at a time, gathered in another order.
        if !format.is_float() && cols > 1 {
            let mut one = Activations::new(k, 1);
            for col in [cols - 1, 0] {
                one.gather(&a, &[col as u32]);
                let got = product(isa, w, Columns::Quantised(&one), 1, &[]);
                assert_eq!(
                    got,
                    want[col * rows..][..rows],
                    "{format} {isa} {rows} x {k}, column {col} of {cols}"
                );
            }
        }
    }
}

/// Random shapes and bytes of one format, through [`check`]: few rows of more than a segment; many short
/// rows, which kernels take several at a time.
fn agrees(format: Format) {
    let shapes = prop_oneof![(1..40usize, 1..4usize), (1..40usize, 60..70usize), (1..300usize, 1..14usize)];
    let cols = prop_oneof![1..9usize, 9..36usize];
    let inputs = (any::<u64>(), shapes, cols, any::<bool>(), 0..300usize);
    let config = ProptestConfig { cases: 24, failure_persistence: None, ..ProptestConfig::default() };
    let run = TestRunner::new(config).run(&inputs, |(seed, (rows, blocks), cols, wild, split)| {
        let blocks = if format.block_len() == 256 { blocks.div_ceil(8) } else { blocks };
        check(format, seed, rows, blocks, cols, wild, &[split]);
        Ok(())
    });
    run.unwrap();
}

macro_rules! paths {
    ($($name:ident $format:ident)*) => { $(
        /// Oracle: the scalar path.
        #[test]
        fn $name() {
            agrees(Format::$format);
        }
    )* };
}

paths! {
    f32 F32 f16 F16 bf16 Bf16 q8_0 Q8_0 q4_0 Q4_0 q4_1 Q4_1 q5_0 Q5_0 q5_1 Q5_1 q2_0 Q2_0 q2_k Q2K q3_k Q3K q4_k Q4K q5_k Q5K
    q6_k Q6K iq1_s Iq1S iq1_m Iq1M iq2_xxs Iq2Xxs iq2_xs Iq2Xs iq2_s Iq2S iq3_xxs Iq3Xxs iq3_s Iq3S iq4_nl Iq4Nl
    iq4_xs Iq4Xs mxfp4 Mxfp4 nvfp4 Nvfp4
}

/// Oracle: extreme weights and activations, where sums are largest; the scalar path.
#[test]
fn extreme_sums() {
    for format in Format::ALL.into_iter().filter(|f| !f.is_float()) {
        for fill in [0x00, 0x0f, 0xf0, 0x80, 0x7f, 0xff] {
            let k = 256;
            let mut bytes = vec![fill; format.row_bytes(k).unwrap() * 17];
            for block in bytes.chunks_mut(format.block_bytes()) {
                match format {
                    Format::Q2K => block[80..].copy_from_slice(&[0, 0x3c, 0, 0x3c]),
                    Format::Q3K => block[108..].copy_from_slice(&[0, 0x3c]),
                    Format::Q6K => block[208..].copy_from_slice(&[0, 0x3c]),
                    Format::Iq1M | Format::Nvfp4 => {}
                    Format::Mxfp4 => block[0] = 127,
                    _ => block[..2].copy_from_slice(&[0, 0x3c]),
                }
            }
            let w = Matrix::new(format, &bytes, k, 17).unwrap();
            for value in [1.0, -1.0] {
                let cols = 17;
                let mut a = Activations::new(k, cols);
                a.quantise(Isa::Scalar, &vec![value; k * cols], k, cols);
                let want = product(Isa::Scalar, w, Columns::Quantised(&a), cols, &[]);
                for isa in Isa::available() {
                    assert_eq!(
                        product(isa, w, Columns::Quantised(&a), cols, &[]),
                        want,
                        "{format} {isa} {fill:#x} {value}"
                    );
                }
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, failure_persistence: None, ..ProptestConfig::default() })]
    /// Oracle: the scalar path, on arbitrary bits.
    #[test]
    fn activations_agree(seed in any::<u64>(), blocks in 1..40usize) {
        let bits = noise(seed, 128 * blocks);
        let arbitrary: Vec<f32> = bits.chunks(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect();
        for x in [arbitrary, activations(seed, 32 * blocks, 1, true)] {
            let mut want = Activations::new(32 * blocks, 1);
            want.quantise(Isa::Scalar, &x, 32 * blocks, 1);
            for isa in Isa::available() {
                let mut got = Activations::new(32 * blocks, 1);
                got.quantise(isa, &x, 32 * blocks, 1);
                let bits = |a: &Activations| a.d(0).iter().map(|d| d.to_bits()).collect::<Vec<_>>();
                prop_assert_eq!(got.q(0), want.q(0));
                prop_assert_eq!(got.sums(0), want.sums(0));
                prop_assert_eq!(bits(&got), bits(&want));
            }
        }
    }
}
