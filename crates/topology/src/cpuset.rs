//! A set of CPU numbers, as the kernel prints them: `0-5,8`.
//!
//! Owns the arithmetic of sets and their text form. Knows nothing of what a CPU is. The set has no fixed
//! capacity, but refuses numbers no kernel gives out, so that a malformed file can't ask for gigabytes.

use std::fmt;
use std::str::FromStr;

/// A set of CPU numbers. Equal sets compare equal however they were built.
#[derive(Clone, Default, PartialEq, Eq, Hash)]
pub struct CpuSet {
    /// Bit `c % 64` of word `c / 64`; no trailing zero words.
    words: Vec<u64>,
}

/// Why a text is no CPU list.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "`{text}` is not a CPU list: `{part}` should be a number or a range such as 0-5, below {limit}",
    limit = CpuSet::LIMIT
)]
pub struct ParseCpuSetError {
    text: String,
    part: String,
}

impl CpuSet {
    /// One more than the largest CPU number a set takes.
    pub const LIMIT: usize = 1 << 16;

    /// The empty set.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds a CPU; returns whether it is new.
    ///
    /// # Panics
    /// If `cpu` is not below [`CpuSet::LIMIT`].
    pub fn insert(&mut self, cpu: usize) -> bool {
        assert!(cpu < Self::LIMIT, "CPU number {cpu} is beyond {}", Self::LIMIT);
        let word = cpu / 64;
        if word >= self.words.len() {
            self.words.resize(word + 1, 0);
        }
        let bit = 1 << (cpu % 64);
        let new = self.words[word] & bit == 0;
        self.words[word] |= bit;
        new
    }

    /// Whether the CPU is in the set.
    pub fn contains(&self, cpu: usize) -> bool {
        self.words.get(cpu / 64).is_some_and(|w| w & (1 << (cpu % 64)) != 0)
    }

    /// How many CPUs the set has.
    pub fn len(&self) -> usize {
        self.words.iter().map(|w| w.count_ones() as usize).sum()
    }

    /// Whether the set has no CPU.
    pub fn is_empty(&self) -> bool {
        self.words.is_empty()
    }

    /// The lowest CPU.
    pub fn first(&self) -> Option<usize> {
        self.iter().next()
    }

    /// The CPUs, ascending.
    pub fn iter(&self) -> impl Iterator<Item = usize> + '_ {
        self.words.iter().enumerate().flat_map(|(i, &w)| {
            std::iter::successors((w != 0).then_some(w), |w| Some(w & (w - 1)).filter(|w| *w != 0))
                .map(move |w| i * 64 + w.trailing_zeros() as usize)
        })
    }

    /// The CPUs in either set.
    pub fn union(&self, other: &CpuSet) -> CpuSet {
        self.combine(other, |a, b| a | b)
    }

    /// The CPUs in both sets.
    pub fn intersection(&self, other: &CpuSet) -> CpuSet {
        self.combine(other, |a, b| a & b)
    }

    /// The CPUs of this set that are not in `other`.
    pub fn difference(&self, other: &CpuSet) -> CpuSet {
        self.combine(other, |a, b| a & !b)
    }

    /// Whether every CPU of this set is in `other`.
    pub fn is_subset(&self, other: &CpuSet) -> bool {
        self.difference(other).is_empty()
    }

    fn combine(&self, other: &CpuSet, op: impl Fn(u64, u64) -> u64) -> CpuSet {
        let at = |words: &[u64], i: usize| words.get(i).copied().unwrap_or(0);
        let len = self.words.len().max(other.words.len());
        let mut words: Vec<u64> = (0..len).map(|i| op(at(&self.words, i), at(&other.words, i))).collect();
        while words.last() == Some(&0) {
            words.pop();
        }
        CpuSet { words }
    }
}

impl FromIterator<usize> for CpuSet {
    fn from_iter<I: IntoIterator<Item = usize>>(cpus: I) -> Self {
        let mut set = CpuSet::new();
        for cpu in cpus {
            set.insert(cpu);
        }
        set
    }
}

/// Reads the kernel's list form: `0-3,8,10-11`; the empty text is the empty set.
impl FromStr for CpuSet {
    type Err = ParseCpuSetError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let mut set = CpuSet::new();
        for part in text.trim().split(',').map(str::trim).filter(|p| !p.is_empty()) {
            let bad = || ParseCpuSetError { text: text.trim().to_owned(), part: part.to_owned() };
            let number = |s: &str| s.parse::<usize>().ok().filter(|c| *c < Self::LIMIT).ok_or_else(bad);
            let (low, high) = match part.split_once('-') {
                Some((low, high)) => (number(low)?, number(high)?),
                None => (number(part)?, number(part)?),
            };
            if low > high {
                return Err(bad());
            }
            for cpu in low..=high {
                set.insert(cpu);
            }
        }
        Ok(set)
    }
}

impl fmt::Display for CpuSet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.is_empty() {
            return f.write_str("none");
        }
        let mut cpus = self.iter().peekable();
        let mut separator = "";
        while let Some(low) = cpus.next() {
            let mut high = low;
            while cpus.next_if_eq(&(high + 1)).is_some() {
                high += 1;
            }
            if low == high {
                write!(f, "{separator}{low}")?;
            } else {
                write!(f, "{separator}{low}-{high}")?;
            }
            separator = ",";
        }
        Ok(())
    }
}

impl fmt::Debug for CpuSet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "CpuSet({self})")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeSet;

    proptest! {
        /// Oracle: `BTreeSet`. Set arithmetic, order and equality agree with it, and the text form reads
        /// back.
        #[test]
        fn agrees_with_a_tree_set(a in prop::collection::btree_set(0usize..200, 0..40),
                                  b in prop::collection::btree_set(0usize..200, 0..40)) {
            let (x, y): (CpuSet, CpuSet) = (a.iter().copied().collect(), b.iter().copied().collect());
            let tree = |s: &CpuSet| s.iter().collect::<BTreeSet<_>>();
            prop_assert_eq!(tree(&x.union(&y)), &a | &b);
            prop_assert_eq!(tree(&x.intersection(&y)), &a & &b);
            prop_assert_eq!(tree(&x.difference(&y)), &a - &b);
            prop_assert_eq!(x.len(), a.len());
            prop_assert_eq!(x.first(), a.first().copied());
            prop_assert_eq!(x.is_subset(&y), a.is_subset(&b));
            prop_assert_eq!(x == y, a == b);
            let again = if x.is_empty() { CpuSet::new() } else { x.to_string().parse().unwrap() };
            prop_assert_eq!(again, x);
        }

        /// Oracle: none needed; no text panics or allocates without bound.
        #[test]
        fn any_text_is_read_or_refused(text in "[0-9,\\- x]{0,24}") {
            let _ = text.parse::<CpuSet>();
        }
    }

    /// Oracle: lists as `Documentation/admin-guide/cputopology` describes them.
    #[test]
    fn kernel_lists() {
        assert_eq!("0-2,5,7-8\n".parse::<CpuSet>().unwrap(), CpuSet::from_iter([0, 1, 2, 5, 7, 8]));
        assert_eq!("\n".parse::<CpuSet>().unwrap(), CpuSet::new());
        assert_eq!(CpuSet::from_iter([8, 0, 1, 2]).to_string(), "0-2,8");
        for bad in ["3-1", "a", "1-", "-1", "99999999999", "0-65536"] {
            assert!(bad.parse::<CpuSet>().unwrap_err().to_string().contains("is not a CPU list"), "{bad}");
        }
    }
}
