//! Every metric that `/metrics` can report. `docs/reference/metrics.md` is generated from this list.

use super::labels::{self, Label};

/// A metric family: a name, its labels and its description.
#[derive(Debug)]
pub(crate) struct Family<const N: usize> {
    pub(super) name: &'static str,
    pub(super) kind: &'static str,
    pub(super) labels: &'static [Label; N],
    pub(super) help: &'static str,
}

/// A group of families, for the reference.
#[cfg(test)]
pub(crate) struct Section {
    pub(crate) name: &'static str,
    /// When the families are reported, and what else there is to say about all of them.
    about: &'static str,
    pub(crate) families: &'static [AnyFamily],
}

/// A family with any number of labels.
#[cfg(test)]
pub(crate) struct AnyFamily {
    pub(crate) name: &'static str,
    pub(crate) kind: &'static str,
    labels: &'static [Label],
    help: &'static str,
}

/// Defines a constant per family, and the list of all of them.
macro_rules! families {
    ($(
        $section:literal $about:literal {
            $($constant:ident: $kind:ident $name:literal [$($label:ident),*] $help:literal;)*
        }
    )*) => {
        $($(
            pub(crate) const $constant: Family<{ <[&str]>::len(&[$(stringify!($label)),*]) }> =
                Family { name: $name, kind: stringify!($kind), labels: &[$(labels::$label),*], help: $help };
        )*)*

        #[cfg(test)]
        pub(crate) const SECTIONS: &[Section] = &[$(Section {
            name: $section,
            about: $about,
            families: &[$(AnyFamily {
                name: $name,
                kind: stringify!($kind),
                labels: $constant.labels,
                help: $help,
            }),*],
        }),*];
    };
}

families! {
    "Process" "Always reported." {
        RELOADS: counter "ratekeeper_reloads_total" [RELOAD_RESULT]
            "Configuration reloads, by result.";
    }
    "Limits" "Reported if the file configures limits or an API." {
        LIMIT_DECISIONS: counter "ratekeeper_limit_decisions_total" [LIMIT, LIMIT_DECISION]
            "Decisions, by limit and decision.";
        REQUESTS_DELAYED: gauge "ratekeeper_requests_delayed" []
            "Requests that a leaky bucket delays.";
        CONCURRENCY_PERMITS: gauge "ratekeeper_concurrency_permits" [LIMIT]
            "Permits held by requests in flight, by concurrency limit.";
    }
    "Gateway" "Reported if the file configures a gateway." {
        REQUESTS: counter "ratekeeper_requests_total" [ROUTE, REQUEST_DECISION, STATUS_CLASS]
            "Requests of the gateway, by route, decision and status class.";
        REQUEST_DURATION: histogram "ratekeeper_request_duration_seconds" [ROUTE]
            "Time from the request head to the end of the response.";
        CONNECTIONS: gauge "ratekeeper_connections" []
            "Client connections.";
        CONNECTIONS_REJECTED: counter "ratekeeper_connections_rejected_total" [CONNECTION_REJECTION]
            "Client connections closed on accept, by reason.";
        CONNECTIONS_REAPED: counter "ratekeeper_connections_reaped_total" []
            "Client connections closed while they waited for a request, because max_connections was near.";
        REQUESTS_IN_FLIGHT: gauge "ratekeeper_requests_in_flight" []
            "Requests in flight.";
        ACCESS_LOG_DROPPED: counter "ratekeeper_access_log_dropped_total" []
            "Access log lines dropped because the output was too slow.";
        UPSTREAM_UP: gauge "ratekeeper_upstream_up" [UPSTREAM, ADDRESS]
            "1 if an upstream address is healthy and not ejected, otherwise 0.";
        UPSTREAM_CONNECTIONS: gauge "ratekeeper_upstream_connections" [UPSTREAM, ADDRESS]
            "Connections to an upstream address.";
    }
    "Memory store" "Reported with `store: memory`, if the file configures limits or an API. \
                    [guarantees.md](../guarantees.md) states why the keys in use can exceed `max_keys`." {
        KEYS: gauge "ratekeeper_keys" []
            "Keys in use in the memory store, once per limit; an estimate for large tables.";
        STORE_BYTES: gauge "ratekeeper_store_bytes" []
            "Bytes of the memory store.";
        STORE_OVERFLOWED: counter "ratekeeper_store_overflowed_total" []
            "Checks of keys for which the memory store was full.";
    }
    "Redis store" "Reported with a Redis store, if the file configures limits or an API." {
        REDIS_UP: gauge "ratekeeper_redis_up" []
            "1 if Redis answers, otherwise 0.";
        REDIS_ERRORS: counter "ratekeeper_redis_errors_total" [REDIS_FAILURE]
            "Failed calls to Redis, by reason.";
    }
    "HTTP API" "Reported if the file configures `apis: { http: ... }`." {
        HTTP_API_REQUESTS: counter "ratekeeper_http_api_requests_total" [ENDPOINT, ENDPOINT_RESULT]
            "HTTP API requests, by endpoint and result.";
        HTTP_API_REPLAYS: counter "ratekeeper_http_api_idempotent_replays_total" []
            "HTTP API requests answered with the stored response of their idempotency key.";
        HTTP_API_IDEMPOTENCY_DROPPED: counter "ratekeeper_http_api_idempotency_dropped_total" []
            "HTTP API responses that could not be stored under their idempotency key.";
        HTTP_API_RESERVATIONS_EXPIRED: counter "ratekeeper_http_api_reservations_expired_total" []
            "Reservations that expired without being settled.";
        HTTP_API_REFUNDS_LOST: counter "ratekeeper_http_api_refunds_lost_total" []
            "Refunds that the store did not confirm.";
    }
    "Envoy API" "Reported if the file configures `apis: { envoy: ... }`, or \
                 `apis: { http: ... }`, which serves its JSON form." {
        ENVOY_API_REQUESTS: counter "ratekeeper_envoy_api_requests_total" [CALL_OUTCOME]
            "Envoy API requests, by result.";
    }
    "Redis API" "Reported if the file configures `apis: { resp: ... }`." {
        REDIS_API_COMMANDS: counter "ratekeeper_redis_api_commands_total" [COMMAND_OUTCOME]
            "Redis API commands, by result.";
        REDIS_API_CONNECTIONS: gauge "ratekeeper_redis_api_connections" []
            "Open Redis API connections.";
        REDIS_API_CONNECTIONS_ACCEPTED: counter "ratekeeper_redis_api_connections_accepted_total" []
            "Accepted Redis API connections.";
        REDIS_API_CONNECTIONS_REJECTED: counter "ratekeeper_redis_api_connections_rejected_total"
            [API_CONNECTION_REJECTION]
            "Redis API connections closed on accept, by reason.";
    }
}

#[cfg(test)]
impl AnyFamily {
    /// Whether a sample of the family can have these labels. `le` is the bound of a histogram's bucket.
    pub(crate) fn allows(&self, labels: &[(&str, &str)]) -> bool {
        let own: Vec<_> = labels.iter().filter(|(name, _)| *name != "le").collect();
        let mut pairs = self.labels.iter().zip(&own);
        own.len() == self.labels.len()
            && pairs.all(|(label, (name, value))| label.name == *name && label.allows(value))
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;
    use std::fmt::Write;

    use super::labels::LabelValues;
    use super::*;

    fn all() -> impl Iterator<Item = &'static AnyFamily> {
        SECTIONS.iter().flat_map(|section| section.families)
    }

    fn write_section(section: &Section, out: &mut String) -> std::fmt::Result {
        writeln!(out, "\n## {}\n\n{}\n", section.name, section.about)?;
        writeln!(out, "| metric | type | labels | meaning |\n|---|---|---|---|")?;
        for AnyFamily { name, kind, labels, help } in section.families {
            let names: Vec<_> = labels.iter().map(|label| format!("`{}`", label.name)).collect();
            writeln!(out, "| `{name}` | {kind} | {} | {help} |", names.join(", "))?;
        }
        let label_rows =
            section.families.iter().flat_map(|family| family.labels.iter().map(move |it| (family, it)));
        let mut is_first = true;
        for (AnyFamily { name, .. }, label) in label_rows {
            if std::mem::take(&mut is_first) {
                writeln!(out, "\n| label of | label | value | meaning |\n|---|---|---|---|")?;
            }
            match label.values {
                LabelValues::Configured(about) => {
                    writeln!(out, "| `{name}` | `{}` | | {about} |", label.name)?;
                }
                LabelValues::Fixed(values) => {
                    for (value, meaning) in values {
                        writeln!(out, "| `{name}` | `{}` | `{value}` | {} |", label.name, meaning.trim())?;
                    }
                }
            }
        }
        Ok(())
    }

    #[test]
    fn reference_of_metrics_is_generated() {
        let mut page = "# Metrics\n\nThis page lists every metric that `/metrics` of the admin listener reports, with its \
                        labels and their values.\nIt is generated from `ratekeeper-server/src/runtime/metrics`; \
                        `cargo xtask generate` writes it. [operations.md](../operations.md)\ndescribes the listener.\n\n\
                        Values of labels are fixed, or come from the configuration, never from clients, so the number \
                        of series is bounded.\n"
            .to_owned();
        for section in SECTIONS {
            write_section(section, &mut page).unwrap();
        }
        testbed::assert_generated("docs/reference/metrics.md", &page);
    }

    #[test]
    fn counters_and_only_counters_end_with_total() {
        for family in all() {
            assert_eq!(family.name.ends_with("_total"), family.kind == "counter", "{}", family.name);
        }
    }

    #[test]
    fn names_and_labels_are_uniform() {
        const LABELS: [&str; 9] =
            ["decision", "reason", "result", "route", "limit", "upstream", "address", "endpoint", "code"];
        for family in all() {
            assert!(family.name.starts_with("ratekeeper_"), "{}", family.name);
            assert!(family.labels.iter().all(|label| LABELS.contains(&label.name)), "{}", family.name);
        }
    }

    /// OpenMetrics names a counter without `_total`.
    #[test]
    fn names_are_unique_in_openmetrics_too() {
        let names: HashSet<_> = all().map(|family| family.name.trim_end_matches("_total")).collect();
        assert_eq!(names.len(), all().count());
    }
}
