//! The worked examples of `vectors/`: a limit on the first line of a file, then one request per line with its
//! complete decision. Core passes all of them, and so does the model while time does not run backwards.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::time::Duration;

use ratekeeper_core::{Decision, Limit, RetryAfter, Time};

use crate::key::{self, Key};
use crate::model::Model;

/// One key of a file. The model is dropped when its time steps back.
struct KeyReplay {
    key: Box<dyn Key>,
    model: Option<Model>,
    last: Time,
}

#[test]
fn core_and_model_pass_every_vector() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../vectors");
    let mut files: Vec<_> = fs::read_dir(&folder)
        .expect("the vectors are next to this crate")
        .map(|entry| entry.expect("the folder can be read").path())
        .filter(|path| path.extension().is_some_and(|extension| extension == "jsonl"))
        .collect();
    files.sort();
    assert!(!files.is_empty(), "no vectors in {}", folder.display());
    let wrong: Vec<String> = files.iter().flat_map(|path| wrong_lines(path)).collect();
    assert!(wrong.is_empty(), "{} lines are wrong:\n{}", wrong.len(), wrong.join("\n"));
}

fn wrong_lines(path: &Path) -> Vec<String> {
    let name = path.file_name().unwrap_or_default().display();
    let text = fs::read_to_string(path).expect("a vector is a text file");
    let mut lines = text.lines();
    let limit = limit(lines.next().expect("the first line holds the limit"));
    let mut keys = BTreeMap::new();
    let mut wrong = Vec::new();
    for (index, expected) in lines.enumerate() {
        let time = between(expected, r#"{"time":""#, '"');
        let key = between(expected, r#""key":""#, '"');
        let cost = between(expected, r#""cost":"#, ',').parse().expect("the cost is a whole number");
        let now = instant(time);
        assert_eq!(instant_text(now), time, "{name}: the shortest way to write it");

        let replay: &mut KeyReplay = keys.entry(key).or_insert_with(|| KeyReplay {
            key: key::fresh(&limit),
            model: Some(Model::new(&limit)),
            last: now,
        });
        let decided = replay.key.decide(now, cost);
        if now < replay.last {
            replay.model = None;
        }
        replay.last = now;
        let modelled = replay.model.as_mut().map(|model| ("model", model.decide(now, cost, &decided)));
        for (who, decision) in [("core", decided)].into_iter().chain(modelled) {
            let line = line(time, key, cost, &decision);
            if line != expected {
                wrong.push(format!("{name}:{}: {who} decides {line}\n  instead of {expected}", index + 2));
            }
        }
    }
    assert!(!keys.is_empty(), "{name}: no requests");
    wrong
}

fn limit(header: &str) -> Limit {
    let (_, yaml) = header.split_once(r#"","limit":""#).expect("the limit follows the reason why");
    let yaml = yaml.strip_suffix(r#""}"#).expect("the limit comes last");
    ratekeeper_config::parse_limit(yaml).map_err(|error| error.to_string()).expect(yaml)
}

/// The text after `before` in `text`, up to the first `end`.
fn between<'a>(text: &'a str, before: &str, end: char) -> &'a str {
    let after = text.split_once(before).map(|(_, after)| after);
    let value = after.and_then(|after| after.split_once(end)).map(|(value, _)| value);
    assert!(value.is_some(), "no {before} in {text}");
    value.unwrap_or_default()
}

/// Seconds with up to nine decimals.
fn instant(text: &str) -> Time {
    let (seconds, decimals) = text.split_once('.').unwrap_or((text, ""));
    let nanos = format!("{seconds}{decimals:0<9}").parse().expect("seconds are a decimal number");
    Time::from_nanos(nanos)
}

fn instant_text(instant: Time) -> String {
    let nanos = instant.as_nanos();
    let text = format!("{}.{:09}", nanos / 1_000_000_000, nanos % 1_000_000_000);
    text.trim_end_matches('0').trim_end_matches('.').to_owned()
}

/// One line, as `ratekeeper simulate --format jsonl` prints it.
fn line(time: &str, key: &str, cost: u32, decision: &Decision) -> String {
    let Decision { allowed, limit, remaining, retry_after, reset_after, delay } = *decision;
    let retry_after = match retry_after {
        RetryAfter::Now => "null".to_owned(),
        RetryAfter::After(wait) => seconds(wait),
        RetryAfter::Never => r#""never""#.to_owned(),
    };
    let (reset_after, delay) = (seconds(reset_after), seconds(delay));
    format!(
        r#"{{"time":"{time}","key":"{key}","cost":{cost},"allowed":{allowed},"limit":{limit},"remaining":{remaining},"retry_after":{retry_after},"reset_after":{reset_after},"delay":{delay}}}"#
    )
}

/// Rounded up to the microsecond, with as few decimals as needed, but at least one; zero is `0`.
fn seconds(wait: Duration) -> String {
    let micros = wait.as_nanos().div_ceil(1_000);
    if micros == 0 {
        return "0".to_owned();
    }
    let text = format!("{}.{:06}", micros / 1_000_000, micros % 1_000_000);
    let text = text.trim_end_matches('0');
    if text.ends_with('.') { format!("{text}0") } else { text.to_owned() }
}
