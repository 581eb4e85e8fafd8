//! Errors of the YAML parser, with their place and their key.

use serde_saphyr::Error;
use serde_saphyr::budget::BudgetBreach;

use super::messages;

/// The message of errors that have no message of their own.
const UNREADABLE: &str = "this is not YAML: check brackets, colons and indentation, and quote text that begins with one of * ! & @ % ` [ {";

const SECOND_DOCUMENT: &str =
    "--- begins a second YAML document: expected one document: remove this line";
const UNCLOSED: &str = "a bracket that is not closed: expected ] or } after the last item";
const ENDED: &str = "the text ends within a list or a map: close it with ] or }";

/// `3:12: what is wrong`: an error with its place in the text.
pub(crate) fn located(error: &serde_saphyr::Error, text: &str) -> String {
    let message = error.without_snippet().to_string();
    let Some(location) = error.location() else { return format!(" {}", messages::plain(&message)) };
    let place = usize::try_from(location.line()).ok().zip(usize::try_from(location.column()).ok());
    let Some((line, column)) = place else { return format!(" {}", messages::plain(&message)) };
    if let Some(told) = indented_otherwise(messages::missing(&message), text, line, column) {
        return told;
    }
    let message = broken(error.without_snippet()).unwrap_or_else(|| messages::plain(&message));
    if [UNREADABLE, UNCLOSED, ENDED].contains(&message.as_str())
        && let Some((line, column, open)) = unclosed_bracket(text, line)
    {
        let close = if open == '[' { ']' } else { '}' };
        return format!(
            "{line}:{column}: this {open} is not closed: add {close} after its last item"
        );
    }
    if message == SECOND_DOCUMENT {
        let before = text.lines().take(line).enumerate().filter(|(_, own)| own.starts_with("---"));
        let line = before.last().map_or(line, |(index, _)| index + 1);
        return format!("{line}:1: {message}");
    }
    let is_container = message == messages::LIST || message == messages::KEYS;
    let message =
        about(key_at(text, line, column, is_container), value_at(text, line, column), &message);
    format!("{line}:{column}: {message}")
}

/// What is wrong with the YAML itself; `None` if a value is not what its key takes.
fn broken(error: &Error) -> Option<String> {
    let sentence = match error {
        Error::Message { .. }
        | Error::Unexpected { .. }
        | Error::InvalidScalar { .. }
        | Error::InvalidBooleanStrict { .. }
        | Error::NonFiniteFloat { .. }
        | Error::SerdeInvalidType { .. }
        | Error::SerdeInvalidValue { .. }
        | Error::SerdeInvalidLength { .. }
        | Error::SerdeUnknownVariant { .. }
        | Error::SerdeUnknownField { .. }
        | Error::SerdeMissingField { .. }
        | Error::DuplicateMappingKey { .. } => return None,
        Error::NullIntoString { .. } => "nothing: expected text",
        Error::MultipleDocuments { .. } => SECOND_DOCUMENT,
        Error::UnknownAnchor { .. } => {
            "* begins an alias in YAML, and there is no anchor of this name: quote text that begins with *, as in \"*.php\""
        }
        Error::RecursiveReferencesRequireWeakTypes { .. } => {
            "this alias stands for the value that it is part of: write the value in full instead of *NAME"
        }
        Error::TaggedScalarCannotDeserializeIntoString { .. }
        | Error::TaggedEnumMismatch { .. } => TAG,
        Error::QuotingRequired { value, .. } => {
            return Some(format!("text that must be quoted: write {value:?}"));
        }
        Error::ExternalMessage { msg, .. } => scanned(msg),
        Error::Budget { breach: BudgetBreach::Depth { .. }, .. } => {
            "more than 64 lists and maps within one another: expected fewer"
        }
        _ => UNREADABLE,
    };
    Some(sentence.into())
}

/// The message for text that YAML reads as a tag.
const TAG: &str = "! begins a tag in YAML: quote text that begins with !, as in \"!/health\"";

/// The message for an error of the scanner.
fn scanned(message: &str) -> &'static str {
    let has = |part: &str| message.contains(part);
    match () {
        () if has("multiline quoted") => {
            "a quotation mark is not closed on the line before: expected another one there"
        }
        () if has("unclosed quote") => "this quotation mark is not closed: expected another one",
        () if has("tabs disallowed") => "a tab: expected spaces, YAML takes no tabs as indentation",
        () if has("mapping values are not allowed") => {
            "a colon and a space in the middle of a value: quote the value, as in \"a: b\", or begin a new line"
        }
        () if has("did not find expected '-'") => {
            "a key outside the item of the list that it belongs to: indent it as far as the first key of its item, or begin an item with -"
        }
        () if has("trailing content after") => {
            "text after the closing quotation mark: expected one value: remove the rest, or put all of it between the marks"
        }
        () if has("unclosed bracket") => UNCLOSED,
        () if has("EOF") || has("end of") => ENDED,
        () if has("unexpected character") || has("cannot start any token") => {
            "text without quotation marks cannot begin with this character: quote it, as in \"@a\""
        }
        () => UNREADABLE,
    }
}

/// The innermost bracket that is not closed before the end of this line, outside of quotation marks
/// and comments: its line, its column and the bracket.
fn unclosed_bracket(text: &str, last_line: usize) -> Option<(usize, usize, char)> {
    let mut open = Vec::new();
    for (index, line) in text.lines().take(last_line).enumerate() {
        let (mut quote, mut before) = (None, ' ');
        for (column, char) in line.chars().enumerate() {
            match (quote, char) {
                (Some(mark), _) if char == mark => quote = None,
                (Some(_), _) => {}
                // A mark within a word is an apostrophe.
                (None, '"' | '\'') if !before.is_alphanumeric() => quote = Some(char),
                (None, '#') if before == ' ' => break,
                (None, '[' | '{') if !open.is_empty() || [' ', '-'].contains(&before) => {
                    open.push((index + 1, column + 1, char));
                }
                (None, ']' | '}') => _ = open.pop(),
                _ => {}
            }
            before = char;
        }
    }
    open.pop()
}

/// A key that is missing because it is indented differently from its siblings.
fn indented_otherwise(key: Option<&str>, text: &str, line: usize, column: usize) -> Option<String> {
    let (key, own) = (key?, column - 1);
    let mut below = text.lines().enumerate().skip(line).take(8);
    let (index, other) = below.find(|(_, other)| {
        other.trim_start().strip_prefix(key).is_some_and(|rest| rest.starts_with(':'))
    })?;
    let indent = other.len() - other.trim_start().len();
    if indent == own {
        return None;
    }
    let (line, column) = (index + 1, indent + 1);
    Some(format!(
        "{line}:{column}: {key} is indented by {indent} spaces, but the first key of its item by {own}: indent it by {own} spaces"
    ))
}

/// The key of an error at this place, which is the place of a value or of a key. If `is_container`,
/// a list or a map was expected, which begins at its first key.
fn key_at(text: &str, line: usize, column: usize, is_container: bool) -> Option<&str> {
    let own = text.lines().nth(line.checked_sub(1)?)?;
    let (before, rest) = own.split_at_checked(column - 1)?;
    // The place of a missing value is the colon.
    let before_colon =
        if rest.starts_with(':') { Some(before) } else { before.trim_end().strip_suffix(':') };
    if let Some(before) = before_colon {
        return before.rsplit([' ', '{', ',', '[', '-']).next();
    }
    if !is_container {
        let (key, _) = rest.split_once(':')?;
        return key.chars().all(|char| char.is_ascii_alphanumeric() || char == '_').then_some(key);
    }
    let above: Vec<&str> = text.lines().take(line - 1).collect();
    let indent = |other: &str| other.len() - other.trim_start().len();
    let parent = above
        .into_iter()
        .rev()
        .find(|other| indent(other) < column - 1 && other.trim_end().ends_with(':'))?;
    parent.trim().trim_start_matches("- ").strip_suffix(':')
}

/// The text from this place to the end of its line.
fn value_at(text: &str, line: usize, column: usize) -> &str {
    let own = text.lines().nth(line - 1).unwrap_or_default();
    own.get(column - 1..).unwrap_or_default().trim_end()
}

/// Whether `KEY: !…` is written there, or its value alone.
fn is_tag(key: &str, value: &str) -> bool {
    let own = value.strip_prefix(key).and_then(|rest| rest.strip_prefix(':')).unwrap_or(value);
    own.trim_start().starts_with('!')
}

/// The message with its key, and with what to write where that is known.
fn about(key: Option<&str>, value: &str, message: &str) -> String {
    let Some(key) = key else {
        if message == messages::KEYS {
            return "this is not a configuration: expected keys and values such as `rules:`; is it the right file?"
                .into();
        }
        return message.into();
    };
    let is_scalar = !value.is_empty()
        && !value.starts_with(['[', '{', '-'])
        && !value.contains(": ")
        && !value.ends_with(':');
    match message {
        messages::LIST if is_scalar && key == "rules" => {
            format!(
                "rules: {value}: expected a list of rules: write [{{ name: per-ip, by: [ip], limit: 10/s }}]"
            )
        }
        messages::LIST if is_scalar => format!("{key}: expected a list: write {key}: [{value}]"),
        messages::LIST => {
            format!("{key}: expected a list: begin each item with a dash, as in `- name: per-ip`")
        }
        messages::KEYS if key == "when" || key == "charge_when" => {
            format!("{key}: expected attributes and their patterns, as in {{ path: \"/v1/*\" }}")
        }
        messages::KEYS if key == "listen" => {
            format!("{key}: expected addresses by protocol, as in {{ http: 127.0.0.1:8080 }}")
        }
        messages::KEYS => format!("{key}: {message}"),
        _ => match message.strip_prefix("nothing: ") {
            Some(_) if is_tag(key, value) => format!("{key}: {TAG}"),
            Some(expected) => format!("{key} has no value: {expected}"),
            // Many messages already name their key.
            None if message.starts_with(key)
                || message.contains("key")
                || message.contains("two rules") =>
            {
                message.into()
            }
            None if message
                .starts_with(['"', '-', '0', '1', '2', '3', '4', '5', '6', '7', '8', '9'])
                || message.starts_with("expected")
                || message.starts_with("a list") =>
            {
                match value.split(|char: char| !char.is_ascii_digit()).next() {
                    Some(digits) if !digits.is_empty() && message == messages::WHOLE => {
                        let written = value.split([' ', ',', '}', ']']).next().unwrap_or(value);
                        format!("{key}: {written}: {message}: write {digits}")
                    }
                    _ => format!("{key}: {message}"),
                }
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
                "f:3:4: limit is indented by 3 spaces, but the first key of its item by 4: indent it by 4 spaces",
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
            (
                "resilience: { deadline_ms: 20ms }\n",
                "f:1:28: deadline_ms: 20ms: expected a whole number, without a unit: write 20",
            ),
            (
                "listen: 127.0.0.1:80\n",
                "f:1:9: listen: expected addresses by protocol, as in { http: 127.0.0.1:8080 }",
            ),
            ("rules:\n  - name:\n    limit: 1/s\n", "f:2:9: name has no value: expected text"),
            ("log: { show_keys: maybe }\n", "f:1:19: show_keys: expected true or false"),
            (
                "rules: 10/s\n",
                "f:1:8: rules: 10/s: expected a list of rules: write [{ name: per-ip, by: [ip], limit: 10/s }]",
            ),
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
