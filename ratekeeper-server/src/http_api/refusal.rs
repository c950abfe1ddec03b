//! Rejections: a status and a reason, converted to a response in one place.

use axum::http::StatusCode;
use axum::http::header::{HeaderValue, RETRY_AFTER};
use axum::response::Response;

use super::records::NotKept;
use crate::problem::problem;

/// A request that is rejected before any limit decides.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Refusal {
    pub(crate) status: StatusCode,
    pub(crate) why: String,
    /// Whether a retry may soon succeed.
    is_soon_over: bool,
    /// Whether the request may have been executed all the same.
    pub(crate) may_be_done: bool,
}

/// Longest reason, in characters: it can quote parts of the request.
const WHY_CHARS_MAX: usize = 400;

impl Refusal {
    pub(crate) fn new(status: StatusCode, why: impl Into<String>) -> Refusal {
        let is_soon_over = status == StatusCode::SERVICE_UNAVAILABLE;
        Refusal { status, why: why.into(), is_soon_over, may_be_done: false }
    }

    /// The same, with a `Retry-After` of one second.
    pub(crate) fn soon_over(self) -> Refusal {
        Refusal { is_soon_over: true, ..self }
    }

    /// The same, for a request that may have been executed: without `Retry-After`, because a retry could execute it
    /// twice.
    pub(crate) fn maybe_done(self) -> Refusal {
        Refusal { is_soon_over: false, may_be_done: true, ..self }
    }

    pub(crate) fn into_response(self) -> Response {
        let why = match self.why.char_indices().nth(WHY_CHARS_MAX) {
            Some((end, _)) => &self.why[..end],
            None => &self.why,
        };
        let mut response = problem(self.status, why);
        if self.is_soon_over {
            response.headers_mut().insert(RETRY_AFTER, HeaderValue::from_static("1"));
        }
        response
    }
}

impl From<NotKept> for Refusal {
    fn from(why: NotKept) -> Refusal {
        Refusal::new(StatusCode::SERVICE_UNAVAILABLE, why.to_string())
    }
}
