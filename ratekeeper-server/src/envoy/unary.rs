//! Calls with one message in each direction, as gRPC sends them over HTTP/2.

use std::pin::Pin;
use std::task::{Context, Poll};

use bytes::{Buf, BufMut, Bytes, BytesMut};
use http::header::CONTENT_TYPE;
use http::{HeaderMap, HeaderName, HeaderValue, Response};
use http_body::{Body, Frame, SizeHint};
use http_body_util::BodyExt;
use prost::Message;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, SemaphorePermit};
use tonic::Status;

use super::bounds::CALL_BYTES_MAX;
use super::error::EnvoyApiError;

const GRPC_ENCODING: HeaderName = HeaderName::from_static("grpc-encoding");
const GRPC_ACCEPT_ENCODING: HeaderName = HeaderName::from_static("grpc-accept-encoding");
const GRPC_STATUS: HeaderName = HeaderName::from_static("grpc-status");
const IDENTITY: HeaderValue = HeaderValue::from_static("identity");
const CONTENT_TYPE_GRPC: HeaderValue = HeaderValue::from_static("application/grpc");

/// A message is preceded by a byte that says whether it is compressed, and by its length in four bytes.
const PREFIX_BYTES: usize = 5;

/// Whether the messages of a call are compressed.
pub(super) fn is_compressed(headers: &HeaderMap) -> bool {
    headers.get(GRPC_ENCODING).is_some_and(|encoding| encoding != IDENTITY)
}

/// Reads the message of a call. The parts of an incomplete message take permits for their bytes.
pub(super) async fn read_message<M: Message + Default>(
    mut body: impl Body<Data = Bytes> + Unpin,
    byte_permits: &Semaphore,
) -> Result<M, EnvoyApiError> {
    let mut received = Bytes::new();
    let mut message = IncompleteMessage { bytes: BytesMut::new(), byte_permits, held: None };
    while let Some(frame) = body.frame().await {
        let frame = frame.map_err(|_| invalid("it could not be read"))?;
        let Ok(data) = frame.into_data() else { continue };
        if data.is_empty() {
            continue;
        }
        let is_first = received.is_empty() && message.bytes.is_empty();
        if is_first {
            // The usual case is a message that arrives at once: it takes no permits, and is not copied.
            if !body.is_end_stream() {
                message.hold(data.len())?;
            }
            received = data;
        } else {
            message.push(&std::mem::take(&mut received))?;
            message.push(&data)?;
        }
    }
    decode(if message.bytes.is_empty() { received } else { message.bytes.freeze() })
}

/// The part of a message that has arrived.
struct IncompleteMessage<'a> {
    bytes: BytesMut,
    byte_permits: &'a Semaphore,
    held: Option<SemaphorePermit<'a>>,
}

impl IncompleteMessage<'_> {
    fn push(&mut self, data: &[u8]) -> Result<(), EnvoyApiError> {
        self.bytes.extend_from_slice(data);
        let declared = self.bytes.first_chunk::<PREFIX_BYTES>().map_or(0, |prefix| message_bytes(*prefix));
        if declared > CALL_BYTES_MAX || self.bytes.len() > PREFIX_BYTES + CALL_BYTES_MAX {
            return Err(EnvoyApiError::MessageTooLong);
        }
        self.hold(self.bytes.capacity())
    }

    /// Takes permits up to a number of bytes.
    fn hold(&mut self, bytes: usize) -> Result<(), EnvoyApiError> {
        let held = self.held.as_ref().map_or(0, SemaphorePermit::num_permits);
        let more = u32::try_from(bytes.saturating_sub(held)).unwrap_or(u32::MAX);
        let more = self.byte_permits.try_acquire_many(more).map_err(|_| EnvoyApiError::Overloaded)?;
        match &mut self.held {
            Some(held) => held.merge(more),
            None => self.held = Some(more),
        }
        Ok(())
    }
}

/// The length of a message in its prefix.
fn message_bytes([_, length @ ..]: [u8; PREFIX_BYTES]) -> usize {
    u32::from_be_bytes(length) as usize
}

/// Decodes the body of a call.
fn decode<M: Message + Default>(mut body: Bytes) -> Result<M, EnvoyApiError> {
    let Some(prefix) = body.first_chunk::<PREFIX_BYTES>().copied() else {
        let reason = if body.is_empty() { "the call has no message" } else { "it is truncated" };
        return Err(invalid(reason));
    };
    match prefix[0] {
        0 => {}
        1 => return Err(invalid("it is compressed, but the call has no `grpc-encoding`")),
        _ => return Err(invalid("its prefix starts with neither 0 nor 1")),
    }
    body.advance(PREFIX_BYTES);
    let declared = message_bytes(prefix);
    if declared > CALL_BYTES_MAX {
        return Err(EnvoyApiError::MessageTooLong);
    }
    if declared != body.len() {
        let reason = if declared < body.len() { "bytes follow the message" } else { "it is truncated" };
        return Err(invalid(reason));
    }
    M::decode(body).map_err(|error| EnvoyApiError::InvalidMessage(error.to_string()))
}

fn invalid(reason: &str) -> EnvoyApiError {
    EnvoyApiError::InvalidMessage(reason.to_owned())
}

/// The response of a call that succeeded.
pub(super) fn success(message: &impl Message) -> Response<CallBody> {
    let length = message.encoded_len();
    let mut bytes = BytesMut::with_capacity(PREFIX_BYTES + length);
    bytes.put_u8(0);
    // A response is far shorter than 4 GiB.
    bytes.put_u32(u32::try_from(length).unwrap_or(u32::MAX));
    // The buffer has room for all of the message.
    let _ = message.encode(&mut bytes);
    let mut response = Response::new(CallBody::Message(bytes.freeze()));
    response.headers_mut().insert(CONTENT_TYPE, CONTENT_TYPE_GRPC);
    response
}

/// The response of a call that failed: headers only.
pub(super) fn failure(error: EnvoyApiError) -> Response<CallBody> {
    let is_compressed = matches!(error, EnvoyApiError::Compressed);
    let mut response = Status::from(error).into_http().map(CallBody::Other);
    if is_compressed {
        response.headers_mut().insert(GRPC_ACCEPT_ENCODING, IDENTITY);
    }
    response
}

/// The body of a response.
#[derive(Debug)]
pub(super) enum CallBody {
    /// A message with its prefix. The trailers of a success follow.
    Message(Bytes),
    /// The trailers of a success.
    Trailers,
    End,
    /// The response of another service.
    Other(tonic::body::Body),
    /// One that may never end, with the permit that its call holds until then.
    Stream {
        body: tonic::body::Body,
        _permit: OwnedSemaphorePermit,
    },
}

impl Body for CallBody {
    type Data = Bytes;
    type Error = Status;

    fn poll_frame(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Status>>> {
        let this = self.get_mut();
        let frame = match this {
            CallBody::Message(bytes) => {
                let bytes = std::mem::take(bytes);
                *this = CallBody::Trailers;
                Frame::data(bytes)
            }
            CallBody::Trailers => {
                *this = CallBody::End;
                Frame::trailers(HeaderMap::from_iter([(GRPC_STATUS, HeaderValue::from_static("0"))]))
            }
            CallBody::End => return Poll::Ready(None),
            CallBody::Other(body) | CallBody::Stream { body, .. } => {
                return Pin::new(body).poll_frame(context);
            }
        };
        Poll::Ready(Some(Ok(frame)))
    }

    fn is_end_stream(&self) -> bool {
        match self {
            CallBody::Message(_) | CallBody::Trailers => false,
            CallBody::End => true,
            CallBody::Other(body) | CallBody::Stream { body, .. } => body.is_end_stream(),
        }
    }

    fn size_hint(&self) -> SizeHint {
        match self {
            CallBody::Other(body) => body.size_hint(),
            // gRPC has no content length.
            _ => SizeHint::default(),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::VecDeque;
    use std::convert::Infallible;

    use super::super::messages::Entry;
    use super::*;

    const MESSAGE: &[u8] = b"\0\0\0\0\x06\x0a\x04user";

    /// A body that arrives in parts.
    struct Parts(VecDeque<Bytes>);

    impl Body for Parts {
        type Data = Bytes;
        type Error = Infallible;

        fn poll_frame(
            mut self: Pin<&mut Self>,
            _: &mut Context<'_>,
        ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
            Poll::Ready(self.0.pop_front().map(|part| Ok(Frame::data(part))))
        }

        fn is_end_stream(&self) -> bool {
            self.0.is_empty()
        }
    }

    /// Reads a message of which at most `bytes_max` bytes may be incomplete.
    async fn read(parts: &[&[u8]], bytes_max: usize) -> Result<Bytes, EnvoyApiError> {
        let body = Parts(parts.iter().map(|part| Bytes::copy_from_slice(part)).collect());
        let byte_permits = Semaphore::new(bytes_max);
        let entry: Result<Entry, _> = read_message(body, &byte_permits).await;
        assert_eq!(byte_permits.available_permits(), bytes_max, "all permits are released");
        entry.map(|entry| entry.key)
    }

    #[tokio::test]
    async fn message_is_read_from_any_parts() {
        // A message that arrives at once takes no permits.
        assert_eq!(read(&[MESSAGE], 0).await.unwrap(), "user");
        for at in 1..MESSAGE.len() {
            let (start, rest) = MESSAGE.split_at(at);
            assert_eq!(read(&[start, rest], 64).await.unwrap(), "user", "{at}");
            let rejected = read(&[start, rest], MESSAGE.len() - 1).await;
            assert!(matches!(rejected, Err(EnvoyApiError::Overloaded)), "{at}");
        }
        for (one, other) in (1..MESSAGE.len()).flat_map(|other| (1..other).map(move |one| (one, other))) {
            let parts = [&MESSAGE[..one], &MESSAGE[one..other], &MESSAGE[other..]];
            assert_eq!(read(&parts, 64).await.unwrap(), "user", "{one} {other}");
        }
        // An empty part at the end, as some clients send it.
        assert_eq!(read(&[MESSAGE, b""], MESSAGE.len()).await.unwrap(), "user");
        assert_eq!(read(&[b"", MESSAGE], 0).await.unwrap(), "user");
    }

    #[tokio::test]
    async fn malformed_message_is_rejected() {
        let rejected = async |bytes: &[u8]| read(&[bytes], 0).await.unwrap_err().to_string();
        let reason = |reason: &str| format!("the message is not a RateLimitRequest: {reason}");
        assert_eq!(rejected(b"").await, reason("the call has no message"));
        assert_eq!(rejected(&MESSAGE[..3]).await, reason("it is truncated"));
        assert_eq!(rejected(&MESSAGE[..10]).await, reason("it is truncated"));
        assert_eq!(rejected(&[MESSAGE, MESSAGE].concat()).await, reason("bytes follow the message"));
        assert_eq!(rejected(b"\x02\0\0\0\0").await, reason("its prefix starts with neither 0 nor 1"));
        let compressed = "it is compressed, but the call has no `grpc-encoding`";
        assert_eq!(rejected(b"\x01\0\0\0\0").await, reason(compressed));
        let encoded =
            |name| is_compressed(&HeaderMap::from_iter([(GRPC_ENCODING, HeaderValue::from_static(name))]));
        assert!(encoded("gzip") && !encoded("identity") && !is_compressed(&HeaderMap::new()));
    }

    #[tokio::test]
    async fn message_that_is_too_long_is_rejected_with_its_prefix() {
        let length = u32::try_from(CALL_BYTES_MAX + 1).unwrap().to_be_bytes();
        let prefix = [&[0][..], &length].concat();
        for parts in [&[&prefix[..]][..], &[&prefix[..2], &prefix[2..], b"x"]] {
            let rejected = read(parts, 100).await;
            assert!(matches!(rejected, Err(EnvoyApiError::MessageTooLong)), "{rejected:?}");
        }
    }
}
