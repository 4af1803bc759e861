//! `strata plan`: what would be put where, before anything is allocated.

use serde_json::json;
use strata_plan::{Bytes, Place};

use super::counted;
use crate::args::PlanArgs;
use crate::config::Config;
use crate::failure::Failure;
use crate::output::{print, print_json};
use crate::wiring::{Asked, Machine};

pub fn run(args: &PlanArgs, config: &Config, machine: &Machine) -> Result<(), Failure> {
    let model = machine.open(&args.model)?;
    let mut config = config.clone();
    config.engine.draft = args.mtp;
    let asked = Asked::setting(&config);
    let planned = machine.plan(&model, &config, &asked)?;
    let (plan, spec, limits) = (&planned.plan, &planned.spec, machine.limits());
    let fits = planned.check(limits);
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
                "device": plan.bytes(Place::Device),
            },
            "limits": limits,
            "device_limits": planned.device,
            "notes": machine.notes(),
            "fits": fits.is_ok(),
            "crowded_out": crowded_out,
        }))?;
    } else {
        let kv = spec.kv.name();
        let mut out = format!(
            "context {}, window {}, keys and values {kv}, {}, {}\n\n{}\n",
            counted(spec.context as u64, "token"),
            counted(spec.window as u64, "token"),
            counted(machine.threads() as u64, "thread"),
            config.isa,
            plan
        );
        if fits.is_ok() {
            for (limits, place) in [(Some(limits), Place::Heap), (planned.device.as_ref(), Place::Device)] {
                let Some(limits) = limits else { continue };
                let (there, taken) = (Bytes(limits.available), Bytes(plan.bytes(place)));
                out += &format!("fits: {} has {there} to give, {taken} are taken at start\n", limits.source);
            }
        }
        machine.notes().iter().for_each(|note| out += &format!("note: {note}\n"));
        if crowded_out > 0 {
            out += &format!(
                "{} of the mapped file don't fit beside that and will be read from disk again and again\n",
                Bytes(crowded_out)
            );
        }
        print(&out)?;
    }
    fits.map_err(|error| asked.too_large(&error))
}
