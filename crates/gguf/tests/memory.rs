//! How much memory reading a header takes, counted by the allocator. One test, because the count is of the process.

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use strata_gguf::write::Outline;
use strata_gguf::{Array, Gguf, Header, Metadata, Value};

struct Counting;

static NOW: AtomicUsize = AtomicUsize::new(0);
static PEAK: AtomicUsize = AtomicUsize::new(0);

// SAFETY: every call is handed on to the system's allocator as it came; counting changes nothing.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        PEAK.fetch_max(NOW.fetch_add(layout.size(), Relaxed) + layout.size(), Relaxed);
        // SAFETY: the caller's obligations are the same.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        NOW.fetch_sub(layout.size(), Relaxed);
        // SAFETY: the caller's obligations are the same.
        unsafe { System.dealloc(at, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// The result of `f`, and the most bytes that were allocated at once on top of what was before.
fn peak<T>(f: impl FnOnce() -> T) -> (T, usize) {
    let before = NOW.load(Relaxed);
    PEAK.store(before, Relaxed);
    let result = f();
    (result, PEAK.load(Relaxed) - before)
}

/// Oracle: the promises of the crate. A count in a small file allocates no more than the file's size allows
/// (here the read buffer and little else), and a vocabulary of 250,000 tokens and merges stays far below 200 MB.
#[test]
fn headers_take_little_memory() {
    // One array that claims to have as many elements as a small file could just hold.
    for (ty, least) in [(0u32, 1usize), (6, 4), (8, 8), (9, 12), (12, 8)] {
        let mut bytes = Vec::new();
        bytes.extend(b"GGUF");
        bytes.extend(3u32.to_le_bytes());
        bytes.extend(0u64.to_le_bytes());
        bytes.extend(1u64.to_le_bytes());
        bytes.extend([1, 0, 0, 0, 0, 0, 0, 0, b'k', 9, 0, 0, 0]);
        bytes.extend(ty.to_le_bytes());
        let room = 60_000;
        for count in [room / least, room / least + 1, usize::MAX] {
            let mut file = bytes.clone();
            file.extend((count as u64).to_le_bytes());
            file.resize(file.len() + room, 0xff);
            let (_, most) = peak(|| Header::parse(&file[..], "m").map(drop));
            assert!(most < 400_000, "type {ty}, {count} elements: {most} bytes");
        }
    }

    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("m.gguf");
    let strings = |len: usize| (0..250_000).map(|i| format!("{i:0len$}")).collect::<Vec<_>>();
    let mut metadata = Metadata::new();
    metadata.insert("tokenizer.ggml.tokens", strings(8));
    metadata.insert("tokenizer.ggml.merges", strings(12));
    metadata.insert("tokenizer.ggml.token_type", vec![1i32; 250_000]);
    Outline::new(metadata).create(&path).unwrap().finish().unwrap();
    let (gguf, most) = peak(|| Gguf::open(&path).unwrap());
    assert!(most < 50_000_000, "{most} bytes");
    let tokens = gguf.metadata().get("tokenizer.ggml.tokens");
    assert!(matches!(tokens, Some(Value::Array(Array::String(tokens))) if tokens[7] == "00000007"));
}
