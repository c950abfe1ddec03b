//! The bounds of a request.
//!
//! By default, Envoy allows a request if its rate limit service returns an error. So no bound may be reachable by
//! Envoy's clients: they choose header values, and Envoy accepts request heads of 60 KiB.

use super::error::EnvoyApiError;
use super::messages::RateLimitRequest;

/// Most bytes of a gRPC request: each descriptor may contain a client's longest value.
pub const CALL_BYTES_MAX: usize = 8 << 20;
const _: () = assert!(CALL_BYTES_MAX >= DESCRIPTORS_MAX * (64 << 10));

/// Most bytes of a call's metadata: Envoy forwards its clients' tracing headers.
pub(super) const METADATA_BYTES_MAX: u32 = 128 << 10;

/// Most bytes of a JSON request. Envoy does not send JSON, and other callers can handle the error.
pub const MESSAGE_BYTES_MAX: usize = 1 << 20;

/// Most descriptors of a request.
pub const DESCRIPTORS_MAX: usize = 100;

/// Most entries of a descriptor. No configuration nests that deep.
pub const ENTRIES_MAX: usize = 32;

/// Most bytes of a domain name, or of an entry's key or value: three times what Envoy accepts from a client by
/// default.
pub const TEXT_BYTES_MAX: usize = 3 * (64 << 10);

pub(super) fn validate(request: &RateLimitRequest) -> Result<(), EnvoyApiError> {
    if request.domain.is_empty() {
        return Err(EnvoyApiError::EmptyDomain);
    }
    if request.domain.len() > TEXT_BYTES_MAX {
        return Err(EnvoyApiError::DomainTooLong);
    }
    if request.descriptors.is_empty() {
        return Err(EnvoyApiError::EmptyDescriptors);
    }
    if request.descriptors.len() > DESCRIPTORS_MAX {
        return Err(EnvoyApiError::TooManyDescriptors);
    }
    for (number, descriptor) in request.descriptors.iter().enumerate() {
        let entries = &descriptor.entries;
        if entries.len() > ENTRIES_MAX {
            return Err(EnvoyApiError::TooManyEntries { descriptor: number });
        }
        let is_long = |text: &[u8]| text.len() > TEXT_BYTES_MAX;
        if entries.iter().any(|entry| is_long(&entry.key) || is_long(&entry.value)) {
            return Err(EnvoyApiError::EntryTooLong { descriptor: number });
        }
    }
    Ok(())
}
