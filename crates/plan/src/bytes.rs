//! Numbers of bytes as people write and read them: `20G`, `31.3 GiB`.

use std::fmt;
use std::str::FromStr;

/// A number of bytes. Units are powers of 1024; what is shown has three digits, so it may be rounded.
///
/// ```
/// # use strata_plan::Bytes;
/// assert_eq!(Bytes(33_608_000_000).to_string(), "31.3 GiB");
/// assert_eq!("20G".parse(), Ok(Bytes(20 << 30)));
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Bytes(pub u64);

const UNITS: [&str; 7] = ["B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"];

impl fmt::Display for Bytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (mut value, mut unit) = (self.0 as f64, 0);
        while value >= 1024.0 {
            (value, unit) = (value / 1024.0, unit + 1);
        }
        let digits = match value {
            ..10.0 => 100.0,
            ..100.0 => 10.0,
            _ => 1.0,
        };
        f.pad(&format!("{} {}", (value * digits).round() / digits, UNITS[unit]))
    }
}

/// Why a text is no number of bytes.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum BytesError {
    /// No number in front.
    #[error("`{0}` is no size like 500M or 20G")]
    Number(String),
    /// No unit behind it.
    #[error("`{0}` is no unit; give K, M, G or T")]
    Unit(String),
    /// More than `u64` holds.
    #[error("{0} is more than can be counted")]
    Large(String),
}

/// A whole number, and behind it K, M, G or T, also as in `KB` and `KiB`, for units of 1024 times as much each.
impl FromStr for Bytes {
    type Err = BytesError;

    fn from_str(text: &str) -> Result<Bytes, BytesError> {
        let digits = text.trim_end_matches(|c: char| c.is_ascii_alphabetic());
        let unit = text[digits.len()..].to_ascii_uppercase();
        let shift = match unit.as_str() {
            "" | "B" => 0,
            "K" | "KB" | "KIB" => 10,
            "M" | "MB" | "MIB" => 20,
            "G" | "GB" | "GIB" => 30,
            "T" | "TB" | "TIB" => 40,
            _ => return Err(BytesError::Unit(unit)),
        };
        let number: u64 = digits.trim_end().parse().map_err(|_| BytesError::Number(text.to_owned()))?;
        number.checked_mul(1 << shift).map(Bytes).ok_or_else(|| BytesError::Large(text.to_owned()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Oracle: the forms by hand.
    #[test]
    fn sizes_read_well() {
        for (bytes, text) in [
            (0, "0 B"),
            (1023, "1023 B"),
            (1536, "1.5 KiB"),
            (48 << 10, "48 KiB"),
            (260 << 20, "260 MiB"),
            (3 << 29, "1.5 GiB"),
            (52 << 30, "52 GiB"),
            (1_108 << 20, "1.08 GiB"),
            (31_999_999_999, "29.8 GiB"),
            (u64::MAX, "16 EiB"),
        ] {
            assert_eq!(Bytes(bytes).to_string(), text);
        }
        assert_eq!(format!("{:>8}|{:<6}|", Bytes(1024), Bytes(1)), "   1 KiB|1 B   |");
    }

    /// Oracle: the forms that the help of flags and the kernel use.
    #[test]
    fn sizes_are_read() {
        let read = |text: &str| text.parse::<Bytes>().map(|bytes| bytes.0);
        for (text, bytes) in
            [("512", 512), ("512K", 512 << 10), ("20G", 20 << 30), ("3kib", 3072), ("8 MB", 8 << 20)]
        {
            assert_eq!(read(text), Ok(bytes));
        }
        assert_eq!(read("G"), Err(BytesError::Number("G".into())));
        assert_eq!(read("-1"), Err(BytesError::Number("-1".into())));
        assert_eq!(read("4X"), Err(BytesError::Unit("X".into())));
        assert_eq!(read("99999999999T"), Err(BytesError::Large("99999999999T".into())));
    }
}
