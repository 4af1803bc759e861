//! The store under loom: readers beside moves, in every interleaving of two threads, with memory that
//! another expert overwrites when one is demoted.
//!
//! Run with `RUSTFLAGS="--cfg loom" cargo test -p strata-residency` and a target folder of its own.
#![cfg(loom)]

mod common;

use common::{expected, host, id, room_left, store};
use loom::sync::Arc;
use loom::thread;
use strata_residency::*;

fn read(store: &ExpertStore, id: ExpertId) {
    let handle = store.handle(id).unwrap();
    match store.pin(&handle) {
        Ok(pinned) => {
            let tier = pinned.tier();
            assert_eq!(pinned.blob(), expected(id).as_blob());
            assert_eq!(pinned.tier(), tier);
        }
        Err(StoreError::Stale { .. }) => {
            assert_ne!(store.handle(id).unwrap(), handle);
        }
        Err(other) => panic!("{other}"),
    }
}

fn promote(store: &ExpertStore, id: ExpertId) -> Result<(), StoreError> {
    store.promote(id, &host())
}

fn check(scenario: impl Fn() + Send + Sync + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(2);
    builder.check(scenario);
}

/// Oracle: the experts' own bytes, and what the tiers hold at the end. The one slot holds another expert once the first has
/// left it.
#[test]
fn a_reader_beside_moves() {
    for reader_first in [false, true] {
        check(move || {
            let store = Arc::new(store(&[0], 1));
            let reads = |store: &ExpertStore| {
                read(store, id(0, 1));
                read(store, id(0, 1));
            };
            let moves = |store: &ExpertStore| {
                // Refused while the reader pins; then there is nothing to demote.
                let _ = promote(store, id(0, 1));
                let _ = store.demote(id(0, 1));
                let _ = promote(store, id(0, 2));
                let _ = store.demote(id(0, 2));
            };
            let other = thread::spawn({
                let store = store.clone();
                move || if reader_first { moves(&store) } else { reads(&store) }
            });
            if reader_first {
                reads(&store)
            } else {
                moves(&store)
            }
            other.join().unwrap();
            store.demote(id(0, 1)).unwrap();
            assert_eq!(room_left(&store, &[0]), 1);
        });
    }
}

/// Oracle: the budget and the tiers. Two threads that want the last room for two experts: one gets it, or both
/// are refused while the other's copy is on its way.
#[test]
fn two_promotions_for_one_room() {
    check(|| {
        let store = Arc::new(store(&[0], 1));
        let other = thread::spawn({
            let store = store.clone();
            move || promote(&store, id(0, 0)).is_ok()
        });
        let one = promote(&store, id(0, 1)).is_ok();
        let two = other.join().unwrap();
        assert!(one != two);
        assert_eq!(store.tier(id(0, 0)).unwrap() == Tier::Heap, two);
        assert_eq!(store.tier(id(0, 1)).unwrap() == Tier::Heap, one);
        assert_eq!(room_left(&store, &[0]), 0);
    });
}

/// Oracle: the tiers. Two threads that promote the same expert leave one copy, counted once.
#[test]
fn two_promotions_of_one_expert() {
    check(|| {
        let store = Arc::new(store(&[0], 2));
        let other = thread::spawn({
            let store = store.clone();
            move || promote(&store, id(0, 0))
        });
        let one = promote(&store, id(0, 0));
        let two = other.join().unwrap();
        assert!(one.is_ok() || two.is_ok());
        for result in [one, two] {
            assert!(matches!(result, Ok(()) | Err(StoreError::Pinned { .. })));
        }
        assert_eq!(store.tier(id(0, 0)).unwrap(), Tier::Heap);
        assert_eq!(room_left(&store, &[0]), 1);
    });
}
