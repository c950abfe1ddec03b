//! Responses to checks.

use axum::body::Body;
use axum::http::StatusCode;
use axum::http::header::{CACHE_CONTROL, CONTENT_TYPE, HeaderName, HeaderValue};
use axum::response::Response;
use ratekeeper::Decision;
use ratekeeper::tower::check::TierOutcome;
use ratekeeper::tower::response::LimitResponse;
use ratekeeper_config::{push_retry_after, push_seconds};

use super::check::{CheckResult, LimitResult};
use super::request_body::LimitCheck;
use crate::runtime::metrics::EndpointResult;

/// Approximate bytes per limit in a response.
const BYTES_PER_LIMIT: usize = 192;

/// A response with the outcome of its request.
#[derive(Debug)]
pub(super) struct EndpointResponse {
    pub(super) response: Response,
    pub(super) outcome: EndpointResult,
}

/// A response in JSON.
pub(super) fn json(status: StatusCode, outcome: EndpointResult, body: Vec<u8>) -> EndpointResponse {
    let mut response = Response::new(Body::from(body));
    *response.status_mut() = status;
    response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
    response.headers_mut().insert(CACHE_CONTROL, HeaderValue::from_static("no-store"));
    EndpointResponse { response, outcome }
}

/// Adds the rate limit headers. A denial's content type is left out, because it belongs to another body.
pub(super) fn add_headers(response: &mut Response, limits: &LimitResponse) {
    for header in limits.headers().filter(|header| header.name != "content-type") {
        if let Ok(value) = HeaderValue::from_str(header.value) {
            response.headers_mut().insert(HeaderName::from_static(header.name), value);
        }
    }
}

/// Begins the response to a check: `{"allowed":...,"limits":[...],"degraded":...`. The caller appends further fields.
pub(super) fn begin(result: &CheckResult, checks: &[LimitCheck<'_>]) -> Vec<u8> {
    let mut out = Vec::with_capacity(64 + checks.len() * BYTES_PER_LIMIT);
    out.extend_from_slice(b"{\"allowed\":");
    push_flag(&mut out, result.allowed);
    out.extend_from_slice(b",\"limits\":[");
    for (number, (check, limit)) in checks.iter().zip(&result.limits).enumerate() {
        if number > 0 {
            out.push(b',');
        }
        push_limit(&mut out, &check.limit, limit);
        if let Some(tiers) = result.tiers.get(number).filter(|tiers| !tiers.is_empty()) {
            push_tiers(&mut out, tiers);
        }
        out.push(b'}');
    }
    out.extend_from_slice(b"],\"degraded\":");
    push_flag(&mut out, result.is_degraded);
    out
}

/// Appends the object of a limit, without its last brace.
fn push_limit(out: &mut Vec<u8>, name: &str, result: &LimitResult) {
    out.extend_from_slice(b"{\"limit\":");
    push_text(out, name);
    out.extend_from_slice(b",\"allowed\":");
    push_flag(out, result.allowed());
    match result.is_on_deny_list {
        // A key on the deny list has no budget.
        true => out.extend_from_slice(
            b",\"size\":null,\"remaining\":null,\"retry_after\":\"never\",\"reset_after\":0,\"delay\":0",
        ),
        false => push_decision(out, result.decision.as_ref()),
    }
    out.extend_from_slice(b",\"shadow\":");
    push_flag(out, result.is_shadow);
    out.extend_from_slice(b",\"banned\":");
    push_flag(out, result.is_banned);
}

/// Appends `,"tiers":[...]` to the object of a limit.
fn push_tiers(out: &mut Vec<u8>, tiers: &[TierOutcome]) {
    out.extend_from_slice(b",\"tiers\":[");
    for (number, tier) in tiers.iter().enumerate() {
        out.extend_from_slice(if number > 0 { b",{\"override\":" } else { b"{\"override\":" });
        out.extend_from_slice(itoa::Buffer::new().format(tier.index).as_bytes());
        out.extend_from_slice(b",\"allowed\":");
        push_flag(out, tier.decision.is_none_or(|decision| decision.allowed));
        push_decision(out, tier.decision.as_ref());
        out.push(b'}');
    }
    out.push(b']');
}

/// Appends the fields of a decision; without one, those of a key that is not limited.
fn push_decision(out: &mut Vec<u8>, decision: Option<&Decision>) {
    let Some(decision) = decision else {
        out.extend_from_slice(
            b",\"size\":null,\"remaining\":null,\"retry_after\":null,\"reset_after\":0,\"delay\":0",
        );
        return;
    };
    out.extend_from_slice(b",\"size\":");
    push_number(out, decision.limit);
    out.extend_from_slice(b",\"remaining\":");
    match decision.known_remaining() {
        Some(remaining) => push_number(out, remaining),
        None => out.extend_from_slice(b"null"),
    }
    out.extend_from_slice(b",\"retry_after\":");
    push_retry_after(out, decision.retry_after);
    out.extend_from_slice(b",\"reset_after\":");
    match decision.known_remaining() {
        Some(_) => push_seconds(out, decision.reset_after),
        None => out.extend_from_slice(b"null"),
    }
    out.extend_from_slice(b",\"delay\":");
    push_seconds(out, decision.delay);
}

pub(super) fn push_flag(out: &mut Vec<u8>, flag: bool) {
    out.extend_from_slice(if flag { b"true" } else { b"false" });
}

pub(super) fn push_number(out: &mut Vec<u8>, number: u32) {
    out.extend_from_slice(itoa::Buffer::new().format(number).as_bytes());
}

/// Appends a JSON string, with its quotes.
pub(super) fn push_text(out: &mut Vec<u8>, text: &str) {
    // Writing into memory cannot fail, and every `str` is a valid JSON string.
    let _ = serde_json::to_writer(out, text);
}
