//! What happens to a request that lacks the key of a limit.

/// What happens to a request that lacks what a rule is by. An empty value is a missing one.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Missing {
    /// All such requests share one budget.
    #[default]
    Share,
    /// The rule does not apply to them.
    Skip,
    /// They are denied.
    Deny,
}

impl Missing {
    /// The word for it in files.
    pub const fn name(self) -> &'static str {
        match self {
            Missing::Share => "share",
            Missing::Skip => "skip",
            Missing::Deny => "deny",
        }
    }
}
