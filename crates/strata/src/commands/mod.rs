//! The commands, a module each.

pub mod bench;
pub mod chat;
pub mod devices;
pub mod eval;
pub mod inspect;
pub mod logits;
pub mod plan;
pub mod run;
pub mod selftest;
pub mod synth;

/// So many things of a kind, in words: `1 tensor`, `2 tensors`.
pub fn counted(number: impl Into<u128>, one: &str) -> String {
    let number = number.into();
    format!("{number} {one}{}", if number == 1 { "" } else { "s" })
}

#[cfg(test)]
mod tests {
    use super::counted;

    /// Oracle: grammar.
    #[test]
    fn one_is_no_plural() {
        assert_eq!(
            (counted(0u64, "token"), counted(1u64, "token"), counted(2u32, "token")),
            ("0 tokens".into(), "1 token".into(), "2 tokens".into())
        );
    }
}
