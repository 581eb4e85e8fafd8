//! The names of policies in headers: unique within an answer, and safe in a header.

use std::borrow::Cow;
use std::fmt::Write;

use tidegate_core::Limit;

/// The policy name of each of `limits`, a rule and one limit of it. All names differ.
///
/// A rule with one limit gives its policy its name. A rule with several limits gives each policy
/// its name and the notation of the limit. Names that are still equal are numbered.
///
/// ```
/// use tidegate::Limit;
/// use tidegate::http::headers;
/// let (second, minute): (Limit, Limit) = ("10/s".parse()?, "120/min".parse()?);
/// let names = headers::names(&[("per-ip", &second), ("per-ip", &minute), ("search", &second)]);
/// assert_eq!(names, ["per-ip 10/s", "per-ip 120/m", "search"]);
/// # Ok::<(), tidegate::ParseError>(())
/// ```
pub fn names<'a>(limits: &[(&'a str, &Limit)]) -> Vec<Cow<'a, str>> {
    let is_single = |name: &str| limits.iter().filter(|(other, _)| *other == name).count() == 1;
    let mut names: Vec<Cow<'a, str>> = Vec::with_capacity(limits.len());
    for (name, limit) in limits {
        if is_single(name) {
            names.push(Cow::Borrowed(name));
            continue;
        }
        let written = if name.is_empty() { limit.to_string() } else { format!("{name} {limit}") };
        let is_taken = |new: &str| {
            names.iter().any(|other| other == new)
                || limits.iter().any(|(other, _)| *other == new && is_single(other))
        };
        let numbered = (2_usize..).map(|number| format!("{written} #{number}"));
        let free = std::iter::once(written.clone()).chain(numbered).find(|new| !is_taken(new));
        names.push(Cow::Owned(free.unwrap_or_default()));
    }
    names
}

/// Numbers repeated policy names in the lines of one IETF header that several layers have written.
///
/// ```
/// use tidegate::http::headers::number_repeated_names;
/// let lines = number_repeated_names(&[r#""a";r=1, "b";r=2"#, r#""a";r=3"#]);
/// assert_eq!(lines, [r#""a";r=1, "b";r=2"#, r#""a #2";r=3"#]);
/// ```
pub fn number_repeated_names(lines: &[&str]) -> Vec<String> {
    let all: Vec<Vec<(&str, &str)>> = lines.iter().map(|line| list_members(line)).collect();
    let mut taken: Vec<Cow<'_, str>> = Vec::new();
    let mut numbered_lines = Vec::with_capacity(lines.len());
    for members in &all {
        let mut out = String::new();
        for (name, parameters) in members {
            let numbered = (2_usize..)
                .map(|number| Cow::Owned(format!("{} #{number}\"", &name[..name.len() - 1])));
            let is_taken = |new: &str| {
                let is_others = |other: &str| other == new && other != *name;
                taken.iter().any(|other| other == new)
                    || all.iter().flatten().any(|(other, _)| is_others(other))
            };
            // A member without quotes has no name.
            let mut candidates = std::iter::once(Cow::Borrowed(*name)).chain(numbered);
            let free = candidates.find(|new| name.is_empty() || !is_taken(new)).unwrap_or_default();
            out.push_str(if out.is_empty() { "" } else { ", " });
            out.push_str(&free);
            out.push_str(parameters);
            taken.push(free);
        }
        numbered_lines.push(out);
    }
    numbered_lines
}

/// The members of a structured-field list: the quoted name of each, if it starts with one, and the
/// rest of it.
fn list_members(line: &str) -> Vec<(&str, &str)> {
    let (mut members, mut start, mut name_end) = (Vec::new(), 0, 0);
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
                members.push((&line[start..name_end], line[name_end..at].trim_end()));
                let rest = line.get(at + 1..).unwrap_or_default();
                start = at + 1 + (rest.len() - rest.trim_start().len());
                name_end = start;
            }
            _ => {}
        }
    }
    members
}

/// A name as it stands in the lists of `RateLimit` and `RateLimit-Policy`: between quotes.
///
/// ```
/// use tidegate::http::headers::quoted_name;
/// assert_eq!(quoted_name("per-ip"), "\"per-ip\"");
/// ```
pub fn quoted_name(name: &str) -> String {
    let mut out = String::with_capacity(name.len() + 2);
    push_quoted_name(&mut out, name);
    out
}

pub(super) fn push_quoted_name(out: &mut String, name: &str) {
    out.push('"');
    push_escaped(out, name);
    out.push('"');
}

/// Appends a name with the escapes that it needs between quotes.
fn push_escaped(out: &mut String, name: &str) {
    // Most names need no escape.
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

/// A name as visible ASCII for a header: other bytes are written `%XX`, so that no name can add a
/// header.
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

    #[test]
    fn all_policy_names_differ() {
        // rule and limit of each charge => its name
        for (limits, expected) in [
            (&[("a", "1/s")][..], &["a"][..]),
            (&[("a", "1/s"), ("b", "1/s")], &["a", "b"]),
            (&[("a", "1/s"), ("b", "1/s"), ("a", "9/m window")], &["a 1/s", "b", "a 9/m window"]),
            // One rule that was charged on several keys.
            (&[("a", "1/s"), ("a", "1/s"), ("a", "1/s")], &["a 1/s", "a 1/s #2", "a 1/s #3"]),
            // A rule whose name is the policy name of another one.
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
    fn repeated_names_of_several_layers_are_numbered() {
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
            // A comma and a quote within a name, and lines of an older draft.
            (&[r#""x, \"y";r=1"#, r#""x, \"y";r=2"#], &[r#""x, \"y";r=1"#, r#""x, \"y #2";r=2"#]),
            (&["10;w=1, 20", "10;w=1"], &["10;w=1, 20", "10;w=1"]),
            (
                &["limit=10, remaining=7, reset=1", r#""open"#],
                &["limit=10, remaining=7, reset=1", r#""open"#],
            ),
        ] {
            assert_eq!(number_repeated_names(lines), expected, "{lines:?}");
        }
    }
}
