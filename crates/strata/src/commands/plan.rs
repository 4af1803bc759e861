//! `strata plan`: what would be put where, before anything is allocated.

use std::sync::Arc;

use serde_json::json;
use strata_plan::Place;

use crate::args::PlanArgs;
use crate::config::Config;
use crate::failure::Failure;
use crate::output::{print, print_json};
use crate::wiring::{Machine, open};

pub fn run(args: &PlanArgs, config: &Config, machine: &Machine) -> Result<(), Failure> {
    let model = Arc::new(open(&args.model)?);
    let mut config = config.clone();
    config.engine.draft = args.mtp;
    let planned = machine.plan(&model, &config)?;
    let (plan, spec, limits) = (&planned.plan, &planned.spec, machine.limits());
    let fits = plan.check(limits);
    let crowded_out = plan.crowded_out(limits);
    if args.json {
        print_json(&json!({
            "model": args.model.to_string_lossy(),
            "config": {
                "context": spec.context,
                "window": spec.window,
                "kv": spec.kv,
                "sequences": spec.sequences,
                "checkpoints": spec.checkpoints,
                "experts": config.engine.experts,
                "draft": config.engine.draft,
                "threads": machine.threads(),
                "isa": config.isa.name(),
            },
            "plan": plan,
            "bytes": {
                "heap": plan.bytes(Place::Heap),
                "mapped": plan.bytes(Place::Mapped),
                "file": plan.bytes(Place::File),
            },
            "limits": limits,
            "fits": fits.is_ok(),
            "crowded_out": crowded_out,
        }))?;
    } else {
        let mib = |bytes: u64| bytes as f64 / (1 << 20) as f64;
        let kv = spec.kv.name();
        let mut out = format!(
            "context {} tokens, window {} tokens, keys and values {kv}, {} threads, {}\n\n{plan}\n",
            spec.context,
            spec.window,
            machine.threads(),
            config.isa
        );
        if fits.is_ok() {
            out += &format!(
                "fits: {} has {:.0} MiB to give, {:.1} MiB are taken at start\n",
                limits.source,
                mib(limits.available),
                mib(plan.bytes(Place::Heap))
            );
        }
        if crowded_out > 0 {
            out += &format!(
                "{:.0} MiB of the mapped file don't fit beside that and will be read from disk again and again\n",
                mib(crowded_out)
            );
        }
        print(&out)?;
    }
    Ok(fits?)
}
