//! Which instruction set the kernels may use, and how one source becomes one instance per instruction set.
//!
//! Owns detection, the names a user may write, and [`dispatch!`](crate::dispatch). Knows no kernel.
//!
//! Invariant: a value of [`Isa`] other than [`Isa::Scalar`] proves that this processor has the features of
//! that path. Such values come only from [`Isa::detect`], [`Isa::available`] and parsing, all of which ask
//! the processor; nothing else can make one. Calling a `#[target_feature]` function after matching on it is
//! therefore sound.

use std::fmt;
use std::str::FromStr;

/// That the processor was asked. Can't be made outside this module.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Proof(());

/// A path through the kernels. All paths give the same bits (arithmetic contract); they differ in speed.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub enum Isa {
    /// Plain Rust, any processor.
    Scalar,
    /// AVX2, FMA, F16C, BMI2.
    Avx2(Proof),
    /// AVX2 and its companions, with AVX-VNNI (256-bit integer dot products).
    AvxVnni(Proof),
    /// AVX-512 F, BW, VL, DQ and VNNI.
    Avx512(Proof),
}

impl Isa {
    /// The fastest path that this processor has.
    pub fn detect() -> Isa {
        Isa::available().pop().unwrap_or(Isa::Scalar)
    }

    /// Every path that this processor has, slowest first; the first is always [`Isa::Scalar`].
    pub fn available() -> Vec<Isa> {
        #[allow(unused_mut)]
        let mut paths = vec![Isa::Scalar];
        #[cfg(x86_paths)]
        {
            let avx2 = is_x86_feature_detected!("avx2")
                && is_x86_feature_detected!("fma")
                && is_x86_feature_detected!("f16c")
                && is_x86_feature_detected!("bmi2");
            if avx2 {
                paths.push(Isa::Avx2(Proof(())));
            }
            if avx2 && is_x86_feature_detected!("avxvnni") {
                paths.push(Isa::AvxVnni(Proof(())));
            }
            if avx2
                && is_x86_feature_detected!("avx512f")
                && is_x86_feature_detected!("avx512bw")
                && is_x86_feature_detected!("avx512vl")
                && is_x86_feature_detected!("avx512dq")
                && is_x86_feature_detected!("avx512vnni")
            {
                paths.push(Isa::Avx512(Proof(())));
            }
        }
        paths
    }

    /// The name that [`Isa::from_str`] reads: `scalar`, `avx2`, `avxvnni` or `avx512`.
    pub fn name(self) -> &'static str {
        match self {
            Isa::Scalar => "scalar",
            Isa::Avx2(_) => "avx2",
            Isa::AvxVnni(_) => "avxvnni",
            Isa::Avx512(_) => "avx512",
        }
    }
}

impl fmt::Display for Isa {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl fmt::Debug for Isa {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// Why a name is not a path on this machine.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum IsaError {
    /// The name is none of the four.
    #[error("`{0}` is not an instruction set path; use scalar, avx2, avxvnni or avx512")]
    Unknown(String),
    /// The name is known, but the processor (or this build) lacks it.
    #[error("the path `{name}` is not available on this machine, which has: {available}")]
    Unavailable {
        /// The path asked for.
        name: &'static str,
        /// The paths there are, separated by commas.
        available: String,
    },
}

impl FromStr for Isa {
    type Err = IsaError;

    /// The path called `name` (any case), if this machine has it.
    fn from_str(name: &str) -> Result<Isa, IsaError> {
        let lower = name.to_ascii_lowercase();
        let Some(known) = ["scalar", "avx2", "avxvnni", "avx512"].into_iter().find(|&n| n == lower) else {
            return Err(IsaError::Unknown(name.to_owned()));
        };
        let available = Isa::available();
        available.iter().copied().find(|isa| isa.name() == known).ok_or_else(|| IsaError::Unavailable {
            name: known,
            available: available.iter().map(|isa| isa.name()).collect::<Vec<_>>().join(", "),
        })
    }
}

/// Compiles a function once per instruction set and picks the instance by an [`Isa`].
///
/// Write the function as usual, with a first parameter `isa` that has no type and is not visible in the body.
/// The body is inlined into one instance per path, each compiled with that path's features, so loops over
/// slices vectorise as widely as the path allows. Since Rust neither reorders nor contracts floating-point
/// operations, all instances give the same bits (a fused multiply-add is `f32::mul_add`, which is fused on
/// every path).
///
/// What the body calls is compiled with the same features only if it is inlined: mark such functions
/// `#[inline(always)]`, as the functions of [`math`](crate::math) and [`lanes`](crate::lanes) are. Don't use
/// closures that must vectorise; they are not always inlined.
///
/// ```
/// use strata_quant::{Isa, dispatch, lanes, math};
///
/// dispatch! {
///     /// Root mean square norm of `x` into `out`, with weights `w`; all of one length.
///     pub fn rms_norm(isa, x: &[f32], w: &[f32], eps: f32, out: &mut [f32]) {
///         let scale = math::rsqrt(lanes::sum_of_squares(x) / x.len() as f32 + eps);
///         for ((out, &x), &w) in out.iter_mut().zip(x).zip(w) {
///             *out = x * scale * w;
///         }
///     }
/// }
/// dispatch! {
///     fn largest(isa, x: &[f32]) -> f32 {
///         lanes::max(x)
///     }
/// }
///
/// let (x, w) = ([3.0, 4.0], [1.0, 2.0]);
/// for isa in Isa::available() {
///     let mut out = [0.0; 2];
///     rms_norm(isa, &x, &w, 0.0, &mut out);
///     assert_eq!(out, [0.84852815, 2.2627418]);
///     assert_eq!(largest(isa, &out), 2.2627418);
/// }
/// ```
#[macro_export]
macro_rules! dispatch {
    ($(#[$meta:meta])* $vis:vis fn $name:ident(isa $(, $arg:ident: $ty:ty)* $(,)?) $(-> $ret:ty)? $body:block) => {
        $(#[$meta])*
        #[allow(clippy::too_many_arguments, unsafe_code)]
        $vis fn $name(isa: $crate::Isa $(, $arg: $ty)*) $(-> $ret)? {
            #[inline(always)]
            #[allow(clippy::too_many_arguments)]
            fn body($($arg: $ty),*) $(-> $ret)? $body
            $crate::__instances!(isa; body; ($($arg: $ty),*) $(-> $ret)?)
        }
    };
}

/// The instances of [`dispatch!`] and the choice between them.
#[cfg(x86_paths)]
#[doc(hidden)]
#[macro_export]
macro_rules! __instances {
    ($isa:ident; $body:ident; ($($arg:ident: $ty:ty),*) $(-> $ret:ty)?) => {{
        #[target_feature(enable = "avx2,fma,f16c,bmi2")]
        #[allow(clippy::too_many_arguments)]
        fn avx2($($arg: $ty),*) $(-> $ret)? {
            $body($($arg),*)
        }
        #[target_feature(enable = "avx2,fma,f16c,bmi2,avx512f,avx512bw,avx512vl,avx512dq")]
        #[allow(clippy::too_many_arguments)]
        fn avx512($($arg: $ty),*) $(-> $ret)? {
            $body($($arg),*)
        }
        match $isa {
            $crate::Isa::Scalar => $body($($arg),*),
            // SAFETY: the value proves that the processor has the features (invariant of `Isa`).
            $crate::Isa::Avx2(_) | $crate::Isa::AvxVnni(_) => unsafe { avx2($($arg),*) },
            // SAFETY: as above.
            $crate::Isa::Avx512(_) => unsafe { avx512($($arg),*) },
        }
    }};
}

/// In this build there is only the plain instance.
#[cfg(not(x86_paths))]
#[doc(hidden)]
#[macro_export]
macro_rules! __instances {
    ($isa:ident; $body:ident; ($($arg:ident: $ty:ty),*) $(-> $ret:ty)?) => {{
        let _ = $isa;
        $body($($arg),*)
    }};
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Oracle: the documented names.
    #[test]
    fn names_parse_back() {
        for isa in Isa::available() {
            assert_eq!(isa.name().parse::<Isa>(), Ok(isa));
            assert_eq!(isa.name().to_uppercase().parse::<Isa>(), Ok(isa));
        }
        assert_eq!("sse9".parse::<Isa>(), Err(IsaError::Unknown("sse9".into())));
        assert!(Isa::available().contains(&Isa::detect()));
        for name in ["avx2", "avxvnni", "avx512"] {
            match name.parse::<Isa>() {
                Ok(isa) => assert!(Isa::available().contains(&isa)),
                Err(e) => assert!(e.to_string().contains("scalar"), "{e}"),
            }
        }
    }
}
