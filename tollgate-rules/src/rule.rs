//! Rules: a limit, whose it is, which requests it concerns, and what else is said of it.

use std::collections::HashSet;
use std::fmt;
use std::ops::Range;
use std::time::Duration;

use ipnet::IpNet;
use tollgate_core::{Align, Count, Failure, Lease, Limit, LimitError};

use crate::key::{Key, NoKey, WrongValues};
use crate::path::{PatternError, Spelling};
use crate::request::Request;
use crate::when::{When, is_in};

/// A limit, and everything that is said of it.
#[derive(Clone, Debug)]
pub struct Rule {
    /// Its name, which clients are told, too.
    pub name: String,
    /// How much.
    pub limit: Limit,
    /// Whose budget a request uses.
    pub key: Key,
    /// What a request costs.
    pub cost: Cost,
    /// Which requests it concerns.
    pub when: When,
    /// It counts and reports, but never denies.
    pub is_shadow: bool,
    /// Other limits for some; the first that fits counts.
    pub overrides: Vec<Override>,
    /// Whom it does not concern.
    pub allow: List,
    /// Who is always denied.
    pub deny: List,
    /// Keys that are denied often are denied for a while.
    pub ban: Option<Ban>,
    /// What is decided while the store is away, if not what the store says for all.
    pub failure: Option<Failure>,
    /// How its budget is taken ahead.
    pub lease: Option<Lease>,
}

impl Rule {
    /// One budget for all requests, of which each costs 1.
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
            failure: None,
            lease: None,
        }
    }

    /// Whose budget a request uses.
    #[must_use]
    pub fn key(mut self, key: Key) -> Rule {
        self.key = key;
        self
    }

    /// Which requests it concerns.
    #[must_use]
    pub fn when(mut self, when: When) -> Rule {
        self.when = when;
        self
    }

    /// What a request costs.
    #[must_use]
    pub fn cost(mut self, cost: Cost) -> Rule {
        self.cost = cost;
        self
    }

    /// It counts and reports, but never denies.
    #[must_use]
    pub fn shadow(mut self) -> Rule {
        self.is_shadow = true;
        self
    }

    /// The same rule for paths of this spelling, whichever its patterns were read for.
    ///
    /// # Errors
    /// If a pattern has what such paths never have.
    pub fn spelt(mut self, spelling: Spelling) -> Result<Rule, PatternError> {
        self.key = self.key.spelt(spelling)?;
        let overrides = self.overrides.iter_mut().filter_map(|it| match &mut it.whose {
            Whose::When(when) => Some(when),
            Whose::Keys(_) => None,
        });
        for pattern in overrides.chain([&mut self.when]).flat_map(|when| &mut when.paths) {
            *pattern = pattern.spelt(spelling)?;
        }
        Ok(self)
    }
}

/// What a request costs: at least 1, whatever is said. One that costs nothing would never be denied.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Cost {
    /// Always the same.
    Fixed(u32),
    /// What a header says; the most if several lines of it say different things.
    Header {
        /// Its name, in lower case.
        name: String,
        /// Where it is missing or says no number.
        otherwise: u32,
        /// What counts instead of anything larger.
        most: u32,
    },
    /// By the name of the route.
    Routes {
        /// Names and costs.
        costs: Vec<(String, u32)>,
        /// On all other routes.
        otherwise: u32,
    },
}

impl Cost {
    fn of(&self, request: &impl Request) -> u32 {
        let cost = match self {
            Cost::Fixed(cost) => *cost,
            Cost::Header { name, otherwise, most } => {
                // A client may send a line of its own in front of the one that a proxy adds.
                let said =
                    request.header(name).map(|value| number(value).map_or(*otherwise, |it| it.min(*most)));
                said.max().unwrap_or(*otherwise)
            }
            Cost::Routes { costs, otherwise } => {
                let cost = costs.iter().find(|(route, _)| route == request.route());
                cost.map_or(*otherwise, |(_, cost)| *cost)
            }
        };
        cost.max(1)
    }
}

/// The number that a header's value is, if it is one. What does not fit is the largest that does.
fn number(value: &[u8]) -> Option<u32> {
    let digits = value.trim_ascii();
    if digits.is_empty() || !digits.iter().all(u8::is_ascii_digit) {
        return None;
    }
    Some(std::str::from_utf8(digits).ok()?.parse().unwrap_or(u32::MAX))
}

/// Another limit for some.
#[derive(Clone, Debug)]
pub struct Override {
    /// For whom.
    pub whose: Whose,
    /// How much; none is no limit at all.
    pub limit: Option<Limit>,
}

/// Whom an [`Override`] is for.
#[derive(Clone, Debug)]
pub enum Whose {
    /// Keys of one part, [by their text](Key::is).
    Keys(Vec<String>),
    /// Requests of a kind: for example those whose token says `plan: gold`.
    When(When),
}

/// Clients and keys by name.
#[derive(Clone, Debug, Default)]
pub struct List {
    /// Networks of clients.
    pub clients: Vec<IpNet>,
    /// Keys of one part, [by their text](Key::is).
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

/// A key that is denied so many times within a window is denied for a while.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ban {
    /// Denials.
    pub after: u32,
    /// The window.
    pub within: Duration,
    /// How long it lasts.
    pub lasts: Duration,
}

/// All rules, with their limits numbered for a store.
#[derive(Clone, Debug, Default)]
pub struct Rules {
    rules: Vec<Numbered>,
    limits: Vec<KeptLimit>,
}

/// A rule, and where its limits stand among all.
#[derive(Clone, Debug)]
struct Numbered {
    rule: Rule,
    limit: usize,
    /// Of each override, if it has a limit.
    overrides: Vec<Option<usize>>,
    ban: Option<BanLimits>,
}

/// A limit that a store keeps.
#[derive(Clone, Debug)]
pub struct KeptLimit {
    /// The limit.
    pub limit: Limit,
    /// What it is called among the others.
    pub name: String,
    /// As its rule says.
    pub failure: Option<Failure>,
    /// As its rule says.
    pub lease: Option<Lease>,
}

/// Where the limits of a [`Ban`] stand.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BanLimits {
    /// Counts denials: 1 is charged for each.
    pub denials: usize,
    /// Is charged 1 when a ban begins, and is used up while it lasts.
    pub ban: usize,
}

/// Rules that do not fit together.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RulesError {
    /// Two limits have the same name, of those that rules are given and those that overrides and bans get by themselves.
    SameName(String),
    /// A ban's numbers make no limit.
    Ban(String, LimitError),
}

impl fmt::Display for RulesError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            RulesError::SameName(name) => write!(f, "two limits are called {name}; give one another name"),
            RulesError::Ban(name, why) => write!(f, "the ban of {name} cannot be: {why}"),
        }
    }
}

impl std::error::Error for RulesError {}

/// What a request is charged.
#[derive(Clone, Debug, Default)]
pub struct Asked {
    /// The charges, in the order of the rules.
    pub charges: Vec<Asking>,
    /// Their keys, one behind the other.
    keys: Vec<u8>,
}

/// A charge of one rule.
#[derive(Clone, Debug)]
pub struct Asking {
    /// Which rule.
    pub rule: usize,
    /// Which of [all limits](Rules::limits).
    pub limit: usize,
    /// How much.
    pub cost: u32,
    /// Where a ban of the key is kept.
    pub ban: Option<BanLimits>,
    key: Range<usize>,
}

impl Asked {
    /// Nothing is charged; the memory stays.
    pub fn clear(&mut self) {
        self.charges.clear();
        self.keys.clear();
    }

    /// Whose budget a charge uses.
    pub fn key(&self, asking: &Asking) -> &[u8] {
        &self.keys[asking.key.clone()]
    }
}

/// Whose budget somebody asks for who has no request to show.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Named<'a> {
    /// [The values](Key::write_values) of the rule's key, one for each part.
    Values(&'a [&'a str]),
    /// Bytes that mean something to whoever asks, and are a key of their own.
    Bytes(&'a [u8]),
}

/// Why somebody who has no request to show is not charged.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum NotNamed {
    /// There is no such rule.
    NoRule,
    /// Its key has other values.
    Values(WrongValues),
    /// The key is on the list of those that the rule always denies.
    Denied,
}

impl fmt::Display for NotNamed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            NotNamed::NoRule => write!(f, "there is no such limit"),
            NotNamed::Values(wrong) => write!(f, "{wrong}"),
            NotNamed::Denied => write!(f, "this key is on the limit's list of those that it always denies"),
        }
    }
}

impl std::error::Error for NotNamed {}

/// Why a request is not decided by its limits.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Refused {
    /// It is on a list of those that a rule always denies, or does not say whose it is where it must.
    Denied {
        /// Which rule.
        rule: usize,
    },
    /// It cannot be told whose it is.
    Unclear(NoKey),
}

impl Rules {
    /// Numbers the rules' limits.
    ///
    /// # Errors
    /// If two limits have the same name, by which a store would take them for one, or a ban is none.
    pub fn new(rules: impl IntoIterator<Item = Rule>) -> Result<Rules, RulesError> {
        let mut all = Rules::default();
        for rule in rules {
            let mut keep = |limit: &Limit, what: &str, lease: Option<Lease>| {
                let name = if what.is_empty() { rule.name.clone() } else { format!("{}/{what}", rule.name) };
                all.limits.push(KeptLimit { limit: limit.clone(), name, failure: rule.failure, lease });
                all.limits.len() - 1
            };
            let limit = keep(&rule.limit, "", rule.lease);
            let others = rule.overrides.iter().enumerate();
            let overrides = others
                .map(|(index, it)| Some(keep(it.limit.as_ref()?, &format!("override {index}"), rule.lease)))
                .collect();
            let ban = match rule.ban {
                Some(ban) => {
                    let wrong = |why| RulesError::Ban(rule.name.clone(), why);
                    let denials = Limit::sliding_window_log(ban.after, ban.within, Count::Admitted);
                    let lasting = Limit::fixed_window(1, ban.lasts, Align::FirstRequest);
                    Some(BanLimits {
                        denials: keep(&denials.map_err(wrong)?, "denials", None),
                        ban: keep(&lasting.map_err(wrong)?, "ban", None),
                    })
                }
                None => None,
            };
            all.rules.push(Numbered { rule, limit, overrides, ban });
        }
        let mut names = HashSet::new();
        match all.limits.iter().find(|kept| !names.insert(&kept.name)) {
            Some(twice) => Err(RulesError::SameName(twice.name.clone())),
            None => Ok(all),
        }
    }

    /// All limits, as a store must keep them: in this order.
    pub fn limits(&self) -> &[KeptLimit] {
        &self.limits
    }

    /// The rules, in order.
    pub fn rules(&self) -> impl ExactSizeIterator<Item = &Rule> {
        self.rules.iter().map(|numbered| &numbered.rule)
    }

    /// One of the rules.
    ///
    /// # Panics
    /// If there are not so many: the number is one that [`Rules::ask`] has given.
    pub fn rule(&self, number: usize) -> &Rule {
        &self.rules[number].rule
    }

    /// What a request is charged by the rules with these numbers. One that stands there twice counts once, and one that
    /// is no rule's counts for nothing.
    ///
    /// A rule's lists are asked in this order, and the first that has the request decides: clients that are allowed,
    /// clients that are denied, keys that are allowed, keys that are denied. An address is harder to choose than a key,
    /// so nobody gets out of a denied network by calling themselves what is allowed.
    ///
    /// # Errors
    /// If it is refused, whatever its limits say. Rules that only count refuse nobody.
    pub fn ask(
        &self,
        request: &impl Request,
        numbers: impl IntoIterator<Item = usize>,
    ) -> Result<Asked, Refused> {
        let mut asked = Asked::default();
        self.ask_into(&mut asked, request, numbers).map(|()| asked)
    }

    /// Adds what somebody is charged by one rule who has no request to show, and says which of the charges it is; none if
    /// the rule does not concern the key. Where the same is charged already, it costs more. What goes by requests, as
    /// some overrides do, is left out of account.
    ///
    /// # Errors
    /// If there is no such rule or key, or the key is on the rule's list of those that are denied.
    pub fn ask_by_name(
        &self,
        asked: &mut Asked,
        number: usize,
        whose: Named<'_>,
        more: u32,
    ) -> Result<Option<usize>, NotNamed> {
        let numbered = self.rules.get(number).ok_or(NotNamed::NoRule)?;
        let start = asked.keys.len();
        match whose {
            Named::Values(values) => {
                numbered.rule.key.write_values(values, &mut asked.keys).map_err(NotNamed::Values)?;
            }
            Named::Bytes(bytes) => asked.keys.extend(bytes),
        }
        let limit = numbered.limit_of(&asked.keys[start..], |_| false).map_err(|_| NotNamed::Denied);
        let Ok(Some(limit)) = limit else {
            asked.keys.truncate(start);
            return limit.map(|_| None);
        };
        let key = start..asked.keys.len();
        let is_same = |it: &Asking| it.limit == limit && asked.key(it) == &asked.keys[key.clone()];
        if let Some(same) = asked.charges.iter().position(is_same) {
            asked.keys.truncate(start);
            let cost = &mut asked.charges[same].cost;
            *cost = cost.saturating_add(more);
            return Ok(Some(same));
        }
        asked.charges.push(Asking { rule: number, limit, cost: more, ban: numbered.ban, key });
        Ok(Some(asked.charges.len() - 1))
    }

    /// The same, written over what another request was charged: then nothing is allocated.
    ///
    /// # Errors
    /// If it is refused, whatever its limits say. What was written until then means nothing.
    pub fn ask_into(
        &self,
        asked: &mut Asked,
        request: &impl Request,
        numbers: impl IntoIterator<Item = usize>,
    ) -> Result<(), Refused> {
        asked.clear();
        for number in numbers {
            let Some(numbered) = self.rules.get(number) else { continue };
            if asked.charges.iter().any(|asking| asking.rule == number) {
                continue;
            }
            let start = asked.keys.len();
            match numbered.charge(request, &mut asked.keys) {
                Ok(Some(limit)) => asked.charges.push(Asking {
                    rule: number,
                    limit,
                    cost: numbered.rule.cost.of(request),
                    ban: numbered.ban,
                    key: start..asked.keys.len(),
                }),
                Ok(None) => asked.keys.truncate(start),
                Err(_) if numbered.rule.is_shadow => asked.keys.truncate(start),
                Err(NoKey::Denied) => return Err(Refused::Denied { rule: number }),
                Err(unclear) => return Err(Refused::Unclear(unclear)),
            }
        }
        Ok(())
    }
}

impl Numbered {
    /// Which limit a request is charged, if any, and writes whose budget it uses.
    fn charge(&self, request: &impl Request, keys: &mut Vec<u8>) -> Result<Option<usize>, NoKey> {
        let rule = &self.rule;
        if !rule.when.fits(request) || rule.allow.has_client(request) {
            return Ok(None);
        }
        // A rule that only counts still counts those whom it would deny.
        if rule.deny.has_client(request) && !rule.is_shadow {
            return Err(NoKey::Denied);
        }
        let start = keys.len();
        match rule.key.write(request, keys) {
            Err(NoKey::Skipped) => return Ok(None),
            written => written?,
        }
        self.limit_of(&keys[start..], |when| when.fits(request))
    }

    /// Which limit a key is charged, if any: as the rule's lists and overrides say.
    fn limit_of(&self, written: &[u8], fits: impl Fn(&When) -> bool) -> Result<Option<usize>, NoKey> {
        let Numbered { rule, limit, overrides, .. } = self;
        if rule.allow.has_key(&rule.key, written) {
            return Ok(None);
        }
        if rule.deny.has_key(&rule.key, written) && !rule.is_shadow {
            return Err(NoKey::Denied);
        }
        let fitting = rule.overrides.iter().position(|it| match &it.whose {
            Whose::Keys(keys) => keys.iter().any(|value| rule.key.is(written, value)),
            Whose::When(when) => fits(when),
        });
        Ok(fitting.map_or(Some(*limit), |index| overrides[index]))
    }
}
