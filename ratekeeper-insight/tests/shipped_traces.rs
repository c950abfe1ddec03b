//! The traces that ship with Ratekeeper, and how they are generated.
//!
//! `traces/demo.csv` is the default trace of `ratekeeper simulate`; `traces/uploads.csv` has costs and RFC 3339
//! times. Both are generated here, so that neither changes by accident. To write them again, run this test with
//! `RATEKEEPER_WRITE_TRACES=1`.

use std::fmt::Write as _;
use std::path::Path;

/// 2026-03-02T10:00:00Z, the start of a minute.
const START_MS: u64 = 1_772_445_600_000;

/// A fixed pseudo-random sequence: xorshift.
struct Dice(u64);

impl Dice {
    fn below(&mut self, bound: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 11) % bound
    }
}

/// Four and a half minutes of three clients: a well-behaved one, one that bursts at minute boundaries, and a scraper.
fn demo() -> String {
    let mut dice = Dice(0x746f_6c6c_6761_7465);
    let mut requests: Vec<(u64, &str)> = Vec::new();
    // A page that polls about every seven seconds.
    for n in 0..39 {
        requests.push((n * 7_000 + 500 + dice.below(900), "web-app"));
    }
    // A job that sends its batches around minute boundaries.
    for minute in 1..5 {
        for _ in 0..10 {
            requests.push((minute * 60_000 - 1 - dice.below(3_000), "batch-job"));
            requests.push((minute * 60_000 + dice.below(3_000), "batch-job"));
        }
    }
    // A scraper that starts after 45 seconds, speeds up, and stops after four minutes.
    let mut at = 45_000;
    while at < 240_000 {
        requests.push((at, "scraper"));
        let pause = if at < 100_000 { 700 } else { 300 };
        at += pause / 2 + dice.below(pause);
    }
    requests.sort_unstable();
    let mut csv = "time,key\n".to_owned();
    for (at, key) in requests {
        let at = START_MS + at;
        let _ = writeln!(csv, "{}.{:03},{key}", at / 1000, at % 1000);
    }
    csv
}

/// An hour of uploads; the cost is their size in megabytes.
fn uploads() -> String {
    let mut dice = Dice(0x7570_6c6f_6164_7321);
    let mut csv = "time,key,cost\n".to_owned();
    let mut second = 0;
    while second < 3_600 {
        let key = ["ana", "ben", "\"carol, desk 2\""][dice.below(3) as usize];
        // Mostly photos, and some films that a bucket of 100 can never allow.
        let cost = if dice.below(20) == 0 { 90 + dice.below(60) } else { 1 + dice.below(25) };
        let _ = writeln!(csv, "2026-03-02T10:{:02}:{:02}Z,{key},{cost}", second / 60, second % 60);
        second += 20 + dice.below(80);
    }
    csv
}

fn check(name: &str, made: &str) {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../traces").join(name);
    if std::env::var_os("RATEKEEPER_WRITE_TRACES").is_some() {
        std::fs::write(&path, made).expect("traces can be written");
    }
    let shipped = std::fs::read_to_string(&path).expect("the trace ships");
    assert!(shipped == made, "{name} is not what this test makes");
}

#[test]
fn demo_trace_matches_its_generator() {
    check("demo.csv", &demo());
}

#[test]
fn uploads_trace_matches_its_generator() {
    check("uploads.csv", &uploads());
}
