//! Whether the store decides and, if it does not, how limits are enforced meanwhile.

use std::sync::Arc;

use tidegate::resilience::{OnFailure, StoreStatus};

use crate::backend::Backend;
use crate::engine::Engine;
use crate::rules::{Mode, Rule, Rules};

/// A store that does not decide, and what that means for requests.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct StoreProblem {
    /// `unreachable` or `refused`.
    pub state: &'static str,
    /// The cause.
    pub why: String,
    /// How limits are enforced meanwhile, with the names of rules that have a policy of their own.
    pub enforced: String,
    /// Whether requests are denied because of it.
    pub denies: bool,
}

/// What is wrong with the store of an engine; `None` if it decides.
pub fn store_problem(engine: &Engine) -> Option<StoreProblem> {
    let Backend::Resilient(resilient, _) = engine.store() else { return None };
    let (status, rules) = (resilient.status(), engine.rules());
    if status.state.is_healthy() {
        return None;
    }
    Some(StoreProblem {
        state: status.state.name(),
        why: status.state.why().into(),
        enforced: enforced(&status, &rules),
        denies: status.on_failure == OnFailure::Closed
            || !rules_with(OnFailure::Closed, &rules).is_empty(),
    })
}

/// How limits are enforced while the store does not decide: what the file says, and which rules
/// have a policy of their own.
pub(crate) fn enforced(status: &StoreStatus, rules: &Rules) -> String {
    let mut text = status.enforced();
    let mut joint = ", except ";
    for policy in [OnFailure::Local, OnFailure::Open, OnFailure::Closed] {
        if policy == status.on_failure {
            continue;
        }
        let names = rules_with(policy, rules);
        let meaning = match policy {
            OnFailure::Open => "open: not enforced".into(),
            OnFailure::Closed => "closed: denied".into(),
            _ => format!("local: {}", status.enforced_by(policy)),
        };
        if let [_, ..] = &names[..] {
            let rules = if names.len() == 1 { "rule" } else { "rules" };
            text += &format!("{joint}{rules} {} ({meaning})", names.join(", "));
            joint = " and ";
        }
    }
    text
}

/// The names of enforced rules that have this policy of their own.
fn rules_with(policy: OnFailure, rules: &Rules) -> Vec<String> {
    let own = |rule: &Rule| rule.on_store_failure.map(OnFailure::from);
    let has_it = |rule: &&Arc<Rule>| rule.mode == Mode::Enforce && own(rule) == Some(policy);
    rules.iter().filter(has_it).map(|rule| rule.name.to_string()).collect()
}

#[cfg(test)]
mod tests {
    use tidegate::resilience::Resilient;

    use super::*;
    use crate::config::Config;

    #[test]
    fn what_is_enforced_names_the_rules_that_differ_from_the_file() {
        let memory = tidegate::Memory::builder().build();
        let status = |policy| {
            Resilient::builder(memory.clone()).nodes(3).on_failure(policy).build().status()
        };
        let rule = |name: &str, more: &str| format!("{{ name: {name}, limit: 10/s{more} }}");
        let [local, open, closed] =
            ["local", "open", "closed"].map(|word| format!(", on_store_failure: {word}"));
        let third = "1/3 of each limit on this node (3 nodes, configured)";
        let shadow = open.clone() + ", mode: shadow";
        for (policy, rules, expected) in [
            (
                OnFailure::Local,
                vec![rule("a", ""), rule("b", &local), rule("c", &shadow)],
                third.to_owned(),
            ),
            (
                OnFailure::Local,
                vec![rule("a", &open)],
                format!("{third}, except rule a (open: not enforced)"),
            ),
            (
                OnFailure::Local,
                vec![rule("a", &open), rule("b", &open), rule("c", &closed)],
                format!(
                    "{third}, except rules a, b (open: not enforced) and rule c (closed: denied)"
                ),
            ),
            (
                OnFailure::Closed,
                vec![rule("a", &local), rule("b", &open)],
                format!(
                    "everything is denied (on_store_failure: closed), except rule a (local: {third}) and rule b (open: not enforced)"
                ),
            ),
        ] {
            let config = Config::parse(&format!("rules: [{}]", rules.join(", ")), "test").unwrap();
            assert_eq!(enforced(&status(policy), &config.rules), expected);
        }
    }
}
