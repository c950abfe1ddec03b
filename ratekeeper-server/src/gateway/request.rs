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
use ratekeeper::tower::{Claims, LimitedCall, ResponseFuture, grpc_content_type};
use ratekeeper_rules::client::TrustedProxies;
use ratekeeper_rules::path::{PathNormalization, RequestPath, hides_match};
use ratekeeper_rules::request::Request as _;
use ratekeeper_rules::response::ResponseStatus;
use ratekeeper_rules::spelling::HeaderAliases;
use tower_service::Service;

use super::access::{AccessRecord, X_REQUEST_ID};
use super::body::{ClientBody, RequestBody, UpstreamBody};
use super::connection::ClientConnection;
use super::forward::{Forward, ForwardContext, TargetEdit};
use super::framing::FramingError;
use super::min_rate::MinRate;
use super::response::{into_grpc, problem, retry_later, set_connection_close};
use super::screen::screen;
use super::state::{Route, State};
use crate::runtime::backend::Backend;
use crate::runtime::metrics::RequestDecision;

/// A body of at most this size usually arrives with its head: it is read, and the connection stays open.
const UNREAD_BYTES_MAX: u64 = 16 << 10;

/// Starts serving a request; `framing` is the error that its bytes showed, if any. Everything up to the first wait runs here, so a request that is answered by then
/// allocates no future.
pub(crate) fn handle<S: Backend>(
    connection: &Arc<ClientConnection<S>>,
    request: Request<Incoming>,
    framing: Result<(), FramingError>,
) -> RequestFuture<S> {
    let recorder = &connection.worker.recorder;
    // Boxed: it is moved with the response several times.
    let mut record =
        Box::new(AccessRecord::new(recorder, connection.peer, connection.activity.begin_request()));
    let is_http1 = request.version() < Version::HTTP_2;
    let grpc = grpc_content_type(request.headers());
    let has_long_body = is_http1 && has_long_body(&request);
    let forwarding = start(connection, request, framing, grpc.is_some(), &mut record);
    let completion = Completion { record, is_http1, grpc, has_long_body };
    match forwarding {
        Ok(ForwardFuture::Limited { mut limited }) => match limited.take_local_response() {
            Some(response) => {
                RequestFuture::finished(completion.finish(connection, response.map(ClientBody::limited)))
            }
            None => RequestFuture::waiting(connection, ForwardFuture::Limited { limited }, completion),
        },
        Ok(forwarding) => RequestFuture::waiting(connection, forwarding, completion),
        Err(response) => {
            RequestFuture::finished(completion.finish(connection, response.map(ClientBody::unlimited)))
        }
    }
}

pin_project! {
    /// The response to a request.
    #[project = RequestProjection]
    pub(crate) enum RequestFuture<S: Backend> {
        Finished { response: Option<Response<ClientBody>> },
        Waiting { #[pin] forwarding: ForwardFuture<S>, connection: Arc<ClientConnection<S>>, completion: Option<Completion> },
    }
}

pin_project! {
    /// The response of an upstream, through limits if there are any.
    #[project = ForwardProjection]
    pub(crate) enum ForwardFuture<S: Backend> {
        Limited { #[pin] limited: ResponseFuture<Forward<S>, Request<RequestBody>, S> },
        Unlimited { #[pin] unlimited: <Forward<S> as Service<Request<RequestBody>>>::Future },
    }
}

impl<S: Backend> RequestFuture<S> {
    fn finished(response: Response<ClientBody>) -> RequestFuture<S> {
        RequestFuture::Finished { response: Some(response) }
    }

    fn waiting(
        connection: &Arc<ClientConnection<S>>,
        forwarding: ForwardFuture<S>,
        completion: Completion,
    ) -> RequestFuture<S> {
        RequestFuture::Waiting { forwarding, connection: connection.clone(), completion: Some(completion) }
    }
}

impl<S: Backend> Future for RequestFuture<S> {
    type Output = Result<Response<ClientBody>, Infallible>;

    /// Stays pending after completion.
    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        match self.project() {
            RequestProjection::Finished { response } => {
                response.take().map_or(Poll::Pending, |it| Poll::Ready(Ok(it)))
            }
            RequestProjection::Waiting { forwarding, connection, completion } => {
                let Ok(response) = match forwarding.project() {
                    ForwardProjection::Limited { mut limited } => {
                        let polled = limited.as_mut().poll(context);
                        if let (Some(event), Some(completion)) = (limited.take_event(), completion.as_mut()) {
                            let key_log = &connection.worker.shared.state.load().key_log;
                            completion.record.set_event(&event, key_log);
                        }
                        ready!(polled).map(|it| it.map(ClientBody::limited))
                    }
                    ForwardProjection::Unlimited { unlimited } => {
                        ready!(unlimited.poll(context)).map(|it| it.map(ClientBody::unlimited))
                    }
                };
                completion.take().map_or(Poll::Pending, |completion| {
                    Poll::Ready(Ok(completion.finish(connection, response)))
                })
            }
        }
    }
}

/// State of a request that is needed once its response is available.
pub(crate) struct Completion {
    record: Box<AccessRecord>,
    is_http1: bool,
    /// The content type that a gRPC call expects.
    grpc: Option<HeaderValue>,
    has_long_body: bool,
}

impl Completion {
    /// Completes the response for the client.
    fn finish<S>(
        self,
        connection: &ClientConnection<S>,
        mut response: Response<ClientBody>,
    ) -> Response<ClientBody> {
        let Completion { mut record, is_http1, grpc, has_long_body } = self;
        record.set_status(response.status());
        if let Some(content_type) = grpc {
            response = into_grpc(response, content_type);
        }
        if response.status() == StatusCode::SWITCHING_PROTOCOLS {
            connection.start_tunnel(&mut response, record);
            return response;
        }
        // A long body of a failed request has probably not been read. hyper then closes the connection rather than
        // parse the rest as the next request, and the response announces that.
        let is_error = response.status().is_client_error() || response.status().is_server_error();
        if (has_long_body && is_error) || (is_http1 && connection.is_draining()) {
            set_connection_close(&mut response);
        }
        let body = response.body_mut();
        body.keep_record(record);
        if is_http1 {
            body.set_back_pressure();
        } else {
            body.set_small_frames();
        }
        response
    }
}

fn has_long_body(request: &Request<Incoming>) -> bool {
    match request.body().size_hint().exact() {
        Some(0) => false,
        Some(..=UNREAD_BYTES_MAX) => request.headers().contains_key(EXPECT),
        _ => true,
    }
}

/// Runs everything up to the first wait.
fn start<S: Backend>(
    connection: &Arc<ClientConnection<S>>,
    request: Request<Incoming>,
    framing: Result<(), FramingError>,
    is_grpc: bool,
    record: &mut AccessRecord,
) -> Result<ForwardFuture<S>, ErrorResponse> {
    let worker = &connection.worker;
    let state = worker.shared.state.load();
    let (mut parts, body) = request.into_parts();
    if state.has_access_log {
        record.log(&parts.method, parts.uri.path_and_query());
    }
    if let Err(error) = screen(&mut parts, framing, &state.header_names, &state.header_aliases) {
        record.set_decision(RequestDecision::Rejected);
        let mut response = problem(error.status, error.detail);
        if error.status == ResponseStatus::MethodNotAllowed {
            let allowed = HeaderValue::from_static("GET, HEAD, POST, PUT, PATCH, DELETE, OPTIONS");
            response.headers_mut().insert(ALLOW, allowed);
        }
        // After a rejected request, further data on this connection is not trusted.
        if parts.version < Version::HTTP_2 {
            set_connection_close(&mut response);
        }
        return Err(Box::new(response));
    }
    let received = RequestPath::read(parts.uri.path(), state.paths);
    let path = received.map_err(|why| record.reject(bad_request(&why.to_string())))?;
    let view = RequestView::new(&parts, &path.matched, &state, connection.peer);
    let matched = find_route(&view, &state, worker.number).map_err(|response| record.reject(response));
    let (route, client) = (matched?, view.client());
    record.set_route(route, client);
    if state.trusted_proxies.trusts(connection.peer)
        && let Some(id) = parts.headers.get(X_REQUEST_ID)
    {
        record.adopt_id(id);
    }
    // Routes that are not critical leave some permits to critical ones.
    let max = if route.is_critical { state.max_in_flight } else { state.max_uncritical };
    if !record.acquire_permit(max) {
        record.set_decision(RequestDecision::Shed);
        let response = retry_later(ResponseStatus::ServiceUnavailable, "gateway overloaded");
        return Err(Box::new(response));
    }

    // A gRPC stream may be silent for hours.
    let is_grpc_stream = is_grpc && parts.version >= Version::HTTP_2;
    let (target, path_edit) = forwarded_target(&parts.uri, &path, route, &state, worker.number)
        .map_err(|response| record.reject(response))?;
    let mut forward_context = ForwardContext {
        connection: connection.clone(),
        route: route.clone(),
        client,
        id: record.id().clone(),
        is_forwarded: false,
        is_grpc_stream,
        path_edit,
    };
    // Limits that read forwarding headers must see the gateway's values. If none does, the headers are set only after
    // the limits, so that a denied request does not pay for them.
    let known = view.into_known();
    if state.reads_forwarded {
        forward_context.set_forwarded(&mut parts.headers);
        forward_context.is_forwarded = true;
    }
    let checks = state.engine.layer.as_ref().map(|layer| {
        let view = RequestView {
            known,
            route: &route.id.0,
            ..RequestView::new(&parts, &path.matched, &state, connection.peer)
        };
        let checks = layer.read(&view, Some(&route.rules), Some(&route.concurrency));
        view.check_token().map(|()| (layer, checks))
    });
    let checks = checks.transpose().map_err(|response| record.reject(response))?;
    if let Some(target) = target {
        parts.uri = target;
    }
    let timeout = (!is_grpc_stream).then_some(state.timeouts.body);
    let min_rate = MinRate(state.timeouts.min_rate);
    let body = RequestBody::new(body, timeout, min_rate, &state.header_names);
    let (request, mut forward) = (Request::from_parts(parts, body), Forward::new(forward_context));
    Ok(match checks {
        Some((layer, checks)) => {
            let LimitedCall { response, event } =
                layer.call_checked(forward, request, Some(route.id.clone()), checks);
            if let Some(event) = event {
                record.set_event(&event, &state.key_log);
            }
            ForwardFuture::Limited { limited: response }
        }
        None => {
            record.set_decision(RequestDecision::Allowed);
            ForwardFuture::Unlimited { unlimited: forward.call(request) }
        }
    })
}

/// The response to a rejected request. Boxed, so that other requests do not reserve memory for it.
pub(crate) type ErrorResponse = Box<Response<UpstreamBody>>;

fn bad_request(detail: &str) -> ErrorResponse {
    Box::new(problem(ResponseStatus::BadRequest, detail))
}

/// Finds the route of a request.
fn find_route<'s, S: Backend>(
    view: &RequestView<'_>,
    state: &'s State<S>,
    worker: usize,
) -> Result<&'s Arc<Route>, ErrorResponse> {
    let route = state.routes(worker).iter().find(|route| route.when.fits(view));
    view.check_token()?;
    let patterns = state.routes(worker).iter().flat_map(|route| &route.when.paths);
    if hides_match(view.path, state.paths, patterns) {
        return Err(bad_request(
            "some servers ignore the end of a path segment (a dot, white space, or text from %3B on), and another \
             route applies to the path without it; send the path without it",
        ));
    }
    route.ok_or_else(|| Box::new(problem(ResponseStatus::NotFound, "no route matches this request")))
}

/// The target to forward, if it differs from the received one, and the edit of its path.
fn forwarded_target<S: Backend>(
    received: &Uri,
    path: &RequestPath<'_>,
    route: &Route,
    state: &State<S>,
    worker: usize,
) -> Result<(Option<Uri>, TargetEdit), ErrorResponse> {
    if path.forwarded == received.path() || received.path() == "*" {
        return Ok((None, TargetEdit::new(route, path)));
    }
    // Parameters and empty segments that no route or limit depends on stay as sent.
    let normalization =
        PathNormalization { ambiguous: state.paths.ambiguous, ..PathNormalization::default() };
    let kept = state.with_parameters(route, worker, received.path(), normalization);
    let forwarded = kept.as_deref().unwrap_or(&path.forwarded);
    let target = (forwarded != received.path()).then(|| with_path(received, forwarded)).transpose()?;
    Ok((target, TargetEdit::new(route, path)))
}

/// The target with another path and the same query.
pub(crate) fn with_path(uri: &Uri, path: &str) -> Result<Uri, ErrorResponse> {
    let target = match uri.query() {
        Some(query) => PathAndQuery::try_from(format!("{path}?{query}")),
        None => PathAndQuery::try_from(path),
    };
    target.map(Uri::from).map_err(|_| Box::new(problem(ResponseStatus::BadRequest, "the path is too long")))
}

/// A request as the conditions of routes and the rules see it.
struct RequestView<'a> {
    parts: &'a Parts,
    path: &'a str,
    aliases: &'a HeaderAliases,
    trusted_proxies: &'a TrustedProxies,
    peer: IpAddr,
    tokens: Option<&'a Tokens>,
    /// Empty until the route is known.
    route: &'a str,
    known: KnownValues,
}

/// What a view has found out so far.
#[derive(Default)]
struct KnownValues {
    client: OnceCell<IpAddr>,
    /// Verifying a token takes longer than everything else.
    claims: OnceCell<Option<Claims>>,
}

impl<'a> RequestView<'a> {
    fn new<S>(parts: &'a Parts, path: &'a str, state: &'a State<S>, peer: IpAddr) -> RequestView<'a> {
        RequestView {
            parts,
            path,
            aliases: &state.header_aliases,
            trusted_proxies: &state.trusted_proxies,
            peer,
            tokens: state.engine.tokens.as_deref(),
            route: "",
            known: KnownValues::default(),
        }
    }

    fn into_known(self) -> KnownValues {
        self.known
    }

    /// Rejects a request with two tokens if a claim was read: the upstream may trust the other token.
    fn check_token(&self) -> Result<(), ErrorResponse> {
        let header = self.known.claims.get().and(self.tokens).map(Tokens::header_name);
        match header.is_some_and(|name| self.parts.headers.get_all(name).iter().nth(1).is_some()) {
            true => Err(bad_request("the request has two tokens; send one")),
            false => Ok(()),
        }
    }
}

impl ratekeeper_rules::request::Request for RequestView<'_> {
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
        // Requests have few headers: comparing their names is faster than parsing and hashing this one.
        let lines = |name: &'b str| {
            self.parts
                .headers
                .iter()
                .filter(move |(its, _)| its.as_str() == name)
                .map(|(_, value)| value.as_bytes())
        };
        lines(name).chain(self.aliases.of(name).flat_map(lines))
    }

    fn client(&self) -> IpAddr {
        // Forwarding headers count only from trusted proxies.
        if !self.trusted_proxies.trusts(self.peer) {
            return self.peer;
        }
        let lines = || self.parts.headers.get_all(self.trusted_proxies.source().header_name());
        *self
            .known
            .client
            .get_or_init(|| self.trusted_proxies.client(self.peer, lines().iter().map(HeaderValue::as_bytes)))
    }

    fn route(&self) -> &str {
        self.route
    }

    fn claim(&self, name: &str) -> Option<&str> {
        let claims = self.known.claims.get_or_init(|| self.tokens?.claims(self.parts)).as_ref()?;
        claims.0.get(name).map(String::as_str)
    }

    fn custom(&self, _name: &str) -> Option<String> {
        None
    }
}
