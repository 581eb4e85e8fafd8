//! What a denied client is told: status, headers and body, and which form of body it asked for.
//!
//! A [`Reply`] is for clients that others serve: those of a proxy, a gateway or a layer. It names
//! the policies that denied and nothing else: no other budget, no rule in shadow mode, no
//! internals.
//!
//! ```
//! use tidegate::http::denial::{Body, Reason, Reply};
//! let body = Body::Problem.asked_for(Some("text/plain, application/json;q=0.5"));
//! assert_eq!((body, body.content_type()), (Body::Text, "text/plain; charset=utf-8"));
//! let reply = Reply::new(Reason::Quota { retry_after_secs: Some(3) }, ["search"]);
//! assert_eq!(reply.status(), 429);
//! assert_eq!(reply.body(body), "Too many requests. Try again in 3 seconds. Violated policies: search.\n");
//! ```

use std::borrow::Cow;
use std::fmt::{self, Write};
use std::str::FromStr;

use crate::http::headers::{self, Families, Policy};
use tidegate_core::Decision;
use tidegate_core::Limit;

/// How many ranges of an `Accept` are looked at; those behind them are as if they were not there.
const MAX_RANGES: usize = 32;

/// How a denial is written.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Body {
    /// `application/problem+json`.
    #[default]
    Problem,
    /// `application/json`, with the same members.
    Json,
    /// `text/plain`.
    Text,
}

impl Body {
    const ALL: [Body; 3] = [Body::Problem, Body::Json, Body::Text];

    /// What an `Accept` header asks for, or this one if it asks for nothing, for anything, or for
    /// what is not there. Of what is wanted equally this one goes first.
    #[must_use]
    pub fn asked_for(self, accept: Option<&str>) -> Body {
        let Some(accept) = accept else { return self };
        let quality = |body: Body| {
            let fits = accept.split(',').take(MAX_RANGES).filter_map(|range| body.fits(range));
            fits.max_by_key(|(exactness, _)| *exactness).map_or(0, |(_, quality)| quality)
        };
        let mut best = (self, quality(self));
        for body in Body::ALL {
            let quality = quality(body);
            if quality > best.1 {
                best = (body, quality);
            }
        }
        best.0
    }

    /// How exactly a media range means this body, and how much it is wanted, in thousandths.
    fn fits(self, range: &str) -> Option<(u8, u32)> {
        let mut parts = range.split(';').map(str::trim_ascii);
        let media = parts.next()?;
        let own = self.content_type().split(';').next()?;
        let (kind, _) = own.split_once('/')?;
        let exactness = if media.eq_ignore_ascii_case(own) {
            3
        } else if media.strip_suffix("/*").is_some_and(|wanted| wanted.eq_ignore_ascii_case(kind)) {
            2
        } else if media == "*/*" {
            1
        } else {
            return None;
        };
        let quality =
            parts.find_map(|part| part.strip_prefix("q=").or_else(|| part.strip_prefix("Q=")));
        Some((exactness, quality.map_or(1000, thousandths)))
    }

    /// The value of `Content-Type`.
    pub fn content_type(self) -> &'static str {
        match self {
            Body::Problem => "application/problem+json",
            Body::Json => "application/json",
            Body::Text => "text/plain; charset=utf-8",
        }
    }
}

/// Why a request is denied.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Reason {
    /// A budget has less left than the request costs.
    Quota {
        /// When it can pass, in seconds; `None` if it costs more than its limit ever has.
        retry_after_secs: Option<u64>,
    },
    /// A rule lets nothing pass (`limit: deny`), and answers with this status.
    Rule(DenyStatus),
}

/// The status with which a rule answers that lets nothing pass.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum DenyStatus {
    /// 403.
    #[default]
    Forbidden,
    /// 429.
    TooManyRequests,
}

impl DenyStatus {
    /// The number.
    pub fn code(self) -> u16 {
        match self {
            DenyStatus::Forbidden => 403,
            DenyStatus::TooManyRequests => 429,
        }
    }
}

impl FromStr for DenyStatus {
    type Err = DenyStatusError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        match text {
            "403" => Ok(DenyStatus::Forbidden),
            "429" => Ok(DenyStatus::TooManyRequests),
            _ => Err(DenyStatusError(text.chars().take(40).collect())),
        }
    }
}

impl fmt::Display for DenyStatus {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.code().fmt(f)
    }
}

/// No [`DenyStatus`] is written so.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct DenyStatusError(String);

impl fmt::Display for DenyStatusError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "deny_status is {:?}: expected 403 or 429", self.0)
    }
}

impl core::error::Error for DenyStatusError {}

impl Reason {
    /// The status of the answer.
    pub fn status(self) -> u16 {
        match self {
            Reason::Quota { .. } => 429,
            Reason::Rule(status) => status.code(),
        }
    }

    /// The type of the problem: the one that IANA registered for used up quotas, or none but its
    /// status.
    pub fn problem_type(self) -> &'static str {
        match self {
            Reason::Rule(DenyStatus::Forbidden) => "about:blank",
            _ => "https://iana.org/assignments/http-problem-types#quota-exceeded",
        }
    }

    /// The title of the problem.
    pub fn title(self) -> &'static str {
        match self {
            Reason::Rule(DenyStatus::Forbidden) => "Forbidden",
            _ => "Request cannot be satisfied as assigned quota has been exceeded",
        }
    }

    /// A sentence for people.
    pub fn detail(self) -> Cow<'static, str> {
        match self {
            Reason::Quota { retry_after_secs: Some(1) } => {
                "Too many requests. Try again in 1 second.".into()
            }
            Reason::Quota { retry_after_secs: Some(secs) } => {
                format!("Too many requests. Try again in {secs} seconds.").into()
            }
            Reason::Quota { retry_after_secs: None } => {
                "Too many requests. This one costs more than its limit ever allows.".into()
            }
            Reason::Rule(DenyStatus::Forbidden) => "This request is not allowed.".into(),
            Reason::Rule(DenyStatus::TooManyRequests) => "Too many requests.".into(),
        }
    }
}

/// What a denied client is told.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Reply {
    reason: Reason,
    violated: Vec<String>,
    headers: Vec<(&'static str, String)>,
}

impl Reply {
    /// To a request that these policies deny, without headers about budgets.
    pub fn new<N: Into<String>>(reason: Reason, violated: impl IntoIterator<Item = N>) -> Reply {
        Reply {
            reason,
            violated: violated.into_iter().map(Into::into).collect(),
            headers: Vec::new(),
        }
    }

    /// To a request that was denied by limits. `limits` are the rule and limit of each charge, in
    /// the order of the check; only those that denied are told about, under the
    /// [names](headers::names) that they have when a request is allowed.
    pub fn to(decision: &Decision, limits: &[(&str, &Limit)], families: Families) -> Reply {
        let names = headers::names(limits);
        let all = names.iter().zip(limits).zip(decision.charges());
        let denied: Vec<Policy<'_>> = all
            .filter(|(_, verdict)| !verdict.allowed)
            .map(|((name, (_, limit)), verdict)| Policy { name, limit, verdict })
            .collect();
        let binding = names.get(decision.binding_index()).map(|name| &**name);
        Reply {
            reason: Reason::Quota { retry_after_secs: headers::retry_after_secs(decision) },
            violated: denied.iter().map(|policy| policy.name.into()).collect(),
            headers: headers::of_policies(decision, &denied, binding, families),
        }
    }

    /// Why it was denied.
    pub fn reason(&self) -> Reason {
        self.reason
    }

    /// The status of the answer.
    pub fn status(&self) -> u16 {
        self.reason.status()
    }

    /// The names of the policies that denied.
    pub fn violated(&self) -> &[String] {
        &self.violated
    }

    /// The headers about the budgets that denied, and `Retry-After`.
    pub fn headers(&self) -> &[(&'static str, String)] {
        &self.headers
    }

    /// The body in this form.
    pub fn body(&self, form: Body) -> String {
        let mut out = String::with_capacity(384);
        self.write_body(form, &mut out).expect("writing to a String cannot fail");
        out
    }

    fn write_body(&self, form: Body, out: &mut String) -> fmt::Result {
        let (reason, detail) = (self.reason, self.reason.detail());
        if form == Body::Text {
            out.push_str(&detail);
            for (at, name) in self.violated.iter().enumerate() {
                out.push_str(if at > 0 { ", " } else { " Violated policies: " });
                out.push_str(&headers::visible(name));
            }
            out.push_str(if self.violated.is_empty() { "\n" } else { ".\n" });
            return Ok(());
        }
        let (kind, title, status) = (reason.problem_type(), reason.title(), reason.status());
        write!(
            out,
            r#"{{"type":"{kind}","title":"{title}","status":{status},"detail":"{detail}","violated-policies":"#
        )?;
        json_texts(out, &self.violated)?;
        match reason {
            Reason::Quota { retry_after_secs: Some(secs) } => {
                write!(out, r#","retry_after_secs":{secs}}}"#)
            }
            _ => write!(out, r#","retry_after_secs":null}}"#),
        }
    }
}

/// A quality such as `0.75`, in thousandths; what is none counts as not wanted.
fn thousandths(text: &str) -> u32 {
    let (whole, rest) = text.split_once('.').unwrap_or((text, ""));
    let digits = rest.len() <= 3 && rest.bytes().all(|byte| byte.is_ascii_digit());
    match whole {
        "1" if digits => 1000,
        "0" if digits => format!("{rest:0<3}").parse().unwrap_or(0),
        _ => 0,
    }
}

/// A JSON array of texts.
fn json_texts(out: &mut String, texts: &[String]) -> fmt::Result {
    out.push('[');
    for (at, text) in texts.iter().enumerate() {
        out.push_str(if at > 0 { ",\"" } else { "\"" });
        for c in text.chars() {
            match c {
                '"' | '\\' => write!(out, "\\{c}")?,
                '\0'..='\u{1f}' => write!(out, "\\u{:04x}", u32::from(c))?,
                _ => out.push(c),
            }
        }
        out.push('"');
    }
    out.push(']');
    Ok(())
}

impl FromStr for Body {
    type Err = BodyError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        match text {
            "problem" => Ok(Body::Problem),
            "json" => Ok(Body::Json),
            "text" => Ok(Body::Text),
            _ => Err(BodyError(text.chars().take(40).collect())),
        }
    }
}

impl fmt::Display for Body {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Body::Problem => "problem",
            Body::Json => "json",
            Body::Text => "text",
        })
    }
}

/// No [`Body`] is called so.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct BodyError(String);

impl fmt::Display for BodyError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}: expected problem, json or text", self.0)
    }
}

impl core::error::Error for BodyError {}

#[cfg(test)]
mod tests {

    use super::*;
    use tidegate_core::{Charge, Op, Record, Timestamp, decide};

    #[test]
    fn what_is_accepted_decides() {
        use Body::{Json, Problem, Text};
        // the setting, Accept => what is sent
        for (setting, accept, expected) in [
            (Problem, None, Problem),
            (Json, None, Json),
            (Text, Some(""), Text),
            (Problem, Some("*/*"), Problem),
            (Text, Some("*/*"), Text),
            (Text, Some("image/png"), Text), // an answer in the wrong language is better than none
            (Problem, Some("application/json"), Json),
            (Problem, Some("APPLICATION/JSON"), Json),
            (Problem, Some("application/*"), Problem),
            (Json, Some("application/*"), Json),
            (Text, Some("application/*"), Problem),
            (Problem, Some("text/html, text/*;q=0.9, */*;q=0.1"), Text),
            (Problem, Some("text/plain;q=0.5, application/json;q=0.501"), Json),
            (Problem, Some("application/problem+json;q=0, */*"), Json),
            (Problem, Some("text/plain; q=1.0 , application/json"), Json), // equally: in the order they stand here
            (Text, Some("text/plain; charset=utf-8; q=0.3, application/json;q=0.2"), Text),
            (Problem, Some("text/plain;q=zero"), Problem),
            (Problem, Some("text/plain;q=0.1234"), Problem),
        ] {
            assert_eq!(setting.asked_for(accept), expected, "{setting} {accept:?}");
        }
        let many = "image/png,".repeat(MAX_RANGES) + "text/plain";
        assert_eq!(Problem.asked_for(Some(&many)), Problem);
    }

    const QUOTA: &str = r#"{"type":"https://iana.org/assignments/http-problem-types#quota-exceeded","title":"Request cannot be satisfied as assigned quota has been exceeded","status":429"#;

    #[test]
    fn bodies_say_why_and_when_and_nothing_else() {
        let quota = |retry_after_secs| Reason::Quota { retry_after_secs };
        let (forbidden, hidden) =
            (Reason::Rule(DenyStatus::Forbidden), Reason::Rule(DenyStatus::TooManyRequests));
        for (reason, status, detail, retry) in [
            (quota(Some(12)), 429, "Too many requests. Try again in 12 seconds.", "12"),
            (quota(Some(1)), 429, "Too many requests. Try again in 1 second.", "1"),
            (
                quota(None),
                429,
                "Too many requests. This one costs more than its limit ever allows.",
                "null",
            ),
            (hidden, 429, "Too many requests.", "null"),
            (forbidden, 403, "This request is not allowed.", "null"),
        ] {
            let reply = Reply::new(reason, ["x"]);
            let start = match status {
                403 => r#"{"type":"about:blank","title":"Forbidden","status":403"#,
                _ => QUOTA,
            };
            let expected = format!(
                r#"{start},"detail":"{detail}","violated-policies":["x"],"retry_after_secs":{retry}}}"#
            );
            assert_eq!(reply.status(), status);
            assert_eq!(
                (reply.body(Body::Problem), reply.body(Body::Json)),
                (expected.clone(), expected)
            );
            assert_eq!(reply.body(Body::Text), format!("{detail} Violated policies: x.\n"));
        }
    }

    #[test]
    fn names_cannot_break_out() {
        let reply = Reply::new(Reason::Quota { retry_after_secs: None }, ["a\"b\\c\n\u{1}é", "x"]);
        let body = reply.body(Body::Json);
        assert!(body.contains(r#""violated-policies":["a\"b\\c\u000a\u0001é","x"],"#), "{body}");
        assert!(reply.body(Body::Text).ends_with(" Violated policies: a\"b\\c%0A%01%C3%A9, x.\n"));
    }

    #[test]
    fn a_reply_is_about_the_policies_that_denied() {
        let limits: Vec<Limit> =
            ["2/s", "100/m window", "2/h window"].map(|limit| limit.parse().unwrap()).into();
        let mut records: [Record; 3] = Default::default();
        let named: Vec<(&str, &Limit)> =
            ["per-ip", "per-ip", "hourly"].into_iter().zip(&limits).collect();
        let now = Timestamp::from_secs(3600);
        let mut ask = || {
            let charges = limits
                .iter()
                .zip(&mut records)
                .map(|(limit, record)| Charge::new(limit, record, 2));
            decide(Op::Check, &mut charges.collect::<Vec<_>>(), now)
        };
        assert!(ask().allowed());
        let reply = Reply::to(&ask(), &named, Families::ALL);
        assert_eq!(reply.violated(), ["per-ip 2/s", "hourly"]);
        assert_eq!(reply.reason(), Reason::Quota { retry_after_secs: Some(3600) });
        let expected = [
            ("RateLimit-Policy", r#""per-ip 2/s";q=2;w=1, "hourly";q=2;w=3600"#),
            ("RateLimit", r#""per-ip 2/s";r=0;t=1, "hourly";r=0;t=3600"#),
            ("X-RateLimit-Limit", "2"),
            ("X-RateLimit-Remaining", "0"),
            ("X-RateLimit-Used", "2"),
            ("X-RateLimit-Reset", "7200"),
            ("X-RateLimit-Resource", "hourly"),
            ("Retry-After", "3600"),
        ];
        assert!(
            reply.headers().iter().map(|(name, value)| (*name, value.as_str())).eq(expected),
            "{reply:?}"
        );
        let reply = Reply::to(&ask(), &named, Families::DRAFT_7);
        assert_eq!(reply.headers()[0], ("RateLimit-Policy", "2;w=1, 2;w=3600".into()));
    }

    #[test]
    fn words_are_read_as_they_are_written() {
        for body in Body::ALL {
            assert_eq!(body.to_string().parse(), Ok(body));
        }
        assert_eq!(
            "html".parse::<Body>().unwrap_err().to_string(),
            "\"html\": expected problem, json or text"
        );
        for status in [DenyStatus::Forbidden, DenyStatus::TooManyRequests] {
            assert_eq!(status.to_string().parse(), Ok(status));
        }
        let error = "401".parse::<DenyStatus>().unwrap_err().to_string();
        assert_eq!(error, "deny_status is \"401\": expected 403 or 429");
    }
}
