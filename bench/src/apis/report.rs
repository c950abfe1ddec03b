//! Prints the figures and the goals.

use std::fmt;

use serde::Serialize;

use super::ours::{CHECK, CL_THROTTLE, GRPC, HTTP};
use super::peers::THROTTLECRAB;
use super::{Job, Way};
use crate::goals::Goal;

/// The measurement of one contender in one round.
#[derive(Clone, Copy, Serialize)]
pub(super) struct Figure {
    /// Processor time per decision, in microseconds.
    pub(super) cpu_us: f64,
    pub(super) per_second: f64,
}

/// One contender, checked in one way: a figure per round.
#[derive(Serialize)]
pub(super) struct Row {
    pub(super) name: &'static str,
    pub(super) way: Way,
    pub(super) job: Job,
    pub(super) rounds: Vec<Figure>,
}

#[derive(Serialize)]
pub(crate) struct Report {
    quick: bool,
    left_out: Option<String>,
    rows: Vec<Row>,
    goals: Vec<Goal>,
}

impl Row {
    pub(super) fn new(name: &'static str, way: Way, job: Job) -> Row {
        Row { name, way, job, rounds: Vec::new() }
    }

    fn median(&self, of: impl Fn(&Figure) -> f64) -> f64 {
        middle(self.rounds.iter().map(of).collect())
    }

    /// Returns the median over the rounds of this contender's figure divided by another's.
    fn ratio(&self, to: &Row, of: impl Fn(&Figure) -> f64) -> f64 {
        middle(self.rounds.iter().zip(&to.rounds).map(|(one, other)| of(one) / of(other)).collect())
    }
}

/// Returns the median; the number of rounds is odd.
fn middle(mut figures: Vec<f64>) -> f64 {
    figures.sort_unstable_by(f64::total_cmp);
    figures.get(figures.len() / 2).copied().unwrap_or(f64::NAN)
}

fn find<'a>(rows: &'a [Row], name: &str, way: Way, job: Job) -> Option<&'a Row> {
    rows.iter().find(|row| row.name == name && row.way == way && row.job == job)
}

/// Compares processor time per decision with throttlecrab's, if it is installed.
fn goals(rows: &[Row]) -> Vec<Goal> {
    let promised = [
        (CL_THROTTLE, Way::Piped),
        (CL_THROTTLE, Way::Alone),
        (CHECK, Way::Piped),
        (CHECK, Way::Alone),
        (HTTP, Way::Http),
    ];
    let goal = |(name, way): (&str, Way)| {
        let to_theirs = |job| {
            let theirs = find(rows, THROTTLECRAB, way, job)?;
            Some(find(rows, name, way, job)?.ratio(theirs, |figure| figure.cpu_us))
        };
        let (allowed, denied) = to_theirs(Job::Allowed).zip(to_theirs(Job::Denied))?;
        let promise = format!("<= throttlecrab's processor time per decision, {name}, {}", way.name());
        let figure = format!("{allowed:.2}x allowed, {denied:.2}x denied");
        Some(Goal::new(promise, figure, allowed.max(denied) <= 1.0))
    };
    promised.into_iter().filter_map(goal).collect()
}

impl Report {
    pub(super) fn new(quick: bool, left_out: Option<String>, rows: Vec<Row>) -> Report {
        Report { quick, left_out, goals: goals(&rows), rows }
    }
}

impl fmt::Display for Report {
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
        for (way, job) in Way::ALL.into_iter().flat_map(|way| Job::ALL.map(|job| (way, job))) {
            let title = format!("{}, {}", way.name(), job.name());
            let theirs = find(&self.rows, THROTTLECRAB, way, job);
            writeln!(
                f,
                "{title:<32}  {:>7}  {:>15}  {:>11}  {:>15}",
                "CPU us", "to throttlecrab", "decisions/s", "to throttlecrab"
            )?;
            for row in self.rows.iter().filter(|row| row.way == way && row.job == job) {
                let ratio = |of: fn(&Figure) -> f64| {
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
        for (name, way) in [(CHECK, Way::Piped), (HTTP, Way::Http), (GRPC, Way::Grpc)] {
            let to_resp = |job| {
                let resp = find(&self.rows, CHECK, Way::Alone, job)?;
                Some(find(&self.rows, name, way, job)?.ratio(resp, |figure| figure.cpu_us))
            };
            let told = |job| to_resp(job).map_or("-".to_owned(), |ratio| format!("{ratio:.2}x"));
            let (allowed, denied) = (told(Job::Allowed), told(Job::Denied));
            writeln!(f, "{:<32}  allowed {allowed:>6}  denied {denied:>6}", way.name())?;
        }
        writeln!(f, "\nGoals\n")?;
        self.goals.iter().try_for_each(|goal| writeln!(f, "{goal}"))
    }
}
