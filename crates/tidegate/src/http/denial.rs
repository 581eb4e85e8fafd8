//! The answer to a denied request: status, headers, and a body in the format that the client
//! accepts.
//!
//! A [`DenialResponse`] is for clients of a proxy, a gateway or a layer. It names the policies that
//! denied and nothing else: no other budget, no rule in shadow mode, no internals. [`problem`]
//! writes the other errors of the same services.
//!
//! ```
//! use tidegate::http::denial::{DenialFormat, DenialReason, DenialResponse};
//! let format = DenialFormat::Problem.negotiate(Some("text/plain, application/json;q=0.5"));
//! assert_eq!(format, DenialFormat::Text);
//! let denial = DenialResponse::new(DenialReason::Quota { retry_after_secs: Some(3) }, ["search"]);
//! assert_eq!(denial.status(), 429);
//! let body = denial.body(format);
//! assert_eq!(body, "Too many requests. Try again in 3 seconds. Violated policies: search.\n");
//! ```

use std::borrow::Cow;
use std::fmt::{self, Write};
use std::str::FromStr;

use tidegate_core::{Decision, Limit};

use super::headers::{self, HeaderFamilies, NamedVerdict};

/// How many media ranges of an `Accept` header are read; the rest is ignored.
const MAX_RANGES: usize = 32;

/// The format of a denial's body.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum DenialFormat {
    /// `application/problem+json`.
    #[default]
    Problem,
    /// `application/json`, with the same members.
    Json,
    /// `text/plain`.
    Text,
}

impl DenialFormat {
    const ALL: [DenialFormat; 3] = [DenialFormat::Problem, DenialFormat::Json, DenialFormat::Text];

    /// The format that an `Accept` header prefers; this one if it has no preference or accepts no
    /// format, and among equal preferences.
    #[must_use]
    pub fn negotiate(self, accept: Option<&str>) -> DenialFormat {
        let Some(accept) = accept else { return self };
        let quality = |format: DenialFormat| {
            let matches =
                accept.split(',').take(MAX_RANGES).filter_map(|range| format.matches(range));
            matches.max_by_key(|(exactness, _)| *exactness).map_or(0, |(_, quality)| quality)
        };
        let mut best = (self, quality(self));
        for format in DenialFormat::ALL {
            let quality = quality(format);
            if quality > best.1 {
                best = (format, quality);
            }
        }
        best.0
    }

    /// How exactly a media range matches this format, and its quality in thousandths.
    fn matches(self, range: &str) -> Option<(u8, u32)> {
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
            DenialFormat::Problem => "application/problem+json",
            DenialFormat::Json => "application/json",
            DenialFormat::Text => "text/plain; charset=utf-8",
        }
    }
}

/// Why a request is denied.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum DenialReason {
    /// A limit has less left than the request costs.
    Quota {
        /// The seconds after which it would be allowed; `None` if it costs more than the limit's
        /// capacity.
        retry_after_secs: Option<u64>,
    },
    /// A rule denies every request (`limit: deny`), with this status.
    Rule(DenyStatus),
}

/// The status of a rule that denies every request.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum DenyStatus {
    /// 403.
    #[default]
    Forbidden,
    /// 429.
    TooManyRequests,
}

impl DenyStatus {
    /// The status as a number.
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

/// A text that is not a [`DenyStatus`].
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct DenyStatusError(String);

impl fmt::Display for DenyStatusError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "deny_status is {:?}: expected 403 or 429", self.0)
    }
}

impl std::error::Error for DenyStatusError {}

impl DenialReason {
    /// The status of the response.
    pub fn status(self) -> u16 {
        match self {
            DenialReason::Quota { .. } => 429,
            DenialReason::Rule(status) => status.code(),
        }
    }

    /// The problem type: the one that IANA has registered for exceeded quotas, or `about:blank`.
    pub fn problem_type(self) -> &'static str {
        match self {
            DenialReason::Rule(DenyStatus::Forbidden) => "about:blank",
            _ => "https://iana.org/assignments/http-problem-types#quota-exceeded",
        }
    }

    /// The title of the problem type.
    pub fn title(self) -> &'static str {
        match self {
            DenialReason::Rule(DenyStatus::Forbidden) => "Forbidden",
            _ => "Request cannot be satisfied as assigned quota has been exceeded",
        }
    }

    /// A sentence for the reader of the response.
    pub fn detail(self) -> Cow<'static, str> {
        match self {
            DenialReason::Quota { retry_after_secs: Some(1) } => {
                "Too many requests. Try again in 1 second.".into()
            }
            DenialReason::Quota { retry_after_secs: Some(secs) } => {
                format!("Too many requests. Try again in {secs} seconds.").into()
            }
            DenialReason::Quota { retry_after_secs: None } => {
                "Too many requests. This one costs more than its limit ever allows.".into()
            }
            DenialReason::Rule(DenyStatus::Forbidden) => "This request is not allowed.".into(),
            DenialReason::Rule(DenyStatus::TooManyRequests) => "Too many requests.".into(),
        }
    }
}

/// The response to a denied request.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct DenialResponse {
    reason: DenialReason,
    violated: Vec<String>,
    headers: Vec<(&'static str, String)>,
}

impl DenialResponse {
    /// A denial by policies of these names, without rate limit headers.
    pub fn new<N: Into<String>>(
        reason: DenialReason,
        violated: impl IntoIterator<Item = N>,
    ) -> DenialResponse {
        DenialResponse {
            reason,
            violated: violated.into_iter().map(Into::into).collect(),
            headers: Vec::new(),
        }
    }

    /// A denial by limits. `limits` are the rule and limit of each charge, in the order of the check.
    ///
    /// The response is only about the limits that denied, under the [names](headers::names) that
    /// they have in the headers of allowed requests.
    pub fn of(
        decision: &Decision,
        limits: &[(&str, &Limit)],
        families: HeaderFamilies,
    ) -> DenialResponse {
        let names = headers::names(limits);
        let all = names.iter().zip(limits).zip(decision.charges());
        let denied: Vec<NamedVerdict<'_>> = all
            .filter(|(_, verdict)| !verdict.allowed)
            .map(|((name, (_, limit)), verdict)| NamedVerdict { name, limit, verdict })
            .collect();
        let binding = names.get(decision.binding_index()).map(|name| &**name);
        DenialResponse {
            reason: DenialReason::Quota { retry_after_secs: headers::retry_after_secs(decision) },
            violated: denied.iter().map(|policy| policy.name.into()).collect(),
            headers: headers::of_policies(decision, &denied, binding, families),
        }
    }

    /// Why the request is denied.
    pub fn reason(&self) -> DenialReason {
        self.reason
    }

    /// The status of the response.
    pub fn status(&self) -> u16 {
        self.reason.status()
    }

    /// The names of the policies that denied.
    pub fn violated(&self) -> &[String] {
        &self.violated
    }

    /// The rate limit headers about the policies that denied, and `Retry-After`.
    pub fn headers(&self) -> &[(&'static str, String)] {
        &self.headers
    }

    /// The body in this format.
    pub fn body(&self, format: DenialFormat) -> String {
        let mut out = String::with_capacity(384);
        self.write_body(format, &mut out).expect("writing to a String cannot fail");
        out
    }

    fn write_body(&self, format: DenialFormat, out: &mut String) -> fmt::Result {
        let (reason, detail) = (self.reason, self.reason.detail());
        if format == DenialFormat::Text {
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
        out.push('[');
        for (at, name) in self.violated.iter().enumerate() {
            out.push_str(if at > 0 { "," } else { "" });
            push_json_string(out, name);
        }
        out.push(']');
        match reason {
            DenialReason::Quota { retry_after_secs: Some(secs) } => {
                write!(out, r#","retry_after_secs":{secs}}}"#)
            }
            _ => write!(out, r#","retry_after_secs":null}}"#),
        }
    }
}

/// The body of an error as `application/problem+json`: the title of a status, and a sentence about
/// this error.
///
/// ```
/// use tidegate::http::denial::problem;
/// let expected = r#"{"type":"about:blank","title":"Bad Request","status":400,"detail":"no \"key\""}"#;
/// assert_eq!(problem(400, "Bad Request", "no \"key\""), expected);
/// ```
pub fn problem(status: u16, title: &str, detail: &str) -> String {
    let mut out = String::with_capacity(96 + detail.len());
    out.push_str(r#"{"type":"about:blank","title":"#);
    push_json_string(&mut out, title);
    write!(out, r#","status":{status},"detail":"#).expect("writing to a String cannot fail");
    push_json_string(&mut out, detail);
    out.push('}');
    out
}

/// A quality such as `0.75`, in thousandths; zero if it is not valid.
fn thousandths(text: &str) -> u32 {
    let (whole, rest) = text.split_once('.').unwrap_or((text, ""));
    let digits = rest.len() <= 3 && rest.bytes().all(|byte| byte.is_ascii_digit());
    match whole {
        "1" if digits => 1000,
        "0" if digits => format!("{rest:0<3}").parse().unwrap_or(0),
        _ => 0,
    }
}

fn push_json_string(out: &mut String, text: &str) {
    out.push('"');
    for c in text.chars() {
        match c {
            '"' | '\\' => out.extend(['\\', c]),
            '\n' => out.push_str("\\n"),
            '\r' => out.push_str("\\r"),
            '\t' => out.push_str("\\t"),
            '\u{8}' => out.push_str("\\b"),
            '\u{c}' => out.push_str("\\f"),
            '\0'..='\u{1f}' => {
                write!(out, "\\u{:04x}", u32::from(c)).expect("writing to a String cannot fail");
            }
            _ => out.push(c),
        }
    }
    out.push('"');
}

impl FromStr for DenialFormat {
    type Err = DenialFormatError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        match text {
            "problem" => Ok(DenialFormat::Problem),
            "json" => Ok(DenialFormat::Json),
            "text" => Ok(DenialFormat::Text),
            _ => Err(DenialFormatError(text.chars().take(40).collect())),
        }
    }
}

impl fmt::Display for DenialFormat {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            DenialFormat::Problem => "problem",
            DenialFormat::Json => "json",
            DenialFormat::Text => "text",
        })
    }
}

/// A text that is not a [`DenialFormat`].
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct DenialFormatError(String);

impl fmt::Display for DenialFormatError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}: expected problem, json or text", self.0)
    }
}

impl std::error::Error for DenialFormatError {}

#[cfg(test)]
mod tests {
    use super::*;
    use tidegate_core::{Charge, Op, Record, Timestamp, decide};

    #[test]
    fn the_accept_header_selects_the_format() {
        use DenialFormat::{Json, Problem, Text};
        // default, Accept => format
        for (setting, accept, expected) in [
            (Problem, None, Problem),
            (Json, None, Json),
            (Text, Some(""), Text),
            (Problem, Some("*/*"), Problem),
            (Text, Some("*/*"), Text),
            (Text, Some("image/png"), Text), // any format is better than none
            (Problem, Some("application/json"), Json),
            (Problem, Some("APPLICATION/JSON"), Json),
            (Problem, Some("application/*"), Problem),
            (Json, Some("application/*"), Json),
            (Text, Some("application/*"), Problem),
            (Problem, Some("text/html, text/*;q=0.9, */*;q=0.1"), Text),
            (Problem, Some("text/plain;q=0.5, application/json;q=0.501"), Json),
            (Problem, Some("application/problem+json;q=0, */*"), Json),
            (Problem, Some("text/plain; q=1.0 , application/json"), Json), // equal: in the order of the enum
            (Text, Some("text/plain; charset=utf-8; q=0.3, application/json;q=0.2"), Text),
            (Problem, Some("text/plain;q=zero"), Problem),
            (Problem, Some("text/plain;q=0.1234"), Problem),
        ] {
            assert_eq!(setting.negotiate(accept), expected, "{setting} {accept:?}");
        }
        let many = "image/png,".repeat(MAX_RANGES) + "text/plain";
        assert_eq!(Problem.negotiate(Some(&many)), Problem);
    }

    const QUOTA: &str = r#"{"type":"https://iana.org/assignments/http-problem-types#quota-exceeded","title":"Request cannot be satisfied as assigned quota has been exceeded","status":429"#;

    #[test]
    fn bodies_contain_reason_and_time_and_nothing_else() {
        let quota = |retry_after_secs| DenialReason::Quota { retry_after_secs };
        let (forbidden, hidden) = (
            DenialReason::Rule(DenyStatus::Forbidden),
            DenialReason::Rule(DenyStatus::TooManyRequests),
        );
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
            let denial = DenialResponse::new(reason, ["x"]);
            let start = match status {
                403 => r#"{"type":"about:blank","title":"Forbidden","status":403"#,
                _ => QUOTA,
            };
            let expected = format!(
                r#"{start},"detail":"{detail}","violated-policies":["x"],"retry_after_secs":{retry}}}"#
            );
            assert_eq!(denial.status(), status);
            assert_eq!(
                (denial.body(DenialFormat::Problem), denial.body(DenialFormat::Json)),
                (expected.clone(), expected)
            );
            assert_eq!(
                denial.body(DenialFormat::Text),
                format!("{detail} Violated policies: x.\n")
            );
        }
    }

    #[test]
    fn names_are_escaped_in_bodies() {
        let denial = DenialResponse::new(
            DenialReason::Quota { retry_after_secs: None },
            ["a\"b\\c\n\u{1}é", "x"],
        );
        let body = denial.body(DenialFormat::Json);
        assert!(body.contains(r#""violated-policies":["a\"b\\c\n\u0001é","x"],"#), "{body}");
        assert!(
            denial
                .body(DenialFormat::Text)
                .ends_with(" Violated policies: a\"b\\c%0A%01%C3%A9, x.\n")
        );
    }

    #[test]
    fn a_denial_is_about_the_policies_that_denied() {
        let limits: Vec<Limit> =
            ["2/s", "100/m window", "2/h window"].map(|limit| limit.parse().unwrap()).into();
        let mut records: [Record; 3] = Default::default();
        let named: Vec<(&str, &Limit)> =
            ["per-ip", "per-ip", "hourly"].into_iter().zip(&limits).collect();
        let now = Timestamp::from_secs(3600);
        let mut decide_next = || {
            let charges = limits
                .iter()
                .zip(&mut records)
                .map(|(limit, record)| Charge::new(limit, record, 2));
            decide(Op::Check, &mut charges.collect::<Vec<_>>(), now)
        };
        assert!(decide_next().allowed());
        let denial = DenialResponse::of(&decide_next(), &named, HeaderFamilies::ALL);
        assert_eq!(denial.violated(), ["per-ip 2/s", "hourly"]);
        assert_eq!(denial.reason(), DenialReason::Quota { retry_after_secs: Some(3600) });
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
            denial.headers().iter().map(|(name, value)| (*name, value.as_str())).eq(expected),
            "{denial:?}"
        );
        let denial = DenialResponse::of(&decide_next(), &named, HeaderFamilies::DRAFT_7);
        assert_eq!(denial.headers()[0], ("RateLimit-Policy", "2;w=1, 2;w=3600".into()));
    }

    #[test]
    fn formats_and_statuses_parse_as_they_display() {
        for body in DenialFormat::ALL {
            assert_eq!(body.to_string().parse(), Ok(body));
        }
        assert_eq!(
            "html".parse::<DenialFormat>().unwrap_err().to_string(),
            "\"html\": expected problem, json or text"
        );
        for status in [DenyStatus::Forbidden, DenyStatus::TooManyRequests] {
            assert_eq!(status.to_string().parse(), Ok(status));
        }
        let error = "401".parse::<DenyStatus>().unwrap_err().to_string();
        assert_eq!(error, "deny_status is \"401\": expected 403 or 429");
    }
}
