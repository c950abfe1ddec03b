//! Limits that change while they are in use.
//!
//! States live in Redis under the limit's name and its scale, so a limit of another size finds them there, and one of
//! another window or rate does not. What this process knows or holds of a limit goes on if nothing has changed; else it
//! is forgotten or given back.

use tollgate_core::Limit;

use super::{Redis, Settings, SettingsError};

impl Redis {
    /// The settings before anything was said of single limits.
    #[cfg(feature = "tower")]
    pub(crate) fn base(&self) -> &Settings {
        &self.0.base
    }

    /// Goes on where this one stands, on its connections: limit n is what limit `from[n]` was here, if any. Must be
    /// called on a runtime.
    pub(crate) fn renewed(
        &self,
        limits: &[Limit],
        from: &[Option<usize>],
        settings: &Settings,
    ) -> Result<Redis, SettingsError> {
        let Ok(runtime) = tokio::runtime::Handle::try_current() else { return Err(SettingsError::NoRuntime) };
        let before = &self.0;
        let terms = settings.terms(limits)?;
        let fallback = before.fallback.renewed(&settings.policies(limits)?, from);
        let next = Redis::on(before.servers.clone(), limits, settings, &before.base, terms, fallback)?;
        let same = |old: usize| {
            let number = from.iter().position(|from| *from == Some(old))?;
            let is_same = before.given.get(old) == next.0.given.get(number)
                && before.names.are_same(old, &next.0.names, number)
                && before.leases.are_same(old, &next.0.leases, number);
            is_same.then_some(number)
        };
        before.denials.hand_on(&next.0.denials, same);
        let unspent = before.leases.hand_on(&next.0.leases, same);
        if !unspent.is_empty() {
            let before = before.clone();
            runtime.spawn(async move { before.give_back_all(unspent).await });
        }
        Ok(next)
    }
}
