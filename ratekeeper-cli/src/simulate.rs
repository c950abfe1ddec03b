//! Replays a trace through a limiter and writes the results to stdout.

use std::io;

use ratekeeper::{Limit, Time};
use ratekeeper_insight::{Comparison, Jsonl, SORTED_WITHIN, Summary, Trace, replay_batches, replay_sorted};

use crate::args::{Format, Simulate};
use crate::error::{CliError, with_help};
use crate::input::{self, Source};
use crate::store::Store;
use crate::terminal;
use crate::validate::print;

pub(crate) fn run(args: &Simulate) -> Result<(), CliError> {
    if args.compare && args.format == Format::Jsonl {
        return Err(CliError::usage(
            "--format jsonl prints the decisions of one limit, and --compare has five",
            "leave one of the two out",
        ));
    }
    if args.compare && args.store != "memory" {
        return Err(CliError::usage(
            "--compare keeps the state of five limits in memory",
            "leave --store out, or simulate one limit at a time",
        ));
    }
    let limit = input::limit(args)?;
    let source = input::trace(args)?;
    match (args.compare, args.format) {
        (true, _) => compare(&limit, args, source),
        (false, Format::Table | Format::Svg) => report(&limit, args, source),
        (false, Format::Jsonl) => jsonl(limit, args, source),
    }
}

fn jsonl(limit: Limit, args: &Simulate, source: Source) -> Result<(), CliError> {
    let mut store = Store::new(&args.store, limit, args.max_keys)?;
    let mut trace = Trace::open(&source.name, source.input)?;
    let mut lines = Jsonl::new(io::stdout().lock());
    let mut decisions = Vec::new();
    let (mut latest, mut earlier) = (Time::EPOCH, 0);
    let replayed = replay_batches(&mut trace, |batch| {
        for request in batch.requests() {
            earlier += u64::from(request.time < latest);
            latest = latest.max(request.time);
        }
        let decided = store.decide_batch(batch, &mut decisions);
        batch
            .requests()
            .zip(&decisions)
            .try_for_each(|(request, decision)| lines.write(&request, decision))?;
        if batch.is_all_for_now() {
            lines.flush()?;
        }
        decided
    });
    // Decisions made before an invalid line are still written.
    let written = lines.finish();
    source.bar.finish_and_clear();
    store.end()?;
    replayed?;
    written.map_err(CliError::Output)?;
    warn_of_overflow(store.overflowed());
    // Each line is the decision of the request in the same line of the trace, so nothing is sorted here.
    warn_of_order(
        earlier,
        "are earlier than one before them: they are decided as by a clock that steps back",
    );
    Ok(())
}

fn report(limit: &Limit, args: &Simulate, source: Source) -> Result<(), CliError> {
    let mut store = Store::new(&args.store, limit.clone(), args.max_keys)?;
    let mut trace = Trace::open(&source.name, source.input)?;
    let mut summary = Summary::new(limit);
    let mut decisions = Vec::new();
    let replayed = replay_sorted(&mut trace, |batch| {
        store.decide_batch(batch, &mut decisions)?;
        summary.count(batch, &decisions);
        Ok(())
    });
    source.bar.finish_and_clear();
    store.end()?;
    let late = replayed?;
    print(&match args.format {
        Format::Svg => summary.svg(&source.name, args.keys),
        _ => summary.report(&source.name, args.keys, terminal::text_style()),
    })?;
    warn_of_overflow(store.overflowed());
    warn_of_late(late);
    Ok(())
}

fn compare(limit: &Limit, args: &Simulate, source: Source) -> Result<(), CliError> {
    let mut comparison =
        Comparison::new(limit, args.max_keys).map_err(|error| CliError::Usage(error.to_string()))?;
    let mut trace = Trace::open(&source.name, source.input)?;
    let replayed = replay_sorted(&mut trace, |batch| {
        comparison.count(batch);
        Ok(())
    });
    source.bar.finish_and_clear();
    let late = replayed?;
    print(&match args.format {
        Format::Svg => comparison.svg(&source.name),
        _ => comparison.report(&source.name, terminal::text_style()),
    })?;
    warn_of_overflow(comparison.overflowed());
    warn_of_late(late);
    Ok(())
}

fn warn_of_late(requests: u64) {
    let what = format!(
        "are more than {SORTED_WITHIN} requests late and were not sorted, so the report is not exact"
    );
    warn_of_order(requests, &what);
}

fn warn_of_order(requests: u64, what: &str) {
    if requests > 0 {
        eprintln!("warning: {}", with_help(&format!("{requests} requests {what}"), "sort the trace by time"));
    }
}

fn warn_of_overflow(requests: u64) {
    if requests > 0 {
        let message = format!(
            "{requests} requests had a key that did not fit into memory, so their decisions are not exact"
        );
        eprintln!("warning: {}", with_help(&message, "raise --max-keys"));
    }
}
