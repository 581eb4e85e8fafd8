//! Writes decisions as JSON, headers and status.

use std::borrow::Cow;
use std::cell::RefCell;
use std::collections::BTreeMap;
use std::sync::Arc;

use axum::body::Body;
use axum::http::{HeaderMap, HeaderName, HeaderValue, Response, StatusCode, header};
use serde_json::json;
use tidegate::http::denial::{self, DenialResponse};
use tidegate::http::headers::{self, Draft, HeaderFamilies};
use tidegate::{Decision, Limit, Source, StoreError, Verdict};

use super::request::{CheckRequest, CheckSubject, ParsedLimits};
use crate::digits;
use crate::engine::{Engine, EngineError};
use crate::problem::{PROBLEM, mistake, string};
use crate::reset::Emptied;
use crate::response_options::ResponseOptions;
use crate::rules::Rule;
use crate::ruling::{Charged, Ruling};

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
const TEXT: HeaderValue = HeaderValue::from_static("text/plain; charset=utf-8");
const NO_STORE: HeaderValue = HeaderValue::from_static("no-store");

/// The number of headers of most decisions.
const MOST: usize = 7;

/// The response to one check, ready to be written.
#[derive(Debug)]
pub(crate) struct CheckResponse {
    pub(crate) allowed: bool,
    json: Vec<u8>,
    headers: HeaderMap,
    /// The reason of a denial, and the policies that deny.
    reason: denial::DenialReason,
    violated: Vec<String>,
}

impl CheckResponse {
    /// The response to a check of a key.
    pub(crate) fn of_key(
        check_request: &CheckRequest,
        op: &str,
        parsed: &ParsedLimits,
        decision: &Decision,
        families: HeaderFamilies,
    ) -> CheckResponse {
        let mut json = Vec::with_capacity(640);
        json.extend_from_slice(b"{\"t_us\":");
        digits::push(&mut json, decision.at().as_micros());
        if let CheckSubject::Key { key, .. } = &check_request.about {
            json.extend_from_slice(b",\"key\":");
            text(&mut json, key);
        }
        begin(&mut json, b',', check_request, op);
        json.extend_from_slice(b",\"limit\":");
        text(&mut json, &parsed.text);
        json.push(b',');
        numbers(&mut json, decision.allowed(), decision.allowed(), decision.binding());
        let own = parsed.charges.iter();
        charges(
            &mut json,
            own.map(|(name, times)| {
                (None, name.as_str(), check_request.cost.saturating_mul(*times))
            }),
            decision,
        );
        if let ("reset", CheckSubject::Key { key, .. }) = (op, &check_request.about) {
            json.extend_from_slice(b",\"reset\":[{\"key\":");
            text(&mut json, key);
            json.extend_from_slice(b",\"limit\":");
            text(&mut json, &parsed.text);
            json.extend_from_slice(b"}]");
        }
        end(&mut json, check_request, Some(decision));
        let names = || parsed.charges.iter().map(|(name, _)| name.as_str());
        let headers = headers_of(
            decision,
            families,
            |draft| parsed.policy(draft),
            names().zip(decision.charges()),
        );
        let violated = violated(decision, names());
        CheckResponse {
            allowed: decision.allowed(),
            json,
            headers,
            reason: quota(Some(decision)),
            violated,
        }
    }

    /// The response to a check of attributes: the complete decision, for callers of the check API.
    pub(crate) fn of_rules(
        check_request: &CheckRequest,
        op: &str,
        ruling: &Ruling,
        response_options: ResponseOptions,
    ) -> CheckResponse {
        let decision = ruling.decision.as_ref();
        let mut json = Vec::with_capacity(640);
        json.push(b'{');
        if let Some(decision) = decision {
            json.extend_from_slice(b"\"t_us\":");
            digits::push(&mut json, decision.at().as_micros());
            json.push(b',');
        }
        begin(&mut json, b' ', check_request, op);
        let limits: Vec<String> =
            ruling.charges.iter().map(|charge| charge.limit.to_string()).collect();
        // A rule with `limit: deny` binds before any limit.
        let binding = ruling.refused_by.as_ref().or(ruling.exempted_by.as_ref());
        let binding = binding.or(ruling.binding().map(|(charge, _)| &charge.rule));
        if let Some(rule) = binding {
            json.extend_from_slice(b",\"rule\":");
            text(&mut json, &rule.name);
        }
        if let Some(name) = &ruling.refused_for {
            json.extend_from_slice(b",\"missing\":");
            text(&mut json, name);
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
                let own = own
                    .map(|(charge, limit)| (Some(&*charge.rule.name), limit.as_str(), charge.cost));
                charges(&mut json, own, decision);
            }
            None if ruling.exempted_by.is_some() => {
                json.extend_from_slice(b"\"allowed\":true,\"exempt\":true,\"charges\":[]");
            }
            None if ruling.allowed => json.extend_from_slice(b"\"allowed\":true,\"charges\":[]"),
            None => json.extend_from_slice(
                b"\"allowed\":false,\"granted\":0,\"retry_after_us\":null,\"charges\":[]",
            ),
        }
        if !ruling.shadow.is_empty() {
            json.extend_from_slice(b",\"shadow\":[");
            for (at, shadowed) in ruling.shadow.iter().enumerate() {
                json.extend_from_slice(if at > 0 { b",{\"rule\":" } else { b"{\"rule\":" });
                text(&mut json, &shadowed.rule.name);
                json.extend_from_slice(if shadowed.allowed {
                    b",\"allowed\":true}"
                } else {
                    b",\"allowed\":false}"
                });
            }
            json.push(b']');
        }
        end(&mut json, check_request, decision);
        let names = headers::names(&limits_of(ruling));
        let mut answer = CheckResponse {
            allowed: ruling.allowed,
            json,
            headers: HeaderMap::new(),
            reason: quota(decision),
            violated: decision
                .map(|decision| violated(decision, names.iter().map(|name| &**name)))
                .unwrap_or_default(),
        };
        match (&ruling.refused_by, decision) {
            // Other budgets are not the reason.
            (Some(rule), _) => {
                answer.reason = denial::DenialReason::Rule(
                    rule.deny_status.unwrap_or(response_options.deny_status),
                );
                answer.violated.push(rule.name.to_string());
            }
            (None, Some(decision)) => {
                let (policy, named) = (policies(ruling, &names), names.iter().map(|name| &**name));
                answer.headers = headers_of(
                    decision,
                    response_options.headers,
                    policy,
                    named.zip(decision.charges()),
                );
            }
            (None, None) => {}
        }
        answer
    }

    /// The response to a reset: the budgets.
    pub(crate) fn of_reset(emptied: &[Emptied]) -> CheckResponse {
        let reset = emptied.iter().map(|Emptied { rule, by }| {
            let by: BTreeMap<&str, &Option<String>> =
                by.iter().map(|(name, value)| (&**name, value)).collect();
            format!(r#"{{"rule":{},"by":{}}}"#, string(&rule.name), json!(by))
        });
        let reset: Vec<String> = reset.collect();
        let json = format!(r#"{{"op":"reset","reset":[{}]}}"#, reset.join(",")).into_bytes();
        CheckResponse {
            allowed: true,
            json,
            headers: HeaderMap::new(),
            reason: quota(None),
            violated: Vec::new(),
        }
    }

    /// Adds a warning as the last member.
    pub(crate) fn with_warning(mut self, why: &str) -> CheckResponse {
        debug_assert_eq!(self.json.last(), Some(&b'}'), "an answer is an object");
        self.json.pop();
        self.json.extend_from_slice(b",\"warning\":");
        text(&mut self.json, why);
        self.json.push(b'}');
        self
    }

    pub(crate) fn json(&self) -> &[u8] {
        &self.json
    }

    /// 200 with the decision. A denial is 429 (403 by a rule with `limit: deny`) with the problem
    /// and the decision in it, the decision, or a line of text, as `accept` asks; `setting` decides
    /// for clients that accept anything.
    pub(crate) fn into_response(
        self,
        setting: denial::DenialFormat,
        accept: Option<&[u8]>,
    ) -> Response<Body> {
        let (status, kind, body) = if self.allowed {
            (StatusCode::OK, JSON, self.json)
        } else {
            let accept = accept.and_then(|accept| std::str::from_utf8(accept).ok());
            let (kind, body) = match setting.negotiate(accept) {
                denial::DenialFormat::Problem => {
                    (PROBLEM, problem(&self.json, self.reason, &self.violated))
                }
                denial::DenialFormat::Json => (JSON, self.json),
                form @ denial::DenialFormat::Text => {
                    (TEXT, DenialResponse::new(self.reason, self.violated).body(form).into_bytes())
                }
            };
            (status(self.reason.status()), kind, body)
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

/// The reason of a denial by limits.
fn quota(decision: Option<&Decision>) -> denial::DenialReason {
    denial::DenialReason::Quota { retry_after_secs: decision.and_then(headers::retry_after_secs) }
}

fn status(code: u16) -> StatusCode {
    StatusCode::from_u16(code).unwrap_or(StatusCode::TOO_MANY_REQUESTS)
}

/// The rule and limit of each charge.
fn limits_of(ruling: &Ruling) -> Vec<(&str, &Limit)> {
    ruling.charges.iter().map(|charge| (&*charge.rule.name, &charge.limit)).collect()
}

/// The value of `RateLimit-Policy` for charges of these names.
fn policies<'a>(
    ruling: &'a Ruling,
    names: &'a [Cow<'a, str>],
) -> impl FnOnce(Draft) -> Option<HeaderValue> + 'a {
    |draft| {
        let named =
            names.iter().zip(&ruling.charges).map(|(name, charge)| (&**name, &charge.limit));
        policy(draft, &named.collect::<Vec<_>>())
    }
}

/// Writes the headers for a client whose request the rules allow.
pub(crate) fn tell(
    ruling: &Ruling,
    families: HeaderFamilies,
    put: impl FnMut(HeaderName, HeaderValue),
) {
    let Some(decision) = &ruling.decision else { return };
    match &ruling.charges[..] {
        [one] => {
            let named = std::iter::once((&*one.rule.name, decision.binding()));
            each(decision, families, |draft| policy_of(draft, one), named, put);
        }
        _ => {
            let names = headers::names(&limits_of(ruling));
            let named = names.iter().map(|name| &**name).zip(decision.charges());
            each(decision, families, policies(ruling, &names), named, put);
        }
    }
}

/// [`policy`] of one limit. It rarely changes, so the last one is cached.
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

/// The response to a gateway whose client's request the rules allow: 204 and the headers.
pub(crate) fn pass(ruling: &Ruling, families: HeaderFamilies) -> Response<Body> {
    let mut response = Response::new(Body::empty());
    *response.status_mut() = StatusCode::NO_CONTENT;
    let headers = response.headers_mut();
    tell(ruling, families, |name, value| _ = headers.insert(name, value));
    headers.insert(header::CACHE_CONTROL, NO_STORE);
    response
}

/// The response to a client of the proxy or of a gateway whose request the rules deny: which
/// policies deny, and when to retry. Only callers of the check API get the complete decision.
/// Without a store, a rule whose policy is then `closed` answers as a [failure](unanswered).
pub(crate) fn denial(engine: &Engine, ruling: &Ruling, accept: Option<&[u8]>) -> Response<Body> {
    let response_options = engine.settings().response_options();
    let reply = match (&ruling.refused_by, &ruling.decision) {
        (None, Some(_)) if ruling.is_closed_by_failure(engine.store().on_failure()) => {
            return unavailable();
        }
        (None, Some(decision)) => {
            DenialResponse::of(decision, &limits_of(ruling), response_options.headers)
        }
        (Some(rule), _) => DenialResponse::new(
            denial::DenialReason::Rule(rule.deny_status.unwrap_or(response_options.deny_status)),
            [&*rule.name],
        ),
        (None, None) => DenialResponse::new(quota(None), [""; 0]),
    };
    let accept = accept.and_then(|accept| std::str::from_utf8(accept).ok());
    let form = response_options.denial.negotiate(accept);
    let mut response = Response::new(Body::from(reply.body(form)));
    *response.status_mut() = status(reply.status());
    let headers = response.headers_mut();
    for (name, value) in reply.headers() {
        if let (Ok(name), Ok(value)) =
            (HeaderName::from_bytes(name.as_bytes()), HeaderValue::try_from(value))
        {
            headers.insert(name, value);
        }
    }
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static(form.content_type()));
    headers.insert(header::CACHE_CONTROL, NO_STORE);
    response
}

/// The response to a client of the proxy or of a gateway if there is no decision. The log has the
/// reason.
pub(crate) fn unanswered(error: &EngineError) -> Response<Body> {
    match error {
        EngineError::Cost(invalid) => mistake(StatusCode::BAD_REQUEST, &invalid.for_client()),
        EngineError::Store(StoreError::Invalid(invalid)) => {
            mistake(StatusCode::BAD_REQUEST, &invalid.to_string())
        }
        _ => unavailable(),
    }
}

fn unavailable() -> Response<Body> {
    let detail = "The rate limiter has no answer. Try again in 1 second.";
    let mut response = mistake(StatusCode::SERVICE_UNAVAILABLE, detail);
    response.headers_mut().insert(header::RETRY_AFTER, HeaderValue::from_static("1"));
    response.headers_mut().insert(header::CACHE_CONTROL, NO_STORE);
    response
}

/// A response with JSON that is not a decision.
pub(crate) fn json(body: impl Into<Body>) -> Response<Body> {
    let mut response = Response::new(body.into());
    response.headers_mut().insert(header::CONTENT_TYPE, JSON);
    response
}

/// The decision with the members of a problem before it.
fn problem(decision: &[u8], reason: denial::DenialReason, violated: &[String]) -> Vec<u8> {
    let mut body = Vec::with_capacity(decision.len() + 256);
    for part in
        [r#"{"type":""#, reason.problem_type(), r#"","title":""#, reason.title(), r#"","status":"#]
    {
        body.extend_from_slice(part.as_bytes());
    }
    digits::push(&mut body, reason.status().into());
    body.extend_from_slice(br#","violated-policies":["#);
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

/// Writes `"cost":1,"op":"check"`, after a comma if `before` is one.
fn begin(out: &mut Vec<u8>, before: u8, check_request: &CheckRequest, op: &str) {
    if before == b',' {
        out.push(before);
    }
    out.extend_from_slice(b"\"cost\":");
    digits::push(out, check_request.cost);
    out.extend_from_slice(b",\"op\":\"");
    out.extend_from_slice(op.as_bytes());
    out.push(b'"');
}

/// Writes the members of every response, in their order. If `ever` is false, there is no time to
/// retry.
fn numbers(out: &mut Vec<u8>, allowed: bool, ever: bool, verdict: &Verdict) {
    out.extend_from_slice(if allowed {
        b"\"allowed\":true,\"granted\":"
    } else {
        b"\"allowed\":false,\"granted\":"
    });
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

/// Writes every charge: its rule, if it has one, its limit and its cost.
fn charges<'a>(
    out: &mut Vec<u8>,
    charges: impl Iterator<Item = (Option<&'a str>, &'a str, u64)>,
    decision: &Decision,
) {
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

fn end(out: &mut Vec<u8>, check_request: &CheckRequest, decision: Option<&Decision>) {
    if let Some(id) = check_request.id {
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
    let text =
        if draft == Draft::Seven { headers::policy_draft_7(named) } else { headers::policy(named) };
    HeaderValue::try_from(text).ok()
}

/// The headers of a decision whose charges have these names, `Retry-After` on a denial, and, for
/// callers of the check API, whether the decision is a fallback.
fn headers_of<'a>(
    decision: &Decision,
    families: HeaderFamilies,
    policy: impl FnOnce(Draft) -> Option<HeaderValue>,
    named: impl Iterator<Item = (&'a str, &'a Verdict)> + Clone,
) -> HeaderMap {
    let mut headers = HeaderMap::with_capacity(MOST);
    each(decision, families, policy, named, |name, value| _ = headers.insert(name, value));
    if decision.source() == Source::Fallback {
        headers.insert(MODE, FALLBACK);
    }
    headers
}

fn each<'a>(
    decision: &Decision,
    families: HeaderFamilies,
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
        let state = if draft == Draft::Seven {
            headers::rate_limit_draft_7(verdict)
        } else {
            headers::rate_limit(named.clone())
        };
        put(RATE_LIMIT, HeaderValue::try_from(state).ok());
    }
    if families.github {
        put(LIMIT, Some(verdict.amount.into()));
        put(REMAINING, Some(verdict.remaining.into()));
        put(USED, Some((verdict.amount - verdict.remaining.min(verdict.amount)).into()));
        put(RESET, Some(headers::reset_epoch_secs(decision).into()));
        let binding = named.map(|(name, _)| name).nth(decision.binding_index());
        put(
            RESOURCE,
            binding.and_then(|name| HeaderValue::try_from(headers::visible(name).as_ref()).ok()),
        );
    }
    put(header::RETRY_AFTER, headers::retry_after_secs(decision).map(Into::into));
}

/// The names of the limits that deny.
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
