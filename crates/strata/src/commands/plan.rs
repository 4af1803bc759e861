//! `strata plan`: what would be put where, before anything is allocated.

use std::sync::Arc;

use serde_json::json;
use strata_plan::{Category, Place, Plan};

use super::counted;
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
            table(plan)
        );
        if fits.is_ok() {
            out += &format!(
                "fits: {} has {:.0} MiB to give, {:.1} MiB are taken at start\n",
                limits.source,
                mib(limits.available),
                mib(plan.bytes(Place::Heap))
            );
        }
        machine.notes().iter().for_each(|note| out += &format!("note: {note}\n"));
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

fn mib(bytes: u64) -> f64 {
    bytes as f64 / (1 << 20) as f64
}

/// What the layers have alike, without their numbers: `layer 3 keys` and `experts, layer 3` are `keys` and `experts`.
fn without_layer(name: &str) -> String {
    let number = |word: &str| !word.is_empty() && word.bytes().all(|b| b.is_ascii_digit());
    let words: Vec<&str> = name.split(' ').collect();
    let mut kept: Vec<&str> = Vec::new();
    let mut at = 0;
    while at < words.len() {
        if words[at] == "layer" && words.get(at + 1).is_some_and(|next| number(next)) {
            at += 2;
        } else {
            kept.push(words[at]);
            at += 1;
        }
    }
    kept.join(" ").trim_end_matches(',').to_owned()
}

/// A line for each kind of thing, the layers' added up, and the totals. `--json` has every single item.
fn table(plan: &Plan) -> String {
    let mut rows: Vec<(Category, Place, String, usize, u64)> = Vec::new();
    for item in plan.items().iter().filter(|item| item.bytes > 0) {
        let name = without_layer(&item.name);
        let same = |row: &&mut (Category, Place, String, usize, u64)| {
            row.0 == item.category && row.1 == item.place && row.2 == name
        };
        match rows.iter_mut().find(same) {
            Some(row) => (row.3, row.4) = (row.3 + 1, row.4.saturating_add(item.bytes)),
            None => rows.push((item.category, item.place, name, 1, item.bytes)),
        }
    }
    let width = rows.iter().map(|row| row.2.chars().count()).max().unwrap_or(0).max(4);
    let mut out = format!("{:<10} {:<width$} {:>6} {:<6} {:>12}\n", "for", "what", "pieces", "place", "MiB");
    rows.sort_by_key(|row| row.0);
    for (category, place, name, pieces, bytes) in &rows {
        let (category, place) = (category.name(), place.name());
        out += &format!("{category:<10} {name:<width$} {pieces:>6} {place:<6} {:>12.2}\n", mib(*bytes));
    }
    for place in Place::ALL.into_iter().filter(|&place| plan.bytes(place) > 0) {
        let bytes = mib(plan.bytes(place));
        out += &format!("{:<10} {:<width$} {:>6} {:<6} {bytes:>12.2}\n", "total", "", "", place.name());
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Oracle: the names as backends and engine write them.
    #[test]
    fn layers_are_added_up() {
        assert_eq!(without_layer("layer 31 gdn state"), "gdn state");
        assert_eq!(without_layer("experts, layer 7"), "experts");
        assert_eq!(without_layer("layer output"), "layer output");
        let mut plan = Plan::new();
        plan.heap(Category::Cache, "layer 3 keys", 1 << 20);
        plan.heap(Category::Cache, "layer 7 keys", 1 << 20);
        plan.heap(Category::Cache, "layer 8 keys", 0);
        plan.item(Category::Experts, "experts, layer 0", Place::Mapped, 3 << 20);
        let text = table(&plan);
        let lines: Vec<Vec<&str>> = text.lines().map(|line| line.split_whitespace().collect()).collect();
        assert_eq!(lines[1], ["experts", "experts", "1", "mapped", "3.00"]);
        assert_eq!(lines[2], ["cache", "keys", "2", "heap", "2.00"]);
        assert_eq!(lines[3], ["total", "heap", "2.00"]);
        assert_eq!(lines.len(), 5);
    }
}
