//! Rules that apply to a request.

use std::borrow::Cow;
use std::sync::Arc;

use tidegate::{Scope, Subject};

use super::{Budget, Mode, Rule};

/// A rule that applies to a request.
#[derive(Clone, Debug)]
pub struct Match {
    /// The rule.
    pub rule: Arc<Rule>,
    /// The key of the budget, among those of the rule.
    pub key: Vec<u8>,
    /// The budget for this request.
    pub budget: Budget,
    /// The cost of this request.
    pub cost: u64,
    /// The attribute whose absence denies the request, if one does.
    pub missing: Option<Arc<str>>,
}

impl Match {
    /// The subject its state is kept under.
    pub fn subject(&self) -> Subject<'_> {
        Subject {
            scope: Scope::Rule(Cow::Borrowed(&self.rule.name)),
            key: Cow::Borrowed(&self.key),
        }
    }
}

/// If a rule exempts the request and none denies it outright, leaves only the first that exempts.
pub(crate) fn exempt<T>(found: &mut Vec<T>, matched: impl Fn(&T) -> &Match) {
    let denied = found
        .iter()
        .map(&matched)
        .any(|one| one.budget == Budget::Deny && one.rule.mode == Mode::Enforce);
    let exempting = found.iter().position(|one| matched(one).budget == Budget::Exempt);
    if let (false, Some(index)) = (denied, exempting) {
        found.swap(0, index);
        found.truncate(1);
    }
}

/// A cost that is not one.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error("{attribute} is {value:?}: expected a whole number as the cost for rule {rule}")]
pub struct InvalidCost {
    pub(super) rule: Arc<str>,
    pub(super) attribute: Arc<str>,
    pub(super) value: String,
}

impl InvalidCost {
    /// The message for the client that sent it, which does not name the rule.
    pub(crate) fn for_client(&self) -> String {
        format!("{} is {:?}: expected a whole number", self.attribute, self.value)
    }
}
