//! The Envoy API: Envoy's rate limit service (RLS), over gRPC or as JSON.
//!
//! | module | what it is |
//! |---|---|
//! | `listen` | the listener: connections, health, reflection and graceful shutdown |
//! | `connection` | connections: bounded in number, and closed if silent or unauthenticated |
//! | `bounded` | calls in flight: authenticated, and bounded in number |
//! | [`messages`] | the messages of Envoy's interface, and their wire format |
//! | `service` | the gRPC method |
//! | `bounds` | the bounds of a request |
//! | `descriptors` | resolves a request's descriptors to limits |
//! | `decide` | checks the limits: charges all of them, or none |
//! | `reply` | builds the response to Envoy |
//! | `refused` | the errors, and their gRPC codes |
//! | `json` | the same service as JSON over HTTP |
//! | `reflection` | gRPC reflection, for tools |
//! | `counts` | metrics |

mod bounded;
mod bounds;
mod connection;
mod counts;
mod decide;
mod descriptors;
mod json;
mod listen;
pub mod messages;
mod reflection;
mod refused;
mod reply;
mod service;

use std::sync::Arc;

use bytes::Bytes;
use ratekeeper::Store;
use ratekeeper::tower::RatekeeperLayer;
use ratekeeper_config::Secret;
use ratekeeper_config::envoy::Domain;

pub use self::bounds::{CALL_BYTES_MAX, DESCRIPTORS_MAX, ENTRIES_MAX, MESSAGE_BYTES_MAX, TEXT_BYTES_MAX};
pub use self::counts::Counts;
use self::counts::Outcome;
pub use self::json::json;
pub use self::listen::{Settings, listen};
use self::messages::{RateLimitRequest, RateLimitResponse};
use self::refused::Refused;

/// What the service decides by. It is consulted on every call, so that a reload takes effect from the next call on.
pub trait Source: Send + Sync + 'static {
    /// The store of the limits.
    type Store: Store + Send + Sync + 'static;

    /// The current configuration.
    fn snapshot(&self) -> Snapshot<Self::Store>;
}

/// The configuration during one call.
#[derive(Debug)]
pub struct Snapshot<S> {
    /// The limits that descriptors refer to by rule number; none if the configuration has none.
    pub layer: Option<RatekeeperLayer<S>>,
    /// The domains that Envoy can name.
    pub domains: Arc<Domains>,
    /// The other settings.
    pub options: Arc<Options>,
    /// The metrics, kept across reloads.
    pub counts: Arc<Counts>,
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
pub struct Options {
    /// The bearer token that clients must send in the `authorization` metadata of a call.
    pub token: Option<Secret>,
    /// Whether descriptors with `is_negative_hits` refund units.
    pub refunds: bool,
    /// Whether the response has Envoy send `x-ratelimit-limit`, `-remaining` and `-reset` to clients.
    pub headers: bool,
    /// The body that Envoy sends to denied clients; empty for Envoy's default.
    pub denied_body: Bytes,
}

/// Decides a request, and counts the outcome.
async fn answer<S: Store + Send + Sync>(
    snapshot: &Snapshot<S>,
    request: &RateLimitRequest,
) -> Result<RateLimitResponse, Refused> {
    let answered = answer_uncounted(snapshot, request).await;
    snapshot.counts.count(match &answered {
        Ok((_, outcome)) => *outcome,
        Err(_) => Outcome::Error,
    });
    answered.map(|(response, _)| response)
}

async fn answer_uncounted<S: Store + Send + Sync>(
    snapshot: &Snapshot<S>,
    request: &RateLimitRequest,
) -> Result<(RateLimitResponse, Outcome), Refused> {
    bounds::check(request)?;
    let wanted = descriptors::of(&snapshot.domains, request, snapshot.options.refunds)?;
    let decided = decide::decide(snapshot.layer.as_ref(), &wanted).await?;
    Ok(reply::reply(request, &wanted, &decided, &snapshot.options))
}
