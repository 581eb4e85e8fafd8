//! Errors over HTTP, as `application/problem+json` (RFC 9457).

use axum::body::Body;
use axum::http::{HeaderValue, Response, StatusCode, header};
use tidegate::http::denial;

/// The media type of a problem.
pub(crate) const PROBLEM: HeaderValue = HeaderValue::from_static("application/problem+json");

/// The response to a request that is not served: its status, and why.
pub(crate) fn mistake(status: StatusCode, detail: &str) -> Response<Body> {
    let title = status.canonical_reason().unwrap_or("Error");
    let body = denial::problem(status.as_u16(), title, detail);
    let mut response = Response::new(Body::from(body));
    *response.status_mut() = status;
    response.headers_mut().insert(header::CONTENT_TYPE, PROBLEM);
    response
}

/// Text as a JSON string.
pub(crate) fn string(text: &str) -> String {
    serde_json::Value::from(text).to_string()
}
