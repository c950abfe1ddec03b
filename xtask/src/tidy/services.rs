//! Modules of the server: each knows `runtime` and no other, and `runtime` knows only itself.

use super::rust_code::{Token, code_only, is_word, tokens};
use super::{File, Finding};

const SERVER: &str = "ratekeeper-server/src/";

const RUNTIME: &str = "runtime";
/// The files that combine the other modules.
const COMPOSITION: &[&str] = &["lib", "server"];

pub(super) fn check(files: &[File]) -> Vec<Finding> {
    files.iter().flat_map(check_file).collect()
}

fn check_file(file: &File) -> Vec<Finding> {
    let Some(path) = file.path.strip_prefix(SERVER).and_then(|path| path.strip_suffix(".rs")) else {
        return Vec::new();
    };
    let module: Vec<&str> = path.split('/').filter(|part| *part != "mod").collect();
    let Some(first) = module.first().copied().filter(|first| !COMPOSITION.contains(first)) else {
        return Vec::new();
    };
    let is_allowed = |used: &str| used == first || used == RUNTIME;
    let used = used_modules(&code_only(&file.text), module.len()).into_iter();
    used.filter(|(used, _)| !is_allowed(used))
        .map(|(used, line)| {
            let message = match first == RUNTIME {
                true => format!("`{RUNTIME}` must not use `{used}`: it knows no service"),
                false => format!(
                    "`{first}` must not use `{used}`: services know only `{RUNTIME}`; server.rs combines them"
                ),
            };
            Finding::in_line(&file.path, line, message)
        })
        .collect()
}

/// The names in the root of the crate that the code of a module uses, with their lines. `depth` is the number of modules
/// from the root to the module.
fn used_modules(code: &str, depth: usize) -> Vec<(String, usize)> {
    let tokens = tokens(code);
    let mut paths = Paths { tokens: &tokens, depth, used: Vec::new() };
    // For each open block, whether it is a module within the file.
    let mut blocks: Vec<bool> = Vec::new();
    for at in 0..tokens.len() {
        let is_start = at == 0 || paths.text(at - 1) != ":";
        match paths.text(at) {
            "{" => {
                let is_module = at >= 2 && paths.text(at - 2) == "mod";
                paths.depth += usize::from(is_module);
                blocks.push(is_module);
            }
            "}" => paths.depth -= usize::from(blocks.pop() == Some(true)),
            "crate" if is_start && paths.text(at + 1) == "as" => paths.push(at),
            "crate" | "super" | "self" if is_start && paths.is_path(at) => paths.read(at, Some(0)),
            _ => {}
        }
    }
    paths.used
}

/// Reads the paths of `use` declarations and expressions.
struct Paths<'a> {
    tokens: &'a [Token<'a>],
    depth: usize,
    used: Vec<(String, usize)>,
}

impl Paths<'_> {
    fn text(&self, at: usize) -> &str {
        self.tokens.get(at).map_or("", |token| token.text)
    }

    /// Whether `::` follows.
    fn is_path(&self, at: usize) -> bool {
        self.text(at + 1) == ":" && self.text(at + 2) == ":"
    }

    fn push(&mut self, at: usize) {
        if let Some(Token { text, line }) = self.tokens.get(at) {
            self.used.push(((*text).to_owned(), *line));
        }
    }

    /// Reads a path, or a group of paths, in a module that is `above` modules above that of the code; in the root of the
    /// crate, if it is none.
    fn read(&mut self, at: usize, above: Option<usize>) {
        match self.text(at) {
            "{" => self.read_group(at, above),
            "crate" if self.is_path(at) => self.read(at + 3, None),
            "self" if self.is_path(at) => self.read(at + 3, above),
            "super" if self.is_path(at) => {
                let above = above.map(|above| above + 1).filter(|above| *above < self.depth);
                self.read(at + 3, above);
            }
            text if above.is_none() && (text == "*" || text.starts_with(is_word)) => self.push(at),
            _ => {}
        }
    }

    fn read_group(&mut self, start: usize, above: Option<usize>) {
        let mut depth = 0_usize;
        for at in start..self.tokens.len() {
            match self.text(at) {
                "{" => depth += 1,
                "}" => depth -= 1,
                _ => {}
            }
            if depth == 0 {
                return;
            }
            let begins_item = depth == 1 && matches!(self.text(at), "{" | ",");
            if begins_item && self.text(at + 1) != "}" {
                self.read(at + 1, above);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What the code of a file must not use, with the lines.
    fn wrong(path: &str, text: &str) -> Vec<(String, usize)> {
        let findings = check(&[File { path: format!("{SERVER}{path}"), text: text.to_owned() }]);
        let name = |finding: &Finding| {
            let name = finding.message.split('`').nth(3).unwrap_or_default();
            (name.to_owned(), finding.line.unwrap_or_default())
        };
        findings.iter().map(name).collect()
    }

    fn is_wrong(path: &str, text: &str, names: &[&str]) {
        let found = wrong(path, text);
        assert_eq!(found.iter().map(|(name, _)| name).collect::<Vec<_>>(), names, "{path}: {text}");
    }

    #[test]
    fn services_use_runtime_and_themselves() {
        is_wrong("gateway/mod.rs", "use crate::runtime::metrics::Metrics;\nuse crate::gateway::body;", &[]);
        is_wrong("admin.rs", "use crate::runtime::{Sockets, tls};", &[]);
        is_wrong("server.rs", "use crate::admin::Admin;\nuse crate::gateway::Gateway;", &[]);
        is_wrong("runtime/engine.rs", "use super::backend::Backend;", &[]);
        is_wrong(
            "gateway/upstream/pool.rs",
            "use super::super::body;\npub(in crate::gateway) fn f() {}",
            &[],
        );
        is_wrong("gateway/timer.rs", "mod tests { use super::super::drain; }", &[]);
    }

    #[test]
    fn services_do_not_use_each_other() {
        is_wrong("http_api/mod.rs", "use crate::envoy::json;", &["envoy"]);
        is_wrong("gateway/state.rs", "use crate::server::Server;", &["server"]);
        is_wrong("envoy/mod.rs", "use crate::{http_api, redis_api as other};", &["http_api", "redis_api"]);
        is_wrong("runtime/backend.rs", "fn of() -> crate::gateway::State {}", &["gateway"]);
    }

    #[test]
    fn declaration_over_several_lines_is_read() {
        let text = "use crate::{\n    runtime::{tls, Sockets},\n    gateway,\n};\n";
        assert_eq!(wrong("envoy/mod.rs", text), [("gateway".to_owned(), 3)]);
    }

    #[test]
    fn path_by_super_is_resolved() {
        is_wrong("envoy/json.rs", "use super::super::gateway::State;", &["gateway"]);
        is_wrong("envoy/json.rs", "use super::{error, super::gateway};", &["gateway"]);
        is_wrong("envoy/json.rs", "use self::super::super::gateway;", &["gateway"]);
        is_wrong("admin.rs", "fn of() -> super::gateway::State {}", &["gateway"]);
        is_wrong("gateway/upstream/mod.rs", "use super::super::envoy;", &["envoy"]);
        is_wrong("envoy/json.rs", "mod tests { use super::super::super::gateway; }", &["gateway"]);
        is_wrong("envoy/json.rs", "mod tests { fn f() {} } use super::super::gateway;", &["gateway"]);
    }

    /// Also a service that this rule has never heard of.
    #[test]
    fn new_service_is_checked() {
        is_wrong("new_api/mod.rs", "use crate::gateway::State;", &["gateway"]);
        is_wrong("gateway/state.rs", "use crate::new_api::Api;", &["new_api"]);
    }

    #[test]
    fn whole_crate_and_its_exports_are_not_used() {
        is_wrong("envoy/mod.rs", "use crate::*;", &["*"]);
        is_wrong("envoy/mod.rs", "use crate as root;", &["crate"]);
        is_wrong("envoy/mod.rs", "use crate::{self as root, Server};", &["self", "Server"]);
    }

    #[test]
    fn other_crates_and_comments_are_not_checked() {
        let text = "//! Like `crate::gateway`.\n".to_owned();
        assert_eq!(check(&[File { path: "ratekeeper-cli/src/run.rs".to_owned(), text }]).len(), 0);
        is_wrong("envoy/mod.rs", "// as in crate::gateway::body\nlet a = \"crate::gateway\";", &[]);
        is_wrong("envoy/mod.rs", "use ratekeeper::tower::gateway;\nuse http::server;", &[]);
    }
}
