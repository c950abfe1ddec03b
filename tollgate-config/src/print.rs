use tollgate_core::{Algorithm, Align, Bucket, Count, Edge, Limit, Time};

use crate::quantity::{duration_text, rate_text};

/// The limit in one line of YAML, with every parameter. [`parse_limit`](crate::parse_limit) reads it back.
pub fn to_yaml(limit: &Limit) -> String {
    let name = limit.name();
    match limit {
        Limit::Bucket(it) => {
            let (capacity, rate) = (it.capacity(), rate_text(it.rate()));
            if it.is_leaky() {
                let mode = if is_shaping(it) { "shape" } else { "police" };
                format!("{name}: {{ capacity: {capacity}, leak: {rate}, mode: {mode} }}")
            } else {
                format!("{name}: {{ capacity: {capacity}, refill: {rate}, style: smooth }}")
            }
        }
        Limit::Steps(it) => {
            let (capacity, rate) = (it.capacity(), rate_text(it.rate()));
            format!("{name}: {{ capacity: {capacity}, refill: {rate}, style: stepped }}")
        }
        Limit::FixedWindow(it) => {
            let align = match it.align() {
                Align::Clock => "clock",
                Align::FirstRequest => "first_request",
            };
            let (limit, window) = (it.limit(), duration_text(it.window()));
            format!("{name}: {{ limit: {limit}, window: {window}, align: {align} }}")
        }
        Limit::Log(it) => {
            let count = match it.count() {
                Count::Admitted => "admitted",
                Count::All => "all",
            };
            let (limit, window) = (it.limit(), duration_text(it.window()));
            format!("{name}: {{ limit: {limit}, window: {window}, count: {count} }}")
        }
        Limit::Counter(it) => {
            let edge = match it.edge() {
                Edge::Weigh => "weigh",
                Edge::Drop => "drop",
                Edge::Keep => "keep",
            };
            let (limit, window, buckets) = (it.limit(), duration_text(it.window()), it.buckets());
            format!("{name}: {{ limit: {limit}, window: {window}, buckets: {buckets}, edge: {edge} }}")
        }
    }
}

/// A leaky bucket does not tell its mode, but shows it: only a shaping one holds back a request while anything is
/// still draining.
fn is_shaping(bucket: &Bucket) -> bool {
    let draining = bucket.fresh() + 1;
    !bucket.look(&draining, Time::EPOCH, 0).delay.is_zero()
}
