//! Who asks: wrk, with as many connections as it takes to keep everybody busy.

use std::error::Error;
use std::process::Command;

use super::Job;

const CONNECTIONS: u32 = 64;

/// What wrk has seen.
#[derive(Debug, PartialEq)]
pub(super) struct Asked {
    pub(super) requests: u64,
    pub(super) per_second: f64,
    pub(super) p50_us: f64,
    pub(super) p99_us: f64,
}

/// Asks for a second. Every answer must be the one that the job is about.
pub(super) fn ask(port: u16, job: Job) -> Result<Asked, Box<dyn Error>> {
    let connections = CONNECTIONS.to_string();
    let output = Command::new("wrk")
        .args(["--threads", "1", "--connections", &connections, "--duration", "1s", "--latency"])
        .args(["--header", "X-User-Id: user123"])
        .arg(format!("http://127.0.0.1:{port}{}", job.path()))
        .output()?;
    let text = String::from_utf8_lossy(&output.stdout);
    let (asked, refused) = read(&text).ok_or_else(|| format!("wrk says {text:?}"))?;
    let is_right = match job {
        Job::Allowed => refused == 0,
        // The first use up the limit.
        Job::Denied => refused + 16 >= asked.requests && asked.requests > 16,
    };
    if !is_right || text.contains("Socket errors") {
        return Err(format!("{}: not the answers that were asked for: {text}", job.path()).into());
    }
    Ok(asked)
}

/// A run, and how many of its answers were neither 2xx nor 3xx.
fn read(text: &str) -> Option<(Asked, u64)> {
    let after = |word: &str| text.lines().find_map(|line| line.trim().strip_prefix(word).map(str::trim));
    let requests = text.lines().find_map(|line| line.split_once(" requests in ")?.0.trim().parse().ok())?;
    let asked = Asked {
        requests,
        per_second: after("Requests/sec:")?.parse().ok()?,
        p50_us: micros(after("50%")?)?,
        p99_us: micros(after("99%")?)?,
    };
    let refused = after("Non-2xx or 3xx responses:").map_or(Some(0), |number| number.parse().ok())?;
    Some((asked, refused))
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
    fn what_wrk_prints_is_read() {
        let text = "Running 1s test @ http://127.0.0.1:8080/denied\n  1 threads and 64 connections\n  \
            Thread Stats   Avg      Stdev     Max   +/- Stdev\n    Latency     1.38ms    1.11ms  15.17ms   87.31%\n    \
            Req/Sec    50.60k     3.35k   55.42k    90.00%\n  Latency Distribution\n     50%  980.00us\n     \
            75%    1.71ms\n     90%    2.54ms\n     99%    5.62ms\n  50333 requests in 1.00s, 8.21MB read\n  \
            Non-2xx or 3xx responses: 50332\nRequests/sec:  50293.03\nTransfer/sec:      8.20MB\n";
        let asked = Asked { requests: 50_333, per_second: 50_293.03, p50_us: 980.0, p99_us: 5_620.0 };
        assert_eq!(read(text), Some((asked, 50_332)));
        assert_eq!(read("unable to connect to 127.0.0.1:8080 Connection refused\n"), None);
    }
}
