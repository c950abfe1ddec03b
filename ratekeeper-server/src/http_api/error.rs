//! The errors of this API: a status and a reason, converted to a Problem Details response in one place.

use ratekeeper_rules::response::ResponseStatus;

use super::response::EndpointResponse;
use crate::runtime::metrics::EndpointResult;
use crate::runtime::problem::{problem, set_retry_soon};
use crate::runtime::records::RecordError;

/// A request that is rejected before any limit decides, or that failed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct HttpApiError {
    pub(crate) status: ResponseStatus,
    pub(crate) reason: String,
    /// Whether a retry may soon succeed.
    is_retryable: bool,
    /// Whether the request may have been executed in spite of the error.
    pub(crate) may_be_executed: bool,
}

/// Longest reason, in characters: it can quote parts of the request.
const REASON_CHARS_MAX: usize = 400;

impl HttpApiError {
    pub(crate) fn new(status: ResponseStatus, reason: impl Into<String>) -> HttpApiError {
        let is_retryable = status == ResponseStatus::ServiceUnavailable;
        HttpApiError { status, reason: reason.into(), is_retryable, may_be_executed: false }
    }

    /// The same, with `Retry-After`.
    pub(crate) fn retryable(self) -> HttpApiError {
        HttpApiError { is_retryable: true, ..self }
    }

    /// The same, for a request that may have been executed: without `Retry-After`, because a retry could execute it
    /// twice.
    pub(crate) fn maybe_executed(self) -> HttpApiError {
        HttpApiError { is_retryable: false, may_be_executed: true, ..self }
    }

    pub(super) fn into_response(self) -> EndpointResponse {
        let reason = match self.reason.char_indices().nth(REASON_CHARS_MAX) {
            Some((end, _)) => &self.reason[..end],
            None => &self.reason,
        };
        let mut response = problem(self.status, reason);
        if self.is_retryable {
            set_retry_soon(response.headers_mut());
        }
        EndpointResponse { response, outcome: EndpointResult::of_error(self.status.code()) }
    }
}

impl From<RecordError> for HttpApiError {
    fn from(reason: RecordError) -> HttpApiError {
        HttpApiError::new(ResponseStatus::ServiceUnavailable, reason.to_string())
    }
}
