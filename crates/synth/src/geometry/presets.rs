//! The geometries that have names.

use super::{Attention, Gdn, Geometry, Indexer, LayerKind, Moe, Ngram};

use LayerKind::{Gdn as Recurrent, Qsa as Full};

impl Geometry {
    /// The names of the built-in geometries.
    pub const PRESETS: [&'static str; 3] = ["tiny", "pebble", "flash-next"];

    /// The built-in geometry of this name.
    pub fn preset(name: &str) -> Option<Self> {
        match name {
            "tiny" => Some(Self::tiny()),
            "pebble" => Some(Self::pebble()),
            "flash-next" => Some(Self::flash_next()),
            _ => None,
        }
    }

    /// The model of the committed golden vectors: every part, as small as it goes (0.6 M parameters). Its hash constants
    /// are the golden model's.
    pub fn tiny() -> Self {
        Self {
            name: "tiny".to_owned(),
            vocabulary: 384,
            hidden: 64,
            layers: 4,
            pattern: vec![Recurrent, Recurrent, Recurrent, Full],
            context: 512,
            streams: 4,
            low_rank: 8,
            epsilon: 1e-6,
            attention: Attention {
                heads: 4,
                kv_heads: 2,
                head_dim: 32,
                rotary: 8,
                rope_base: 1e7,
                rope_sections: [2, 1, 1],
            },
            indexer: Indexer { heads: 4, dim: 16, budget: 16, ratio: 4 },
            gdn: Gdn { key_heads: 2, value_heads: 6, key_dim: 16, value_dim: 16, conv_kernel: 4 },
            moe: Moe { experts: 8, used: 2, width: 32, shared_width: 32 },
            ngram: Some(Ngram {
                layer: 1,
                order: 3,
                heads: 4,
                row: 8,
                conv_kernel: 4,
                base: 97,
                divisor: 8,
                seed: 1234,
            }),
            special_tokens: tokens(&[
                ("<|endoftext|>", 2),
                ("<|im_start|>", 376),
                ("<|im_end|>", 377),
                ("<|vision_start|>", 378),
                ("<|vision_end|>", 379),
                ("<|image_pad|>", 380),
                ("<|video_pad|>", 381),
                ("<think>", 382),
                ("</think>", 383),
            ]),
        }
    }

    /// The trained demo model `models/pebble.gguf` (59 M parameters): what its header says.
    pub fn pebble() -> Self {
        Self {
            name: "pebble".to_owned(),
            vocabulary: 12_288,
            hidden: 256,
            layers: 8,
            pattern: vec![Recurrent, Recurrent, Recurrent, Full],
            context: 8192,
            streams: 4,
            low_rank: 32,
            epsilon: 1e-6,
            attention: Attention {
                heads: 4,
                kv_heads: 2,
                head_dim: 64,
                rotary: 16,
                rope_base: 1e7,
                rope_sections: [3, 3, 2],
            },
            indexer: Indexer { heads: 2, dim: 32, budget: 64, ratio: 4 },
            gdn: Gdn { key_heads: 4, value_heads: 8, key_dim: 32, value_dim: 32, conv_kernel: 4 },
            moe: Moe { experts: 64, used: 4, width: 96, shared_width: 96 },
            ngram: Some(Ngram {
                layer: 1,
                order: 3,
                heads: 4,
                row: 32,
                conv_kernel: 4,
                base: 20_000,
                divisor: 128,
                seed: 1234,
            }),
            special_tokens: tokens(&[
                ("<|endoftext|>", 12_275),
                ("<|im_start|>", 12_276),
                ("<|im_end|>", 12_277),
                ("<|vision_start|>", 12_278),
                ("<|vision_end|>", 12_279),
                ("<|image_pad|>", 12_280),
                ("<|video_pad|>", 12_281),
                ("<tool_call>", 12_282),
                ("</tool_call>", 12_283),
                ("<tool_response>", 12_284),
                ("</tool_response>", 12_285),
                ("<think>", 12_286),
                ("</think>", 12_287),
            ]),
        }
    }

    /// Qwen3.8-Flash-Next (125.7 B parameters in the trunk, 51.2 B in the n-gram table): its published configuration.
    pub fn flash_next() -> Self {
        Self {
            name: "flash-next".to_owned(),
            vocabulary: 248_320,
            hidden: 2560,
            layers: 48,
            pattern: vec![Recurrent, Recurrent, Recurrent, Full],
            context: 262_144,
            streams: 4,
            low_rank: 320,
            epsilon: 1e-6,
            attention: Attention {
                heads: 24,
                kv_heads: 2,
                head_dim: 256,
                rotary: 64,
                rope_base: 1e7,
                rope_sections: [11, 11, 10],
            },
            indexer: Indexer { heads: 4, dim: 128, budget: 2048, ratio: 4 },
            gdn: Gdn { key_heads: 16, value_heads: 48, key_dim: 128, value_dim: 128, conv_kernel: 4 },
            moe: Moe { experts: 512, used: 10, width: 640, shared_width: 640 },
            ngram: Some(Ngram {
                layer: 1,
                order: 3,
                heads: 8,
                row: 160,
                conv_kernel: 4,
                base: 20_000_000,
                divisor: 128,
                seed: 1234,
            }),
            special_tokens: tokens(&[
                ("<|endoftext|>", 248_044),
                ("<|im_start|>", 248_045),
                ("<|im_end|>", 248_046),
                ("<|vision_start|>", 248_053),
                ("<|vision_end|>", 248_054),
                ("<|vision_pad|>", 248_055),
                ("<|image_pad|>", 248_056),
                ("<|video_pad|>", 248_057),
                ("<tool_call>", 248_058),
                ("</tool_call>", 248_059),
                ("<tool_response>", 248_066),
                ("</tool_response>", 248_067),
                ("<think>", 248_068),
                ("</think>", 248_069),
            ]),
        }
    }
}

fn tokens(list: &[(&str, u32)]) -> std::collections::BTreeMap<String, u32> {
    list.iter().map(|&(name, id)| (name.to_owned(), id)).collect()
}
