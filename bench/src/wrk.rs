//! Load generator for HTTP: wrk, with enough connections to saturate the server.
#![allow(clippy::float_arithmetic, reason = "figures for people; nothing is decided by them")]

use std::error::Error;
use std::process::Command;

const CONNECTIONS: u32 = 64;

/// The results of wrk.
#[derive(Debug, PartialEq)]
pub(crate) struct WrkResult {
    pub(crate) requests: u64,
    /// Responses that are neither 2xx nor 3xx.
    pub(crate) not_2xx: u64,
    pub(crate) per_second: f64,
    pub(crate) p50_us: f64,
    pub(crate) p99_us: f64,
}

/// Runs wrk for one second with an address and further arguments. A missing response is an error.
pub(crate) fn run(arguments: &[&str]) -> Result<WrkResult, Box<dyn Error>> {
    let connections = CONNECTIONS.to_string();
    let output = Command::new("wrk")
        .args(["--threads", "1", "--connections", &connections, "--duration", "1s", "--latency"])
        .args(arguments)
        .output()?;
    let text = String::from_utf8_lossy(&output.stdout);
    match read(&text) {
        Some(result) if !text.contains("Socket errors") => Ok(result),
        _ => Err(format!("wrk printed {text:?} {:?}", String::from_utf8_lossy(&output.stderr)).into()),
    }
}

fn read(text: &str) -> Option<WrkResult> {
    let after = |word: &str| text.lines().find_map(|line| line.trim().strip_prefix(word).map(str::trim));
    let requests = text.lines().find_map(|line| line.split_once(" requests in ")?.0.trim().parse().ok())?;
    let not_2xx = after("Non-2xx or 3xx responses:").map_or(Some(0), |number| number.parse().ok())?;
    Some(WrkResult {
        requests,
        not_2xx,
        per_second: after("Requests/sec:")?.parse().ok()?,
        p50_us: micros(after("50%")?)?,
        p99_us: micros(after("99%")?)?,
    })
}

fn micros(text: &str) -> Option<f64> {
    let digits = text.trim_end_matches(char::is_alphabetic);
    let unit = match &text[digits.len()..] {
        "us" => 1.0,
        "ms" => 1e3,
        "s" => 1e6,
        _ => return None,
    };
    Some(digits.parse::<f64>().ok()? * unit)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn wrk_output_is_parsed() {
        let text = "Running 1s test @ http://127.0.0.1:8080/denied\n  1 threads and 64 connections\n  \
            Thread Stats   Avg      Stdev     Max   +/- Stdev\n    Latency     1.38ms    1.11ms  15.17ms   87.31%\n    \
            Req/Sec    50.60k     3.35k   55.42k    90.00%\n  Latency Distribution\n     50%  980.00us\n     \
            75%    1.71ms\n     90%    2.54ms\n     99%    5.62ms\n  50333 requests in 1.00s, 8.21MB read\n  \
            Non-2xx or 3xx responses: 50332\nRequests/sec:  50293.03\nTransfer/sec:      8.20MB\n";
        let (requests, not_2xx, per_second) = (50_333, 50_332, 50_293.03);
        let result = WrkResult { requests, not_2xx, per_second, p50_us: 980.0, p99_us: 5_620.0 };
        assert_eq!(read(text), Some(result));
        assert_eq!(read("unable to connect to 127.0.0.1:8080 Connection refused\n"), None);
    }
}
