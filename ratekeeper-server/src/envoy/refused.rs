//! The errors of this API, and their gRPC codes and HTTP statuses.

use std::fmt;

use http::StatusCode;
use tonic::{Code, Status};

use super::bounds::{DESCRIPTORS_MAX, ENTRIES_MAX, TEXT_BYTES_MAX};

/// Why a request is rejected. Descriptors are numbered from 0.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Refused {
    NoDomain,
    LongDomain,
    NoDescriptors,
    ManyDescriptors,
    ManyEntries {
        descriptor: usize,
    },
    LongEntry {
        descriptor: usize,
    },
    /// An inline limit has an unknown unit.
    Unit {
        descriptor: usize,
        unit: i32,
    },
    /// A refund where refunds are not allowed.
    Refund {
        descriptor: usize,
    },
    NotMessage(String),
    NoMethod,
    NotJson(String),
    LongBody,
    NoToken,
    /// Too many calls are in flight: shed, to bound memory.
    Busy,
    /// The store is unavailable and the failure policy is `closed`. Envoy applies its `failure_mode_deny` only if the
    /// call fails; it would allow a response with an unknown code.
    Away,
    /// The limits do not match the descriptors that refer to them.
    Broken(String),
}

impl Refused {
    fn code(&self) -> Code {
        match self {
            Refused::Away => Code::Unavailable,
            Refused::Broken(_) => Code::Internal,
            Refused::Refund { .. } => Code::PermissionDenied,
            Refused::NoToken => Code::Unauthenticated,
            Refused::NoMethod => Code::Unimplemented,
            Refused::Busy => Code::ResourceExhausted,
            _ => Code::InvalidArgument,
        }
    }

    /// The HTTP status.
    pub(super) fn status(&self) -> StatusCode {
        match self {
            Refused::Away | Refused::Busy => StatusCode::SERVICE_UNAVAILABLE,
            Refused::Broken(_) => StatusCode::INTERNAL_SERVER_ERROR,
            Refused::Refund { .. } => StatusCode::FORBIDDEN,
            Refused::NoToken => StatusCode::UNAUTHORIZED,
            Refused::LongBody => StatusCode::PAYLOAD_TOO_LARGE,
            _ => StatusCode::BAD_REQUEST,
        }
    }

    /// The number of the gRPC code.
    pub(super) fn number(&self) -> i32 {
        self.code().into()
    }
}

impl From<Refused> for Status {
    fn from(refused: Refused) -> Status {
        Status::new(refused.code(), refused.to_string())
    }
}

impl fmt::Display for Refused {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Refused::NoDomain => write!(f, "`domain` is empty: send the name of a configured domain"),
            Refused::LongDomain => write!(f, "`domain` is longer than {TEXT_BYTES_MAX} bytes"),
            Refused::NoDescriptors => write!(f, "`descriptors` is empty: send at least one"),
            Refused::ManyDescriptors => {
                write!(f, "there are more than {DESCRIPTORS_MAX} descriptors: send at most {DESCRIPTORS_MAX}")
            }
            Refused::ManyEntries { descriptor } => {
                let too_many = format_args!("more than {ENTRIES_MAX} entries");
                write!(f, "descriptors[{descriptor}] has {too_many}: send at most {ENTRIES_MAX}")
            }
            Refused::LongEntry { descriptor } => {
                let what = "has a key or a value that is longer than";
                write!(f, "descriptors[{descriptor}] {what} {TEXT_BYTES_MAX} bytes")
            }
            Refused::Unit { descriptor, unit } => {
                let units = "1 to 6 (SECOND, MINUTE, HOUR, DAY, MONTH, YEAR)";
                write!(f, "descriptors[{descriptor}].limit.unit is {unit}: send {units}")
            }
            Refused::Refund { descriptor } => {
                let what = "has `is_negative_hits`, and refunds are off";
                let instead = "to allow it, write `refunds: true` where the configuration opens this API";
                write!(f, "descriptors[{descriptor}] {what}: {instead}")
            }
            Refused::NotMessage(why) => write!(f, "the message is not a RateLimitRequest: {why}"),
            Refused::NoMethod => write!(f, "there is no such method: call ShouldRateLimit"),
            Refused::NotJson(why) => write!(f, "the body is no RateLimitRequest in JSON: {why}"),
            Refused::LongBody => {
                write!(f, "the body is longer than {} bytes", super::MESSAGE_BYTES_MAX)
            }
            Refused::NoToken => {
                write!(f, "send the token that the configuration has, as in `authorization: Bearer ...`")
            }
            Refused::Busy => write!(f, "too many calls in flight: retry later"),
            Refused::Away => {
                write!(f, "the store is unavailable: retry later, or configure a failure policy")
            }
            Refused::Broken(why) => write!(f, "the limits do not fit their descriptors: {why}"),
        }
    }
}
