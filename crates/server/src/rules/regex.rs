//! Patterns that look like regular expressions, and what to write instead.

/// The most patterns that one expression is rewritten to.
const MAX_REWRITTEN: usize = 8;

/// What a message says about the notation of patterns.
pub(crate) const NOTATION: &str = "expected a pattern, in which * is any number of characters, ? is one, and ! in front means not";

/// The replacement of a regular expression.
#[derive(PartialEq, Eq, Debug)]
pub(crate) enum Rewritten {
    /// These patterns, of which one must match.
    To(Vec<String>),
    /// There is no simple replacement.
    Not,
}

impl Rewritten {
    /// `write "/api/*"`.
    pub(crate) fn advice(&self) -> String {
        match self {
            Rewritten::To(patterns) => match &patterns[..] {
                [one] => format!("write {one:?}"),
                many => {
                    let many: Vec<String> = many.iter().map(|one| format!("{one:?}")).collect();
                    format!("write [{}]", many.join(", "))
                }
            },
            Rewritten::Not => "write each value that is meant, as a list".into(),
        }
    }
}

/// The attribute that a pattern is for, which shows what its author meant.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum PatternContext {
    /// Paths, in which a dot hardly begins a name and a bar hardly stands for itself.
    Path,
    /// Methods, which have no bar.
    Method,
    /// Anything else.
    Other,
}

/// What to write instead, if `text` looks like a regular expression.
pub(crate) fn rewritten(text: &str, about: PatternContext) -> Option<Rewritten> {
    let (not, body) = match text.strip_prefix('!') {
        Some(body) => ("!", body),
        None => ("", text),
    };
    if !looks_like_one(body, about) {
        return None;
    }
    let is_anchored = body.starts_with('^');
    let ends = body.ends_with('$');
    let body = if is_alternative(body, about) { format!("({body})") } else { body.into() };
    let inner = body.strip_prefix('^').unwrap_or(&body);
    let inner = inner.strip_suffix('$').unwrap_or(inner);
    Some(match expanded(inner) {
        Some(patterns) if patterns.iter().all(|one| !one.is_empty()) => {
            let whole = |one: String| {
                if is_anchored && !ends && !one.ends_with('*') { one + "*" } else { one }
            };
            Rewritten::To(patterns.into_iter().map(|one| format!("{not}{}", whole(one))).collect())
        }
        _ => Rewritten::Not,
    })
}

/// `GET|POST`, `/a|/b`.
fn is_alternative(text: &str, about: PatternContext) -> bool {
    about != PatternContext::Other && text.contains('|') && !text.contains(['(', '\\'])
}

fn looks_like_one(text: &str, about: PatternContext) -> bool {
    let is_path = about == PatternContext::Path;
    // `.*bot.*`, `.*\.example\.com`: no value begins with a dot before anything.
    if text.starts_with(".*")
        || text.starts_with(".+")
        || text.starts_with("(?")
        || is_alternative(text, about)
    {
        return true;
    }
    if text.starts_with('^') || (text.ends_with('$') && !text.ends_with("\\$") && text.len() > 1) {
        return true;
    }
    let chars: Vec<char> = text.chars().collect();
    let mut at = 0;
    while let Some(char) = chars.get(at) {
        let next = chars.get(at + 1).copied();
        let rest = &chars[at + 1..];
        match (char, next) {
            ('\\', Some('d' | 'D' | 'w' | 'W' | 's' | 'S' | 'b')) => return true,
            ('\\', _) => at += 1,
            ('.', Some('+')) => return true,
            // `/api.*`, `/api/.*`; `/files/report.*` is one, too, and a pattern `/files/report.*`
            // hardly.
            ('.', Some('*')) if is_path && at + 2 == chars.len() => return true,
            ('.', Some('*')) if is_path && at > 0 && chars[at - 1] == '/' => return true,
            ('(', Some('?')) if rest.get(1) == Some(&':') => return true,
            ('(', _) => {
                let end = rest.iter().position(|char| *char == ')');
                if end.is_some_and(|end| rest[..end].contains(&'|') || rest[..end] == ['.', '*']) {
                    return true;
                }
            }
            // An address of IPv6 stands in brackets, too.
            ('[', _) => {
                let end = rest.iter().position(|char| *char == ']');
                if end.is_some_and(|end| end > 0 && !rest[..end].contains(&':')) {
                    return true;
                }
            }
            _ => {}
        }
        at += 1;
    }
    false
}

/// The expression as patterns, if they can express it.
fn expanded(text: &str) -> Option<Vec<String>> {
    let mut patterns = vec![String::new()];
    let mut rest = text;
    while let Some(char) = rest.chars().next() {
        let after = &rest[char.len_utf8()..];
        let (pieces, left): (Vec<String>, &str) = match char {
            '(' => {
                let end = after.find(')')?;
                let inner = after[..end].strip_prefix("?:").unwrap_or(&after[..end]);
                let left = &after[end + 1..];
                if inner.contains('(') || left.starts_with(['?', '+', '*', '{']) {
                    return None;
                }
                let mut pieces = Vec::new();
                for one in inner.split('|') {
                    pieces.extend(expanded(one)?);
                }
                (pieces, left)
            }
            '[' => any_of_class(&after[after.find(']')? + 1..])?,
            '\\' => {
                let class = after.chars().next()?;
                let left = &after[class.len_utf8()..];
                match class {
                    'd' | 'w' | 's' | 'D' | 'W' | 'S' => any_of_class(left)?,
                    'b' | 'B' => return None,
                    '*' | '?' | '\\' | '!' => (vec![format!("\\{class}")], left),
                    other => (vec![other.to_string()], left),
                }
            }
            '.' if after.starts_with(['*', '+']) => any_of_class(after)?,
            '+' | '?' | '{' | '|' | ')' | '^' | '$' => return None,
            other => (vec![other.to_string()], after),
        };
        patterns = patterns
            .iter()
            .flat_map(|before| pieces.iter().map(move |piece| format!("{before}{piece}")))
            .collect();
        if patterns.len() > MAX_REWRITTEN {
            return None;
        }
        rest = left;
    }
    Some(patterns)
}

/// A class of characters, by what comes after it: one, some, or any number.
fn any_of_class(after: &str) -> Option<(Vec<String>, &str)> {
    match after.chars().next() {
        Some('*') => Some((vec!["*".into()], &after[1..])),
        Some('+') => Some((vec!["?*".into()], &after[1..])),
        Some('?' | '{') => None,
        _ => Some((vec!["?".into()], after)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn expressions_are_rewritten_where_that_is_easy() {
        for (text, expected) in [
            ("^/api/.*$", "write \"/api/*\""),
            ("^/api/", "write \"/api/*\""),
            ("/v1/(a|b)", "write [\"/v1/a\", \"/v1/b\"]"),
            ("/v[0-9]+/users", "write \"/v?*/users\""),
            ("/users/\\d+", "write \"/users/?*\""),
            ("!^/internal/.*", "write \"!/internal/*\""),
            ("(?:x|y)\\.com$", "write [\"x.com\", \"y.com\"]"),
            ("/files/.+", "write \"/files/?*\""),
            ("^(a|b)?$", "write each value that is meant, as a list"),
            ("\\bword\\b", "write each value that is meant, as a list"),
        ] {
            assert_eq!(
                rewritten(text, PatternContext::Path).map(|one| one.advice()).as_deref(),
                Some(expected),
                "{text}"
            );
        }
        for (text, about, expected) in [
            ("GET|POST", PatternContext::Method, "write [\"GET\", \"POST\"]"),
            ("/a|/b", PatternContext::Path, "write [\"/a\", \"/b\"]"),
            ("/api.*", PatternContext::Path, "write \"/api*\""),
            (".*", PatternContext::Path, "write \"*\""),
            (".*.example.com", PatternContext::Other, "write \"*.example.com\""),
            (".*bot.*", PatternContext::Other, "write \"*bot*\""),
            ("(?i)bot", PatternContext::Other, "write each value that is meant, as a list"),
        ] {
            assert_eq!(
                rewritten(text, about).map(|one| one.advice()).as_deref(),
                Some(expected),
                "{text}"
            );
        }
        for text in [
            "/api/*",
            "10.0.*",
            "curl/8.*",
            "a\\[b\\]",
            "[::1]",
            "Mozilla/5.0 (X11*",
            "*.example.com",
            "$",
            "a|b",
        ] {
            assert_eq!(rewritten(text, PatternContext::Other), None, "{text}");
        }
        assert_eq!(
            rewritten("/\\.*", PatternContext::Path),
            None,
            "with a backslash a dot is meant"
        );
    }
}
