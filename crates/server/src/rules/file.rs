//! How rules are written in a file: what the derives of [`Rule`](super::Rule) cannot express.

use std::fmt;
use std::sync::Arc;

use serde::de::{Deserializer, Error as _, MapAccess, SeqAccess, Visitor};
use serde::ser::{SerializeMap, SerializeStruct, Serializer};
use serde::{Deserialize, Serialize, de};
use tidegate::Limits;
use tidegate::http::DEFAULT_IPV6_PREFIX;

use super::{Budget, Condition, Cost, MAX_NAME_BYTES, MAX_RULES, Measure, Pattern, Rules, Settle};
use crate::nearest::nearest;
use crate::parse::values::Text;

impl<'de> Deserialize<'de> for Rules {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        let rules = Vec::deserialize(from)?;
        if rules.len() > MAX_RULES {
            let problem = format!("{} rules: expected at most {MAX_RULES}", rules.len());
            return Err(D::Error::custom(problem));
        }
        Ok(Rules::new(rules))
    }
}

impl Serialize for Rules {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        to.collect_seq(self.iter().map(|rule| &**rule))
    }
}

/// The name of a rule: letters, digits, `-`, `_`, `.`; it is shown in headers and metrics.
pub(super) fn name<'de, D: Deserializer<'de>>(from: D) -> Result<Arc<str>, D::Error> {
    let name = Text::deserialize(from)?.0;
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte);
    if name.len() > MAX_NAME_BYTES || !name.bytes().all(plain) {
        return Err(D::Error::custom(format!(
            "rule name {name:?}: expected 1 to {MAX_NAME_BYTES} letters, digits, `-`, `_` or `.`"
        )));
    }
    Ok(name.into())
}

pub(super) fn as_name<S: Serializer>(name: &Arc<str>, to: S) -> Result<S::Ok, S::Error> {
    to.serialize_str(name)
}

/// One attribute, or a list of them.
pub(super) fn names<'de, D: Deserializer<'de>>(from: D) -> Result<Vec<Arc<str>>, D::Error> {
    let names = from.deserialize_any(OneOrMany("an attribute such as ip, or a list of them"))?;
    Ok(names.into_iter().map(Into::into).collect())
}

pub(super) fn as_names<S: Serializer>(names: &[Arc<str>], to: S) -> Result<S::Ok, S::Error> {
    to.collect_seq(names.iter().map(|name| &**name))
}

pub(super) const fn ipv6_prefix() -> u8 {
    DEFAULT_IPV6_PREFIX
}

pub(super) const fn yes() -> bool {
    true
}

/// `unlimited`, `deny`, `exempt`, or limits in the notation.
impl<'de> Deserialize<'de> for Budget {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        let texts = from.deserialize_any(OneOrMany("a limit such as 10/s"))?;
        let [text] = &texts[..] else {
            let joined = texts.join("; ");
            return Err(D::Error::custom(format!(
                "a list: several limits are one text, joined by `;`: write {joined}"
            )));
        };
        match text.trim().to_ascii_lowercase().as_str() {
            "unlimited" => Ok(Budget::Unlimited),
            "deny" => Ok(Budget::Deny),
            "exempt" => Ok(Budget::Exempt),
            _ => text.parse::<Limits>().map(Budget::Limits).map_err(|error| {
                D::Error::custom(match nearest(text.trim(), ["exempt", "deny", "unlimited"]) {
                    Some(word) => format!("limit {text:?}: did you mean {word}?"),
                    None => format!("limit {text:?}: {error}"),
                })
            }),
        }
    }
}

impl Serialize for Budget {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        match self {
            Budget::Limits(limits) => to.collect_str(limits),
            Budget::Unlimited => to.serialize_str("unlimited"),
            Budget::Deny => to.serialize_str("deny"),
            Budget::Exempt => to.serialize_str("exempt"),
        }
    }
}

/// Attribute by attribute, what its value may look like: one pattern, or a list of which one must
/// match.
pub(super) fn conditions<'de, D: Deserializer<'de>>(from: D) -> Result<Vec<Condition>, D::Error> {
    from.deserialize_map(Conditions { of_response: false })
}

/// The same for conditions on a response, in which `status: 4xx` is a class of statuses.
pub(super) fn conditions_on_response<'de, D: Deserializer<'de>>(
    from: D,
) -> Result<Vec<Condition>, D::Error> {
    from.deserialize_map(Conditions { of_response: true })
}

pub(super) fn as_conditions<S: Serializer>(
    conditions: &[Condition],
    to: S,
) -> Result<S::Ok, S::Error> {
    let mut map = to.serialize_map(Some(conditions.len()))?;
    for condition in conditions {
        let patterns: Vec<&str> = condition.any_of.iter().map(Pattern::text).collect();
        map.serialize_entry(&*condition.attribute, &patterns)?;
    }
    map.end()
}

struct Conditions {
    of_response: bool,
}

impl<'de> Visitor<'de> for Conditions {
    type Value = Vec<Condition>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("attributes and patterns such as { method: POST, path: /v1/* }")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Vec<Condition>, A::Error> {
        let mut conditions = Vec::new();
        while let Some(Text(attribute)) = map.next_key()? {
            let is_status = self.of_response && attribute == "status";
            let any_of = map.next_value_seed(Patterns { is_status })?;
            conditions.push(Condition { attribute: attribute.into(), any_of });
        }
        Ok(conditions)
    }
}

/// One pattern or several.
struct Patterns {
    is_status: bool,
}

impl<'de> de::DeserializeSeed<'de> for Patterns {
    type Value = Vec<Pattern>;

    fn deserialize<D: Deserializer<'de>>(self, from: D) -> Result<Vec<Pattern>, D::Error> {
        let texts =
            from.deserialize_any(OneOrMany("a pattern such as /v1/*, or a list of them"))?;
        let read =
            |text: &String| if self.is_status { Pattern::of_status(text) } else { text.parse() };
        texts.iter().map(read).collect::<Result<_, _>>().map_err(D::Error::custom)
    }
}

/// Reads one text or a list of texts; numbers and truth values are taken as they are written.
struct OneOrMany(&'static str);

impl<'de> Visitor<'de> for OneOrMany {
    type Value = Vec<String>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.0)
    }

    fn visit_str<E: de::Error>(self, text: &str) -> Result<Vec<String>, E> {
        if text.trim().is_empty() {
            return Err(E::custom(format!("a blank value: expected {}", self.0)));
        }
        Ok(vec![text.into()])
    }

    fn visit_u64<E: de::Error>(self, number: u64) -> Result<Vec<String>, E> {
        Ok(vec![number.to_string()])
    }

    fn visit_i64<E: de::Error>(self, number: i64) -> Result<Vec<String>, E> {
        Ok(vec![number.to_string()])
    }

    fn visit_bool<E: de::Error>(self, truth: bool) -> Result<Vec<String>, E> {
        Ok(vec![truth.to_string()])
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Vec<String>, A::Error> {
        let mut texts = Vec::new();
        while let Some(Text(text)) = list.next_element()? {
            texts.push(text);
        }
        if texts.is_empty() {
            Err(A::Error::custom(format!("an empty list: expected {}", self.0)))
        } else {
            Ok(texts)
        }
    }
}

impl Default for Cost {
    fn default() -> Self {
        Cost::Fixed(1)
    }
}

/// A number, or the attribute that has it.
impl<'de> Deserialize<'de> for Cost {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        struct NumberOrAttribute;
        impl<'de> Visitor<'de> for NumberOrAttribute {
            type Value = Cost;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a whole number, or { from: ATTRIBUTE, max: N }")
            }

            fn visit_u64<E: de::Error>(self, units: u64) -> Result<Cost, E> {
                Ok(Cost::Fixed(units))
            }

            fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<Cost, A::Error> {
                #[derive(Deserialize)]
                #[serde(deny_unknown_fields)]
                struct From {
                    from: Text,
                    #[serde(default = "one")]
                    min: u64,
                    max: u64,
                }
                // A client that sets its own cost must not make its request free.
                fn one() -> u64 {
                    1
                }
                let From { from, min, max } =
                    From::deserialize(de::value::MapAccessDeserializer::new(map))?;
                Ok(Cost::From { attribute: from.0.into(), min, max })
            }
        }
        from.deserialize_any(NumberOrAttribute)
    }
}

impl Serialize for Cost {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        match self {
            Cost::Fixed(units) => to.serialize_u64(*units),
            Cost::From { attribute, min, max } => {
                let mut map = to.serialize_struct("Cost", 3)?;
                map.serialize_field("from", &**attribute)?;
                map.serialize_field("min", min)?;
                map.serialize_field("max", max)?;
                map.end()
            }
        }
    }
}

/// `response_bytes`, `response_ms`, `header.NAME`; or one of these with how many of them are one
/// unit.
impl<'de> Deserialize<'de> for Settle {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        fn read<E: de::Error>(text: &str, per: u64) -> Result<Settle, E> {
            let by = match text {
                "response_bytes" => Measure::Bytes,
                "response_ms" => Measure::Millis,
                _ => match text.strip_prefix("header.").filter(|name| !name.is_empty()) {
                    Some(name) => Measure::Header(name.to_ascii_lowercase().into()),
                    None => {
                        let problem = format!(
                            "{text:?}: expected response_bytes, response_ms or header.NAME"
                        );
                        return Err(E::custom(problem));
                    }
                },
            };
            if per == 0 {
                Err(E::custom("per: 0: expected at least 1"))
            } else {
                Ok(Settle { by, per })
            }
        }
        struct MeasureOrRatio;
        impl<'de> Visitor<'de> for MeasureOrRatio {
            type Value = Settle;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("response_bytes, response_ms, header.NAME, or { by: …, per: N }")
            }

            fn visit_str<E: de::Error>(self, text: &str) -> Result<Settle, E> {
                read(text, 1)
            }

            fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<Settle, A::Error> {
                #[derive(Deserialize)]
                #[serde(deny_unknown_fields)]
                struct Ratio {
                    by: Text,
                    per: u64,
                }
                let Ratio { by, per } =
                    Ratio::deserialize(de::value::MapAccessDeserializer::new(map))?;
                read(&by.0, per)
            }
        }
        from.deserialize_any(MeasureOrRatio)
    }
}

impl Serialize for Settle {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        let mut map = to.serialize_struct("Settle", 2)?;
        match &self.by {
            Measure::Bytes => map.serialize_field("by", "response_bytes")?,
            Measure::Millis => map.serialize_field("by", "response_ms")?,
            Measure::Header(name) => map.serialize_field("by", &format!("header.{name}"))?,
        }
        map.serialize_field("per", &self.per)?;
        map.end()
    }
}

/// What becomes of requests that lack an attribute, if the rule states it.
pub(super) mod missing {
    use super::*;

    #[derive(Deserialize, Serialize)]
    #[serde(remote = "tidegate::http::Missing", rename_all = "lowercase")]
    enum Missing {
        Share,
        Skip,
        Deny,
    }

    #[derive(Deserialize, Serialize)]
    struct Stated(#[serde(with = "Missing")] tidegate::http::Missing);

    pub(in crate::rules) fn deserialize<'de, D: Deserializer<'de>>(
        from: D,
    ) -> Result<Option<tidegate::http::Missing>, D::Error> {
        Ok(Some(Stated::deserialize(from)?.0))
    }

    pub(in crate::rules) fn serialize<S: Serializer>(
        missing: &Option<tidegate::http::Missing>,
        to: S,
    ) -> Result<S::Ok, S::Error> {
        missing.map(Stated).serialize(to)
    }
}

/// The sync mode of the library, which has no serde of its own.
#[derive(Deserialize, Serialize)]
#[serde(remote = "tidegate::resilience::SyncMode", rename_all = "lowercase")]
pub(super) enum SyncMode {
    Direct,
    Lease,
    Async,
}
