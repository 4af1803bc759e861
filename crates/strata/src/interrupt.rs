//! Signals that ask the program to end.
//!
//! One rule for all commands: such a signal ends the program at once, with 128 and its number as the exit code; half-written
//! files go, and the terminal becomes what it was. What can do better with the first signal says so ([`defer`]): it looks at
//! the flag, or its answer is cancelled ([`cancels`]). A second signal ends the program whatever it is doing, as a
//! thread of its own waits for them.
//!
//! Invariant: a signal is never lost between two answers. What begins an answer forgets earlier cancellations, so
//! [`pass_on`] is called after it; the flag is set before anything is cancelled.

use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU8, Ordering};
use std::sync::{Arc, LazyLock, OnceLock};
use std::{fs, thread};

use rustix::termios::{OptionalActions, Termios, tcgetattr, tcsetattr};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM, SIGXFSZ};
use signal_hook::flag;
use signal_hook::iterator::Signals;
use strata_engine::Canceller;

use crate::failure::Failure;

static RAISED: LazyLock<Arc<AtomicBool>> = LazyLock::new(Arc::default);
/// The last signal.
static SIGNAL: AtomicI32 = AtomicI32::new(SIGINT);
static DEFERRED: AtomicU8 = AtomicU8::new(Deferred::Nothing as u8);
static ANSWER: OnceLock<Canceller> = OnceLock::new();
static TERMINAL: OnceLock<Termios> = OnceLock::new();

/// Which signals don't end the program when they come for the first time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Deferred {
    Nothing,
    /// Ctrl-C.
    Keyboard,
    All,
}

/// Begins to wait for signals. One that whoever started the program wants ignored (`nohup`) stays ignored.
pub fn catch() -> Result<(), Failure> {
    let refused = |error| Failure::failed(format!("the system refuses to hand signals over: {error}"));
    let ignored = ignored();
    let caught = [SIGINT, SIGTERM, SIGHUP].into_iter().filter(|signal| ignored >> (signal - 1) & 1 == 0);
    let mut signals = Signals::new(caught).map_err(refused)?;
    // A handler does for files that grow over the limit set for them: to write then fails. Nobody asks for the flag.
    flag::register(SIGXFSZ, Arc::default()).map_err(refused)?;
    let wait = move || signals.forever().for_each(on_signal);
    let thread = thread::Builder::new().name("signals".into()).stack_size(1 << 20).spawn(wait);
    thread.map(drop).map_err(|error| Failure::failed(format!("the system refuses a thread: {error}")))
}

/// The signals that are ignored, a bit each.
fn ignored() -> u64 {
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    mask.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok()).unwrap_or(0)
}

fn on_signal(signal: i32) {
    SIGNAL.store(signal, Ordering::SeqCst);
    let again = RAISED.swap(true, Ordering::SeqCst);
    let deferred = DEFERRED.load(Ordering::SeqCst);
    let waits = deferred == Deferred::All as u8 || (deferred == Deferred::Keyboard as u8 && signal == SIGINT);
    if again || !waits {
        end();
    }
    pass_on();
}

fn end() -> ! {
    if let Some(terminal) = TERMINAL.get() {
        // The editor also asks for pasted text to be marked.
        let _ = rustix::io::write(rustix::stdio::stdout(), b"\x1b[?2004l");
        let _ = tcsetattr(rustix::stdio::stdin(), OptionalActions::Now, terminal);
    }
    strata_gguf::sigbus::remove_unfinished();
    std::process::exit(code().into());
}

/// The exit code of a program that the last signal ends.
pub fn code() -> u8 {
    128 + SIGNAL.load(Ordering::SeqCst) as u8
}

/// From now on, these signals set the flag and cancel the answer when they come for the first time.
pub fn defer(signals: Deferred) {
    DEFERRED.store(signals as u8, Ordering::SeqCst);
}

/// Remembers the terminal as it is, for an end in the middle of a line.
pub fn keep_terminal() {
    if let Ok(terminal) = tcgetattr(rustix::stdio::stdin()) {
        let _ = TERMINAL.set(terminal);
    }
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
    let deferred = DEFERRED.swap(Deferred::Nothing as u8, Ordering::SeqCst);
    // One of the two threads sees what the other has stored.
    if raised() {
        end();
    }
    let done = work();
    DEFERRED.store(deferred, Ordering::SeqCst);
    done
}

/// Whether a signal came since the last call of [`clear`].
pub fn raised() -> bool {
    RAISED.load(Ordering::SeqCst)
}

/// The flag itself, for work that looks at it on its own.
pub fn flag() -> Arc<AtomicBool> {
    Arc::clone(&RAISED)
}

/// Forgets earlier signals.
pub fn clear() {
    RAISED.store(false, Ordering::SeqCst);
}
