//! The answer to a request that is denied, in the form that its client reads.

use std::fmt::Write;

use ::http::header::{ACCEPT, CACHE_CONTROL, CONTENT_TYPE};
use ::http::{HeaderValue, Response, StatusCode};
use tidegate_core::{Decision, headers};

use super::grpc;
use super::head::Head;
use super::layer::Setup;
use super::plan::Denied;

/// A denial, and whom it is told to.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct Denial<'a> {
    /// The request.
    pub head: Head<'a>,
    /// What was decided.
    pub decision: &'a Decision,
    /// The rule that binds.
    pub rule: &'a str,
    /// All rules that denied.
    pub violated: &'a [String],
}

impl Denial<'_> {
    /// What is answered unless told otherwise: 429 with a body in the form that the request accepts.
    ///
    /// `application/problem+json` is preferred; `application/json` and text are there for those who ask for them.
    pub fn response(&self) -> Response<String> {
        let retry_after = headers::retry_after_secs(self.decision);
        let (kind, body) = match form_of(&self.head) {
            Form::Problem => ("application/problem+json", self.problem(retry_after)),
            Form::Json => ("application/json", self.json(retry_after)),
            Form::Text => ("text/plain; charset=utf-8", text(retry_after)),
        };
        answer(StatusCode::TOO_MANY_REQUESTS, kind, body)
    }

    fn problem(&self, retry_after: Option<u64>) -> String {
        let mut body = String::from(
            r#"{"type":"https://iana.org/assignments/http-problem-types#quota-exceeded","title":"Request cannot be satisfied as assigned quota has been exceeded","status":429,"violated-policies":["#,
        );
        for (index, name) in self.violated.iter().enumerate() {
            if index > 0 {
                body.push(',');
            }
            quote(name, &mut body);
        }
        body.push(']');
        if let Some(secs) = retry_after {
            let _ = write!(body, r#","retry-after":{secs}"#);
        }
        body.push('}');
        body
    }

    fn json(&self, retry_after: Option<u64>) -> String {
        let mut body = String::from(r#"{"error":"too_many_requests","limit":"#);
        quote(self.rule, &mut body);
        if let Some(secs) = retry_after {
            let _ = write!(body, r#","retry_after":{secs}"#);
        }
        body.push('}');
        body
    }
}

fn text(retry_after: Option<u64>) -> String {
    match retry_after {
        Some(1) => "Too many requests: try again in 1 second.\n".into(),
        Some(secs) => format!("Too many requests: try again in {secs} seconds.\n"),
        None => "Too many requests: this one costs more than its limit can ever hold.\n".into(),
    }
}

fn answer(status: StatusCode, kind: &'static str, body: String) -> Response<String> {
    let mut response = Response::new(body);
    *response.status_mut() = status;
    response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static(kind));
    response.headers_mut().insert(CACHE_CONTROL, HeaderValue::from_static("no-store"));
    response
}

/// Text as a JSON string.
fn quote(text: &str, out: &mut String) {
    out.push('"');
    for char in text.chars() {
        match char {
            '"' | '\\' => out.extend(['\\', char]),
            char if u32::from(char) < 0x20 => {
                let _ = write!(out, "\\u{:04x}", u32::from(char));
            }
            char => out.push(char),
        }
    }
    out.push('"');
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Form {
    Problem,
    Json,
    Text,
}

/// The form that the request likes best; problem details if it does not say.
fn form_of(head: &Head<'_>) -> Form {
    let mut best = (0, Form::Problem);
    let accepts = head.headers.get_all(ACCEPT).into_iter().filter_map(|value| value.to_str().ok());
    for range in accepts.flat_map(|value| value.split(',')).take(32) {
        let mut pieces = range.split(';').map(str::trim);
        let form = match pieces.next().unwrap_or_default().to_ascii_lowercase().as_str() {
            "application/problem+json" | "application/*" | "*/*" => Form::Problem,
            "application/json" => Form::Json,
            "text/plain" | "text/html" | "text/*" => Form::Text,
            _ => continue,
        };
        let quality = pieces.find_map(|piece| piece.strip_prefix("q=")).map_or(1000, per_mille);
        // Of equals the first.
        if quality > best.0 {
            best = (quality, form);
        }
    }
    best.1
}

/// A quality such as `0.8`, as 800; what is none counts as nothing.
fn per_mille(text: &str) -> u32 {
    let (whole, rest) = text.trim().split_once('.').unwrap_or((text.trim(), ""));
    match whole {
        "1" => 1000,
        "0" if rest.len() <= 3 => format!("{rest:0<3}").parse().unwrap_or(0),
        _ => 0,
    }
}

impl Setup {
    /// The answer to a request that was denied.
    pub(super) fn deny(&self, head: Head<'_>, denied: &Denied) -> Response<String> {
        let Denied { decision, rule, violated, tell } = denied;
        let denial = Denial { head, decision, rule, violated };
        let mut response = match &self.denied {
            Some(answer) => answer(&denial),
            None if self.grpc || head.is_grpc() => grpc::exhausted(&denial),
            None => denial.response(),
        };
        for (name, value) in tell {
            response.headers_mut().entry(name).or_insert_with(|| value.clone());
        }
        response
    }

    /// The answer to a request about which nobody could decide.
    pub(super) fn unavailable(&self, head: Head<'_>) -> Response<String> {
        let told = "The rate limiter has no answer: try again soon.";
        if self.grpc || head.is_grpc() {
            return grpc::failed(grpc::UNAVAILABLE, told);
        }
        match form_of(&head) {
            Form::Text => answer(StatusCode::SERVICE_UNAVAILABLE, "text/plain; charset=utf-8", format!("{told}\n")),
            _ => {
                let body =
                    format!(r#"{{"type":"about:blank","title":"Service Unavailable","status":503,"detail":"{told}"}}"#);
                answer(StatusCode::SERVICE_UNAVAILABLE, "application/problem+json", body)
            }
        }
    }

    /// The answer when the program is not set up for its rules: for whoever wrote it.
    pub(super) fn mistaken(&self, head: Head<'_>, mistake: &str) -> Response<String> {
        if self.grpc || head.is_grpc() {
            return grpc::failed(grpc::INTERNAL, mistake);
        }
        answer(StatusCode::INTERNAL_SERVER_ERROR, "text/plain; charset=utf-8", format!("tidegate: {mistake}\n"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ::http::Request;

    #[test]
    fn the_form_is_what_the_client_likes_best() {
        for (accept, expected) in [
            ("", Form::Problem),
            ("*/*", Form::Problem),
            ("application/*", Form::Problem),
            ("application/json", Form::Json),
            ("Application/JSON; charset=utf-8", Form::Json),
            ("text/plain", Form::Text),
            ("text/html,application/xhtml+xml,application/xml;q=0.9,*/*;q=0.8", Form::Text),
            ("text/plain;q=0.5, application/json;q=0.9", Form::Json),
            ("text/plain;q=0.5, application/json;q=0", Form::Text),
            ("application/json, application/problem+json", Form::Json),
            ("image/png", Form::Problem),
            ("text/plain;q=nonsense", Form::Problem),
            ("text/plain;q=0.1234", Form::Problem),
        ] {
            let request = Request::builder().header("accept", accept).body(()).unwrap();
            assert_eq!(form_of(&Head::of(&request)), expected, "{accept}");
        }
    }

    #[test]
    fn names_cannot_leave_their_quotes() {
        let mut out = String::new();
        quote("a\"b\\c\n\u{e9}", &mut out);
        assert_eq!(out, "\"a\\\"b\\\\c\\u000a\u{e9}\"");
    }
}
