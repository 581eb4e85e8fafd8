//! Handlers for administration: rules, explanations, the most limited keys, metrics, and the API
//! description.

use axum::body::Body;
use axum::extract::{RawQuery, State};
use axum::http::{HeaderMap, Response, StatusCode, header};
use serde_json::json;

use super::request::{CheckBody, CheckSubject, Operation};
use super::{BodyBytes, failure, reply, request};
use crate::engine::Engine;
use crate::explain::rule_to_json;
use crate::problem::mistake;

/// The OpenAPI description.
pub(super) const OPENAPI: &str = include_str!("openapi.json");

/// The most keys that a response lists.
const MAX_LISTED: usize = 1000;
/// How many keys a response lists by default.
const LISTED: usize = 20;

/// `GET /v1/rules`.
pub(super) async fn rules(State(engine): State<Engine>) -> Response<Body> {
    let rules: Vec<_> = engine.rules().iter().map(|rule| rule_to_json(rule)).collect();
    let domains = engine.domains();
    reply::json(json!({ "rules": rules, "domains": domains.names() }).to_string().into_bytes())
}

/// `POST /v1/explain`: JSON, or text for a client that accepts text/plain.
pub(super) async fn explain(
    State(engine): State<Engine>,
    headers: HeaderMap,
    BodyBytes(body): BodyBytes,
) -> Response<Body> {
    let check_request = match request::read(&body, Operation::Peek) {
        Ok(CheckBody::One(check_request)) => check_request,
        Ok(CheckBody::Batch(_)) => {
            return mistake(StatusCode::BAD_REQUEST, "checks: expected one check");
        }
        Err(problem) => return mistake(StatusCode::BAD_REQUEST, &problem),
    };
    let CheckSubject::Attributes(attributes) = &check_request.about else {
        return mistake(StatusCode::BAD_REQUEST, "key: expected attributes, which rules are about");
    };
    match engine.explain(&attributes[..], check_request.cost).await {
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
        "too many requests for long pages: decisions go first; try again later",
    )
}

fn text(text: impl Into<Body>, kind: &'static str) -> Response<Body> {
    let mut response = Response::new(text.into());
    response.headers_mut().insert(header::CONTENT_TYPE, header::HeaderValue::from_static(kind));
    response
}
