//! The configuration: defaults, then the file, then the environment, then the flags, resolved once.
//!
//! [`Settings`] is one layer: every setting may be open in it. [`Config`] is the result: complete, checked, and
//! passed by reference to everything. The only layer below the file is the model's own (its sampling defaults), which
//! is not known before the model is open: [`Config::sampling`] takes it.
//!
//! The environment comes in as a value ([`Environment`]), read in one place and nowhere else in the program.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::num::{IntErrorKind, ParseIntError};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use serde::Deserialize;
use serde::de::{DeserializeOwned, IntoDeserializer, value};
use strata_backend::KvFormat;
use strata_engine::sampling::SamplingError;
use strata_engine::{EngineConfig, ExpertHome, Sampling};
use strata_quant::Isa;
use strata_topology::Assignment;
use toml::{Spanned, Value};

use crate::failure::Failure;

/// What [`Environment`] reads, beside the settings.
const OTHER_VARIABLES: [&str; 1] = ["STRATA_CONFIG"];
/// Variables that only tests read.
const TEST_VARIABLES: [&str; 2] = ["STRATA_GOLDEN", "STRATA_MODELS"];

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

/// Reads `--kv`.
pub fn kv_format(word: &str) -> Result<KvFormat, String> {
    word_of(word)
}

/// Reads `--experts`.
pub fn expert_home(word: &str) -> Result<ExpertHome, String> {
    word_of(word)
}

/// Reads a size: bytes, or with K, M, G or T behind the number units of 1024 times as much each.
pub fn size(text: &str) -> Result<u64, String> {
    let digits = text.trim_end_matches(|c: char| c.is_ascii_alphabetic());
    let shift = match text[digits.len()..].to_ascii_uppercase().as_str() {
        "" | "B" => 0,
        "K" | "KIB" => 10,
        "M" | "MIB" => 20,
        "G" | "GIB" => 30,
        "T" | "TIB" => 40,
        unit => return Err(format!("`{unit}` is no unit; give K, M, G or T")),
    };
    let number: u64 = digits.parse().map_err(|_| format!("`{text}` is no size like 500M or 20G"))?;
    if number == 0 {
        return Err("it must be at least 1 byte".into());
    }
    number.checked_mul(1 << shift).ok_or_else(|| format!("{text} is more than can be counted"))
}

/// Reads a count from a flag, or says what it must be.
pub fn whole<T: FromStr<Err = ParseIntError>>(text: &str) -> Result<T, String> {
    text.trim().parse().map_err(|error: ParseIntError| match error.kind() {
        IntErrorKind::PosOverflow => "it is more than can be counted".into(),
        _ => format!("it must be {WHOLE}"),
    })
}

// ---- what settings must be, and how they are read from variables and from the file

const WHOLE: &str = "a whole number, not negative";
const NUMBER: &str = "a number";
const TEXT: &str = "a text in quotes";
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
            const VARIABLES: &'static [&'static str] = &[$($variable),+];
            /// The keys that the file may have, in the order of [`Settings::VARIABLES`].
            pub const KEYS: &'static [&'static str] = &[$(stringify!($key)),+];

            /// This layer over another one. Whoever gives a temperature doesn't want what a layer below says of greed.
            #[must_use]
            pub fn over(self, mut below: Settings) -> Settings {
                if self.temperature.is_some() {
                    below.greedy = None;
                }
                Settings { $($key: self.$key.or(below.$key),)+ }
            }

            /// Whether this layer decides the setting.
            fn decides(&self, key: &str) -> bool {
                match key {
                    $(stringify!($key) => self.$key.is_some(),)+
                    _ => false,
                }
            }

            fn from_variables(environment: &Environment) -> Result<Settings, Failure> {
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
    experts: ExpertHome, "STRATA_EXPERTS", "mapped or heap", |word| expert_home(word).ok(), plain;
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

/// Who decides a layer.
#[derive(Debug, Clone)]
enum Layer {
    Flags,
    Variables,
    File(PathBuf),
}

impl Layer {
    /// A setting as this layer's writer knows it.
    fn name(&self, key: &str) -> String {
        match self {
            Layer::Flags => flag(key),
            Layer::Variables => format!("the variable STRATA_{}", key.to_uppercase()),
            Layer::File(path) => format!("`{key}` in the configuration file {}", path.display()),
        }
    }
}

/// The flag of a setting.
pub fn flag(key: &str) -> String {
    format!("--{}", key.replace('_', "-"))
}

/// The process's environment, as far as this program looks at it.
#[derive(Debug, Clone, Default)]
pub struct Environment(BTreeMap<String, OsString>);

impl Environment {
    /// Reads it. Nothing else in the program does.
    pub fn read() -> Environment {
        let wanted = |name: &str| {
            name.starts_with("STRATA_")
                || matches!(name, "HOME" | "XDG_CONFIG_HOME" | "XDG_STATE_HOME" | "NO_COLOR" | "TERM")
        };
        let named = std::env::vars_os().filter_map(|(name, value)| Some((name.into_string().ok()?, value)));
        Environment(named.filter(|(name, _)| wanted(name)).collect())
    }

    fn get(&self, name: &str) -> Result<Option<&str>, Failure> {
        let Some(value) = self.0.get(name).filter(|value| !value.is_empty()) else { return Ok(None) };
        let text =
            value.to_str().ok_or_else(|| Failure::usage(format!("the variable {name} is not UTF-8")))?;
        Ok(Some(text))
    }

    fn path(&self, name: &str) -> Option<PathBuf> {
        self.0.get(name).filter(|value| !value.is_empty()).map(PathBuf::from)
    }

    /// Whether text may be dimmed on a terminal.
    pub fn allows_style(&self) -> bool {
        self.path("NO_COLOR").is_none() && self.0.get("TERM").is_none_or(|term| term != "dumb")
    }

    /// A file of this program in the folder that `variable` names, or `fallback` in the home folder.
    fn file(&self, variable: &str, fallback: &str, name: &str) -> Option<PathBuf> {
        let folder = self.path(variable).or_else(|| Some(self.path("HOME")?.join(fallback)))?;
        Some(folder.join("strata").join(name))
    }

    /// The usual configuration file.
    fn config_file(&self) -> Option<PathBuf> {
        self.file("XDG_CONFIG_HOME", ".config", "config.toml")
    }

    /// The file that remembers what was typed into chats.
    pub fn history_file(&self) -> Option<PathBuf> {
        self.file("XDG_STATE_HOME", ".local/state", "history")
    }

    /// Variables that look like this program's but mean nothing.
    pub fn unknown(&self) -> impl Iterator<Item = &str> {
        let known = |name: &str| {
            Settings::VARIABLES.contains(&name)
                || OTHER_VARIABLES.contains(&name)
                || TEST_VARIABLES.contains(&name)
        };
        self.0.keys().map(String::as_str).filter(move |name| name.starts_with("STRATA_") && !known(name))
    }
}

/// Everything that was decided before the model is opened.
#[derive(Debug, Clone, PartialEq)]
pub struct Config {
    /// The engine's part.
    pub engine: EngineConfig,
    /// Threads that compute; one per physical core when open.
    pub threads: Option<usize>,
    /// Instruction set path.
    pub isa: Isa,
    /// What to log.
    pub log: Level,
    /// Nothing on standard error but warnings and errors.
    pub quiet: bool,
    /// Tokens of an answer at most.
    pub max_tokens: Option<usize>,
    /// System message.
    pub system: Option<String>,
    /// Whether the model thinks before it answers; the template's default when open.
    pub think: Option<bool>,
    /// The settings that sampling is resolved from.
    sampling: Settings,
    /// What to call a setting that was given, by the layer that decided it.
    names: BTreeMap<&'static str, String>,
}

impl Config {
    /// Puts all layers on each other and checks the result. `file` is `--config`.
    pub fn resolve(
        flags: Settings,
        file: Option<&Path>,
        environment: &Environment,
    ) -> Result<Config, Failure> {
        let variables = Settings::from_variables(environment)?;
        let named = file.map(Path::to_owned).or_else(|| environment.path("STRATA_CONFIG"));
        let file = named.or_else(|| environment.config_file().filter(|path| path.exists()));
        let mut layers = vec![(Layer::Flags, flags), (Layer::Variables, variables)];
        if let Some(path) = file {
            let settings = read_file(&path)?;
            layers.push((Layer::File(path), settings));
        }
        let mut names = BTreeMap::new();
        for (layer, settings) in &layers {
            if settings.greedy == Some(Switch::On) && settings.temperature.is_some() {
                let (one, other) = (layer.name("greedy"), layer.name("temperature"));
                return Err(Failure::usage(format!("{one} and {other} exclude each other; leave one out")));
            }
            for key in Settings::KEYS.iter().filter(|key| settings.decides(key)) {
                names.entry(*key).or_insert_with(|| layer.name(key));
            }
        }
        let settings = layers.into_iter().map(|(_, settings)| settings).reduce(Settings::over);
        Config::from_settings(settings.unwrap_or_default(), names)
    }

    fn from_settings(settings: Settings, names: BTreeMap<&'static str, String>) -> Result<Config, Failure> {
        let name = |key: &str| names.get(key).cloned().unwrap_or_else(|| flag(key));
        let at_least_one = |key: &str, value: Option<usize>| match value {
            Some(0) => Err(Failure::usage(format!("{} is 0, but must be at least 1", name(key)))),
            value => Ok(value),
        };
        let threads = at_least_one("threads", settings.threads)?;
        if let Some(threads) = threads.filter(|&threads| threads > Assignment::MOST_THREADS) {
            let (name, most) = (name("threads"), Assignment::MOST_THREADS);
            return Err(Failure::usage(format!("{name} is {threads}, but must be at most {most}")));
        }
        let isa = match &settings.isa {
            None => Isa::detect(),
            Some(isa) => isa.parse().map_err(|why| Failure::usage(format!("{}: {why}", name("isa"))))?,
        };
        let defaults = EngineConfig::default();
        let config = Config {
            engine: EngineConfig {
                context: at_least_one("context", settings.context)?,
                window: at_least_one("window", settings.window)?,
                kv: settings.kv.unwrap_or(defaults.kv),
                experts: settings.experts.unwrap_or(defaults.experts),
                ..defaults
            },
            threads,
            isa,
            log: settings.log.unwrap_or(Level::Warn),
            quiet: settings.quiet.is_some_and(Switch::is_on),
            max_tokens: settings.max_tokens,
            system: settings.system.clone(),
            think: settings.think.map(Switch::is_on),
            sampling: settings,
            names,
        };
        // Ranges that don't depend on the model are wrong before it is opened.
        config.sampling(Sampling::default()).validate(usize::MAX).map_err(|why| config.out_of_range(&why))?;
        Ok(config)
    }

    /// What to call a setting: as it was given, or its flag.
    pub fn name(&self, key: &str) -> String {
        self.names.get(key).cloned().unwrap_or_else(|| flag(key))
    }

    /// A parameter that was given and makes no sense is a mistake of usage; the model's own is one of the model.
    pub fn out_of_range(&self, why: &SamplingError) -> Failure {
        let SamplingError { parameter, value, range } = why;
        match self.names.get(parameter) {
            Some(name) => Failure::usage(format!("{name} is {value}, but must be {range}")),
            None => Failure::failed(format!(
                "the {parameter} that the model recommends is {value}, but must be {range}; give {}",
                flag(parameter)
            )),
        }
    }

    /// How tokens are chosen, over the model's own defaults. The seed is the given one, or a new one.
    pub fn sampling(&self, model: Sampling) -> Sampling {
        let settings = &self.sampling;
        let greedy = settings.greedy.is_some_and(Switch::is_on);
        Sampling {
            temperature: if greedy { 0.0 } else { settings.temperature.unwrap_or(model.temperature) },
            top_k: settings.top_k.unwrap_or(model.top_k),
            top_p: settings.top_p.unwrap_or(model.top_p),
            min_p: settings.min_p.unwrap_or(model.min_p),
            repetition_penalty: settings.repetition_penalty.unwrap_or(model.repetition_penalty),
            presence_penalty: settings.presence_penalty.unwrap_or(model.presence_penalty),
            frequency_penalty: settings.frequency_penalty.unwrap_or(model.frequency_penalty),
            logit_bias: settings.logit_bias.clone().unwrap_or(model.logit_bias),
            seed: settings.seed.unwrap_or_else(new_seed),
            logprobs: model.logprobs,
        }
    }
}

/// A seed nobody chose. Below 2^53, so that every JSON reader keeps it exactly.
fn new_seed() -> u64 {
    use std::hash::{BuildHasher, RandomState};
    RandomState::new().hash_one(std::process::id()) >> 11
}

/// Reads a configuration file.
fn read_file(path: &Path) -> Result<Settings, Failure> {
    let failed = |why: String| Failure::usage(format!("the configuration file {}: {why}", path.display()));
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

    fn environment(variables: &[(&str, &str)]) -> Environment {
        Environment(variables.iter().map(|(name, value)| (name.to_string(), value.into())).collect())
    }

    fn file(text: &str) -> (tempfile::TempDir, PathBuf) {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("config.toml");
        std::fs::write(&path, text).unwrap();
        (folder, path)
    }

    /// Oracle: the documented order, one setting decided in each layer.
    #[test]
    fn layers_lie_in_order() {
        let (_folder, path) = file("context = 1\nwindow = 2\ntop_k = 3\ntemperature = 1\nthink = \"off\"\n");
        let environment =
            environment(&[("STRATA_WINDOW", "20"), ("STRATA_TOP_K", "30"), ("STRATA_THINK", "on")]);
        let flags = Settings { top_k: Some(300), ..Settings::default() };
        let config = Config::resolve(flags, Some(&path), &environment).unwrap();
        assert_eq!(config.engine.context, Some(1));
        assert_eq!(config.engine.window, Some(20));
        assert_eq!(config.engine.kv, KvFormat::F16);
        assert_eq!(config.think, Some(true));
        let sampling = config.sampling(Sampling { top_p: 0.25, ..Sampling::default() });
        assert_eq!((sampling.top_k, sampling.top_p, sampling.temperature), (300, 0.25, 1.0));
    }

    /// Oracle: the sentences name the file, the line and the key; the variable and its text.
    #[test]
    fn mistakes_are_named() {
        let (_folder, path) = file("context = 1\ncontxt = 2\n");
        let name = path.display().to_string();
        let resolve = |path: &Path, environment: &Environment| {
            Config::resolve(Settings::default(), Some(path), environment).unwrap_err().to_string()
        };
        let message = resolve(&path, &environment(&[]));
        assert!(
            message.contains(&name) && message.contains("line 2") && message.contains("contxt"),
            "{message}"
        );
        assert!(!message.contains('\n'), "{message}");

        let (_folder, path) = file("kv = \"f8\"\n");
        assert!(resolve(&path, &environment(&[])).contains("f8"));
        let (_folder, path) = file("");
        let message = resolve(&path, &environment(&[("STRATA_CONTEXT", "many")]));
        assert!(message.contains("STRATA_CONTEXT") && message.contains("many"), "{message}");
        let message = resolve(&path, &environment(&[("STRATA_KV", "f8")]));
        assert!(message.contains("STRATA_KV") && message.contains("f16"), "{message}");
        let message = resolve(&path, &environment(&[("STRATA_TOP_P", "1.5")]));
        assert!(message.contains("STRATA_TOP_P") && message.contains("1.5"), "{message}");
        let message = resolve(&path, &environment(&[("STRATA_THREADS", "0")]));
        assert_eq!(message, "the variable STRATA_THREADS is 0, but must be at least 1");
        let missing = resolve(Path::new("/nowhere/config.toml"), &environment(&[]));
        assert!(missing.contains("/nowhere/config.toml"), "{missing}");
    }

    /// Oracle: the names that a setting has where it was written, whatever is wrong with it.
    #[test]
    fn mistakes_are_named_where_they_were_made() {
        let nothing = environment(&[]);
        for (line, parts) in [
            ("threads = 0", &["`threads`", "0", "at least 1"][..]),
            ("threads = \"2\"", &["line 2", "`threads`", "\"2\"", "whole number"]),
            ("threads = -2", &["line 2", "`threads`", "-2", "not negative"]),
            ("threads = 5000", &["`threads`", "5000", "4096"]),
            ("kv = 16", &["line 2", "`kv`", "16", "f32 or f16"]),
            ("quiet = \"x\"", &["line 2", "`quiet`", "\"x\"", "on or off"]),
            ("isa = \"mmx\"", &["`isa`", "mmx"]),
            ("temperature = nan", &["`temperature`", "NaN", "at least 0"]),
            ("logit_bias = [[1, nan]]", &["`logit_bias`", "NaN", "token 1"]),
            ("logit_bias = [1]", &["line 2", "`logit_bias`", "17=-inf"]),
            ("logit_bias = \"1:2\"", &["line 2", "`logit_bias`", "1:2", "17=-inf"]),
            ("greedy = true\ntemperature = 1", &["`greedy`", "`temperature`", "exclude"]),
        ] {
            let (_folder, path) = file(&format!("\n{line}\n"));
            let message =
                Config::resolve(Settings::default(), Some(&path), &nothing).unwrap_err().to_string();
            let name = path.display().to_string();
            for part in parts.iter().chain([&name.as_str()]) {
                assert!(message.contains(part), "no {part} in {message}");
            }
        }
        let flags = Settings { logit_bias: Some(vec![(7, f32::NAN)]), ..Settings::default() };
        let message = Config::resolve(flags, None, &nothing).unwrap_err().to_string();
        assert_eq!(message, "--logit-bias is NaN for token 7, but must be a number");
        let variables = environment(&[("STRATA_TEMPERATURE", "nan")]);
        let message = Config::resolve(Settings::default(), None, &variables).unwrap_err().to_string();
        assert_eq!(message, "the variable STRATA_TEMPERATURE is NaN, but must be at least 0 and finite");
    }

    /// Oracle: the two forms that the documentation shows.
    #[test]
    fn biases_have_two_forms_in_the_file() {
        for form in ["\"17=-inf,23=1.5\"", "[[17, -inf], [23, 1.5]]"] {
            let (_folder, path) = file(&format!("logit_bias = {form}\n"));
            let config = Config::resolve(Settings::default(), Some(&path), &environment(&[])).unwrap();
            let biases = config.sampling(Sampling::default()).logit_bias;
            assert_eq!(biases, [(17, f32::NEG_INFINITY), (23, 1.5)], "{form}");
        }
    }

    /// Oracle: the order of layers. Greedy is a temperature of 0, so whichever of the two lies higher counts.
    #[test]
    fn greed_is_a_temperature() {
        let (_folder, path) = file("greedy = true\n");
        let temperature = |flags: Settings, variables: &[(&str, &str)]| {
            let config = Config::resolve(flags, Some(&path), &environment(variables)).unwrap();
            config.sampling(Sampling { temperature: 0.5, ..Sampling::default() }).temperature
        };
        let given = Settings { temperature: Some(0.7), ..Settings::default() };
        let greedy = Settings { greedy: Some(Switch::On), ..Settings::default() };
        assert_eq!(temperature(Settings::default(), &[]), 0.0);
        assert_eq!(temperature(given, &[]), 0.7);
        assert_eq!(temperature(Settings::default(), &[("STRATA_TEMPERATURE", "0.9")]), 0.9);
        assert_eq!(temperature(Settings::default(), &[("STRATA_GREEDY", "off")]), 0.5);
        assert_eq!(temperature(greedy, &[("STRATA_TEMPERATURE", "0.9")]), 0.0);
    }

    /// Oracle: the naming rule that the help states.
    #[test]
    fn variables_are_named_after_keys() {
        let named: Vec<String> =
            Settings::KEYS.iter().map(|key| format!("STRATA_{}", key.to_uppercase())).collect();
        assert_eq!(named, Settings::VARIABLES);
    }

    /// Oracle: the XDG base directory rule, and that a file nobody named may be absent.
    #[test]
    fn finds_the_usual_file() {
        let folder = tempfile::tempdir().unwrap();
        let home = folder.path().display().to_string();
        let environment = environment(&[("HOME", &home)]);
        let resolve = || Config::resolve(Settings::default(), None, &environment).unwrap();
        assert_eq!(resolve().engine.context, None);
        std::fs::create_dir_all(folder.path().join(".config/strata")).unwrap();
        std::fs::write(folder.path().join(".config/strata/config.toml"), "context = 77\n").unwrap();
        assert_eq!(resolve().engine.context, Some(77));
        assert_eq!(environment.history_file().unwrap(), folder.path().join(".local/state/strata/history"));
    }

    /// Oracle: the forms that the help shows.
    #[test]
    fn reads_the_words_of_flags() {
        assert_eq!("17=-inf".parse(), Ok(Bias { token: 17, bias: f32::NEG_INFINITY }));
        assert!("x=1".parse::<Bias>().is_err() && "1".parse::<Bias>().is_err());
        assert_eq!(biases("1=2, 3=-4.5"), Some(vec![(1, 2.0), (3, -4.5)]));
        assert_eq!(kv_format("f32"), Ok(KvFormat::F32));
        assert_eq!(expert_home("heap"), Ok(ExpertHome::Heap));
        assert_eq!("debug".parse(), Ok(Level::Debug));
        assert_eq!((size("512"), size("20G"), size("3kib")), (Ok(512), Ok(20 << 30), Ok(3072)));
        assert!(size("G").is_err() && size("4X").is_err() && size("99999999999T").is_err());
        assert!(size("0").is_err() && size("0G").is_err());
        assert_eq!(whole::<usize>("12"), Ok(12));
        assert!(whole::<u64>("-3").unwrap_err().contains("not negative"));
    }

    /// Oracle: only variables of this program that mean nothing, not those of its tests.
    #[test]
    fn unknown_variables_are_found() {
        let environment =
            environment(&[("STRATA_CONTXT", "1"), ("STRATA_GOLDEN", "x"), ("STRATA_KV", "f16")]);
        assert_eq!(environment.unknown().collect::<Vec<_>>(), ["STRATA_CONTXT"]);
    }
}
