//! An independent client: Python's standard library.

use std::path::Path;
use std::process::Stdio;

use testbed::TEST_TIMEOUT;
use tokio::process::Command;
use tokio::time::timeout;

use crate::run::support::{Folder, Process, Upstream};

const LIMIT: usize = 5;

#[tokio::test(flavor = "multi_thread")]
async fn python_client_reads_responses_and_rate_limit_headers() {
    let (folder, upstream) = (Folder::new("python"), Upstream::start().await);
    let at = upstream.address();
    let text = format!(
        "limits: {{ per-user: {{ key: {{ header: X-User-Id }}, fixed_window: {{ limit: {LIMIT}, window: 1h, align: first_request }} }} }}\n\
         gateway:\n  listen: 127.0.0.1:0\n  access_log: false\n  routes:\n    \
           - {{ id: limited, path: /limited, upstream: http://{at}, limits: [per-user] }}\n    \
           - {{ id: rest, upstream: http://{at}, limits: [] }}\n"
    );
    let (_process, address) = Process::serving(&folder.write("ratekeeper.yaml", &text)).await;
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/run/client.py");
    let mut command = Command::new("python3");
    command.arg(script).args([address.port().to_string(), LIMIT.to_string()]);
    let running = command.stdin(Stdio::null()).kill_on_drop(true).output();
    let output = timeout(TEST_TIMEOUT, running).await.expect("the Python client timed out").unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}
