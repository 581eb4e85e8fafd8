//! The HTTP listener: JSON in, decisions out, with the headers that clients know.

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
use self::reply::Answer;
pub(crate) use self::reply::{denial, tell, unanswered};
use self::request::{About, Asked, Question, Verb};
pub use self::request::{MAX_ATTRIBUTES, MAX_BATCH, MAX_BODY_BYTES};
use crate::auth::{Auth, Caller, Guard, May};
use crate::browser;
use crate::engine::{Engine, EngineError};
use crate::listen::http::{Access, Application, HttpServer};
use crate::listen::wire::Begun;
use crate::listen::{Bounds, Entrance, Visitor};
use crate::nearest::nearest;
use crate::observe::metrics::Refusal;
use crate::problem::{mistake, string};
use crate::protocol::Protocol;
use crate::readiness::Readiness;
use crate::supervise::Health;

/// What the handlers need.
#[derive(Clone, Debug)]
struct Desk {
    engine: Engine,
    guard: Arc<Guard>,
    health: Health,
    patience: Duration,
}

impl FromRef<Desk> for Engine {
    fn from_ref(desk: &Desk) -> Engine {
        desk.engine.clone()
    }
}

/// Where load balancers ask whether requests should come here.
pub(crate) const READY_PATH: &str = "/readyz";

/// Which paths a listener answers.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Part {
    /// All.
    Whole,
    /// What is for those who ask.
    Checks,
    /// What is for those who look after it.
    Admin,
}

/// What somebody must be allowed who asks for this path, where there are tokens. Health is for load
/// balancers, which have none. Numbers are for those who may check, so that whoever collects them
/// need not be able to reset budgets.
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

/// What changes or shows other people's budgets.
fn for_admins(path: &str) -> bool {
    matches!(path, "/v1/reset" | "/v1/rules" | "/v1/explain" | "/v1/top")
}

/// Everything this listener answers: method, path, and who does.
fn table() -> Vec<(&'static str, String, MethodRouter<Desk>)> {
    let mut table: Vec<(&'static str, String, MethodRouter<Desk>)> = Vec::new();
    for (name, verb) in Verb::ALL {
        let ask = move |State(engine): State<Engine>, Wanted(accept): Wanted, Sent(body): Sent| async move {
            decide(&engine, verb, &body, accept.as_ref().map(HeaderValue::as_bytes)).await
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

/// Method and path of everything this listener answers, in the order in which it is described.
pub fn paths() -> Vec<(&'static str, String)> {
    table().into_iter().map(|(method, path, _)| (method, path)).collect()
}

fn routes(desk: Desk, part: Part) -> Router {
    let mut router = Router::new();
    for (method, path, answer) in table() {
        let own = match part {
            Part::Whole => true,
            Part::Checks => !for_admins(&path) && path != "/metrics",
            Part::Admin => for_admins(&path) || path == "/metrics" || needs(&path) == May::Nothing,
        };
        if own {
            // Every method of forward-auth is right: the one that counts is in a header.
            let answer = if path == forward::PATH {
                answer
            } else {
                answer.fallback(move || wrong_method(method))
            };
            router = router.route(&path, answer);
        }
    }
    router.fallback(move |uri: Uri| async move { no_such_path(uri.path(), part) }).with_state(desk)
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

fn no_such_path(path: &str, part: Part) -> Response<Body> {
    let known = paths();
    let hint = match nearest(path, known.iter().map(|(_, path)| path.as_str())) {
        Some(moved) if moved == path && part == Part::Checks => {
            "it is at the admin address (listen.admin)".into()
        }
        Some(moved) if moved == path => "it is not at the admin address (listen.admin)".into(),
        Some(right) => format!("did you mean {right}?"),
        None => "expected /v1/check or another of those that /openapi.json lists".into(),
    };
    mistake(StatusCode::NOT_FOUND, &format!("no such path: {hint}"))
}

/// Serves until `shutdown` says so, then finishes what has begun. Without TLS and tokens, and with
/// the bounds every listener has.
///
/// # Errors
/// Never while it can accept at all: running out of files is waited out.
pub async fn serve(
    listener: TcpListener,
    engine: Engine,
    shutdown: watch::Receiver<bool>,
) -> io::Result<()> {
    let entrance =
        Entrance::new(Protocol::Http, listener, None, Bounds::default(), engine.observer().clone());
    let guard = Arc::new(Guard::new(Auth::default()));
    serve_at(entrance, engine, guard, Health::default(), Part::Whole, shutdown).await
}

/// The same at an entrance that is there already.
pub(crate) async fn serve_at(
    entrance: Entrance,
    engine: Engine,
    guard: Arc<Guard>,
    health: Health,
    part: Part,
    shutdown: watch::Receiver<bool>,
) -> io::Result<()> {
    let (bounds, observer, protocol) =
        (entrance.bounds().clone(), entrance.observer().clone(), entrance.protocol());
    let patience = bounds.get().patience;
    let desk = Desk { engine: engine.clone(), guard: Arc::clone(&guard), health, patience };
    let application = Application::new(routes(desk, part), access);
    let server = HttpServer::new(application, protocol, guard, bounds, observer);
    let down = shutdown.clone();
    if part == Part::Admin {
        let serve = move |visitor| server.clone().serve(visitor, down.clone());
        return entrance.receive(shutdown, serve).await;
    }
    let fast_path = FastPath { server: server.clone(), engine };
    let serve = move |visitor| {
        let (fast_path, server, mut down) = (fast_path.clone(), server.clone(), down.clone());
        async move {
            let Visitor { mut stream, peer, place, .. } = visitor;
            let caller = Arc::new(Caller::at(peer.ip()));
            let Some(bytes) = fast_path.serve(&mut stream, &caller, &mut down).await else {
                return;
            };
            let stream = Begun { bytes, at: 0, stream };
            server.serve_stream(stream, caller, place, down).await;
        }
    };
    entrance.receive(shutdown, serve).await
}

/// What is accepted, as far as somebody says so.
struct Wanted(Option<HeaderValue>);

impl FromRequestParts<Desk> for Wanted {
    type Rejection = Infallible;

    async fn from_request_parts(parts: &mut Parts, _: &Desk) -> Result<Self, Infallible> {
        Ok(Wanted(parts.headers.get(header::ACCEPT).cloned()))
    }
}

/// A body that has arrived, whole and in time.
struct Sent(Bytes);

impl FromRequest<Desk> for Sent {
    type Rejection = Response<Body>;

    async fn from_request(request: Request, desk: &Desk) -> Result<Self, Response<Body>> {
        let body = Limited::new(request.into_body(), MAX_BODY_BYTES).collect();
        match tokio::time::timeout(desk.patience, body).await {
            Ok(Ok(body)) => Ok(Sent(body.to_bytes())),
            Ok(Err(error)) if error.is::<LengthLimitError>() => {
                let detail =
                    format!("the body is too long: expected at most {MAX_BODY_BYTES} bytes");
                Err(mistake(StatusCode::PAYLOAD_TOO_LARGE, &detail))
            }
            Ok(Err(_)) => Err(mistake(StatusCode::BAD_REQUEST, "the body did not arrive whole")),
            Err(_) => {
                desk.engine.observer().metrics().refused(desk.engine.protocol(), Refusal::Slow);
                let mut response =
                    mistake(StatusCode::REQUEST_TIMEOUT, "the body did not arrive in time");
                // What is still to come of it must not be taken for a request.
                response
                    .headers_mut()
                    .insert(header::CONNECTION, header::HeaderValue::from_static("close"));
                Err(response)
            }
        }
    }
}

/// Answers a question. What its sender accepts decides how a denial is written.
pub(crate) async fn decide(
    engine: &Engine,
    verb: Verb,
    body: &[u8],
    accept: Option<&[u8]>,
) -> Response<Body> {
    match request::read(body, verb) {
        Err(problem) => mistake(StatusCode::BAD_REQUEST, &problem),
        Ok(Asked::One(question)) => match answer(engine, verb, &question).await {
            Ok(answer) => answer.into_response(engine.settings().response_options().denial, accept),
            Err(error) => failure(&error),
        },
        Ok(Asked::Batch(questions)) => {
            // One after the other, each by itself: an answer for each, in order.
            let mut results = b"{\"results\":[".to_vec();
            for (at, question) in questions.iter().enumerate() {
                if at > 0 {
                    results.push(b',');
                }
                match answer(engine, verb, question).await {
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

async fn answer(engine: &Engine, verb: Verb, question: &Question) -> Result<Answer, EngineError> {
    let op = verb.op();
    match &question.about {
        About::Key { key, brought } => {
            let limits = &brought.limits;
            let mut check = Check::of(op).charge(key, limits, question.cost);
            if op == Op::Settle {
                check = check.reserving(question.reserved);
            }
            if let Some(id) = question.id {
                check = check.with_id(id);
            }
            let decision = engine.check(&check).await?;
            Ok(Answer::of_key(
                question,
                verb.name(),
                brought,
                &decision,
                engine.settings().response_options().headers,
            ))
        }
        About::Attributes(attributes) => {
            let matches = engine.matching(&attributes[..], question.cost)?;
            let ruling = engine.check_rules(op, matches, question.id).await?;
            let answer = Answer::of_rules(
                question,
                verb.name(),
                &ruling,
                engine.settings().response_options(),
            );
            Ok(match engine.unknown_attributes(attributes) {
                Some(why) => answer.with_warning(&why),
                None => answer,
            })
        }
        About::Reset(target) => Ok(Answer::of_reset(&engine.reset(target).await?)),
    }
}

/// Envoy's rate limit service as JSON.
async fn envoy(State(engine): State<Engine>, Sent(body): Sent) -> Response<Body> {
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
async fn ready(State(desk): State<Desk>, uri: Uri, headers: HeaderMap) -> Response<Body> {
    let is_brief = browser::foreign(Some(&desk.guard.hosts()), &uri, &headers).is_some();
    Readiness::of(&desk.engine, &desk.health).await.into_response(is_brief)
}

#[cfg(feature = "fuzzing")]
pub(crate) use self::forward::answer_to;

/// For fuzzing: what each path answers to these bytes, as status and body.
#[cfg(feature = "fuzzing")]
pub(crate) async fn answer_every_verb(engine: &Engine, bytes: &[u8]) -> Vec<(u16, Vec<u8>)> {
    let mut answers = Vec::new();
    for (_, verb) in Verb::ALL {
        let response = decide(engine, verb, bytes, None).await;
        let status = response.status().as_u16();
        let body =
            axum::body::to_bytes(response.into_body(), usize::MAX).await.expect("a body in memory");
        answers.push((status, body.to_vec()));
    }
    answers
}
