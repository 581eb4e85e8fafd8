//! What is for those who look after it: rules, explanations, the most limited keys, numbers, and
//! the description of all paths.

use axum::body::Body;
use axum::extract::{RawQuery, State};
use axum::http::{HeaderMap, Response, StatusCode, header};
use serde_json::json;

use super::request::{About, Asked, Verb};
use super::{Sent, failure, reply, request};
use crate::engine::Engine;
use crate::explain::rule_to_json;
use crate::problem::mistake;

/// The description of all paths.
pub(super) const OPENAPI: &str = include_str!("openapi.json");

/// The most keys that are listed at once.
const MAX_LISTED: usize = 1000;
/// How many are listed if nobody says.
const LISTED: usize = 20;

/// `GET /v1/rules`.
pub(super) async fn rules(State(engine): State<Engine>) -> Response<Body> {
    let rules: Vec<_> = engine.rules().iter().map(|rule| rule_to_json(rule)).collect();
    let domains = engine.domains();
    reply::json(json!({ "rules": rules, "domains": domains.names() }).to_string().into_bytes())
}

/// `POST /v1/explain`: JSON, or text for whoever prefers it.
pub(super) async fn explain(
    State(engine): State<Engine>,
    headers: HeaderMap,
    Sent(body): Sent,
) -> Response<Body> {
    let question = match request::read(&body, Verb::Peek) {
        Ok(Asked::One(question)) => question,
        Ok(Asked::Batch(_)) => {
            return mistake(StatusCode::BAD_REQUEST, "checks: expected one question");
        }
        Err(problem) => return mistake(StatusCode::BAD_REQUEST, &problem),
    };
    let About::Attributes(attributes) = &question.about else {
        return mistake(StatusCode::BAD_REQUEST, "key: expected attributes, which rules are about");
    };
    match engine.explain(&attributes[..], question.cost).await {
        Err(error) => failure(&error),
        Ok(explanation) => {
            let accept =
                headers.get(header::ACCEPT).and_then(|value| value.to_str().ok()).unwrap_or("");
            if accept.starts_with("text/plain") {
                text(explanation.to_string(), "text/plain; charset=utf-8")
            } else {
                reply::json(explanation.to_json().to_string().into_bytes())
            }
        }
    }
}

/// `GET /v1/top?n=20`.
pub(super) async fn top(State(engine): State<Engine>, RawQuery(query): RawQuery) -> Response<Body> {
    let most = match query.as_deref() {
        None | Some("") => LISTED,
        Some(query) => match query.strip_prefix("n=").and_then(|n| n.parse().ok()) {
            Some(most @ 1..=MAX_LISTED) => most,
            _ => {
                return mistake(
                    StatusCode::BAD_REQUEST,
                    &format!("the query: expected n=1 to n={MAX_LISTED}"),
                );
            }
        },
    };
    let top = engine.observer().top();
    let listed = top.list(most).into_iter().map(|one| {
        let rule = Some(one.rule).filter(|rule| !rule.is_empty());
        json!({ "rule": rule, "key": one.key, "denied": one.denied, "error": one.error })
    });
    let keys: Vec<_> = listed.collect();
    let answer =
        json!({ "covers_secs": top.covers().as_secs(), "left_out": top.left_out(), "keys": keys });
    reply::json(answer.to_string().into_bytes())
}

/// `GET /metrics`.
pub(super) async fn metrics(State(engine): State<Engine>) -> Response<Body> {
    if !engine.observer().may_send_a_page().await {
        return too_many();
    }
    text(engine.observer().page(engine.store()), "text/plain; version=0.0.4; charset=utf-8")
}

/// `GET /openapi.json`.
pub(super) async fn openapi(State(engine): State<Engine>) -> Response<Body> {
    if !engine.observer().may_send_a_page().await {
        return too_many();
    }
    reply::json(OPENAPI.as_bytes())
}

fn too_many() -> Response<Body> {
    mistake(
        StatusCode::SERVICE_UNAVAILABLE,
        "too many ask for long pages: decisions go first, ask again later",
    )
}

fn text(text: impl Into<Body>, kind: &'static str) -> Response<Body> {
    let mut response = Response::new(text.into());
    response.headers_mut().insert(header::CONTENT_TYPE, header::HeaderValue::from_static(kind));
    response
}
