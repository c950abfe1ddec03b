//! The response if a concurrency limit has no free permit.

use super::denial::{DEGRADED, PROBLEM_JSON, QUOTA_EXCEEDED, REDUCED_CAPACITY, push_names, push_violated};
use super::text::push_integer;
use super::{HeaderSet, LimitResponse, PolicyName};

/// A concurrency limit whose permits are all in use.
#[derive(Clone, Copy, Debug)]
pub struct ExhaustedLimit<'a> {
    /// The name that responses report.
    pub name: &'a PolicyName,
    /// Maximum requests in flight.
    pub max: u32,
}

/// The end of a request in flight cannot be predicted, so a denied client may retry soon.
const RETRY_AFTER_SECS: u64 = 1;

impl LimitResponse {
    /// Writes the response to a request that these limits deny, over the previous one. `is_degraded` if it is denied
    /// only because the number of requests in flight is unknown.
    ///
    /// The IETF headers have a unit for concurrent requests. The other sets have none, so they contain only
    /// `Retry-After`.
    ///
    /// ```
    /// use ratekeeper_rules::response::{LimitResponse, ExhaustedLimit, HeaderSet, PolicyName};
    ///
    /// let (name, mut response) = (PolicyName::new("per-user")?, LimitResponse::default());
    /// response.write_exhausted(HeaderSet::default(), &[ExhaustedLimit { name: &name, max: 20 }], false);
    /// assert_eq!((response.status(), response.header("retry-after")), (Some(429), Some("1")));
    /// let policy = r#""per-user";q=20;qu="concurrent-requests""#;
    /// assert_eq!(response.header("ratelimit-policy"), Some(policy));
    /// # Ok::<(), ratekeeper_rules::response::NameError>(())
    /// ```
    pub fn write_exhausted(&mut self, set: HeaderSet, limits: &[ExhaustedLimit], is_degraded: bool) {
        self.text.clear();
        self.headers.clear();
        if set == HeaderSet::default() {
            self.push_list("ratelimit", limits, |text, _| {
                text.push_str(";r=0;t=");
                push_integer(text, RETRY_AFTER_SECS);
            });
            self.push_list("ratelimit-policy", limits, |text, max| {
                text.push_str(";q=");
                push_integer(text, u64::from(max));
                text.push_str(r#";qu="concurrent-requests""#);
            });
        }
        push_integer(&mut self.text, RETRY_AFTER_SECS);
        self.end_header("retry-after", false);
        self.text.push_str("no-store");
        self.end_header("cache-control", false);
        self.text.push_str(PROBLEM_JSON);
        self.end_header("content-type", false);

        let problem = if is_degraded { REDUCED_CAPACITY } else { QUOTA_EXCEEDED };
        self.status = Some(problem.status.code());
        let (text, names) = (&mut self.text, limits.iter().map(|limit| limit.name));
        problem.push_head(text, problem.status.code());
        if is_degraded {
            text.push_str(DEGRADED);
        }
        let is_one = push_names(text, names.clone());
        text.push_str(match (is_degraded, is_one) {
            (true, true) => " denies this request.",
            (true, false) => " deny this request.",
            (false, true) => " allows no more requests in flight.",
            (false, false) => " allow no more requests in flight.",
        });
        text.push_str(" Retry in 1 second.");
        push_violated(text, names);
    }

    fn push_list(
        &mut self,
        name: &'static str,
        limits: &[ExhaustedLimit],
        parameters: impl Fn(&mut String, u32),
    ) {
        for (index, ExhaustedLimit { name, max }) in limits.iter().enumerate() {
            self.text.push_str(if index == 0 { "" } else { ", " });
            self.text.push_str(name.quoted());
            parameters(&mut self.text, *max);
        }
        self.end_header(name, true);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn response(set: &str, names: &[&str], is_degraded: bool) -> LimitResponse {
        let names: Vec<_> = names.iter().map(|name| PolicyName::new(name).unwrap()).collect();
        let limits: Vec<_> = names.iter().map(|name| ExhaustedLimit { name, max: 7 }).collect();
        let mut response = LimitResponse::default();
        response.write_exhausted(HeaderSet::named(set).unwrap(), &limits, is_degraded);
        response
    }

    #[test]
    fn response_names_all_exhausted_limits() {
        let response = response("ietf", &["a", "b"], false);
        assert_eq!(response.header("ratelimit"), Some(r#""a";r=0;t=1, "b";r=0;t=1"#));
        assert!(response.headers().all(|header| header.is_list == header.name.starts_with("ratelimit")));
        assert_eq!(
            response.body(),
            concat!(
                r#"{"type":"https://iana.org/assignments/http-problem-types#quota-exceeded","#,
                r#""title":"Quota Exceeded","status":429,"#,
                r#""detail":"Limits \"a\" and \"b\" allow no more requests in flight. "#,
                r#"Retry in 1 second.","violated-policies":["a","b"]}"#
            )
        );
    }

    #[test]
    fn other_header_sets_contain_only_retry_after() {
        let names: Vec<_> = response("github", &["a"], true).headers().map(|header| header.name).collect();
        assert_eq!(names, ["retry-after", "cache-control", "content-type"]);
        let response = response("none", &["a"], true);
        assert_eq!(response.status(), Some(503));
        assert!(response.body().contains("#temporary-reduced-capacity"), "{}", response.body());
    }
}
