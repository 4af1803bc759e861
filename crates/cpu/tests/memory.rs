//! Memory: what is allocated was planned, and nothing is allocated after the backend is built.
//!
//! Without the test harness, whose own thread would be counted too.

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicU64, Ordering};

use strata_backend::{Checkpoint, Cut, KvFormat, Op, SeqSlot};
use strata_plan::Place;
use strata_quant::Format;

#[allow(dead_code)]
#[path = "ops/rig.rs"]
mod rig;
use rig::*;

struct Counting;

static CALLS: AtomicU64 = AtomicU64::new(0);
static BYTES: AtomicU64 = AtomicU64::new(0);

// SAFETY: passes everything on to the system's allocator.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        CALLS.fetch_add(1, Ordering::Relaxed);
        BYTES.fetch_add(layout.size() as u64, Ordering::Relaxed);
        // SAFETY: the caller's obligations are the same.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, ptr: *mut u8, layout: Layout) {
        // SAFETY: the caller's obligations are the same.
        unsafe { System.dealloc(ptr, layout) }
    }
}

#[global_allocator]
static COUNTING: Counting = Counting;

/// Oracle: the plan. What is in the arena is counted in the backend's own test.
fn main() {
    for recipe in [odd(), Recipe { kv: KvFormat::F16, ..even() }, Recipe { format: Format::Iq4Nl, ..even() }]
    {
        let mut beside = 0;
        let mut rig = Rig::build(recipe, |plan, build| {
            let planned = plan.bytes(Place::Heap) - plan.arena_bytes() as u64;
            let before = BYTES.load(Ordering::Relaxed);
            let backend = build();
            beside = BYTES.load(Ordering::Relaxed) - before;
            // Lists of blocks and names are not worth a line in the plan.
            assert!(
                (planned..planned + 32_000).contains(&beside),
                "{beside} bytes allocated, {planned} planned"
            );
            backend
        });
        assert!(beside > 0);
        rig.counter = || CALLS.load(Ordering::Relaxed);
        for run in ["first", "second"] {
            assert_eq!(allocations(&mut rig), 0, "allocations in the {run} run after the build");
        }
    }
}

/// Allocations while a sequence is read, decoded, forked, saved and cleared.
fn allocations(rig: &mut Rig) -> u64 {
    let tokens = rig.tokens(90, 1);
    let mut long = window(0, 0, &tokens[..80]);
    long.spans[0].cuts = vec![Cut { after: 10, to: Checkpoint(0) }];
    rig.counted = 0;
    rig.backend.clear(SeqSlot(0)).unwrap();
    rig.step(&long);
    for at in 80..90 {
        rig.step(&window(0, at, &tokens[at..=at]));
    }
    let mut both = window(0, 90, &tokens[..1]);
    both.push(SeqSlot(2), 0, &tokens[..3]);
    rig.step(&both);
    let (table, eh_proj, e_norm, h_norm) = (rig.table, rig.eh_proj, rig.e_norm, rig.h_norm);
    rig.submit(Op::DraftJoin { table, eh_proj, e_norm, h_norm, next: &tokens, x: X, out: OUT });
    let backend = &mut rig.backend;
    let before = CALLS.load(Ordering::Relaxed);
    backend.begin_step();
    backend.commit(&both.spans).unwrap();
    backend.fork(SeqSlot(0), SeqSlot(1), 20).unwrap();
    backend.restore(Checkpoint(0), SeqSlot(1)).unwrap();
    backend.clear(SeqSlot(2)).unwrap();
    backend.take_counters();
    backend.end_step();
    rig.counted + CALLS.load(Ordering::Relaxed) - before
}
