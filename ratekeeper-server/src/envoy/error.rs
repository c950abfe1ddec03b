//! The errors of this API, and their gRPC codes and HTTP statuses.

use ratekeeper::tower::check::KeyError;
use ratekeeper_rules::response::ResponseStatus;
use tonic::{Code, Status};

use super::bounds::{CALL_BYTES_MAX, DESCRIPTORS_MAX, ENTRIES_MAX, MESSAGE_BYTES_MAX, TEXT_BYTES_MAX};

/// Why a request is rejected, shed or failed. Descriptors are numbered from 0.
#[derive(Debug, thiserror::Error)]
pub(super) enum EnvoyApiError {
    #[error("`domain` is empty: send the name of a configured domain")]
    EmptyDomain,
    #[error("`domain` is longer than {} bytes", TEXT_BYTES_MAX)]
    DomainTooLong,
    #[error("`descriptors` is empty: send at least one")]
    EmptyDescriptors,
    #[error("more than {max} descriptors: send at most {max}", max = DESCRIPTORS_MAX)]
    TooManyDescriptors,
    #[error("descriptors[{descriptor}] has more than {max} entries: send at most {max}", max = ENTRIES_MAX)]
    TooManyEntries { descriptor: usize },
    #[error("descriptors[{descriptor}] has a key or a value longer than {max} bytes", max = TEXT_BYTES_MAX)]
    EntryTooLong { descriptor: usize },
    /// An inline limit has an unknown unit.
    #[error(
        "descriptors[{descriptor}].limit.unit is {unit}: send 1 to 6 (SECOND, MINUTE, HOUR, DAY, MONTH, YEAR)"
    )]
    UnknownUnit { descriptor: usize, unit: i32 },
    /// A refund, while refunds are disabled.
    #[error(
        "descriptors[{descriptor}] has `is_negative_hits`, but refunds are disabled: enable them with \
         `refunds: true` in this API's configuration"
    )]
    RefundsDisabled { descriptor: usize },
    #[error("the message is not a RateLimitRequest: {0}")]
    InvalidMessage(String),
    #[error("the message is longer than {} bytes", CALL_BYTES_MAX)]
    MessageTooLong,
    #[error("the message is compressed: send it without compression")]
    Compressed,
    #[error("the call took too long")]
    TimedOut,
    #[error("unknown method: call ShouldRateLimit")]
    UnknownMethod,
    #[error("the body is not a RateLimitRequest in JSON: {0}")]
    InvalidJson(#[source] serde_json::Error),
    #[error("the body is longer than {} bytes", MESSAGE_BYTES_MAX)]
    BodyTooLong,
    #[error("missing or wrong token: send `authorization: Bearer <token>`")]
    Unauthenticated,
    /// Too many calls are in flight: shed, to bound memory.
    #[error("too many calls in flight: retry later")]
    Overloaded,
    /// The store is unavailable and the failure policy is `closed`. Envoy applies its `failure_mode_deny` only if the
    /// call fails; it would allow a response with an unknown code.
    #[error("the store is unavailable: retry later, or configure a failure policy")]
    StoreUnavailable,
    /// The limits do not match the descriptors that refer to them.
    #[error("the limits do not match their descriptors: {0}")]
    Mismatch(#[source] KeyError),
}

impl EnvoyApiError {
    fn code(&self) -> Code {
        match self {
            EnvoyApiError::Overloaded => Code::ResourceExhausted,
            EnvoyApiError::MessageTooLong => Code::OutOfRange,
            EnvoyApiError::Compressed => Code::Unimplemented,
            EnvoyApiError::TimedOut => Code::DeadlineExceeded,
            other => i32::from(other.status().grpc_code().number).into(),
        }
    }

    /// The HTTP status.
    pub(super) fn status(&self) -> ResponseStatus {
        match self {
            EnvoyApiError::StoreUnavailable | EnvoyApiError::Overloaded => ResponseStatus::ServiceUnavailable,
            EnvoyApiError::Mismatch(_) => ResponseStatus::InternalServerError,
            EnvoyApiError::RefundsDisabled { .. } => ResponseStatus::Forbidden,
            EnvoyApiError::Unauthenticated => ResponseStatus::Unauthorized,
            EnvoyApiError::UnknownMethod => ResponseStatus::NotFound,
            EnvoyApiError::BodyTooLong => ResponseStatus::PayloadTooLarge,
            _ => ResponseStatus::BadRequest,
        }
    }

    /// The number of the gRPC code.
    pub(super) fn grpc_code(&self) -> i32 {
        self.code().into()
    }
}

impl From<EnvoyApiError> for Status {
    fn from(error: EnvoyApiError) -> Status {
        Status::new(error.code(), error.to_string())
    }
}

#[cfg(test)]
mod tests {
    use std::error::Error;

    use serde::de::Error as _;

    use super::*;

    #[test]
    fn error_names_the_bound_and_has_its_cause_as_source() {
        let too_many = EnvoyApiError::TooManyEntries { descriptor: 3 };
        assert_eq!(too_many.to_string(), "descriptors[3] has more than 32 entries: send at most 32");
        let invalid = EnvoyApiError::InvalidJson(serde_json::Error::custom("a reason"));
        assert_eq!(invalid.to_string(), "the body is not a RateLimitRequest in JSON: a reason");
        assert!(invalid.source().is_some_and(|source| source.is::<serde_json::Error>()));
    }
}
