//! `/v1/reserve` and `/v1/settle`: charge an estimate before the work, and correct it afterwards.
//!
//! A reservation that is not settled is refunded when it expires. It is charged before its record is stored and
//! refunded after its record is removed, so a process that ends in between leaves units charged until the limit
//! recovers them, but units that were not charged are never refunded. For the same reason, a reservation whose record
//! may or may not be stored is left to expire, and one whose record may or may not be taken is not refunded.
//!
//! A server that was suspended executes requests that were given up. So a settlement first reads its record and peeks at
//! its limit: only if both stores answer is the record taken. Until then, nothing has changed, and the caller can retry.

use std::borrow::Cow;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use axum::http::StatusCode;
use ratekeeper::tower::check::CheckMode;
use ratekeeper::{Store, Time};
use ratekeeper_config::push_seconds;
use ratekeeper_rules::response::ResponseStatus;
use tokio::select;
use tokio::sync::watch;
use tokio::time::{MissedTickBehavior, interval};

use super::check::ResolvedChecks;
use super::error::HttpApiError;
use super::idempotency::{ApiRequest, hex, random_bytes};
use super::request_body::{self, Key, LimitCheck, Reservation, ReserveRequest, SettleRequest};
use super::response::EndpointResponse;
use super::{HttpApi, HttpApiSnapshot, response};
use crate::runtime::http_listener::is_closing;
use crate::runtime::metrics::EndpointResult;
use crate::runtime::records::{RecordError, RecordStore, TakeResult};

/// Interval between sweeps for expired reservations.
const SWEEP_INTERVAL: Duration = Duration::from_secs(1);
/// Expired reservations fetched per batch.
const SWEEP_BATCH: usize = 256;
/// Attempts to charge the remaining budget, if concurrent requests take it first.
const CHARGE_ATTEMPTS_MAX: usize = 3;
/// Random bytes in a reservation id, so that it cannot be guessed.
const ID_BYTES: usize = 16;

/// Charges the limit and stores a reservation.
pub(super) async fn reserve<S: Store + Send + Sync + 'static, R: RecordStore>(
    api: Arc<HttpApi<S, R>>,
    request: ApiRequest,
) -> Result<EndpointResponse, HttpApiError> {
    let ReserveRequest { check, expires } = ReserveRequest::read(&request.body)?;
    let checks = [check];
    let snapshot = api.snapshot();
    let resolved = ResolvedChecks::new(&snapshot, &checks)?;
    let id = new_id()?;
    let result = resolved.decide(CheckMode::Charge).await?;
    if result.outcome.is_closed {
        let reason = "the store is unavailable and the failure policy is `closed`: nothing is reserved; retry. If the \
                      store executes the request later, its charge stands until the limit recovers it";
        return Err(HttpApiError::new(ResponseStatus::ServiceUnavailable, reason));
    }
    if !result.allowed {
        return Ok(resolved.response(
            &result,
            &checks,
            None,
            b",\"reservation\":null,\"expires_after\":null",
        ));
    }
    let [check] = &checks;
    let Key(parts) = &check.key;
    let is_charged =
        !result.is_degraded && result.limits.iter().all(|limit| limit.decision.is_some_and(|it| it.allowed));
    let at = result.outcome.at;
    let reservation = Reservation {
        limit: check.limit.clone().into_owned(),
        key: parts.iter().map(|part| part.clone().into_owned()).collect(),
        cost: check.cost,
        charged: if is_charged { check.cost } else { 0 },
        charged_at_ns: at.as_nanos(),
        expires_at_ns: at.saturating_add(expires).as_nanos(),
    };
    let record = serde_json::to_vec(&reservation).unwrap_or_default();
    match api.records.put(&id, &record, expires).await {
        Ok(()) => {}
        // The record was certainly not stored, so nothing else will refund it.
        Err(error @ (RecordError::Full | RecordError::NotSent(_))) => {
            refund(&*api, &snapshot, &reservation, reservation.charged).await;
            return Err(error.into());
        }
        // The record may be stored. Only the process that finds it expired may refund it.
        Err(error @ RecordError::Unavailable(_)) => return Err(HttpApiError::from(error).maybe_executed()),
    }
    let mut more = b",\"reservation\":".to_vec();
    response::push_text(&mut more, &id);
    more.extend_from_slice(b",\"expires_after\":");
    push_seconds(&mut more, expires);
    Ok(resolved.response(&result, &checks, None, &more))
}

fn new_id() -> Result<String, HttpApiError> {
    random_bytes::<ID_BYTES>().map(|bytes| hex(&bytes))
}

/// Corrects the charge of a reservation to the actual cost.
pub(super) async fn settle<S: Store + Send + Sync + 'static, R: RecordStore>(
    api: Arc<HttpApi<S, R>>,
    request: ApiRequest,
) -> Result<EndpointResponse, HttpApiError> {
    let SettleRequest { reservation: id, cost } = request_body::read(&request.body)?;
    let reservation = parse_record(api.records.read(&id).await.map_err(not_settled)?)?;
    let snapshot = api.snapshot();
    let rest = reservation.charged.saturating_sub(cost);
    if rest > 0 && is_store_unavailable(&snapshot, &reservation).await {
        return Err(not_settled("the store of the limit does not answer"));
    }
    match api.records.take(&id).await {
        Ok(taken) => parse_record(taken)?,
        Err(error @ (RecordError::NotSent(_) | RecordError::Full)) => return Err(not_settled(error)),
        Err(error @ RecordError::Unavailable(_)) => {
            let effect = if rest > 0 {
                api.metrics.lost_refunds.fetch_add(1, Ordering::Relaxed);
                tracing::warn!(limit = reservation.limit, "reservation possibly settled without its refund");
                "without its refund, and the charge stands until the limit recovers it"
            } else {
                "and nothing more is charged"
            };
            let reason = format!(
                "{error}; whether the reservation is settled is unknown. Retry: if the response is 409, it is settled \
                 {effect}"
            );
            return Err(HttpApiError::new(ResponseStatus::ServiceUnavailable, reason));
        }
    };
    let mut settlement = Settlement::default();
    if rest > 0 {
        if !refund(&*api, &snapshot, &reservation, rest).await {
            let reason = format!(
                "the reservation is settled, but the store did not confirm the refund of {rest} units; if it was not \
                 made, the charge stands until the limit recovers it. A retry gets 409"
            );
            return Err(HttpApiError::new(ResponseStatus::ServiceUnavailable, reason).maybe_executed());
        }
        settlement.refunded = rest;
    } else if reservation.charged == reservation.cost {
        settlement = charge_more(&snapshot, &reservation, cost - reservation.charged).await;
    }
    // If nothing was charged, nothing more is charged: the limit did not apply, is a shadow limit, or was
    // unavailable.
    let Settlement { refunded, uncovered, is_degraded } = settlement;
    let mut body = b"{\"limit\":".to_vec();
    response::push_text(&mut body, &reservation.limit);
    for (name, number) in [
        (",\"reserved\":", reservation.cost),
        (",\"cost\":", cost),
        (",\"refunded\":", refunded),
        (",\"uncovered\":", uncovered),
    ] {
        body.extend_from_slice(name.as_bytes());
        response::push_number(&mut body, number);
    }
    body.extend_from_slice(b",\"degraded\":");
    response::push_flag(&mut body, is_degraded);
    body.push(b'}');
    Ok(response::json(StatusCode::OK, EndpointResult::Allowed, body))
}

/// The error of a settlement that has changed nothing.
fn not_settled(error: impl fmt::Display) -> HttpApiError {
    let reason = format!("{error}; the reservation is unchanged, retry");
    HttpApiError::new(ResponseStatus::ServiceUnavailable, reason)
}

fn parse_record(found: TakeResult) -> Result<Reservation, HttpApiError> {
    let (status, reason) = match found {
        TakeResult::Record(record) => match serde_json::from_slice(&record) {
            Ok(reservation) => return Ok(reservation),
            Err(_) => (ResponseStatus::NotFound, "this reservation was stored by an incompatible version"),
        },
        TakeResult::Gone => {
            (ResponseStatus::Conflict, "this reservation was already settled, or expired and was refunded")
        }
        TakeResult::Unknown => {
            (ResponseStatus::NotFound, "unknown reservation; it may have been settled or refunded long ago")
        }
    };
    Err(HttpApiError::new(status, reason))
}

/// The outcome of a settlement.
#[derive(Clone, Copy, Debug, Default)]
struct Settlement {
    refunded: u32,
    /// Units used beyond the remaining budget.
    uncovered: u32,
    is_degraded: bool,
}

/// The check that a reservation stands for.
fn check_of(reservation: &Reservation, cost: u32) -> [LimitCheck<'_>; 1] {
    let key = reservation.key.iter().map(|part| Cow::Borrowed(part.as_str())).collect();
    [LimitCheck { limit: Cow::Borrowed(&reservation.limit), key: Key(key), cost }]
}

/// Charges the units used beyond the reservation, up to the remaining budget: a peek returns how many remain, so that
/// finished work is never denied and never causes a ban.
async fn charge_more<S: Store>(
    snapshot: &HttpApiSnapshot<S>,
    reservation: &Reservation,
    more: u32,
) -> Settlement {
    let mut settlement = Settlement { uncovered: more, ..Settlement::default() };
    for _ in 0..CHARGE_ATTEMPTS_MAX {
        if settlement.uncovered == 0 {
            break;
        }
        let peek = check_of(reservation, settlement.uncovered);
        let Ok(resolved) = ResolvedChecks::new(snapshot, &peek) else { break };
        let Ok(result) = resolved.decide(CheckMode::Peek).await else { break };
        settlement.is_degraded |= result.is_degraded;
        let [limit] = result.limits.as_slice() else { break };
        let available = match limit.decision {
            // The limit no longer applies to this key.
            None if !limit.is_on_deny_list => settlement.uncovered,
            Some(decision) if !limit.is_banned => decision.remaining.min(settlement.uncovered),
            _ => 0,
        };
        if available == 0 || result.is_degraded {
            break;
        }
        let charge = check_of(reservation, available);
        let Ok(resolved) = ResolvedChecks::new(snapshot, &charge) else { break };
        match resolved.decide(CheckMode::Charge).await {
            Ok(result) if result.allowed => settlement.uncovered -= available,
            Ok(_) => {}
            Err(_) => break,
        }
    }
    settlement
}

/// Refunds units of a reservation, as of the time of their charge. Returns whether it succeeded.
async fn refund<S: Store + Send + Sync + 'static, R: RecordStore>(
    api: &HttpApi<S, R>,
    snapshot: &HttpApiSnapshot<S>,
    reservation: &Reservation,
    cost: u32,
) -> bool {
    if cost == 0 {
        return true;
    }
    let checks = check_of(reservation, cost);
    // A limit that a reload removed has nothing to refund.
    let Ok(resolved) = ResolvedChecks::new(snapshot, &checks) else { return true };
    let at = Time::from_nanos(reservation.charged_at_ns);
    match resolved.layer.refund(&resolved.to_checks(), Some(at)).await {
        Ok(()) => true,
        // The error is not logged because it may contain the key.
        Err(_) => {
            api.metrics.lost_refunds.fetch_add(1, Ordering::Relaxed);
            tracing::warn!(limit = reservation.limit, "reservation not refunded: store unavailable");
            false
        }
    }
}

/// Whether the store of a limit is unavailable now.
async fn is_store_unavailable<S: Store>(snapshot: &HttpApiSnapshot<S>, reservation: &Reservation) -> bool {
    let peek = check_of(reservation, 0);
    let Ok(resolved) = ResolvedChecks::new(snapshot, &peek) else { return false };
    resolved.decide(CheckMode::Peek).await.is_ok_and(|result| result.is_degraded)
}

/// Stores expired records again, so that another process can refund them.
async fn store_again<S: Store + Send + Sync + 'static, R: RecordStore>(
    api: &HttpApi<S, R>,
    pending: Vec<Vec<u8>>,
) {
    for record in pending {
        let is_stored = match new_id() {
            Ok(id) => api.records.put(&id, &record, SWEEP_INTERVAL).await.is_ok(),
            Err(_) => false,
        };
        if !is_stored {
            api.metrics.lost_refunds.fetch_add(1, Ordering::Relaxed);
            tracing::warn!("expired reservation neither refunded nor stored for a retry");
        }
    }
}

/// The outcome of one batch of a sweep.
#[derive(Clone, Copy, Debug)]
struct SweepResult {
    reservations: usize,
    /// Whether more may be refunded now.
    has_more: bool,
}

/// Refunds the pending records, or else a batch of expired ones. If the store becomes unavailable, the rest stays in
/// `pending`: those refunds were not sent, so each is still made only once. No further records are fetched meanwhile.
async fn refund_batch<S: Store + Send + Sync + 'static, R: RecordStore>(
    api: &HttpApi<S, R>,
    pending: &mut Vec<Vec<u8>>,
) -> SweepResult {
    let snapshot = api.snapshot();
    let had_pending = !pending.is_empty();
    if let Some(Ok(first)) = pending.first().map(|record| serde_json::from_slice(record))
        && is_store_unavailable(&snapshot, &first).await
    {
        return SweepResult { reservations: 0, has_more: false };
    }
    if !had_pending {
        match api.records.take_due(SWEEP_BATCH).await {
            Ok(due) => *pending = due,
            Err(error) => {
                tracing::warn!(%error, "expired reservations not listed");
                return SweepResult { reservations: 0, has_more: false };
            }
        }
    }
    let mut result = SweepResult { reservations: 0, has_more: had_pending || pending.len() == SWEEP_BATCH };
    for record in pending.iter() {
        result.reservations += 1;
        api.metrics.expired_reservations.fetch_add(1, Ordering::Relaxed);
        if let Ok(reservation) = serde_json::from_slice::<Reservation>(record)
            && !refund(api, &snapshot, &reservation, reservation.charged).await
            && is_store_unavailable(&snapshot, &reservation).await
        {
            result.has_more = false;
            break;
        }
    }
    pending.drain(..result.reservations);
    result
}

/// Refunds all expired reservations, and returns how many there were.
pub async fn refund_expired<S: Store + Send + Sync + 'static, R: RecordStore>(api: &HttpApi<S, R>) -> usize {
    let (mut total, mut pending) = (0, Vec::new());
    loop {
        let SweepResult { reservations, has_more } = refund_batch(api, &mut pending).await;
        total += reservations;
        if !has_more {
            store_again(api, pending).await;
            return total;
        }
    }
}

/// Refunds expired reservations at intervals until the API ends. A batch in progress is completed.
pub(super) async fn sweep<S: Store + Send + Sync + 'static, R: RecordStore>(
    api: Arc<HttpApi<S, R>>,
    mut shutdown: watch::Receiver<bool>,
) {
    let mut ticks = interval(SWEEP_INTERVAL);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut pending = Vec::new();
    loop {
        select! {
            biased;
            () = is_closing(&mut shutdown) => break,
            _ = ticks.tick() => {}
        }
        while refund_batch(&*api, &mut pending).await.has_more && !*shutdown.borrow() {}
    }
    store_again(&*api, pending).await;
}
