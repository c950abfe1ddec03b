//! What is too much to ask.
//!
//! Envoy lets requests pass where its rate limit service refuses to decide, unless it is told otherwise. So no bound may be
//! within reach of Envoy's clients: they choose the values of headers, and Envoy takes heads of 60 KiB.

use super::messages::RateLimitRequest;
use super::refused::Refused;

/// The most bytes of a request over gRPC: a client's longest value may be in each descriptor.
pub const CALL_BYTES_MAX: usize = 8 << 20;
const _: () = assert!(CALL_BYTES_MAX >= DESCRIPTORS_MAX * (64 << 10));

/// The most bytes of a call's metadata: Envoy sends on what its clients say of their traces.
pub(super) const METADATA_BYTES_MAX: u32 = 128 << 10;

/// The most bytes of a request in JSON. Envoy does not ask in JSON, and who does can be told that it is too long.
pub const MESSAGE_BYTES_MAX: usize = 1 << 20;

/// The most descriptors of a request.
pub const DESCRIPTORS_MAX: usize = 100;

/// The most entries of a descriptor. No configuration has so many inside of each other.
pub const ENTRIES_MAX: usize = 32;

/// The most bytes of a domain's name, or of an entry's key or value: three times what Envoy takes from a client by default.
pub const TEXT_BYTES_MAX: usize = 3 * (64 << 10);

pub(super) fn check(request: &RateLimitRequest) -> Result<(), Refused> {
    if request.domain.is_empty() {
        return Err(Refused::NoDomain);
    }
    if request.domain.len() > TEXT_BYTES_MAX {
        return Err(Refused::LongDomain);
    }
    if request.descriptors.is_empty() {
        return Err(Refused::NoDescriptors);
    }
    if request.descriptors.len() > DESCRIPTORS_MAX {
        return Err(Refused::ManyDescriptors);
    }
    for (number, descriptor) in request.descriptors.iter().enumerate() {
        let entries = &descriptor.entries;
        if entries.len() > ENTRIES_MAX {
            return Err(Refused::ManyEntries { descriptor: number });
        }
        let is_long = |text: &[u8]| text.len() > TEXT_BYTES_MAX;
        if entries.iter().any(|entry| is_long(&entry.key) || is_long(&entry.value)) {
            return Err(Refused::LongEntry { descriptor: number });
        }
    }
    Ok(())
}
