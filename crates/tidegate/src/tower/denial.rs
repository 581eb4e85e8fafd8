//! The responses of the layer itself, in the form that the client accepts.

use crate::http::denial::{DenialFormat, DenialResponse, problem};
use ::http::header::{ACCEPT, CACHE_CONTROL, CONTENT_TYPE};
use ::http::{HeaderValue, Response, StatusCode};
use tidegate_core::Decision;

use super::budget_headers::{IsDenial, add_missing};
use super::grpc;
use super::head::RequestHead;
use super::layer::Setup;
use super::plan::{DeniedRequest, InvalidRequest};

/// A denied request and its decision, as a custom [response](super::RateLimitLayer::denied) gets
/// them.
///
/// ```
/// use tidegate::tower::{Denial, RateLimitLayer, key};
/// let teapot = |denial: &Denial<'_>| {
///     let mut response = denial.response();
///     *response.status_mut() = http::StatusCode::IM_A_TEAPOT;
///     response
/// };
/// let layer = RateLimitLayer::new("10/s".parse()?, key::peer_ip()).denied(teapot);
/// # Ok::<(), tidegate::ParseError>(())
/// ```
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct Denial<'a> {
    /// The request.
    pub head: RequestHead<'a>,
    /// The decision over all rules. It may contain limits that the client should not see.
    pub decision: &'a Decision,
    /// The name of the rule that binds.
    pub rule: &'a str,
    /// The policies that denied, as in the headers: the name of a rule with one limit, or name and
    /// limit of a rule with several.
    pub violated: &'a [String],
    /// The headers and body for the client.
    pub(super) reply: &'a DenialResponse,
}

impl Denial<'_> {
    /// The default response: 429 with a body in the form that the request accepts.
    ///
    /// The form is `application/problem+json`, unless `Accept` prefers `application/json` or text.
    /// The body has the policies that denied, and the wait.
    pub fn response(&self) -> Response<String> {
        let form = form_of(&self.head);
        let status =
            StatusCode::from_u16(self.reply.status()).unwrap_or(StatusCode::TOO_MANY_REQUESTS);
        answer(status, form.content_type(), self.reply.body(form))
    }
}

/// The form that the request prefers; the default is problem details.
fn form_of(head: &RequestHead<'_>) -> DenialFormat {
    DenialFormat::Problem.negotiate(head.headers.get(ACCEPT).and_then(|value| value.to_str().ok()))
}

fn answer(status: StatusCode, kind: &'static str, body: String) -> Response<String> {
    let mut response = Response::new(body);
    *response.status_mut() = status;
    response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static(kind));
    response.headers_mut().insert(CACHE_CONTROL, HeaderValue::from_static("no-store"));
    response
}

fn answer_problem(status: StatusCode, detail: &str) -> Response<String> {
    let title = status.canonical_reason().unwrap_or_default();
    let body = problem(status.as_u16(), title, detail);
    answer(status, DenialFormat::Problem.content_type(), body)
}

impl Setup {
    /// The response to a denied request.
    pub(super) fn deny(&self, head: RequestHead<'_>, denied: &DeniedRequest) -> Response<String> {
        let DeniedRequest { decision, rule, reply } = denied;
        let denial = Denial { head, decision, rule, violated: reply.violated(), reply };
        let mut response = match &self.denied {
            Some(answer) => answer(&denial),
            None if self.grpc || head.is_grpc() => grpc::exhausted(&denial),
            None => denial.response(),
        };
        add_missing(response.headers_mut(), reply);
        response.extensions_mut().insert(IsDenial);
        response
    }

    /// The response to a request without the key of a rule that denies such requests.
    pub(super) fn missing_key(&self, head: RequestHead<'_>) -> Response<String> {
        let detail = "The request lacks the key that its rate limit is by, such as a header.";
        if self.grpc || head.is_grpc() {
            return grpc::failed(grpc::PERMISSION_DENIED, detail);
        }
        match form_of(&head) {
            DenialFormat::Text => {
                answer(StatusCode::FORBIDDEN, "text/plain; charset=utf-8", format!("{detail}\n"))
            }
            _ => answer_problem(StatusCode::FORBIDDEN, detail),
        }
    }

    /// The response to a request to which no rule can be applied.
    pub(super) fn invalid(
        &self,
        head: RequestHead<'_>,
        invalid: &InvalidRequest,
    ) -> Response<String> {
        let InvalidRequest { status, why } = invalid;
        if self.grpc || head.is_grpc() {
            return grpc::failed(grpc::INVALID_ARGUMENT, why);
        }
        match form_of(&head) {
            DenialFormat::Text => answer(*status, "text/plain; charset=utf-8", format!("{why}\n")),
            _ => answer_problem(*status, why),
        }
    }

    /// The response to a request without a decision, if the layer fails closed.
    pub(super) fn unavailable(&self, head: RequestHead<'_>) -> Response<String> {
        let detail = "The rate limiter has no answer: try again soon.";
        if self.grpc || head.is_grpc() {
            return grpc::failed(grpc::UNAVAILABLE, detail);
        }
        match form_of(&head) {
            DenialFormat::Text => answer(
                StatusCode::SERVICE_UNAVAILABLE,
                "text/plain; charset=utf-8",
                format!("{detail}\n"),
            ),
            _ => answer_problem(StatusCode::SERVICE_UNAVAILABLE, detail),
        }
    }

    /// The response if the program is not set up for its rules, with the advice how to fix it.
    pub(super) fn misconfigured(&self, head: RequestHead<'_>, advice: &str) -> Response<String> {
        if self.grpc || head.is_grpc() {
            return grpc::failed(grpc::INTERNAL, advice);
        }
        answer(
            StatusCode::INTERNAL_SERVER_ERROR,
            "text/plain; charset=utf-8",
            format!("tidegate: {advice}\n"),
        )
    }
}
