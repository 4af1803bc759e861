//! Tensor roles: every tensor of the files there are, the forms in which files differ, and what must be refused.

use strata_gguf::{Gguf, TensorType};
use strata_model::hyper::Hyper;
use strata_model::roles::{Attention, GateUp, Layer, Mixer, RoleError, Roles};
use strata_model::{TensorRef, Warning};
use strata_quant::Format;
use strata_testkit::golden;
use tempfile::TempDir;

use crate::copy::{Part, Parts, tiny};

fn find(gguf: &Gguf) -> (Result<Roles, RoleError>, Vec<Warning>) {
    let mut warnings = Vec::new();
    let hyper = Hyper::from_gguf(gguf, &mut warnings).expect("the metadata is in order");
    (Roles::find(gguf, &hyper, &mut warnings), warnings)
}

/// The roles of a changed copy of tiny.
fn changed(change: impl FnOnce(&mut Parts)) -> (Gguf, Result<Roles, RoleError>, Vec<Warning>) {
    let folder = TempDir::new().expect("a folder");
    let mut parts = Parts::tiny();
    change(&mut parts);
    let gguf = Gguf::open(&parts.write(&folder)).expect("opens");
    let (roles, warnings) = find(&gguf);
    (gguf, roles, warnings)
}

fn mixer(m: &Mixer) -> Vec<TensorRef> {
    [Some(m.norm), Some(m.down), Some(m.up), m.inject].into_iter().flatten().collect()
}

fn layer(l: &Layer) -> Vec<TensorRef> {
    let mut all = [mixer(&l.attn_mixer), mixer(&l.ffn_mixer)].concat();
    match l.attention {
        Attention::Gdn(g) => {
            all.extend([g.qkv, g.gate, g.conv1d, g.dt_bias, g.a, g.alpha, g.beta, g.norm, g.out]);
        }
        Attention::Qsa(q) => {
            all.extend([q.q, q.k, q.v, q.output, q.q_norm, q.k_norm]);
            all.extend([q.index_q, q.index_k, q.index_q_norm, q.index_k_norm]);
        }
    }
    let moe = &l.moe;
    all.extend([moe.router, moe.down, moe.shared.gate, moe.shared.up, moe.shared.down, moe.shared.weight]);
    match moe.gate_up {
        GateUp::Split { gate, up } => all.extend([gate, up]),
        GateUp::Fused(both) => all.push(both),
    }
    if let Some(p) = l.ple {
        all.extend([p.key, p.value, p.norm_key, p.norm_query, p.norm_conv, p.conv1d]);
    }
    all
}

/// Every tensor with a role.
fn all(roles: &Roles) -> Vec<TensorRef> {
    let trunk = &roles.trunk;
    let mut all = vec![trunk.token_embd, trunk.output];
    all.extend(trunk.ngram_table);
    all.extend(mixer(&trunk.head_mixer));
    all.extend(trunk.layers.iter().flat_map(layer));
    if let Some(mtp) = &roles.mtp {
        all.extend([mtp.eh_proj, mtp.enorm, mtp.hnorm]);
        all.extend(mtp.embed_tokens.into_iter().chain(mtp.shared_head_head));
        all.extend(mixer(&mtp.head_mixer));
        all.extend(layer(&mtp.layer));
    }
    all
}

/// Oracle: the file's own index. Every tensor has exactly one role, and the sizes add up to its bytes.
#[test]
fn every_tensor_has_one_role() {
    for (path, count, draft) in [
        (tiny(), 145, true),
        (golden::dir().join("tiny/tiny-nomtp.gguf"), 113, false),
        (golden::pebble(), 246, true),
    ] {
        let gguf = Gguf::open(&path).expect("opens");
        let (roles, warnings) = find(&gguf);
        let roles = roles.unwrap_or_else(|e| panic!("{}: {e}", path.display()));
        assert_eq!((warnings.len(), roles.unused.len(), roles.mtp.is_some()), (0, 0, draft));
        let all = all(&roles);
        let mut indices: Vec<usize> = all.iter().map(|t| t.index).collect();
        indices.sort_unstable();
        assert_eq!(indices, (0..count).collect::<Vec<_>>());
        for t in all {
            let info = &gguf.tensors()[t.index];
            assert_eq!(t.bytes() as u64, info.bytes, "{}", info.name);
            assert_eq!(t.format.tensor_type(), info.ty, "{}", info.name);
        }
    }
}

/// Oracle: names and shapes of the spec, section 3.2, on a sample of roles.
#[test]
fn roles_have_their_names_and_shapes() {
    let gguf = Gguf::open(&golden::pebble()).expect("opens");
    let roles = find(&gguf).0.expect("finds");
    let is = |t: TensorRef, name: &str, rows: usize, k: usize, experts: usize, format: Format| {
        assert_eq!(gguf.tensors()[t.index].name, name);
        assert_eq!((t.rows, t.k, t.experts, t.format, t.scale), (rows, k, experts, format, None), "{name}");
    };
    let trunk = &roles.trunk;
    is(trunk.output, "output.weight", 12288, 256, 1, Format::Q8_0);
    is(trunk.head_mixer.up, "output_hc_up.weight", 1024, 32, 1, Format::Q8_0);
    assert_eq!(trunk.head_mixer.inject, None);
    is(trunk.ngram_table.expect("a table"), "per_layer_token_embd.weight", 160_384, 32, 1, Format::Iq4Nl);
    let (gdn, qsa) = (&trunk.layers[1], &trunk.layers[3]);
    let Attention::Gdn(g) = gdn.attention else { panic!("layer 1 is recurrent") };
    is(g.a, "blk.1.ssm_a", 1, 8, 1, Format::F32);
    is(g.dt_bias, "blk.1.ssm_dt.bias", 1, 8, 1, Format::F32);
    is(g.conv1d, "blk.1.ssm_conv1d.weight", 512, 4, 1, Format::F32);
    is(gdn.attn_mixer.inject.expect("injects"), "blk.1.hc_attn_inject.weight", 4, 1024, 1, Format::Q8_0);
    is(gdn.moe.down, "blk.1.ffn_down_exps.weight", 256, 96, 64, Format::Iq4Nl);
    let ple = gdn.ple.expect("n-grams");
    is(ple.conv1d, "blk.1.ple_conv1d.weight", 1024, 4, 1, Format::F16);
    is(ple.key, "blk.1.ple_key.weight", 1024, 256, 1, Format::Q8_0);
    let Attention::Qsa(q) = qsa.attention else { panic!("layer 3 is full") };
    is(q.q, "blk.3.attn_q.weight", 512, 256, 1, Format::Q8_0);
    is(q.index_k, "blk.3.indexer.k_proj.weight", 32, 256, 1, Format::F16);
    is(qsa.moe.shared.weight, "blk.3.ffn_gate_inp_shexp.weight", 1, 256, 1, Format::F32);
    let mtp = roles.mtp.expect("a draft block");
    is(mtp.eh_proj, "blk.8.nextn.eh_proj.weight", 256, 512, 1, Format::Q8_0);
    is(mtp.head_mixer.norm, "blk.8.nextn.hc_head_norm.weight", 1, 1024, 1, Format::F32);
    assert_eq!((mtp.embed_tokens, mtp.shared_head_head), (None, None));
}

/// Oracle: the shapes that were written. (That fused experts give the same answers is the engine's test.)
#[test]
fn fused_experts_are_found() {
    let (_, roles, _) = changed(|parts| {
        for block in 0..5 {
            let gate = parts.remove(&format!("blk.{block}.ffn_gate_exps.weight"));
            let up = parts.remove(&format!("blk.{block}.ffn_up_exps.weight"));
            let name = format!("blk.{block}.ffn_gate_up_exps.weight");
            let bytes = [gate.bytes, up.bytes].concat();
            parts.tensors.push(Part { name, shape: vec![64, 64, 8], ty: TensorType::F32, bytes });
        }
    });
    let roles = roles.expect("finds");
    let draft = &roles.mtp.as_ref().expect("a draft").layer;
    for layer in roles.trunk.layers.iter().chain([draft]) {
        assert!(matches!(layer.moe.gate_up, GateUp::Fused(both) if (both.rows, both.experts) == (64, 8)));
    }
}

/// Oracle: trap 17 of the spec: the forms that published files use for the same bytes.
#[test]
fn other_forms_of_the_same_tensors_are_accepted() {
    let (_, roles, warnings) = changed(|parts| {
        parts.get("blk.0.hc_attn_norm.weight").shape = vec![64, 4];
        parts.get("blk.1.ple_norm_key.weight").shape = vec![64, 4];
        parts.get("output_hc_norm.weight").shape = vec![256, 1, 1];
        parts.get("blk.0.ffn_gate_inp_shexp.weight").shape = vec![64];
        *parts.get("blk.1.ple_conv1d.weight") =
            Part::zeros("blk.1.ple_conv1d.weight", &[4, 256], TensorType::BF16);
        // A table padded further, a draft block with its own ends, a head that is the embedding.
        *parts.get("per_layer_token_embd.weight") =
            Part::zeros("per_layer_token_embd.weight", &[8, 1024], TensorType::F16);
        for name in ["embed_tokens", "shared_head_head"] {
            let name = format!("blk.4.nextn.{name}.weight");
            parts.tensors.push(Part::zeros(&name, &[64, 384], TensorType::Q8_0));
        }
        parts.remove("output.weight");
    });
    let roles = roles.expect("accepted");
    assert_eq!((warnings.len(), roles.unused.len()), (0, 0));
    let norm = roles.trunk.layers[0].attn_mixer.norm;
    assert_eq!((norm.rows, norm.k), (1, 256));
    assert_eq!(roles.trunk.output, roles.trunk.token_embd);
    assert_eq!(roles.trunk.ngram_table.expect("a table").rows, 1024);
    let mtp = roles.mtp.expect("a draft block");
    assert!(mtp.embed_tokens.is_some() && mtp.shared_head_head.is_some());
}

/// Oracle: one factor, or one per expert, as NVFP4 files carry them.
#[test]
fn nvfp4_scales_are_found() {
    let (gguf, roles, _) = changed(|parts| {
        for (name, shape) in [("ffn_gate_exps", vec![64, 32, 8]), ("ffn_gate_shexp", vec![64, 32])] {
            let name = format!("blk.0.{name}.weight");
            *parts.get(&name) = Part::zeros(&name, &shape, TensorType::NVFP4);
        }
        parts.tensors.push(Part::zeros("blk.0.ffn_gate_exps.scale", &[8], TensorType::F32));
        parts.tensors.push(Part::zeros("blk.0.ffn_gate_shexp.scale", &[1], TensorType::F32));
    });
    let roles = roles.expect("finds");
    assert_eq!(roles.unused, [""; 0]);
    let moe = roles.trunk.layers[0].moe;
    let GateUp::Split { gate, up } = moe.gate_up else { panic!("split") };
    let name = |index: Option<usize>| index.map(|i| gguf.tensors()[i].name.as_str());
    assert_eq!(name(gate.scale), Some("blk.0.ffn_gate_exps.scale"));
    assert_eq!(name(moe.shared.gate.scale), Some("blk.0.ffn_gate_shexp.scale"));
    assert_eq!(up.scale, None);
}

/// Oracle: the sentence each mistake promises.
#[test]
fn wrong_tensors_are_refused() {
    let refused = |change: &dyn Fn(&mut Parts)| {
        let message = changed(change).1.map(|_| ()).expect_err("refused").to_string();
        assert!(!message.contains('\n'));
        message
    };
    let shaped = |name: &'static str, shape: &'static [u64], ty: TensorType| {
        refused(&move |parts| *parts.get(name) = Part::zeros(name, shape, ty))
    };
    for name in ["blk.3.attn_k.weight", "blk.0.ssm_a", "output_hc_up.weight", "blk.4.nextn.enorm.weight"] {
        let message = refused(&|parts| drop(parts.remove(name)));
        assert!(
            message.contains(&format!("no tensor `{name}`")) && message.contains("download"),
            "{message}"
        );
    }
    let message = shaped("blk.3.attn_k.weight", &[64, 32], TensorType::F32);
    assert!(message.contains("[64, 32]") && message.contains("[64, 64]"), "{message}");
    let message = shaped("blk.0.hc_attn_norm.weight", &[4, 64], TensorType::F32);
    assert!(message.contains("[256] or [64, 4]"), "{message}");
    assert!(shaped("blk.0.ffn_down_exps.weight", &[32, 64, 4], TensorType::F32).contains("[32, 64, 8]"));
    let message = shaped("blk.0.hc_attn_norm.weight", &[256], TensorType::Q8_0);
    assert!(message.contains("Q8_0") && message.contains("must be F32"), "{message}");
    let message = shaped("blk.3.attn_k.weight", &[64, 64], TensorType::I32);
    assert!(message.contains("`blk.3.attn_k.weight`") && message.contains("I32"), "{message}");
    let message = shaped("per_layer_token_embd.weight", &[8, 880], TensorType::F32);
    assert!(message.contains("880 rows") && message.contains("888"), "{message}");
    assert!(shaped("per_layer_token_embd.weight", &[16, 888], TensorType::F32).contains("[8, 888]"));
}

/// Oracle: the definition. What has no role is listed; inside a layer it is worth a warning.
#[test]
fn tensors_without_a_role_are_named() {
    let (_, roles, warnings) = changed(|parts| {
        parts.tensors.push(Part::zeros("blk.0.attn_qkv.bias", &[160], TensorType::F32));
        parts.tensors.push(Part::zeros("rope_freqs.weight", &[4], TensorType::F32));
    });
    assert_eq!(roles.expect("finds").unused, ["blk.0.attn_qkv.bias", "rope_freqs.weight"]);
    assert_eq!(warnings, [Warning::UnknownTensors { count: 1, example: "blk.0.attn_qkv.bias".to_owned() }]);
}
