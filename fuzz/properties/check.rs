//! Bodies of the HTTP API: for any bytes, the response is a documented one, and no limit is charged beyond its size.

use std::sync::{Arc, OnceLock};

use axum::Router;
use axum::body::Body;
use axum::http::Request;
use http_body_util::BodyExt;
use ratekeeper::tower::RatekeeperLayer;
use ratekeeper::tower::key::{Key, KeyPart};
use ratekeeper::tower::rule::Rule;
use ratekeeper::{Limit, ManualClock, Time, WindowAlign};
use ratekeeper_server::http_api::{HttpApi, HttpApiSettings, HttpApiSnapshot, MemoryRecords, router};
use serde_json::Value;
use tokio::runtime::{Builder, Runtime};
use tower_service::Service;

const PATHS: [&str; 6] = ["/v1/check", "/v1/peek", "/v1/reserve", "/v1/settle", "/v1/refund", "/v1/reset"];
const SIZE: u32 = 10;

/// Creates two limits, `u` per user and `a` for all, on a clock that stands still.
fn api() -> Option<(Router, Runtime)> {
    let clock = ManualClock::new(Time::from_secs(1_700_000_000));
    let limit = Limit::fixed_window(SIZE, std::time::Duration::from_secs(3600), WindowAlign::Clock).ok()?;
    let per_user = Rule::new("u", limit.clone()).key(Key::of(KeyPart::header("X-User-Id")));
    let builder = RatekeeperLayer::builder().rule(per_user).rule(Rule::new("a", limit)).max_keys(1_000);
    let settings = HttpApiSettings { limits: 2, refunds: true, resets: true, ..HttpApiSettings::default() };
    let snapshot =
        HttpApiSnapshot { layer: Some(builder.build_on(clock.clone()).ok()?), settings: Arc::new(settings) };
    let api = HttpApi::new(snapshot, MemoryRecords::with_clock(clock, 1_000, 1 << 20));
    Some((router(Arc::new(api)), Builder::new_current_thread().enable_time().build().ok()?))
}

/// Checks one request: the first byte selects the path, the others are the body.
pub(crate) fn check(bytes: &[u8]) {
    static API: OnceLock<Option<(Router, Runtime)>> = OnceLock::new();
    let Some((router, runtime)) = API.get_or_init(api) else { panic!("the API cannot be built") };
    let (first, body) = bytes.split_first().unwrap_or((&0, &[]));
    let path = PATHS[usize::from(*first) % PATHS.len()];
    let request =
        Request::post(path).header("content-type", "application/json").body(Body::from(body.to_vec()));
    let exchange = async {
        let mut router = router.clone();
        let Ok(request) = request else { panic!("the request cannot be built") };
        let Ok(response) = router.call(request).await;
        let status = response.status().as_u16();
        let kind = response.headers().get("content-type").cloned();
        (status, kind, response.into_body().collect().await)
    };
    let (status, kind, body) = runtime.block_on(exchange);
    let Ok(body) = body else { panic!("the response body is incomplete") };
    let Ok(body) = serde_json::from_slice::<Value>(&body.to_bytes()) else {
        panic!("the response is not JSON")
    };
    let Some(kind) = kind.as_ref().and_then(|kind| kind.to_str().ok()) else {
        panic!("the response has no content type")
    };
    // 503 is the response to a reservation that does not fit into memory.
    assert!(matches!(status, 200 | 400 | 403 | 404 | 409 | 413 | 422 | 429 | 503), "{path}: {status}");
    assert!(status != 503 || path == "/v1/reserve", "{path}: {body}");
    if kind == "application/problem+json" {
        assert_eq!(body["status"], status, "{body}");
        let detail = body["detail"].as_str().unwrap_or_default();
        assert!(
            !detail.is_empty() && detail.chars().count() <= 400 && !detail.chars().any(char::is_control),
            "{detail:?}"
        );
        return;
    }
    assert!(matches!(status, 200 | 403 | 429), "{path}: {status} {body}");
    for limit in body["limits"].as_array().into_iter().flatten() {
        assert!(limit["remaining"].as_u64() <= Some(SIZE.into()), "{body}");
        assert!(body["allowed"] == false || limit["allowed"] == true, "{body}");
    }
}
