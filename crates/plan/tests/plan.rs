//! The plan against itself and against the arena, byte for byte.

use proptest::prelude::*;
use strata_plan::{
    ALIGNMENT, Arena, ArenaError, Category, HUGE_PAGE, Limits, Place, Plan, PlanError, Region, largest,
};

const MIB: usize = 1 << 20;

fn limits(available: usize) -> Limits {
    Limits { available: available as u64, total: 4096 << 20, source: "cgroup memory.max".into() }
}

fn regions(sizes: &[usize]) -> (Plan, Vec<Region>) {
    let mut plan = Plan::new();
    let regions = sizes.iter().map(|&bytes| plan.heap(Category::Scratch, "r", bytes)).collect();
    (plan, regions)
}

proptest! {
    /// Oracle: intervals side by side. Regions are aligned, as long as asked, and fill the arena without gap or overlap
    /// once each is rounded up.
    #[test]
    fn regions_tile_the_arena(sizes in prop::collection::vec(0usize..1000, 0..40)) {
        let (plan, regions) = regions(&sizes);
        let mut end = 0;
        for (region, &bytes) in regions.iter().zip(&sizes) {
            prop_assert_eq!(region.bytes(), bytes);
            prop_assert_eq!(region.offset() % ALIGNMENT, 0);
            prop_assert_eq!(region.offset(), end);
            end += bytes.next_multiple_of(ALIGNMENT);
        }
        prop_assert_eq!(plan.arena_bytes(), end);
        prop_assert_eq!(plan.bytes(Place::Heap), end as u64);
        prop_assert_eq!(plan.by_category(Category::Scratch), end as u64);
    }

    /// Oracle: what was written. Blocks taken in any order are zero, hold their own bytes while all others are written, and
    /// together are exactly what was planned; none can be had twice.
    #[test]
    fn blocks_are_disjoint_and_all_that_was_planned(
        sizes in prop::collection::vec(0usize..500, 1..30),
        order in any::<prop::sample::Index>(),
    ) {
        let (plan, mut regions) = regions(&sizes);
        let first = order.index(regions.len());
        regions.rotate_left(first);
        let mut arena = Arena::new(&plan).unwrap();
        let mut blocks: Vec<_> = regions.iter().map(|&region| arena.take::<u8>(region).unwrap()).collect();
        prop_assert_eq!(arena.taken_bytes(), plan.arena_bytes());
        for &region in regions.iter().filter(|region| region.bytes() > 0) {
            let again = arena.take::<u8>(region);
            prop_assert!(matches!(again, Err(ArenaError::Taken { .. })), "{region:?}");
        }
        drop(arena);
        for (index, block) in blocks.iter_mut().enumerate() {
            prop_assert!(block.iter().all(|&byte| byte == 0));
            block.fill(index as u8 + 1);
        }
        for (index, (block, region)) in blocks.iter().zip(&regions).enumerate() {
            prop_assert_eq!(block.len(), region.bytes());
            prop_assert_eq!(block.as_ptr() as usize % ALIGNMENT, 0);
            prop_assert!(block.iter().all(|&byte| byte == index as u8 + 1));
        }
    }

    /// Oracle: intervals side by side, and what was written. Parts of a region have their length, are aligned, tile what the
    /// region takes up and can be taken like regions, beside those before and behind.
    #[test]
    fn parts_tile_their_region(bytes in 1usize..300, count in 0usize..9, beside in 0usize..200) {
        let each = bytes.next_multiple_of(ALIGNMENT);
        let (plan, regions) = regions(&[beside, count * each, beside]);
        let parts: Vec<Region> = regions[1].parts(bytes).collect();
        let starts: Vec<usize> = parts.iter().map(|part| part.offset()).collect();
        let expected: Vec<usize> = (0..count).map(|at| regions[1].offset() + at * each).collect();
        prop_assert_eq!(starts, expected);
        prop_assert_eq!(regions[1].parts(bytes + each).count(), count / 2);
        let mut arena = Arena::new(&plan).unwrap();
        let all = [regions[0], regions[2]].into_iter().chain(parts);
        let mut blocks: Vec<_> = all.map(|region| arena.take::<u8>(region).unwrap()).collect();
        prop_assert_eq!(arena.taken_bytes(), plan.arena_bytes());
        if count > 0 {
            let whole = arena.take::<u8>(regions[1]);
            prop_assert!(matches!(whole, Err(ArenaError::Taken { .. })), "taken twice");
        }
        for (index, block) in blocks.iter_mut().enumerate() {
            block.fill(index as u8 + 1);
        }
        for (index, block) in blocks.iter().enumerate() {
            prop_assert_eq!(block.len(), if index < 2 { beside } else { bytes });
            prop_assert!(block.iter().all(|&byte| byte == index as u8 + 1));
        }
    }

    /// Oracle: trying every value.
    #[test]
    fn largest_is_what_trying_all_finds(lo in 0usize..50, hi in 0usize..50, limit in 0usize..60) {
        let all = (lo..=hi).filter(|&n| n < limit).max();
        prop_assert_eq!(largest(lo, hi, |n| n < limit), all);
    }
}

/// Oracle: the arena's contract, with regions that another plan made.
#[test]
fn foreign_regions_are_refused() {
    let (plan, _) = regions(&[256]);
    let (_, foreign) = regions(&[64, 128, 64, 64, usize::MAX]);
    let mut arena = Arena::new(&plan).unwrap();
    arena.take::<u8>(foreign[1]).unwrap();
    let (_, overlapping) = regions(&[128, 128]);
    for (region, taken) in
        [(overlapping[0], true), (overlapping[1], true), (foreign[0], false), (foreign[2], false)]
    {
        assert_eq!(matches!(arena.take::<u8>(region), Err(ArenaError::Taken { .. })), taken, "{region:?}");
    }
    for outside in [foreign[3], foreign[4]] {
        assert!(matches!(arena.take::<u8>(outside), Err(ArenaError::Outside { .. })), "{outside:?}");
    }
    assert_eq!(arena.taken_bytes(), plan.arena_bytes());
}

/// Oracle: sizes and alignments of the types.
#[test]
fn blocks_have_their_type() {
    let (plan, regions) = regions(&[12, 10, 0]);
    let mut arena = Arena::new(&plan).unwrap();
    assert!(matches!(arena.take::<f32>(regions[1]), Err(ArenaError::Unfit { bytes: 10, size: 4, .. })));
    assert!(matches!(arena.take::<()>(regions[1]), Err(ArenaError::Unfit { .. })));
    let mut floats = arena.take::<f32>(regions[0]).unwrap();
    assert!(arena.take::<u16>(regions[2]).unwrap().is_empty());
    // A block may be written and read by another thread.
    std::thread::spawn(move || {
        floats[2] = 1.5;
        assert_eq!(floats[..], [0.0, 0.0, 1.5]);
    })
    .join()
    .unwrap();
    assert!(Arena::new(&Plan::new()).is_ok());
}

/// Oracle: the kernel's map of this process. An arena of at least a huge page starts at one, and exactly the mappings of
/// the region asked for carry the advice. What isn't in the arena is refused.
#[cfg(target_os = "linux")]
#[test]
fn huge_pages_are_asked_for() {
    let (plan, regions) = regions(&[2 * HUGE_PAGE, HUGE_PAGE]);
    let mut arena = Arena::new(&plan).unwrap();
    let (_, outside) = self::regions(&[3 * HUGE_PAGE, 1]);
    assert!(matches!(arena.ask_for_huge_pages(outside[1]), Err(ArenaError::Outside { .. })));
    let asked = arena.ask_for_huge_pages(regions[0]);
    let [experts, rest] = [0, 1].map(|at| arena.take::<u8>(regions[at]).unwrap());
    assert_eq!(experts.as_ptr().addr() % HUGE_PAGE, 0);
    if let Err(ArenaError::HugePages(error)) = asked {
        return eprintln!("skipped: this system has no huge pages: {error}");
    }
    asked.unwrap();
    let map = std::fs::read_to_string("/proc/self/smaps").unwrap();
    let advised = |address: usize| {
        let mut inside = false;
        let flags = map.lines().find(|line| {
            let bound = |text: &str| usize::from_str_radix(text, 16);
            let range = line.split(' ').next().and_then(|word| word.split_once('-'));
            if let Some((Ok(start), Ok(end))) = range.map(|(start, end)| (bound(start), bound(end))) {
                inside = (start..end).contains(&address);
            }
            inside && line.starts_with("VmFlags:")
        });
        flags.unwrap().split(' ').any(|flag| flag == "hg")
    };
    assert!(advised(experts.as_ptr().addr()) && advised(experts.as_ptr().addr() + experts.len() - 1));
    assert!(!advised(rest.as_ptr().addr()));
}

/// Oracle: the kernel's count of this process's resident pages. Planned memory costs nothing before it is written.
#[cfg(target_os = "linux")]
#[test]
fn untouched_memory_is_not_resident() {
    let resident = || {
        let text = std::fs::read_to_string("/proc/self/statm").unwrap();
        text.split(' ').nth(1).unwrap().parse::<usize>().unwrap() * 4096
    };
    let (plan, regions) = regions(&[1024 * MIB]);
    let before = resident();
    let mut arena = Arena::new(&plan).unwrap();
    let mut block = arena.take::<u64>(regions[0]).unwrap();
    assert_eq!(block.len(), 128 * MIB);
    let half = block.len() / 2;
    block[half] = 1;
    assert!(resident() < before + 256 * MIB);
}

fn example() -> Plan {
    let mut plan = Plan::new();
    plan.item(Category::Experts, "routed experts", Place::Mapped, 3 << 30);
    plan.item(Category::Table, "n-gram table", Place::File, 28 << 30);
    for layer in [3, 7] {
        plan.heap(Category::Cache, (layer, "keys and values"), 300 * MIB);
    }
    plan.heap(Category::Cache, (8, "keys and values"), 0);
    plan.heap(Category::Window, "residual", 400 * MIB);
    plan.heap(Category::Recurrent, "states", 108 * MIB);
    plan
}

/// Oracle: the sentence, and addition: each layer's is an item of its own.
#[test]
fn a_plan_that_does_not_fit_says_what_is_large() {
    let mut plan = example();
    assert_eq!(plan.check(&limits(1108 * MIB)), Ok(()));
    let error = plan.check(&limits(1000 * MIB)).unwrap_err();
    assert_eq!(
        error.to_string(),
        "the plan needs 1.08 GiB of memory, 108 MiB too much: cgroup memory.max leaves 1000 MiB of 4 GiB; the largest \
         parts are keys and values (cache) with 600 MiB, residual (window) with 400 MiB, states (recurrent) with \
         108 MiB"
    );
    for _ in 0..2 {
        plan.item(Category::Experts, "routed experts", Place::Heap, 350 << 20);
    }
    plan.heap(Category::Window, "logits", 50 * MIB);
    let mut categories = plan.check(&limits(1000 * MIB)).unwrap_err().categories;
    categories.sort_unstable();
    let mib = |category, mib: u64| (category, mib << 20);
    assert_eq!(
        categories,
        [
            mib(Category::Experts, 700),
            mib(Category::Recurrent, 108),
            mib(Category::Cache, 600),
            mib(Category::Window, 450)
        ]
    );
}

/// Oracle: saturation. Sizes beyond what a number holds are refused, not wrapped, wherever they come in.
#[test]
fn overflow_never_fits() {
    let mut products = Plan::new();
    products.heap(Category::Cache, "one", usize::MAX);
    let mut sums = Plan::new();
    for _ in 0..3 {
        sums.heap(Category::Cache, "many", usize::MAX / 2);
    }
    assert_eq!([products.arena_bytes(), sums.arena_bytes()], [usize::MAX; 2]);
    let mut items = Plan::new();
    items.item(Category::Experts, "a", Place::Heap, u64::MAX);
    items.item(Category::Experts, "b", Place::Heap, 2);
    for plan in [products, sums, items] {
        let everything = Limits { available: u64::MAX, ..limits(0) };
        let PlanError { needed, .. } = plan.check(&everything).unwrap_err();
        assert_eq!(needed, u64::MAX);
    }
}

/// Oracle: subtraction by hand. Mapped pages get what anonymous memory leaves.
#[test]
fn mapped_pages_take_what_is_left() {
    let plan = example();
    assert_eq!(plan.crowded_out(&limits(4180 * MIB)), 0);
    assert_eq!(plan.crowded_out(&limits(4179 * MIB)), MIB as u64);
    assert_eq!(plan.crowded_out(&limits(0)), 3 << 30);
}

/// Oracle: the table, and the same numbers as JSON.
#[test]
fn the_plan_is_a_table_and_json() {
    let plan = example();
    let table = "\
for        what            pieces place       size
experts    routed experts       1 mapped     3 GiB
table      n-gram table         1 file      28 GiB
recurrent  states               1 heap     108 MiB
cache      keys and values      2 heap     600 MiB
window     residual             1 heap     400 MiB
total                             heap    1.08 GiB
total                             mapped     3 GiB
total                             file      28 GiB
";
    assert_eq!(plan.to_string(), table);
    let json = serde_json::to_value(&plan).unwrap();
    assert_eq!(json["arena_bytes"], 1108 * MIB);
    let first = serde_json::json!({
        "category": "experts", "name": "routed experts", "place": "mapped", "bytes": 3u64 << 30,
    });
    assert_eq!(json["items"][0], first);
    assert_eq!(
        (&json["items"][3]["layer"], &json["items"][3]["name"]),
        (&7.into(), &"keys and values".into())
    );
}
