//! `/v1/reserve` and `/v1/settle`: what something will cost is charged before it is done, and put right afterwards.
//!
//! A reservation that nobody settles is given back when it expires. It is charged before it is written down and given
//! back after it is crossed out, so a process that ends in between leaves something taken that nobody used, until its
//! limit forgets it; nobody ever gets back what was not taken. Where it is not known whether it is written down, it is left
//! to expire, for the same reason.

use std::borrow::Cow;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use axum::http::StatusCode;
use axum::response::Response;
use tokio::select;
use tokio::sync::watch;
use tokio::time::{MissedTickBehavior, interval};
use tollgate::tower::direct::How;
use tollgate::{Store, Time};
use tollgate_config::push_seconds;

use super::asked::{self, Ask, Key, Reservation, Reserve, Settle};
use super::counts::Said;
use super::decide::Found;
use super::once::{Asked, hex, new_number};
use super::records::{NotKept, Records, Taken};
use super::refusal::Refusal;
use super::serve::is_closing;
use super::{Snapshot, Source, told};

/// How often it is looked what has expired.
const SWEEP_EVERY: Duration = Duration::from_secs(1);
/// As many are given back before others are asked for.
const SWEPT_AT_ONCE: usize = 256;
/// How often it is tried to charge what is still there, if others are quicker.
const TRIES_MAX: usize = 3;
/// What nobody can guess.
const ID_BYTES: usize = 16;

/// Charges now, and remembers.
pub(super) async fn reserve<T: Source>(door: Arc<T>, asked: Asked) -> Result<Response, Refusal> {
    let Reserve { ask, expires } = Reserve::read(&asked.body)?;
    let asks = [ask];
    let snapshot = door.snapshot();
    let found = Found::new(&snapshot, &asks)?;
    let id = new_id()?;
    let heard = found.hear(How::Charge).await?;
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
    match door.records().put(&id, &record, expires).await {
        Ok(()) => {}
        // Nobody will ever find it there.
        Err(why @ (NotKept::Full | NotKept::NotSent(_))) => {
            give_back(&*door, &snapshot, &reservation, reservation.taken).await;
            return Err(why.into());
        }
        // It may be there. Whoever finds it gives it back, and nobody else may.
        Err(why @ NotKept::Unreached(_)) => return Err(Refusal::from(why).maybe_done()),
    }
    let mut more = b",\"reservation\":".to_vec();
    told::push_text(&mut more, &id);
    more.extend_from_slice(b",\"expires_after\":");
    push_seconds(&mut more, expires);
    Ok(found.response(&heard, &asks, None, &more))
}

fn new_id() -> Result<String, Refusal> {
    new_number::<ID_BYTES>().map(|number| hex(&number))
}

/// Puts right what was reserved.
pub(super) async fn settle<T: Source>(door: Arc<T>, asked: Asked) -> Result<Response, Refusal> {
    let Settle { reservation: id, cost } = asked::read(&asked.body)?;
    let record = match door.records().take(&id).await? {
        Taken::Record(record) => record,
        Taken::Gone => {
            let why = "this reservation was settled already, or has expired and was given back";
            return Err(Refusal::new(StatusCode::CONFLICT, why));
        }
        Taken::Unknown => {
            let why = "there is no such reservation; it may have been settled or given back long ago";
            return Err(Refusal::new(StatusCode::NOT_FOUND, why));
        }
    };
    let Ok(reservation) = serde_json::from_slice::<Reservation>(&record) else {
        return Err(Refusal::new(
            StatusCode::NOT_FOUND,
            "this reservation is of a kind that is not known here",
        ));
    };
    let snapshot = door.snapshot();
    let mut settled = Settled::default();
    if cost < reservation.taken {
        let rest = reservation.taken - cost;
        settled.is_degraded = !give_back(&*door, &snapshot, &reservation, rest).await;
        settled.given_back = if settled.is_degraded { 0 } else { rest };
    } else if reservation.taken == reservation.cost {
        settled = charge_more(&snapshot, &reservation, cost - reservation.taken).await;
    }
    // Where nothing was taken, nothing more is: the limit did not concern it, or only counts, or was away.
    let Settled { given_back, uncovered, is_degraded } = settled;
    let mut body = b"{\"limit\":".to_vec();
    told::push_text(&mut body, &reservation.limit);
    for (name, number) in [
        (",\"reserved\":", reservation.cost),
        (",\"cost\":", cost),
        (",\"given_back\":", given_back),
        (",\"uncovered\":", uncovered),
    ] {
        body.extend_from_slice(name.as_bytes());
        told::push_number(&mut body, number);
    }
    body.extend_from_slice(b",\"degraded\":");
    told::push_flag(&mut body, is_degraded);
    body.push(b'}');
    Ok(told::json(StatusCode::OK, Said::Yes, body))
}

/// How a reservation ended.
#[derive(Clone, Copy, Debug, Default)]
struct Settled {
    given_back: u32,
    /// What was used beyond what the limit had.
    uncovered: u32,
    is_degraded: bool,
}

/// What was reserved, as it is asked for.
fn ask_of(reservation: &Reservation, cost: u32) -> [Ask<'_>; 1] {
    let key = reservation.key.iter().map(|part| Cow::Borrowed(part.as_str())).collect();
    [Ask { limit: Cow::Borrowed(&reservation.limit), key: Key(key), cost }]
}

/// Charges what was used beyond the reservation, as far as it is there: a look says how much, so that nobody is denied,
/// or even banned, for work that is done already.
async fn charge_more<S: Store>(snapshot: &Snapshot<S>, reservation: &Reservation, more: u32) -> Settled {
    let mut settled = Settled { uncovered: more, ..Settled::default() };
    for _ in 0..TRIES_MAX {
        if settled.uncovered == 0 {
            break;
        }
        let look = ask_of(reservation, settled.uncovered);
        let Ok(found) = Found::new(snapshot, &look) else { break };
        let Ok(heard) = found.hear(How::Look).await else { break };
        settled.is_degraded |= heard.is_degraded;
        let [one] = heard.each.as_slice() else { break };
        let there = match one.decision {
            // The limit does not concern this key any more.
            None if !one.is_listed => settled.uncovered,
            Some(decision) if !one.is_banned => decision.remaining.min(settled.uncovered),
            _ => 0,
        };
        if there == 0 || heard.is_degraded {
            break;
        }
        let charge = ask_of(reservation, there);
        let Ok(found) = Found::new(snapshot, &charge) else { break };
        match found.hear(How::Charge).await {
            Ok(heard) if heard.allowed => settled.uncovered -= there,
            Ok(_) => {}
            Err(_) => break,
        }
    }
    settled
}

/// Gives back some of what was reserved, as of when it was charged. Whether it was done.
async fn give_back<T: Source>(
    door: &T,
    snapshot: &Snapshot<T::Store>,
    reservation: &Reservation,
    cost: u32,
) -> bool {
    if cost == 0 {
        return true;
    }
    let asks = ask_of(reservation, cost);
    // A limit that there is no more has nothing to give back to.
    let Ok(found) = Found::new(snapshot, &asks) else { return true };
    let at = Time::from_nanos(reservation.at_ns);
    match found.layer.give_back(&found.demands(), Some(at)).await {
        Ok(()) => true,
        // Why may repeat the key, and no key is in the log.
        Err(_) => {
            door.counts().lost.fetch_add(1, Ordering::Relaxed);
            tracing::warn!(limit = reservation.limit, "a reservation could not be given back");
            false
        }
    }
}

/// Whether the store of a limit does not answer just now.
async fn is_away<S: Store>(snapshot: &Snapshot<S>, reservation: &Reservation) -> bool {
    let look = ask_of(reservation, 0);
    let Ok(found) = Found::new(snapshot, &look) else { return false };
    found.hear(How::Look).await.is_ok_and(|heard| heard.is_degraded)
}

/// Hands records that were due back to those who keep them, for somebody else.
async fn put_back<T: Source>(door: &T, waiting: Vec<Vec<u8>>) {
    for record in waiting {
        let is_kept = match new_id() {
            Ok(id) => door.records().put(&id, &record, SWEEP_EVERY).await.is_ok(),
            Err(_) => false,
        };
        if !is_kept {
            door.counts().lost.fetch_add(1, Ordering::Relaxed);
            tracing::warn!("a reservation that has expired could not be kept until the store answers again");
        }
    }
}

/// Some of what has expired was given back.
#[derive(Clone, Copy, Debug)]
struct Swept {
    reservations: usize,
    /// Whether there may be more that can be given back now.
    goes_on: bool,
}

/// Gives back what waits, or else some of what has expired. Once the store does not answer, the rest waits here: it was not
/// sent, so it is given back later and still only once. No more is asked for meanwhile.
async fn give_some_back<T: Source>(door: &T, waiting: &mut Vec<Vec<u8>>) -> Swept {
    let snapshot = door.snapshot();
    let has_waited = !waiting.is_empty();
    if let Some(Ok(first)) = waiting.first().map(|record| serde_json::from_slice(record))
        && is_away(&snapshot, &first).await
    {
        return Swept { reservations: 0, goes_on: false };
    }
    if !has_waited {
        match door.records().due(SWEPT_AT_ONCE).await {
            Ok(due) => *waiting = due,
            Err(why) => {
                tracing::warn!(%why, "it cannot be seen which reservations have expired");
                return Swept { reservations: 0, goes_on: false };
            }
        }
    }
    let mut swept = Swept { reservations: 0, goes_on: has_waited || waiting.len() == SWEPT_AT_ONCE };
    for record in waiting.iter() {
        swept.reservations += 1;
        door.counts().expired.fetch_add(1, Ordering::Relaxed);
        if let Ok(reservation) = serde_json::from_slice::<Reservation>(record)
            && !give_back(door, &snapshot, &reservation, reservation.taken).await
            && is_away(&snapshot, &reservation).await
        {
            swept.goes_on = false;
            break;
        }
    }
    waiting.drain(..swept.reservations);
    swept
}

/// Gives back what has expired, and says how many reservations that were.
pub async fn give_back_expired<T: Source>(door: &T) -> usize {
    let (mut all, mut waiting) = (0, Vec::new());
    loop {
        let Swept { reservations, goes_on } = give_some_back(door, &mut waiting).await;
        all += reservations;
        if !goes_on {
            put_back(door, waiting).await;
            return all;
        }
    }
}

/// Looks again and again what has expired, until the door ends. What is being given back then is given back.
pub(super) async fn sweep<T: Source>(door: Arc<T>, mut ends: watch::Receiver<bool>) {
    let mut ticks = interval(SWEEP_EVERY);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut waiting = Vec::new();
    loop {
        select! {
            biased;
            () = is_closing(&mut ends) => break,
            _ = ticks.tick() => {}
        }
        while give_some_back(&*door, &mut waiting).await.goes_on && !*ends.borrow() {}
    }
    put_back(&*door, waiting).await;
}
