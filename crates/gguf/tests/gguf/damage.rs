//! Damaged files: whatever happens to the bytes, reading ends with a model or with one sentence.

use crate::raw::{Raw, array, entry, pair, string};
use proptest::prelude::*;
use strata_gguf::{Header, join};

/// A file with something of everything.
fn sample() -> Vec<u8> {
    let tokens = [string("a"), string("bc"), string("Ġd")].concat();
    let nested = [array(5, 1, &[1, 0, 0, 0]), array(0, 2, &[3, 4])].concat();
    Raw { alignment: 64, ..Raw::valid() }
        .pair(pair("general.alignment", 4, &64u32.to_le_bytes()))
        .pair(pair("tokens", 9, &array(8, 3, &tokens)))
        .pair(pair("multipliers", 9, &array(10, 2, &[0x11; 16])))
        .pair(pair("nested", 9, &array(9, 2, &nested)))
        .pair(pair("flag", 7, &[1]))
        .pair(pair("eps", 6, &1e-6f32.to_le_bytes()))
        .pair(pair("split.count", 2, &2u16.to_le_bytes()))
        .pair(pair("split.no", 2, &0u16.to_le_bytes()))
        .pair(pair("split.tensors.count", 5, &4i32.to_le_bytes()))
        .entry(entry("b", &[256, 2], 12, 64), 352)
        .entry(entry("c", &[8, 1, 2], 0, 384), 64)
        .bytes()
}

/// What reading `bytes` must keep to, whatever they are. Returns whether they were accepted.
fn check(bytes: &[u8]) -> bool {
    match Header::parse(bytes, "m") {
        Ok(header) => {
            for tensor in &header.tensors {
                assert!(tensor.offset + tensor.bytes <= bytes.len() as u64);
                assert_eq!(tensor.row_bytes() * tensor.rows(), tensor.bytes);
            }
            // As the model it is alone, and as both shards of one.
            for headers in [vec![header.clone()], vec![header.clone(), header]] {
                if let Err(error) = join(headers) {
                    assert!(!error.to_string().contains('\n'));
                }
            }
            true
        }
        Err(error) => {
            let text = error.to_string();
            assert!(text.starts_with("m: ") && !text.contains('\n') && text.len() < 1000, "{text}");
            false
        }
    }
}

/// The undamaged sample is accepted, or the tests below would show nothing.
#[test]
fn the_sample_is_valid() {
    assert!(check(&sample()));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(4000))]

    /// Oracle: no panic, and what is accepted lies inside the file.
    #[test]
    fn flipped_bytes_end_in_a_model_or_a_sentence(
        flips in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..6),
    ) {
        let mut bytes = sample();
        for (at, value) in flips {
            let at = at.index(bytes.len());
            bytes[at] = value;
        }
        check(&bytes);
    }

    /// Numbers from the edges of their range, at any offset.
    #[test]
    fn edge_numbers_end_in_a_model_or_a_sentence(
        at in any::<prop::sample::Index>(),
        value in prop::sample::select(&[
            0, 1, 2, 7, 8, 9, 0x7fff_ffff, 0x8000_0000, 0xffff_ffff, 1 << 32, 1 << 61, i64::MAX as u64, 1 << 63,
            u64::MAX - 31, u64::MAX,
        ][..]),
    ) {
        let mut bytes = sample();
        let at = at.index(bytes.len() - 8);
        bytes[at..at + 8].copy_from_slice(&value.to_le_bytes());
        check(&bytes);
    }

    /// A shorter file is accepted only if no tensor is cut.
    #[test]
    fn truncation_ends_in_a_model_or_a_sentence(len in any::<prop::sample::Index>()) {
        let bytes = sample();
        check(&bytes[..len.index(bytes.len())]);
    }

    /// Bytes that are no file at all, with and without a plausible begin.
    #[test]
    fn noise_is_refused(noise in prop::collection::vec(any::<u8>(), 0..400)) {
        prop_assert!(!check(&noise));
        let begin = [b"GGUF", &3u32.to_le_bytes()[..], &1u64.to_le_bytes(), &1u64.to_le_bytes()].concat();
        check(&[begin, noise].concat());
    }
}
