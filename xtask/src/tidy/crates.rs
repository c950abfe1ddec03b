//! Crates: allowed dependencies, folders, and shared lints.

use std::fs;

use anyhow::{Context, Result};

use super::Finding;
use crate::workspace::{Package, Workspace};

/// Which crates of the workspace a crate may depend on. Dev-dependencies are not restricted.
enum Uses {
    Any,
    Only(&'static [&'static str]),
    /// Only the standard library: no external crate either.
    StdOnly,
}

// A new dependency is a design decision: change this table and ARCHITECTURE.md in one commit.
const ARROWS: &[(&str, Uses)] = &[
    ("ratekeeper-core", Uses::StdOnly),
    ("ratekeeper-rules", Uses::Only(&["ratekeeper-core"])),
    ("ratekeeper", Uses::Only(&["ratekeeper-core", "ratekeeper-rules"])),
    ("ratekeeper-config", Uses::Only(&["ratekeeper-core", "ratekeeper-rules"])),
    ("ratekeeper-server", Uses::Only(&["ratekeeper", "ratekeeper-config", "ratekeeper-rules"])),
    ("ratekeeper-insight", Uses::Only(&["ratekeeper", "ratekeeper-config", "ratekeeper-core"])),
    ("ratekeeper-cli", Uses::Any),
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

/// Returns the forbidden dependencies of a package.
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

    /// Returns the findings for a crate with these dependencies, in a workspace of all crates in the table.
    fn check(name: &str, uses: &[&str]) -> Vec<String> {
        let ours: Vec<&str> = ARROWS.iter().map(|(row, _)| *row).collect();
        let uses = uses.iter().map(ToString::to_string).collect();
        arrows(&Package { name: name.to_string(), manifest: "Cargo.toml".into(), uses }, &ours).collect()
    }

    #[test]
    fn allowed_dependencies_pass() {
        assert!(check("ratekeeper-core", &[]).is_empty());
        assert!(check("ratekeeper", &["ratekeeper-core", "tokio"]).is_empty());
        assert!(
            check("ratekeeper-insight", &["ratekeeper", "ratekeeper-config", "ratekeeper-core"]).is_empty()
        );
        assert!(check("ratekeeper-cli", &["ratekeeper-insight", "ratekeeper", "clap"]).is_empty());
    }

    #[test]
    fn forbidden_dependencies_are_found() {
        assert_eq!(check("ratekeeper", &["ratekeeper-core", "ratekeeper-config"]).len(), 1);
        assert_eq!(check("ratekeeper-config", &["ratekeeper"]).len(), 1);
        assert_eq!(check("ratekeeper-insight", &["ratekeeper-cli"]).len(), 1);
        assert_eq!(check("xtask", &["ratekeeper-core", "anyhow"]).len(), 1);
    }

    #[test]
    fn core_may_not_depend_on_any_crate() {
        assert_eq!(check("ratekeeper-core", &["serde"]).len(), 1);
    }

    #[test]
    fn crate_without_a_row_is_found() {
        assert_eq!(check("ratekeeper-new", &[]).len(), 1);
    }

    #[test]
    fn both_forms_of_shared_lints_are_accepted() {
        assert!(shares_lints("[package]\nname = \"a\"\n\n[lints]\nworkspace = true\n"));
        assert!(shares_lints("lints.workspace = true\n"));
        assert!(!shares_lints("[package]\nname = \"a\"\n"));
        assert!(!shares_lints("[dependencies]\nworkspace = true\n"));
        assert!(!shares_lints("[lints.rust]\nworkspace = true\n"));
    }
}
