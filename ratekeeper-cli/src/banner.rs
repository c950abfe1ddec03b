//! Readable output of `run`: the banner with addresses and first steps, and the summary of the traffic at the end.

use std::fmt::Write as _;
use std::time::Duration;

use ratekeeper_server::{ServiceAddress, Traffic};

/// Limits in the summary.
const TOP_LIMITS: usize = 5;

/// The addresses and what to try. `demo_port` is the port of the demo's gateway.
pub(crate) fn banner(
    config: &str,
    listening: &[ServiceAddress],
    demo_port: Option<u16>,
    has_access_log: bool,
) -> String {
    let mut text = format!("\nRatekeeper {}, configuration {config}\n\n", env!("CARGO_PKG_VERSION"));
    let width = listening.iter().map(|it| it.service.len()).max().unwrap_or(0);
    for ServiceAddress { service, url, .. } in listening {
        // Writing into a string cannot fail.
        let _ = writeln!(text, "  {service:width$}  {url}");
    }
    if let Some(port) = demo_port {
        let _ = write!(
            text,
            "\n  Each user may send 10 requests per minute. Send one, then eleven:\n\n    \
             curl -i -H \"X-User-Id: user123\" http://localhost:{port}/api/test\n    \
             for i in $(seq 11); do curl -s -o /dev/null -w '%{{http_code}} ' -H \"X-User-Id: alice\" \
             http://localhost:{port}/api/test; done\n\n  \
             Next: `ratekeeper init` writes a configuration file of your own.\n"
        );
    }
    text.push_str("\n  Ctrl-C shuts down.");
    text.push_str(if has_access_log { " Each request is a line below.\n\n" } else { "\n\n" });
    text
}

/// Totals, and the limits that denied most. Requests are those of the gateway; limits also count the checks of the APIs.
pub(crate) fn summary(traffic: &Traffic, after: Duration, has_gateway: bool) -> String {
    let by_decision: Vec<String> = traffic
        .decisions
        .iter()
        .filter(|(name, count)| *count > 0 || matches!(*name, "allowed" | "denied"))
        .map(|(name, count)| format!("{count} {name}"))
        .collect();
    let requests: u64 = traffic.decisions.iter().map(|(_, count)| count).sum();
    let s = if requests == 1 { "" } else { "s" };
    let mut text = match has_gateway {
        true => format!("\n{requests} request{s} in {}: {}\n", span(after), by_decision.join(", ")),
        false => format!("\nRan for {}\n", span(after)),
    };
    let mut limits: Vec<_> = traffic.limits.iter().filter(|it| it.allowed + it.denied > 0).collect();
    limits.sort_by(|a, b| (b.denied, b.allowed, &a.name).cmp(&(a.denied, a.allowed, &b.name)));
    let width = limits.iter().take(TOP_LIMITS).map(|it| it.name.chars().count()).max().unwrap_or(0).max(5);
    if !limits.is_empty() {
        let _ = writeln!(text, "\n  {:width$}  {:>9}  {:>9}", "limit", "allowed", "denied");
    }
    for limit in limits.iter().take(TOP_LIMITS) {
        let shadow = if limit.is_shadow { "  shadow: not enforced" } else { "" };
        let _ = writeln!(text, "  {:width$}  {:>9}  {:>9}{shadow}", limit.name, limit.allowed, limit.denied);
    }
    if let Some(others) = limits.len().checked_sub(TOP_LIMITS).filter(|it| *it > 0) {
        let _ = writeln!(text, "  and {others} more");
    }
    text
}

fn span(time: Duration) -> String {
    let seconds = time.as_secs();
    match (seconds / 3600, seconds / 60 % 60, seconds % 60) {
        (0, 0, seconds) => format!("{seconds}s"),
        (0, minutes, seconds) => format!("{minutes}m {seconds}s"),
        (hours, minutes, _) => format!("{hours}h {minutes}m"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ratekeeper_server::LimitTraffic;

    #[test]
    fn summary_lists_the_limits_that_denied_most() {
        let limit = |name: &str, allowed, denied| {
            let is_shadow = name == "planned";
            LimitTraffic { name: name.to_owned(), is_shadow, allowed, denied }
        };
        let traffic = Traffic {
            decisions: vec![("allowed", 12), ("denied", 3), ("shed", 0), ("rejected", 1)],
            limits: vec![
                limit("per-ip", 15, 0),
                limit("per-user", 12, 3),
                limit("unused", 0, 0),
                limit("planned", 14, 1),
            ],
        };
        assert_eq!(
            summary(&traffic, Duration::from_secs(83), true),
            "
16 requests in 1m 23s: 12 allowed, 3 denied, 1 rejected

  limit       allowed     denied
  per-user         12          3
  planned          14          1  shadow: not enforced
  per-ip           15          0
"
        );
    }

    #[test]
    fn summary_without_a_gateway_counts_no_requests() {
        let limit = LimitTraffic { name: "per-user".to_owned(), is_shadow: false, allowed: 1, denied: 1 };
        let traffic = Traffic { decisions: vec![("allowed", 0), ("denied", 0)], limits: vec![limit] };
        assert_eq!(
            summary(&traffic, Duration::from_secs(9), false),
            "\nRan for 9s\n\n  limit       allowed     denied\n  per-user          1          1\n"
        );
    }

    #[test]
    fn summary_of_no_traffic_is_one_line() {
        let traffic = Traffic { decisions: vec![("allowed", 0), ("denied", 0)], limits: Vec::new() };
        assert_eq!(
            summary(&traffic, Duration::from_secs(3_700), true),
            "\n0 requests in 1h 1m: 0 allowed, 0 denied\n"
        );
    }
}
