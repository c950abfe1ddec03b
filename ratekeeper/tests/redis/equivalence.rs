//! Goal: Redis and memory agree on every field of every decision. Method: the same random requests to both at the
//! same time, which sometimes steps back.

use std::time::Duration;

use ratekeeper::redis::Settings;
use ratekeeper::{Decision, Limit, Limiter, ManualClock, Memory, Time};
use testbed::{RedisServer, ordinary_or_long};

use crate::limits::every_limit;
use crate::redis::{PATIENT, limiter};

/// A deterministic random generator.
pub(crate) struct Dice(pub(crate) u64);

impl Dice {
    pub(crate) fn below(&mut self, sides: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % sides
    }
}

/// The next step of the clock, in nanoseconds.
pub(crate) fn step(dice: &mut Dice, window_ns: u64) -> i64 {
    let far = match dice.below(20) {
        0..6 => 0,
        6..12 => dice.below(window_ns / 10 + 1),
        12..15 => dice.below(1_000),
        15..17 => dice.below(2 * window_ns + 1),
        17 => window_ns,
        // A step back, by less than a window or by five windows.
        18 => return -(dice.below(window_ns + 1) as i64),
        _ => return if dice.below(40) == 0 { -((window_ns * 5) as i64) } else { 1 },
    };
    far as i64
}

struct Pair {
    clock: ManualClock,
    memory: Limiter<Memory<ManualClock>>,
    redis: Limiter<ratekeeper::redis::Redis>,
}

impl Pair {
    fn new(limits: &[Limit], url: &str, namespace: &str) -> Pair {
        let settings = Settings::new(url).namespace(namespace).deadline(PATIENT);
        let clock = ManualClock::new(Time::EPOCH);
        let (first, others) = limits.split_first().unwrap();
        let builder = others.iter().cloned().fold(Limiter::builder(first.clone()), |it, limit| it.and(limit));
        let memory = builder.clock(clock.clone()).max_keys(10_000).build().unwrap();
        Pair { clock, memory, redis: limiter(limits, &settings) }
    }

    async fn decide(&self, now: Time, key: u64, cost: u32) -> (Decision, Decision) {
        self.clock.set(now);
        let redis = self.redis.check_at(now, &key, cost).await.unwrap();
        (self.memory.check_n(&key, cost), redis.decision())
    }
}

/// `grain_ns`: the resolution of the clock.
pub(crate) async fn agree(
    limits: &[Limit],
    url: &str,
    namespace: &str,
    steps: usize,
    seed: u64,
    grain_ns: u64,
) {
    let pair = Pair::new(limits, url, namespace);
    let mut dice = Dice(seed);
    let window_ns = limits.iter().map(|limit| limit.window().as_nanos()).min().unwrap() as u64;
    let most = u64::from(limits[0].limit());
    let mut now = 1_700_000_000_000_000_000_u64;
    for number in 0..steps {
        now = now.saturating_add_signed(step(&mut dice, window_ns));
        now -= now % grain_ns;
        let (key, cost) = (dice.below(3), dice.below(most / 2 + 3) as u32);
        let (memory, redis) = pair.decide(Time::from_nanos(now), key, cost).await;
        assert_eq!(redis, memory, "{limits:?}: step {number} at {now}, key {key}, cost {cost}, seed {seed}");
    }
}

/// 2 * 10^5 steps over all variants with small and large limits in a long run; a quarter of them in an ordinary run.
#[tokio::test]
async fn memory_and_redis_agree_on_every_field() {
    let server = RedisServer::start().unwrap();
    let mut number = 0;
    let steps = ordinary_or_long(400, 1_600);
    for size in [1, 5, 300, 70_000] {
        for limit in every_limit(size, 10) {
            // The server's clock has a resolution of a microsecond, and some states are stored in microseconds.
            for grain_ns in [1, 1_000] {
                number += 1;
                let seed = 88_172_645_463_325_252 + number;
                let limit = std::slice::from_ref(&limit);
                agree(limit, &server.url(), &number.to_string(), steps, seed, grain_ns).await;
            }
        }
    }
    assert!(number * 1_600 >= 200_000, "{number} traces");
    assert_eq!(server.keys_without_expiry().unwrap(), Vec::<String>::new());
}

/// Several limits are charged atomically, with the same decisions as in memory.
#[tokio::test]
async fn memory_and_redis_agree_on_several_limits() {
    let server = RedisServer::start().unwrap();
    let variants = every_limit(5, 10);
    for (number, limit) in variants.iter().enumerate() {
        let other = &variants[(number + 5) % variants.len()];
        let third = &variants[(number * 7 + 3) % variants.len()];
        let limits = [limit.clone(), other.clone(), third.clone()];
        let grain_ns = if number % 2 == 0 { 1 } else { 1_000 };
        agree(&limits, &server.url(), &number.to_string(), 1_000, 7_777_777 + number as u64, grain_ns).await;
    }
}

/// The server's clock is stepped: at most one extra burst is allowed, and no key is denied for longer than a window.
#[tokio::test]
async fn stepped_clock_allows_one_extra_burst_and_locks_out_no_key() {
    let server = RedisServer::start().unwrap();
    for (number, limit) in every_limit(5, 10).into_iter().enumerate() {
        for (name, step_secs) in [("-1h", -3_600_i64), ("-1s", -1), ("+1s", 1), ("+1h", 3_600)] {
            let settings =
                Settings::new(&server.url()).namespace(&format!("{number}{name}")).deadline(PATIENT);
            let redis = limiter(std::slice::from_ref(&limit), &settings);
            let start = 1_700_000_000_u64;
            let mut admitted = 0;
            for _ in 0..20 {
                let verdict = redis.check_at(Time::from_secs(start), "key", 1).await.unwrap();
                admitted += u32::from(verdict.allowed());
            }
            let after = Time::from_secs(start.saturating_add_signed(step_secs));
            for _ in 0..20 {
                let verdict = redis.check_at(after, "key", 1).await.unwrap();
                admitted += u32::from(verdict.allowed());
            }
            assert!(admitted <= 10, "{limit:?} {name}: {admitted} admitted");
            // One window from there, plus the share of a counter's bucket at the edge; the window of the state may be
            // one ahead.
            let later = after.saturating_add(3 * limit.window() + Duration::from_secs(1));
            assert!(redis.check_at(later, "key", 1).await.unwrap().allowed(), "{limit:?} {name}");
        }
    }
}
