//! The `strata` binary: flags, typed configuration, wiring.
//!
//! What a command line means is decided in three steps, each a value that the next takes: [`args`] (what was typed),
//! [`config`] (with the file and the environment: what it means), [`commands`] (doing it, with the rooms that [`wiring`]
//! fits together). [`failure`] is how all of it ends; the exit codes stand there.

mod args;
mod commands;
mod config;
mod costs;
mod delivery;
mod failure;
mod interrupt;
mod output;
mod progress;
mod wiring;

use std::io::IsTerminal;
use std::process::ExitCode;

use clap::Parser;
use tracing_subscriber::filter::LevelFilter;

use args::{Args, Command};
use config::{Config, Environment, Level};
use failure::{Failure, say, warn};
use wiring::{Machine, on_driver};

fn main() -> ExitCode {
    match run(Args::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => {
            if !matches!(failure, Failure::Interrupted | Failure::PipeClosed) {
                say(&failure);
            }
            ExitCode::from(failure.code())
        }
    }
}

fn run(args: Args) -> Result<(), Failure> {
    let environment = Environment::read();
    environment.unknown().for_each(|name| warn(format_args!("the variable {name} means nothing here")));
    let config = Config::resolve(args.settings(), args.common.config.as_deref(), &environment)?;
    log(config.log, &environment);
    interrupt::catch()?;
    strata_gguf::sigbus::install()
        .map_err(|error| Failure::failed(format!("the system refuses a handler for lost files: {error}")))?;
    let machine = || Machine::read(&config);
    match args.command {
        Command::Devices(args) => commands::devices::run(&args, &machine()?),
        Command::Selftest(args) => on_driver(machine()?, move |_| commands::selftest::run(&args, &config)),
        Command::Inspect(args) => commands::inspect::run(&args),
        Command::Synth(args) => commands::synth::run(&args, &config),
        Command::Plan(args) => {
            on_driver(machine()?, move |machine| commands::plan::run(&args, &config, machine))
        }
        Command::Run(args) => {
            on_driver(machine()?, move |machine| commands::run::run(&args, &config, &environment, machine))
        }
        Command::Logits(args) => {
            on_driver(machine()?, move |machine| commands::logits::run(&args, &config, machine))
        }
        Command::Eval(args) => {
            on_driver(machine()?, move |machine| commands::eval::run(&args, &config, machine))
        }
        Command::Bench(args) => {
            on_driver(machine()?, move |machine| commands::bench::run(&args, &config, machine))
        }
    }
}

/// Sends what the libraries have to say to standard error.
fn log(level: Level, environment: &Environment) {
    let filter = match level {
        Level::Off => LevelFilter::OFF,
        Level::Error => LevelFilter::ERROR,
        Level::Warn => LevelFilter::WARN,
        Level::Info => LevelFilter::INFO,
        Level::Debug => LevelFilter::DEBUG,
        Level::Trace => LevelFilter::TRACE,
    };
    tracing_subscriber::fmt()
        .with_max_level(filter)
        .with_writer(std::io::stderr)
        .with_ansi(std::io::stderr().is_terminal() && environment.allows_style())
        .without_time()
        .with_target(false)
        .init();
}
