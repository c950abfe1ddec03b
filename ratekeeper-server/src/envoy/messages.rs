//! The messages of Envoy's rate limit service (`envoy.service.ratelimit.v3`), as far as Envoy reads and writes them.
//!
//! A request holds what Envoy's clients send, and Envoy forwards bytes that are not UTF-8. A `string` field rejects
//! them, and Envoy allows a request whose call fails. So the text of a request is read as `bytes`, which have the
//! same form on the wire.

use bytes::{Buf, BufMut, Bytes};
use prost::encoding::{self, DecodeContext, WireType};
use prost::{DecodeError, Enumeration, Message};
use prost_types::{Duration, Struct};
use ratekeeper_config::envoy::Unit;

use super::bounds::{DESCRIPTORS_MAX, ENTRIES_MAX};

/// A request from Envoy: `envoy.service.ratelimit.v3.RateLimitRequest`.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct RateLimitRequest {
    /// The name of a configured domain.
    pub domain: Bytes,
    /// At most one more than the allowed number: the rest of a message is skipped, so that two bytes on the wire do
    /// not become a hundred in memory.
    pub descriptors: Vec<RateLimitDescriptor>,
    /// Units that each descriptor without `hits_addend` charges; 0 means 1.
    pub hits_addend: u32,
}

/// A descriptor of a request: `envoy.extensions.common.ratelimit.v3.RateLimitDescriptor`.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct RateLimitDescriptor {
    /// At most one more than the allowed number, as for the descriptors of a request.
    pub entries: Vec<Entry>,
    /// An inline limit.
    pub limit: Option<RateLimitOverride>,
    /// Units that this descriptor charges.
    pub hits_addend: Option<u64>,
    /// Whether the units are refunded instead of charged.
    pub is_negative_hits: bool,
}

/// A key and its value.
#[derive(Clone, PartialEq, Eq, Hash, Message)]
pub struct Entry {
    /// The key, such as `remote_address`.
    #[prost(bytes = "bytes", tag = "1")]
    pub key: Bytes,
    /// The value, which may be empty.
    #[prost(bytes = "bytes", tag = "2")]
    pub value: Bytes,
}

/// An inline limit: `RateLimitDescriptor.RateLimitOverride`.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Message)]
pub struct RateLimitOverride {
    /// Units per unit of time.
    #[prost(uint32, tag = "1")]
    pub requests_per_unit: u32,
    /// A [`RateLimitUnit`].
    #[prost(enumeration = "RateLimitUnit", tag = "2")]
    pub unit: i32,
}

/// A response to Envoy: `envoy.service.ratelimit.v3.RateLimitResponse`.
#[derive(Clone, PartialEq, Message)]
pub struct RateLimitResponse {
    /// A [`RateLimitCode`], over all descriptors.
    #[prost(enumeration = "RateLimitCode", tag = "1")]
    pub overall_code: i32,
    /// One for each descriptor, in their order.
    #[prost(message, repeated, tag = "2")]
    pub statuses: Vec<DescriptorStatus>,
    /// Headers that Envoy sends to its client.
    #[prost(message, repeated, tag = "3")]
    pub response_headers_to_add: Vec<HeaderValue>,
    /// The body that Envoy sends to a denied client.
    #[prost(bytes = "bytes", tag = "5")]
    pub raw_body: Bytes,
    /// Metadata for Envoy's later filters.
    #[prost(message, optional, tag = "6")]
    pub dynamic_metadata: Option<Struct>,
}

/// The decision on one descriptor.
#[derive(Clone, PartialEq, Message)]
pub struct DescriptorStatus {
    /// A [`RateLimitCode`].
    #[prost(enumeration = "RateLimitCode", tag = "1")]
    pub code: i32,
    /// The limit, if the descriptor has one.
    #[prost(message, optional, tag = "2")]
    pub current_limit: Option<RateLimit>,
    /// Units that remain.
    #[prost(uint32, tag = "3")]
    pub limit_remaining: u32,
    /// Time until the full budget is restored.
    #[prost(message, optional, tag = "4")]
    pub duration_until_reset: Option<Duration>,
}

/// A limit, as Envoy shows it.
#[derive(Clone, PartialEq, Eq, Hash, Message)]
pub struct RateLimit {
    /// Units per unit of time.
    #[prost(uint32, tag = "1")]
    pub requests_per_unit: u32,
    /// A [`RateLimitUnit`].
    #[prost(enumeration = "RateLimitUnit", tag = "2")]
    pub unit: i32,
    /// The name of the limit, if it has one.
    #[prost(string, tag = "3")]
    pub name: String,
}

/// A header: `envoy.config.core.v3.HeaderValue`.
#[derive(Clone, PartialEq, Eq, Hash, Message)]
pub struct HeaderValue {
    /// The name.
    #[prost(string, tag = "1")]
    pub key: String,
    /// The value.
    #[prost(string, tag = "2")]
    pub value: String,
}

/// A decision.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Enumeration)]
#[repr(i32)]
pub enum RateLimitCode {
    /// Never sent: Envoy allows it.
    Unknown = 0,
    /// Allowed.
    Ok = 1,
    /// Denied.
    OverLimit = 2,
}

impl RateLimitCode {
    pub(super) fn name(self) -> &'static str {
        match self {
            RateLimitCode::Unknown => "UNKNOWN",
            RateLimitCode::Ok => "OK",
            RateLimitCode::OverLimit => "OVER_LIMIT",
        }
    }
}

/// A unit of time. Inline limits have no week; limits in responses have.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Enumeration)]
#[repr(i32)]
pub enum RateLimitUnit {
    /// No unit.
    Unknown = 0,
    /// 1 s.
    Second = 1,
    /// 60 s.
    Minute = 2,
    /// 60 min.
    Hour = 3,
    /// 24 h.
    Day = 4,
    /// 30 days.
    Month = 5,
    /// 365 days.
    Year = 6,
    /// 7 days.
    Week = 7,
}

impl RateLimitUnit {
    /// The unit as the configuration has it.
    pub fn unit(self) -> Option<Unit> {
        match self {
            RateLimitUnit::Unknown => None,
            RateLimitUnit::Second => Some(Unit::Second),
            RateLimitUnit::Minute => Some(Unit::Minute),
            RateLimitUnit::Hour => Some(Unit::Hour),
            RateLimitUnit::Day => Some(Unit::Day),
            RateLimitUnit::Month => Some(Unit::Month),
            RateLimitUnit::Year => Some(Unit::Year),
            RateLimitUnit::Week => Some(Unit::Week),
        }
    }
}

impl From<Unit> for RateLimitUnit {
    fn from(unit: Unit) -> RateLimitUnit {
        match unit {
            Unit::Second => RateLimitUnit::Second,
            Unit::Minute => RateLimitUnit::Minute,
            Unit::Hour => RateLimitUnit::Hour,
            Unit::Day => RateLimitUnit::Day,
            Unit::Week => RateLimitUnit::Week,
            Unit::Month => RateLimitUnit::Month,
            Unit::Year => RateLimitUnit::Year,
        }
    }
}

// By hand, because a derived message keeps every element of a repeated field.
impl Message for RateLimitRequest {
    fn encode_raw(&self, buffer: &mut impl BufMut) {
        if !self.domain.is_empty() {
            encoding::bytes::encode(1, &self.domain, buffer);
        }
        encoding::message::encode_repeated(2, &self.descriptors, buffer);
        if self.hits_addend != 0 {
            encoding::uint32::encode(3, &self.hits_addend, buffer);
        }
    }

    fn merge_field(
        &mut self,
        tag: u32,
        wire_type: WireType,
        buffer: &mut impl Buf,
        context: DecodeContext,
    ) -> Result<(), DecodeError> {
        match tag {
            1 => encoding::bytes::merge(wire_type, &mut self.domain, buffer, context),
            2 if self.descriptors.len() <= DESCRIPTORS_MAX => {
                encoding::message::merge_repeated(wire_type, &mut self.descriptors, buffer, context)
            }
            3 => encoding::uint32::merge(wire_type, &mut self.hits_addend, buffer, context),
            _ => encoding::skip_field(wire_type, tag, buffer, context),
        }
    }

    fn encoded_len(&self) -> usize {
        let domain = if self.domain.is_empty() { 0 } else { encoding::bytes::encoded_len(1, &self.domain) };
        let hits =
            if self.hits_addend == 0 { 0 } else { encoding::uint32::encoded_len(3, &self.hits_addend) };
        domain + encoding::message::encoded_len_repeated(2, &self.descriptors) + hits
    }

    fn clear(&mut self) {
        *self = RateLimitRequest::default();
    }
}

impl Message for RateLimitDescriptor {
    fn encode_raw(&self, buffer: &mut impl BufMut) {
        encoding::message::encode_repeated(1, &self.entries, buffer);
        if let Some(limit) = &self.limit {
            encoding::message::encode(2, limit, buffer);
        }
        if let Some(hits) = &self.hits_addend {
            encoding::message::encode(3, hits, buffer);
        }
        if self.is_negative_hits {
            encoding::bool::encode(4, &self.is_negative_hits, buffer);
        }
    }

    fn merge_field(
        &mut self,
        tag: u32,
        wire_type: WireType,
        buffer: &mut impl Buf,
        context: DecodeContext,
    ) -> Result<(), DecodeError> {
        match tag {
            1 if self.entries.len() <= ENTRIES_MAX => {
                encoding::message::merge_repeated(wire_type, &mut self.entries, buffer, context)
            }
            2 => {
                let limit = self.limit.get_or_insert_default();
                encoding::message::merge(wire_type, limit, buffer, context)
            }
            3 => {
                let hits = self.hits_addend.get_or_insert_default();
                encoding::message::merge(wire_type, hits, buffer, context)
            }
            4 => encoding::bool::merge(wire_type, &mut self.is_negative_hits, buffer, context),
            _ => encoding::skip_field(wire_type, tag, buffer, context),
        }
    }

    fn encoded_len(&self) -> usize {
        let limit = self.limit.as_ref().map_or(0, |limit| encoding::message::encoded_len(2, limit));
        let hits = self.hits_addend.as_ref().map_or(0, |hits| encoding::message::encoded_len(3, hits));
        let negative =
            if self.is_negative_hits { encoding::bool::encoded_len(4, &self.is_negative_hits) } else { 0 };
        encoding::message::encoded_len_repeated(1, &self.entries) + limit + hits + negative
    }

    fn clear(&mut self) {
        *self = RateLimitDescriptor::default();
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// The request as a compiler of protocol buffers derives it from Envoy's definition.
    #[derive(Clone, PartialEq, Message)]
    struct DerivedRequest {
        #[prost(string, tag = "1")]
        domain: String,
        #[prost(message, repeated, tag = "2")]
        descriptors: Vec<DerivedDescriptor>,
        #[prost(uint32, tag = "3")]
        hits_addend: u32,
    }

    #[derive(Clone, PartialEq, Message)]
    struct DerivedDescriptor {
        #[prost(message, repeated, tag = "1")]
        entries: Vec<DerivedEntry>,
        #[prost(message, optional, tag = "2")]
        limit: Option<RateLimitOverride>,
        #[prost(message, optional, tag = "3")]
        hits_addend: Option<u64>,
        #[prost(bool, tag = "4")]
        is_negative_hits: bool,
    }

    #[derive(Clone, PartialEq, Message)]
    struct DerivedEntry {
        #[prost(string, tag = "1")]
        key: String,
        #[prost(string, tag = "2")]
        value: String,
    }

    fn derived_descriptor() -> impl Strategy<Value = DerivedDescriptor> {
        let entry = (".{0,9}", ".{0,9}").prop_map(|(key, value)| DerivedEntry { key, value });
        let limit = (any::<u32>(), any::<i32>())
            .prop_map(|(requests_per_unit, unit)| RateLimitOverride { requests_per_unit, unit });
        let entries = prop::collection::vec(entry, 0..4);
        (entries, prop::option::of(limit), prop::option::of(any::<u64>()), any::<bool>()).prop_map(
            |(entries, limit, hits_addend, is_negative_hits)| DerivedDescriptor {
                entries,
                limit,
                hits_addend,
                is_negative_hits,
            },
        )
    }

    proptest! {
        #![proptest_config(testbed::property::cases(256))]

        #[test]
        fn request_has_the_wire_form_of_the_derived_message(
            domain in ".{0,9}",
            descriptors in prop::collection::vec(derived_descriptor(), 0..4),
            hits_addend in any::<u32>(),
        ) {
            let written = DerivedRequest { domain, descriptors, hits_addend }.encode_to_vec();
            let read = RateLimitRequest::decode(&written[..]).unwrap();
            prop_assert_eq!(read.encoded_len(), written.len());
            prop_assert_eq!(read.encode_to_vec(), written);
        }

        #[test]
        fn arbitrary_bytes_are_read_as_the_derived_message_reads_them(
            bytes in prop::collection::vec(any::<u8>(), 0..64),
        ) {
            if let Ok(derived) = DerivedRequest::decode(&bytes[..]) {
                let read = RateLimitRequest::decode(&bytes[..]).unwrap();
                prop_assert_eq!(read.encode_to_vec(), derived.encode_to_vec());
            }
        }
    }

    #[test]
    fn bytes_that_are_not_utf8_are_kept() {
        let entry = Entry { key: Bytes::from_static(b"user"), value: Bytes::from_static(b"\xff\xfe") };
        let descriptor = RateLimitDescriptor { entries: vec![entry], ..RateLimitDescriptor::default() };
        let request = RateLimitRequest { descriptors: vec![descriptor], ..RateLimitRequest::default() };
        let written = request.encode_to_vec();
        assert_eq!(RateLimitRequest::decode(&written[..]).unwrap(), request);
        assert!(DerivedRequest::decode(&written[..]).is_err());
    }

    #[test]
    fn elements_beyond_the_bound_are_skipped() {
        let entries = vec![Entry::default(); 10 * ENTRIES_MAX];
        let descriptor = RateLimitDescriptor { entries, ..RateLimitDescriptor::default() };
        let descriptors = vec![descriptor; 10 * DESCRIPTORS_MAX];
        let request = RateLimitRequest { descriptors, hits_addend: 7, ..RateLimitRequest::default() };
        let read = RateLimitRequest::decode(&request.encode_to_vec()[..]).unwrap();
        assert_eq!(read.hits_addend, 7);
        assert_eq!(read.descriptors.len(), DESCRIPTORS_MAX + 1);
        assert!(read.descriptors.iter().all(|it| it.entries.len() == ENTRIES_MAX + 1));
    }
}
