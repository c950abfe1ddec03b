//! The response body: the service's, or that of a denial.

use std::pin::Pin;
use std::task::{Context, Poll};

use bytes::Bytes;
use http_body::{Body, Frame, SizeHint};
use pin_project_lite::pin_project;

use crate::slots::Held;

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
        kind: Kind<B>,
        // Permits, released when the body has ended.
        slots: Held,
    }
}

pin_project! {
    #[derive(Debug)]
    #[project = Projected]
    enum Kind<B> {
        Inner { #[pin] body: B },
        Told { text: Option<Bytes> },
    }
}

impl<B> ResponseBody<B> {
    pub(crate) fn inner(body: B, slots: Held) -> ResponseBody<B> {
        ResponseBody { kind: Kind::Inner { body }, slots }
    }

    pub(crate) fn told(text: impl Into<Bytes>) -> ResponseBody<B> {
        let text = text.into();
        ResponseBody { kind: Kind::Told { text: (!text.is_empty()).then_some(text) }, slots: Held::new() }
    }
}

impl<B> Default for ResponseBody<B> {
    /// Returns an empty body.
    fn default() -> ResponseBody<B> {
        ResponseBody::told(Bytes::new())
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
            Projected::Inner { body } => {
                let polled = body.poll_frame(context);
                if let Poll::Ready(None | Some(Err(_))) = polled {
                    this.slots.clear();
                }
                polled
            }
            Projected::Told { text } => Poll::Ready(text.take().map(|text| Ok(Frame::data(text.into())))),
        }
    }

    fn is_end_stream(&self) -> bool {
        match &self.kind {
            Kind::Inner { body } => body.is_end_stream(),
            Kind::Told { text } => text.is_none(),
        }
    }

    fn size_hint(&self) -> SizeHint {
        match &self.kind {
            Kind::Inner { body } => body.size_hint(),
            Kind::Told { text } => SizeHint::with_exact(text.as_ref().map_or(0, |text| text.len() as u64)),
        }
    }
}
