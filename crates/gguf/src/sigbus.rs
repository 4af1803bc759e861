//! The fault guard: a mapped file that shrinks ends the program with a sentence instead of a bare `SIGBUS`.
//!
//! Reading a page of a map that is no longer backed by the file raises `SIGBUS`. Nothing in Rust can turn that
//! into an error value, so the guard's signal handler looks up which map was touched, removes the half-written
//! files that it was told of (`RemoveOnFault`), writes one line that names the file, and leaves with
//! [`EXIT_CODE`]. Maps register themselves here (`Watch`); the binary decides whether the guard is active
//! ([`install`]).
//!
//! Invariant: a slot of the table is in one of three states: free (`start` 0), claimed by a thread that fills or
//! clears it (`start` is `CLAIMED`), or published (`start` an address, and every other field valid). The handler
//! reads only published slots and only atomics, allocates nothing, takes no lock and calls only `unlink`, `write`,
//! `pause`, `_exit`, `sigaction` and `raise`, which are async-signal-safe. A path to be removed belongs to whoever
//! takes its pointer out of the list: its owner, who frees it, or the handler.
//!
//! This is one of the crate's two modules with `unsafe`: signal handling has no safe form.

#![allow(unsafe_code)]

use crate::error::{Error, printable_path};
use std::ffi::{CString, c_char};
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::ptr::null_mut;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU8, AtomicUsize, Ordering};

/// The exit code of a program that the guard ends (`EX_IOERR` of `sysexits.h`).
pub const EXIT_CODE: i32 = 74;

/// How many maps can be watched at once.
const SLOTS: usize = 1024;
/// Bytes of a file name that are kept; of a longer one the end, which tells more.
const NAME: usize = 240;
/// A `start` that no map can have.
const CLAIMED: usize = usize::MAX;

struct Slot {
    start: AtomicUsize,
    end: AtomicUsize,
    name_len: AtomicUsize,
    name: [AtomicU8; NAME],
}

static TABLE: [Slot; SLOTS] = [const {
    Slot {
        start: AtomicUsize::new(0),
        end: AtomicUsize::new(0),
        name_len: AtomicUsize::new(0),
        name: [const { AtomicU8::new(0) }; NAME],
    }
}; SLOTS];

/// A map being watched, until this is dropped.
#[derive(Debug)]
pub(crate) struct Watch {
    slot: usize,
}

impl Watch {
    /// Watches the `len` bytes from address `start`, which are a map of the file at `path`.
    pub(crate) fn new(start: usize, len: usize, path: &Path) -> Result<Self, Error> {
        let name = printable_path(path);
        let claim = |slot: &Slot| {
            slot.start.compare_exchange(0, CLAIMED, Ordering::Acquire, Ordering::Relaxed).is_ok()
        };
        let Some(at) = TABLE.iter().position(claim) else {
            return Err(Error::TooManyMappings { file: name, limit: SLOTS });
        };
        let slot = &TABLE[at];
        let kept = &name.as_bytes()[name.len().saturating_sub(NAME)..];
        for (to, &byte) in slot.name.iter().zip(kept) {
            to.store(byte, Ordering::Relaxed);
        }
        slot.name_len.store(kept.len(), Ordering::Relaxed);
        slot.end.store(start.saturating_add(len), Ordering::Relaxed);
        slot.start.store(start, Ordering::Release);
        Ok(Self { slot: at })
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        TABLE[self.slot].start.store(0, Ordering::Release);
    }
}

/// A place in the list of files to be removed. Places are used again, never freed.
#[derive(Debug)]
struct Place {
    /// From `CString::into_raw`; null in a place that is free.
    path: AtomicPtr<c_char>,
    next: AtomicPtr<Place>,
}

/// The first place.
static DOOMED: AtomicPtr<Place> = AtomicPtr::new(null_mut());

fn places() -> impl Iterator<Item = &'static Place> {
    let mut at = DOOMED.load(Ordering::Acquire);
    std::iter::from_fn(move || {
        // SAFETY: null, or a place that `RemoveOnFault::new` leaked, published after it was complete.
        let place = unsafe { at.as_ref() }?;
        at = place.next.load(Ordering::Relaxed);
        Some(place)
    })
}

/// A half-written file, which the guard removes if it ends the program before this is dropped.
///
/// The path is taken as it is: a relative one is looked up in the working folder of that time.
#[derive(Debug)]
pub(crate) struct RemoveOnFault(&'static Place);

impl RemoveOnFault {
    /// Names the file at `path`, which need not exist. Refuses a path that holds a zero byte.
    pub(crate) fn new(path: &Path) -> io::Result<RemoveOnFault> {
        let path = CString::new(path.as_os_str().as_bytes())?.into_raw();
        let claim = |place: &&Place| {
            place.path.compare_exchange(null_mut(), path, Ordering::AcqRel, Ordering::Relaxed).is_ok()
        };
        if let Some(place) = places().find(claim) {
            return Ok(RemoveOnFault(place));
        }
        let place = Box::leak(Box::new(Place { path: AtomicPtr::new(path), next: AtomicPtr::default() }));
        let mut first = DOOMED.load(Ordering::Relaxed);
        loop {
            *place.next.get_mut() = first;
            match DOOMED.compare_exchange_weak(first, place, Ordering::AcqRel, Ordering::Relaxed) {
                Ok(_) => return Ok(RemoveOnFault(place)),
                Err(other) => first = other,
            }
        }
    }
}

impl Drop for RemoveOnFault {
    fn drop(&mut self) {
        let path = self.0.path.swap(null_mut(), Ordering::AcqRel);
        if !path.is_null() {
            // SAFETY: from `into_raw` in `new`; taking it out of the list made it ours alone.
            drop(unsafe { CString::from_raw(path) });
        }
    }
}

/// Removes every half-written file of this process, which is to end now without a drop.
pub fn remove_unfinished() {
    for place in places() {
        let path = place.path.swap(null_mut(), Ordering::AcqRel);
        if !path.is_null() {
            // SAFETY: a string that ends in zero, from `CString::into_raw`. Taken out of the list it is ours
            // alone; it is never freed, as the handler must not. What can't be removed stays: nothing can be done.
            unsafe { libc::unlink(path) };
        }
    }
}

/// Whether a thread is on its way to the end.
static ENDING: AtomicBool = AtomicBool::new(false);

/// Makes the guard active in this process, for all maps of all models, for good. Calling it again is harmless.
///
/// Faults that concern no watched map are left to the default action.
///
/// # Errors
/// What the operating system says.
pub fn install() -> io::Result<()> {
    // SAFETY: `action` is a plain C struct for which zeros are valid; all fields that matter are set below. The
    // handler has the signature that SA_SIGINFO asks for and does only what is async-signal-safe (module text).
    let done = unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        action.sa_sigaction = on_fault as extern "C" fn(_, _, _) as usize;
        action.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK;
        libc::sigemptyset(&mut action.sa_mask);
        libc::sigaction(libc::SIGBUS, &action, std::ptr::null_mut())
    };
    if done == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

extern "C" fn on_fault(signal: libc::c_int, info: *mut libc::siginfo_t, _context: *mut libc::c_void) {
    // SAFETY: the kernel calls a SA_SIGINFO handler with a valid `info`, which for SIGBUS carries an address.
    let (address, sent_by_fault) = unsafe { ((*info).si_addr() as usize, (*info).si_code > 0) };
    if sent_by_fault && let Some(slot) = watched(address) {
        while ENDING.swap(true, Ordering::AcqRel) {
            // SAFETY: `pause` has no preconditions. Another thread is about to end the program.
            unsafe { libc::pause() };
        }
        remove_unfinished();
        report(slot);
        // SAFETY: `_exit` may be called anywhere; it runs no destructors and flushes nothing.
        unsafe { libc::_exit(EXIT_CODE) }
    }
    // SAFETY: as in `install`; the default action has no handler to get wrong. A fault happens again when this
    // returns and then takes the default action; a signal that was sent is sent once more.
    unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        action.sa_sigaction = libc::SIG_DFL;
        libc::sigaction(signal, &action, std::ptr::null_mut());
        if !sent_by_fault {
            libc::raise(signal);
        }
    }
}

/// The published slot whose map holds `address`.
fn watched(address: usize) -> Option<&'static Slot> {
    TABLE.iter().find(|slot| {
        let start = slot.start.load(Ordering::Acquire);
        start != 0 && start != CLAIMED && start <= address && address < slot.end.load(Ordering::Relaxed)
    })
}

/// Writes the sentence to standard error.
fn report(slot: &Slot) {
    const BEFORE: &[u8] = b"strata: ";
    const AFTER: &[u8] = b" was truncated or became unreadable while in use; \
        leave model files alone while they are open, and start again\n";
    let mut line = [0u8; BEFORE.len() + NAME + AFTER.len()];
    let name_len = slot.name_len.load(Ordering::Relaxed).min(NAME);
    let len = BEFORE.len() + name_len + AFTER.len();
    line[..BEFORE.len()].copy_from_slice(BEFORE);
    for (to, from) in line[BEFORE.len()..].iter_mut().zip(&slot.name[..name_len]) {
        *to = from.load(Ordering::Relaxed);
    }
    line[BEFORE.len() + name_len..len].copy_from_slice(AFTER);
    let line = &line[..len];
    // SAFETY: the pointer and length are those of a live slice. What can't be written is lost: there is nobody
    // left to tell.
    unsafe {
        libc::write(libc::STDERR_FILENO, line.as_ptr().cast(), line.len());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Oracle: the ranges registered. Also that a full table is an error and that slots come back.
    #[test]
    fn the_table_finds_maps_by_address() {
        const BASE: usize = 1 << 40;
        let path = |i: usize| format!("{}/{i}.gguf", "d".repeat(300));
        let watches: Vec<Watch> =
            (0..SLOTS).map(|i| Watch::new(BASE + i * 100, 50, path(i).as_ref()).unwrap()).collect();
        let error = Watch::new(1, 1, "one/more.gguf".as_ref()).unwrap_err();
        assert_eq!(error.to_string(), "one/more.gguf: too many mapped files (at most 1024 at once)");
        for i in [0, 1, 500, SLOTS - 1] {
            let name = |address| {
                let slot = watched(address)?;
                let bytes = slot.name.iter().take(slot.name_len.load(Ordering::Relaxed));
                Some(bytes.map(|b| b.load(Ordering::Relaxed)).collect::<Vec<u8>>())
            };
            let text = path(i);
            let kept = &text.as_bytes()[text.len() - NAME..];
            assert_eq!(name(BASE + i * 100).as_deref(), Some(kept));
            assert_eq!(name(BASE + i * 100 + 49).as_deref(), Some(kept));
            assert_eq!(name(BASE + i * 100 + 50), None);
        }
        drop(watches);
        assert!(watched(BASE).is_none());
        assert!(Watch::new(BASE, 1, "again.gguf".as_ref()).is_ok());
    }

    /// Oracle: the list before. Places come back, whoever used them.
    #[test]
    fn places_are_used_again() {
        let name = || RemoveOnFault::new("half.part".as_ref()).unwrap();
        let all: Vec<RemoveOnFault> = (0..100).map(|_| name()).collect();
        drop(all);
        let before = places().count();
        let again: Vec<RemoveOnFault> = (0..50).map(|_| name()).collect();
        assert!(before >= 100 && places().count() <= before + 10, "{before}");
        drop(again);
        assert!(RemoveOnFault::new("a\0b".as_ref()).is_err());
    }
}
