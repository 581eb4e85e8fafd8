//! What an error of a store means for the layers in front of it.

use std::sync::Arc;

use super::StoreError;

/// What a failed call says about the store as a whole; see [`Store::diagnose`](super::Store::diagnose).
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum Diagnosis {
    /// The store decides; the error has a cause in this process or in the call.
    Healthy,
    /// The store answered with an error that may concern this call alone.
    CallFailed {
        /// What went wrong.
        why: Arc<str>,
        /// How to fix it; may be empty.
        advice: &'static str,
    },
    /// The store did not answer.
    Unresponsive {
        /// What went wrong.
        why: Arc<str>,
        /// How to fix it; may be empty.
        advice: &'static str,
        /// Whether the connection was refused or broke, so that no answer can come.
        is_disconnected: bool,
    },
    /// The store answers and takes no charges.
    Refused {
        /// What went wrong.
        why: Arc<str>,
        /// How to fix it; may be empty.
        advice: &'static str,
        /// Whether waiting cannot fix it: the configuration has to change.
        is_permanent: bool,
    },
}

impl Diagnosis {
    /// The diagnosis when nothing but the error is known.
    pub(crate) fn of(error: &StoreError) -> Self {
        match error {
            StoreError::Unavailable(why) => Diagnosis::Unresponsive {
                why: why.to_string().into(),
                advice: "",
                is_disconnected: false,
            },
            _ => Diagnosis::Healthy,
        }
    }
}
