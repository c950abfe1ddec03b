//! Limits that change while they are in use.
//!
//! States are stored in Redis under the limit's name and scale, so a limit that changes only in size keeps its
//! states, and a limit with another window or rate starts with new ones. A named limit whose windows begin with the
//! first request keeps them if the length changes, too. Cached denials and leases of an unchanged
//! limit are kept; otherwise denials are dropped and leases are refunded.

use ratekeeper_core::Limit;

use super::{Redis, Settings, SettingsError};

impl Redis {
    /// The settings without the options of single limits.
    #[cfg(feature = "tower")]
    pub(crate) fn base(&self) -> &Settings {
        &self.0.base
    }

    /// Creates a store for new limits on the same connections, with state migration: limit n continues limit
    /// `from[n]` of this store, if any. Must be called on a tokio runtime.
    pub(crate) fn reload(
        &self,
        limits: &[Limit],
        from: &[Option<usize>],
        settings: &Settings,
    ) -> Result<Redis, SettingsError> {
        let Ok(runtime) = tokio::runtime::Handle::try_current() else { return Err(SettingsError::NoRuntime) };
        let before = &self.0;
        let terms = settings.terms(limits)?;
        let fallback = before.fallback.reload(&settings.policies(limits)?, from)?;
        let next =
            Redis::with_servers(before.servers.clone(), limits, settings, &before.base, terms, fallback)?;
        let same = |old: usize| {
            let number = from.iter().position(|from| *from == Some(old))?;
            let is_same = before.configured.get(old) == next.0.configured.get(number)
                && before.names.are_same(old, &next.0.names, number)
                && before.leases.are_same(old, &next.0.leases, number);
            is_same.then_some(number)
        };
        before.denials.migrate_to(&next.0.denials, same);
        let unspent = before.leases.migrate_to(&next.0.leases, same);
        if !unspent.is_empty() {
            let before = before.clone();
            runtime.spawn(async move { before.refund_all(unspent).await });
        }
        Ok(next)
    }
}
