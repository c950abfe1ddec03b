//! The Envoy API: Envoy's rate limit service (RLS), over gRPC or as JSON.
//!
//! | module | what it is |
//! |---|---|
//! | `api` | the service: settings, reloads and the JSON form's route |
//! | `listener` | the listener: connections, health, reflection and graceful shutdown |
//! | `connection` | connections: bounded in number, and closed if silent or unauthenticated |
//! | `call_guard` | calls in flight: authenticated, and bounded in number |
//! | [`messages`] | the messages of Envoy's interface, and their wire format |
//! | `service` | the calls: the method that Envoy calls, health checks and reflection |
//! | `stream_timeout` | resets the streams of clients that do not read |
//! | `unary` | calls with one message in each direction |
//! | `not_grpc` | requests that are not gRPC calls |
//! | `bounds` | the bounds of a request |
//! | `descriptors` | resolves a request's descriptors to limits |
//! | `check` | checks the limits: charges all of them, or none |
//! | `reply` | builds the response to Envoy |
//! | `error` | the errors, and their gRPC codes |
//! | `json` | the same service as JSON over HTTP |
//! | `reflection` | gRPC reflection, for tools |
//! | `metrics` | metrics |

mod api;
mod bounds;
mod call_guard;
mod check;
mod connection;
mod descriptors;
mod error;
mod json;
mod listener;
pub mod messages;
mod metrics;
mod not_grpc;
mod reflection;
mod reply;
mod service;
mod stream_timeout;
mod unary;

use std::sync::Arc;

use bytes::Bytes;
use ratekeeper::Store;
use ratekeeper::tower::RatekeeperLayer;
use ratekeeper_config::envoy::Domain;
use ratekeeper_config::{EnvoyHeaderNames, Secret};

pub(crate) use self::api::{ADDRESS, EnvoyApi};
pub use self::bounds::{CALL_BYTES_MAX, DESCRIPTORS_MAX, ENTRIES_MAX, MESSAGE_BYTES_MAX, TEXT_BYTES_MAX};
use self::error::EnvoyApiError;
pub use self::json::json;
pub use self::listener::{EnvoyListenerSettings, listen};
use self::messages::{RateLimitRequest, RateLimitResponse};
pub use self::metrics::EnvoyMetrics;
use crate::runtime::metrics::CallOutcome;

/// The configuration during one call.
#[derive(Debug)]
pub struct EnvoySnapshot<S> {
    /// The limits that descriptors refer to by rule number; none if the configuration has none.
    pub layer: Option<RatekeeperLayer<S>>,
    /// The domains that Envoy can name.
    pub domains: Arc<Domains>,
    /// The settings.
    pub settings: Arc<EnvoyApiSettings>,
    /// The metrics, kept across reloads.
    pub metrics: Arc<EnvoyMetrics>,
}

/// Domains, by their names.
#[derive(Clone, Debug, Default)]
pub struct Domains(Box<[Domain]>);

impl Domains {
    /// Of two domains with the same name, either may be found.
    pub fn new(mut domains: Vec<Domain>) -> Domains {
        domains.sort_by(|one, other| one.name.cmp(&other.name));
        Domains(domains.into())
    }

    fn get(&self, name: &[u8]) -> Option<&Domain> {
        let at = self.0.binary_search_by(|domain| domain.name.as_bytes().cmp(name)).ok()?;
        self.0.get(at)
    }
}

/// The settings of the service.
#[derive(Clone, Debug, Default)]
pub struct EnvoyApiSettings {
    /// The bearer token that clients must send in the `authorization` metadata of a call.
    pub token: Option<Secret>,
    /// Whether descriptors with `is_negative_hits` refund units.
    pub refunds: bool,
    /// Whether the response has Envoy send the limit, what remains and the reset to clients.
    pub headers: bool,
    /// The names of these headers.
    pub header_names: EnvoyHeaderNames,
    /// The body that Envoy sends to denied clients; empty for Envoy's default.
    pub denied_body: Bytes,
}

/// Decides a request and counts its outcome.
async fn decide_and_count<S: Store + Send + Sync>(
    snapshot: &EnvoySnapshot<S>,
    request: &RateLimitRequest,
) -> Result<RateLimitResponse, EnvoyApiError> {
    let result = decide(snapshot, request).await;
    snapshot.metrics.count(match &result {
        Ok((_, outcome)) => *outcome,
        Err(_) => CallOutcome::Error,
    });
    result.map(|(response, _)| response)
}

async fn decide<S: Store + Send + Sync>(
    snapshot: &EnvoySnapshot<S>,
    request: &RateLimitRequest,
) -> Result<(RateLimitResponse, CallOutcome), EnvoyApiError> {
    bounds::validate(request)?;
    let descriptors = descriptors::resolve(&snapshot.domains, request, snapshot.settings.refunds)?;
    let verdict = check::decide(snapshot.layer.as_ref(), &descriptors).await?;
    Ok(reply::reply(request, &descriptors, &verdict, &snapshot.settings))
}
