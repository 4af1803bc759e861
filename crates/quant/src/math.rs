//! The functions of the arithmetic contract, each defined by its operation order on f32.
//!
//! Owns their bits: a fused multiply-add is written as one, nothing else is ever fused, and no library
//! function is called, so every processor and every other backend that repeats these lines gives the same
//! result. All are within 2 ulp over the whole range (tests measure it against f64) and take the limits at
//! infinities. Always inlined, so that loops over them inside [`dispatch!`](crate::dispatch) vectorise;
//! [`float`](crate::float) has such loops ready-made.
//!
//! Ranges: `exp` reduces to `2^k * e^r`, `|r| <= ln 2 / 2`; `log1p` to `k ln 2 + log(1 + f)`, `1 + f` in
//! `[sqrt(1/2), sqrt(2))`. The polynomials are minimax fits of relative error, rounded to f32 term by term.

/// log2(e).
const LOG2_E: f32 = f32::from_bits(0x3fb8_aa3b);
/// ln 2, rounded.
const LN_2: f32 = f32::from_bits(0x3f31_7218);
/// ln 2 less the rounded one.
const LN_2_REST: f32 = f32::from_bits(0xb102_e308);
/// Adding and subtracting it rounds a float of magnitude below 2^22 to an integer, ties to even.
const ROUND: f32 = f32::from_bits(0x4b40_0000);
/// The bits of sqrt(1/2).
const SQRT_HALF_BITS: i32 = 0x3f35_04f3;

/// `(e^r - 1 - r) / r^2`, ascending powers; relative error of e^r 3.1e-9.
const EXP: [f32; 5] = [
    f32::from_bits(0x3eff_fffe),
    f32::from_bits(0x3e2a_aa49),
    f32::from_bits(0x3d2a_ac56),
    f32::from_bits(0x3c09_1cbe),
    f32::from_bits(0x3ab5_289a),
];

/// `(log(1 + f) - f + f^2 / 2) / f^3`, ascending powers; relative error of the logarithm 5.9e-9.
const LOG: [f32; 8] = [
    f32::from_bits(0x3eaa_aaaa),
    f32::from_bits(0xbe80_0115),
    f32::from_bits(0x3e4c_d014),
    f32::from_bits(0xbe2a_38b2),
    f32::from_bits(0x3e11_6b88),
    f32::from_bits(0xbe06_c5fd),
    f32::from_bits(0x3e02_b9d9),
    f32::from_bits(0xbd9c_64fd),
];

/// 2^n; n in -126..=127.
#[inline(always)]
fn power_of_two(n: i32) -> f32 {
    f32::from_bits((n.wrapping_add(127) << 23) as u32)
}

/// `e^x` in pieces.
struct Exp {
    /// 0.7..1.5, or NaN.
    p: f32,
    /// What rounding `p` lost.
    lost: f32,
    /// Powers of two: `e^x = (p + lost) * a * b`.
    a: f32,
    b: f32,
}

/// Reduces and evaluates the polynomial of `e^x`.
#[inline(always)]
fn exp_parts(x: f32) -> Exp {
    // Beyond these the result is 0 or infinite anyway. `clamp` keeps NaN.
    let x = x.clamp(-110.0, 100.0);
    let shifted = x.mul_add(LOG2_E, ROUND);
    let k = shifted - ROUND;
    let n = (shifted.to_bits() as i32).wrapping_sub(ROUND.to_bits() as i32);
    let r = k.mul_add(-LN_2, x);
    let r = k.mul_add(-LN_2_REST, r);
    let p = EXP[4];
    let p = p.mul_add(r, EXP[3]);
    let p = p.mul_add(r, EXP[2]);
    let p = p.mul_add(r, EXP[1]);
    let p = p.mul_add(r, EXP[0]);
    let slope = p.mul_add(r, 1.0);
    let p = slope.mul_add(r, 1.0);
    let lost = slope.mul_add(r, 1.0 - p);
    // Two factors, because 2^n alone may be out of range where the result, rounded once, is not.
    let a = n >> 1;
    Exp { p, lost, a: power_of_two(a), b: power_of_two(n.wrapping_sub(a)) }
}

/// `e^x`.
#[inline(always)]
pub fn exp(x: f32) -> f32 {
    let Exp { p, a, b, .. } = exp_parts(x);
    p * a * b
}

/// `(n + n_lost) / (1 + e + e_lost)` for e in 0..=1, where the lost parts are what rounding took from n and
/// e. The quotient of the rounded operands is corrected once by what they lost.
#[inline(always)]
fn over_one_plus(n: f32, n_lost: f32, e: f32, e_lost: f32) -> f32 {
    let denominator = 1.0 + e;
    let quotient = n / denominator;
    let lost = (e - (denominator - 1.0)) + e_lost;
    // 1 - e / 2 stands for 1 / (1 + e): a correction of about an ulp needs no more.
    let corrected = (-quotient).mul_add(lost, n_lost).mul_add(e.mul_add(-0.5, 1.0), quotient);
    if quotient == f32::INFINITY { quotient } else { corrected }
}

/// `1 / (1 + e^-x)`, computed as `e / (1 + e)` with `e = e^x` for negative x, so that small results keep
/// their digits.
#[inline(always)]
pub fn sigmoid(x: f32) -> f32 {
    let Exp { p, lost, a, b } = exp_parts(-x.abs());
    let (e, e_lost) = (p * a * b, lost * a * b);
    let (n, n_lost) = if x >= 0.0 { (1.0, 0.0) } else { (e, e_lost) };
    over_one_plus(n, n_lost, e, e_lost)
}

/// `x * sigmoid(x)`, as one quotient; 0 at -infinity.
#[inline(always)]
pub fn silu(x: f32) -> f32 {
    let Exp { p, lost, a, b } = exp_parts(-x.abs());
    // Below -110 the product is 0; the bound only keeps -infinity from meeting that zero.
    let bounded = if x < -200.0 { -200.0 } else { x };
    let product = bounded * p;
    let product_lost = bounded.mul_add(lost, bounded.mul_add(p, -product));
    let (n, n_lost) = if x >= 0.0 { (x, 0.0) } else { (product * a * b, product_lost * a * b) };
    over_one_plus(n, n_lost, p * a * b, lost * a * b)
}

/// `log(1 + x)` for x in -1 (excluded) ..= 2^64; x itself where that is the nearest.
#[inline(always)]
fn log1p_core(x: f32, one: f32) -> (f32, f32) {
    let u = one + x;
    let k = (u.to_bits() as i32).wrapping_sub(SQRT_HALF_BITS) >> 23;
    let scale = f32::from_bits(0x3f80_0000i32.wrapping_sub(k << 23) as u32);
    // (one + x) * scale - 1 with one rounding: scale - 1 is exact where it matters.
    let f = x.mul_add(scale, one.mul_add(scale, -1.0));
    (f, k as f32)
}

/// `k ln 2 + log(1 + f)`.
#[inline(always)]
fn log_sum(f: f32, k: f32) -> f32 {
    let q = LOG[7];
    let q = q.mul_add(f, LOG[6]);
    let q = q.mul_add(f, LOG[5]);
    let q = q.mul_add(f, LOG[4]);
    let q = q.mul_add(f, LOG[3]);
    let q = q.mul_add(f, LOG[2]);
    let q = q.mul_add(f, LOG[1]);
    let q = q.mul_add(f, LOG[0]);
    let tail = (f * f).mul_add(f.mul_add(q, -0.5), k * LN_2_REST);
    k.mul_add(LN_2, tail + f)
}

/// `log(1 + x)`; -infinity at -1, NaN below.
#[inline(always)]
pub fn log1p(x: f32) -> f32 {
    // From 2^64 on, the 1 is lost, and 2^-k would leave the range.
    let large = x >= f32::from_bits((127 + 64) << 23);
    let (small, one) = if large { (x * f32::from_bits((127 - 64) << 23), 0.0) } else { (x, 1.0) };
    let (f, k) = log1p_core(small, one);
    let y = log_sum(f, if large { k + 64.0 } else { k });
    let y = if x.abs() < f32::from_bits((127 - 25) << 23) || x == f32::INFINITY { x } else { y };
    let y = if x == -1.0 { f32::NEG_INFINITY } else { y };
    if x < -1.0 { f32::NAN } else { y }
}

/// `log(1 + e^x)`, as `max(x, 0) + log1p(e^-|x|)`.
#[inline(always)]
pub fn softplus(x: f32) -> f32 {
    let (f, k) = log1p_core(exp(-x.abs()), 1.0);
    let positive = if x > 0.0 { x } else { 0.0 };
    positive + log_sum(f, k)
}

/// `1 / sqrt(x)`: an IEEE square root, then an IEEE division.
#[inline(always)]
pub fn rsqrt(x: f32) -> f32 {
    1.0 / x.sqrt()
}

/// The SwiGLU of one element: `silu(gate) * up`.
#[inline(always)]
pub fn swiglu(gate: f32, up: f32) -> f32 {
    silu(gate) * up
}

/// The f32 of an f16's bits; exact.
#[inline(always)]
pub fn f16_to_f32(h: u16) -> f32 {
    let magnitude = (u32::from(h) & 0x7fff) << 13;
    // The exponent bias differs by 112; the product is exact, also for subnormal halves.
    let scaled = f32::from_bits(magnitude) * f32::from_bits((127 + 112) << 23);
    let special = if magnitude >= 0x7c00 << 13 { 0x7f80_0000 } else { 0 };
    f32::from_bits(scaled.to_bits() | special | (u32::from(h) & 0x8000) << 16)
}

/// The bits of the f16 nearest to `x`, ties to even; infinite from 65520 on, NaN for NaN.
#[inline(always)]
pub const fn f32_to_f16(x: f32) -> u16 {
    let sign = (x.to_bits() >> 16) & 0x8000;
    let bits = x.to_bits() & 0x7fff_ffff;
    // Normal halves: round the 13 bits that go, carry into the exponent, move the bias.
    let normal = (bits.wrapping_add(0xfff + (bits >> 13 & 1)) >> 13).wrapping_sub(112 << 10);
    // Subnormal ones: 0.5 has their unit in the last place.
    let subnormal = (f32::from_bits(bits) + 0.5).to_bits().wrapping_sub(0.5f32.to_bits());
    let finite = if bits < (127 - 14) << 23 { subnormal } else { normal };
    let limited = if bits >= 0x477f_f000 { 0x7c00 } else { finite };
    (sign | if bits > 0x7f80_0000 { 0x7e00 } else { limited }) as u16
}

/// The f32 of a bfloat16's bits; exact.
#[inline(always)]
pub fn bf16_to_f32(b: u16) -> f32 {
    f32::from_bits(u32::from(b) << 16)
}
