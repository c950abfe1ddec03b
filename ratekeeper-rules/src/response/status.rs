//! The statuses of responses that Ratekeeper itself sends, and the gRPC codes that gRPC clients get instead.

/// A gRPC code.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GrpcCode {
    /// Its number, as in `grpc-status`.
    pub number: u8,
    /// The number as text.
    pub text: &'static str,
    /// Its name.
    pub name: &'static str,
}

/// Defines the gRPC codes that our responses have.
macro_rules! grpc_codes {
    ($($NAME:ident = $number:literal,)*) => {
        impl GrpcCode {$(
            #[doc = concat!("`", stringify!($NAME), "`.")]
            pub const $NAME: GrpcCode =
                GrpcCode { number: $number, text: stringify!($number), name: stringify!($NAME) };
        )*}
    };
}

grpc_codes! {
    UNKNOWN = 2,
    INVALID_ARGUMENT = 3,
    PERMISSION_DENIED = 7,
    RESOURCE_EXHAUSTED = 8,
    UNIMPLEMENTED = 12,
    INTERNAL = 13,
    UNAVAILABLE = 14,
    UNAUTHENTICATED = 16,
}

/// A part of Ratekeeper that sends responses.
#[cfg(test)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Sender {
    /// The middleware, also as a part of the gateway and of `/v1/authorize`.
    Middleware,
    Gateway,
    HttpApi,
    EnvoyApi,
    Admin,
}

/// Defines the statuses, each with its number, title, gRPC code, meaning and senders.
macro_rules! statuses {
    ($($Status:ident = $code:literal $title:literal $grpc:ident [$($Sender:ident)*] $meaning:literal;)*) => {
        /// A status of our own responses.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        #[non_exhaustive]
        pub enum ResponseStatus {
            $(#[doc = concat!(stringify!($code), ": ", $meaning, ".")] $Status,)*
        }

        impl ResponseStatus {
            /// All statuses. Of several with the same gRPC code, the first is the one that the code stands for.
            pub const ALL: &[ResponseStatus] = &[$(ResponseStatus::$Status),*];

            /// The number of the status.
            pub const fn code(self) -> u16 {
                match self {
                    $(ResponseStatus::$Status => $code,)*
                }
            }

            /// The title of a Problem Details body with this status.
            pub const fn title(self) -> &'static str {
                match self {
                    $(ResponseStatus::$Status => $title,)*
                }
            }

            /// The code that gRPC clients get instead.
            pub const fn grpc_code(self) -> GrpcCode {
                match self {
                    $(ResponseStatus::$Status => GrpcCode::$grpc,)*
                }
            }

            #[cfg(test)]
            fn meaning(self) -> &'static str {
                match self {
                    $(ResponseStatus::$Status => $meaning,)*
                }
            }

            #[cfg(test)]
            fn senders(self) -> &'static [Sender] {
                match self {
                    $(ResponseStatus::$Status => &[$(Sender::$Sender),*],)*
                }
            }
        }
    };
}

statuses! {
    BadRequest = 400 "Bad Request" INVALID_ARGUMENT [Middleware Gateway HttpApi EnvoyApi]
        "malformed, or read in different ways";
    Unauthorized = 401 "Unauthorized" UNAUTHENTICATED [HttpApi EnvoyApi Admin]
        "missing or wrong token";
    Forbidden = 403 "Forbidden" PERMISSION_DENIED [Middleware HttpApi EnvoyApi Admin]
        "on a deny list, or without a key; of an API, a client or a request that the configuration does not permit";
    TooManyRequests = 429 "Too Many Requests" RESOURCE_EXHAUSTED [Middleware HttpApi EnvoyApi]
        "denied by a limit";
    NotFound = 404 "Not Found" UNIMPLEMENTED [Gateway HttpApi EnvoyApi Admin]
        "no route; of an API or the admin listener, an unknown path, limit or reservation";
    MethodNotAllowed = 405 "Method Not Allowed" UNKNOWN [Gateway HttpApi Admin]
        "the method TRACE; of an API or the admin listener, a method that the path does not have";
    RequestTimeout = 408 "Request Timeout" UNKNOWN [Gateway HttpApi EnvoyApi]
        "the request body did not arrive in time";
    Conflict = 409 "Conflict" UNKNOWN [HttpApi]
        "the reservation is settled already, or a request with this idempotency key is in flight";
    PayloadTooLarge = 413 "Payload Too Large" INVALID_ARGUMENT [HttpApi EnvoyApi]
        "the request body is too long";
    UnsupportedMediaType = 415 "Unsupported Media Type" UNKNOWN [HttpApi EnvoyApi]
        "not JSON; of the Envoy API, not a gRPC call";
    MisdirectedRequest = 421 "Misdirected Request" UNKNOWN [HttpApi Admin]
        "a request for a host name, and no token is configured";
    UnprocessableEntity = 422 "Unprocessable Entity" UNKNOWN [HttpApi]
        "JSON with an invalid field";
    HeaderFieldsTooLarge = 431 "Request Header Fields Too Large" UNKNOWN [Gateway]
        "the request head is too long";
    ClientClosedRequest = 499 "Client Closed Request" UNKNOWN []
        "never sent: the access log's status of a request whose client disconnected before a response";
    InternalServerError = 500 "Internal Server Error" INTERNAL [Middleware Gateway HttpApi EnvoyApi Admin]
        "the peer address is unknown, or an internal error";
    NotImplemented = 501 "Not Implemented" UNKNOWN [Gateway]
        "the method CONNECT, or a transfer coding other than `chunked`";
    ServiceUnavailable = 503 "Service Unavailable" UNAVAILABLE [Middleware Gateway HttpApi EnvoyApi Admin]
        "overloaded, no connection to the upstream is free, or the store is unavailable; of `/readyz`, during a graceful shutdown";
    BadGateway = 502 "Bad Gateway" UNAVAILABLE [Gateway]
        "the upstream failed";
    GatewayTimeout = 504 "Gateway Timeout" UNAVAILABLE [Gateway]
        "the upstream timed out";
}

impl ResponseStatus {
    /// The status that a gRPC code stands for, by the code's text in `grpc-status`.
    ///
    /// ```
    /// use ratekeeper_rules::response::{GrpcCode, ResponseStatus};
    ///
    /// assert_eq!(ResponseStatus::TooManyRequests.grpc_code(), GrpcCode::RESOURCE_EXHAUSTED);
    /// assert_eq!(ResponseStatus::of_grpc(b"14"), Some(ResponseStatus::ServiceUnavailable));
    /// assert_eq!(ResponseStatus::of_grpc(b"2"), None);
    /// ```
    pub fn of_grpc(code: &[u8]) -> Option<ResponseStatus> {
        let is_it = |it: &&ResponseStatus| it.grpc_code().text.as_bytes() == code;
        ResponseStatus::ALL.iter().find(is_it).copied().filter(|it| it.grpc_code() != GrpcCode::UNKNOWN)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn name(sender: &Sender) -> &'static str {
        match sender {
            Sender::Middleware => "middleware",
            Sender::Gateway => "gateway",
            Sender::HttpApi => "HTTP API",
            Sender::EnvoyApi => "Envoy API",
            Sender::Admin => "admin listener",
        }
    }

    #[test]
    fn reference_of_statuses_is_generated() {
        let mut page = "# Statuses\n\nThis page lists the statuses of the responses that Ratekeeper itself sends. A gRPC \
                        client gets the code instead.\nIt is generated from \
                        `ratekeeper-rules/src/response/status.rs`; `cargo xtask generate` writes it.\n\n\
                        The middleware is also a part of the gateway and of `/v1/authorize`. The status of a denial can \
                        be configured:\n`deny_response` of a limit, `deny_status` of the HTTP API. The Envoy API has its \
                        statuses only if it is called as JSON;\nover gRPC it sends the codes, but \
                        `RESOURCE_EXHAUSTED` if it is overloaded.\nThe title is that of the Problem Details body.\n\n\
                        | status | title | gRPC code | meaning | sent by |\n|---|---|---|---|---|\n"
            .to_owned();
        let mut all = ResponseStatus::ALL.to_vec();
        all.sort_unstable_by_key(|status| status.code());
        for status in all {
            let GrpcCode { number, name: code, .. } = status.grpc_code();
            let senders = status.senders().iter().map(name).collect::<Vec<_>>().join(", ");
            let (meaning, title) = (status.meaning(), status.title());
            page.push_str(&format!(
                "| {} | {title} | {number} `{code}` | {meaning} | {senders} |\n",
                status.code()
            ));
        }
        testbed::assert_generated("docs/reference/statuses.md", &page);
    }
}
