//! The policy for requests without the key of a limit.

/// What happens to a request without the key of a rule. An empty value counts as missing.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Missing {
    /// All such requests share one budget.
    #[default]
    Share,
    /// The rule does not apply.
    Skip,
    /// The request is denied.
    Deny,
}

impl Missing {
    /// The word used in configuration.
    pub const fn name(self) -> &'static str {
        match self {
            Missing::Share => "share",
            Missing::Skip => "skip",
            Missing::Deny => "deny",
        }
    }
}
