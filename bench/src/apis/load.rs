//! Sends checks to a contender and verifies its responses.

use std::error::Error;
use std::io::{Read, Write};
use std::net::{Ipv4Addr, TcpStream};
use std::process::Command;
use std::time::Duration;

use testbed::process::{Folder, Running};

use super::grpc::{Api, Load};
use super::report::{ApisFigure, ApisRow};
use super::{ApiCheck, ApiJob, ApisSize, Transport};
use crate::wrk;

/// The key in a check; redis-benchmark replaces the placeholder with twelve digits.
const KEY: &str = "user:__rand_int__";
/// One of the keys.
const ONE_KEY: &str = "user:000000000000";

const RESP_CONNECTIONS: &str = "50";
const PIPELINE: usize = 16;
/// Read timeout for one response.
const READ_TIMEOUT: Duration = Duration::from_secs(10);

/// A check in the protocol of one API.
pub(super) enum CheckFormat {
    /// A command, and the text that the expected response contains.
    Resp {
        command: Vec<&'static str>,
        response: &'static str,
    },
    /// A POST, with `%s` for the key.
    Http {
        path: &'static str,
        body: String,
    },
    Grpc(Api),
}

impl CheckFormat {
    /// Creates a check by a Redis command, with the key between `before` and `limit`.
    pub(super) fn command(
        before: &[&'static str],
        limit: &[&'static str],
        response: &'static str,
    ) -> CheckFormat {
        CheckFormat::Resp { command: [before, &[KEY], limit].concat(), response }
    }

    pub(super) fn supports(&self, transport: Transport) -> bool {
        match self {
            CheckFormat::Resp { .. } => matches!(transport, Transport::Piped | Transport::Alone),
            CheckFormat::Http { .. } => transport == Transport::Http,
            CheckFormat::Grpc(_) => transport == Transport::Grpc,
        }
    }
}

/// Runs one round of load against a contender and measures its processor time.
pub(super) fn visit(
    process: &Running,
    check: &ApiCheck,
    row: &ApisRow,
    size: &ApisSize,
    folder: &Folder,
) -> Result<ApisFigure, Box<dyn Error>> {
    let port = check.port;
    let before = process.cpu_us()?;
    let (decisions, per_second) = match &check.format {
        CheckFormat::Resp { command, .. } if row.transport == Transport::Piped => {
            by_redis_benchmark(port, command, PIPELINE, size.piped, size.keys)?
        }
        CheckFormat::Resp { command, .. } => by_redis_benchmark(port, command, 1, size.alone, size.keys)?,
        CheckFormat::Http { path, body } => by_wrk(port, path, body, size.keys, folder)?,
        &CheckFormat::Grpc(api) => {
            by_this_program(&Load { port, api, job: row.job, decisions: size.grpc, keys: size.keys })?
        }
    };
    let spent = process.cpu_us()? - before;
    // The load generators ignore the responses, so verify one here.
    match &check.format {
        CheckFormat::Resp { command, response } => {
            let mut text = format!("*{}\r\n", command.len());
            for word in command {
                let word = if *word == KEY { ONE_KEY } else { word };
                text.push_str(&format!("${}\r\n{word}\r\n", word.len()));
            }
            expect(port, &text, response)?;
        }
        CheckFormat::Http { path, body } => {
            let (body, is_allowed) = (body.replace("%s", ONE_KEY), row.job == ApiJob::Allowed);
            let text = format!(
                "POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n\
                 Content-Length: {}\r\n\r\n{body}",
                body.len()
            );
            expect(port, &text, &format!("{{\"allowed\":{is_allowed},"))?;
        }
        // The gRPC load generator verifies every response.
        CheckFormat::Grpc(_) => {}
    }
    Ok(ApisFigure { cpu_us: spent as f64 / decisions as f64, per_second })
}

/// Sends one check and waits until the response contains `expected`.
fn expect(port: u16, check: &str, expected: &str) -> Result<(), Box<dyn Error>> {
    let mut stream = TcpStream::connect((Ipv4Addr::LOCALHOST, port))?;
    stream.set_read_timeout(Some(READ_TIMEOUT))?;
    stream.write_all(check.as_bytes())?;
    let (mut response, mut part) = (String::new(), [0; 4096]);
    while !response.contains(expected) {
        match stream.read(&mut part) {
            Ok(read) if read > 0 => response.push_str(&String::from_utf8_lossy(&part[..read])),
            _ => return Err(format!("sent {check:?}, expected {expected:?}, got {response:?}").into()),
        }
        // Expected responses are short.
        if response.len() > part.len() {
            return Err(format!("sent {check:?}, the response is too long").into());
        }
    }
    Ok(())
}

fn by_redis_benchmark(
    port: u16,
    command: &[&str],
    depth: usize,
    decisions: usize,
    keys: usize,
) -> Result<(usize, f64), Box<dyn Error>> {
    let output = Command::new("redis-benchmark")
        .args(["-p", &port.to_string(), "-c", RESP_CONNECTIONS, "-r", &keys.to_string(), "--csv"])
        .args(["-n", &decisions.to_string(), "-P", &depth.to_string()])
        .args(command)
        .output()
        .map_err(|error| format!("redis-benchmark: {error}; try `sudo apt-get install redis-tools`"))?;
    let text = String::from_utf8_lossy(&output.stdout);
    let per_second = per_second(&text).ok_or_else(|| {
        format!("redis-benchmark printed {text} {}", String::from_utf8_lossy(&output.stderr))
    })?;
    Ok((decisions, per_second))
}

/// Returns the second field of the last line: requests per second.
fn per_second(csv: &str) -> Option<f64> {
    let line = csv.lines().rfind(|line| line.starts_with('"'))?;
    line.split("\",\"").nth(1)?.parse().ok()
}

fn by_wrk(
    port: u16,
    path: &str,
    body: &str,
    keys: usize,
    folder: &Folder,
) -> Result<(usize, f64), Box<dyn Error>> {
    let script = folder.write("check.lua", include_str!("check.lua"))?.display().to_string();
    let (url, keys) = (format!("http://127.0.0.1:{port}{path}"), keys.to_string());
    let result = wrk::run(&["--script", &script, &url, "--", body, &keys])?;
    if result.not_2xx > 0 {
        return Err(
            format!("a denial has status 200 as well, but some responses have not: {result:?}").into()
        );
    }
    Ok((usize::try_from(result.requests)?, result.per_second))
}

/// Runs the load in another process, because only the server's processor time is measured.
fn by_this_program(load: &Load) -> Result<(usize, f64), Box<dyn Error>> {
    let output = Command::new(std::env::current_exe()?).arg("grpc-load").args(load.arguments()).output()?;
    let text = String::from_utf8_lossy(&output.stdout);
    let Ok(per_second) = text.trim().parse() else {
        return Err(String::from_utf8_lossy(&output.stderr).into());
    };
    Ok((load.decisions, per_second))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn redis_benchmark_output_is_parsed() {
        let text = "\"test\",\"rps\",\"avg_latency_ms\"\n\"CL.THROTTLE user 1 1 1\",\"66666.67\",\"0.400\"\n";
        assert_eq!(per_second(text), Some(66666.67));
        assert_eq!(per_second("nothing"), None);
    }
}
