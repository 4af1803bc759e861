//! Properties of the policy, whatever the model, the history and the moves.
#![cfg(not(loom))]

use std::collections::{BTreeMap, BTreeSet};

use proptest::prelude::*;
use strata_residency::{
    Caution, Content, Cost, Costs, ExpertId, Heat, LayerExperts, Move, Pace, Ranking, RankingError, Roster,
    STEP, SlotError, Slots, Swap, plan_moves,
};

const COSTS: Costs = Costs {
    miss: Cost { fixed_ns: 500, ps_per_byte: 25_000 },
    load: Cost { fixed_ns: 1000, ps_per_byte: 40_000 },
    evict: Cost { fixed_ns: 10, ps_per_byte: 0 },
};

fn id(layer: u16, expert: u16) -> ExpertId {
    ExpertId { layer, expert }
}

/// Layers of one to eight experts, of lengths that differ.
fn rosters() -> impl Strategy<Value = Roster> {
    let layer = (0u16..=8, prop::sample::select(vec![60u64, 100, 101, 250]));
    prop::collection::vec(layer, 1..6).prop_map(|layers| {
        Roster::new(layers.into_iter().map(|(experts, bytes)| LayerExperts { experts, bytes }))
    })
}

fn experts() -> impl Strategy<Value = Vec<ExpertId>> {
    prop::collection::vec((0u16..6, 0u16..8).prop_map(|(layer, expert)| id(layer, expert)), 0..12)
}

fn paces() -> impl Strategy<Value = Pace> {
    (1u16..40, 1u16..200, 0u16..40, 0u16..40).prop_map(|(half_life, prior_half_life, prior, prompt)| Pace {
        half_life,
        prior_half_life,
        prior,
        prompt,
    })
}

fn cautions() -> impl Strategy<Value = Caution> {
    (1u32..1000, 0u32..200, 0u32..30).prop_map(|(horizon, margin, doubt)| Caution { horizon, margin, doubt })
}

#[derive(Debug, Clone)]
enum Act {
    Step(Vec<ExpertId>),
    Prompt(u64, Vec<(ExpertId, u64)>),
    /// Plans with these experts held and so many idle bytes, and lands all or every other one.
    Plan(BTreeSet<ExpertId>, u64, bool, Swap),
}

fn acts() -> impl Strategy<Value = Vec<Act>> {
    let prompt = (1u64..5000, experts(), 0u64..6000);
    let act = prop_oneof![
        4 => experts().prop_map(Act::Step),
        1 => prompt.prop_map(|(tokens, ids, count)| Act::Prompt(tokens, ids.into_iter().map(|id| (id, count)).collect())),
        2 => (experts(), 0u64..1500, any::<bool>(), prop::sample::select(vec![Swap::Evict, Swap::Exchange]))
            .prop_map(|(held, idle, all, swap)| Act::Plan(held.into_iter().collect(), idle, all, swap)),
    ];
    prop::collection::vec(act, 0..60)
}

/// What is in the slots, as anyone can see.
fn contents(slots: &Slots) -> BTreeMap<usize, Content> {
    slots.ids().map(|slot| (slot.index(), slots.content(slot))).collect()
}

/// The invariants, by counting anew.
fn check(slots: &Slots, budget: u64) {
    let roster = slots.roster();
    assert!(slots.total_bytes() <= budget);
    let (mut seen, mut used) = (BTreeSet::new(), 0);
    let mut layers = vec![0; roster.layers().len()];
    for slot in slots.ids() {
        let (Content::Coming(expert) | Content::Holds(expert)) = slots.content(slot) else { continue };
        assert!(seen.insert(expert), "{expert:?} is in two slots");
        assert_eq!(slots.slot_of(expert), Some(slot));
        assert!(roster.bytes(expert) <= slots.bytes(slot));
        used += roster.bytes(expert);
        let landed = slots.content(slot) == Content::Holds(expert);
        assert_eq!(slots.resident(expert), landed.then_some(slot));
        layers[usize::from(expert.layer)] += usize::from(landed);
    }
    assert!(used <= budget);
    for expert in roster.ids().filter(|id| !seen.contains(id)) {
        assert_eq!(slots.slot_of(expert), None);
    }
    for (layer, count) in (0u16..).zip(layers) {
        assert_eq!(slots.layer_count(layer), count);
    }
}

fn place(slots: &mut Slots, heat: &Heat) {
    for load in slots.first_loads(heat) {
        slots.begin(load).unwrap();
        slots.land(load.slot).unwrap();
    }
}

/// Oracle: by hand. What steps used comes first, by how often, and of what nobody used every layer's first experts.
#[test]
fn experts_are_listed_by_their_use() {
    let roster = Roster::new([3, 0, 2].map(|experts| LayerExperts { experts, bytes: 256 }));
    let mut heat = Heat::new(&roster, Pace::default());
    let id = |(layer, expert)| ExpertId { layer, expert };
    let all = |heat: &Heat| roster.by_use(heat);
    assert_eq!(all(&heat), [(0, 0), (2, 0), (0, 1), (2, 1), (0, 2)].map(id));
    heat.decode(&roster, [(2, 1), (0, 2)].map(id));
    heat.decode(&roster, [(0, 2)].map(id));
    assert_eq!(all(&heat), [(0, 2), (2, 1), (0, 0), (2, 0), (0, 1)].map(id));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    /// Oracle: counting anew after every act, and the plan itself: budget and idle bytes are kept, held experts stay, what is
    /// on its way is left alone, the slots afterwards are those before with the plan's changes, and a second plan from
    /// equal values is equal.
    #[test]
    fn plans_keep_the_budget_and_their_word(
        roster in rosters(), budget in 0u64..4000, pace in paces(), caution in cautions(), acts in acts(),
    ) {
        let mut slots = Slots::cut(roster.clone(), budget, usize::MAX);
        let mut heat = Heat::new(&roster, pace);
        place(&mut slots, &heat);
        check(&slots, budget);
        for act in acts {
            match act {
                Act::Step(chosen) => heat.decode(&roster, chosen),
                Act::Prompt(tokens, chosen) => heat.prompt(&roster, tokens, chosen),
                Act::Plan(held, idle, all, swap) => {
                    let plan = plan_moves(&slots, &heat, (&COSTS, swap), caution, idle, &held);
                    let again = plan_moves(&slots.clone(), &heat.clone(), (&COSTS, swap), caution, idle, &held);
                    prop_assert_eq!(&plan, &again);
                    prop_assert!(plan.iter().map(|m| roster.bytes(m.load)).sum::<u64>() <= idle);
                    let mut predicted = contents(&slots);
                    for m in &plan {
                        prop_assert!(m.evict.is_none_or(|out| !held.contains(&out)));
                        let alike = m.evict.is_some_and(|out| roster.bytes(out) == roster.bytes(m.load));
                        prop_assert!(alike || swap == Swap::Evict);
                        let before = predicted.insert(m.slot.index(), Content::Coming(m.load));
                        prop_assert_eq!(before, Some(m.evict.map_or(Content::Empty, Content::Holds)));
                        slots.begin(*m).unwrap();
                    }
                    prop_assert_eq!(contents(&slots), predicted);
                    check(&slots, budget);
                    let ways: Vec<_> = slots.ids().filter(|s| matches!(slots.content(*s), Content::Coming(_))).collect();
                    for (i, slot) in ways.into_iter().enumerate() {
                        match i % 3 {
                            0 => _ = slots.land(slot).unwrap(),
                            1 if all => _ = slots.land(slot).unwrap(),
                            1 => _ = slots.give_up(slot).unwrap(),
                            _ => {}
                        }
                    }
                    check(&slots, budget);
                }
            }
            // Uses are shares of the steps remembered, but for the rounding of three sources.
            for number in 0..roster.len() {
                prop_assert!(heat.uses(number) <= heat.steps() + 3, "{} of {}", heat.uses(number), heat.steps());
            }
        }
    }

    /// Oracle: the invariants, under moves that nobody planned. What is refused changes nothing.
    #[test]
    fn slots_refuse_what_they_are_not_ready_for(
        roster in rosters(), budget in 0u64..3000,
        moves in prop::collection::vec((0usize..40, prop::option::of((0u16..6, 0u16..8)), (0u16..6, 0u16..8), 0u8..3), 0..80),
    ) {
        let mut slots = Slots::cut(roster, budget, usize::MAX);
        let ids: Vec<_> = slots.ids().collect();
        for (slot, evict, load, end) in moves {
            let Some(&slot) = ids.get(slot) else { continue };
            let before = slots.clone();
            let wanted = Move { slot, evict: evict.map(|(l, e)| id(l, e)), load: id(load.0, load.1) };
            if slots.begin(wanted).is_err() {
                prop_assert_eq!(&before, &slots);
            }
            let before = slots.clone();
            let ended = match end { 0 => slots.land(slot), 1 => slots.give_up(slot), _ => continue };
            if ended.is_err() {
                prop_assert_eq!(&before, &slots);
            }
            check(&slots, budget);
        }
    }

    /// Oracle: the definition: no layer with experts left over has less than another by more than an expert's length, unless
    /// nothing of its length fits any more; and the first experts fill exactly the slots that were cut for their layer.
    #[test]
    fn a_first_placement_is_uniform(roster in rosters(), budget in 0u64..4000) {
        let mut slots = Slots::cut(roster.clone(), budget, usize::MAX);
        let left = budget - slots.total_bytes();
        place(&mut slots, &Heat::new(&roster, Pace::default()));
        check(&slots, budget);
        let bytes = |layer: u16| slots.layer_count(layer) as u64 * roster.layers()[usize::from(layer)].bytes;
        let layers = 0..roster.layers().len() as u16;
        prop_assert_eq!(layers.clone().map(bytes).sum::<u64>(), slots.total_bytes());
        for layer in layers.clone() {
            let LayerExperts { experts, bytes: length } = roster.layers()[usize::from(layer)];
            let count = slots.layer_count(layer);
            prop_assert!((0..experts).all(|e| slots.resident(id(layer, e)).is_some() == (usize::from(e) < count)));
            if count < usize::from(experts) {
                prop_assert!(length > left);
                for other in layers.clone().filter(|l| slots.layer_count(*l) > 0) {
                    // When the other's last slot was given, it had no more than this one, or this one's length no longer fit.
                    let last = roster.layers()[usize::from(other)].bytes;
                    prop_assert!(bytes(other) - last <= bytes(layer) || length > left + last, "{other} against {layer}");
                }
            }
        }
    }

    /// Oracle: exponentials in f64, and the bound of 6 % between the two.
    #[test]
    fn decay_is_nearly_exponential(half_life in 16u16..300, used in prop::collection::vec(any::<bool>(), 1..1500)) {
        let roster = Roster::new([LayerExperts { experts: 1, bytes: 1 }]);
        let mut heat = Heat::new(&roster, Pace { half_life, prior_half_life: 1, prior: 0, prompt: 0 });
        for &used in &used {
            heat.decode(&roster, used.then_some(id(0, 0)));
        }
        let age = |i: usize| 0.5f64.powf((used.len() - i) as f64 / f64::from(half_life));
        let (mut uses, mut steps) = (0.0, 0.0);
        for (i, &used) in used.iter().enumerate() {
            steps += age(i);
            uses += if used { age(i) } else { 0.0 };
        }
        let near = |found: u64, exact: f64| (found as f64 / STEP as f64 - exact).abs() <= 0.125 * exact + 0.1;
        prop_assert!(near(heat.uses(0), uses), "{} for {uses}", heat.uses(0) as f64 / STEP as f64);
        prop_assert!(near(heat.steps(), steps), "{} for {steps}", heat.steps() as f64 / STEP as f64);
    }

    /// Oracle: the value that was saved. What a heat learned comes back with the shares it had.
    #[test]
    fn a_ranking_survives_a_restart(roster in rosters(), pace in paces(), other in paces(), acts in acts(), now: u64, identity: Vec<u8>) {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("model.ranking");
        let mut heat = Heat::new(&roster, pace);
        for act in acts {
            if let Act::Step(chosen) = act { heat.decode(&roster, chosen) }
        }
        let ranking = Ranking::of(&heat, now);
        prop_assert!(Ranking::load(&path, &roster, &identity).unwrap().is_none());
        ranking.save(&path, &roster, &identity).unwrap();
        let loaded = Ranking::load(&path, &roster, &identity).unwrap().unwrap();
        prop_assert_eq!(&loaded, &ranking);
        prop_assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 1);

        // Whatever the half-life that it is gone on with.
        let mut again = Heat::new(&roster, other);
        again.recall(&loaded);
        let share = |uses: u64, steps: u64| uses as f64 / steps.max(1) as f64;
        let mut alone = Heat::new(&roster, Pace { prior: u16::MAX, ..pace });
        alone.recall(&loaded);
        if again.steps() > 4 * STEP && alone.steps() > 4 * STEP {
            for number in 0..roster.len() {
                let (a, b) = (share(again.uses(number), again.steps()), share(alone.uses(number), alone.steps()));
                // Weights are whole numbers, of at most a half-life.
                let grain = 1.5 / f64::from(other.prior_half_life.min(pace.prior_half_life));
                prop_assert!((a - b).abs() <= grain, "{a} and {b}");
            }
        }
    }
}

fn small() -> (Roster, Heat) {
    let roster =
        Roster::new([LayerExperts { experts: 5, bytes: 100 }, LayerExperts { experts: 3, bytes: 70 }]);
    let mut heat = Heat::new(&roster, Pace::default());
    for step in 0..50 {
        heat.decode(&roster, [id(0, step % 5), id(1, 2), id(1, 2), id(7, 7)]);
    }
    (roster, heat)
}

/// Oracle: the file as it was saved. Every other one is refused: any bit flipped, any length, other experts, another identity.
#[test]
fn damaged_and_foreign_rankings_are_refused() {
    let (roster, heat) = small();
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.ranking");
    Ranking::of(&heat, 1).save(&path, &roster, b"model").unwrap();
    let bytes = std::fs::read(&path).unwrap();
    assert_eq!(bytes.len(), 52 + 4 * 8);
    let load = |bytes: &[u8]| {
        std::fs::write(&path, bytes).unwrap();
        Ranking::load(&path, &roster, b"model")
    };
    load(&bytes).unwrap().unwrap();
    for place in 0..bytes.len() {
        for bit in 0..8 {
            let mut bytes = bytes.clone();
            bytes[place] ^= 1 << bit;
            let error = load(&bytes).expect_err(&format!("bit {bit} of byte {place}")).to_string();
            let start = format!("{}: ", path.display());
            assert!(
                error.starts_with(&start) && error.ends_with("it is ignored, and a new one is learned"),
                "{error}"
            );
        }
        assert!(load(&bytes[..place]).is_err(), "cut to {place}");
    }
    assert!(matches!(load(&[&bytes[..], b"x"].concat()), Err(RankingError::Damaged { .. })));
    assert!(matches!(load(b"GGUF, for all we know"), Err(RankingError::Other { .. })));
    load(&bytes).unwrap().unwrap();
    let foreign = |roster: &Roster, identity: &[u8]| Ranking::load(&path, roster, identity).unwrap_err();
    assert!(matches!(foreign(&roster, b"modem"), RankingError::Foreign { .. }));
    let mut layers = roster.layers().to_vec();
    layers.swap(0, 1);
    assert!(matches!(foreign(&Roster::new(layers), b"model"), RankingError::Foreign { .. }));
    // A folder has no bytes to read.
    assert!(matches!(Ranking::load(folder.path(), &roster, b"model"), Err(RankingError::Read { .. })));
    assert!(matches!(Ranking::of(&heat, 1).save(folder.path(), &roster, b""), Err(RankingError::Write(_))));
}

/// Oracle: halving. The order stays as long as there is anything left of it, and new steps outweigh an old file.
#[test]
fn old_rankings_fade() {
    let (roster, heat) = small();
    let fresh = Ranking::of(&heat, 1000);
    let remembered = |age: u64| {
        let mut ranking = fresh.clone();
        ranking.age(1000 + age, 100);
        let mut heat = Heat::new(&roster, Pace { prior: 1000, ..Pace::default() });
        heat.recall(&ranking);
        (heat.steps() as f64 / STEP as f64, heat.uses(7) as f64 / STEP as f64)
    };
    for (age, left) in [(0, 50.0), (99, 50.0), (100, 25.0), (399, 6.25), (400, 3.125), (1 << 40, 0.0)] {
        let (steps, uses) = remembered(age);
        let near = |found: f64| (found - left).abs() < 0.02 * left + 0.1;
        assert!(near(steps) && near(uses), "{age}: {steps}, {uses}");
    }
    for (now, half_life) in [(0, 100), (u64::MAX, 0)] {
        let mut ranking = fresh.clone();
        ranking.age(now, half_life);
        assert_eq!(ranking, fresh);
    }
}

/// Oracle: by hand. The most used experts come first, whichever layer they are in; of equals the first ones.
#[test]
fn a_placement_with_history_takes_the_most_used() {
    let (roster, mut heat) = small();
    heat.decode(&roster, [id(0, 4), id(1, 2)]);
    let mut slots = Slots::cut(roster, 340, usize::MAX);
    // 70 for layer 1, 100 for layer 0, in turns: of 340 bytes two of each.
    assert_eq!(slots.ids().map(|slot| slots.bytes(slot)).collect::<Vec<_>>(), [100, 70, 70, 100]);
    place(&mut slots, &heat);
    let resident: Vec<_> = slots.roster().ids().filter(|id| slots.resident(*id).is_some()).collect();
    // Of layer 0 those used last, as later uses weigh more; of layer 1 the one used, and the first of the others.
    assert_eq!(resident, [id(0, 3), id(0, 4), id(1, 0), id(1, 2)]);
}

/// Oracle: by hand. Of equal candidates the lower id is loaded, of equal residents the higher one goes; a short expert may
/// have a long slot, a long one no short slot.
#[test]
fn ties_go_to_the_lower_id() {
    let roster =
        Roster::new([LayerExperts { experts: 4, bytes: 70 }, LayerExperts { experts: 4, bytes: 100 }]);
    let mut slots = Slots::cut(roster.clone(), 340, usize::MAX);
    let mut heat = Heat::new(&roster, Pace::default());
    place(&mut slots, &heat);
    for _ in 0..100 {
        heat.decode(&roster, [id(0, 2), id(0, 3)]);
    }
    let plan = |slots: &Slots, idle, held: &[ExpertId]| {
        let held = held.iter().copied().collect();
        let plan = plan_moves(slots, &heat, (&COSTS, Swap::Evict), Caution::default(), idle, &held);
        plan.into_iter().map(|m| (m.load, m.evict)).collect::<Vec<_>>()
    };
    let (a, b) = (id(0, 2), id(0, 3));
    assert_eq!(plan(&slots, 1000, &[]), [(a, Some(id(1, 1))), (b, Some(id(1, 0)))]);
    assert_eq!(plan(&slots, 139, &[]), [(a, Some(id(1, 1)))]);
    assert_eq!(plan(&slots, 69, &[]), []);
    assert_eq!(plan(&slots, 1000, &[id(1, 0), id(1, 1)]), [(a, Some(id(0, 1))), (b, Some(id(0, 0)))]);
    assert_eq!(plan(&slots, 1000, &[id(0, 0), id(0, 1), id(1, 0), id(1, 1)]), []);

    let mut heat = Heat::new(&roster, Pace::default());
    for _ in 0..100 {
        heat.decode(&roster, [id(1, 0), id(1, 1), id(1, 2)]);
    }
    // The slots of layer 1 hold what is used as much; those of layer 0 are too short.
    assert_eq!(
        plan_moves(&slots, &heat, (&COSTS, Swap::Evict), Caution::default(), 1000, &BTreeSet::new()),
        []
    );
    let slot = slots.ids().next().unwrap();
    let wrong = Move { slot, evict: Some(id(0, 0)), load: id(1, 2) };
    assert_eq!(slots.begin(wrong), Err(SlotError::TooLong(id(1, 2), slot)));
}

/// Oracle: the definition. A prompt counts by shares and like at most `prompt` steps, however long; many count no more.
#[test]
fn prompts_have_a_small_share() {
    let roster = Roster::new([LayerExperts { experts: 2, bytes: 1 }]);
    let pace = Pace { half_life: 64, prior: 0, prompt: 8, ..Pace::default() };
    let mut heat = Heat::new(&roster, pace);
    for _ in 0..100 {
        heat.prompt(&roster, 100_000, [(id(0, 0), 100_000), (id(0, 1), 25_000)]);
    }
    let (steps, uses) = (heat.steps(), [heat.uses(0), heat.uses(1)]);
    assert!(steps <= 8 * STEP && steps > 7 * STEP);
    assert!(uses[0] <= steps && uses[0] + 100 > steps && uses[1].abs_diff(steps / 4) < 100);
    // Decoding fades it.
    let mut without = Heat::new(&roster, pace);
    for _ in 0..128 {
        heat.decode(&roster, []);
        without.decode(&roster, []);
    }
    assert!(heat.uses(0).abs_diff(uses[0] / 4) < 2);
    assert!((heat.steps() - without.steps()).abs_diff(steps / 4) < 2);
    heat.prompt(&roster, 0, [(id(0, 0), 5)]);
    assert!(heat.uses(0).abs_diff(uses[0] / 4) < 2);
}

/// Oracle: arithmetic in f64 of what a swap saves and costs: it is planned just above the margin and not below.
#[test]
fn a_swap_must_pay() {
    let roster = Roster::new([LayerExperts { experts: 2, bytes: 1000 }]);
    let mut slots = Slots::cut(roster.clone(), 1000, usize::MAX);
    let mut heat = Heat::new(&roster, Pace { prior: 0, ..Pace::default() });
    place(&mut slots, &heat);
    (0..1000).for_each(|step| heat.decode(&roster, [id(0, u16::from(step % 4 != 0))]));
    let difference = (heat.uses(1) as f64 - heat.uses(0) as f64) / heat.steps() as f64;
    assert!((difference - 0.5).abs() < 0.05);
    let cost = |ns| Cost { fixed_ns: 0, ps_per_byte: ns };
    for (horizon, margin, load, evict) in [(100, 50, 900, 100), (7, 0, 1000, 0), (1000, 150, 10_000, 5000)] {
        // Nanoseconds of a miss at which it is just worth it.
        let border =
            f64::from(load + evict) * (1.0 + f64::from(margin) / 100.0) / f64::from(horizon) / difference;
        let planned = |miss: f64| {
            let costs = Costs {
                miss: Cost { fixed_ns: miss as u32, ps_per_byte: 0 },
                load: cost(load),
                evict: cost(evict),
            };
            let caution = Caution { horizon, margin, doubt: 20 };
            plan_moves(&slots, &heat, (&costs, Swap::Evict), caution, 1000, &BTreeSet::new()).len()
        };
        assert_eq!((planned(border - 1.0), planned(border + 2.0)), (0, 1), "{border}");
    }
}
