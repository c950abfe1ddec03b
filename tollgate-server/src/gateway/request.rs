//! The life of a request: screened, routed, held against its limits, forwarded, answered.

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
use tollgate::tower::token::Tokens;
use tollgate::tower::{About, Claims, ResponseFuture, Subject, grpc_content_type};
use tollgate_rules::client::Trust;
use tollgate_rules::path::{Ambiguous, Spelling, normalise};
use tollgate_rules::request::Request as _;
use tower_service::Service;

use super::answer::{close, in_grpc, problem, try_again};
use super::body::{Outgoing, RequestBody, UpstreamBody};
use super::connection::Connection;
use super::forward::{Errand, Forward};
use super::heads::takes_trailers;
use super::record::{Passage, X_REQUEST_ID};
use super::screen::{screen, wanted_upgrade};
use super::state::{Route, State};
use crate::limits::Stored;
use crate::metrics::Decision;

/// A body that is not much longer has come with its head: it is read, and the connection lives on.
const UNREAD_BYTES_MAX: u64 = 16 << 10;

/// Begins to answer one request. Everything up to the first wait is done here, so a request that has its answer by then
/// needs no memory for a future.
pub(crate) fn serve<S: Stored>(connection: &Arc<Connection<S>>, request: Request<Incoming>) -> Serving<S> {
    let desk = &connection.worker.desk;
    let mut passage = Passage::new(desk, connection.peer, connection.watch.begin());
    let is_http1 = request.version() < Version::HTTP_2;
    let grpc = grpc_content_type(request.headers());
    let is_long = is_http1 && is_long(&request);
    let entered = enter(connection, request, grpc.is_some(), &mut passage);
    let rest = Rest { passage, is_http1, grpc, is_long };
    match entered {
        Ok(Entered::Limited { mut limited }) => match limited.told() {
            Some(told) => Serving::answered(rest.end(connection, told.map(Outgoing::limited))),
            None => Serving::waiting(connection, Entered::Limited { limited }, rest),
        },
        Ok(entered) => Serving::waiting(connection, entered, rest),
        Err(refused) => Serving::answered(rest.end(connection, refused.map(Outgoing::unlimited))),
    }
}

pin_project! {
    /// A request that is being answered.
    #[project = Stage]
    pub(crate) enum Serving<S: Stored> {
        Answered { response: Option<Response<Outgoing>> },
        Waiting { #[pin] entered: Entered<S>, connection: Arc<Connection<S>>, rest: Option<Rest> },
    }
}

pin_project! {
    /// A request on its way to its upstream, through limits if there are any.
    #[project = Way]
    pub(crate) enum Entered<S: Stored> {
        Limited { #[pin] limited: ResponseFuture<Forward<S>, Request<RequestBody>, S> },
        Unlimited { #[pin] unlimited: <Forward<S> as Service<Request<RequestBody>>>::Future },
    }
}

impl<S: Stored> Serving<S> {
    fn answered(response: Response<Outgoing>) -> Serving<S> {
        Serving::Answered { response: Some(response) }
    }

    fn waiting(connection: &Arc<Connection<S>>, entered: Entered<S>, rest: Rest) -> Serving<S> {
        Serving::Waiting { entered, connection: connection.clone(), rest: Some(rest) }
    }
}

impl<S: Stored> Future for Serving<S> {
    type Output = Result<Response<Outgoing>, Infallible>;

    /// Once it is done it stays pending.
    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        match self.project() {
            Stage::Answered { response } => response.take().map_or(Poll::Pending, |it| Poll::Ready(Ok(it))),
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

/// What is needed of a request when its answer is there.
pub(crate) struct Rest {
    passage: Passage,
    is_http1: bool,
    /// The content type that a gRPC call expects.
    grpc: Option<HeaderValue>,
    is_long: bool,
}

impl Rest {
    /// The answer as it goes to the client.
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
        // A long body of a request that came to nothing has probably not been read. hyper closes the connection then,
        // rather than to take the rest for the next request, and the client may as well know.
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

/// Everything up to the first wait.
fn enter<S: Stored>(
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
        // What else comes on this connection is not to be trusted.
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
    // Routes that are not critical leave some places to the others.
    let most = if route.is_critical { state.max_in_flight } else { state.max_uncritical };
    if !passage.take_place(most) {
        passage.said().set(Decision::Shed);
        let refused = try_again(StatusCode::SERVICE_UNAVAILABLE, "the gateway has too much to do");
        return Err(Box::new(refused));
    }

    // A stream of calls may be silent for hours.
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
    // What we say of a request, limits must have from us. Where they do not look, one that they deny need not pay for it.
    if state.reads_forwarded {
        errand.set_forwarded(&mut parts.headers);
        errand.is_forwarded = true;
    }
    let body = RequestBody::new(body, (!may_be_silent).then_some(state.timeouts.body), &state.header_names);
    let (request, mut forward) = (Request::from_parts(parts, body), Forward::new(errand));
    Ok(match &state.limits {
        Some(limits) => {
            let about = About {
                client: Some(client),
                claims: claims.as_ref().map(Option::as_ref),
                route: Some(&route.id),
                chosen: Some(&route.chosen),
                slots: Some(&route.chosen_slots),
                subject: Some(Subject(passage.said().clone())),
            };
            Entered::Limited { limited: limits.call_about(forward, request, about) }
        }
        None => {
            passage.said().set(Decision::Allowed);
            Entered::Unlimited { unlimited: forward.call(request) }
        }
    })
}

/// What a client is told instead of a response. Most requests have none, and should not make room for it.
pub(crate) type Refused = Box<Response<UpstreamBody>>;

/// What was found out about a request.
struct Found<'s> {
    route: &'s Arc<Route>,
    client: IpAddr,
    /// What its token claims, if a route wanted to know; to verify one takes longer than everything else.
    claims: Option<Option<Claims>>,
}

/// The route of a request and its client. From now on it has the one spelling of its path that was looked up.
fn look_up<'s, S: Stored>(
    peer: IpAddr,
    state: &'s State<S>,
    worker: usize,
    parts: &mut Parts,
) -> Result<Found<'s>, Refused> {
    let ambiguous = |why: Ambiguous| Box::new(problem(StatusCode::BAD_REQUEST, &why.to_string()));
    let path = normalise(parts.uri.path(), state.paths).map_err(ambiguous)?;
    let (trust, tokens) = (&state.client, state.tokens.as_deref());
    let (client, claims) = (OnceCell::new(), OnceCell::new());
    let seen = Seen { parts, path: &path, trust, tokens, peer, client, claims };
    let route = state.routes(worker).iter().find(|route| route.when.fits(&seen));
    let client = seen.client();
    // Whoever looks next may believe the other one.
    let claims = seen.claims.into_inner();
    let token_header = claims.as_ref().and(tokens).map(Tokens::header_name);
    if token_header.is_some_and(|name| parts.headers.get_all(name).iter().nth(1).is_some()) {
        return Err(Box::new(problem(StatusCode::BAD_REQUEST, "there are two tokens; send one")));
    }
    let Some(route) = route else {
        return Err(Box::new(problem(StatusCode::NOT_FOUND, "there is no route for this request")));
    };
    // Letters and slashes at the end are as the upstream wants them; the rest is what was matched.
    let spelling = Spelling { ambiguous: state.paths.ambiguous, ..Spelling::default() };
    let plain = match spelling == state.paths {
        true => path,
        false => normalise(parts.uri.path(), spelling).map_err(ambiguous)?,
    };
    if plain != parts.uri.path() && parts.uri.path() != "*" {
        parts.uri = with_path(&parts.uri, &plain)?;
    }
    Ok(Found { route, client, claims })
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
        // Nobody else's word counts.
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
