//! What was said about budgets, in Envoy's words.

use std::sync::Arc;

use prost_types::value::Kind;
use prost_types::{Duration, ListValue, Struct, Value};
use tidegate::{Limit, Retry, headers};

use super::decide::{Asked, Drawn, binds_more};
use super::message::{Code, CurrentLimit, DescriptorStatus, HeaderValue, RateLimitResponse};
use crate::rules::Budget;
use crate::rules::envoy::{Terms, Unit};

/// What Envoy is told to add when the answer is not the store's.
const MODE: &str = "x-tidegate-mode";
const SECOND_US: u64 = 1_000_000;

/// The answer to a request.
pub(super) fn of(asked: &Asked, over: bool, terms: &Terms) -> RateLimitResponse {
    let statuses = asked.lines.iter().map(|line| {
        let drawn = line.iter().map(|index| &asked.budgets[*index]);
        drawn
            .reduce(|best, next| if speaks_before(next, best) { next } else { best })
            .map_or_else(|| DescriptorStatus { code: Code::Ok.into(), ..DescriptorStatus::default() }, status)
    });
    let mut response = RateLimitResponse {
        overall_code: code(over),
        statuses: statuses.collect(),
        dynamic_metadata: metadata(asked),
        ..RateLimitResponse::default()
    };
    if asked.degraded {
        response.response_headers_to_add.push(header(MODE, "fallback".into()));
        response.request_headers_to_add.push(header(MODE, "fallback".into()));
    }
    if let Some(families) = terms.headers
        && let Some(ruling) = &asked.ruling
        && let Some(decision) = &ruling.decision
    {
        let limits: Vec<(&str, &Limit)> =
            ruling.charges.iter().map(|charged| (&*charged.rule.name, &charged.limit)).collect();
        let headers = headers::of(decision, &limits, families).into_iter();
        response.response_headers_to_add.extend(headers.map(|(name, value)| header(name, value)));
    }
    if over && terms.body {
        response.response_headers_to_add.push(header("content-type", "application/problem+json".into()));
        let denied = asked.budgets.iter().filter(|drawn| drawn.denies());
        let denied: Vec<&str> = denied.map(|drawn| &*drawn.found.rule.name).collect();
        response.raw_body = serde_json::json!({
            "type": "https://iana.org/assignments/http-problem-types#quota-exceeded",
            "title": "Request cannot be satisfied as assigned quota has been exceeded",
            "status": 429,
            "violated-policies": denied,
        })
        .to_string()
        .into_bytes();
    }
    response
}

fn code(over: bool) -> i32 {
    if over { Code::OverLimit.into() } else { Code::Ok.into() }
}

/// Which of two budgets of one descriptor the answer is about: what denies, then what is enforced, then what has the least left.
fn speaks_before(one: &Drawn, other: &Drawn) -> bool {
    let rank = |drawn: &Drawn| (drawn.denies(), !drawn.shadow(), drawn.found.budget != Budget::Unlimited);
    match (&one.told.limit, &other.told.limit) {
        (Some((_, own)), Some((_, others))) if rank(one) == rank(other) => binds_more(own, others),
        (own, others) if rank(one) == rank(other) => own.is_some() && others.is_none() && !other.told.over,
        _ => rank(one) > rank(other),
    }
}

fn status(drawn: &Drawn) -> DescriptorStatus {
    let mut status = DescriptorStatus { code: code(drawn.denies()), ..DescriptorStatus::default() };
    if drawn.found.budget == Budget::Unlimited {
        status.limit_remaining = u32::MAX;
        return status;
    }
    let name = drawn.name.to_string();
    let stated = drawn.stated.map(|(requests, unit)| (requests, Some(unit)));
    let (requests_per_unit, unit) = match (stated, &drawn.told.limit) {
        (Some(stated), _) => stated,
        (None, Some((limit, verdict))) => (short(verdict.amount), Unit::of(limit)),
        (None, None) => (0, None),
    };
    status.current_limit = Some(CurrentLimit { requests_per_unit, unit: unit.map_or(0, |unit| unit as i32), name });
    match &drawn.told.limit {
        Some((_, verdict)) => {
            status.limit_remaining = if drawn.told.over { 0 } else { short(verdict.remaining) };
            // Envoy shows whole seconds and cuts off the rest; rounded up, whoever believes it is not too early.
            let wait_us = match verdict.retry {
                Retry::After(micros) if drawn.told.over => micros,
                _ => verdict.reset_after_us,
            };
            status.duration_until_reset = Some(seconds(wait_us.div_ceil(SECOND_US)));
        }
        // Nothing ever passes, in this unit of time or another.
        None => status.duration_until_reset = unit.map(|unit| seconds(unit.period().as_micros() / SECOND_US)),
    }
    status
}

fn short(number: u64) -> u32 {
    u32::try_from(number).unwrap_or(u32::MAX)
}

fn seconds(seconds: u64) -> Duration {
    Duration { seconds: i64::try_from(seconds).unwrap_or(i64::MAX), nanos: 0 }
}

fn header(name: &str, value: String) -> HeaderValue {
    HeaderValue { key: name.to_ascii_lowercase(), value, raw_value: Vec::new() }
}

/// What filters after this one may want to know: what limits in shadow mode would have denied, which quotas are used up, what descriptors with something left have to say, and
/// whether the answer is not the store's. Nothing, most of the time.
fn metadata(asked: &Asked) -> Option<Struct> {
    let mut fields = Struct::default();
    let mut put = |name: &str, value: Value| {
        // Of descriptors that say the same thing differently, the first is heard.
        fields.fields.entry(name.into()).or_insert(value);
    };
    let shadows = asked.budgets.iter().filter(|drawn| drawn.shadow() && drawn.told.over);
    let shadows: Vec<Value> = shadows.map(|drawn| text(&drawn.found.rule.name)).collect();
    if !shadows.is_empty() {
        put("shadow", list(shadows));
    }
    if asked.degraded {
        put("degraded", Value { kind: Some(Kind::BoolValue(true)) });
        put("source", Value { kind: Some(Kind::StringValue("fallback".into())) });
    }
    if asked.budgets.iter().any(Drawn::quota) {
        let used_up = |line: &&Vec<usize>| {
            line.iter().any(|index| asked.budgets[*index].quota() && asked.budgets[*index].told.over)
        };
        let lines = asked.lines.iter().enumerate().filter(|(_, line)| used_up(line));
        put("quotaModeEnabled", Value { kind: Some(Kind::BoolValue(true)) });
        put("quotaModeViolations", list(lines.map(|(at, _)| number(at)).collect()));
    }
    for drawn in asked.lines.iter().flatten().map(|index| &asked.budgets[*index]).filter(|drawn| !drawn.told.over) {
        for (name, value) in drawn.limited.iter().filter_map(|limited| limited.metadata.as_ref()).flatten() {
            put(name, value_of(value));
        }
    }
    (!fields.fields.is_empty()).then_some(fields)
}

fn text(text: &Arc<str>) -> Value {
    Value { kind: Some(Kind::StringValue(text.to_string())) }
}

fn number(number: usize) -> Value {
    Value { kind: Some(Kind::NumberValue(f64::from(u32::try_from(number).unwrap_or(u32::MAX)))) }
}

fn list(values: Vec<Value>) -> Value {
    Value { kind: Some(Kind::ListValue(ListValue { values })) }
}

/// JSON as protobuf has it.
fn value_of(json: &serde_json::Value) -> Value {
    use serde_json::Value as Json;
    let kind = match json {
        Json::Null => Kind::NullValue(0),
        Json::Bool(truth) => Kind::BoolValue(*truth),
        Json::Number(number) => Kind::NumberValue(number.as_f64().unwrap_or(f64::NAN)),
        Json::String(text) => Kind::StringValue(text.clone()),
        Json::Array(items) => Kind::ListValue(ListValue { values: items.iter().map(value_of).collect() }),
        Json::Object(members) => {
            let fields = members.iter().map(|(name, value)| (name.clone(), value_of(value))).collect();
            Kind::StructValue(Struct { fields })
        }
    };
    Value { kind: Some(kind) }
}
