//! The CPU backend from outside: only through the op contract.

mod bits;
mod oracle;
mod reading;
mod rig;
mod state;
