//! What clients are told about their budget, as headers of the answer.

use std::mem;

use ::bytes::Bytes;
use ::http::{HeaderMap, HeaderName, HeaderValue};
use tidegate_core::headers::{self, Families, Told};
use tidegate_core::{Decision, Limit};

use super::layer::{Setup, name_of};
use super::rule::Rule;
use crate::store::Charge;

const POLICY: HeaderName = HeaderName::from_static("ratelimit-policy");
const RATE_LIMIT: HeaderName = HeaderName::from_static("ratelimit");

/// Headers to add.
#[derive(Default)]
pub(super) enum Tell {
    #[default]
    Nothing,
    /// What nearly every answer says.
    Usual {
        policy: HeaderValue,
        rate: HeaderValue,
    },
    Headers(Vec<(HeaderName, HeaderValue)>),
}

impl Tell {
    /// What nearly every answer says, of one limit that is always the same.
    #[allow(unsafe_code, reason = "160 instructions of 2300 for every request; see docs/decisions/0034")]
    pub(super) fn usual(policy: &HeaderValue, told: &Told) -> Tell {
        let rate = Bytes::copy_from_slice(told.as_bytes());
        debug_assert!(HeaderValue::from_bytes(&rate).is_ok());
        // SAFETY: what is told are visible letters of ASCII only (`a_name_of_any_kind_is_told_in_visible_letters`), which is what a header's value is made of.
        let rate = unsafe { HeaderValue::from_maybe_shared_unchecked(rate) };
        Tell::Usual { policy: policy.clone(), rate }
    }

    /// To what the service has answered.
    pub(super) fn add_to(&mut self, headers: &mut HeaderMap) {
        match mem::take(self) {
            Tell::Nothing => {}
            // Lists of several layers are one list.
            Tell::Usual { policy, rate } => {
                headers.append(POLICY, policy);
                headers.append(RATE_LIMIT, rate);
            }
            Tell::Headers(told) => {
                for (name, value) in told {
                    // What can be said only once, the inner layer has said.
                    if name.as_str().starts_with("ratelimit") || !headers.contains_key(&name) {
                        headers.append(name, value);
                    }
                }
            }
        }
    }

    /// To an answer that may say something else already.
    pub(super) fn add_missing_to(&self, headers: &mut HeaderMap) {
        let mut add = |name: &HeaderName, value: &HeaderValue| {
            headers.entry(name).or_insert_with(|| value.clone());
        };
        match self {
            Tell::Nothing => {}
            Tell::Usual { policy, rate } => {
                add(&POLICY, policy);
                add(&RATE_LIMIT, rate);
            }
            Tell::Headers(told) => told.iter().for_each(|(name, value)| add(name, value)),
        }
    }
}

/// What clients are told of a single rule's limits.
pub(super) fn policy_of(rules: &[Rule]) -> Option<HeaderValue> {
    let [rule] = rules else { return None };
    let named: Vec<(&str, &Limit)> = rule.limits.value()?.iter().map(|limit| (&*rule.name, limit)).collect();
    HeaderValue::try_from(headers::policy(&named)).ok()
}

impl Setup {
    /// What to tell about a decision over `charges`.
    pub(super) fn tell(&self, charges: &[Charge<'_>], decision: &Decision) -> Tell {
        let named: Vec<(&str, &Limit)> = charges.iter().map(|charge| (name_of(charge), &charge.limit)).collect();
        self.tell_named(&named, decision)
    }

    /// What to tell about a decision over limits of these names.
    pub(super) fn tell_named(&self, named: &[(&str, &Limit)], decision: &Decision) -> Tell {
        if self.families == Families::IETF && decision.allowed() {
            // What is told with every request is worth a shorter way.
            let rate = headers::rate_limit(named.iter().map(|(name, _)| *name).zip(decision.charges()));
            let policy = self.policy.clone().or_else(|| HeaderValue::try_from(headers::policy(named)).ok());
            if let (Some(policy), Ok(rate)) = (policy, HeaderValue::try_from(rate)) {
                return Tell::Usual { policy, rate };
            }
        }
        let told = headers::of(decision, named, self.families);
        let header = |(name, value): (&str, String)| {
            Some((HeaderName::from_bytes(name.as_bytes()).ok()?, HeaderValue::try_from(value).ok()?))
        };
        Tell::Headers(told.into_iter().filter_map(header).collect())
    }
}
