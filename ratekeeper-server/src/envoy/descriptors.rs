//! Resolves a request's descriptors to limits.

use std::borrow::Cow;
use std::time::Duration;

use ratekeeper::tower::check::{Check, KeyInput, LimitRef};
use ratekeeper::{Decision, Limit, RetryAfter, Time, WindowAlign};
use ratekeeper_config::envoy::{Descriptor, DescriptorLimit, Domain, Metadata, Unit};
use smallvec::SmallVec;

use super::Domains;
use super::error::EnvoyApiError;
use super::messages::{
    Entry, RateLimit, RateLimitDescriptor, RateLimitOverride, RateLimitRequest, RateLimitUnit,
};

/// A descriptor, resolved.
#[derive(Debug)]
pub(super) struct ResolvedDescriptor<'s> {
    pub(super) limit: ResolvedLimit,
    pub(super) hits: Hits,
    /// Whether the descriptor has its own `hits_addend`, instead of the request's.
    pub(super) has_own_hits: bool,
    /// The limit as reported to Envoy, if there is one.
    pub(super) reported_limit: Option<RateLimit>,
    pub(super) is_shadow: bool,
    pub(super) is_quota: bool,
    pub(super) metadata: Option<&'s Metadata>,
}

/// The limit of a descriptor.
#[derive(Debug)]
pub(super) enum ResolvedLimit {
    /// No limit: always allowed.
    None,
    /// Always allowed, and reported as unlimited.
    Unlimited,
    /// Always denied. With a unit, the reset is the end of its current window.
    Blocked { unit: Option<Unit> },
    /// The limit of a rule.
    Rule { number: usize, key: Vec<u8> },
    /// An inline limit.
    Inline { limit: Limit, key: Vec<u8> },
}

/// The units of a descriptor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Hits {
    Charge(u32),
    /// Zero hits: a peek that is denied if nothing remains.
    Peek,
    /// More than any limit allows.
    AboveAnyLimit,
    Refund(u32),
}

impl ResolvedDescriptor<'_> {
    /// The check of this descriptor, or its refund; none if it has no limit.
    pub(super) fn to_check(&self, is_refund: bool) -> Option<Check<'_>> {
        let (limit, key) = match &self.limit {
            ResolvedLimit::Rule { number, key } => (LimitRef::Rule(*number), key),
            ResolvedLimit::Inline { limit, key } => (LimitRef::Inline(limit), key),
            ResolvedLimit::None | ResolvedLimit::Unlimited | ResolvedLimit::Blocked { .. } => return None,
        };
        let cost = match self.hits {
            Hits::Charge(hits) => hits,
            Hits::Refund(hits) if is_refund => hits,
            Hits::Refund(_) | Hits::Peek => 0,
            Hits::AboveAnyLimit => u32::MAX,
        };
        Some(Check { limit, key: KeyInput::Bytes(key), cost })
    }

    /// Whether it denies the request only if all quota descriptors are over.
    pub(super) fn is_quota_member(&self) -> bool {
        self.is_quota
            && self.reported_limit.is_some()
            && !self.is_shadow
            && !matches!(self.hits, Hits::Refund(_))
    }

    /// The decision of a blocked descriptor with a unit: nothing remains, and the window ends with the unit.
    pub(super) fn blocked_decision(&self, now: Time) -> Option<Decision> {
        let ResolvedLimit::Blocked { unit: Some(unit) } = self.limit else { return None };
        // Units are at most a year long, so the nanoseconds fit.
        let length = unit.length().as_nanos() as u64;
        Some(Decision {
            allowed: false,
            limit: 0,
            remaining: 0,
            retry_after: RetryAfter::Never,
            reset_after: Duration::from_nanos(length - now.as_nanos() % length),
            delay: Duration::ZERO,
        })
    }

    /// Whether it is always denied.
    pub(super) fn is_always_denied(&self) -> bool {
        match self.limit {
            ResolvedLimit::None | ResolvedLimit::Unlimited => false,
            ResolvedLimit::Blocked { .. } => !matches!(self.hits, Hits::Refund(_)),
            ResolvedLimit::Rule { .. } | ResolvedLimit::Inline { .. } => self.hits == Hits::AboveAnyLimit,
        }
    }
}

/// Resolves all descriptors, in their order.
pub(super) fn resolve<'s>(
    domains: &'s Domains,
    request: &RateLimitRequest,
    refunds: bool,
) -> Result<SmallVec<[ResolvedDescriptor<'s>; 2]>, EnvoyApiError> {
    let domain = domains.get(&request.domain);
    let mut all = SmallVec::<[ResolvedDescriptor<'s>; 2]>::new();
    let mut replaced = SmallVec::<[&str; 4]>::new();
    for (number, descriptor) in request.descriptors.iter().enumerate() {
        let hits = hits(descriptor, request.hits_addend);
        if matches!(hits, Hits::Refund(_)) && !refunds {
            return Err(EnvoyApiError::RefundsDisabled { descriptor: number });
        }
        let resolved = match (domain, &descriptor.limit) {
            (None, _) => without_limit(hits),
            (Some(domain), Some(inline)) => resolve_inline(domain, &descriptor.entries, inline, hits)
                .ok_or(EnvoyApiError::UnknownUnit { descriptor: number, unit: inline.unit })?,
            (Some(domain), None) => {
                // Bytes that are not UTF-8 count as the replacement character.
                let text = |bytes| String::from_utf8_lossy(bytes);
                let entries: SmallVec<[(Cow<'_, str>, Cow<'_, str>); 4]> =
                    descriptor.entries.iter().map(|it| (text(&it.key), text(&it.value))).collect();
                let entries: SmallVec<[(&str, &str); 4]> =
                    entries.iter().map(|(key, value)| (&**key, &**value)).collect();
                match domain.find(&entries) {
                    Some(found) => {
                        replaced.extend(found.descriptor.replaces.iter().map(String::as_str));
                        resolve_configured(found.descriptor, found.key, hits)
                    }
                    None => without_limit(hits),
                }
            }
        };
        all.push(ResolvedDescriptor { has_own_hits: descriptor.hits_addend.is_some(), ..resolved });
    }
    if !replaced.is_empty() {
        for resolved in &mut all {
            if resolved.reported_limit.as_ref().is_some_and(|limit| replaced.contains(&limit.name.as_str())) {
                *resolved = without_limit(resolved.hits);
            }
        }
    }
    Ok(all)
}

fn without_limit(hits: Hits) -> ResolvedDescriptor<'static> {
    ResolvedDescriptor {
        limit: ResolvedLimit::None,
        hits,
        has_own_hits: false,
        reported_limit: None,
        is_shadow: false,
        is_quota: false,
        metadata: None,
    }
}

/// A descriptor's `hits_addend` has precedence and may be 0; in the request, 0 means 1.
fn hits(descriptor: &RateLimitDescriptor, request_hits: u32) -> Hits {
    let hits = descriptor.hits_addend.unwrap_or(u64::from(request_hits.max(1)));
    match (u32::try_from(hits), descriptor.is_negative_hits) {
        (hits, true) => Hits::Refund(hits.unwrap_or(u32::MAX)),
        (Ok(0), false) => Hits::Peek,
        (Ok(hits), false) => Hits::Charge(hits),
        (Err(_), false) => Hits::AboveAnyLimit,
    }
}

fn resolve_configured(descriptor: &Descriptor, key: Vec<u8>, hits: Hits) -> ResolvedDescriptor<'_> {
    let limit = match descriptor.limit {
        DescriptorLimit::None => ResolvedLimit::None,
        DescriptorLimit::Unlimited => ResolvedLimit::Unlimited,
        DescriptorLimit::Blocked => ResolvedLimit::Blocked { unit: descriptor.unit },
        DescriptorLimit::Rule(number) => ResolvedLimit::Rule { number, key },
    };
    let reported_limit = match limit {
        ResolvedLimit::Blocked { .. } | ResolvedLimit::Rule { .. } => Some(RateLimit {
            name: descriptor.name.clone().unwrap_or_default(),
            requests_per_unit: descriptor.requests_per_unit,
            unit: descriptor.unit.map_or(RateLimitUnit::Unknown, RateLimitUnit::from).into(),
        }),
        ResolvedLimit::None | ResolvedLimit::Unlimited | ResolvedLimit::Inline { .. } => None,
    };
    ResolvedDescriptor {
        limit,
        reported_limit,
        is_shadow: descriptor.is_shadow,
        is_quota: descriptor.is_quota,
        metadata: descriptor.metadata.as_ref(),
        ..without_limit(hits)
    }
}

/// Resolves an inline limit to a fixed window of its unit, aligned to the clock. None if the unit is unknown.
fn resolve_inline(
    domain: &Domain,
    entries: &[Entry],
    inline: &RateLimitOverride,
    hits: Hits,
) -> Option<ResolvedDescriptor<'static>> {
    // Envoy defines `WEEK` for limits in responses only, not for inline limits.
    let unit = RateLimitUnit::try_from(inline.unit).ok()?.unit().filter(|unit| *unit != Unit::Week)?;
    // Zero requests per unit is not a valid window; it always denies.
    let limit = match Limit::fixed_window(inline.requests_per_unit, unit.length(), WindowAlign::Clock) {
        Ok(limit) => ResolvedLimit::Inline { limit, key: inline_key(domain, entries) },
        Err(_) => ResolvedLimit::Blocked { unit: Some(unit) },
    };
    let reported_limit = RateLimit {
        name: String::new(),
        requests_per_unit: inline.requests_per_unit,
        unit: RateLimitUnit::from(unit).into(),
    };
    Some(ResolvedDescriptor { limit, reported_limit: Some(reported_limit), ..without_limit(hits) })
}

/// Each text is preceded by its length, so that different lists of texts cannot produce the same key.
fn inline_key(domain: &Domain, entries: &[Entry]) -> Vec<u8> {
    let texts = || {
        let entries = entries.iter().flat_map(|entry| [&entry.key[..], &entry.value[..]]);
        [domain.name.as_bytes()].into_iter().chain(entries)
    };
    let mut key = Vec::with_capacity(texts().map(|text| size_of::<u64>() + text.len()).sum());
    for text in texts() {
        key.extend((text.len() as u64).to_le_bytes());
        key.extend(text);
    }
    key
}
