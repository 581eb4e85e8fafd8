//! A decision as the text of HTTP headers: IETF draft-ietf-httpapi-ratelimit-headers-10, and the GitHub style.
//!
//! Everything is rounded so that a client that believes it is never too early: waits up, what is left down.
//!
//! ```
//! use tidegate_core::{Charge, Limit, Op, Record, Timestamp, decide, headers};
//! let limit: Limit = "100/min burst 20".parse()?;
//! let decision = decide(Op::Check, &mut [Charge::new(&limit, &mut Record::default(), 1)], Timestamp::from_secs(7));
//! let headers = headers::of(&decision, &[("search", &limit)], headers::Families::ALL);
//! assert_eq!(headers[0], ("RateLimit-Policy", r#""search";q=20;w=12"#.into()));
//! assert_eq!(headers[1], ("RateLimit", r#""search";r=19;t=1"#.into()));
//! assert_eq!(headers[2], ("X-RateLimit-Limit", "20".into()));
//! # Ok::<(), tidegate_core::ParseError>(())
//! ```

use alloc::borrow::Cow;
use alloc::string::{String, ToString};
use alloc::vec::Vec;
use core::fmt::Write;

use crate::algorithm::Algorithm;
use crate::decision::{Decision, Retry, Verdict};
use crate::limit::Limit;

/// The largest integer a structured field may carry.
const MAX_FIELD_INTEGER: u64 = 999_999_999_999_999;
const SECOND_US: u64 = 1_000_000;

/// Which families of headers to send.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Families {
    /// `RateLimit-Policy` and `RateLimit`.
    pub ietf: bool,
    /// `X-RateLimit-Limit`, `-Remaining`, `-Used`, `-Reset` and `-Resource`.
    pub github: bool,
}

impl Families {
    /// All of them.
    pub const ALL: Families = Families { ietf: true, github: true };
    /// The IETF draft only.
    pub const IETF: Families = Families { ietf: true, github: false };
    /// The GitHub style only.
    pub const GITHUB: Families = Families { ietf: false, github: true };
}

/// Every header of a decision, as names and values. `Retry-After` is added on a denial whatever the families.
///
/// `limits` are the name and limit of each charge, in the order of the check. GitHub's headers speak of the binding charge.
pub fn of(decision: &Decision, limits: &[(&str, &Limit)], families: Families) -> Vec<(&'static str, String)> {
    let mut headers = Vec::new();
    if families.ietf {
        headers.push(("RateLimit-Policy", policy(limits)));
        let named = limits.iter().map(|(name, _)| *name).zip(decision.charges());
        headers.push(("RateLimit", rate_limit(named)));
    }
    if families.github {
        let verdict = decision.binding();
        headers.push(("X-RateLimit-Limit", verdict.amount.to_string()));
        headers.push(("X-RateLimit-Remaining", verdict.remaining.to_string()));
        headers.push(("X-RateLimit-Used", (verdict.amount - verdict.remaining.min(verdict.amount)).to_string()));
        headers.push(("X-RateLimit-Reset", reset_epoch_secs(decision).to_string()));
        if let Some((name, _)) = limits.get(decision.binding_index()) {
            headers.push(("X-RateLimit-Resource", visible(name).into_owned()));
        }
    }
    if let Some(secs) = retry_after_secs(decision) {
        headers.push(("Retry-After", secs.to_string()));
    }
    headers
}

/// The value of `RateLimit-Policy`: for each limit its name, quota `q` and, where it is whole seconds, window `w`.
pub fn policy(limits: &[(&str, &Limit)]) -> String {
    list(limits.iter().copied(), |out, limit: &Limit| {
        write!(out, ";q={}", limit.capacity().min(MAX_FIELD_INTEGER))?;
        let window_us = match limit.algorithm() {
            // A bucket has no window; the time to fill it is what a client can plan with.
            Algorithm::Bucket(bucket) => bucket.fill_us().div_ceil(SECOND_US) * SECOND_US,
            Algorithm::Concurrent(_) => return Ok(()),
            other => other.period_us(),
        };
        if window_us % SECOND_US == 0 { write!(out, ";w={}", window_us / SECOND_US) } else { Ok(()) }
    })
}

/// The value of `RateLimit`: for each charge the name, what remains `r` and, unless that is everything, the seconds `t`
/// until more is available.
pub fn rate_limit<'a>(verdicts: impl IntoIterator<Item = (&'a str, &'a Verdict)>) -> String {
    list(verdicts, |out, verdict: &Verdict| {
        write!(out, ";r={}", verdict.remaining.min(MAX_FIELD_INTEGER))?;
        if verdict.remaining < verdict.amount {
            write!(out, ";t={}", verdict.next_after_us.div_ceil(SECOND_US))?;
        }
        Ok(())
    })
}

/// The value of `Retry-After`: whole seconds, rounded up, at least 1; `None` unless it was denied and can pass some time.
pub fn retry_after_secs(decision: &Decision) -> Option<u64> {
    match decision.retry() {
        Retry::After(micros) if !decision.allowed() => {
            let more_us = decision.binding().next_after_us;
            Some(micros.max(more_us).div_ceil(SECOND_US).max(1))
        }
        _ => None,
    }
}

/// The value of `X-RateLimit-Reset`: the Unix second, rounded up, at which everything is available again.
pub fn reset_epoch_secs(decision: &Decision) -> u64 {
    decision.at().as_micros().saturating_add(decision.binding().reset_after_us).div_ceil(SECOND_US)
}

/// A structured-field list of quoted names with parameters.
fn list<'a, T: 'a>(
    items: impl IntoIterator<Item = (&'a str, T)>,
    parameters: impl Fn(&mut String, T) -> core::fmt::Result,
) -> String {
    let mut out = String::new();
    for (name, item) in items {
        if !out.is_empty() {
            out.push_str(", ");
        }
        out.push('"');
        for c in visible(name).chars() {
            if matches!(c, '"' | '\\') {
                out.push('\\');
            }
            out.push(c);
        }
        out.push('"');
        parameters(&mut out, item).expect("writing to a String cannot fail");
    }
    out
}

/// A name as it may stand in a header: bytes that may not are written `%XX`, so that no name can add a header of its own.
pub fn visible(name: &str) -> Cow<'_, str> {
    if name.bytes().all(|byte| byte != b'%' && matches!(byte, b' '..=b'~')) {
        return Cow::Borrowed(name);
    }
    let mut out = String::with_capacity(name.len());
    for byte in name.bytes() {
        match byte {
            b'%' => out.push_str("%25"),
            b' '..=b'~' => out.push(char::from(byte)),
            _ => write!(out, "%{byte:02X}").expect("writing to a String cannot fail"),
        }
    }
    Cow::Owned(out)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Charge, Op, Record, Timestamp, decide};

    fn denied(limit: &Limit, cost: u64) -> Decision {
        let mut record = Record::default();
        let now = Timestamp::from_secs(100);
        let _ = decide(Op::Check, &mut [Charge::new(limit, &mut record, limit.capacity())], now);
        decide(Op::Check, &mut [Charge::new(limit, &mut record, cost)], now)
    }

    #[test]
    fn policies_name_quota_and_window() {
        // limit => RateLimit-Policy
        for (text, expected) in [
            ("100/min", r#""x";q=100;w=60"#),
            ("100/min burst 20", r#""x";q=20;w=12"#),
            ("7/min burst 1", r#""x";q=1;w=9"#), // a bucket's time to fill is rounded up
            ("1000/day estimate", r#""x";q=1000;w=86400"#),
            ("10/1500ms window", r#""x";q=10"#), // not whole seconds: no window rather than a wrong one
            ("20 concurrent ttl 30s", r#""x";q=20"#),
        ] {
            assert_eq!(policy(&[("x", &text.parse().unwrap())]), expected, "{text}");
        }
    }

    #[test]
    fn retry_after_is_rounded_up_and_never_zero() {
        for (text, cost, expected) in [
            ("10/s", 1, Some(1)),           // 100 ms
            ("1/2s", 1, Some(2)),           // exactly 2 s
            ("2/3s", 1, Some(2)),           // 1.5 s
            ("10/s", 11, None),             // never
            ("60/h window", 1, Some(3500)), // the hour ends at 3600, it is second 100
        ] {
            assert_eq!(retry_after_secs(&denied(&text.parse().unwrap(), cost)), expected, "{text} cost {cost}");
        }
    }

    #[test]
    fn nothing_is_said_of_more_when_everything_is_left() {
        let limit: Limit = "10/s".parse().unwrap();
        let idle = decide(Op::Peek, &mut [Charge::new(&limit, &mut Record::default(), 1)], Timestamp::EPOCH);
        assert_eq!(rate_limit([("x", idle.binding())]), r#""x";r=10"#);
        assert_eq!(retry_after_secs(&idle), None);
    }

    #[test]
    fn numbers_of_a_store_that_went_mad_are_still_numbers() {
        let mad =
            Verdict { reset_after_us: u64::MAX, next_after_us: u64::MAX, remaining: u64::MAX, ..Verdict::default() };
        let decision = Decision::of_one(mad, false, Timestamp::MAX);
        let limit: Limit = "10/s".parse().unwrap();
        assert_eq!(reset_epoch_secs(&decision), u64::MAX.div_ceil(SECOND_US));
        assert!(!of(&decision, &[("x", &limit)], Families::ALL).is_empty());
    }

    #[test]
    fn hostile_names_cannot_leave_their_quotes() {
        let limit: Limit = "10/s".parse().unwrap();
        let name = "a\"b\\c\r\nSet-Cookie: x=1\u{e9}%";
        assert_eq!(policy(&[(name, &limit)]), r#""a\"b\\c%0D%0ASet-Cookie: x=1%C3%A9%25";q=10;w=1"#);
        let headers = of(&denied(&limit, 1), &[(name, &limit)], Families::ALL);
        assert!(headers.iter().all(|(_, value)| value.bytes().all(|b| (b' '..=b'~').contains(&b))), "{headers:?}");
    }

    #[test]
    fn github_headers_speak_of_the_binding_charge() {
        let (a, b): (Limit, Limit) = ("10/s".parse().unwrap(), "3/min window".parse().unwrap());
        let (mut ra, mut rb) = (Record::default(), Record::default());
        let now = Timestamp::from_secs(90);
        let decision = decide(Op::Check, &mut [Charge::new(&a, &mut ra, 1), Charge::new(&b, &mut rb, 1)], now);
        let headers = of(&decision, &[("burst", &a), ("minute", &b)], Families::GITHUB);
        let expected = [("Limit", "3"), ("Remaining", "2"), ("Used", "1"), ("Reset", "120"), ("Resource", "minute")];
        for ((name, value), (suffix, expected)) in headers.iter().zip(expected) {
            assert_eq!((name.trim_start_matches("X-RateLimit-"), value.as_str()), (suffix, expected));
        }
    }
}
