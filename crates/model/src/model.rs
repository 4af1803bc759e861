//! A model file, opened and understood.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use strata_gguf::Gguf;
use xxhash_rust::xxh3::Xxh3;

use crate::hyper::{Hyper, HyperError};
use crate::roles::{Mtp, RoleError, Roles, Trunk};
use crate::template::{Template, TemplateError};
use crate::tokenizer::{Tokenizer, TokenizerError};
use crate::warning::Warning;

/// Why a file can't be used as a model.
#[derive(Debug, thiserror::Error)]
pub enum ModelError {
    /// The file can't be read as GGUF, or a key is missing or of another type; names the file itself.
    #[error(transparent)]
    Gguf(#[from] strata_gguf::Error),
    /// The metadata doesn't describe a usable model.
    #[error("{}: {source}", .file.display())]
    Hyper {
        /// The file.
        file: PathBuf,
        /// What is wrong.
        source: Box<HyperError>,
    },
    /// A tensor is missing or not as it should be.
    #[error("{}: {source}", .file.display())]
    Roles {
        /// The file.
        file: PathBuf,
        /// What is wrong.
        source: Box<RoleError>,
    },
    /// The tokenizer can't be built.
    #[error("{}: {source}", .file.display())]
    Tokenizer {
        /// The file.
        file: PathBuf,
        /// What is wrong.
        source: Box<TokenizerError>,
    },
    /// The chat template can't be compiled.
    #[error("{}: {source}", .file.display())]
    Template {
        /// The file.
        file: PathBuf,
        /// What is wrong.
        source: Box<TemplateError>,
    },
    /// Vocabulary and embedding disagree.
    #[error(
        "{}: the tokenizer has {tokens} tokens but the embedding {rows} rows; the file is damaged or mixed from two models",
        .file.display()
    )]
    Vocabulary {
        /// The file.
        file: PathBuf,
        /// Tokens of the tokenizer.
        tokens: usize,
        /// Rows of the embedding.
        rows: usize,
    },
}

/// Everything a model file says, short of its weights.
#[derive(Debug)]
pub struct Model {
    /// The opened file or files.
    pub gguf: Arc<Gguf>,
    /// Sizes and settings.
    pub hyper: Hyper,
    /// The trunk's tensors.
    pub trunk: Trunk,
    /// The draft block's tensors, if the file has one.
    pub mtp: Option<Mtp>,
    /// Text to tokens and back.
    pub tokenizer: Arc<Tokenizer>,
    /// Messages to text; absent in base models.
    pub template: Option<Template>,
    /// What was wrong or unusual and worked around, to be said once.
    pub warnings: Vec<Warning>,
    /// Names of tensors without a role.
    pub unused: Vec<String>,
}

impl Model {
    /// Opens the model at `path`: a whole file, or any one shard of a split one. Reads headers only.
    ///
    /// # Errors
    /// One sentence about what is wrong with the file and what to do.
    pub fn open(path: &Path) -> Result<Self, ModelError> {
        let gguf = Gguf::open(path)?;
        let mut warnings = Vec::new();
        let file = || path.to_owned();
        let hyper = Hyper::from_gguf(&gguf, &mut warnings).map_err(|source| match source {
            HyperError::Metadata(error) => ModelError::Gguf(error),
            source => ModelError::Hyper { file: file(), source: source.into() },
        })?;
        let Roles { trunk, mtp, unused } = Roles::find(&gguf, &hyper, &mut warnings)
            .map_err(|source| ModelError::Roles { file: file(), source: source.into() })?;
        let tokenizer =
            Tokenizer::from_metadata(gguf.metadata(), &mut warnings).map_err(|source| match source {
                TokenizerError::Metadata(error) => ModelError::Gguf(error),
                source => ModelError::Tokenizer { file: file(), source: source.into() },
            })?;
        if tokenizer.vocab_size() != hyper.vocab {
            let (tokens, rows) = (tokenizer.vocab_size(), hyper.vocab);
            return Err(ModelError::Vocabulary { file: file(), tokens, rows });
        }
        let template = Template::from_metadata(gguf.metadata()).map_err(|source| match source {
            TemplateError::Metadata(error) => ModelError::Gguf(error),
            source => ModelError::Template { file: file(), source: source.into() },
        })?;
        Ok(Self {
            gguf: Arc::new(gguf),
            hyper,
            trunk,
            mtp,
            tokenizer: Arc::new(tokenizer),
            template,
            warnings,
            unused,
        })
    }

    /// A number that tells this model from others: from its metadata, its tensors' names, types, shapes and places, and
    /// samples of its weights. The same file gives the same number in every build. No proof against intent.
    ///
    /// # Errors
    /// If the samples can't be read.
    pub fn fingerprint(&self) -> Result<u64, ModelError> {
        let mut hash = Xxh3::new();
        for (key, value) in self.gguf.metadata().iter() {
            hash.update(format!("{key}={value:?};").as_bytes());
        }
        let tensors = self.gguf.tensors();
        for t in tensors {
            let line = format!("{} {} {:?} {} {};", t.name, t.ty.name(), t.shape, t.offset, t.bytes);
            hash.update(line.as_bytes());
        }
        let step = tensors.len().div_ceil(SAMPLES).max(1);
        for tensor in tensors.iter().step_by(step) {
            let mut sample = [0; 64];
            let len = tensor.bytes.min(64);
            let sample = &mut sample[..len as usize];
            self.gguf.read_at(tensor, (tensor.bytes - len) / 2, sample)?;
            hash.update(sample);
        }
        Ok(hash.digest())
    }
}

/// Tensors whose bytes enter the fingerprint.
const SAMPLES: usize = 64;
