//! Output for people: durations, counts and colors.

use std::fmt::Display;
use std::io::{self, BufWriter, IsTerminal, StdoutLock};

/// Standard output, locked and buffered. The caller flushes it.
pub(crate) fn stdout() -> BufWriter<StdoutLock<'static>> {
    BufWriter::with_capacity(64 * 1024, io::stdout().lock())
}

/// Colors text, but only on a terminal, and never when `NO_COLOR` is set.
#[derive(Clone, Copy)]
pub(crate) struct Paint {
    colors: bool,
}

impl Paint {
    /// For standard output.
    pub(crate) fn stdout() -> Self {
        let refused = std::env::var_os("NO_COLOR").is_some_and(|value| !value.is_empty());
        let dumb = std::env::var_os("TERM").is_some_and(|value| value == "dumb");
        Paint { colors: io::stdout().is_terminal() && !refused && !dumb }
    }

    /// For a file.
    pub(crate) fn plain() -> Self {
        Paint { colors: false }
    }

    pub(crate) fn good(self, text: impl Display) -> String {
        self.with("32", text)
    }

    pub(crate) fn bad(self, text: impl Display) -> String {
        self.with("31", text)
    }

    pub(crate) fn caution(self, text: impl Display) -> String {
        self.with("33", text)
    }

    pub(crate) fn strong(self, text: impl Display) -> String {
        self.with("1", text)
    }

    pub(crate) fn faint(self, text: impl Display) -> String {
        self.with("2", text)
    }

    fn with(self, code: &str, text: impl Display) -> String {
        let text = text.to_string();
        if self.colors && !text.is_empty() { format!("\x1b[{code}m{text}\x1b[0m") } else { text }
    }
}

/// A duration in microseconds as exact text: `1 h 30 min`, `1.5 s`, `250 us`.
pub(crate) fn human(micros: u64) -> String {
    const SECOND: u64 = 1_000_000;
    let (seconds, part) = (micros / SECOND, micros % SECOND);
    let decimals = |whole: u64, part: u64, digits: usize, unit: &str| {
        let part = if part == 0 { String::new() } else { format!(".{part:0digits$}") };
        format!("{whole}{} {unit}", part.trim_end_matches('0'))
    };
    match micros {
        0 => return "0 s".into(),
        1..1_000 => return format!("{micros} us"),
        1_000..SECOND => return decimals(micros / 1_000, micros % 1_000, 3, "ms"),
        _ => {}
    }
    let mut words = Vec::new();
    for (count, unit) in
        [(seconds / 86_400, "d"), (seconds / 3_600 % 24, "h"), (seconds / 60 % 60, "min")]
    {
        if count > 0 {
            words.push(format!("{count} {unit}"));
        }
    }
    if !seconds.is_multiple_of(60) || part > 0 {
        words.push(decimals(seconds % 60, part, 6, "s"));
    }
    words.join(" ")
}

/// A count in groups of thousands: `12 345 678`.
pub(crate) fn grouped(n: u64) -> String {
    let digits = n.to_string();
    let mut text = String::with_capacity(digits.len() + digits.len() / 3);
    for (index, digit) in digits.char_indices() {
        if index > 0 && (digits.len() - index).is_multiple_of(3) {
            text.push(' ');
        }
        text.push(digit);
    }
    text
}

/// `1 unit`, `2 units`.
pub(crate) fn units(n: u64) -> String {
    if n == 1 { "1 unit".into() } else { format!("{} units", grouped(n)) }
}

/// `1 rule`, `2 rules`.
pub(crate) fn counted(count: usize, what: &str) -> String {
    if count == 1 { format!("1 {what}") } else { format!("{count} {what}s") }
}

/// A paragraph in lines of at most 90 characters, each after an indent.
pub(crate) fn wrapped(text: &str, indent: &str) -> String {
    let mut lines = vec![String::new()];
    for word in text.split(' ') {
        let last = lines.last_mut().expect("there is always a line");
        if !last.is_empty() && last.chars().count() + 1 + word.chars().count() > 90 {
            lines.push(word.to_owned());
        } else {
            last.push_str(if last.is_empty() { "" } else { " " });
            last.push_str(word);
        }
    }
    lines.iter().map(|line| format!("{indent}{line}")).collect::<Vec<_>>().join("\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations_are_readable_and_exact() {
        let rows = [
            (0, "0 s"),
            (250, "250 us"),
            (499_000, "499 ms"),
            (1_500, "1.5 ms"),
            (1_500_000, "1.5 s"),
            (60_000_000, "1 min"),
            (5_400_000_000, "1 h 30 min"),
            (86_400_000_001, "1 d 0.000001 s"),
        ];
        for (micros, text) in rows {
            assert_eq!(human(micros), text);
        }
    }

    #[test]
    fn counts_are_grouped_by_thousands() {
        assert_eq!(
            (grouped(0), grouped(999), grouped(1_000)),
            ("0".into(), "999".into(), "1 000".into())
        );
        assert_eq!(grouped(12_345_678), "12 345 678");
    }
}
