//! A rule in one line: `10/s by ip`.

use std::sync::Arc;

use tidegate::Limits;
use tidegate::http::DEFAULT_IPV6_PREFIX;
use tidegate::resilience::SyncMode;

use super::{Budget, Cost, MAX_NAME_BYTES, Mode, Rule};
use crate::nearest::nearest;

/// The attributes that a rule in one line can have.
const EXPECTED: &str =
    "ip, path, method, host, bearer, bearer.CLAIM, header.NAME, query.NAME or cookie.NAME";

impl Rule {
    /// Reads `LIMIT [by ATTRIBUTE[, ATTRIBUTE]…]`: one budget for each combination of their values,
    /// or one for all requests. The name lists its attributes: `per-ip`, `per-ip-path`, `everyone`.
    ///
    /// # Errors
    /// What is wrong with it, and what was expected.
    pub fn in_one_line(text: &str) -> Result<Rule, String> {
        let (limit, by) = match text.trim().rsplit_once(" by ") {
            Some((limit, by)) => (limit, attributes(by)?),
            None => (text, Vec::new()),
        };
        let limits: Limits =
            limit.trim().parse().map_err(|error| format!("limit {limit:?}: {error}"))?;
        let name = if by.is_empty() { "everyone".into() } else { format!("per-{}", by.join("-")) };
        Ok(Rule {
            name: plain(&name),
            when: Vec::new(),
            by: by.into_iter().map(Arc::from).collect(),
            missing: Default::default(),
            budget: Budget::Limits(limits),
            cost: Cost::Fixed(1),
            overrides: Vec::new(),
            mode: Mode::Enforce,
            refunds: true,
            on_store_failure: None,
            sync: SyncMode::default(),
            overflow: None,
            charge_when: Vec::new(),
            settle: None,
            deny_status: None,
            ipv6_prefix: DEFAULT_IPV6_PREFIX,
        })
    }
}

/// `ip, path`, `ip and path`.
fn attributes(text: &str) -> Result<Vec<String>, String> {
    let words = text.split(',').flat_map(|part| part.split(" and ")).map(str::trim);
    words
        .map(|word| {
            let known = match word.split_once('.') {
                None => ["ip", "path", "method", "host", "bearer"].contains(&word),
                Some((kind, name)) => {
                    ["header", "query", "cookie", "bearer"].contains(&kind) && !name.is_empty()
                }
            };
            // Headers are known in lower case alone.
            let spelt =
                if word.starts_with("header.") { word.to_ascii_lowercase() } else { word.into() };
            if known {
                Ok(spelt)
            } else {
                Err(format!(
                    "by {word:?}: no such attribute: expected {EXPECTED}{}",
                    did_you_mean(word)
                ))
            }
        })
        .collect()
}

/// The attribute nearest to an unknown word.
fn did_you_mean(word: &str) -> String {
    let plain = ["ip", "path", "method", "host", "bearer"];
    let meant = match word.split_once('.') {
        Some((kind, name)) => nearest(kind, ["header", "query", "cookie", "bearer"])
            .map(|kind| format!("{kind}.{name}")),
        None if nearest(word, ["address", "client", "client-ip", "remote-addr"]).is_some() => {
            Some("ip".into())
        }
        None => nearest(word, plain).map(Into::into),
    };
    meant
        .filter(|meant| meant != word)
        .map_or(String::new(), |meant| format!(": did you mean {meant}?"))
}

/// A name that is valid in headers and metrics.
fn plain(name: &str) -> Arc<str> {
    let fine = |c: char| if c.is_ascii_alphanumeric() || "-_.".contains(c) { c } else { '_' };
    name.chars().map(fine).take(MAX_NAME_BYTES).collect::<String>().into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_is_a_rule() {
        for (text, name, by) in [
            ("10/s by ip", "per-ip", &["ip"][..]),
            ("10/s; 120/m by ip, path", "per-ip-path", &["ip", "path"]),
            (
                "30/min burst 5 by header.X-API-Key and path",
                "per-header.x-api-key-path",
                &["header.x-api-key", "path"],
            ),
            ("1000/s", "everyone", &[]),
        ] {
            let rule = Rule::in_one_line(text).unwrap();
            assert_eq!(
                (&*rule.name, rule.by.iter().map(|by| &**by).collect::<Vec<_>>().as_slice()),
                (name, by)
            );
        }
        for (text, expected) in [
            ("10/s by", "limit \"10/s by\": "),
            ("10/s by user", "by \"user\": no such attribute: expected ip, path"),
            ("10/s by ip,", "by \"\": no such attribute: expected ip, path"),
            ("10/s by header.", "by \"header.\": no such attribute: expected ip"),
            ("ten by ip", "limit \"ten\": "),
        ] {
            let error = Rule::in_one_line(text).unwrap_err();
            assert!(error.starts_with(expected), "{text} says {error}");
        }
    }

    #[test]
    fn an_unknown_attribute_suggests_the_nearest_one() {
        for (word, expected) in [
            ("pth", ": did you mean path?"),
            ("adress", ": did you mean ip?"),
            ("client", ": did you mean ip?"),
            ("heder.X-Key", ": did you mean header.X-Key?"),
            ("cookies.a", ": did you mean cookie.a?"),
            ("header.", ""),
            ("colour", ""),
            ("colour.x", ""),
        ] {
            let error = Rule::in_one_line(&format!("10/s by {word}")).unwrap_err();
            assert_eq!(
                error,
                format!("by {word:?}: no such attribute: expected {EXPECTED}{expected}")
            );
        }
    }
}
