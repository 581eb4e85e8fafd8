//! The rules of a file, as they are written: what serde reads before they become [`Rule`]s.

use std::fmt;
use std::sync::Arc;

use serde::de::{Deserializer, Error as _, MapAccess, SeqAccess, Visitor};
use serde::{Deserialize, de};
use tidegate::Limits;
use tidegate::http::DEFAULT_IPV6_PREFIX;
use tidegate::resilience::SyncMode;

use super::file::{DenyStatusWord, FailureWord, OverflowWord};
use crate::nearest::nearest;
use crate::parse::values::Text;
use crate::rules::{
    Budget, Condition, Cost, MAX_NAME_BYTES, Measure, Missing, Mode, Override, Pattern, Rule,
    Settle,
};

#[derive(Deserialize, Debug)]
#[serde(deny_unknown_fields)]
pub(super) struct RuleFile {
    name: Name,
    #[serde(default)]
    when: Conditions,
    #[serde(default)]
    by: Names,
    #[serde(default)]
    missing: MissingWord,
    limit: BudgetText,
    #[serde(default)]
    cost: CostFile,
    #[serde(default)]
    overrides: Vec<OverrideFile>,
    #[serde(default)]
    mode: ModeWord,
    #[serde(default)]
    refunds: OnOff,
    #[serde(default)]
    on_store_failure: Option<FailureWord>,
    #[serde(default)]
    sync: SyncWord,
    #[serde(default)]
    overflow: Option<OverflowWord>,
    #[serde(default)]
    charge_when: Conditions,
    #[serde(default)]
    settle: Option<SettleFile>,
    #[serde(default)]
    deny_status: Option<DenyStatusWord>,
}

#[derive(Deserialize, Debug)]
#[serde(deny_unknown_fields)]
struct OverrideFile {
    when: Conditions,
    limit: BudgetText,
}

impl RuleFile {
    pub(super) fn checked(self) -> Result<Rule, String> {
        let name: Arc<str> = self.name.0.into();
        let mut charge_when = self.charge_when.0;
        for condition in
            charge_when.iter_mut().filter(|condition| &*condition.attribute == "status")
        {
            let patterns =
                condition.any_of.iter().map(|pattern| Pattern::of_status(pattern.text()));
            condition.any_of = patterns
                .collect::<Result<_, _>>()
                .map_err(|error| format!("rule {name}: charge_when: {error}"))?;
        }
        let overrides = self
            .overrides
            .into_iter()
            .map(|other| Override { when: other.when.0, budget: other.limit.0 });
        Ok(Rule {
            name,
            when: self.when.0,
            by: self.by.0,
            missing: self.missing.into(),
            budget: self.limit.0,
            cost: self.cost.0,
            overrides: overrides.collect(),
            mode: match self.mode {
                ModeWord::Enforce => Mode::Enforce,
                ModeWord::Shadow => Mode::Shadow,
            },
            refunds: self.refunds == OnOff::On,
            on_store_failure: self.on_store_failure.map(Into::into),
            sync: self.sync.into(),
            overflow: self.overflow.map(Into::into),
            charge_when,
            settle: self.settle.map(|settle| settle.0),
            deny_status: self.deny_status.map(|word| word.0),
            ipv6_prefix: DEFAULT_IPV6_PREFIX,
        })
    }
}

#[derive(Deserialize, Debug, Clone, Copy, Default)]
#[serde(rename_all = "lowercase")]
enum SyncWord {
    #[default]
    Direct,
    Lease,
    Async,
}

impl From<SyncWord> for SyncMode {
    fn from(word: SyncWord) -> Self {
        match word {
            SyncWord::Direct => SyncMode::Direct,
            SyncWord::Lease => SyncMode::Lease,
            SyncWord::Async => SyncMode::Async,
        }
    }
}

#[derive(Deserialize, Debug, Clone, Copy, Default)]
#[serde(rename_all = "lowercase")]
enum ModeWord {
    #[default]
    Enforce,
    Shadow,
}

#[derive(Deserialize, Debug, Clone, Copy, Default)]
#[serde(rename_all = "lowercase")]
enum MissingWord {
    #[default]
    Share,
    Skip,
    Deny,
}

impl From<MissingWord> for Missing {
    fn from(word: MissingWord) -> Self {
        match word {
            MissingWord::Share => Missing::Share,
            MissingWord::Skip => Missing::Skip,
            MissingWord::Deny => Missing::Deny,
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
enum OnOff {
    #[default]
    On,
    Off,
}

/// YAML reads `on` and `off` as truth values in some dialects: both are taken.
impl<'de> Deserialize<'de> for OnOff {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        match Text::deserialize(from)?.0.as_str() {
            "on" | "true" => Ok(OnOff::On),
            "off" | "false" => Ok(OnOff::Off),
            other => Err(D::Error::custom(format!("{other:?}: expected on or off"))),
        }
    }
}

/// The name of a rule: letters, digits, `-`, `_`, `.`; it is shown in headers and metrics.
#[derive(Debug)]
struct Name(String);

impl<'de> Deserialize<'de> for Name {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        let name = Text::deserialize(from)?.0;
        let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte);
        if name.len() > MAX_NAME_BYTES || !name.bytes().all(plain) {
            let problem = format!(
                "rule name {name:?}: expected 1 to {MAX_NAME_BYTES} letters, digits, `-`, `_` or `.`"
            );
            return Err(D::Error::custom(problem));
        }
        Ok(Name(name))
    }
}

/// `unlimited`, `deny`, `exempt`, or limits in the notation.
#[derive(Debug)]
struct BudgetText(Budget);

impl<'de> Deserialize<'de> for BudgetText {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        let texts = from.deserialize_any(OneOrMany("a limit such as 10/s"))?;
        let [text] = &texts[..] else {
            let joined = texts.join("; ");
            return Err(D::Error::custom(format!(
                "a list: several limits are one text, joined by `;`: write {joined}"
            )));
        };
        match text.trim().to_ascii_lowercase().as_str() {
            "unlimited" => Ok(BudgetText(Budget::Unlimited)),
            "deny" => Ok(BudgetText(Budget::Deny)),
            "exempt" => Ok(BudgetText(Budget::Exempt)),
            _ => match text.parse::<Limits>() {
                Ok(limits) => Ok(BudgetText(Budget::Limits(limits))),
                Err(error) => Err(D::Error::custom(
                    match nearest(text.trim(), ["exempt", "deny", "unlimited"]) {
                        Some(word) => format!("limit {text:?}: did you mean {word}?"),
                        None => format!("limit {text:?}: {error}"),
                    },
                )),
            },
        }
    }
}

/// One name or several.
#[derive(Debug, Default)]
struct Names(Vec<Arc<str>>);

impl<'de> Deserialize<'de> for Names {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        let names =
            from.deserialize_any(OneOrMany("an attribute such as ip, or a list of them"))?;
        Ok(Names(names.into_iter().map(Into::into).collect()))
    }
}

/// Attribute by attribute, what its value may look like: one pattern, or a list of which one must
/// match.
#[derive(Debug, Default)]
struct Conditions(Vec<Condition>);

impl<'de> Deserialize<'de> for Conditions {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        struct Map;
        impl<'de> Visitor<'de> for Map {
            type Value = Conditions;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("attributes and patterns such as { method: POST, path: /v1/* }")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Conditions, A::Error> {
                let mut conditions = Vec::new();
                while let Some(attribute) = map.next_key::<Text>()? {
                    let Patterns(any_of) = map.next_value()?;
                    conditions.push(Condition { attribute: attribute.0.into(), any_of });
                }
                Ok(Conditions(conditions))
            }
        }
        from.deserialize_map(Map)
    }
}

struct Patterns(Vec<Pattern>);

impl<'de> Deserialize<'de> for Patterns {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        let texts =
            from.deserialize_any(OneOrMany("a pattern such as /v1/*, or a list of them"))?;
        texts
            .iter()
            .map(|text| text.parse::<Pattern>().map_err(D::Error::custom))
            .collect::<Result<_, _>>()
            .map(Patterns)
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
        while let Some(text) = list.next_element::<Text>()? {
            texts.push(text.0);
        }
        if texts.is_empty() {
            Err(A::Error::custom(format!("an empty list: expected {}", self.0)))
        } else {
            Ok(texts)
        }
    }
}

/// A number, or where to read it from.
#[derive(Debug)]
struct CostFile(Cost);

impl Default for CostFile {
    fn default() -> Self {
        CostFile(Cost::Fixed(1))
    }
}

impl<'de> Deserialize<'de> for CostFile {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        struct Either;
        impl<'de> Visitor<'de> for Either {
            type Value = CostFile;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a whole number, or { from: ATTRIBUTE, max: N }")
            }

            fn visit_u64<E: de::Error>(self, units: u64) -> Result<CostFile, E> {
                Ok(CostFile(Cost::Fixed(units)))
            }

            fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<CostFile, A::Error> {
                #[derive(Deserialize)]
                #[serde(deny_unknown_fields)]
                struct From {
                    from: Text,
                    #[serde(default = "one")]
                    min: u64,
                    max: u64,
                }
                // What a client says of itself must not make its request free.
                fn one() -> u64 {
                    1
                }
                let From { from, min, max } =
                    From::deserialize(de::value::MapAccessDeserializer::new(map))?;
                Ok(CostFile(Cost::From { attribute: from.0.into(), min, max }))
            }
        }
        from.deserialize_any(Either)
    }
}

/// `response_bytes`, `response_ms`, `header.NAME`; or one of these with how many of them are one
/// unit.
#[derive(Debug)]
struct SettleFile(Settle);

impl<'de> Deserialize<'de> for SettleFile {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        fn read<E: de::Error>(text: &str, per: u64) -> Result<SettleFile, E> {
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
                Ok(SettleFile(Settle { by, per }))
            }
        }
        struct Either;
        impl<'de> Visitor<'de> for Either {
            type Value = SettleFile;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("response_bytes, response_ms, header.NAME, or { by: …, per: N }")
            }

            fn visit_str<E: de::Error>(self, text: &str) -> Result<SettleFile, E> {
                read(text, 1)
            }

            fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<SettleFile, A::Error> {
                #[derive(Deserialize)]
                #[serde(deny_unknown_fields)]
                struct Pair {
                    by: Text,
                    per: u64,
                }
                let Pair { by, per } =
                    Pair::deserialize(de::value::MapAccessDeserializer::new(map))?;
                read(&by.0, per)
            }
        }
        from.deserialize_any(Either)
    }
}
