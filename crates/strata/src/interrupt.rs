//! Ctrl-C as a flag instead of an end.
//!
//! Commands that leave files behind, or that go on afterwards (a chat), call [`catch`]; before that a signal ends the
//! process, which then has nothing to tidy up. The handler sets a flag and cancels the answer that [`cancels`] named.
//!
//! This is the binary's only module with `unsafe`: signal handling has no safe form.

use std::io;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};

use strata_engine::Canceller;

static RAISED: AtomicBool = AtomicBool::new(false);
static ANSWER: OnceLock<Canceller> = OnceLock::new();

/// Ctrl-C.
pub const KEYBOARD: &[libc::c_int] = &[libc::SIGINT];
/// All the usual ways to be told to end.
pub const ENDINGS: &[libc::c_int] = &[libc::SIGINT, libc::SIGTERM, libc::SIGHUP];

/// From now on, these signals set the flag instead of ending the process.
pub fn catch(signals: &[libc::c_int]) -> io::Result<()> {
    for &signal in signals {
        // SAFETY: `action` is a plain C struct for which zeros are valid; the handler has the signature of a plain
        // handler, and does only what is async-signal-safe (see `on_signal`).
        let done = unsafe {
            let mut action: libc::sigaction = std::mem::zeroed();
            action.sa_sigaction = on_signal as extern "C" fn(_) as usize;
            action.sa_flags = libc::SA_RESTART;
            libc::sigemptyset(&mut action.sa_mask);
            libc::sigaction(signal, &action, std::ptr::null_mut())
        };
        if done != 0 {
            return Err(io::Error::last_os_error());
        }
    }
    Ok(())
}

/// Names what a signal cancels beside setting the flag. The first one named stays.
pub fn cancels(answer: Canceller) {
    let _ = ANSWER.set(answer);
}

/// Whether a signal came since the last call of [`clear`].
pub fn raised() -> bool {
    RAISED.load(Ordering::Acquire)
}

/// The flag itself, for work that looks at it on its own.
pub fn flag() -> &'static AtomicBool {
    &RAISED
}

/// Forgets earlier signals.
pub fn clear() {
    RAISED.store(false, Ordering::Release);
}

/// Loads and stores of atomics only: reading a `OnceLock` that is set, or is not, is one load.
extern "C" fn on_signal(_signal: libc::c_int) {
    RAISED.store(true, Ordering::Release);
    if let Some(answer) = ANSWER.get() {
        answer.cancel();
    }
}
