//! The sampling that a model file recommends for itself: its `general.sampling.*` keys.

use strata_gguf::{Error, Metadata};

use crate::sampling::Sampling;

impl Sampling {
    /// What the file recommends; what it doesn't mention stays as [`Sampling::default`] has it. Values are taken as they are:
    /// [`Sampling::validate`] tells which make no sense.
    ///
    /// # Errors
    /// If a key is no number.
    pub fn recommended(metadata: &Metadata) -> Result<Sampling, Error> {
        let f32 = |key: &str| metadata.opt_f32(&format!("general.sampling.{key}"));
        // Files write "all tokens" as 0 or below.
        let top_k = metadata.opt_i64("general.sampling.top_k")?;
        let top_k = top_k.map(|k| usize::try_from(k).unwrap_or(0));
        let defaults = Sampling::default();
        Ok(Sampling {
            temperature: f32("temp")?.unwrap_or(defaults.temperature),
            top_k: top_k.unwrap_or(defaults.top_k),
            top_p: f32("top_p")?.unwrap_or(defaults.top_p),
            min_p: f32("min_p")?.unwrap_or(defaults.min_p),
            repetition_penalty: f32("penalty_repeat")?.unwrap_or(defaults.repetition_penalty),
            ..defaults
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use strata_gguf::Value;

    /// Oracle: the keys' meaning; absent ones leave the default.
    #[test]
    fn reads_what_is_there() {
        let mut metadata = Metadata::new();
        assert_eq!(Sampling::recommended(&metadata).unwrap(), Sampling::default());
        metadata.insert("general.sampling.temp", Value::F32(0.6));
        metadata.insert("general.sampling.top_k", Value::I32(20));
        metadata.insert("general.sampling.penalty_repeat", Value::F32(1.1));
        let expected =
            Sampling { temperature: 0.6, top_k: 20, repetition_penalty: 1.1, ..Sampling::default() };
        assert_eq!(Sampling::recommended(&metadata).unwrap(), expected);
        metadata.insert("general.sampling.top_k", Value::I32(-1));
        assert_eq!(Sampling::recommended(&metadata).unwrap().top_k, 0);
        metadata.insert("general.sampling.temp", Value::String("hot".into()));
        assert!(Sampling::recommended(&metadata).unwrap_err().to_string().contains("general.sampling.temp"));
    }
}
