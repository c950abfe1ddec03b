//! The runner of property tests, which other crates include, too.

use std::fmt::Debug;

use proptest::prelude::*;
use proptest::test_runner::{Config, TestCaseResult, TestRunner};

/// Runs `test` over 10 000 random values and prints a minimized failing one.
pub(crate) fn check<S: Strategy>(strategy: &S, test: impl Fn(S::Value) -> TestCaseResult)
where
    S::Value: Debug,
{
    check_at_least(10_000, strategy, test);
}

/// The same, over at least `cases` values. `RATEKEEPER_CASES` raises that number.
pub(crate) fn check_at_least<S: Strategy>(cases: u32, strategy: &S, test: impl Fn(S::Value) -> TestCaseResult)
where
    S::Value: Debug,
{
    let configured: Option<u32> = std::env::var("RATEKEEPER_CASES").ok().and_then(|cases| cases.parse().ok());
    let config =
        Config { cases: configured.unwrap_or(0).max(cases), failure_persistence: None, ..Config::default() };
    let failure = TestRunner::new(config).run(strategy, test).err();
    assert!(failure.is_none(), "{}", failure.map(|error| error.to_string()).unwrap_or_default());
}
