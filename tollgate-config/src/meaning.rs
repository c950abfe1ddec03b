//! Typed -> limit. Defaults are filled in and every value is checked, once.

use tollgate_core::{Align, BUCKETS_MAX, Count, Edge, Limit, LimitError, Mode, Style};

use crate::error::{Place, Problem, known_instead, listed, quoted};
use crate::quantity::{self, Fault};
use crate::read::place;
use crate::typed::{self, Text};

const COUNT_DEFAULT: u32 = 10;
const RATE_DEFAULT: &str = "1/s";
const WINDOW_DEFAULT: &str = "60s";

pub(crate) fn limit(typed: &typed::Limit) -> Result<Limit, Problem> {
    let checked = match typed {
        typed::Limit::TokenBucket(it) => Limit::token_bucket(
            whole("capacity", it.capacity.as_ref(), COUNT_DEFAULT, u32::MAX)?,
            read(it.refill.as_ref(), RATE_DEFAULT, quantity::rate)?,
            word("style", it.style.as_ref(), &[("smooth", Style::Smooth), ("stepped", Style::Stepped)])?,
        ),
        typed::Limit::LeakyBucket(it) => Limit::leaky_bucket(
            whole("capacity", it.capacity.as_ref(), COUNT_DEFAULT, u32::MAX)?,
            read(it.leak.as_ref(), RATE_DEFAULT, quantity::rate)?,
            word("mode", it.mode.as_ref(), &[("police", Mode::Police), ("shape", Mode::Shape)])?,
        ),
        typed::Limit::FixedWindow(it) => Limit::fixed_window(
            whole("limit", it.limit.as_ref(), COUNT_DEFAULT, u32::MAX)?,
            read(it.window.as_ref(), WINDOW_DEFAULT, quantity::window)?,
            word(
                "align",
                it.align.as_ref(),
                &[("clock", Align::Clock), ("first_request", Align::FirstRequest)],
            )?,
        ),
        typed::Limit::SlidingWindowLog(it) => Limit::sliding_window_log(
            whole("limit", it.limit.as_ref(), COUNT_DEFAULT, u32::MAX)?,
            read(it.window.as_ref(), WINDOW_DEFAULT, quantity::window)?,
            word("count", it.count.as_ref(), &[("admitted", Count::Admitted), ("all", Count::All)])?,
        ),
        typed::Limit::SlidingWindowCounter(it) => Limit::sliding_window_counter(
            whole("limit", it.limit.as_ref(), COUNT_DEFAULT, u32::MAX)?,
            read(it.window.as_ref(), WINDOW_DEFAULT, quantity::window)?,
            whole("buckets", it.buckets.as_ref(), 1, BUCKETS_MAX)?,
            word(
                "edge",
                it.edge.as_ref(),
                &[("weigh", Edge::Weigh), ("drop", Edge::Drop), ("keep", Edge::Keep)],
            )?,
        ),
    };
    checked.map_err(out_of_range)
}

fn whole(name: &str, typed: Option<&Text>, default: u32, max: u32) -> Result<u32, Problem> {
    let Some(text) = typed else { return Ok(default) };
    quantity::whole(name, &text.value, max).map_err(|fault| at(text, fault))
}

/// Reads a quantity. The default is written as a person would write it, and read by the same function.
fn read<T>(typed: Option<&Text>, default: &str, reader: fn(&str) -> Result<T, Fault>) -> Result<T, Problem> {
    match typed {
        Some(text) => reader(&text.value).map_err(|fault| at(text, fault)),
        None => reader(default).map_err(|fault| nowhere(fault.what)),
    }
}

/// One of a few words; the first is the default.
fn word<T: Copy>(name: &str, typed: Option<&Text>, words: &[(&str, T)]) -> Result<T, Problem> {
    let Some(text) = typed else { return Ok(words[0].1) };
    words.iter().find(|(word, _)| *word == text.value).map(|(_, meaning)| *meaning).ok_or_else(|| {
        let known: Vec<&str> = words.iter().map(|(word, _)| *word).collect();
        let instead = known_instead(&text.value, &known, &format!("{name} is {}", listed(&known, "or")));
        at(text, Fault { what: format!("{} is not a {name}", quoted(&text.value)), instead })
    })
}

fn at(text: &Text, fault: Fault) -> Problem {
    Problem { place: place(text.referenced), what: fault.what, instead: fault.instead }
}

/// Each parameter was checked at its place already, so this only speaks if the core ever checks more than we do.
fn out_of_range(error: LimitError) -> Problem {
    nowhere(error.to_string())
}

fn nowhere(what: String) -> Problem {
    Problem { place: Place::default(), what, instead: "change the parameters".to_owned() }
}
