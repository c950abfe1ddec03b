//! Active health checks.

use std::sync::Arc;

use http::header::{HOST, HeaderValue, USER_AGENT};
use http::{Request, Uri, Version};
use ratekeeper_config::{Health, Protocol};
use tokio::time::{sleep, timeout};

use super::body::RequestBody;
use super::pool::{NoConnection, Pool};
use super::upstream::{Address, Upstream};

/// Checks all addresses of an upstream periodically, for as long as the upstream is in use.
pub(crate) fn watch(upstream: &Arc<Upstream>) {
    let Some(health) = upstream.config.health.clone() else { return };
    for address in upstream.addresses() {
        let (owner, address) = (Arc::downgrade(upstream), Arc::downgrade(address));
        let health = health.clone();
        tokio::spawn(async move {
            let (mut in_a_row, mut last) = (0, true);
            // The task ends when a reload drops the upstream.
            while let (Some(_owner), Some(address)) = (owner.upgrade(), address.upgrade()) {
                let asked = timeout(health.timeout, ask(&address, &health)).await;
                let is_well = asked.unwrap_or(Some(false)).unwrap_or(last);
                in_a_row = if is_well == last { in_a_row + 1 } else { 1 };
                last = is_well;
                let needed = if is_well { health.healthy_after } else { health.unhealthy_after };
                if in_a_row >= needed && address.set_well(is_well) {
                    let upstream = &address.authority;
                    match is_well {
                        true => tracing::info!(%upstream, "upstream healthy"),
                        false => tracing::warn!(%upstream, "upstream unhealthy: health checks failed"),
                    }
                }
                drop((address, _owner));
                sleep(health.every).await;
            }
        });
    }
}

/// Whether an address answers with a success status; None if the gateway is out of file descriptors.
async fn ask(address: &Arc<Address>, health: &Health) -> Option<bool> {
    let mut request = Request::new(RequestBody::empty());
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
    let mut connection = match Pool::fresh(address).await {
        Ok(connection) => connection,
        Err(NoConnection::Exhausted) => return None,
        Err(_) => return Some(false),
    };
    Some(connection.send(request).await.is_ok_and(|response| response.status().is_success()))
}
