//! One layer of the configuration, and how it is read from variables and from the file.

use std::collections::BTreeMap;
use std::ops::Range;
use std::path::Path;
use std::str::FromStr;

use serde::de::DeserializeOwned;
use strata_backend::KvFormat;
use strata_cuda::ExpertCache;
use strata_engine::ExpertHome;
use toml::{Spanned, Value};

use super::environment::Environment;
use super::words::{
    Bias, CACHE, Device, Level, Switch, WHOLE, expert_cache, expert_home, kv_format, size, size_or_none,
};
use crate::failure::Failure;

const NUMBER: &str = "a number";
const TEXT: &str = "a text in quotes";
const SIZE: &str = "a size, such as 500M or 20G";
const SWITCH: &str = "on or off";
const BIASES: &str = "token ids and numbers, such as \"17=-inf,23=1.5\" or [[17, -inf], [23, 1.5]]";

fn parsed<T: FromStr>(text: &str) -> Option<T> {
    text.trim().parse().ok()
}

fn biases(text: &str) -> Option<Vec<(u32, f32)>> {
    let bias = |bias: &str| bias.parse().ok().map(|Bias { token, bias }| (token, bias));
    text.split(',').map(bias).collect()
}

fn plain<T: DeserializeOwned>(value: &Value) -> Option<T> {
    value.clone().try_into().ok()
}

fn switch(value: &Value) -> Option<Switch> {
    match value {
        Value::Boolean(on) => Some(if *on { Switch::On } else { Switch::Off }),
        Value::String(word) => word.parse().ok(),
        _ => None,
    }
}

fn cache(value: &Value) -> Option<ExpertCache> {
    let number = || value.as_integer().map(|number| number.to_string());
    expert_cache(&value.as_str().map(str::to_owned).or_else(number)?).ok()
}

fn listed_biases(value: &Value) -> Option<Vec<(u32, f32)>> {
    value.as_str().map_or_else(|| plain(value), biases)
}

/// One list of all settings makes the layer, its keys, how a variable and a value of the file are read, and how layers are put on
/// each other.
macro_rules! settings {
    ($($(#[$doc:meta])* $key:ident: $type:ty, $variable:literal, $range:expr, $read:expr, $take:expr;)+) => {
        /// One layer of the configuration: what it leaves open is `None`.
        #[derive(Debug, Clone, Default, PartialEq)]
        pub struct Settings {
            $($(#[$doc])* pub $key: Option<$type>,)+
        }

        impl Settings {
            /// The variables that settings are read from.
            pub(super) const VARIABLES: &'static [&'static str] = &[$($variable),+];
            /// The keys that the file may have, in the order of [`Settings::VARIABLES`].
            pub const KEYS: &'static [&'static str] = &[$(stringify!($key)),+];

            /// This layer over another one. Whoever gives a temperature doesn't want what a layer below says of greed.
            #[must_use]
            pub fn over(self, mut below: Settings) -> Settings {
                if self.temperature.is_some() {
                    below.greedy = None;
                }
                // One says where experts live in place of the other.
                if self.experts.is_some() {
                    below.resident_budget = None;
                }
                if self.resident_budget.is_some() {
                    below.experts = None;
                }
                Settings { $($key: self.$key.or(below.$key),)+ }
            }

            /// Whether this layer decides the setting.
            pub(super) fn decides(&self, key: &str) -> bool {
                match key {
                    $(stringify!($key) => self.$key.is_some(),)+
                    _ => false,
                }
            }

            pub(super) fn from_variables(environment: &Environment) -> Result<Settings, Failure> {
                let mut settings = Settings::default();
                $(if let Some(text) = environment.get($variable)? {
                    let read: fn(&str) -> Option<$type> = $read;
                    settings.$key = Some(read(text).ok_or_else(|| {
                        Failure::usage(format!("the variable {} is `{text}`, but must be {}", $variable, $range))
                    })?);
                })+
                Ok(settings)
            }

            /// Takes a value of the file, or says in words what is wrong with it.
            fn put(&mut self, key: &str, value: &Value) -> Result<(), String> {
                match key {
                    $(stringify!($key) => {
                        let take: fn(&Value) -> Option<$type> = $take;
                        let taken = take(value);
                        self.$key = Some(taken.ok_or_else(|| format!("`{key}` is {value}, but must be {}", $range))?);
                        Ok(())
                    })+
                    _ => Err(format!("`{key}` is no setting; there are {}", Settings::KEYS.join(", "))),
                }
            }
        }
    };
}

settings! {
    /// Threads that compute.
    threads: usize, "STRATA_THREADS", WHOLE, parsed, plain;
    /// Tokens that a sequence may have.
    context: usize, "STRATA_CONTEXT", WHOLE, parsed, plain;
    /// Rows of a prompt window.
    window: usize, "STRATA_WINDOW", WHOLE, parsed, plain;
    /// How keys and values are stored.
    kv: KvFormat, "STRATA_KV", "f32 or f16", |word| kv_format(word).ok(), plain;
    /// Where routed experts live.
    experts: ExpertHome, "STRATA_EXPERTS", "auto, mapped or heap", |word| expert_home(word).ok(), plain;
    /// Bytes of memory for the most used experts; the others are read from the file.
    resident_budget: u64, "STRATA_RESIDENT_BUDGET", SIZE, |text| size(text).ok(), |value| size(value.as_str()?).ok();
    /// Where the model is computed.
    device: Device, "STRATA_DEVICE", "auto, cpu or cuda:N", parsed, |value| parsed(value.as_str()?);
    /// Bytes of memory to act as if there were no more.
    ram_limit: u64, "STRATA_RAM_LIMIT", SIZE, |text| size(text).ok(), |value| size(value.as_str()?).ok();
    /// Bytes of a GPU's memory to act as if there were no more.
    vram_limit: u64, "STRATA_VRAM_LIMIT", SIZE, |text| size(text).ok(), |value| size(value.as_str()?).ok();
    /// Bytes of a GPU's memory to leave to others.
    vram_reserve: u64, "STRATA_VRAM_RESERVE", SIZE, |text| size_or_none(text).ok(), |value| size_or_none(value.as_str()?).ok();
    /// Experts that a GPU keeps in its own memory.
    expert_cache: ExpertCache, "STRATA_EXPERT_CACHE", CACHE, |text| expert_cache(text).ok(), cache;
    /// Whether the CPU computes a share of the experts that a GPU has no room for.
    cpu_experts: Switch, "STRATA_CPU_EXPERTS", SWITCH, parsed, switch;
    /// Whether what is learned of experts is kept beside the model.
    ranking: Switch, "STRATA_RANKING", SWITCH, parsed, switch;
    /// Threads that copy experts which a GPU can't read to where it can.
    stagers: usize, "STRATA_STAGERS", WHOLE, parsed, plain;
    /// Bytes of the memory that they copy to.
    ring: u64, "STRATA_RING", SIZE, |text| size(text).ok(), |value| size(value.as_str()?).ok();
    /// Instruction set path.
    isa: String, "STRATA_ISA", TEXT, parsed, plain;
    /// What to log.
    log: Level, "STRATA_LOG", "off, error, warn, info, debug or trace", parsed, plain;
    /// Nothing on standard error but warnings and errors.
    quiet: Switch, "STRATA_QUIET", SWITCH, parsed, switch;
    /// Always the most probable token: a temperature of 0.
    greedy: Switch, "STRATA_GREEDY", SWITCH, parsed, switch;
    temperature: f32, "STRATA_TEMPERATURE", NUMBER, parsed, plain;
    top_k: usize, "STRATA_TOP_K", WHOLE, parsed, plain;
    top_p: f32, "STRATA_TOP_P", NUMBER, parsed, plain;
    min_p: f32, "STRATA_MIN_P", NUMBER, parsed, plain;
    repetition_penalty: f32, "STRATA_REPETITION_PENALTY", NUMBER, parsed, plain;
    presence_penalty: f32, "STRATA_PRESENCE_PENALTY", NUMBER, parsed, plain;
    frequency_penalty: f32, "STRATA_FREQUENCY_PENALTY", NUMBER, parsed, plain;
    /// Pairs of a token and what its logit gets.
    logit_bias: Vec<(u32, f32)>, "STRATA_LOGIT_BIAS", BIASES, biases, listed_biases;
    seed: u64, "STRATA_SEED", WHOLE, parsed, plain;
    /// Tokens of an answer.
    max_tokens: usize, "STRATA_MAX_TOKENS", WHOLE, parsed, plain;
    /// System message.
    system: String, "STRATA_SYSTEM", TEXT, |text| Some(text.to_owned()), plain;
    /// Whether the model thinks before it answers.
    think: Switch, "STRATA_THINK", SWITCH, parsed, switch;
}

/// Bytes of a configuration file, at most.
const LONGEST: u64 = 1 << 20;

/// Reads a configuration file.
pub fn read_file(path: &Path) -> Result<Settings, Failure> {
    let failed = |why: String| Failure::usage(format!("the configuration file {}: {why}", path.display()));
    let found = std::fs::metadata(path).map_err(|error| failed(error.to_string()))?;
    if !found.is_file() || found.len() > LONGEST {
        return Err(failed(format!("it is no regular file of at most {} KiB", LONGEST >> 10)));
    }
    let text = std::fs::read_to_string(path).map_err(|error| failed(error.to_string()))?;
    let line = |span: Range<usize>| text.bytes().take(span.start).filter(|&byte| byte == b'\n').count() + 1;
    let table: BTreeMap<Spanned<String>, Value> = toml::from_str(&text).map_err(|error| {
        let place = error.span().map_or(String::new(), |span| format!("line {}: ", line(span)));
        failed(format!("{place}{}", error.message().replace('\n', " ")))
    })?;
    let mut settings = Settings::default();
    for (key, value) in &table {
        let put = settings.put(key.get_ref(), value);
        put.map_err(|why| failed(format!("line {}: {why}", line(key.span()))))?;
    }
    Ok(settings)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Oracle: the naming rule that the help states.
    #[test]
    fn variables_are_named_after_keys() {
        let named: Vec<String> =
            Settings::KEYS.iter().map(|key| format!("STRATA_{}", key.to_uppercase())).collect();
        assert_eq!(named, Settings::VARIABLES);
    }

    /// Oracle: the form that the help shows.
    #[test]
    fn biases_are_listed() {
        assert_eq!(biases("1=2, 3=-4.5"), Some(vec![(1, 2.0), (3, -4.5)]));
    }
}
