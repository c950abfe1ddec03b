use std::time::{Duration, Instant};

/// Polling interval.
const GLANCE: Duration = Duration::from_millis(20);

/// Polls until `is_so` returns true or `timeout` has passed; returns the last result.
#[expect(clippy::disallowed_methods, reason = "how long a test waits for a server; no limit is decided here")]
pub(crate) fn wait_until(timeout: Duration, mut is_so: impl FnMut() -> bool) -> bool {
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
        std::thread::park_timeout(GLANCE);
    }
}
