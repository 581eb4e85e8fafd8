//! Traces and transcripts: requests and expected answers as lines of text.
//!
//! ```text
//! # limit: 2/s; 100/h                               what the file is for; several such lines: one replay each
//! # time  key     cost op      expectation
//! 0       user:7  1    check   -> allow remaining 1
//! 499ms   user:7  2            -> deny retry 1ms    # the first one has almost drained
//! 1.5s
//! ```
//! A line is `TIME [KEY [COST [OP]]]`, and in a transcript `-> allow|deny` with any of `remaining
//! N`, `retry DURATION|never`, `reset DURATION`, `next DURATION` and `granted N` after it. Fields
//! are separated by white space; a `#` at the start of a field starts a comment. Times count
//! from the Unix epoch and are exact: integer microseconds, no floats.
//!
//! Lines are read one by one, so a trace can be larger than memory:
//! ```
//! use tidegate_trace::Line;
//! let Line::Event(event) = Line::parse("499ms user:7 2 -> deny retry 1ms", 1)? else { panic!() };
//! assert_eq!((event.at.as_micros(), event.key, event.cost), (499_000, "user:7", 2));
//! assert_eq!(event.to_string(), "499ms user:7 2 check -> deny retry 1ms");
//! # Ok::<(), tidegate_trace::TraceError>(())
//! ```

use std::borrow::Cow;
use std::fmt;

mod duration;
mod expect;
mod random;

pub use duration::{Micros, duration};
pub use expect::{Expectation, Mismatch};
pub use random::Random;

use tidegate_core::Op;
use tidegate_core::Timestamp;

/// The key of a line without one.
pub const DEFAULT_KEY: &str = "-";

/// The content of one line.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Line<'t> {
    /// The line is empty or a comment.
    Comment,
    /// `# limit: …`: a comment with the limits of the file, in the notation; not parsed here.
    Limit {
        /// The limits as written, trimmed.
        text: &'t str,
        /// The column of the first character of `text`, counted from 1.
        column: usize,
    },
    /// A request.
    Event(Event<'t>),
}

/// A request at a time, in a transcript with the expected answer.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Event<'t> {
    /// The time of the request.
    pub at: Timestamp,
    /// The key of the request.
    pub key: &'t str,
    /// The cost of the request.
    pub cost: u64,
    /// The operation: one of [`Op::PLAIN`].
    pub op: Op,
    /// The expected answer, if the line has one.
    pub expect: Option<Expectation>,
}

impl<'t> Line<'t> {
    /// Parses one line; `number` is for the error only.
    ///
    /// # Errors
    /// The first field that is wrong, and what was expected there.
    pub fn parse(text: &'t str, number: u64) -> Result<Self, TraceError> {
        let mut fields = Fields { rest: text, column: 1 };
        let Some(time) = fields.next() else { return Ok(header(text)) };
        let at = Timestamp::from_micros(
            duration(time.text).map_err(|expected| time.error(number, "time", expected))?,
        );
        let mut event = Event { at, key: DEFAULT_KEY, cost: 1, op: Op::Check, expect: None };
        for position in 1.. {
            let Some(field) = fields.next() else { return Ok(Line::Event(event)) };
            if field.text == ARROW {
                event.expect = Some(Expectation::read(&mut fields, number)?);
                return Ok(Line::Event(event));
            }
            match position {
                1 => event.key = field.text,
                2 => event.cost = field.number(number, "cost")?,
                3 => {
                    event.op = Op::from_name(field.text)
                        .ok_or_else(|| field.error(number, "operation", operations().into()))?
                }
                _ => {
                    return Err(field.error(
                        number,
                        "field",
                        "-> and an expectation, or the end of the line".into(),
                    ));
                }
            }
        }
        Ok(Line::Event(event))
    }
}

const ARROW: &str = "->";

/// The operations of a trace, for error messages: `check, peek, … or reset`.
fn operations() -> String {
    let names = Op::PLAIN.map(Op::name);
    let [first @ .., last] = &names;
    format!("{} or {last}", first.join(", "))
}

/// A line without fields: empty, a comment, or the comment with the limits.
fn header(text: &str) -> Line<'_> {
    let comment = text.trim_start().trim_start_matches('#').trim_start();
    let Some((name, limits)) = comment.split_once(':') else { return Line::Comment };
    if !name.trim_end().eq_ignore_ascii_case("limit") {
        return Line::Comment;
    }
    let limits = limits.trim();
    let before = text.trim_end().len() - limits.len();
    Line::Limit { text: limits, column: text[..before].chars().count() + 1 }
}

/// The remaining fields of a line.
struct Fields<'t> {
    rest: &'t str,
    /// The column of the start of `rest`.
    column: usize,
}

#[derive(Clone, Copy)]
struct Field<'t> {
    text: &'t str,
    column: usize,
}

impl<'t> Fields<'t> {
    fn next(&mut self) -> Option<Field<'t>> {
        let trimmed = self.rest.trim_start();
        self.column += self.rest[..self.rest.len() - trimmed.len()].chars().count();
        self.rest = trimmed;
        if trimmed.is_empty() || trimmed.starts_with('#') {
            return None;
        }
        let end = trimmed.find(char::is_whitespace).unwrap_or(trimmed.len());
        let field = Field { text: &trimmed[..end], column: self.column };
        self.column += field.text.chars().count();
        self.rest = &trimmed[end..];
        Some(field)
    }

    /// The next field, which must be there.
    fn need(
        &mut self,
        number: u64,
        name: &'static str,
        expected: &'static str,
    ) -> Result<Field<'t>, TraceError> {
        let here = self.next();
        here.ok_or_else(|| {
            Field { text: "", column: self.column }.error(number, name, expected.into())
        })
    }
}

impl Field<'_> {
    fn error(self, line: u64, field: &'static str, expected: Cow<'static, str>) -> TraceError {
        TraceError {
            line,
            column: self.column,
            field,
            value: self.text.chars().take(40).collect(),
            expected,
        }
    }

    fn number(self, line: u64, name: &'static str) -> Result<u64, TraceError> {
        if self.text.is_empty() || !self.text.bytes().all(|byte| byte.is_ascii_digit()) {
            return Err(self.error(line, name, "a whole number".into()));
        }
        let expected = || format!("a whole number of at most {}", u64::MAX).into();
        self.text.parse().map_err(|_| self.error(line, name, expected()))
    }
}

/// Writes all fields, so that the line does not depend on defaults.
impl fmt::Display for Event<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {} {} {}", Micros(self.at.as_micros()), self.key, self.cost, self.op.name())?;
        match self.expect {
            Some(expect) => write!(f, " {ARROW} {expect}"),
            None => Ok(()),
        }
    }
}

/// Why a line is not valid: the place, and what was expected there.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct TraceError {
    line: u64,
    column: usize,
    field: &'static str,
    value: String,
    expected: Cow<'static, str>,
}

impl TraceError {
    /// The number of the line, as given by the caller.
    pub fn line(&self) -> u64 {
        self.line
    }

    /// The column, counted in characters from 1.
    pub fn column(&self) -> usize {
        self.column
    }

    /// The name of the field that is wrong.
    pub fn field(&self) -> &'static str {
        self.field
    }

    /// The value of the field, shortened; empty at the end of the line.
    pub fn value(&self) -> &str {
        &self.value
    }
}

impl fmt::Display for TraceError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let TraceError { line, column, field, value, expected } = self;
        write!(f, "line {line}, column {column}: {field}: expected {expected}, found ")?;
        if value.is_empty() { f.write_str("the end of the line") } else { write!(f, "{value:?}") }
    }
}

impl std::error::Error for TraceError {}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use tidegate_core::Verdict;
    use tidegate_core::{Decision, MAX_WAIT_US, Retry};

    fn event(text: &str) -> Event<'_> {
        match Line::parse(text, 1) {
            Ok(Line::Event(event)) => event,
            other => panic!("{text:?} is not an event: {other:?}"),
        }
    }

    fn error(text: &str) -> String {
        Line::parse(text, 7).unwrap_err().to_string()
    }

    #[test]
    fn durations_are_exact() {
        let cases: [(&str, u64); 15] = [
            ("0", 0),
            ("0.0", 0),
            ("0s", 0),
            ("250us", 250),
            ("250µs", 250),
            ("499ms", 499_000),
            ("1.5s", 1_500_000),
            ("0.000001s", 1),
            ("1.50000000000000000000s", 1_500_000),
            ("0.001ms", 1),
            ("2m", 120_000_000),
            ("2min", 120_000_000),
            ("0.5h", 1_800_000_000),
            ("1d", 86_400_000_000),
            ("4503599627370495us", MAX_WAIT_US),
        ];
        for (text, micros) in cases {
            assert_eq!(duration(text), Ok(micros), "{text}");
        }
        for text in [
            "",
            "s",
            "1",
            "1.5",
            ".5s",
            "5.s",
            "1.2.3s",
            "-1s",
            "+1s",
            "1 s",
            "1e3s",
            "0.5us",
            "1.0000001s",
        ] {
            assert!(duration(text).is_err(), "{text}");
        }
        assert!(duration("4503599627370496us").is_err());
        assert!(duration("99999999999999999999999d").is_err());
    }

    #[test]
    fn missing_fields_have_defaults() {
        let full = Event { at: Timestamp::EPOCH, key: "-", cost: 1, op: Op::Check, expect: None };
        assert_eq!(event("0"), full);
        assert_eq!(event("  0\t# a comment"), full);
        assert_eq!(event("0 user#7"), Event { key: "user#7", ..full });
        assert_eq!(
            event("1ms k 3 TAKE"),
            Event { at: Timestamp::from_millis(1), key: "k", cost: 3, op: Op::Take, ..full }
        );
        assert_eq!(event("0 -> deny").expect, Some(Expectation::default()));
        assert_eq!(event("0 k -> allow").key, "k");
    }

    #[test]
    fn comments_can_contain_the_limits() {
        assert_eq!(Line::parse("", 1), Ok(Line::Comment));
        assert_eq!(Line::parse("# hello: world", 1), Ok(Line::Comment));
        assert_eq!(
            Line::parse("# limit: 10/s; 2/m ", 1),
            Ok(Line::Limit { text: "10/s; 2/m", column: 10 })
        );
        assert_eq!(Line::parse(" ## Limit :10/s", 1), Ok(Line::Limit { text: "10/s", column: 12 }));
        assert_eq!(Line::parse("# limit:", 1), Ok(Line::Limit { text: "", column: 9 }));
    }

    #[test]
    fn errors_name_the_place_and_what_was_expected() {
        let rows: Vec<(&str, &str)> = Vec::from([
            (
                "5 k",
                r#"line 7, column 1: time: expected a unit after 5 (us, ms, s, m, h or d), found "5""#,
            ),
            ("0 k x", r#"line 7, column 5: cost: expected a whole number, found "x""#),
            ("0 k -1", r#"line 7, column 5: cost: expected a whole number, found "-1""#),
            ("0 k 99999999999999999999", "at most 18446744073709551615"),
            (
                "0 k 1 get",
                r#"column 7: operation: expected check, peek, take, debit, refund or reset, found "get""#,
            ),
            (
                "0 k 1 peek 5",
                "column 12: field: expected -> and an expectation, or the end of the line",
            ),
            ("0 ->", "column 5: answer: expected allow or deny, found the end of the line"),
            ("0 -> yes", r#"column 6: answer: expected allow or deny, found "yes""#),
            (
                "0 -> deny retry",
                "column 16: retry: expected a duration such as 499ms, or never, found the end",
            ),
            ("0 -> deny retry 1", "column 17: retry: expected a unit after 1"),
            (
                "0 -> deny left 1",
                "expected remaining, retry, reset, next, granted or the end of the line",
            ),
            ("0 -> deny retry 1s retry 2s", "column 20: expectation: expected each word only once"),
            ("é0s k", "column 1: time"),
        ]);
        for (text, expected) in rows {
            let error = error(text);
            assert!(error.contains(expected), "{text:?}: {error}");
        }
    }

    #[test]
    fn a_mismatch_lists_the_differences() {
        let verdict = Verdict {
            remaining: 2,
            retry: Retry::After(1_500),
            reset_after_us: 7,
            ..Verdict::default()
        };
        let decision = Decision::of_one(verdict, false, Timestamp::EPOCH);
        let compare = |text| {
            event(text).expect.unwrap().compare(&decision).map_err(|mismatch| mismatch.to_string())
        };
        assert_eq!(compare("0 -> deny"), Ok(()));
        assert_eq!(compare("0 -> deny remaining 2 retry 1.5ms reset 7us next 0 granted 0"), Ok(()));
        assert_eq!(
            compare("0 -> allow remaining 3 retry never").unwrap_err(),
            "expected allow but got deny, expected remaining 3 but got 2, expected retry never but got 1.5ms"
        );
    }

    fn expectations() -> impl Strategy<Value = Expectation> {
        let number = || proptest::option::of(any::<u64>());
        let micros = || 0..=MAX_WAIT_US;
        let retry = prop_oneof![
            Just(Retry::Now),
            Just(Retry::Never),
            (1..=MAX_WAIT_US).prop_map(Retry::After)
        ];
        let times = (proptest::option::of(micros()), proptest::option::of(micros()));
        (any::<bool>(), number(), proptest::option::of(retry), times, number()).prop_map(
            |(allowed, remaining, retry, (reset_after_us, next_after_us), granted)| Expectation {
                allowed,
                remaining,
                retry,
                reset_after_us,
                next_after_us,
                granted,
            },
        )
    }

    proptest! {
        #[test]
        fn parsing_any_text_does_not_panic(text in "\\PC*", number: u64) {
            let _ = Line::parse(&text, number);
            let _ = duration(&text);
        }

        #[test]
        fn parsing_almost_valid_text_does_not_panic(
            text in "[ #]{0,2}[0-9.]{0,25}(us|ms|s|d|é)?( [a-z#:>-]{0,6}){0,3}( -> ?(allow|deny)?( (retry|reset|granted) ?[0-9.a-z]{0,9}){0,3})?"
        ) {
            let _ = Line::parse(&text, 1);
        }

        #[test]
        fn displayed_lines_parse_back(
            at in 0..=MAX_WAIT_US,
            key in "[!-\"$-~é][!-~é]{0,12}",
            cost: u64,
            which in 0..6usize,
            expect in proptest::option::of(expectations()),
        ) {
            prop_assume!(key != ARROW);
            let op = Op::PLAIN[which];
            let event = Event { at: Timestamp::from_micros(at), key: &key, cost, op, expect };
            let text = event.to_string();
            prop_assert_eq!(Line::parse(&text, 1), Ok(Line::Event(event)), "{}", text);
        }

        #[test]
        fn displayed_durations_parse_back(micros in 0..=MAX_WAIT_US) {
            prop_assert_eq!(duration(&Micros(micros).to_string()), Ok(micros));
        }
    }
}
