//! The figures for people, and what was promised.

use std::fmt;

use serde::Serialize;

use super::DEPTHS;
use super::ours::{CHECK, CL_THROTTLE};
use super::peers::THROTTLECRAB;
use crate::goals::Goal;

/// One contender: its figures in each round.
#[derive(Serialize)]
pub(super) struct Row {
    pub(super) name: &'static str,
    pub(super) depth: usize,
    pub(super) cpu_us: Vec<f64>,
    pub(super) per_second: Vec<f64>,
}

impl Row {
    pub(super) fn new(name: &'static str, depth: usize) -> Row {
        Row { name, depth, cpu_us: Vec::new(), per_second: Vec::new() }
    }
}

#[derive(Serialize)]
pub(crate) struct Report {
    quick: bool,
    left_out: Vec<String>,
    rows: Vec<Row>,
    goals: Vec<Goal>,
}

fn median(figures: &[f64]) -> f64 {
    let mut sorted = figures.to_vec();
    sorted.sort_unstable_by(f64::total_cmp);
    sorted.get(sorted.len() / 2).copied().unwrap_or(f64::NAN)
}

/// Ours over the other's, round by round; none if one of them does not take part.
fn ratio(rows: &[Row], depth: usize, ours: &str, other: &str) -> Option<f64> {
    let find = |name: &str| rows.iter().find(|row| row.depth == depth && row.name == name);
    let pairs = find(ours)?.cpu_us.iter().zip(&find(other)?.cpu_us);
    Some(median(&pairs.map(|(ours, other)| ours / other).collect::<Vec<_>>()))
}

impl Report {
    pub(super) fn new(quick: bool, left_out: Vec<String>, rows: Vec<Row>) -> Report {
        let mut goals = Vec::new();
        for (name, depth) in
            [CL_THROTTLE, CHECK].into_iter().flat_map(|name| DEPTHS.map(|depth| (name, depth)))
        {
            if let Some(ratio) = ratio(&rows, depth, name, THROTTLECRAB) {
                let promise = format!("<= throttlecrab's processor time, {name}, {depth} in a pipeline");
                goals.push(Goal::new(promise, format!("{ratio:.2}"), ratio <= 1.0));
            }
        }
        Report { quick, left_out, rows, goals }
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.quick {
            writeln!(f, "QUICK: a smoke test of one round. These figures are not to be quoted.\n")?;
        }
        writeln!(
            f,
            "Processor time per decision in microseconds, and decisions per second, by how many are in a pipeline; medians\n\
             of interleaved rounds.\n"
        )?;
        writeln!(f, "{:<28}  {:>9}  {:>12}  {:>12}", "", "pipeline", "us/decision", "decisions/s")?;
        for Row { name, depth, cpu_us, per_second } in &self.rows {
            let (cpu_us, per_second) = (median(cpu_us), median(per_second));
            writeln!(f, "{name:<28}  {depth:>9}  {cpu_us:>12.2}  {per_second:>12.0}")?;
        }
        self.left_out.iter().try_for_each(|who| writeln!(f, "\nLeft out: {who}"))?;
        writeln!(f, "\nGoals\n")?;
        self.goals.iter().try_for_each(|goal| writeln!(f, "{goal}"))
    }
}
