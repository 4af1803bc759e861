//! The words that flags, variables and the file have in common.

use std::num::{IntErrorKind, ParseIntError};
use std::str::FromStr;

use serde::Deserialize;
use serde::de::{IntoDeserializer, value};
use strata_backend::KvFormat;
use strata_cuda::ExpertCache;
use strata_engine::ExpertHome;
use strata_plan::Bytes;

/// What a count must be.
pub const WHOLE: &str = "a whole number, not negative";

/// On or off.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Switch {
    On,
    Off,
}

impl Switch {
    pub fn name(self) -> &'static str {
        match self {
            Switch::On => "on",
            Switch::Off => "off",
        }
    }

    pub fn is_on(self) -> bool {
        self == Switch::On
    }
}

impl FromStr for Switch {
    type Err = String;

    fn from_str(word: &str) -> Result<Self, String> {
        match word {
            "on" | "true" | "1" => Ok(Switch::On),
            "off" | "false" | "0" => Ok(Switch::Off),
            other => Err(format!("`{other}` is neither on nor off")),
        }
    }
}

/// What is worth logging.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Level {
    Off,
    Error,
    Warn,
    Info,
    Debug,
    Trace,
}

impl Level {
    pub const ALL: [Level; 6] =
        [Level::Off, Level::Error, Level::Warn, Level::Info, Level::Debug, Level::Trace];

    pub fn name(self) -> &'static str {
        match self {
            Level::Off => "off",
            Level::Error => "error",
            Level::Warn => "warn",
            Level::Info => "info",
            Level::Debug => "debug",
            Level::Trace => "trace",
        }
    }
}

impl FromStr for Level {
    type Err = String;

    fn from_str(word: &str) -> Result<Self, String> {
        word_of(word)
    }
}

/// A bias on one token's logit, written `ID=X`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Bias {
    pub token: u32,
    pub bias: f32,
}

impl FromStr for Bias {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let parsed = text.split_once('=').and_then(|(token, bias)| {
            Some(Bias { token: token.trim().parse().ok()?, bias: bias.trim().parse().ok()? })
        });
        parsed.ok_or_else(|| format!("`{text}` is no token id and number like 17=-1.5"))
    }
}

/// A word by the names that the type has in the configuration file.
fn word_of<'a, T: Deserialize<'a>>(word: &'a str) -> Result<T, String> {
    T::deserialize(word.into_deserializer()).map_err(|error: value::Error| error.to_string().replace('`', ""))
}

/// Where a model is computed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Device {
    /// A GPU if there is one that the model fits, else the CPU.
    #[default]
    Auto,
    Cpu,
    /// The GPU of this number.
    Cuda(usize),
}

impl FromStr for Device {
    type Err = String;

    fn from_str(word: &str) -> Result<Self, String> {
        match word {
            "auto" => Ok(Device::Auto),
            "cpu" => Ok(Device::Cpu),
            "cuda" => Ok(Device::Cuda(0)),
            _ => {
                let number = word.strip_prefix("cuda:").and_then(|number| number.parse().ok());
                number.map(Device::Cuda).ok_or_else(|| format!("`{word}` is none of auto, cpu and cuda:N"))
            }
        }
    }
}

/// Reads `--kv`.
pub fn kv_format(word: &str) -> Result<KvFormat, String> {
    word_of(word)
}

/// Reads `--experts`.
pub fn expert_home(word: &str) -> Result<ExpertHome, String> {
    word_of(word)
}

/// Reads a size.
pub fn size_or_none(text: &str) -> Result<u64, String> {
    text.parse().map(|Bytes(bytes)| bytes).map_err(|why| why.to_string())
}

/// Reads a size that is not nothing.
pub fn size(text: &str) -> Result<u64, String> {
    match size_or_none(text)? {
        0 => Err("it must be at least 1 byte".into()),
        bytes => Ok(bytes),
    }
}

/// What `--expert-cache` may be.
pub const CACHE: &str = "auto, a number of experts, or a size with its unit";

/// Reads `--expert-cache`.
pub fn expert_cache(text: &str) -> Result<ExpertCache, String> {
    let text = text.trim();
    match (text, text.parse(), text.parse()) {
        ("auto", ..) => Ok(ExpertCache::Auto),
        (_, Ok(experts), _) => Ok(ExpertCache::Experts(experts)),
        (.., Ok(Bytes(bytes))) => Ok(ExpertCache::Bytes(bytes)),
        _ => Err(format!("it must be {CACHE}")),
    }
}

/// Reads a count from a flag, or says what it must be.
pub fn whole<T: FromStr<Err = ParseIntError>>(text: &str) -> Result<T, String> {
    text.trim().parse().map_err(|error: ParseIntError| match error.kind() {
        IntErrorKind::PosOverflow => "it is more than can be counted".into(),
        _ => format!("it must be {WHOLE}"),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Oracle: the forms that the help shows.
    #[test]
    fn reads_the_words_of_flags() {
        assert_eq!("17=-inf".parse(), Ok(Bias { token: 17, bias: f32::NEG_INFINITY }));
        assert!("x=1".parse::<Bias>().is_err() && "1".parse::<Bias>().is_err());
        assert_eq!(kv_format("f32"), Ok(KvFormat::F32));
        assert_eq!(expert_home("heap"), Ok(ExpertHome::Heap));
        assert_eq!("debug".parse(), Ok(Level::Debug));
        assert_eq!(size("20G"), Ok(20 << 30));
        assert!(size("4X").is_err() && size("0").is_err() && size("0G").is_err());
        assert_eq!(whole::<usize>("12"), Ok(12));
        assert!(whole::<u64>("-3").unwrap_err().contains("not negative"));
    }
}
