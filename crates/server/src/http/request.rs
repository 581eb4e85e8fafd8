//! Parses check requests in JSON.

use std::cell::RefCell;
use std::collections::VecDeque;
use std::collections::btree_map::{BTreeMap, Entry};
use std::fmt;
use std::sync::Arc;

use axum::http::HeaderValue;
use serde::de::value::MapAccessDeserializer;
use serde::de::{MapAccess, Unexpected, Visitor};
use serde::{Deserialize, Deserializer};
use tidegate::http::headers::Draft;
use tidegate::{Id, Limit, Limits, Op};

use super::reply::policy;
use crate::ids::fresh_id;
use crate::parse::messages;
use crate::reset::Target;

/// The largest body, in bytes.
pub const MAX_BODY_BYTES: usize = 64 << 10;
/// The most checks in one batch.
pub const MAX_BATCH: usize = 1000;
/// The most attributes of one request.
pub const MAX_ATTRIBUTES: usize = 64;
/// How much of what was sent an error repeats, in characters.
const MAX_SHOWN: usize = 128;
/// How many parsed limits each thread caches.
const REMEMBERED: usize = 8;

/// A body: one check, or a batch of them.
#[derive(Deserialize, Debug, Default)]
#[serde(deny_unknown_fields)]
pub(crate) struct Body {
    key: Option<String>,
    limit: Option<String>,
    attributes: Option<Attributes>,
    rule: Option<String>,
    by: Option<Attributes>,
    #[serde(default, deserialize_with = "whole")]
    cost: Option<u64>,
    #[serde(default, deserialize_with = "whole")]
    reserved: Option<u64>,
    #[serde(default, deserialize_with = "whole")]
    id: Option<u64>,
    checks: Option<Vec<Object>>,
}

/// Names and values, each name once: of two values, the one that a rule takes and the one that its
/// caller means could differ.
#[derive(Debug, Default)]
struct Attributes(BTreeMap<String, String>);

impl<'de> Deserialize<'de> for Attributes {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        struct ObjectVisitor;
        impl<'de> Visitor<'de> for ObjectVisitor {
            type Value = Attributes;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object of names and values, such as {\"ip\":\"192.0.2.7\"}")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Attributes, A::Error> {
                let mut attributes = BTreeMap::new();
                while let Some(name) = map.next_key::<String>()? {
                    match attributes.entry(name) {
                        Entry::Vacant(place) => _ = place.insert(map.next_value()?),
                        Entry::Occupied(place) => {
                            let shown: String = place.key().chars().take(MAX_SHOWN).collect();
                            let problem = format_args!(
                                "{shown:?} is there twice: expected each attribute once"
                            );
                            return Err(serde::de::Error::custom(problem));
                        }
                    }
                }
                Ok(Attributes(attributes))
            }
        }
        from.deserialize_map(ObjectVisitor)
    }
}

/// A body that is an object. serde would also accept a list of its values.
#[derive(Debug)]
struct Object(Body);

impl<'de> Deserialize<'de> for Object {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        struct ObjectVisitor;
        impl<'de> Visitor<'de> for ObjectVisitor {
            type Value = Object;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object such as {\"key\":\"a\",\"limit\":\"1/s\"}, {\"attributes\":{…}}, or {\"checks\":[…]} for several")
            }

            fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<Object, A::Error> {
                Body::deserialize(MapAccessDeserializer::new(map)).map(Object)
            }
        }
        from.deserialize_map(ObjectVisitor)
    }
}

/// A whole number, or null.
struct WholeNumber;

impl<'de> Visitor<'de> for WholeNumber {
    type Value = Option<u64>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a whole number, 0 or more")
    }

    fn visit_u64<E: serde::de::Error>(self, number: u64) -> Result<Option<u64>, E> {
        Ok(Some(number))
    }

    // JSON numbers beyond u64 arrive as floats.
    fn visit_f64<E: serde::de::Error>(self, number: f64) -> Result<Option<u64>, E> {
        if number.fract() == 0.0 && number >= 1.0 {
            return Err(E::custom(format_args!("{number:e}: expected at most {}", u64::MAX)));
        }
        Err(E::invalid_type(Unexpected::Float(number), &self))
    }

    fn visit_unit<E: serde::de::Error>(self) -> Result<Option<u64>, E> {
        Ok(None)
    }
}

fn whole<'de, D: Deserializer<'de>>(from: D) -> Result<Option<u64>, D::Error> {
    from.deserialize_any(WholeNumber)
}

/// One check.
#[derive(Debug, Clone)]
pub(crate) struct CheckRequest {
    pub(crate) about: CheckSubject,
    pub(crate) cost: u64,
    pub(crate) reserved: u64,
    pub(crate) id: Option<Id>,
}

/// What a check charges.
#[derive(Debug, Clone)]
pub(crate) enum CheckSubject {
    /// A key under limits of the caller.
    Key {
        /// The key.
        key: String,
        /// The limits.
        parsed: Arc<ParsedLimits>,
    },
    /// The rules that match these attributes.
    Attributes(Vec<(String, String)>),
    /// Budgets of rules, to be reset.
    Reset(Target),
}

/// Limits of a caller, and their text in responses.
#[derive(Debug)]
pub(crate) struct ParsedLimits {
    /// Their text in the request.
    pub(crate) text: String,
    pub(crate) limits: Limits,
    /// Each charge: its limit in the notation, and how often it occurs.
    pub(crate) charges: Vec<(String, u64)>,
    /// `RateLimit-Policy` in draft 10 and in draft 7.
    policies: [Option<HeaderValue>; 2],
}

impl ParsedLimits {
    /// The value of `RateLimit-Policy`.
    pub(crate) fn policy(&self, draft: Draft) -> Option<HeaderValue> {
        self.policies[usize::from(draft == Draft::Seven)].clone()
    }

    /// Parses limits. The last ones on this thread are cached: most callers repeat them, and
    /// parsing costs more than deciding.
    fn read(text: String) -> Result<Arc<ParsedLimits>, String> {
        thread_local! {
            static LAST: RefCell<VecDeque<Arc<ParsedLimits>>> = RefCell::default();
        }
        let known =
            LAST.with_borrow(|last| last.iter().find(|known| known.text == text).map(Arc::clone));
        if let Some(known) = known {
            return Ok(known);
        }
        let limits: Limits = text.parse().map_err(|error| {
            let shown: String = text.chars().take(MAX_SHOWN).collect();
            format!("limit is {shown:?}: {error}")
        })?;
        let mut own: Vec<(&Limit, u64)> = Vec::with_capacity(limits.as_slice().len());
        for limit in &limits {
            match own.iter_mut().find(|(known, _)| *known == limit) {
                Some((_, times)) => *times += 1, // charged once, with twice the cost
                None => own.push((limit, 1)),
            }
        }
        let charges: Vec<(String, u64)> =
            own.iter().map(|(limit, times)| (limit.to_string(), *times)).collect();
        let named: Vec<(&str, &Limit)> = charges
            .iter()
            .zip(&own)
            .map(|((name, _), (limit, _))| (name.as_str(), *limit))
            .collect();
        let policies = [Draft::Ten, Draft::Seven].map(|draft| policy(draft, &named));
        let parsed = Arc::new(ParsedLimits { text, limits, charges, policies });
        LAST.with_borrow_mut(|last| {
            last.truncate(REMEMBERED - 1);
            last.push_front(Arc::clone(&parsed));
        });
        Ok(parsed)
    }
}

/// One check or several.
#[derive(Debug)]
pub(crate) enum CheckBody {
    One(CheckRequest),
    Batch(Vec<CheckRequest>),
}

/// The error for an invalid body, with its place.
fn mistake_in(bytes: &[u8], error: &serde_json::Error) -> String {
    let (line, column) = (error.line(), error.column());
    if error.is_data() {
        // Parse again and record the path: invalid bodies are rare.
        let again = serde_path_to_error::deserialize::<_, Object>(
            &mut serde_json::Deserializer::from_slice(bytes),
        );
        let problem = messages::plain(&error.to_string()).replace("unknown key", "unknown member");
        // A message about the name of a member has that name.
        let is_about_name =
            problem.starts_with("unknown member") || problem.contains(" is there twice: remove");
        let place = again
            .err()
            .map_or_else(|| "body".into(), |error| place_of(error.path(), is_about_name));
        return match problem.strip_suffix(": expected text") {
            Some(found) if place.ends_with("limit") => {
                format!("{place}: {found}: expected a limit in quotation marks, such as \"10/s\"")
            }
            Some(found) => format!("{place}: {found}: expected text in quotation marks"),
            None => format!("{place}: {problem}"),
        };
    }
    let text = error.to_string();
    let problem = match text.as_str() {
        _ if error.is_eof() && column == 0 => "is empty",
        _ if error.is_eof() => "ends too early",
        text if text.starts_with("number out of range") => "has a number that is out of range",
        text if text.starts_with("trailing characters") => "goes on behind its object",
        _ => "is not JSON",
    };
    let example = "{\"key\":\"user:7\",\"limit\":\"10/s\"}";
    format!(
        "the body {problem} (line {line}, column {column}): expected an object such as {example}"
    )
}

/// `body`, or the member of it that a path names: `checks[3].limit`; without the last name, the
/// object that has it.
fn place_of(path: &serde_path_to_error::Path, without_name: bool) -> String {
    let path = path.to_string();
    let path = match path.rsplit_once('.') {
        Some((object, _)) if without_name => object,
        None if without_name => "",
        _ => path.as_str(),
    };
    if path.is_empty() || path == "." {
        "body".into()
    } else {
        path.chars().take(MAX_SHOWN).collect()
    }
}

/// Parses a body.
pub(crate) fn read(bytes: &[u8], operation: Operation) -> Result<CheckBody, String> {
    let Object(body) = serde_json::from_slice(bytes).map_err(|error| mistake_in(bytes, &error))?;
    match body.checks {
        None => body.check_request(operation, "").map(CheckBody::One),
        Some(_) if body.is_question() => {
            Err("checks stands beside other members: expected checks alone".into())
        }
        Some(checks) if checks.is_empty() || checks.len() > MAX_BATCH => {
            Err(format!("checks has {} items: expected 1 to {MAX_BATCH}", checks.len()))
        }
        Some(checks) => {
            let requests = checks.into_iter().enumerate();
            requests
                .map(|(at, Object(one))| one.check_request(operation, &format!("checks[{at}].")))
                .collect::<Result<_, _>>()
                .map(CheckBody::Batch)
        }
    }
}

/// Which budgets of rules a reset names.
fn target(
    rule: Option<String>,
    by: Option<Attributes>,
    attributes: Option<Attributes>,
) -> Result<Target, String> {
    match (rule.as_deref(), by, attributes) {
        (Some("*"), None, Some(attributes)) => {
            Ok(Target::Applying(attributes.0.into_iter().collect()))
        }
        (Some("*"), ..) => Err("rule is \"*\": expected attributes beside it, and no by".into()),
        (Some(name), by, None) => Ok(Target::Rule {
            name: name.into(),
            by: by.unwrap_or_default().0.into_iter().collect(),
        }),
        (Some(name), _, Some(_)) => Err(format!(
            "attributes stands beside rule {name:?}: expected by, or \"*\" as the rule"
        )),
        (None, None, Some(attributes)) => Ok(Target::Given(attributes.0.into_iter().collect())),
        (None, ..) => {
            Err("by stands without a rule: expected rule, too, or attributes instead of by".into())
        }
    }
}

impl Body {
    /// Whether it has members of a single check.
    fn is_question(&self) -> bool {
        let Body { key, limit, attributes, rule, by, cost: _, reserved: _, id: _, checks: _ } =
            self;
        key.is_some() || limit.is_some() || attributes.is_some() || rule.is_some() || by.is_some()
    }

    fn check_request(self, operation: Operation, place: &str) -> Result<CheckRequest, String> {
        if self.checks.is_some() {
            return Err(format!("{place}checks: expected no batch within a batch"));
        }
        for (name, attributes) in [("attributes", &self.attributes), ("by", &self.by)] {
            if let Some(attributes) =
                attributes.as_ref().filter(|attributes| attributes.0.len() > MAX_ATTRIBUTES)
            {
                let found = attributes.0.len();
                return Err(format!(
                    "{place}{name} has {found} items: expected at most {MAX_ATTRIBUTES}"
                ));
            }
        }
        let names_rule = self.rule.is_some() || self.by.is_some();
        if names_rule && operation != Operation::Reset {
            return Err(format!(
                "{place}rule and by are for /v1/reset: expected key and limit, or attributes"
            ));
        }
        let about = match (self.key, self.limit, self.attributes) {
            (None, None, attributes)
                if names_rule || (operation == Operation::Reset && attributes.is_some()) =>
            {
                if self.cost.or(self.reserved).or(self.id).is_some() {
                    return Err(format!(
                        "{place}cost, reserved or id stands beside rule or attributes: a reset takes none"
                    ));
                }
                CheckSubject::Reset(
                    target(self.rule, self.by, attributes)
                        .map_err(|problem| format!("{place}{problem}"))?,
                )
            }
            _ if names_rule => {
                return Err(format!(
                    "{place}rule or by stands beside key or limit: expected one or the other"
                ));
            }
            (Some(key), Some(text), None) => CheckSubject::Key {
                key,
                parsed: ParsedLimits::read(text).map_err(|problem| format!("{place}{problem}"))?,
            },
            (None, None, Some(attributes)) => {
                CheckSubject::Attributes(attributes.0.into_iter().collect())
            }
            (Some(_), None, None) => {
                return Err(format!(
                    "{place}limit is missing: expected one such as \"10/s; 120/m\""
                ));
            }
            (None, Some(_), None) => {
                return Err(format!("{place}key is missing: expected whose budget it is"));
            }
            (None, None, None) if operation == Operation::Reset => {
                return Err(format!(
                    "{place}rule is missing: expected rule and by, attributes, or key and limit"
                ));
            }
            (None, None, None) => {
                return Err(format!(
                    "{place}key is missing: expected key and limit, or attributes"
                ));
            }
            _ => {
                return Err(format!(
                    "{place}attributes stands beside key or limit: expected one or the other"
                ));
            }
        };
        let id = match (self.id, operation) {
            (Some(0), _) => return Err(format!("{place}id is 0: expected a positive number")),
            (Some(id), _) => Some(Id(id)),
            (None, Operation::Settle | Operation::Release) => {
                return Err(format!(
                    "{place}id is missing: expected the id that reserve or lease answered"
                ));
            }
            (None, Operation::Reserve | Operation::Lease) => Some(fresh_id()),
            (None, _) => None,
        };
        let cost = self.cost.unwrap_or(u64::from(operation != Operation::Reset));
        Ok(CheckRequest { about, cost, reserved: self.reserved.unwrap_or(0), id })
    }
}

/// An operation, as the last part of its path names it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Operation {
    Check,
    Peek,
    Take,
    Debit,
    Refund,
    Reset,
    Reserve,
    Settle,
    Lease,
    Release,
}

impl Operation {
    pub(crate) const ALL: [(&'static str, Operation); 10] = [
        ("check", Operation::Check),
        ("peek", Operation::Peek),
        ("take", Operation::Take),
        ("debit", Operation::Debit),
        ("refund", Operation::Refund),
        ("reset", Operation::Reset),
        ("reserve", Operation::Reserve),
        ("settle", Operation::Settle),
        ("lease", Operation::Lease),
        ("release", Operation::Release),
    ];

    /// The operation of this path.
    pub(crate) fn at(path: &str) -> Option<Operation> {
        let own = path.strip_prefix("/v1/")?;
        Operation::ALL.iter().find(|(name, _)| *name == own).map(|(_, operation)| *operation)
    }

    /// As in the path.
    pub(crate) fn name(self) -> &'static str {
        Operation::ALL
            .iter()
            .find(|(_, operation)| *operation == self)
            .map_or("check", |(name, _)| name)
    }

    pub(crate) fn op(self) -> Op {
        match self {
            Operation::Check | Operation::Reserve | Operation::Lease => Op::Check,
            Operation::Peek => Op::Peek,
            Operation::Take => Op::Take,
            Operation::Debit => Op::Debit,
            Operation::Refund => Op::Refund,
            Operation::Reset => Op::Reset,
            Operation::Settle => Op::Settle,
            Operation::Release => Op::Release,
        }
    }
}
