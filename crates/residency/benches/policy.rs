//! Exploration.
fn main() {
    use policies::*;
    use strata_residency::*;
    use traces::*;
    for (n, t) in [
        ("drift1.3", &Model::new(1.3, 16, 2).drifting(16, 2000)),
        ("zipf1.3", &Model::new(1.3, 1, 2).steps(0, 2000)),
    ] {
        for room in [64, 128] {
            let r = 800..2000;
            let p = |w: &str, o: Outcome| {
                println!("{n} {room} {w}: {:.1} loads {:.3}", o.rate(r.clone()), o.loads(r.clone()))
            };
            p("lru", lru(t, room));
            p("lfu", lfu(t, room));
            p("belady", belady(t, room));
            p("fixed", fixed(t, room));
            for h in [24, 32, 48] {
                for prior in [8, 16, 32] {
                    for doubt in [10, 20] {
                        for horizon in [64, 128, 512] {
                            let s = Setup {
                                pace: Pace { half_life: h, prior, ..Pace::default() },
                                caution: Caution { doubt, horizon, ..Caution::default() },
                                ..Setup::default()
                            };
                            p(
                                &format!("strata h{h} prior{prior} doubt{doubt} hor{horizon}"),
                                strata(t, room, s),
                            );
                        }
                    }
                }
            }
        }
    }
}
#[path = "../tests/replay/policies.rs"]
mod policies;
#[path = "../tests/replay/traces.rs"]
mod traces;
