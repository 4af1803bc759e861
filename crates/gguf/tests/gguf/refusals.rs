//! Every kind of bad file, each with the sentence it gets. Oracle: the sentences as a person would want them, with
//! offsets counted by hand from the format's description.

use crate::raw::{Raw, array, entry, pair, string};
use std::io;
use strata_gguf::{Gguf, Header, ReadAt};

/// Offset of the first pair, and of the second in [`Raw::valid`] with another one.
const FIRST: usize = 24;
const SECOND: usize = FIRST + 8 + 20 + 4 + 8 + 4;

fn sentence(bytes: &[u8]) -> String {
    let error = Header::parse(bytes, "m.gguf").map(|_| ()).expect_err("this file should be refused");
    let text = error.to_string();
    assert!(!text.contains('\n'), "{text}");
    text
}

fn refused(raw: &Raw, expected: &str) {
    assert_eq!(sentence(&raw.bytes()), format!("m.gguf: {expected}"));
}

#[test]
fn the_valid_file_is_read() {
    let header = Header::parse(&Raw::valid().bytes()[..], "m.gguf").unwrap();
    assert_eq!(header.metadata.str("general.architecture").unwrap(), "test");
    assert_eq!((header.tensors[0].offset, header.tensors[0].bytes), (128, 32));
    let old = Raw { version: 2, ..Raw::valid() };
    assert_eq!(Header::parse(&old.bytes()[..], "m.gguf").unwrap().version, 2);
}

#[test]
fn magic_and_version() {
    let zip = Raw { magic: *b"PK\x03\x04", ..Raw::valid() };
    refused(&zip, r#"not a GGUF file (it begins with "PK\x03\x04" instead of "GGUF")"#);
    assert_eq!(sentence(b""), r#"m.gguf: not a GGUF file (it begins with nothing instead of "GGUF")"#);
    assert_eq!(sentence(b"<h"), r#"m.gguf: not a GGUF file (it begins with "<h" instead of "GGUF")"#);
    for version in [0, 1, 4] {
        let text = format!(
            "GGUF version {version} is not supported (2 and 3 are); convert the model again with a current converter"
        );
        refused(&Raw { version, ..Raw::valid() }, &text);
    }
    let big_endian = Raw { version: 3u32.swap_bytes(), ..Raw::valid() };
    refused(&big_endian, "this GGUF is big-endian, which is not supported; convert it to little-endian");
}

#[test]
fn truncation() {
    let bytes = Raw::valid().bytes();
    assert_eq!(
        sentence(&bytes[..30]),
        "m.gguf: metadata at offset 24 needs 14 bytes, but the file has only 6 more; \
         it is damaged or only partly downloaded, fetch it again"
    );
    assert_eq!(
        sentence(&bytes[..58]),
        "m.gguf: string length of metadata key `general.architecture` at offset 56 needs 8 bytes, but the file has \
         only 2 more; it is damaged or only partly downloaded, fetch it again"
    );
    assert_eq!(
        sentence(&bytes[..159]),
        "m.gguf: tensor `a` (index entry at offset 68) ends at byte 160, but the file has only 159; \
         it is damaged or only partly downloaded, fetch it again"
    );
    for len in 0..bytes.len() {
        sentence(&bytes[..len]);
    }
}

#[test]
fn counts_that_cannot_be() {
    for count in [u64::MAX, u64::MAX / 14, 1 << 40, 1 << 20] {
        let text = sentence(&Raw { pair_count: Some(count), ..Raw::valid() }.bytes());
        assert!(text.starts_with("m.gguf: metadata at offset 24 needs "), "{text}");
        let text = sentence(&Raw { tensor_count: Some(count), ..Raw::valid() }.bytes());
        assert!(text.starts_with("m.gguf: tensor index at offset 68 needs "), "{text}");
        let long = [&count.to_le_bytes()[..], &8u32.to_le_bytes()].concat();
        let text = sentence(&Raw::valid().pair(long).bytes());
        let known = if count > 65_535 { "metadata key `` at offset 68 is " } else { "metadata key at" };
        assert!(text.starts_with(&format!("m.gguf: {known}")), "{text}");
        for (ty, name) in [(0, "u8"), (6, "f32"), (8, "string"), (9, "array"), (10, "u64")] {
            let raw = Raw::valid().pair(pair("k", 9, &array(ty, count, &[])));
            let left = raw.bytes().len() - (SECOND + 8 + 1 + 4 + 12);
            let text = format!(
                "metadata key `k` at offset 68 is an array of {count} {name}, \
                 which cannot fit into the {left} bytes left in the file"
            );
            refused(&raw, &text);
        }
        let text = sentence(&Raw::valid().pair(pair("k", 8, &count.to_le_bytes())).bytes());
        assert!(text.starts_with("m.gguf: string of metadata key `k` at offset 89 needs "), "{text}");
    }
}

#[test]
fn keys() {
    let with = |bytes| Raw::valid().pair(bytes);
    refused(&with(pair("", 4, &[0; 4])), "metadata key `` at offset 68 is empty");
    refused(
        &with(pair(vec![b'k'; 65_536], 4, &[0; 4])),
        "metadata key `` at offset 68 is 65536 bytes long (at most 65535 are allowed)",
    );
    refused(&with(pair(b"k\xff", 4, &[0; 4])), "metadata key `k\u{fffd}` at offset 68 is not UTF-8");
    refused(
        &with(pair("general.architecture", 4, &[0; 4])),
        "metadata key `general.architecture` at offset 68 occurs twice",
    );
    refused(&with(pair("k", 13, &[0; 8])), "metadata key `k` at offset 68 has unknown value type 13");
    refused(
        &with(pair("k", 9, &array(99, 1, &[0; 8]))),
        "metadata key `k` at offset 68 has unknown value type 99",
    );
    refused(
        &with(pair("k", 8, &string(b"\xc3("))),
        "metadata key `k` at offset 68 is a string that is not UTF-8",
    );
    refused(
        &with(pair("k", 9, &array(8, 2, &[string("a"), string(b"\xff")].concat()))),
        "metadata key `k` at offset 68 is an array whose element 1 is a string that is not UTF-8",
    );
    refused(
        &with(pair("k", 7, &[2])),
        "metadata key `k` at offset 68 is a boolean stored as 2 instead of 0 or 1",
    );
    refused(
        &with(pair("k", 9, &array(7, 3, &[0, 1, 255]))),
        "metadata key `k` at offset 68 is a boolean stored as 255 instead of 0 or 1",
    );
    let nested = |depth: usize| [array(9, 1, &[]).repeat(depth - 1), array(0, 1, &[7])].concat();
    assert!(Header::parse(&with(pair("k", 9, &nested(8))).bytes()[..], "m").is_ok());
    refused(
        &with(pair("k", 9, &nested(9))),
        "metadata key `k` at offset 68 is an array of arrays more than 8 deep",
    );
    // Far deeper than any stack.
    refused(
        &with(pair("k", 9, &nested(100_000))),
        "metadata key `k` at offset 68 is an array of arrays more than 8 deep",
    );
}

#[test]
fn names_are_escaped_and_cut() {
    let text = sentence(&Raw::valid().pair(pair("two\nlines\u{2028}\x1b[31m", 99, &[])).bytes());
    assert_eq!(
        text,
        r"m.gguf: metadata key `two\u{a}lines\u{2028}\u{1b}[31m` at offset 68 has unknown value type 99"
    );
    let text = sentence(&Raw::valid().pair(pair("k".repeat(60_000), 99, &[])).bytes());
    assert!(text.len() < 250, "{text}");
}

#[test]
fn alignments() {
    let with = |bytes: &[u8], ty| Raw::valid().pair(pair("general.alignment", ty, bytes));
    for (value, ty, shown) in [
        (&0u32.to_le_bytes()[..], 4, "0"),
        (&1u32.to_le_bytes(), 4, "1"),
        (&4u32.to_le_bytes(), 4, "4"),
        (&48u32.to_le_bytes(), 4, "48"),
        (&(1u32 << 25).to_le_bytes(), 4, "33554432"),
        (&(1u64 << 63).to_le_bytes(), 10, "9223372036854775808"),
        (&(-32i32).to_le_bytes(), 5, "-32"),
        (&32f32.to_le_bytes(), 6, "32.0"),
        (&string("32"), 8, "\"32\""),
    ] {
        let text = format!(
            "metadata key `general.alignment` at offset 68 is {shown}, \
             but the data alignment must be a power of two from 8 to 16777216"
        );
        refused(&with(value, ty), &text);
    }
    let wide = Raw { alignment: 4096, ..with(&4096u32.to_le_bytes(), 4) };
    let header = Header::parse(&wide.bytes()[..], "m").unwrap();
    assert_eq!((header.alignment, header.tensors[0].offset), (4096, 4096));
}

#[test]
fn tensors() {
    // The second entry begins after the first: name, one dimension, type, offset.
    let at = SECOND + (8 + 1 + 4 + 8 + 4 + 8);
    let with = |bytes| Raw::valid().entry(bytes, 1024);
    let refused = |bytes: Vec<u8>, name: &str, problem: &str| {
        let text = format!("tensor `{name}` (index entry at offset {at}) {problem}");
        refused(&with(bytes), &text);
    };
    refused(entry("", &[8], 0, 32), "", "has an empty name");
    refused(
        entry(vec![b'n'; 65_536], &[8], 0, 32),
        "",
        "has a name of 65536 bytes (at most 65535 are allowed)",
    );
    refused(entry(b"b\xfe", &[8], 0, 32), "b\u{fffd}", "has a name that is not UTF-8");
    refused(entry("a", &[8], 0, 32), "a", "occurs twice");
    refused(entry("b", &[], 0, 32), "b", "has 0 dimensions (1 to 4 are allowed)");
    refused(entry("b", &[1; 5], 0, 32), "b", "has 5 dimensions (1 to 4 are allowed)");
    refused(entry("b", &[8, 0], 0, 32), "b", "has a dimension of length 0");
    refused(
        entry("b", &[8], 43, 32),
        "b",
        "has unknown type id 43; it needs a newer version of this program, or the file is damaged",
    );
    refused(
        entry("b", &[128], 12, 32),
        "b",
        "has rows of 128 values, which is not a multiple of the 256 of a Q4_K block",
    );
    for shape in [[1 << 32, 1 << 32], [u64::MAX - 255, 2], [1 << 63, 1]] {
        for ty in [0, 12, 24] {
            refused(entry("b", &shape, ty, 32), "b", "has more values than can be counted");
        }
    }
    refused(entry("b", &[8], 0, 40), "b", "has its data at 40, which is not a multiple of the alignment 32");
    // The data begins at 160 now; the file has 32 + 1024 bytes of it.
    refused(
        entry("b", &[256, 2], 0, 32),
        "b",
        "ends at byte 2240, but the file has only 1216; it is damaged or only partly downloaded, fetch it again",
    );
    refused(
        entry("b", &[8], 0, u64::MAX - 31),
        "b",
        "ends at byte 18446744073709551615, but the file has only 1216; \
         it is damaged or only partly downloaded, fetch it again",
    );
    refused(entry("b", &[8], 0, 0), "b", "overlaps the data of tensor `a`");
    // By a single byte: 33 bytes of I8 reach into the next 32. Touching is fine.
    let by_one =
        |len| Raw::valid().entry(entry("b", &[len], 24, 32), 32).entry(entry("c", &[32], 24, 64), 32);
    assert!(Header::parse(&by_one(32).bytes()[..], "m").is_ok());
    let text = sentence(&by_one(33).bytes());
    assert!(text.ends_with("overlaps the data of tensor `b`"), "{text}");
    let long = Raw::valid().entry(entry("b", &[64], 0, 32), 256).entry(entry("c", &[8], 0, 96), 0);
    let text = sentence(&long.bytes());
    assert!(
        text.ends_with("tensor `c` (index entry at offset 134) overlaps the data of tensor `b`"),
        "{text}"
    );
}

#[test]
fn removed_types_are_known_by_name() {
    let raw = Raw::valid().entry(entry("b", &[64, 4], 31, 32), 144);
    let header = Header::parse(&raw.bytes()[..], "m").unwrap();
    assert_eq!((header.tensors[1].ty.name(), header.tensors[1].bytes), ("Q4_0_4_4", 144));
}

#[test]
fn what_cannot_be_opened() {
    let folder = tempfile::tempdir().unwrap();
    let text = Gguf::open(folder.path()).unwrap_err().to_string();
    assert_eq!(
        text,
        format!("{}: not a regular file; give the path of a .gguf file", folder.path().display())
    );
    let absent = folder.path().join("absent.gguf");
    let text = Gguf::open(&absent).unwrap_err().to_string();
    assert_eq!(text, format!("{}: cannot open it: No such file or directory (os error 2)", absent.display()));
}

/// A getter's error names the file, the key and both types.
#[test]
fn values_of_another_type() {
    let raw = Raw::valid().pair(pair("big", 10, &(1u64 << 32).to_le_bytes())).pair(pair(
        "list",
        9,
        &array(5, 2, &[1, 0, 0, 0, 255, 255, 255, 255]),
    ));
    let metadata = Header::parse(&raw.bytes()[..], "m.gguf").unwrap().metadata;
    let texts = [
        (metadata.u32("none").map(|_| ()), "metadata key `none` is missing"),
        (
            metadata.u32("big").map(|_| ()),
            "metadata key `big` should be an integer from 0 to 4294967295, but it is u64 4294967296",
        ),
        (
            metadata.f32("general.architecture").map(|_| ()),
            "metadata key `general.architecture` should be a float, but it is string \"test\"",
        ),
        (
            metadata.opt_str("big").map(|_| ()),
            "metadata key `big` should be a string, but it is u64 4294967296",
        ),
        (
            metadata.u64s("list").map(|_| ()),
            "metadata key `list` should be an array of integers that are not negative, but it is array of 2 i32",
        ),
    ];
    for (result, text) in texts {
        assert_eq!(result.unwrap_err().to_string(), format!("m.gguf: {text}"));
    }
    assert_eq!(metadata.u64("big").unwrap(), 1 << 32);
    assert_eq!(metadata.i64s("list").unwrap(), [1, -1]);
    assert_eq!(metadata.opt_u32("none").unwrap(), None);
}

/// A file of any length that costs nothing: `begin`, then zeros.
struct Endless {
    begin: Vec<u8>,
    len: u64,
}

impl ReadAt for Endless {
    fn size(&self) -> io::Result<u64> {
        Ok(self.len)
    }

    fn fill_at(&self, buf: &mut [u8], offset: u64) -> io::Result<()> {
        buf.fill(0);
        let begin = self.begin.get(offset as usize..).unwrap_or_default();
        let here = begin.len().min(buf.len());
        buf[..here].copy_from_slice(&begin[..here]);
        Ok(())
    }
}

/// In a huge file a huge length is inside the file; the limit on headers refuses it before it is allocated.
#[test]
fn headers_of_huge_files_are_bounded() {
    let endless = |raw: Raw| Endless { begin: raw.bytes(), len: 1 << 50 };
    let raw = Raw { data: 0, entries: Vec::new(), ..Raw::valid() };
    let long = raw.clone().pair(pair("k", 8, &(1u64 << 49).to_le_bytes()));
    assert_eq!(
        Header::parse(&endless(long), "m.gguf").unwrap_err().to_string(),
        "m.gguf: string of metadata key `k` at offset 89 needs 562949953421312 bytes, \
         which makes the header longer than 268435456 bytes; the file is damaged"
    );
    let many = Raw { pair_count: Some(1 << 40), ..raw.clone() };
    assert_eq!(
        Header::parse(&endless(many), "m.gguf").unwrap_err().to_string(),
        "m.gguf: metadata at offset 24 needs 15393162788864 bytes, \
         which makes the header longer than 268435456 bytes; the file is damaged"
    );
    let wide = raw.pair(pair("k", 9, &array(12, 1 << 40, &[])));
    assert_eq!(
        Header::parse(&endless(wide), "m.gguf").unwrap_err().to_string(),
        "m.gguf: array of metadata key `k` at offset 93 needs 8796093022208 bytes, \
         which makes the header longer than 268435456 bytes; the file is damaged"
    );
}

/// A source that ends before it said it would is a file that changed, and one that fails says why.
#[test]
fn sources_that_fail() {
    struct Failing(io::ErrorKind);
    impl ReadAt for Failing {
        fn size(&self) -> io::Result<u64> {
            Ok(1000)
        }
        fn fill_at(&self, _: &mut [u8], _: u64) -> io::Result<()> {
            Err(self.0.into())
        }
    }
    let text = |kind| Header::parse(&Failing(kind), "m").unwrap_err().to_string();
    assert_eq!(
        text(io::ErrorKind::UnexpectedEof),
        "m: the file became shorter while in use; leave model files alone while they are open, and start again"
    );
    assert_eq!(text(io::ErrorKind::PermissionDenied), "m: cannot read it: permission denied");
}
