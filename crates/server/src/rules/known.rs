//! The attributes that rules use. A check with only other attributes is reported, because a
//! misspelt name is never silently a request without a limit. Headers, cookies and query parameters
//! among them must not occur twice in a request.

use std::sync::Arc;

use super::{Cost, Rule, Rules};
use crate::nearest::nearest;

/// The attributes that a rule uses.
pub(super) fn attributes(rule: &Rule) -> impl Iterator<Item = Arc<str>> {
    let overridden = rule.overrides.iter().flat_map(|other| &other.when);
    let conditions = rule.when.iter().chain(overridden).map(|condition| &condition.attribute);
    let cost = match &rule.cost {
        Cost::From { attribute, .. } => Some(attribute),
        Cost::Fixed(_) => None,
    };
    rule.by.iter().chain(conditions).chain(cost).cloned().collect::<Vec<_>>().into_iter()
}

/// Headers, cookies and query parameters that rules use.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Named {
    /// Headers, in lower case. Not `host`, of which there is one anyway, and not `cookie`, which
    /// HTTP/2 sends in several lines.
    pub headers: Vec<Arc<str>>,
    /// Cookies.
    pub cookies: Vec<Arc<str>>,
    /// Query parameters.
    pub parameters: Vec<Arc<str>>,
}

impl Named {
    /// Those among these attributes.
    pub(super) fn among<'a>(attributes: impl Iterator<Item = &'a Arc<str>>) -> Self {
        let mut named = Named::default();
        for attribute in attributes {
            let (list, name): (_, Arc<str>) =
                match attribute.split_once('.').unwrap_or((attribute, "")) {
                    ("bearer", _) => (&mut named.headers, "authorization".into()),
                    ("header", name) => match name.to_ascii_lowercase() {
                        name if name == "host" || name == "cookie" => continue,
                        name => (&mut named.headers, name.into()),
                    },
                    ("cookie", name) => (&mut named.cookies, name.into()),
                    ("query", name) => (&mut named.parameters, name.into()),
                    _ => continue,
                };
            if !list.contains(&name) {
                list.push(name);
            }
        }
        named
    }
}

impl Rules {
    /// Whether a rule uses this attribute.
    pub(crate) fn looks_at(&self, name: &str) -> bool {
        self.known.contains(name)
    }

    /// The headers, cookies and query parameters that rules use.
    pub fn named(&self) -> &Named {
        &self.named
    }

    /// The message for a check with attributes that no rule uses; `None` if a rule uses one of
    /// them, or if the check has none.
    pub(crate) fn unknown<'a>(
        &self,
        names: impl Iterator<Item = &'a str> + Clone,
    ) -> Option<String> {
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
            more => Some(format!(
                "no rule looks at any of the {more} attributes, {} among them: {hint}",
                shown(first)
            )),
        }
    }
}

#[cfg(test)]
mod tests {
    use crate::config::Config;

    #[test]
    fn headers_cookies_and_parameters_of_rules_are_found() {
        let text = "\
rules:
  - name: a
    when: { header.X-Plan: gold, path: /x, header.host: h }
    by: [header.x-key, cookie.session, query.k, bearer.sub, header.cookie]
    limit: 1/s
    cost: { from: header.x-cost, max: 9 }
  - { name: b, by: [bearer], limit: 1/s, overrides: [{ when: { query.plan: gold, cookie.Session: s }, limit: 9/s }] }
";
        let rules = Config::parse(text, "f").unwrap().rules;
        let list = |names: &[std::sync::Arc<str>]| {
            names.iter().map(|name| &**name).collect::<Vec<_>>().join(" ")
        };
        assert_eq!(list(&rules.named().headers), "authorization x-plan x-cost x-key");
        assert_eq!(list(&rules.named().cookies), "Session session");
        assert_eq!(list(&rules.named().parameters), "k plan");
    }

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
            (
                &["colour"],
                "no rule looks at the attribute \"colour\": the rules look at path, plan, size, user",
            ),
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
