//! `strata synth`: a random-weight model of a real geometry, to try a machine or an engine with.

use strata_plan::Bytes;
use strata_synth::{Geometry, Mix, Options, SynthError};

use super::counted;
use crate::args::SynthArgs;
use crate::config::Config;
use crate::failure::{Failure, say};
use crate::interrupt::{self, Deferred};
use crate::progress;

pub fn run(args: &SynthArgs, config: &Config) -> Result<(), Failure> {
    let geometry = Geometry::named(&args.geometry).map_err(refused)?;
    let formats = args.formats.parse::<Mix>().map_err(refused)?;
    let options = Options {
        ngram_rows: args.ngram_rows,
        router_skew: args.router_skew,
        draft: args.mtp,
        shard_bytes: args.split,
        threads: config.threads,
        overwrite: args.force,
        ..Options::new(geometry, formats, args.seed)
    };
    interrupt::defer(Deferred::All);
    let bar = progress::bytes(config.quiet, 0, "writing");
    let mut observe = |written: strata_synth::Progress| {
        bar.set_length(written.total);
        bar.set_position(written.written);
    };
    let made = strata_synth::write(&options, &args.out, &mut observe, &interrupt::flag());
    bar.finish_and_clear();
    match made {
        // Whatever a signal has led to.
        Err(_) if interrupt::raised() => Err(Failure::Interrupted),
        Err(error) => Err(refused(error)),
        Ok(made) => {
            if !config.quiet {
                let files: Vec<String> = made.files.iter().map(|file| file.display().to_string()).collect();
                let tensors = counted(made.tensors as u64, "tensor");
                say(format_args!("{}: {tensors}, {}", files.join(", "), Bytes(made.bytes)));
            }
            Ok(())
        }
    }
}

/// Tells flags that make no sense from work that failed.
fn refused(error: SynthError) -> Failure {
    match error {
        SynthError::NoSuchGeometry(_) => Failure::usage(format!("--geometry: {error}")),
        SynthError::NoSuchMix { .. } => Failure::usage(format!("--formats: {error}")),
        SynthError::Skew(_) => Failure::usage(format!("--router-skew: {error}")),
        SynthError::ShardSize => Failure::usage(format!("--split: {error}")),
        SynthError::TableRows { .. } | SynthError::NoTable(_) => Failure::usage(error.to_string()),
        SynthError::Gguf(strata_gguf::Error::Exists { file }) => Failure::failed(format!(
            "{file}: already exists; remove it, choose another name, or give --force to replace it"
        )),
        error => error.into(),
    }
}
