//! Every op against its float64 oracle (`strata_testkit::oracle`), on odd shapes in F32 and on even ones in a block format.
//!
//! In F32 the tolerance is that of f32 arithmetic. With Q8_0 weights the oracle has the decoded weights but activations that
//! aren't quantised, so the tolerance is that of 8-bit activations; the products themselves are tested bit for bit elsewhere.

use strata_backend::{GroupedRows, HostExperts, KvFormat, Layer, Op, QsaShape};
use strata_quant::Format;
use strata_testkit::oracle::{self, Rows, rows};

use crate::rig::*;

const EPS: f64 = 1e-6;

/// The largest difference, relative to the root mean square of what is expected.
fn check(name: &str, got: &[f32], expected: &Rows, tolerance: f64) {
    let expected = expected.concat();
    assert_eq!(got.len(), expected.len(), "{name}");
    let scale = (expected.iter().map(|x| x * x).sum::<f64>() / expected.len() as f64).sqrt();
    assert!(scale > 1e-3, "{name}: an oracle that says nothing, {scale}");
    assert!(got.iter().all(|v| v.is_finite()), "{name}: a value that is not finite");
    let worst = got.iter().zip(&expected).map(|(&a, b)| (f64::from(a) - b).abs()).fold(0.0, f64::max);
    assert!(worst <= tolerance * scale, "{name}: off by {worst:e} at a scale of {scale:e}");
}

/// Shapes and the tolerance there.
pub fn recipes() -> Vec<(Recipe, f64)> {
    vec![(odd(), 2e-5), (Recipe { threads: 1, seed: 7, ..odd() }, 2e-5), (even(), 0.08)]
}

fn mixer(rig: &Rig, w: &strata_backend::MixerWeights) -> oracle::Mixer {
    oracle::Mixer {
        norm: rig.vector(w.norm),
        down: rig.rows(w.down),
        up: rig.rows(w.up),
        inject: w.inject.map_or(vec![], |w| rig.rows(w)),
    }
}

#[test]
fn embedding_and_mixer() {
    for (recipe, tolerance) in recipes() {
        let mut rig = Rig::new(recipe);
        let (d, s) = (rig.recipe.shape.hidden, rig.recipe.shape.streams);
        let tokens = rig.tokens(37, 3);
        rig.enter(&window(0, 0, &tokens));
        let table = rig.rows(rig.table);
        let x: Rows = tokens.iter().map(|&t| table[t as usize].repeat(s)).collect();
        check("embed", &rig.read(X, 37), &x, 0.0);

        let oracle = mixer(&rig, &rig.mixer);
        let (u, inject): (Rows, Rows) = x.iter().map(|x| oracle.read(x, s, EPS)).unzip();
        check("u", &rig.read(U, 37), &u, tolerance);
        check("inject", &rig.read(INJECT, 37), &inject, tolerance);

        rig.submit(Op::MixerWrite { rows: 37, y: U, inject: INJECT, x: X });
        let written = |x: &Vec<f64>, u: &Vec<f64>, w: &Vec<f64>| {
            x.iter().enumerate().map(|(i, x)| x + w[i / d] * u[i % d]).collect::<Vec<f64>>()
        };
        let x: Rows = x.iter().zip(&u).zip(&inject).map(|((x, u), w)| written(x, u, w)).collect();
        check("x", &rig.read(X, 37), &x, tolerance);
    }
}

#[test]
fn head_and_draft_join() {
    for (recipe, tolerance) in recipes() {
        let mut rig = Rig::new(recipe);
        let (d, s) = (rig.recipe.shape.hidden, rig.recipe.shape.streams);
        let tokens = rig.tokens(30, 3);
        rig.enter(&window(0, 0, &tokens));
        // Streams that differ.
        rig.submit(Op::MixerWrite { rows: 30, y: U, inject: INJECT, x: X });
        let x = rows(&rig.read(X, 30), s * d);
        let chosen = [0, 3, 4, 17, 29];
        let (final_mixer, output) = (rig.final_mixer, rig.output);
        rig.submit(Op::Head { mixer: final_mixer, output, rows: &chosen, x: X, logits: LOGITS });
        let oracle = mixer(&rig, &final_mixer);
        let head = rig.rows(output);
        let logits =
            chosen.iter().map(|&row| oracle::mul(&head, &oracle.read(&x[row as usize], s, EPS).0)).collect();
        check("logits", &rig.read(LOGITS, 5), &logits, tolerance);

        let (table, eh_proj, e_norm, h_norm) = (rig.table, rig.eh_proj, rig.e_norm, rig.h_norm);
        let next = rig.tokens(30, 4);
        rig.submit(Op::DraftJoin { table, eh_proj, e_norm, h_norm, next: &next, x: X, out: OUT });
        let (eh, en, hn) = (rig.rows(eh_proj), rig.vector(e_norm), rig.vector(h_norm));
        let table = rig.rows(table);
        let join = |(x, &t): (&Vec<f64>, &u32)| oracle::draft_join(&eh, &en, &hn, &table[t as usize], x, EPS);
        let joined = x.iter().zip(&next).map(join).collect();
        check("join", &rig.read(OUT, 30), &joined, tolerance);
    }
}

#[test]
fn gated_delta_net() {
    for (recipe, tolerance) in recipes() {
        let mut rig = Rig::new(recipe);
        let tokens = rig.tokens(45, 5);
        let window = window(1, 0, &tokens);
        rig.enter(&window);
        rig.gdn(&window.spans);
        let g = rig.recipe.shape.gdn.unwrap();
        let w = rig.gdn;
        let oracle = oracle::Gdn {
            key_heads: g.key_heads,
            value_heads: g.value_heads,
            key_dim: g.key_dim,
            value_dim: g.value_dim,
            qkv: rig.rows(w.qkv),
            gate: rig.rows(w.gate),
            conv: rig.rows(w.conv),
            dt_bias: rig.vector(w.dt_bias),
            a: rig.vector(w.a),
            alpha: rig.rows(w.alpha),
            beta: rig.rows(w.beta),
            norm: rig.vector(w.norm),
            out: rig.rows(w.out),
        };
        let u = rows(&rig.read(U, 45), rig.recipe.shape.hidden);
        let (y, state) = oracle.run(&u, EPS);
        check("gdn", &rig.read(Y, 45), &y, 2.0 * tolerance);

        rig.backend.commit(&window.spans).unwrap();
        let mut bytes = Vec::new();
        rig.backend.export(strata_backend::SeqSlot(1), 0, &mut bytes).unwrap();
        let exported: Vec<f32> =
            bytes.as_chunks().0[..g.state_floats()].iter().map(|&b| f32::from_le_bytes(b)).collect();
        check("gdn state", &exported, &vec![state], 2.0 * tolerance);
    }
}

fn qsa(rig: &Rig, layer: Layer) -> oracle::Qsa {
    let (q, w) = (rig.recipe.shape.qsa.clone().unwrap(), rig.qsa);
    oracle::Qsa {
        heads: q.heads,
        kv_heads: q.kv_heads,
        head_dim: q.head_dim,
        rotary: q.rotary,
        rope_base: f64::from(q.rope_base),
        index_heads: q.index_heads,
        budget: q.budget,
        block: rig.spec.layers[usize::from(layer.0)].qsa.unwrap(),
        q: rig.rows(w.q),
        k: rig.rows(w.k),
        v: rig.rows(w.v),
        out: rig.rows(w.out),
        q_norm: rig.vector(w.q_norm),
        k_norm: rig.vector(w.k_norm),
        index_q: rig.rows(w.index_q),
        index_k: rig.rows(w.index_k),
        index_q_norm: rig.vector(w.index_q_norm),
        index_k_norm: rig.vector(w.index_k_norm),
    }
}

/// Sparse from the budget on: the odd shape has 12 of 90 tokens to select in blocks of 2, or of 1 in the other layer. In F32 only: rounding elsewhere may
/// choose another block, and then nothing is near.
#[test]
fn sparse_attention() {
    for recipe in [odd(), Recipe { threads: 1, seed: 7, ..odd() }, Recipe { format: Format::F32, ..even() }] {
        for layer in [QSA, DRAFT] {
            attention(recipe.clone(), layer, 2e-5);
        }
    }
}

/// A budget that is never used up, so that caches and weights may round.
#[test]
fn attention_in_other_formats() {
    for (recipe, tolerance) in [(odd(), 5e-3), (even(), 0.15)] {
        let q = QsaShape { budget: 96, ..recipe.shape.qsa.clone().unwrap() };
        let shape = strata_backend::Shape { qsa: Some(q), ..recipe.shape.clone() };
        attention(Recipe { shape, kv: KvFormat::F16, ..recipe }, QSA, tolerance);
    }
}

fn attention(recipe: Recipe, layer: Layer, tolerance: f64) {
    let mut rig = Rig::new(recipe);
    let tokens = rig.tokens(90, 6);
    let window = window(2, 0, &tokens);
    rig.enter(&window);
    rig.qsa(layer, &window.spans);
    let u = rows(&rig.read(U, 90), rig.recipe.shape.hidden);
    check("qsa", &rig.read(Y, 90), &qsa(&rig, layer).run(&u, EPS), tolerance);
}

/// More keys than a chunk of 256, so that chunks merge: all of them, or two thirds.
#[test]
fn attention_over_several_chunks() {
    for (threads, budget) in [(1, 700), (2, 700), (1, 400), (2, 400)] {
        let base = odd();
        let q = QsaShape { budget, ..base.shape.qsa.clone().unwrap() };
        let shape = strata_backend::Shape { qsa: Some(q), ..base.shape.clone() };
        let mut rig = Rig::new(Recipe { shape, context: 700, window: 600, threads, ..base });
        let tokens = rig.tokens(601, 6);
        let (first, last) = (window(2, 0, &tokens[..600]), window(2, 600, &tokens[600..]));
        rig.enter(&first);
        rig.qsa(QSA, &first.spans);
        let mut u = rows(&rig.read(U, 600), 40);
        let mut y = rig.read(Y, 600);
        rig.backend.commit(&first.spans).unwrap();
        // One row alone takes the path whose tasks are heads and chunks.
        rig.enter(&last);
        rig.qsa(QSA, &last.spans);
        u.extend(rows(&rig.read(U, 1), 40));
        y.extend(rig.read(Y, 1));
        check("chunks", &y, &qsa(&rig, QSA).run(&u, EPS), 2e-5);
    }
}

#[test]
fn experts() {
    for (recipe, tolerance) in recipes() {
        for n in [1, 3, 80] {
            let mut rig = Rig::new(recipe.clone());
            let tokens = rig.tokens(n, 8);
            rig.enter(&window(0, 0, &tokens));
            rig.moe(n);
            let swiglu = |[gate, up, down]: [Rows; 3]| oracle::Swiglu { gate, up, down };
            let oracle = oracle::Moe {
                router: rig.rows(rig.router),
                used: rig.recipe.shape.moe.used,
                experts: rig.expert_values.iter().cloned().map(swiglu).collect(),
                shared: swiglu([
                    rig.rows(rig.shared.gate),
                    rig.rows(rig.shared.up),
                    rig.rows(rig.shared.down),
                ]),
                scalar: rig.vector(rig.shared.scalar),
            };
            let u = rows(&rig.read(U, n), rig.recipe.shape.hidden);
            let y = u.iter().map(|u| oracle.run(u)).collect();
            check("moe", &rig.read(Y, n), &y, 2.0 * tolerance);
        }
    }
}

/// Oracle: the expert alone. What a device asks for has the bits of one asked alone, whoever else is asked and with however many threads.
#[test]
fn experts_for_a_device() {
    for (recipe, tolerance) in recipes() {
        let (used, d) = (recipe.shape.moe.used, recipe.shape.hidden);
        let u = Random(5).floats(d, 1.0);
        let wide = rows(&u, d);
        let mut alone = Vec::new();
        for threads in [1, 2] {
            let rig = Rig::new(Recipe { threads, grain: Some(1), ..recipe.clone() });
            let mut host = rig.host();
            host.begin_step();
            for experts in [vec![2u32], vec![5], (1..=used as u32).collect(), vec![]] {
                let mut out = vec![0.0; experts.len() * d];
                host.outputs(QSA, &rig.experts, &experts, &u, &mut out).unwrap();
                for (expert, out) in experts.iter().zip(out.chunks_exact(d)) {
                    let [gate, up, down] = rig.expert_values[*expert as usize].clone();
                    check(
                        "expert",
                        out,
                        &vec![oracle::Swiglu { gate, up, down }.run(&wide[0])],
                        2.0 * tolerance,
                    );
                    alone.push((*expert, out.to_vec()));
                }
            }
            host.end_step();
            let mut out = vec![0.0; d];
            let more = vec![0; used + 1];
            assert!(host.outputs(QSA, &rig.experts, &more, &u, &mut vec![0.0; (used + 1) * d]).is_err());
            assert!(host.outputs(QSA, &rig.experts, &[99], &u, &mut out).is_err());
        }
        for (expert, out) in &alone {
            let first = &alone.iter().find(|(other, _)| other == expert).unwrap().1;
            assert!(out.iter().zip(first).all(|(a, b)| a.to_bits() == b.to_bits()), "expert {expert}");
        }
    }
}

/// Oracle: each row alone. Of rows grouped by expert, some with none and one with more than are done at a time, every place has the bits of its row
/// asked alone, with however many threads.
#[test]
fn grouped_experts_for_a_device() {
    for (recipe, _) in recipes() {
        let d = recipe.shape.hidden;
        let u = Random(6).floats(90 * d, 1.0);
        let row = |row: u32| &u[row as usize * d..][..d];
        let places: [(u32, Vec<u32>); 4] =
            [(0, vec![7]), (2, (0..90).rev().collect()), (3, vec![]), (5, vec![89, 3, 4])];
        let (mut bounds, mut order) = (vec![0u32], Vec::new());
        for (_, rows) in &places {
            order.extend(rows);
            bounds.push(order.len() as u32);
        }
        let experts: Vec<u32> = places.iter().map(|(expert, _)| *expert).collect();
        for threads in [1, 2, 5] {
            let rig = Rig::new(Recipe { threads, grain: Some(1), ..recipe.clone() });
            let mut host = rig.host();
            host.begin_step();
            let mut out = vec![0.0; order.len() * d];
            let grouped = GroupedRows { experts: &experts, bounds: &bounds, order: &order, u: &u };
            host.grouped(QSA, &rig.experts, grouped, &mut out).unwrap();
            let pairs = places.iter().flat_map(|(expert, rows)| rows.iter().map(move |row| (*expert, *row)));
            for ((expert, of), out) in pairs.zip(out.chunks_exact(d)) {
                let mut alone = vec![0.0; d];
                host.outputs(QSA, &rig.experts, &[expert], row(of), &mut alone).unwrap();
                assert!(out.iter().zip(&alone).all(|(a, b)| a.to_bits() == b.to_bits()), "{expert} of {of}");
            }
            let wrong = |rows: GroupedRows<'_>, host: &mut dyn HostExperts| {
                host.grouped(QSA, &rig.experts, rows, &mut vec![0.0; order.len() * d]).is_err()
            };
            assert!(wrong(GroupedRows { bounds: &bounds[1..], ..grouped }, &mut *host));
            assert!(wrong(GroupedRows { u: &u[d..], ..grouped }, &mut *host));
            assert!(wrong(GroupedRows { experts: &[0, 2, 3, 99], ..grouped }, &mut *host));
            host.end_step();
        }
    }
}

#[test]
fn ngrams() {
    for (recipe, tolerance) in recipes() {
        let mut rig = Rig::new(recipe);
        let shape = rig.recipe.shape.clone();
        let n = shape.ngram.unwrap();
        let tokens = rig.tokens(50, 9);
        let window = window(0, 0, &tokens);
        rig.enter(&window);
        rig.submit(Op::MixerWrite { rows: 50, y: U, inject: INJECT, x: X });
        let before = rows(&rig.read(X, 50), shape.streams * shape.hidden);
        rig.ngram(&window);
        let w = rig.ngram;
        let oracle = oracle::Ngram {
            streams: shape.streams,
            dilation: n.dilation,
            key: rig.rows(w.key),
            value: rig.rows(w.value),
            norm_key: rig.vector(w.norm_key),
            norm_query: rig.vector(w.norm_query),
            norm_conv: rig.vector(w.norm_conv),
            conv: rig.rows(w.conv),
        };
        let e = rows(&rig.table_rows(&tokens).1, n.heads * n.row);
        let delta = oracle.run(&before, &e, EPS);
        let after = before.iter().zip(&delta);
        let after = after.map(|(x, d)| x.iter().zip(d).map(|(x, d)| x + d).collect()).collect();
        check("ngram", &rig.read(X, 50), &after, tolerance);
    }
}
