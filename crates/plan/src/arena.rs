//! The one allocation of anonymous memory that everything planned with [`crate::Plan::heap`] lives in.
//!
//! Owns the memory and remembers what was handed out. Does not know what a block is for.
//!
//! Invariant: the bytes of two live [`Block`]s never overlap, because a byte is handed out once in the arena's life.
//!
//! The memory is mapped, not touched: a page costs nothing before its first write, and reads as zero.
//!
//! This module is an island of `unsafe`: many exclusive slices of one mapping.

use std::collections::BTreeMap;
use std::marker::PhantomData;
use std::ops::{Deref, DerefMut};
use std::ptr::NonNull;
use std::sync::Arc;

use bytemuck::Pod;
use memmap2::MmapMut;

use crate::{ALIGNMENT, Plan, Region};

/// The larger pages that the system may give: what an arena of at least one starts at a multiple of, bytes.
pub const HUGE_PAGE: usize = 2 << 20;

/// Memory for all regions of one plan.
#[derive(Debug)]
pub struct Arena {
    memory: Arc<MmapMut>,
    /// Where the arena starts in `memory`.
    skip: usize,
    base: NonNull<u8>,
    bytes: usize,
    /// Start and end of what was handed out, by start; disjoint.
    taken: BTreeMap<usize, usize>,
}

// SAFETY: `base` points into `memory`, which is owned and never moves; nothing in `Arena` is bound to a thread.
unsafe impl Send for Arena {}

/// Why a block could not be handed out.
#[derive(Debug, thiserror::Error)]
pub enum ArenaError {
    /// The system refused the allocation.
    #[error("{bytes} bytes of memory could not be allocated: {source}")]
    Allocate {
        /// How many.
        bytes: usize,
        /// What the system said.
        source: std::io::Error,
    },
    /// The system has no huge pages to give.
    #[error("the system gives no huge pages: {0}")]
    HugePages(std::io::Error),
    /// A region of another plan.
    #[error(
        "a region of {bytes} bytes at {offset} is not inside the arena of {arena} bytes: it belongs to another plan"
    )]
    Outside {
        /// Where the region starts.
        offset: usize,
        /// Its length.
        bytes: usize,
        /// The arena's length.
        arena: usize,
    },
    /// A region, or a part of it, was taken before.
    #[error("the region of {bytes} bytes at {offset} was handed out before")]
    Taken {
        /// Where the region starts.
        offset: usize,
        /// Its length.
        bytes: usize,
    },
    /// A length or type that the region can't hold.
    #[error("a region of {bytes} bytes is not a whole number of values of {size} bytes aligned to {align}")]
    Unfit {
        /// The region's length.
        bytes: usize,
        /// Size of a value.
        size: usize,
        /// Its alignment.
        align: usize,
    },
}

impl Arena {
    /// Maps the memory for a plan.
    pub fn new(plan: &Plan) -> Result<Arena, ArenaError> {
        let bytes = plan.arena_bytes();
        // Addresses to choose an aligned start from; those before and behind the arena never become memory.
        let align = if bytes < HUGE_PAGE { 1 } else { HUGE_PAGE };
        let mut memory = MmapMut::map_anon(bytes.max(1).saturating_add(align - 1))
            .map_err(|source| ArenaError::Allocate { bytes, source })?;
        let start = memory.as_ptr().addr();
        let skip = start.next_multiple_of(align) - start;
        let base = NonNull::from(&mut memory[skip..]).cast();
        Ok(Arena { memory: Arc::new(memory), skip, base, bytes, taken: BTreeMap::new() })
    }

    /// Asks the system for [`HUGE_PAGE`]s where a region is, from now on. To be asked before the region is written: what has
    /// small pages may keep them. A system without huge pages says so, and nothing else changes.
    pub fn ask_for_huge_pages(&self, region: Region) -> Result<(), ArenaError> {
        self.end(region)?;
        #[cfg(target_os = "linux")]
        self.memory
            .advise_range(memmap2::Advice::HugePage, self.skip + region.offset(), region.bytes())
            .map_err(ArenaError::HugePages)?;
        Ok(())
    }

    /// Hands out a region, all zeros, as values of type `T`. Each region can be taken once.
    pub fn take<T: Pod>(&mut self, region: Region) -> Result<Block<T>, ArenaError> {
        let (offset, bytes) = (region.offset(), region.bytes());
        let (size, align) = (size_of::<T>(), align_of::<T>());
        if size == 0 || !bytes.is_multiple_of(size) || align > ALIGNMENT {
            return Err(ArenaError::Unfit { bytes, size, align });
        }
        let end = self.end(region)?;
        if self.taken.range(..end).next_back().is_some_and(|(_, &taken)| taken > offset) {
            return Err(ArenaError::Taken { offset, bytes });
        }
        if end > offset {
            self.taken.insert(offset, end);
        }
        // SAFETY: `offset <= end <= bytes`, so the pointer stays inside (or one past) the `bytes` bytes of the
        // mapping that `base` starts.
        let start = unsafe { self.base.add(offset) }.cast();
        Ok(Block { start, len: bytes / size, _memory: self.memory.clone(), _values: PhantomData })
    }

    /// Where what a region takes up ends, if that is inside the arena.
    fn end(&self, region: Region) -> Result<usize, ArenaError> {
        let (offset, bytes) = (region.offset(), region.bytes());
        bytes
            .checked_next_multiple_of(ALIGNMENT)
            .and_then(|footprint| offset.checked_add(footprint))
            .filter(|&end| end <= self.bytes)
            .ok_or(ArenaError::Outside { offset, bytes, arena: self.bytes })
    }

    /// How much was handed out, bytes, in units of [`ALIGNMENT`]: [`Plan::arena_bytes`] once every region was taken.
    pub fn taken_bytes(&self) -> usize {
        self.taken.iter().map(|(start, end)| end - start).sum()
    }
}

/// A slice of the arena that nobody else can reach. It keeps the arena's memory alive.
#[derive(Debug)]
pub struct Block<T> {
    start: NonNull<T>,
    len: usize,
    _memory: Arc<MmapMut>,
    _values: PhantomData<T>,
}

// SAFETY: a block is the only way to its bytes (the arena hands each byte out once and nobody dereferences the mapping
// itself), so it may go where a `Box<[T]>` may go.
unsafe impl<T: Send> Send for Block<T> {}
// SAFETY: `&Block<T>` gives `&[T]` and nothing else.
unsafe impl<T: Sync> Sync for Block<T> {}

impl<T> Deref for Block<T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        // SAFETY: `take` checked that `len` values lie inside the mapping, aligned (regions start at multiples of
        // `ALIGNMENT`, mappings at pages), and that they overlap no other block; `T: Pod` there, so zeros or whatever
        // was written through this block are values; `_memory` keeps the mapping alive; writers need `&mut self`.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr(), self.len) }
    }
}

impl<T> DerefMut for Block<T> {
    fn deref_mut(&mut self) -> &mut [T] {
        // SAFETY: as in `deref`, and `&mut self` excludes every other access to these bytes.
        unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr(), self.len) }
    }
}
