//! The headers that show clients their budget.

use std::mem;

use crate::http::denial::DenialResponse;
use crate::http::headers::{self, HeaderFamilies, RateLimitValue};
use ::http::{HeaderMap, HeaderName, HeaderValue, Response};
use tidegate_core::{Decision, Limit};

use super::layer::{Setup, name_of};
use super::rule::Rule;
use crate::store::{Charge, distinct};

const POLICY: HeaderName = HeaderName::from_static("ratelimit-policy");
const RATE_LIMIT: HeaderName = HeaderName::from_static("ratelimit");

/// Headers to add to a response.
#[derive(Default)]
pub(super) enum BudgetHeaders {
    #[default]
    None,
    /// The two headers of the IETF draft.
    Ietf { policy: HeaderValue, rate_limit: HeaderValue },
    /// Any headers.
    List(Vec<(HeaderName, HeaderValue)>),
}

impl BudgetHeaders {
    /// The headers of the IETF draft for one constant limit.
    pub(super) fn ietf(policy: &HeaderValue, told: &RateLimitValue) -> BudgetHeaders {
        let rate_limit =
            HeaderValue::from_bytes(told.as_bytes()).expect("header text is visible ASCII");
        BudgetHeaders::Ietf { policy: policy.clone(), rate_limit }
    }

    /// Adds the headers to the service's response. The denial of an inner layer shows only the
    /// policies that denied, and stays as it is.
    pub(super) fn add_to<B>(&mut self, response: &mut Response<B>) {
        if response.extensions().get::<IsDenial>().is_some() {
            return;
        }
        let headers = response.headers_mut();
        let is_beside_others = match mem::take(self) {
            BudgetHeaders::None => false,
            // The lines of several layers are one list.
            BudgetHeaders::Ietf { policy, rate_limit } => {
                let is_beside_others = headers.append(POLICY, policy);
                headers.append(RATE_LIMIT, rate_limit);
                is_beside_others
            }
            BudgetHeaders::List(list) => {
                let is_beside_others = headers.contains_key(POLICY);
                for (name, value) in list {
                    // A header that cannot be repeated is that of the inner layer.
                    if name.as_str().starts_with("ratelimit") || !headers.contains_key(&name) {
                        headers.append(name, value);
                    }
                }
                is_beside_others
            }
        };
        if is_beside_others {
            [POLICY, RATE_LIMIT].into_iter().for_each(|name| make_names_unique(headers, &name));
        }
    }
}

/// Marks the response to a denied request, for the layers around this one.
#[derive(Clone, Copy)]
pub(super) struct IsDenial;

/// Renames policies of several layers that have the same name.
#[cold]
fn make_names_unique(headers: &mut HeaderMap, name: &HeaderName) {
    let lines: Option<Vec<&str>> =
        headers.get_all(name).iter().map(|line| line.to_str().ok()).collect();
    let Some(lines) = lines else { return };
    let unique = headers::number_repeated_names(&lines).into_iter().map(HeaderValue::try_from);
    if let Ok(unique) = unique.collect::<Result<Vec<_>, _>>() {
        headers.remove(name);
        unique.into_iter().for_each(|line| _ = headers.append(name, line));
    }
}

/// Adds the headers of a denial that a custom response does not have.
pub(super) fn add_missing(headers: &mut HeaderMap, reply: &DenialResponse) {
    for (name, value) in reply.headers() {
        if let (Ok(name), Ok(value)) =
            (HeaderName::from_bytes(name.as_bytes()), HeaderValue::try_from(value))
        {
            headers.entry(name).or_insert(value);
        }
    }
}

/// The policies of a single rule with constant limits.
#[derive(Clone)]
pub(super) struct FixedPolicy {
    names: Vec<String>,
    pub(super) policy: HeaderValue,
}

impl FixedPolicy {
    pub(super) fn of(rules: &[Rule]) -> Option<FixedPolicy> {
        let [rule] = rules else { return None };
        let limits: Vec<(&str, &Limit)> =
            distinct(rule.limits.value()?).into_iter().map(|limit| (&*rule.name, limit)).collect();
        let names: Vec<String> = headers::names(&limits).into_iter().map(Into::into).collect();
        let named: Vec<(&str, &Limit)> =
            names.iter().zip(&limits).map(|(name, (_, limit))| (name.as_str(), *limit)).collect();
        let policy = HeaderValue::try_from(headers::policy(&named)).ok()?;
        Some(FixedPolicy { names, policy })
    }
}

impl Setup {
    /// The headers for an allowed decision over `charges`.
    pub(super) fn budget_headers(
        &self,
        charges: &[Charge<'_>],
        decision: &Decision,
    ) -> BudgetHeaders {
        self.budget_headers_named(&limits_of(charges), decision)
    }

    /// The headers for an allowed decision over limits and the names of their rules.
    pub(super) fn budget_headers_named(
        &self,
        limits: &[(&str, &Limit)],
        decision: &Decision,
    ) -> BudgetHeaders {
        if self.families == HeaderFamilies::IETF {
            let (policy, rate_limit) = match &self.fixed {
                Some(fixed) => {
                    let named = fixed.names.iter().map(String::as_str).zip(decision.verdicts());
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
                    (policy, headers::rate_limit(names.zip(decision.verdicts())))
                }
            };
            if let (Some(policy), Ok(rate_limit)) = (policy, HeaderValue::try_from(rate_limit)) {
                return BudgetHeaders::Ietf { policy, rate_limit };
            }
        }
        let list = headers::of(decision, limits, self.families);
        let header = |(name, value): (&str, String)| {
            Some((
                HeaderName::from_bytes(name.as_bytes()).ok()?,
                HeaderValue::try_from(value).ok()?,
            ))
        };
        BudgetHeaders::List(list.into_iter().filter_map(header).collect())
    }
}

/// The rule and limit of each charge.
pub(super) fn limits_of<'a>(charges: &'a [Charge<'_>]) -> Vec<(&'a str, &'a Limit)> {
    charges.iter().map(|charge| (name_of(charge), &charge.limit)).collect()
}
