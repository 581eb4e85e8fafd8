//! What clients are told about their budget, as headers of the answer.

use ::http::{HeaderMap, HeaderName, HeaderValue};
use tidegate_core::headers::{self, Families, Told};
use tidegate_core::{Decision, Limit, Verdict};

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
    /// To what the service has answered.
    pub(super) fn add_to(self, headers: &mut HeaderMap) {
        match self {
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

    /// What is told with nearly every request, of one limit that is always the same; unless its name is long.
    pub(super) fn tell_usual(&self, item: &str, verdict: &Verdict) -> Option<Tell> {
        if self.families != Families::IETF {
            return None;
        }
        let (told, mut text) = (Told::of(verdict), [0; 128]);
        let told = told.as_bytes();
        text.get_mut(..item.len())?.copy_from_slice(item.as_bytes());
        text.get_mut(item.len()..item.len() + told.len())?.copy_from_slice(told);
        let rate = HeaderValue::from_bytes(&text[..item.len() + told.len()]).ok()?;
        Some(Tell::Usual { policy: self.policy.clone()?, rate })
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
