//! The lifecycle of a request: screen, route, check limits, forward, respond.

use std::cell::OnceCell;
use std::convert::Infallible;
use std::future::Future;
use std::net::IpAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use http::header::{ALLOW, EXPECT, HOST, HeaderValue};
use http::request::Parts;
use http::uri::{PathAndQuery, Uri};
use http::{Request, Response, StatusCode, Version};
use hyper::body::{Body, Incoming};
use pin_project_lite::pin_project;
use ratekeeper::tower::token::Tokens;
use ratekeeper::tower::{Claims, RequestContext, ResponseFuture, Subject, grpc_content_type};
use ratekeeper_rules::client::TrustedProxies;
use ratekeeper_rules::path::{AmbiguousPath, PathNormalization, normalise};
use ratekeeper_rules::request::Request as _;
use tower_service::Service;

use super::access::{Passage, X_REQUEST_ID};
use super::answer::{close, in_grpc, problem, try_again};
use super::body::{Outgoing, RequestBody, UpstreamBody};
use super::connection::Connection;
use super::forward::{Errand, Forward};
use super::hop_headers::takes_trailers;
use super::screen::{screen, wanted_upgrade};
use super::state::{Route, State};
use crate::backend::Backend;
use crate::metrics::Decision;

/// A body of at most this size usually arrives with its head: it is read, and the connection stays open.
const UNREAD_BYTES_MAX: u64 = 16 << 10;

/// Starts serving a request. Everything up to the first wait runs here, so a request that is answered by then
/// allocates no future.
pub(crate) fn serve<S: Backend>(connection: &Arc<Connection<S>>, request: Request<Incoming>) -> Serving<S> {
    let desk = &connection.worker.desk;
    let mut passage = Passage::new(desk, connection.peer, connection.watch.begin());
    let is_http1 = request.version() < Version::HTTP_2;
    let grpc = grpc_content_type(request.headers());
    let is_long = is_http1 && is_long(&request);
    let entered = enter(connection, request, grpc.is_some(), &mut passage);
    let rest = Rest { passage, is_http1, grpc, is_long };
    match entered {
        Ok(Entered::Limited { mut limited }) => match limited.take_local_response() {
            Some(told) => Serving::answered(rest.end(connection, told.map(Outgoing::limited))),
            None => Serving::waiting(connection, Entered::Limited { limited }, rest),
        },
        Ok(entered) => Serving::waiting(connection, entered, rest),
        Err(refused) => Serving::answered(rest.end(connection, refused.map(Outgoing::unlimited))),
    }
}

pin_project! {
    /// A request being served.
    #[project = Stage]
    pub(crate) enum Serving<S: Backend> {
        Finished { response: Option<Response<Outgoing>> },
        Waiting { #[pin] entered: Entered<S>, connection: Arc<Connection<S>>, rest: Option<Rest> },
    }
}

pin_project! {
    /// A request on its way to its upstream, through limits if there are any.
    #[project = Way]
    pub(crate) enum Entered<S: Backend> {
        Limited { #[pin] limited: ResponseFuture<Forward<S>, Request<RequestBody>, S> },
        Unlimited { #[pin] unlimited: <Forward<S> as Service<Request<RequestBody>>>::Future },
    }
}

impl<S: Backend> Serving<S> {
    fn answered(response: Response<Outgoing>) -> Serving<S> {
        Serving::Finished { response: Some(response) }
    }

    fn waiting(connection: &Arc<Connection<S>>, entered: Entered<S>, rest: Rest) -> Serving<S> {
        Serving::Waiting { entered, connection: connection.clone(), rest: Some(rest) }
    }
}

impl<S: Backend> Future for Serving<S> {
    type Output = Result<Response<Outgoing>, Infallible>;

    /// Stays pending after completion.
    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        match self.project() {
            Stage::Finished { response } => response.take().map_or(Poll::Pending, |it| Poll::Ready(Ok(it))),
            Stage::Waiting { entered, connection, rest } => {
                let Ok(response) = match entered.project() {
                    Way::Limited { limited } => {
                        ready!(limited.poll(context)).map(|it| it.map(Outgoing::limited))
                    }
                    Way::Unlimited { unlimited } => {
                        ready!(unlimited.poll(context)).map(|it| it.map(Outgoing::unlimited))
                    }
                };
                rest.take().map_or(Poll::Pending, |rest| Poll::Ready(Ok(rest.end(connection, response))))
            }
        }
    }
}

/// State of a request that is needed once its response is available.
pub(crate) struct Rest {
    passage: Passage,
    is_http1: bool,
    /// The content type that a gRPC call expects.
    grpc: Option<HeaderValue>,
    is_long: bool,
}

impl Rest {
    /// Completes the response for the client.
    fn end<S>(self, connection: &Connection<S>, mut response: Response<Outgoing>) -> Response<Outgoing> {
        let Rest { mut passage, is_http1, grpc, is_long } = self;
        passage.answered(response.status());
        if let Some(content_type) = grpc {
            response = in_grpc(response, content_type);
        }
        if response.status() == StatusCode::SWITCHING_PROTOCOLS {
            connection.switch(&mut response, passage);
            return response;
        }
        // A long body of a failed request has probably not been read. hyper then closes the connection rather than
        // parse the rest as the next request, and the response announces that.
        let is_error = response.status().is_client_error() || response.status().is_server_error();
        if (is_long && is_error) || (is_http1 && connection.is_draining()) {
            close(&mut response);
        }
        let response = response.map(|body| body.holding(passage));
        if is_http1 { response } else { response.map(Outgoing::in_parts) }
    }
}

fn is_long(request: &Request<Incoming>) -> bool {
    let length = request.body().size_hint().exact();
    length.is_none_or(|length| length > UNREAD_BYTES_MAX) || request.headers().contains_key(EXPECT)
}

/// Runs everything up to the first wait.
fn enter<S: Backend>(
    connection: &Arc<Connection<S>>,
    request: Request<Incoming>,
    is_grpc: bool,
    passage: &mut Passage,
) -> Result<Entered<S>, Refused> {
    let worker = &connection.worker;
    let state = worker.shared.state.load();
    let (mut parts, body) = request.into_parts();
    if state.has_access_log {
        passage.log(&parts.method, parts.uri.path_and_query());
    }
    if let Err(refusal) = screen(&mut parts, &state.header_names) {
        passage.said().set(Decision::Refused);
        let mut response = problem(refusal.status, refusal.why);
        if refusal.status == StatusCode::METHOD_NOT_ALLOWED {
            let allowed = HeaderValue::from_static("GET, HEAD, POST, PUT, PATCH, DELETE, OPTIONS");
            response.headers_mut().insert(ALLOW, allowed);
        }
        // After a rejected request, further data on this connection is not trusted.
        if parts.version < Version::HTTP_2 {
            close(&mut response);
        }
        return Err(Box::new(response));
    }
    let Found { route, client, claims } = look_up(connection.peer, &state, worker.number, &mut parts)
        .inspect_err(|_| passage.said().set(Decision::Refused))?;
    passage.routed(route, client);
    if let Some(id) = parts.headers.get(X_REQUEST_ID).filter(|_| state.client.trusts(connection.peer)) {
        passage.name(id);
    }
    // Routes that are not critical leave some permits to critical ones.
    let most = if route.is_critical { state.max_in_flight } else { state.max_uncritical };
    if !passage.take_place(most) {
        passage.said().set(Decision::Shed);
        let refused = try_again(StatusCode::SERVICE_UNAVAILABLE, "gateway overloaded");
        return Err(Box::new(refused));
    }

    // A gRPC stream may be silent for hours.
    let may_be_silent = is_grpc && parts.version >= Version::HTTP_2;
    let mut errand = Errand {
        upgrade: wanted_upgrade(&parts),
        takes_trailers: takes_trailers(&parts.headers),
        connection: connection.clone(),
        route: route.clone(),
        client,
        id: passage.id().clone(),
        is_forwarded: false,
        may_be_silent,
    };
    // Limits that read forwarding headers must see the gateway's values. If none does, the headers are set only after
    // the limits, so that a denied request does not pay for them.
    if state.reads_forwarded {
        errand.set_forwarded(&mut parts.headers);
        errand.is_forwarded = true;
    }
    let body = RequestBody::new(body, (!may_be_silent).then_some(state.timeouts.body), &state.header_names);
    let (request, mut forward) = (Request::from_parts(parts, body), Forward::new(errand));
    Ok(match &state.limits {
        Some(limits) => {
            let about = RequestContext {
                client: Some(client),
                claims: claims.as_ref().map(Option::as_ref),
                route: Some(&route.id),
                rules: Some(&route.chosen),
                concurrency: Some(&route.chosen_slots),
                subject: Some(Subject(passage.said().clone())),
            };
            Entered::Limited { limited: limits.call_with(forward, request, about) }
        }
        None => {
            passage.said().set(Decision::Allowed);
            Entered::Unlimited { unlimited: forward.call(request) }
        }
    })
}

/// The response to a rejected request. Boxed, so that other requests do not reserve memory for it.
pub(crate) type Refused = Box<Response<UpstreamBody>>;

/// The route, client and claims of a request.
struct Found<'s> {
    route: &'s Arc<Route>,
    client: IpAddr,
    /// Claims of the token, if a route reads them; verifying a token takes longer than everything else.
    claims: Option<Option<Claims>>,
}

/// Finds the route and client of a request, and normalises the request's path as it was matched.
fn look_up<'s, S: Backend>(
    peer: IpAddr,
    state: &'s State<S>,
    worker: usize,
    parts: &mut Parts,
) -> Result<Found<'s>, Refused> {
    let ambiguous = |why: AmbiguousPath| Box::new(problem(StatusCode::BAD_REQUEST, &why.to_string()));
    let path = normalise(parts.uri.path(), state.paths).map_err(ambiguous)?;
    let (trust, tokens) = (&state.client, state.tokens.as_deref());
    let (client, claims) = (OnceCell::new(), OnceCell::new());
    let seen = Seen { parts, path: &path, trust, tokens, peer, client, claims };
    let route = state.routes(worker).iter().find(|route| route.when.fits(&seen));
    let client = seen.client();
    // With two tokens, the upstream may trust the other one.
    let claims = seen.claims.into_inner();
    let token_header = claims.as_ref().and(tokens).map(Tokens::header_name);
    if token_header.is_some_and(|name| parts.headers.get_all(name).iter().nth(1).is_some()) {
        return Err(Box::new(problem(StatusCode::BAD_REQUEST, "there are two tokens; send one")));
    }
    let Some(route) = route else {
        return Err(Box::new(problem(StatusCode::NOT_FOUND, "there is no route for this request")));
    };
    // Letter case and trailing slashes stay as sent, for the upstream; the rest is normalised as it was matched.
    let spelling = PathNormalization { ambiguous: state.paths.ambiguous, ..PathNormalization::default() };
    let plain = match spelling == state.paths {
        true => path,
        false => normalise(parts.uri.path(), spelling).map_err(ambiguous)?,
    };
    if plain != parts.uri.path() && parts.uri.path() != "*" {
        parts.uri = with_path(&parts.uri, &plain)?;
    }
    Ok(Found { route, client, claims })
}

/// The target with another path and the same query.
pub(crate) fn with_path(uri: &Uri, path: &str) -> Result<Uri, Refused> {
    let target = match uri.query() {
        Some(query) => PathAndQuery::try_from(format!("{path}?{query}")),
        None => PathAndQuery::try_from(path),
    };
    target.map(Uri::from).map_err(|_| Box::new(problem(StatusCode::BAD_REQUEST, "the path is too long")))
}

/// A request as routes match it.
struct Seen<'a> {
    parts: &'a Parts,
    path: &'a str,
    trust: &'a TrustedProxies,
    peer: IpAddr,
    tokens: Option<&'a Tokens>,
    client: OnceCell<IpAddr>,
    claims: OnceCell<Option<Claims>>,
}

impl ratekeeper_rules::request::Request for Seen<'_> {
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
        // Forwarding headers count only from trusted proxies.
        if !self.trust.trusts(self.peer) {
            return self.peer;
        }
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
