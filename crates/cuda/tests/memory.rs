//! What is taken of a GPU's memory, and when. A program of its own with one test, for the count of the GPU's free bytes is of everyone's.
//! Without a GPU, or in a build without kernels, it says so and passes.

use std::io::Write;
use strata_cuda::{Cuda, Room};
use strata_engine::{Engine, EngineConfig, Wants};
use strata_selftest::{CheckError, ids, ops, samplings, whole};
use strata_testkit::golden;

fn work(engine: &mut Engine) -> Vec<u8> {
    let tokens = ids(12_288, 240);
    let mut bytes = whole::forks_and_rewinds(engine, &tokens, false).unwrap();
    for (_, sampling) in samplings() {
        let prompts = [&tokens[..100], &tokens[3..40], &tokens[7..8]];
        bytes.extend(whole::neighbours(engine, &prompts, &sampling).unwrap());
    }
    bytes
}

/// Oracle: the driver's counts. After loading, nothing is allocated on the device, nor pinned on the host; events and recordings are made
/// while work of a kind is new, and no more of them afterwards. The plan is what the GPU says is gone, to 1 %.
#[test]
fn nothing_is_allocated_late_and_the_plan_is_what_is_taken() {
    let gpu = || -> Result<Cuda, CheckError> { Ok(Cuda::new(&ops::first()?, Room::default())?) };
    let Some(gpu) = strata_selftest::or_skip(gpu()) else { return };
    let context = gpu.context().clone();
    let config = EngineConfig {
        window: Some(128),
        context: Some(8192),
        sequences: 160,
        checkpoints: 4,
        ..EngineConfig::default()
    };
    let mut engine = whole::engine(&golden::pebble(), &config, gpu).unwrap();
    let loaded = context.made();
    let first = work(&mut engine);
    assert!(first == work(&mut engine));
    let settled = context.made();
    assert_eq!((settled.device, settled.pinned), (loaded.device, loaded.pinned));
    for _ in 0..3 {
        assert!(first == work(&mut engine));
    }
    // Every list of ops has come by now.
    let seq = engine.open().unwrap();
    for token in ids(12_288, 300).chunks(1) {
        engine.forward(seq, token, Wants::Last, &mut |_, _| ()).unwrap();
    }
    let made = context.made();
    let _ = writeln!(std::io::stderr(), "after loading {loaded:?}, then {settled:?}, in the end {made:?}");
    assert_eq!((made.device, made.pinned), (loaded.device, loaded.pinned));
    let (planned, taken) = engine.device_bytes().unwrap();
    let _ = writeln!(std::io::stderr(), "{planned} bytes planned, {taken} taken");
    assert!(planned >= 1 << 30, "{planned} bytes are too few to tell 1 % from the driver's own blocks");
    assert!(taken.abs_diff(planned) <= planned / 100, "{planned} bytes planned, {taken} taken");
}
