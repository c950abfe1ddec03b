//! Bodies on their way.

use std::error::Error;
use std::fmt;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use bytes::Bytes;
use http::HeaderName;
use http_body::{Body, Frame, SizeHint};
use hyper::body::Incoming;
use tokio::time::{Sleep, sleep};
use tollgate::tower::ResponseBody;

use super::deadline::Upload;
use super::heads::may_trail;
use super::pool::{Connection, Pool};
use super::record::Passage;
use super::stall;
use super::upstream::UnderWay;

/// The largest part of a response that a stream of HTTP/2 is given at once.
const PART_BYTES_MAX: usize = 16 << 10;

/// What a client sends.
#[derive(Debug)]
pub(crate) struct RequestBody {
    body: Option<Incoming>,
    /// How long the client may send nothing.
    patience: Option<Duration>,
    waiting: Option<Pin<Box<Sleep>>>,
    /// Whose turn it is, for those who wait for the answer.
    upload: Option<Arc<Upload>>,
    /// Headers that may not come behind the body, either.
    named: Option<Arc<[HeaderName]>>,
}

impl RequestBody {
    pub(crate) fn new(body: Incoming, patience: Option<Duration>, named: &Arc<[HeaderName]>) -> RequestBody {
        if body.is_end_stream() {
            return RequestBody::empty();
        }
        let (upload, named) = (Some(Arc::default()), Some(named.clone()));
        RequestBody { body: Some(body), patience, waiting: None, upload, named }
    }

    pub(crate) fn empty() -> RequestBody {
        RequestBody { body: None, patience: None, waiting: None, upload: None, named: None }
    }
}

impl RequestBody {
    /// Whether it is the client's turn or the upstream's, if there is a body at all.
    pub(crate) fn upload(&self) -> Option<Arc<Upload>> {
        self.upload.clone()
    }
}

/// Why a client's body broke off.
#[derive(Debug)]
pub(crate) enum BodyError {
    /// The client sent nothing for too long.
    TooSlow,
    Broken(hyper::Error),
}

impl fmt::Display for BodyError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            BodyError::TooSlow => write!(f, "the client sent nothing for too long"),
            BodyError::Broken(error) => write!(f, "{error}"),
        }
    }
}

impl Error for BodyError {}

/// What the client did, if a request failed because of that.
pub(crate) fn client_fault(error: &hyper::Error) -> Option<&BodyError> {
    let mut source = error.source();
    while let Some(error) = source {
        if let Some(fault) = error.downcast_ref() {
            return Some(fault);
        }
        source = error.source();
    }
    None
}

/// What limits and routes have looked at does not come once more behind the body.
fn screen_trailers(mut frame: Frame<Bytes>, named: &[HeaderName]) -> Frame<Bytes> {
    if let Some(trailers) = frame.trailers_mut() {
        let is_kept = |name: &HeaderName| may_trail(name) && !named.contains(name);
        *trailers = std::mem::take(trailers)
            .into_iter()
            .scan(None, |last, (name, value)| {
                // Of several values of a name, only the first comes with it.
                *last = name.or(last.take());
                Some((last.clone()?, value))
            })
            .filter(|(name, _)| is_kept(name))
            .collect();
    }
    frame
}

impl Body for RequestBody {
    type Data = Bytes;
    type Error = BodyError;

    fn poll_frame(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BodyError>>> {
        let RequestBody { body, patience, waiting, upload, named } = self.get_mut();
        let Some(incoming) = body else { return Poll::Ready(None) };
        if let Poll::Ready(frame) = Pin::new(incoming).poll_frame(context) {
            *waiting = None;
            upload.iter().for_each(|upload| upload.waits_for_upstream());
            let named = named.as_deref().unwrap_or_default();
            let screened = |frame| screen_trailers(frame, named);
            return Poll::Ready(frame.map(|frame| frame.map(screened).map_err(BodyError::Broken)));
        }
        upload.iter().for_each(|upload| upload.waits_for_client());
        let Some(patience) = *patience else { return Poll::Pending };
        let waited = waiting.get_or_insert_with(|| Box::pin(sleep(patience)));
        ready!(waited.as_mut().poll(context));
        *body = None;
        Poll::Ready(Some(Err(BodyError::TooSlow)))
    }

    fn is_end_stream(&self) -> bool {
        self.body.as_ref().is_none_or(Body::is_end_stream)
    }

    fn size_hint(&self) -> SizeHint {
        self.body.as_ref().map_or(SizeHint::with_exact(0), Body::size_hint)
    }
}

/// What an upstream sends, or what we say instead.
#[derive(Debug)]
pub(crate) enum UpstreamBody {
    Told(Option<Bytes>),
    Streamed(Box<Streamed>),
    /// Nothing: what comes is no response any more.
    Switched {
        _under_way: Option<UnderWay>,
    },
}

/// A response on its way. Once it is through, its connection is free for the next.
#[derive(Debug)]
pub(crate) struct Streamed {
    body: Incoming,
    /// How long the upstream may send nothing.
    patience: Option<Duration>,
    waiting: Option<Pin<Box<Sleep>>>,
    /// With the pool that it goes back to.
    connection: Option<(Connection, Arc<Pool>)>,
    _under_way: Option<UnderWay>,
}

/// Why an upstream's body broke off.
#[derive(Debug)]
pub(crate) enum AnswerError {
    /// It sent nothing for too long.
    Silent,
    Broken(hyper::Error),
}

impl fmt::Display for AnswerError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            AnswerError::Silent => write!(f, "the upstream sent nothing for too long"),
            AnswerError::Broken(error) => write!(f, "{error}"),
        }
    }
}

impl Error for AnswerError {}

impl UpstreamBody {
    pub(crate) fn told(text: impl Into<Bytes>) -> UpstreamBody {
        let text = text.into();
        UpstreamBody::Told((!text.is_empty()).then_some(text))
    }

    pub(crate) fn switched(under_way: Option<UnderWay>) -> UpstreamBody {
        UpstreamBody::Switched { _under_way: under_way }
    }

    pub(crate) fn streamed(
        body: Incoming,
        patience: Option<Duration>,
        connection: Connection,
        home: Arc<Pool>,
        under_way: Option<UnderWay>,
    ) -> UpstreamBody {
        let connection = Some((connection, home));
        let mut streamed = Streamed { body, patience, waiting: None, connection, _under_way: under_way };
        streamed.go_home();
        match streamed.connection {
            // There is no body, so nothing is on its way any more.
            None => UpstreamBody::Told(None),
            Some(_) => UpstreamBody::Streamed(Box::new(streamed)),
        }
    }
}

impl Streamed {
    fn go_home(&mut self) {
        if self.body.is_end_stream()
            && let Some((connection, home)) = self.connection.take()
        {
            home.keep(connection);
        }
    }
}

impl Streamed {
    fn poll_frame(&mut self, context: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, AnswerError>>> {
        let frame = match Pin::new(&mut self.body).poll_frame(context) {
            Poll::Ready(frame) => {
                self.waiting = None;
                frame.map(|frame| frame.map_err(AnswerError::Broken))
            }
            Poll::Pending => {
                let Some(patience) = self.patience else { return Poll::Pending };
                let waited = self.waiting.get_or_insert_with(|| Box::pin(sleep(patience)));
                ready!(waited.as_mut().poll(context));
                Some(Err(AnswerError::Silent))
            }
        };
        match &frame {
            Some(Err(_)) => self.connection = None,
            _ => self.go_home(),
        }
        Poll::Ready(frame)
    }
}

impl Body for UpstreamBody {
    type Data = Bytes;
    type Error = AnswerError;

    fn poll_frame(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, AnswerError>>> {
        match self.get_mut() {
            UpstreamBody::Told(text) => Poll::Ready(text.take().map(|text| Ok(Frame::data(text)))),
            UpstreamBody::Streamed(streamed) => streamed.poll_frame(context),
            UpstreamBody::Switched { .. } => Poll::Ready(None),
        }
    }

    fn is_end_stream(&self) -> bool {
        match self {
            UpstreamBody::Told(text) => text.is_none(),
            UpstreamBody::Streamed(streamed) => streamed.body.is_end_stream(),
            UpstreamBody::Switched { .. } => true,
        }
    }

    fn size_hint(&self) -> SizeHint {
        match self {
            UpstreamBody::Told(text) => {
                SizeHint::with_exact(text.as_ref().map_or(0, |text| text.len() as u64))
            }
            UpstreamBody::Streamed(streamed) => streamed.body.size_hint(),
            UpstreamBody::Switched { .. } => SizeHint::with_exact(0),
        }
    }
}

/// What goes to the client. It holds what the request holds until all of it has gone, or the client has.
#[derive(Debug)]
pub(crate) struct Outgoing {
    body: Limited,
    passage: Option<Passage>,
    /// What is given at once.
    part_bytes_max: usize,
    /// What has come and was not given yet.
    rest: Bytes,
}

#[derive(Debug)]
enum Limited {
    /// It went through the limits.
    Yes(ResponseBody<UpstreamBody>),
    No(UpstreamBody),
}

impl Outgoing {
    pub(crate) fn limited(body: ResponseBody<UpstreamBody>) -> Outgoing {
        Outgoing::new(Limited::Yes(body))
    }

    pub(crate) fn unlimited(body: UpstreamBody) -> Outgoing {
        Outgoing::new(Limited::No(body))
    }

    fn new(body: Limited) -> Outgoing {
        Outgoing { body, passage: None, part_bytes_max: usize::MAX, rest: Bytes::new() }
    }

    /// In small parts: that a slow client takes something shows only where one part has gone and the next is wanted.
    #[must_use]
    pub(crate) fn in_parts(self) -> Outgoing {
        Outgoing { part_bytes_max: PART_BYTES_MAX, ..self }
    }

    /// The request is over when this body is.
    #[must_use]
    pub(crate) fn holding(mut self, passage: Passage) -> Outgoing {
        // A body that is at its end is not asked for anything.
        if !self.is_end_stream() {
            self.passage = Some(passage);
        }
        self
    }
}

impl Body for Outgoing {
    type Data = Bytes;
    type Error = AnswerError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, AnswerError>>> {
        let Outgoing { body, passage, part_bytes_max, rest } = &mut *self;
        let polled = match body {
            _ if !rest.is_empty() => Poll::Ready(Some(Ok(Frame::data(std::mem::take(rest))))),
            Limited::Yes(body) => Pin::new(body).poll_frame(context),
            Limited::No(body) => Pin::new(body).poll_frame(context),
        };
        stall::asked(polled.is_ready());
        let mut frame = ready!(polled);
        if let Some(Ok(frame)) = &mut frame
            && let Some(data) = frame.data_mut()
        {
            if data.len() > *part_bytes_max {
                *rest = data.split_off(*part_bytes_max);
            }
            if let Some(passage) = passage {
                passage.sent(data.len());
            }
        }
        if !matches!(frame, Some(Ok(_))) || self.is_end_stream() {
            self.passage = None;
        }
        Poll::Ready(frame)
    }

    fn is_end_stream(&self) -> bool {
        let is_end = match &self.body {
            Limited::Yes(body) => body.is_end_stream(),
            Limited::No(body) => body.is_end_stream(),
        };
        is_end && self.rest.is_empty()
    }

    fn size_hint(&self) -> SizeHint {
        match &self.body {
            Limited::Yes(body) => body.size_hint(),
            Limited::No(body) => body.size_hint(),
        }
    }
}
