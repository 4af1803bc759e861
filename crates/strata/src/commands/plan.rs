//! `strata plan`: what would be put where, before anything is allocated.

use serde_json::json;
use strata_engine::{BEYOND, Planned};
use strata_model::Model;
use strata_plan::{Bytes, Category, Place, Rates, Weights};

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
    let rates = machine.rates(&planned, &config);
    // What is read from a disk comes at a rate that isn't known.
    let weights = weights(&model, &planned).filter(|_| crowded_out == 0);
    let answer = weights.and_then(|weights| weights.answer(&rates));
    let prompt = weights.and_then(|weights| weights.prompt(&rates, spec.window));
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
            "rates": rates,
            "at_most": { "answer": answer, "prompt": prompt },
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
        if let Some(answer) = answer {
            out += &format!("{}\nan answer, its experts used evenly: {answer}\n", as_text(&rates));
        }
        if let Some(prompt) = prompt {
            out += &format!("a prompt of {}: {prompt}\n", counted(spec.window as u64, "token"));
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

/// Bytes that caches may hold.
const LARGEST_CACHE: u64 = 512 << 20;

/// Rates in a line.
fn as_text(rates: &Rates) -> String {
    let Rates { host, device, link } = *rates;
    let known = [("host memory, measured now,", host), ("the device's memory", device), ("the link", link)];
    let known = known.into_iter().filter_map(|(what, rate)| Some(format!("{what} {:.0} GB/s", rate? / 1e9)));
    format!("rates: {}", known.collect::<Vec<_>>().join(", "))
}

/// What tokens read of a model as it was planned. Nothing where some experts are read from files, or caches may hold all.
fn weights(model: &Model, planned: &Planned) -> Option<Weights> {
    let sum = |category: Category, place: Place| {
        let items = planned.plan.items().iter();
        items
            .filter(|item| (item.category, item.place) == (category, place))
            .map(|item| item.bytes)
            .sum::<u64>()
    };
    let all = |category| [Place::Heap, Place::Mapped, Place::Device].map(|place| sum(category, place));
    let [heap, mapped, _] = all(Category::Experts);
    // Those of a device's slots have no home but the file.
    let inside = sum(Category::Experts, Place::File);
    let read = planned.plan.items().iter().any(|item| item.name == BEYOND && item.bytes > 0);
    // A row of the embedding is read, unless its table is the head as well.
    let trunk = &model.trunk;
    let embedding = if trunk.output == trunk.token_embd { 0 } else { trunk.token_embd.bytes() as u64 };
    let dense = all(Category::Weights).iter().sum::<u64>().saturating_sub(embedding);
    let moe = planned.spec.shape.moe;
    let weights = Weights { dense, inside, beside: heap + mapped, experts: moe.experts, used: moe.used };
    (!read && dense + heap + mapped + inside > LARGEST_CACHE).then_some(weights)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Oracle: by hand.
    #[test]
    fn rates_are_told() {
        let rates = Rates { host: Some(28.4e9), device: None, link: Some(54.4e9) };
        assert_eq!(as_text(&rates), "rates: host memory, measured now, 28 GB/s, the link 54 GB/s");
    }
}
