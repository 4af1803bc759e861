//! What isn't a matrix is refused with a sentence; a product writes its rows and nothing else.

use std::sync::Barrier;

use strata_quant::{Activations, Columns, Format, Isa, Matrix, MatrixError, Out, matmul};

/// Oracle: the sizes of the formats.
#[test]
fn bytes_that_are_no_matrix_are_refused() {
    let bytes = [0; 68];
    assert!(Matrix::new(Format::Q8_0, &bytes, 32, 2).is_ok());
    assert_eq!(Matrix::new(Format::Q8_0, &bytes, 0, 2).err(), Some(MatrixError::Empty(Format::Q8_0)));
    let partial = Matrix::new(Format::Q4K, &bytes, 160, 1).err().unwrap();
    assert_eq!(partial.to_string(), "rows of 160 values aren't whole Q4_K blocks of 256");
    let short = Matrix::new(Format::Q8_0, &bytes, 32, 3).err().unwrap();
    assert_eq!(short.to_string(), "3 rows of 32 Q8_0 values take 102, not 68 bytes");
    let huge = Matrix::new(Format::F32, &bytes, usize::MAX / 8, usize::MAX).err().unwrap();
    assert!(huge.to_string().contains("too many"), "{huge}");
}

/// Oracle: the buffer elsewhere keeps what it had.
#[test]
fn a_product_writes_its_rows_only() {
    let (k, rows, cols, stride) = (96, 40, 9, 45);
    let bytes: Vec<u8> = (0..Format::Q4_0.row_bytes(k).unwrap() * rows).map(|i| (i % 37) as u8).collect();
    let w = Matrix::new(Format::Q4_0, &bytes, k, rows).unwrap();
    let x: Vec<f32> = (0..k * cols).map(|i| (i % 11) as f32 - 5.0).collect();
    for isa in Isa::available() {
        let mut a = Activations::new(k, cols);
        a.quantise(isa, &x, k, cols);
        for rows in [0..0, 3..4, 7..31, 0..40] {
            let mut out = vec![f32::NEG_INFINITY; stride * cols];
            matmul(isa, w, rows.clone(), Columns::Quantised(&a), Out::new(&mut out, stride));
            for (i, v) in out.iter().enumerate() {
                assert_eq!(v.is_infinite(), !rows.contains(&(i % stride)), "{isa} {rows:?} {i}");
            }
        }
    }
}

/// Oracle: one thread.
#[test]
fn threads_share_an_output() {
    let (k, rows, cols) = (256, 64, 17);
    let bytes: Vec<u8> =
        (0..Format::Iq4Xs.row_bytes(k).unwrap() * rows).map(|i| (i * 31 % 61) as u8).collect();
    let w = Matrix::new(Format::Iq4Xs, &bytes, k, rows).unwrap();
    let isa = Isa::detect();
    let mut a = Activations::new(k, cols);
    a.quantise(isa, &(0..k * cols).map(|i| (i % 13) as f32 - 6.0).collect::<Vec<_>>(), k, cols);
    let mut want = vec![0.0; rows * cols];
    matmul(isa, w, 0..rows, Columns::Quantised(&a), Out::new(&mut want, rows));

    let mut got = vec![0.0f32; rows * cols];
    let (start, len) = (got.as_mut_ptr().expose_provenance(), got.len());
    let barrier = Barrier::new(4);
    std::thread::scope(|scope| {
        for part in 0..4 {
            let (a, barrier) = (&a, &barrier);
            scope.spawn(move || {
                barrier.wait();
                // SAFETY: the buffer outlives the scope, and each thread has rows of its own.
                let out = unsafe { Out::shared(std::ptr::with_exposed_provenance_mut(start), len, rows) };
                matmul(isa, w, part * 16..(part + 1) * 16, Columns::Quantised(a), out);
            });
        }
    });
    assert_eq!(got, want);
}

/// Oracle: the documented panics.
#[test]
fn mistakes_of_the_caller_panic() {
    let bytes = [0; 68];
    let w = Matrix::new(Format::Q8_0, &bytes, 32, 2).unwrap();
    let mut a = Activations::new(32, 2);
    a.quantise(Isa::Scalar, &[0.0; 64], 32, 2);
    let mut longer = Activations::new(64, 2);
    longer.quantise(Isa::Scalar, &[0.0; 128], 64, 2);
    let panics = |f: &mut dyn FnMut()| std::panic::catch_unwind(std::panic::AssertUnwindSafe(f)).is_err();
    let mut out = [0.0; 4];
    let mut run = |rows: std::ops::Range<usize>, x: Columns<'_>, len: usize, stride| {
        panics(&mut || matmul(Isa::detect(), w, rows.clone(), x, Out::new(&mut out[..len], stride)))
    };
    assert!(!run(0..2, Columns::Quantised(&a), 4, 2));
    assert!(run(0..3, Columns::Quantised(&a), 4, 2), "rows beyond the matrix");
    assert!(run(0..2, Columns::Quantised(&a), 3, 2), "too short an output");
    assert!(run(0..2, Columns::Quantised(&a), 4, 1), "columns that overlap");
    assert!(run(0..2, Columns::Quantised(&longer), 4, 2), "columns of another length");
    assert!(run(0..2, Columns::Float(&[0.0; 64]), 4, 2), "float columns for a block format");
    assert!(
        panics(&mut || a.quantise(Isa::Scalar, &[0.0; 96], 32, 3)),
        "more columns than there is room for"
    );
    assert!(panics(&mut || longer.gather(&a, &[0, 2])), "a column that isn't there");
}
