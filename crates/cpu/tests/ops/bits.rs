//! The same bits whatever the window, the threads, the path and the neighbours.

use strata_backend::{KvFormat, SeqSlot, Window};
use strata_quant::{Format, Isa};

use crate::rig::*;

fn recipes() -> Vec<Recipe> {
    vec![
        odd(),
        even(),
        Recipe { kv: KvFormat::F16, experts: Some([Format::Iq4Nl, Format::Q4_0, Format::F16]), ..even() },
    ]
}

fn bits(x: &[f32]) -> Vec<u32> {
    x.iter().map(|x| x.to_bits()).collect()
}

/// All logits of a sequence read in windows of `sizes`, repeated.
fn read_in(rig: &mut Rig, tokens: &[u32], sizes: &[usize]) -> Vec<f32> {
    let (mut at, mut out) = (0, Vec::new());
    for &size in sizes.iter().cycle() {
        let end = tokens.len().min(at + size);
        out.extend(rig.step(&window(0, at, &tokens[at..end])));
        at = end;
        if at == tokens.len() {
            return out;
        }
    }
    out
}

/// Oracle: one row at a time, one thread, scalar path.
#[test]
fn windows_threads_and_paths() {
    for recipe in recipes() {
        let mut rig = Rig::new(Recipe { threads: 1, isa: Isa::Scalar, ..recipe.clone() });
        let tokens = rig.tokens(91, 11);
        let expected = bits(&read_in(&mut rig, &tokens, &[1]));
        assert!(expected.iter().any(|&x| x != 0));
        // A grain of 1 shares even these small shapes among all threads.
        for (threads, grain) in [(1, None), (2, None), (2, Some(1)), (3, Some(1))] {
            for isa in Isa::available() {
                for sizes in [&[91][..], &[7], &[40, 1, 2], &[1]] {
                    let vectors = isa == Isa::detect();
                    if !vectors && (sizes == [1] || threads == 3) {
                        continue;
                    }
                    let mut rig = Rig::new(Recipe { threads, grain, isa, ..recipe.clone() });
                    let found = bits(&read_in(&mut rig, &tokens, sizes));
                    assert!(
                        found == expected,
                        "{threads} threads, grain {grain:?}, {isa}, windows of {sizes:?}"
                    );
                }
            }
        }
    }
}

/// Oracle: each sequence alone.
#[test]
fn neighbours() {
    for recipe in recipes() {
        let mut rig = Rig::new(Recipe { grain: Some(1), ..recipe });
        let vocab = rig.recipe.shape.vocab;
        let texts: Vec<Vec<u32>> = (0..3).map(|i| rig.tokens(20 + i, 20 + i as u64)).collect();
        let mut alone = Vec::new();
        for tokens in &texts {
            rig.backend.clear(SeqSlot(0)).unwrap();
            alone.push(read_in(&mut rig, tokens, &[64]));
        }
        for slot in 0..3 {
            rig.backend.clear(SeqSlot(slot)).unwrap();
        }
        // Out of slot order, and of different lengths.
        let (mut at, mut found) = ([0; 3], vec![Vec::new(); 3]);
        for lengths in [[5, 9, 1], [1, 1, 1], [3, 10, 1], [11, 1, 19]] {
            let mut window = Window::default();
            for i in [2, 0, 1] {
                let end = texts[i].len().min(at[i] + lengths[i]);
                if end > at[i] {
                    window.push(SeqSlot(i as u32), at[i], &texts[i][at[i]..end]);
                }
            }
            let logits = rig.step(&window);
            for span in &window.spans {
                let i = span.slot.0 as usize;
                found[i].extend_from_slice(&logits[span.row * vocab..(span.row + span.rows) * vocab]);
                at[i] += span.rows;
            }
        }
        for i in 0..3 {
            assert_eq!(at[i], texts[i].len());
            assert!(bits(&found[i]) == bits(&alone[i]), "sequence {i}");
        }
    }
}
