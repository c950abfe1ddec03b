//! The life of a request: screened, routed, held against its limits, forwarded, answered.

use std::cell::OnceCell;
use std::net::IpAddr;
use std::sync::Arc;

use http::header::{CONTENT_TYPE, EXPECT, HOST, HeaderMap, HeaderValue};
use http::request::Parts;
use http::uri::{PathAndQuery, Uri};
use http::{Request, Response, StatusCode, Version};
use hyper::body::{Body, Incoming};
use tollgate::tower::token::Tokens;
use tollgate::tower::{Claims, Peer, Subject};
use tollgate_rules::client::Trust;
use tollgate_rules::path::{Ambiguous, Spelling, normalise};
use tollgate_rules::request::Request as _;
use tower_layer::Layer;
use tower_service::Service;

use super::answer::{close, in_grpc, problem, try_again};
use super::body::{Outgoing, RequestBody, UpstreamBody};
use super::connection::Connection;
use super::forward::Forward;
use super::heads::{Origin, remove_hop_by_hop, set_forwarded, takes_trailers};
use super::record::{Passage, X_REQUEST_ID};
use super::screen::{screen, wanted_upgrade};
use super::state::{Route, State};
use crate::limits::Stored;
use crate::metrics::Decision;

/// A body that is not much longer has come with its head: it is read, and the connection lives on.
const UNREAD_BYTES_MAX: u64 = 16 << 10;

/// Answers one request.
pub(crate) async fn serve<S: Stored>(
    connection: &Arc<Connection<S>>,
    request: Request<Incoming>,
) -> Response<Outgoing> {
    let worker = &connection.worker;
    let mut passage =
        Passage::new(&worker.shared.ledger, worker.number, connection.peer, connection.watch.begin());
    let is_http1 = request.version() < Version::HTTP_2;
    let is_grpc = is_grpc(request.headers());
    let is_long = is_http1 && is_long(&request);
    let mut response = match pass(connection, request, &mut passage).await {
        Ok(response) => response,
        Err(refused) => refused.map(Outgoing::unlimited),
    };
    passage.answered(response.status());
    if is_grpc {
        response = in_grpc(response);
    }
    if response.status() == StatusCode::SWITCHING_PROTOCOLS {
        connection.switch(&mut response, passage);
        return response;
    }
    // A long body of a request that came to nothing has probably not been read. hyper closes the connection then, rather
    // than to take the rest for the next request, and the client may as well know.
    let is_error = response.status().is_client_error() || response.status().is_server_error();
    if (is_long && is_error) || (is_http1 && connection.is_draining()) {
        close(&mut response);
    }
    response.map(|body| body.holding(passage))
}

fn is_long(request: &Request<Incoming>) -> bool {
    let length = request.body().size_hint().exact();
    length.is_none_or(|length| length > UNREAD_BYTES_MAX) || request.headers().contains_key(EXPECT)
}

async fn pass<S: Stored>(
    connection: &Arc<Connection<S>>,
    request: Request<Incoming>,
    passage: &mut Passage,
) -> Result<Response<Outgoing>, Response<UpstreamBody>> {
    let shared = &connection.worker.shared;
    let state = shared.state.load_full();
    let (mut parts, body) = request.into_parts();
    if state.has_access_log {
        passage.log(&parts.method, parts.uri.path_and_query());
    }
    if let Err(refusal) = screen(&mut parts, &state.key_headers) {
        passage.said().set(Decision::Refused);
        let mut response = problem(refusal.status, refusal.why);
        // What else comes on this connection is not to be trusted.
        if parts.version < Version::HTTP_2 {
            close(&mut response);
        }
        return Err(response);
    }
    let (route, client) = look_up(connection.peer, &state, &mut parts).map_err(|refused| {
        passage.said().set(Decision::Refused);
        *refused
    })?;
    passage.routed(&route, client);
    // Routes that are not critical leave some places to the others.
    let most = if route.is_critical { state.max_in_flight } else { state.max_uncritical };
    if !passage.take_place(most) {
        passage.said().set(Decision::Shed);
        return Err(try_again(StatusCode::SERVICE_UNAVAILABLE, "the gateway has too much to do"));
    }

    let forward = Forward {
        upgrade: wanted_upgrade(&parts),
        takes_trailers: takes_trailers(&parts.headers),
        worker: connection.worker.number,
        ticker: shared.ticker.clone(),
        route,
    };
    remove_hop_by_hop(&mut parts.headers);
    let Connection { peer, port, is_tls, .. } = **connection;
    set_forwarded(&mut parts.headers, Origin { peer, client, port, is_tls, trust: &state.client });
    if (!parts.headers.contains_key(X_REQUEST_ID) || !state.client.trusts(peer))
        && let Some(id) = passage.id()
    {
        parts.headers.insert(X_REQUEST_ID, id);
    }
    // A stream of calls may be silent for hours.
    let may_be_silent = parts.version >= Version::HTTP_2 || is_grpc(&parts.headers);
    let body = RequestBody::new(body, (!may_be_silent).then_some(state.timeouts.body));
    match &state.limits {
        Some(limits) => {
            parts.extensions.insert(Subject(passage.said().clone()));
            parts.extensions.insert(Peer(peer));
            parts.extensions.insert(forward.route.id.clone());
            parts.extensions.insert(forward.route.chosen.clone());
            parts.extensions.insert(forward.route.chosen_slots.clone());
            let Ok(response) = limits.layer(forward).call(Request::from_parts(parts, body)).await;
            Ok(response.map(Outgoing::limited))
        }
        None => {
            let mut forward = forward;
            let Ok(response) = forward.call(Request::from_parts(parts, body)).await;
            Ok(response.map(Outgoing::unlimited))
        }
    }
}

fn is_grpc(headers: &HeaderMap) -> bool {
    headers.get(CONTENT_TYPE).is_some_and(|kind| kind.as_bytes().starts_with(b"application/grpc"))
}

/// What a client is told instead of a response. Most requests have none, and should not make room for it.
pub(crate) type Refused = Box<Response<UpstreamBody>>;

/// The route of a request and its client. From now on it has the one spelling of its path that was looked up.
fn look_up<S>(peer: IpAddr, state: &State<S>, parts: &mut Parts) -> Result<(Arc<Route>, IpAddr), Refused> {
    let ambiguous = |why: Ambiguous| Box::new(problem(StatusCode::BAD_REQUEST, &why.to_string()));
    let path = normalise(parts.uri.path(), state.paths).map_err(ambiguous)?;
    let (trust, tokens) = (&state.client, state.tokens.as_deref());
    let (client, claims) = (OnceCell::new(), OnceCell::new());
    let seen = Seen { parts, path: &path, trust, tokens, peer, client, claims };
    let route = state.routes.iter().find(|route| route.when.fits(&seen)).cloned();
    let client = seen.client();
    let Some(route) = route else {
        return Err(Box::new(problem(StatusCode::NOT_FOUND, "there is no route for this request")));
    };
    // Letters and slashes at the end are as the upstream wants them; the rest is what was matched.
    let spelling = Spelling { ambiguous: state.paths.ambiguous, ..Spelling::default() };
    let plain = normalise(parts.uri.path(), spelling).map_err(ambiguous)?;
    if plain != parts.uri.path() && parts.uri.path() != "*" {
        parts.uri = with_path(&parts.uri, &plain)?;
    }
    Ok((route, client))
}

/// The same target with another path.
pub(crate) fn with_path(uri: &Uri, path: &str) -> Result<Uri, Refused> {
    let target = match uri.query() {
        Some(query) => PathAndQuery::try_from(format!("{path}?{query}")),
        None => PathAndQuery::try_from(path),
    };
    target.map(Uri::from).map_err(|_| Box::new(problem(StatusCode::BAD_REQUEST, "the path is too long")))
}

/// A request as routes see it.
struct Seen<'a> {
    parts: &'a Parts,
    path: &'a str,
    trust: &'a Trust,
    peer: IpAddr,
    tokens: Option<&'a Tokens>,
    client: OnceCell<IpAddr>,
    claims: OnceCell<Option<Claims>>,
}

impl tollgate_rules::request::Request for Seen<'_> {
    fn method(&self) -> &str {
        self.parts.method.as_str()
    }

    fn host(&self) -> &str {
        self.parts.headers.get(HOST).and_then(|host| host.to_str().ok()).unwrap_or("")
    }

    fn path(&self) -> &str {
        self.path
    }

    fn query(&self) -> &str {
        self.parts.uri.query().unwrap_or("")
    }

    fn header<'b>(&'b self, name: &'b str) -> impl Iterator<Item = &'b [u8]> + 'b {
        self.parts.headers.get_all(name).iter().map(HeaderValue::as_bytes)
    }

    fn client(&self) -> IpAddr {
        let lines = || self.parts.headers.get_all(self.trust.source().header_name());
        *self.client.get_or_init(|| self.trust.client(self.peer, lines().iter().map(HeaderValue::as_bytes)))
    }

    fn route(&self) -> &str {
        ""
    }

    fn claim(&self, name: &str) -> Option<&str> {
        let claims = self.claims.get_or_init(|| self.tokens?.claims(self.parts)).as_ref()?;
        claims.0.get(name).map(String::as_str)
    }

    fn custom(&self, _name: &str) -> Option<String> {
        None
    }
}
