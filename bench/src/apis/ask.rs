//! Sends checks to a contender and verifies its answers.

use std::error::Error;
use std::io::{Read, Write};
use std::net::{Ipv4Addr, TcpStream};
use std::process::Command;
use std::time::Duration;

use testbed::process::{Folder, Running};

use super::grpc::{Api, Load};
use super::report::{Figure, Row};
use super::{Job, Question, Size, Way};
use crate::wrk;

/// The key in a check; redis-benchmark replaces the placeholder with twelve digits.
const KEY: &str = "user:__rand_int__";
/// One of the keys.
const ONE_KEY: &str = "user:000000000000";

const RESP_CONNECTIONS: &str = "50";
const PIPELINE: usize = 16;
/// Read timeout for one answer.
const PATIENCE: Duration = Duration::from_secs(10);

/// A check in the protocol of one API.
pub(super) enum Ask {
    /// A command, and the text that the expected answer contains.
    Resp {
        command: Vec<&'static str>,
        answer: &'static str,
    },
    /// A POST, with `%s` for the key.
    Http {
        path: &'static str,
        body: String,
    },
    Grpc(Api),
}

impl Ask {
    /// Creates a check by a Redis command, with the key between `before` and `limit`.
    pub(super) fn command(before: &[&'static str], limit: &[&'static str], answer: &'static str) -> Ask {
        Ask::Resp { command: [before, &[KEY], limit].concat(), answer }
    }

    pub(super) fn is_asked(&self, way: Way) -> bool {
        match self {
            Ask::Resp { .. } => matches!(way, Way::Piped | Way::Alone),
            Ask::Http { .. } => way == Way::Http,
            Ask::Grpc(_) => way == Way::Grpc,
        }
    }
}

/// Runs one round of load against a contender and measures its processor time.
pub(super) fn visit(
    process: &Running,
    question: &Question,
    row: &Row,
    size: &Size,
    folder: &Folder,
) -> Result<Figure, Box<dyn Error>> {
    let port = question.port;
    let before = process.cpu_us()?;
    let (decisions, per_second) = match &question.ask {
        Ask::Resp { command, .. } if row.way == Way::Piped => {
            by_redis_benchmark(port, command, PIPELINE, size.piped, size.keys)?
        }
        Ask::Resp { command, .. } => by_redis_benchmark(port, command, 1, size.alone, size.keys)?,
        Ask::Http { path, body } => by_wrk(port, path, body, size.keys, folder)?,
        &Ask::Grpc(api) => {
            by_this_program(&Load { port, api, job: row.job, decisions: size.grpc, keys: size.keys })?
        }
    };
    let spent = process.cpu_us()? - before;
    // The load generators ignore the answers, so verify one here.
    match &question.ask {
        Ask::Resp { command, answer } => {
            let mut text = format!("*{}\r\n", command.len());
            for word in command {
                let word = if *word == KEY { ONE_KEY } else { word };
                text.push_str(&format!("${}\r\n{word}\r\n", word.len()));
            }
            expect(port, &text, answer)?;
        }
        Ask::Http { path, body } => {
            let (body, is_allowed) = (body.replace("%s", ONE_KEY), row.job == Job::Allowed);
            let text = format!(
                "POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n\
                 Content-Length: {}\r\n\r\n{body}",
                body.len()
            );
            expect(port, &text, &format!("{{\"allowed\":{is_allowed},"))?;
        }
        // The gRPC load generator verifies every answer.
        Ask::Grpc(_) => {}
    }
    Ok(Figure { cpu_us: spent as f64 / decisions as f64, per_second })
}

/// Sends one check and waits until the answer contains `expected`.
fn expect(port: u16, question: &str, expected: &str) -> Result<(), Box<dyn Error>> {
    let mut stream = TcpStream::connect((Ipv4Addr::LOCALHOST, port))?;
    stream.set_read_timeout(Some(PATIENCE))?;
    stream.write_all(question.as_bytes())?;
    let (mut told, mut part) = (String::new(), [0; 4096]);
    while !told.contains(expected) {
        match stream.read(&mut part) {
            Ok(read) if read > 0 => told.push_str(&String::from_utf8_lossy(&part[..read])),
            _ => return Err(format!("asked {question:?}, it says {told:?} and not {expected:?}").into()),
        }
        // Expected answers are short.
        if told.len() > part.len() {
            return Err(format!("asked {question:?}, it says too much").into());
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
    let per_second = per_second(&text)
        .ok_or_else(|| format!("redis-benchmark says {text} {}", String::from_utf8_lossy(&output.stderr)))?;
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
    let asked = wrk::ask(&["--script", &script, &url, "--", body, &keys])?;
    if asked.refused > 0 {
        return Err(format!("a denial is an answer, too, and these were refused: {asked:?}").into());
    }
    Ok((usize::try_from(asked.requests)?, asked.per_second))
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
