//! The answer to a request that is denied, in the form that its client reads.

use crate::http::denial::{Body, Reply};
use ::http::header::{ACCEPT, CACHE_CONTROL, CONTENT_TYPE};
use ::http::{HeaderValue, Response, StatusCode};
use tidegate_core::Decision;

use super::grpc;
use super::head::Head;
use super::layer::Setup;
use super::plan::{Denied, Unfit};
use super::tell::{IsDenial, add_missing};

/// A denial, and whom it is told to.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct Denial<'a> {
    /// The request.
    pub head: Head<'a>,
    /// What was decided, about all rules: for you, not for the client.
    pub decision: &'a Decision,
    /// The rule that binds.
    pub rule: &'a str,
    /// The policies that denied, as the headers name them: a rule with one limit by its name, one
    /// with several by name and limit.
    pub violated: &'a [String],
    /// What the client is told.
    pub(super) reply: &'a Reply,
}

impl Denial<'_> {
    /// What is answered unless told otherwise: 429 with a body in the form that the request
    /// accepts.
    ///
    /// `application/problem+json` is preferred; `application/json` and text are there for those who
    /// ask for them. The body names the policies that denied, and says when to try again.
    pub fn response(&self) -> Response<String> {
        let form = form_of(&self.head);
        let status =
            StatusCode::from_u16(self.reply.status()).unwrap_or(StatusCode::TOO_MANY_REQUESTS);
        answer(status, form.content_type(), self.reply.body(form))
    }
}

/// The form that the request likes best; problem details if it does not say.
fn form_of(head: &Head<'_>) -> Body {
    Body::Problem.asked_for(head.headers.get(ACCEPT).and_then(|value| value.to_str().ok()))
}

fn answer(status: StatusCode, kind: &'static str, body: String) -> Response<String> {
    let mut response = Response::new(body);
    *response.status_mut() = status;
    response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static(kind));
    response.headers_mut().insert(CACHE_CONTROL, HeaderValue::from_static("no-store"));
    response
}

impl Setup {
    /// The answer to a request that was denied.
    pub(super) fn deny(&self, head: Head<'_>, denied: &Denied) -> Response<String> {
        let Denied { decision, rule, reply } = denied;
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

    /// The answer to a request that lacks the key of a rule which denies such requests.
    pub(super) fn refuse(&self, head: Head<'_>) -> Response<String> {
        let told = "The request lacks the key that its rate limit is by, such as a header.";
        if self.grpc || head.is_grpc() {
            return grpc::failed(grpc::PERMISSION_DENIED, told);
        }
        match form_of(&head) {
            Body::Text => {
                answer(StatusCode::FORBIDDEN, "text/plain; charset=utf-8", format!("{told}\n"))
            }
            _ => {
                let body = format!(
                    r#"{{"type":"about:blank","title":"Forbidden","status":403,"detail":"{told}"}}"#
                );
                answer(StatusCode::FORBIDDEN, "application/problem+json", body)
            }
        }
    }

    /// The answer to a request that cannot be judged.
    pub(super) fn unfit(&self, head: Head<'_>, unfit: &Unfit) -> Response<String> {
        let Unfit { status, why } = unfit;
        if self.grpc || head.is_grpc() {
            return grpc::failed(grpc::INVALID_ARGUMENT, why);
        }
        match form_of(&head) {
            Body::Text => answer(*status, "text/plain; charset=utf-8", format!("{why}\n")),
            _ => {
                let (title, code) =
                    (status.canonical_reason().unwrap_or_default(), status.as_u16());
                let detail = why.replace('\\', r"\\").replace('"', r#"\""#);
                let body = format!(
                    r#"{{"type":"about:blank","title":"{title}","status":{code},"detail":"{detail}"}}"#
                );
                answer(*status, "application/problem+json", body)
            }
        }
    }

    /// The answer to a request about which nobody could decide.
    pub(super) fn unavailable(&self, head: Head<'_>) -> Response<String> {
        let told = "The rate limiter has no answer: try again soon.";
        if self.grpc || head.is_grpc() {
            return grpc::failed(grpc::UNAVAILABLE, told);
        }
        match form_of(&head) {
            Body::Text => answer(
                StatusCode::SERVICE_UNAVAILABLE,
                "text/plain; charset=utf-8",
                format!("{told}\n"),
            ),
            _ => {
                let body = format!(
                    r#"{{"type":"about:blank","title":"Service Unavailable","status":503,"detail":"{told}"}}"#
                );
                answer(StatusCode::SERVICE_UNAVAILABLE, "application/problem+json", body)
            }
        }
    }

    /// The answer when the program is not set up for its rules: for whoever wrote it.
    pub(super) fn mistaken(&self, head: Head<'_>, mistake: &str) -> Response<String> {
        if self.grpc || head.is_grpc() {
            return grpc::failed(grpc::INTERNAL, mistake);
        }
        answer(
            StatusCode::INTERNAL_SERVER_ERROR,
            "text/plain; charset=utf-8",
            format!("tidegate: {mistake}\n"),
        )
    }
}
