//! The functions of the contract against f64, and their vectorised loops against themselves.

use strata_quant::{Isa, float, lanes, math};

/// Distance of `got` from the real number `want`, in units in the last place of f32 there.
fn ulps(got: f32, want: f64) -> f64 {
    if want.is_nan() || got.is_nan() {
        return if want.is_nan() && got.is_nan() { 0.0 } else { f64::INFINITY };
    }
    let nearest = want as f32;
    if nearest.is_infinite() || got.is_infinite() {
        return if nearest == got { 0.0 } else { f64::INFINITY };
    }
    let exponent = (want.abs().log2().floor() as i32).max(-126);
    (f64::from(got) - want).abs() / f64::powi(2.0, exponent - 23)
}

/// Every 1,999th f32, all special values, and the neighbourhoods of the functions' corners.
fn inputs() -> Vec<f32> {
    let sweep = (0..u32::MAX / 1999).map(|i| f32::from_bits(i * 1999));
    let corners = [
        0.0f32,
        1.0,
        -1.0,
        88.0,
        88.73,
        89.0,
        -87.3,
        -88.0,
        -103.0,
        -104.0,
        -110.0,
        100.0,
        -200.0,
        0.35,
        20.0,
        17.0,
        1e-8,
        3e-8,
        6e-8,
        1.8e19,
        1.9e19,
        3.4e38,
        1.2e-38,
        0.414,
        -0.293,
        -0.999_999_94,
    ];
    let near = corners.into_iter().flat_map(|c| {
        (-300..300i32).map(move |i| f32::from_bits((c.to_bits() as i32).wrapping_add(i) as u32))
    });
    let special = [f32::INFINITY, f32::NEG_INFINITY, f32::NAN, -0.0, f32::MAX, f32::MIN, f32::from_bits(1)];
    sweep.chain(near).chain(special).collect()
}

fn worst(name: &str, f: fn(f32) -> f32, exact: fn(f64) -> f64) {
    let (mut most, mut at) = (0.0, 0.0);
    for x in inputs() {
        let error = ulps(f(x), exact(f64::from(x)));
        if error > most {
            (most, at) = (error, x);
        }
    }
    println!("{name}: {most:.3} ulp at {at:?}");
    assert!(most <= 2.0, "{name}({at:?}) = {:?} is off by {most} ulp", f(at));
}

/// Oracle: f64.
#[test]
fn functions_are_within_two_ulp() {
    worst("exp", math::exp, f64::exp);
    worst("sigmoid", math::sigmoid, |x| 1.0 / (1.0 + (-x).exp()));
    worst("silu", math::silu, |x| if x == f64::NEG_INFINITY { -0.0 } else { x / (1.0 + (-x).exp()) });
    worst("log1p", math::log1p, f64::ln_1p);
    worst("softplus", math::softplus, |x| x.max(0.0) + (-x.abs()).exp().ln_1p());
    worst("rsqrt", math::rsqrt, |x| 1.0 / x.sqrt());
}

/// Oracle: the limits.
#[test]
fn limits() {
    let (inf, nan) = (f32::INFINITY, f32::NAN);
    assert_eq!([math::exp(-inf), math::exp(inf), math::exp(0.0), math::exp(-0.0)], [0.0, inf, 1.0, 1.0]);
    assert_eq!([math::sigmoid(-inf), math::sigmoid(inf), math::sigmoid(0.0)], [0.0, 1.0, 0.5]);
    assert_eq!([math::silu(-inf), math::silu(inf), math::silu(0.0)], [0.0, inf, 0.0]);
    assert_eq!([math::log1p(-1.0), math::log1p(inf), math::log1p(0.0)], [-inf, inf, 0.0]);
    assert!(math::log1p(-0.0).is_sign_negative() && math::log1p(-1.1).is_nan() && math::log1p(-inf).is_nan());
    assert_eq!([math::softplus(-inf), math::softplus(inf)], [0.0, inf]);
    assert_eq!([math::rsqrt(0.0), math::rsqrt(inf), math::rsqrt(4.0)], [inf, 0.0, 0.5]);
    for f in [math::exp, math::sigmoid, math::silu, math::log1p, math::softplus, math::rsqrt] {
        assert!(f(nan).is_nan() && f(-nan).is_nan());
    }
}

/// Oracle: the scalar definitions. NaN compares by class.
#[test]
fn slices_have_the_scalar_bits() {
    type Slice = fn(Isa, &mut [f32]);
    type Scalar = fn(f32) -> f32;
    let functions: [(Slice, Scalar); 6] = [
        (float::exp, math::exp),
        (float::sigmoid, math::sigmoid),
        (float::silu, math::silu),
        (float::log1p, math::log1p),
        (float::softplus, math::softplus),
        (float::rsqrt, math::rsqrt),
    ];
    let x: Vec<f32> = inputs().into_iter().step_by(7).collect();
    for isa in Isa::available() {
        for (slice, scalar) in functions {
            let mut got = x.clone();
            slice(isa, &mut got);
            for (&x, &got) in x.iter().zip(&got) {
                let want = scalar(x);
                assert!(
                    got.to_bits() == want.to_bits() || got.is_nan() && want.is_nan(),
                    "{isa} {x:?}: {got:?}, not {want:?}"
                );
            }
        }
        let mut out = vec![0.0; x.len() - 1];
        float::swiglu(isa, &x[1..], &x[..x.len() - 1], &mut out);
        for (i, got) in out.iter().enumerate() {
            let want = math::swiglu(x[i + 1], x[i]);
            assert!(got.to_bits() == want.to_bits() || got.is_nan() && want.is_nan());
        }
    }
}

/// Oracle: the order written out element by element.
#[test]
fn reductions_keep_their_order() {
    let x: Vec<f32> = (0..1000u32).map(|i| ((i * 7919 % 1009) as f32 - 500.0) * 1.37).collect();
    let w: Vec<f32> = x.iter().rev().map(|x| x * 0.77).collect();
    for len in [0, 1, 31, 32, 33, 63, 64, 500, 1000] {
        let (x, w) = (&x[..len], &w[..len]);
        let (mut sum, mut dot, mut square) = ([0.0f32; 32], [0.0f32; 32], [0.0f32; 32]);
        for j in 0..len {
            sum[j % 32] += x[j];
            dot[j % 32] = w[j].mul_add(x[j], dot[j % 32]);
            square[j % 32] = x[j].mul_add(x[j], square[j % 32]);
        }
        let fold = |mut l: [f32; 32]| {
            for width in [16, 8, 4, 2, 1] {
                for i in 0..width {
                    l[i] += l[i + width];
                }
            }
            l[0]
        };
        let largest = x.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        assert_eq!(lanes::sum(x), fold(sum));
        for isa in Isa::available() {
            assert_eq!(float::sum(isa, x), fold(sum), "{isa} {len}");
            assert_eq!(float::dot(isa, w, x), fold(dot), "{isa} {len}");
            assert_eq!(float::sum_of_squares(isa, x), fold(square), "{isa} {len}");
            assert_eq!(float::max(isa, x), largest, "{isa} {len}");
        }
    }
    assert_eq!(lanes::max(&[f32::NAN, 1.0, f32::NAN]), 1.0);
}
