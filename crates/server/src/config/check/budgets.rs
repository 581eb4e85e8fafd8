//! Limits, costs, and what happens to requests that lack an attribute.

use tidegate::Limits;

use super::super::Config;
use crate::findings::Finding;
use crate::parse::outline::Step::{self, Item, Key};
use crate::rules::{Budget, Cost, Missing, Mode, Rule};

impl Config {
    /// `unlimited` belongs into overrides, `exempt` on a rule of its own.
    pub(super) fn check_budgets(&self, index: usize, rule: &Rule, found: &mut Vec<Finding>) {
        let name = &rule.name;
        let of_rule = |key| self.outline.value(&[Key("rules"), Item(index), Key(key)]);
        if rule.budget == Budget::Unlimited {
            found.push(Finding::error(
                of_rule("limit"),
                format!(
                    "rule {name}: limit: unlimited has no effect, and the other rules still apply: write `limit: exempt` to exempt the requests that match from all rules, or remove the rule"
                ),
            ));
        }
        if rule.budget == Budget::Exempt && rule.mode == Mode::Shadow {
            found.push(Finding::error(
                of_rule("mode"),
                format!("rule {name}: limit: exempt cannot be in shadow mode, in which a rule has no effect: remove `mode: shadow`, or the rule"),
            ));
        }
        if rule.budget == Budget::Exempt && !rule.overrides.is_empty() {
            found.push(Finding::error(
                self.outline.key(&[Key("rules"), Item(index), Key("overrides")]),
                format!(
                    "rule {name}: limit: exempt has no overrides: narrow `when` instead, for example with `!PATTERN`"
                ),
            ));
        }
        if rule.deny_status.is_some() && !rule.can_deny_outright() {
            found.push(Finding::error(
                self.outline.key(&[Key("rules"), Item(index), Key("deny_status")]),
                format!(
                    "rule {name}: deny_status is for `limit: deny` or `missing: deny`, which this rule and its overrides do not have: remove it; requests over a limit get 429"
                ),
            ));
        }
        for (at, _) in
            rule.overrides.iter().enumerate().filter(|(_, other)| other.budget == Budget::Exempt)
        {
            found.push(Finding::error(
                self.outline.value(&[Key("rules"), Item(index), Key("overrides"), Item(at), Key("limit")]),
                format!(
                    "rule {name}: limit: exempt in an override: write `limit: unlimited` to lift this rule alone, or a rule of its own with `limit: exempt` to lift all rules"
                ),
            ));
        }
    }

    /// Costs above the capacity of a limit, and costs of 0.
    pub(super) fn check_cost(&self, index: usize, rule: &Rule, found: &mut Vec<Finding>) {
        let (name, at) = (&rule.name, [Key("rules"), Item(index)]);
        let cost_at = [&at[..], &[Key("cost")]].concat();
        match &rule.cost {
            Cost::Fixed(0) if rule.settle.is_none() => found.push(Finding::warning(
                self.outline.value(&cost_at),
                format!("rule {name}: cost: 0 takes nothing, so the rule never limits: write a cost of at least 1, or remove the rule"),
            )),
            Cost::Fixed(cost) => {
                let own = (&rule.budget, [&at[..], &[Key("limit")]].concat());
                let others = rule.overrides.iter().enumerate();
                let others = others.map(|(number, other)| {
                    (&other.budget, [&at[..], &[Key("overrides"), Item(number), Key("limit")]].concat())
                });
                for (budget, steps) in std::iter::once(own).chain(others) {
                    if let Budget::Limits(limits) = budget {
                        self.too_dear(rule, *cost, limits, &steps, found);
                    }
                }
            }
            Cost::From { max: 0, .. } => found.push(Finding::error(
                self.outline.value(&[&cost_at[..], &[Key("max")]].concat()),
                format!("rule {name}: cost: max: 0 makes every request free: expected at least 1, the most that one request may cost"),
            )),
            Cost::From { min, max, .. } if min > max => found.push(Finding::error(
                self.outline.value(&[&cost_at[..], &[Key("min")]].concat()),
                format!("rule {name}: cost: min: {min} is more than max: {max}: expected at most {max}"),
            )),
            Cost::From { max, .. } => {
                if let Budget::Limits(limits) = &rule.budget
                    && let Some(limit) = limits.iter().find(|limit| limit.capacity() < *max)
                {
                    let most = limit.capacity();
                    found.push(Finding::warning(
                        self.outline.value(&[&cost_at[..], &[Key("max")]].concat()),
                        format!(
                            "rule {name}: cost: max: {max} is more than {limit} ever allows at once, so a request that costs more than {most} never passes: write at most {most}, or a larger limit or burst"
                        ),
                    ));
                }
            }
        }
        if !matches!(rule.budget, Budget::Limits(_))
            && rule.overrides.is_empty()
            && self.outline.has(&cost_at)
        {
            found.push(Finding::warning(
                self.outline.key(&cost_at),
                format!(
                    "rule {name}: cost has no effect: the rule has no limit to charge; remove it"
                ),
            ));
        }
        if rule.budget == Budget::Exempt && !rule.by.is_empty() {
            found.push(Finding::warning(
                self.outline.key(&[&at[..], &[Key("by")]].concat()),
                format!("rule {name}: by has no effect: limit: exempt keeps no budgets; remove it"),
            ));
        }
    }

    fn too_dear(
        &self,
        rule: &Rule,
        cost: u64,
        limits: &Limits,
        steps: &[Step<'_>],
        found: &mut Vec<Finding>,
    ) {
        let name = &rule.name;
        for limit in limits.iter().filter(|limit| limit.capacity() < cost) {
            let most = limit.capacity();
            found.push(Finding::error(
                self.outline.value(steps),
                format!(
                    "rule {name}: cost: {cost} can never pass {limit}, which holds at most {most}: write a cost of at most {most}, or a larger limit or burst"
                ),
            ));
        }
    }

    /// Requests that lack an attribute of `by`, if the rule does not state `missing`.
    pub(super) fn check_missing(&self, index: usize, rule: &Rule, found: &mut Vec<Finding>) {
        let (name, at) = (&rule.name, [Key("rules"), Item(index)]);
        let missing_at = [&at[..], &[Key("missing")]].concat();
        let is_said = self.outline.has(&missing_at);
        let word = rule.missing.unwrap_or_default().name();
        if is_said && (rule.by.is_empty() || rule.budget == Budget::Exempt) {
            let why = if rule.by.is_empty() {
                "the rule has no by"
            } else {
                "limit: exempt keeps no budgets"
            };
            found.push(Finding::warning(
                self.outline.key(&missing_at),
                format!("rule {name}: missing: {word} has no effect: {why}; remove it"),
            ));
        }
        let keeps_budgets = matches!(rule.budget, Budget::Limits(_)) || !rule.overrides.is_empty();
        if is_said || !keeps_budgets || rule.budget == Budget::Exempt {
            return;
        }
        let required = |attribute: &str| {
            let own = rule.when.iter().filter(|condition| *condition.attribute == *attribute);
            own.into_iter()
                .any(|condition| !condition.any_of.iter().any(|pattern| pattern.matches("")))
        };
        for (number, attribute) in rule.by.iter().enumerate() {
            let is_wrong =
                self.check_attribute("", attribute, "").is_some_and(|finding| finding.is_error());
            if !self.is_always_supplied(attribute) && !required(attribute) && !is_wrong {
                let [skip, deny, share] =
                    [Missing::Skip, Missing::Deny, Missing::Share].map(Missing::name);
                found.push(Finding::warning(
                    self.outline.value(&[&at[..], &[Key("by"), Item(number)]].concat()),
                    format!(
                        "rule {name}: by {attribute}: all requests without {attribute} share one budget: write `missing: {skip}` (the rule does not apply to them), `missing: {deny}`, or `missing: {share}` if that is meant"
                    ),
                ));
            }
        }
    }

    /// Warnings about rules of command line options. Such a rule cannot state `missing`.
    pub fn warnings_of_options(&self, rules: &[Rule]) -> Vec<Finding> {
        let mut found = Vec::new();
        for rule in rules {
            let Budget::Limits(limits) = &rule.budget else { continue };
            for attribute in rule.by.iter().filter(|attribute| !self.is_always_supplied(attribute))
            {
                found.push(Finding::warning(
                    format!("--limit '{limits} by {}'", rule.by.join(", ")),
                    format!(
                        "all requests without {attribute} share one budget: if that is not meant, write the rule into a file with `missing: skip` or `missing: deny`; --print-config prints one to begin with"
                    ),
                ));
            }
        }
        found
    }
}
