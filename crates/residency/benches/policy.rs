//! Hit rates of the policy beside those of well-known ones, over synthetic traces, and what a plan costs.
//!
//! `cargo bench -p strata-residency --bench policy`

#[path = "../tests/replay/policies.rs"]
mod policies;
#[path = "../tests/replay/scenes.rs"]
mod scenes;
#[path = "../tests/replay/traces.rs"]
mod traces;

use std::collections::BTreeSet;
use std::time::Instant;

use policies::{COSTS, Setup, belady, fixed, lfu, lru, strata};
use scenes::Scene;
use strata_residency::{Caution, ExpertId, Heat, LayerExperts, Pace, Roster, Slots, Swap, plan_moves};
use traces::{Random, scan};

fn main() {
    println!("Hits of 100 uses in steps 1,000 to 3,000; loads per step and layer (512 experts, 10 used).\n");
    println!(
        "| trace | room | LRU | LFU | fixed, in hindsight | Strata | Belady | loads, LRU | loads, Strata |"
    );
    println!("|---|---|---|---|---|---|---|---|---|");
    let then = || 1000..3000;
    for (name, events) in [
        ("one topic", scenes::one_topic(3000)),
        ("topics of 128 steps", scenes::many_topics(3000)),
        ("uniform", scenes::uniform(3000)),
        ("scan without end", scan(3000)),
    ] {
        for room in [64, 128] {
            let (ours, theirs) = (strata(&events, room, Setup::default()), lru(&events, room));
            let [lfu, fixed, belady] = [lfu, fixed, belady].map(|of| of(&events, room).rate(then()));
            println!(
                "| {name} | {room} | {:.1} | {lfu:.1} | {fixed:.1} | {:.1} | {belady:.1} | {:.2} | {:.3} |",
                theirs.rate(then()),
                ours.rate(then()),
                theirs.loads(then()),
                ours.loads(then()),
            );
        }
    }

    println!("\nHits of 100 uses around a disturbance, room 128: Strata / LRU.\n");
    println!("| disturbance | before | steps 0 to 15 after | 16 to 31 | 32 to 63 |");
    println!("|---|---|---|---|---|");
    for (name, Scene { events, before, after }) in [
        ("a new topic", scenes::switch()),
        ("a pass through all experts", scenes::scanned()),
        ("a prompt of the topic", scenes::prompt()),
        ("a prompt of another topic", scenes::other_prompt()),
        ("a prompt of another topic, and its answer", scenes::prompt_and_answer()),
    ] {
        let (ours, theirs) = (strata(&events, 128, Setup::default()), lru(&events, 128));
        let at = |from, to| after.start + from..after.start + to;
        let cells = [before, at(0, 16), at(16, 32), at(32, 64)]
            .map(|steps| format!("{:.1} / {:.1}", ours.rate(steps.clone()), theirs.rate(steps)));
        println!("| {name} | {} |", cells.join(" | "));
    }
    time_of_a_plan();
}

/// All layers of the real geometry, a quarter of the experts resident, frequencies as uneven as random draws make them.
fn time_of_a_plan() {
    let roster = Roster::new((0..48).map(|_| LayerExperts { experts: 512, bytes: 2 << 20 }));
    let mut slots = Slots::cut(roster.clone(), roster.total_bytes() / 4, usize::MAX);
    let mut heat = Heat::new(&roster, Pace::default());
    for load in slots.first_loads(&heat) {
        if slots.begin(load).and_then(|()| slots.land(load.slot)).is_err() {
            println!("a first load was refused");
        }
    }
    let mut random = Random(1);
    let mut step = || -> Vec<ExpertId> {
        let draws = (0..480u16).map(|i| ExpertId {
            layer: i / 10,
            expert: (random.below(512) * random.below(512) / 512) as u16,
        });
        draws.collect()
    };
    (0..500).for_each(|_| heat.decode(&roster, step()));
    let median = |mut times: Vec<u128>| {
        times.sort_unstable();
        times[times.len() / 2] as f64 / 1000.0
    };
    let counted = (0..201).map(|_| {
        let chosen = step();
        let start = Instant::now();
        heat.decode(&roster, chosen);
        start.elapsed().as_nanos()
    });
    let counted = median(counted.collect());
    let planned = (0..201).map(|_| {
        let start = Instant::now();
        std::hint::black_box(plan_moves(
            &slots,
            &heat,
            (&COSTS, Swap::Exchange),
            Caution::default(),
            192 << 20,
            &BTreeSet::new(),
        ));
        start.elapsed().as_nanos()
    });
    println!(
        "\nCounting a step of 480 uses: {counted:.1} us; a plan over 24,576 experts: {:.1} us (medians of 201).",
        median(planned.collect())
    );
}
