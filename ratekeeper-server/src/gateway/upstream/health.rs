//! Active health checks.

use std::sync::Arc;

use http::header::{HOST, HeaderValue, USER_AGENT};
use http::{Request, Uri, Version};
use ratekeeper_config::{Health, Protocol};
use tokio::time::{sleep, timeout};

use super::pool::{ConnectError, Pool};
use super::{Address, Upstream};
use crate::gateway::body::RequestBody;

/// Checks all addresses of an upstream periodically, for as long as the upstream is in use.
pub(crate) fn spawn_checks(upstream: &Arc<Upstream>) {
    let Some(health) = upstream.config.health.clone() else { return };
    for address in upstream.addresses() {
        let (weak_owner, weak_address) = (Arc::downgrade(upstream), Arc::downgrade(address));
        let health = health.clone();
        tokio::spawn(async move {
            let (mut consecutive, mut last) = (0, true);
            // The task ends when a reload drops the upstream.
            while let (Some(owner), Some(address)) = (weak_owner.upgrade(), weak_address.upgrade()) {
                let result = timeout(health.timeout, check(&address, &health)).await;
                let is_healthy = result.unwrap_or(Some(false)).unwrap_or(last);
                consecutive = if is_healthy == last { consecutive + 1 } else { 1 };
                last = is_healthy;
                let needed = if is_healthy { health.healthy_after } else { health.unhealthy_after };
                if consecutive >= needed && address.set_healthy(is_healthy) {
                    let (upstream, address) = (&owner.config.name, &address.authority);
                    match is_healthy {
                        true => tracing::info!(upstream, %address, "upstream healthy"),
                        false => {
                            tracing::warn!(upstream, %address, "upstream unhealthy, health checks failed");
                        }
                    }
                }
                drop((address, owner));
                sleep(health.every).await;
            }
        });
    }
}

/// Whether an address answers with a success status; None if the gateway is out of file descriptors.
async fn check(address: &Arc<Address>, health: &Health) -> Option<bool> {
    let mut request = Request::new(RequestBody::Empty);
    let path = format!("{}{}", address.config.path, health.path);
    let target = match address.protocol {
        Protocol::Http1 => path.parse::<Uri>().ok(),
        Protocol::Http2 => {
            *request.version_mut() = Version::HTTP_2;
            format!("{}://{}{path}", address.scheme, address.authority).parse().ok()
        }
    };
    let (Some(target), Ok(host)) = (target, HeaderValue::from_str(address.authority.as_str())) else {
        return Some(false);
    };
    *request.uri_mut() = target;
    if address.protocol == Protocol::Http1 {
        request.headers_mut().insert(HOST, host);
    }
    request.headers_mut().insert(USER_AGENT, HeaderValue::from_static("ratekeeper-health"));
    // Opens a new connection: accepting one is part of being healthy.
    let mut connection = match Pool::open_unpooled(address).await {
        Ok(connection) => connection,
        Err(ConnectError::OutOfDescriptors) => return None,
        Err(_) => return Some(false),
    };
    Some(connection.send(request).await.is_ok_and(|response| response.status().is_success()))
}
