//! The policy over synthetic traces, beside well-known ones. The figures are those of `cargo bench -p strata-residency --bench
//! policy`; here are the relations between them that must hold, with room for other seeds.
#![cfg(not(loom))]

mod policies;
mod scenes;
mod traces;

use std::collections::BTreeSet;

use policies::{COSTS, Setup, belady, fixed, lfu, lru, strata};
use scenes::Scene;
use strata_residency::{Caution, Heat, Pace, Ranking, Slots, Swap, plan_moves};
use traces::{BYTES, Event, LAYERS, roster, scan};

const ROOM: usize = 128;

/// Oracle: what was published of the real model: the 64 experts per layer used last serve 67 % of the uses, 128 serve 81 %.
#[test]
fn the_trace_is_skewed_as_published() {
    let events = scenes::many_topics(1500);
    for (room, served) in [(64, 67.0), (128, 81.0)] {
        let rate = lru(&events, room).rate(500..1500);
        assert!((rate - served).abs() < 4.0, "the last {room} serve {rate} %");
    }
}

/// Oracle: LRU and LFU, which load all that they miss; the best fixed choice in hindsight; Belady's optimum. In one topic the policy
/// is nearly the best fixed choice and far above LRU, and moves next to nothing.
#[test]
fn in_one_topic_it_finds_the_best_choice() {
    let (events, then) = (scenes::one_topic(1500), 500..1500);
    let (ours, lru) = (strata(&events, ROOM, Setup::default()), lru(&events, ROOM));
    let rate = ours.rate(then.clone());
    assert!(rate > lru.rate(then.clone()) + 4.0, "{rate}");
    assert!(rate > lfu(&events, ROOM).rate(then.clone()) - 1.0, "{rate}");
    assert!(rate > fixed(&events, ROOM).rate(then.clone()) - 2.0, "{rate}");
    assert!(rate < belady(&events, ROOM).rate(then.clone()), "{rate}");
    assert!(ours.loads(then.clone()) < 0.05 && lru.loads(then.clone()) > 1.0);
}

/// Oracle: as above. Where topics change, the policy follows: above LRU and LFU, near the best fixed choice in hindsight, with a tenth
/// of LRU's loads.
#[test]
fn it_follows_topics_with_few_moves() {
    let (events, then) = (scenes::many_topics(1500), 500..1500);
    for room in [64, 128] {
        let (ours, lru) = (strata(&events, room, Setup::default()), lru(&events, room));
        let rate = ours.rate(then.clone());
        assert!(rate > lru.rate(then.clone()), "{rate} at {room}");
        assert!(rate > lfu(&events, room).rate(then.clone()), "{rate} at {room}");
        assert!(rate > fixed(&events, room).rate(then.clone()) - 2.0, "{rate} at {room}");
        assert!(ours.loads(then.clone()) < lru.loads(then.clone()) / 10.0);
    }
}

/// Oracle: the rate in the old topic. A new one costs much at first, and after 128 steps little.
#[test]
fn it_recovers_from_a_new_topic() {
    let Scene { events, before, after } = scenes::switch();
    let ours = strata(&events, ROOM, Setup::default());
    let (known, start) = (ours.rate(before), after.start);
    let (first, later) = (ours.rate(start..start + 16), ours.rate(start + 128..start + 256));
    assert!(known - first > 10.0, "{known}, then {first}");
    assert!(known - later < 4.0, "{known}, later {later}");
}

/// Oracle: the rate before, and what LRU loses. Neither a pass through all experts nor a long prompt drives out what decoding
/// needs.
#[test]
fn scans_and_prompts_leave_the_decode_set() {
    for (name, scene) in
        [("scan", scenes::scanned()), ("prompt", scenes::prompt()), ("other prompt", scenes::other_prompt())]
    {
        let Scene { events, before, after } = scene;
        let soon = after.start..after.start + 32;
        let loses = |outcome: policies::Outcome| outcome.rate(before.clone()) - outcome.rate(soon.clone());
        let (ours, theirs) = (loses(strata(&events, ROOM, Setup::default())), loses(lru(&events, ROOM)));
        assert!(ours < 3.0 && ours < theirs / 3.0, "{name}: loses {ours}, LRU {theirs}");
    }
}

/// Oracle: the same replay without the prompt's share. A prompt that the answer is like helps.
#[test]
fn an_answer_profits_from_its_prompt() {
    let Scene { events, after, .. } = scenes::prompt_and_answer();
    let rate = |prompt| {
        let setup = Setup { pace: Pace { prompt, ..Pace::default() }, ..Setup::default() };
        strata(&events, ROOM, setup).rate(after.start..after.start + 32)
    };
    let (with, without) = (rate(Pace::default().prompt), rate(0));
    assert!(with > without + 2.0, "{with} and {without}");
}

/// Oracle: counting. Never more than the link has time for; nothing once nothing is new; a scan without end, from which LRU gets
/// no hit at all, moves nothing.
#[test]
fn moves_end_and_are_bounded() {
    let some: Vec<Event> = scenes::one_topic(8);
    let repeated: Vec<Event> = some.iter().cycle().take(800).cloned().collect();
    let ours = strata(&repeated, 64, Setup::default());
    assert!(ours.loads.iter().all(|&loads| loads <= 2 * u32::from(LAYERS)));
    assert!(ours.loads(0..100) > 0.0);
    assert_eq!(ours.loads(400..800), 0.0);
    assert_eq!(ours.rate(400..800), 100.0);

    let events = scan(800);
    let ours = strata(&events, ROOM, Setup::default());
    assert!((ours.rate(100..800) - 25.0).abs() < 2.0, "{}", ours.rate(100..800));
    assert!(ours.loads(400..800) < 0.05, "{}", ours.loads(400..800));
    assert!(lru(&events, ROOM).rate(100..800) < 1.0);

    // A link without time moves nothing, one with little moves little.
    let events = scenes::one_topic(300);
    assert_eq!(strata(&events, ROOM, Setup { idle: 0.0, ..Setup::default() }).loads(0..300), 0.0);
    let slow = strata(&events, ROOM, Setup { idle: 0.05, ..Setup::default() });
    assert!(slow.loads(0..300) > 0.0 && slow.loads(0..300) <= 0.05 + 0.01);
}

/// Mutant: a plan that swaps for any difference. Where all experts are used alike it never rests, and gains nothing.
#[test]
fn without_hysteresis_it_churns() {
    let (events, then) = (scenes::uniform(1000), 500..1000);
    let careless = Caution { margin: 0, doubt: 0, horizon: u32::MAX };
    let ours = strata(&events, ROOM, Setup { idle: 10.0, ..Setup::default() });
    let mutant = strata(&events, ROOM, Setup { caution: careless, idle: 10.0, ..Setup::default() });
    let (few, many) = (ours.loads(then.clone()), mutant.loads(then.clone()));
    assert!(many > 1.5 && few < many / 4.0, "{few} and {many}");
    assert!(ours.rate(then.clone()) > mutant.rate(then) - 1.0);
}

/// Mutant: a prompt that counts as if its tokens were steps. It drives out what decoding needs, where the link has the time.
#[test]
fn prompts_that_count_fully_drive_out_the_decode_set() {
    let Scene { events, before, after } = scenes::other_prompt();
    let loses = |prompt| {
        let setup = Setup { pace: Pace { prompt, ..Pace::default() }, idle: 1000.0, ..Setup::default() };
        let outcome = strata(&events, ROOM, setup);
        outcome.rate(before.clone()) - outcome.rate(after.start..after.start + 32)
    };
    let (ours, mutant) = (loses(Pace::default().prompt), loses(2048));
    assert!(ours < 2.0 && mutant > ours + 1.5, "loses {ours}, mutant {mutant}");
}

/// Oracle: the same start without a file. What was learned is of use at the next start, from the first step on.
#[test]
fn a_ranking_helps_at_the_start() {
    let (events, roster) = (scenes::many_topics(1200), roster());
    let mut heat = Heat::new(&roster, Pace::default());
    for event in &events[..900] {
        if let Event::Step(chosen) = event {
            heat.decode(&roster, chosen.iter().copied());
        }
    }
    let ranking = Ranking::of(&heat, 0);
    let hits = |heat: &Heat| {
        let mut slots = Slots::cut(roster.clone(), ROOM as u64 * u64::from(LAYERS) * BYTES, usize::MAX);
        for load in slots.first_loads(heat) {
            slots.begin(load).unwrap();
            slots.land(load.slot).unwrap();
        }
        let mut hits = 0;
        for event in &events[900..] {
            let Event::Step(chosen) = event else { continue };
            hits += chosen.iter().filter(|id| slots.resident(**id).is_some()).count();
        }
        // With nothing but the ranking there is no reason to move.
        assert_eq!(
            plan_moves(&slots, heat, (&COSTS, Swap::Evict), Caution::default(), u64::MAX, &BTreeSet::new()),
            []
        );
        hits
    };
    let fresh = Heat::new(&roster, Pace::default());
    let mut learned = fresh.clone();
    learned.recall(&ranking);
    let (with, without) = (hits(&learned), hits(&fresh));
    assert!(with > 2 * without, "{with} and {without}");
}

/// Oracle: the same replay again.
#[test]
fn replays_are_reproducible() {
    let Scene { events, .. } = scenes::other_prompt();
    assert!(strata(&events, 64, Setup::default()) == strata(&events, 64, Setup::default()));
}
