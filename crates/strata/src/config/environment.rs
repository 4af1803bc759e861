//! The process's environment as a value.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::path::PathBuf;

use super::settings::Settings;
use crate::failure::Failure;

/// What [`Environment`] reads, beside the settings.
const OTHER_VARIABLES: [&str; 1] = ["STRATA_CONFIG"];
/// Variables that only tests read.
const TEST_VARIABLES: [&str; 2] = ["STRATA_GOLDEN", "STRATA_MODELS"];

/// The process's environment, as far as this program looks at it.
#[derive(Debug, Clone, Default)]
pub struct Environment(pub(super) BTreeMap<String, OsString>);

impl Environment {
    /// Reads it. Nothing else in the program does.
    pub fn read() -> Environment {
        let wanted = |name: &str| {
            name.starts_with("STRATA_")
                || matches!(name, "HOME" | "XDG_CONFIG_HOME" | "XDG_STATE_HOME" | "NO_COLOR" | "TERM")
        };
        let named = std::env::vars_os().filter_map(|(name, value)| Some((name.into_string().ok()?, value)));
        Environment(named.filter(|(name, _)| wanted(name)).collect())
    }

    pub(super) fn get(&self, name: &str) -> Result<Option<&str>, Failure> {
        let Some(value) = self.0.get(name).filter(|value| !value.is_empty()) else { return Ok(None) };
        let text =
            value.to_str().ok_or_else(|| Failure::usage(format!("the variable {name} is not UTF-8")))?;
        Ok(Some(text))
    }

    pub(super) fn path(&self, name: &str) -> Option<PathBuf> {
        self.0.get(name).filter(|value| !value.is_empty()).map(PathBuf::from)
    }

    /// Whether text may be dimmed on a terminal.
    pub fn allows_style(&self) -> bool {
        self.path("NO_COLOR").is_none() && self.0.get("TERM").is_none_or(|term| term != "dumb")
    }

    /// A file of this program in the folder that `variable` names, or `fallback` in the home folder.
    fn file(&self, variable: &str, fallback: &str, name: &str) -> Option<PathBuf> {
        let folder = self.path(variable).or_else(|| Some(self.path("HOME")?.join(fallback)))?;
        Some(folder.join("strata").join(name))
    }

    /// The usual configuration file.
    pub(super) fn config_file(&self) -> Option<PathBuf> {
        self.file("XDG_CONFIG_HOME", ".config", "config.toml")
    }

    /// The file that remembers what was typed into chats.
    pub fn history_file(&self) -> Option<PathBuf> {
        self.file("XDG_STATE_HOME", ".local/state", "history")
    }

    /// Variables that look like this program's but mean nothing.
    pub fn unknown(&self) -> impl Iterator<Item = &str> {
        let known = |name: &str| {
            Settings::VARIABLES.contains(&name)
                || OTHER_VARIABLES.contains(&name)
                || TEST_VARIABLES.contains(&name)
        };
        self.0.keys().map(String::as_str).filter(move |name| name.starts_with("STRATA_") && !known(name))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Oracle: only variables of this program that mean nothing, not those of its tests.
    #[test]
    fn unknown_variables_are_found() {
        let variables = ["STRATA_CONTXT", "STRATA_GOLDEN", "STRATA_KV"];
        let environment = Environment(variables.map(|name| (name.into(), "x".into())).into());
        assert_eq!(environment.unknown().collect::<Vec<_>>(), ["STRATA_CONTXT"]);
    }
}
