//! The result of a check against the rules.

use std::sync::Arc;

use tidegate::{Decision, Limit, Timestamp, Verdict};

use crate::rules::Rule;

/// What the rules say about a request.
#[derive(Clone, Debug)]
pub struct Ruling {
    /// Whether it may pass.
    pub allowed: bool,
    /// What the limits say; nothing, if no rule with limits applies.
    pub decision: Option<Decision>,
    /// Whose limits they are, in the order of the decision's charges.
    pub charges: Vec<Charged>,
    /// The rule that lets nothing pass, if one applies.
    pub refused_by: Option<Arc<Rule>>,
    /// The attribute whose absence that rule denies, if that is why.
    pub refused_for: Option<Arc<str>>,
    /// The rule that exempts the request from all others, if one does.
    pub exempted_by: Option<Arc<Rule>>,
    /// What rules in shadow mode would have said.
    pub shadow: Vec<Shadowed>,
}

/// One limit of one rule.
#[derive(Clone, Debug)]
pub struct Charged {
    /// The rule.
    pub rule: Arc<Rule>,
    /// Whose budget.
    pub key: Vec<u8>,
    /// The limit.
    pub limit: Limit,
    /// What it cost.
    pub cost: u64,
}

/// What a rule in shadow mode would have said.
#[derive(Clone, Debug)]
pub struct Shadowed {
    /// The rule.
    pub rule: Arc<Rule>,
    /// Whether it would have let the request pass.
    pub allowed: bool,
    /// What its limits say, if it has any; its source is [`Source::Shadow`].
    pub decision: Option<Decision>,
}

impl Ruling {
    /// The charge that binds, and what it says.
    pub fn binding(&self) -> Option<(&Charged, &Verdict)> {
        let decision = self.decision.as_ref()?;
        Some((self.charges.get(decision.binding_index())?, decision.binding()))
    }

    /// When it was decided, if limits were asked.
    pub fn at(&self) -> Option<Timestamp> {
        self.decision.as_ref().map(Decision::at)
    }
}
