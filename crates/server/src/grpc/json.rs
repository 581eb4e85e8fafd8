//! The same service as JSON over HTTP, as envoyproxy/ratelimit has it at `/json`: protobuf's own
//! mapping to JSON, both ways.

use std::fmt;

use axum::http::StatusCode;
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use prost_types::value::Kind;
use serde::de::{Deserializer, Error, Visitor};
use serde::{Deserialize, de};
use serde_json::{Map, Value, json};

use super::message::{
    Code, Descriptor, DescriptorStatus, Entry, HeaderValue, Override, RateLimitRequest,
    RateLimitResponse, UnitNumber,
};
use super::{Problem, decide};
use crate::engine::Engine;

/// Answers a body: the status, and the body of the answer.
pub(crate) async fn answer(engine: &Engine, body: &[u8]) -> (StatusCode, String) {
    let said = match read(body) {
        Ok(request) => decide::decide(engine, &request).await,
        Err(problem) => Err(problem),
    };
    match said {
        Ok(response) if response.overall_code == i32::from(Code::OverLimit) => {
            (StatusCode::TOO_MANY_REQUESTS, write(&response).to_string())
        }
        Ok(response) => (StatusCode::OK, write(&response).to_string()),
        Err(problem) => {
            let status = if problem.is_mistake() {
                StatusCode::BAD_REQUEST
            } else {
                StatusCode::INTERNAL_SERVER_ERROR
            };
            let error = tonic::Status::from(problem);
            (
                status,
                json!({"code": i32::from(error.code()), "message": error.message()}).to_string(),
            )
        }
    }
}

fn read(body: &[u8]) -> Result<RateLimitRequest, Problem> {
    let read: RequestJson = serde_json::from_slice(body)
        .map_err(|error| Problem::Invalid(format!("the body is not as expected: {error}")))?;
    let descriptors =
        read.descriptors.unwrap_or_default().into_iter().map(|descriptor| Descriptor {
            entries: descriptor
                .entries
                .unwrap_or_default()
                .into_iter()
                .map(|entry| Entry {
                    key: entry.key.unwrap_or_default(),
                    value: entry.value.unwrap_or_default(),
                })
                .collect(),
            limit: descriptor.limit.map(|limit| Override {
                requests_per_unit: limit.requests_per_unit.map_or(0, |number| number.0),
                unit: limit.unit.map_or(0, |unit| unit.0),
            }),
            hits_addend: descriptor.hits_addend.map(|number| number.0),
            is_negative_hits: descriptor.is_negative_hits.unwrap_or_default(),
        });
    Ok(RateLimitRequest {
        domain: read.domain.unwrap_or_default(),
        descriptors: descriptors.collect(),
        hits_addend: read.hits_addend.map_or(0, |number| number.0),
    })
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
struct RequestJson {
    domain: Option<String>,
    descriptors: Option<Vec<DescriptorJson>>,
    #[serde(alias = "hits_addend")]
    hits_addend: Option<Number<u32>>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
struct DescriptorJson {
    entries: Option<Vec<EntryJson>>,
    limit: Option<OverrideJson>,
    #[serde(alias = "hits_addend")]
    hits_addend: Option<Number<u64>>,
    #[serde(alias = "is_negative_hits")]
    is_negative_hits: Option<bool>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct EntryJson {
    key: Option<String>,
    value: Option<String>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
struct OverrideJson {
    #[serde(alias = "requests_per_unit")]
    requests_per_unit: Option<Number<u32>>,
    unit: Option<UnitJson>,
}

/// A number as it is, or in quotes, as protobuf writes long ones.
struct Number<T>(T);

impl<'de, T: TryFrom<u64>> Deserialize<'de> for Number<T> {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        let number = from.deserialize_any(NumberText)?;
        T::try_from(number)
            .map(Number)
            .map_err(|_| D::Error::custom(format!("{number} is too large")))
    }
}

struct NumberText;

impl Visitor<'_> for NumberText {
    type Value = u64;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a whole number")
    }

    fn visit_u64<E: de::Error>(self, number: u64) -> Result<u64, E> {
        Ok(number)
    }

    fn visit_str<E: de::Error>(self, text: &str) -> Result<u64, E> {
        text.parse().map_err(|_| E::invalid_value(de::Unexpected::Str(text), &self))
    }
}

/// A unit by its name or its number.
struct UnitJson(i32);

impl<'de> Deserialize<'de> for UnitJson {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        struct Either;
        impl Visitor<'_> for Either {
            type Value = UnitJson;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("SECOND, MINUTE, HOUR, DAY, WEEK, MONTH or YEAR")
            }

            fn visit_str<E: de::Error>(self, name: &str) -> Result<UnitJson, E> {
                let unit = UnitNumber::from_name(name);
                unit.map(|unit| UnitJson(unit.into()))
                    .ok_or_else(|| E::invalid_value(de::Unexpected::Str(name), &self))
            }

            fn visit_u64<E: de::Error>(self, number: u64) -> Result<UnitJson, E> {
                i32::try_from(number)
                    .map(UnitJson)
                    .map_err(|_| E::invalid_value(de::Unexpected::Unsigned(number), &self))
            }
        }
        from.deserialize_any(Either)
    }
}

/// Protobuf's mapping leaves out what is empty or zero.
fn write(response: &RateLimitResponse) -> Value {
    let mut out = Map::new();
    out.insert("overallCode".into(), code(response.overall_code).into());
    out.insert("statuses".into(), response.statuses.iter().map(write_status).collect());
    for (name, headers) in [
        ("responseHeadersToAdd", &response.response_headers_to_add),
        ("requestHeadersToAdd", &response.request_headers_to_add),
    ] {
        if !headers.is_empty() {
            out.insert(name.into(), headers.iter().map(write_header).collect());
        }
    }
    if !response.raw_body.is_empty() {
        out.insert("rawBody".into(), STANDARD.encode(&response.raw_body).into());
    }
    if let Some(fields) = &response.dynamic_metadata {
        out.insert("dynamicMetadata".into(), write_struct(fields));
    }
    Value::Object(out)
}

fn write_status(status: &DescriptorStatus) -> Value {
    let mut out = Map::new();
    out.insert("code".into(), code(status.code).into());
    if let Some(limit) = &status.current_limit {
        let mut current = Map::new();
        if limit.requests_per_unit > 0 {
            current.insert("requestsPerUnit".into(), limit.requests_per_unit.into());
        }
        if let Ok(unit) = UnitNumber::try_from(limit.unit)
            && unit != UnitNumber::Unknown
        {
            current.insert("unit".into(), unit.name().into());
        }
        if !limit.name.is_empty() {
            current.insert("name".into(), limit.name.clone().into());
        }
        out.insert("currentLimit".into(), Value::Object(current));
    }
    if status.limit_remaining > 0 {
        out.insert("limitRemaining".into(), status.limit_remaining.into());
    }
    if let Some(wait) = &status.duration_until_reset {
        out.insert("durationUntilReset".into(), format!("{}s", wait.seconds).into());
    }
    Value::Object(out)
}

fn write_header(header: &HeaderValue) -> Value {
    json!({"key": header.key, "value": header.value})
}

fn write_struct(fields: &prost_types::Struct) -> Value {
    Value::Object(
        fields.fields.iter().map(|(name, value)| (name.clone(), write_value(value))).collect(),
    )
}

fn write_value(value: &prost_types::Value) -> Value {
    match &value.kind {
        None | Some(Kind::NullValue(_)) => Value::Null,
        Some(Kind::BoolValue(truth)) => (*truth).into(),
        // Whole numbers without a point, as protobuf writes them.
        #[allow(clippy::cast_possible_truncation, reason = "it is whole and small")]
        Some(Kind::NumberValue(number)) if number.fract() == 0.0 && number.abs() < 1e15 => {
            (*number as i64).into()
        }
        Some(Kind::NumberValue(number)) => (*number).into(),
        Some(Kind::StringValue(text)) => text.clone().into(),
        Some(Kind::ListValue(list)) => list.values.iter().map(write_value).collect(),
        Some(Kind::StructValue(fields)) => write_struct(fields),
    }
}

fn code(number: i32) -> &'static str {
    match Code::try_from(number) {
        Ok(Code::Ok) => "OK",
        Ok(Code::OverLimit) => "OVER_LIMIT",
        _ => "UNKNOWN",
    }
}
