//! Response options: which headers a response has, and how a denial is written.

use tidegate::http::denial::{self, DenyStatus};
use tidegate::http::headers::Families;

/// How answers are dressed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ResponseOptions {
    /// Which families of headers are sent.
    pub headers: Families,
    /// How a denial is written to those who did not say how they want it.
    pub denial: denial::Body,
    /// The status with which a rule answers that lets nothing pass, unless it says otherwise.
    pub deny_status: DenyStatus,
}

impl Default for ResponseOptions {
    fn default() -> Self {
        ResponseOptions {
            headers: Families::ALL,
            denial: denial::Body::Problem,
            deny_status: DenyStatus::default(),
        }
    }
}
