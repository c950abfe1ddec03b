//! Every metric that `/metrics` can report. docs/operations.md and its translation have the same list, and a test
//! compares them.
//!
//! Labels are `decision`, `reason` and `result`, names from the configuration or the API (`route`, `limit`,
//! `upstream`, `address`, `endpoint`), and `code` for a status class.

/// A metric family: a name, its labels and its description.
#[derive(Debug)]
pub(crate) struct Family {
    pub(super) name: &'static str,
    pub(super) kind: &'static str,
    pub(super) labels: &'static [&'static str],
    pub(super) help: &'static str,
}

/// Defines a constant per family, and the list of all of them.
macro_rules! families {
    ($($constant:ident: $kind:ident $name:literal [$($label:literal),*] $help:literal;)*) => {
        $(pub(crate) const $constant: Family =
            Family { name: $name, kind: stringify!($kind), labels: &[$($label),*], help: $help };)*

        #[cfg(test)]
        const ALL: &[Family] = &[$($constant),*];
    };
}

families! {
    REQUESTS: counter "ratekeeper_requests_total" ["route", "decision", "code"]
        "Requests, by route, decision and status class.";
    REQUEST_DURATION: histogram "ratekeeper_request_duration_seconds" ["route"]
        "Time from the request head to the end of the response.";
    LIMIT_DECISIONS: counter "ratekeeper_limit_decisions_total" ["limit", "decision"]
        "Decisions, by limit and decision.";
    RELOADS: counter "ratekeeper_reloads_total" ["result"]
        "Configuration reloads, by result.";
    CONNECTIONS: gauge "ratekeeper_connections" []
        "Client connections.";
    CONNECTIONS_REJECTED: counter "ratekeeper_connections_rejected_total" ["reason"]
        "Client connections closed on accept, by reason.";
    CONNECTIONS_REAPED: counter "ratekeeper_connections_reaped_total" []
        "Client connections closed while they waited for a request, because max_connections was near.";
    REQUESTS_IN_FLIGHT: gauge "ratekeeper_requests_in_flight" []
        "Requests in flight.";
    REQUESTS_DELAYED: gauge "ratekeeper_requests_delayed" []
        "Requests that a leaky bucket delays.";
    CONCURRENCY_PERMITS: gauge "ratekeeper_concurrency_permits" ["limit"]
        "Permits held by requests in flight, by concurrency limit.";
    ACCESS_LOG_DROPPED: counter "ratekeeper_access_log_dropped_total" []
        "Access log lines dropped because the output was too slow.";
    UPSTREAM_UP: gauge "ratekeeper_upstream_up" ["upstream", "address"]
        "Whether an upstream address is healthy and not ejected.";
    UPSTREAM_CONNECTIONS: gauge "ratekeeper_upstream_connections" ["upstream", "address"]
        "Connections to an upstream address.";
    KEYS: gauge "ratekeeper_keys" []
        "Keys in use in the memory store, once per limit; an estimate for large tables.";
    STORE_BYTES: gauge "ratekeeper_store_bytes" []
        "Bytes of the memory store.";
    STORE_OVERFLOWED: counter "ratekeeper_store_overflowed_total" []
        "Checks of keys for which the memory store was full.";
    REDIS_UP: gauge "ratekeeper_redis_up" []
        "Whether Redis answers.";
    REDIS_ERRORS: counter "ratekeeper_redis_errors_total" ["reason"]
        "Failed calls to Redis, by reason.";
    HTTP_API_REQUESTS: counter "ratekeeper_http_api_requests_total" ["endpoint", "result"]
        "HTTP API requests, by endpoint and result.";
    HTTP_API_REPLAYS: counter "ratekeeper_http_api_idempotent_replays_total" []
        "HTTP API requests answered with the stored response of their idempotency key.";
    HTTP_API_IDEMPOTENCY_DROPPED: counter "ratekeeper_http_api_idempotency_dropped_total" []
        "HTTP API responses that could not be stored under their idempotency key.";
    HTTP_API_RESERVATIONS_EXPIRED: counter "ratekeeper_http_api_reservations_expired_total" []
        "Reservations that expired without being settled.";
    HTTP_API_REFUNDS_LOST: counter "ratekeeper_http_api_refunds_lost_total" []
        "Refunds that the store did not confirm.";
    ENVOY_API_REQUESTS: counter "ratekeeper_envoy_api_requests_total" ["result"]
        "Envoy API requests, by result.";
    REDIS_API_COMMANDS: counter "ratekeeper_redis_api_commands_total" ["result"]
        "Redis API commands, by result.";
    REDIS_API_CONNECTIONS: gauge "ratekeeper_redis_api_connections" []
        "Open Redis API connections.";
    REDIS_API_CONNECTIONS_ACCEPTED: counter "ratekeeper_redis_api_connections_total" []
        "Accepted Redis API connections.";
    REDIS_API_CONNECTIONS_REJECTED: counter "ratekeeper_redis_api_connections_rejected_total" ["reason"]
        "Redis API connections closed on accept, by reason.";
}

#[cfg(test)]
mod tests {
    use super::*;

    const PAGES: [(&str, &str); 2] = [
        ("docs/operations.md", include_str!("../../../../docs/operations.md")),
        ("docs/operations.ko.md", include_str!("../../../../docs/operations.ko.md")),
    ];

    /// The names in backquotes of a table cell.
    fn quoted(cell: &str) -> Vec<&str> {
        cell.split('`').skip(1).step_by(2).collect()
    }

    #[test]
    fn operations_pages_list_every_metric_with_its_labels() {
        let expected: Vec<_> = ALL.iter().map(|family| (vec![family.name], family.labels.to_vec())).collect();
        for (name, page) in PAGES {
            let rows = page.lines().filter(|line| line.starts_with("| `ratekeeper_"));
            let documented: Vec<(Vec<&str>, Vec<&str>)> = rows
                .map(|row| {
                    let mut cells = row.split('|').skip(1);
                    (quoted(cells.next().unwrap()), quoted(cells.next().unwrap()))
                })
                .collect();
            assert_eq!(documented, expected, "{name} and families.rs differ, in content or in order");
        }
    }

    #[test]
    fn counters_and_only_counters_end_with_total() {
        for family in ALL {
            assert_eq!(family.name.ends_with("_total"), family.kind == "counter", "{}", family.name);
        }
    }

    #[test]
    fn names_and_labels_are_uniform() {
        const LABELS: [&str; 9] =
            ["decision", "reason", "result", "route", "limit", "upstream", "address", "endpoint", "code"];
        for family in ALL {
            assert!(family.name.starts_with("ratekeeper_"), "{}", family.name);
            assert!(family.labels.iter().all(|label| LABELS.contains(label)), "{family:?}");
            assert_eq!(ALL.iter().filter(|other| other.name == family.name).count(), 1, "{}", family.name);
        }
    }
}
