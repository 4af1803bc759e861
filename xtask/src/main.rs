//! Checks of the house, against docs/ARCHITECTURE.md: which crate may use which, where `unsafe` may stand, and under which
//! licences dependencies come.
//!
//! `cargo run -p xtask -- check`

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};

use serde_json::Value;

/// Licences that a program under MIT OR Apache-2.0 may be linked with.
const LICENCES: &[&str] = &[
    "0BSD",
    "Apache-2.0",
    "Apache-2.0 WITH LLVM-exception",
    "BSD-2-Clause",
    "BSD-3-Clause",
    "BSL-1.0",
    "CC0-1.0",
    "CDLA-Permissive-2.0",
    "ISC",
    "MIT",
    "MIT-0",
    "NCSA",
    "Unicode-3.0",
    "Unlicense",
    "Zlib",
];

fn main() -> ExitCode {
    if std::env::args().nth(1).as_deref() != Some("check") {
        eprintln!("usage: cargo run -p xtask -- check");
        return ExitCode::from(2);
    }
    match check() {
        Ok(problems) if problems.is_empty() => {
            println!("arrows, unsafe and licences: as docs/ARCHITECTURE.md says");
            ExitCode::SUCCESS
        }
        Ok(problems) => {
            problems.iter().for_each(|p| eprintln!("{p}"));
            ExitCode::FAILURE
        }
        Err(error) => {
            eprintln!("{error}");
            ExitCode::FAILURE
        }
    }
}

fn check() -> Result<Vec<String>, Box<dyn std::error::Error>> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let map = std::fs::read_to_string(root.join("docs/ARCHITECTURE.md"))?;
    let workspace = metadata(&root)?;
    let mut problems = arrows(&workspace, &block(&map, "arrows")?);
    problems.extend(unsafe_code(&root, &block(&map, "unsafe")?)?);
    problems.extend(licences(&workspace));
    problems.extend(licences(&metadata(&root.join("fuzz"))?));
    Ok(problems)
}

/// What cargo knows of the workspace in `folder`.
fn metadata(folder: &Path) -> Result<Value, Box<dyn std::error::Error>> {
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let output = Command::new(cargo)
        .args(["metadata", "--format-version", "1", "--all-features"])
        .current_dir(folder)
        .output()?;
    if !output.status.success() {
        return Err(String::from_utf8_lossy(&output.stderr).into());
    }
    Ok(serde_json::from_slice(&output.stdout)?)
}

/// The lines of the map's fenced block with this name.
fn block(map: &str, name: &str) -> Result<Vec<String>, String> {
    let fence = format!("```{name}");
    let mut lines = map.lines().skip_while(|line| line.trim() != fence);
    lines.next().ok_or_else(|| format!("docs/ARCHITECTURE.md has no block {fence}"))?;
    Ok(lines.take_while(|line| line.trim() != "```").map(|line| line.trim().to_owned()).collect())
}

fn packages(metadata: &Value) -> impl Iterator<Item = &Value> {
    metadata["packages"].as_array().into_iter().flatten()
}

/// Normal dependencies between the workspace's crates that the map doesn't allow, and crates it doesn't know.
fn arrows(metadata: &Value, lines: &[String]) -> Vec<String> {
    let allowed: BTreeMap<&str, BTreeSet<&str>> = lines
        .iter()
        .filter_map(|line| line.split_once("->"))
        .map(|(from, to)| (from.trim(), to.split_whitespace().collect()))
        .collect();
    let mut problems = Vec::new();
    for package in packages(metadata).filter(|p| p["source"].is_null()) {
        let name = package["name"].as_str().unwrap_or_default();
        let Some(allowed) = allowed.get(name) else {
            problems.push(format!("{name} is not among the arrows of docs/ARCHITECTURE.md"));
            continue;
        };
        for dependency in package["dependencies"].as_array().into_iter().flatten() {
            let to = dependency["name"].as_str().unwrap_or_default();
            let ours = !dependency["path"].is_null();
            if ours && dependency["kind"].is_null() && !allowed.contains(to) {
                problems.push(format!("{name} depends on {to}: no such arrow in docs/ARCHITECTURE.md"));
            }
        }
    }
    problems
}

/// Source files with unsafe code that the map doesn't name, and names without unsafe code.
fn unsafe_code(root: &Path, lines: &[String]) -> std::io::Result<Vec<String>> {
    let named: BTreeSet<&str> = lines.iter().filter_map(|line| line.split_whitespace().next()).collect();
    let mut found = BTreeSet::new();
    let mut folders = vec![root.join("crates"), root.join("xtask")];
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(&folder)? {
            let path = entry?.path();
            if path.is_dir() {
                folders.push(path);
            } else if path.extension().is_some_and(|e| e == "rs") && is_unsafe(&path)? {
                found.insert(relative(root, &path));
            }
        }
    }
    let covered = |path: &str, name: &str| path == name || (name.ends_with('/') && path.starts_with(name));
    let mut problems = Vec::new();
    for path in &found {
        if !named.iter().any(|name| covered(path, name)) {
            problems.push(format!("{path} has unsafe code but is not named in docs/ARCHITECTURE.md"));
        }
    }
    for name in named {
        if !found.iter().any(|path| covered(path, name)) {
            problems.push(format!("docs/ARCHITECTURE.md names {name}, which has no unsafe code"));
        }
    }
    Ok(problems)
}

fn relative(root: &Path, path: &Path) -> String {
    let path: PathBuf = path.strip_prefix(root).unwrap_or(path).into();
    path.to_string_lossy().replace('\\', "/")
}

/// Whether a file has an `unsafe` block, function, trait or implementation outside of comments.
fn is_unsafe(path: &Path) -> std::io::Result<bool> {
    let text = std::fs::read_to_string(path)?;
    Ok(text.lines().map(|line| line.split("//").next().unwrap_or_default()).any(|code| {
        code.match_indices("unsafe").any(|(at, word)| {
            let after = code[at + word.len()..].trim_start();
            let whole = !code[..at].ends_with(|c: char| c.is_alphanumeric() || c == '_' || c == '"');
            whole
                && (after.starts_with('{')
                    || ["fn", "impl", "trait", "extern"].iter().any(|k| after.starts_with(k)))
        })
    }))
}

/// Dependencies that come under no licence of the list.
fn licences(metadata: &Value) -> Vec<String> {
    packages(metadata)
        .filter(|package| !package["license"].as_str().is_some_and(allowed))
        .map(|p| format!("{} {}: licence {} is not in the list", p["name"], p["version"], p["license"]))
        .collect()
}

/// Whether an SPDX expression can be satisfied from the list: an AND by all its parts, an OR by one; AND binds closer.
fn allowed(expression: &str) -> bool {
    let expression = expression.trim().replace('/', " OR ");
    let any = split(&expression, " OR ");
    if any.len() > 1 {
        return any.into_iter().any(allowed);
    }
    let all = split(&expression, " AND ");
    if all.len() > 1 {
        return all.into_iter().all(allowed);
    }
    let inner = expression.strip_prefix('(').and_then(|e| e.strip_suffix(')'));
    inner.map_or_else(|| LICENCES.contains(&expression.as_str()), allowed)
}

/// The parts of an expression between operators that stand outside of parentheses.
fn split<'e>(expression: &'e str, operator: &str) -> Vec<&'e str> {
    let (mut parts, mut start, mut depth) = (Vec::new(), 0, 0);
    for (at, byte) in expression.bytes().enumerate() {
        depth += i32::from(byte == b'(') - i32::from(byte == b')');
        if depth == 0 && at >= start && expression[at..].starts_with(operator) {
            parts.push(&expression[start..at]);
            start = at + operator.len();
        }
    }
    parts.push(&expression[start..]);
    parts
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Oracle: the meaning of SPDX expressions.
    #[test]
    fn licence_expressions() {
        for good in [
            "MIT",
            "MIT/Apache-2.0",
            "GPL-3.0 OR MIT",
            "(MIT OR GPL-3.0) AND ISC",
            "MIT AND (ISC OR GPL-2.0)",
        ] {
            assert!(allowed(good), "{good}");
        }
        for bad in ["GPL-3.0", "(MIT OR Apache-2.0) AND GPL-3.0", "MIT AND GPL-3.0", ""] {
            assert!(!allowed(bad), "{bad}");
        }
    }

    /// Oracle: the blocks, by eye.
    #[test]
    fn a_block_of_the_map_is_found_by_its_name() {
        let map = "text\n```arrows\na -> b\n```\n```unsafe\nc  why\n```\n";
        assert_eq!(block(map, "arrows").unwrap(), ["a -> b"]);
        assert_eq!(block(map, "unsafe").unwrap(), ["c  why"]);
        assert!(block(map, "other").is_err());
    }
}
