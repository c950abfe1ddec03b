//! Which limit continues which when the rules change.

use std::collections::HashMap;

use super::{NumberedRule, OverrideScope, Rule, Rules};

/// A key that another limit of its rule applies to than before.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MovedKey {
    /// The written key.
    pub key: Vec<u8>,
    /// Index of the limit before.
    pub from: usize,
    /// Index of the limit now.
    pub to: usize,
}

impl Rules {
    /// For each limit, the index of the limit of `before` that it continues. Rules are matched by name, overrides with
    /// conditions by their conditions, and overrides for keys by a key that they have in common.
    pub fn predecessors(&self, before: &Rules) -> Vec<Option<usize>> {
        let is_of_keys = |rules: &Rules| {
            let mut is_of_keys = vec![false; rules.limits.len()];
            for (_, limit) in rules.rules.iter().flat_map(|it| it.key_overrides()) {
                limit.into_iter().for_each(|limit| is_of_keys[limit] = true);
            }
            is_of_keys
        };
        let named = before.limits.iter().zip(is_of_keys(before)).enumerate();
        let named: HashMap<&str, usize> = named
            .filter(|(_, (_, is_of_keys))| !is_of_keys)
            .map(|(index, (stored, _))| (stored.name.as_str(), index))
            .collect();
        let own = self.limits.iter().zip(is_of_keys(self));
        let mut predecessors: Vec<Option<usize>> = own
            .map(|(stored, is_of_keys)| named.get(stored.name.as_str()).copied().filter(|_| !is_of_keys))
            .collect();
        for (after, before) in self.pairs(before) {
            let mut former = HashMap::new();
            for (keys, limit) in before.key_overrides() {
                keys.iter().for_each(|key| _ = former.entry(key.as_str()).or_insert(limit));
            }
            let mut is_continued = Vec::new();
            for (keys, limit) in after.key_overrides() {
                let Some(limit) = limit else { continue };
                let mut shared = keys.iter().filter_map(|key| *former.get(key.as_str())?);
                predecessors[limit] = shared.find(|it| !is_continued.contains(it));
                is_continued.extend(predecessors[limit]);
            }
        }
        predecessors
    }

    /// The keys of overrides that have moved to a limit which does not continue theirs, because an override was added,
    /// removed or changed. Keys that an override has by their network are not among them.
    pub fn moved_keys(&self, before: &Rules, predecessors: &[Option<usize>]) -> Vec<MovedKey> {
        let mut moved = Vec::new();
        let changed = self.pairs(before).filter(|(after, before)| !after.has_same_keys(before, predecessors));
        for (after, before) in changed {
            let (listed_before, listed_after) = (before.listed_keys(), after.listed_keys());
            for value in
                listed_before.keys().chain(listed_after.keys().filter(|it| !listed_before.contains_key(*it)))
            {
                let from = listed_before.get(value).copied().unwrap_or(Some(before.limit));
                let to = listed_after.get(value).copied().unwrap_or(Some(after.limit));
                // A network of another override may contain an address.
                let is_same = to.and_then(|to| predecessors[to]) == from && !after.rule.key.is_address();
                for key in if is_same { Vec::new() } else { after.rule.key.named_by(value) } {
                    if !before.rule.key.named_by(value).contains(&key) {
                        continue;
                    }
                    let limits = (before.limit_of(&key, |_| false), after.limit_of(&key, |_| false));
                    if let (Ok(Some(from)), Ok(Some(to))) = limits
                        && predecessors[to.limit] != Some(from.limit)
                    {
                        moved.push(MovedKey { key, from: from.limit, to: to.limit });
                    }
                }
            }
        }
        moved
    }

    /// The rules of the same name.
    fn pairs<'a>(&'a self, before: &'a Rules) -> impl Iterator<Item = (&'a NumberedRule, &'a NumberedRule)> {
        let named: HashMap<&str, _> = before.rules.iter().map(|it| (it.rule.name.as_str(), it)).collect();
        self.rules.iter().filter_map(move |it| Some((it, *named.get(it.rule.name.as_str())?)))
    }
}

impl NumberedRule {
    /// The overrides for keys, each with its keys and the index of its limit, if it has one.
    pub(super) fn key_overrides(&self) -> impl Iterator<Item = (&[String], Option<usize>)> {
        let Rule { overrides, .. } = &self.rule;
        overrides.iter().zip(&self.overrides).filter_map(|(it, limit)| match &it.scope {
            OverrideScope::Keys(keys) => Some((keys.as_slice(), *limit)),
            OverrideScope::When(_) => None,
        })
    }

    /// Whether each limit applies to the same keys as the limit of `before` that it continues, so that no key moves. Many
    /// keys are compared faster than the limit of each is found.
    fn has_same_keys(&self, before: &NumberedRule, predecessors: &[Option<usize>]) -> bool {
        let continued = |limit: Option<usize>| limit.and_then(|limit| predecessors[limit]);
        let continued_overrides = self.key_overrides().map(|(keys, limit)| (keys, continued(limit)));
        self.rule.key == before.rule.key
            && continued(Some(self.limit)) == Some(before.limit)
            && continued_overrides.eq(before.key_overrides())
    }

    /// The keys of the overrides, each with the limit of the first that has it.
    fn listed_keys(&self) -> HashMap<&str, Option<usize>> {
        let mut listed = HashMap::new();
        for (keys, limit) in self.key_overrides() {
            keys.iter().for_each(|key| _ = listed.entry(key.as_str()).or_insert(limit));
        }
        listed
    }
}
