//! A decision as the text of HTTP headers: IETF draft-ietf-httpapi-ratelimit-headers-10 or, for
//! clients that know no later one, -07; and the GitHub style.
//!
//! Everything is rounded so that a client that believes it is never too early: waits up, what is
//! left down.
//!
//! ```
//! use crate::http::headers;
//! use tidegate_core::{Charge, Limit, Op, Record, Timestamp, decide};
//! let limit: Limit = "100/min burst 20".parse()?;
//! let decision = decide(Op::Check, &mut [Charge::new(&limit, &mut Record::default(), 1)], Timestamp::from_secs(7));
//! let headers = headers::of(&decision, &[("search", &limit)], headers::Families::ALL);
//! assert_eq!(headers[0], ("RateLimit-Policy", r#""search";q=20;w=12"#.into()));
//! assert_eq!(headers[1], ("RateLimit", r#""search";r=19;t=1"#.into()));
//! assert_eq!(headers[2], ("X-RateLimit-Limit", "20".into()));
//! # Ok::<(), tidegate_core::ParseError>(())
//! ```

use std::borrow::Cow;
use std::fmt::{self, Write};
use std::str::FromStr;

use tidegate_core::Algorithm;
use tidegate_core::Limit;
use tidegate_core::{Decision, Retry, Verdict};

/// The largest integer a structured field may carry.
const MAX_FIELD_INTEGER: u64 = 999_999_999_999_999;
const SECOND_US: u64 = 1_000_000;

/// Which of the IETF's drafts `RateLimit-Policy` and `RateLimit` follow; they have the same names
/// in both.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum Draft {
    /// Draft 10: every limit by its name, what remains and when there is more.
    Ten,
    /// Draft 7: the binding limit, what remains of it and when it is whole again; as many clients
    /// still read it.
    Seven,
}

/// Which families of headers to send. Written `draft-10 github`; read with commas or spaces between
/// the words.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Families {
    /// `RateLimit-Policy` and `RateLimit`.
    pub ietf: Option<Draft>,
    /// `X-RateLimit-Limit`, `-Remaining`, `-Used`, `-Reset` and `-Resource`.
    pub github: bool,
}

impl Families {
    /// None of them: nothing but `Retry-After`.
    pub const NONE: Families = Families { ietf: None, github: false };
    /// The IETF's latest draft and the GitHub style.
    pub const ALL: Families = Families { ietf: Some(Draft::Ten), github: true };
    /// The IETF's latest draft only.
    pub const IETF: Families = Families { ietf: Some(Draft::Ten), github: false };
    /// The IETF's draft 7 only.
    pub const DRAFT_7: Families = Families { ietf: Some(Draft::Seven), github: false };
    /// The GitHub style only.
    pub const GITHUB: Families = Families { ietf: None, github: true };

    /// These, and the one that `word` names: `draft-10` (or `ietf`), `draft-7`, `github`; `none`
    /// adds nothing. The two drafts share their names, so only one of them can be sent.
    ///
    /// # Errors
    /// What was expected, if it names none, or another draft than the one that is there already.
    pub fn and(self, word: &str) -> Result<Families, FamilyError> {
        let draft = match word {
            "none" => return Ok(self),
            "github" => return Ok(Families { github: true, ..self }),
            "draft-10" | "ietf" => Draft::Ten,
            "draft-7" => Draft::Seven,
            _ => return Err(FamilyError::Unknown(word.chars().take(40).collect())),
        };
        match self.ietf {
            Some(other) if other != draft => Err(FamilyError::TwoDrafts),
            _ => Ok(Families { ietf: Some(draft), ..self }),
        }
    }
}

impl FromStr for Families {
    type Err = FamilyError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let mut words = text.split([',', ' ']).filter(|word| !word.is_empty()).peekable();
        if words.peek().is_none() {
            return Err(FamilyError::Unknown(String::new()));
        }
        words.try_fold(Families::NONE, Families::and)
    }
}

impl fmt::Display for Families {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let draft = match self.ietf {
            Some(Draft::Ten) => "draft-10",
            Some(Draft::Seven) => "draft-7",
            None => "",
        };
        f.write_str(match (draft, self.github) {
            ("", false) => "none",
            ("", true) => "github",
            ("draft-10", true) => "draft-10 github",
            (_, true) => "draft-7 github",
            (draft, false) => draft,
        })
    }
}

/// Why [`Families`] could not be read.
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum FamilyError {
    /// No family is called so.
    Unknown(String),
    /// Both drafts were asked for.
    TwoDrafts,
}

impl fmt::Display for FamilyError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            FamilyError::Unknown(word) => {
                write!(f, "{word:?}: expected draft-10 (or ietf), draft-7, github or none")
            }
            FamilyError::TwoDrafts => {
                f.write_str("draft-10 and draft-7 have the same headers: expected one of the two")
            }
        }
    }
}

impl core::error::Error for FamilyError {}

/// Every header of a decision, as names and values. `Retry-After` is added on a denial whatever the
/// families.
///
/// `limits` are the rule and limit of each charge, in the order of the check; [`names`] makes
/// policies of them. GitHub's headers speak of the binding charge.
pub fn of(
    decision: &Decision,
    limits: &[(&str, &Limit)],
    families: Families,
) -> Vec<(&'static str, String)> {
    let names = names(limits);
    let policies: Vec<Policy<'_>> = names
        .iter()
        .zip(limits)
        .zip(decision.charges())
        .map(|((name, (_, limit)), verdict)| Policy { name, limit, verdict })
        .collect();
    of_policies(
        decision,
        &policies,
        names.get(decision.binding_index()).map(|name| &**name),
        families,
    )
}

/// A limit with the name that clients know it by, and what it says.
pub(crate) struct Policy<'a> {
    pub(crate) name: &'a str,
    pub(crate) limit: &'a Limit,
    pub(crate) verdict: &'a Verdict,
}

/// The headers of a decision, about these policies of it only.
pub(crate) fn of_policies(
    decision: &Decision,
    policies: &[Policy<'_>],
    binding: Option<&str>,
    families: Families,
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
            Draft::Seven => (policy_7(&limits), rate_limit_7(decision.binding())),
        };
        headers.extend([("RateLimit-Policy", policy), ("RateLimit", rate_limit)]);
    }
    if families.github {
        let verdict = decision.binding();
        headers.push(("X-RateLimit-Limit", verdict.amount.to_string()));
        headers.push(("X-RateLimit-Remaining", verdict.remaining.to_string()));
        headers.push((
            "X-RateLimit-Used",
            (verdict.amount - verdict.remaining.min(verdict.amount)).to_string(),
        ));
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

/// The names of the policies that `limits`, each a rule and one limit of it, are for clients. No
/// two are the same.
///
/// A rule with one limit gives its policy its name. A rule with several limits gives each its name
/// and its notation. What is still the same is numbered.
///
/// ```
/// use crate::http::headers;
/// use tidegate_core::Limit;
/// let (second, minute): (Limit, Limit) = ("10/s".parse()?, "120/min".parse()?);
/// let names = headers::names(&[("per-ip", &second), ("per-ip", &minute), ("search", &second)]);
/// assert_eq!(names, ["per-ip 10/s", "per-ip 120/m", "search"]);
/// # Ok::<(), tidegate_core::ParseError>(())
/// ```
pub fn names<'a>(limits: &[(&'a str, &Limit)]) -> Vec<Cow<'a, str>> {
    let is_alone = |name: &str| limits.iter().filter(|(other, _)| *other == name).count() == 1;
    let mut names: Vec<Cow<'a, str>> = Vec::with_capacity(limits.len());
    for (name, limit) in limits {
        if is_alone(name) {
            names.push(Cow::Borrowed(name));
            continue;
        }
        let written = if name.is_empty() { limit.to_string() } else { format!("{name} {limit}") };
        let is_taken = |new: &str| {
            names.iter().any(|other| other == new)
                || limits.iter().any(|(other, _)| *other == new && is_alone(other))
        };
        let numbered = (2_usize..).map(|number| format!("{written} #{number}"));
        let free = core::iter::once(written.clone()).chain(numbered).find(|new| !is_taken(new));
        names.push(Cow::Owned(free.unwrap_or_default()));
    }
    names
}

/// The lines of one of the IETF's headers that several layers wrote, with a number after each name
/// that a line before it has.
///
/// ```
/// use tidegate::http::headers::told_apart;
/// assert_eq!(told_apart(&[r#""a";r=1, "b";r=2"#, r#""a";r=3"#]), [r#""a";r=1, "b";r=2"#, r#""a #2";r=3"#]);
/// ```
pub fn told_apart(lines: &[&str]) -> Vec<String> {
    let all: Vec<Vec<(&str, &str)>> = lines.iter().map(|line| named_items(line)).collect();
    let mut taken: Vec<Cow<'_, str>> = Vec::new();
    let mut apart = Vec::with_capacity(lines.len());
    for items in &all {
        let mut out = String::new();
        for (name, parameters) in items {
            let numbered = (2_usize..)
                .map(|number| Cow::Owned(format!("{} #{number}\"", &name[..name.len() - 1])));
            let is_taken = |new: &str| {
                let is_others = |other: &str| other == new && other != *name;
                taken.iter().any(|other| other == new)
                    || all.iter().flatten().any(|(other, _)| is_others(other))
            };
            // What is not quoted has no name.
            let mut candidates = core::iter::once(Cow::Borrowed(*name)).chain(numbered);
            let free = candidates.find(|new| name.is_empty() || !is_taken(new)).unwrap_or_default();
            out.push_str(if out.is_empty() { "" } else { ", " });
            out.push_str(&free);
            out.push_str(parameters);
            taken.push(free);
        }
        apart.push(out);
    }
    apart
}

/// The members of a structured-field list: the quoted name of each, if it begins with one, and the
/// rest of it.
fn named_items(line: &str) -> Vec<(&str, &str)> {
    let (mut items, mut start, mut name_end) = (Vec::new(), 0, 0);
    let (mut is_quoted, mut is_escaped) = (false, false);
    for (at, byte) in line.bytes().chain([b',']).enumerate() {
        match byte {
            _ if is_escaped => is_escaped = false,
            b'\\' if is_quoted => is_escaped = true,
            b'"' => {
                is_quoted = !is_quoted;
                if !is_quoted && name_end == start && line[start..].starts_with('"') {
                    name_end = at + 1;
                }
            }
            b',' if !is_quoted || at == line.len() => {
                items.push((&line[start..name_end], line[name_end..at].trim_end()));
                let rest = line.get(at + 1..).unwrap_or_default();
                start = at + 1 + (rest.len() - rest.trim_start().len());
                name_end = start;
            }
            _ => {}
        }
    }
    items
}

/// The value of `RateLimit-Policy`: for each limit its name, quota `q` and, where it is whole
/// seconds, window `w`. The names should be those of [`names`], as a list of policies must not have
/// one twice.
pub fn policy(limits: &[(&str, &Limit)]) -> String {
    let mut out = String::with_capacity(64); // most are shorter
    push_list(&mut out, limits.iter().copied(), |out, limit: &Limit| {
        out.push_str(";q=");
        push_number(out, limit.capacity().min(MAX_FIELD_INTEGER));
        push_window(out, limit);
    });
    out
}

/// The value of `RateLimit-Policy` in draft 7: for each limit its quota and, where it is whole
/// seconds, window `w`.
pub fn policy_7(limits: &[(&str, &Limit)]) -> String {
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

/// The parameter `w`.
fn push_window(out: &mut String, limit: &Limit) {
    let window_us = match limit.algorithm() {
        // A bucket has no window; the time to fill it is what a client can plan with.
        Algorithm::Bucket(bucket) => bucket.fill_us().div_ceil(SECOND_US) * SECOND_US,
        Algorithm::Concurrent(_) => return,
        other => other.period_us(),
    };
    if window_us % SECOND_US == 0 {
        out.push_str(";w=");
        push_number(out, window_us / SECOND_US);
    }
}

/// The value of `RateLimit`: for each charge the name, what remains `r` and, unless that is
/// everything, the seconds `t` until more is available.
pub fn rate_limit<'a>(verdicts: impl IntoIterator<Item = (&'a str, &'a Verdict)>) -> String {
    let mut out = String::with_capacity(64); // most are shorter
    push_rate_limit(&mut out, verdicts);
    out
}

/// Writes the value of `RateLimit` into `out`, which should be empty: as [`rate_limit`], for who
/// has a text to use again.
pub fn push_rate_limit<'a>(
    out: &mut String,
    verdicts: impl IntoIterator<Item = (&'a str, &'a Verdict)>,
) {
    push_list(out, verdicts, push_verdict);
}

/// What is said of one charge in `RateLimit`, its [`item`] before it or not: for who says it with
/// every answer. It lies where it is used, and nothing is allocated for it.
///
/// ```
/// use crate::http::headers::{Item, Told};
/// use tidegate_core::Verdict;
/// # let verdict = Verdict { remaining: 7, amount: 10, next_after_us: 900_000, ..Verdict::default() };
/// assert_eq!(Told::of(&verdict).as_bytes(), b";r=7;t=1");
/// let item = Item::of("per-ip").expect("a short name");
/// let mut told = Told::empty();
/// told.tell(&item, 7, 10, 900_000);
/// assert_eq!(told.as_bytes(), b"\"per-ip\";r=7;t=1");
/// ```
#[derive(Clone, Copy, Debug)]
pub struct Told {
    text: [u8; Item::LONGEST + Told::LONGEST],
    from: usize,
}

impl Told {
    // Twice three letters and a number.
    const LONGEST: usize = 48;

    /// About this verdict.
    pub fn of(verdict: &Verdict) -> Told {
        let mut told = Told::empty();
        told.left(verdict.remaining, verdict.amount, verdict.next_after_us);
        told
    }

    /// Writes another text in its place: of what has this name so much remains of its amount, and
    /// there is more after so many microseconds.
    #[inline]
    pub fn tell(&mut self, item: &Item, remaining: u64, amount: u64, next_after_us: u64) {
        self.from = self.text.len();
        self.left(remaining, amount, next_after_us);
        // All of it in one go, which is quicker than only the letters.
        self.put(item.text);
        self.from += Item::LONGEST - item.length;
    }

    /// Nothing yet.
    #[inline]
    pub fn empty() -> Told {
        Told { text: [0; Item::LONGEST + Told::LONGEST], from: Item::LONGEST + Told::LONGEST }
    }

    /// From the end to the beginning, as digits are found.
    fn left(&mut self, remaining: u64, amount: u64, next_after_us: u64) {
        if remaining < amount {
            self.number(next_after_us.div_ceil(SECOND_US));
            self.put(*b";t=");
        }
        self.number(remaining.min(MAX_FIELD_INTEGER));
        self.put(*b";r=");
    }

    /// Plain letters of ASCII.
    pub fn as_bytes(&self) -> &[u8] {
        &self.text[self.from..]
    }

    /// Two digits at a time.
    #[allow(clippy::cast_possible_truncation, reason = "one or two digits")]
    fn number(&mut self, number: u64) {
        const PAIRS: &[u8; 200] = b"\
            0001020304050607080910111213141516171819202122232425262728293031323334353637383940414243444546474849\
            5051525354555657585960616263646566676869707172737475767778798081828384858687888990919293949596979899";
        let mut rest = number;
        while rest >= 10 {
            let pair = 2 * (rest % 100) as usize;
            self.put([PAIRS[pair], PAIRS[pair + 1]]);
            rest /= 100;
        }
        // The first digit, unless the last pair had it.
        if rest > 0 || number == 0 {
            self.put([b'0' + rest as u8]);
        }
    }

    /// Before what is there.
    fn put<const N: usize>(&mut self, letters: [u8; N]) {
        self.from -= N;
        self.text[self.from..self.from + N].copy_from_slice(&letters);
    }
}

fn push_verdict(out: &mut String, verdict: &Verdict) {
    out.push_str(str::from_utf8(Told::of(verdict).as_bytes()).unwrap_or_default());
}

/// An [`item`] that is short enough to be kept in one place.
#[derive(Clone, Copy, Debug)]
pub struct Item {
    // At the end of it.
    text: [u8; Item::LONGEST],
    length: usize,
}

impl Item {
    const LONGEST: usize = 64;

    /// Of this name; `None` if it is longer than that.
    pub fn of(name: &str) -> Option<Item> {
        let (item, mut text) = (item(name), [0; Item::LONGEST]);
        let from = Item::LONGEST.checked_sub(item.len())?;
        text[from..].copy_from_slice(item.as_bytes());
        Some(Item { text, length: item.len() })
    }
}

/// A name as it stands in the lists of `RateLimit` and `RateLimit-Policy`: between quotes.
///
/// ```
/// use tidegate::http::headers::item;
/// assert_eq!(item("per-ip"), "\"per-ip\"");
/// ```
pub fn item(name: &str) -> String {
    let mut out = String::with_capacity(name.len() + 2);
    push_item(&mut out, name);
    out
}

/// The value of `RateLimit` in draft 7, about one limit: the quota, what remains of it, and the
/// seconds until it is whole again.
pub fn rate_limit_7(verdict: &Verdict) -> String {
    let (limit, remaining) =
        (verdict.amount.min(MAX_FIELD_INTEGER), verdict.remaining.min(MAX_FIELD_INTEGER));
    format!(
        "limit={limit}, remaining={remaining}, reset={}",
        verdict.reset_after_us.div_ceil(SECOND_US)
    )
}

/// The value of `Retry-After`: whole seconds, rounded up, at least 1; `None` unless it was denied
/// and can pass some time.
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

/// A structured-field list of quoted names with parameters.
fn push_list<'a, T: 'a>(
    out: &mut String,
    items: impl IntoIterator<Item = (&'a str, T)>,
    push_parameters: impl Fn(&mut String, T),
) {
    for (name, item) in items {
        if !out.is_empty() {
            out.push_str(", ");
        }
        push_item(out, name);
        push_parameters(out, item);
    }
}

fn push_item(out: &mut String, name: &str) {
    out.push('"');
    push_quoted(out, name);
    out.push('"');
}

/// A name as it may stand between quotes.
fn push_quoted(out: &mut String, name: &str) {
    // Most names have nothing that needs another spelling.
    if name.bytes().all(|byte| matches!(byte, b' '..=b'~') && !matches!(byte, b'%' | b'"' | b'\\'))
    {
        out.push_str(name);
        return;
    }
    for c in visible(name).chars() {
        if matches!(c, '"' | '\\') {
            out.push('\\');
        }
        out.push(c);
    }
}

/// A number in full.
fn push_number(out: &mut String, number: u64) {
    let mut told = Told::empty();
    told.number(number);
    out.push_str(str::from_utf8(told.as_bytes()).unwrap_or_default());
}

/// A name as it may stand in a header: bytes that may not are written `%XX`, so that no name can
/// add a header of its own.
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
    use tidegate_core::{Charge, Limits, Op, Record, Timestamp, decide};

    fn denied(limit: &Limit, cost: u64) -> Decision {
        let mut record = Record::default();
        let now = Timestamp::from_secs(100);
        let _ = decide(Op::Check, &mut [Charge::new(limit, &mut record, limit.capacity())], now);
        decide(Op::Check, &mut [Charge::new(limit, &mut record, cost)], now)
    }

    #[test]
    fn digits_are_those_of_the_number() {
        let mut told = Told::empty();
        let ends = (0..20)
            .flat_map(|power| [10_u64.pow(power) - 1, 10_u64.pow(power), 10_u64.pow(power) + 1]);
        for number in (0..100_000).chain(ends).chain([u64::MAX]) {
            told.from = told.text.len();
            told.number(number);
            assert_eq!(told.as_bytes(), number.to_string().as_bytes());
        }
    }

    #[test]
    fn a_name_of_any_kind_is_told_in_visible_letters() {
        let long = "x".repeat(62);
        let many =
            ["per-ip", "", "a \"b\" \\c", "größe", "a\r\nb: c", "50%", "\0\u{7f}", long.as_str()];
        let mut told = Told::empty();
        for name in many {
            let own = Item::of(name).unwrap_or_else(|| panic!("{name:?} is short"));
            told.tell(&own, 999_999, 1_000_000, 1);
            assert_eq!(told.as_bytes(), format!("{};r=999999;t=1", item(name)).as_bytes());
            assert!(told.as_bytes().iter().all(|byte| matches!(byte, b' '..=b'~')), "{name:?}");
        }
        assert!(Item::of(&"x".repeat(63)).is_none());
        let item = Item::of("x").expect("a short name");
        for number in [0, 1, 9, 10, 99, 100, 12_345, MAX_FIELD_INTEGER, u64::MAX] {
            let shown = number.min(MAX_FIELD_INTEGER);
            told.tell(&item, number, u64::MAX, u64::MAX);
            let more = if number < u64::MAX { ";t=18446744073710" } else { "" };
            assert_eq!(told.as_bytes(), format!("\"x\";r={shown}{more}").as_bytes());
        }
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
    fn no_two_policies_have_one_name() {
        // rule and limit of each charge => its name
        for (limits, expected) in [
            (&[("a", "1/s")][..], &["a"][..]),
            (&[("a", "1/s"), ("b", "1/s")], &["a", "b"]),
            (&[("a", "1/s"), ("b", "1/s"), ("a", "9/m window")], &["a 1/s", "b", "a 9/m window"]),
            // One rule that was charged on two keys.
            (&[("a", "1/s"), ("a", "1/s"), ("a", "1/s")], &["a 1/s", "a 1/s #2", "a 1/s #3"]),
            // A rule that is called as another one would be.
            (&[("a", "1/s"), ("a", "2/s"), ("a 1/s", "3/s")], &["a 1/s #2", "a 2/s", "a 1/s"]),
            (&[("", "1/s"), ("", "2/s")], &["1/s", "2/s"]),
        ] {
            let parsed: Vec<Limit> =
                limits.iter().map(|(_, limit)| limit.parse().unwrap()).collect();
            let limits: Vec<(&str, &Limit)> =
                limits.iter().map(|(name, _)| *name).zip(&parsed).collect();
            assert_eq!(names(&limits), expected, "{limits:?}");
        }
    }

    #[test]
    fn policies_of_several_layers_are_told_apart() {
        for (lines, expected) in [
            (&[r#""a";q=1;w=2"#, r#""b";q=1"#][..], &[r#""a";q=1;w=2"#, r#""b";q=1"#][..]),
            (
                &[r#""a";r=1"#, r#""a";r=2"#, r#""a";r=3"#],
                &[r#""a";r=1"#, r#""a #2";r=2"#, r#""a #3";r=3"#],
            ),
            (
                &[r#""a";r=1, "a #2";r=4"#, r#""a";r=2"#],
                &[r#""a";r=1, "a #2";r=4"#, r#""a #3";r=2"#],
            ),
            // A comma and a quote within a name, and what an older draft says.
            (&[r#""x, \"y";r=1"#, r#""x, \"y";r=2"#], &[r#""x, \"y";r=1"#, r#""x, \"y #2";r=2"#]),
            (&["10;w=1, 20", "10;w=1"], &["10;w=1, 20", "10;w=1"]),
            (
                &["limit=10, remaining=7, reset=1", r#""open"#],
                &["limit=10, remaining=7, reset=1", r#""open"#],
            ),
        ] {
            assert_eq!(told_apart(lines), expected, "{lines:?}");
        }
    }

    #[test]
    fn draft_7_speaks_of_the_limit_that_binds() {
        let limits: Limits = "10/s; 100/min window; 20 concurrent ttl 30s".parse().unwrap();
        let mut records: [Record; 3] = Default::default();
        let mut charges: Vec<Charge<'_>> = limits
            .into_iter()
            .zip(&mut records)
            .map(|(limit, record)| Charge::new(limit, record, 3))
            .collect();
        let decision = decide(Op::Check, &mut charges, Timestamp::from_secs(100));
        let names = ["a", "b", "c"];
        let named: Vec<(&str, &Limit)> = names.into_iter().zip(&limits).collect();
        let headers = of(&decision, &named, Families::DRAFT_7);
        assert_eq!(headers[0], ("RateLimit-Policy", "10;w=1, 100;w=60, 20".into()));
        assert_eq!(headers[1], ("RateLimit", "limit=10, remaining=7, reset=1".into()));
        assert_eq!(headers.len(), 2);
    }

    #[test]
    fn families_are_read_as_they_are_written() {
        for (text, expected) in [
            ("draft-10 github", Families::ALL),
            ("ietf,github", Families::ALL),
            ("github, draft-10", Families::ALL),
            ("draft-10", Families::IETF),
            ("draft-7", Families::DRAFT_7),
            ("draft-7 github", Families { ietf: Some(Draft::Seven), github: true }),
            ("github", Families::GITHUB),
            ("none", Families::NONE),
        ] {
            let read: Families = text.parse().unwrap();
            assert_eq!(read, expected, "{text}");
            assert_eq!(read.to_string().parse(), Ok(expected), "{text}");
        }
        assert_eq!("draft-7 ietf".parse::<Families>(), Err(FamilyError::TwoDrafts));
        for wrong in ["", " ,", "draft-6", "GitHub"] {
            let error = wrong.parse::<Families>().unwrap_err();
            assert!(matches!(error, FamilyError::Unknown(_)), "{wrong}");
            assert!(
                error.to_string().contains("expected draft-10 (or ietf), draft-7, github or none"),
                "{error}"
            );
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
            assert_eq!(
                retry_after_secs(&denied(&text.parse().unwrap(), cost)),
                expected,
                "{text} cost {cost}"
            );
        }
    }

    #[test]
    fn nothing_is_said_of_more_when_everything_is_left() {
        let limit: Limit = "10/s".parse().unwrap();
        let idle = decide(
            Op::Peek,
            &mut [Charge::new(&limit, &mut Record::default(), 1)],
            Timestamp::EPOCH,
        );
        assert_eq!(rate_limit([("x", idle.binding())]), r#""x";r=10"#);
        assert_eq!(retry_after_secs(&idle), None);
    }

    #[test]
    fn numbers_of_a_store_that_went_mad_are_still_numbers() {
        let mad = Verdict {
            reset_after_us: u64::MAX,
            next_after_us: u64::MAX,
            remaining: u64::MAX,
            ..Verdict::default()
        };
        let decision = Decision::of_one(mad, false, Timestamp::MAX);
        let limit: Limit = "10/s".parse().unwrap();
        assert_eq!(reset_epoch_secs(&decision), u64::MAX.div_ceil(SECOND_US));
        assert!(!of(&decision, &[("x", &limit)], Families::ALL).is_empty());
    }

    #[test]
    fn numbers_are_written_in_full() {
        let around =
            (0..20).map(|power| 10_u64.pow(power)).flat_map(|power| [power - 1, power, power + 1]);
        for number in (0..=1000).chain(around).chain([1_234_567_890, MAX_FIELD_INTEGER, u64::MAX]) {
            let mut out = String::from("=");
            push_number(&mut out, number);
            assert_eq!(out, format!("={number}"));
        }
    }

    #[test]
    fn hostile_names_cannot_leave_their_quotes() {
        let limit: Limit = "10/s".parse().unwrap();
        let name = "a\"b\\c\r\nSet-Cookie: x=1\u{e9}%";
        assert_eq!(
            policy(&[(name, &limit)]),
            r#""a\"b\\c%0D%0ASet-Cookie: x=1%C3%A9%25";q=10;w=1"#
        );
        let headers = of(&denied(&limit, 1), &[(name, &limit)], Families::ALL);
        assert!(
            headers.iter().all(|(_, value)| value.bytes().all(|b| (b' '..=b'~').contains(&b))),
            "{headers:?}"
        );
    }

    #[test]
    fn github_headers_speak_of_the_binding_charge() {
        let (a, b): (Limit, Limit) = ("10/s".parse().unwrap(), "3/min window".parse().unwrap());
        let (mut ra, mut rb) = (Record::default(), Record::default());
        let now = Timestamp::from_secs(90);
        let decision =
            decide(Op::Check, &mut [Charge::new(&a, &mut ra, 1), Charge::new(&b, &mut rb, 1)], now);
        let headers = of(&decision, &[("burst", &a), ("minute", &b)], Families::GITHUB);
        let expected = [
            ("Limit", "3"),
            ("Remaining", "2"),
            ("Used", "1"),
            ("Reset", "120"),
            ("Resource", "minute"),
        ];
        for ((name, value), (suffix, expected)) in headers.iter().zip(expected) {
            assert_eq!(
                (name.trim_start_matches("X-RateLimit-"), value.as_str()),
                (suffix, expected)
            );
        }
    }
}
