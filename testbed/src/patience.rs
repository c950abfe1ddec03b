use std::time::{Duration, Instant};

/// How soon a change is seen.
const GLANCE: Duration = Duration::from_millis(20);

/// Looks again and again until it is so, or for so long. Says whether it is so.
#[expect(clippy::disallowed_methods, reason = "how long a test waits for a server; no limit is decided here")]
pub(crate) fn wait_until(patience: Duration, mut is_so: impl FnMut() -> bool) -> bool {
    let start = Instant::now();
    loop {
        // Taken before the look: on a busy machine a look may be long, and the last one begins when the time is over.
        let is_last = start.elapsed() >= patience;
        if is_so() {
            return true;
        }
        if is_last {
            return false;
        }
        std::thread::park_timeout(GLANCE);
    }
}
