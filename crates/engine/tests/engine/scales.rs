//! Files whose NVFP4 tensors have a scale for the whole tensor beside those of the blocks.

use std::collections::BTreeMap;
use std::path::Path;

use strata_gguf::TensorType;
use strata_quant::{Format, Isa};
use strata_synth::Geometry;
use strata_synth::geometry::LayerKind;

use crate::copy::{Part, Parts};
use crate::geometries::model;
use crate::rig::{bits, trunk_and_draft};

const BLOCK: usize = 36;

/// A model all of whose matrices are NVFP4, of blocks whose scales can be doubled three times.
fn base(folder: &tempfile::TempDir) -> Parts {
    let mut geometry = Geometry::tiny();
    (geometry.layers, geometry.pattern) = (2, vec![LayerKind::Gdn, LayerKind::Qsa]);
    // So large that what a norm takes in isn't all the same to it when scaled.
    geometry.epsilon = 0.99;
    (geometry.low_rank, geometry.gdn.key_heads, geometry.gdn.value_heads) = (64, 2, 4);
    (geometry.moe.width, geometry.moe.shared_width) = (64, 64);
    let ngram = geometry.ngram.as_mut().unwrap();
    (ngram.layer, ngram.row) = (0, 64);
    let mut parts = Parts::of(&model(folder, &geometry, &[4]));
    let mut random = 1u64;
    for part in parts.tensors.iter_mut().filter(|part| part.shape.len() > 1 && part.shape[0] % 64 == 0) {
        let mut blocks = Part::zeros(&part.name, &part.shape, TensorType::NVFP4);
        for (i, byte) in blocks.bytes.iter_mut().enumerate() {
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            let any = (random >> 56) as u8;
            *byte = if i % BLOCK < 4 { 0x18 | any & 7 } else { any };
        }
        *part = blocks;
    }
    parts
}

fn is_scaled(part: &Part) -> bool {
    part.ty == TensorType::NVFP4
}

/// How often each matrix of a tensor is doubled: by its scale, or by its blocks' scales.
fn doublings(part: &Part, at: usize) -> Vec<u32> {
    let matrices = part.shape.get(2).copied().unwrap_or(1) as usize;
    // Every other stack of experts has one scale for all.
    let same = part.name.contains("ffn_up_exps");
    (0..matrices).map(|i| if same { 2 } else { 1 + ((at + i) % 3) as u32 }).collect()
}

/// The tensors with their scales beside them.
fn beside(parts: &Parts) -> Vec<Part> {
    let scale = |(at, part): (usize, &Part)| {
        let mut factors: Vec<f32> = doublings(part, at).iter().map(|&n| (1 << n) as f32).collect();
        factors.truncate(if part.name.contains("ffn_up_exps") { 1 } else { factors.len() });
        let name = part.name.replace(".weight", ".scale");
        // Most files have them in F32.
        let half = part.name.contains("shexp");
        let bytes = factors.iter().flat_map(|&x| match half {
            true => strata_quant::math::f32_to_f16(x).to_le_bytes().to_vec(),
            false => x.to_le_bytes().to_vec(),
        });
        let ty = if half { TensorType::F16 } else { TensorType::F32 };
        Part { name, shape: vec![factors.len() as u64], ty, bytes: bytes.collect() }
    };
    parts.tensors.iter().filter(|part| is_scaled(part)).enumerate().map(scale).collect()
}

/// The scales inside the blocks: E4M3 numbers are doubled by adding one to the exponent. Not those of the tensor `but`.
fn inside(parts: &Parts, but: &str) -> Vec<Part> {
    let fold = |(at, part): (usize, &Part)| {
        let mut part = part.clone();
        let doublings = doublings(&part, at);
        let matrix = part.bytes.len() / doublings.len();
        for (i, byte) in part.bytes.iter_mut().enumerate().filter(|(i, _)| i % BLOCK < 4) {
            *byte += if part.name == but { 0 } else { 8 * doublings[i / matrix] as u8 };
        }
        part
    };
    let (scaled, others): (Vec<&Part>, Vec<&Part>) = parts.tensors.iter().partition(|part| is_scaled(part));
    scaled.into_iter().enumerate().map(fold).chain(others.into_iter().cloned()).collect()
}

fn run(path: &Path, window: usize, isa: Isa) -> [Vec<Vec<u32>>; 2] {
    trunk_and_draft(path, window, isa).map(|rows| bits(&rows))
}

/// Oracle: the same numbers in a file without such scales. Powers of two are exact wherever they are applied, so the logits have
/// the same bits; and a scale that is missing in one place changes them.
#[test]
fn scales_of_whole_tensors_count_wherever_there_are_some() {
    let folder = tempfile::tempdir().unwrap();
    let base = base(&folder);
    let write = |tensors: Vec<Part>| Parts { metadata: base.metadata.clone(), tensors }.write(&folder);
    let want = run(&write(inside(&base, "")), 61, Isa::detect());
    let scaled = write([base.tensors.clone(), beside(&base)].concat());
    for (window, isa) in [(61, Isa::detect()), (1, Isa::detect()), (61, Isa::Scalar)] {
        assert!(run(&scaled, window, isa) == want, "windows of {window}, {isa}");
    }
    let mut seen = BTreeMap::new();
    for part in base.tensors.iter().filter(|part| is_scaled(part)) {
        let changed = run(&write(inside(&base, &part.name)), 61, Isa::detect()) != want;
        assert!(changed, "{}: its scale counts nowhere", part.name);
        let role = part.name.rsplit_once('.').unwrap().0;
        *seen.entry(role.rsplit('.').next().unwrap().to_owned()).or_insert(0) += 1;
    }
    for role in ["token_embd", "output", "per_layer_token_embd", "attn_qkv", "attn_output", "eh_proj"] {
        assert!(seen.contains_key(role), "{role}");
    }
    for role in ["ffn_gate_inp", "ffn_gate_exps", "ffn_up_exps", "ffn_down_exps", "ffn_down_shexp"] {
        assert_eq!(seen[role], 3, "{role}");
    }
    assert_eq!(Format::Nvfp4.block_bytes(), BLOCK);
}
