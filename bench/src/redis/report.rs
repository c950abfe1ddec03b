//! Prints the figures and the goals.

use std::fmt;

use super::programs::LeaseFigures;
use super::scenarios::{
    COUNTER, DENIED_LOG, FIXED, FLOOR_GETRANGE, FLOOR_INCRBY, FLOOR_SETRANGE, HOT_LOG, LEAKY, PACED_LOG,
    SHARED, SHORT_COUNTER, TOKEN,
};
use super::{DEPTHS, LogBytes, RedisReport, RedisRow, programs};
use crate::figures::{median, median_ratio};
use crate::goals::Goal;

/// Returns the median over the rounds of our figure divided by the baseline's.
fn ratio(rows: &[RedisRow], depth: usize, ours: &str, baseline: &str) -> f64 {
    let find = |name: &str| rows.iter().find(|row| row.depth == depth && row.name == name);
    let Some((ours, baseline)) = find(ours).zip(find(baseline)) else { return f64::NAN };
    median_ratio(&ours.server_us_per_decision, &baseline.server_us_per_decision, |figure| *figure)
}

/// The floor of a scenario: the commands that its decisions need in Redis.
fn floor(name: &str) -> Option<&'static str> {
    match name {
        TOKEN | LEAKY | FIXED => Some(FLOOR_INCRBY),
        COUNTER | SHORT_COUNTER => Some(FLOOR_SETRANGE),
        DENIED_LOG => Some(FLOOR_GETRANGE),
        _ => None,
    }
}

/// Checks the goals. They apply to the deepest pipeline, where decisions are nearly all of the server's work; the
/// ratios at the other depths are printed beside.
pub(super) fn goals(
    rows: &[RedisRow],
    logs: &[LogBytes],
    denials: &programs::DenialFigures,
    leased: &LeaseFigures,
) -> Vec<Goal> {
    let mut goals = Vec::new();
    let shared = format!(", {SHARED} a call");
    for (name, how, max, words) in [
        (TOKEN, "", 0.4, "1/2.5"),
        (LEAKY, "", 0.4, "1/2.5"),
        (FIXED, "", 0.5, "1/2"),
        (COUNTER, "", 2.0 / 3.0, "2/3"),
        (SHORT_COUNTER, "", 2.0 / 3.0, "2/3"),
        (HOT_LOG, "", 1.0 / 3.0, "1/3"),
        (PACED_LOG, "", 1.0 / 3.0, "1/3"),
        (DENIED_LOG, "", 1.0 / 3.0, "1/3"),
        (TOKEN, shared.as_str(), 0.25, "1/4"),
        (LEAKY, shared.as_str(), 0.25, "1/4"),
    ] {
        let [deepest, others @ ..] = DEPTHS
            .map(|depth| ratio(rows, depth, &format!("{name}, ours{how}"), &format!("{name}, baseline")));
        let mut others: Vec<String> = others
            .iter()
            .zip(&DEPTHS[1..])
            .map(|(ratio, depth)| format!("{ratio:.2} with {depth} in a pipeline"))
            .collect();
        if let Some(floor) = floor(name).filter(|_| how.is_empty()) {
            let ratio = ratio(rows, DEPTHS[0], floor, &format!("{name}, baseline"));
            others.push(format!("the floor is {ratio:.2}"));
        }
        let promise = format!("<= {words} of the baseline's server time, {name}{how}");
        let figure = format!("{deepest:.2} ({})", others.join(", "));
        goals.push(Goal::new(promise, figure, deepest <= max));
    }
    for log in logs.iter().filter(|log| log.limit >= 100) {
        let figure = log.ours_value as f64 / f64::from(log.limit);
        let promise = format!("<= 9 bytes per entry, a full log of {}", log.limit);
        goals.push(Goal::new(promise, format!("{figure:.2}"), figure <= 9.0));
    }
    let promise = "denied keys before their retry_after cost Redis nothing".to_owned();
    let figure = format!("{} calls for {} checks (rechecked once a second)", denials.calls, denials.checks);
    goals.push(Goal::new(promise, figure, denials.calls * 1_000 <= denials.checks));
    let promise = ">= 20x the exact mode's decisions per second, leased".to_owned();
    let ratio = leased.leased / leased.exact;
    let figure = format!("{ratio:.1}x, {} calls for {} checks", leased.calls, leased.checks);
    goals.push(Goal::new(promise, figure, ratio >= 20.0));
    goals
}

impl fmt::Display for RedisReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.quick {
            writeln!(f, "QUICK: a smoke test with few requests. These figures are not to be quoted.\n")?;
        }
        writeln!(
            f,
            "The server's processor time per decision, in microseconds, by how many decisions are in a pipeline, and the\n\
             share that was allowed; medians of interleaved rounds.\n"
        )?;
        write!(f, "{:<44}", "")?;
        DEPTHS.iter().try_for_each(|depth| write!(f, "  {depth:>8}"))?;
        writeln!(f, "  {:>12}  {:>9}", "decisions/s", "allowed")?;
        let of_depth = |depth| self.rows.iter().filter(move |row| row.depth == depth);
        for (index, row) in of_depth(DEPTHS[0]).enumerate() {
            write!(f, "{:<44}", row.name)?;
            for row in DEPTHS.iter().filter_map(|&depth| of_depth(depth).nth(index)) {
                write!(f, "  {:>8.2}", median(row.server_us_per_decision.iter().copied()))?;
            }
            let allowed = row.allowed_percent.map_or("-".to_owned(), |percent| format!("{percent:.0} %"));
            writeln!(f, "  {:>12.0}  {allowed:>9}", median(row.decisions_per_second.iter().copied()))?;
        }
        writeln!(f, "\nBytes of a full log (MEMORY USAGE), and of its value.\n")?;
        writeln!(f, "{:<34}  {:>12}  {:>12}  {:>12}", "limit", "sorted set", "ours", "our value")?;
        for log in &self.logs {
            writeln!(
                f,
                "{:<34}  {:>12}  {:>12}  {:>12}",
                log.limit, log.sorted_set, log.ours, log.ours_value
            )?;
        }
        writeln!(
            f,
            "\nWhole programs, decisions per second: concurrent tasks, each with one check in flight.\n"
        )?;
        writeln!(f, "{:<34}  {:>12}  {:>12}", "tasks", "baseline", "ours")?;
        for row in &self.programs {
            writeln!(f, "{:<34}  {:>12.0}  {:>12.0}", row.tasks, row.baseline, row.ours)?;
        }
        writeln!(f, "{:<34}  {:>12}  {:>12.0}", "1, from the denial cache", "-", self.denials.per_second)?;
        let LeaseFigures { exact, leased, .. } = self.leased;
        writeln!(f, "{:<34}  {:>12}  {exact:>12.0}", "64, one key", "-")?;
        writeln!(f, "{:<34}  {:>12}  {leased:>12.0}", "64, one key, leased", "-")?;
        writeln!(f, "\nGoals\n")?;
        self.goals.iter().try_for_each(|goal| writeln!(f, "{goal}"))
    }
}
