//! Crates: which may use which, where they are, and that they share the lints.

use std::fs;

use anyhow::{Context, Result};

use super::Finding;
use crate::workspace::{Package, Workspace};

/// What a crate may use of ours. Arrows point down only; dev-dependencies are free.
enum Uses {
    Any,
    Only(&'static [&'static str]),
    /// Nothing but the standard library, whoever wrote it.
    StdOnly,
}

// A new arrow is a decision: it changes this table and ARCHITECTURE.md in one commit.
const ARROWS: &[(&str, Uses)] = &[
    ("tollgate-core", Uses::StdOnly),
    ("tollgate-rules", Uses::Only(&["tollgate-core"])),
    ("tollgate", Uses::Only(&["tollgate-core", "tollgate-rules"])),
    ("tollgate-config", Uses::Only(&["tollgate-core", "tollgate-rules"])),
    ("tollgate-server", Uses::Only(&["tollgate", "tollgate-config", "tollgate-rules"])),
    ("tollgate-sim", Uses::Only(&["tollgate", "tollgate-config", "tollgate-core"])),
    ("tollgate-cli", Uses::Any),
    ("testbed", Uses::Only(&[])),
    ("bench", Uses::Any),
    ("xtask", Uses::Only(&[])),
];

pub(super) fn check(workspace: &Workspace) -> Result<Vec<Finding>> {
    let ours: Vec<&str> = workspace.packages.iter().map(|package| package.name.as_str()).collect();
    let mut findings = Vec::new();
    for package in &workspace.packages {
        let manifest = package.manifest.strip_prefix(&workspace.root).unwrap_or(&package.manifest);
        let path = manifest.to_string_lossy();
        let text = fs::read_to_string(&package.manifest).with_context(|| format!("reading {path}"))?;
        findings.extend(arrows(package, &ours).map(|message| Finding::in_file(&path, message)));
        if !shares_lints(&text) {
            findings.push(Finding::in_file(&path, "add `[lints]` with `workspace = true`"));
        }
        if manifest.parent().is_none_or(|folder| folder.as_os_str() != package.name.as_str()) {
            let message =
                format!("the crate `{}` belongs in a folder of its name, at the root", package.name);
            findings.push(Finding::in_file(&path, message));
        }
    }
    Ok(findings)
}

/// What a package uses and must not.
fn arrows(package: &Package, ours: &[&str]) -> impl Iterator<Item = String> {
    let name = &package.name;
    let row = ARROWS.iter().find(|(row, _)| row == name);
    let is_wrong = |used: &&String| match row {
        Some((_, Uses::Any)) | None => false,
        Some((_, Uses::Only(allowed))) => ours.contains(&used.as_str()) && !allowed.contains(&used.as_str()),
        Some((_, Uses::StdOnly)) => true,
    };
    let unknown =
        row.is_none().then(|| format!("`{name}` has no row in the table of xtask/src/tidy/crates.rs"));
    let wrong = package.uses.iter().filter(is_wrong);
    let wrong = wrong.map(|used| format!("`{name}` must not use `{used}` (xtask/src/tidy/crates.rs)"));
    unknown.into_iter().chain(wrong.collect::<Vec<_>>())
}

fn shares_lints(manifest: &str) -> bool {
    let mut section = "";
    manifest.lines().map(str::trim).any(|line| {
        if line.starts_with('[') {
            section = line;
        }
        let setting: String = line.chars().filter(|character| !character.is_whitespace()).collect();
        (section == "[lints]" && setting == "workspace=true")
            || (section.is_empty() && setting == "lints.workspace=true")
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What is wrong with a crate that uses these, in a workspace of all the crates in the table.
    fn check(name: &str, uses: &[&str]) -> Vec<String> {
        let ours: Vec<&str> = ARROWS.iter().map(|(row, _)| *row).collect();
        let uses = uses.iter().map(ToString::to_string).collect();
        arrows(&Package { name: name.to_string(), manifest: "Cargo.toml".into(), uses }, &ours).collect()
    }

    #[test]
    fn arrows_that_point_down_are_fine() {
        assert!(check("tollgate-core", &[]).is_empty());
        assert!(check("tollgate", &["tollgate-core", "tokio"]).is_empty());
        assert!(check("tollgate-sim", &["tollgate", "tollgate-config", "tollgate-core"]).is_empty());
        assert!(check("tollgate-cli", &["tollgate-sim", "tollgate", "clap"]).is_empty());
    }

    #[test]
    fn arrows_that_point_up_or_across_are_found() {
        assert_eq!(check("tollgate", &["tollgate-core", "tollgate-config"]).len(), 1);
        assert_eq!(check("tollgate-config", &["tollgate"]).len(), 1);
        assert_eq!(check("tollgate-sim", &["tollgate-cli"]).len(), 1);
        assert_eq!(check("xtask", &["tollgate-core", "anyhow"]).len(), 1);
    }

    #[test]
    fn the_core_uses_nothing_at_all() {
        assert_eq!(check("tollgate-core", &["serde"]).len(), 1);
    }

    #[test]
    fn a_crate_without_a_row_is_found() {
        assert_eq!(check("tollgate-new", &[]).len(), 1);
    }

    #[test]
    fn the_lints_are_shared_in_either_spelling() {
        assert!(shares_lints("[package]\nname = \"a\"\n\n[lints]\nworkspace = true\n"));
        assert!(shares_lints("lints.workspace = true\n"));
        assert!(!shares_lints("[package]\nname = \"a\"\n"));
        assert!(!shares_lints("[dependencies]\nworkspace = true\n"));
        assert!(!shares_lints("[lints.rust]\nworkspace = true\n"));
    }
}
