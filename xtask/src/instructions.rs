//! The processor instructions of a request to the gateway and to the APIs, counted by callgrind.
//!
//! Unlike times, instruction counts hardly change on a busy machine, so a regression of a few percent fails. A server
//! with one worker serves the same requests twice, a few and many, on one connection; the difference between both runs
//! is the cost of the requests alone. Only the worker's thread is counted: what others do depends on the time that
//! passes. The kernel's work is not counted.

mod grpc;

use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::path::Path;
use std::process::{Command, Stdio};
use std::thread;
use std::time::Duration;

use anyhow::{Context, Result, ensure};

use crate::background;
use crate::workspace::Workspace;

/// A scenario may exceed its instructions by this share.
const TOLERANCE_PERCENT: u64 = 5;
/// Requests in the short and in the long run.
const REQUESTS: [u64; 2] = [1_000, 3_000];
/// How long a server may take to start: callgrind starts slowly.
const START_TIME_MAX: Duration = Duration::from_secs(60);
const PROXIED: &[u8] =
    b"GET /api/items?page=2 HTTP/1.1\r\nhost: localhost\r\nuser-agent: curl/8.0\r\naccept: */*\r\n\
    x-user-id: alice\r\n\r\n";
const CHECK: &[u8] = b"POST /v1/check HTTP/1.1\r\nhost: localhost\r\nuser-agent: curl/8.0\r\n\
    content-type: application/json\r\ncontent-length: 36\r\n\r\n{\"limit\":\"per-client\",\"key\":\"alice\"}";

/// What is measured.
struct Scenario {
    name: &'static str,
    /// The instructions of a request, measured with the `release` profile. Lower the number when a change saves some.
    instructions: u64,
    has_redis: bool,
    limit: &'static str,
    service: MeasuredService,
    /// The status of HTTP, or the code of the Envoy API.
    status: &'static str,
}

#[derive(Clone, Copy)]
enum MeasuredService {
    Gateway,
    HttpApi,
    EnvoyApi,
}

const ALLOWED: &str = "token_bucket: { capacity: 1000000, refill: 1000000/s }";
const DENIED: &str = "token_bucket: { capacity: 1, refill: 1/1d }";

const SCENARIOS: [Scenario; 7] = [
    Scenario {
        name: "allowed",
        instructions: 67_200,
        has_redis: false,
        limit: ALLOWED,
        service: MeasuredService::Gateway,
        status: "200",
    },
    Scenario {
        name: "denied",
        instructions: 36_000,
        has_redis: false,
        limit: DENIED,
        service: MeasuredService::Gateway,
        status: "429",
    },
    Scenario {
        name: "allowed, Redis",
        instructions: 88_800,
        has_redis: true,
        limit: ALLOWED,
        service: MeasuredService::Gateway,
        status: "200",
    },
    Scenario {
        name: "denied, Redis",
        instructions: 39_200,
        has_redis: true,
        limit: DENIED,
        service: MeasuredService::Gateway,
        status: "429",
    },
    Scenario {
        name: "HTTP API, allowed",
        instructions: 44_200,
        has_redis: false,
        limit: ALLOWED,
        service: MeasuredService::HttpApi,
        status: "200",
    },
    Scenario {
        name: "Envoy API, allowed",
        instructions: 71_200,
        has_redis: false,
        limit: ALLOWED,
        service: MeasuredService::EnvoyApi,
        status: "1",
    },
    Scenario {
        name: "Envoy API, denied",
        instructions: 71_100,
        has_redis: false,
        limit: DENIED,
        service: MeasuredService::EnvoyApi,
        status: "2",
    },
];

/// Counts the instructions of each scenario with the `release` build.
pub(crate) fn run(workspace: &Workspace) -> Result<()> {
    let folder = workspace.target.join("instructions");
    fs::create_dir_all(&folder).context("creating a folder for the measurement")?;
    let redis_port = free_address()?.port();
    let mut redis = Command::new("redis-server");
    redis
        .args(["--port", &redis_port.to_string(), "--bind", "127.0.0.1", "--save", "", "--dir"])
        .arg(&folder);
    redis.stdout(Stdio::null());
    let _redis = background::start(redis, redis_port, START_TIME_MAX)?;
    // The first checks are slow under callgrind.
    let redis = format!(
        "{{ redis: {{ address: \"redis://127.0.0.1:{redis_port}\", instances: 1, deadline: 10s }} }}"
    );
    let upstream = upstream()?;
    let mut exceeded = Vec::new();
    for scenario in &SCENARIOS {
        let store = if scenario.has_redis { &redis } else { "memory" };
        let [few, many] =
            REQUESTS.map(|requests| count(workspace, &folder, scenario, upstream, store, requests));
        let measured = (many?.saturating_sub(few?)) / (REQUESTS[1] - REQUESTS[0]);
        let max = scenario.instructions + scenario.instructions * TOLERANCE_PERCENT / 100;
        println!("      {:<20} {measured:>7} instructions a request, at most {max}", scenario.name);
        if measured > max {
            exceeded.push(scenario.name);
        }
    }
    ensure!(exceeded.is_empty(), "more instructions than allowed: {}", exceeded.join("; "));
    Ok(())
}

/// The instructions of a gateway that serves some requests.
fn count(
    workspace: &Workspace,
    folder: &Path,
    scenario: &Scenario,
    upstream: SocketAddr,
    store: &str,
    requests: u64,
) -> Result<u64> {
    let (address, limit) = (free_address()?, scenario.limit);
    let config = folder.join("ratekeeper.yaml");
    let text = format!(
        "store: {store}\nadmin: off\nlimits:\n  per-client:\n    key: {{ header: x-user-id, fallback: ip }}\n    {limit}\n{}",
        match scenario.service {
            MeasuredService::Gateway => format!(
                "gateway:\n  listen: {address}\n  routes:\n    - {{ id: api, path: /api/**, upstream: http://{upstream}, limits: [per-client] }}\n"
            ),
            MeasuredService::HttpApi => format!("apis: {{ http: {address} }}\n"),
            MeasuredService::EnvoyApi =>
                format!("domains:\n  edge:\n    - {{ key: user, {limit} }}\napis: {{ envoy: {address} }}\n"),
        }
    );
    fs::write(&config, text).context("writing the configuration")?;
    let output = folder.join("callgrind");
    fs::create_dir_all(&output)?;
    for old in fs::read_dir(&output)? {
        fs::remove_file(old?.path())?;
    }
    let mut command = Command::new("taskset");
    // One processor, so that the gateway has one worker.
    command.args(["--cpu-list", "0", "valgrind", "--tool=callgrind", "--separate-threads=yes"]);
    command.arg(format!("--callgrind-out-file={}", output.join("out").display()));
    command.arg(workspace.target.join("release/ratekeeper")).arg("run").arg("-c").arg(&config);
    command.stdout(Stdio::null()).stderr(fs::File::create(folder.join("stderr.txt"))?);
    let served = background::start(command, address.port(), START_TIME_MAX)
        .and_then(|_gateway| send(address, scenario, requests));
    served.with_context(|| {
        let log = fs::read_to_string(folder.join("stderr.txt")).unwrap_or_default();
        format!("scenario `{}`; the gateway's log:\n{log}", scenario.name)
    })?;
    // Of all threads, the worker executes most.
    let mut most = 0;
    for thread in fs::read_dir(&output)? {
        let counted = fs::read_to_string(thread?.path()).context("reading callgrind's output")?;
        if let Some(total) = counted.lines().find_map(|line| line.strip_prefix("totals: ")) {
            most = most.max(total.trim().parse().context("reading callgrind's total")?);
        }
    }
    ensure!(most > 0, "callgrind counted nothing");
    Ok(most)
}

/// Sends requests on one connection, and checks the statuses of all but the first.
fn send(server: SocketAddr, scenario: &Scenario, requests: u64) -> Result<()> {
    let stream = TcpStream::connect(server)?;
    stream.set_read_timeout(Some(Duration::from_secs(60)))?;
    stream.set_nodelay(true)?;
    let mut responses = BufReader::new(&stream);
    if let MeasuredService::EnvoyApi = scenario.service {
        (&stream).write_all(&grpc::preface())?;
    }
    for number in 0..requests {
        let status = match scenario.service {
            MeasuredService::Gateway => {
                (&stream).write_all(PROXIED)?;
                read_response(&mut responses)?
            }
            MeasuredService::HttpApi => {
                (&stream).write_all(CHECK)?;
                read_response(&mut responses)?
            }
            MeasuredService::EnvoyApi => {
                (&stream).write_all(&grpc::call(number)?)?;
                grpc::read_code(&mut responses, &stream)?
            }
        };
        ensure!(number == 0 || status == scenario.status, "request {number} got the status {status}");
    }
    Ok(())
}

/// Reads a response and returns its status.
fn read_response(responses: &mut impl BufRead) -> Result<String> {
    let (mut status, mut length) = (String::new(), 0);
    loop {
        let mut line = String::new();
        ensure!(responses.read_line(&mut line)? > 0, "the gateway closed the connection");
        let line = line.trim_end();
        if line.is_empty() {
            break;
        }
        if status.is_empty() {
            status = line.split(' ').nth(1).unwrap_or_default().to_owned();
        }
        if let Some((name, value)) = line.split_once(':')
            && name.eq_ignore_ascii_case("content-length")
        {
            length = value.trim().parse()?;
        }
    }
    responses.by_ref().take(length).read_to_end(&mut Vec::new())?;
    Ok(status)
}

/// Answers all requests with 200 and a short body, on threads that end with the process.
fn upstream() -> Result<SocketAddr> {
    let listener = TcpListener::bind("127.0.0.1:0")?;
    let address = listener.local_addr()?;
    thread::spawn(move || {
        for stream in listener.incoming().flatten() {
            thread::spawn(move || {
                let mut lines = BufReader::new(&stream).lines();
                while let Some(Ok(line)) = lines.next() {
                    if line.is_empty()
                        && (&stream).write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok").is_err()
                    {
                        return;
                    }
                }
            });
        }
    });
    Ok(address)
}

fn free_address() -> Result<SocketAddr> {
    Ok(TcpListener::bind("127.0.0.1:0")?.local_addr()?)
}
