//! `strata selftest` and GPUs that aren't there.

use strata_selftest::ops::OnGpu;

use crate::program::{Place, pebble};

/// Oracle: the machine. A GPU with kernels for it computes what the CPU does; without one, a sentence says why.
#[test]
fn a_gpu_is_checked_or_missed() {
    let place = Place::new();
    place.run(&["selftest", "--device", "cpu"]).badly(2, &["--device", "held against"]);
    let ended = place.run(&["selftest", "--json"]);
    match OnGpu::first() {
        Err(why) => ended.badly(1, &["--device", &why.to_string()]),
        Ok(_) => {
            let report = ended.json();
            assert_eq!(report["equal"], true, "{report}");
            assert!(report["checks"].as_array().unwrap().len() > 60, "{report}");
        }
    }
}

/// Oracle: the exit code of work that can't be done, whoever wants the device.
#[test]
fn devices_that_are_not_there() {
    let place = Place::new();
    let run = ["run", &pebble(), "hello", "--device", "cuda:63"];
    for args in [&["selftest", "--device", "cuda:63"][..], &run] {
        place.run(args).badly(1, &["--device"]);
    }
}
