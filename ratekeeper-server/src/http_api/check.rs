//! `/v1/check`, `/v1/peek`, `/v1/reset`, `/v1/refund`: operations on limits by name.

use std::sync::Arc;

use axum::http::StatusCode;
use ratekeeper::tower::RatekeeperLayer;
use ratekeeper::tower::check::{Check, CheckMode, CheckOutcome, KeyError, KeyInput, LimitRef, TierOutcome};
use ratekeeper::{Decision, Store};
use ratekeeper_rules::response::ResponseStatus;
use smallvec::SmallVec;

use super::error::HttpApiError;
use super::idempotency::ApiRequest;
use super::request_body::{self, CheckRequest, DenyStatus, Key, LimitCheck};
use super::response::EndpointResponse;
use super::{HttpApi, HttpApiSnapshot, response};
use crate::runtime::metrics::EndpointResult;
use crate::runtime::records::RecordStore;

/// The decision on one check.
#[derive(Clone, Copy, Debug)]
pub(super) struct LimitResult {
    /// None if the limit does not apply to the key, or if the key is on the limit's deny list.
    pub(super) decision: Option<Decision>,
    pub(super) is_shadow: bool,
    pub(super) is_banned: bool,
    /// Whether the key is on the limit's deny list.
    pub(super) is_on_deny_list: bool,
}

impl LimitResult {
    pub(super) fn allowed(&self) -> bool {
        !self.is_on_deny_list && self.decision.is_none_or(|decision| decision.allowed)
    }
}

/// The verdict over all checks of a request.
#[derive(Clone, Debug)]
pub(super) struct CheckResult {
    pub(super) limits: SmallVec<[LimitResult; 4]>,
    pub(super) allowed: bool,
    pub(super) is_degraded: bool,
    pub(super) outcome: CheckOutcome,
    /// For each check, the tiers that may apply to its key; empty if it charged.
    pub(super) tiers: Vec<SmallVec<[TierOutcome; 2]>>,
}

/// Checks, resolved to rules of the configuration.
pub(super) struct ResolvedChecks<'a, S> {
    pub(super) layer: &'a RatekeeperLayer<S>,
    checks: SmallVec<[ResolvedCheck<'a>; 4]>,
}

struct ResolvedCheck<'a> {
    rule: usize,
    is_shadow: bool,
    values: SmallVec<[&'a str; 4]>,
    cost: u32,
}

impl ResolvedCheck<'_> {
    fn to_check(&self) -> Check<'_> {
        Check { limit: LimitRef::Rule(self.rule), key: KeyInput::Values(&self.values), cost: self.cost }
    }
}

impl<'a, S: Store> ResolvedChecks<'a, S> {
    /// Looks up the limits by name.
    pub(super) fn new(
        snapshot: &'a HttpApiSnapshot<S>,
        checks: &'a [LimitCheck<'a>],
    ) -> Result<ResolvedChecks<'a, S>, HttpApiError> {
        let Some(layer) = &snapshot.layer else {
            return Err(HttpApiError::new(ResponseStatus::NotFound, "the configuration has no limits"));
        };
        let resolved = checks.iter().map(|check| {
            let mut rules = layer.rules().take(snapshot.settings.limits).enumerate();
            let (number, rule) = rules.find(|(_, rule)| rule.name == check.limit).ok_or_else(|| {
                let names: Vec<&str> =
                    layer.rules().take(snapshot.settings.limits).map(|rule| rule.name.as_str()).collect();
                unknown_limit(&check.limit, &names)
            })?;
            let Key(parts) = &check.key;
            let values = parts.iter().map(AsRef::as_ref).collect();
            Ok(ResolvedCheck { rule: number, is_shadow: rule.is_shadow, values, cost: check.cost })
        });
        Ok(ResolvedChecks { layer, checks: resolved.collect::<Result<_, HttpApiError>>()? })
    }

    /// The same checks with the cost 0, to report the state of their keys.
    fn without_cost(mut self) -> ResolvedChecks<'a, S> {
        self.checks.iter_mut().for_each(|check| check.cost = 0);
        self
    }

    /// The arguments of the layer's methods.
    pub(super) fn to_checks(&self) -> SmallVec<[Check<'_>; 4]> {
        self.checks.iter().map(ResolvedCheck::to_check).collect()
    }

    /// Charges all limits or none, or peeks.
    ///
    /// A key on a limit's deny list is a denial and not an error: the caller requests a decision about that key.
    /// Nothing is charged then.
    pub(super) async fn decide(&self, mode: CheckMode) -> Result<CheckResult, HttpApiError> {
        // The indices of the checks whose keys are not on a deny list.
        let mut decidable: SmallVec<[usize; 4]> = (0..self.checks.len()).collect();
        let mut is_denied = false;
        let outcome = loop {
            let checks: SmallVec<[Check<'_>; 4]> =
                decidable.iter().map(|index| self.checks[*index].to_check()).collect();
            match self.layer.check(&checks, if is_denied { CheckMode::Peek } else { mode }).await {
                Ok(outcome) => break outcome,
                Err(error) if error.why == KeyError::Denied && error.check < decidable.len() => {
                    let on_deny_list = decidable.remove(error.check);
                    is_denied |= !self.checks[on_deny_list].is_shadow;
                }
                Err(error) => {
                    let index = decidable.get(error.check).copied().unwrap_or_default();
                    let prefix =
                        if self.checks.len() > 1 { format!("checks[{index}]: ") } else { String::new() };
                    let reason = format!("{prefix}{}", error.why);
                    return Err(HttpApiError::new(ResponseStatus::UnprocessableEntity, reason));
                }
            }
        };
        let on_deny_list = |check: &ResolvedCheck<'_>| LimitResult {
            decision: None,
            is_shadow: check.is_shadow,
            is_banned: false,
            is_on_deny_list: true,
        };
        let mut limits: SmallVec<[LimitResult; 4]> = self.checks.iter().map(on_deny_list).collect();
        for (index, limit) in decidable.iter().zip(&outcome.limits) {
            limits[*index] = LimitResult {
                decision: limit.decision,
                is_shadow: limit.is_shadow,
                is_banned: limit.is_banned,
                is_on_deny_list: false,
            };
        }
        let allowed = outcome.allowed && !is_denied;
        Ok(CheckResult { limits, allowed, is_degraded: outcome.is_degraded, outcome, tiers: Vec::new() })
    }

    /// Decides without charging, and adds the tiers of each limit: which of them applies depends on the request, which
    /// the caller does not send.
    async fn peek(&self) -> Result<CheckResult, HttpApiError> {
        let mut result = self.decide(CheckMode::Peek).await?;
        for check in &self.checks {
            // A key that does not fit was an error of the peek.
            result.tiers.push(self.layer.peek_tiers(&check.to_check()).await.unwrap_or_default());
        }
        Ok(result)
    }

    /// Builds the response with its headers; `more` is appended to the JSON object.
    pub(super) fn response(
        &self,
        result: &CheckResult,
        checks: &[LimitCheck<'_>],
        deny_status: Option<DenyStatus>,
        more: &[u8],
    ) -> EndpointResponse {
        let mut body = response::begin(result, checks);
        body.extend_from_slice(more);
        body.push(b'}');
        let outcome = if result.allowed { EndpointResult::Allowed } else { EndpointResult::Denied };
        let status = deny_status.filter(|_| !result.allowed).map_or(StatusCode::OK, |status| status.0);
        let mut response = response::json(status, outcome, body);
        response::add_headers(&mut response.response, &self.layer.response(&result.outcome));
        response
    }
}

fn unknown_limit(name: &str, names: &[&str]) -> HttpApiError {
    let short: String = name.chars().take(64).collect();
    let help = match ratekeeper_config::nearest(name, names) {
        Some(nearest) => format!("did you mean `{nearest}`?"),
        None => "send the name of a configured limit".to_owned(),
    };
    HttpApiError::new(ResponseStatus::NotFound, format!("unknown limit `{short}`; {help}"))
}

/// Charges limits atomically.
pub(super) async fn check<S: Store + Send + Sync + 'static, R: RecordStore>(
    api: Arc<HttpApi<S, R>>,
    request: ApiRequest,
) -> Result<EndpointResponse, HttpApiError> {
    let CheckRequest { checks, deny_status } = CheckRequest::read(&request.body)?;
    let statuses = &request_body::CHECK_DENY_STATUSES;
    let in_query = DenyStatus::in_query(request.query(), statuses)?;
    let deny_status = in_query.or_else(|| DenyStatus::of(deny_status?, statuses));
    let snapshot = api.snapshot();
    let resolved = ResolvedChecks::new(&snapshot, &checks)?;
    let result = resolved.decide(CheckMode::Charge).await?;
    Ok(resolved.response(&result, &checks, deny_status, b""))
}

/// Decides as a check would, without charging.
pub(super) async fn peek<S: Store + Send + Sync + 'static, R: RecordStore>(
    api: Arc<HttpApi<S, R>>,
    request: ApiRequest,
) -> Result<EndpointResponse, HttpApiError> {
    let CheckRequest { checks, deny_status } = CheckRequest::read(&request.body)?;
    let snapshot = api.snapshot();
    let resolved = ResolvedChecks::new(&snapshot, &checks)?;
    let result = resolved.peek().await?;
    let deny_status =
        deny_status.and_then(|status| DenyStatus::of(status, &request_body::CHECK_DENY_STATUSES));
    Ok(resolved.response(&result, &checks, deny_status, b""))
}

/// Resets a key in all tiers, including its ban.
pub(super) async fn reset<S: Store + Send + Sync + 'static, R: RecordStore>(
    api: Arc<HttpApi<S, R>>,
    request: ApiRequest,
) -> Result<EndpointResponse, HttpApiError> {
    let snapshot = api.snapshot();
    if !snapshot.settings.resets {
        let reason = "resets are disabled, because a client that can reset a key has no limit; enable them with \
                      `apis.http.resets: true`";
        return Err(HttpApiError::new(ResponseStatus::Forbidden, reason));
    }
    let checks: [LimitCheck<'_>; 1] = [request_body::read(&request.body)?];
    apply(&snapshot, &checks, KeyOperation::Reset).await
}

/// Refunds units without a known time of charge: from the oldest that still count, and never more than were charged.
pub(super) async fn refund<S: Store + Send + Sync + 'static, R: RecordStore>(
    api: Arc<HttpApi<S, R>>,
    request: ApiRequest,
) -> Result<EndpointResponse, HttpApiError> {
    let snapshot = api.snapshot();
    if !snapshot.settings.refunds {
        let reason = "refunds are disabled, because a client that can refund has no limit; enable them with \
                      `apis.http.refunds: true`, or use `/v1/reserve` and `/v1/settle`";
        return Err(HttpApiError::new(ResponseStatus::Forbidden, reason));
    }
    let checks: [LimitCheck<'_>; 1] = [request_body::read(&request.body)?];
    apply(&snapshot, &checks, KeyOperation::Refund).await
}

/// An operation on a key other than charging.
enum KeyOperation {
    Reset,
    Refund,
}

/// Applies an operation and responds with the state of the keys after it.
async fn apply<'a, S: Store>(
    snapshot: &'a HttpApiSnapshot<S>,
    checks: &'a [LimitCheck<'a>],
    operation: KeyOperation,
) -> Result<EndpointResponse, HttpApiError> {
    let resolved = ResolvedChecks::new(snapshot, checks)?;
    // Peek first, so that errors are reported before anything changes. A key on a deny list was never charged.
    let result = resolved.peek().await?;
    if result.limits.iter().any(|limit| limit.is_on_deny_list) {
        return Ok(resolved.response(&result, checks, None, b""));
    }
    let done = match &operation {
        KeyOperation::Reset => resolved.layer.reset(&resolved.to_checks()).await,
        KeyOperation::Refund => resolved.layer.refund(&resolved.to_checks(), None).await,
    };
    if let Err(error) = done {
        let reason = format!(
            "the store failed or did not confirm the operation: {error}; call `/v1/peek` before a retry"
        );
        let failed = HttpApiError::new(ResponseStatus::ServiceUnavailable, reason);
        // A reset is idempotent, so it can be retried; a refund is not.
        return Err(match operation {
            KeyOperation::Reset => failed,
            KeyOperation::Refund => failed.maybe_executed(),
        });
    }
    // A peek at the refunded cost would be about another request of that cost.
    let state = resolved.without_cost();
    let result = state.peek().await.map_err(HttpApiError::maybe_executed)?;
    // The operation succeeded, even if the limit now denies the key.
    let outcome = EndpointResult::Allowed;
    Ok(EndpointResponse { outcome, ..state.response(&result, checks, None, b"") })
}
