//! `strata plan`.

use std::process::{Command, Stdio};

use assert_cmd::cargo::cargo_bin;

use crate::program::{Ended, Place, golden, pebble};

/// Oracle: addition, and that a cache grows with the context and its format.
#[test]
fn bytes_add_up() {
    let place = Place::new();
    let plan = |flags: &[&str]| {
        place.run(&[&["plan", &pebble(), "--json", "--window", "64"], flags].concat()).json()
    };
    let small = plan(&["--context", "512"]);
    let items = small["plan"]["items"].as_array().unwrap();
    let sum = |place: &str| -> u64 {
        items.iter().filter(|item| item["place"] == place).map(|item| item["bytes"].as_u64().unwrap()).sum()
    };
    for place in ["heap", "mapped", "file"] {
        assert_eq!(small["bytes"][place], sum(place), "{place}");
        assert!(sum(place) > 0, "{place}");
    }
    assert_eq!(small["fits"], true);
    // Caches may hold all of this model: no memory bounds its speed.
    assert!(small["rates"]["host"].as_f64().unwrap() > 1e8 && small["at_most"]["answer"].is_null());
    assert_eq!(small["config"]["context"], 512);
    let heap = |json: &serde_json::Value| json["bytes"]["heap"].as_u64().unwrap();
    assert!(heap(&plan(&["--context", "1024"])) > heap(&small));
    assert!(heap(&plan(&["--context", "512", "--kv", "f32"])) > heap(&small));
    assert!(heap(&plan(&["--context", "512", "--mtp"])) > heap(&small));
}

/// Oracle: the mapped plan. Experts in the heap take what they took in the file, each rounded up to cache lines, and all of it
/// is in the arena: there is no other memory for them.
#[test]
fn experts_in_the_heap_are_planned_whole() {
    let plan = |home: &str| {
        Place::new().run(&["plan", &pebble(), "--json", "--window", "64", "--experts", home]).json()
    };
    let (mapped, heap) = (plan("mapped"), plan("heap"));
    let bytes = |json: &serde_json::Value, pointer: &str| json.pointer(pointer).unwrap().as_u64().unwrap();
    let less = bytes(&mapped, "/bytes/mapped") - bytes(&heap, "/bytes/mapped");
    let more = bytes(&heap, "/bytes/heap") - bytes(&mapped, "/bytes/heap");
    let pieces = 8 * 64;
    assert!(
        less > 0 && (less..less + 64 * pieces).contains(&more),
        "{less} bytes mapped, {more} in the heap"
    );
    assert_eq!(more % 64, 0);
    assert_eq!(bytes(&heap, "/plan/arena_bytes") - bytes(&mapped, "/plan/arena_bytes"), more);
}

/// Oracle: the budget, and the plan with experts in the heap. Memory has what the budget has room for, and a bounded number of experts that are
/// being read; a budget for all is a plan without either.
#[test]
fn a_budget_bounds_experts_in_memory() {
    let plan = |flags: &[&str]| {
        Place::new()
            .run(&[&["plan", &pebble(), "--json", "--device", "cpu", "--window", "64"], flags].concat())
            .json()
    };
    let of = |json: &serde_json::Value, name: &str| -> u64 {
        let items = json["plan"]["items"].as_array().unwrap().iter().filter(|item| item["name"] == name);
        items.map(|item| item["bytes"].as_u64().unwrap()).sum()
    };
    let some = plan(&["--resident-budget", "2M"]);
    let (kept, read) = (of(&some, "resident experts"), of(&some, "experts being read"));
    assert!(kept > 1 << 20 && kept <= 2 << 20 && read > 0, "{kept} {read}");
    assert_eq!(some["config"]["experts"]["budget"], 2 << 20);
    assert!(of(&some, "experts beyond the budget") > 0 && of(&some, "routed experts") == 0);
    let none = plan(&["--resident-budget", "1"]);
    assert_eq!((of(&none, "resident experts"), of(&none, "experts being read")), (0, read));
    let all = plan(&["--resident-budget", "1T"]);
    let heap = of(&plan(&["--experts", "heap"]), "routed experts");
    assert!(of(&all, "resident experts") >= heap && of(&all, "experts being read") == 0);
    Place::new()
        .run(&["plan", &pebble(), "--resident-budget", "2M", "--experts", "heap"])
        .badly(2, &["--resident-budget and --experts exclude each other"]);
    // Beside a GPU it is no mistake: whatever becomes of this one, which there isn't, is the GPU's.
    let beside = Place::new().run(&["plan", &pebble(), "--resident-budget", "2M", "--device", "cuda:99"]);
    assert!(beside.code == Some(1) && beside.err.contains("--device"), "{}", beside.err);
    assert!(!beside.err.contains("resident-budget"), "{}", beside.err);
    let short = ["--resident-budget", "2G", "--ram-limit", "30M", "--device", "cpu"];
    let short = Place::new().run(&[&["plan", &pebble()], &short[..]].concat());
    assert!(short.err.contains("lower --resident-budget"), "{}", short.err);
}

/// Oracle: the table has a line for everything and says whether it fits.
#[test]
fn reads_well() {
    let text = Place::new().run(&["plan", &golden("tiny/tiny.gguf")]).well();
    for part in ["context 512 tokens", "dense weights", "mapped", "total", "fits: "] {
        assert!(text.contains(part), "no `{part}` in {text}");
    }
}

/// Oracle: the flag. Too little memory is refused with the flag that says so, and what is enough isn't.
#[test]
fn less_memory_may_be_acted() {
    let plan = |limit: &str| Place::new().run(&["plan", &pebble(), "--device", "cpu", "--ram-limit", limit]);
    let short = plan("1M");
    assert_eq!(short.code, Some(1));
    assert!(short.err.contains("too much: --ram-limit leaves 1 MiB of 1 MiB"), "{}", short.err);
    assert!(plan("4G").well().contains("fits: "));
}

/// Oracle: the model's own limit.
#[test]
fn a_context_beyond_the_model_is_refused() {
    Place::new().run(&["plan", &pebble(), "--context", "1000000"]).badly(2, &["1000000", "8192"]);
}

/// Oracle: a limit on addresses that leaves no room for the stacks of so many threads.
#[test]
fn a_plan_needs_no_threads() {
    let mut shell = Command::new("sh");
    shell.args(["-c", "ulimit -v 1000000; exec \"$0\" \"$@\""]).arg(cargo_bin!("strata"));
    shell.args(["plan", &pebble(), "--threads", "1000"]).env_clear().stdin(Stdio::null());
    let text = Ended::of(shell.output().unwrap()).well();
    assert!(text.contains("1000 threads"), "{text}");
}
