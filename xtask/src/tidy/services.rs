//! Modules of the server: services know `runtime` and not each other, and `runtime` knows no service.

use super::{File, Finding};

const SERVER: &str = "ratekeeper-server/src/";

/// The services, which only [`COMPOSITION`] may combine.
const SERVICES: &[&str] = &["admin", "envoy", "gateway", "http_api", "redis_api"];
const RUNTIME: &str = "runtime";
/// The files that know all services.
const COMPOSITION: &[&str] = &["lib", "server"];

pub(super) fn check(files: &[File]) -> Vec<Finding> {
    files.iter().flat_map(check_file).collect()
}

fn check_file(file: &File) -> Vec<Finding> {
    let Some(path) = file.path.strip_prefix(SERVER).and_then(|path| path.strip_suffix(".rs")) else {
        return Vec::new();
    };
    let module = path.split('/').next().unwrap_or_default();
    if COMPOSITION.contains(&module) {
        return Vec::new();
    }
    let mut findings = Vec::new();
    for (number, line) in file.text.lines().enumerate() {
        for used in used_modules(line).filter(|used| *used != module) {
            let message = match module == RUNTIME {
                true => format!("`runtime` must not use `{used}`: it knows no service"),
                false => format!(
                    "`{module}` must not use `{used}`: services know only `runtime`; server.rs combines them"
                ),
            };
            findings.push(Finding::in_line(&file.path, number + 1, message));
        }
    }
    findings
}

/// The modules of the crate that a line names.
fn used_modules(line: &str) -> impl Iterator<Item = &str> {
    let code = line.split("//").next().unwrap_or_default();
    let after_crate = code.split("crate::").skip(1);
    after_crate
        .flat_map(|rest| {
            let is_list = rest.starts_with('{');
            let names = if is_list { rest.trim_start_matches('{').split('}').next() } else { Some(rest) };
            let names = names.unwrap_or_default().split(if is_list { ',' } else { ':' });
            names.take(if is_list { usize::MAX } else { 1 }).map(|name| {
                let name = name.trim();
                name.split(|letter: char| !letter.is_alphanumeric() && letter != '_')
                    .next()
                    .unwrap_or_default()
            })
        })
        .filter(|name| SERVICES.contains(name) || COMPOSITION.contains(name))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn findings(path: &str, text: &str) -> usize {
        check(&[File { path: format!("{SERVER}{path}"), text: text.to_owned() }]).len()
    }

    #[test]
    fn services_use_runtime_and_themselves() {
        assert_eq!(
            findings("gateway/mod.rs", "use crate::runtime::metrics::Metrics;\nuse crate::gateway::body;"),
            0
        );
        assert_eq!(findings("admin.rs", "use crate::runtime::Sockets;"), 0);
        assert_eq!(findings("server.rs", "use crate::admin::Admin;\nuse crate::gateway::Gateway;"), 0);
        assert_eq!(findings("runtime/engine.rs", "use super::backend::Backend;"), 0);
    }

    #[test]
    fn services_do_not_use_each_other() {
        assert_eq!(findings("http_api/mod.rs", "use crate::envoy::json;"), 1);
        assert_eq!(findings("gateway/state.rs", "use crate::server::Server;"), 1);
        assert_eq!(findings("envoy/mod.rs", "use crate::{http_api, redis_api};"), 2);
        assert_eq!(findings("runtime/backend.rs", "fn of() -> crate::gateway::State {}"), 1);
    }

    #[test]
    fn other_crates_and_comments_are_not_checked() {
        let text = "//! Like `crate::gateway`.\n".to_owned();
        assert_eq!(check(&[File { path: "ratekeeper-cli/src/run.rs".to_owned(), text }]).len(), 0);
        assert_eq!(findings("envoy/mod.rs", "// as in crate::gateway::body"), 0);
    }
}
