//! Progress bars on standard error: on a terminal, and not with `--quiet`.

use std::io::IsTerminal;

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

/// Whether somebody watches.
fn watched(quiet: bool) -> bool {
    !quiet && std::io::stderr().is_terminal()
}

fn bar(quiet: bool, total: u64, title: &'static str, template: &str) -> ProgressBar {
    let target = if watched(quiet) { ProgressDrawTarget::stderr() } else { ProgressDrawTarget::hidden() };
    let bar = ProgressBar::with_draw_target(Some(total), target);
    // A template that doesn't parse would be a mistake in this file; the plain style is as good.
    let style = ProgressStyle::with_template(template).unwrap_or_else(|_| ProgressStyle::default_bar());
    bar.set_style(style.progress_chars("=> "));
    bar.set_message(title);
    bar
}

/// A bar over bytes.
pub fn bytes(quiet: bool, total: u64, title: &'static str) -> ProgressBar {
    bar(
        quiet,
        total,
        title,
        "{msg} [{bar:40}] {binary_bytes}/{binary_total_bytes} {binary_bytes_per_sec} {eta}",
    )
}

/// A bar over things of a kind.
pub fn steps(quiet: bool, total: u64, title: &'static str, unit: &str) -> ProgressBar {
    bar(quiet, total, title, &format!("{{msg}} [{{bar:40}}] {{pos}}/{{len}} {unit} {{eta}}"))
}
