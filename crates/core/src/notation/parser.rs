//! From text to limits.

use alloc::borrow::Cow;
use alloc::string::{String, ToString};
use alloc::vec::Vec;
use core::str::FromStr;

use super::error::{Kind, ParseError};
use super::{Limits, MAX_LIMITS};
use crate::algorithm::Algorithm;
use crate::limit::{Limit, Parameter};
use crate::time::Period;

/// The longest text that is read.
const MAX_LENGTH: usize = 4_096;

const UNITS: &str = "us, ms, s, m, h, d or w";
const ALGORITHMS: &str = "bucket, window, sliding, estimate, log or concurrent";

impl FromStr for Limit {
    type Err = ParseError;

    fn from_str(text: &str) -> Result<Self, ParseError> {
        read_one(text).map_err(|error| error.hinted(text))
    }
}

impl FromStr for Limits {
    type Err = ParseError;

    fn from_str(text: &str) -> Result<Self, ParseError> {
        read_several(text).map_err(|error| error.hinted(text))
    }
}

fn read_one(text: &str) -> Result<Limit, ParseError> {
    let mut parser = Parser::new(text)?;
    let limit = parser.limit()?;
    match parser.peek() {
        None => Ok(limit),
        Some(Token { kind: TokenKind::Semicolon, .. }) => {
            Err(parser.unexpected("one limit and no more"))
        }
        Some(_) => Err(parser.unexpected_option(&limit)),
    }
}

fn read_several(text: &str) -> Result<Limits, ParseError> {
    let mut parser = Parser::new(text)?;
    let mut limits = Vec::new();
    loop {
        if limits.len() == MAX_LIMITS {
            return Err(parser.unexpected(alloc::format!("at most {MAX_LIMITS} limits")));
        }
        let limit = parser.limit()?;
        limits.push(limit);
        match parser.peek() {
            None => return Ok(Limits(limits.into())),
            Some(Token { kind: TokenKind::Semicolon, .. }) => parser.advance(),
            Some(_) => return Err(parser.unexpected_option(&limit)),
        }
        if parser.peek().is_none() {
            return Ok(Limits(limits.into())); // a last `;` is forgiven
        }
    }
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum TokenKind {
    Number(u64),
    Word,
    Slash,
    Semicolon,
}

#[derive(Clone, Copy, Debug)]
struct Token<'t> {
    kind: TokenKind,
    text: &'t str,
    column: usize,
}

struct Parser<'t> {
    tokens: Vec<Token<'t>>,
    position: usize,
    end_column: usize,
}

impl<'t> Parser<'t> {
    fn new(text: &'t str) -> Result<Self, ParseError> {
        if text.len() > MAX_LENGTH {
            let expected = alloc::format!("at most {MAX_LENGTH} bytes");
            let found = alloc::format!("{} bytes", text.len());
            return Err(ParseError::new(
                1,
                Kind::Unexpected { expected: expected.into(), found: Some(found) },
            ));
        }
        let mut tokens = Vec::new();
        let (mut rest, mut column) = (text, 1);
        while let Some(first) = rest.chars().next() {
            let is_number = |c: char| c.is_ascii_digit() || c == '_';
            let is_word = |c: char| c.is_alphabetic() || c == '-';
            let length = match first {
                c if c.is_ascii_digit() => rest.find(|c| !is_number(c)).unwrap_or(rest.len()),
                c if c.is_alphabetic() => rest.find(|c| !is_word(c)).unwrap_or(rest.len()),
                c => c.len_utf8(),
            };
            let (token, after) = rest.split_at(length);
            let kind = match first {
                c if c.is_whitespace() => None,
                '/' => Some(TokenKind::Slash),
                ';' => Some(TokenKind::Semicolon),
                c if c.is_ascii_digit() => Some(TokenKind::Number(number(token, column)?)),
                c if c.is_alphabetic() => Some(TokenKind::Word),
                c => {
                    let expected = match c {
                        '.' => "a whole number".into(),
                        ',' => "a whole number, or `;` between two limits".into(),
                        '-' | '+' => "a whole number without a sign".into(),
                        _ => {
                            "a limit such as 10/s, 30/min burst 15 or 240/h sliding step 1m".into()
                        }
                    };
                    let found = Some(token.to_string());
                    return Err(ParseError::new(column, Kind::Unexpected { expected, found }));
                }
            };
            if let Some(kind) = kind {
                tokens.push(Token { kind, text: token, column });
            }
            column += token.chars().count();
            rest = after;
        }
        Ok(Parser { tokens, position: 0, end_column: column })
    }

    fn peek(&self) -> Option<Token<'t>> {
        self.tokens.get(self.position).copied()
    }

    fn advance(&mut self) {
        self.position += 1;
    }

    /// The next token if it is one of these words; it is then behind us.
    fn word(&mut self, words: &[&str]) -> bool {
        let found = self.peek().is_some_and(|token| {
            token.kind == TokenKind::Word
                && words.iter().any(|word| token.text.eq_ignore_ascii_case(word))
        });
        if found {
            self.advance();
        }
        found
    }

    fn number(&mut self, expected: &'static str) -> Result<(u64, usize), ParseError> {
        match self.peek() {
            Some(Token { kind: TokenKind::Number(n), column, .. }) => {
                self.advance();
                Ok((n, column))
            }
            _ => Err(self.unexpected(expected)),
        }
    }

    fn column(&self) -> usize {
        self.peek().map_or(self.end_column, |token| token.column)
    }

    fn unexpected(&self, expected: impl Into<Cow<'static, str>>) -> ParseError {
        let found = self.peek().map(|token| token.text.chars().take(40).collect());
        ParseError::new(self.column(), Kind::Unexpected { expected: expected.into(), found })
    }

    fn unexpected_option(&self, limit: &Limit) -> ParseError {
        if self.peek().is_some_and(|token| token.text.eq_ignore_ascii_case("by")) {
            let message = "`by` is no part of a limit: remove it here, and write it in a rule, as in by: [ip]";
            return ParseError::new(self.column(), Kind::Misplaced(message.into()));
        }
        let options = match limit.algorithm() {
            Algorithm::Bucket(_) => {
                "an algorithm (bucket, window, sliding, estimate, log), burst, count rejected, debt"
            }
            Algorithm::Window(_) => "from first hit, count rejected, debt",
            Algorithm::Sliding(_) => "step, lenient, strict, count rejected, debt",
            Algorithm::Concurrent(_) => return self.unexpected("; or the end"),
            _ => "count rejected, debt",
        };
        self.unexpected(alloc::format!("{options}, ; or the end"))
    }

    /// `[number] unit`
    fn period(&mut self, expected: &str) -> Result<(Period, usize), ParseError> {
        let column = self.column();
        let n = match self.peek() {
            Some(Token { kind: TokenKind::Number(n), .. }) => {
                self.advance();
                n
            }
            _ => 1,
        };
        let unit = self
            .peek()
            .filter(|token| token.kind == TokenKind::Word)
            .and_then(|token| unit(token.text));
        let Some(unit) = unit else {
            return Err(self.unexpected(alloc::format!("{expected} in {UNITS}")));
        };
        self.advance();
        Ok((Period::micros(n.saturating_mul(unit.as_micros())), column))
    }

    fn limit(&mut self) -> Result<Limit, ParseError> {
        let (amount, amount_column) = self.number("an amount, as the 10 in 10/s")?;
        let mut found = Found { amount: (amount, amount_column), ..Found::default() };
        if self.peek().is_some_and(|token| token.kind == TokenKind::Slash) {
            self.advance();
            found.period = Some(self.period("a period such as s, 20s or 2 days,")?);
        } else if self.word(&["per"]) {
            found.period = Some(self.period("a period such as s, 20s or 2 days,")?);
        } else if !self.peek().is_some_and(|token| token.text.eq_ignore_ascii_case("concurrent")) {
            return Err(self.unexpected("/ and a period, as in 10/s, or `concurrent ttl 30s`"));
        }
        self.algorithm(&mut found)?;
        while self.option(&mut found)? {}
        found.build(self)
    }

    fn algorithm(&mut self, found: &mut Found) -> Result<(), ParseError> {
        let column = self.column();
        if self.word(&["bucket", "token-bucket", "leaky-bucket", "funnel", "gcra"]) {
            found.name = "bucket";
        } else if self.word(&["window"]) {
            found.name = "window";
        } else if self.word(&["sliding"]) {
            found.name = "sliding";
        } else if self.word(&["estimate"]) {
            found.name = "estimate";
        } else if self.word(&["log"]) {
            found.name = "log";
        } else if self.peek().is_some_and(|token| token.text.eq_ignore_ascii_case("concurrent")) {
            if found.period.is_some() {
                return Err(
                    self.unexpected("no period before `concurrent` (write 20 concurrent ttl 30s)")
                );
            }
            self.advance();
            found.name = "concurrent";
            if !self.word(&["ttl"]) {
                return Err(self.unexpected(
                    "ttl and the time after which a lease ends that is not released, as in 20 concurrent ttl 30s",
                ));
            }
            found.ttl = Some(self.period("a time such as 30s,")?);
        } else if let Some(Token { kind: TokenKind::Word, text, .. }) = self.peek() {
            let known =
                ["burst", "step", "lenient", "strict", "from", "count", "debt", "by", "ttl"];
            if !known.iter().any(|word| text.eq_ignore_ascii_case(word)) {
                return Err(self.unexpected(alloc::format!(
                    "an algorithm ({ALGORITHMS}) or an option such as burst 20"
                )));
            }
        }
        found.algorithm_column = column;
        Ok(())
    }

    /// Reads one option if there is one, and says whether it did.
    fn option(&mut self, found: &mut Found) -> Result<bool, ParseError> {
        let start = self.position;
        let twice = |parser: &mut Self, already: bool, word: &str| {
            if already {
                parser.position = start;
                return Err(parser.unexpected(alloc::format!("{word} only once")));
            }
            Ok(())
        };
        let only_for = |parser: &mut Self, name: &str, allowed: &[&str], word: &str| {
            if !allowed.contains(&name) {
                parser.position = start;
                let instead = if let [one] = allowed {
                    alloc::format!(", or write {one}")
                } else {
                    String::new()
                };
                let message = alloc::format!("{name} has no {word}: remove it{instead}");
                return Err(ParseError::new(parser.column(), Kind::Misplaced(message)));
            }
            Ok(())
        };
        if self.word(&["burst"]) {
            only_for(self, found.name, &["bucket"], "burst")?;
            twice(self, found.burst.is_some(), "burst")?;
            found.burst = Some(self.number("a number of units, as in burst 20")?);
        } else if self.word(&["step"]) {
            only_for(self, found.name, &["sliding"], "step")?;
            twice(self, found.step.is_some(), "step")?;
            found.step = Some(self.period("a time such as 1m or 500ms,")?);
        } else if self.word(&["lenient"]) {
            only_for(self, found.name, &["sliding"], "lenient")?;
            twice(self, found.lenient.is_some(), "lenient or strict")?;
            found.lenient = Some(true);
        } else if self.word(&["strict"]) {
            only_for(self, found.name, &["sliding"], "strict")?;
            twice(self, found.lenient.is_some(), "lenient or strict")?;
            found.lenient = Some(false);
        } else if self.word(&["from"]) {
            only_for(self, found.name, &["window"], "from first hit")?;
            twice(self, found.from_first_hit, "from first hit")?;
            if !(self.word(&["first"]) && self.word(&["hit"])) {
                return Err(self.unexpected("from first hit"));
            }
            found.from_first_hit = true;
        } else if self.word(&["count"]) {
            only_for(
                self,
                found.name,
                &["bucket", "window", "sliding", "estimate", "log"],
                "count rejected",
            )?;
            twice(self, found.count_rejected, "count rejected")?;
            if !self.word(&["rejected"]) {
                return Err(self.unexpected("count rejected"));
            }
            found.count_rejected = true;
        } else if self.word(&["debt"]) {
            only_for(
                self,
                found.name,
                &["bucket", "window", "sliding", "estimate", "log"],
                "debt",
            )?;
            twice(self, found.debt.is_some(), "debt")?;
            found.debt = Some(self.number("a number of units, as in debt 5")?);
        }
        Ok(self.position > start)
    }
}

/// What a text said, with the columns, so that a bad number is shown where it stands.
struct Found {
    amount: (u64, usize),
    period: Option<(Period, usize)>,
    name: &'static str,
    algorithm_column: usize,
    ttl: Option<(Period, usize)>,
    burst: Option<(u64, usize)>,
    step: Option<(Period, usize)>,
    debt: Option<(u64, usize)>,
    lenient: Option<bool>,
    from_first_hit: bool,
    count_rejected: bool,
}

impl Default for Found {
    fn default() -> Self {
        Found {
            amount: (0, 1),
            period: None,
            name: "bucket",
            algorithm_column: 1,
            ttl: None,
            burst: None,
            step: None,
            debt: None,
            lenient: None,
            from_first_hit: false,
            count_rejected: false,
        }
    }
}

impl Found {
    fn build(&self, parser: &Parser<'_>) -> Result<Limit, ParseError> {
        let amount = self.amount.0;
        let period = self.period.map_or(Period::micros(0), |(period, _)| period);
        macro_rules! finish {
            ($builder:expr) => {{
                let mut builder = $builder;
                if let Some((units, _)) = self.debt {
                    builder = builder.debt(units);
                }
                if self.count_rejected {
                    builder = builder.count_rejected();
                }
                builder.build()
            }};
        }
        let built = match self.name {
            "window" if self.from_first_hit => {
                finish!(Limit::window(amount, period).from_first_hit())
            }
            "window" => finish!(Limit::window(amount, period)),
            "sliding" => {
                let mut builder = Limit::sliding(amount, period);
                if let Some((step, _)) = self.step {
                    builder = builder.step(step);
                }
                if self.lenient == Some(true) {
                    builder = builder.lenient();
                }
                finish!(builder)
            }
            "estimate" => finish!(Limit::estimate(amount, period)),
            "log" => finish!(Limit::log(amount, period)),
            "concurrent" => match self.ttl {
                Some((ttl, _)) => finish!(Limit::concurrent(amount, ttl)),
                None => return Err(parser.unexpected("ttl, as in 20 concurrent ttl 30s")),
            },
            _ => match self.burst {
                Some((units, _)) => finish!(Limit::bucket(amount, period).burst(units)),
                None => finish!(Limit::bucket(amount, period)),
            },
        };
        built.map_err(|error| {
            ParseError::new(self.column_of(error.parameter()), Kind::Invalid(error))
        })
    }

    fn column_of(&self, parameter: Parameter) -> usize {
        let period = self.period.map_or(self.amount.1, |(_, column)| column);
        match parameter {
            Parameter::Amount => self.amount.1,
            Parameter::Period => period,
            Parameter::Burst => self.burst.map_or(self.amount.1, |(_, column)| column),
            Parameter::Step => self.step.map_or(period, |(_, column)| column),
            Parameter::Ttl => self.ttl.map_or(self.algorithm_column, |(_, column)| column),
            Parameter::Debt => self.debt.map_or(self.amount.1, |(_, column)| column),
            Parameter::CountRejected => self.algorithm_column,
        }
    }
}

/// `1_000` is a thousand.
fn number(token: &str, column: usize) -> Result<u64, ParseError> {
    let mut value: u64 = 0;
    for digit in token.bytes().filter(u8::is_ascii_digit) {
        let next =
            value.checked_mul(10).and_then(|value| value.checked_add(u64::from(digit - b'0')));
        let Some(next) = next else {
            let expected = "a number below 9007199254740992".into();
            let found = Some(token.chars().take(40).collect());
            return Err(ParseError::new(column, Kind::Unexpected { expected, found }));
        };
        value = next;
    }
    Ok(value)
}

pub(super) fn unit(word: &str) -> Option<Period> {
    const UNITS: [(Period, &[&str]); 7] = [
        (
            Period::MICROSECOND,
            &["us", "µs", "μs", "usec", "usecs", "micros", "microsecond", "microseconds"],
        ),
        (Period::MILLISECOND, &["ms", "msec", "msecs", "millis", "millisecond", "milliseconds"]),
        (Period::SECOND, &["s", "sec", "secs", "second", "seconds"]),
        (Period::MINUTE, &["m", "min", "mins", "minute", "minutes"]),
        (Period::HOUR, &["h", "hr", "hrs", "hour", "hours"]),
        (Period::DAY, &["d", "day", "days"]),
        (Period::WEEK, &["w", "wk", "wks", "week", "weeks"]),
    ];
    let names = |names: &[&str]| names.iter().any(|name| name.eq_ignore_ascii_case(word));
    UNITS.iter().find(|(_, all)| names(all)).map(|(unit, _)| *unit)
}
