//! The configuration: defaults, then the file, then the environment, then the flags, resolved once.
//!
//! [`Settings`] is one layer: every setting may be open in it. [`Config`] is the result: complete, checked, and
//! passed by reference to everything. The only layer below the file is the model's own (its sampling defaults), which
//! is not known before the model is open: [`Config::sampling`] takes it.
//!
//! The environment comes in as a value ([`Environment`]), read in one place and nowhere else in the program.

mod environment;
mod settings;
mod words;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use strata_cuda::ExpertCache;
use strata_engine::sampling::SamplingError;
use strata_engine::{EngineConfig, ExpertHome, Sampling};
use strata_quant::Isa;
use strata_topology::Assignment;

pub use environment::Environment;
pub use settings::Settings;
use settings::read_file;
pub use words::{
    Bias, Device, Level, Switch, expert_cache, expert_home, kv_format, size, size_or_none, whole,
};

use crate::failure::Failure;

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

/// Everything that was decided before the model is opened.
#[derive(Debug, Clone, PartialEq)]
pub struct Config {
    /// The engine's part.
    pub engine: EngineConfig,
    /// Threads that compute; one per physical core when open.
    pub threads: Option<usize>,
    /// Where the model is computed.
    pub device: Device,
    /// Bytes of memory to act as if there were no more.
    pub ram_limit: Option<u64>,
    /// Bytes of a GPU's memory to act as if there were no more.
    pub vram_limit: Option<u64>,
    /// Experts that a GPU keeps in its own memory.
    pub expert_cache: ExpertCache,
    /// Whether the CPU computes a share of the others.
    pub cpu_experts: bool,
    /// Whether what a GPU's steps teach of experts is read from beside the model, and kept there.
    pub ranking: bool,
    /// Threads that copy experts which a GPU can't read; as many as help when open.
    pub stagers: Option<usize>,
    /// Bytes of the memory that they copy to.
    pub ring: u64,
    /// Bytes of a GPU's memory to leave to others.
    pub vram_reserve: u64,
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
            if settings.resident_budget.is_some() && settings.experts.is_some() {
                let (one, other) = (layer.name("resident_budget"), layer.name("experts"));
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
                experts: match settings.resident_budget {
                    Some(bytes) => ExpertHome::Budget(bytes),
                    None => settings.experts.unwrap_or(defaults.experts),
                },
                ..defaults
            },
            threads,
            device: settings.device.unwrap_or_default(),
            ram_limit: settings.ram_limit,
            vram_limit: settings.vram_limit,
            expert_cache: settings.expert_cache.unwrap_or_default(),
            cpu_experts: settings.cpu_experts.is_none_or(Switch::is_on),
            ranking: settings.ranking.is_none_or(Switch::is_on),
            stagers: at_least_one("stagers", settings.stagers)?,
            ring: settings.ring.unwrap_or(64 << 20),
            vram_reserve: settings.vram_reserve.unwrap_or(256 << 20),
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

    /// Whether a setting was given.
    pub fn was_given(&self, key: &str) -> bool {
        self.names.contains_key(key)
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

#[cfg(test)]
mod tests {
    use strata_backend::KvFormat;

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

    /// Oracle: where experts live is one value, and the upper layer's word on it counts, whichever setting says it.
    #[test]
    fn a_budget_is_a_home() {
        let (_folder, path) = file("resident_budget = \"3G\"\n");
        let home =
            |flags: Settings| Config::resolve(flags, Some(&path), &environment(&[])).unwrap().engine.experts;
        assert_eq!(home(Settings::default()), ExpertHome::Budget(3 << 30));
        let heap = Settings { experts: Some(ExpertHome::Heap), ..Settings::default() };
        assert_eq!(home(heap), ExpertHome::Heap);
        let (_folder, path) = file("experts = \"heap\"\n");
        let flags = Settings { resident_budget: Some(7), ..Settings::default() };
        let config = Config::resolve(flags, Some(&path), &environment(&[])).unwrap();
        assert_eq!(config.engine.experts, ExpertHome::Budget(7));
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
            ("experts = \"heap\"\nresident_budget = \"1G\"", &["`experts`", "`resident_budget`", "exclude"]),
            ("experts = \"budget\"", &["line 2", "`experts`", "auto, mapped or heap"]),
            ("resident_budget = \"0G\"", &["line 2", "`resident_budget`", "0G"]),
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
}
