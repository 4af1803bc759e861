//! What a model will consist of, before a byte of it is made.
//!
//! Owns the options and what follows from them: metadata, tensors and their formats. [`write`](crate::write()) makes it real.
//!
//! Invariant: the same options have the same layout; it takes no memory beyond the vocabulary, whatever the model's size.

use strata_gguf::{Metadata, TensorType};
use strata_quant::Format;

use crate::directions::Cut;
use crate::error::SynthError;
use crate::geometry::Geometry;
use crate::metadata::{metadata, table};
use crate::mix::Mix;
use crate::skew::{RouterSkew, Topics};
use crate::tensors::{Role, Tensor, tensors};

/// What model to make.
#[derive(Clone, Debug, PartialEq)]
pub struct Options {
    /// How large its parts are.
    pub geometry: Geometry,
    /// Which formats its tensors have.
    pub formats: Mix,
    /// Decides every weight.
    pub seed: u64,
    /// About how many rows the n-gram table has; the geometry's own number if `None`. It's made of primes, so there are a few
    /// more.
    pub ngram_rows: Option<u64>,
    /// The exponent of Zipf's law that expert use follows (see [`RouterSkew`]); even use if `None`.
    pub router_skew: Option<f64>,
    /// Whether the model has a draft block.
    pub draft: bool,
    /// Where files are split, if they are: none is larger, unless it has a single tensor.
    pub shard_bytes: Option<u64>,
    /// How many threads make it; one per physical core if `None`. Doesn't change a byte.
    pub threads: Option<usize>,
    /// Whether files that exist may be replaced.
    pub overwrite: bool,
}

impl Options {
    /// A model in one file with nothing unusual: the whole n-gram table, no skew, no draft block.
    pub fn new(geometry: Geometry, formats: Mix, seed: u64) -> Self {
        Self {
            geometry,
            formats,
            seed,
            ngram_rows: None,
            router_skew: None,
            draft: false,
            shard_bytes: None,
            threads: None,
            overwrite: false,
        }
    }

    /// How the routers will be skewed; `None` if they won't.
    ///
    /// # Errors
    /// As [`layout`].
    pub fn skew(&self) -> Result<Option<RouterSkew>, SynthError> {
        self.check()?;
        Ok(self.skew_and_cut().map(|(skew, _)| skew))
    }

    pub(crate) fn skew_and_cut(&self) -> Option<(RouterSkew, Cut)> {
        let geometry = &self.geometry;
        let alpha = self.router_skew?;
        let wanted = self.formats.format(Role::Embedding, 0, geometry.layers, geometry.hidden.into());
        let cut = Cut::new(wanted, geometry.hidden);
        let topics = Topics::new(geometry, cut.room(), self.seed);
        Some((RouterSkew::new(geometry, topics, alpha, self.seed), cut))
    }

    fn check(&self) -> Result<(), SynthError> {
        self.geometry.check()?;
        if let Some(alpha) = self.router_skew.filter(|alpha| !(*alpha > 0.0 && *alpha <= 3.0)) {
            return Err(SynthError::Skew(alpha));
        }
        if self.shard_bytes == Some(0) {
            return Err(SynthError::ShardSize);
        }
        if let Some(asked) = self.ngram_rows {
            let Some(ngram) = &self.geometry.ngram else {
                return Err(SynthError::NoTable(self.geometry.name.clone()));
            };
            let heads = u64::from(ngram.all_heads());
            let (least, most) = (2 * heads, heads << 36);
            if !(least..=most).contains(&asked) {
                return Err(SynthError::TableRows { asked, heads, least, most });
            }
        }
        Ok(())
    }
}

/// A tensor that a model will have.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Planned {
    /// Its name in the file.
    pub name: String,
    /// Its shape, the row length first.
    pub shape: Vec<u64>,
    /// What it is for.
    pub role: Role,
    /// Its layer, the draft block's being one past the trunk's; `None` outside the layers.
    pub layer: Option<u32>,
    /// Its format.
    pub format: Format,
    /// Its size.
    pub bytes: u64,
}

impl Planned {
    /// The type in the file.
    pub fn tensor_type(&self) -> TensorType {
        self.format.tensor_type()
    }

    /// Bytes of a row.
    pub(crate) fn row_bytes(&self) -> u64 {
        self.shape[0] / self.format.block_len() as u64 * self.format.block_bytes() as u64
    }
}

/// What a model will consist of.
#[derive(Clone, Debug, PartialEq)]
pub struct Layout {
    /// Its metadata.
    pub metadata: Metadata,
    /// Its tensors, in the order of the file.
    pub tensors: Vec<Planned>,
}

impl Layout {
    /// Bytes of all tensors.
    pub fn bytes(&self) -> u64 {
        self.tensors.iter().map(|t| t.bytes).sum()
    }

    /// Bytes of the routed experts, those of the draft block among them.
    pub fn expert_bytes(&self) -> u64 {
        self.tensors.iter().filter(|t| t.role.is_expert()).map(|t| t.bytes).sum()
    }

    /// Weights of all tensors.
    pub fn weights(&self) -> u64 {
        self.tensors.iter().map(|t| t.shape.iter().product::<u64>()).sum()
    }
}

/// What the model that `options` ask for will consist of.
///
/// # Errors
/// If the geometry is none that a model can have, or an option is out of its range.
pub fn layout(options: &Options) -> Result<Layout, SynthError> {
    options.check()?;
    let Options { geometry, formats, .. } = options;
    let table = geometry.ngram.as_ref().map(|ngram| table(ngram, geometry.vocabulary, options.ngram_rows));
    let rows = table.as_ref().map_or(0, |table| table.rows);
    let cut = options.skew_and_cut().map(|(_, cut)| cut);
    let plan = |Tensor { name, shape, role, layer }: Tensor| {
        let format = match cut {
            Some(cut) if matches!(role, Role::Embedding | Role::Head) => cut.format,
            _ => formats.format(role, layer.unwrap_or(0), geometry.layers, shape[0]),
        };
        let blocks = shape.iter().product::<u64>() / format.block_len() as u64;
        let bytes = blocks * format.block_bytes() as u64;
        Planned { name, shape, role, layer, format, bytes }
    };
    let tensors = tensors(geometry, options.draft, rows).into_iter().map(plan).collect();
    Ok(Layout { metadata: metadata(options, table.as_ref()), tensors })
}
