//! JSON into questions.

use std::collections::BTreeMap;

use serde::Deserialize;
use tidegate::{Id, Limits, Op};

/// The largest body, in bytes.
pub const MAX_BODY_BYTES: usize = 64 << 10;
/// The most checks in one batch.
pub const MAX_BATCH: usize = 1000;
/// The most attributes of one request.
pub const MAX_ATTRIBUTES: usize = 64;

/// A body as it is sent: one question, or a batch of them.
#[derive(Deserialize, Debug, Default)]
#[serde(deny_unknown_fields)]
pub(crate) struct Body {
    key: Option<String>,
    limit: Option<String>,
    attributes: Option<BTreeMap<String, String>>,
    cost: Option<u64>,
    reserved: Option<u64>,
    id: Option<u64>,
    checks: Option<Vec<Body>>,
}

/// One question.
#[derive(Debug, Clone)]
pub(crate) struct Question {
    pub(crate) about: About,
    pub(crate) cost: u64,
    pub(crate) reserved: u64,
    pub(crate) id: Option<Id>,
}

/// What it is about.
#[derive(Debug, Clone)]
pub(crate) enum About {
    /// A key, under limits that the caller brings.
    Key {
        /// The key.
        key: String,
        /// The limits as they were written.
        text: String,
        /// The limits.
        limits: Limits,
    },
    /// Whatever the rules say about these attributes.
    Attributes(Vec<(String, String)>),
}

/// One question or several.
#[derive(Debug)]
pub(crate) enum Asked {
    One(Question),
    Batch(Vec<Question>),
}

/// Reads a body.
pub(crate) fn read(bytes: &[u8], verb: Verb) -> Result<Asked, String> {
    let body: Body = serde_json::from_slice(bytes).map_err(|error| format!("the body is not as expected: {error}"))?;
    match body.checks {
        None => body.question(verb, "").map(Asked::One),
        Some(_) if body.key.is_some() || body.limit.is_some() || body.attributes.is_some() => {
            Err("checks stands beside key, limit or attributes: expected checks alone".into())
        }
        Some(checks) if checks.is_empty() || checks.len() > MAX_BATCH => {
            Err(format!("checks has {} items: expected 1 to {MAX_BATCH}", checks.len()))
        }
        Some(checks) => {
            let questions = checks.into_iter().enumerate();
            questions
                .map(|(at, one)| one.question(verb, &format!("checks[{at}].")))
                .collect::<Result<_, _>>()
                .map(Asked::Batch)
        }
    }
}

impl Body {
    fn question(self, verb: Verb, place: &str) -> Result<Question, String> {
        if self.checks.is_some() {
            return Err(format!("{place}checks: expected no batch within a batch"));
        }
        let about = match (self.key, self.limit, self.attributes) {
            (Some(key), Some(text), None) => {
                let limits = text.parse().map_err(|error| format!("{place}limit is {text:?}: {error}"))?;
                About::Key { key, text, limits }
            }
            (None, None, Some(attributes)) if attributes.len() > MAX_ATTRIBUTES => {
                return Err(format!(
                    "{place}attributes has {} items: expected at most {MAX_ATTRIBUTES}",
                    attributes.len()
                ));
            }
            (None, None, Some(attributes)) => About::Attributes(attributes.into_iter().collect()),
            (Some(_), None, None) => {
                return Err(format!("{place}limit is missing: expected one such as \"10/s; 120/m\""));
            }
            (None, Some(_), None) => return Err(format!("{place}key is missing: expected whose budget it is")),
            (None, None, None) => return Err(format!("{place}: expected key and limit, or attributes")),
            _ => return Err(format!("{place}attributes stands beside key or limit: expected one or the other")),
        };
        let id = match (self.id, verb) {
            (Some(0), _) => return Err(format!("{place}id is 0: expected a positive number")),
            (Some(id), _) => Some(Id(id)),
            (None, Verb::Settle | Verb::Release) => {
                return Err(format!("{place}id is missing: expected the id that reserve or lease answered"));
            }
            (None, Verb::Reserve | Verb::Lease) => Some(fresh_id()),
            (None, _) => None,
        };
        let cost = self.cost.unwrap_or(u64::from(verb != Verb::Reset));
        Ok(Question { about, cost, reserved: self.reserved.unwrap_or(0), id })
    }
}

/// What to do, by the last part of the path.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Verb {
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

impl Verb {
    pub(crate) const ALL: [(&'static str, Verb); 10] = [
        ("check", Verb::Check),
        ("peek", Verb::Peek),
        ("take", Verb::Take),
        ("debit", Verb::Debit),
        ("refund", Verb::Refund),
        ("reset", Verb::Reset),
        ("reserve", Verb::Reserve),
        ("settle", Verb::Settle),
        ("lease", Verb::Lease),
        ("release", Verb::Release),
    ];

    pub(crate) fn op(self) -> Op {
        match self {
            Verb::Check | Verb::Reserve | Verb::Lease => Op::Check,
            Verb::Peek => Op::Peek,
            Verb::Take => Op::Take,
            Verb::Debit => Op::Debit,
            Verb::Refund => Op::Refund,
            Verb::Reset => Op::Reset,
            Verb::Settle => Op::Settle,
            Verb::Release => Op::Release,
        }
    }
}

/// A number that is hard to guess and fits into 53 bits, which is all that some languages' numbers hold.
fn fresh_id() -> Id {
    use std::hash::{BuildHasher, RandomState};
    Id(RandomState::new().hash_one(0) >> 11 | 1)
}
