//! The committed golden vectors, bit for bit, on every path of this machine.
//!
//! Oracle of all tests here: `tests/data/contract` and `tests/data/quants`, made by an independent
//! implementation.

use half::f16;
use strata_quant::{Activations, Columns, Format, Isa, Matrix, Out, dequantise, lanes, matmul};
use strata_testkit::golden::Npz;

/// The name that the archives use.
fn key(format: Format) -> String {
    match format {
        Format::Q2K | Format::Q3K | Format::Q4K | Format::Q5K | Format::Q6K => {
            format!("q{}", &format.name()[1..])
        }
        _ => format.name().to_lowercase(),
    }
}

fn same(got: f32, want: f32) -> bool {
    got.to_bits() == want.to_bits() || got.is_nan() && want.is_nan()
}

#[track_caller]
fn assert_same(got: &[f32], want: &[f32], what: &str) {
    assert_eq!(got.len(), want.len(), "{what}");
    for (i, (&got, &want)) in got.iter().zip(want).enumerate() {
        assert!(
            same(got, want),
            "{what}, element {i}: {got:?} ({:08x}), not {want:?} ({:08x})",
            got.to_bits(),
            want.to_bits()
        );
    }
}

#[test]
fn every_format_decodes_to_the_reference_values() {
    let mut z = Npz::golden("quants/quants.npz");
    for format in Format::ALL {
        for (bytes, values) in [("bytes", "values"), ("random_blocks", "random_values")] {
            let name = format!("{}.{bytes}", key(format));
            if format.is_float() && (bytes == "random_blocks" || !z.has(&name)) {
                continue;
            }
            let want = z.f32(&format!("{}.{values}", key(format))).data;
            let bytes = z.array::<u8>(&name).data;
            let mut got = vec![0.0; want.len()];
            dequantise(format, &bytes, &mut got);
            assert_same(&got, &want, &name);
        }
    }
}

/// Multiplies all rows by all columns; result `[row][col]`, as the archive has it.
fn product(isa: Isa, w: Matrix<'_>, x: Columns<'_>, cols: usize) -> Vec<f32> {
    let mut out = vec![f32::NAN; w.rows() * cols];
    matmul(isa, w, 0..w.rows(), x, Out::new(&mut out, w.rows()));
    (0..w.rows() * cols).map(|i| out[i % cols * w.rows() + i / cols]).collect()
}

#[test]
fn activations_quantise_as_the_contract_says() {
    let mut z = Npz::golden("contract/contract.npz");
    for isa in Isa::available() {
        for k in [96, 640, 2560, 6400] {
            let x = z.f32(&format!("x.{k}"));
            let (q, d) = (z.array::<i8>(&format!("q.{k}")), z.f32(&format!("d.{k}")));
            let mut a = Activations::new(k, 7);
            a.quantise(isa, &x.data, k, 7);
            for col in 0..7 {
                assert_same(a.d(col), d.row(col), &format!("{isa} d.{k}"));
                for (i, (&got, &want)) in a.q(col).iter().zip(q.row(col)).enumerate() {
                    assert!(
                        got == want || a.d(col)[i / 32].is_nan(),
                        "{isa} q.{k} [{col}, {i}]: {got}, not {want}"
                    );
                }
                for (sum, q) in a.sums(col).iter().zip(a.q(col).chunks(16)) {
                    assert_eq!(*sum, q.iter().map(|&q| i32::from(q)).sum::<i32>());
                }
            }
        }
    }
}

#[test]
fn block_products_have_the_golden_bits() {
    let mut z = Npz::golden("contract/contract.npz");
    let mut products = 0;
    for k in [96, 640, 2560, 6400] {
        let x = z.f32(&format!("x.{k}"));
        for format in Format::ALL {
            let name = format!("{}.{k}.rows", key(format));
            if format.is_float() || !z.has(&name) {
                continue;
            }
            let rows = z.array::<u8>(&name);
            let want = z.f32(&format!("{}.{k}.dot", key(format)));
            let w = Matrix::new(format, &rows.data, k, 4).unwrap();
            for isa in Isa::available() {
                let mut a = Activations::new(k, 7);
                a.quantise(isa, &x.data, k, 7);
                assert_same(
                    &product(isa, w, Columns::Quantised(&a), 7),
                    &want.data,
                    &format!("{isa} {name}"),
                );
                products += 1;
                if format == Format::Nvfp4 {
                    let scale = z.f32(&format!("nvfp4.{k}.tensor_scale")).data[0];
                    let want = z.f32(&format!("nvfp4.{k}.scaled"));
                    let got = product(isa, w.scaled(scale), Columns::Quantised(&a), 7);
                    assert_same(&got, &want.data, &format!("{isa} {name} scaled"));
                }
            }
        }
    }
    assert_eq!(products, 60 * Isa::available().len());
}

#[test]
fn float_products_have_the_golden_bits() {
    let mut z = Npz::golden("contract/contract.npz");
    for k in [40, 96, 2560] {
        let x = z.f32(&format!("float.{k}.x")).data;
        for format in [Format::F32, Format::F16, Format::Bf16] {
            let name = format!("{}.{k}.rows", key(format));
            let bytes: Vec<u8> = if format == Format::F32 {
                z.f32(&name).data.iter().flat_map(|w| w.to_le_bytes()).collect()
            } else {
                z.array::<u16>(&name).data.iter().flat_map(|w| w.to_le_bytes()).collect()
            };
            let want = z.f32(&format!("{}.{k}.dot", key(format))).data;
            let w = Matrix::new(format, &bytes, k, 4).unwrap();
            for isa in Isa::available() {
                assert_same(&product(isa, w, Columns::Float(&x), 7), &want, &format!("{isa} {name}"));
            }
        }
    }
}

#[test]
fn multiply_adds_are_fused() {
    let mut z = Npz::golden("contract/contract.npz");
    let (abc, want) = (z.f32("fma.abc"), z.f32("fma.out").data);
    for (i, &want) in want.iter().enumerate() {
        let [a, b, c] = [0, 1, 2].map(|j| abc.row(j)[i]);
        let mut acc = [c];
        lanes::axpy(a, &[b], &mut acc);
        assert!(same(acc[0], want), "fma({a:?}, {b:?}, {c:?}) is {:?}, not {:?}", acc[0], want);
        for isa in Isa::available() {
            let mut acc = [c; 40];
            strata_quant::float::axpy(isa, a, &[b; 40], &mut acc);
            assert!(acc.iter().all(|&got| same(got, want)), "{isa}");
        }
    }
}

/// Oracle: the `half` crate, for all 65,536 halves and a sweep of f32.
#[test]
fn halves_convert_exactly() {
    let all: Vec<u16> = (0..=u16::MAX).collect();
    let sweep: Vec<f32> =
        (0..1 << 20).map(|i: u32| f32::from_bits(i * 4096 + (i.wrapping_mul(2_654_435_761) >> 20))).collect();
    for isa in Isa::available() {
        let mut wide = vec![0.0; all.len()];
        strata_quant::float::widen_f16(isa, &all, &mut wide);
        assert_same(&wide, &all.iter().map(|&h| f16::from_bits(h).to_f32()).collect::<Vec<_>>(), "f16");
        let mut narrow = vec![0; sweep.len()];
        strata_quant::float::narrow_f16(isa, &sweep, &mut narrow);
        for (&x, &h) in sweep.iter().zip(&narrow) {
            let (got, want) = (f16::from_bits(h), f16::from_f32(x));
            assert!(
                got.to_bits() == want.to_bits() || got.is_nan() && want.is_nan(),
                "{x:?}: {got:?}, not {want:?}"
            );
        }
        let mut back = vec![0; wide.len()];
        strata_quant::float::narrow_f16(isa, &wide, &mut back);
        assert!(all.iter().zip(&back).all(|(&a, &b)| a == b || f16::from_bits(a).is_nan()));
    }
}
