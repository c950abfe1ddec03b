//! What the admin listener reports.

/// Metrics and readiness.
pub trait StatusSource: Send + Sync + 'static {
    /// The metrics, in the Prometheus text format.
    fn metrics(&self) -> String;

    /// Whether new requests are accepted.
    fn is_ready(&self) -> bool;
}
