//! Property tests: how many cases they try, and a runner for those that are not written with `proptest!`.

use std::fmt::Debug;

use proptest::strategy::Strategy;
use proptest::test_runner::{Config, TestCaseResult, TestRunner};

/// Cases that [`check`] tries in an ordinary run.
const ORDINARY_CASES: u32 = 10_000;

/// A configuration with this many cases in an ordinary run. `RATEKEEPER_CASES` raises the number: of a property that
/// tries 10 000 cases to itself, of others in proportion.
pub fn cases(ordinary: u32) -> Config {
    let configured = std::env::var("RATEKEEPER_CASES").ok().and_then(|cases| cases.parse().ok());
    Config { cases: scaled(ordinary, configured), failure_persistence: None, ..Config::default() }
}

fn scaled(ordinary: u32, configured: Option<u32>) -> u32 {
    let configured = u64::from(configured.unwrap_or(0).max(ORDINARY_CASES));
    u32::try_from(u64::from(ordinary) * configured / u64::from(ORDINARY_CASES)).unwrap_or(u32::MAX)
}

/// Runs `test` over random values, 10 000 in an ordinary run, and prints a minimized failing one.
///
/// # Panics
/// If the test fails.
#[track_caller]
pub fn check<S: Strategy>(strategy: &S, test: impl Fn(S::Value) -> TestCaseResult)
where
    S::Value: Debug,
{
    let failure = TestRunner::new(cases(ORDINARY_CASES)).run(strategy, test).err();
    assert!(failure.is_none(), "{}", failure.map(|error| error.to_string()).unwrap_or_default());
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn configured_cases_raise_every_number_and_lower_none() {
        assert_eq!(scaled(500, None), 500);
        assert_eq!(scaled(500, Some(10)), 500);
        assert_eq!(scaled(10_000, Some(1_000_000)), 1_000_000);
        assert_eq!(scaled(500, Some(1_000_000)), 50_000);
        assert_eq!(scaled(u32::MAX, Some(u32::MAX)), u32::MAX);
    }
}
