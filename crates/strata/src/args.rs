//! The command line as typed values.
//!
//! Owns the flags, their help and nothing else: what a value means once the configuration file and the environment
//! have had their say is [`crate::config`]'s business. Every flag that can also stand in the file turns into a field
//! of [`Settings`].

use std::path::PathBuf;

use clap::{Args as Flags, Parser, Subcommand, ValueEnum};

use crate::config::{Bias, Device, Level, Settings, Switch, flag, whole};
use strata_backend::KvFormat;
use strata_cuda::ExpertCache;
use strata_engine::ExpertHome;

/// What stands below the help of the program. Lines are wrapped where the terminal ends.
fn after() -> String {
    format!(
        "Configuration: what these flags set can also stand in a configuration file, where --some-name is the key \
        some_name, or in a variable, where it is STRATA_SOME_NAME: {}. All other flags are flags only, also the \
        --context of eval, which is the length of its windows. Flags win over variables, variables over the file, \
        the file over what the model recommends; what a command has no flag for means nothing to it.\n\n\
        The file is the one that --config or STRATA_CONFIG names, or else strata/config.toml in $XDG_CONFIG_HOME \
        (~/.config).\n\n\
        Exit codes: 0 done, 1 failed, 2 wrong flags or configuration, 74 a model file changed while it was in use, \
        128 and the number of the signal that ended it (130 for Ctrl-C, 143 when it was terminated). A second signal ends it \
        whatever it is doing.",
        Settings::KEYS.iter().map(|key| flag(key)).collect::<Vec<_>>().join(", ")
    )
}

/// Runs mixture-of-experts language models that don't fit the graphics card.
#[derive(Debug, Parser)]
#[command(name = "strata", version, after_help = after(), max_term_width = 110)]
pub struct Args {
    #[command(flatten)]
    pub common: CommonFlags,
    #[command(subcommand)]
    pub command: Command,
}

/// Flags that every command has.
#[derive(Debug, Flags)]
pub struct CommonFlags {
    /// Configuration file to read instead of the usual one
    #[arg(long, global = true, value_name = "FILE", help_heading = "Common")]
    pub config: Option<PathBuf>,
    /// What to log on standard error [default: warn]
    #[arg(long, global = true, value_name = "LEVEL", help_heading = "Common")]
    pub log: Option<Level>,
    /// No progress bar, no speeds: nothing on standard error but warnings and errors
    #[arg(long, short, global = true, help_heading = "Common")]
    pub quiet: bool,
}

/// What to do.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Answer a prompt, or chat when none is given
    #[command(after_help = "\
Examples:
  strata run models/pebble.gguf                                    a chat; /help inside
  strata run models/pebble.gguf \"What is the capital of Italy?\"    one answer
  strata run models/pebble.gguf --raw -n 40 \"The sea is\"           a text continued
  git diff | strata run model.gguf --system \"Review this.\" -       the prompt from a pipe")]
    Run(RunArgs),
    /// Write the logits of every token of a sequence to a .npy file
    #[command(after_help = "\
Examples:
  strata logits models/pebble.gguf --ids 17,23,29 --out logits.npy
  strata logits models/pebble.gguf --ids @ids.txt --out draft.npy --mtp

The array is f32 [tokens, vocabulary]; with --mtp [tokens - 1, vocabulary]: row i is the draft block's guess at token \
i + 2, from the trunk's state at token i and token i + 1.")]
    Logits(LogitsArgs),
    /// Perplexity of a model on a text; with --against, how far it is from another model
    #[command(after_help = "\
Examples:
  strata eval models/pebble.gguf book.txt
  strata eval model-iq3_xxs.gguf book.txt --against model-bf16.gguf --windows 40 --json

The text is cut into windows of --context tokens; marks of turns written in it are read as text. Each window starts \
from an empty state, with no token put in front; of N tokens the logits at N/2 to N-2 score the tokens N/2+1 to N-1. \
What is left over at the end is not used.

Kullback-Leibler divergence is that of MODEL from the model given with --against: the sum of q * ln(q / p), where q \
is the other model's distribution.")]
    Eval(EvalArgs),
    /// Measure how fast prompts are read and tokens are made
    #[command(after_help = "\
Examples:
  strata bench models/pebble.gguf
  strata bench model.gguf --prompt 128,512,4096 --gen 64 --threads 8 --reps 7 --json
  strata bench model.gguf --prompt 0 --gen 128 --depth 1024,131072        answers behind long texts
  strata bench model.gguf --prompt 0 --gen 64 --sequences 1,8,32          several answers at once

Prompts are arbitrary tokens but the same every time; answers are the model's likeliest tokens. After a round to warm up, \
the median of the repetitions is reported, with the slowest and the fastest. Tokens of answers are those of all sequences.")]
    Bench(BenchArgs),
    /// Show what is inside a GGUF file
    #[command(after_help = "\
Examples:
  strata inspect models/pebble.gguf
  strata inspect model-00002-of-00003.gguf --tensors       any one of several shards

Only headers are read, whatever the file's size.")]
    Inspect(InspectArgs),
    /// Show what would be put where in memory, before anything is allocated
    #[command(after_help = "\
Example:
  strata plan model.gguf --context 65536 --kv f16")]
    Plan(PlanArgs),
    /// Make a model with random weights, to try a machine before a long download
    #[command(after_help = "\
Examples:
  strata synth --geometry tiny --formats f32 tiny.gguf
  strata synth --geometry flash-next --formats ud-iq3_xxs --ngram-rows 2000000 flash.gguf
  strata synth --geometry flash-next --formats iq3_s --split 20G flash.gguf
  strata synth --geometry flash-next --formats q2_0 --router-skew 0.8 --mtp --seed 7 skewed.gguf

The same flags and seed make the same file. Activations stay in a sane range, but what such a model says means \
nothing. Routers use all experts alike unless --router-skew lets their use follow Zipf's law with slowly drifting topics.")]
    Synth(SynthArgs),
    /// What there is to compute with: GPUs, CPUs, memory, and which threads go where
    Devices(DevicesArgs),
    /// Check that a GPU computes what the CPU does
    #[command(after_help = "\
Examples:
  strata selftest
  strata selftest --device cuda:1 --json

Random weights of every format are quantised, decoded and multiplied, and three small models with random weights are run, \
on the GPU and on the CPU. There is no tolerance: a result is equal when all its bits are, but one NaN is as good as another. \
Times are of a line's checks, with what the CPU and the comparison take of it. No model file is needed; the small ones are \
written to the folder for temporary files. The exit code is 0 when all is equal.")]
    Selftest(SelftestArgs),
}

/// A model and how to run it.
#[derive(Debug, Flags)]
pub struct EngineFlags {
    /// Threads that compute [default: one per physical core]
    #[arg(long, value_name = "N", value_parser = whole::<usize>, allow_negative_numbers = true, help_heading = "Engine")]
    pub threads: Option<usize>,
    /// Tokens of a prompt read together [default: at most 512]
    #[arg(long, value_name = "N", value_parser = whole::<usize>, allow_negative_numbers = true, help_heading = "Engine")]
    pub window: Option<usize>,
    /// How keys and values are stored: f32 or f16 [default: f16]
    #[arg(long, value_name = "FORMAT", value_parser = crate::config::kv_format, help_heading = "Engine")]
    pub kv: Option<KvFormat>,
    /// Where routed experts live that a GPU has no room for: mapped (read in place from the file, nothing is copied at start), heap (copied at start), or auto: in the heap beside a GPU, if there is room, else mapped [default: auto]
    #[arg(long, value_name = "HOME", value_parser = crate::config::expert_home, help_heading = "Engine")]
    pub experts: Option<ExpertHome>,
    /// Keep only so much of the experts in memory, e.g. 24G: the most used of those that the GPU has no room for, or of all; the others are read from the file when they are used, without the page cache. Instead of --experts [default: no limit]
    #[arg(long, value_name = "SIZE", value_parser = crate::config::size, allow_negative_numbers = true, help_heading = "Engine")]
    pub resident_budget: Option<u64>,
    /// Where to compute: cpu, cuda:N, or auto: a GPU if there is one that the model fits [default: auto]
    #[arg(long, value_name = "DEVICE", help_heading = "Engine")]
    pub device: Option<Device>,
    /// Act as if this machine had only so much memory, e.g. 32G
    #[arg(long, value_name = "SIZE", value_parser = crate::config::size, allow_negative_numbers = true, help_heading = "Engine")]
    pub ram_limit: Option<u64>,
    /// Act as if the GPU had only so much memory, e.g. 12G
    #[arg(long, value_name = "SIZE", value_parser = crate::config::size, allow_negative_numbers = true, help_heading = "Engine")]
    pub vram_limit: Option<u64>,
    /// GPU memory to leave to others [default: 256M]
    #[arg(long, value_name = "SIZE", value_parser = crate::config::size_or_none, allow_negative_numbers = true, help_heading = "Engine")]
    pub vram_reserve: Option<u64>,
    /// Experts that the GPU keeps in its own memory: a number, or a size with its unit, e.g. 4G [default: as many as there is room for]
    #[arg(long, value_name = "N|SIZE|auto", value_parser = crate::config::expert_cache, allow_negative_numbers = true, help_heading = "Engine")]
    pub expert_cache: Option<ExpertCache>,
    /// Have the CPU compute a share of the experts that the GPU has no room for, as large as is fastest, for one answer at a time and for prompts of up to 2,048 tokens [default: on]
    #[arg(long, value_name = "on|off", help_heading = "Engine")]
    pub cpu_experts: Option<Switch>,
    /// Learn which experts are used and keep that beside the model, in a file of its name with `.experts`, where a GPU or --resident-budget has no room for all [default: on]
    #[arg(long, value_name = "on|off", help_heading = "Engine")]
    pub ranking: Option<Switch>,
    /// Threads that copy experts which the GPU can't read where they are (--experts mapped), or read them from the file (--resident-budget), to where it can [default: one per CPU that doesn't drive, at most 12]
    #[arg(long, value_name = "N", value_parser = whole::<usize>, allow_negative_numbers = true, help_heading = "Engine")]
    pub stagers: Option<usize>,
    /// Pinned memory that they copy to, e.g. 64M [default: 64M]
    #[arg(long, value_name = "SIZE", value_parser = crate::config::size, allow_negative_numbers = true, help_heading = "Engine")]
    pub ring: Option<u64>,
    /// Instructions to compute with: scalar, avx2, avxvnni or avx512; all give the same bits [default: the fastest]
    #[arg(long, value_name = "NAME", help_heading = "Engine")]
    pub isa: Option<String>,
}

/// How long sequences may become.
#[derive(Debug, Flags)]
pub struct ContextFlag {
    /// Tokens that a conversation may have [default: what the model allows, at most 16384]
    #[arg(long, value_name = "N", value_parser = whole::<usize>, allow_negative_numbers = true, help_heading = "Engine")]
    pub context: Option<usize>,
}

/// How tokens are chosen.
#[derive(Debug, Flags)]
pub struct SamplingFlags {
    /// Always take the most probable token
    #[arg(long, help_heading = "Sampling")]
    pub greedy: bool,
    /// Flattens (above 1) or sharpens (below 1) the distribution; 0 is --greedy
    #[arg(
        long,
        value_name = "X",
        conflicts_with = "greedy",
        allow_negative_numbers = true,
        help_heading = "Sampling"
    )]
    pub temperature: Option<f32>,
    /// Only the K most probable tokens; 0 for all
    #[arg(long, value_name = "K", value_parser = whole::<usize>, allow_negative_numbers = true, help_heading = "Sampling")]
    pub top_k: Option<usize>,
    /// Only the most probable tokens that together reach this probability
    #[arg(long, value_name = "P", allow_negative_numbers = true, help_heading = "Sampling")]
    pub top_p: Option<f32>,
    /// Only tokens at least this probable relative to the most probable one
    #[arg(long, value_name = "P", allow_negative_numbers = true, help_heading = "Sampling")]
    pub min_p: Option<f32>,
    /// Weakens tokens that occurred before, above 1
    #[arg(long, value_name = "X", allow_negative_numbers = true, help_heading = "Sampling")]
    pub repetition_penalty: Option<f32>,
    /// Subtracted from the logits of tokens that the answer has
    #[arg(long, value_name = "X", allow_negative_numbers = true, help_heading = "Sampling")]
    pub presence_penalty: Option<f32>,
    /// Subtracted from the logits of tokens that the answer has, for each occurrence
    #[arg(long, value_name = "X", allow_negative_numbers = true, help_heading = "Sampling")]
    pub frequency_penalty: Option<f32>,
    /// Added to the logits of single tokens, e.g. 17=-inf,23=1.5; may be repeated
    #[arg(
        long,
        value_name = "ID=X",
        value_delimiter = ',',
        allow_hyphen_values = true,
        help_heading = "Sampling"
    )]
    pub logit_bias: Vec<Bias>,
    /// The same seed gives the same answer [default: another one every time]
    #[arg(long, value_name = "N", value_parser = whole::<u64>, allow_negative_numbers = true, help_heading = "Sampling")]
    pub seed: Option<u64>,
}

/// `strata run`.
#[derive(Debug, Flags)]
pub struct RunArgs {
    /// Model file (any one shard of a split model)
    pub model: PathBuf,
    /// What to answer; `-` reads standard input; a chat when left out
    pub prompt: Option<String>,
    /// Continue the prompt as it is, without the model's chat template
    #[arg(long, requires = "prompt", conflicts_with_all = ["system", "think"])]
    pub raw: bool,
    /// System message: what the model should know or be before it answers
    #[arg(long, value_name = "TEXT")]
    pub system: Option<String>,
    /// Whether the model thinks before it answers [default: as its chat template does]
    #[arg(long, value_name = "on|off")]
    pub think: Option<Switch>,
    /// Tokens of an answer at most [default: until the context is full]
    #[arg(long, short = 'n', value_name = "N", value_parser = whole::<usize>, allow_negative_numbers = true)]
    pub max_tokens: Option<usize>,
    /// Print one JSON object when the answer is complete
    #[arg(long, requires = "prompt")]
    pub json: bool,
    /// Say where the time of the prompt and of the answer went, on standard error
    #[arg(long, conflicts_with = "json")]
    pub prompt_timing: bool,
    #[command(flatten)]
    pub sampling: SamplingFlags,
    #[command(flatten)]
    pub context: ContextFlag,
    #[command(flatten)]
    pub engine: EngineFlags,
}

/// `strata logits`.
#[derive(Debug, Flags)]
pub struct LogitsArgs {
    /// Model file (any one shard of a split model)
    pub model: PathBuf,
    /// Token ids, separated by commas or white space; @FILE reads them from a file
    #[arg(long, value_name = "IDS|@FILE", allow_hyphen_values = true)]
    pub ids: String,
    /// The .npy file to write
    #[arg(long, value_name = "FILE")]
    pub out: PathBuf,
    /// The draft (MTP) block's logits instead of the model's
    #[arg(long)]
    pub mtp: bool,
    #[command(flatten)]
    pub engine: EngineFlags,
}

/// `strata eval`.
#[derive(Debug, Flags)]
pub struct EvalArgs {
    /// Model file (any one shard of a split model)
    pub model: PathBuf,
    /// The text, UTF-8; `-` reads standard input
    pub text: PathBuf,
    /// Tokens of a window, whatever the configuration says of --context elsewhere
    #[arg(long, value_name = "N", default_value_t = 512, value_parser = whole::<usize>, allow_negative_numbers = true)]
    pub context: usize,
    /// Windows to use at most [default: all]
    #[arg(long, value_name = "N", value_parser = whole::<usize>, allow_negative_numbers = true)]
    pub windows: Option<usize>,
    /// Another model with the same vocabulary to compare with
    #[arg(long, value_name = "MODEL2")]
    pub against: Option<PathBuf>,
    /// Print one JSON object
    #[arg(long)]
    pub json: bool,
    #[command(flatten)]
    pub engine: EngineFlags,
}

/// `strata bench`.
#[derive(Debug, Flags)]
pub struct BenchArgs {
    /// Model file (any one shard of a split model)
    pub model: PathBuf,
    /// Lengths of prompts to read
    #[arg(long, value_name = "N,N,..", value_delimiter = ',', default_value = "128,512", value_parser = whole::<usize>, allow_hyphen_values = true)]
    pub prompt: Vec<usize>,
    /// Tokens to answer, one by one; 0 for none
    #[arg(long = "gen", value_name = "N", default_value_t = 64, value_parser = whole::<usize>, allow_negative_numbers = true)]
    pub generate: usize,
    /// Tokens that a sequence holds before it answers
    #[arg(long, value_name = "N,N,..", value_delimiter = ',', default_value = "1", value_parser = whole::<usize>, allow_hyphen_values = true)]
    pub depth: Vec<usize>,
    /// Sequences that answer together
    #[arg(long, value_name = "N,N,..", value_delimiter = ',', default_value = "1", value_parser = whole::<usize>, allow_hyphen_values = true)]
    pub sequences: Vec<usize>,
    /// Repetitions
    #[arg(long, value_name = "R", default_value_t = 5, value_parser = whole::<usize>, allow_negative_numbers = true)]
    pub reps: usize,
    /// Print one JSON object
    #[arg(long)]
    pub json: bool,
    #[command(flatten)]
    pub engine: EngineFlags,
}

/// `strata inspect`.
#[derive(Debug, Flags)]
pub struct InspectArgs {
    /// GGUF file (any one shard of a split model)
    pub model: PathBuf,
    /// List every tensor
    #[arg(long)]
    pub tensors: bool,
    /// Print one JSON object, with all metadata in full
    #[arg(long)]
    pub json: bool,
}

/// `strata plan`.
#[derive(Debug, Flags)]
pub struct PlanArgs {
    /// Model file (any one shard of a split model)
    pub model: PathBuf,
    /// Plan for the draft (MTP) block too
    #[arg(long)]
    pub mtp: bool,
    /// Print one JSON object
    #[arg(long)]
    pub json: bool,
    #[command(flatten)]
    pub context: ContextFlag,
    #[command(flatten)]
    pub engine: EngineFlags,
}

/// `strata synth`.
#[derive(Debug, Flags)]
pub struct SynthArgs {
    /// The file to write; split models get -00001-of-0000N before the ending
    pub out: PathBuf,
    /// tiny, pebble, flash-next, or a JSON file with sizes of your own
    #[arg(long, value_name = "NAME|FILE.json")]
    pub geometry: String,
    /// Mix of formats as published files have them (ud-iq3_xxs, iq3_s, q2_0, ud-q4_k_xl, ..), or one format (f32, q4_k, ..)
    #[arg(long, value_name = "MIX")]
    pub formats: String,
    /// Decides every weight
    #[arg(long, value_name = "N", default_value_t = 0, value_parser = whole::<u64>, allow_negative_numbers = true)]
    pub seed: u64,
    /// About how many rows the n-gram table gets [default: as many as the real model's]
    #[arg(long, value_name = "N", value_parser = whole::<u64>, allow_negative_numbers = true)]
    pub ngram_rows: Option<u64>,
    /// Let expert use follow Zipf's law with this exponent [default: even use]
    #[arg(long, value_name = "ALPHA", allow_negative_numbers = true)]
    pub router_skew: Option<f64>,
    /// Add the draft (MTP) block
    #[arg(long)]
    pub mtp: bool,
    /// Split into files of at most this size, e.g. 500M or 20G
    #[arg(long, value_name = "SIZE", value_parser = crate::config::size, allow_negative_numbers = true)]
    pub split: Option<u64>,
    /// Replace files that exist
    #[arg(long)]
    pub force: bool,
    /// Threads that compute [default: one per physical core]
    #[arg(long, value_name = "N", value_parser = whole::<usize>, allow_negative_numbers = true)]
    pub threads: Option<usize>,
}

#[derive(Debug, Flags)]
pub struct DevicesArgs {
    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

/// `strata selftest`.
#[derive(Debug, Flags)]
pub struct SelftestArgs {
    /// Which GPU: cuda:N, or auto for the first [default: auto]
    #[arg(long, value_name = "DEVICE", help_heading = "Engine")]
    pub device: Option<Device>,
    /// Print one JSON object
    #[arg(long)]
    pub json: bool,
}

impl ValueEnum for Switch {
    fn value_variants<'a>() -> &'a [Self] {
        &[Switch::On, Switch::Off]
    }

    fn to_possible_value(&self) -> Option<clap::builder::PossibleValue> {
        Some(self.name().into())
    }
}

impl ValueEnum for Level {
    fn value_variants<'a>() -> &'a [Self] {
        &Level::ALL
    }

    fn to_possible_value(&self) -> Option<clap::builder::PossibleValue> {
        Some(self.name().into())
    }
}

impl Args {
    /// The settings that the flags make; what was left out is left open.
    pub fn settings(&self) -> Settings {
        let mut settings = Settings { log: self.common.log, ..Settings::default() };
        settings.quiet = self.common.quiet.then_some(Switch::On);
        match &self.command {
            Command::Run(run) => {
                run.engine.settle(&mut settings);
                run.sampling.settle(&mut settings);
                settings.context = run.context.context;
                settings.system = run.system.clone();
                settings.think = run.think;
                settings.max_tokens = run.max_tokens;
            }
            Command::Logits(logits) => logits.engine.settle(&mut settings),
            Command::Eval(eval) => eval.engine.settle(&mut settings),
            Command::Bench(bench) => bench.engine.settle(&mut settings),
            Command::Plan(plan) => {
                plan.engine.settle(&mut settings);
                settings.context = plan.context.context;
            }
            Command::Synth(synth) => settings.threads = synth.threads,
            Command::Selftest(selftest) => settings.device = selftest.device,
            Command::Inspect(_) | Command::Devices(_) => {}
        }
        settings
    }
}

impl EngineFlags {
    fn settle(&self, settings: &mut Settings) {
        settings.threads = self.threads;
        settings.window = self.window;
        settings.kv = self.kv;
        settings.experts = self.experts;
        settings.resident_budget = self.resident_budget;
        settings.device = self.device;
        settings.ram_limit = self.ram_limit;
        settings.vram_limit = self.vram_limit;
        settings.vram_reserve = self.vram_reserve;
        settings.expert_cache = self.expert_cache;
        settings.cpu_experts = self.cpu_experts;
        settings.ranking = self.ranking;
        settings.stagers = self.stagers;
        settings.ring = self.ring;
        settings.isa = self.isa.clone();
    }
}

impl SamplingFlags {
    fn settle(&self, settings: &mut Settings) {
        settings.greedy = self.greedy.then_some(Switch::On);
        settings.temperature = self.temperature;
        settings.top_k = self.top_k;
        settings.top_p = self.top_p;
        settings.min_p = self.min_p;
        settings.repetition_penalty = self.repetition_penalty;
        settings.presence_penalty = self.presence_penalty;
        settings.frequency_penalty = self.frequency_penalty;
        settings.logit_bias = (!self.logit_bias.is_empty())
            .then(|| self.logit_bias.iter().map(|bias| (bias.token, bias.bias)).collect());
        settings.seed = self.seed;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    /// Oracle: the help, which promises a flag for every key of the file.
    #[test]
    fn every_setting_has_its_flag() {
        let command = Args::command();
        let run = command.find_subcommand("run").unwrap();
        let long: Vec<_> =
            command.get_arguments().chain(run.get_arguments()).filter_map(|arg| arg.get_long()).collect();
        for key in Settings::KEYS {
            assert!(long.contains(&&flag(key)[2..]), "{key}");
        }
    }

    /// Oracle: each number below is one, so it is the value that is judged, not taken for a flag.
    #[test]
    fn numbers_may_be_negative() {
        let read =
            |args: &str| Args::try_parse_from(format!("strata {args}").split(' ')).map_err(|e| e.to_string());
        for flag in
            ["temperature", "top-p", "min-p", "repetition-penalty", "presence-penalty", "frequency-penalty"]
        {
            read(&format!("run m x --{flag} -1.5")).unwrap();
        }
        for flag in ["top-k", "seed", "threads", "window", "context", "max-tokens"] {
            let why = read(&format!("run m x --{flag} -1")).unwrap_err();
            assert!(why.contains("whole number, not negative"), "{why}");
        }
        assert!(read("run m x --logit-bias -1=2").unwrap_err().contains("`-1=2` is no token id"));
        assert!(read("bench m --prompt -1,2").unwrap_err().contains("not negative"));
        read("logits m --ids -1,2 --out o").unwrap();
        read("synth o --geometry tiny --formats f32 --router-skew -1").unwrap();
        assert!(read("synth o --geometry tiny --formats f32 --split -5").unwrap_err().contains("500M"));
    }
}
