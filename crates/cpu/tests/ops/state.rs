//! State: transactions, cuts, checkpoints, forks, bytes.

use strata_backend::{BackendError, Checkpoint, Cut, KvFormat, Op, SeqSlot};

use crate::rig::*;

fn recipes() -> Vec<Recipe> {
    vec![odd(), Recipe { kv: KvFormat::F16, ..even() }]
}

fn exported(rig: &mut Rig, slot: u32, tokens: usize) -> Vec<u8> {
    let mut bytes = Vec::new();
    rig.backend.export(SeqSlot(slot), tokens, &mut bytes).unwrap();
    bytes
}

/// Oracle: the state before.
#[test]
fn a_window_without_commit_changes_nothing() {
    for recipe in recipes() {
        let mut rig = Rig::new(recipe);
        let tokens = rig.tokens(60, 1);
        rig.step(&window(0, 0, &tokens[..33]));
        let before = exported(&mut rig, 0, 33);
        let other = rig.tokens(20, 2);
        rig.forward(&window(0, 33, &other));
        assert!(exported(&mut rig, 0, 33) == before);
        let after = rig.step(&window(0, 33, &tokens[33..]));

        let mut fresh = Rig::new(rig.recipe.clone());
        fresh.step(&window(0, 0, &tokens[..33]));
        assert!(fresh.step(&window(0, 33, &tokens[33..])) == after, "the aborted window left a trace");
    }
}

/// Oracle: reading the same in one window. A window that touches only some layers (the draft block's) commits those.
#[test]
fn a_commit_leaves_untouched_layers_alone() {
    let mut rig = Rig::new(odd());
    let tokens = rig.tokens(30, 1);
    let first = window(0, 0, &tokens[..20]);
    rig.step(&first);
    let before = exported(&mut rig, 0, 20);
    // An aborted window wrote pending state in all layers...
    rig.forward(&window(0, 20, &tokens[20..]));
    // ...and then the draft block alone runs and commits, over the tokens that the trunk has.
    rig.enter(&first);
    rig.qsa(DRAFT, &first.spans);
    rig.backend.commit(&first.spans).unwrap();
    let trunk = rig.spec.state_bytes(&rig.spec.layers[0], 20) + rig.spec.state_bytes(&rig.spec.layers[1], 20);
    assert!(exported(&mut rig, 0, 20)[..trunk] == before[..trunk]);
}

/// Oracle: the state after reading exactly so far.
#[test]
fn cuts_copy_the_state_in_passing() {
    for recipe in recipes() {
        let mut rig = Rig::new(recipe);
        let tokens = rig.tokens(70, 1);
        let mut long = window(1, 0, &tokens);
        long.spans[0].cuts = vec![Cut { after: 11, to: Checkpoint(1) }, Cut { after: 70, to: Checkpoint(0) }];
        rig.step(&long);
        let whole = exported(&mut rig, 1, 70);
        rig.backend.restore(Checkpoint(1), SeqSlot(1)).unwrap();
        let cut = exported(&mut rig, 1, 11);
        let again = rig.step(&window(1, 11, &tokens[11..]));
        assert!(exported(&mut rig, 1, 70) == whole);

        let mut fresh = Rig::new(rig.recipe.clone());
        fresh.step(&window(0, 0, &tokens[..11]));
        assert!(exported(&mut fresh, 0, 11) == cut);
        assert!(fresh.step(&window(0, 11, &tokens[11..])) == again);
        rig.backend.restore(Checkpoint(0), SeqSlot(1)).unwrap();
        assert!(exported(&mut rig, 1, 70) == whole);
    }
}

/// Oracle: the logits of the sequence that was copied.
#[test]
fn forks_checkpoints_and_bytes_carry_a_sequence() {
    for recipe in recipes() {
        let mut rig = Rig::new(recipe);
        let tokens = rig.tokens(50, 1);
        let mut first = window(0, 0, &tokens[..31]);
        first.spans[0].cuts = vec![Cut { after: 31, to: Checkpoint(0) }];
        rig.step(&first);
        // Another sequence's parity differs.
        rig.step(&window(1, 0, &tokens[..9]));
        rig.step(&window(1, 9, &tokens[9..19]));
        rig.backend.fork(SeqSlot(0), SeqSlot(1), 31).unwrap();
        let bytes = exported(&mut rig, 0, 31);
        assert!(exported(&mut rig, 1, 31) == bytes);
        let size: usize = rig.spec.layers.iter().map(|layer| rig.spec.state_bytes(layer, 31)).sum();
        assert_eq!(bytes.len(), size);

        let next = rig.step(&window(0, 31, &tokens[31..]));
        assert!(rig.step(&window(1, 31, &tokens[31..])) == next, "fork");
        rig.backend.restore(Checkpoint(0), SeqSlot(0)).unwrap();
        assert!(rig.step(&window(0, 31, &tokens[31..])) == next, "checkpoint");
        rig.backend.import(SeqSlot(2), 31, &bytes).unwrap();
        assert!(exported(&mut rig, 2, 31) == bytes);
        assert!(rig.step(&window(2, 31, &tokens[31..])) == next, "bytes");
        let mut other = Rig::new(rig.recipe.clone());
        other.backend.import(SeqSlot(0), 31, &bytes).unwrap();
        assert!(other.step(&window(0, 31, &tokens[31..])) == next, "bytes into another backend");
    }
}

/// Oracle: a fresh backend.
#[test]
fn clear_forgets() {
    for recipe in recipes() {
        let mut rig = Rig::new(recipe);
        let tokens = rig.tokens(40, 1);
        let first = rig.step(&window(0, 0, &tokens));
        rig.backend.clear(SeqSlot(0)).unwrap();
        assert!(rig.step(&window(0, 0, &tokens)) == first);
    }
}

/// What an engine must not do is refused with a sentence, and changes nothing.
#[test]
fn what_does_not_fit_is_refused() {
    let mut rig = Rig::new(odd());
    let refused = |found: Result<(), BackendError>, what: &str| {
        let message = found.unwrap_err().to_string();
        assert!(message.contains(what), "{message}");
    };
    let mut bytes = exported(&mut rig, 0, 4);
    bytes.pop();
    refused(rig.backend.import(SeqSlot(0), 4, &bytes), "does not fit");
    refused(rig.backend.import(SeqSlot(0), 97, &bytes), "context of 96");
    refused(rig.backend.clear(SeqSlot(3)), "slot 3 of 3");
    refused(rig.backend.restore(Checkpoint(2), SeqSlot(0)), "checkpoint 2 of 2");
    let (table, gdn) = (rig.table, rig.gdn);
    refused(rig.backend.submit(&Op::Embed { table, tokens: &[77], x: X }), "token 77 of a vocabulary of 77");
    refused(rig.backend.submit(&Op::Embed { table, tokens: &[1; 97], x: X }), "97 rows of 120 are needed");
    let late = window(0, 90, &[1; 7]);
    refused(
        rig.backend.submit(&Op::Gdn { layer: GDN, weights: gdn, spans: &late.spans, u: U, y: Y }),
        "out of range",
    );
    let fine = window(0, 0, &[1; 7]);
    let spans = &fine.spans;
    refused(
        rig.backend.submit(&Op::Gdn { layer: QSA, weights: gdn, spans, u: U, y: Y }),
        "layer 1 has no GDN state",
    );
    refused(
        rig.backend.submit(&Op::Gdn { layer: GDN, weights: gdn, spans, u: U, y: U }),
        "not different ones",
    );
    refused(rig.backend.submit(&Op::Group { rows: 5 }), "5 rows to group");
    let wrong = strata_backend::GdnWeights { out: gdn.qkv, ..gdn };
    refused(
        rig.backend.submit(&Op::Gdn { layer: GDN, weights: wrong, spans, u: U, y: Y }),
        "but an op needs [40, 120]",
    );
}
