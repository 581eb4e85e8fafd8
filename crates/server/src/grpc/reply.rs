//! What was said about budgets, in Envoy's words.

use prost_types::value::Kind;
use prost_types::{Duration, ListValue, Struct, Value};
use tidegate::http::denial::{DenialFormat, DenialReason, DenialResponse, DenyStatus};
use tidegate::http::headers::{self, HeaderFamilies};
use tidegate::{Decision, Limit, Retry, Timestamp};

use super::decide::{Asked, Drawn, binds_more};
use super::message::{Code, CurrentLimit, DescriptorStatus, HeaderValue, RateLimitResponse};
use crate::rules::Budget;
use crate::rules::envoy::{EnvoyOptions, Unit};
use crate::ruling::Ruling;

/// What Envoy is told to add when the answer is not the store's.
const MODE: &str = "x-tidegate-mode";
const SECOND_US: u64 = 1_000_000;

/// The answer to a request. `deny_status` is what rules that let nothing pass answer with over
/// HTTP, unless they say otherwise.
pub(super) fn of(
    asked: &Asked,
    over: bool,
    options: &EnvoyOptions,
    deny_status: impl FnOnce() -> DenyStatus,
) -> RateLimitResponse {
    let statuses = asked.lines.iter().map(|line| {
        let drawn = line.iter().map(|index| &asked.budgets[*index]);
        drawn.reduce(|best, next| if speaks_before(next, best) { next } else { best }).map_or_else(
            || DescriptorStatus { code: Code::Ok.into(), ..DescriptorStatus::default() },
            status,
        )
    });
    let mut response = RateLimitResponse {
        overall_code: code(over),
        statuses: statuses.collect(),
        dynamic_metadata: metadata(asked, deny_status),
        ..RateLimitResponse::default()
    };
    if asked.degraded {
        // For the service behind Envoy; its client need not know.
        response.request_headers_to_add.push(header(MODE, "fallback".into()));
    }
    let reply = over.then(|| denial(asked, options.headers.unwrap_or(HeaderFamilies::NONE)));
    if let (Some(reply), Some(_)) = (&reply, options.headers) {
        let headers = reply.headers().iter();
        response
            .response_headers_to_add
            .extend(headers.map(|(name, value)| header(name, value.clone())));
    } else if let Some(families) = options.headers
        && let Some(ruling) = &asked.ruling
        && let Some(decision) = &ruling.decision
    {
        let headers = headers::of(decision, &limits_of(ruling), families).into_iter();
        response.response_headers_to_add.extend(headers.map(|(name, value)| header(name, value)));
    }
    if let (Some(reply), true) = (&reply, options.body) {
        let form = DenialFormat::Problem;
        response.response_headers_to_add.push(header("content-type", form.content_type().into()));
        response.raw_body = reply.body(form).into_bytes();
    }
    response
}

/// What a client of Envoy is told whose request is denied: which policies denied, and when to try
/// again. Envoy answers 429 whatever it was; the metadata has the status of a rule that lets
/// nothing pass.
fn denial(asked: &Asked, families: HeaderFamilies) -> DenialResponse {
    if let Some(ruling) = asked.ruling.as_ref().filter(|ruling| ruling.refused_by.is_none())
        && let Some(decision) = ruling.decision.as_ref().filter(|decision| !decision.allowed())
    {
        return DenialResponse::of(decision, &limits_of(ruling), families);
    }
    let denying: Vec<&Drawn> = asked.budgets.iter().filter(|drawn| drawn.denies()).collect();
    let reason = if denying.iter().any(|drawn| drawn.found.budget == Budget::Deny) {
        DenialReason::Rule(DenyStatus::TooManyRequests)
    } else {
        let verdicts = denying
            .iter()
            .filter_map(|drawn| drawn.told.limit.map(|(_, verdict)| verdict))
            .collect();
        let decision = Decision::of_many(verdicts, false, Timestamp::EPOCH);
        DenialReason::Quota { retry_after_secs: headers::retry_after_secs(&decision) }
    };
    DenialResponse::new(reason, denying.iter().map(|drawn| &*drawn.found.rule.name))
}

fn limits_of(ruling: &Ruling) -> Vec<(&str, &Limit)> {
    ruling.charges.iter().map(|charged| (&*charged.rule.name, &charged.limit)).collect()
}

fn code(over: bool) -> i32 {
    if over { Code::OverLimit.into() } else { Code::Ok.into() }
}

/// Which of two budgets of one descriptor the answer is about: what denies, then what is enforced,
/// then what has the least left.
fn speaks_before(one: &Drawn, other: &Drawn) -> bool {
    let rank = |drawn: &Drawn| (drawn.denies(), !drawn.shadow(), !is_unlimited(drawn));
    match (&one.told.limit, &other.told.limit) {
        (Some((_, own)), Some((_, others))) if rank(one) == rank(other) => binds_more(own, others),
        (own, others) if rank(one) == rank(other) => {
            own.is_some() && others.is_none() && !other.told.over
        }
        _ => rank(one) > rank(other),
    }
}

fn is_unlimited(drawn: &Drawn) -> bool {
    matches!(drawn.found.budget, Budget::Unlimited | Budget::Exempt)
}

fn status(drawn: &Drawn) -> DescriptorStatus {
    let mut status = DescriptorStatus { code: code(drawn.denies()), ..DescriptorStatus::default() };
    if is_unlimited(drawn) {
        status.limit_remaining = u32::MAX;
        return status;
    }
    // Envoy copies the limit into headers for clients, which must not see rules in shadow mode.
    // Descriptors of Envoy's own configuration are filled as envoyproxy/ratelimit fills them.
    if drawn.shadow() && drawn.limited.is_none() {
        return status;
    }
    let name = drawn.name.to_string();
    let stated = drawn.stated.map(|(requests, unit)| (requests, Some(unit)));
    let (requests_per_unit, unit) = match (stated, &drawn.told.limit) {
        (Some(stated), _) => stated,
        (None, Some((limit, verdict))) => (short(verdict.amount), Unit::of(limit)),
        (None, None) => (0, None),
    };
    status.current_limit =
        Some(CurrentLimit { requests_per_unit, unit: unit.map_or(0, |unit| unit as i32), name });
    match &drawn.told.limit {
        Some((_, verdict)) => {
            status.limit_remaining = if drawn.told.over { 0 } else { short(verdict.remaining) };
            // Envoy shows whole seconds and cuts off the rest; rounded up, whoever believes it is
            // not too early.
            let wait_us = match verdict.retry {
                Retry::After(micros) if drawn.told.over => micros,
                _ => verdict.reset_after_us,
            };
            status.duration_until_reset = Some(seconds(wait_us.div_ceil(SECOND_US)));
        }
        // Nothing ever passes, in this unit of time or another.
        None => {
            status.duration_until_reset =
                unit.map(|unit| seconds(unit.period().as_micros() / SECOND_US))
        }
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

/// What filters after this one may want to know: what limits in shadow mode would have denied,
/// which quotas are used up, what descriptors with something left have to say, whether the answer
/// is not the store's, and the status of a rule that lets nothing pass. Nothing, most of the time.
fn metadata(asked: &Asked, deny_status: impl FnOnce() -> DenyStatus) -> Option<Struct> {
    let mut fields = Struct::default();
    let mut put = |name: &str, value: Value| {
        fields.fields.insert(name.into(), value);
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
    if let Some(warning) = &asked.warning {
        put("warning", text(warning));
    }
    // What Envoy's own configuration never lets pass (`requests_per_unit: 0`) is over its limit, as
    // there.
    let is_deny = |drawn: &&Drawn| {
        drawn.found.budget == Budget::Deny && drawn.stated.is_none() && drawn.denies()
    };
    if let Some(drawn) = asked.budgets.iter().find(is_deny) {
        let status = drawn.found.rule.deny_status.unwrap_or_else(deny_status);
        put("deny_status", number(status.code().into()));
    }
    if asked.budgets.iter().any(Drawn::quota) {
        let used_up = |line: &&Vec<usize>| {
            line.iter()
                .any(|index| asked.budgets[*index].quota() && asked.budgets[*index].told.over)
        };
        let lines = asked.lines.iter().enumerate().filter(|(_, line)| used_up(line));
        put("quotaModeEnabled", Value { kind: Some(Kind::BoolValue(true)) });
        put("quotaModeViolations", list(lines.map(|(at, _)| number(at)).collect()));
    }
    // Under a key of its own, as in envoyproxy/ratelimit: a descriptor cannot pass for what the
    // server says.
    let mut passed = Struct::default();
    for drawn in asked
        .lines
        .iter()
        .flatten()
        .map(|index| &asked.budgets[*index])
        .filter(|drawn| !drawn.told.over)
    {
        for own in drawn.limited.iter().filter_map(|limited| limited.metadata.as_ref()) {
            merge(&mut passed, own);
        }
    }
    if !passed.fields.is_empty() {
        put("metadata", Value { kind: Some(Kind::StructValue(passed)) });
    }
    (!fields.fields.is_empty()).then_some(fields)
}

/// Adds the metadata of a descriptor to that of the descriptors before it. Objects of the same name
/// are merged; otherwise the first value stays.
fn merge(into: &mut Struct, own: &serde_json::Map<String, serde_json::Value>) {
    for (name, value) in own {
        match (into.fields.get_mut(name), value) {
            (None, value) => drop(into.fields.insert(name.clone(), value_of(value))),
            (
                Some(Value { kind: Some(Kind::StructValue(before)) }),
                serde_json::Value::Object(own),
            ) => {
                merge(before, own);
            }
            (Some(_), _) => {}
        }
    }
}

fn text(text: &str) -> Value {
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
        Json::Array(items) => {
            Kind::ListValue(ListValue { values: items.iter().map(value_of).collect() })
        }
        Json::Object(members) => {
            let fields =
                members.iter().map(|(name, value)| (name.clone(), value_of(value))).collect();
            Kind::StructValue(Struct { fields })
        }
    };
    Value { kind: Some(kind) }
}
