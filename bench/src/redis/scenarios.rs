//! The scenarios: each algorithm by our library and by a commonly used script, over the same keys in the same order.

use std::error::Error;
use std::time::Duration;

use ratekeeper::{EdgePolicy, LeakyMode, Limit, LogPolicy, Rate, RefillStyle, Time, WindowAlign};

use super::wire::{Reply, pack};

/// Decisions per call, where calls are shared.
pub(super) const SHARED: usize = 16;
/// Keys of a scenario with many keys.
const KEYS: usize = 10_000;
/// Keys of a log held near its limit. Each is checked once per tick.
const HOT_KEYS: usize = 64;
/// Their tick: 95 requests per second of the 100 allowed.
const TICK: Duration = Duration::from_micros(10_500);

/// When requests are sent.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Pace {
    /// Without delay.
    Fast,
    /// One per key and tick, by the clock. The server sleeps between ticks and wakes for each.
    Clock,
    /// One per key and tick, by a time sent with the request, without delay. Neither side then reads the clock.
    SentTime,
}

/// An algorithm in both forms: our limit, and the baseline's script and arguments.
pub(super) struct RedisScenario {
    pub(super) name: &'static str,
    script: &'static str,
    limit: Limit,
    arguments: [&'static str; 4],
    keys: usize,
    pace: Pace,
    /// Whether it is also measured with several decisions per call.
    is_shared: bool,
}

/// Active keys: each has been charged before, and none has its full budget when it is charged again.
pub(super) const TOKEN: &str = "token bucket";
pub(super) const LEAKY: &str = "leaky bucket";
/// Keys that have their full budget whenever they are charged.
pub(super) const RESTED: &str = "token bucket, rested keys";
pub(super) const FIXED: &str = "fixed window";
pub(super) const COUNTER: &str = "counter";
/// A window so short that many requests start a new one, so that the previous window must be weighted.
pub(super) const SHORT_COUNTER: &str = "counter, new windows";
/// Growing logs: no entry expires.
pub(super) const LOG: &str = "log, growing";
/// Logs that hold 95 of 100 requests per second and admit all: as many entries expire as are added.
pub(super) const HOT_LOG: &str = "hot log, allowed";
pub(super) const PACED_LOG: &str = "hot log, allowed, by the clock";
/// One key far above its 100 per second.
pub(super) const DENIED_LOG: &str = "hot log, denied";

pub(super) fn scenarios() -> Result<Vec<RedisScenario>, Box<dyn Error>> {
    let (hour, minute, second) =
        (Duration::from_secs(3_600), Duration::from_secs(60), Duration::from_secs(1));
    let a_minute = Rate::new(1, minute)?;
    let scenario = |name, limit, script, arguments| RedisScenario {
        name,
        script,
        limit,
        arguments,
        keys: KEYS,
        pace: Pace::Fast,
        is_shared: false,
    };
    let (token, leaky) = (include_str!("token_bucket.lua"), include_str!("leaky_bucket.lua"));
    let (fixed, counter) = (include_str!("fixed_window.lua"), include_str!("sliding_window_counter.lua"));
    let log = include_str!("sliding_window_log.lua");
    let million = 1_000_000;
    let in_use = ["1000000", "0.016666666666666666", "1", "3600"];
    Ok(vec![
        RedisScenario {
            is_shared: true,
            ..scenario(TOKEN, Limit::token_bucket(million, a_minute, RefillStyle::Smooth)?, token, in_use)
        },
        RedisScenario {
            is_shared: true,
            ..scenario(LEAKY, Limit::leaky_bucket(million, a_minute, LeakyMode::Police)?, leaky, in_use)
        },
        scenario(
            RESTED,
            Limit::token_bucket(1_000, Rate::new(1_000, second)?, RefillStyle::Smooth)?,
            token,
            ["1000", "1000", "1", "3600"],
        ),
        scenario(
            FIXED,
            Limit::fixed_window(million, hour, WindowAlign::Clock)?,
            fixed,
            ["1000000", "3600", "", ""],
        ),
        scenario(
            COUNTER,
            Limit::sliding_window_counter(million, hour, 1, EdgePolicy::Weigh)?,
            counter,
            ["1000000", "3600", "", ""],
        ),
        scenario(
            SHORT_COUNTER,
            Limit::sliding_window_counter(million, 20 * second, 1, EdgePolicy::Weigh)?,
            counter,
            ["1000000", "20", "", ""],
        ),
        scenario(
            LOG,
            Limit::sliding_window_log(1_000, hour, LogPolicy::Admitted)?,
            log,
            ["1000", "3600", "", ""],
        ),
        RedisScenario {
            keys: 1,
            ..scenario(
                DENIED_LOG,
                Limit::sliding_window_log(100, second, LogPolicy::Admitted)?,
                log,
                ["100", "1", "", ""],
            )
        },
        RedisScenario {
            keys: HOT_KEYS,
            pace: Pace::SentTime,
            ..scenario(
                HOT_LOG,
                Limit::sliding_window_log(100, second, LogPolicy::Admitted)?,
                log,
                ["100", "1", "", ""],
            )
        },
        RedisScenario {
            keys: HOT_KEYS,
            pace: Pace::Clock,
            ..scenario(
                PACED_LOG,
                Limit::sliding_window_log(100, second, LogPolicy::Admitted)?,
                log,
                ["100", "1", "", ""],
            )
        },
    ])
}

/// Functions of `floor.lua` and their names in the report.
pub(super) const FLOOR_INCRBY: &str = "floor: TIME, INCRBY";
pub(super) const FLOOR_SETRANGE: &str = "floor: TIME, GET, SETRANGE";
pub(super) const FLOOR_GETRANGE: &str = "floor: TIME, GETRANGE";
const FLOORS: [(&str, &str); 5] = [
    ("floor: an empty function", "floor_empty"),
    (FLOOR_INCRBY, "floor_incrby"),
    (FLOOR_GETRANGE, "floor_getrange"),
    (FLOOR_SETRANGE, "floor_setrange"),
    ("floor: TIME, GET, SET", "floor_set"),
];

/// The contenders of the floor, with keys and arguments as long as those of the library.
pub(super) fn floors(depth: usize, requests: usize) -> Result<Vec<RedisContender>, Box<dyn Error>> {
    let limit = Limit::fixed_window(1, Duration::from_secs(1), WindowAlign::Clock)?;
    let charge = ratekeeper::redis::wire::charge(&limit, 1);
    let floor = |(name, function): (&str, &str)| {
        let key = |number: usize| format!("rate_limit:{function}:{{{:032x}}}", number * 7_919 % KEYS);
        let by = Implementation::Nothing;
        let mut floor = RedisContender::new(name.to_owned(), by, depth, requests, |packed, number| {
            // As long as the names of the library's functions.
            let function = format!("{function:_<27}");
            pack(packed, &[b"FCALL", function.as_bytes(), b"1", key(number).as_bytes(), &charge]);
        });
        if name == FLOOR_GETRANGE {
            // As long as the head of a log.
            floor.before = pipelines(0, KEYS.div_ceil(depth), depth, 1, &mut |packed, number| {
                pack(packed, &[b"SETRANGE", key(number).as_bytes(), b"97", b"x"]);
            });
        }
        floor
    };
    Ok(FLOORS.into_iter().map(floor).collect())
}

/// How decisions are made.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Implementation {
    Baseline,
    Ours,
    OursShared,
    /// None: the cost of an empty call to Redis.
    Nothing,
}

/// A contender's packed commands.
pub(super) struct RedisContender {
    pub(super) name: String,
    pub(super) by: Implementation,
    /// Sent before the first round, so that every key exists.
    pub(super) before: Vec<Vec<u8>>,
    /// The pipelines of each round, or one set for all rounds.
    pub(super) rounds: Vec<Vec<Vec<u8>>>,
    /// Pipelines of a round that are not measured.
    pub(super) warm_up: usize,
    /// Commands, and therefore replies, per pipeline.
    pub(super) replies: usize,
    pub(super) decisions: usize,
    /// A tick and its number of pipelines, if requests are paced by the clock.
    pub(super) tick: Option<(Duration, usize)>,
}

impl RedisContender {
    /// Creates a contender; `make` packs one command, given the number of its first request.
    pub(super) fn new(
        name: String,
        by: Implementation,
        depth: usize,
        requests: usize,
        mut make: impl FnMut(&mut Vec<u8>, usize),
    ) -> RedisContender {
        let per_command = if by == Implementation::OursShared { SHARED } else { 1 };
        let commands = depth.div_ceil(per_command);
        let decisions = commands * per_command;
        let round = pipelines(0, requests.div_ceil(decisions), commands, per_command, &mut make);
        RedisContender {
            name,
            by,
            before: Vec::new(),
            rounds: vec![round],
            warm_up: 0,
            replies: commands,
            decisions,
            tick: None,
        }
    }
}

fn pipelines(
    mut number: usize,
    count: usize,
    commands: usize,
    per_command: usize,
    make: &mut impl FnMut(&mut Vec<u8>, usize),
) -> Vec<Vec<u8>> {
    let pipeline = |_| {
        let mut packed = Vec::new();
        for _ in 0..commands {
            make(&mut packed, number);
            number += per_command;
        }
        packed
    };
    (0..count).map(pipeline).collect()
}

/// Returns whether a reply admits its request; `None` for a command with several requests.
pub(super) fn is_allowed(by: Implementation, reply: &Reply) -> Option<bool> {
    match (by, reply) {
        // A byte of flags follows the 8-byte instant of the decision.
        (Implementation::Ours, Reply::Text(text)) => Some(text.get(8)? % 2 == 1),
        (Implementation::Baseline, Reply::Many(parts)) => Some(*parts.first()? == Reply::Number(1)),
        _ => None,
    }
}

/// The loaded scripts, and the extent of the load.
pub(super) struct LoadSettings<'a> {
    pub(super) function: &'a str,
    pub(super) sha: &'a str,
    /// Decisions per pipeline, and per round.
    pub(super) depth: usize,
    pub(super) requests: usize,
    pub(super) rounds: usize,
    /// Ticks per round that fill the window, and ticks that are measured.
    pub(super) ticks_before: usize,
    pub(super) ticks: usize,
}

impl RedisScenario {
    /// Returns the baseline's script. If the time is sent with the request, the script reads it from its arguments.
    pub(super) fn script(&self) -> String {
        match self.pace {
            Pace::SentTime => self.script.replace("redis.call('TIME')", "{ ARGV[3], ARGV[4] }"),
            Pace::Fast | Pace::Clock => self.script.to_owned(),
        }
    }

    /// Returns the contenders of this scenario.
    pub(super) fn contenders(&self, loaded: &LoadSettings<'_>) -> Vec<RedisContender> {
        let mut ways = vec![Implementation::Baseline, Implementation::Ours];
        if self.is_shared {
            ways.push(Implementation::OursShared);
        }
        ways.into_iter().map(|by| self.contender(by, loaded)).collect()
    }

    fn contender(&self, by: Implementation, loaded: &LoadSettings<'_>) -> RedisContender {
        let RedisScenario { name, keys, pace, .. } = self;
        let per_command = if by == Implementation::OursShared { SHARED } else { 1 };
        let mut make = self.command(by, loaded);
        let requests = if *pace == Pace::Fast {
            loaded.requests
        } else {
            (loaded.ticks_before + loaded.ticks) * HOT_KEYS
        };
        let name = match by {
            Implementation::Baseline => format!("{name}, baseline"),
            Implementation::OursShared => format!("{name}, ours, {SHARED} a call"),
            Implementation::Ours | Implementation::Nothing => format!("{name}, ours"),
        };
        let mut contender = RedisContender::new(name, by, loaded.depth, requests, &mut make);
        let (commands, decisions) = (contender.replies, contender.decisions);
        match pace {
            Pace::Fast => {
                contender.before = pipelines(0, keys.div_ceil(decisions), commands, per_command, &mut make);
            }
            Pace::Clock => contender.tick = Some((TICK, HOT_KEYS / decisions)),
            Pace::SentTime => {
                // The sent time continues from round to round.
                let count = requests / decisions;
                contender.rounds = (0..loaded.rounds)
                    .map(|round| pipelines(round * requests, count, commands, per_command, &mut make))
                    .collect();
            }
        }
        if *pace != Pace::Fast {
            contender.warm_up = loaded.ticks_before * HOT_KEYS / decisions;
        }
        contender
    }

    /// Returns a function that packs a command, given the number of its first request.
    fn command(&self, by: Implementation, loaded: &LoadSettings<'_>) -> impl FnMut(&mut Vec<u8>, usize) {
        let RedisScenario { name, limit, arguments, keys, pace, .. } = self;
        let (keys, sends_time) = (*keys, *pace == Pace::SentTime);
        // An order that defeats caches.
        let key = move |number: usize| number * 7_919 % keys;
        let (function, sha) = (loaded.function.to_owned(), loaded.sha.to_owned());
        let charge = ratekeeper::redis::wire::charge(limit, 1);
        let count = if by == Implementation::OursShared { SHARED } else { 1 };
        let depth = loaded.depth;
        let prefix = format!("rate_limit:{}:", limit.name());
        // In production this part of the key is a hash; here it identifies the scenario.
        let scenario = name
            .bytes()
            .fold(depth as u128, |hash, byte| hash.wrapping_mul(31).wrapping_add(u128::from(byte)))
            << 40
            | (count as u128) << 32;
        move |packed, number| {
            let at = TICK * u32::try_from(number / HOT_KEYS).unwrap_or(u32::MAX)
                + Duration::from_secs(1_700_000_000);
            if by == Implementation::Baseline {
                let key = format!("{name}:{depth}:user{}", key(number));
                let time = [at.as_secs().to_string(), at.subsec_micros().to_string()];
                let mut parts: Vec<&[u8]> = vec![b"EVALSHA", sha.as_bytes(), b"1", key.as_bytes()];
                parts.extend(arguments.iter().map(|part| part.as_bytes()));
                if sends_time {
                    parts.truncate(6);
                    parts.extend(time.iter().map(|part| part.as_bytes()));
                }
                pack(packed, &parts);
                return;
            }
            // Keys have the same length as in production.
            let keys: Vec<String> = (number..number + count)
                .map(|number| format!("{prefix}{{{:032x}}}", scenario + key(number) as u128))
                .collect();
            let count_text = count.to_string();
            let mut parts: Vec<&[u8]> = vec![b"FCALL", function.as_bytes(), count_text.as_bytes()];
            parts.extend(keys.iter().map(|key| key.as_bytes()));
            parts.extend(std::iter::repeat_n(charge.as_slice(), count));
            let time = ratekeeper::redis::wire::time(Time::EPOCH.saturating_add(at));
            if sends_time {
                parts.push(&time);
            }
            pack(packed, &parts);
        }
    }
}
