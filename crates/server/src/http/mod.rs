//! The HTTP check API: JSON requests, decisions with the usual rate limit headers.

mod admin;
mod fast_path;
mod forward;
mod reply;
mod request;

use std::convert::Infallible;
use std::io;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::body::{Body, Bytes};
use axum::extract::{FromRef, FromRequest, FromRequestParts, Request, State};
use axum::http::request::Parts;
use axum::http::{HeaderMap, HeaderValue, Response, StatusCode, Uri, header};
use axum::routing::{MethodRouter, any, get, post};
use http_body_util::{BodyExt, LengthLimitError, Limited};
use tidegate::{Check, Op, StoreError};
use tokio::net::TcpListener;
use tokio::sync::watch;

use self::fast_path::FastPath;
use self::reply::CheckResponse;
pub(crate) use self::reply::{denial, tell, unanswered};
use self::request::{CheckBody, CheckRequest, CheckSubject, Operation};
pub use self::request::{MAX_ATTRIBUTES, MAX_BATCH, MAX_BODY_BYTES};
use crate::auth::{Auth, Caller, Guard, May};
use crate::browser;
use crate::engine::{Engine, EngineError};
use crate::listen::http::{Access, Application, HttpServer};
use crate::listen::wire::Prefixed;
use crate::listen::{Bounds, Connection, Listener};
use crate::nearest::nearest;
use crate::observe::metrics::Refusal;
use crate::problem::{mistake, string};
use crate::protocol::Protocol;
use crate::readiness::Readiness;
use crate::supervise::Health;

/// The state of the handlers.
#[derive(Clone, Debug)]
struct HttpState {
    engine: Engine,
    guard: Arc<Guard>,
    health: Health,
    patience: Duration,
}

impl FromRef<HttpState> for Engine {
    fn from_ref(state: &HttpState) -> Engine {
        state.engine.clone()
    }
}

/// The path that load balancers probe.
pub(crate) const READY_PATH: &str = "/readyz";

/// The paths that a listener answers.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Endpoints {
    /// All.
    All,
    /// Checks and health.
    Checks,
    /// Administration, metrics and health.
    Admin,
}

/// What the token of a request must allow. Health is for load balancers, which have no token.
/// Metrics need the check token, so that a collector need not be able to reset budgets.
fn needs(path: &str) -> May {
    match path {
        "/healthz" | READY_PATH | "/openapi.json" => May::Nothing,
        path if for_admins(path) => May::Everything,
        _ => May::Check,
    }
}

/// What a request for this path needs.
fn access(path: &str) -> Access {
    Access { may: needs(path), by_gateway: path == forward::PATH }
}

/// Whether a path changes or shows the budgets of other callers.
fn for_admins(path: &str) -> bool {
    matches!(path, "/v1/reset" | "/v1/rules" | "/v1/explain" | "/v1/top")
}

/// Method, path and handler of every endpoint.
fn table() -> Vec<(&'static str, String, MethodRouter<HttpState>)> {
    let mut table: Vec<(&'static str, String, MethodRouter<HttpState>)> = Vec::new();
    for (name, operation) in Operation::ALL {
        let ask = move |State(engine): State<Engine>,
                        AcceptHeader(accept): AcceptHeader,
                        BodyBytes(body): BodyBytes| async move {
            decide(&engine, operation, &body, accept.as_ref().map(HeaderValue::as_bytes)).await
        };
        table.push(("post", format!("/v1/{name}"), post(ask)));
    }
    table.extend([
        ("get", forward::PATH.into(), any(forward::auth)),
        ("post", "/v1/explain".into(), post(admin::explain)),
        ("post", "/json".into(), post(envoy)),
        ("get", "/v1/rules".into(), get(admin::rules)),
        ("get", "/v1/top".into(), get(admin::top)),
        ("get", "/metrics".into(), get(admin::metrics)),
        ("get", "/openapi.json".into(), get(admin::openapi)),
        ("get", "/healthz".into(), get(|| async { "ok\n" })),
        ("get", READY_PATH.into(), get(ready)),
    ]);
    table
}

/// Method and path of every endpoint, in the order of the description.
pub fn paths() -> Vec<(&'static str, String)> {
    table().into_iter().map(|(method, path, _)| (method, path)).collect()
}

fn routes(state: HttpState, part: Endpoints) -> Router {
    let mut router = Router::new();
    for (method, path, answer) in table() {
        let own = match part {
            Endpoints::All => true,
            Endpoints::Checks => !for_admins(&path) && path != "/metrics",
            Endpoints::Admin => {
                for_admins(&path) || path == "/metrics" || needs(&path) == May::Nothing
            }
        };
        if own {
            // forward-auth accepts every method.
            let answer = if path == forward::PATH {
                answer
            } else {
                answer.fallback(move || wrong_method(method))
            };
            router = router.route(&path, answer);
        }
    }
    router.fallback(move |uri: Uri| async move { no_such_path(uri.path(), part) }).with_state(state)
}

async fn wrong_method(method: &'static str) -> Response<Body> {
    let method = method.to_ascii_uppercase();
    let mut response = mistake(
        StatusCode::METHOD_NOT_ALLOWED,
        &format!("wrong method: use {method}; see /openapi.json"),
    );
    response
        .headers_mut()
        .insert(header::ALLOW, HeaderValue::try_from(method).expect("a method is plain text"));
    response
}

fn no_such_path(path: &str, part: Endpoints) -> Response<Body> {
    let known = paths();
    let hint = match nearest(path, known.iter().map(|(_, path)| path.as_str())) {
        Some(moved) if moved == path && part == Endpoints::Checks => {
            "it is at the admin address (listen.admin)".into()
        }
        Some(moved) if moved == path => "it is not at the admin address (listen.admin)".into(),
        Some(right) => format!("did you mean {right}?"),
        None => "expected /v1/check or another of those that /openapi.json lists".into(),
    };
    mistake(StatusCode::NOT_FOUND, &format!("no such path: {hint}"))
}

/// Serves without TLS and tokens until `shutdown` is true, then finishes open requests.
///
/// # Errors
/// Never while it can accept connections: it waits when no file is free.
pub async fn serve(
    listener: TcpListener,
    engine: Engine,
    shutdown: watch::Receiver<bool>,
) -> io::Result<()> {
    let listener =
        Listener::new(Protocol::Http, listener, None, Bounds::default(), engine.observer().clone());
    let guard = Arc::new(Guard::new(Auth::default()));
    serve_at(listener, engine, guard, Health::default(), Endpoints::All, shutdown).await
}

/// Serves the connections of this listener.
pub(crate) async fn serve_at(
    listener: Listener,
    engine: Engine,
    guard: Arc<Guard>,
    health: Health,
    part: Endpoints,
    shutdown: watch::Receiver<bool>,
) -> io::Result<()> {
    let (bounds, observer, protocol) =
        (listener.bounds().clone(), listener.observer().clone(), listener.protocol());
    let patience = bounds.get().patience;
    let state = HttpState { engine: engine.clone(), guard: Arc::clone(&guard), health, patience };
    let application = Application::new(routes(state, part), access);
    let server = HttpServer::new(application, protocol, guard, bounds, observer);
    let down = shutdown.clone();
    if part == Endpoints::Admin {
        let serve = move |connection| server.clone().serve(connection, down.clone());
        return listener.serve(shutdown, serve).await;
    }
    let fast_path = FastPath { server: server.clone(), engine };
    let serve = move |connection| {
        let (fast_path, server, mut down) = (fast_path.clone(), server.clone(), down.clone());
        async move {
            let Connection { mut stream, peer, slot, .. } = connection;
            let caller = Arc::new(Caller::at(peer.ip()));
            let Some(bytes) = fast_path.serve(&mut stream, &caller, &mut down).await else {
                return;
            };
            let stream = Prefixed { bytes, at: 0, stream };
            server.serve_stream(stream, caller, slot, down).await;
        }
    };
    listener.serve(shutdown, serve).await
}

/// The `Accept` header, if there is one.
struct AcceptHeader(Option<HeaderValue>);

impl FromRequestParts<HttpState> for AcceptHeader {
    type Rejection = Infallible;

    async fn from_request_parts(parts: &mut Parts, _: &HttpState) -> Result<Self, Infallible> {
        Ok(AcceptHeader(parts.headers.get(header::ACCEPT).cloned()))
    }
}

/// A body that has arrived completely and in time.
struct BodyBytes(Bytes);

impl FromRequest<HttpState> for BodyBytes {
    type Rejection = Response<Body>;

    async fn from_request(request: Request, state: &HttpState) -> Result<Self, Response<Body>> {
        let body = Limited::new(request.into_body(), MAX_BODY_BYTES).collect();
        match tokio::time::timeout(state.patience, body).await {
            Ok(Ok(body)) => Ok(BodyBytes(body.to_bytes())),
            Ok(Err(error)) if error.is::<LengthLimitError>() => {
                let detail =
                    format!("the body is too long: expected at most {MAX_BODY_BYTES} bytes");
                Err(mistake(StatusCode::PAYLOAD_TOO_LARGE, &detail))
            }
            Ok(Err(_)) => Err(mistake(StatusCode::BAD_REQUEST, "the body did not arrive whole")),
            Err(_) => {
                state.engine.observer().metrics().refused(state.engine.protocol(), Refusal::Slow);
                let mut response =
                    mistake(StatusCode::REQUEST_TIMEOUT, "the body did not arrive in time");
                // The rest of the body must not be taken for a request.
                response
                    .headers_mut()
                    .insert(header::CONNECTION, header::HeaderValue::from_static("close"));
                Err(response)
            }
        }
    }
}

/// Answers a request. `accept` decides how a denial is written.
pub(crate) async fn decide(
    engine: &Engine,
    operation: Operation,
    body: &[u8],
    accept: Option<&[u8]>,
) -> Response<Body> {
    match request::read(body, operation) {
        Err(problem) => mistake(StatusCode::BAD_REQUEST, &problem),
        Ok(CheckBody::One(check_request)) => {
            match answer(engine, operation, &check_request).await {
                Ok(answer) => {
                    answer.into_response(engine.settings().response_options().denial, accept)
                }
                Err(error) => failure(&error),
            }
        }
        Ok(CheckBody::Batch(requests)) => {
            // In order, each check by itself.
            let mut results = b"{\"results\":[".to_vec();
            for (at, check_request) in requests.iter().enumerate() {
                if at > 0 {
                    results.push(b',');
                }
                match answer(engine, operation, check_request).await {
                    Ok(answer) => results.extend_from_slice(answer.json()),
                    Err(error) => {
                        results.extend_from_slice(
                            format!("{{\"error\":{}}}", string(&error.to_string())).as_bytes(),
                        );
                    }
                }
            }
            results.extend_from_slice(b"]}");
            reply::json(results)
        }
    }
}

async fn answer(
    engine: &Engine,
    operation: Operation,
    check_request: &CheckRequest,
) -> Result<CheckResponse, EngineError> {
    let op = operation.op();
    match &check_request.about {
        CheckSubject::Key { key, parsed } => {
            let limits = &parsed.limits;
            let mut check = Check::of(op).charge(key, limits, check_request.cost);
            if op == Op::Settle {
                check = check.reserving(check_request.reserved);
            }
            if let Some(id) = check_request.id {
                check = check.with_id(id);
            }
            let decision = engine.check(&check).await?;
            Ok(CheckResponse::of_key(
                check_request,
                operation.name(),
                parsed,
                &decision,
                engine.settings().response_options().headers,
            ))
        }
        CheckSubject::Attributes(attributes) => {
            let matches = engine.matching(&attributes[..], check_request.cost)?;
            let ruling = engine.check_rules(op, matches, check_request.id).await?;
            let answer = CheckResponse::of_rules(
                check_request,
                operation.name(),
                &ruling,
                engine.settings().response_options(),
            );
            Ok(match engine.unknown_attributes(attributes) {
                Some(why) => answer.with_warning(&why),
                None => answer,
            })
        }
        CheckSubject::Reset(target) => Ok(CheckResponse::of_reset(&engine.reset(target).await?)),
    }
}

/// Envoy's rate limit service as JSON.
async fn envoy(State(engine): State<Engine>, BodyBytes(body): BodyBytes) -> Response<Body> {
    let (status, body) = crate::grpc::json::answer(&engine, &body).await;
    let mut response = reply::json(body.into_bytes());
    *response.status_mut() = status;
    response
        .headers_mut()
        .insert(header::CACHE_CONTROL, header::HeaderValue::from_static("no-store"));
    response
}

fn failure(error: &EngineError) -> Response<Body> {
    let status = match error {
        EngineError::Cost(_)
        | EngineError::Target(_)
        | EngineError::Store(StoreError::Invalid(_)) => StatusCode::BAD_REQUEST,
        EngineError::NoRefunds(_) => StatusCode::FORBIDDEN,
        _ => StatusCode::SERVICE_UNAVAILABLE,
    };
    mistake(status, &error.to_string())
}

/// `GET /readyz`. A request by a web page of another site gets no details.
async fn ready(State(state): State<HttpState>, uri: Uri, headers: HeaderMap) -> Response<Body> {
    let is_brief = browser::foreign(Some(&state.guard.hosts()), &uri, &headers).is_some();
    Readiness::of(&state.engine, &state.health).await.into_response(is_brief)
}

#[cfg(feature = "fuzzing")]
pub(crate) use self::forward::answer_to;

/// For fuzzing: status and body of the response of each operation.
#[cfg(feature = "fuzzing")]
pub(crate) async fn answer_every_verb(engine: &Engine, bytes: &[u8]) -> Vec<(u16, Vec<u8>)> {
    let mut answers = Vec::new();
    for (_, operation) in Operation::ALL {
        let response = decide(engine, operation, bytes, None).await;
        let status = response.status().as_u16();
        let body =
            axum::body::to_bytes(response.into_body(), usize::MAX).await.expect("a body in memory");
        answers.push((status, body.to_vec()));
    }
    answers
}
