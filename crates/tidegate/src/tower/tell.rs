//! What clients are told about their budget, as headers of the answer.

use std::mem;

use crate::http::denial::Reply;
use crate::http::headers::{self, Families, Told};
use ::http::{HeaderMap, HeaderName, HeaderValue, Response};
use tidegate_core::{Decision, Limit};

use super::layer::{Setup, name_of};
use super::rule::Rule;
use crate::store::{Charge, distinct};

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
    pub(super) fn usual(policy: &HeaderValue, told: &Told) -> Tell {
        // Names are escaped: `a_name_of_any_kind_is_told_in_visible_letters`.
        let rate = HeaderValue::from_bytes(told.as_bytes()).expect("header text is visible ASCII");
        Tell::Usual { policy: policy.clone(), rate }
    }

    /// To what the service has answered. The denial of another layer speaks of the policies that
    /// denied, and of no other.
    pub(super) fn add_to<B>(&mut self, response: &mut Response<B>) {
        if response.extensions().get::<IsDenial>().is_some() {
            return;
        }
        let headers = response.headers_mut();
        let is_beside_others = match mem::take(self) {
            Tell::Nothing => false,
            // Lists of several layers are one list.
            Tell::Usual { policy, rate } => {
                let is_beside_others = headers.append(POLICY, policy);
                headers.append(RATE_LIMIT, rate);
                is_beside_others
            }
            Tell::Headers(told) => {
                let is_beside_others = headers.contains_key(POLICY);
                for (name, value) in told {
                    // What can be said only once, the inner layer has said.
                    if name.as_str().starts_with("ratelimit") || !headers.contains_key(&name) {
                        headers.append(name, value);
                    }
                }
                is_beside_others
            }
        };
        if is_beside_others {
            [POLICY, RATE_LIMIT].into_iter().for_each(|name| tell_apart(headers, &name));
        }
    }
}

/// Marks the answer to a request that a layer denied, for the layers around it.
#[derive(Clone, Copy)]
pub(super) struct IsDenial;

/// Gives policies of several layers that have one name each a name of their own.
#[cold]
fn tell_apart(headers: &mut HeaderMap, name: &HeaderName) {
    let lines: Option<Vec<&str>> =
        headers.get_all(name).iter().map(|line| line.to_str().ok()).collect();
    let Some(lines) = lines else { return };
    let apart = headers::told_apart(&lines).into_iter().map(HeaderValue::try_from);
    if let Ok(apart) = apart.collect::<Result<Vec<_>, _>>() {
        headers.remove(name);
        apart.into_iter().for_each(|line| _ = headers.append(name, line));
    }
}

/// Adds the headers of a denial to an answer that may say something else already.
pub(super) fn add_missing(headers: &mut HeaderMap, reply: &Reply) {
    for (name, value) in reply.headers() {
        if let (Ok(name), Ok(value)) =
            (HeaderName::from_bytes(name.as_bytes()), HeaderValue::try_from(value))
        {
            headers.entry(name).or_insert(value);
        }
    }
}

/// The policies of a single rule whose limits are always the same.
#[derive(Clone)]
pub(super) struct Fixed {
    names: Vec<String>,
    pub(super) policy: HeaderValue,
}

impl Fixed {
    pub(super) fn of(rules: &[Rule]) -> Option<Fixed> {
        let [rule] = rules else { return None };
        let limits: Vec<(&str, &Limit)> =
            distinct(rule.limits.value()?).into_iter().map(|limit| (&*rule.name, limit)).collect();
        let names: Vec<String> = headers::names(&limits).into_iter().map(Into::into).collect();
        let named: Vec<(&str, &Limit)> =
            names.iter().zip(&limits).map(|(name, (_, limit))| (name.as_str(), *limit)).collect();
        let policy = HeaderValue::try_from(headers::policy(&named)).ok()?;
        Some(Fixed { names, policy })
    }
}

impl Setup {
    /// What to tell about a decision over `charges` that allows.
    pub(super) fn tell(&self, charges: &[Charge<'_>], decision: &Decision) -> Tell {
        self.tell_named(&limits_of(charges), decision)
    }

    /// What to tell about a decision that allows, over these limits of rules of these names.
    pub(super) fn tell_named(&self, limits: &[(&str, &Limit)], decision: &Decision) -> Tell {
        if self.families == Families::IETF {
            // What is told with every request is worth a shorter way.
            let (policy, rate) = match &self.fixed {
                Some(fixed) => {
                    let named = fixed.names.iter().map(String::as_str).zip(decision.charges());
                    (Some(fixed.policy.clone()), headers::rate_limit(named))
                }
                None => {
                    let names = headers::names(limits);
                    let names = names.iter().map(|name| &**name);
                    let named: Vec<_> = names
                        .clone()
                        .zip(limits)
                        .map(|(name, (_, limit))| (name, *limit))
                        .collect();
                    let policy = HeaderValue::try_from(headers::policy(&named)).ok();
                    (policy, headers::rate_limit(names.zip(decision.charges())))
                }
            };
            if let (Some(policy), Ok(rate)) = (policy, HeaderValue::try_from(rate)) {
                return Tell::Usual { policy, rate };
            }
        }
        let told = headers::of(decision, limits, self.families);
        let header = |(name, value): (&str, String)| {
            Some((
                HeaderName::from_bytes(name.as_bytes()).ok()?,
                HeaderValue::try_from(value).ok()?,
            ))
        };
        Tell::Headers(told.into_iter().filter_map(header).collect())
    }
}

/// The rule and limit of each charge.
pub(super) fn limits_of<'a>(charges: &'a [Charge<'_>]) -> Vec<(&'a str, &'a Limit)> {
    charges.iter().map(|charge| (name_of(charge), &charge.limit)).collect()
}
