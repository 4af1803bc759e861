//! The table of ggml tensor types: id, name, block length and block bytes of every id ever published.
//!
//! This module owns *layout* (how many bytes a row takes), not meaning: how a block decodes is the business
//! of `strata-quant`, which also says which of these types it can compute with.
//!
//! Invariant: for every type `block_len` and `block_bytes` are non-zero, and ids and names are unique.

use std::fmt;

macro_rules! table {
    ($($(#[$doc:meta])* $variant:ident = $id:literal, $name:literal, $len:literal, $bytes:literal;)+) => {
        /// The element type of a tensor, as its id in the tensor index of a GGUF file names it.
        #[allow(non_camel_case_types)]
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
        pub enum TensorType {
            $($(#[$doc])* $variant,)+
        }

        impl TensorType {
            /// Every type of the table, by ascending id.
            pub const ALL: &'static [TensorType] = &[$(TensorType::$variant),+];

            /// The type with this id, or `None` if no type was ever published under it.
            pub fn from_id(id: u32) -> Option<Self> {
                match id {
                    $($id => Some(Self::$variant),)+
                    _ => None,
                }
            }

            /// The id that GGUF files store.
            pub fn id(self) -> u32 {
                match self { $(Self::$variant => $id,)+ }
            }

            /// The name in common use, e.g. `IQ4_XS`, `Q4_K`, `BF16`.
            pub fn name(self) -> &'static str {
                match self { $(Self::$variant => $name,)+ }
            }

            /// Values in one block; the row length of a tensor of this type is a multiple of it.
            pub fn block_len(self) -> usize {
                match self { $(Self::$variant => $len,)+ }
            }

            /// Bytes of one block.
            pub fn block_bytes(self) -> usize {
                match self { $(Self::$variant => $bytes,)+ }
            }
        }
    };
}

// Columns: id, name, values per block, bytes per block.
table! {
    /// IEEE 754 binary32.
    F32 = 0, "F32", 1, 4;
    /// IEEE 754 binary16.
    F16 = 1, "F16", 1, 2;
    /// 4-bit, one f16 scale per 32.
    Q4_0 = 2, "Q4_0", 32, 18;
    /// 4-bit, f16 scale and minimum per 32.
    Q4_1 = 3, "Q4_1", 32, 20;
    /// Removed before GGUF existed: 4-bit, one f16 scale per 16.
    Q4_2 = 4, "Q4_2", 16, 10;
    /// Removed before GGUF existed: 4-bit, f16 scale and minimum per 16.
    Q4_3 = 5, "Q4_3", 16, 12;
    /// 5-bit, one f16 scale per 32.
    Q5_0 = 6, "Q5_0", 32, 22;
    /// 5-bit, f16 scale and minimum per 32.
    Q5_1 = 7, "Q5_1", 32, 24;
    /// 8-bit, one f16 scale per 32.
    Q8_0 = 8, "Q8_0", 32, 34;
    /// 8-bit activations with their sum per 32 (f16 scale, f16 sum); an intermediate, not a storage format.
    Q8_1 = 9, "Q8_1", 32, 36;
    /// 2-bit super-blocks of 256.
    Q2_K = 10, "Q2_K", 256, 84;
    /// 3-bit super-blocks of 256.
    Q3_K = 11, "Q3_K", 256, 110;
    /// 4-bit super-blocks of 256.
    Q4_K = 12, "Q4_K", 256, 144;
    /// 5-bit super-blocks of 256.
    Q5_K = 13, "Q5_K", 256, 176;
    /// 6-bit super-blocks of 256.
    Q6_K = 14, "Q6_K", 256, 210;
    /// 8-bit activations per 256 with sums; an intermediate, not a storage format.
    Q8_K = 15, "Q8_K", 256, 292;
    /// 2.06 bits, grid of 256 x 8.
    IQ2_XXS = 16, "IQ2_XXS", 256, 66;
    /// 2.31 bits, grid of 512 x 8.
    IQ2_XS = 17, "IQ2_XS", 256, 74;
    /// 3.06 bits, grid of 256 x 4.
    IQ3_XXS = 18, "IQ3_XXS", 256, 98;
    /// 1.56 bits, grid of 2048 x 8.
    IQ1_S = 19, "IQ1_S", 256, 50;
    /// 4-bit with a non-linear code book, one f16 scale per 32.
    IQ4_NL = 20, "IQ4_NL", 32, 18;
    /// 3.44 bits, grid of 512 x 4.
    IQ3_S = 21, "IQ3_S", 256, 110;
    /// 2.56 bits, grid of 1024 x 8.
    IQ2_S = 22, "IQ2_S", 256, 82;
    /// 4.25 bits with a non-linear code book, super-blocks of 256.
    IQ4_XS = 23, "IQ4_XS", 256, 136;
    /// Signed 8-bit integers.
    I8 = 24, "I8", 1, 1;
    /// Signed 16-bit integers.
    I16 = 25, "I16", 1, 2;
    /// Signed 32-bit integers.
    I32 = 26, "I32", 1, 4;
    /// Signed 64-bit integers.
    I64 = 27, "I64", 1, 8;
    /// IEEE 754 binary64.
    F64 = 28, "F64", 1, 8;
    /// 1.75 bits, grid of 2048 x 8.
    IQ1_M = 29, "IQ1_M", 256, 56;
    /// bfloat16: the upper half of binary32.
    BF16 = 30, "BF16", 1, 2;
    /// Removed: `Q4_0` with the blocks of 4 rows interleaved by 4 bytes.
    Q4_0_4_4 = 31, "Q4_0_4_4", 32, 18;
    /// Removed: `Q4_0` with the blocks of 4 rows interleaved by 8 bytes.
    Q4_0_4_8 = 32, "Q4_0_4_8", 32, 18;
    /// Removed: `Q4_0` with the blocks of 8 rows interleaved by 8 bytes.
    Q4_0_8_8 = 33, "Q4_0_8_8", 32, 18;
    /// Ternary, 1.69 bits.
    TQ1_0 = 34, "TQ1_0", 256, 54;
    /// Ternary, 2.06 bits.
    TQ2_0 = 35, "TQ2_0", 256, 66;
    /// Removed: `IQ4_NL` with the blocks of 4 rows interleaved by 4 bytes.
    IQ4_NL_4_4 = 36, "IQ4_NL_4_4", 32, 18;
    /// Removed: `IQ4_NL` with the blocks of 4 rows interleaved by 8 bytes.
    IQ4_NL_4_8 = 37, "IQ4_NL_4_8", 32, 18;
    /// Removed: `IQ4_NL` with the blocks of 8 rows interleaved by 8 bytes.
    IQ4_NL_8_8 = 38, "IQ4_NL_8_8", 32, 18;
    /// OCP microscaling FP4: E2M1 values, one E8M0 scale per 32.
    MXFP4 = 39, "MXFP4", 32, 17;
    /// FP4 of E2M1 values with an E4M3 scale per 16, in blocks of 64.
    NVFP4 = 40, "NVFP4", 64, 36;
    /// 1-bit, one f16 scale per 128.
    Q1_0 = 41, "Q1_0", 128, 18;
    /// 2-bit, one f16 scale per 64.
    Q2_0 = 42, "Q2_0", 64, 18;
}

impl TensorType {
    /// Bytes of a row of `row_len` values; `None` if that is no whole number of blocks or exceeds `u64`.
    pub fn row_bytes(self, row_len: u64) -> Option<u64> {
        let block_len = self.block_len() as u64;
        if !row_len.is_multiple_of(block_len) {
            return None;
        }
        (row_len / block_len).checked_mul(self.block_bytes() as u64)
    }
}

impl fmt::Display for TensorType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Oracle: the definition of the table: ids find their type again and have no gap, names are told apart in any case.
    #[test]
    fn ids_and_names_are_unique() {
        for (i, &ty) in TensorType::ALL.iter().enumerate() {
            assert_eq!(ty.id() as usize, i);
            assert_eq!(TensorType::from_id(ty.id()), Some(ty));
            let alike = |other: &&TensorType| other.name().eq_ignore_ascii_case(ty.name());
            assert_eq!(TensorType::ALL.iter().filter(alike).count(), 1, "{ty}");
            assert!(ty.block_len() > 0 && ty.block_bytes() > 0);
        }
        assert_eq!(TensorType::ALL.len(), 43);
        assert_eq!(TensorType::from_id(43), None);
        assert_eq!(TensorType::from_id(u32::MAX), None);
    }

    /// Oracle: counted by hand. A row is whole blocks, and no length overflows.
    #[test]
    fn rows_are_whole_blocks() {
        assert_eq!(TensorType::Q4_K.row_bytes(2560), Some(1440));
        assert_eq!(TensorType::Q4_K.row_bytes(2561), None);
        assert_eq!(TensorType::F32.row_bytes(3), Some(12));
        assert_eq!(TensorType::F32.row_bytes(u64::MAX), None);
        assert_eq!(TensorType::IQ4_XS.row_bytes(0), Some(0));
    }
}
