//! The errors of this API, and their gRPC codes and HTTP statuses.

use std::fmt;

use ratekeeper_rules::response::ResponseStatus;
use tonic::{Code, Status};

use super::bounds::{DESCRIPTORS_MAX, ENTRIES_MAX, TEXT_BYTES_MAX};

/// Why a request is rejected, shed or failed. Descriptors are numbered from 0.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum EnvoyApiError {
    EmptyDomain,
    DomainTooLong,
    EmptyDescriptors,
    TooManyDescriptors,
    TooManyEntries {
        descriptor: usize,
    },
    EntryTooLong {
        descriptor: usize,
    },
    /// An inline limit has an unknown unit.
    UnknownUnit {
        descriptor: usize,
        unit: i32,
    },
    /// A refund, while refunds are disabled.
    RefundsDisabled {
        descriptor: usize,
    },
    InvalidMessage(String),
    UnknownMethod,
    InvalidJson(String),
    BodyTooLong,
    Unauthenticated,
    /// Too many calls are in flight: shed, to bound memory.
    Overloaded,
    /// The store is unavailable and the failure policy is `closed`. Envoy applies its `failure_mode_deny` only if the
    /// call fails; it would allow a response with an unknown code.
    StoreUnavailable,
    /// The limits do not match the descriptors that refer to them.
    Mismatch(String),
}

impl EnvoyApiError {
    fn code(&self) -> Code {
        match self {
            EnvoyApiError::Overloaded => Code::ResourceExhausted,
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

impl fmt::Display for EnvoyApiError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            EnvoyApiError::EmptyDomain => {
                write!(f, "`domain` is empty: send the name of a configured domain")
            }
            EnvoyApiError::DomainTooLong => write!(f, "`domain` is longer than {TEXT_BYTES_MAX} bytes"),
            EnvoyApiError::EmptyDescriptors => write!(f, "`descriptors` is empty: send at least one"),
            EnvoyApiError::TooManyDescriptors => {
                write!(f, "more than {DESCRIPTORS_MAX} descriptors: send at most {DESCRIPTORS_MAX}")
            }
            EnvoyApiError::TooManyEntries { descriptor } => {
                let too_many = format_args!("more than {ENTRIES_MAX} entries");
                write!(f, "descriptors[{descriptor}] has {too_many}: send at most {ENTRIES_MAX}")
            }
            EnvoyApiError::EntryTooLong { descriptor } => {
                write!(f, "descriptors[{descriptor}] has a key or a value longer than {TEXT_BYTES_MAX} bytes")
            }
            EnvoyApiError::UnknownUnit { descriptor, unit } => {
                let units = "1 to 6 (SECOND, MINUTE, HOUR, DAY, MONTH, YEAR)";
                write!(f, "descriptors[{descriptor}].limit.unit is {unit}: send {units}")
            }
            EnvoyApiError::RefundsDisabled { descriptor } => {
                let reason = "has `is_negative_hits`, but refunds are disabled";
                let help = "enable them with `refunds: true` in this API's configuration";
                write!(f, "descriptors[{descriptor}] {reason}: {help}")
            }
            EnvoyApiError::InvalidMessage(reason) => {
                write!(f, "the message is not a RateLimitRequest: {reason}")
            }
            EnvoyApiError::UnknownMethod => write!(f, "unknown method: call ShouldRateLimit"),
            EnvoyApiError::InvalidJson(reason) => {
                write!(f, "the body is not a RateLimitRequest in JSON: {reason}")
            }
            EnvoyApiError::BodyTooLong => {
                write!(f, "the body is longer than {} bytes", super::MESSAGE_BYTES_MAX)
            }
            EnvoyApiError::Unauthenticated => {
                write!(f, "missing or wrong token: send `authorization: Bearer <token>`")
            }
            EnvoyApiError::Overloaded => write!(f, "too many calls in flight: retry later"),
            EnvoyApiError::StoreUnavailable => {
                write!(f, "the store is unavailable: retry later, or configure a failure policy")
            }
            EnvoyApiError::Mismatch(reason) => {
                write!(f, "the limits do not match their descriptors: {reason}")
            }
        }
    }
}
