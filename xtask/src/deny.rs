//! Licenses, sources and version requirements of the dependencies.
//!
//! [`check`] reads `cargo metadata` and applies the rules of deny.toml, so it runs on every machine. cargo-deny also
//! checks the advisories, but has to be compiled: the long run installs it.

use std::fs;

use anyhow::{Context, Result};
use serde_json::Value;
use spdx::{Expression, ParseMode};
use toml::Table;

use crate::workspace::{Workspace, metadata};

/// The path of the rules, relative to the root.
const RULES: &str = "deny.toml";

/// Where cargo-deny is installed, relative to the target folder.
pub(crate) const TOOLS: &str = "tools";

/// The outcome of an attempt to check the advisories.
pub(crate) enum Advisories {
    Checked,
    Unchecked(&'static str),
}

/// Returns what violates the rules, one sentence for each violation.
pub(crate) fn check(workspace: &Workspace) -> Result<Vec<String>> {
    let text = fs::read_to_string(workspace.root.join(RULES)).context("reading deny.toml")?;
    violations(&metadata(&workspace.root, &["--all-features", "--locked"])?, &allowed_licenses(&text)?)
}

/// Runs cargo-deny, which the long run installs first.
pub(crate) fn cargo_deny(workspace: &Workspace) -> Result<Advisories> {
    let tools = workspace.target.join(TOOLS);
    let path = std::env::var_os("PATH").unwrap_or_default();
    let folders = [tools.join("bin")].into_iter().chain(std::env::split_paths(&path));
    let path = std::env::join_paths(folders).context("adding a folder to PATH")?;
    let path = path.to_string_lossy();
    let deny = |arguments: &str| workspace.cargo(&format!("deny {arguments}")).quiet_env("PATH", &path);
    if !deny("--version").succeeds() {
        if !workspace.long_tests {
            return Ok(Advisories::Unchecked(
                "cargo-deny is not installed; `cargo xtask test --long` installs it",
            ));
        }
        let root = tools.to_string_lossy();
        workspace.cargo(&format!("install cargo-deny --locked --root {root}")).run()?;
    }
    deny("check licenses bans sources").run()?;
    if !deny("fetch db").succeeds() {
        return Ok(Advisories::Unchecked("the advisory database cannot be reached from this machine"));
    }
    deny("check advisories").run()?;
    Ok(Advisories::Checked)
}

fn allowed_licenses(rules: &str) -> Result<Vec<String>> {
    let rules: Table = rules.parse().context("deny.toml is not TOML")?;
    let allowed =
        rules.get("licenses").and_then(|licenses| licenses.get("allow")).and_then(|it| it.as_array());
    let allowed = allowed.context("deny.toml has no list `licenses.allow`")?;
    let names = allowed.iter().map(|name| Some(name.as_str()?.to_string()));
    names.collect::<Option<_>>().context("`licenses.allow` of deny.toml is not a list of names")
}

fn violations(metadata: &Value, allowed: &[String]) -> Result<Vec<String>> {
    let packages = metadata["packages"].as_array().context("`cargo metadata` lists no packages")?;
    let members = metadata["workspace_members"].as_array().context("`cargo metadata` lists no members")?;
    let mut found = Vec::new();
    for package in packages {
        let text = |field: &str| package[field].as_str();
        let name = format!("{} {}", text("name").unwrap_or("?"), text("version").unwrap_or("?"));
        let is_ours = members.contains(&package["id"]);
        if let Some(why) = license_violation(text("license"), allowed) {
            found.push(format!("{name}: {why}"));
        }
        match text("source") {
            None if is_ours => {}
            Some(source) if source.starts_with("registry+") => {}
            source => found.push(format!(
                "{name}: comes from {}; dependencies come from the default registry",
                source.unwrap_or("a folder outside the workspace")
            )),
        }
        let dependencies = package["dependencies"].as_array().filter(|_| is_ours);
        for dependency in dependencies.into_iter().flatten() {
            if dependency["req"] == "*" && dependency["path"].is_null() {
                found.push(format!("{name}: `{}` has no version requirement", dependency["name"]));
            }
            if !dependency["registry"].is_null() {
                found.push(format!("{name}: `{}` comes from another registry", dependency["name"]));
            }
        }
    }
    Ok(found)
}

/// Returns why a license expression is not acceptable, if it is not.
fn license_violation(expression: Option<&str>, allowed: &[String]) -> Option<String> {
    let Some(text) = expression else { return Some("states no license".to_string()) };
    // Older crates separate alternatives by a slash.
    let parsed = match Expression::parse_mode(text, ParseMode::LAX) {
        Ok(parsed) => parsed,
        Err(error) => return Some(format!("the license `{text}` is not understood: {}", error.reason)),
    };
    let is_allowed = parsed.evaluate(|requirement| {
        let id = requirement.license.id().map(|id| id.name);
        requirement.addition.is_none() && id.is_some_and(|id| allowed.iter().any(|name| name == id))
    });
    (!is_allowed).then(|| format!("the license `{text}` is not in `licenses.allow` of {RULES}"))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn allowed() -> Vec<String> {
        allowed_licenses("[licenses]\nallow = [\"MIT\", \"Apache-2.0\"]").unwrap()
    }

    #[test]
    fn license_is_acceptable_if_an_alternative_is() {
        let accepted = ["MIT", "MIT OR GPL-3.0-only", "MIT/Apache-2.0", "(MIT OR ISC) AND Apache-2.0"];
        for text in accepted.into_iter().chain(["Apache-2.0 WITH LLVM-exception OR MIT"]) {
            assert_eq!(license_violation(Some(text), &allowed()), None, "{text}");
        }
        for text in ["GPL-3.0-only", "MIT AND ISC", "Apache-2.0 WITH LLVM-exception", "my own"] {
            assert!(license_violation(Some(text), &allowed()).is_some(), "{text}");
        }
        assert_eq!(license_violation(None, &allowed()).unwrap(), "states no license");
    }

    #[test]
    fn source_and_version_requirement_are_checked() {
        let package = |id: &str, source: Value, dependencies: Value| {
            json!({ "id": id, "name": id, "version": "1.0.0", "license": "MIT", "source": source,
                "dependencies": dependencies })
        };
        let dependency =
            |req: &str, path: Value| json!([{ "name": "b", "req": req, "path": path, "registry": null }]);
        let metadata = |packages: Value| json!({ "packages": packages, "workspace_members": ["ours"] });
        let registry = json!("registry+index");
        let good = metadata(json!([
            package("ours", Value::Null, dependency("^1", Value::Null)),
            package("b", registry.clone(), json!([])),
        ]));
        assert!(violations(&good, &allowed()).unwrap().is_empty());
        for (bad, expected) in [
            (package("b", json!("git+https://example.com/b"), json!([])), "default registry"),
            (package("b", Value::Null, json!([])), "outside the workspace"),
            (package("ours", Value::Null, dependency("*", Value::Null)), "no version requirement"),
        ] {
            let found = violations(&metadata(json!([bad])), &allowed()).unwrap();
            assert!(found.len() == 1 && found[0].contains(expected), "{found:?}");
        }
        let beside = package("ours", Value::Null, dependency("*", json!("/beside")));
        assert!(violations(&metadata(json!([beside])), &allowed()).unwrap().is_empty());
    }
}
