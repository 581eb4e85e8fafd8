//! The HTTP door: JSON in, decisions out, with the headers that clients know.

mod reply;
mod request;

use std::io;

use axum::Router;
use axum::body::{Body, Bytes};
use axum::extract::{DefaultBodyLimit, State};
use axum::http::{Response, StatusCode};
use axum::routing::{get, post};
use tidegate::{Check, Op, Scope, StoreError, Subject};
use tokio::net::TcpListener;
use tokio::sync::watch;

use self::reply::{Answer, mistake};
use self::request::{About, Asked, Question, Verb};
pub use self::request::{MAX_ATTRIBUTES, MAX_BATCH, MAX_BODY_BYTES};
use crate::gate::{Gate, GateError};

/// Everything this door answers.
pub fn routes(gate: Gate) -> Router {
    let mut router = Router::new();
    for (name, verb) in Verb::ALL {
        let ask = move |State(gate): State<Gate>, body: Bytes| async move { decide(&gate, verb, &body).await };
        router = router.route(&format!("/v1/{name}"), post(ask));
    }
    router
        .route(
            "/v1/explain",
            post(|State(gate): State<Gate>, body: Bytes| async move { decide(&gate, Verb::Peek, &body).await }),
        )
        .route("/v1/rules", get(rules))
        .route("/healthz", get(|| async { "ok\n" }))
        .route("/readyz", get(ready))
        .fallback(|| async { mistake(StatusCode::NOT_FOUND, "no such path: expected /v1/check or one of its kin") })
        .layer(DefaultBodyLimit::max(MAX_BODY_BYTES))
        .with_state(gate)
}

/// Serves until `shutdown` says so, then finishes what has begun.
///
/// # Errors
/// If it cannot accept connections at all.
pub async fn serve(listener: TcpListener, gate: Gate, mut shutdown: watch::Receiver<bool>) -> io::Result<()> {
    let down = async move { _ = shutdown.wait_for(|down| *down).await };
    axum::serve(listener, routes(gate)).with_graceful_shutdown(down).await
}

async fn decide(gate: &Gate, verb: Verb, body: &[u8]) -> Response<Body> {
    match request::read(body, verb) {
        Err(problem) => mistake(StatusCode::BAD_REQUEST, &problem),
        Ok(Asked::One(question)) => match answer(gate, verb, &question).await {
            Ok(answer) => answer.into_response(),
            Err(error) => failure(&error),
        },
        Ok(Asked::Batch(questions)) => {
            // One after the other, each by itself: an answer for each, in order.
            let mut results = b"{\"results\":[".to_vec();
            for (at, question) in questions.iter().enumerate() {
                if at > 0 {
                    results.push(b',');
                }
                match answer(gate, verb, question).await {
                    Ok(answer) => results.extend_from_slice(answer.json()),
                    Err(error) => {
                        results.extend_from_slice(
                            format!("{{\"error\":{}}}", reply::string(&error.to_string())).as_bytes(),
                        );
                    }
                }
            }
            results.extend_from_slice(b"]}");
            reply::json(results)
        }
    }
}

async fn answer(gate: &Gate, verb: Verb, question: &Question) -> Result<Answer, GateError> {
    let op = verb.op();
    match &question.about {
        About::Key { key, brought } => {
            let limits = &brought.limits;
            if let (Verb::Check, None, [limit]) = (verb, question.id, limits.as_slice())
                && let subject = (Subject { scope: Scope::AdHoc, key: key.as_bytes().into() })
                && let Some(decision) = gate.check_at_once(&subject, limit, question.cost)
            {
                return Ok(Answer::of_key(question, verb.name(), brought, &decision));
            }
            let mut check = Check::of(op).charge(key, limits, question.cost);
            if op == Op::Settle {
                check = check.reserving(question.reserved);
            }
            if let Some(id) = question.id {
                check = check.with_id(id);
            }
            let decision = gate.decide(&check).await?;
            Ok(Answer::of_key(question, verb.name(), brought, &decision))
        }
        About::Attributes(attributes) => {
            let ruling = gate.rule(op, &attributes[..], question.cost, question.id).await?;
            Ok(Answer::of_rules(question, verb.name(), &ruling))
        }
    }
}

fn failure(error: &GateError) -> Response<Body> {
    let status = match error {
        GateError::Cost(_) | GateError::Store(StoreError::Invalid(_)) => StatusCode::BAD_REQUEST,
        GateError::NoRefunds(_) => StatusCode::FORBIDDEN,
        _ => StatusCode::SERVICE_UNAVAILABLE,
    };
    mistake(status, &error.to_string())
}

async fn rules(State(gate): State<Gate>) -> Response<Body> {
    let rules = gate.rules();
    let names: Vec<String> = rules.iter().map(|rule| format!("{{\"name\":{}}}", reply::string(&rule.name))).collect();
    reply::json(format!("{{\"rules\":[{}]}}", names.join(",")).into_bytes())
}

/// A real decision through the real path: a look at a key nobody uses.
async fn ready(State(gate): State<Gate>) -> Response<Body> {
    let Ok(limits) = "1/s".parse::<tidegate::Limits>() else {
        return mistake(StatusCode::INTERNAL_SERVER_ERROR, "no limit");
    };
    let check = Check::of(Op::Peek).charge("tidegate-readyz", &limits, 1);
    match gate.decide(&check).await {
        Ok(_) => Response::new(Body::from("ready\n")),
        Err(error) => mistake(StatusCode::SERVICE_UNAVAILABLE, &error.to_string()),
    }
}
