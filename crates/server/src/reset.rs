//! Reset: empties the budgets that a call names, and lists them.
//!
//! The state of a budget is known by the name of the rule, the values of its `by`, and the position
//! of each limit. Overrides use the same positions, so a reset covers as many positions as the
//! longest list of limits of the rule has, whichever override applies.

use std::sync::Arc;

use tidegate::Limits;

use crate::nearest::nearest;
use crate::rules::{Attributes, Budget, Missing, Rule, Rules};

/// The most names in an error message.
const MAX_LISTED: usize = 8;

/// Which budgets of rules to reset.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Target {
    /// One budget of one rule: the one with these values of its `by`.
    Rule {
        /// The name of the rule.
        name: String,
        /// A value for each attribute of the rule's `by`.
        by: Vec<(String, String)>,
    },
    /// One budget of each rule that has a `by`, all of whose attributes are given.
    Given(Vec<(String, String)>),
    /// One budget of each rule that applies to a request with these attributes, rules without `by`
    /// included.
    Applying(Vec<(String, String)>),
}

/// A budget that was reset.
#[derive(Clone, Debug)]
pub struct Emptied {
    /// Its rule.
    pub rule: Arc<Rule>,
    /// The values of the rule's `by`; none for an attribute that was not given.
    pub by: Vec<(Arc<str>, Option<String>)>,
}

impl Emptied {
    /// The budget of this rule for these attributes.
    pub(crate) fn new(rule: &Arc<Rule>, attributes: NamedValues<'_>) -> Self {
        let value = |name: &Arc<str>| {
            attributes.iter().find(|(own, _)| **own == **name).map(|(_, value)| value.clone())
        };
        let by = rule.by.iter().map(|name| (Arc::clone(name), value(name))).collect();
        Emptied { rule: Arc::clone(rule), by }
    }
}

/// The budgets that a reset names do not exist.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum InvalidTarget {
    /// No rule has this name.
    #[error("rule {name:?}: there is no such rule; {hint}")]
    UnknownRule {
        /// The name.
        name: String,
        /// The nearest name, or some of those that exist.
        hint: String,
    },
    /// An attribute of the rule's `by` is not given.
    #[error("by lacks {attribute}: rule {rule} has one budget for each {by}")]
    Lacking {
        /// The rule.
        rule: Arc<str>,
        /// The attribute.
        attribute: Arc<str>,
        /// All attributes of the rule's `by`.
        by: String,
    },
    /// An attribute is given that is not in the rule's `by`.
    #[error("by has {attribute:?}, which is not in the by of rule {rule}: {hint}")]
    NotInBy {
        /// The rule.
        rule: Arc<str>,
        /// The attribute.
        attribute: String,
        /// The nearest attribute, or all of them.
        hint: String,
    },
    /// The rule keeps no budget for requests without this attribute.
    #[error(
        "by has an empty {attribute}: rule {rule} says missing: {}, so there is no budget for requests without it; give a value", .missing.name()
    )]
    Empty {
        /// The rule.
        rule: Arc<str>,
        /// The attribute.
        attribute: Arc<str>,
        /// What the rule does with requests without it.
        missing: Missing,
    },
    /// The rule has no limits that could be reset.
    #[error("rule {0} has no limits: there is nothing to reset")]
    NoLimits(Arc<str>),
    /// No rule has a `by` whose attributes are all given.
    #[error(
        "nothing to reset: no rule with limits has a by whose attributes are all given ({given}); {hint}"
    )]
    NoneGiven {
        /// The attributes that are given.
        given: String,
        /// What rules have in `by`.
        hint: String,
    },
    /// No rule applies to the attributes.
    #[error(
        "nothing to reset: no rule with limits applies to these attributes; /v1/explain says why"
    )]
    NoneApplies,
}

/// Attributes and their values.
pub(crate) type NamedValues<'a> = &'a [(String, String)];

/// The rules whose budgets are named, each with the attributes that say which budget.
pub(crate) fn find<'a>(
    rules: &Rules,
    target: &'a Target,
) -> Result<Vec<(Arc<Rule>, NamedValues<'a>)>, InvalidTarget> {
    let limited = || rules.iter().filter(|rule| longest(rule).is_some());
    match target {
        Target::Rule { name, by } => {
            let rule = rules.iter().find(|rule| *rule.name == **name);
            let rule = rule.ok_or_else(|| unknown_rule(rules, name))?;
            check_by(rule, by)?;
            if longest(rule).is_none() {
                return Err(InvalidTarget::NoLimits(Arc::clone(&rule.name)));
            }
            if let Some(attribute) = without_budget(rule, &by[..]) {
                let (rule, attribute, missing) = (
                    Arc::clone(&rule.name),
                    Arc::clone(attribute),
                    rule.missing.unwrap_or_default(),
                );
                return Err(InvalidTarget::Empty { rule, attribute, missing });
            }
            Ok(vec![(Arc::clone(rule), by)])
        }
        Target::Given(given) => {
            let has = |name: &Arc<str>| given.iter().any(|(own, _)| **own == **name);
            let found = limited().filter(|rule| {
                !rule.by.is_empty()
                    && rule.by.iter().all(has)
                    && without_budget(rule, &given[..]).is_none()
            });
            let found: Vec<_> = found.map(|rule| (Arc::clone(rule), &given[..])).collect();
            if found.is_empty() { Err(none_given(limited(), given)) } else { Ok(found) }
        }
        Target::Applying(attributes) => {
            let applying = limited().filter(|rule| {
                rule.unmet(&attributes[..]).is_none()
                    && without_budget(rule, &attributes[..]).is_none()
            });
            let found: Vec<_> = applying.map(|rule| (Arc::clone(rule), &attributes[..])).collect();
            if found.is_empty() { Err(InvalidTarget::NoneApplies) } else { Ok(found) }
        }
    }
}

/// The longest list of limits of the rule and its overrides.
pub(crate) fn longest(rule: &Rule) -> Option<&Limits> {
    let budgets =
        std::iter::once(&rule.budget).chain(rule.overrides.iter().map(|other| &other.budget));
    let limits = budgets.filter_map(|budget| match budget {
        Budget::Limits(limits) => Some(limits),
        _ => None,
    });
    limits.max_by_key(|limits| positions(limits))
}

/// The missing attribute without which the rule has no budget, because it skips or denies such
/// requests.
fn without_budget<'r>(
    rule: &'r Rule,
    attributes: &(impl Attributes + ?Sized),
) -> Option<&'r Arc<str>> {
    rule.skipped_for(attributes).or_else(|| rule.denied_for(attributes))
}

/// How many positions limits take: equal ones share one.
fn positions(limits: &Limits) -> usize {
    let limits = limits.as_slice();
    limits.iter().enumerate().filter(|(at, limit)| !limits[..*at].contains(limit)).count()
}

/// Whether every attribute of the rule's `by` is given, and no other.
fn check_by(rule: &Rule, given: NamedValues<'_>) -> Result<(), InvalidTarget> {
    let by = || rule.by.iter().map(|name| &**name);
    if let Some((attribute, _)) = given.iter().find(|(name, _)| !by().any(|own| own == name)) {
        let hint = match nearest(attribute, by()) {
            Some(name) => format!("did you mean {name:?}?"),
            None if rule.by.is_empty() => "it has one budget for all requests, leave by out".into(),
            None => format!("expected {}", joined(by())),
        };
        return Err(InvalidTarget::NotInBy {
            rule: Arc::clone(&rule.name),
            attribute: attribute.clone(),
            hint,
        });
    }
    let lacking = rule.by.iter().find(|name| !given.iter().any(|(own, _)| **own == ***name));
    match lacking {
        Some(attribute) => Err(InvalidTarget::Lacking {
            rule: Arc::clone(&rule.name),
            attribute: Arc::clone(attribute),
            by: joined(by()),
        }),
        None => Ok(()),
    }
}

fn unknown_rule(rules: &Rules, name: &str) -> InvalidTarget {
    let names = || rules.iter().map(|rule| &*rule.name);
    let hint = match nearest(name, names()) {
        Some(name) => format!("did you mean {name:?}?"),
        None if rules.is_empty() => "there are no rules".into(),
        None => format!("expected one of {}", listed(names())),
    };
    InvalidTarget::UnknownRule {
        name: name.chars().take(crate::rules::MAX_NAME_BYTES).collect(),
        hint,
    }
}

fn none_given<'a>(
    limited: impl Iterator<Item = &'a Arc<Rule>>,
    given: NamedValues<'_>,
) -> InvalidTarget {
    let limited: Vec<&Arc<Rule>> = limited.filter(|rule| !rule.by.is_empty()).collect();
    let names = || limited.iter().flat_map(|rule| &rule.by).map(|name| &**name);
    let unknown =
        given.iter().map(|(name, _)| name).find(|name| !names().any(|own| own == name.as_str()));
    let hint =
        match unknown.and_then(|name| nearest(name, names()).map(|resilient| (name, resilient))) {
            Some((name, nearest)) => format!("instead of {name:?}, did you mean {nearest:?}?"),
            None if limited.is_empty() => {
                "no rule has a by; \"rule\":\"*\" resets all rules that apply".into()
            }
            None => {
                let rules = limited.iter().map(|rule| {
                    format!("{} has {}", rule.name, joined(rule.by.iter().map(|name| &**name)))
                });
                listed(rules)
            }
        };
    let given =
        if given.is_empty() { "none".into() } else { listed(given.iter().map(|(name, _)| name)) };
    InvalidTarget::NoneGiven { given, hint }
}

/// `user and path`.
fn joined<'a>(names: impl Iterator<Item = &'a str>) -> String {
    names.collect::<Vec<_>>().join(" and ")
}

/// `a, b, c, ...`: as many as a message can list.
fn listed(names: impl Iterator<Item = impl AsRef<str>>) -> String {
    let mut names = names;
    let mut listed: Vec<String> =
        names.by_ref().take(MAX_LISTED).map(|name| name.as_ref().to_string()).collect();
    if names.next().is_some() {
        listed.push("...".into());
    }
    listed.join(", ")
}
