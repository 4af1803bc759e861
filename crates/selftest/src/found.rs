//! What a comparison found.

use std::fmt;

/// What a comparison found.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Found {
    /// Computations that were compared.
    pub cases: usize,
    /// Their values.
    pub values: u64,
    /// How many of these differ.
    pub differing: u64,
    /// The largest difference, as a part of the larger of the two values; infinite where only one is a finite number.
    pub worst: f64,
    /// Where the first one is.
    pub first: Option<String>,
}

impl Found {
    /// Whether all is equal, and there was something.
    pub fn equal(&self) -> bool {
        self.differing == 0 && self.values > 0
    }

    /// Compares the results of a case, called `what`: bits are equal, or both are NaN. Where there are more values on one side, these differ.
    pub fn floats(&mut self, what: impl fmt::Display, ours: &[f32], theirs: &[f32]) {
        self.cases += 1;
        self.values += ours.len().max(theirs.len()) as u64;
        self.lengths(&what, ours.len(), theirs.len());
        for (at, (a, b)) in ours.iter().zip(theirs).enumerate() {
            if a.to_bits() == b.to_bits() || (a.is_nan() && b.is_nan()) {
                continue;
            }
            let (a, b) = (f64::from(*a), f64::from(*b));
            let apart = (a - b).abs() / a.abs().max(b.abs());
            // Zeros of either sign are not apart, though their bits differ.
            let apart = if a == b { 0.0 } else { apart };
            self.worst = self.worst.max(if apart.is_nan() { f64::INFINITY } else { apart });
            self.differs(1, || format!("{what}: value {at} is {a:e}, not {b:e}"));
        }
    }

    /// Compares the results of a case that are no floats.
    pub fn exactly<T: PartialEq + fmt::Debug>(&mut self, what: impl fmt::Display, ours: &[T], theirs: &[T]) {
        self.cases += 1;
        self.values += ours.len().max(theirs.len()) as u64;
        self.lengths(&what, ours.len(), theirs.len());
        for (at, (a, b)) in ours.iter().zip(theirs).enumerate() {
            if a != b {
                self.differs(1, || format!("{what}: value {at} is {a:?}, not {b:?}"));
            }
        }
    }

    fn lengths(&mut self, what: &impl fmt::Display, ours: usize, theirs: usize) {
        if ours != theirs {
            self.differs(ours.abs_diff(theirs) as u64, || format!("{what}: {ours} values, not {theirs}"));
        }
    }

    fn differs(&mut self, values: u64, where_: impl FnOnce() -> String) {
        self.differing += values;
        self.first.get_or_insert_with(where_);
    }

    /// Adds what another comparison found.
    pub fn add(&mut self, other: Found) {
        self.cases += other.cases;
        self.values += other.values;
        self.differing += other.differing;
        self.worst = self.worst.max(other.worst);
        self.first = self.first.take().or(other.first);
    }
}

impl fmt::Display for Found {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Found { values, differing, worst, first, .. } = self;
        match first {
            None if *values == 0 => f.write_str("nothing was compared"),
            None => f.pad("equal"),
            Some(first) if *worst > 0.0 => {
                write!(f, "{differing} of {values} values differ, by up to {worst:.1e} of them; {first}")
            }
            Some(first) => write!(f, "{differing} of {values} values differ; {first}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Oracle: the definition. Zeros have signs, a NaN has none, and nothing is not equal.
    #[test]
    fn bits_count() {
        let mut found = Found::default();
        assert!(!found.equal() && found.to_string() == "nothing was compared");
        found.floats("a", &[1.0, f32::NAN], &[1.0, -f32::NAN]);
        assert!(found.equal() && found.to_string() == "equal");
        found.floats("b", &[1.0, 0.0, 3.0], &[1.0, -0.0, 2.0]);
        assert!(!found.equal() && (found.cases, found.values, found.differing) == (2, 5, 2), "{found}");
        assert!((found.worst - 1.0 / 3.0).abs() < 1e-12, "{}", found.worst);
        assert!(found.to_string().ends_with("b: value 1 is 0e0, not -0e0"), "{found}");
    }

    /// Oracle: by hand. What is missing differs, and a number is infinitely far from what is none.
    #[test]
    fn what_is_missing_differs() {
        let mut found = Found::default();
        found.exactly("ids", &[1, 2, 3], &[1]);
        assert_eq!((found.values, found.differing, found.worst), (3, 2, 0.0));
        let mut other = Found::default();
        other.floats("x", &[1.0], &[f32::NAN]);
        found.add(other);
        assert_eq!((found.cases, found.values, found.differing), (2, 4, 3));
        assert!(found.worst.is_infinite() && found.first.as_deref() == Some("ids: 3 values, not 1"));
    }
}
