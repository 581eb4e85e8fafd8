//! Decisions into JSON, headers and status.

use std::io::Write;

use axum::body::Body;
use axum::http::{HeaderName, HeaderValue, Response, StatusCode, header};
use tidegate::headers::{self, Families};
use tidegate::{Check, Decision, Limit, Verdict};

use super::request::{About, Question};
use crate::gate::Ruling;

/// What was decided about one question, ready to be written.
#[derive(Debug)]
pub(crate) struct Answer {
    pub(crate) allowed: bool,
    json: Vec<u8>,
    headers: Vec<(&'static str, String)>,
    violated: Vec<String>,
}

impl Answer {
    /// The answer to a question about a key.
    pub(crate) fn of_key(question: &Question, op: &str, check: &Check<'_>, decision: &Decision) -> Answer {
        let About::Key { key, text, .. } = &question.about else { return Answer::nothing(op, question.cost, true) };
        let mut json = Vec::with_capacity(512);
        let (key, limit) = (string(key), string(text));
        let (t_us, cost) = (decision.at().as_micros(), question.cost);
        let _ = write!(json, r#"{{"t_us":{t_us},"key":{key},"cost":{cost},"op":"{op}","limit":{limit},"#);
        numbers(&mut json, decision.allowed(), decision.binding());
        let names: Vec<String> = check.charges().iter().map(|charge| charge.limit.to_string()).collect();
        let charges =
            check.charges().iter().zip(&names).map(|(charge, name)| (None, name.as_str(), &charge.limit, charge.cost));
        write_charges(&mut json, charges, decision);
        finish(&mut json, question, decision);
        let limits: Vec<(&str, &Limit)> =
            names.iter().map(String::as_str).zip(check.charges().iter().map(|charge| &charge.limit)).collect();
        Answer::with(json, decision, &limits)
    }

    /// The answer to a question about attributes.
    pub(crate) fn of_rules(question: &Question, op: &str, ruling: &Ruling) -> Answer {
        let Some(decision) = &ruling.decision else {
            let mut answer = Answer::nothing(op, question.cost, ruling.allowed);
            answer.violated.extend(ruling.refused_by.iter().map(|rule| rule.name.to_string()));
            return answer;
        };
        let mut json = Vec::with_capacity(512);
        let (t_us, cost) = (decision.at().as_micros(), question.cost);
        let _ = write!(json, r#"{{"t_us":{t_us},"cost":{cost},"op":"{op}","#);
        if let Some((charge, _)) = ruling.binding() {
            let _ =
                write!(json, r#""rule":{},"limit":{},"#, string(&charge.rule.name), string(&charge.limit.to_string()));
        }
        numbers(&mut json, ruling.allowed, decision.binding());
        let texts: Vec<String> = ruling.charges.iter().map(|charge| charge.limit.to_string()).collect();
        let charges = ruling.charges.iter().zip(&texts);
        let charges =
            charges.map(|(charge, text)| (Some(&*charge.rule.name), text.as_str(), &charge.limit, charge.cost));
        write_charges(&mut json, charges, decision);
        if !ruling.shadow.is_empty() {
            json.extend_from_slice(br#","shadow":["#);
            for (at, shadowed) in ruling.shadow.iter().enumerate() {
                let comma = if at > 0 { "," } else { "" };
                let (rule, allowed) = (string(&shadowed.rule.name), shadowed.allowed);
                let _ = write!(json, r#"{comma}{{"rule":{rule},"allowed":{allowed}}}"#);
            }
            json.push(b']');
        }
        finish(&mut json, question, decision);
        let named = ruling.charges.iter().map(|charge| (&*charge.rule.name, &charge.limit));
        let mut answer = Answer::with(json, decision, &named.collect::<Vec<_>>());
        answer.allowed = ruling.allowed;
        answer.violated.extend(ruling.refused_by.iter().map(|rule| rule.name.to_string()));
        answer
    }

    fn with(json: Vec<u8>, decision: &Decision, limits: &[(&str, &Limit)]) -> Answer {
        let denied = decision.charges().iter().zip(limits).filter(|(verdict, _)| !verdict.allowed);
        let violated =
            if decision.allowed() { Vec::new() } else { denied.map(|(_, (name, _))| (*name).into()).collect() };
        Answer { allowed: decision.allowed(), json, headers: headers::of(decision, limits, Families::ALL), violated }
    }

    /// No limit was asked.
    fn nothing(op: &str, cost: u64, allowed: bool) -> Answer {
        let json = format!(r#"{{"cost":{cost},"op":"{op}","allowed":{allowed},"charges":[]}}"#).into_bytes();
        Answer { allowed, json, headers: Vec::new(), violated: Vec::new() }
    }

    pub(crate) fn json(&self) -> &[u8] {
        &self.json
    }

    /// 200 with the decision, or 429 with the problem and the decision in it.
    pub(crate) fn into_response(self) -> Response<Body> {
        let (status, kind, body) = if self.allowed {
            (StatusCode::OK, "application/json", self.json)
        } else {
            (StatusCode::TOO_MANY_REQUESTS, "application/problem+json", problem(&self.json, &self.violated))
        };
        let mut response = Response::new(Body::from(body));
        *response.status_mut() = status;
        let headers = response.headers_mut();
        headers.insert(header::CONTENT_TYPE, HeaderValue::from_static(kind));
        headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-store"));
        for (name, value) in self.headers {
            if let (Ok(name), Ok(value)) = (HeaderName::try_from(name), HeaderValue::try_from(value)) {
                headers.insert(name, value);
            }
        }
        response
    }
}

/// The decision with what makes it a problem before it.
fn problem(decision: &[u8], violated: &[String]) -> Vec<u8> {
    let violated: Vec<String> = violated.iter().map(|name| string(name)).collect();
    let mut body = format!(
        r#"{{"type":"https://iana.org/assignments/http-problem-types#quota-exceeded","title":"Request cannot be satisfied as assigned quota has been exceeded","status":429,"violated-policies":[{}],"#,
        violated.join(",")
    )
    .into_bytes();
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
    response.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static("application/problem+json"));
    response
}

/// The members every answer has, in the order every JSON answer has them.
fn numbers(out: &mut Vec<u8>, allowed: bool, verdict: &Verdict) {
    let Verdict { granted, remaining, reset_after_us, next_after_us, .. } = verdict;
    let _ = write!(out, r#""allowed":{allowed},"granted":{granted},"remaining":{remaining}"#);
    match verdict.retry.micros() {
        Some(micros) => _ = write!(out, r#","retry_after_us":{micros}"#),
        None => out.extend_from_slice(br#","retry_after_us":null"#),
    }
    let _ = write!(out, r#","reset_after_us":{reset_after_us},"next_after_us":{next_after_us}"#);
}

fn write_charges<'a>(
    out: &mut Vec<u8>,
    charges: impl Iterator<Item = (Option<&'a str>, &'a str, &'a Limit, u64)>,
    decision: &Decision,
) {
    out.extend_from_slice(br#","charges":["#);
    for (at, ((rule, text, _, cost), verdict)) in charges.zip(decision.charges()).enumerate() {
        out.extend_from_slice(if at > 0 { b",{" } else { b"{" });
        if let Some(rule) = rule {
            let _ = write!(out, r#""rule":{},"#, string(rule));
        }
        let (limit, amount, binding) = (string(text), verdict.amount, at == decision.binding_index());
        let _ = write!(out, r#""limit":{limit},"amount":{amount},"cost":{cost},"binding":{binding},"#);
        numbers(out, verdict.allowed, verdict);
        out.push(b'}');
    }
    out.push(b']');
}

fn finish(out: &mut Vec<u8>, question: &Question, decision: &Decision) {
    if let Some(id) = question.id {
        let _ = write!(out, r#","id":{}"#, id.0);
    }
    let _ = write!(out, r#","source":"{}"}}"#, decision.source().name());
}

/// Text as a JSON string.
pub(crate) fn string(text: &str) -> String {
    serde_json::Value::from(text).to_string()
}
