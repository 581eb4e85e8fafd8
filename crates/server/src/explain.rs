//! Why a request would pass or not: for every rule whether it applies and why, on whose budget it draws, and what its limits would say now.
//!
//! The same answer as text, for people at a terminal, and as JSON, for `POST /v1/explain`. Nothing is charged.

use std::fmt;
use std::sync::Arc;

use serde_json::{Map, Value, json};
use tidegate::{Decision, Limit, Op, Verdict};

use crate::gate::{Gate, GateError};
use crate::rules::{Attributes, Budget, Mode, Rule};

/// What all rules say about a request.
#[derive(Clone, Debug)]
pub struct Explanation {
    /// Whether it would pass.
    pub allowed: bool,
    /// Every rule, in the order of the file.
    pub rules: Vec<Explained>,
}

/// What one rule says about it.
#[derive(Clone, Debug)]
pub struct Explained {
    /// The rule.
    pub rule: Arc<Rule>,
    /// Why it does not apply, or how it does.
    pub found: Result<Applied, Unmet>,
}

/// The first condition that does not hold.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Unmet {
    /// The attribute it is about.
    pub attribute: Arc<str>,
    /// Its value, if the request has one.
    pub value: Option<String>,
    /// What would have matched: any one of these.
    pub expected: Vec<String>,
}

/// How a rule applies.
#[derive(Clone, Debug)]
pub struct Applied {
    /// The values its budget is kept by; a missing one counts as empty.
    pub by: Vec<(Arc<str>, Option<String>)>,
    /// Which of its overrides counts, from 0; none: what the rule itself says.
    pub overridden: Option<usize>,
    /// How much there is.
    pub budget: Budget,
    /// What the request costs.
    pub cost: u64,
    /// What each limit would say now.
    pub limits: Vec<(Limit, Verdict)>,
    /// Whether this rule would let it pass.
    pub allowed: bool,
}

impl Gate {
    /// What the rules would say now, and why. Nothing is charged.
    ///
    /// # Errors
    /// If a cost is not a number or the store has no answer.
    pub async fn explain(&self, attributes: &(impl Attributes + ?Sized), cost: u64) -> Result<Explanation, GateError> {
        let rules = self.rules();
        let (mut explained, mut allowed) = (Vec::new(), true);
        for rule in rules.iter() {
            let found = match rule.unmet(attributes) {
                Some((condition, value)) => Err(Unmet {
                    attribute: Arc::clone(&condition.attribute),
                    value: value.map(Into::into),
                    expected: condition.any_of.iter().map(|pattern| pattern.text().into()).collect(),
                }),
                None => {
                    let (matched, overridden) = rule.applied(attributes, cost)?;
                    let budget = matched.budget.clone();
                    let ruling = self.rule_quietly(Op::Peek, vec![matched.clone()]).await?;
                    let limits = match &ruling {
                        Some(decision) => limits_of(&budget, decision),
                        None => Vec::new(),
                    };
                    let own = budget != Budget::Deny && ruling.as_ref().is_none_or(Decision::allowed);
                    let value = |name: &Arc<str>| attributes.get(name).map(Into::into);
                    let by = rule.by.iter().map(|name| (Arc::clone(name), value(name))).collect();
                    allowed &= own || rule.mode == Mode::Shadow;
                    Ok(Applied { by, overridden, budget, cost: matched.cost, limits, allowed: own })
                }
            };
            explained.push(Explained { rule: Arc::clone(rule), found });
        }
        Ok(Explanation { allowed, rules: explained })
    }
}

fn limits_of(budget: &Budget, decision: &Decision) -> Vec<(Limit, Verdict)> {
    match budget {
        Budget::Limits(limits) => limits.into_iter().copied().zip(decision.charges().iter().copied()).collect(),
        _ => Vec::new(),
    }
}

impl fmt::Display for Explanation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for explained in &self.rules {
            explained.fmt(f)?;
        }
        writeln!(f, "the request {}", if self.allowed { "would pass" } else { "would be denied" })
    }
}

impl fmt::Display for Explained {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = &self.rule.name;
        let shadow = if self.rule.mode == Mode::Shadow { " (shadow: denies nothing)" } else { "" };
        let applied = match &self.found {
            Ok(applied) => applied,
            Err(Unmet { attribute, value, expected }) => {
                let expected: Vec<String> = expected.iter().map(|text| format!("{text:?}")).collect();
                let expected = expected.join(" or ");
                return match value {
                    Some(value) => writeln!(f, "{name}: does not apply: {attribute} is {value:?}, not {expected}"),
                    None => writeln!(f, "{name}: does not apply: there is no {attribute}, only {expected} matches"),
                };
            }
        };
        let by: Vec<String> = applied
            .by
            .iter()
            .map(|(name, value)| match value {
                Some(value) => format!("{name} {value:?}"),
                None => format!("no {name}"),
            })
            .collect();
        let whose = if by.is_empty() { "everybody".into() } else { by.join(", ") };
        write!(f, "{name}: applies to {whose}")?;
        if let Some(at) = applied.overridden {
            write!(f, ", by override {}", at + 1)?;
        }
        match &applied.budget {
            Budget::Unlimited => writeln!(f, ": unlimited{shadow}"),
            Budget::Deny => writeln!(f, ": lets nothing pass{shadow}"),
            Budget::Limits(_) => {
                writeln!(f, ", costs {}{shadow}", applied.cost)?;
                for (limit, verdict) in &applied.limits {
                    let Verdict { remaining, amount, .. } = verdict;
                    write!(f, "    {limit}: {remaining} of {amount} left, ")?;
                    match verdict.retry.micros() {
                        _ if verdict.allowed => writeln!(f, "would pass")?,
                        Some(micros) => writeln!(f, "would be denied for {} ms", micros.div_ceil(1000))?,
                        None => writeln!(f, "can never pass")?,
                    }
                }
                Ok(())
            }
        }
    }
}

impl Explanation {
    /// As JSON.
    pub fn to_json(&self) -> Value {
        let rules: Vec<Value> = self.rules.iter().map(Explained::to_json).collect();
        json!({ "allowed": self.allowed, "rules": rules })
    }
}

impl Explained {
    fn to_json(&self) -> Value {
        let (name, mode) = (&*self.rule.name, mode(self.rule.mode));
        match &self.found {
            Err(Unmet { attribute, value, expected }) => json!({
                "rule": name, "mode": mode, "applies": false,
                "because": { "attribute": **attribute, "value": value, "expected": expected },
            }),
            Ok(applied) => {
                let by: Map<String, Value> =
                    applied.by.iter().map(|(name, value)| (name.to_string(), json!(value))).collect();
                let limits: Vec<Value> = applied
                    .limits
                    .iter()
                    .map(|(limit, verdict)| {
                        json!({
                            "limit": limit.to_string(), "allowed": verdict.allowed, "amount": verdict.amount,
                            "remaining": verdict.remaining, "retry_after_us": verdict.retry.micros(),
                            "reset_after_us": verdict.reset_after_us,
                        })
                    })
                    .collect();
                json!({
                    "rule": name, "mode": mode, "applies": true, "by": by, "override": applied.overridden,
                    "budget": budget(&applied.budget), "cost": applied.cost, "allowed": applied.allowed, "limits": limits,
                })
            }
        }
    }
}

/// A rule as JSON, as it would be written in a file.
pub(crate) fn rule_to_json(rule: &Rule) -> Value {
    use crate::rules::{Condition, Cost, Failure};
    let conditions = |when: &[Condition]| -> Value {
        let pairs = when.iter().map(|condition| {
            let any_of: Vec<&str> = condition.any_of.iter().map(|pattern| pattern.text()).collect();
            (condition.attribute.to_string(), json!(any_of))
        });
        Value::Object(pairs.collect())
    };
    let cost = match &rule.cost {
        Cost::Fixed(units) => json!(units),
        Cost::From { attribute, max } => json!({ "from": **attribute, "max": max }),
    };
    let overrides: Vec<Value> = rule
        .overrides
        .iter()
        .map(|other| json!({ "when": conditions(&other.when), "limit": budget(&other.budget) }))
        .collect();
    let failure = rule.on_store_failure.map(|failure| match failure {
        Failure::Open => "open",
        Failure::Closed => "closed",
        Failure::Local => "local",
    });
    let by: Vec<&str> = rule.by.iter().map(|name| &**name).collect();
    json!({
        "name": &*rule.name, "when": conditions(&rule.when), "by": by, "limit": budget(&rule.budget), "cost": cost,
        "overrides": overrides, "mode": mode(rule.mode), "refunds": rule.refunds, "on_store_failure": failure,
        "overflow": rule.overflow.map(crate::print::overflow),
        "sync": rule.sync.name(),
    })
}

fn mode(mode: Mode) -> &'static str {
    match mode {
        Mode::Enforce => "enforce",
        Mode::Shadow => "shadow",
    }
}

fn budget(budget: &Budget) -> String {
    match budget {
        Budget::Limits(limits) => limits.to_string(),
        Budget::Unlimited => "unlimited".into(),
        Budget::Deny => "deny".into(),
    }
}
