//! Signals as events instead of an end.
//!
//! Commands that leave files behind, or that go on afterwards (a chat), call [`catch`]; before that a signal ends the
//! process, which then has nothing to tidy up. A thread waits for signals: it sets a flag, cancels the answer that
//! [`cancels`] named, and ends the program where nobody looks at the flag ([`or_end`]).
//!
//! Invariant: a signal is never lost between two answers. What begins an answer forgets earlier cancellations, so
//! [`pass_on`] is called after it; the flag is set before anything is cancelled.

use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::thread;

use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM, SIGXFSZ};
use signal_hook::flag;
use signal_hook::iterator::Signals;
use strata_engine::Canceller;

use crate::failure::INTERRUPTED;

static RAISED: AtomicBool = AtomicBool::new(false);
/// Whether a signal ends the program at once.
static ENDS: AtomicBool = AtomicBool::new(false);
static ANSWER: OnceLock<Canceller> = OnceLock::new();

/// Ctrl-C.
pub const KEYBOARD: &[i32] = &[SIGINT];
/// All the usual ways to be told to end.
pub const ENDINGS: &[i32] = &[SIGINT, SIGTERM, SIGHUP];

/// From now on, these signals set the flag instead of ending the process.
pub fn catch(signals: &[i32]) -> io::Result<()> {
    let mut signals = Signals::new(signals)?;
    let wait = move || signals.forever().for_each(|_| on_signal());
    thread::Builder::new().name("signals".into()).spawn(wait).map(drop)
}

fn on_signal() {
    RAISED.store(true, Ordering::SeqCst);
    pass_on();
    if ENDS.load(Ordering::SeqCst) {
        std::process::exit(INTERRUPTED.into());
    }
}

/// From now on, a file that grows over the limit that is set for files fails to be written instead of ending the process.
pub fn survive_size_limits() -> io::Result<()> {
    // A handler does, whatever it does. Nobody asks for the flag.
    flag::register(SIGXFSZ, Arc::default()).map(drop)
}

/// Names what a signal cancels beside setting the flag. The first one named stays.
pub fn cancels(answer: Canceller) {
    let _ = ANSWER.set(answer);
}

/// Cancels the answer if a signal came since the last call of [`clear`].
pub fn pass_on() {
    if raised()
        && let Some(answer) = ANSWER.get()
    {
        answer.cancel();
    }
}

/// Does work that can't look at the flag and leaves nothing behind: a signal that comes meanwhile, or that came before,
/// ends the program.
pub fn or_end<T>(work: impl FnOnce() -> T) -> T {
    ENDS.store(true, Ordering::SeqCst);
    // One of the two threads sees what the other has stored.
    if RAISED.load(Ordering::SeqCst) {
        std::process::exit(INTERRUPTED.into());
    }
    let done = work();
    ENDS.store(false, Ordering::SeqCst);
    done
}

/// Whether a signal came since the last call of [`clear`].
pub fn raised() -> bool {
    RAISED.load(Ordering::SeqCst)
}

/// The flag itself, for work that looks at it on its own.
pub fn flag() -> &'static AtomicBool {
    &RAISED
}

/// Forgets earlier signals.
pub fn clear() {
    RAISED.store(false, Ordering::SeqCst);
}
