//! Mistakes that a parser of YAML finds, with their place and the key that they are about.

use super::words;

/// `3:12: what is wrong`, of a text that could not be read.
pub(crate) fn located(error: &serde_saphyr::Error, text: &str) -> String {
    let message = error.without_snippet().to_string();
    let Some(location) = error.location() else { return format!(" {}", words::plain(&message)) };
    let place = usize::try_from(location.line()).ok().zip(usize::try_from(location.column()).ok());
    let Some((line, column)) = place else { return format!(" {}", words::plain(&message)) };
    if let Some(told) = indented_otherwise(words::missing(&message), text, line, column) {
        return told;
    }
    let message = words::plain(&message);
    let is_container = message == words::LIST || message == words::KEYS;
    let message = about(key_at(text, line, column, is_container), value_at(text, line, column), &message);
    format!("{line}:{column}: {message}")
}

/// A key that is missing, because it stands further left or right than those beside it.
fn indented_otherwise(key: Option<&str>, text: &str, line: usize, column: usize) -> Option<String> {
    let (key, own) = (key?, column - 1);
    let mut below = text.lines().enumerate().skip(line).take(8);
    let (index, other) =
        below.find(|(_, other)| other.trim_start().strip_prefix(key).is_some_and(|rest| rest.starts_with(':')))?;
    let indent = other.len() - other.trim_start().len();
    if indent == own {
        return None;
    }
    let (line, column) = (index + 1, indent + 1);
    Some(format!(
        "{line}:{column}: {key} is indented by {indent} spaces, the keys beside it by {own}: indent it by {own}, too"
    ))
}

/// The key that a mistake at this place is about. A place can be that of a value or of a key; `is_container` if a list or a map was expected, which then
/// begins at its first key.
fn key_at(text: &str, line: usize, column: usize, is_container: bool) -> Option<&str> {
    let own = text.lines().nth(line.checked_sub(1)?)?;
    let (before, rest) = own.split_at_checked(column - 1)?;
    if let Some(before) = before.trim_end().strip_suffix(':') {
        return before.rsplit([' ', '{', ',', '[', '-']).next();
    }
    if !is_container {
        let (key, _) = rest.split_once(':')?;
        return key.chars().all(|char| char.is_ascii_alphanumeric() || char == '_').then_some(key);
    }
    let above: Vec<&str> = text.lines().take(line - 1).collect();
    let indent = |other: &str| other.len() - other.trim_start().len();
    let parent = above.into_iter().rev().find(|other| indent(other) < column - 1 && other.trim_end().ends_with(':'))?;
    parent.trim().trim_start_matches("- ").strip_suffix(':')
}

/// What is written at this place, up to the end of its line.
fn value_at(text: &str, line: usize, column: usize) -> &str {
    let own = text.lines().nth(line - 1).unwrap_or_default();
    own.get(column - 1..).unwrap_or_default().trim_end()
}

/// The message with the key that it is about, and with what to write where that is known.
fn about(key: Option<&str>, value: &str, message: &str) -> String {
    let Some(key) = key else {
        if message == words::KEYS {
            return "this is not a configuration: expected keys and values such as `rules:`; is it the right file?"
                .into();
        }
        return message.into();
    };
    let is_scalar =
        !value.is_empty() && !value.starts_with(['[', '{', '-']) && !value.contains(": ") && !value.ends_with(':');
    match message {
        words::LIST if is_scalar => format!("{key}: expected a list: write {key}: [{value}]"),
        words::LIST => format!("{key}: expected a list: begin each item with a dash, as in `- name: per-ip`"),
        words::KEYS if key == "when" || key == "charge_when" => {
            format!("{key}: expected attributes and their patterns, as in {{ path: \"/v1/*\" }}")
        }
        words::KEYS if key == "listen" => {
            format!("{key}: expected addresses by protocol, as in {{ http: 127.0.0.1:8080 }}")
        }
        words::KEYS => format!("{key}: {message}"),
        _ => match message.strip_prefix("nothing: ") {
            Some(expected) => format!("{key} has no value: {expected}"),
            // Many a message names its key already.
            None if message.starts_with(key) || message.contains("key") || message.contains("two rules") => {
                message.into()
            }
            None if message.starts_with(['"', '-', '0', '1', '2', '3', '4', '5', '6', '7', '8', '9'])
                || message.starts_with("expected")
                || message.starts_with("a list") =>
            {
                format!("{key}: {message}")
            }
            None => message.into(),
        },
    }
}

#[cfg(test)]
mod tests {
    use crate::config::Config;

    #[test]
    fn a_mistake_names_its_key_and_what_to_write() {
        for (text, expected) in [
            (
                "rules:\n  name: a\n  limit: 1/s\n",
                "f:2:3: rules: expected a list: begin each item with a dash, as in `- name: per-ip`",
            ),
            (
                "trusted_proxies: 10.0.0.0/8\n",
                "f:1:18: trusted_proxies: expected a list: write trusted_proxies: [10.0.0.0/8]",
            ),
            (
                "rules:\n  - name: a\n    when: [path]\n    limit: 1/s\n",
                "f:3:11: when: expected attributes and their patterns, as in { path: \"/v1/*\" }",
            ),
            (
                "rules:\n  - name: a\n   limit: 1/s\n",
                "f:3:4: limit is indented by 3 spaces, the keys beside it by 4: indent it by 4, too",
            ),
            (
                "rules:\n  - name: a\n    by:\n    limit: 1/s\n",
                "f:3:5: by has no value: expected an attribute such as ip, or a list of them",
            ),
            (
                "rules:\n  - name: a\n    limit: 1/s\n    cost: one\n",
                "f:4:5: cost: \"one\": expected a whole number, or { from: ATTRIBUTE, max: N }",
            ),
            (
                "rules:\n  - name: a\n    limit: 1/s\n    mode: shaddow\n",
                "f:4:11: mode: \"shaddow\": did you mean shadow?",
            ),
            ("near: { deadline_ms: 20ms }\n", "f:1:22: deadline_ms: expected a whole number, without a unit"),
            ("listen: 127.0.0.1:80\n", "f:1:9: listen: expected addresses by protocol, as in { http: 127.0.0.1:8080 }"),
            ("rules:\n  - limit: 1/s\n", "f:2:5: name is missing: add `name: VALUE`"),
            (
                "<html></html>\n",
                "f:1:1: this is not a configuration: expected keys and values such as `rules:`; is it the right file?",
            ),
        ] {
            assert_eq!(Config::parse(text, "f").unwrap_err().to_string(), expected, "{text}");
        }
    }
}
