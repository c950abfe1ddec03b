//! Schemathesis generates requests from the OpenAPI document, valid and invalid, and checks the responses against it.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use ratekeeper_server::http_api::OPENAPI;
use serde_json::{Value, json};

use super::support::{PER_USER, run};

/// The version whose checks these tests were written for.
const PACKAGE: &str = "schemathesis==4.32.5";
const EXAMPLES_PER_OPERATION: &str = "40";

/// Installed once, below the build directory.
fn program() -> PathBuf {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("schemathesis");
    let program = folder.join("bin/schemathesis");
    if !program.is_file() {
        let succeeds =
            |command: &mut Command| command.stdin(Stdio::null()).status().is_ok_and(|it| it.success());
        let installed = succeeds(Command::new("python3").args(["-m", "venv"]).arg(&folder))
            && succeeds(Command::new(folder.join("bin/pip")).args(["install", "--quiet", PACKAGE]));
        assert!(
            installed,
            "{PACKAGE} cannot be installed; `cargo xtask test` needs python3 with venv, and PyPI"
        );
    }
    program
}

/// The document with the limit names of this API: other names are rejected early.
fn document() -> Value {
    let mut document: Value = serde_json::from_str(OPENAPI).unwrap();
    let schemas = &mut document["components"]["schemas"];
    let limit = json!({ "type": "string", "enum": ["total", "per-user", "nobody"] });
    for schema in ["/LimitCheck", "/ReserveRequest", "/CheckRequest/oneOf/0"] {
        schemas.pointer_mut(schema).unwrap()["properties"]["limit"] = limit.clone();
    }
    document
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn responses_conform_to_the_openapi_document() {
    let api = run(&format!(
        "{PER_USER}
  total: {{ key: global, fixed_window: {{ limit: 100, window: 1h }} }}"
    ));
    let program = tokio::task::spawn_blocking(program).await.unwrap();
    let file = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("openapi-{}.json", std::process::id()));
    std::fs::write(&file, document().to_string()).unwrap();
    let checks = "not_a_server_error,status_code_conformance,content_type_conformance,response_headers_conformance,\
                  response_schema_conformance";
    let output = tokio::process::Command::new(program)
        .arg("run")
        .arg(&file)
        .args(["--url", &format!("http://{}", api.address), "--checks", checks, "--seed", "7"])
        .args(["--max-examples", EXAMPLES_PER_OPERATION, "--phases", "examples,coverage,fuzzing"])
        .args(["--suppress-health-check", "all", "--no-color"])
        .current_dir(env!("CARGO_TARGET_TMPDIR"))
        .stdin(Stdio::null())
        .output()
        .await
        .unwrap();
    let _ = std::fs::remove_file(&file);
    let report = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{report}\n{}", String::from_utf8_lossy(&output.stderr));
    assert!(report.contains("Tested: 8"), "not all operations were tested: {report}");
}
