//! Input and output that block must not stop the gateway.

use std::net::{Ipv4Addr, SocketAddr};
use std::process::{Child, Command, Stdio};

use nix::sys::signal::Signal;
use nix::sys::stat::Mode;
use testbed::{TEST_TIMEOUT, wait_until};
use tokio::time::timeout;

use crate::run::support::{Client, Folder, Process, Upstream, get, one_route, ratekeeper};

/// A process that is killed on drop.
struct Killed(Child);

impl Drop for Killed {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn with_unread_stderr(command: &mut Command) -> Killed {
    Killed(command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap())
}

#[tokio::test]
async fn full_pipe_on_stderr_stops_nothing() {
    let (folder, closed) = (Folder::new("unread"), testbed::process::free_port().unwrap());
    let port = testbed::process::free_port().unwrap();
    let file = folder.write(
        "a.yaml",
        &format!(
            "gateway:\n  listen: 127.0.0.1:{port}\n  upstreams: {{ one: {{ addresses: [http://127.0.0.1:{closed}], \
             outlier_ejection: off }} }}\n  routes: [{{ id: all, limits: all, upstream: one }}]\n"
        ),
    );
    // Each failed attempt is logged, and nobody reads the log.
    let _process =
        with_unread_stderr(ratekeeper().env("RATEKEEPER_LOG", "debug").args(["run", "--config"]).arg(&file));
    assert!(testbed::process::listens(port));
    let mut client = Client::connected(SocketAddr::from((Ipv4Addr::LOCALHOST, port))).await;
    for number in 0..2_000 {
        let response = timeout(TEST_TIMEOUT / 3, client.get("/", "")).await;
        let response = response.unwrap_or_else(|_| panic!("no response to request {number}")).unwrap();
        assert_eq!(response.status, 502);
    }
}

#[tokio::test]
async fn configuration_that_is_a_fifo_stops_nothing() {
    let (folder, upstream) = (Folder::new("fifo"), Upstream::start().await);
    let file = folder.write("a.yaml", &one_route(&upstream, "", ""));
    let (mut process, address) = Process::serving(&file).await;
    let regular = file.with_extension("regular");
    std::fs::rename(&file, &regular).unwrap();
    nix::unistd::mkfifo(&file, Mode::S_IRUSR | Mode::S_IWUSR).unwrap();
    process.signal(Signal::SIGHUP);
    let line = process.line("not reloaded").await;
    assert!(line.contains("not a regular file"), "{line}");
    assert_eq!(get(address, "/").await.status, 200);
    assert_eq!(process.metric("ratekeeper_reloads_total{result=\"failure\"}").await, 1);
    // A regular file is read again.
    std::fs::rename(&regular, &file).unwrap();
    process.signal(Signal::SIGHUP);
    wait_until(|| process.count_lines("configuration reloaded") > 0).await;
}
