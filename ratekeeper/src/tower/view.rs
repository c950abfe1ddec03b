//! An HTTP request as rules see it.

use std::cell::OnceCell;
use std::net::{IpAddr, Ipv4Addr};

use http::Uri;
use http::header::{HOST, HeaderMap, HeaderName, HeaderValue};
use http::request::Parts;
use http::uri::PathAndQuery;
use ratekeeper_rules::path::RequestPath;
use ratekeeper_rules::request::{Request, host_name, is_well_formed_host};
use ratekeeper_rules::spelling::{HeaderAliases, is_header_alias};

use super::engine::{Engine, RequestRejection};
use super::{Claims, NonCanonicalPath, RequestContext};

/// A request's head. The client address and the claims are computed when the first rule uses them.
pub(crate) struct View<'a, S> {
    parts: &'a Parts,
    context: &'a RequestContext<'a>,
    engine: &'a Engine<S>,
    path: RequestPath<'a>,
    host: &'a str,
    client: OnceCell<Option<IpAddr>>,
    verified: OnceCell<Option<Claims>>,
}

impl<'a, S> View<'a, S> {
    pub(crate) fn new(
        parts: &'a Parts,
        context: &'a RequestContext<'a>,
        engine: &'a Engine<S>,
    ) -> Result<View<'a, S>, RequestRejection> {
        reject_aliases(&parts.headers, &engine.header_names, &engine.header_aliases)?;
        let path = RequestPath::read(parts.uri.path(), engine.path_normalization);
        let path = path.map_err(|error| RequestRejection::Malformed(error.to_string()))?;
        let (client, verified) = (OnceCell::new(), OnceCell::new());
        Ok(View { parts, context, engine, path, host: host(parts)?, client, verified })
    }

    /// Whether a rule used the client's address and the request has no peer address.
    pub(crate) fn lacks_peer(&self) -> bool {
        self.client.get().is_some_and(Option::is_none)
    }

    /// Rejects a request with two tokens if a rule used a claim: the service might use the other token.
    pub(crate) fn check_token(&self) -> Result<(), RequestRejection> {
        let Some(header) = self.engine.token_header.as_ref().filter(|_| self.verified.get().is_some()) else {
            return Ok(());
        };
        match self.parts.headers.get_all(header).iter().nth(1) {
            Some(_) => Err(twice(header)),
            None => Ok(()),
        }
    }

    /// The target to forward, if it differs from the received target.
    pub(crate) fn forwarded_target(&self) -> Result<Option<Uri>, RequestRejection> {
        let (uri, path) = (&self.parts.uri, &self.path.forwarded);
        let policy = self.engine.non_canonical_paths;
        // `OPTIONS *` and `CONNECT host:443` have no path to normalize.
        if policy == NonCanonicalPath::Keep || matches!(uri.path(), "" | "*") || path == uri.path() {
            return Ok(None);
        }
        if policy == NonCanonicalPath::Reject {
            return Err(RequestRejection::Malformed(
                "the path is not in canonical form; send the canonical form".to_owned(),
            ));
        }
        let target = match uri.query() {
            Some(query) => format!("{path}?{query}"),
            None => path.clone().into_owned(),
        };
        let mut parts = uri.clone().into_parts();
        let too_long = || RequestRejection::Malformed("the path is too long".to_owned());
        parts.path_and_query = Some(PathAndQuery::try_from(target).map_err(|_| too_long())?);
        Uri::from_parts(parts).map(Some).map_err(|_| too_long())
    }

    fn find_client(&self) -> Option<IpAddr> {
        if self.context.client.is_some() {
            return self.context.client;
        }
        let peer = (self.engine.peer)(self.parts)?;
        let trust = &self.engine.trusted_proxies;
        let lines = self.parts.headers.get_all(trust.source().header_name());
        Some(trust.client(peer, lines.iter().map(HeaderValue::as_bytes)))
    }
}

/// The request's host, from the target or the `Host` header. Services read either one, so both must be equal.
fn host(parts: &Parts) -> Result<&str, RequestRejection> {
    let mut lines = parts.headers.get_all(HOST).iter();
    let first = lines.next();
    if lines.next().is_some() {
        return Err(twice(&HOST));
    }
    let is_host = |host: &&str| host.is_empty() || is_well_formed_host(host);
    let malformed = || RequestRejection::Malformed("the host of the request is malformed".to_owned());
    let named = first.map(|host| host.to_str().ok().filter(is_host).ok_or_else(malformed)).transpose()?;
    let target = parts.uri.host().map(|host| Some(host).filter(is_host).ok_or_else(malformed)).transpose()?;
    match (target, named) {
        (Some(target), Some(named)) if !host_name(target).eq_ignore_ascii_case(host_name(named)) => Err(
            RequestRejection::Malformed("the target and the header host name two hosts; send one".to_owned()),
        ),
        (target, named) => Ok(target.or(named).unwrap_or_default()),
    }
}

/// Rejects other spellings of headers that rules read: servers that turn names into variables read `X_User_Id` as
/// `X-User-Id`, so a client could use the budget of one and be served as the other. If rules read both, a request may
/// have either.
fn reject_aliases(
    headers: &HeaderMap,
    read: &[HeaderName],
    aliases: &HeaderAliases,
) -> Result<(), RequestRejection> {
    if let Some((name, other)) = aliases.both_present(|name| headers.contains_key(name)) {
        return Err(RequestRejection::Malformed(format!(
            "the headers {name} and {other} are two spellings of one header; send one of them"
        )));
    }
    let aliased = |name: &HeaderName| read.iter().find(|of| is_header_alias(name.as_str(), of.as_str()));
    let aliases = headers.keys().filter_map(|name| Some((name, aliased(name)?)));
    match aliases.into_iter().find(|(name, _)| !read.contains(name)) {
        Some((name, of)) => Err(RequestRejection::Malformed(format!(
            "the header {name} is another spelling of {of}; send only {of}"
        ))),
        None => Ok(()),
    }
}

fn twice(header: &HeaderName) -> RequestRejection {
    RequestRejection::Malformed(format!("the header {header} is there twice; send it once"))
}

impl<S> Request for View<'_, S> {
    fn method(&self) -> &str {
        self.parts.method.as_str()
    }

    fn host(&self) -> &str {
        self.host
    }

    fn path(&self) -> &str {
        &self.path.matched
    }

    fn query(&self) -> &str {
        self.parts.uri.query().unwrap_or("")
    }

    fn header<'b>(&'b self, name: &'b str) -> impl Iterator<Item = &'b [u8]> + 'b {
        let lines = |name| self.parts.headers.get_all(name).iter().map(HeaderValue::as_bytes);
        lines(name).chain(self.engine.header_aliases.of(name).flat_map(lines))
    }

    fn client(&self) -> IpAddr {
        // If the address is unknown, the request is rejected after all rules have been evaluated.
        self.client.get_or_init(|| self.find_client()).unwrap_or(IpAddr::V4(Ipv4Addr::UNSPECIFIED))
    }

    fn route(&self) -> &str {
        let route = self.context.route.or_else(|| self.parts.extensions.get());
        route.map_or("", |route| route.0.as_ref())
    }

    fn claim(&self, name: &str) -> Option<&str> {
        if let Some(known) = self.context.claims {
            return known?.get(name);
        }
        let verify = || self.engine.verify.as_ref().and_then(|verify| verify(self.parts));
        let claims = self.verified.get_or_init(verify).as_ref();
        claims.or_else(|| self.parts.extensions.get::<Claims>())?.get(name)
    }

    fn custom(&self, name: &str) -> Option<String> {
        let (_, extractor) = self.engine.extractors.iter().find(|(its, _)| its == name)?;
        extractor.extract(self.parts)
    }
}
