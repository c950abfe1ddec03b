//! A request's descriptors -> what is wanted of which limits.

use std::borrow::Cow;

use smallvec::SmallVec;
use tollgate::tower::direct::{Demand, Named, Which};
use tollgate::{Align, Limit};
use tollgate_config::envoy::{Descriptor, DescriptorLimit, Domain, Metadata, Unit};

use super::Domains;
use super::messages::{
    Entry, RateLimit, RateLimitDescriptor, RateLimitOverride, RateLimitRequest, RateLimitUnit,
};
use super::refused::Refused;

/// What a descriptor wants.
#[derive(Debug)]
pub(super) struct Wanted<'s> {
    pub(super) limit: Wants,
    pub(super) hits: Hits,
    /// Whether they are the descriptor's own, and not those of the request.
    pub(super) has_own_hits: bool,
    /// How Envoy is told of the limit, if there is one.
    pub(super) told: Option<RateLimit>,
    pub(super) is_shadow: bool,
    pub(super) is_quota: bool,
    pub(super) metadata: Option<&'s Metadata>,
}

/// Which limit.
#[derive(Debug)]
pub(super) enum Wants {
    /// None: everything passes.
    Nothing,
    /// Everything passes, and that is told.
    Unlimited,
    /// Nothing passes.
    Blocked,
    /// That of a rule.
    Rule { number: usize, key: Vec<u8> },
    /// The one that came along.
    Own { limit: Limit, key: Vec<u8> },
}

/// How much.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Hits {
    Take(u32),
    /// Nothing is taken: is anything left?
    Look,
    /// More than any limit has.
    BeyondAll,
    GiveBack(u32),
}

impl Wanted<'_> {
    /// What is asked of the limits, or given back; nothing if there is nobody to ask.
    pub(super) fn demand(&self, gives_back: bool) -> Option<Demand<'_>> {
        let (limit, key) = match &self.limit {
            Wants::Rule { number, key } => (Which::Rule(*number), key),
            Wants::Own { limit, key } => (Which::Own(limit), key),
            Wants::Nothing | Wants::Unlimited | Wants::Blocked => return None,
        };
        let cost = match self.hits {
            Hits::Take(hits) => hits,
            Hits::GiveBack(hits) if gives_back => hits,
            Hits::GiveBack(_) | Hits::Look => 0,
            Hits::BeyondAll => u32::MAX,
        };
        Some(Demand { limit, key: Named::Bytes(key), cost })
    }

    /// Whether it may deny the request only together with all others of which that is said.
    pub(super) fn is_of_quota(&self) -> bool {
        self.is_quota && self.told.is_some() && !self.is_shadow && !matches!(self.hits, Hits::GiveBack(_))
    }

    /// Whether it is denied whatever is left.
    pub(super) fn is_hopeless(&self) -> bool {
        match self.limit {
            Wants::Nothing | Wants::Unlimited => false,
            Wants::Blocked => !matches!(self.hits, Hits::GiveBack(_)),
            Wants::Rule { .. } | Wants::Own { .. } => self.hits == Hits::BeyondAll,
        }
    }
}

/// What each descriptor wants, in their order.
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
                // Bytes that are not UTF-8 count like the character that replaces them.
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

/// A descriptor's own number counts, and may be none; that of the request is one where it is none.
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

/// By a limit that came along: a window of a unit, by the clock. None if there is no such unit.
fn by_own_limit(
    domain: &Domain,
    entries: &[Entry],
    own: &RateLimitOverride,
    hits: Hits,
) -> Option<Wanted<'static>> {
    // Envoy defines a week for limits that it is shown, and none for those that it sends.
    let unit = RateLimitUnit::try_from(own.unit).ok()?.unit().filter(|unit| *unit != Unit::Week)?;
    // Nothing at all per unit is a window that nothing fits into.
    let limit = match Limit::fixed_window(own.requests_per_unit, unit.length(), Align::Clock) {
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

/// Each text behind its length, so that no text can look like the end of another.
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
