//! Rules: which limits apply to a request, and which budget it is charged to.
//!
//! A request is a set of named values, its [`Attributes`]. A [`Rule`] has conditions on them
//! (`when`), the attributes by which it separates budgets (`by`), and a limit. All rules that match
//! are charged together, all or nothing; rules in shadow mode are only reported.

mod by;
mod compare;
pub mod envoy;
mod file;
mod known;
mod matching;
pub(crate) mod outcome;
mod pattern;
mod policy;
pub(crate) mod regex;
mod request;
#[cfg(test)]
mod tests;

use std::borrow::Cow;
use std::collections::BTreeSet;
use std::net::IpAddr;
use std::sync::Arc;

use serde::{Deserialize, Serialize};
use tidegate::Limits;
use tidegate::http::denial::DenyStatus;
use tidegate::http::group;
use tidegate::memory::Overflow;
use tidegate::resilience::{OnFailure, Policy, SyncMode};

pub(crate) use compare::{covers, excludes};
pub use known::Named;
pub(crate) use matching::exempt;
pub use matching::{InvalidCost, Match};
pub use outcome::{Measure, Settle};
pub use pattern::{MAX_PATTERN_BYTES, Pattern, PatternError};
pub use policy::{HeaderPolicy, RequestPolicy};
pub use request::{
    HeaderLines, HttpRequest, HttpRequestError, MAX_CLAIMS_BYTES, MAX_METHOD_BYTES, MAX_URI_BYTES,
    Repeated,
};
pub use tidegate::http::Missing;

use crate::parse::values;

/// The most rules there may be.
pub const MAX_RULES: usize = 1000;
/// The longest name of a rule, in bytes.
pub const MAX_NAME_BYTES: usize = 64;

/// What is known about a request.
pub trait Attributes {
    /// The value under this name, if there is one: `ip`, `method`, `header.x-api-key`.
    fn get(&self, name: &str) -> Option<Cow<'_, str>>;
}

/// The simplest attributes: pairs of name and value.
impl<N: AsRef<str>, V: AsRef<str>> Attributes for [(N, V)] {
    fn get(&self, name: &str) -> Option<Cow<'_, str>> {
        self.iter()
            .find(|(own, _)| own.as_ref() == name)
            .map(|(_, value)| Cow::Borrowed(value.as_ref()))
    }
}

/// All rules, in the order in which they were written.
#[derive(Clone, Debug, Default)]
pub struct Rules {
    rules: Vec<Arc<Rule>>,
    /// Whether one of them exempts.
    has_exemptions: bool,
    /// The attributes that they look at.
    known: BTreeSet<Arc<str>>,
    /// What of a request over HTTP they are.
    named: Named,
}

/// One rule. It was checked when it was read.
#[derive(Clone, Debug, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct Rule {
    /// Its name in responses, metrics and logs, and in the keys of its state.
    #[serde(deserialize_with = "file::name", serialize_with = "file::as_name")]
    pub name: Arc<str>,
    /// Conditions that must all hold.
    #[serde(default, deserialize_with = "file::conditions")]
    #[serde(serialize_with = "file::as_conditions", skip_serializing_if = "Vec::is_empty")]
    pub when: Vec<Condition>,
    /// The attributes with one budget per combination of values; one budget for all if empty.
    #[serde(default, deserialize_with = "file::names")]
    #[serde(serialize_with = "file::as_names", skip_serializing_if = "Vec::is_empty")]
    pub by: Vec<Arc<str>>,
    /// What becomes of requests that lack an attribute of `by`; they share one budget if `None`.
    #[serde(default, with = "file::missing", skip_serializing_if = "Option::is_none")]
    pub missing: Option<Missing>,
    /// The budget.
    #[serde(rename = "limit")]
    pub budget: Budget,
    /// The cost of a request.
    #[serde(default)]
    pub cost: Cost,
    /// Other budgets for some requests; the first that matches applies.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub overrides: Vec<Override>,
    /// Whether it is enforced.
    #[serde(default)]
    pub mode: Mode,
    /// Whether callers may refund charges of this rule that have no id.
    #[serde(default = "file::yes", with = "values::on_off")]
    pub refunds: bool,
    /// The policy when the store does not answer; that of the file if `None`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub on_store_failure: Option<Failure>,
    /// How a remote store takes part in decisions.
    #[serde(default, with = "file::SyncMode")]
    pub sync: SyncMode,
    /// What happens to new keys when a store in memory is full; the policy of the file if `None`.
    #[serde(default, with = "values::some_overflow", skip_serializing_if = "Option::is_none")]
    pub overflow: Option<Overflow>,
    /// Which responses are charged, where the server sees responses; all if empty.
    #[serde(default, deserialize_with = "file::conditions_on_response")]
    #[serde(serialize_with = "file::as_conditions", skip_serializing_if = "Vec::is_empty")]
    pub charge_when: Vec<Condition>,
    /// The cost of a response, where the server sees responses; `cost` if `None`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub settle: Option<Settle>,
    /// The status of an outright denial by this rule; that of the file if `None`.
    #[serde(default, with = "values::some_text", skip_serializing_if = "Option::is_none")]
    pub deny_status: Option<DenyStatus>,
    /// The prefix length by which IPv6 addresses are one client in budgets by `ip`.
    #[serde(skip, default = "file::ipv6_prefix")]
    pub ipv6_prefix: u8,
}

/// A condition on one attribute: any one of the patterns must match. A missing attribute matches
/// nothing, not even `*` or a negation.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Condition {
    /// The attribute.
    pub attribute: Arc<str>,
    /// What its value may look like.
    pub any_of: Vec<Pattern>,
}

/// Another budget for some requests of a rule: tiers, big customers.
#[derive(Clone, Debug, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct Override {
    /// Conditions that must all hold.
    #[serde(deserialize_with = "file::conditions", serialize_with = "file::as_conditions")]
    pub when: Vec<Condition>,
    /// The budget.
    #[serde(rename = "limit")]
    pub budget: Budget,
}

/// How much there is.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Budget {
    /// As much as these limits say, all of them.
    Limits(Limits),
    /// No limit.
    Unlimited,
    /// Nothing at all.
    Deny,
    /// No rule charges the request. Only a rule can say so, not an override.
    Exempt,
}

/// What a request costs.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Cost {
    /// So many times what the caller says, which is one unless said otherwise.
    Fixed(u64),
    /// What an attribute says, at least `min` and at most `max`; what the caller says if it is
    /// missing.
    From {
        /// The attribute.
        attribute: Arc<str>,
        /// The least that is believed.
        min: u64,
        /// The most that is believed.
        max: u64,
    },
}

/// Whether a rule is enforced.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Deserialize, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Mode {
    /// What it denies is denied.
    #[default]
    Enforce,
    /// It counts and is reported, but denies nothing.
    Shadow,
}

/// The policy when the store does not answer.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Deserialize, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Failure {
    /// Allow everything.
    Open,
    /// Deny everything.
    Closed,
    /// Decide locally, in this process.
    #[default]
    Local,
}

impl Rules {
    /// Rules in this order.
    pub fn new(rules: Vec<Rule>) -> Self {
        Rules::default().and(&rules)
    }

    /// These, and then more.
    pub fn and(mut self, more: &[Rule]) -> Self {
        self.has_exemptions |= more.iter().any(|rule| rule.budget == Budget::Exempt);
        self.known.extend(more.iter().flat_map(known::attributes));
        self.named = Named::among(self.known.iter());
        self.rules.extend(more.iter().cloned().map(Arc::new));
        self
    }

    /// The same with budgets by `ip` kept by networks of so many bits for IPv6.
    #[must_use]
    pub fn with_ipv6_prefix(mut self, bits: u8) -> Self {
        self.rules.iter_mut().for_each(|rule| Arc::make_mut(rule).ipv6_prefix = bits);
        self
    }

    /// All of them.
    pub fn iter(&self) -> impl Iterator<Item = &Arc<Rule>> {
        self.rules.iter()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.rules.is_empty()
    }

    /// The rules that decide a request which costs `cost` by itself: those that apply, or the one
    /// that exempts it from all others.
    ///
    /// # Errors
    /// If a cost that is read from an attribute is not a number.
    pub fn matching(
        &self,
        attributes: &(impl Attributes + ?Sized),
        cost: u64,
    ) -> Result<Vec<Match>, InvalidCost> {
        let mut found = self.applying(attributes, cost)?;
        if self.has_exemptions {
            exempt(&mut found, |one| one);
        }
        Ok(found)
    }

    /// The rules that apply to a request, also where one of them exempts it from the others.
    ///
    /// # Errors
    /// If a cost that is read from an attribute is not a number.
    pub fn applying(
        &self,
        attributes: &(impl Attributes + ?Sized),
        cost: u64,
    ) -> Result<Vec<Match>, InvalidCost> {
        let applies = self.rules.iter().filter(|rule| rule.applies_to(attributes));
        applies.map(|rule| rule.applied_to(attributes, cost)).collect()
    }
}

/// The word for an overflow policy in configuration files and explanations.
pub(crate) fn overflow_name(policy: Overflow) -> &'static str {
    match policy {
        Overflow::SharedBucket => "shared_bucket",
        Overflow::DenyNew => "deny_new",
        Overflow::AllowNew => "allow_new",
    }
}

impl From<Failure> for OnFailure {
    fn from(failure: Failure) -> Self {
        match failure {
            Failure::Open => OnFailure::Open,
            Failure::Closed => OnFailure::Closed,
            Failure::Local => OnFailure::Local,
        }
    }
}

impl Rule {
    /// Whether it denies outright all requests that match, or some of them.
    pub(crate) fn can_deny_outright(&self) -> bool {
        self.budget == Budget::Deny
            || self.on_missing() == Missing::Deny
            || self.overrides.iter().any(|other| other.budget == Budget::Deny)
    }

    /// The policy for the store.
    pub fn policy(&self) -> Policy {
        Policy {
            sync: self.sync,
            on_failure: self.on_store_failure.map(Into::into),
            overflow: self.overflow,
        }
    }

    /// Whether its conditions hold, and the request does not lack an attribute without which the
    /// rule is skipped.
    fn applies_to(&self, attributes: &(impl Attributes + ?Sized)) -> bool {
        holds(&self.when, attributes) && self.skipped_for(attributes).is_none()
    }

    fn applied_to(
        self: &Arc<Self>,
        attributes: &(impl Attributes + ?Sized),
        cost: u64,
    ) -> Result<Match, InvalidCost> {
        if let Some(name) = self.denied_for(attributes) {
            let (rule, key, missing) =
                (Arc::clone(self), self.key_of(attributes), Some(Arc::clone(name)));
            return Ok(Match { rule, key, budget: Budget::Deny, cost, missing });
        }
        let budget = self
            .overrides
            .iter()
            .find(|other| holds(&other.when, attributes))
            .map(|other| &other.budget);
        let cost = match &self.cost {
            Cost::Fixed(units) => units.saturating_mul(cost),
            Cost::From { attribute, min, max } => match attributes.get(attribute) {
                // Only a caller of the check API can ask what a request would find, without taking
                // anything.
                None if cost == 0 => 0,
                None => cost.max(*min).min(*max),
                Some(value) => match value.parse::<u64>() {
                    Ok(units) => units.max(*min).min(*max),
                    Err(_) => {
                        let value = value.chars().take(64).collect();
                        return Err(InvalidCost {
                            rule: self.name.clone(),
                            attribute: attribute.clone(),
                            value,
                        });
                    }
                },
            },
        };
        let budget = budget.unwrap_or(&self.budget).clone();
        Ok(Match {
            rule: Arc::clone(self),
            key: self.key_of(attributes),
            budget,
            cost,
            missing: None,
        })
    }
}

impl Rule {
    /// The first attribute of `by` that the request lacks.
    pub(crate) fn lacking(&self, attributes: &(impl Attributes + ?Sized)) -> Option<&Arc<str>> {
        self.by.iter().find(|name| attributes.get(name).is_none_or(|value| value.is_empty()))
    }

    /// The attribute without which the rule does not apply, if the request lacks one.
    pub(crate) fn skipped_for(&self, attributes: &(impl Attributes + ?Sized)) -> Option<&Arc<str>> {
        if self.on_missing() == Missing::Skip { self.lacking(attributes) } else { None }
    }

    /// The attribute without which the request is denied, if it lacks one.
    pub(crate) fn denied_for(&self, attributes: &(impl Attributes + ?Sized)) -> Option<&Arc<str>> {
        if self.on_missing() == Missing::Deny { self.lacking(attributes) } else { None }
    }

    /// What `missing` means: nothing on a rule that exempts, which has no budgets.
    fn on_missing(&self) -> Missing {
        if self.budget == Budget::Exempt {
            Missing::Share
        } else {
            self.missing.unwrap_or_default()
        }
    }

    /// The first condition that does not hold, and the value it was about.
    pub(crate) fn unmet<'a>(
        &self,
        attributes: &'a (impl Attributes + ?Sized),
    ) -> Option<(&Condition, Option<Cow<'a, str>>)> {
        let unmet = self
            .when
            .iter()
            .find(|condition| !holds(std::slice::from_ref(condition), attributes))?;
        Some((unmet, attributes.get(&unmet.attribute)))
    }

    /// The key of the budget that a request with these attributes draws on: the values of `by`, no
    /// two combinations the same. A single value is the key itself; several values each have their
    /// length before them. A missing attribute is the empty value: unless the rule states
    /// `missing`, requests without it share that budget.
    pub(crate) fn key_of(&self, attributes: &(impl Attributes + ?Sized)) -> Vec<u8> {
        match &self.by[..] {
            [] => Vec::new(),
            [name] => self.value_of(name, attributes).into_owned().into_bytes(),
            names => {
                let mut key = Vec::new();
                for name in names {
                    let value = self.value_of(name, attributes);
                    key.extend_from_slice(format!("{}:", value.len()).as_bytes());
                    key.extend_from_slice(value.as_bytes());
                }
                key
            }
        }
    }

    /// The value that separates budgets. A client has all addresses of its IPv6 network, in every
    /// protocol.
    fn value_of<'a>(&self, name: &str, attributes: &'a (impl Attributes + ?Sized)) -> Cow<'a, str> {
        let value = attributes.get(name).unwrap_or_default();
        if name != "ip" || !value.contains(':') {
            return value;
        }
        match value.parse::<IpAddr>() {
            Ok(ip) => Cow::Owned(group(ip, self.ipv6_prefix).to_string()),
            Err(_) => value,
        }
    }

    /// What it means for a request to which it applies, and which of its overrides counts.
    pub(crate) fn applied(
        self: &Arc<Self>,
        attributes: &(impl Attributes + ?Sized),
        cost: u64,
    ) -> Result<(Match, Option<usize>), InvalidCost> {
        let overridden = self.overrides.iter().position(|other| holds(&other.when, attributes));
        Ok((self.applied_to(attributes, cost)?, overridden))
    }
}

fn holds(conditions: &[Condition], attributes: &(impl Attributes + ?Sized)) -> bool {
    conditions.iter().all(|condition| {
        let value = attributes.get(&condition.attribute);
        value.is_some_and(|value| condition.any_of.iter().any(|pattern| pattern.matches(&value)))
    })
}
