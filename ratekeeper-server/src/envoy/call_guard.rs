//! Calls in flight: authenticated, and bounded in number.

use std::sync::Arc;

use http::HeaderMap;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use super::EnvoyApiSettings;
use super::connection::ConnectionAuth;
use super::error::EnvoyApiError;
use crate::runtime::guard::has_token;

/// Rejects calls without the token, and calls beyond a bound. A call holds its permit from its head to its response, so
/// that slow senders are bounded as well; if the response is a stream that may never end, to the end of the stream.
#[derive(Debug)]
pub(super) struct CallGuard {
    permits: Arc<Semaphore>,
    requires_token: bool,
}

impl CallGuard {
    pub(super) fn new(calls_max: usize) -> CallGuard {
        CallGuard { permits: Arc::new(Semaphore::new(calls_max)), requires_token: true }
    }

    /// Load balancers have no token, so their health checks require none.
    pub(super) fn without_token(self) -> CallGuard {
        CallGuard { requires_token: false, ..self }
    }

    pub(super) fn admit(
        &self,
        settings: &EnvoyApiSettings,
        headers: &HeaderMap,
        auth: &ConnectionAuth,
    ) -> Result<OwnedSemaphorePermit, EnvoyApiError> {
        if let Some(token) = settings.token.as_ref().filter(|_| self.requires_token) {
            if !has_token(headers, token) {
                return Err(EnvoyApiError::Unauthenticated);
            }
            auth.set_authenticated();
        }
        self.permits.clone().try_acquire_owned().map_err(|_| EnvoyApiError::Overloaded)
    }
}
