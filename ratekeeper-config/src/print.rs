use ratekeeper_core::{Algorithm, Bucket, Limit, Time};

use crate::quantity::{duration_text, rate_text};
use crate::words;

/// The limit as one line of YAML, with all parameters. [`parse_limit`](crate::parse_limit) reads it.
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
        Limit::SteppedBucket(it) => {
            let (capacity, rate) = (it.capacity(), rate_text(it.rate()));
            format!("{name}: {{ capacity: {capacity}, refill: {rate}, style: stepped }}")
        }
        Limit::FixedWindow(it) => {
            let align = words::name(&words::ALIGNS, &it.align());
            let (limit, window) = (it.limit(), duration_text(it.window()));
            format!("{name}: {{ limit: {limit}, window: {window}, align: {align} }}")
        }
        Limit::Log(it) => {
            let count = words::name(&words::COUNTS, &it.count());
            let (limit, window) = (it.limit(), duration_text(it.window()));
            format!("{name}: {{ limit: {limit}, window: {window}, count: {count} }}")
        }
        Limit::Counter(it) => {
            let edge = words::name(&words::EDGES, &it.edge());
            let (limit, window, buckets) = (it.limit(), duration_text(it.window()), it.buckets());
            format!("{name}: {{ limit: {limit}, window: {window}, buckets: {buckets}, edge: {edge} }}")
        }
    }
}

/// The mode of a leaky bucket, derived from its behavior: only a shaping bucket delays a request while it drains.
fn is_shaping(bucket: &Bucket) -> bool {
    let draining = bucket.fresh() + 1;
    !bucket.peek(&draining, Time::EPOCH, 0).delay.is_zero()
}
