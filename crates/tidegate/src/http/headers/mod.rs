//! A decision as HTTP headers: draft 10 or 7 of the IETF
//! (draft-ietf-httpapi-ratelimit-headers), and the GitHub style.
//!
//! Waits are rounded up and what remains is rounded down, so a client that obeys them is never too
//! early.
//!
//! ```
//! use tidegate::http::headers::{self, HeaderFamilies};
//! # use tidegate::core::{Charge, Limit, Op, Record, Timestamp, decide};
//! let limit: Limit = "100/min burst 20".parse()?;
//! # let now = Timestamp::from_secs(7);
//! # let decision = decide(Op::Check, &mut [Charge::new(&limit, &mut Record::default(), 1)], now);
//! let headers = headers::of(&decision, &[("search", &limit)], HeaderFamilies::ALL);
//! assert_eq!(headers[0], ("RateLimit-Policy", r#""search";q=20;w=12"#.into()));
//! assert_eq!(headers[1], ("RateLimit", r#""search";r=19;t=1"#.into()));
//! assert_eq!(headers[2], ("X-RateLimit-Limit", "20".into()));
//! # Ok::<(), tidegate::ParseError>(())
//! ```

mod families;
mod names;
mod value;

use tidegate_core::{Algorithm, Decision, Limit, Retry, Verdict};

pub use self::families::{Draft, HeaderFamilies, HeaderFamiliesError};
pub use self::names::{names, number_repeated_names, quoted_name, visible};
pub use self::value::{QuotedName, RateLimitValue};

use self::names::push_quoted_name;
use self::value::{push_number, push_parameters};

/// The largest integer a structured field may carry.
const MAX_FIELD_INTEGER: u64 = 999_999_999_999_999;
const SECOND_US: u64 = 1_000_000;

/// All headers of a decision, as names and values. A denial always has `Retry-After`, unless it can
/// never pass.
///
/// `limits` are the rule and limit of each charge, in the order of the check; [`names()`] makes policy
/// names of them. The GitHub headers are about the binding charge.
pub fn of(
    decision: &Decision,
    limits: &[(&str, &Limit)],
    families: HeaderFamilies,
) -> Vec<(&'static str, String)> {
    let names = names(limits);
    let policies: Vec<NamedVerdict<'_>> = names
        .iter()
        .zip(limits)
        .zip(decision.charges())
        .map(|((name, (_, limit)), verdict)| NamedVerdict { name, limit, verdict })
        .collect();
    let binding = names.get(decision.binding_index()).map(|name| &**name);
    of_policies(decision, &policies, binding, families)
}

/// A limit under its policy name, and the verdict on it.
pub(crate) struct NamedVerdict<'a> {
    pub(crate) name: &'a str,
    pub(crate) limit: &'a Limit,
    pub(crate) verdict: &'a Verdict,
}

/// The headers of a decision, about some of its policies.
pub(crate) fn of_policies(
    decision: &Decision,
    policies: &[NamedVerdict<'_>],
    binding: Option<&str>,
    families: HeaderFamilies,
) -> Vec<(&'static str, String)> {
    let mut headers = Vec::new();
    if let Some(draft) = families.ietf {
        let limits: Vec<(&str, &Limit)> =
            policies.iter().map(|policy| (policy.name, policy.limit)).collect();
        let (policy, rate_limit) = match draft {
            Draft::Ten => (
                policy(&limits),
                rate_limit(policies.iter().map(|policy| (policy.name, policy.verdict))),
            ),
            Draft::Seven => (policy_draft_7(&limits), rate_limit_draft_7(decision.binding())),
        };
        headers.extend([("RateLimit-Policy", policy), ("RateLimit", rate_limit)]);
    }
    if families.github {
        let verdict = decision.binding();
        let used = verdict.amount.saturating_sub(verdict.remaining);
        headers.push(("X-RateLimit-Limit", verdict.amount.to_string()));
        headers.push(("X-RateLimit-Remaining", verdict.remaining.to_string()));
        headers.push(("X-RateLimit-Used", used.to_string()));
        headers.push(("X-RateLimit-Reset", reset_epoch_secs(decision).to_string()));
        if let Some(name) = binding {
            headers.push(("X-RateLimit-Resource", visible(name).into_owned()));
        }
    }
    if let Some(secs) = retry_after_secs(decision) {
        headers.push(("Retry-After", secs.to_string()));
    }
    headers
}

/// The value of `RateLimit-Policy`: for each limit its name, its quota `q` and, if it is whole
/// seconds, its window `w`.
///
/// The names should come from [`names()`], because a list of policies must not repeat one.
pub fn policy(limits: &[(&str, &Limit)]) -> String {
    let mut out = String::with_capacity(64); // most are shorter
    push_list(&mut out, limits.iter().copied(), |out, limit: &Limit| {
        out.push_str(";q=");
        push_number(out, limit.capacity().min(MAX_FIELD_INTEGER));
        push_window(out, limit);
    });
    out
}

/// The value of `RateLimit-Policy` in draft 7: for each limit its quota and, if it is whole seconds,
/// its window `w`.
pub fn policy_draft_7(limits: &[(&str, &Limit)]) -> String {
    let mut out = String::new();
    for (at, (_, limit)) in limits.iter().enumerate() {
        if at > 0 {
            out.push_str(", ");
        }
        push_number(&mut out, limit.capacity().min(MAX_FIELD_INTEGER));
        push_window(&mut out, limit);
    }
    out
}

/// Appends the parameter `w`.
fn push_window(out: &mut String, limit: &Limit) {
    let window_us = match limit.algorithm() {
        // A bucket has no window; clients can plan with the time it takes to fill.
        Algorithm::Bucket(bucket) => bucket.fill_us().div_ceil(SECOND_US) * SECOND_US,
        Algorithm::Concurrent(_) => return,
        other => other.period_us(),
    };
    if window_us % SECOND_US == 0 {
        out.push_str(";w=");
        push_number(out, window_us / SECOND_US);
    }
}

/// The value of `RateLimit`: for each charge its name, what remains `r` and, unless that is
/// everything, the seconds `t` until more is available.
pub fn rate_limit<'a>(verdicts: impl IntoIterator<Item = (&'a str, &'a Verdict)>) -> String {
    let mut out = String::with_capacity(64); // most are shorter
    push_list(&mut out, verdicts, push_parameters);
    out
}

/// The value of `RateLimit` in draft 7, about one limit: its quota, what remains of it, and the
/// seconds until it is full again.
pub fn rate_limit_draft_7(verdict: &Verdict) -> String {
    let limit = verdict.amount.min(MAX_FIELD_INTEGER);
    let remaining = verdict.remaining.min(MAX_FIELD_INTEGER);
    let reset = verdict.reset_after_us.div_ceil(SECOND_US);
    format!("limit={limit}, remaining={remaining}, reset={reset}")
}

/// The value of `Retry-After` in seconds, rounded up, at least 1; `None` if the request was allowed
/// or can never pass.
pub fn retry_after_secs(decision: &Decision) -> Option<u64> {
    match decision.retry() {
        Retry::After(micros) if !decision.allowed() => {
            let more_us = decision.binding().next_after_us;
            Some(micros.max(more_us).div_ceil(SECOND_US).max(1))
        }
        _ => None,
    }
}

/// The value of `X-RateLimit-Reset`: the Unix second, rounded up, at which everything is available
/// again.
pub fn reset_epoch_secs(decision: &Decision) -> u64 {
    decision.at().as_micros().saturating_add(decision.binding().reset_after_us).div_ceil(SECOND_US)
}

/// Appends a structured-field list of quoted names with parameters.
fn push_list<'a, T: 'a>(
    out: &mut String,
    members: impl IntoIterator<Item = (&'a str, T)>,
    push_parameters: impl Fn(&mut String, T),
) {
    for (name, member) in members {
        if !out.is_empty() {
            out.push_str(", ");
        }
        push_quoted_name(out, name);
        push_parameters(out, member);
    }
}

#[cfg(test)]
mod tests;
