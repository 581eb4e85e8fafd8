//! The verdict of the rules on one request.

use std::sync::Arc;

use tidegate::resilience::OnFailure;
use tidegate::{Decision, Limit, Source, Timestamp, Verdict};

use crate::rules::{Budget, Match, Rule};

/// The verdict of the rules on one request.
#[derive(Clone, Debug)]
pub struct Ruling {
    /// Whether all enforced rules allow the request.
    pub allowed: bool,
    /// The decision on all limits of enforced rules; `None` if no rule with limits matches.
    pub decision: Option<Decision>,
    /// The limits, in the order of the decision's charges.
    pub charges: Vec<Charged>,
    /// The rule with `limit: deny` that matches, or the rule that denies a missing attribute.
    pub refused_by: Option<Arc<Rule>>,
    /// The missing attribute, if `refused_by` denies for that.
    pub refused_for: Option<Arc<str>>,
    /// The rule that exempts the request from all others.
    pub exempted_by: Option<Arc<Rule>>,
    /// The verdicts of rules in shadow mode.
    pub shadow: Vec<Shadowed>,
}

/// One limit of one rule.
#[derive(Clone, Debug)]
pub struct Charged {
    /// The rule.
    pub rule: Arc<Rule>,
    /// The key of the budget.
    pub key: Vec<u8>,
    /// The limit.
    pub limit: Limit,
    /// The cost charged to it.
    pub cost: u64,
}

/// The verdict of a rule in shadow mode.
#[derive(Clone, Debug)]
pub struct Shadowed {
    /// The rule.
    pub rule: Arc<Rule>,
    /// Whether the rule would allow the request if it were enforced.
    pub allowed: bool,
    /// The decision on its limits, if it has any. Its source is [`Source::Shadow`].
    pub decision: Option<Decision>,
}

impl Ruling {
    /// The verdict of these enforced matches before any limit is charged: whether one refuses or
    /// exempts the request.
    pub(crate) fn before_limits(enforced: &[Match]) -> Self {
        let refusing = enforced.iter().find(|matched| matched.budget == Budget::Deny);
        let exempting =
            enforced.iter().find(|matched| matched.budget == Budget::Exempt && refusing.is_none());
        Ruling {
            allowed: refusing.is_none(),
            decision: None,
            charges: Vec::new(),
            refused_by: refusing.map(|matched| Arc::clone(&matched.rule)),
            refused_for: refusing.and_then(|matched| matched.missing.clone()),
            exempted_by: exempting.map(|matched| Arc::clone(&matched.rule)),
            shadow: Vec::new(),
        }
    }

    /// The binding charge and its verdict.
    pub fn binding(&self) -> Option<(&Charged, &Verdict)> {
        let decision = self.decision.as_ref()?;
        Some((self.charges.get(decision.binding_index())?, decision.binding()))
    }

    /// The time of the decision, if there is one.
    pub fn at(&self) -> Option<Timestamp> {
        self.decision.as_ref().map(Decision::at)
    }

    /// Whether the request is denied only because the store is unavailable, by a rule whose policy
    /// is then `closed`. `default` is the policy of rules without one.
    pub(crate) fn is_closed_by_failure(&self, default: Option<OnFailure>) -> bool {
        let Some(default) = default else { return false };
        let Some(decision) =
            self.decision.as_ref().filter(|decision| decision.source() == Source::Fallback)
        else {
            return false;
        };
        let mut denied =
            self.charges.iter().zip(decision.charges()).filter(|(_, verdict)| !verdict.allowed);
        denied.any(|(charged, _)| {
            charged.rule.policy().on_failure.unwrap_or(default) == OnFailure::Closed
        })
    }
}
