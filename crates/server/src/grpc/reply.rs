//! Writes verdicts as responses of Envoy's protocol.

use prost_types::value::Kind;
use prost_types::{Duration, ListValue, Struct, Value};
use tidegate::http::denial::{DenialFormat, DenialReason, DenialResponse, DenyStatus};
use tidegate::http::headers::{self, HeaderFamilies};
use tidegate::{Decision, Limit, Retry, Timestamp};

use super::decide::{DrawnBudget, RequestBudgets, binds_more};
use super::message::{Code, CurrentLimit, DescriptorStatus, HeaderValue, RateLimitResponse};
use crate::rules::Budget;
use crate::rules::envoy::{EnvoyOptions, Unit};
use crate::ruling::Ruling;

/// The header that Envoy adds if this node decided in place of the store.
const MODE: &str = "x-tidegate-mode";
const SECOND_US: u64 = 1_000_000;

/// The response to a request. `deny_status` is the status over HTTP of denials by rules with
/// `limit: deny` that have none of their own.
pub(super) fn of(
    request_budgets: &RequestBudgets,
    over: bool,
    options: &EnvoyOptions,
    deny_status: impl FnOnce() -> DenyStatus,
) -> RateLimitResponse {
    let statuses = request_budgets.lines.iter().map(|line| {
        let drawn = line.iter().map(|index| &request_budgets.budgets[*index]);
        drawn.reduce(|best, next| if binds_before(next, best) { next } else { best }).map_or_else(
            || DescriptorStatus { code: Code::Ok.into(), ..DescriptorStatus::default() },
            status,
        )
    });
    let mut response = RateLimitResponse {
        overall_code: code(over),
        statuses: statuses.collect(),
        dynamic_metadata: metadata(request_budgets, deny_status),
        ..RateLimitResponse::default()
    };
    if request_budgets.degraded {
        // For the service behind Envoy, not for its client.
        response.request_headers_to_add.push(header(MODE, "fallback".into()));
    }
    let reply =
        over.then(|| denial(request_budgets, options.headers.unwrap_or(HeaderFamilies::NONE)));
    if let (Some(reply), Some(_)) = (&reply, options.headers) {
        let headers = reply.headers().iter();
        response
            .response_headers_to_add
            .extend(headers.map(|(name, value)| header(name, value.clone())));
    } else if let Some(families) = options.headers
        && let Some(ruling) = &request_budgets.ruling
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

/// The denial for a client of Envoy: which policies deny, and when to retry. Envoy always answers
/// 429; the metadata has the status of a rule with `limit: deny`.
fn denial(request_budgets: &RequestBudgets, families: HeaderFamilies) -> DenialResponse {
    if let Some(ruling) =
        request_budgets.ruling.as_ref().filter(|ruling| ruling.refused_by.is_none())
        && let Some(decision) = ruling.decision.as_ref().filter(|decision| !decision.allowed())
    {
        return DenialResponse::of(decision, &limits_of(ruling), families);
    }
    let denying: Vec<&DrawnBudget> =
        request_budgets.budgets.iter().filter(|drawn| drawn.denies()).collect();
    let reason = if denying.iter().any(|drawn| drawn.found.budget == Budget::Deny) {
        DenialReason::Rule(DenyStatus::TooManyRequests)
    } else {
        let verdicts = denying
            .iter()
            .filter_map(|drawn| drawn.verdict.limit.map(|(_, verdict)| verdict))
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

/// Whether `one` is reported before `other`: a denial first, then an enforced rule, then the least
/// that is left.
fn binds_before(one: &DrawnBudget, other: &DrawnBudget) -> bool {
    let rank = |drawn: &DrawnBudget| (drawn.denies(), !drawn.shadow(), !is_unlimited(drawn));
    match (&one.verdict.limit, &other.verdict.limit) {
        (Some((_, own)), Some((_, others))) if rank(one) == rank(other) => binds_more(own, others),
        (own, others) if rank(one) == rank(other) => {
            own.is_some() && others.is_none() && !other.verdict.over
        }
        _ => rank(one) > rank(other),
    }
}

fn is_unlimited(drawn: &DrawnBudget) -> bool {
    matches!(drawn.found.budget, Budget::Unlimited | Budget::Exempt)
}

fn status(drawn: &DrawnBudget) -> DescriptorStatus {
    let mut status = DescriptorStatus { code: code(drawn.denies()), ..DescriptorStatus::default() };
    if is_unlimited(drawn) {
        status.limit_remaining = u32::MAX;
        return status;
    }
    // Envoy copies the limit into headers for clients, so rules in shadow mode have none.
    // Descriptors of Envoy's own configuration are filled as envoyproxy/ratelimit does.
    if drawn.shadow() && drawn.limited.is_none() {
        return status;
    }
    let name = drawn.name.to_string();
    let stated = drawn.stated.map(|(requests, unit)| (requests, Some(unit)));
    let (requests_per_unit, unit) = match (stated, &drawn.verdict.limit) {
        (Some(stated), _) => stated,
        (None, Some((limit, verdict))) => (short(verdict.amount), Unit::of(limit)),
        (None, None) => (0, None),
    };
    status.current_limit =
        Some(CurrentLimit { requests_per_unit, unit: unit.map_or(0, |unit| unit as i32), name });
    match &drawn.verdict.limit {
        Some((_, verdict)) => {
            status.limit_remaining = if drawn.verdict.over { 0 } else { short(verdict.remaining) };
            // Envoy truncates to seconds; rounded up, a client that waits this long is not too
            // early.
            let wait_us = match verdict.retry {
                Retry::After(micros) if drawn.verdict.over => micros,
                _ => verdict.reset_after_us,
            };
            status.duration_until_reset = Some(seconds(wait_us.div_ceil(SECOND_US)));
        }
        // No request is ever allowed, so any unit fits.
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

/// The dynamic metadata for later filters: denials by limits in shadow mode, exhausted quotas,
/// metadata of allowed descriptors, whether the decision is a fallback, and the status of a rule
/// with `limit: deny`. `None` if there is nothing to report.
fn metadata(
    request_budgets: &RequestBudgets,
    deny_status: impl FnOnce() -> DenyStatus,
) -> Option<Struct> {
    let mut fields = Struct::default();
    let mut put = |name: &str, value: Value| {
        fields.fields.insert(name.into(), value);
    };
    let shadows =
        request_budgets.budgets.iter().filter(|drawn| drawn.shadow() && drawn.verdict.over);
    let shadows: Vec<Value> = shadows.map(|drawn| text(&drawn.found.rule.name)).collect();
    if !shadows.is_empty() {
        put("shadow", list(shadows));
    }
    if request_budgets.degraded {
        put("degraded", Value { kind: Some(Kind::BoolValue(true)) });
        put("source", Value { kind: Some(Kind::StringValue("fallback".into())) });
    }
    if let Some(warning) = &request_budgets.warning {
        put("warning", text(warning));
    }
    // A descriptor with `requests_per_unit: 0` is over its limit, as in envoyproxy/ratelimit.
    let is_deny = |drawn: &&DrawnBudget| {
        drawn.found.budget == Budget::Deny && drawn.stated.is_none() && drawn.denies()
    };
    if let Some(drawn) = request_budgets.budgets.iter().find(is_deny) {
        let status = drawn.found.rule.deny_status.unwrap_or_else(deny_status);
        put("deny_status", number(status.code().into()));
    }
    if request_budgets.budgets.iter().any(DrawnBudget::quota) {
        let used_up = |line: &&Vec<usize>| {
            line.iter().any(|index| {
                request_budgets.budgets[*index].quota()
                    && request_budgets.budgets[*index].verdict.over
            })
        };
        let lines = request_budgets.lines.iter().enumerate().filter(|(_, line)| used_up(line));
        put("quotaModeEnabled", Value { kind: Some(Kind::BoolValue(true)) });
        put("quotaModeViolations", list(lines.map(|(at, _)| number(at)).collect()));
    }
    // Under a key of its own, as in envoyproxy/ratelimit, so that metadata of a descriptor cannot
    // pass for that of the server.
    let mut passed = Struct::default();
    for drawn in request_budgets
        .lines
        .iter()
        .flatten()
        .map(|index| &request_budgets.budgets[*index])
        .filter(|drawn| !drawn.verdict.over)
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
