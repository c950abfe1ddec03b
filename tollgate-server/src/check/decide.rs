//! `/v1/check`, `/v1/peek`, `/v1/reset`, `/v1/refund`: limits asked by name.

use std::sync::Arc;

use axum::http::StatusCode;
use axum::response::Response;
use smallvec::SmallVec;
use tollgate::tower::RateLimitLayer;
use tollgate::tower::direct::{Answered, Demand, How, Named, NotNamed, Which};
use tollgate::{Decision, Store};

use super::asked::{self, Ask, Checks, DenyStatus, Key};
use super::counts::Said;
use super::once::Asked;
use super::refusal::Refusal;
use super::{Snapshot, Source, told};

/// What was said to one ask.
#[derive(Clone, Copy, Debug)]
pub(super) struct One {
    /// None if the limit does not concern the key, or always denies it.
    pub(super) decision: Option<Decision>,
    pub(super) is_shadow: bool,
    pub(super) is_banned: bool,
    /// Whether the key is on the list of those that the limit always denies.
    pub(super) is_listed: bool,
}

impl One {
    pub(super) fn allowed(&self) -> bool {
        !self.is_listed && self.decision.is_none_or(|decision| decision.allowed)
    }
}

/// What was said to all of them.
#[derive(Clone, Debug)]
pub(super) struct Heard {
    pub(super) each: SmallVec<[One; 4]>,
    pub(super) allowed: bool,
    pub(super) is_degraded: bool,
    pub(super) answered: Answered,
}

/// Asks that were found among the limits of the file.
pub(super) struct Found<'a, S> {
    pub(super) layer: &'a RateLimitLayer<S>,
    each: SmallVec<[FoundAsk<'a>; 4]>,
}

struct FoundAsk<'a> {
    rule: usize,
    is_shadow: bool,
    values: SmallVec<[&'a str; 4]>,
    cost: u32,
}

impl FoundAsk<'_> {
    fn demand(&self) -> Demand<'_> {
        Demand { limit: Which::Rule(self.rule), key: Named::Values(&self.values), cost: self.cost }
    }
}

impl<'a, S: Store> Found<'a, S> {
    /// Looks the limits up by their names.
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

    /// All of them, as the layer wants them.
    pub(super) fn demands(&self) -> SmallVec<[Demand<'_>; 4]> {
        self.each.iter().map(FoundAsk::demand).collect()
    }

    /// Charges all of them or none, or looks.
    ///
    /// A key that a limit always denies is an answer here and no mistake: whoever asks wants to know whether somebody may
    /// go on. Nothing is charged then.
    pub(super) async fn hear(&self, how: How) -> Result<Heard, Refusal> {
        let mut open: SmallVec<[usize; 4]> = (0..self.each.len()).collect();
        let mut is_refused = false;
        let answered = loop {
            let demands: SmallVec<[Demand<'_>; 4]> = open.iter().map(|at| self.each[*at].demand()).collect();
            match self.layer.ask(&demands, if is_refused { How::Look } else { how }).await {
                Ok(answered) => break answered,
                Err(unasked) if unasked.why == NotNamed::Denied && unasked.demand < open.len() => {
                    let listed = open.remove(unasked.demand);
                    is_refused |= !self.each[listed].is_shadow;
                }
                Err(unasked) => {
                    let at = open.get(unasked.demand).copied().unwrap_or_default();
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
        for (at, said) in open.iter().zip(&answered.said) {
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

    /// An answer with its headers, and with what is still to be told at its end.
    pub(super) fn response(
        &self,
        heard: &Heard,
        asks: &[Ask<'_>],
        deny_status: Option<DenyStatus>,
        more: &[u8],
    ) -> Response {
        let mut body = told::begin(heard, asks);
        body.extend_from_slice(more);
        body.push(b'}');
        let said = if heard.allowed { Said::Yes } else { Said::No };
        let status = deny_status.filter(|_| !heard.allowed).map_or(StatusCode::OK, |status| status.0);
        let mut response = told::json(status, said, body);
        told::tell(&mut response, &self.layer.told(&heard.answered));
        response
    }
}

fn unknown(name: &str, known: &[&str]) -> Refusal {
    let short: String = name.chars().take(64).collect();
    let instead = match tollgate_config::nearest(name, known) {
        Some(near) => format!("did you mean `{near}`?"),
        None => "the limits are those of the configuration".to_owned(),
    };
    Refusal::new(StatusCode::NOT_FOUND, format!("there is no limit `{short}`; {instead}"))
}

/// Charges limits, all or none.
pub(super) async fn check<T: Source>(door: Arc<T>, asked: Asked) -> Result<Response, Refusal> {
    let Checks { asks, deny_status } = Checks::read(&asked.body)?;
    let known = &asked::CHECK_DENY_STATUSES;
    let in_query = DenyStatus::in_query(asked.query(), known)?;
    let deny_status = in_query.or_else(|| DenyStatus::of(deny_status?, known));
    let snapshot = door.snapshot();
    let found = Found::new(&snapshot, &asks)?;
    let heard = found.hear(How::Charge).await?;
    Ok(found.response(&heard, &asks, deny_status, b""))
}

/// Says what a check would be told, and takes nothing.
pub(super) async fn peek<T: Source>(door: Arc<T>, asked: Asked) -> Result<Response, Refusal> {
    let Checks { asks, deny_status } = Checks::read(&asked.body)?;
    let snapshot = door.snapshot();
    let found = Found::new(&snapshot, &asks)?;
    let heard = found.hear(How::Look).await?;
    let deny_status = deny_status.and_then(|status| DenyStatus::of(status, &asked::CHECK_DENY_STATUSES));
    Ok(found.response(&heard, &asks, deny_status, b""))
}

/// Forgets a key, bans included.
pub(super) async fn reset<T: Source>(door: Arc<T>, asked: Asked) -> Result<Response, Refusal> {
    let snapshot = door.snapshot();
    if !snapshot.settings.resets {
        let why =
            "resets are off: whoever may reset a key has no limit; allow them with `doors.http.resets: true`";
        return Err(Refusal::new(StatusCode::FORBIDDEN, why));
    }
    let asks: [Ask<'_>; 1] = [asked::read(&asked.body)?];
    change(&snapshot, &asks, Change::Forget).await
}

/// Gives back what is not known to have been charged at any time: the oldest that counts, and never more than there is.
pub(super) async fn refund<T: Source>(door: Arc<T>, asked: Asked) -> Result<Response, Refusal> {
    let snapshot = door.snapshot();
    if !snapshot.settings.refunds {
        let why = "refunds are off: whoever may give back has no limit; allow them with `doors.http.refunds: true`, \
                   or use `/v1/reserve` and `/v1/settle`";
        return Err(Refusal::new(StatusCode::FORBIDDEN, why));
    }
    let asks: [Ask<'_>; 1] = [asked::read(&asked.body)?];
    change(&snapshot, &asks, Change::GiveBack).await
}

/// What can be done to a key, beside charging it.
enum Change {
    Forget,
    GiveBack,
}

/// Does something to keys, and tells how they are then.
async fn change<'a, S: Store>(
    snapshot: &'a Snapshot<S>,
    asks: &'a [Ask<'a>],
    change: Change,
) -> Result<Response, Refusal> {
    let found = Found::new(snapshot, asks)?;
    // What is wrong with them is said before anything is done. Of a key that is always denied nothing was ever taken.
    let heard = found.hear(How::Look).await?;
    if heard.each.iter().any(|one| one.is_listed) {
        return Ok(found.response(&heard, asks, None, b""));
    }
    let done = match &change {
        Change::Forget => found.layer.forget(&found.demands()).await,
        Change::GiveBack => found.layer.give_back(&found.demands(), None).await,
    };
    if let Err(why) = done {
        let why = format!(
            "the store did not do it, or did not say so: {why}; look with `/v1/peek` before you ask for it again"
        );
        let refusal = Refusal::new(StatusCode::SERVICE_UNAVAILABLE, why);
        // To forget a key twice is to forget it once.
        return Err(match change {
            Change::Forget => refusal,
            Change::GiveBack => refusal.maybe_done(),
        });
    }
    let heard = found.hear(How::Look).await.map_err(Refusal::maybe_done)?;
    let mut response = found.response(&heard, asks, None, b"");
    // Whatever the limit says to the next one, this was done.
    response.extensions_mut().insert(Said::Yes);
    Ok(response)
}
