//! The rate limit service of Envoy: proxies ask over gRPC, or as JSON, whether a request may pass.
//!
//! | module | what it is |
//! |---|---|
//! | `listen` | the door itself: connections, health, reflection, and the end |
//! | `connection` | those who ask: so many at once, and none that says nothing |
//! | `bounded` | calls under way: only of those who may call, and so many at once |
//! | [`messages`] | the messages of Envoy's interface, and their form on the wire |
//! | `service` | the method that is called |
//! | `bounds` | what is too much to ask |
//! | `wanted` | a request's descriptors -> what is wanted of which limits |
//! | `decide` | what is wanted -> what the limits say, all of them charged or none |
//! | `reply` | what the limits said -> what Envoy is told |
//! | `refused` | what is not decided, and why |
//! | `json` | the same over HTTP |
//! | `reflection` | what the service is called and takes, for tools that ask |
//! | `counts` | what has happened |

mod bounded;
mod bounds;
mod connection;
mod counts;
mod decide;
mod json;
mod listen;
pub mod messages;
mod reflection;
mod refused;
mod reply;
mod service;
mod wanted;

use std::sync::Arc;

use bytes::Bytes;
use tollgate::Store;
use tollgate::tower::RateLimitLayer;
use tollgate_config::Secret;
use tollgate_config::envoy::Domain;

pub use self::bounds::{CALL_BYTES_MAX, DESCRIPTORS_MAX, ENTRIES_MAX, MESSAGE_BYTES_MAX, TEXT_BYTES_MAX};
pub use self::counts::Counts;
use self::counts::Outcome;
pub use self::json::json;
pub use self::listen::{Settings, listen};
use self::messages::{RateLimitRequest, RateLimitResponse};
use self::refused::Refused;

/// Where the service learns what there is: each call asks anew, so that a new configuration counts from the next one on.
pub trait Source: Send + Sync + 'static {
    /// Where the states of keys are.
    type Store: Store + Send + Sync + 'static;

    /// What there is now.
    fn snapshot(&self) -> Snapshot<Self::Store>;
}

/// What a call is decided by.
#[derive(Debug)]
pub struct Snapshot<S> {
    /// The limits that descriptors refer to by the numbers of their rules; none if there is nothing to decide by.
    pub layer: Option<RateLimitLayer<S>>,
    /// What Envoy may ask about.
    pub domains: Arc<Domains>,
    /// What else was configured.
    pub options: Arc<Options>,
    /// What has happened. It goes on counting when the configuration changes.
    pub counts: Arc<Counts>,
}

/// Domains, by their names.
#[derive(Clone, Debug, Default)]
pub struct Domains(Box<[Domain]>);

impl Domains {
    /// Of two with the same name, either may be found.
    pub fn new(mut domains: Vec<Domain>) -> Domains {
        domains.sort_by(|one, other| one.name.cmp(&other.name));
        Domains(domains.into())
    }

    fn get(&self, name: &[u8]) -> Option<&Domain> {
        let at = self.0.binary_search_by(|domain| domain.name.as_bytes().cmp(name)).ok()?;
        self.0.get(at)
    }
}

/// What was configured of the service.
#[derive(Clone, Debug, Default)]
pub struct Options {
    /// What those have to know who ask: over gRPC, in the metadata `authorization`, behind `Bearer `.
    pub token: Option<Secret>,
    /// Whether descriptors with `is_negative_hits` give back what was taken.
    pub refunds: bool,
    /// Whether Envoy is told to send `x-ratelimit-limit`, `-remaining` and `-reset` to clients.
    pub headers: bool,
    /// What Envoy is told to send to clients as the body of a denial; empty for its own.
    pub denied_body: Bytes,
}

/// Decides a request, and counts it.
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
    let wanted = wanted::of(&snapshot.domains, request, snapshot.options.refunds)?;
    let decided = decide::decide(snapshot.layer.as_ref(), &wanted).await?;
    Ok(reply::reply(request, &wanted, &decided, &snapshot.options))
}
