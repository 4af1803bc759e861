//! The plan itself: items, the layout of the arena, the check against limits.
//!
//! Owns the arithmetic. Sizes saturate instead of wrapping, and a saturated plan never passes [`Plan::check`]; a
//! caller whose own product could overflow uses `saturating_mul` and gets the same sentence.

use std::fmt;

use serde::Serialize;

use crate::Limits;

/// Every region of the arena starts at a multiple of this, bytes: a cache line, and the widest vector register.
pub const ALIGNMENT: usize = 64;

/// How memory is backed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Place {
    /// Anonymous host memory: it has to fit.
    Heap,
    /// Pages of a file read in place: the system may drop and read them again.
    Mapped,
    /// Read on demand, never resident.
    File,
}

impl Place {
    /// All places.
    pub const ALL: [Place; 3] = [Place::Heap, Place::Mapped, Place::File];

    /// The name in reports.
    pub fn name(self) -> &'static str {
        match self {
            Place::Heap => "heap",
            Place::Mapped => "mapped",
            Place::File => "file",
        }
    }
}

/// What memory is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Category {
    /// Dense weights.
    Weights,
    /// Routed experts.
    Experts,
    /// The n-gram table.
    Table,
    /// State of fixed size per sequence, and its checkpoints.
    Recurrent,
    /// State that grows with the context: keys, values, indexer keys.
    Cache,
    /// Activation buffers, as tall as a window.
    Window,
    /// Everything else that an op needs while it runs.
    Scratch,
}

impl Category {
    /// All categories, in the order of reports.
    pub const ALL: [Category; 7] = [
        Category::Weights,
        Category::Experts,
        Category::Table,
        Category::Recurrent,
        Category::Cache,
        Category::Window,
        Category::Scratch,
    ];

    /// The name in reports.
    pub fn name(self) -> &'static str {
        match self {
            Category::Weights => "weights",
            Category::Experts => "experts",
            Category::Table => "table",
            Category::Recurrent => "recurrent",
            Category::Cache => "cache",
            Category::Window => "window",
            Category::Scratch => "scratch",
        }
    }

    /// The flag that makes this category smaller, where there is one.
    fn flag(self) -> Option<&'static str> {
        match self {
            Category::Cache => Some("--context"),
            Category::Window | Category::Scratch => Some("--window"),
            Category::Weights | Category::Experts | Category::Table | Category::Recurrent => None,
        }
    }
}

/// A piece of the arena. Made by [`Plan::heap`], turned into memory by [`crate::Arena::take`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Region {
    offset: usize,
    bytes: usize,
}

impl Region {
    /// Where it starts in the arena, bytes; a multiple of [`ALIGNMENT`].
    pub fn offset(self) -> usize {
        self.offset
    }

    /// How long it is, bytes, as asked for. It takes up this many rounded up to [`ALIGNMENT`].
    pub fn bytes(self) -> usize {
        self.bytes
    }
}

/// One line of the plan.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Item {
    /// What it is for.
    pub category: Category,
    /// Which one, in a person's words.
    pub name: String,
    /// How it is backed.
    pub place: Place,
    /// What it takes up, bytes; for a region of the arena rounded up to [`ALIGNMENT`].
    pub bytes: u64,
}

/// What goes where. Built by describing; nothing is allocated by it.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct Plan {
    items: Vec<Item>,
    arena_bytes: usize,
}

impl Plan {
    /// A plan of nothing.
    pub fn new() -> Plan {
        Plan::default()
    }

    /// Lays out `bytes` bytes in the arena, behind everything laid out before.
    pub fn heap(&mut self, category: Category, name: impl Into<String>, bytes: usize) -> Region {
        let region = Region { offset: self.arena_bytes, bytes };
        let footprint = bytes.checked_next_multiple_of(ALIGNMENT).unwrap_or(usize::MAX);
        self.arena_bytes = self.arena_bytes.saturating_add(footprint);
        self.item(category, name, Place::Heap, footprint as u64);
        region
    }

    /// Notes memory that is not in the arena: mapped weights, experts in the store's heap tier, a table on disk.
    pub fn item(&mut self, category: Category, name: impl Into<String>, place: Place, bytes: u64) {
        self.items.push(Item { category, name: name.into(), place, bytes });
    }

    /// The lines, in the order of their description.
    pub fn items(&self) -> &[Item] {
        &self.items
    }

    /// Length of the arena that holds every region, bytes.
    pub fn arena_bytes(&self) -> usize {
        self.arena_bytes
    }

    /// What is planned in a place, bytes. `u64::MAX` where the sum is larger.
    pub fn bytes(&self, place: Place) -> u64 {
        sum(self.items.iter().filter(|item| item.place == place))
    }

    /// What is planned for a category in any place, bytes. `u64::MAX` where the sum is larger.
    pub fn by_category(&self, category: Category) -> u64 {
        sum(self.items.iter().filter(|item| item.category == category))
    }

    /// Whether the anonymous memory of the plan fits what the machine has.
    ///
    /// Mapped pages don't have to fit: the system drops and reads them again. [`Plan::crowded_out`] says how many.
    ///
    /// # Errors
    /// One sentence with what is needed, what is there, the biggest items and what to turn down.
    pub fn check(&self, limits: &Limits) -> Result<(), PlanError> {
        let needed = self.bytes(Place::Heap);
        if needed <= limits.available && needed < u64::MAX {
            return Ok(());
        }
        let mut biggest: Vec<&Item> =
            self.items.iter().filter(|item| item.place == Place::Heap && item.bytes > 0).collect();
        biggest.sort_by_key(|item| std::cmp::Reverse(item.bytes));
        let mut flags: Vec<&'static str> = Vec::new();
        for flag in biggest.iter().filter_map(|item| item.category.flag()) {
            if !flags.contains(&flag) {
                flags.push(flag);
            }
        }
        biggest.truncate(3);
        Err(PlanError {
            needed,
            available: limits.available,
            source_of_limit: limits.source.clone(),
            biggest: biggest.into_iter().cloned().collect(),
            flags,
        })
    }

    /// Bytes of mapped pages that can't stay in memory beside the plan's anonymous memory, and will be read again
    /// from disk while running.
    pub fn crowded_out(&self, limits: &Limits) -> u64 {
        let room = limits.available.saturating_sub(self.bytes(Place::Heap));
        self.bytes(Place::Mapped).saturating_sub(room)
    }
}

fn sum<'a>(items: impl Iterator<Item = &'a Item>) -> u64 {
    items.fold(0, |total, item| total.saturating_add(item.bytes))
}

/// A table: a line per item, then the totals per place.
impl fmt::Display for Plan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let width = self.items.iter().map(|item| item.name.chars().count()).max().unwrap_or(0).max(4);
        writeln!(f, "{:<10} {:<width$} {:<6} {:>12}", "for", "what", "place", "MiB")?;
        for category in Category::ALL {
            for item in self.items.iter().filter(|item| item.category == category) {
                let (category, place) = (item.category.name(), item.place.name());
                writeln!(f, "{category:<10} {:<width$} {place:<6} {:>12.2}", item.name, mib(item.bytes))?;
            }
        }
        for place in Place::ALL.into_iter().filter(|&place| self.bytes(place) > 0) {
            writeln!(
                f,
                "{:<10} {:<width$} {:<6} {:>12.2}",
                "total",
                "",
                place.name(),
                mib(self.bytes(place))
            )?;
        }
        Ok(())
    }
}

fn mib(bytes: u64) -> f64 {
    bytes as f64 / (1 << 20) as f64
}

/// A plan that needs more than there is.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub struct PlanError {
    /// Anonymous memory of the plan, bytes; `u64::MAX` where the sum is larger.
    pub needed: u64,
    /// What the machine has left, bytes.
    pub available: u64,
    /// Which limit that is.
    pub source_of_limit: String,
    /// The largest anonymous items, largest first.
    pub biggest: Vec<Item>,
    /// Flags that would make it smaller, the most promising first.
    pub flags: Vec<&'static str>,
}

impl fmt::Display for PlanError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.needed == u64::MAX {
            write!(f, "the plan needs more bytes than a number can hold")?;
        } else {
            write!(f, "the plan needs {:.1} MiB of memory", mib(self.needed))?;
        }
        write!(f, ", but {} leaves {:.1} MiB", self.source_of_limit, mib(self.available))?;
        for (index, item) in self.biggest.iter().enumerate() {
            let lead = if index == 0 { "; the largest parts are " } else { ", " };
            write!(f, "{lead}{} ({}) with {:.1} MiB", item.name, item.category.name(), mib(item.bytes))?;
        }
        if !self.flags.is_empty() {
            write!(f, "; lower {}", self.flags.join(" or "))?;
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
pub fn largest(lo: usize, hi: usize, mut fits: impl FnMut(usize) -> bool) -> Option<usize> {
    if lo > hi || !fits(lo) {
        return None;
    }
    // `good` fits; everything above `bad_below` is either unknown or outside.
    let (mut good, mut high) = (lo, hi);
    while good < high {
        let middle = good + (high - good).div_ceil(2);
        if fits(middle) {
            good = middle;
        } else {
            high = middle - 1;
        }
    }
    Some(good)
}
