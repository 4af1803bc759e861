//! Geometry: how large every part of a model is, as plain data.
//!
//! Owns the description, its JSON form and the rules that its numbers obey. The built-in ones are in `presets`. Does not
//! know tensors, formats or weights.
//!
//! Invariant: after [`Geometry::check`] has passed, every product of two dimensions fits 48 bits and every layer's shapes
//! fit together.

mod presets;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::error::SynthError;

/// The special tokens that every geometry names: the end of a text (which also resets the n-grams), and the marks of a turn.
pub(crate) const END_OF_TEXT: &str = "<|endoftext|>";
pub(crate) const TURN_START: &str = "<|im_start|>";
pub(crate) const TURN_END: &str = "<|im_end|>";
/// The placeholder of an image, where a geometry names one.
pub(crate) const IMAGE: &str = "<|image_pad|>";

/// The sizes of a model of architecture `qwen4exp`. Section 1 of the architecture's description has the meaning of each.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Geometry {
    /// A name for reports and for the file's metadata.
    pub name: String,
    /// Tokens, and so rows of the embedding and of the head.
    pub vocabulary: u32,
    /// Width of a residual stream.
    pub hidden: u32,
    /// Layers of the trunk.
    pub layers: u32,
    /// What mixes tokens in each layer: repeated over the layers.
    pub pattern: Vec<LayerKind>,
    /// The longest context the model claims.
    pub context: u32,
    /// Residual streams.
    pub streams: u32,
    /// Inner width of the mixers between streams.
    pub low_rank: u32,
    /// The epsilon of every norm.
    pub epsilon: f32,
    /// The attention of the full layers.
    pub attention: Attention,
    /// What selects the blocks that attention sees.
    pub indexer: Indexer,
    /// The recurrent layers.
    pub gdn: Gdn,
    /// The expert stage of every layer.
    pub moe: Moe,
    /// The n-gram block, if there is one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ngram: Option<Ngram>,
    /// Special tokens by name; `<|endoftext|>`, `<|im_start|>` and `<|im_end|>` are needed. Ids above the highest are
    /// padding, the others ordinary tokens.
    pub special_tokens: BTreeMap<String, u32>,
}

/// What mixes tokens in a layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum LayerKind {
    /// Gated DeltaNet: recurrent.
    Gdn,
    /// Block-sparse attention with an indexer.
    Qsa,
}

/// Attention of the full layers.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Attention {
    /// Query heads: a multiple of the key and value heads.
    pub heads: u32,
    /// Key and value heads.
    pub kv_heads: u32,
    /// Width of a head.
    pub head_dim: u32,
    /// Rotary dimensions of a head: even.
    pub rotary: u32,
    /// Base of the rotary frequencies.
    pub rope_base: f32,
    /// Rotary pairs per axis (time, height, width); they add up to half of `rotary`.
    pub rope_sections: [u32; 3],
}

/// The indexer of the full layers.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Indexer {
    /// Query heads; there is one key head.
    pub heads: u32,
    /// Width of a head: not below the rotary dimensions.
    pub dim: u32,
    /// Tokens that may be selected: a multiple of the ratio.
    pub budget: u32,
    /// Tokens in a block.
    pub ratio: u32,
}

/// The recurrent layers.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Gdn {
    /// Key (and query) heads.
    pub key_heads: u32,
    /// Value heads: a multiple of the key heads.
    pub value_heads: u32,
    /// Width of a key head.
    pub key_dim: u32,
    /// Width of a value head.
    pub value_dim: u32,
    /// Taps of the convolution.
    pub conv_kernel: u32,
}

/// The expert stage.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Moe {
    /// Routed experts per layer.
    pub experts: u32,
    /// Experts per token.
    pub used: u32,
    /// Inner width of a routed expert.
    pub width: u32,
    /// Inner width of the shared expert.
    pub shared_width: u32,
}

/// The n-gram block.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Ngram {
    /// The layer that it precedes, counted from 0; a recurrent one.
    pub layer: u32,
    /// The longest n-gram: heads for 2-grams, ..., `order`-grams.
    pub order: u32,
    /// Heads per length.
    pub heads: u32,
    /// Width of a row of the table.
    pub row: u32,
    /// Taps of the convolution.
    pub conv_kernel: u32,
    /// Every head's rows are a prime from here on.
    pub base: u64,
    /// The table's rows are padded to a multiple of this.
    pub divisor: u64,
    /// Seed of the hash multipliers.
    pub seed: u64,
}

impl Ngram {
    /// Heads of all lengths: rows that a token reads.
    pub fn all_heads(&self) -> u32 {
        self.heads * (self.order - 1)
    }
}

/// What is wrong with a geometry.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum GeometryProblem {
    /// A number is out of its range.
    #[error("`{field}` is {value}; it must be from {least} to {most}")]
    Range {
        /// The field, with its group.
        field: &'static str,
        /// What it is.
        value: u64,
        /// The least it can be.
        least: u64,
        /// The most it can be.
        most: u64,
    },
    /// A number isn't a multiple of another.
    #[error("`{field}` is {value}, which is no multiple of `{of}`, {unit}")]
    Multiple {
        /// The field.
        field: &'static str,
        /// What it is.
        value: u64,
        /// The field that divides it.
        of: &'static str,
        /// What that is.
        unit: u64,
    },
    /// The rotary sections don't fit.
    #[error("`attention.rope_sections` adds up to {sum}; it must be {half}, half of `attention.rotary`")]
    Sections {
        /// Their sum.
        sum: u64,
        /// What it must be.
        half: u64,
    },
    /// A float is out of its range.
    #[error("`{field}` must be a number above {above} and below {below}")]
    Float {
        /// The field.
        field: &'static str,
        /// It must be above this.
        above: &'static str,
        /// And below this.
        below: &'static str,
    },
    /// No layer kinds.
    #[error("`pattern` is empty; give the kinds of the layers, such as [\"gdn\", \"gdn\", \"gdn\", \"qsa\"]")]
    NoPattern,
    /// The n-gram block precedes a full layer.
    #[error("`ngram.layer` is {0}, but that layer isn't recurrent (`gdn`), as it must be")]
    NgramLayer(u32),
    /// A needed special token is missing.
    #[error("`special_tokens` doesn't name `{0}`; add it with its id")]
    NoToken(&'static str),
    /// A special token looks like ordinary text.
    #[error("the special token `{0}` must begin with `<` and end with `>`, or it could be mistaken for text")]
    TokenName(String),
    /// Two special tokens have one id.
    #[error("the special tokens `{0}` and `{1}` have the same id, {2}")]
    SameId(String, String, u32),
    /// Too few tokens for the bytes.
    #[error(
        "`vocabulary` is {vocabulary}; the 256 byte tokens and {special} special tokens below padding need {least}"
    )]
    FewTokens {
        /// The vocabulary.
        vocabulary: u32,
        /// Special tokens.
        special: usize,
        /// The fewest tokens.
        least: u64,
    },
}

/// No dimension is larger than this, so that shapes and sizes stay far from overflow.
const LARGEST: u32 = 1 << 20;

impl Geometry {
    /// The geometry called `name`: a built-in one ([`Geometry::preset`]), or the JSON file at that path.
    ///
    /// # Errors
    /// If it is neither, if the file can't be read or isn't a geometry, or if no model can have it ([`Geometry::check`]).
    pub fn named(name: &str) -> Result<Self, SynthError> {
        if let Some(preset) = Self::preset(name) {
            return Ok(preset);
        }
        let path = Path::new(name);
        if !path.exists() {
            return Err(SynthError::NoSuchGeometry(name.to_owned()));
        }
        Self::read(path)
    }

    /// The geometry in a JSON file.
    ///
    /// # Errors
    /// If the file can't be read or isn't a geometry, or if no model can have it ([`Geometry::check`]).
    pub fn read(path: &Path) -> Result<Self, SynthError> {
        let file = PathBuf::from(path);
        let text = match std::fs::read_to_string(path) {
            Ok(text) => text,
            Err(source) => return Err(SynthError::Read { file, source }),
        };
        let geometry: Self =
            serde_json::from_str(&text).map_err(|source| SynthError::Json { file, source })?;
        geometry.check()?;
        Ok(geometry)
    }

    /// What mixes tokens in trunk layer `layer`.
    pub fn kind(&self, layer: u32) -> LayerKind {
        self.pattern[layer as usize % self.pattern.len()]
    }

    /// The id of a special token.
    pub(crate) fn special(&self, name: &str) -> Option<u32> {
        self.special_tokens.get(name).copied()
    }

    /// One past the highest special token: padding begins there.
    pub(crate) fn padding_from(&self) -> u32 {
        self.special_tokens.values().map(|id| id + 1).max().unwrap_or(0)
    }

    /// Width of all streams side by side.
    pub(crate) fn wide(&self) -> u32 {
        self.streams * self.hidden
    }

    /// Whether a model can have this geometry.
    ///
    /// # Errors
    /// The first rule that it breaks.
    pub fn check(&self) -> Result<(), SynthError> {
        self.problem().map_err(|problem| SynthError::Geometry { name: self.name.clone(), problem })
    }

    fn problem(&self) -> Result<(), GeometryProblem> {
        self.ranges()?;
        let Self { attention, indexer, gdn, moe, .. } = self;
        if self.pattern.is_empty() {
            return Err(GeometryProblem::NoPattern);
        }
        multiple("attention.heads", attention.heads, "attention.kv_heads", attention.kv_heads)?;
        multiple("gdn.value_heads", gdn.value_heads, "gdn.key_heads", gdn.key_heads)?;
        multiple("indexer.budget", indexer.budget, "indexer.ratio", indexer.ratio)?;
        if attention.rotary % 2 == 1 {
            return Err(GeometryProblem::Multiple {
                field: "attention.rotary",
                value: attention.rotary.into(),
                of: "a rotary pair",
                unit: 2,
            });
        }
        range("attention.rotary", attention.rotary, 2u32, attention.head_dim.min(indexer.dim))?;
        let (sum, half) =
            (attention.rope_sections.iter().map(|&n| u64::from(n)).sum(), u64::from(attention.rotary / 2));
        if sum != half {
            return Err(GeometryProblem::Sections { sum, half });
        }
        range("moe.used", moe.used, 1u32, moe.experts)?;
        if let Some(ngram) = &self.ngram {
            range("ngram.layer", ngram.layer, 0u32, self.layers - 1)?;
            if self.kind(ngram.layer) != LayerKind::Gdn {
                return Err(GeometryProblem::NgramLayer(ngram.layer));
            }
        }
        self.tokens()
    }

    /// Every number by itself.
    fn ranges(&self) -> Result<(), GeometryProblem> {
        let Self { attention, indexer, gdn, moe, .. } = self;
        for (field, value, most) in [
            ("vocabulary", self.vocabulary, 1 << 22),
            ("hidden", self.hidden, LARGEST),
            ("layers", self.layers, 4096),
            ("context", self.context, 1 << 30),
            ("streams", self.streams, 64),
            ("low_rank", self.low_rank, LARGEST),
            ("attention.heads", attention.heads, 4096),
            ("attention.kv_heads", attention.kv_heads, 4096),
            ("attention.head_dim", attention.head_dim, 4096),
            ("indexer.heads", indexer.heads, 4096),
            ("indexer.dim", indexer.dim, 4096),
            ("indexer.budget", indexer.budget, LARGEST),
            ("indexer.ratio", indexer.ratio, 4096),
            ("gdn.key_heads", gdn.key_heads, 4096),
            ("gdn.value_heads", gdn.value_heads, 4096),
            ("gdn.key_dim", gdn.key_dim, 4096),
            ("gdn.value_dim", gdn.value_dim, 4096),
            ("gdn.conv_kernel", gdn.conv_kernel, 64),
            ("moe.experts", moe.experts, 1 << 16),
            ("moe.width", moe.width, LARGEST),
            ("moe.shared_width", moe.shared_width, LARGEST),
        ] {
            range(field, value, 1u32, most)?;
        }
        if let Some(ngram) = &self.ngram {
            range("ngram.order", ngram.order, 2u32, 8u32)?;
            for (field, value, most) in [
                ("ngram.heads", u64::from(ngram.heads), 256u64),
                ("ngram.row", ngram.row.into(), 1 << 16),
                ("ngram.conv_kernel", ngram.conv_kernel.into(), 64),
                ("ngram.base", ngram.base, 1 << 36),
                ("ngram.divisor", ngram.divisor, 1 << 32),
            ] {
                range(field, value, 1u32, most)?;
            }
        }
        let float = |field, value: f32, (above, above_text), (below, below_text)| {
            let fits = value > above && value < below;
            fits.then_some(()).ok_or(GeometryProblem::Float { field, above: above_text, below: below_text })
        };
        float("epsilon", self.epsilon, (0.0, "0"), (1.0, "1"))?;
        float("attention.rope_base", attention.rope_base, (1.0, "1"), (1e12, "1e12"))
    }

    fn tokens(&self) -> Result<(), GeometryProblem> {
        let mut names: BTreeMap<u32, &str> = BTreeMap::new();
        for (name, &id) in &self.special_tokens {
            if name.len() < 3 || !name.starts_with('<') || !name.ends_with('>') {
                return Err(GeometryProblem::TokenName(name.clone()));
            }
            range("special_tokens", id, 0u32, self.vocabulary - 1)?;
            if let Some(other) = names.insert(id, name) {
                return Err(GeometryProblem::SameId(other.to_owned(), name.clone(), id));
            }
        }
        for name in [END_OF_TEXT, TURN_START, TURN_END] {
            self.special(name).ok_or(GeometryProblem::NoToken(name))?;
        }
        let special = self.special_tokens.len();
        let least = 256 + special as u64;
        if u64::from(self.padding_from()) < least {
            return Err(GeometryProblem::FewTokens { vocabulary: self.vocabulary, special, least });
        }
        Ok(())
    }
}

fn range(
    field: &'static str,
    value: impl Into<u64>,
    least: impl Into<u64>,
    most: impl Into<u64>,
) -> Result<(), GeometryProblem> {
    let (value, least, most) = (value.into(), least.into(), most.into());
    if (least..=most).contains(&value) {
        Ok(())
    } else {
        Err(GeometryProblem::Range { field, value, least, most })
    }
}

fn multiple(field: &'static str, value: u32, of: &'static str, unit: u32) -> Result<(), GeometryProblem> {
    if value.is_multiple_of(unit) {
        return Ok(());
    }
    Err(GeometryProblem::Multiple { field, value: value.into(), of, unit: unit.into() })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn problem_of(change: impl FnOnce(&mut Geometry)) -> String {
        let mut geometry = Geometry::tiny();
        change(&mut geometry);
        geometry.check().unwrap_err().to_string()
    }

    /// Oracle: the rules of the architecture; each broken one is named with its field.
    #[test]
    fn broken_rules_are_named() {
        for (change, words) in [
            ((|g| g.hidden = 0) as fn(&mut Geometry), "`hidden` is 0"),
            (|g| g.pattern.clear(), "`pattern` is empty"),
            (
                |g| g.attention.kv_heads = 3,
                "`attention.heads` is 4, which is no multiple of `attention.kv_heads`, 3",
            ),
            (|g| g.gdn.value_heads = 5, "`gdn.value_heads`"),
            (|g| g.indexer.budget = 18, "`indexer.budget`"),
            (|g| g.attention.rotary = 7, "`attention.rotary`"),
            (|g| g.attention.rotary = 18, "`attention.rotary` is 18; it must be from 2 to 16"),
            (|g| g.attention.rope_sections = [1, 1, 1], "`attention.rope_sections` adds up to 3"),
            (|g| g.moe.used = 9, "`moe.used` is 9"),
            (|g| g.ngram.as_mut().unwrap().layer = 3, "`ngram.layer` is 3"),
            (|g| g.ngram.as_mut().unwrap().layer = 4, "`ngram.layer` is 4; it must be from 0 to 3"),
            (|g| g.ngram.as_mut().unwrap().order = 1, "`ngram.order`"),
            (|g| g.epsilon = f32::NAN, "`epsilon`"),
            (|g| g.special_tokens.clear(), "doesn't name `<|endoftext|>`"),
            (|g| _ = g.special_tokens.insert("the".into(), 9), "`the` must begin with"),
            (|g| _ = g.special_tokens.insert("<a>".into(), 2), "the same id, 2"),
            (|g| _ = g.special_tokens.insert("<a>".into(), 384), "`special_tokens` is 384"),
            (|g| g.vocabulary = 1 << 30, "`vocabulary`"),
        ] {
            let text = problem_of(change);
            assert!(text.starts_with("geometry `tiny`: ") && text.contains(words), "{text}");
        }
        assert!(
            problem_of(|g| {
                g.special_tokens = [(END_OF_TEXT, 0), (TURN_START, 1), (TURN_END, 200)]
                    .map(|(n, i)| (n.to_owned(), i))
                    .into();
            })
            .contains("the 256 byte tokens and 3 special tokens")
        );
    }

    /// Oracle: the value itself. Presets pass, and come back from their JSON form.
    #[test]
    fn presets_are_valid_and_survive_json() {
        for name in Geometry::PRESETS {
            let geometry = Geometry::preset(name).unwrap();
            geometry.check().unwrap();
            assert_eq!(geometry.name, name);
            let text = serde_json::to_string_pretty(&geometry).unwrap();
            assert_eq!(serde_json::from_str::<Geometry>(&text).unwrap(), geometry, "{text}");
        }
        assert_eq!(Geometry::preset("huge"), None);
    }

    /// Oracle: what the files hold. Neither a name nor a file, no JSON, an unknown field, a broken rule: each a sentence.
    #[test]
    fn bad_files_are_errors() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("g.json");
        let error = |text: &str| {
            std::fs::write(&path, text).unwrap();
            Geometry::named(path.to_str().unwrap()).unwrap_err().to_string()
        };
        assert!(error("{").contains("g.json is no geometry: EOF"));
        let tiny = serde_json::to_value(Geometry::tiny()).unwrap();
        let with = |key: &str, value: serde_json::Value| {
            let mut changed = tiny.clone();
            changed[key] = value;
            changed.to_string()
        };
        assert!(error(&with("widht", 1.into())).contains("unknown field `widht`"));
        assert!(error(&with("hidden", 0.into())).contains("`hidden` is 0"));
        assert!(error(&with("hidden", "x".into())).contains("invalid type"));
        assert!(
            Geometry::named("no-such-thing")
                .unwrap_err()
                .to_string()
                .contains("there is no geometry `no-such-thing`")
        );
        assert!(
            Geometry::named(folder.path().to_str().unwrap())
                .unwrap_err()
                .to_string()
                .starts_with("can't read")
        );
    }
}
