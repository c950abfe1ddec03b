//! Prints the figures and the goals.

use std::fmt;

use serde::Serialize;

use super::GatewayJob;
use super::ours::{ACCESS_LOG, NO_ADMIN, NO_HEADERS, NO_LIMITS, RATEKEEPER, REDIS};
use super::peers::{NGINX, NGINX_BARE};
use crate::figures::{median, median_ratio};
use crate::goals::Goal;

/// The measurement of one contender in one round.
#[derive(Clone, Copy, Serialize)]
pub(super) struct GatewayFigure {
    /// Processor time per request, in microseconds.
    pub(super) cpu_us: f64,
    pub(super) per_second: f64,
    pub(super) p50_us: f64,
    pub(super) p99_us: f64,
}

/// One contender at one job: a figure per round.
#[derive(Serialize)]
pub(super) struct GatewayRow {
    name: &'static str,
    job: GatewayJob,
    pub(super) rounds: Vec<GatewayFigure>,
}

#[derive(Serialize)]
pub(crate) struct GatewayReport {
    quick: bool,
    left_out: Vec<String>,
    rows: Vec<GatewayRow>,
    goals: Vec<Goal>,
}

impl GatewayRow {
    pub(super) fn new(name: &'static str, job: GatewayJob) -> GatewayRow {
        GatewayRow { name, job, rounds: Vec::new() }
    }

    fn median(&self, of: impl Fn(&GatewayFigure) -> f64) -> f64 {
        median(self.rounds.iter().map(of))
    }
}

fn find<'a>(rows: &'a [GatewayRow], name: &str, job: GatewayJob) -> Option<&'a GatewayRow> {
    rows.iter().find(|row| row.name == name && row.job == job)
}

/// Returns the median over the rounds of one contender's figure divided by another's.
fn ratio(
    rows: &[GatewayRow],
    job: GatewayJob,
    [name, to]: [&str; 2],
    of: impl Fn(&GatewayFigure) -> f64,
) -> f64 {
    let Some((row, to)) = find(rows, name, job).zip(find(rows, to, job)) else { return f64::NAN };
    median_ratio(&row.rounds, &to.rounds, of)
}

fn goals(rows: &[GatewayRow]) -> Vec<Goal> {
    let goal = |name: &str, job: GatewayJob, max: f64, words: &str| {
        let to = |peer| ratio(rows, job, [name, peer], |figure| figure.cpu_us);
        let promise = format!("<= {max:.2}x nginx's processor time per {words}, headers and metrics on");
        let figure = format!("{:.2}x ({:.2}x one that sets no forwarded headers)", to(NGINX), to(NGINX_BARE));
        Goal::new(promise, figure, to(NGINX) <= max)
    };
    vec![
        goal(RATEKEEPER, GatewayJob::Allowed, 1.05, "proxied request"),
        goal(RATEKEEPER, GatewayJob::Denied, 1.15, "denied request"),
        goal(REDIS, GatewayJob::Allowed, 1.3, "proxied request, limits in Redis"),
    ]
}

impl GatewayReport {
    pub(super) fn new(quick: bool, left_out: Vec<String>, rows: Vec<GatewayRow>) -> GatewayReport {
        GatewayReport { quick, left_out, goals: goals(&rows), rows }
    }
}

impl fmt::Display for GatewayReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.quick {
            writeln!(f, "QUICK: a smoke test of one round. These figures are not to be quoted.\n")?;
        }
        writeln!(
            f,
            "Processor time of a proxy per request, in microseconds; 64 keep-alive connections, small responses, one user.\n\
             Medians of interleaved rounds; a ratio to nginx is the median of the rounds' ratios.\n"
        )?;
        for missing in &self.left_out {
            writeln!(f, "left out: {missing}")?;
        }
        for (job, title) in
            [(GatewayJob::Allowed, "allowed: proxied, 200"), (GatewayJob::Denied, "denied: 429")]
        {
            writeln!(
                f,
                "{title:<30}  {:>8}  {:>8}  {:>11}  {:>8}  {:>8}  {:>8}",
                "CPU us", "to nginx", "requests/s", "to nginx", "p50 us", "p99 us"
            )?;
            for row in self.rows.iter().filter(|row| row.job == job) {
                writeln!(
                    f,
                    "{:<30}  {:>8.1}  {:>7.2}x  {:>11.0}  {:>7.2}x  {:>8.0}  {:>8.0}",
                    row.name,
                    row.median(|figure| figure.cpu_us),
                    ratio(&self.rows, job, [row.name, NGINX], |figure| figure.cpu_us),
                    row.median(|figure| figure.per_second),
                    ratio(&self.rows, job, [row.name, NGINX], |figure| figure.per_second),
                    row.median(|figure| figure.p50_us),
                    row.median(|figure| figure.p99_us),
                )?;
            }
            writeln!(f)?;
        }
        writeln!(f, "What each feature of ours costs, in microseconds of processor time per request.\n")?;
        for (what, on, off) in [
            ("headers", RATEKEEPER, NO_HEADERS),
            ("admin listener", RATEKEEPER, NO_ADMIN),
            ("access log", ACCESS_LOG, RATEKEEPER),
            ("limits, headers included", RATEKEEPER, NO_LIMITS),
            ("limits in Redis", REDIS, RATEKEEPER),
        ] {
            let cost = |job| {
                // A contender without limits denies nothing.
                let (on, off) = find(&self.rows, on, job).zip(find(&self.rows, off, job))?;
                let pairs = on.rounds.iter().zip(&off.rounds);
                Some(median(pairs.map(|(on, off)| on.cpu_us - off.cpu_us)))
            };
            let shown = |job| cost(job).map_or("-".to_owned(), |cost| format!("{cost:+.1}"));
            writeln!(
                f,
                "{what:<30}  allowed {:>6}  denied {:>6}",
                shown(GatewayJob::Allowed),
                shown(GatewayJob::Denied)
            )?;
        }
        writeln!(f, "\nGoals\n")?;
        self.goals.iter().try_for_each(|goal| writeln!(f, "{goal}"))
    }
}
