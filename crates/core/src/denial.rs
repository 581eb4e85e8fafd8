//! What a denied request is answered with: the text of the body, and which of them a client asked for.
//!
//! ```
//! use tidegate_core::denial::Body;
//! let body = Body::Problem.asked_for(Some("text/plain, application/json;q=0.5"));
//! assert_eq!((body, body.content_type()), (Body::Text, "text/plain; charset=utf-8"));
//! assert_eq!(body.write(&["search"], Some(3)), "too many requests: search; try again in 3 s\n");
//! ```

use alloc::format;
use alloc::string::String;
use core::fmt::{self, Write};
use core::str::FromStr;

/// How many ranges of an `Accept` are looked at; those behind them are as if they were not there.
const MAX_RANGES: usize = 32;

/// How a denial is written.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Body {
    /// `application/problem+json`, of the type quota-exceeded.
    #[default]
    Problem,
    /// `application/json`.
    Json,
    /// `text/plain`.
    Text,
}

impl Body {
    const ALL: [Body; 3] = [Body::Problem, Body::Json, Body::Text];

    /// What an `Accept` header asks for, or this one if it asks for nothing, for anything, or for what is not there. Of what is
    /// wanted equally this one goes first.
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
        let quality = parts.find_map(|part| part.strip_prefix("q=").or_else(|| part.strip_prefix("Q=")));
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

    /// The body: whose limits denied it, and after how many seconds it can pass, if ever.
    #[must_use]
    pub fn write(self, violated: &[&str], retry_after_secs: Option<u64>) -> String {
        let mut out = String::new();
        self.write_to(&mut out, violated, retry_after_secs).expect("writing to a String cannot fail");
        out
    }

    fn write_to(self, out: &mut String, violated: &[&str], retry_after_secs: Option<u64>) -> fmt::Result {
        match self {
            Body::Problem => {
                write!(
                    out,
                    r#"{{"type":"{PROBLEM_TYPE}","title":"{PROBLEM_TITLE}","status":429,"violated-policies":"#
                )?;
                names(out, violated)?;
            }
            Body::Json => {
                out.push_str(r#"{"error":"too many requests","violated-policies":"#);
                names(out, violated)?;
            }
            Body::Text => {
                out.push_str("too many requests");
                for (at, name) in violated.iter().enumerate() {
                    out.push_str(if at > 0 { ", " } else { ": " });
                    out.push_str(&crate::headers::visible(name));
                }
                return match retry_after_secs {
                    Some(secs) => writeln!(out, "; try again in {secs} s"),
                    None => writeln!(out),
                };
            }
        }
        match retry_after_secs {
            Some(secs) => write!(out, r#","retry_after_secs":{secs}}}"#),
            None => write!(out, r#","retry_after_secs":null}}"#),
        }
    }
}

/// The type of the problem, as IANA registered it.
pub const PROBLEM_TYPE: &str = "https://iana.org/assignments/http-problem-types#quota-exceeded";
/// Its title.
pub const PROBLEM_TITLE: &str = "Request cannot be satisfied as assigned quota has been exceeded";

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
fn names(out: &mut String, names: &[&str]) -> fmt::Result {
    out.push('[');
    for (at, name) in names.iter().enumerate() {
        out.push_str(if at > 0 { ",\"" } else { "\"" });
        for c in name.chars() {
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
    use alloc::string::ToString;

    use super::*;

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

    #[test]
    fn names_cannot_break_out() {
        let name = "a\"b\\c\n\u{1}é";
        assert_eq!(
            Body::Json.write(&[name, "x"], None),
            r#"{"error":"too many requests","violated-policies":["a\"b\\c\u000a\u0001é","x"],"retry_after_secs":null}"#
        );
        assert_eq!(Body::Text.write(&[name, "x"], None), "too many requests: a\"b\\c%0A%01%C3%A9, x\n");
        assert_eq!(
            Body::Problem.write(&["x"], Some(7)),
            r#"{"type":"https://iana.org/assignments/http-problem-types#quota-exceeded","title":"Request cannot be satisfied as assigned quota has been exceeded","status":429,"violated-policies":["x"],"retry_after_secs":7}"#
        );
    }

    #[test]
    fn words_are_read_as_they_are_written() {
        for body in Body::ALL {
            assert_eq!(body.to_string().parse(), Ok(body));
        }
        assert_eq!("html".parse::<Body>().unwrap_err().to_string(), "\"html\": expected problem, json or text");
    }
}
