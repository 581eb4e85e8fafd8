//! Response options: which headers a response has, and how a denial is written.

use tidegate::http::denial::{self, DenyStatus};
use tidegate::http::headers::HeaderFamilies;

/// How answers are dressed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ResponseOptions {
    /// Which families of headers are sent.
    pub headers: HeaderFamilies,
    /// How a denial is written to those who did not say how they want it.
    pub denial: denial::DenialFormat,
    /// The status with which a rule answers that lets nothing pass, unless it says otherwise.
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
