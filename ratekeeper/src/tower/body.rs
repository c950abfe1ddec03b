//! The response body: the service's, or that of a denial.

use std::pin::Pin;
use std::task::{Context, Poll};

use bytes::Bytes;
use http_body::{Body, Frame, SizeHint};
use pin_project_lite::pin_project;

use crate::concurrency::Permits;

pin_project! {
    /// The body of a response from a [`RateLimit`](super::RateLimit): the service's body, or the body of a denial.
    ///
    /// ```
    /// use http_body::Body;
    /// use ratekeeper::tower::ResponseBody;
    ///
    /// // What a service with texts as bodies has behind a layer.
    /// fn length(body: &ResponseBody<String>) -> Option<u64> {
    ///     body.size_hint().exact()
    /// }
    /// assert_eq!(length(&ResponseBody::default()), Some(0));
    /// ```
    #[derive(Debug)]
    pub struct ResponseBody<B> {
        #[pin]
        kind: BodyKind<B>,
        // Permits, released when the body has ended.
        permits: Permits,
    }
}

pin_project! {
    #[derive(Debug)]
    #[project = ProjectedBody]
    enum BodyKind<B> {
        Inner { #[pin] body: B },
        Local { text: Option<Bytes> },
    }
}

impl<B> ResponseBody<B> {
    pub(crate) fn inner(body: B, permits: Permits) -> ResponseBody<B> {
        ResponseBody { kind: BodyKind::Inner { body }, permits }
    }

    /// The service's body; `None` if it is the body of a denial.
    pub fn service_body(&self) -> Option<&B> {
        match &self.kind {
            BodyKind::Inner { body } => Some(body),
            BodyKind::Local { .. } => None,
        }
    }

    pub(crate) fn local(text: impl Into<Bytes>) -> ResponseBody<B> {
        let text = text.into();
        ResponseBody {
            kind: BodyKind::Local { text: (!text.is_empty()).then_some(text) },
            permits: Permits::new(),
        }
    }
}

impl<B> Default for ResponseBody<B> {
    /// Returns an empty body.
    fn default() -> ResponseBody<B> {
        ResponseBody::local(Bytes::new())
    }
}

impl<B: Body> Body for ResponseBody<B>
where
    B::Data: From<Bytes>,
{
    type Data = B::Data;
    type Error = B::Error;

    fn poll_frame(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<B::Data>, B::Error>>> {
        let this = self.project();
        match this.kind.project() {
            ProjectedBody::Inner { body } => {
                let polled = body.poll_frame(context);
                if let Poll::Ready(None | Some(Err(_))) = polled {
                    this.permits.clear();
                }
                polled
            }
            ProjectedBody::Local { text } => {
                Poll::Ready(text.take().map(|text| Ok(Frame::data(text.into()))))
            }
        }
    }

    fn is_end_stream(&self) -> bool {
        match &self.kind {
            BodyKind::Inner { body } => body.is_end_stream(),
            BodyKind::Local { text } => text.is_none(),
        }
    }

    fn size_hint(&self) -> SizeHint {
        match &self.kind {
            BodyKind::Inner { body } => body.size_hint(),
            BodyKind::Local { text } => {
                SizeHint::with_exact(text.as_ref().map_or(0, |text| text.len() as u64))
            }
        }
    }
}
