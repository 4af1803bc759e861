//! How a thread gets its CPU set: always the set of its role, never its parent's.
//!
//! Owns the one system call and the record of its refusal. Which set belongs to which role is `roles`'. A
//! refused set is not fatal (some sandboxes forbid the call): the thread then runs where the system lets it,
//! which is logged and recorded once, see [`refusal`].

use std::io;
use std::sync::OnceLock;
use std::thread::JoinHandle;

use crate::cpuset::CpuSet;
use crate::roles::Role;

/// That the system refused a thread its CPU set.
#[derive(Debug, Clone, thiserror::Error)]
#[error(
    "the system refused to place {role} thread `{thread}` on CPUs {set}: {reason}; \
     such threads run wherever it puts them"
)]
pub struct Refusal {
    /// The thread's role.
    pub role: Role,
    /// The thread's name.
    pub thread: String,
    /// The set it should have had.
    pub set: CpuSet,
    /// The system's word.
    pub reason: String,
}

/// The first refusal of this process. Later ones are not recorded.
static FIRST: OnceLock<Refusal> = OnceLock::new();

/// The first time that a thread of this process was refused its CPU set, if there was one.
pub fn refusal() -> Option<&'static Refusal> {
    FIRST.get()
}

/// The stack of every thread with a role, whatever the environment says of stacks.
const STACK: usize = 8 << 20;

/// Starts a thread that sets its own CPU set to `set` before it runs `f`.
///
/// `name` is what system tools show; Linux keeps 15 bytes of it. Where threads can't be placed (not Linux),
/// `set` is a description only.
///
/// # Errors
/// When the system refuses the thread. A refused set is no error, see [`refusal`].
pub fn spawn<T: Send + 'static>(
    role: Role,
    set: &CpuSet,
    name: &str,
    f: impl FnOnce() -> T + Send + 'static,
) -> io::Result<JoinHandle<T>> {
    let set = set.clone();
    let thread = name.to_owned();
    std::thread::Builder::new().name(name.to_owned()).stack_size(STACK).spawn(move || {
        if let Err(error) = place_this_thread(&set) {
            let refusal = Refusal { role, thread, set, reason: error.to_string() };
            if FIRST.set(refusal.clone()).is_ok() {
                tracing::warn!("{refusal}");
            }
        }
        f()
    })
}

#[cfg(target_os = "linux")]
fn place_this_thread(set: &CpuSet) -> io::Result<()> {
    use rustix::thread::CpuSet as Mask;
    let mut mask = Mask::new();
    for cpu in set.iter() {
        if cpu >= Mask::MAX_CPU {
            return Err(io::Error::other(format!(
                "CPU {cpu} is beyond the {} that the call can name",
                Mask::MAX_CPU
            )));
        }
        mask.set(cpu);
    }
    Ok(rustix::thread::sched_setaffinity(None, &mask)?)
}

#[cfg(not(target_os = "linux"))]
fn place_this_thread(_set: &CpuSet) -> io::Result<()> {
    Ok(())
}

/// The CPUs that the process's first thread may use, as the system call tells it.
#[cfg(target_os = "linux")]
pub(crate) fn process_mask() -> Option<CpuSet> {
    use rustix::thread::CpuSet as Mask;
    let mask = rustix::thread::sched_getaffinity(Some(rustix::process::getpid())).ok()?;
    Some((0..Mask::MAX_CPU).filter(|&cpu| mask.is_set(cpu)).collect())
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use super::*;
    use crate::topology::Topology;

    /// The calling thread's set, by the system call.
    fn mine() -> CpuSet {
        let mask = rustix::thread::sched_getaffinity(None).unwrap();
        (0..rustix::thread::CpuSet::MAX_CPU).filter(|&cpu| mask.is_set(cpu)).collect()
    }

    /// Oracle: the kernel. A thread spawned by a parent that is pinned to one CPU has its role's set, not the
    /// parent's; and so has the thread that it spawns.
    #[test]
    fn a_pinned_parent_is_not_inherited() {
        let topology = Topology::read();
        let (all, last) = (topology.allowed().clone(), CpuSet::from_iter(topology.allowed().iter().last()));
        let one = CpuSet::from_iter(all.first());
        let (pinned, wide, narrow) = spawn(Role::Driver, &one, "pinned", move || {
            let pinned = mine();
            let wide = spawn(Role::Io, &all, "wide", move || {
                let narrow = spawn(Role::Compute, &last, "narrow", mine).unwrap().join().unwrap();
                (mine(), narrow)
            });
            let (wide, narrow) = wide.unwrap().join().unwrap();
            (pinned, wide, narrow)
        })
        .unwrap()
        .join()
        .unwrap();
        assert_eq!(pinned, CpuSet::from_iter(topology.allowed().first()));
        assert_eq!(&wide, topology.allowed());
        assert_eq!(narrow, CpuSet::from_iter(topology.allowed().iter().last()));
    }

    /// Oracle: the documented behaviour. A set that the kernel refuses (no such CPU) is not fatal, and is
    /// recorded once.
    #[test]
    fn a_refusal_is_recorded_once() {
        let absent = [1000, CpuSet::LIMIT - 1].map(|cpu| CpuSet::from_iter([cpu]));
        for set in &absent {
            assert_eq!(spawn(Role::Io, set, "refused", || 7).unwrap().join().unwrap(), 7);
        }
        let refusal = refusal().unwrap();
        assert_eq!((refusal.role, refusal.thread.as_str(), &refusal.set), (Role::Io, "refused", &absent[0]));
        assert!(refusal.to_string().contains("io thread `refused` on CPUs 1000"), "{refusal}");
    }
}
