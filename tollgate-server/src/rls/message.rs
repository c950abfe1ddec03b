//! Bytes -> what Envoy asks, and what it is told -> bytes.
//!
//! Texts of a request hold what Envoy's clients send, and Envoy sends on what is no UTF-8. A text of protocol buffers must
//! be, but a request that is refused for it would pass. So requests are read here, and such bytes are replaced.

use bytes::Buf;
use envoy_types::pb::envoy::extensions::common::ratelimit::v3::RateLimitDescriptor;
use envoy_types::pb::envoy::extensions::common::ratelimit::v3::rate_limit_descriptor::{
    Entry, RateLimitOverride,
};
use envoy_types::pb::envoy::service::ratelimit::v3::{RateLimitRequest, RateLimitResponse};
use envoy_types::pb::google::protobuf::UInt64Value;
use tonic::Status;
use tonic::codec::{Codec, DecodeBuf, Decoder, EncodeBuf, Encoder};

use super::bounds::{DESCRIPTORS_MAX, ENTRIES_MAX};
use super::refused::Refused;

/// How the messages of a call are read and written.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Messages;

impl Codec for Messages {
    type Encode = RateLimitResponse;
    type Decode = RateLimitRequest;
    type Encoder = Messages;
    type Decoder = Messages;

    fn encoder(&mut self) -> Messages {
        Messages
    }

    fn decoder(&mut self) -> Messages {
        Messages
    }
}

impl Encoder for Messages {
    type Item = RateLimitResponse;
    type Error = Status;

    fn encode(&mut self, response: RateLimitResponse, buffer: &mut EncodeBuf<'_>) -> Result<(), Status> {
        prost::Message::encode(&response, buffer).map_err(|why| Status::internal(why.to_string()))
    }
}

impl Decoder for Messages {
    type Item = RateLimitRequest;
    type Error = Status;

    fn decode(&mut self, buffer: &mut DecodeBuf<'_>) -> Result<Option<RateLimitRequest>, Status> {
        let bytes = buffer.copy_to_bytes(buffer.remaining());
        Ok(Some(request(&bytes)?))
    }
}

/// What is too many is counted and not kept: a descriptor of two bytes would take many times as much.
fn request(bytes: &[u8]) -> Result<RateLimitRequest, Refused> {
    let mut request = RateLimitRequest::default();
    let mut descriptors = 0;
    for field in Fields(bytes) {
        match field? {
            (1, Field::Bytes(domain)) => request.domain = text(domain),
            (2, Field::Bytes(bytes)) => {
                if descriptors < DESCRIPTORS_MAX {
                    request.descriptors.push(descriptor(bytes, descriptors)?);
                }
                descriptors += 1;
            }
            (3, Field::Number(hits)) => request.hits_addend = hits as u32,
            (1..=3, _) => return Err(Refused::NotMessage),
            _ => {}
        }
    }
    if descriptors > DESCRIPTORS_MAX {
        return Err(Refused::ManyDescriptors(descriptors));
    }
    Ok(request)
}

fn descriptor(bytes: &[u8], number: usize) -> Result<RateLimitDescriptor, Refused> {
    let mut descriptor = RateLimitDescriptor::default();
    let mut entries = 0;
    for field in Fields(bytes) {
        match field? {
            (1, Field::Bytes(bytes)) => {
                if entries < ENTRIES_MAX {
                    descriptor.entries.push(entry(bytes)?);
                }
                entries += 1;
            }
            (2, Field::Bytes(bytes)) => own_limit(bytes, descriptor.limit.get_or_insert_default())?,
            (3, Field::Bytes(bytes)) => hits(bytes, descriptor.hits_addend.get_or_insert_default())?,
            (4, Field::Number(is_negative)) => descriptor.is_negative_hits = is_negative != 0,
            (1..=4, _) => return Err(Refused::NotMessage),
            _ => {}
        }
    }
    if entries > ENTRIES_MAX {
        return Err(Refused::ManyEntries { descriptor: number, entries });
    }
    Ok(descriptor)
}

fn entry(bytes: &[u8]) -> Result<Entry, Refused> {
    let mut entry = Entry::default();
    for field in Fields(bytes) {
        match field? {
            (1, Field::Bytes(key)) => entry.key = text(key),
            (2, Field::Bytes(value)) => entry.value = text(value),
            (1 | 2, _) => return Err(Refused::NotMessage),
            _ => {}
        }
    }
    Ok(entry)
}

fn own_limit(bytes: &[u8], limit: &mut RateLimitOverride) -> Result<(), Refused> {
    for field in Fields(bytes) {
        match field? {
            (1, Field::Number(requests)) => limit.requests_per_unit = requests as u32,
            (2, Field::Number(unit)) => limit.unit = unit as i32,
            (1 | 2, _) => return Err(Refused::NotMessage),
            _ => {}
        }
    }
    Ok(())
}

fn hits(bytes: &[u8], hits: &mut UInt64Value) -> Result<(), Refused> {
    for field in Fields(bytes) {
        match field? {
            (1, Field::Number(value)) => hits.value = value,
            (1, _) => return Err(Refused::NotMessage),
            _ => {}
        }
    }
    Ok(())
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// The fields of a message, with their numbers, as they were written.
struct Fields<'a>(&'a [u8]);

enum Field<'a> {
    Number(u64),
    /// A text, or a message.
    Bytes(&'a [u8]),
    /// Of a kind that nothing here has.
    Other,
}

impl<'a> Iterator for Fields<'a> {
    type Item = Result<(u64, Field<'a>), Refused>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.0.is_empty() {
            return None;
        }
        let field = self.field().ok_or(Refused::NotMessage);
        if field.is_err() {
            // Nothing behind it can be told apart.
            self.0 = &[];
        }
        Some(field)
    }
}

impl<'a> Fields<'a> {
    fn field(&mut self) -> Option<(u64, Field<'a>)> {
        let key = self.number()?;
        let field = match key & 7 {
            0 => Field::Number(self.number()?),
            1 => self.take(8).map(|_| Field::Other)?,
            2 => {
                let length = self.number()?;
                Field::Bytes(self.take(usize::try_from(length).ok()?)?)
            }
            5 => self.take(4).map(|_| Field::Other)?,
            _ => return None,
        };
        let number = key >> 3;
        (number > 0).then_some((number, field))
    }

    fn take(&mut self, length: usize) -> Option<&'a [u8]> {
        let (taken, rest) = self.0.split_at_checked(length)?;
        self.0 = rest;
        Some(taken)
    }

    /// Seven bits in a byte, the lowest first; all but the last byte have the eighth.
    fn number(&mut self) -> Option<u64> {
        const LAST_SHIFT: u32 = 63;
        let mut number = 0;
        for shift in (0..=LAST_SHIFT).step_by(7) {
            let (byte, rest) = self.0.split_first()?;
            self.0 = rest;
            if shift == LAST_SHIFT && *byte > 1 {
                return None;
            }
            number |= u64::from(byte & 0x7f) << shift;
            if *byte < 0x80 {
                return Some(number);
            }
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use prost::Message;

    use super::*;

    fn some_descriptor() -> impl Strategy<Value = RateLimitDescriptor> {
        let entry = (".{0,9}", ".{0,9}").prop_map(|(key, value)| Entry { key, value });
        let limit = (any::<u32>(), any::<i32>())
            .prop_map(|(requests_per_unit, unit)| RateLimitOverride { requests_per_unit, unit });
        let hits = any::<u64>().prop_map(|value| UInt64Value { value });
        let entries = prop::collection::vec(entry, 0..4);
        (entries, prop::option::of(limit), prop::option::of(hits), any::<bool>()).prop_map(
            |(entries, limit, hits_addend, is_negative_hits)| RateLimitDescriptor {
                entries,
                limit,
                hits_addend,
                is_negative_hits,
            },
        )
    }

    proptest! {
        /// What others write is read as they mean it.
        #[test]
        fn a_request_is_read_as_it_was_written(
            domain in ".{0,9}",
            descriptors in prop::collection::vec(some_descriptor(), 0..4),
            hits_addend in any::<u32>(),
        ) {
            let written = RateLimitRequest { domain, descriptors, hits_addend };
            prop_assert_eq!(request(&written.encode_to_vec()), Ok(written));
        }

        /// Whatever comes is read as others read it, but for texts and kinds of fields that nobody writes any more.
        #[test]
        fn whatever_comes_is_read_or_refused(bytes in prop::collection::vec(any::<u8>(), 0..64)) {
            if let Ok(theirs) = RateLimitRequest::decode(&bytes[..]) && let Ok(ours) = request(&bytes) {
                prop_assert_eq!(ours, theirs);
            }
        }
    }
}
