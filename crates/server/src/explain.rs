//! Explains a decision: for every rule whether it matches and why, which budget it charges, and
//! what its limits would decide now.
//!
//! Available as text for terminals and as JSON for `POST /v1/explain`. Nothing is charged.

use std::fmt;
use std::sync::Arc;

use serde_json::{Map, Value, json};
use tidegate::{Decision, Limit, Verdict};

use crate::engine::{Engine, EngineError};
use crate::rules::{Attributes, Budget, InvalidCost, Match, Missing, Mode, Rule, Rules};

/// The last line of an explanation of an allowed request starts with this.
pub const WOULD_PASS: &str = "the request would pass";
/// The last line of an explanation of a denied request starts with this.
pub const WOULD_BE_DENIED: &str = "the request would be denied";

/// The explanation of all rules.
#[derive(Clone, Debug)]
pub struct Explanation {
    /// Whether the request would be allowed; `None` if that depends on state that was not read.
    pub allowed: Option<bool>,
    /// The rule that exempts the request from all others.
    pub exempted_by: Option<Arc<Rule>>,
    /// Every rule, in order.
    pub rules: Vec<Explained>,
    /// Why no rule can match: the request has no attribute that a rule reads.
    pub warning: Option<String>,
}

/// The explanation of one rule.
#[derive(Clone, Debug)]
pub struct Explained {
    /// The rule.
    pub rule: Arc<Rule>,
    /// How the rule applies, or why it does not.
    pub found: Result<Applied, NotApplied>,
}

/// Why a rule does not apply.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum NotApplied {
    /// A condition does not hold.
    Unmet(Unmet),
    /// This attribute is missing, and the rule has `missing: skip`.
    Skipped(Arc<str>),
}

/// The first condition that does not hold.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Unmet {
    /// The attribute.
    pub attribute: Arc<str>,
    /// Its value, if it is present.
    pub value: Option<String>,
    /// The patterns, any of which would match.
    pub expected: Vec<String>,
}

/// How a rule applies.
#[derive(Clone, Debug)]
pub struct Applied {
    /// The values of `by`; a missing one counts as empty.
    pub by: Vec<(Arc<str>, Option<String>)>,
    /// The missing attribute, if the rule denies for it.
    pub missing: Option<Arc<str>>,
    /// The index of the override that applies; `None` if none does.
    pub overridden: Option<usize>,
    /// The budget.
    pub budget: Budget,
    /// The cost of the request.
    pub cost: u64,
    /// Each limit and its verdict now; `None` if its state was not read.
    pub limits: Vec<(Limit, Option<Verdict>)>,
    /// Whether this rule would allow the request; `None` if that depends on state that was not
    /// read.
    pub allowed: Option<bool>,
}

impl Engine {
    /// Explains what the rules would decide now. Nothing is charged.
    pub async fn explain<N: AsRef<str>, V: AsRef<str>>(
        &self,
        attributes: &[(N, V)],
        cost: u64,
    ) -> Result<Explanation, EngineError> {
        let mut explanation = Explanation::of_matching(&self.rules(), attributes, cost)?;
        for explained in &mut explanation.rules {
            let Ok(applied) = &mut explained.found else { continue };
            let (matched, _) = explained.rule.applied(attributes, cost)?;
            let Some(decision) = self.peek(&[matched]).await? else {
                continue;
            };
            applied.limits = limits_of(&applied.budget, &decision);
            applied.allowed = Some(decision.allowed());
        }
        explanation.allowed = explanation.would_pass();
        Ok(explanation)
    }
}

impl Explanation {
    /// Which rules apply and why, without the state of their budgets.
    ///
    /// # Errors
    /// If a cost is not a number.
    pub fn of_matching<N: AsRef<str>, V: AsRef<str>>(
        rules: &Rules,
        attributes: &[(N, V)],
        cost: u64,
    ) -> Result<Explanation, InvalidCost> {
        let (mut explained, mut denied, mut exempted_by) = (Vec::new(), false, None);
        for rule in rules.iter() {
            let found = match (rule.unmet(attributes), rule.skipped_for(attributes)) {
                (Some((condition, value)), _) => Err(NotApplied::Unmet(Unmet {
                    attribute: Arc::clone(&condition.attribute),
                    value: value.map(Into::into),
                    expected: condition
                        .any_of
                        .iter()
                        .map(|pattern| pattern.text().into())
                        .collect(),
                })),
                (None, Some(name)) => Err(NotApplied::Skipped(Arc::clone(name))),
                (None, None) => {
                    let (matched, overridden) = rule.applied(attributes, cost)?;
                    let value = |name: &Arc<str>| Attributes::get(attributes, name).map(Into::into);
                    let by = rule.by.iter().map(|name| (Arc::clone(name), value(name))).collect();
                    let (limits, allowed) = match &matched.budget {
                        Budget::Limits(limits) => {
                            (limits.into_iter().map(|limit| (*limit, None)).collect(), None)
                        }
                        Budget::Unlimited | Budget::Exempt => (Vec::new(), Some(true)),
                        Budget::Deny => (Vec::new(), Some(false)),
                    };
                    denied |= matched.budget == Budget::Deny && rule.mode == Mode::Enforce;
                    if matched.budget == Budget::Exempt && exempted_by.is_none() {
                        exempted_by = Some(Arc::clone(rule));
                    }
                    let Match { budget, cost, missing, .. } = matched;
                    Ok(Applied { by, missing, overridden, budget, cost, limits, allowed })
                }
            };
            explained.push(Explained { rule: Arc::clone(rule), found });
        }
        let exempted_by = exempted_by.filter(|_| !denied);
        let warning = rules.unknown(attributes.iter().map(|(name, _)| name.as_ref()));
        let mut explanation = Explanation { allowed: None, exempted_by, rules: explained, warning };
        explanation.allowed = explanation.would_pass();
        Ok(explanation)
    }

    /// True if a rule exempts the request; false if an enforced rule denies it; true if all
    /// enforced rules that match allow it.
    fn would_pass(&self) -> Option<bool> {
        if self.exempted_by.is_some() {
            return Some(true);
        }
        let enforced = self.rules.iter().filter(|explained| explained.rule.mode == Mode::Enforce);
        let verdicts = || {
            enforced
                .clone()
                .filter_map(|explained| explained.found.as_ref().ok())
                .map(|applied| applied.allowed)
        };
        if verdicts().any(|allowed| allowed == Some(false)) {
            return Some(false);
        }
        verdicts().all(|allowed| allowed == Some(true)).then_some(true)
    }
}

fn limits_of(budget: &Budget, decision: &Decision) -> Vec<(Limit, Option<Verdict>)> {
    match budget {
        Budget::Limits(limits) => {
            limits.into_iter().copied().zip(decision.charges().iter().copied().map(Some)).collect()
        }
        _ => Vec::new(),
    }
}

impl fmt::Display for Explanation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(warning) = &self.warning {
            writeln!(f, "warning: {warning}")?;
        }
        for explained in &self.rules {
            explained.fmt(f)?;
        }
        match (&self.exempted_by, self.allowed) {
            (Some(rule), _) => {
                writeln!(f, "{WOULD_PASS}: {} exempts it, and no rule charges it", rule.name)
            }
            (None, Some(true)) => writeln!(f, "{WOULD_PASS}"),
            (None, Some(false)) => writeln!(f, "{WOULD_BE_DENIED}"),
            (None, None) => {
                writeln!(
                    f,
                    "whether the request would pass depends on what is used, which is not known here"
                )
            }
        }
    }
}

impl fmt::Display for Explained {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = &self.rule.name;
        let shadow = if self.rule.mode == Mode::Shadow { " (shadow: denies nothing)" } else { "" };
        let applied = match &self.found {
            Ok(applied) => applied,
            Err(NotApplied::Skipped(attribute)) => {
                return writeln!(
                    f,
                    "{name}: does not apply: {attribute} is missing, and the rule says `missing: skip`"
                );
            }
            Err(NotApplied::Unmet(Unmet { attribute, value, expected })) => {
                let expected: Vec<String> =
                    expected.iter().map(|text| format!("{text:?}")).collect();
                let expected = expected.join(" or ");
                return match value {
                    Some(value) => writeln!(
                        f,
                        "{name}: does not apply: {attribute} is {value:?}, not {expected}"
                    ),
                    None => writeln!(
                        f,
                        "{name}: does not apply: there is no {attribute}, only {expected} matches"
                    ),
                };
            }
        };
        if let Some(attribute) = &applied.missing {
            return writeln!(
                f,
                "{name}: denies: {attribute} is missing, and the rule says `missing: deny`{shadow}"
            );
        }
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
            Budget::Exempt => writeln!(f, ": exempts from all rules but those that deny"),
            Budget::Limits(_) => {
                writeln!(f, ", costs {}{shadow}", applied.cost)?;
                for (limit, verdict) in &applied.limits {
                    let Some(verdict) = verdict else {
                        writeln!(f, "    {limit}")?;
                        continue;
                    };
                    let Verdict { remaining, amount, .. } = verdict;
                    write!(f, "    {limit}: {remaining} of {amount} left, ")?;
                    match verdict.retry.micros() {
                        _ if verdict.allowed => writeln!(f, "would pass")?,
                        Some(micros) => {
                            writeln!(f, "would be denied for {} ms", micros.div_ceil(1000))?
                        }
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
        let mut explanation = json!({ "allowed": self.allowed, "rules": rules });
        if let Some(rule) = &self.exempted_by {
            explanation["exempted_by"] = json!(*rule.name);
        }
        if let Some(warning) = &self.warning {
            explanation["warning"] = json!(warning);
        }
        explanation
    }
}

impl Explained {
    fn to_json(&self) -> Value {
        let (name, mode) = (&*self.rule.name, mode(self.rule.mode));
        match &self.found {
            Err(NotApplied::Skipped(attribute)) => json!({
                "rule": name, "mode": mode, "applies": false,
                "because": { "attribute": **attribute, "value": null, "missing": Missing::Skip.name() },
            }),
            Err(NotApplied::Unmet(Unmet { attribute, value, expected })) => json!({
                "rule": name, "mode": mode, "applies": false,
                "because": { "attribute": **attribute, "value": value, "expected": expected },
            }),
            Ok(applied) => {
                let by: Map<String, Value> = applied
                    .by
                    .iter()
                    .map(|(name, value)| (name.to_string(), json!(value)))
                    .collect();
                let limits: Vec<Value> = applied
                    .limits
                    .iter()
                    .map(|(limit, verdict)| match verdict {
                        None => json!({ "limit": limit.to_string() }),
                        Some(verdict) => json!({
                            "limit": limit.to_string(), "allowed": verdict.allowed, "amount": verdict.amount,
                            "remaining": verdict.remaining, "retry_after_us": verdict.retry.micros(),
                            "reset_after_us": verdict.reset_after_us,
                        }),
                    })
                    .collect();
                let mut explained = json!({
                    "rule": name, "mode": mode, "applies": true, "by": by, "override": applied.overridden,
                    "budget": budget(&applied.budget), "cost": applied.cost, "allowed": applied.allowed, "limits": limits,
                });
                if let Some(attribute) = &applied.missing {
                    explained["because"] = json!({ "attribute": **attribute, "value": null, "missing": Missing::Deny.name() });
                }
                explained
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
        Cost::From { attribute, min, max } => {
            json!({ "from": **attribute, "min": min, "max": max })
        }
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
        "name": &*rule.name, "when": conditions(&rule.when), "by": by, "missing": rule.missing.unwrap_or_default().name(), "limit": budget(&rule.budget),
        "cost": cost,
        "overrides": overrides, "mode": mode(rule.mode), "refunds": rule.refunds, "on_store_failure": failure,
        "overflow": rule.overflow.map(crate::rules::overflow_name),
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
        Budget::Exempt => "exempt".into(),
    }
}
