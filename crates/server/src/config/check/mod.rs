//! Errors and warnings about a configuration that could be read.
//!
//! These checks use the text only. [`preflight`](crate::preflight()) checks the files and the store
//! that it names.

mod attributes;
mod budgets;
mod patterns;
mod reach;
mod settings;

use super::Config;
use crate::findings::{self, Finding, Severity};
use crate::parse::outline::Outline;
use crate::parse::outline::Step::{self, Item, Key};
use crate::rules::{Condition, Cost, Rule};

/// Keys and items without a value.
pub(super) fn blanks(outline: &Outline) -> Vec<Finding> {
    let blanks = outline.blanks().into_iter();
    let message = |key| format!("{key} has no value: write one, or remove {key}");
    blanks.map(|(place, key)| Finding::error(place, message(key))).collect()
}

impl Config {
    /// The errors and warnings of this configuration, sorted by place.
    pub(super) fn findings(&self) -> Vec<Finding> {
        let mut found = Vec::new();
        if !self.outline.is_of_file() {
            return found;
        }
        found.extend(blanks(&self.outline));
        self.check_settings(&mut found);
        for (index, rule) in self.rules.iter().enumerate() {
            self.check_rule(index, rule, &mut found);
        }
        self.check_reach(&mut found);
        findings::sort(&mut found);
        found
    }

    /// The warnings: what works, but is probably not intended.
    pub fn warnings(&self) -> Vec<Finding> {
        self.findings()
            .into_iter()
            .filter(|finding| finding.severity == Severity::Warning)
            .collect()
    }

    fn check_rule(&self, index: usize, rule: &Rule, found: &mut Vec<Finding>) {
        let (name, at) = (&rule.name, [Key("rules"), Item(index)]);
        self.check_budgets(index, rule, found);
        self.check_cost(index, rule, found);
        self.check_missing(index, rule, found);
        for (number, attribute) in rule.by.iter().enumerate() {
            let place = self.outline.value(&[&at[..], &[Key("by"), Item(number)]].concat());
            found.extend(self.check_attribute(&format!("rule {name}: by"), attribute, &place));
            if rule.by[..number].contains(attribute) {
                let message =
                    format!("rule {name}: by {attribute}: it is there twice; remove one of them");
                found.push(Finding::warning(place, message));
            }
        }
        if let Cost::From { attribute, .. } = &rule.cost {
            let place = self.outline.value(&[&at[..], &[Key("cost"), Key("from")]].concat());
            found.extend(self.check_attribute(
                &format!("rule {name}: cost: from"),
                attribute,
                &place,
            ));
        }
        let steps = [&at[..], &[Key("when")]].concat();
        self.check_conditions(&format!("rule {name}: when"), &rule.when, &steps, found);
        for (number, other) in rule.overrides.iter().enumerate() {
            let steps = [&at[..], &[Key("overrides"), Item(number), Key("when")]].concat();
            self.check_conditions(
                &format!("rule {name}: override {}", number + 1),
                &other.when,
                &steps,
                found,
            );
        }
        let steps = [&at[..], &[Key("charge_when")]].concat();
        self.check_response(&format!("rule {name}: charge_when"), &rule.charge_when, &steps, found);
        let only_proxy =
            [("charge_when", !rule.charge_when.is_empty()), ("settle", rule.settle.is_some())];
        for (key, _) in only_proxy.into_iter().filter(|(_, said)| *said && self.proxy.is_none()) {
            found.push(Finding::warning(
                self.outline.key(&[&at[..], &[Key(key)]].concat()),
                format!(
                    "rule {name}: {key} has no effect: only the proxy sees responses; set proxy.upstream, or remove it"
                ),
            ));
        }
    }

    /// Conditions on a request. `label` begins each message.
    fn check_conditions(
        &self,
        label: &str,
        when: &[Condition],
        steps: &[Step<'_>],
        found: &mut Vec<Finding>,
    ) {
        for condition in when {
            let steps = [steps, &[Key(&condition.attribute)]].concat();
            let place = self.outline.key(&steps);
            found.extend(self.check_attribute(label, &condition.attribute, &place));
            for (number, pattern) in condition.any_of.iter().enumerate() {
                let place = self.outline.value(&[&steps[..], &[Item(number)]].concat());
                found.extend(self.check_pattern(label, &condition.attribute, pattern, &place));
            }
        }
    }

    /// Conditions on a response.
    fn check_response(
        &self,
        label: &str,
        when: &[Condition],
        steps: &[Step<'_>],
        found: &mut Vec<Finding>,
    ) {
        for condition in when {
            let steps = [steps, &[Key(&condition.attribute)]].concat();
            found.extend(attributes::of_response(
                label,
                &condition.attribute,
                &self.outline.key(&steps),
            ));
            for (number, pattern) in condition.any_of.iter().enumerate() {
                let place = self.outline.value(&[&steps[..], &[Item(number)]].concat());
                found.extend(patterns::of_response(label, &condition.attribute, pattern, &place));
            }
        }
    }
}
