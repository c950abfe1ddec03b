//! `/v1/reserve` and `/v1/settle`: charge an estimate before the work, and correct it afterwards.
//!
//! A reservation that is not settled is refunded when it expires. It is charged before its record is stored and
//! refunded after its record is removed, so a process that ends in between leaves units charged until the limit
//! recovers them, but units that were not charged are never refunded. For the same reason, a reservation whose record
//! may or may not be stored is left to expire.

use std::borrow::Cow;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use axum::http::StatusCode;
use axum::response::Response;
use ratekeeper::tower::check::CheckMode;
use ratekeeper::{Store, Time};
use ratekeeper_config::push_seconds;
use tokio::select;
use tokio::sync::watch;
use tokio::time::{MissedTickBehavior, interval};

use super::counts::Said;
use super::decide::Found;
use super::idempotency::{Asked, hex, new_number};
use super::records::{NotKept, Records, Taken};
use super::refusal::Refusal;
use super::request::{self, Ask, Key, Reservation, Reserve, Settle};
use super::serve::is_closing;
use super::{Snapshot, Source, response};

/// Interval between sweeps for expired reservations.
const SWEEP_EVERY: Duration = Duration::from_secs(1);
/// Expired reservations fetched per batch.
const SWEPT_AT_ONCE: usize = 256;
/// Attempts to charge the remaining budget, if concurrent requests take it first.
const TRIES_MAX: usize = 3;
/// Random bytes in a reservation id, so that it cannot be guessed.
const ID_BYTES: usize = 16;

/// Charges the limit and stores a reservation.
pub(super) async fn reserve<T: Source>(api: Arc<T>, asked: Asked) -> Result<Response, Refusal> {
    let Reserve { ask, expires } = Reserve::read(&asked.body)?;
    let asks = [ask];
    let snapshot = api.snapshot();
    let found = Found::new(&snapshot, &asks)?;
    let id = new_id()?;
    let heard = found.hear(CheckMode::Charge).await?;
    if !heard.allowed {
        return Ok(found.response(&heard, &asks, None, b",\"reservation\":null,\"expires_after\":null"));
    }
    let [ask] = &asks;
    let Key(parts) = &ask.key;
    let is_taken =
        !heard.is_degraded && heard.each.iter().all(|one| one.decision.is_some_and(|it| it.allowed));
    let at = heard.answered.at;
    let reservation = Reservation {
        limit: ask.limit.clone().into_owned(),
        key: parts.iter().map(|part| part.clone().into_owned()).collect(),
        cost: ask.cost,
        taken: if is_taken { ask.cost } else { 0 },
        at_ns: at.as_nanos(),
        expires_at_ns: at.saturating_add(expires).as_nanos(),
    };
    let record = serde_json::to_vec(&reservation).unwrap_or_default();
    match api.records().put(&id, &record, expires).await {
        Ok(()) => {}
        // The record was certainly not stored, so nothing else will refund it.
        Err(why @ (NotKept::Full | NotKept::NotSent(_))) => {
            refund(&*api, &snapshot, &reservation, reservation.taken).await;
            return Err(why.into());
        }
        // The record may be stored. Only the process that finds it expired may refund it.
        Err(why @ NotKept::StoreUnavailable(_)) => return Err(Refusal::from(why).maybe_done()),
    }
    let mut more = b",\"reservation\":".to_vec();
    response::push_text(&mut more, &id);
    more.extend_from_slice(b",\"expires_after\":");
    push_seconds(&mut more, expires);
    Ok(found.response(&heard, &asks, None, &more))
}

fn new_id() -> Result<String, Refusal> {
    new_number::<ID_BYTES>().map(|number| hex(&number))
}

/// Corrects the charge of a reservation to the actual cost.
pub(super) async fn settle<T: Source>(api: Arc<T>, asked: Asked) -> Result<Response, Refusal> {
    let Settle { reservation: id, cost } = request::read(&asked.body)?;
    let record = match api.records().take(&id).await? {
        Taken::Record(record) => record,
        Taken::Gone => {
            let why = "this reservation was settled already, or expired and was refunded";
            return Err(Refusal::new(StatusCode::CONFLICT, why));
        }
        Taken::Unknown => {
            let why = "there is no such reservation; it may have been settled or refunded long ago";
            return Err(Refusal::new(StatusCode::NOT_FOUND, why));
        }
    };
    let Ok(reservation) = serde_json::from_slice::<Reservation>(&record) else {
        return Err(Refusal::new(
            StatusCode::NOT_FOUND,
            "this reservation is of a kind that is not known here",
        ));
    };
    let snapshot = api.snapshot();
    let mut settled = Settled::default();
    if cost < reservation.taken {
        let rest = reservation.taken - cost;
        settled.is_degraded = !refund(&*api, &snapshot, &reservation, rest).await;
        settled.refunded = if settled.is_degraded { 0 } else { rest };
    } else if reservation.taken == reservation.cost {
        settled = charge_more(&snapshot, &reservation, cost - reservation.taken).await;
    }
    // If nothing was charged, nothing more is charged: the limit did not apply, is a shadow limit, or was
    // unavailable.
    let Settled { refunded, uncovered, is_degraded } = settled;
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
    Ok(response::json(StatusCode::OK, Said::Yes, body))
}

/// The outcome of a settlement.
#[derive(Clone, Copy, Debug, Default)]
struct Settled {
    refunded: u32,
    /// Units used beyond the remaining budget.
    uncovered: u32,
    is_degraded: bool,
}

/// The check that a reservation stands for.
fn ask_of(reservation: &Reservation, cost: u32) -> [Ask<'_>; 1] {
    let key = reservation.key.iter().map(|part| Cow::Borrowed(part.as_str())).collect();
    [Ask { limit: Cow::Borrowed(&reservation.limit), key: Key(key), cost }]
}

/// Charges the units used beyond the reservation, up to the remaining budget: a peek returns how many remain, so that
/// finished work is never denied and never causes a ban.
async fn charge_more<S: Store>(snapshot: &Snapshot<S>, reservation: &Reservation, more: u32) -> Settled {
    let mut settled = Settled { uncovered: more, ..Settled::default() };
    for _ in 0..TRIES_MAX {
        if settled.uncovered == 0 {
            break;
        }
        let look = ask_of(reservation, settled.uncovered);
        let Ok(found) = Found::new(snapshot, &look) else { break };
        let Ok(heard) = found.hear(CheckMode::Peek).await else { break };
        settled.is_degraded |= heard.is_degraded;
        let [one] = heard.each.as_slice() else { break };
        let there = match one.decision {
            // The limit no longer applies to this key.
            None if !one.is_listed => settled.uncovered,
            Some(decision) if !one.is_banned => decision.remaining.min(settled.uncovered),
            _ => 0,
        };
        if there == 0 || heard.is_degraded {
            break;
        }
        let charge = ask_of(reservation, there);
        let Ok(found) = Found::new(snapshot, &charge) else { break };
        match found.hear(CheckMode::Charge).await {
            Ok(heard) if heard.allowed => settled.uncovered -= there,
            Ok(_) => {}
            Err(_) => break,
        }
    }
    settled
}

/// Refunds units of a reservation, as of the time of their charge. Returns whether it succeeded.
async fn refund<T: Source>(
    api: &T,
    snapshot: &Snapshot<T::Store>,
    reservation: &Reservation,
    cost: u32,
) -> bool {
    if cost == 0 {
        return true;
    }
    let asks = ask_of(reservation, cost);
    // A limit that a reload removed has nothing to refund.
    let Ok(found) = Found::new(snapshot, &asks) else { return true };
    let at = Time::from_nanos(reservation.at_ns);
    match found.layer.refund(&found.demands(), Some(at)).await {
        Ok(()) => true,
        // The error is not logged because it may contain the key.
        Err(_) => {
            api.counts().lost.fetch_add(1, Ordering::Relaxed);
            tracing::warn!(limit = reservation.limit, "reservation not refunded: store unavailable");
            false
        }
    }
}

/// Whether the store of a limit is unavailable now.
async fn is_away<S: Store>(snapshot: &Snapshot<S>, reservation: &Reservation) -> bool {
    let look = ask_of(reservation, 0);
    let Ok(found) = Found::new(snapshot, &look) else { return false };
    found.hear(CheckMode::Peek).await.is_ok_and(|heard| heard.is_degraded)
}

/// Stores expired records again, so that another process can refund them.
async fn put_back<T: Source>(api: &T, waiting: Vec<Vec<u8>>) {
    for record in waiting {
        let is_kept = match new_id() {
            Ok(id) => api.records().put(&id, &record, SWEEP_EVERY).await.is_ok(),
            Err(_) => false,
        };
        if !is_kept {
            api.counts().lost.fetch_add(1, Ordering::Relaxed);
            tracing::warn!("expired reservation not refunded and not kept for a retry");
        }
    }
}

/// The outcome of one batch of a sweep.
#[derive(Clone, Copy, Debug)]
struct Swept {
    reservations: usize,
    /// Whether more may be refunded now.
    goes_on: bool,
}

/// Refunds the waiting records, or else a batch of expired ones. If the store becomes unavailable, the rest stays in
/// `waiting`: those refunds were not sent, so each is still made only once. No further records are fetched meanwhile.
async fn give_some_back<T: Source>(api: &T, waiting: &mut Vec<Vec<u8>>) -> Swept {
    let snapshot = api.snapshot();
    let has_waited = !waiting.is_empty();
    if let Some(Ok(first)) = waiting.first().map(|record| serde_json::from_slice(record))
        && is_away(&snapshot, &first).await
    {
        return Swept { reservations: 0, goes_on: false };
    }
    if !has_waited {
        match api.records().due(SWEPT_AT_ONCE).await {
            Ok(due) => *waiting = due,
            Err(why) => {
                tracing::warn!(%why, "cannot list expired reservations");
                return Swept { reservations: 0, goes_on: false };
            }
        }
    }
    let mut swept = Swept { reservations: 0, goes_on: has_waited || waiting.len() == SWEPT_AT_ONCE };
    for record in waiting.iter() {
        swept.reservations += 1;
        api.counts().expired.fetch_add(1, Ordering::Relaxed);
        if let Ok(reservation) = serde_json::from_slice::<Reservation>(record)
            && !refund(api, &snapshot, &reservation, reservation.taken).await
            && is_away(&snapshot, &reservation).await
        {
            swept.goes_on = false;
            break;
        }
    }
    waiting.drain(..swept.reservations);
    swept
}

/// Refunds all expired reservations, and returns how many there were.
pub async fn refund_expired<T: Source>(api: &T) -> usize {
    let (mut all, mut waiting) = (0, Vec::new());
    loop {
        let Swept { reservations, goes_on } = give_some_back(api, &mut waiting).await;
        all += reservations;
        if !goes_on {
            put_back(api, waiting).await;
            return all;
        }
    }
}

/// Refunds expired reservations at intervals until the API ends. A batch in progress is completed.
pub(super) async fn sweep<T: Source>(api: Arc<T>, mut ends: watch::Receiver<bool>) {
    let mut ticks = interval(SWEEP_EVERY);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut waiting = Vec::new();
    loop {
        select! {
            biased;
            () = is_closing(&mut ends) => break,
            _ = ticks.tick() => {}
        }
        while give_some_back(&*api, &mut waiting).await.goes_on && !*ends.borrow() {}
    }
    put_back(&*api, waiting).await;
}
