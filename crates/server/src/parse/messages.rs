//! Messages of serde and of the parsers of YAML and JSON, in the user's terms.

use crate::nearest::nearest;

/// Where a list is expected.
pub(crate) const LIST: &str = "expected a list: `- ITEM` on lines of their own, or [ITEM, ITEM]";
/// Where keys and values are expected.
pub(crate) const KEYS: &str =
    "expected keys and values: `KEY: VALUE` on lines of their own, or { KEY: VALUE }";

/// Where a number is expected.
pub(crate) const WHOLE: &str = "expected a whole number, without a unit";

/// The key that a message says is missing.
pub(crate) fn missing(message: &str) -> Option<&str> {
    without_place(message).strip_prefix("missing field `")?.strip_suffix('`')
}

/// The message in plain words. One about an unknown key or word suggests the nearest known one, or
/// lists all.
pub(crate) fn plain(message: &str) -> String {
    let message = without_place(message);
    let known = |what| {
        let (word, rest) = message.strip_prefix(what)?.strip_prefix(" `")?.split_once('`')?;
        let choices = rest.strip_prefix(", expected ")?;
        let choices = choices.strip_prefix("one of ").unwrap_or(choices);
        let choices: Vec<&str> =
            choices.split(", ").map(|choice| choice.trim_matches('`')).collect();
        Some((word, choices))
    };
    if let Some((key, choices)) = known("unknown field") {
        return format!("unknown key {key:?}: {}", hint(key, &choices));
    }
    if let Some((word, choices)) = known("unknown variant") {
        let word_shown = if word == "~" { "nothing".into() } else { format!("{word:?}") };
        return format!("{word_shown}: {}", hint(word, &choices));
    }
    if let Some(rest) =
        message.strip_prefix("invalid type: ").or_else(|| message.strip_prefix("invalid value: "))
    {
        let (found, expected) = rest.split_once(", expected ").unwrap_or((rest, "another value"));
        let expected = match expected {
            "a string" => "text",
            "a map" => "keys and values",
            "a sequence" => "a list",
            other => other,
        };
        return format!("{}: expected {expected}", value(found));
    }
    if let Some(field) =
        message.strip_prefix("missing field `").and_then(|rest| rest.strip_suffix('`'))
    {
        return format!("{field} is missing: add `{field}: VALUE`");
    }
    if let Some(field) =
        message.strip_prefix("duplicate field `").and_then(|rest| rest.strip_suffix('`'))
    {
        return format!("{field} is there twice: remove one of them");
    }
    if let Some(rest) = message.strip_prefix("duplicate mapping key: ") {
        let key = rest.split(", ").next().unwrap_or(rest);
        return format!("{key} is there twice: remove one of them");
    }
    if message
        .strip_prefix("invalid ")
        .is_some_and(|kind| ["u8", "u16", "u32", "u64", "i64"].contains(&kind))
    {
        return WHOLE.into();
    }
    match message {
        "invalid boolean" => "expected true or false".into(),
        "expected sequence start" => LIST.into(),
        "expected mapping start" => KEYS.into(),
        "expected string scalar" => "expected text, found a list or keys and values".into(),
        _ => message.into(),
    }
}

/// A value as its author wrote it, from its name in a message of serde.
fn value(found: &str) -> String {
    for kind in ["integer `", "floating point `", "boolean `", "character `", "string "] {
        if let Some(text) = found.strip_prefix(kind) {
            return text.trim_end_matches('`').into();
        }
    }
    match found {
        "unit value" | "null" | "Option value" => "nothing".into(),
        "sequence" => "a list".into(),
        "map" => "keys and values".into(),
        other => other.into(),
    }
}

/// The message without the place at its end, which is printed before it.
fn without_place(message: &str) -> &str {
    let numbers = |place: &str| {
        let (line, column) =
            place.split_once(", column ").or_else(|| place.split_once(" column "))?;
        Some([line, column].iter().all(|number| number.bytes().all(|byte| byte.is_ascii_digit())))
    };
    match message.rsplit_once(" at line ") {
        Some((before, place)) if numbers(place) == Some(true) => before,
        _ => message,
    }
}

/// `did you mean limit?`, or `expected a, b or c`.
pub(crate) fn hint(word: &str, choices: &[&str]) -> String {
    match nearest(word, choices.iter().copied()) {
        Some(choice) => format!("did you mean {choice}?"),
        None => format!("expected {}", one_of(choices)),
    }
}

/// `a, b or c`.
pub(crate) fn one_of(choices: &[&str]) -> String {
    match choices {
        [] => "nothing".into(),
        [one] => (*one).into(),
        [before @ .., last] => format!("{} or {last}", before.join(", ")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unknown_keys_and_words_come_with_the_right_ones() {
        for (message, expected) in [
            (
                "unknown field `lmit`, expected one of name, when, limit at line 2, column 15",
                "unknown key \"lmit\": did you mean limit?",
            ),
            (
                "unknown field `color`, expected one of `name`, `limit`",
                "unknown key \"color\": expected name or limit",
            ),
            (
                "unknown variant `shaddow`, expected one of enforce, shadow at line 2, column 3",
                "\"shaddow\": did you mean shadow?",
            ),
            ("unknown variant `x`, expected `problem`", "\"x\": expected problem"),
            ("missing field `limit` at line 2, column 6", "limit is missing: add `limit: VALUE`"),
            (
                "duplicate mapping key: limit, set DuplicateKeyPolicy in Options",
                "limit is there twice: remove one of them",
            ),
            ("duplicate field `key` at line 1 column 20", "key is there twice: remove one of them"),
            (
                "invalid type: string \"one\", expected a number at line 4, column 5",
                "\"one\": expected a number",
            ),
            (
                "invalid type: integer `-1`, expected a number at line 1 column 34",
                "-1: expected a number",
            ),
            ("invalid type: floating point `1.5`, expected a number", "1.5: expected a number"),
            ("invalid type: unit value, expected a name", "nothing: expected a name"),
            ("invalid type: null, expected a string", "nothing: expected text"),
            ("invalid u32 at line 1, column 22", "expected a whole number, without a unit"),
            ("invalid boolean at line 1, column 2", "expected true or false"),
            (
                "unknown variant `~`, expected one of enforce, shadow",
                "nothing: expected enforce or shadow",
            ),
        ] {
            assert_eq!(plain(message), expected);
        }
    }
}
