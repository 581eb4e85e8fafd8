//! Which attributes the rules look at, to report a call that brings only others: a misspelt name is not silently a request without a limit.

use std::sync::Arc;

use super::{Cost, Rule, Rules};
use crate::nearest::nearest;

/// The attributes that a rule looks at.
pub(super) fn attributes(rule: &Rule) -> impl Iterator<Item = Arc<str>> {
    let overridden = rule.overrides.iter().flat_map(|other| &other.when);
    let conditions = rule.when.iter().chain(overridden).map(|condition| &condition.attribute);
    let cost = match &rule.cost {
        Cost::From { attribute, .. } => Some(attribute),
        Cost::Fixed(_) => None,
    };
    rule.by.iter().chain(conditions).chain(cost).cloned().collect::<Vec<_>>().into_iter()
}

impl Rules {
    /// Whether a rule looks at this attribute.
    pub(crate) fn looks_at(&self, name: &str) -> bool {
        self.known.contains(name)
    }

    /// Why no rule can know a request by these names: none of them is looked at. Nothing, if one is, or if there are none.
    pub(crate) fn unknown<'a>(&self, names: impl Iterator<Item = &'a str> + Clone) -> Option<String> {
        if names.clone().any(|name| self.known.contains(name)) {
            return None;
        }
        let first = names.clone().next()?;
        if self.is_empty() {
            return Some("there are no rules, so nothing is limited".into());
        }
        let known: Vec<&str> = self.known.iter().map(|name| &**name).collect();
        let hint = match names.clone().find_map(|name| nearest(name, known.iter().copied())) {
            Some(right) => format!("did you mean {right:?}?"),
            None if known.is_empty() => "the rules look at no attribute".into(),
            None => format!("the rules look at {}", known.join(", ")),
        };
        let shown = |name: &str| format!("{:?}", name.chars().take(64).collect::<String>());
        match names.count() {
            1 => Some(format!("no rule looks at the attribute {}: {hint}", shown(first))),
            more => Some(format!("no rule looks at any of the {more} attributes, {} among them: {hint}", shown(first))),
        }
    }
}

#[cfg(test)]
mod tests {
    use crate::config::Config;

    #[test]
    fn only_a_call_without_any_known_attribute_is_reported() {
        let text = "\
rules:
  - { name: a, when: { path: /x }, by: [user], limit: 1/s, cost: { from: size, max: 9 } }
  - { name: b, limit: 1/s, overrides: [{ when: { plan: gold }, limit: 9/s }] }
";
        let rules = Config::parse(text, "f").unwrap().rules;
        let unknown = |names: &[&'static str]| rules.unknown(names.iter().copied());
        for known in ["path", "user", "size", "plan"] {
            assert_eq!(unknown(&["other", known]), None, "{known}");
        }
        assert_eq!(unknown(&[]), None);
        for (names, expected) in [
            (&["usr"][..], "no rule looks at the attribute \"usr\": did you mean \"user\"?"),
            (&["colour"], "no rule looks at the attribute \"colour\": the rules look at path, plan, size, user"),
            (
                &["colour", "usr"],
                "no rule looks at any of the 2 attributes, \"colour\" among them: did you mean \"user\"?",
            ),
        ] {
            assert_eq!(unknown(names).unwrap(), expected);
        }
        let of = |text| Config::parse(text, "f").unwrap().rules.unknown(["a"].into_iter());
        assert_eq!(of("rules: []\n").unwrap(), "there are no rules, so nothing is limited");
        let global = of("rules: [{ name: all, limit: 1/s }]\n").unwrap();
        assert_eq!(global, "no rule looks at the attribute \"a\": the rules look at no attribute");
    }
}
