//! Prints the figures and the goals.

use std::fmt;

use serde::Serialize;

use super::ours::{CHECK, CL_THROTTLE, GRPC, HTTP};
use super::peers::THROTTLECRAB;
use super::{ApiJob, Transport};
use crate::figures::{median, median_ratio};
use crate::goals::Goal;

/// The measurement of one contender in one round.
#[derive(Clone, Copy, Serialize)]
pub(super) struct ApisFigure {
    /// Processor time per decision, in microseconds.
    pub(super) cpu_us: f64,
    pub(super) per_second: f64,
}

/// One contender, checked in one transport: a figure per round.
#[derive(Serialize)]
pub(super) struct ApisRow {
    pub(super) name: &'static str,
    pub(super) transport: Transport,
    pub(super) job: ApiJob,
    pub(super) rounds: Vec<ApisFigure>,
}

#[derive(Serialize)]
pub(crate) struct ApisReport {
    quick: bool,
    left_out: Option<String>,
    rows: Vec<ApisRow>,
    goals: Vec<Goal>,
}

impl ApisRow {
    pub(super) fn new(name: &'static str, transport: Transport, job: ApiJob) -> ApisRow {
        ApisRow { name, transport, job, rounds: Vec::new() }
    }

    fn median(&self, of: impl Fn(&ApisFigure) -> f64) -> f64 {
        median(self.rounds.iter().map(of))
    }

    /// Returns the median over the rounds of this contender's figure divided by another's.
    fn ratio(&self, to: &ApisRow, of: impl Fn(&ApisFigure) -> f64) -> f64 {
        median_ratio(&self.rounds, &to.rounds, of)
    }
}

fn find<'a>(rows: &'a [ApisRow], name: &str, transport: Transport, job: ApiJob) -> Option<&'a ApisRow> {
    rows.iter().find(|row| row.name == name && row.transport == transport && row.job == job)
}

/// Compares processor time per decision with throttlecrab's, if it is installed.
fn goals(rows: &[ApisRow]) -> Vec<Goal> {
    let promised = [
        (CL_THROTTLE, Transport::Piped),
        (CL_THROTTLE, Transport::Alone),
        (CHECK, Transport::Piped),
        (CHECK, Transport::Alone),
        (HTTP, Transport::Http),
        (GRPC, Transport::Grpc),
    ];
    let goal = |(name, transport): (&str, Transport)| {
        let to_theirs = |job| {
            let theirs = find(rows, THROTTLECRAB, transport, job)?;
            Some(find(rows, name, transport, job)?.ratio(theirs, |figure| figure.cpu_us))
        };
        let (allowed, denied) = to_theirs(ApiJob::Allowed).zip(to_theirs(ApiJob::Denied))?;
        let promise = format!("<= throttlecrab's processor time per decision, {name}, {}", transport.name());
        let figure = format!("{allowed:.2}x allowed, {denied:.2}x denied");
        Some(Goal::new(promise, figure, allowed.max(denied) <= 1.0))
    };
    promised.into_iter().filter_map(goal).collect()
}

impl ApisReport {
    pub(super) fn new(quick: bool, left_out: Option<String>, rows: Vec<ApisRow>) -> ApisReport {
        ApisReport { quick, left_out, goals: goals(&rows), rows }
    }
}

impl fmt::Display for ApisReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.quick {
            writeln!(f, "QUICK: a smoke test of one round. These figures are not to be quoted.\n")?;
        }
        writeln!(
            f,
            "Processor time of a server per decision, in microseconds, and decisions per second. Medians of interleaved\n\
             rounds; a ratio is the median of the rounds' ratios.\n"
        )?;
        if let Some(missing) = &self.left_out {
            writeln!(f, "left out: {missing}\n")?;
        }
        for (transport, job) in
            Transport::ALL.into_iter().flat_map(|transport| ApiJob::ALL.map(|job| (transport, job)))
        {
            let title = format!("{}, {}", transport.name(), job.name());
            let theirs = find(&self.rows, THROTTLECRAB, transport, job);
            writeln!(
                f,
                "{title:<32}  {:>7}  {:>15}  {:>11}  {:>15}",
                "CPU us", "to throttlecrab", "decisions/s", "to throttlecrab"
            )?;
            for row in self.rows.iter().filter(|row| row.transport == transport && row.job == job) {
                let ratio = |of: fn(&ApisFigure) -> f64| {
                    theirs.map_or("-".to_owned(), |theirs| format!("{:.2}x", row.ratio(theirs, of)))
                };
                writeln!(
                    f,
                    "{:<32}  {:>7.2}  {:>15}  {:>11.0}  {:>15}",
                    row.name,
                    row.median(|figure| figure.cpu_us),
                    ratio(|figure| figure.cpu_us),
                    row.median(|figure| figure.per_second),
                    ratio(|figure| figure.per_second),
                )?;
            }
            writeln!(f)?;
        }
        writeln!(
            f,
            "Our APIs beside each other: processor time per decision to that of RK.CHECK, one at a time.\n"
        )?;
        for (name, transport) in [(CHECK, Transport::Piped), (HTTP, Transport::Http), (GRPC, Transport::Grpc)]
        {
            let to_resp = |job| {
                let resp = find(&self.rows, CHECK, Transport::Alone, job)?;
                Some(find(&self.rows, name, transport, job)?.ratio(resp, |figure| figure.cpu_us))
            };
            let shown = |job| to_resp(job).map_or("-".to_owned(), |ratio| format!("{ratio:.2}x"));
            let (allowed, denied) = (shown(ApiJob::Allowed), shown(ApiJob::Denied));
            writeln!(f, "{:<32}  allowed {allowed:>6}  denied {denied:>6}", transport.name())?;
        }
        writeln!(f, "\nGoals\n")?;
        self.goals.iter().try_for_each(|goal| writeln!(f, "{goal}"))
    }
}
