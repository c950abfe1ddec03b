//! Why something is not even asked: a status and a sentence, turned into an answer in one place.

use axum::http::StatusCode;
use axum::http::header::{HeaderValue, RETRY_AFTER};
use axum::response::Response;

use super::records::NotKept;
use crate::problem::problem;

/// A request that is refused, whatever its limits say.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Refusal {
    pub(crate) status: StatusCode,
    pub(crate) why: String,
    /// Whether it will be otherwise in a moment.
    is_soon_over: bool,
    /// Whether it may have been done all the same.
    pub(crate) may_be_done: bool,
}

/// What is told of a mistake repeats some of what was sent, and no more than this.
const WHY_CHARS_MAX: usize = 400;

impl Refusal {
    pub(crate) fn new(status: StatusCode, why: impl Into<String>) -> Refusal {
        let is_soon_over = status == StatusCode::SERVICE_UNAVAILABLE;
        Refusal { status, why: why.into(), is_soon_over, may_be_done: false }
    }

    /// The same, for whoever should try again in a moment.
    pub(crate) fn soon_over(self) -> Refusal {
        Refusal { is_soon_over: true, ..self }
    }

    /// The same, of something that may have been done all the same: nobody is asked to try again, since a second time
    /// could be one too many.
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
