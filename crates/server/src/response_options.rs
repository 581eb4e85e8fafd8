//! Response options: which headers a response has, and how a denial is written.

use tidegate::http::denial::{self, DenyStatus};
use tidegate::http::headers::HeaderFamilies;

/// How responses over HTTP are written.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ResponseOptions {
    /// Which families of rate limit headers are sent.
    pub headers: HeaderFamilies,
    /// How a denial is written for clients without a preference.
    pub denial: denial::DenialFormat,
    /// The status of a denial by a rule with `limit: deny` that has none of its own.
    pub deny_status: DenyStatus,
}

impl Default for ResponseOptions {
    fn default() -> Self {
        ResponseOptions {
            headers: HeaderFamilies::ALL,
            denial: denial::DenialFormat::Problem,
            deny_status: DenyStatus::default(),
        }
    }
}
