//! Goal: a key exists as long as its state counts, and always has an expiry. Method: requests at an injected time,
//! while the server's clock controls the expiry.

use std::time::Duration;

use ratekeeper::{Limit, Time};
use testbed::RedisServer;

use crate::limits::every_limit;
use crate::redis::all_expire;
use crate::redis::equivalence::{Dice, step};
use crate::redis::function_calls::{Operation, Raw};

/// With an injected time keys live a day longer.
const EXTRA: Duration = Duration::from_secs(86_400);
/// The server's clock advances between a call and the query of the expiry.
const SLACK: Duration = Duration::from_secs(5);
const WINDOW_SECS: u64 = 10_000;

/// Requests of cost 1 and more on one key, some of them refunded.
async fn lives(limit: &Limit, server: &RedisServer, name: u64) {
    let mut raw = Raw::new(server, limit, name).await;
    let mut dice = Dice(3_935_559_000_370_003_845 + name);
    let window = limit.window();
    let mut now = 1_700_000_000_000_000_000_u64;
    // The expiry of the key, by the clock of the requests.
    let mut expires = Time::EPOCH;
    let mut kept = 0;
    for number in 0..400 {
        now += step(&mut dice, window.as_nanos() as u64).max(0) as u64;
        if name.is_multiple_of(2) {
            now -= now % 1_000;
        }
        let at = Time::from_nanos(now);
        let cost = if dice.below(3) == 0 { dice.below(5) as u32 } else { 1 };
        let mut decision = raw.charge(at, 0, cost).await;
        if decision.allowed && dice.below(6) == 0 {
            raw.call(Some(at), &[Operation::Refund { key: 0, cost, at: Some(at) }]).await;
            decision = raw.charge(at, 0, 0).await;
        }
        let what = format!("{limit:?}: step {number} at {now}, cost {cost}, {decision:?}");
        let Some(left) = raw.expires_after(0).await else {
            assert_eq!(decision.reset_after, Duration::ZERO, "{what}: gone");
            continue;
        };
        // The library never reads the expiry: if it wrote a new one, the mark is overwritten.
        if raw.is_marked(0).await {
            kept += 1;
        } else {
            assert!(left >= EXTRA - SLACK, "{what}: {left:?}");
            expires = at.saturating_add(left + SLACK - EXTRA);
            // A weighed bucket may have no effect long before it expires.
            let latest = at.saturating_add(decision.reset_after + 2 * window + 2 * SLACK);
            assert!(expires <= latest, "{what}: not before {expires:?}, more than two windows late");
        }
        let counts = !decision.reset_after.is_zero();
        assert!(
            !counts || expires >= at.saturating_add(decision.reset_after),
            "{what}: early, at {expires:?}"
        );
        raw.mark_expiry(0).await;
    }
    assert!(kept > 20, "{limit:?}: the expiry was kept {kept} times");
}

#[tokio::test]
async fn key_expires_after_its_state_counts() {
    let server = RedisServer::start().unwrap();
    let mut name = 0;
    for limit in every_limit(5_000, WINDOW_SECS) {
        for _ in 0..2 {
            name += 1;
            lives(&limit, &server, name).await;
        }
    }
    all_expire(&server);
}
