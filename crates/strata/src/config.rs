//! The configuration: defaults, then the file, then the environment, then the flags, resolved once.
//!
//! [`Settings`] is one layer: every setting may be open in it. [`Config`] is the result: complete, checked, and
//! passed by reference to everything. The only layer below the file is the model's own (its sampling defaults), which
//! is not known before the model is open: [`Config::sampling`] takes it.
//!
//! The environment comes in as a value ([`Environment`]), read in one place and nowhere else in the program.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fmt;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use serde::Deserialize;
use serde::de::{IntoDeserializer, value};
use strata_backend::KvFormat;
use strata_engine::{EngineConfig, ExpertHome, Sampling};
use strata_quant::Isa;
use strata_topology::Assignment;

use crate::failure::Failure;

/// What [`Environment`] reads, beside the settings.
const OTHER_VARIABLES: [&str; 1] = ["STRATA_CONFIG"];
/// Variables that only tests read.
const TEST_VARIABLES: [&str; 2] = ["STRATA_GOLDEN", "STRATA_MODELS"];

/// On or off.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(try_from = "SwitchForm")]
pub enum Switch {
    On,
    Off,
}

/// How a switch is written in the file.
#[derive(Deserialize)]
#[serde(untagged, expecting = "expected true, false, \"on\" or \"off\"")]
enum SwitchForm {
    Bool(bool),
    Word(String),
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

impl TryFrom<SwitchForm> for Switch {
    type Error = String;

    fn try_from(form: SwitchForm) -> Result<Self, String> {
        match form {
            SwitchForm::Bool(true) => Ok(Switch::On),
            SwitchForm::Bool(false) => Ok(Switch::Off),
            SwitchForm::Word(word) => word.parse(),
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
    number.checked_mul(1 << shift).ok_or_else(|| format!("{text} is more than can be counted"))
}

fn number<T: FromStr<Err: fmt::Display>>(text: &str) -> Result<T, String> {
    text.trim().parse().map_err(|error: T::Err| error.to_string())
}

fn text(text: &str) -> Result<String, String> {
    Ok(text.to_owned())
}

fn biases(text: &str) -> Result<Vec<(u32, f32)>, String> {
    text.split(',').map(|bias| bias.parse().map(|Bias { token, bias }| (token, bias))).collect()
}

/// One list of all settings makes the layer, its keys, how a variable is read, and how layers are put on each other.
macro_rules! settings {
    ($($(#[$doc:meta])* $key:ident: $type:ty, $variable:literal, $read:expr;)+) => {
        /// One layer of the configuration: what it leaves open is `None`.
        #[derive(Debug, Clone, Default, PartialEq, Deserialize)]
        #[serde(default, deny_unknown_fields)]
        pub struct Settings {
            $($(#[$doc])* pub $key: Option<$type>,)+
        }

        impl Settings {
            /// The variables that settings are read from.
            const VARIABLES: &'static [&'static str] = &[$($variable),+];

            /// This layer over another one.
            #[must_use]
            pub fn over(self, below: Settings) -> Settings {
                Settings { $($key: self.$key.or(below.$key),)+ }
            }

            fn from_variables(environment: &Environment) -> Result<Settings, Failure> {
                let mut settings = Settings::default();
                $(if let Some(text) = environment.get($variable)? {
                    let read: fn(&str) -> Result<$type, String> = $read;
                    settings.$key = Some(read(text).map_err(|why| {
                        Failure::usage(format!("the variable {} is `{text}`: {why}", $variable))
                    })?);
                })+
                Ok(settings)
            }
        }
    };
}

settings! {
    /// Threads that compute.
    threads: usize, "STRATA_THREADS", number;
    /// Tokens that a sequence may have.
    context: usize, "STRATA_CONTEXT", number;
    /// Rows of a prompt window.
    window: usize, "STRATA_WINDOW", number;
    /// How keys and values are stored.
    kv: KvFormat, "STRATA_KV", kv_format;
    /// Where routed experts live.
    experts: ExpertHome, "STRATA_EXPERTS", expert_home;
    /// Instruction set path.
    isa: String, "STRATA_ISA", text;
    /// What to log.
    log: Level, "STRATA_LOG", Level::from_str;
    /// Nothing on standard error but warnings and errors.
    quiet: Switch, "STRATA_QUIET", Switch::from_str;
    temperature: f32, "STRATA_TEMPERATURE", number;
    top_k: usize, "STRATA_TOP_K", number;
    top_p: f32, "STRATA_TOP_P", number;
    min_p: f32, "STRATA_MIN_P", number;
    repetition_penalty: f32, "STRATA_REPETITION_PENALTY", number;
    presence_penalty: f32, "STRATA_PRESENCE_PENALTY", number;
    frequency_penalty: f32, "STRATA_FREQUENCY_PENALTY", number;
    /// Pairs of a token and what its logit gets.
    logit_bias: Vec<(u32, f32)>, "STRATA_LOGIT_BIAS", biases;
    seed: u64, "STRATA_SEED", number;
    /// Tokens of an answer.
    max_tokens: usize, "STRATA_MAX_TOKENS", number;
    /// System message.
    system: String, "STRATA_SYSTEM", text;
    /// Whether the model thinks before it answers.
    think: Switch, "STRATA_THINK", Switch::from_str;
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
        let below = match (named, environment.config_file()) {
            (Some(path), _) => read_file(&path)?,
            (None, Some(path)) if path.exists() => read_file(&path)?,
            _ => Settings::default(),
        };
        Config::from_settings(flags.over(variables).over(below))
    }

    fn from_settings(settings: Settings) -> Result<Config, Failure> {
        let at_least_one = |name: &str, value: Option<usize>| match value {
            Some(0) => Err(Failure::usage(format!("{name} is 0, but must be at least 1"))),
            value => Ok(value),
        };
        let threads = at_least_one("--threads", settings.threads)?;
        if let Some(threads) = threads.filter(|&threads| threads > Assignment::MOST_THREADS) {
            let most = Assignment::MOST_THREADS;
            return Err(Failure::usage(format!("--threads is {threads}, but must be at most {most}")));
        }
        let isa = match &settings.isa {
            None => Isa::detect(),
            Some(name) => name.parse().map_err(|why| Failure::usage(format!("--isa: {why}")))?,
        };
        let defaults = EngineConfig::default();
        let config = Config {
            engine: EngineConfig {
                context: at_least_one("--context", settings.context)?,
                window: at_least_one("--window", settings.window)?,
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
        };
        // Ranges that don't depend on the model are wrong before it is opened.
        config
            .sampling(Sampling::default())
            .validate(usize::MAX)
            .map_err(|why| Failure::usage(why.to_string()))?;
        Ok(config)
    }

    /// How tokens are chosen, over the model's own defaults. The seed is the given one, or a new one.
    pub fn sampling(&self, model: Sampling) -> Sampling {
        let settings = &self.sampling;
        Sampling {
            temperature: settings.temperature.unwrap_or(model.temperature),
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
    toml::from_str(&text).map_err(|error| {
        let line = error.span().map(|span| text[..span.start].matches('\n').count() + 1);
        let place = line.map_or(String::new(), |line| format!("line {line}: "));
        failed(format!("{place}{}", error.message().replace('\n', " ")))
    })
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
        assert!(message.contains("top_p") && message.contains("1.5"), "{message}");
        let message = resolve(&path, &environment(&[("STRATA_THREADS", "0")]));
        assert!(message.contains("--threads"), "{message}");
        let missing = resolve(Path::new("/nowhere/config.toml"), &environment(&[]));
        assert!(missing.contains("/nowhere/config.toml"), "{missing}");
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
        assert_eq!(biases("1=2, 3=-4.5"), Ok(vec![(1, 2.0), (3, -4.5)]));
        assert_eq!(kv_format("f32"), Ok(KvFormat::F32));
        assert_eq!(expert_home("heap"), Ok(ExpertHome::Heap));
        assert_eq!("debug".parse(), Ok(Level::Debug));
        assert_eq!((size("512"), size("20G"), size("3kib")), (Ok(512), Ok(20 << 30), Ok(3072)));
        assert!(size("G").is_err() && size("4X").is_err() && size("99999999999T").is_err());
    }

    /// Oracle: only variables of this program that mean nothing, not those of its tests.
    #[test]
    fn unknown_variables_are_found() {
        let environment =
            environment(&[("STRATA_CONTXT", "1"), ("STRATA_GOLDEN", "x"), ("STRATA_KV", "f16")]);
        assert_eq!(environment.unknown().collect::<Vec<_>>(), ["STRATA_CONTXT"]);
    }
}
