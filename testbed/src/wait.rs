//! Waiting for a condition, with a deadline that only a failing test reaches.

use std::future::Future;
use std::panic::Location;
use std::time::{Duration, Instant};

use tokio::time::{sleep, timeout};

/// How long a test waits for what must happen: long enough for the busiest machine, so that only a failing test waits
/// this long.
pub const TEST_TIMEOUT: Duration = Duration::from_secs(30);

/// Interval between two polls of a condition.
const POLL_INTERVAL: Duration = Duration::from_millis(2);

/// Number of polls with the same count after which it is stable.
const STABLE_POLLS: usize = 200;

/// Interval between two polls of a server that starts.
const SERVER_POLL_INTERVAL: Duration = Duration::from_millis(20);

/// Polls until the condition is true.
///
/// # Panics
/// If it is false for [`TEST_TIMEOUT`]; the message names the line that waits.
#[track_caller]
pub fn wait_until(mut is_so: impl FnMut() -> bool) -> impl Future<Output = ()> {
    let caller = Location::caller();
    let polling = async move {
        while !is_so() {
            sleep(POLL_INTERVAL).await;
        }
    };
    within_test_timeout(polling, caller)
}

/// Polls until there is a value, and returns it.
///
/// # Panics
/// If there is none for [`TEST_TIMEOUT`]; the message names the line that waits.
#[track_caller]
pub fn wait_for<T>(mut poll: impl AsyncFnMut() -> Option<T>) -> impl Future<Output = T> {
    let caller = Location::caller();
    let polling = async move {
        loop {
            if let Some(value) = poll().await {
                return value;
            }
            sleep(POLL_INTERVAL).await;
        }
    };
    within_test_timeout(polling, caller)
}

/// Polls a count until it stays the same, and returns it: the writer that increases it is blocked or done.
///
/// # Panics
/// If it is zero or changes for [`TEST_TIMEOUT`]; the message names the line that waits.
#[track_caller]
pub fn wait_until_stable(mut count: impl FnMut() -> usize) -> impl Future<Output = usize> {
    let (mut last, mut same) = (0, 0);
    wait_for(async move || {
        let now = count();
        same = if now == last && now > 0 { same + 1 } else { 0 };
        last = now;
        (same == STABLE_POLLS).then_some(last)
    })
}

#[expect(clippy::panic, reason = "a condition that never holds fails its test")]
async fn within_test_timeout<T>(polling: impl Future<Output = T>, caller: &Location<'_>) -> T {
    let result = timeout(TEST_TIMEOUT, polling).await;
    result.unwrap_or_else(|_| panic!("{caller}: the condition does not hold after {TEST_TIMEOUT:?}"))
}

/// Polls, blocking the thread, until `is_so` returns true or `timeout` has passed; returns the last result.
#[expect(clippy::disallowed_methods, reason = "how long a test waits for a server; no limit is decided here")]
pub(crate) fn block_until(timeout: Duration, mut is_so: impl FnMut() -> bool) -> bool {
    let start = Instant::now();
    loop {
        // Read before the poll: a poll may take long on a busy machine, and the last one must start after the
        // timeout.
        let is_last = start.elapsed() >= timeout;
        if is_so() {
            return true;
        }
        if is_last {
            return false;
        }
        std::thread::park_timeout(SERVER_POLL_INTERVAL);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn condition_is_polled_until_it_holds() {
        let mut polls = 0;
        wait_until(|| {
            polls += 1;
            polls == 3
        })
        .await;
        let value = wait_for(async || {
            polls += 1;
            (polls == 6).then_some(polls)
        });
        assert_eq!(value.await, 6);
    }

    #[tokio::test(start_paused = true)]
    async fn count_is_stable_once_it_stays_the_same() {
        let mut polls = 0;
        let count = wait_until_stable(|| {
            polls += 1;
            polls.min(70) / 7
        });
        assert_eq!(count.await, 10);
    }

    #[tokio::test(start_paused = true)]
    #[should_panic(expected = "wait.rs")]
    async fn condition_that_never_holds_fails_the_test() {
        wait_until(|| false).await;
    }
}
