//! Format mixes: which format a tensor has in each of the published files.
//!
//! Owns the tables, their sources, and what replaces a format whose blocks don't fit a row. The mixes named `ud-*` are
//! Unsloth's files of Qwen3.8-Flash-Next, `q2_0`, `iq2_xs`, `iq3_xxs` and `iq3_s` are ISTA-DASLab's; their per-layer maps were
//! fitted to what is published of each file (formats seen, bytes of the experts, bytes of the file); a test holds them to it.
//! What is known and what is fitted stands at each table. Every other name is a single format throughout.
//!
//! Invariant: the format of a tensor depends on its role, its layer's place in the trunk and its row length only, and its
//! blocks divide the row.

use std::fmt;
use std::str::FromStr;

use strata_quant::Format;

use crate::error::SynthError;
use crate::tensors::Role;

use Format::{
    Bf16, F16, F32, Iq2S, Iq2Xs, Iq3S, Iq3Xxs, Iq4Nl, Iq4Xs, Q2_0, Q4_0, Q4K, Q5_0, Q5_1, Q5K, Q6K, Q8_0,
};

/// Which formats a model's tensors have.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Mix(Kind);

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Kind {
    UdIq3Xxs,
    UdQ3KXl,
    UdIq4Xs,
    UdQ4KXl,
    Q2_0,
    Iq2Xs,
    Iq3Xxs,
    Iq3S,
    Pure(Format),
}

/// The published mixes by name.
const PUBLISHED: [(&str, Kind); 8] = [
    ("ud-iq3_xxs", Kind::UdIq3Xxs),
    ("ud-q3_k_xl", Kind::UdQ3KXl),
    ("ud-iq4_xs", Kind::UdIq4Xs),
    ("ud-q4_k_xl", Kind::UdQ4KXl),
    ("q2_0", Kind::Q2_0),
    ("iq2_xs", Kind::Iq2Xs),
    ("iq3_xxs", Kind::Iq3Xxs),
    ("iq3_s", Kind::Iq3S),
];

/// What a single format is called where a published mix has its name: `pure-iq3_s`.
const PURE: &str = "pure-";

impl Mix {
    /// A single format for everything that is ever quantised.
    pub fn pure(format: Format) -> Self {
        Self(Kind::Pure(format))
    }

    /// Every mix: the published ones, then the single formats.
    pub fn all() -> impl Iterator<Item = Mix> {
        PUBLISHED.into_iter().map(|(_, kind)| Self(kind)).chain(Format::ALL.into_iter().map(Self::pure))
    }

    /// The format of a tensor with this role and row length; `layer` of `layers` trunk layers, the draft block counting as
    /// the last (0 for tensors outside the layers).
    pub(crate) fn format(self, role: Role, layer: u32, layers: u32, row: u64) -> Format {
        fitting(self.wanted(role, layer, layers), row)
    }

    fn wanted(self, role: Role, layer: u32, layers: u32) -> Format {
        // The real model's layer at the same depth.
        let depth = u64::from(layer.min(layers - 1)) * 48 / u64::from(layers);
        match role {
            // Never quantised: vectors, the router, the convolutions; the indexer stays as it was trained.
            Role::Gamma | Role::TimeBias | Role::Decay | Role::GdnConv | Role::Router | Role::SharedGate => {
                F32
            }
            Role::NgramConv | Role::Indexer => match self.0 {
                Kind::Pure(format) if format.is_float() => format,
                _ if role == Role::Indexer => Bf16,
                _ => F16,
            },
            Role::ExpertGate => self.experts(depth).0,
            Role::ExpertUp => self.experts(depth).1,
            Role::ExpertDown => self.experts(depth).2,
            _ => self.dense(role),
        }
    }

    /// Gate, up and down of the routed experts in layer `depth` of 48.
    fn experts(self, depth: u64) -> (Format, Format, Format) {
        let both = |format, down| (format, format, down);
        // Known of UD-Q4_K_XL; that UD-IQ4_XS and UD-Q3_K_XL have the same five, and a heavier layer 2, follows from their
        // sizes, which then agree to the byte.
        let heavy_down = matches!(depth, 2 | 4 | 30 | 46 | 47);
        match self.0 {
            Kind::Pure(format) => both(format, format),
            // Known: IQ2_S with IQ3_S in one layer, which is taken to be layer 2 as in the other files; down IQ4_NL.
            Kind::UdIq3Xxs => both(if depth == 2 { Iq3S } else { Iq2S }, Iq4Nl),
            Kind::UdQ3KXl => {
                both(if depth == 2 { Iq4Xs } else { Iq3Xxs }, if heavy_down { Q8_0 } else { Iq4Nl })
            }
            Kind::UdIq4Xs => {
                both(if depth == 2 { Iq4Xs } else { Iq3S }, if heavy_down { Q8_0 } else { Iq4Nl })
            }
            Kind::UdQ4KXl => both(if depth == 2 { Q5K } else { Q4K }, if heavy_down { Q8_0 } else { Q5_1 }),
            // Known: 31.6 GiB, exactly 48 times 675 MiB.
            Kind::Q2_0 => both(Q2_0, Q2_0),
            // Known: 35,454,976,000 B, which this meets exactly; the layers are ours (the late ones heavier).
            Kind::Iq2Xs => match depth {
                47 => (Iq2Xs, Iq3S, Q2_0),
                33..=46 => both(Iq2S, Q2_0),
                _ => both(Iq2Xs, Q2_0),
            },
            // Known: 40.0 GiB, the set of formats, late layers heavier. The steps are ours.
            Kind::Iq3Xxs => match depth {
                0..=15 => both(Iq2S, Q2_0),
                16..=31 => both(Iq3Xxs, Q2_0),
                32..=42 => both(Iq3S, Q2_0),
                _ => both(Iq3S, Iq4Nl),
            },
            // Known: 46.8 GiB. The map is ours.
            Kind::Iq3S => match depth {
                0 | 1 => both(Iq3Xxs, Q2_0),
                2..=28 => both(Iq3S, Q2_0),
                _ => both(Iq3S, Iq4Nl),
            },
        }
    }

    /// Everything else.
    fn dense(self, role: Role) -> Format {
        if let Kind::Pure(format) = self.0 {
            return format;
        }
        if matches!(self.0, Kind::UdIq3Xxs | Kind::UdQ3KXl | Kind::UdIq4Xs | Kind::UdQ4KXl) {
            return match (role, self.0) {
                (Role::Table, _) => Iq4Nl,
                (Role::Inject | Role::Alpha | Role::Beta, _) => F32,
                // Known: embedding and head Q6_K, the rest Q6_K and Q8_0. Which is which is fitted.
                (Role::MixDown | Role::MixUp | Role::NgramKey | Role::NgramValue, Kind::UdIq3Xxs) => Q8_0,
                (Role::Key | Role::Value, Kind::UdIq3Xxs) => Q8_0,
                (_, Kind::UdIq3Xxs) => Q6K,
                // Fitted: one of embedding and head is Q6_K.
                (Role::Head, Kind::UdQ3KXl | Kind::UdIq4Xs) => Q6K,
                _ => Q8_0,
            };
        }
        // ISTA's files. Known: a table in IQ4_NL, dense matrices of Q6_K, Q5_K, Q4_K, IQ4_XS, IQ3_S, IQ4_NL and Q2_0, no Q8_0,
        // routers and norms float, the size of the file. The mixers must then be 16-bit floats (IQ3_S would be too small
        // with everything else in Q6_K); the choice by role is ours and meets the size.
        match (role, self.0) {
            (Role::Table | Role::SharedDown, _) => Iq4Nl,
            (Role::Inject | Role::Alpha | Role::Beta, _) => F32,
            (Role::MixDown | Role::MixUp, _) => Bf16,
            (Role::Head | Role::Key | Role::Value | Role::Join, Kind::Q2_0 | Kind::Iq2Xs) => Q4K,
            (
                Role::GdnQkv | Role::AttentionOutput | Role::NgramKey | Role::NgramValue,
                Kind::Q2_0 | Kind::Iq2Xs,
            ) => Iq4Xs,
            (Role::Embedding, Kind::Iq2Xs) => Iq4Xs,
            (_, Kind::Q2_0 | Kind::Iq2Xs) => Iq3S,
            (Role::GdnOutput | Role::AttentionOutput | Role::Key | Role::Value, Kind::Iq3Xxs) => Q5K,
            (_, Kind::Iq3Xxs) => Q4K,
            (Role::GdnOutput | Role::AttentionOutput | Role::Key | Role::Value | Role::Head, _) => Q6K,
            (Role::Embedding | Role::GdnGate, _) => Q4K,
            _ => Q5K,
        }
    }
}

/// `wanted`, or what replaces it in rows that aren't whole blocks of it: as llama-quantize does for the formats it knows; for
/// rows that aren't multiples of 32, F16.
fn fitting(wanted: Format, row: u64) -> Format {
    let fits = |format: Format| row.is_multiple_of(format.block_len() as u64);
    if fits(wanted) {
        return wanted;
    }
    let other = match wanted {
        Format::Q2_0 | Format::Q2K | Format::Q3K => Q4_0,
        Format::Q4K => Q5_0,
        Format::Q5K => Q5_1,
        Format::Q6K => Q8_0,
        Format::Nvfp4 => Format::Mxfp4,
        _ => Iq4Nl,
    };
    if fits(other) { other } else { F16 }
}

impl fmt::Display for Mix {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            Kind::Pure(format) => {
                let name = format.name().to_ascii_lowercase();
                let taken = PUBLISHED.iter().any(|&(published, _)| published == name);
                write!(f, "{}{name}", if taken { PURE } else { "" })
            }
            kind => f.write_str(PUBLISHED.iter().find(|&&(_, k)| k == kind).map_or("", |&(name, _)| name)),
        }
    }
}

impl FromStr for Mix {
    type Err = SynthError;

    /// Case doesn't matter.
    fn from_str(name: &str) -> Result<Self, SynthError> {
        let lower = name.to_ascii_lowercase();
        if let Some(&(_, kind)) = PUBLISHED.iter().find(|&&(published, _)| published == lower) {
            return Ok(Self(kind));
        }
        let single = lower.strip_prefix(PURE).unwrap_or(&lower);
        Format::ALL.into_iter().find(|f| f.name().eq_ignore_ascii_case(single)).map(Self::pure).ok_or_else(
            || {
                let known = PUBLISHED.map(|(published, _)| published).join(", ");
                SynthError::NoSuchMix { name: name.to_owned(), known }
            },
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Oracle: the mix itself, from its name; all names are different.
    #[test]
    fn names_come_back() {
        let mixes: Vec<Mix> = Mix::all().collect();
        for (i, mix) in mixes.iter().enumerate() {
            assert_eq!(mix.to_string().parse::<Mix>().unwrap(), *mix);
            assert_eq!(mix.to_string().to_uppercase().parse::<Mix>().unwrap(), *mix);
            assert!(mixes[..i].iter().all(|other| other.to_string() != mix.to_string()));
        }
        assert_eq!("q2_0".parse::<Mix>().unwrap().to_string(), "q2_0");
        assert_eq!("pure-q2_0".parse::<Mix>().unwrap(), Mix::pure(Q2_0));
        assert_eq!("pure-q4_k".parse::<Mix>().unwrap(), Mix::pure(Q4K));
        for bad in ["q9", "", "pure-", "q8_1"] {
            assert!(bad.parse::<Mix>().unwrap_err().to_string().contains("ud-iq3_xxs, ud-q3_k_xl"));
        }
    }

    /// Oracle: the substitutions of section 5 of the architecture's description, for the real model's odd rows; any row gets
    /// blocks that divide it.
    #[test]
    fn odd_rows_get_formats_that_fit() {
        use Format::*;
        for (wanted, odd) in [
            (Iq1S, Iq4Nl),
            (Iq2Xxs, Iq4Nl),
            (Iq3S, Iq4Nl),
            (Iq4Xs, Iq4Nl),
            (Q2K, Q4_0),
            (Q3K, Q4_0),
            (Q4K, Q5_0),
            (Q5K, Q5_1),
            (Q6K, Q8_0),
            (Q8_0, Q8_0),
            (Bf16, Bf16),
        ] {
            assert_eq!(
                [fitting(wanted, 2560), fitting(wanted, 640), fitting(wanted, 160)],
                [wanted, odd, odd]
            );
        }
        assert_eq!([fitting(Q2_0, 640), fitting(Q2_0, 160), fitting(Nvfp4, 160)], [Q2_0, Q4_0, Mxfp4]);
        for format in Format::ALL {
            for row in [4, 8, 96, 160, 256, 640] {
                assert!(row % fitting(format, row).block_len() as u64 == 0);
            }
        }
    }
}
