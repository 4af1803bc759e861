//! The plan itself: items, their sums, the layout of the arena, the table for people.
//!
//! Sizes saturate instead of wrapping, and a saturated plan never passes [`Plan::check`]: a caller whose own product
//! could overflow uses `saturating_mul` and gets the same sentence.

use std::fmt;

use serde::Serialize;

use crate::Bytes;

/// Every region of the arena starts at a multiple of this, bytes: a cache line, and the widest vector register.
pub const ALIGNMENT: usize = 64;

/// Every region of device memory starts at a multiple of this, bytes: what the widest accesses of a warp fall into.
pub const DEVICE_ALIGNMENT: usize = 256;

/// How memory is backed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Place {
    /// Anonymous host memory: it has to fit.
    Heap,
    /// Pages of a file read in place: the system may drop and read them again.
    Mapped,
    /// Read on demand, or once while loading: never resident.
    File,
    /// Memory of an accelerator: it has to fit there.
    Device,
}

impl Place {
    /// All places.
    pub const ALL: [Place; 4] = [Place::Heap, Place::Mapped, Place::File, Place::Device];

    /// The name in reports.
    pub fn name(self) -> &'static str {
        match self {
            Place::Heap => "heap",
            Place::Mapped => "mapped",
            Place::File => "file",
            Place::Device => "device",
        }
    }
}

/// What memory is for, in the order of reports.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize)]
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

    /// Equal parts of it, each `bytes` long, which may be taken apart from each other. A part takes up its bytes rounded up
    /// to [`ALIGNMENT`]; what doesn't suffice for another belongs to none.
    pub fn parts(self, bytes: usize) -> impl Iterator<Item = Region> {
        let footprint = bytes.max(1).checked_next_multiple_of(ALIGNMENT).unwrap_or(usize::MAX);
        (0..self.bytes / footprint).map(move |at| Region { offset: self.offset + at * footprint, bytes })
    }
}

/// One thing of the plan.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Item {
    /// What it is for.
    pub category: Category,
    /// The layer that it belongs to, if it does to one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub layer: Option<usize>,
    /// Which one, in a person's words.
    pub name: String,
    /// How it is backed.
    pub place: Place,
    /// What it takes up, bytes; for a region of the arena rounded up to [`ALIGNMENT`].
    pub bytes: u64,
}

/// What an item is called: `"rotary table"`, or for layer 3 `(3, "keys")`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Name {
    layer: Option<usize>,
    name: String,
}

impl From<&str> for Name {
    fn from(name: &str) -> Name {
        Name { layer: None, name: name.to_owned() }
    }
}

impl From<String> for Name {
    fn from(name: String) -> Name {
        Name { layer: None, name }
    }
}

impl From<(usize, &str)> for Name {
    fn from((layer, name): (usize, &str)) -> Name {
        Name { layer: Some(layer), name: name.to_owned() }
    }
}

/// The items of one category, name and place, those of all layers added up.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Line {
    /// What they are for.
    pub category: Category,
    /// What they are called.
    pub name: String,
    /// How they are backed.
    pub place: Place,
    /// How many there are.
    pub pieces: usize,
    /// What they take up together, bytes. `u64::MAX` where the sum is larger.
    pub bytes: u64,
}

/// What goes where. Built by describing; nothing is allocated by it.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct Plan {
    items: Vec<Item>,
    arena_bytes: usize,
    device_bytes: usize,
}

impl Plan {
    /// A plan of nothing.
    pub fn new() -> Plan {
        Plan::default()
    }

    /// Lays out `bytes` bytes in the arena, behind everything laid out before.
    pub fn heap(&mut self, category: Category, name: impl Into<Name>, bytes: usize) -> Region {
        let (region, footprint) = behind(&mut self.arena_bytes, bytes, ALIGNMENT);
        self.item(category, name, Place::Heap, footprint);
        region
    }

    /// Lays out `bytes` bytes of device memory, behind everything laid out there before; regions start at multiples of [`DEVICE_ALIGNMENT`].
    pub fn device(&mut self, category: Category, name: impl Into<Name>, bytes: usize) -> Region {
        let (region, footprint) = behind(&mut self.device_bytes, bytes, DEVICE_ALIGNMENT);
        self.item(category, name, Place::Device, footprint);
        region
    }

    /// Notes memory that is not in the arena: mapped weights, a table on disk.
    pub fn item(&mut self, category: Category, name: impl Into<Name>, place: Place, bytes: u64) {
        let Name { layer, name } = name.into();
        self.items.push(Item { category, layer, name, place, bytes });
    }

    /// The items, in the order of their description.
    pub fn items(&self) -> &[Item] {
        &self.items
    }

    /// What takes up memory, the layers' added up, in the order of categories.
    pub fn lines(&self) -> Vec<Line> {
        let mut lines: Vec<Line> = Vec::new();
        for item in self.items.iter().filter(|item| item.bytes > 0) {
            let &Item { category, place, bytes, ref name, .. } = item;
            let same =
                |line: &&mut Line| line.category == category && line.place == place && line.name == *name;
            match lines.iter_mut().find(same) {
                Some(line) => (line.pieces, line.bytes) = (line.pieces + 1, line.bytes.saturating_add(bytes)),
                None => lines.push(Line { category, name: name.clone(), place, pieces: 1, bytes }),
            }
        }
        lines.sort_by_key(|line| line.category);
        lines
    }

    /// Length of the arena that holds every region, bytes.
    pub fn arena_bytes(&self) -> usize {
        self.arena_bytes
    }

    /// Length of the device memory that holds every region there, bytes.
    pub fn device_bytes(&self) -> usize {
        self.device_bytes
    }

    /// What is planned in a place, bytes. `u64::MAX` where the sum is larger.
    pub fn bytes(&self, place: Place) -> u64 {
        sum(self.items.iter().filter(|item| item.place == place))
    }

    /// What is planned for a category in any place, bytes. `u64::MAX` where the sum is larger.
    pub fn by_category(&self, category: Category) -> u64 {
        sum(self.items.iter().filter(|item| item.category == category))
    }
}

/// A region of `bytes` behind `end`, which moves on; and what the region takes up.
fn behind(end: &mut usize, bytes: usize, alignment: usize) -> (Region, u64) {
    let region = Region { offset: *end, bytes };
    let footprint = bytes.checked_next_multiple_of(alignment).unwrap_or(usize::MAX);
    *end = end.saturating_add(footprint);
    (region, footprint as u64)
}

fn sum<'a>(items: impl Iterator<Item = &'a Item>) -> u64 {
    items.fold(0, |total, item| total.saturating_add(item.bytes))
}

/// A table: [`Plan::lines`], then the totals of places.
impl fmt::Display for Plan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let lines = self.lines();
        let width = lines.iter().map(|line| line.name.chars().count()).max().unwrap_or(0).max(4);
        writeln!(f, "{:<10} {:<width$} {:>6} {:<6} {:>9}", "for", "what", "pieces", "place", "size")?;
        for Line { category, name, place, pieces, bytes } in &lines {
            let (category, place) = (category.name(), place.name());
            writeln!(f, "{category:<10} {name:<width$} {pieces:>6} {place:<6} {:>9}", Bytes(*bytes))?;
        }
        for place in Place::ALL.into_iter().filter(|&place| self.bytes(place) > 0) {
            let bytes = Bytes(self.bytes(place));
            writeln!(f, "{:<10} {:<width$} {:>6} {:<6} {bytes:>9}", "total", "", "", place.name())?;
        }
        Ok(())
    }
}
