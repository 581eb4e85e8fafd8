//! Rules and overrides that repeat others, or never decide anything.

use std::collections::BTreeSet;

use super::super::Config;
use crate::findings::Finding;
use crate::parse::outline::Step::{Item, Key};
use crate::rules::{Budget, Condition, Mode, Rule, covers, excludes};

impl Config {
    pub(super) fn check_reach(&self, found: &mut Vec<Finding>) {
        for (index, rule) in self.rules.iter().enumerate() {
            let earlier: Vec<&Rule> = self.rules.iter().take(index).map(|rule| &**rule).collect();
            if let Some(same) = earlier.iter().find(|earlier| earlier.name == rule.name) {
                found.push(Finding::error(
                    self.outline.value(&[Key("rules"), Item(index), Key("name")]),
                    format!(
                        "two rules are called {:?}: expected a name of its own for each, by which its state is known",
                        same.name
                    ),
                ));
            } else if let Some(same) = earlier.iter().find(|earlier| repeats(earlier, rule)) {
                found.push(Finding::warning(
                    self.outline.value(&[Key("rules"), Item(index), Key("name")]),
                    format!(
                        "rule {} repeats rule {}: it has the same when, by and limit; remove one of them",
                        rule.name, same.name
                    ),
                ));
            }
            self.check_reached(index, rule, found);
            self.check_overrides(index, rule, found);
        }
    }

    /// Whether another rule exempts or denies everything that this one applies to.
    fn check_reached(&self, index: usize, rule: &Rule, found: &mut Vec<Finding>) {
        let decides = |other: &&Rule| match other.budget {
            // The first rule that exempts applies.
            Budget::Exempt if rule.budget == Budget::Exempt => self
                .rules
                .iter()
                .position(|one| one.name == other.name)
                .is_some_and(|before| before < index),
            Budget::Exempt => rule.budget != Budget::Deny,
            Budget::Deny if rule.budget == Budget::Deny => false,
            Budget::Deny => {
                other.mode == Mode::Enforce && other.overrides.is_empty() && other.by.is_empty()
            }
            _ => false,
        };
        let mut others = self.rules.iter().map(|other| &**other).filter(decides);
        if let Some(other) = others.find(|other| covers(&other.when, &rule.when)) {
            let verb = if other.budget == Budget::Exempt { "exempts" } else { "denies" };
            found.push(Finding::warning(
                self.outline.value(&[Key("rules"), Item(index), Key("name")]),
                format!(
                    "rule {} never decides: rule {} {verb} every request that it applies to; narrow the when of {}, or remove {}",
                    rule.name, other.name, other.name, rule.name
                ),
            ));
        }
    }

    /// The first override that matches applies, so one after a weaker condition is never reached.
    fn check_overrides(&self, index: usize, rule: &Rule, found: &mut Vec<Finding>) {
        if let Some(all) = rule.overrides.iter().position(|other| covers(&other.when, &rule.when)) {
            let (name, own) = (&rule.name, all + 1);
            found.push(Finding::warning(
                self.outline.value(&[Key("rules"), Item(index), Key("overrides"), Item(all)]),
                format!(
                    "rule {name}: override {own} matches every request of the rule, so the rule's own limit never counts: narrow its when, or write its limit into the rule"
                ),
            ));
        }
        for (number, other) in rule.overrides.iter().enumerate() {
            let place =
                || self.outline.value(&[Key("rules"), Item(index), Key("overrides"), Item(number)]);
            let (name, own) = (&rule.name, number + 1);
            let both: Vec<Condition> = rule.when.iter().chain(&other.when).cloned().collect();
            if let Some(before) =
                rule.overrides[..number].iter().position(|before| covers(&before.when, &both))
            {
                let before = before + 1;
                found.push(Finding::warning(
                    place(),
                    format!(
                        "rule {name}: override {own} is never reached: override {before} matches first, and the first that matches counts; put the narrower one first, or remove one"
                    ),
                ));
            } else if let Some(condition) =
                other.when.iter().find(|own| rule.when.iter().any(|of| excludes(of, own)))
            {
                let attribute = &condition.attribute;
                found.push(Finding::warning(
                    place(),
                    format!(
                        "rule {name}: override {own} never matches: the rule's own when excludes its {attribute}; change one of them"
                    ),
                ));
            }
        }
    }
}

/// Whether two rules differ only in their names.
fn repeats(one: &Rule, other: &Rule) -> bool {
    covers(&one.when, &other.when)
        && covers(&other.when, &one.when)
        && one.by.iter().collect::<BTreeSet<_>>() == other.by.iter().collect::<BTreeSet<_>>()
        && (&one.budget, &one.cost, one.mode) == (&other.budget, &other.cost, other.mode)
        && one.overrides.is_empty()
        && other.overrides.is_empty()
        && (&one.charge_when, &one.settle) == (&other.charge_when, &other.settle)
}
