//! The weight formats there are kernels for.
//!
//! Owns the list and its names. Sizes come from [`TensorType`], the one table of the container; what the
//! bytes of a block mean is in [`formats`](crate::formats), one file each.

use strata_gguf::TensorType;

/// A weight format that can be multiplied.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[allow(missing_docs)]
pub enum Format {
    F32,
    F16,
    Bf16,
    Q8_0,
    Q4_0,
    Q4_1,
    Q5_0,
    Q5_1,
    Q2_0,
    Q2K,
    Q3K,
    Q4K,
    Q5K,
    Q6K,
    Iq1S,
    Iq1M,
    Iq2Xxs,
    Iq2Xs,
    Iq2S,
    Iq3Xxs,
    Iq3S,
    Iq4Nl,
    Iq4Xs,
    Mxfp4,
    Nvfp4,
}

/// A tensor type that exists in GGUF but has no kernels here.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("weights of type {} are not supported; convert the model to one of the supported types, such as Q4_K or IQ4_XS", .0.name())]
pub struct UnsupportedType(pub TensorType);

impl Format {
    /// Every format.
    pub const ALL: [Format; 25] = [
        Format::F32,
        Format::F16,
        Format::Bf16,
        Format::Q8_0,
        Format::Q4_0,
        Format::Q4_1,
        Format::Q5_0,
        Format::Q5_1,
        Format::Q2_0,
        Format::Q2K,
        Format::Q3K,
        Format::Q4K,
        Format::Q5K,
        Format::Q6K,
        Format::Iq1S,
        Format::Iq1M,
        Format::Iq2Xxs,
        Format::Iq2Xs,
        Format::Iq2S,
        Format::Iq3Xxs,
        Format::Iq3S,
        Format::Iq4Nl,
        Format::Iq4Xs,
        Format::Mxfp4,
        Format::Nvfp4,
    ];

    /// The tensor type of the container.
    pub fn tensor_type(self) -> TensorType {
        match self {
            Format::F32 => TensorType::F32,
            Format::F16 => TensorType::F16,
            Format::Bf16 => TensorType::BF16,
            Format::Q8_0 => TensorType::Q8_0,
            Format::Q4_0 => TensorType::Q4_0,
            Format::Q4_1 => TensorType::Q4_1,
            Format::Q5_0 => TensorType::Q5_0,
            Format::Q5_1 => TensorType::Q5_1,
            Format::Q2_0 => TensorType::Q2_0,
            Format::Q2K => TensorType::Q2_K,
            Format::Q3K => TensorType::Q3_K,
            Format::Q4K => TensorType::Q4_K,
            Format::Q5K => TensorType::Q5_K,
            Format::Q6K => TensorType::Q6_K,
            Format::Iq1S => TensorType::IQ1_S,
            Format::Iq1M => TensorType::IQ1_M,
            Format::Iq2Xxs => TensorType::IQ2_XXS,
            Format::Iq2Xs => TensorType::IQ2_XS,
            Format::Iq2S => TensorType::IQ2_S,
            Format::Iq3Xxs => TensorType::IQ3_XXS,
            Format::Iq3S => TensorType::IQ3_S,
            Format::Iq4Nl => TensorType::IQ4_NL,
            Format::Iq4Xs => TensorType::IQ4_XS,
            Format::Mxfp4 => TensorType::MXFP4,
            Format::Nvfp4 => TensorType::NVFP4,
        }
    }

    /// The name in common use, such as `IQ4_XS`.
    pub fn name(self) -> &'static str {
        self.tensor_type().name()
    }

    /// Values in one block; rows are whole numbers of blocks.
    pub fn block_len(self) -> usize {
        self.tensor_type().block_len()
    }

    /// Bytes of one block.
    pub fn block_bytes(self) -> usize {
        self.tensor_type().block_bytes()
    }

    /// Bytes of a row of `k` values; `None` if that is no whole number of blocks or doesn't fit a `usize`.
    pub fn row_bytes(self, k: usize) -> Option<usize> {
        k.is_multiple_of(self.block_len()).then(|| k / self.block_len())?.checked_mul(self.block_bytes())
    }

    /// Whether products take f32 columns (F32, F16, BF16); the block formats take quantised ones.
    pub fn is_float(self) -> bool {
        matches!(self, Format::F32 | Format::F16 | Format::Bf16)
    }
}

impl TryFrom<TensorType> for Format {
    type Error = UnsupportedType;

    fn try_from(ty: TensorType) -> Result<Format, UnsupportedType> {
        Format::ALL.into_iter().find(|format| format.tensor_type() == ty).ok_or(UnsupportedType(ty))
    }
}

impl std::fmt::Display for Format {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.pad(self.name())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Oracle: the container's table; every other type is refused by name.
    #[test]
    fn every_type_is_a_format_or_refused_by_name() {
        for &ty in TensorType::ALL {
            match Format::try_from(ty) {
                Ok(format) => assert_eq!(format.tensor_type(), ty),
                Err(refused) => assert!(refused.to_string().contains(ty.name())),
            }
        }
        assert_eq!(Format::ALL.iter().filter(|&&f| Format::try_from(f.tensor_type()) == Ok(f)).count(), 25);
        assert_eq!(Format::Iq4Xs.row_bytes(512), Some(272));
        assert_eq!(Format::Iq4Xs.row_bytes(160), None);
        assert_eq!(Format::F32.row_bytes(usize::MAX), None);
    }
}
