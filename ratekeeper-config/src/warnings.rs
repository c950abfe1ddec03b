//! Risks in a valid file: settings that are possible, but probably not intended.

use std::collections::HashSet;
use std::net::{IpAddr, SocketAddr};

use ratekeeper_rules::path::Pattern;
use ratekeeper_rules::when::When;

use crate::error::quoted;
use crate::gateway::{Address, Gateway};
use crate::reader::{Entry, Reader};

/// Maximum number of route pairs compared: those of about 450 routes. Later routes are not checked.
const PAIRS_MAX: usize = 100_000;

/// Maximum number of routes whose paths are compared in the other case with all routes.
const CASE_ROUTES_MAX: usize = 300;

/// Warns of limits that no route uses.
pub(crate) fn unused_limits(reader: &mut Reader, gateway: &Gateway, limits: &[Entry<'_>]) {
    let used: HashSet<&str> =
        gateway.routes.iter().flat_map(|route| &route.limit_names).map(|it| &**it).collect();
    for limit in limits.iter().filter(|limit| !used.contains(limit.name)) {
        let message = format!("no route uses the limit {}", quoted(limit.name));
        let help = format!("add it to a route, as in `limits: [{}]`, or remove it", limit.name);
        reader.warn(limit.position, message, help);
    }
}

/// Warns of routes that never match, because an earlier route matches all of their requests.
pub(crate) fn unreachable_routes(reader: &mut Reader, gateway: &Gateway) {
    let mut pairs = 0;
    for (index, route) in gateway.routes.iter().enumerate() {
        pairs += index;
        if pairs > PAIRS_MAX {
            return;
        }
        if let Some(earlier) = gateway.routes[..index].iter().find(|it| it.when.covers(&route.when)) {
            let (id, earlier) = (quoted(&route.id), quoted(&earlier.id));
            let message =
                format!("the route {id} never matches: {earlier} comes first and matches the same requests");
            let help = format!("move {id} above {earlier}, or remove one of the two");
            reader.warn(route.position, message, help);
        }
    }
}

const CASE_HELP: &str = "write `paths: { case: ignore }` if your service ignores case, or `paths: { case: exact }` if \
    it does not";

/// Maximum number of further limits and routes that the warning about case names.
const CASE_NAMES_MAX: usize = 10;

/// Warns of the limits and routes that a service which ignores case serves in another case without the limit. One
/// warning, because one setting decides about all of them. Called unless the file says how case is compared.
pub(crate) fn case_of_paths<'c>(
    reader: &mut Reader,
    gateway: Option<&Gateway>,
    limits: &[Entry<'_>],
    conditions: impl Iterator<Item = (&'c str, &'c When)>,
) {
    let of_limits = conditions.filter_map(|(name, when)| {
        let (pattern, other) = in_other_case(when)?;
        let entry = limits.iter().find(|entry| entry.name == name)?;
        Some((entry.position, format!("the limit {}", quoted(name)), pattern, other))
    });
    let routes = || gateway.into_iter().flat_map(|gateway| &gateway.routes);
    let of_routes = routes().take(CASE_ROUTES_MAX).filter_map(|route| {
        let (pattern, other) = in_other_case(&route.when)?;
        let when = When { paths: vec![other.clone()], ..route.when.clone() };
        let next = routes().find(|it| it.when.covers(&when))?;
        let is_limited = route.limit_names.iter().all(|name| next.limit_names.contains(name));
        (!is_limited).then(|| (route.position, format!("the route {}", quoted(&route.id)), pattern, other))
    });
    let mut found = of_limits.chain(of_routes);
    let Some((position, what, pattern, other)) = found.next() else { return };
    let mut message = format!(
        "{what} applies to {} and not to {}, which may be the same to your service",
        quoted(&pattern.to_string()),
        quoted(&other.to_string())
    );
    let mut others: Vec<String> = found.map(|(_, what, ..)| what).collect();
    let more = others.len().saturating_sub(CASE_NAMES_MAX);
    others.truncate(CASE_NAMES_MAX);
    others.extend((more > 0).then(|| format!("{more} more")));
    if let Some((last, first)) = others.split_last() {
        let and = if first.is_empty() { "" } else { " and " };
        message += &format!("; the same holds for {}{and}{last}", first.join(", "));
    }
    reader.warn(position, message, CASE_HELP);
}

/// The first path of the conditions that they do not match in the other case, with that one.
fn in_other_case(when: &When) -> Option<(&Pattern, Pattern)> {
    when.paths.iter().find_map(|pattern| {
        let other = pattern.in_other_case()?;
        (!when.paths.iter().any(|it| it.covers(&other))).then_some((pattern, other))
    })
}

/// Warns of upstreams whose address is a listener of the file.
pub(crate) fn own_listeners(reader: &mut Reader) {
    let listening: Vec<SocketAddr> = reader.listening.iter().map(|(address, _)| *address).collect();
    for (address, position) in std::mem::take(&mut reader.upstream_addresses) {
        if let Some(own) = listening.iter().find(|listener| is_same(&address, **listener)) {
            let message = format!(
                "the upstream is a listener of this file, {own}: requests would return to Ratekeeper"
            );
            reader.warn(position, message, "write the address of your service, or listen on another port");
        }
    }
}

fn is_same(upstream: &Address, listener: SocketAddr) -> bool {
    if listener.port() == 0 || upstream.port != listener.port() {
        return false;
    }
    let ip = listener.ip().to_canonical();
    let is_local = ip.is_loopback() || ip.is_unspecified();
    match upstream.host.parse::<IpAddr>().map(|host| host.to_canonical()) {
        Ok(host) => {
            host == ip || (ip.is_unspecified() && host.is_loopback()) || (is_local && host.is_unspecified())
        }
        Err(_) => upstream.host == "localhost" && is_local,
    }
}
