//! What is asked: each algorithm by our library and by the usual script, over the same keys in the same order.

use std::error::Error;
use std::time::Duration;

use tollgate::{Align, Count, Edge, Limit, Mode, Rate, Style, Time};

use super::wire::{Reply, pack};

/// Decisions in one call, where calls are shared.
pub(super) const SHARED: usize = 16;
/// Keys of a scenario that is about many.
const KEYS: usize = 10_000;
/// Keys of a log that is held at its limit. Each is asked once a tick.
const HOT_KEYS: usize = 64;
/// A tick of those: 95 requests a second of the 100 that are allowed.
const TICK: Duration = Duration::from_micros(10_500);

/// When requests come.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Pace {
    /// As fast as it goes.
    Fast,
    /// One for each key a tick, by the clock. The server sleeps in between, and wakes up for each.
    Clock,
    /// The same by a time that is said with the request, as fast as it goes. Neither side then asks for the time.
    Said,
}

/// An algorithm with both its forms: our limit, and the baseline's script and arguments.
pub(super) struct Scenario {
    pub(super) name: &'static str,
    script: &'static str,
    limit: Limit,
    arguments: [&'static str; 4],
    keys: usize,
    pace: Pace,
    /// Whether it is measured with several decisions in a call, too.
    is_shared: bool,
}

/// Keys that are in use: each has been charged before, and none is as good as new when its turn comes again.
pub(super) const TOKEN: &str = "token bucket";
pub(super) const LEAKY: &str = "leaky bucket";
/// Keys that are full again whenever their turn comes.
pub(super) const RESTED: &str = "token bucket, rested keys";
pub(super) const FIXED: &str = "fixed window";
pub(super) const COUNTER: &str = "counter";
/// A window so short that a good part of the requests begin one, and the window before has to be weighed.
pub(super) const SHORT_COUNTER: &str = "counter, new windows";
/// Logs that grow: nothing leaves them.
pub(super) const LOG: &str = "log, growing";
/// Logs that hold 95 of 100 a second, and admit everything: as many leave as come.
pub(super) const HOT_LOG: &str = "hot log, admitted";
pub(super) const PACED_LOG: &str = "hot log, admitted, by the clock";
/// One key far above its 100 a second.
pub(super) const DENIED_LOG: &str = "hot log, denied";

pub(super) fn scenarios() -> Result<Vec<Scenario>, Box<dyn Error>> {
    let (hour, minute, second) =
        (Duration::from_secs(3_600), Duration::from_secs(60), Duration::from_secs(1));
    let a_minute = Rate::new(1, minute)?;
    let scenario = |name, limit, script, arguments| Scenario {
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
        Scenario {
            is_shared: true,
            ..scenario(TOKEN, Limit::token_bucket(million, a_minute, Style::Smooth)?, token, in_use)
        },
        Scenario {
            is_shared: true,
            ..scenario(LEAKY, Limit::leaky_bucket(million, a_minute, Mode::Police)?, leaky, in_use)
        },
        scenario(
            RESTED,
            Limit::token_bucket(1_000, Rate::new(1_000, second)?, Style::Smooth)?,
            token,
            ["1000", "1000", "1", "3600"],
        ),
        scenario(
            FIXED,
            Limit::fixed_window(million, hour, Align::Clock)?,
            fixed,
            ["1000000", "3600", "", ""],
        ),
        scenario(
            COUNTER,
            Limit::sliding_window_counter(million, hour, 1, Edge::Weigh)?,
            counter,
            ["1000000", "3600", "", ""],
        ),
        scenario(
            SHORT_COUNTER,
            Limit::sliding_window_counter(million, 20 * second, 1, Edge::Weigh)?,
            counter,
            ["1000000", "20", "", ""],
        ),
        scenario(
            LOG,
            Limit::sliding_window_log(1_000, hour, Count::Admitted)?,
            log,
            ["1000", "3600", "", ""],
        ),
        Scenario {
            keys: 1,
            ..scenario(
                DENIED_LOG,
                Limit::sliding_window_log(100, second, Count::Admitted)?,
                log,
                ["100", "1", "", ""],
            )
        },
        Scenario {
            keys: HOT_KEYS,
            pace: Pace::Said,
            ..scenario(
                HOT_LOG,
                Limit::sliding_window_log(100, second, Count::Admitted)?,
                log,
                ["100", "1", "", ""],
            )
        },
        Scenario {
            keys: HOT_KEYS,
            pace: Pace::Clock,
            ..scenario(
                PACED_LOG,
                Limit::sliding_window_log(100, second, Count::Admitted)?,
                log,
                ["100", "1", "", ""],
            )
        },
    ])
}

/// How a contender is asked.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum By {
    Baseline,
    Ours,
    OursShared,
    /// Neither: what Redis takes for a call with nothing in it.
    Nothing,
}

/// Commands that are packed and ready.
pub(super) struct Contender {
    pub(super) name: String,
    pub(super) by: By,
    /// Sent before the first round, so that every key is there.
    pub(super) before: Vec<Vec<u8>>,
    /// One for each round, or one for all rounds.
    pub(super) rounds: Vec<Vec<Vec<u8>>>,
    /// Pipelines of a round that are not measured.
    pub(super) warm_up: usize,
    /// Commands, and so replies, of a pipeline.
    pub(super) replies: usize,
    pub(super) decisions: usize,
    /// A tick, and how many pipelines go in it, if requests come by the clock.
    pub(super) tick: Option<(Duration, usize)>,
}

impl Contender {
    /// `make` packs one command, given the number of its first request.
    pub(super) fn new(
        name: String,
        by: By,
        depth: usize,
        requests: usize,
        mut make: impl FnMut(&mut Vec<u8>, usize),
    ) -> Contender {
        let per_command = if by == By::OursShared { SHARED } else { 1 };
        let commands = depth.div_ceil(per_command);
        let decisions = commands * per_command;
        let round = pipelines(0, requests.div_ceil(decisions), commands, per_command, &mut make);
        Contender {
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

/// Whether a request was admitted, by the reply to its command; nothing where a command holds several.
pub(super) fn is_admitted(by: By, reply: &Reply) -> Option<bool> {
    match (by, reply) {
        // After the instant of the decision a byte of flags.
        (By::Ours, Reply::Text(text)) => Some(text.get(8)? % 2 == 1),
        (By::Baseline, Reply::Many(parts)) => Some(*parts.first()? == Reply::Number(1)),
        _ => None,
    }
}

/// What is loaded, and how much is asked of it.
pub(super) struct Loaded<'a> {
    pub(super) function: &'a str,
    pub(super) sha: &'a str,
    /// Decisions in a pipeline, and in a round.
    pub(super) depth: usize,
    pub(super) requests: usize,
    pub(super) rounds: usize,
    /// Ticks of a round that fill the window before anything is measured, and those that are.
    pub(super) ticks_before: usize,
    pub(super) ticks: usize,
}

impl Scenario {
    /// The baseline's script. Where the time is said, it takes that instead of asking for it.
    pub(super) fn script(&self) -> String {
        match self.pace {
            Pace::Said => self.script.replace("redis.call('TIME')", "{ ARGV[3], ARGV[4] }"),
            Pace::Fast | Pace::Clock => self.script.to_owned(),
        }
    }

    /// All ways in which the scenario is asked.
    pub(super) fn contenders(&self, loaded: &Loaded<'_>) -> Vec<Contender> {
        let mut ways = vec![By::Baseline, By::Ours];
        if self.is_shared {
            ways.push(By::OursShared);
        }
        ways.into_iter().map(|by| self.contender(by, loaded)).collect()
    }

    fn contender(&self, by: By, loaded: &Loaded<'_>) -> Contender {
        let Scenario { name, keys, pace, .. } = self;
        let per_command = if by == By::OursShared { SHARED } else { 1 };
        let mut make = self.command(by, loaded);
        let requests = if *pace == Pace::Fast {
            loaded.requests
        } else {
            (loaded.ticks_before + loaded.ticks) * HOT_KEYS
        };
        let name = match by {
            By::Baseline => format!("{name}, baseline"),
            By::OursShared => format!("{name}, ours, {SHARED} a call"),
            By::Ours | By::Nothing => format!("{name}, ours"),
        };
        let mut contender = Contender::new(name, by, loaded.depth, requests, &mut make);
        let (commands, decisions) = (contender.replies, contender.decisions);
        match pace {
            Pace::Fast => {
                contender.before = pipelines(0, keys.div_ceil(decisions), commands, per_command, &mut make);
            }
            Pace::Clock => contender.tick = Some((TICK, HOT_KEYS / decisions)),
            Pace::Said => {
                // Time goes on from round to round.
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

    /// Packs a command, given the number of its first request.
    fn command(&self, by: By, loaded: &Loaded<'_>) -> impl FnMut(&mut Vec<u8>, usize) {
        let Scenario { name, limit, arguments, keys, pace, .. } = self;
        let (keys, is_said) = (*keys, *pace == Pace::Said);
        // An order that no cache likes.
        let key = move |number: usize| number * 7_919 % keys;
        let (function, sha) = (loaded.function.to_owned(), loaded.sha.to_owned());
        let charge = tollgate::redis::wire::charge(limit, 1);
        let count = if by == By::OursShared { SHARED } else { 1 };
        let depth = loaded.depth;
        let prefix = format!("rate_limit:{}:", limit.name());
        // The scenario is part of what would be a hash.
        let scenario = name
            .bytes()
            .fold(depth as u128, |hash, byte| hash.wrapping_mul(31).wrapping_add(u128::from(byte)))
            << 40
            | (count as u128) << 32;
        move |packed, number| {
            let at = TICK * u32::try_from(number / HOT_KEYS).unwrap_or(u32::MAX)
                + Duration::from_secs(1_700_000_000);
            if by == By::Baseline {
                let key = format!("{name}:{depth}:user{}", key(number));
                let said = [at.as_secs().to_string(), at.subsec_micros().to_string()];
                let mut parts: Vec<&[u8]> = vec![b"EVALSHA", sha.as_bytes(), b"1", key.as_bytes()];
                parts.extend(arguments.iter().map(|part| part.as_bytes()));
                if is_said {
                    parts.truncate(6);
                    parts.extend(said.iter().map(|part| part.as_bytes()));
                }
                pack(packed, &parts);
                return;
            }
            // As long as they are in production.
            let keys: Vec<String> = (number..number + count)
                .map(|number| format!("{prefix}{{{:032x}}}", scenario + key(number) as u128))
                .collect();
            let count_text = count.to_string();
            let mut parts: Vec<&[u8]> = vec![b"FCALL", function.as_bytes(), count_text.as_bytes()];
            parts.extend(keys.iter().map(|key| key.as_bytes()));
            parts.extend(std::iter::repeat_n(charge.as_slice(), count));
            let said = tollgate::redis::wire::time(Time::EPOCH.saturating_add(at));
            if is_said {
                parts.push(&said);
            }
            pack(packed, &parts);
        }
    }
}
