//! Decisions into JSON, headers and status.

use std::cell::RefCell;
use std::sync::Arc;

use axum::body::Body;
use axum::http::{HeaderMap, HeaderName, HeaderValue, Response, StatusCode, header};
use tidegate::denial;
use tidegate::headers::{self, Draft, Families};
use tidegate::{Decision, Limit, Source, Verdict};

use super::Manners;
use super::request::{About, Brought, Question};
use crate::digits;
use crate::gate::{Charged, Ruling};
use crate::rules::Rule;

const POLICY: HeaderName = HeaderName::from_static("ratelimit-policy");
const RATE_LIMIT: HeaderName = HeaderName::from_static("ratelimit");
const LIMIT: HeaderName = HeaderName::from_static("x-ratelimit-limit");
const REMAINING: HeaderName = HeaderName::from_static("x-ratelimit-remaining");
const USED: HeaderName = HeaderName::from_static("x-ratelimit-used");
const RESET: HeaderName = HeaderName::from_static("x-ratelimit-reset");
const RESOURCE: HeaderName = HeaderName::from_static("x-ratelimit-resource");
const MODE: HeaderName = HeaderName::from_static("x-tidegate-mode");
const FALLBACK: HeaderValue = HeaderValue::from_static("fallback");
const JSON: HeaderValue = HeaderValue::from_static("application/json");
const PROBLEM: HeaderValue = HeaderValue::from_static("application/problem+json");
const TEXT: HeaderValue = HeaderValue::from_static("text/plain; charset=utf-8");
const NO_STORE: HeaderValue = HeaderValue::from_static("no-store");

/// As many headers most decisions have.
const MOST: usize = 7;

/// What was decided about one question, ready to be written.
#[derive(Debug)]
pub(crate) struct Answer {
    pub(crate) allowed: bool,
    json: Vec<u8>,
    headers: HeaderMap,
    violated: Vec<String>,
    retry_after_secs: Option<u64>,
}

impl Answer {
    /// The answer to a question about a key.
    pub(crate) fn of_key(
        question: &Question,
        op: &str,
        brought: &Brought,
        decision: &Decision,
        families: Families,
    ) -> Answer {
        let mut json = Vec::with_capacity(640);
        json.extend_from_slice(b"{\"t_us\":");
        digits::push(&mut json, decision.at().as_micros());
        if let About::Key { key, .. } = &question.about {
            json.extend_from_slice(b",\"key\":");
            text(&mut json, key);
        }
        begin(&mut json, b',', question, op);
        json.extend_from_slice(b",\"limit\":");
        text(&mut json, &brought.text);
        json.push(b',');
        numbers(&mut json, decision.allowed(), decision.allowed(), decision.binding());
        let own = brought.charges.iter();
        charges(
            &mut json,
            own.map(|(name, times)| (None, name.as_str(), question.cost.saturating_mul(*times))),
            decision,
        );
        end(&mut json, question, Some(decision));
        let names = || brought.charges.iter().map(|(name, _)| name.as_str());
        let headers = headers_of(decision, families, |draft| brought.policy(draft), names().zip(decision.charges()));
        let retry_after_secs = headers::retry_after_secs(decision);
        Answer { allowed: decision.allowed(), json, headers, violated: violated(decision, names()), retry_after_secs }
    }

    /// The answer to a question about attributes.
    pub(crate) fn of_rules(question: &Question, op: &str, ruling: &Ruling, families: Families) -> Answer {
        let decision = ruling.decision.as_ref();
        let mut json = Vec::with_capacity(640);
        json.push(b'{');
        if let Some(decision) = decision {
            json.extend_from_slice(b"\"t_us\":");
            digits::push(&mut json, decision.at().as_micros());
            json.push(b',');
        }
        begin(&mut json, b' ', question, op);
        let limits: Vec<String> = ruling.charges.iter().map(|charge| charge.limit.to_string()).collect();
        // Who lets nothing pass binds before any limit.
        let binding = ruling.refused_by.as_ref().or(ruling.binding().map(|(charge, _)| &charge.rule));
        if let Some(rule) = binding {
            json.extend_from_slice(b",\"rule\":");
            text(&mut json, &rule.name);
        }
        if let (Some(decision), None) = (decision, &ruling.refused_by) {
            json.extend_from_slice(b",\"limit\":");
            text(&mut json, limits.get(decision.binding_index()).map_or("", String::as_str));
        }
        json.push(b',');
        match decision {
            Some(decision) => {
                numbers(&mut json, ruling.allowed, ruling.refused_by.is_none(), decision.binding());
                let own = ruling.charges.iter().zip(&limits);
                let own = own.map(|(charge, limit)| (Some(&*charge.rule.name), limit.as_str(), charge.cost));
                charges(&mut json, own, decision);
            }
            None if ruling.allowed => json.extend_from_slice(b"\"allowed\":true,\"charges\":[]"),
            None => json.extend_from_slice(b"\"allowed\":false,\"granted\":0,\"retry_after_us\":null,\"charges\":[]"),
        }
        if !ruling.shadow.is_empty() {
            json.extend_from_slice(b",\"shadow\":[");
            for (at, shadowed) in ruling.shadow.iter().enumerate() {
                json.extend_from_slice(if at > 0 { b",{\"rule\":" } else { b"{\"rule\":" });
                text(&mut json, &shadowed.rule.name);
                json.extend_from_slice(if shadowed.allowed { b",\"allowed\":true}" } else { b",\"allowed\":false}" });
            }
            json.push(b']');
        }
        end(&mut json, question, decision);
        let names = || ruling.charges.iter().map(|charge| &*charge.rule.name);
        let mut answer = Answer {
            allowed: ruling.allowed,
            json,
            headers: HeaderMap::new(),
            violated: Vec::new(),
            retry_after_secs: None,
        };
        if let Some(decision) = decision {
            answer.headers = headers_of_ruling(ruling, families);
            answer.violated = violated(decision, names());
            if ruling.refused_by.is_none() {
                answer.retry_after_secs = headers::retry_after_secs(decision);
            }
        }
        answer.violated.extend(ruling.refused_by.iter().map(|rule| rule.name.to_string()));
        answer
    }

    pub(crate) fn json(&self) -> &[u8] {
        &self.json
    }

    /// 204 with the headers alone, for whoever asks only whether.
    pub(crate) fn without_body(self) -> Response<Body> {
        let mut response = Response::new(Body::empty());
        *response.status_mut() = StatusCode::NO_CONTENT;
        *response.headers_mut() = self.headers;
        response.headers_mut().insert(header::CACHE_CONTROL, NO_STORE);
        response
    }

    /// 200 with the decision; or 429 with the problem and the decision in it, the decision alone, or a line of text, whichever is accepted. Who
    /// accepts anything gets what the setting says.
    pub(crate) fn into_response(self, setting: denial::Body, accept: Option<&[u8]>) -> Response<Body> {
        let (status, kind, body) = if self.allowed {
            (StatusCode::OK, JSON, self.json)
        } else {
            let accept = accept.and_then(|accept| std::str::from_utf8(accept).ok());
            let (kind, body) = match setting.asked_for(accept) {
                denial::Body::Problem => (PROBLEM, problem(&self.json, &self.violated)),
                denial::Body::Json => (JSON, self.json),
                denial::Body::Text => {
                    let violated: Vec<&str> = self.violated.iter().map(String::as_str).collect();
                    (TEXT, denial::Body::Text.write(&violated, self.retry_after_secs).into_bytes())
                }
            };
            (StatusCode::TOO_MANY_REQUESTS, kind, body)
        };
        let mut response = Response::new(Body::from(body));
        *response.status_mut() = status;
        let headers = response.headers_mut();
        *headers = self.headers;
        headers.insert(header::CONTENT_TYPE, kind);
        headers.insert(header::CACHE_CONTROL, NO_STORE);
        response
    }
}

/// The headers that tell what the rules say.
fn headers_of_ruling(ruling: &Ruling, families: Families) -> HeaderMap {
    let mut headers = HeaderMap::with_capacity(MOST);
    tell(ruling, families, |name, value| _ = headers.insert(name, value));
    headers
}

/// The same, one after the other.
pub(crate) fn tell(ruling: &Ruling, families: Families, put: impl FnMut(HeaderName, HeaderValue)) {
    let Some(decision) = &ruling.decision else { return };
    let names = || ruling.charges.iter().map(|charge| &*charge.rule.name);
    let policy = |draft| match &ruling.charges[..] {
        [one] => policy_of(draft, one),
        many => policy(draft, &many.iter().map(|charge| (&*charge.rule.name, &charge.limit)).collect::<Vec<_>>()),
    };
    each(decision, families, policy, names().zip(decision.charges()), put);
}

/// The same as [`policy`], for one limit. It does not change from request to request, so the last one is kept.
fn policy_of(draft: Draft, charged: &Charged) -> Option<HeaderValue> {
    type Last = Option<(Draft, Arc<Rule>, Limit, HeaderValue)>;
    thread_local! {
        static LAST: RefCell<Last> = const { RefCell::new(None) };
    }
    LAST.with_borrow_mut(|last| {
        if let Some((of, rule, limit, value)) = last
            && *of == draft
            && Arc::ptr_eq(rule, &charged.rule)
            && *limit == charged.limit
        {
            return Some(value.clone());
        }
        let value = policy(draft, &[(&charged.rule.name, &charged.limit)])?;
        *last = Some((draft, Arc::clone(&charged.rule), charged.limit, value.clone()));
        Some(value)
    })
}

/// The answer to a request that the rules deny, for somebody who accepts this.
pub(crate) fn denial(ruling: &Ruling, manners: Manners, accept: Option<&[u8]>) -> Response<Body> {
    let question = Question { about: About::Attributes(Vec::new()), cost: 1, reserved: 0, id: None };
    Answer::of_rules(&question, "check", ruling, manners.headers).into_response(manners.denial, accept)
}

/// JSON that is no decision.
pub(crate) fn json(body: impl Into<Body>) -> Response<Body> {
    let mut response = Response::new(body.into());
    response.headers_mut().insert(header::CONTENT_TYPE, JSON);
    response
}

/// The decision with what makes it a problem before it.
fn problem(decision: &[u8], violated: &[String]) -> Vec<u8> {
    let mut body = Vec::with_capacity(decision.len() + 256);
    body.extend_from_slice(
        br#"{"type":"https://iana.org/assignments/http-problem-types#quota-exceeded","title":"Request cannot be satisfied as assigned quota has been exceeded","status":429,"violated-policies":["#,
    );
    for (at, name) in violated.iter().enumerate() {
        if at > 0 {
            body.push(b',');
        }
        text(&mut body, name);
    }
    body.extend_from_slice(b"],");
    body.extend_from_slice(&decision[1..]);
    body
}

/// A mistake, named.
pub(crate) fn mistake(status: StatusCode, detail: &str) -> Response<Body> {
    let title = status.canonical_reason().unwrap_or("Error");
    let body = format!(
        r#"{{"type":"about:blank","title":{},"status":{},"detail":{}}}"#,
        string(title),
        status.as_u16(),
        string(detail)
    );
    let mut response = Response::new(Body::from(body));
    *response.status_mut() = status;
    response.headers_mut().insert(header::CONTENT_TYPE, PROBLEM);
    response
}

/// `"cost":1,"op":"check"`, after a comma if something stands before it.
fn begin(out: &mut Vec<u8>, before: u8, question: &Question, op: &str) {
    if before == b',' {
        out.push(before);
    }
    out.extend_from_slice(b"\"cost\":");
    digits::push(out, question.cost);
    out.extend_from_slice(b",\"op\":\"");
    out.extend_from_slice(op.as_bytes());
    out.push(b'"');
}

/// The members every answer has, in the order every JSON answer has them. What can `ever` pass has a time at which it would.
fn numbers(out: &mut Vec<u8>, allowed: bool, ever: bool, verdict: &Verdict) {
    out.extend_from_slice(if allowed { b"\"allowed\":true,\"granted\":" } else { b"\"allowed\":false,\"granted\":" });
    digits::push(out, verdict.granted);
    out.extend_from_slice(b",\"remaining\":");
    digits::push(out, verdict.remaining);
    out.extend_from_slice(b",\"retry_after_us\":");
    match verdict.retry.micros() {
        Some(micros) if ever || micros > 0 => digits::push(out, micros),
        _ => out.extend_from_slice(b"null"),
    }
    out.extend_from_slice(b",\"reset_after_us\":");
    digits::push(out, verdict.reset_after_us);
    out.extend_from_slice(b",\"next_after_us\":");
    digits::push(out, verdict.next_after_us);
}

/// Every charge: its rule if it has one, its limit, what it cost.
fn charges<'a>(out: &mut Vec<u8>, charges: impl Iterator<Item = (Option<&'a str>, &'a str, u64)>, decision: &Decision) {
    out.extend_from_slice(b",\"charges\":[");
    for (at, ((rule, limit, cost), verdict)) in charges.zip(decision.charges()).enumerate() {
        out.extend_from_slice(if at > 0 { b",{" } else { b"{" });
        if let Some(rule) = rule {
            out.extend_from_slice(b"\"rule\":");
            text(out, rule);
            out.push(b',');
        }
        out.extend_from_slice(b"\"limit\":");
        text(out, limit);
        out.extend_from_slice(b",\"amount\":");
        digits::push(out, verdict.amount);
        out.extend_from_slice(b",\"cost\":");
        digits::push(out, cost);
        out.extend_from_slice(if at == decision.binding_index() {
            b",\"binding\":true,"
        } else {
            b",\"binding\":false,"
        });
        numbers(out, verdict.allowed, true, verdict);
        out.push(b'}');
    }
    out.push(b']');
}

fn end(out: &mut Vec<u8>, question: &Question, decision: Option<&Decision>) {
    if let Some(id) = question.id {
        out.extend_from_slice(b",\"id\":");
        digits::push(out, id.0);
    }
    if let Some(decision) = decision {
        out.extend_from_slice(b",\"source\":\"");
        out.extend_from_slice(decision.source().name().as_bytes());
        out.push(b'"');
    }
    out.push(b'}');
}

/// The value of `RateLimit-Policy` in this draft.
pub(crate) fn policy(draft: Draft, named: &[(&str, &Limit)]) -> Option<HeaderValue> {
    let text = if draft == Draft::Seven { headers::policy_7(named) } else { headers::policy(named) };
    HeaderValue::try_from(text).ok()
}

/// The headers of a decision whose charges have these names, in these families, `Retry-After` on a denial, and whether the store had no part in it.
fn headers_of<'a>(
    decision: &Decision,
    families: Families,
    policy: impl FnOnce(Draft) -> Option<HeaderValue>,
    named: impl Iterator<Item = (&'a str, &'a Verdict)> + Clone,
) -> HeaderMap {
    let mut headers = HeaderMap::with_capacity(MOST);
    each(decision, families, policy, named, |name, value| _ = headers.insert(name, value));
    headers
}

fn each<'a>(
    decision: &Decision,
    families: Families,
    policy: impl FnOnce(Draft) -> Option<HeaderValue>,
    named: impl Iterator<Item = (&'a str, &'a Verdict)> + Clone,
    mut put: impl FnMut(HeaderName, HeaderValue),
) {
    let mut put = |name: HeaderName, value: Option<HeaderValue>| {
        if let Some(value) = value {
            put(name, value);
        }
    };
    let verdict = decision.binding();
    if let Some(draft) = families.ietf {
        put(POLICY, policy(draft));
        let state =
            if draft == Draft::Seven { headers::rate_limit_7(verdict) } else { headers::rate_limit(named.clone()) };
        put(RATE_LIMIT, HeaderValue::try_from(state).ok());
    }
    if families.github {
        put(LIMIT, Some(verdict.amount.into()));
        put(REMAINING, Some(verdict.remaining.into()));
        put(USED, Some((verdict.amount - verdict.remaining.min(verdict.amount)).into()));
        put(RESET, Some(headers::reset_epoch_secs(decision).into()));
        let binding = named.map(|(name, _)| name).nth(decision.binding_index());
        put(RESOURCE, binding.and_then(|name| HeaderValue::try_from(headers::visible(name).as_ref()).ok()));
    }
    put(header::RETRY_AFTER, headers::retry_after_secs(decision).map(Into::into));
    put(MODE, (decision.source() == Source::Fallback).then_some(FALLBACK));
}

/// Whose limits denied it.
fn violated<'a>(decision: &Decision, names: impl Iterator<Item = &'a str>) -> Vec<String> {
    if decision.allowed() {
        return Vec::new();
    }
    let denied = decision.charges().iter().zip(names).filter(|(verdict, _)| !verdict.allowed);
    denied.map(|(_, name)| name.into()).collect()
}

/// Writes text as a JSON string.
fn text(out: &mut Vec<u8>, text: &str) {
    serde_json::to_writer(out, text).expect("writing text to memory cannot fail");
}

/// Text as a JSON string.
pub(crate) fn string(text: &str) -> String {
    serde_json::Value::from(text).to_string()
}
