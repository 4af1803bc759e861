//! Any bytes read as a GGUF header end in a header that keeps its promises, or in one sentence.
//!
//! The bytes are read twice: as a whole file, and as the begin of a larger one whose other bytes are zeros, so that
//! a header alone is a useful input. What follows an accepted header is read as the next shard of the same model.

#![no_main]

use libfuzzer_sys::fuzz_target;
use std::io;
use strata_gguf::{Error, Header, ReadAt, join};

/// The bytes, followed by zeros.
struct Padded<'a>(&'a [u8]);

const PADDING: u64 = 4 << 20;

impl ReadAt for Padded<'_> {
    fn size(&self) -> io::Result<u64> {
        Ok(self.0.len() as u64 + PADDING)
    }

    fn fill_at(&self, buf: &mut [u8], offset: u64) -> io::Result<()> {
        let rest = self.0.get(offset as usize..).unwrap_or_default();
        let here = rest.len().min(buf.len());
        buf[..here].copy_from_slice(&rest[..here]);
        buf[here..].fill(0);
        Ok(())
    }
}

fuzz_target!(|bytes: &[u8]| {
    check(Header::parse(bytes, "file"));
    let Some(first) = check(Header::parse(&Padded(bytes), "first")) else { return };
    check(join(vec![first.clone()]));
    let rest = bytes.get(first.data_offset as usize..).unwrap_or_default();
    if let Some(second) = check(Header::parse(&Padded(rest), "second")) {
        let names: usize = first.tensors.len() + second.tensors.len();
        if let Some((_, tensors)) = check(join(vec![first, second])) {
            assert_eq!(tensors.len(), names);
        }
    }
});

/// The promise about errors, and for headers those about tensors.
fn check<T: Promises>(result: Result<T, Error>) -> Option<T> {
    match result {
        Ok(value) => {
            value.hold();
            Some(value)
        }
        Err(error) => {
            let text = error.to_string();
            assert!(!text.chars().any(char::is_control) && text.len() < 2000, "{text:?}");
            None
        }
    }
}

trait Promises {
    fn hold(&self);
}

impl Promises for Header {
    fn hold(&self) {
        let mut places: Vec<(u64, u64)> = Vec::new();
        for tensor in &self.tensors {
            assert!(tensor.offset >= self.data_offset && tensor.offset % self.alignment == 0);
            assert!(tensor.offset.checked_add(tensor.bytes).is_some_and(|end| end <= self.len));
            assert_eq!(tensor.row_bytes() * tensor.rows(), tensor.bytes);
            assert_eq!(tensor.ty.row_bytes(tensor.shape[0]), Some(tensor.row_bytes()));
            assert_eq!(tensor.values() / tensor.shape[0], tensor.rows());
            places.push((tensor.offset, tensor.offset + tensor.bytes));
        }
        places.sort_unstable();
        assert!(places.windows(2).all(|pair| pair[0].1 <= pair[1].0));
        for (key, value) in self.metadata.iter() {
            assert!(!key.is_empty() && self.metadata.get(key) == Some(value));
            assert!(!value.to_string().contains('\n'));
        }
    }
}

impl Promises for (strata_gguf::Metadata, Vec<strata_gguf::TensorInfo>) {
    fn hold(&self) {
        let mut names: Vec<&str> = self.1.iter().map(|tensor| tensor.name.as_str()).collect();
        names.sort_unstable();
        assert!(names.windows(2).all(|pair| pair[0] != pair[1]));
    }
}
