//! For tests only: golden vectors from disk, and where they are; slow oracles of the ops.
//!
//! Golden files lie under `tests/data` of the repository. `STRATA_GOLDEN` names another folder of the same
//! layout, so that anyone can try other vectors; `STRATA_MODELS` names a folder with the large models that the
//! repository doesn't carry.

pub mod golden;
pub mod oracle;
