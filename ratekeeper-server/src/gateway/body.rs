//! Request and response bodies.

use std::error::Error;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use bytes::Bytes;
use http::HeaderName;
use http_body::{Body, Frame, SizeHint};
use hyper::body::Incoming;
use ratekeeper::tower::ResponseBody;
use ratekeeper_rules::response::ResponseStatus;
use tokio::time::{Instant, Sleep, sleep};

use super::access::AccessRecord;
use super::hop_headers::is_allowed_trailer;
use super::min_rate::MinRate;
use super::request_timeout::UploadProgress;
use super::screen::is_protected_alias;
use super::stream_stall;
use super::upstream::InFlightGuard;
use super::upstream::pool::{Pool, UpstreamConnection};

/// Largest data frame that a response body yields to an HTTP/2 stream.
const FRAME_BYTES_MAX: usize = 16 << 10;
/// Largest request body that is kept for another attempt, in bytes and data frames.
const REPLAY_BYTES_MAX: usize = 64 << 10;
const REPLAY_FRAMES_MAX: usize = 64;

/// A request body, as it is sent to an upstream.
#[derive(Debug)]
pub(crate) enum RequestBody {
    Empty,
    Client(IncomingBody),
    /// What was sent is kept, for another attempt.
    Replay(ReplayReader),
}

/// A request body from the client.
#[derive(Debug)]
pub(crate) struct IncomingBody {
    body: Option<Incoming>,
    /// Longest time that the client may be awaited; data restores it at the minimum rate.
    timeout: Option<Duration>,
    min_rate: MinRate,
    /// Set while the client is awaited, for the time that is left.
    timer: Option<Pin<Box<Sleep>>>,
    /// How long the client has been awaited before, less what data has restored.
    waited: Duration,
    /// Records whether the client or the upstream is awaited, for the request timeout.
    upload: Arc<UploadProgress>,
    /// Headers that the configuration reads or sets; they are not allowed as trailers.
    protected: Arc<[HeaderName]>,
}

impl RequestBody {
    pub(crate) fn new(
        body: Incoming,
        timeout: Option<Duration>,
        min_rate: MinRate,
        protected: &Arc<[HeaderName]>,
    ) -> RequestBody {
        if body.is_end_stream() {
            return RequestBody::Empty;
        }
        let (upload, protected) = (Arc::default(), protected.clone());
        RequestBody::Client(IncomingBody {
            body: Some(body),
            timeout,
            min_rate,
            timer: None,
            waited: Duration::ZERO,
            upload,
            protected,
        })
    }

    /// Whether the client or the upstream is awaited; none if the request has no body.
    pub(crate) fn upload(&self) -> Option<Arc<UploadProgress>> {
        match self {
            RequestBody::Client(body) => Some(body.upload.clone()),
            RequestBody::Empty | RequestBody::Replay(_) => None,
        }
    }

    /// A body for the next attempt, which begins again.
    pub(crate) fn replay(&mut self) -> RequestBody {
        *self = match std::mem::replace(self, RequestBody::Empty) {
            RequestBody::Client(body) => RequestBody::Replay(ReplayReader::new(body)),
            other => other,
        };
        match self {
            RequestBody::Replay(reader) => RequestBody::Replay(reader.another()),
            _ => RequestBody::Empty,
        }
    }

    /// Whether all that earlier attempts have sent can be sent again.
    pub(crate) fn can_replay(&self) -> bool {
        match self {
            RequestBody::Replay(reader) => reader.replay().is_kept,
            RequestBody::Empty => true,
            RequestBody::Client(_) => false,
        }
    }

    /// Called when there will be no further attempt.
    pub(crate) fn end_replay(&self) {
        if let RequestBody::Replay(reader) = self {
            reader.replay().is_kept = false;
        }
    }
}

/// A body that is kept for another attempt until it is too long.
#[derive(Debug)]
struct Replay {
    body: IncomingBody,
    /// The data frames that were sent; trailers are not kept.
    sent: Vec<Bytes>,
    sent_bytes: usize,
    is_kept: bool,
    attempts: usize,
}

/// Reads a [`Replay`] from its beginning. Only the latest reader that has begun gets data.
#[derive(Debug)]
pub(crate) struct ReplayReader {
    replay: Arc<Mutex<Replay>>,
    attempt: Option<usize>,
    /// Index of the next frame to send again.
    next: usize,
}

impl ReplayReader {
    fn new(body: IncomingBody) -> ReplayReader {
        let replay = Replay { body, sent: Vec::new(), sent_bytes: 0, is_kept: true, attempts: 0 };
        ReplayReader { replay: Arc::new(Mutex::new(replay)), attempt: None, next: 0 }
    }

    fn another(&self) -> ReplayReader {
        ReplayReader { replay: self.replay.clone(), attempt: None, next: 0 }
    }

    fn replay(&self) -> MutexGuard<'_, Replay> {
        self.replay.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn poll_frame(
        &mut self,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, RequestBodyError>>> {
        let mut replay = self.replay.lock().unwrap_or_else(PoisonError::into_inner);
        let attempt = *self.attempt.get_or_insert_with(|| {
            replay.attempts += 1;
            replay.attempts
        });
        if attempt != replay.attempts {
            // A later attempt has begun: the earlier one, which polls this body, has no stream left.
            return Poll::Ready(None);
        }
        if let Some(data) = replay.sent.get(self.next) {
            self.next += 1;
            return Poll::Ready(Some(Ok(Frame::data(data.clone()))));
        }
        let frame = ready!(replay.body.poll_frame(context));
        match frame.as_ref().and_then(|frame| frame.as_ref().ok()).map(Frame::data_ref) {
            Some(Some(data)) if replay.is_kept && replay.has_room(data) => {
                let data = data.clone();
                replay.sent_bytes += data.len();
                replay.sent.push(data);
                self.next += 1;
            }
            // The end of the body can be read again.
            None if frame.is_none() => {}
            _ => {
                replay.is_kept = false;
                replay.sent = Vec::new();
                self.next = 0;
            }
        }
        Poll::Ready(frame)
    }
}

impl Replay {
    fn has_room(&self, data: &Bytes) -> bool {
        self.sent.len() < REPLAY_FRAMES_MAX && self.sent_bytes + data.len() <= REPLAY_BYTES_MAX
    }
}

/// Why a request body ended early.
#[derive(Debug, thiserror::Error)]
pub(crate) enum RequestBodyError {
    /// The client sent no data within the timeout, or too slowly.
    #[error("request body timed out")]
    TimedOut,
    // Not a source: hyper would reset the stream with the reason of an HTTP/2 error among the sources, and that reason
    // (REFUSED_STREAM, for example) is about the other connection.
    #[error("{0}")]
    Failed(hyper::Error),
}

/// The request body's error, if that is why a request failed.
pub(crate) fn request_body_error(error: &hyper::Error) -> Option<&RequestBodyError> {
    let mut source = error.source();
    while let Some(error) = source {
        if let Some(cause) = error.downcast_ref() {
            return Some(cause);
        }
        source = error.source();
    }
    None
}

/// Removes trailers that would override headers which limits and routes have evaluated.
fn screen_trailers(mut frame: Frame<Bytes>, protected: &[HeaderName]) -> Frame<Bytes> {
    if let Some(trailers) = frame.trailers_mut() {
        // Servers read `X_User_Id` as `X-User-Id`, as in the head.
        let is_allowed = |name: &HeaderName| {
            is_allowed_trailer(name) && !protected.contains(name) && !is_protected_alias(name, protected)
        };
        *trailers = std::mem::take(trailers)
            .into_iter()
            .scan(None, |last, (name, value)| {
                // Of several values of a name, only the first comes with the name.
                *last = name.or(last.take());
                Some((last.clone()?, value))
            })
            .filter(|(name, _)| is_allowed(name))
            .collect();
    }
    frame
}

impl IncomingBody {
    fn poll_frame(
        &mut self,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, RequestBodyError>>> {
        let IncomingBody { body, timeout, min_rate, timer, waited, upload, protected } = self;
        let Some(incoming) = body else { return Poll::Ready(None) };
        if let Poll::Ready(frame) = Pin::new(incoming).poll_frame(context) {
            if let (Some(timer), Some(timeout)) = (timer.take(), *timeout) {
                let left = timer.deadline().saturating_duration_since(Instant::now());
                *waited = timeout.saturating_sub(left);
            }
            if let Some(Ok(frame)) = &frame {
                // Both sides of a conversation may be slow.
                let min_rate = if upload.has_response() { MinRate(0) } else { *min_rate };
                *waited = min_rate.left_after(*waited, frame.data_ref().map_or(0, Bytes::len));
            }
            upload.waits_for_upstream();
            let screened = |frame| screen_trailers(frame, protected);
            return Poll::Ready(frame.map(|frame| frame.map(screened).map_err(RequestBodyError::Failed)));
        }
        upload.waits_for_client();
        let Some(timeout) = *timeout else { return Poll::Pending };
        let timer = timer.get_or_insert_with(|| Box::pin(sleep(timeout.saturating_sub(*waited))));
        ready!(timer.as_mut().poll(context));
        *body = None;
        Poll::Ready(Some(Err(RequestBodyError::TimedOut)))
    }

    fn is_end_stream(&self) -> bool {
        self.body.as_ref().is_none_or(Body::is_end_stream)
    }

    fn size_hint(&self) -> SizeHint {
        self.body.as_ref().map_or(SizeHint::with_exact(0), Body::size_hint)
    }
}

impl Body for RequestBody {
    type Data = Bytes;
    type Error = RequestBodyError;

    fn poll_frame(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, RequestBodyError>>> {
        match self.get_mut() {
            RequestBody::Empty => Poll::Ready(None),
            RequestBody::Client(body) => body.poll_frame(context),
            RequestBody::Replay(reader) => reader.poll_frame(context),
        }
    }

    fn is_end_stream(&self) -> bool {
        match self {
            RequestBody::Empty => true,
            RequestBody::Client(body) => body.is_end_stream(),
            RequestBody::Replay(reader) => {
                let replay = reader.replay();
                replay.sent.len() <= reader.next && replay.body.is_end_stream()
            }
        }
    }

    fn size_hint(&self) -> SizeHint {
        match self {
            RequestBody::Empty => SizeHint::with_exact(0),
            RequestBody::Client(body) => body.size_hint(),
            RequestBody::Replay(reader) => {
                let replay = reader.replay();
                let again: usize = replay.sent.iter().skip(reader.next).map(Bytes::len).sum();
                let (rest, again) = (replay.body.size_hint(), again as u64);
                let mut hint = SizeHint::new();
                hint.set_lower(rest.lower().saturating_add(again));
                if let Some(upper) = rest.upper() {
                    hint.set_upper(upper.saturating_add(again));
                }
                hint
            }
        }
    }
}

/// A response body from an upstream, or generated by the gateway.
#[derive(Debug)]
pub(crate) enum UpstreamBody {
    /// Generated by the gateway.
    Generated {
        status: ResponseStatus,
        text: Option<Bytes>,
    },
    /// The upstream sent no body.
    Empty,
    Streaming(Box<StreamingBody>),
    /// Empty: the connection has switched protocols.
    Upgraded {
        _in_flight: Option<InFlightGuard>,
    },
}

/// A response body in transit. At its end, the connection returns to its pool.
#[derive(Debug)]
pub(crate) struct StreamingBody {
    body: Incoming,
    /// Longest time without data from the upstream.
    timeout: Option<Duration>,
    timer: Option<Pin<Box<Sleep>>>,
    /// The connection, and the pool that it returns to.
    connection: Option<(UpstreamConnection, Arc<Pool>)>,
    _in_flight: Option<InFlightGuard>,
}

/// Why a response body ended early.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ResponseBodyError {
    /// The upstream sent no data within the timeout.
    #[error("upstream response timed out")]
    TimedOut,
    // Not a source: hyper would reset the stream with the reason of an HTTP/2 error among the sources, and that reason
    // (REFUSED_STREAM, for example) is about the other connection.
    #[error("{0}")]
    Failed(hyper::Error),
}

impl UpstreamBody {
    pub(crate) fn generated(status: ResponseStatus, text: impl Into<Bytes>) -> UpstreamBody {
        let text = text.into();
        UpstreamBody::Generated { status, text: (!text.is_empty()).then_some(text) }
    }

    pub(crate) fn upgraded(in_flight: Option<InFlightGuard>) -> UpstreamBody {
        UpstreamBody::Upgraded { _in_flight: in_flight }
    }

    pub(crate) fn streaming(
        body: Incoming,
        timeout: Option<Duration>,
        connection: UpstreamConnection,
        pool: Arc<Pool>,
        in_flight: Option<InFlightGuard>,
    ) -> UpstreamBody {
        let connection = Some((connection, pool));
        let mut streaming = StreamingBody { body, timeout, timer: None, connection, _in_flight: in_flight };
        streaming.release_connection();
        match streaming.connection {
            // There is no body, so the connection has already returned to its pool.
            None => UpstreamBody::Empty,
            Some(_) => UpstreamBody::Streaming(Box::new(streaming)),
        }
    }
}

impl StreamingBody {
    fn release_connection(&mut self) {
        if self.body.is_end_stream()
            && let Some((connection, pool)) = self.connection.take()
        {
            pool.release(connection);
        }
    }
}

impl StreamingBody {
    fn poll_frame(
        &mut self,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, ResponseBodyError>>> {
        let frame = match Pin::new(&mut self.body).poll_frame(context) {
            Poll::Ready(frame) => {
                self.timer = None;
                frame.map(|frame| frame.map_err(ResponseBodyError::Failed))
            }
            Poll::Pending => {
                let Some(timeout) = self.timeout else { return Poll::Pending };
                let timer = self.timer.get_or_insert_with(|| Box::pin(sleep(timeout)));
                ready!(timer.as_mut().poll(context));
                Some(Err(ResponseBodyError::TimedOut))
            }
        };
        match &frame {
            Some(Err(_)) => self.connection = None,
            _ => self.release_connection(),
        }
        Poll::Ready(frame)
    }
}

impl Body for UpstreamBody {
    type Data = Bytes;
    type Error = ResponseBodyError;

    fn poll_frame(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, ResponseBodyError>>> {
        match self.get_mut() {
            UpstreamBody::Generated { text, .. } => {
                Poll::Ready(text.take().map(|text| Ok(Frame::data(text))))
            }
            UpstreamBody::Streaming(streaming) => streaming.poll_frame(context),
            UpstreamBody::Empty | UpstreamBody::Upgraded { .. } => Poll::Ready(None),
        }
    }

    fn is_end_stream(&self) -> bool {
        match self {
            UpstreamBody::Generated { text, .. } => text.is_none(),
            UpstreamBody::Streaming(streaming) => streaming.body.is_end_stream(),
            UpstreamBody::Empty | UpstreamBody::Upgraded { .. } => true,
        }
    }

    fn size_hint(&self) -> SizeHint {
        match self {
            UpstreamBody::Generated { text, .. } => {
                SizeHint::with_exact(text.as_ref().map_or(0, |text| text.len() as u64))
            }
            UpstreamBody::Streaming(streaming) => streaming.body.size_hint(),
            UpstreamBody::Empty | UpstreamBody::Upgraded { .. } => SizeHint::with_exact(0),
        }
    }
}

/// The response body for the client. It holds the request's resources until it is sent or the client disconnects.
#[derive(Debug)]
pub(crate) struct ClientBody {
    body: BodySource,
    record: Option<Box<AccessRecord>>,
    /// Largest data frame to yield.
    frame_bytes_max: usize,
    /// Yields nothing while the client does not read.
    waits_for_client: bool,
    /// Data received but not yet yielded.
    pending: Bytes,
}

#[derive(Debug)]
enum BodySource {
    /// The response passed through the limits.
    Limited(ResponseBody<UpstreamBody>),
    Unlimited(UpstreamBody),
}

impl ClientBody {
    pub(crate) fn limited(body: ResponseBody<UpstreamBody>) -> ClientBody {
        ClientBody::new(BodySource::Limited(body))
    }

    pub(crate) fn unlimited(body: UpstreamBody) -> ClientBody {
        ClientBody::new(BodySource::Unlimited(body))
    }

    fn new(body: BodySource) -> ClientBody {
        ClientBody {
            body,
            record: None,
            frame_bytes_max: usize::MAX,
            waits_for_client: false,
            pending: Bytes::new(),
        }
    }

    /// The status for which the gateway generated the body; none if it is from an upstream or a limit.
    pub(crate) fn generated_status(&self) -> Option<ResponseStatus> {
        let body = match &self.body {
            BodySource::Limited(body) => body.service_body(),
            BodySource::Unlimited(body) => Some(body),
        };
        match body {
            Some(UpstreamBody::Generated { status, .. }) => Some(*status),
            _ => None,
        }
    }

    /// Yields small frames: a slow client's progress shows only when one frame has been sent and the next is polled.
    pub(crate) fn set_small_frames(&mut self) {
        self.frame_bytes_max = FRAME_BYTES_MAX;
    }

    /// Yields nothing while data waits for the client: hyper would buffer it up to the size of the largest head. Only for
    /// HTTP/1, where hyper polls the body again once that data is sent.
    pub(crate) fn set_back_pressure(&mut self) {
        self.waits_for_client = true;
    }

    /// Keeps the access record until this body ends.
    pub(crate) fn keep_record(&mut self, record: Box<AccessRecord>) {
        // hyper does not poll a body that is already at its end.
        if !self.is_end_stream() {
            self.record = Some(record);
        }
    }
}

impl Body for ClientBody {
    type Data = Bytes;
    type Error = ResponseBodyError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, ResponseBodyError>>> {
        let ClientBody { body, record, frame_bytes_max, waits_for_client, pending } = &mut *self;
        if *waits_for_client && record.as_ref().is_some_and(|record| record.is_client_blocked()) {
            return Poll::Pending;
        }
        let polled = match body {
            _ if !pending.is_empty() => Poll::Ready(Some(Ok(Frame::data(std::mem::take(pending))))),
            BodySource::Limited(body) => Pin::new(body).poll_frame(context),
            BodySource::Unlimited(body) => Pin::new(body).poll_frame(context),
        };
        let Poll::Ready(mut frame) = polled else {
            stream_stall::record_pending_body();
            return Poll::Pending;
        };
        let mut yielded = 0;
        if let Some(Ok(frame)) = &mut frame
            && let Some(data) = frame.data_mut()
        {
            if data.len() > *frame_bytes_max {
                *pending = data.split_off(*frame_bytes_max);
            }
            yielded = data.len();
            if let Some(record) = record {
                record.add_bytes(data.len());
            }
        }
        stream_stall::record_yielded_data(yielded);
        if !matches!(frame, Some(Ok(_))) || self.is_end_stream() {
            self.record = None;
        }
        Poll::Ready(frame)
    }

    fn is_end_stream(&self) -> bool {
        let is_end = match &self.body {
            BodySource::Limited(body) => body.is_end_stream(),
            BodySource::Unlimited(body) => body.is_end_stream(),
        };
        is_end && self.pending.is_empty()
    }

    fn size_hint(&self) -> SizeHint {
        match &self.body {
            BodySource::Limited(body) => body.size_hint(),
            BodySource::Unlimited(body) => body.size_hint(),
        }
    }
}
