//! The statuses of responses that Ratekeeper itself sends, and the gRPC codes that gRPC clients get instead.

/// A status of our own responses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ResponseStatus {
    /// The HTTP status.
    pub status: u16,
    /// The number of the gRPC code, as in `grpc-status`.
    pub grpc_code: &'static str,
    /// What it means.
    pub meaning: &'static str,
}

const INVALID_ARGUMENT: &str = "3";
const PERMISSION_DENIED: &str = "7";
const RESOURCE_EXHAUSTED: &str = "8";
const UNIMPLEMENTED: &str = "12";
const INTERNAL: &str = "13";
const UNAVAILABLE: &str = "14";
const UNKNOWN: &str = "2";

/// All statuses for which gRPC clients get a code of their own. Of several with the same code, the first is the one
/// that the code stands for.
pub const STATUSES: &[ResponseStatus] = &[
    ResponseStatus {
        status: 400,
        grpc_code: INVALID_ARGUMENT,
        meaning: "malformed, or read in different ways",
    },
    ResponseStatus { status: 403, grpc_code: PERMISSION_DENIED, meaning: "on a deny list, or without a key" },
    ResponseStatus { status: 429, grpc_code: RESOURCE_EXHAUSTED, meaning: "denied by a limit" },
    ResponseStatus { status: 404, grpc_code: UNIMPLEMENTED, meaning: "no route" },
    ResponseStatus { status: 500, grpc_code: INTERNAL, meaning: "the peer address is unknown" },
    ResponseStatus {
        status: 503,
        grpc_code: UNAVAILABLE,
        meaning: "overloaded, or the store is unavailable",
    },
    ResponseStatus { status: 502, grpc_code: UNAVAILABLE, meaning: "the upstream failed" },
    ResponseStatus { status: 504, grpc_code: UNAVAILABLE, meaning: "the upstream timed out" },
];

/// The gRPC code of an HTTP status.
///
/// ```
/// use ratekeeper_rules::response::{grpc_code, status_of_grpc};
///
/// assert_eq!((grpc_code(429), grpc_code(408)), ("8", "2"));
/// assert_eq!((status_of_grpc(b"14"), status_of_grpc(b"2")), (Some(503), None));
/// ```
pub fn grpc_code(status: u16) -> &'static str {
    STATUSES.iter().find(|it| it.status == status).map_or(UNKNOWN, |it| it.grpc_code)
}

/// The HTTP status that a gRPC code stands for.
pub fn status_of_grpc(code: &[u8]) -> Option<u16> {
    STATUSES.iter().find(|it| it.grpc_code.as_bytes() == code).map(|it| it.status)
}
