//! Resolves a request's descriptors to limits.

use std::borrow::Cow;

use ratekeeper::tower::check::{Check, KeyInput, LimitRef};
use ratekeeper::{Limit, WindowAlign};
use ratekeeper_config::envoy::{Descriptor, DescriptorLimit, Domain, Metadata, Unit};
use smallvec::SmallVec;

use super::Domains;
use super::messages::{
    Entry, RateLimit, RateLimitDescriptor, RateLimitOverride, RateLimitRequest, RateLimitUnit,
};
use super::refused::Refused;

/// A descriptor, resolved.
#[derive(Debug)]
pub(super) struct Wanted<'s> {
    pub(super) limit: Wants,
    pub(super) hits: Hits,
    /// Whether the descriptor has its own `hits_addend`, instead of the request's.
    pub(super) has_own_hits: bool,
    /// The limit as reported to Envoy, if there is one.
    pub(super) told: Option<RateLimit>,
    pub(super) is_shadow: bool,
    pub(super) is_quota: bool,
    pub(super) metadata: Option<&'s Metadata>,
}

/// The limit of a descriptor.
#[derive(Debug)]
pub(super) enum Wants {
    /// No limit: always allowed.
    Nothing,
    /// Always allowed, and reported as unlimited.
    Unlimited,
    /// Always denied.
    Blocked,
    /// The limit of a rule.
    Rule { number: usize, key: Vec<u8> },
    /// An inline limit.
    Own { limit: Limit, key: Vec<u8> },
}

/// The units of a descriptor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Hits {
    Take(u32),
    /// Zero hits: a peek that is denied if nothing remains.
    Look,
    /// More than any limit allows.
    BeyondAll,
    GiveBack(u32),
}

impl Wanted<'_> {
    /// The check of this descriptor, or its refund; none if it has no limit.
    pub(super) fn demand(&self, gives_back: bool) -> Option<Check<'_>> {
        let (limit, key) = match &self.limit {
            Wants::Rule { number, key } => (LimitRef::Rule(*number), key),
            Wants::Own { limit, key } => (LimitRef::Inline(limit), key),
            Wants::Nothing | Wants::Unlimited | Wants::Blocked => return None,
        };
        let cost = match self.hits {
            Hits::Take(hits) => hits,
            Hits::GiveBack(hits) if gives_back => hits,
            Hits::GiveBack(_) | Hits::Look => 0,
            Hits::BeyondAll => u32::MAX,
        };
        Some(Check { limit, key: KeyInput::Bytes(key), cost })
    }

    /// Whether it denies the request only if all quota descriptors are over.
    pub(super) fn is_of_quota(&self) -> bool {
        self.is_quota && self.told.is_some() && !self.is_shadow && !matches!(self.hits, Hits::GiveBack(_))
    }

    /// Whether it is always denied.
    pub(super) fn is_hopeless(&self) -> bool {
        match self.limit {
            Wants::Nothing | Wants::Unlimited => false,
            Wants::Blocked => !matches!(self.hits, Hits::GiveBack(_)),
            Wants::Rule { .. } | Wants::Own { .. } => self.hits == Hits::BeyondAll,
        }
    }
}

/// Resolves all descriptors, in their order.
pub(super) fn of<'s>(
    domains: &'s Domains,
    request: &RateLimitRequest,
    refunds: bool,
) -> Result<SmallVec<[Wanted<'s>; 2]>, Refused> {
    let domain = domains.get(&request.domain);
    let mut all = SmallVec::<[Wanted<'s>; 2]>::new();
    let mut replaced = SmallVec::<[&str; 4]>::new();
    for (number, descriptor) in request.descriptors.iter().enumerate() {
        let hits = hits(descriptor, request.hits_addend);
        if matches!(hits, Hits::GiveBack(_)) && !refunds {
            return Err(Refused::Refund { descriptor: number });
        }
        let wanted = match (domain, &descriptor.limit) {
            (None, _) => nothing(hits),
            (Some(domain), Some(own)) => by_own_limit(domain, &descriptor.entries, own, hits)
                .ok_or(Refused::Unit { descriptor: number, unit: own.unit })?,
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
                        by_descriptor(found.descriptor, found.key, hits)
                    }
                    None => nothing(hits),
                }
            }
        };
        all.push(Wanted { has_own_hits: descriptor.hits_addend.is_some(), ..wanted });
    }
    if !replaced.is_empty() {
        for wanted in &mut all {
            if wanted.told.as_ref().is_some_and(|told| replaced.contains(&told.name.as_str())) {
                *wanted = nothing(wanted.hits);
            }
        }
    }
    Ok(all)
}

fn nothing(hits: Hits) -> Wanted<'static> {
    Wanted {
        limit: Wants::Nothing,
        hits,
        has_own_hits: false,
        told: None,
        is_shadow: false,
        is_quota: false,
        metadata: None,
    }
}

/// A descriptor's `hits_addend` has precedence and may be 0; in the request, 0 means 1.
fn hits(descriptor: &RateLimitDescriptor, of_request: u32) -> Hits {
    let hits = descriptor.hits_addend.unwrap_or(u64::from(of_request.max(1)));
    match (u32::try_from(hits), descriptor.is_negative_hits) {
        (hits, true) => Hits::GiveBack(hits.unwrap_or(u32::MAX)),
        (Ok(0), false) => Hits::Look,
        (Ok(hits), false) => Hits::Take(hits),
        (Err(_), false) => Hits::BeyondAll,
    }
}

fn by_descriptor(descriptor: &Descriptor, key: Vec<u8>, hits: Hits) -> Wanted<'_> {
    let limit = match descriptor.limit {
        DescriptorLimit::None => Wants::Nothing,
        DescriptorLimit::Unlimited => Wants::Unlimited,
        DescriptorLimit::Blocked => Wants::Blocked,
        DescriptorLimit::Rule(number) => Wants::Rule { number, key },
    };
    let told = match limit {
        Wants::Blocked | Wants::Rule { .. } => Some(RateLimit {
            name: descriptor.name.clone().unwrap_or_default(),
            requests_per_unit: descriptor.requests_per_unit,
            unit: descriptor.unit.map_or(RateLimitUnit::Unknown, RateLimitUnit::from).into(),
        }),
        Wants::Nothing | Wants::Unlimited | Wants::Own { .. } => None,
    };
    Wanted {
        limit,
        told,
        is_shadow: descriptor.is_shadow,
        is_quota: descriptor.is_quota,
        metadata: descriptor.metadata.as_ref(),
        ..nothing(hits)
    }
}

/// Resolves an inline limit to a fixed window of its unit, aligned to the clock. None if the unit is unknown.
fn by_own_limit(
    domain: &Domain,
    entries: &[Entry],
    own: &RateLimitOverride,
    hits: Hits,
) -> Option<Wanted<'static>> {
    // Envoy defines `WEEK` for limits in responses only, not for inline limits.
    let unit = RateLimitUnit::try_from(own.unit).ok()?.unit().filter(|unit| *unit != Unit::Week)?;
    // Zero requests per unit is not a valid window; it always denies.
    let limit = match Limit::fixed_window(own.requests_per_unit, unit.length(), WindowAlign::Clock) {
        Ok(limit) => Wants::Own { limit, key: own_key(domain, entries) },
        Err(_) => Wants::Blocked,
    };
    let told = RateLimit {
        name: String::new(),
        requests_per_unit: own.requests_per_unit,
        unit: RateLimitUnit::from(unit).into(),
    };
    Some(Wanted { limit, told: Some(told), ..nothing(hits) })
}

/// Each text is preceded by its length, so that different lists of texts cannot produce the same key.
fn own_key(domain: &Domain, entries: &[Entry]) -> Vec<u8> {
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
