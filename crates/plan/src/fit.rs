//! Whether a plan fits, and the largest setting with which it does.
//!
//! Pure functions of the plan and of numbers that somebody else measured.

use std::fmt;

use serde::Serialize;

use crate::{Bytes, Category, Line, Place, Plan};

/// What the machine lets this process have.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Limits {
    /// Bytes that can still be taken.
    pub available: u64,
    /// Bytes that there are in all.
    pub total: u64,
    /// Which limit that is, e.g. `MemAvailable` or `cgroup memory.max`.
    pub source: String,
}

impl Plan {
    /// Whether the anonymous memory of the plan fits what the machine has.
    ///
    /// Mapped pages don't have to fit: the system drops and reads them again. [`Plan::crowded_out`] says how many.
    ///
    /// # Errors
    /// One sentence with what is needed, what is there and the biggest items.
    pub fn check(&self, limits: &Limits) -> Result<(), PlanError> {
        self.check_in(Place::Heap, limits)
    }

    /// The same of another place that things have to fit in.
    pub fn check_in(&self, place: Place, limits: &Limits) -> Result<(), PlanError> {
        let needed = self.bytes(place);
        if needed <= limits.available && needed < u64::MAX {
            return Ok(());
        }
        let mut biggest = self.lines();
        biggest.retain(|line| line.place == place);
        biggest.sort_by_key(|line| std::cmp::Reverse(line.bytes));
        let mut categories: Vec<(Category, u64)> = Vec::new();
        for line in &biggest {
            match categories.iter_mut().find(|(known, _)| *known == line.category) {
                Some((_, sum)) => *sum = sum.saturating_add(line.bytes),
                None => categories.push((line.category, line.bytes)),
            }
        }
        biggest.truncate(3);
        Err(PlanError { place, needed, limits: limits.clone(), biggest, categories })
    }

    /// Bytes of mapped pages that can't stay in memory beside the plan's anonymous memory, and will be read again
    /// from disk while running.
    pub fn crowded_out(&self, limits: &Limits) -> u64 {
        let room = limits.available.saturating_sub(self.bytes(Place::Heap));
        self.bytes(Place::Mapped).saturating_sub(room)
    }
}

/// A plan that needs more than there is.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub struct PlanError {
    /// Where it does not fit.
    pub place: Place,
    /// What the plan has there, bytes; `u64::MAX` where the sum is larger.
    pub needed: u64,
    /// What there is.
    pub limits: Limits,
    /// What takes up most of it, largest first.
    pub biggest: Vec<Line>,
    /// What each category takes up there, bytes: whoever knows how to make it smaller can say so.
    pub categories: Vec<(Category, u64)>,
}

impl fmt::Display for PlanError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Limits { available, total, source } = &self.limits;
        if self.needed == u64::MAX {
            write!(f, "the plan needs more bytes than a number can hold")?;
        } else {
            let (needed, short) = (Bytes(self.needed), Bytes(self.needed.saturating_sub(*available)));
            write!(f, "the plan needs {needed} of memory, {short} too much")?;
        }
        write!(f, ": {source} leaves {} of {}", Bytes(*available), Bytes(*total))?;
        for (index, line) in self.biggest.iter().enumerate() {
            let lead = if index == 0 { "; the largest parts are " } else { ", " };
            write!(f, "{lead}{} ({}) with {}", line.name, line.category.name(), Bytes(line.bytes))?;
        }
        Ok(())
    }
}

/// The largest value in `lo..=hi` that fits, where everything below a fitting value fits too; `None` where even `lo`
/// doesn't. Asks about `log2(hi - lo)` times.
///
/// ```
/// # use strata_plan::{Category, Limits, Plan, largest};
/// let limits = Limits { available: 1 << 20, total: 1 << 20, source: "MemAvailable".into() };
/// let plan_for = |context: usize| {
///     let mut plan = Plan::new();
///     plan.heap(Category::Cache, "keys and values", context.saturating_mul(24 << 10));
///     plan
/// };
/// assert_eq!(largest(1, 262_144, |context| plan_for(context).check(&limits).is_ok()), Some(42));
/// ```
pub fn largest(mut lo: usize, mut hi: usize, mut fits: impl FnMut(usize) -> bool) -> Option<usize> {
    if lo > hi || !fits(lo) {
        return None;
    }
    // `lo` fits; nothing above `hi` does.
    while lo < hi {
        let middle = lo + (hi - lo).div_ceil(2);
        if fits(middle) {
            lo = middle;
        } else {
            hi = middle - 1;
        }
    }
    Some(lo)
}
