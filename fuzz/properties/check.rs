//! Bodies of the check API: whatever bytes come, the answer is one that the documentation knows, and no limit is ever
//! charged more than it has.

use std::sync::{Arc, OnceLock};

use axum::Router;
use axum::body::Body;
use axum::http::Request;
use http_body_util::BodyExt;
use serde_json::Value;
use tokio::runtime::{Builder, Runtime};
use tollgate::tower::RateLimitLayer;
use tollgate::tower::key::{Key, Part};
use tollgate::tower::rule::Rule;
use tollgate::{Align, Limit, ManualClock, Memory, Time};
use tollgate_server::check::{Counts, MemoryRecords, Settings, Snapshot, Source, router};
use tower_service::Service;

const PATHS: [&str; 6] = ["/v1/check", "/v1/peek", "/v1/reserve", "/v1/settle", "/v1/refund", "/v1/reset"];
const SIZE: u32 = 10;

struct Door {
    layer: RateLimitLayer<Memory<ManualClock>>,
    settings: Arc<Settings>,
    records: MemoryRecords<ManualClock>,
    counts: Counts,
}

impl Source for Door {
    type Store = Memory<ManualClock>;
    type Records = MemoryRecords<ManualClock>;

    fn snapshot(&self) -> Snapshot<Memory<ManualClock>> {
        Snapshot { layer: Some(self.layer.clone()), settings: self.settings.clone() }
    }

    fn records(&self) -> &MemoryRecords<ManualClock> {
        &self.records
    }

    fn counts(&self) -> &Counts {
        &self.counts
    }
}

/// Two limits, `u` for each of something and `a` for all, at a time that stands still.
fn door() -> Option<(Router, Runtime)> {
    let clock = ManualClock::new(Time::from_secs(1_700_000_000));
    let limit = Limit::fixed_window(SIZE, std::time::Duration::from_secs(3600), Align::Clock).ok()?;
    let per_user = Rule::new("u", limit.clone()).key(Key::of(Part::header("X-User-Id")));
    let builder = RateLimitLayer::builder().rule(per_user).rule(Rule::new("a", limit)).max_keys(1_000);
    let door = Door {
        layer: builder.build_on(clock.clone()).ok()?,
        settings: Arc::new(Settings { limits: 2, refunds: true, resets: true, ..Settings::default() }),
        records: MemoryRecords::on(clock, 1_000, 1 << 20),
        counts: Counts::default(),
    };
    Some((router(Arc::new(door)), Builder::new_current_thread().enable_time().build().ok()?))
}

/// The first byte says which path, and the others are the body.
pub(crate) fn check(bytes: &[u8]) {
    static DOOR: OnceLock<Option<(Router, Runtime)>> = OnceLock::new();
    let Some((router, runtime)) = DOOR.get_or_init(door) else { panic!("there is no door") };
    let (first, body) = bytes.split_first().unwrap_or((&0, &[]));
    let path = PATHS[usize::from(*first) % PATHS.len()];
    let request =
        Request::post(path).header("content-type", "application/json").body(Body::from(body.to_vec()));
    let answered = async {
        let mut router = router.clone();
        let Ok(request) = request else { panic!("there is no request") };
        let Ok(response) = router.call(request).await;
        let status = response.status().as_u16();
        let kind = response.headers().get("content-type").cloned();
        (status, kind, response.into_body().collect().await)
    };
    let (status, kind, body) = runtime.block_on(answered);
    let Ok(body) = body else { panic!("the answer broke off") };
    let Ok(body) = serde_json::from_slice::<Value>(&body.to_bytes()) else {
        panic!("the answer is not JSON")
    };
    let Some(kind) = kind.as_ref().and_then(|kind| kind.to_str().ok()) else { panic!("of no type") };
    // Without room for another reservation, it says so.
    assert!(matches!(status, 200 | 400 | 403 | 404 | 409 | 413 | 422 | 429 | 503), "{path}: {status}");
    assert!(status != 503 || path == "/v1/reserve", "{path}: {body}");
    if kind == "application/problem+json" {
        assert_eq!(body["status"], status, "{body}");
        let told = body["detail"].as_str().unwrap_or_default();
        assert!(
            !told.is_empty() && told.chars().count() <= 400 && !told.chars().any(char::is_control),
            "{told:?}"
        );
        return;
    }
    assert!(matches!(status, 200 | 403 | 429), "{path}: {status} {body}");
    for limit in body["limits"].as_array().into_iter().flatten() {
        assert!(limit["remaining"].as_u64() <= Some(SIZE.into()), "{body}");
        assert!(body["allowed"] == false || limit["allowed"] == true, "{body}");
    }
}
