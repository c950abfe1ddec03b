//! `/v1/check`, `/v1/peek`, `/v1/reset`, `/v1/refund`: operations on limits by name.

use std::sync::Arc;

use axum::http::StatusCode;
use axum::response::Response;
use ratekeeper::tower::RatekeeperLayer;
use ratekeeper::tower::check::{Check, CheckMode, CheckOutcome, KeyError, KeyInput, LimitRef};
use ratekeeper::{Decision, Store};
use smallvec::SmallVec;

use super::counts::Said;
use super::idempotency::Asked;
use super::refusal::Refusal;
use super::request::{self, Ask, Checks, DenyStatus, Key};
use super::{Snapshot, Source, response};

/// The decision on one check.
#[derive(Clone, Copy, Debug)]
pub(super) struct One {
    /// None if the limit does not apply to the key, or if its deny list names the key.
    pub(super) decision: Option<Decision>,
    pub(super) is_shadow: bool,
    pub(super) is_banned: bool,
    /// Whether the limit's deny list names the key.
    pub(super) is_listed: bool,
}

impl One {
    pub(super) fn allowed(&self) -> bool {
        !self.is_listed && self.decision.is_none_or(|decision| decision.allowed)
    }
}

/// The verdict over all checks of a request.
#[derive(Clone, Debug)]
pub(super) struct Heard {
    pub(super) each: SmallVec<[One; 4]>,
    pub(super) allowed: bool,
    pub(super) is_degraded: bool,
    pub(super) answered: CheckOutcome,
}

/// Checks, resolved to rules of the configuration.
pub(super) struct Found<'a, S> {
    pub(super) layer: &'a RatekeeperLayer<S>,
    each: SmallVec<[FoundAsk<'a>; 4]>,
}

struct FoundAsk<'a> {
    rule: usize,
    is_shadow: bool,
    values: SmallVec<[&'a str; 4]>,
    cost: u32,
}

impl FoundAsk<'_> {
    fn demand(&self) -> Check<'_> {
        Check { limit: LimitRef::Rule(self.rule), key: KeyInput::Values(&self.values), cost: self.cost }
    }
}

impl<'a, S: Store> Found<'a, S> {
    /// Looks up the limits by name.
    pub(super) fn new(snapshot: &'a Snapshot<S>, asks: &'a [Ask<'a>]) -> Result<Found<'a, S>, Refusal> {
        let Some(layer) = &snapshot.layer else {
            return Err(Refusal::new(StatusCode::NOT_FOUND, "the configuration has no limits"));
        };
        let found = asks.iter().map(|ask| {
            let mut rules = layer.rules().take(snapshot.settings.limits).enumerate();
            let (rule, found) = rules.find(|(_, rule)| rule.name == ask.limit).ok_or_else(|| {
                let known: Vec<&str> =
                    layer.rules().take(snapshot.settings.limits).map(|rule| rule.name.as_str()).collect();
                unknown(&ask.limit, &known)
            })?;
            let Key(parts) = &ask.key;
            let values = parts.iter().map(AsRef::as_ref).collect();
            Ok(FoundAsk { rule, is_shadow: found.is_shadow, values, cost: ask.cost })
        });
        Ok(Found { layer, each: found.collect::<Result<_, Refusal>>()? })
    }

    /// All checks, in the form that the layer takes.
    pub(super) fn demands(&self) -> SmallVec<[Check<'_>; 4]> {
        self.each.iter().map(FoundAsk::demand).collect()
    }

    /// Charges all limits or none, or peeks.
    ///
    /// A key on a limit's deny list is a denial and not an error: the caller wants a decision about that key. Nothing
    /// is charged then.
    pub(super) async fn hear(&self, how: CheckMode) -> Result<Heard, Refusal> {
        let mut open: SmallVec<[usize; 4]> = (0..self.each.len()).collect();
        let mut is_refused = false;
        let answered = loop {
            let demands: SmallVec<[Check<'_>; 4]> = open.iter().map(|at| self.each[*at].demand()).collect();
            match self.layer.check(&demands, if is_refused { CheckMode::Peek } else { how }).await {
                Ok(answered) => break answered,
                Err(unasked) if unasked.why == KeyError::Denied && unasked.check < open.len() => {
                    let listed = open.remove(unasked.check);
                    is_refused |= !self.each[listed].is_shadow;
                }
                Err(unasked) => {
                    let at = open.get(unasked.check).copied().unwrap_or_default();
                    let place = if self.each.len() > 1 { format!("checks[{at}]: ") } else { String::new() };
                    let why = format!("{place}{}", unasked.why);
                    return Err(Refusal::new(StatusCode::UNPROCESSABLE_ENTITY, why));
                }
            }
        };
        let listed = |ask: &FoundAsk<'_>| One {
            decision: None,
            is_shadow: ask.is_shadow,
            is_banned: false,
            is_listed: true,
        };
        let mut each: SmallVec<[One; 4]> = self.each.iter().map(listed).collect();
        for (at, said) in open.iter().zip(&answered.limits) {
            each[*at] = One {
                decision: said.decision,
                is_shadow: said.is_shadow,
                is_banned: said.is_banned,
                is_listed: false,
            };
        }
        let allowed = answered.allowed && !is_refused;
        Ok(Heard { each, allowed, is_degraded: answered.is_degraded, answered })
    }

    /// Builds the response with its headers; `more` is appended to the JSON object.
    pub(super) fn response(
        &self,
        heard: &Heard,
        asks: &[Ask<'_>],
        deny_status: Option<DenyStatus>,
        more: &[u8],
    ) -> Response {
        let mut body = response::begin(heard, asks);
        body.extend_from_slice(more);
        body.push(b'}');
        let said = if heard.allowed { Said::Yes } else { Said::No };
        let status = deny_status.filter(|_| !heard.allowed).map_or(StatusCode::OK, |status| status.0);
        let mut response = response::json(status, said, body);
        response::tell(&mut response, &self.layer.response(&heard.answered));
        response
    }
}

fn unknown(name: &str, known: &[&str]) -> Refusal {
    let short: String = name.chars().take(64).collect();
    let instead = match ratekeeper_config::nearest(name, known) {
        Some(near) => format!("did you mean `{near}`?"),
        None => "the limits are those of the configuration".to_owned(),
    };
    Refusal::new(StatusCode::NOT_FOUND, format!("there is no limit `{short}`; {instead}"))
}

/// Charges limits atomically.
pub(super) async fn check<T: Source>(api: Arc<T>, asked: Asked) -> Result<Response, Refusal> {
    let Checks { asks, deny_status } = Checks::read(&asked.body)?;
    let known = &request::CHECK_DENY_STATUSES;
    let in_query = DenyStatus::in_query(asked.query(), known)?;
    let deny_status = in_query.or_else(|| DenyStatus::of(deny_status?, known));
    let snapshot = api.snapshot();
    let found = Found::new(&snapshot, &asks)?;
    let heard = found.hear(CheckMode::Charge).await?;
    Ok(found.response(&heard, &asks, deny_status, b""))
}

/// Decides as a check would, without charging.
pub(super) async fn peek<T: Source>(api: Arc<T>, asked: Asked) -> Result<Response, Refusal> {
    let Checks { asks, deny_status } = Checks::read(&asked.body)?;
    let snapshot = api.snapshot();
    let found = Found::new(&snapshot, &asks)?;
    let heard = found.hear(CheckMode::Peek).await?;
    let deny_status = deny_status.and_then(|status| DenyStatus::of(status, &request::CHECK_DENY_STATUSES));
    Ok(found.response(&heard, &asks, deny_status, b""))
}

/// Resets a key, including its ban.
pub(super) async fn reset<T: Source>(api: Arc<T>, asked: Asked) -> Result<Response, Refusal> {
    let snapshot = api.snapshot();
    if !snapshot.settings.resets {
        let why = "resets are off, because a client that may reset a key has no limit; allow them with `apis.http.resets: true`";
        return Err(Refusal::new(StatusCode::FORBIDDEN, why));
    }
    let asks: [Ask<'_>; 1] = [request::read(&asked.body)?];
    change(&snapshot, &asks, Change::Forget).await
}

/// Refunds units without a known time of charge: from the oldest that still count, and never more than were charged.
pub(super) async fn refund<T: Source>(api: Arc<T>, asked: Asked) -> Result<Response, Refusal> {
    let snapshot = api.snapshot();
    if !snapshot.settings.refunds {
        let why = "refunds are off, because a client that may refund has no limit; allow them with `apis.http.refunds: true`, \
                   or use `/v1/reserve` and `/v1/settle`";
        return Err(Refusal::new(StatusCode::FORBIDDEN, why));
    }
    let asks: [Ask<'_>; 1] = [request::read(&asked.body)?];
    change(&snapshot, &asks, Change::GiveBack).await
}

/// An operation on a key other than charging.
enum Change {
    Forget,
    GiveBack,
}

/// Applies an operation and responds with the state of the keys after it.
async fn change<'a, S: Store>(
    snapshot: &'a Snapshot<S>,
    asks: &'a [Ask<'a>],
    change: Change,
) -> Result<Response, Refusal> {
    let found = Found::new(snapshot, asks)?;
    // Peek first, so that errors are reported before anything changes. A key on a deny list was never charged.
    let heard = found.hear(CheckMode::Peek).await?;
    if heard.each.iter().any(|one| one.is_listed) {
        return Ok(found.response(&heard, asks, None, b""));
    }
    let done = match &change {
        Change::Forget => found.layer.reset(&found.demands()).await,
        Change::GiveBack => found.layer.refund(&found.demands(), None).await,
    };
    if let Err(why) = done {
        let why = format!(
            "the store did not do it, or did not say so: {why}; look with `/v1/peek` before you ask for it again"
        );
        let refusal = Refusal::new(StatusCode::SERVICE_UNAVAILABLE, why);
        // A reset is idempotent, so it can be retried; a refund is not.
        return Err(match change {
            Change::Forget => refusal,
            Change::GiveBack => refusal.maybe_done(),
        });
    }
    let heard = found.hear(CheckMode::Peek).await.map_err(Refusal::maybe_done)?;
    let mut response = found.response(&heard, asks, None, b"");
    // The operation succeeded, even if the limit now denies the key.
    response.extensions_mut().insert(Said::Yes);
    Ok(response)
}
