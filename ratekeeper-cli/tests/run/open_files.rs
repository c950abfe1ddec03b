//! A process with a low limit on open files.

use testbed::wait_until;
use tokio::io::AsyncWriteExt;
use tokio::net::TcpStream;

use crate::run::support::{Client, Folder, Process, Upstream, one_route, ratekeeper};

/// Starts the binary from a shell that first lowers the limit.
fn limited(limit: &str, file: &std::path::Path) -> Process {
    let mut command = std::process::Command::new("sh");
    command.args(["-c", &format!("{limit} && exec \"$0\" run --config \"$1\"")]);
    Process::spawn(command.arg(ratekeeper().get_program()).arg(file))
}

/// Returns the soft and the hard limit of a process.
fn open_files(process: &Process) -> (u64, u64) {
    let limits = std::fs::read_to_string(format!("/proc/{}/limits", process.pid())).unwrap();
    let line = limits.lines().find(|line| line.starts_with("Max open files")).unwrap();
    let mut numbers = line.split_whitespace().filter_map(|word| word.parse().ok());
    (numbers.next().unwrap(), numbers.next().unwrap())
}

#[tokio::test]
async fn soft_limit_is_raised_and_a_low_hard_limit_is_logged() {
    let (folder, upstream) = (Folder::new("descriptors"), Upstream::start().await);
    let file = folder.write("a.yaml", &one_route(&upstream, "", "  max_connections: 1000"));
    let process = limited("ulimit -Sn 100 && ulimit -Hn 3000", &file);
    process.address().await;
    assert_eq!(open_files(&process), (3_000, 3_000));
    assert_eq!(process.count_lines("max_connections"), 0, "{:?}", process.stderr());

    let process = limited("ulimit -Sn 100 && ulimit -Hn 2000", &file);
    process.address().await;
    let line = process.line("max_connections").await;
    assert!(line.contains("WARN") && line.contains("2000") && line.contains("2200"), "{line}");
}

#[tokio::test]
async fn exhausted_descriptors_do_not_eject_the_upstream() {
    let (folder, upstream) = (Folder::new("exhausted"), Upstream::start().await);
    let at = upstream.address();
    let up = format!("ratekeeper_upstream_up{{upstream=\"one\",address=\"{at}\"}}");
    let file = format!(
        "admin: 127.0.0.1:0\ngateway:\n  listen: 127.0.0.1:0\n  upstreams:\n    one:\n      addresses: [http://{at}]\n      \
         outlier_ejection: {{ after: 1, for: 1h }}\n      health: {{ path: /, every: 100ms, unhealthy_after: 1 }}\n  \
         routes: [{{ id: all, limits: all, upstream: one }}]\n"
    );
    let process = limited("ulimit -n 64", &folder.write("a.yaml", &file));
    let address = process.address().await;
    // A connection opened before the others, without a request yet.
    let mut client = Client::connected(address).await;
    let mut crowd = Vec::new();
    for _ in 0..100 {
        crowd.push(TcpStream::connect(address).await.unwrap());
    }
    // Several times: the descriptor that a health check frees goes to the next connection in the queue.
    wait_until(|| process.count_lines("accept failed") > 6).await;
    let response = client.get("/", "").await.unwrap();
    assert_eq!(response.status, 503, "{}", response.head);
    drop(crowd);
    process.until_metric("ratekeeper_connections", 1).await;
    assert_eq!(process.metric(&up).await, 1, "{:?}", process.stderr());
    assert_eq!(process.count_lines("upstream ejected"), 0, "{:?}", process.stderr());
    assert_eq!(client.get("/", "").await.unwrap().status, 200);
}

/// Clients of the admin listener need no token to open a connection.
#[tokio::test]
async fn admin_connections_leave_descriptors_to_the_gateway() {
    let (folder, upstream) = (Folder::new("reserved"), Upstream::start().await);
    let process = limited("ulimit -n 256", &folder.write("a.yaml", &one_route(&upstream, "", "")));
    let (address, admin) = (process.address().await, process.admin().await);
    let mut silent = Vec::new();
    for _ in 0..300 {
        let mut stream = TcpStream::connect(admin).await.unwrap();
        // Beyond its bound, the listener closes the connection.
        let _ = stream.write_all(b"GET /met").await;
        silent.push(stream);
    }
    for _ in 0..3 {
        let mut client = Client::connected(address).await;
        assert_eq!(client.get("/", "").await.unwrap().status, 200);
    }
    assert_eq!(process.count_lines("accept failed"), 0, "{:?}", process.stderr());
}
