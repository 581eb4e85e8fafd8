//! What the author of a text most likely meant; the end of an error message, if it is known.

use alloc::borrow::ToOwned;
use alloc::format;
use alloc::string::String;
use alloc::vec::Vec;

use super::parser::unit;
use crate::exact::gcd;
use crate::time::Period;

/// Words of the notation that are often misspelled.
const WORDS: [&str; 14] = [
    "bucket",
    "window",
    "sliding",
    "estimate",
    "log",
    "concurrent",
    "burst",
    "step",
    "lenient",
    "strict",
    "from",
    "count",
    "debt",
    "ttl",
];
/// More digits than this are no slip of the pen.
const MAX_DIGITS: usize = 9;
/// More digits behind a point make a limit with a huge burst.
const MAX_DECIMALS: usize = 3;

/// What to write instead, if `text` is wrong at `column`, counted in characters from 1.
pub(super) fn hint(text: &str, column: usize) -> Option<String> {
    let at = text.char_indices().nth(column.checked_sub(1)?).map_or(text.len(), |(index, _)| index);
    let (before, rest) = text.split_at(at);
    let own = before.rsplit(';').next().unwrap_or_default();
    let has_period =
        own.contains('/') || own.split_whitespace().any(|word| word.eq_ignore_ascii_case("per"));
    let first = rest.chars().next()?;
    let (word, after_word) = split_while(rest, char::is_alphabetic);
    match first {
        '.' => fraction(own, &rest[1..]),
        '=' | ':' if has_period => assigned(before, &rest[1..]),
        ',' if has_period && option(&rest[1..]).is_some() => Some(format!(
            "options follow without a comma: write {} {}",
            before.trim_end(),
            rest[1..].trim_start()
        )),
        ',' if !has_period => thousands(own, &rest[1..]),
        ',' | '&' | '|' | '+' if has_period => {
            joined(before, rest.trim_start_matches([',', '&', '|', '+']))
        }
        '0'..='9' if has_period => compound(own, rest).or_else(|| joined(before, rest)),
        '/' if has_period => Some("a limit has one /; whom it is for is `by` in a rule".to_owned()),
        _ if has_period && word.eq_ignore_ascii_case("and") => joined(before, after_word),
        _ if has_period && ends_with_slash(own) => period(own.trim_start(), word),
        _ if !has_period && ends_with_digit(own) => amount(own, word, after_word),
        _ if !word.is_empty() => nearest(word).map(|right| format!("did you mean {right}?")),
        _ => None,
    }
}

/// `10/s, 120/m`: limits are joined by `;`.
fn joined(before: &str, rest: &str) -> Option<String> {
    let rest = rest.trim_start();
    let (digits, after) = split_while(rest, |char| char.is_ascii_digit());
    let after = after.trim_start();
    let is_limit = !digits.is_empty() && (after.starts_with('/') || after.starts_with("per "));
    is_limit.then(|| format!("limits are joined by `;`: write {}; {rest}", before.trim_end()))
}

/// The word of the notation with which a text begins.
fn option(text: &str) -> Option<&str> {
    let (word, _) = split_while(text.trim_start(), char::is_alphabetic);
    WORDS.iter().any(|own| word.eq_ignore_ascii_case(own)).then_some(word)
}

/// `burst=20`, `burst: 20`.
fn assigned(before: &str, after: &str) -> Option<String> {
    let name = before.trim_end().rsplit(|char: char| !char.is_alphabetic()).next()?;
    let value = after.trim_start();
    option(name).filter(|_| !value.is_empty()).map(|name| format!("write {name} {value}"))
}

/// `60/1m30s`.
fn compound(own: &str, rest: &str) -> Option<String> {
    let (_, first) = own.rsplit_once('/')?;
    let period = |text: &str| {
        let (digits, word) = split_while(text.trim(), |char| char.is_ascii_digit());
        let (word, rest) = split_while(word, char::is_alphabetic);
        let number: u64 = digits.parse().ok()?;
        rest.trim().is_empty().then_some(())?;
        unit(word)?.as_micros().checked_mul(number)
    };
    let micros = period(first)?.checked_add(period(rest)?)?;
    Some(format!("a period is one number and one unit: write {}", Period::micros(micros)))
}

/// `1,000`.
fn thousands(own: &str, after: &str) -> Option<String> {
    let (_, digits) = rsplit_digits(own);
    let (more, _) = split_while(after, |char| char.is_ascii_digit());
    if digits.is_empty() || more.len() != 3 {
        return None;
    }
    Some(format!("write {digits}{more}"))
}

/// `1.5/s` is `3/2s`, and `10/1.5s` is `10/1500ms`.
fn fraction(own: &str, after: &str) -> Option<String> {
    let (head, whole) = rsplit_digits(own);
    let (part, after) = split_while(after, |char| char.is_ascii_digit());
    if whole.is_empty()
        || part.is_empty()
        || part.len() > MAX_DECIMALS
        || whole.len() + part.len() > MAX_DIGITS
    {
        return None;
    }
    let (mut over, mut under) = (
        format!("{whole}{part}").parse::<u64>().ok()?,
        10_u64.pow(u32::try_from(part.len()).ok()?),
    );
    let divisor = u64::try_from(gcd(over.into(), under.into())).ok()?.max(1);
    (over, under) = (over / divisor, under / divisor);
    if ends_with_slash(head) {
        let (word, _) = split_while(after.trim_start(), char::is_alphabetic);
        let micros = unit(word)?.as_micros().checked_mul(over)?;
        return (micros.is_multiple_of(under))
            .then(|| format!("write {}", Period::micros(micros / under)));
    }
    let after = after.trim_start();
    let after = after.strip_prefix('/').or_else(|| after.strip_prefix("per "))?.trim_start();
    let (number, after) = split_while(after, |char| char.is_ascii_digit());
    let (word, _) = split_while(after.trim_start(), char::is_alphabetic);
    let number: u64 = if number.is_empty() { 1 } else { number.parse().ok()? };
    let micros = unit(word)?.as_micros().checked_mul(number)?.checked_mul(under)?;
    (over > 0).then(|| {
        format!("write {over}/{}", period_as_written(Period::micros(micros), under * number, word))
    })
}

/// The period in the author's unit, as in `2s`.
fn period_as_written(period: Period, number: u64, word: &str) -> String {
    match unit(word) {
        Some(unit) if unit.in_largest_unit().0 == 1 => {
            format!("{number}{}", unit.in_largest_unit().1)
        }
        _ => format!("{period}"),
    }
}

/// `10/month`.
fn period(own: &str, word: &str) -> Option<String> {
    let is = |names: &[&str]| names.iter().any(|name| word.eq_ignore_ascii_case(name));
    if is(&["month", "months", "mon", "mo"]) {
        return Some(format!("months differ in length: write {own}30d"));
    }
    if is(&["year", "years", "yr", "y"]) {
        return Some(format!("years differ in length: write {own}365d"));
    }
    is(&["fortnight", "fortnights"]).then(|| format!("write {own}2w"))
}

/// `10k/s`, `1e3/s`, `10rps`, `10 requests/s`.
fn amount(own: &str, word: &str, after: &str) -> Option<String> {
    let (_, digits) = rsplit_digits(own.trim_end());
    let number: u64 = if digits.len() > MAX_DIGITS { return None } else { digits.parse().ok()? };
    if word == "e" || word == "E" {
        let (power, _) = split_while(after, |char| char.is_ascii_digit());
        let power: u32 = power.parse().ok().filter(|power| *power <= 9)?;
        return Some(format!("write {}", number.checked_mul(10_u64.pow(power))?));
    }
    let times = match word {
        "k" | "K" => 1_000,
        "M" => 1_000_000,
        _ => {
            let unit = match word.to_ascii_lowercase().as_str() {
                "rps" | "qps" => "s",
                "rpm" | "qpm" => "m",
                "rph" => "h",
                "r" | "req" | "reqs" | "request" | "requests" | "hit" | "hits" | "call"
                | "calls" => {
                    let after = after.trim_start();
                    let period =
                        after.strip_prefix('/').or_else(|| after.strip_prefix("per "))?.trim();
                    return Some(format!("write {number}/{period}"));
                }
                _ => return None,
            };
            return Some(format!("write {number}/{unit}"));
        }
    };
    Some(format!("write {}", number.checked_mul(times)?))
}

/// The word of the notation that differs from this one by at most two letters.
fn nearest(word: &str) -> Option<&'static str> {
    let word: Vec<char> = word.chars().map(|char| char.to_ascii_lowercase()).collect();
    if word.len() > 16 {
        return None;
    }
    let most = if word.len() < 6 { 1 } else { 2 };
    let (right, distance) = WORDS
        .iter()
        .map(|right| (*right, distance(&word, right)))
        .min_by_key(|(_, distance)| *distance)?;
    (distance > 0 && distance <= most).then_some(right)
}

/// How many letters have to be put in, taken out or changed.
fn distance(word: &[char], right: &str) -> usize {
    let mut row: Vec<usize> = (0..=word.len()).collect();
    for (index, letter) in right.chars().enumerate() {
        let mut diagonal = row[0];
        row[0] = index + 1;
        for at in 1..=word.len() {
            let changed = diagonal + usize::from(word[at - 1] != letter);
            diagonal = row[at];
            row[at] = changed.min(row[at] + 1).min(row[at - 1] + 1);
        }
    }
    row[word.len()]
}

fn ends_with_slash(text: &str) -> bool {
    let text = text.trim_end().trim_end_matches(|char: char| char.is_ascii_digit()).trim_end();
    text.ends_with('/')
        || text.rsplit(' ').next().is_some_and(|word| word.eq_ignore_ascii_case("per"))
}

fn ends_with_digit(text: &str) -> bool {
    text.trim_end().ends_with(|char: char| char.is_ascii_digit())
}

/// The text before the digits at its end, and those.
fn rsplit_digits(text: &str) -> (&str, &str) {
    text.split_at(text.trim_end_matches(|char: char| char.is_ascii_digit()).len())
}

fn split_while(text: &str, is: impl Fn(char) -> bool) -> (&str, &str) {
    text.split_at(text.find(|char| !is(char)).unwrap_or(text.len()))
}

#[cfg(test)]
mod tests {
    use alloc::string::ToString;

    use crate::Limits;

    #[test]
    fn hints_are_what_the_author_meant_and_parse() {
        for (text, offered) in [
            ("10/s,120/m", "limits are joined by `;`: write 10/s; 120/m"),
            ("10/s, 120/m, 5/h", "limits are joined by `;`: write 10/s; 120/m, 5/h"),
            ("10/s 120/m", "limits are joined by `;`: write 10/s; 120/m"),
            ("10/s and 120/m", "limits are joined by `;`: write 10/s; 120/m"),
            ("10/s & 120/m", "limits are joined by `;`: write 10/s; 120/m"),
            ("10/s + 120/m", "limits are joined by `;`: write 10/s; 120/m"),
            ("1,000/s", "write 1000"),
            ("1.5/s", "write 3/2s"),
            ("0.5/s", "write 1/2s"),
            ("2.5/min burst 5", "write 5/2m"),
            ("0.25 per 2 hours", "write 1/8h"),
            ("5/s; 1.2/s", "write 6/5s"),
            ("10/1.5s", "write 1500ms"),
            ("10/0.5 h", "write 30m"),
            ("100/month", "months differ in length: write 100/30d"),
            ("100/years", "years differ in length: write 100/365d"),
            ("10/fortnight", "write 10/2w"),
            ("10/s burst=20", "write burst 20"),
            ("10/s burst: 20", "write burst 20"),
            ("100/min, burst 20", "options follow without a comma: write 100/min burst 20"),
            ("60/1m30s", "a period is one number and one unit: write 90s"),
            ("10k/s", "write 10000"),
            ("2M/day", "write 2000000"),
            ("1e3/s", "write 1000"),
            ("10rps", "write 10/s"),
            ("10 rpm", "write 10/m"),
            ("10 r/s", "write 10/s"),
            ("10 requests per minute", "write 10/minute"),
            ("10/hour/user", "a limit has one /; whom it is for is `by` in a rule"),
            ("10/minute slidng", "did you mean sliding?"),
            ("10/s bursts 5", "did you mean burst?"),
            ("10/s Windows", "did you mean window?"),
        ] {
            let error = text.parse::<Limits>().unwrap_err().to_string();
            assert!(error.ends_with(&alloc::format!(": {offered}")), "{text}: {error}");
            // A suggested limit parses.
            if let Some(whole) = offered.strip_prefix("write ").filter(|whole| whole.contains('/'))
            {
                assert!(whole.parse::<Limits>().is_ok(), "{text}: {whole}");
            }
        }
        for text in [
            "ten/s",
            "10",
            "",
            "10/s turbo",
            "10/parsec",
            "1.3333333/s",
            "-5/s",
            "10..5/s",
            "1.5",
            "10/s burst",
            "0.0/s",
            "10/s,",
            "10/s burst 5 5",
        ] {
            let error = text.parse::<Limits>().unwrap_err().to_string();
            assert!(
                !error.contains("write ") && !error.contains("did you mean"),
                "{text}: {error}"
            );
        }
    }
}
