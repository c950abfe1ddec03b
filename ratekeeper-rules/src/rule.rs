//! Rules: a limit with a key, conditions and policies.

mod cost;
mod rejection;
mod reload;

use std::collections::{HashMap, HashSet};
use std::ops::Range;
use std::time::Duration;

use ipnet::IpNet;
use ratekeeper_core::{FailurePolicy, Lease, Limit, LimitError, LogPolicy, WindowAlign};

use crate::key::{Key, KeyValuesError, NoKey};
use crate::path::{PathNormalization, Pattern, PatternError};
use crate::request::Request;
use crate::when::{When, is_in};

pub use cost::Cost;
pub use rejection::{ForbiddenReason, Rejection};
pub use reload::MovedKey;

/// A limit with its key, conditions and policies.
#[derive(Clone, Debug)]
pub struct Rule {
    /// The rule's name, which responses report.
    pub name: String,
    /// How much is allowed.
    pub limit: Limit,
    /// Whose budget a request uses.
    pub key: Key,
    /// What a request costs.
    pub cost: Cost,
    /// Which requests the rule applies to.
    pub when: When,
    /// Shadow: evaluated and reported, never enforced.
    pub is_shadow: bool,
    /// Other limits for some keys or requests; the first that fits applies.
    pub overrides: Vec<Override>,
    /// Clients and keys that the rule does not apply to.
    pub allow: List,
    /// Clients and keys that are always denied.
    pub deny: List,
    /// Bans keys that are denied often.
    pub ban: Option<Ban>,
    /// Decides while the store is unavailable; none uses the store's default.
    pub on_store_failure: Option<FailurePolicy>,
    /// How budget is leased.
    pub lease: Option<Lease>,
}

impl Rule {
    /// A rule with one budget for all requests and a cost of 1 each.
    pub fn new(name: &str, limit: Limit) -> Rule {
        Rule {
            name: name.to_owned(),
            limit,
            key: Key::global(),
            cost: Cost::Fixed(1),
            when: When::default(),
            is_shadow: false,
            overrides: Vec::new(),
            allow: List::default(),
            deny: List::default(),
            ban: None,
            on_store_failure: None,
            lease: None,
        }
    }

    /// Sets whose budget a request uses.
    #[must_use]
    pub fn key(mut self, key: Key) -> Rule {
        self.key = key;
        self
    }

    /// Sets which requests the rule applies to.
    #[must_use]
    pub fn when(mut self, when: When) -> Rule {
        self.when = when;
        self
    }

    /// Sets what a request costs.
    #[must_use]
    pub fn cost(mut self, cost: Cost) -> Rule {
        self.cost = cost;
        self
    }

    /// Makes it a shadow rule: evaluated and reported, never enforced.
    #[must_use]
    pub fn shadow(mut self) -> Rule {
        self.is_shadow = true;
        self
    }

    /// Every header that the rule may read, in lower case.
    pub fn header_names(&self) -> impl Iterator<Item = &str> {
        let cost = match &self.cost {
            Cost::Header { name, .. } => Some(name.as_str()),
            _ => None,
        };
        let conditions = self.overrides.iter().filter_map(|it| match &it.scope {
            OverrideScope::When(when) => Some(when),
            OverrideScope::Keys(_) => None,
        });
        let conditions = conditions.chain([&self.when]).flat_map(When::header_names);
        self.key.header_names().chain(cost).chain(conditions)
    }

    /// Every path pattern of the rule: of its key, its conditions and those of its overrides.
    pub fn patterns(&self) -> impl Iterator<Item = &Pattern> {
        let conditions = self.overrides.iter().filter_map(|it| match &it.scope {
            OverrideScope::When(when) => Some(when),
            OverrideScope::Keys(_) => None,
        });
        self.key.patterns().chain(conditions.chain([&self.when]).flat_map(|when| &when.paths))
    }

    /// The same rule with its patterns read for this path normalization.
    ///
    /// # Errors
    /// If a pattern contains text that never occurs in paths normalized this way.
    pub fn with_normalization(mut self, normalization: PathNormalization) -> Result<Rule, PatternError> {
        self.key = self.key.with_normalization(normalization)?;
        let overrides = self.overrides.iter_mut().filter_map(|it| match &mut it.scope {
            OverrideScope::When(when) => Some(when),
            OverrideScope::Keys(_) => None,
        });
        for pattern in overrides.chain([&mut self.when]).flat_map(|when| &mut when.paths) {
            *pattern = pattern.with_normalization(normalization)?;
        }
        Ok(self)
    }
}

/// Another limit for some keys or requests.
#[derive(Clone, Debug)]
pub struct Override {
    /// Where it applies.
    pub scope: OverrideScope,
    /// The limit; none means unlimited.
    pub limit: Option<Limit>,
}

/// Where an [`Override`] applies.
#[derive(Clone, Debug)]
pub enum OverrideScope {
    /// Keys with a single part, [by value](Key::is).
    Keys(Vec<String>),
    /// Requests that fit conditions, for example a token with `plan: gold`.
    When(When),
}

/// A list of clients and keys.
#[derive(Clone, Debug, Default)]
pub struct List {
    /// Networks of clients.
    pub clients: Vec<IpNet>,
    /// Keys with a single part, [by value](Key::is).
    pub keys: Vec<String>,
}

impl List {
    fn has_client(&self, request: &impl Request) -> bool {
        is_in(&self.clients, request)
    }

    fn has_key(&self, key: &Key, written: &[u8]) -> bool {
        self.keys.iter().any(|value| key.is(written, value))
    }
}

/// Bans a key after a number of denials within a window.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ban {
    /// Denials that start a ban.
    pub after: u32,
    /// The window in which denials are counted.
    pub within: Duration,
    /// How long a ban lasts.
    pub lasts: Duration,
}

/// All rules, with their limits numbered for a store.
#[derive(Clone, Debug, Default)]
pub struct Rules {
    rules: Vec<NumberedRule>,
    limits: Vec<StoredLimit>,
}

/// A rule and the indices of its limits.
#[derive(Clone, Debug)]
struct NumberedRule {
    rule: Rule,
    limit: usize,
    /// The limit of each override, if it has one.
    overrides: Vec<Option<usize>>,
    ban: Option<BanLimits>,
}

/// A limit that a store keeps.
#[derive(Clone, Debug)]
pub struct StoredLimit {
    /// The index of the rule that has it.
    pub rule: usize,
    /// The limit.
    pub limit: Limit,
    /// The name under which a store keeps the limit's states. It is unique, except that overrides for keys have the name
    /// of their rule: a key has one of these limits, and keeps its usage if a reload gives it another.
    pub name: String,
    /// The rule's failure policy.
    pub on_store_failure: Option<FailurePolicy>,
    /// The rule's lease.
    pub lease: Option<Lease>,
}

/// Indices of the limits of a [`Ban`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BanLimits {
    /// Counts denials: each charges 1.
    pub denials: usize,
    /// Charged 1 when a ban starts, and exhausted while it lasts.
    pub ban: usize,
}

/// Rules that cannot be combined.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RulesError {
    /// Two limits have the same name; the generated names of overrides and bans are included.
    #[error("two limits are called {0}; give one another name")]
    SameName(String),
    /// A ban's parameters are out of range.
    #[error("the ban of {0} cannot be: {1}")]
    Ban(String, #[source] LimitError),
}

/// What a request is charged.
#[derive(Clone, Debug, Default)]
pub struct ChargeList {
    /// The charges, in the order of the rules.
    pub charges: Vec<RuleCharge>,
    /// Their keys, concatenated.
    keys: Vec<u8>,
}

/// A charge of one rule.
#[derive(Clone, Debug)]
pub struct RuleCharge {
    /// Index of the rule.
    pub rule: usize,
    /// Index into [all limits](Rules::limits).
    pub limit: usize,
    /// Units to charge.
    pub cost: u32,
    /// The position of the override that applies, from 0; none if the rule's own limit does.
    pub tier: Option<usize>,
    /// The limits of the rule's ban.
    pub ban: Option<BanLimits>,
    key: Range<usize>,
}

impl ChargeList {
    /// Removes all charges; the memory stays allocated.
    pub fn clear(&mut self) {
        self.charges.clear();
        self.keys.clear();
    }

    /// The key of a charge.
    pub fn key(&self, charge: &RuleCharge) -> &[u8] {
        &self.keys[charge.key.clone()]
    }
}

/// The key of a check that is made without a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KeyInput<'a> {
    /// [The values](Key::write_values) of the rule's key, one for each part.
    Values(&'a [&'a str]),
    /// Opaque bytes that are the key.
    Bytes(&'a [u8]),
}

impl KeyInput<'_> {
    fn write(self, key: &Key, text: &mut Vec<u8>) -> Result<(), KeyError> {
        match self {
            KeyInput::Values(values) => key.write_values(values, text).map_err(KeyError::Values),
            KeyInput::Bytes(bytes) => {
                text.extend(bytes);
                Ok(())
            }
        }
    }
}

/// An override with conditions on requests, for a key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tier {
    /// Its position among the rule's overrides, from 0.
    pub index: usize,
    /// The index of its charge; none if the tier is unlimited.
    pub charge: Option<usize>,
}

/// Why a check without a request is not charged.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum KeyError {
    /// The rule does not exist.
    #[error("there is no such limit")]
    NoRule,
    /// The values do not fit the rule's key.
    #[error(transparent)]
    Values(KeyValuesError),
    /// The key is on the rule's deny list.
    #[error("this key is on the limit's list of those that it always denies")]
    Denied,
}

/// The limit that a rule charges for a key.
#[derive(Clone, Copy, PartialEq, Eq)]
struct SelectedLimit {
    /// Index into all limits.
    limit: usize,
    /// The position of the override that selected it.
    tier: Option<usize>,
}

/// Why a rule does not charge a request.
enum NoCharge {
    DenyList,
    NoKey(NoKey),
}

/// The name of an override with conditions. Of several with the same conditions, only the first ever applies.
fn tier_name(when: &When, tiers: &mut HashMap<String, usize>) -> String {
    let conditions = when.canonical_text();
    let count = tiers.entry(conditions.clone()).or_insert(0);
    *count += 1;
    match count {
        1 => format!("when {conditions}"),
        count => format!("when {conditions} #{count}"),
    }
}

impl Rules {
    /// Numbers the limits of the rules.
    ///
    /// # Errors
    /// If two limits have the same name, because a store identifies limits by name, or a ban's parameters are out of
    /// range.
    pub fn new(rules: impl IntoIterator<Item = Rule>) -> Result<Rules, RulesError> {
        let mut all = Rules::default();
        for rule in rules {
            let mut keep = |limit: &Limit, what: &str, lease: Option<Lease>| {
                let name = if what.is_empty() { rule.name.clone() } else { format!("{}/{what}", rule.name) };
                all.limits.push(StoredLimit {
                    rule: all.rules.len(),
                    limit: limit.clone(),
                    name,
                    on_store_failure: rule.on_store_failure,
                    lease,
                });
                all.limits.len() - 1
            };
            let limit = keep(&rule.limit, "", rule.lease);
            let mut tiers = HashMap::new();
            let overrides = rule.overrides.iter().map(|it| {
                let what = match &it.scope {
                    OverrideScope::Keys(_) => String::new(),
                    OverrideScope::When(when) => tier_name(when, &mut tiers),
                };
                Some(keep(it.limit.as_ref()?, &what, rule.lease))
            });
            let overrides = overrides.collect();
            let ban = match rule.ban {
                Some(ban) => {
                    let wrong = |why| RulesError::Ban(rule.name.clone(), why);
                    let denials = Limit::sliding_window_log(ban.after, ban.within, LogPolicy::Admitted);
                    let lasting = Limit::fixed_window(1, ban.lasts, WindowAlign::FirstRequest);
                    Some(BanLimits {
                        denials: keep(&denials.map_err(wrong)?, "denials", None),
                        ban: keep(&lasting.map_err(wrong)?, "ban", None),
                    })
                }
                None => None,
            };
            all.rules.push(NumberedRule { rule, limit, overrides, ban });
        }
        let of_keys: HashSet<usize> =
            all.rules.iter().flat_map(|it| it.key_overrides()).filter_map(|(_, limit)| limit).collect();
        let unique = all.limits.iter().enumerate().filter(|(index, _)| !of_keys.contains(index));
        let mut names = HashSet::new();
        match unique.map(|(_, kept)| &kept.name).find(|name| !names.insert(*name)) {
            Some(twice) => Err(RulesError::SameName(twice.clone())),
            None => Ok(all),
        }
    }

    /// All limits, in the order in which a store must keep them.
    pub fn limits(&self) -> &[StoredLimit] {
        &self.limits
    }

    /// The rules, in order.
    pub fn rules(&self) -> impl ExactSizeIterator<Item = &Rule> {
        self.rules.iter().map(|numbered| &numbered.rule)
    }

    /// The rule with this index.
    ///
    /// # Panics
    /// If the index is out of range; an index from [`Rules::charges_for`] never is.
    pub fn rule(&self, number: usize) -> &Rule {
        &self.rules[number].rule
    }

    /// What a request is charged by the rules with these indices. Duplicate and unknown indices are ignored.
    ///
    /// A rule's lists are checked in this order, and the first that contains the request decides: allowed clients,
    /// denied clients, allowed keys, denied keys. An address is harder to forge than a key, so a client in a denied
    /// network cannot get around it with an allowed key.
    ///
    /// # Errors
    /// If the request is denied or rejected independently of its limits. Shadow rules never fail.
    pub fn charges_for(
        &self,
        request: &impl Request,
        numbers: impl IntoIterator<Item = usize>,
    ) -> Result<ChargeList, Rejection> {
        let mut list = ChargeList::default();
        self.charges_into(&mut list, request, numbers).map(|()| list)
    }

    /// Adds the charge of one rule for a check without a request, and returns its index in the charges; none if the
    /// rule does not apply to the key. If the same key of the same limit is charged already, its cost is increased.
    /// Overrides with conditions on requests are ignored.
    ///
    /// # Errors
    /// If the rule does not exist, the values do not fit its key, or the key is on the rule's deny list.
    pub fn add_charge(
        &self,
        list: &mut ChargeList,
        number: usize,
        key: KeyInput<'_>,
        more: u32,
    ) -> Result<Option<usize>, KeyError> {
        let numbered = self.rules.get(number).ok_or(KeyError::NoRule)?;
        let start = list.keys.len();
        key.write(&numbered.rule.key, &mut list.keys)?;
        let limit = numbered.limit_of(&list.keys[start..], |_| false).map_err(|_| KeyError::Denied);
        let Ok(Some(SelectedLimit { limit, tier })) = limit else {
            list.keys.truncate(start);
            return limit.map(|_| None);
        };
        let key = start..list.keys.len();
        let is_same = |it: &RuleCharge| it.limit == limit && list.key(it) == &list.keys[key.clone()];
        if let Some(same) = list.charges.iter().position(is_same) {
            list.keys.truncate(start);
            let cost = &mut list.charges[same].cost;
            *cost = cost.saturating_add(more);
            return Ok(Some(same));
        }
        list.charges.push(RuleCharge { rule: number, limit, tier, cost: more, ban: numbered.ban, key });
        Ok(Some(list.charges.len() - 1))
    }

    /// Adds a charge for each tier of a rule that may apply to a key: each override with conditions on requests, which
    /// a check without a request cannot decide.
    ///
    /// # Errors
    /// If the rule does not exist or the values do not fit its key.
    pub fn add_tiers(
        &self,
        list: &mut ChargeList,
        number: usize,
        key: KeyInput<'_>,
        cost: u32,
    ) -> Result<Vec<Tier>, KeyError> {
        let numbered = self.rules.get(number).ok_or(KeyError::NoRule)?;
        let NumberedRule { rule, overrides, .. } = numbered;
        let start = list.keys.len();
        key.write(&rule.key, &mut list.keys)?;
        let key = start..list.keys.len();
        let written = &list.keys[key.clone()];
        let is_listed = |listed: &List| listed.has_key(&rule.key, written);
        if is_listed(&rule.allow) || (is_listed(&rule.deny) && !rule.is_shadow) {
            list.keys.truncate(start);
            return Ok(Vec::new());
        }
        // An override for the key itself comes before the tiers behind it.
        let is_key = |it: &Override| match &it.scope {
            OverrideScope::Keys(keys) => keys.iter().any(|value| rule.key.is(written, value)),
            OverrideScope::When(_) => false,
        };
        let end = rule.overrides.iter().position(is_key).unwrap_or(rule.overrides.len());
        let mut tiers = Vec::new();
        for (index, it) in rule.overrides[..end].iter().enumerate() {
            if let OverrideScope::When(_) = it.scope {
                let charge = overrides[index].map(|limit| {
                    let ban = numbered.ban;
                    let tier = Some(index);
                    list.charges.push(RuleCharge { rule: number, limit, tier, cost, ban, key: key.clone() });
                    list.charges.len() - 1
                });
                tiers.push(Tier { index, charge });
            }
        }
        Ok(tiers)
    }

    /// Like [`Rules::charges_for`], but reuses the memory of `list`, so that nothing is allocated.
    ///
    /// # Errors
    /// If the request is denied or rejected independently of its limits. The contents of `list` are then
    /// unspecified.
    pub fn charges_into(
        &self,
        list: &mut ChargeList,
        request: &impl Request,
        numbers: impl IntoIterator<Item = usize>,
    ) -> Result<(), Rejection> {
        list.clear();
        for number in numbers {
            let Some(numbered) = self.rules.get(number) else { continue };
            if list.charges.iter().any(|charge| charge.rule == number) {
                continue;
            }
            let start = list.keys.len();
            match numbered.charge(request, &mut list.keys) {
                Ok(Some(SelectedLimit { limit, tier })) => list.charges.push(RuleCharge {
                    rule: number,
                    limit,
                    tier,
                    cost: numbered.rule.cost.of(request),
                    ban: numbered.ban,
                    key: start..list.keys.len(),
                }),
                Ok(None) => list.keys.truncate(start),
                Err(_) if numbered.rule.is_shadow => list.keys.truncate(start),
                Err(NoCharge::DenyList) => {
                    let reason = ForbiddenReason::DenyList;
                    return Err(Rejection::Forbidden { rule: number, reason });
                }
                Err(NoCharge::NoKey(NoKey::Denied)) => {
                    let reason = ForbiddenReason::MissingKey;
                    return Err(Rejection::Forbidden { rule: number, reason });
                }
                Err(NoCharge::NoKey(error)) => return Err(Rejection::Ambiguous(error)),
            }
        }
        Ok(())
    }
}

impl NumberedRule {
    /// Returns the limit to charge, if any, and writes the key.
    fn charge(&self, request: &impl Request, keys: &mut Vec<u8>) -> Result<Option<SelectedLimit>, NoCharge> {
        let rule = &self.rule;
        if !rule.when.fits(request) || rule.allow.has_client(request) {
            return Ok(None);
        }
        // A shadow rule still charges requests that it would deny.
        if rule.deny.has_client(request) && !rule.is_shadow {
            return Err(NoCharge::DenyList);
        }
        let start = keys.len();
        match rule.key.write(request, keys) {
            Err(NoKey::Skipped) => return Ok(None),
            written => written.map_err(NoCharge::NoKey)?,
        }
        self.limit_of(&keys[start..], |when| when.fits(request))
    }

    /// Returns the limit to charge for a key, if any, by the rule's lists and overrides.
    fn limit_of(
        &self,
        written: &[u8],
        fits: impl Fn(&When) -> bool,
    ) -> Result<Option<SelectedLimit>, NoCharge> {
        let NumberedRule { rule, limit, overrides, .. } = self;
        if rule.allow.has_key(&rule.key, written) {
            return Ok(None);
        }
        if rule.deny.has_key(&rule.key, written) && !rule.is_shadow {
            return Err(NoCharge::DenyList);
        }
        let fitting = rule.overrides.iter().position(|it| match &it.scope {
            OverrideScope::Keys(keys) => keys.iter().any(|value| rule.key.is(written, value)),
            OverrideScope::When(when) => fits(when),
        });
        let limit = fitting.map_or(Some(*limit), |index| overrides[index]);
        Ok(limit.map(|limit| SelectedLimit { limit, tier: fitting }))
    }
}
