//! The commands that check a limit: their arguments and replies. The [module](super) documents both.

use std::time::Duration;

use ratekeeper::tower::RatekeeperLayer;
use ratekeeper::tower::check::{Check, CheckMode, KeyError, KeyInput, LimitRef};
use ratekeeper::{Decision, Gcra, Rate, RetryAfter, Store};
use smallvec::SmallVec;

use super::commands::Command;
use super::protocol::Words;
use super::reply::{Replies, quoted};
use crate::runtime::metrics::CommandOutcome;

/// The text of an error reply.
pub(crate) type ErrorText = std::borrow::Cow<'static, str>;

const CELL_USAGE: &str =
    "Cell error: Usage: cl.throttle <key> <max_burst> <count per period> <period> [<quantity>]";

const NO_LIMITS: &str = "UNAVAILABLE no limits are configured; retry later";
const STORE_UNAVAILABLE: &str = "UNAVAILABLE store unavailable and the failure policy is closed";

/// The limits, and how many of them can be checked by name.
pub(crate) type Limits<'l, S> = (&'l RatekeeperLayer<S>, usize);

/// The parameters of a throttle command, and the cost to charge.
#[derive(Debug, PartialEq, Eq)]
struct Throttle {
    gcra: Gcra,
    cost: u32,
}

/// Checks the limit and writes the reply.
pub(crate) async fn answer<S: Store>(
    command: Command,
    words: Words<'_>,
    limits: Option<Limits<'_, S>>,
    out: &mut Replies,
) -> CommandOutcome {
    let result = match (command, limits) {
        (_, None) => {
            out.error(NO_LIMITS);
            return CommandOutcome::Unavailable;
        }
        (Command::ClThrottle, Some((limits, _))) => cl_throttle(words, limits, out).await,
        (Command::Throttle, Some((limits, _))) => throttle(words, limits, out).await,
        (_, Some(limits)) => rk_check(words, limits, out).await,
    };
    result.unwrap_or_else(|error| {
        out.error(&error);
        CommandOutcome::Error
    })
}

/// `CL.THROTTLE key max_burst count period [quantity]`
async fn cl_throttle<S: Store>(
    words: Words<'_>,
    limits: &RatekeeperLayer<S>,
    out: &mut Replies,
) -> Result<CommandOutcome, ErrorText> {
    let check = parse_cl_throttle(words)?;
    Ok(match check_throttle(&check, words, limits).await {
        Some(decision) => {
            out.numbers(&cl_throttle_reply(&decision));
            outcome_of(decision.allowed)
        }
        None => unavailable(out),
    })
}

/// `THROTTLE key max_burst count period [quantity]`
async fn throttle<S: Store>(
    words: Words<'_>,
    limits: &RatekeeperLayer<S>,
    out: &mut Replies,
) -> Result<CommandOutcome, ErrorText> {
    let check = parse_throttle(words)?;
    Ok(match check_throttle(&check, words, limits).await {
        Some(decision) => {
            out.numbers(&throttle_reply(&decision));
            outcome_of(decision.allowed)
        }
        None => unavailable(out),
    })
}

/// `RK.CHECK limit [key [cost [key ...]]]`
async fn rk_check<S: Store>(
    words: Words<'_>,
    (limits, named): Limits<'_, S>,
    out: &mut Replies,
) -> Result<CommandOutcome, ErrorText> {
    let name = words.get(1).unwrap_or_default();
    let Some(number) = limits.rules().take(named).position(|rule| rule.name.as_bytes() == name) else {
        return Err(
            format!("ERR unknown limit '{}'; send the name of a configured limit", quoted(name)).into()
        );
    };
    let cost = match words.get(3) {
        None => 1,
        cost => integer(cost)
            .and_then(|cost| u32::try_from(cost).ok())
            .ok_or_else(|| format!("ERR invalid cost; it must be 0 to {}", u32::MAX))?,
    };
    let mut values = SmallVec::<[&str; 4]>::new();
    // With a cost but no key, the key is an empty word.
    let first = words.get(2).filter(|key| !key.is_empty() || words.len() > 4);
    for value in first.into_iter().chain(words.iter().skip(4)) {
        values.push(std::str::from_utf8(value).map_err(|_| "ERR a part of the key is not UTF-8")?);
    }
    let check = Check { limit: LimitRef::Rule(number), key: KeyInput::Values(&values), cost };
    let outcome = match limits.check(&[check], mode(cost)).await {
        Ok(outcome) => outcome,
        Err(error) if error.why == KeyError::Denied => {
            out.numbers(&ON_DENY_LIST);
            return Ok(CommandOutcome::Denied);
        }
        Err(error) => return Err(format!("ERR {}", error.why).into()),
    };
    if outcome.is_closed {
        return Ok(unavailable(out));
    }
    let allowed = outcome.allowed;
    match outcome.limits.first().and_then(|limit| limit.decision) {
        // The decision of a shadow limit may differ from the verdict.
        Some(decision) if allowed => {
            out.numbers(&rk_check_reply(&Decision { allowed, retry_after: RetryAfter::Now, ..decision }));
        }
        Some(decision) => out.numbers(&rk_check_reply(&decision)),
        None => out.numbers(&UNLIMITED),
    }
    Ok(outcome_of(allowed))
}

/// Checks the command's key; none if the store is unavailable and the policy is `closed`. A key keeps one instant,
/// whatever the parameters of its commands, as in redis-cell and throttlecrab.
async fn check_throttle<S: Store>(
    check: &Throttle,
    words: Words<'_>,
    limits: &RatekeeperLayer<S>,
) -> Option<Decision> {
    let key = words.get(1).unwrap_or_default();
    let verdict = limits.check_gcra(&check.gcra, key, check.cost, mode(check.cost)).await;
    (!verdict.is_closed()).then(|| verdict.decision())
}

/// A cost of 0 peeks.
fn mode(cost: u32) -> CheckMode {
    if cost == 0 { CheckMode::Peek } else { CheckMode::Charge }
}

fn outcome_of(allowed: bool) -> CommandOutcome {
    if allowed { CommandOutcome::Allowed } else { CommandOutcome::Denied }
}

fn unavailable(out: &mut Replies) -> CommandOutcome {
    out.error(STORE_UNAVAILABLE);
    CommandOutcome::Unavailable
}

/// Parses `CL.THROTTLE`, with the error messages of redis-cell.
fn parse_cl_throttle(words: Words<'_>) -> Result<Throttle, ErrorText> {
    if !matches!(words.len(), 5 | 6) {
        return Err(CELL_USAGE.into());
    }
    let number = |at: usize| {
        integer(words.get(at)).ok_or_else(|| {
            format!("Cell error: Couldn't parse as integer: {}", quoted(words.get(at).unwrap_or_default()))
        })
    };
    let (max_burst, count, period) = (number(2)?, number(3)?, number(4)?);
    let quantity = if words.len() == 6 { number(5)? } else { 1 };
    let capacity = max_burst.checked_add(1).and_then(|capacity| u32::try_from(capacity).ok());
    let capacity = capacity
        .filter(|capacity| *capacity > 0)
        .ok_or_else(|| format!("Cell error: max_burst is {max_burst}; it must be 0 to {}", u32::MAX - 1))?;
    if count == 0 || period == 0 {
        return Err("Cell error: Zero rates are not supported".into());
    }
    let cost = u32::try_from(quantity)
        .map_err(|_| format!("Cell error: quantity is {quantity}; it must be 0 to {}", u32::MAX))?;
    let gcra = gcra(capacity, count, period).map_err(|why| format!("Cell error: {why}"))?;
    Ok(Throttle { gcra, cost })
}

/// Parses `THROTTLE`.
fn parse_throttle(words: Words<'_>) -> Result<Throttle, ErrorText> {
    if words.len() > 6 {
        return Err("ERR wrong number of arguments for 'throttle' command".into());
    }
    let number = |at: usize, name: &str, min: u32| {
        let number = integer(words.get(at)).and_then(|number| u32::try_from(number).ok());
        let number = number.filter(|number| *number >= min);
        number.ok_or_else(|| format!("ERR invalid {name}; it must be {min} to {}", u32::MAX))
    };
    let capacity = number(2, "max_burst", 1)?;
    let (count, period) = (number(3, "count_per_period", 1)?, number(4, "period", 1)?);
    let cost = if words.len() == 6 { number(5, "quantity", 0)? } else { 1 };
    let gcra = gcra(capacity, count.into(), period.into()).map_err(|why| format!("ERR {why}"))?;
    Ok(Throttle { gcra, cost })
}

/// A token bucket of `capacity` units that refills `count` units per `period` seconds, one by one.
fn gcra(capacity: u32, count: i64, period: i64) -> Result<Gcra, String> {
    let whole = |number: i64, name: &str| {
        u64::try_from(number).map_err(|_| format!("{name} is {number}; it must be at least 1"))
    };
    let (count, period) = (whole(count, "count")?, whole(period, "period")?);
    let rate = Rate::new(count, Duration::from_secs(period)).map_err(|why| why.to_string())?;
    Gcra::new(capacity, rate).map_err(|why| why.to_string())
}

/// Parses a whole number.
pub(crate) fn integer(word: Option<&[u8]>) -> Option<i64> {
    std::str::from_utf8(word?).ok()?.parse().ok()
}

/// The reply for a key on the limit's deny list: no wait helps.
const ON_DENY_LIST: [i64; 6] = [0, 0, 0, -1, 0, 0];
/// The reply for a key that the limit exempts.
const UNLIMITED: [i64; 6] = [1, -1, -1, -1, 0, 0];

fn cl_throttle_reply(decision: &Decision) -> [i64; 5] {
    let Decision { allowed, limit, retry_after, .. } = *decision;
    let (remaining, reset_after) = budget(decision, seconds);
    let retry_after = match retry_after {
        RetryAfter::After(wait) => seconds(wait),
        RetryAfter::Now | RetryAfter::Never => -1,
    };
    [i64::from(!allowed), limit.into(), remaining, retry_after, reset_after]
}

fn throttle_reply(decision: &Decision) -> [i64; 5] {
    let Decision { allowed, limit, retry_after, .. } = *decision;
    let (remaining, reset_after) = budget(decision, seconds);
    let retry_after = match retry_after {
        RetryAfter::After(wait) => seconds(wait),
        RetryAfter::Now => 0,
        RetryAfter::Never => -1,
    };
    [allowed.into(), limit.into(), remaining, reset_after, retry_after]
}

fn rk_check_reply(decision: &Decision) -> [i64; 6] {
    let Decision { allowed, limit, retry_after, delay, .. } = *decision;
    let (remaining, reset_after) = budget(decision, millis);
    let retry_after = match retry_after {
        RetryAfter::After(wait) => millis(wait),
        RetryAfter::Now | RetryAfter::Never => -1,
    };
    [allowed.into(), limit.into(), remaining, retry_after, reset_after, millis(delay)]
}

/// The remaining units and the time until the full budget; both are -1 if nobody knows.
fn budget(decision: &Decision, unit: fn(Duration) -> i64) -> (i64, i64) {
    let known = decision.known_remaining();
    known.map_or((-1, -1), |remaining| (remaining.into(), unit(decision.reset_after)))
}

fn seconds(wait: Duration) -> i64 {
    rounded_up(wait, 1_000_000_000)
}

fn millis(wait: Duration) -> i64 {
    rounded_up(wait, 1_000_000)
}

fn rounded_up(wait: Duration, unit_ns: u128) -> i64 {
    i64::try_from(wait.as_nanos().div_ceil(unit_ns)).unwrap_or(i64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    const DENIED: Decision = Decision {
        allowed: false,
        limit: 5,
        remaining: 1,
        retry_after: RetryAfter::After(Duration::from_nanos(1_000_000_001)),
        reset_after: Duration::from_nanos(3_900_000_001),
        delay: Duration::ZERO,
    };

    /// One decision in all layouts. Times are rounded up, so that a retry is not early even by a nanosecond.
    #[test]
    fn each_layout_has_its_own_order_and_unit() {
        assert_eq!(cl_throttle_reply(&DENIED), [1, 5, 1, 2, 4]);
        assert_eq!(throttle_reply(&DENIED), [0, 5, 1, 4, 2]);
        assert_eq!(rk_check_reply(&DENIED), [0, 5, 1, 1001, 3901, 0]);
        let never = Decision { retry_after: RetryAfter::Never, ..DENIED };
        assert_eq!(cl_throttle_reply(&never)[3], -1);
        assert_eq!(throttle_reply(&never)[4], -1);
        assert_eq!(rk_check_reply(&never)[3], -1);
        let unknown = Decision { remaining: Decision::UNKNOWN, ..DENIED };
        assert_eq!(rk_check_reply(&unknown), [0, 5, -1, 1001, -1, 0]);
        let delay = Duration::from_micros(1_500);
        let allowed = Decision { allowed: true, retry_after: RetryAfter::Now, delay, ..DENIED };
        assert_eq!(cl_throttle_reply(&allowed), [0, 5, 1, -1, 4]);
        assert_eq!(throttle_reply(&allowed), [1, 5, 1, 4, 0]);
        assert_eq!(rk_check_reply(&allowed), [1, 5, 1, -1, 3901, 2]);
    }

    #[test]
    fn longest_wait_does_not_overflow() {
        assert_eq!(seconds(Duration::MAX), i64::MAX);
        assert_eq!(millis(Duration::MAX), i64::MAX);
        assert_eq!((seconds(Duration::ZERO), millis(Duration::from_nanos(1))), (0, 1));
    }
}
