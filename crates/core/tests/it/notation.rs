//! The notation: every spelling has one canonical form that parses back, and every mistake is shown
//! where it stands.

use proptest::prelude::*;
use tidegate_core::{Limit, Limits, MAX_LIMITS, Parameter, Period};

use crate::draw::{self, Seeded};

#[test]
fn every_spelling_has_one_canonical_form() {
    for (canonical, spellings) in [
        (
            "10/s",
            &[
                "10/s",
                " 10 / S ",
                "10 per second",
                "10per sec",
                "10/1s",
                "10/1000ms",
                "10/s burst 10",
            ][..],
        ),
        (
            "10/s",
            &[
                "10/s bucket",
                "10/s token-bucket",
                "10/s Leaky-Bucket",
                "10/s FUNNEL",
                "10/s gcra",
                "10/s debt 10",
            ],
        ),
        (
            "30/m burst 15",
            &[
                "30/min burst 15",
                "30/60s burst 15",
                "30 per minute bucket burst 15",
                "30/m\tburst\n15",
            ],
        ),
        ("1000/2d", &["1_000/2 days", "1000/48h", "1000 per 2 day", "1000/2880 mins"]),
        ("10/w", &["10/week", "10/7d", "10/weeks", "10/wk"]),
        ("10/us", &["10/µs", "10/μs", "10/microsecond", "10/1us", "10/micros"]),
        ("10/1500ms", &["10/1500ms", "10/1500000us", "10 per 1500 milliseconds", "10/1_500 msec"]),
        ("240/h window", &["240/h window", "240/hr WINDOW", "240/3600s window debt 240"]),
        (
            "240/h window from first hit",
            &["240/h window from first hit", "240/hours window From First Hit"],
        ),
        (
            "240/h sliding step 6m",
            &["240/h sliding", "240/h sliding strict", "240/h sliding step 360s"],
        ),
        (
            "240/h sliding step 1m",
            &[
                "240/h sliding step 1m",
                "240/h sliding strict step m",
                "240/h sliding step 1m strict",
            ],
        ),
        (
            "240/h sliding step 1m lenient",
            &["240/h sliding lenient step 1m", "240/h sliding step 60s lenient"],
        ),
        ("1000/d estimate", &["1000/day estimate", "1000/24h estimate"]),
        (
            "5/20s log count rejected",
            &["5/20s log count rejected", "5 per 20 seconds log count rejected debt 5"],
        ),
        ("5/20s log count rejected debt 0", &["5/20s log debt 0 count rejected"]),
        ("20 concurrent ttl 30s", &["20 concurrent ttl 30s", "20 CONCURRENT TTL 30 seconds"]),
        (
            "10/s; 120/m; 240/h sliding step 1m",
            &["10/s;120/m;240/h sliding step 1m;", "10/s ; 2_0_0/m debt 1"][..1],
        ),
    ] {
        for spelling in spellings {
            let limits: Limits =
                spelling.parse().unwrap_or_else(|error| panic!("{spelling}: {error}"));
            assert_eq!(limits.to_string(), canonical, "{spelling}");
            assert_eq!(canonical.parse::<Limits>().as_ref(), Ok(&limits), "{spelling}");
        }
    }
}

#[test]
fn every_error_has_the_column_of_the_mistake() {
    let amount = "an amount, as the 10 in 10/s";
    let period = "a period such as s, 20s or 2 days, in us, ms, s, m, h, d or w";
    let slash = "/ and a period, as in 10/s, or `concurrent ttl 30s`";
    let word = "an algorithm (bucket, window, sliding, estimate, log or concurrent) or an option such as burst 20";
    let options = "an algorithm (bucket, window, sliding, estimate, log), burst, count rejected, debt, ; or the end";
    let comma = "a whole number, or `;` between two limits";
    let ttl = "ttl and the time after which a lease ends that is not released, as in 20 concurrent ttl 30s";
    // text, column, expected, found (empty is the end)
    for (text, column, expected, found) in [
        ("", 1, amount, ""),
        (";", 1, amount, ";"),
        ("/s", 1, amount, "/"),
        ("10/s;;5/m", 6, amount, ";"),
        ("10", 3, slash, ""),
        ("10 s", 4, slash, "s"),
        ("10/s; 5", 8, slash, ""),
        ("10/", 4, period, ""),
        ("10/fortnight", 4, period, "fortnight"),
        ("10/5", 5, period, ""),
        ("10/s turbo", 6, word, "turbo"),
        ("10/s 5", 6, options, "5"),
        ("10/s burst 5 5", 14, options, "5"),
        (
            "10/s window sliding",
            13,
            "from first hit, count rejected, debt, ; or the end",
            "sliding",
        ),
        (
            "10/s sliding log",
            14,
            "step, lenient, strict, count rejected, debt, ; or the end",
            "log",
        ),
        ("10/s log window", 10, "count rejected, debt, ; or the end", "window"),
        ("20 concurrent ttl 30s 5", 23, "; or the end", "5"),
        ("10/s burst", 11, "a number of units, as in burst 20", ""),
        ("10/s debt x", 11, "a number of units, as in debt 5", "x"),
        ("10/h sliding step", 18, "a time such as 1m or 500ms, in us, ms, s, m, h, d or w", ""),
        ("-5/s", 1, "a whole number without a sign", "-"),
        ("10/s burst +5", 12, "a whole number without a sign", "+"),
        ("1.5/s", 2, "a whole number", "."),
        ("10/1.5s", 5, "a whole number", "."),
        ("1,000/s", 2, comma, ","),
        ("10/s,120/m", 5, comma, ","),
        ("10/s # no", 6, "a limit such as 10/s, 30/min burst 15 or 240/h sliding step 1m", "#"),
        ("18446744073709551616/s", 1, "a number below 9007199254740992", "18446744073709551616"),
        ("10/99999999999999999999s", 4, "a number below 9007199254740992", "99999999999999999999"),
        ("20 concurrent", 14, ttl, ""),
        ("20 concurrent 30s", 15, ttl, "30"),
        ("20 concurrent ttl", 18, "a time such as 30s, in us, ms, s, m, h, d or w", ""),
        (
            "20/s concurrent ttl 30s",
            6,
            "no period before `concurrent` (write 20 concurrent ttl 30s)",
            "concurrent",
        ),
        ("10/s burst 5 burst 6", 14, "burst only once", "burst"),
        ("10/s debt 1 debt 2", 13, "debt only once", "debt"),
        ("10/s log count rejected count rejected", 25, "count rejected only once", "count"),
        ("10/s window from first hit from first hit", 28, "from first hit only once", "from"),
        ("10/s sliding step 100ms step 100ms", 25, "step only once", "step"),
        ("10/s sliding lenient strict", 22, "lenient or strict only once", "strict"),
        ("10/s window from first", 23, "from first hit", ""),
        ("10/s log count", 15, "count rejected", ""),
        ("10/µs turbo", 7, word, "turbo"), // columns are characters, not bytes
    ] {
        let found = if found.is_empty() { "the end".to_owned() } else { format!("{found:?}") };
        let error = text.parse::<Limits>().expect_err(text);
        let hint = match text {
            "10/fortnight" => ": write 10/2w",
            "1.5/s" => ": write 3/2s",
            "10/1.5s" => ": write 1500ms",
            "1,000/s" => ": write 1000",
            "10/s,120/m" => ": limits are joined by `;`: write 10/s; 120/m",
            _ => "",
        };
        assert_eq!(
            error.to_string(),
            format!("column {column}: expected {expected}, found {found}{hint}"),
            "{text}"
        );
        assert_eq!(error.column(), column, "{text}");
    }
}

#[test]
fn every_number_out_of_range_is_named() {
    let grid = "is too large for exact arithmetic on any clock grid (1us to 1s): expected a smaller amount, burst or debt, \
                or an amount and period with a common divisor";
    let slow = "would take more than 142 years to drain with its debt: expected a smaller burst or debt, or a faster rate";
    for (text, column, parameter, message) in [
        ("0/s", 1, Parameter::Amount, "amount 0 is too small: expected at least 1"),
        (
            "9007199254740992/s",
            1,
            Parameter::Amount,
            "amount 9007199254740992 is too large: expected at most 9007199254740991",
        ),
        ("10/0s", 4, Parameter::Period, "period 0us is too small: expected at least 1us"),
        (
            "10/9999999w",
            4,
            Parameter::Period,
            "period 9999999w is too large: expected at most 3723w (71 years)",
        ),
        // More microseconds than 64 bits hold.
        (
            "10/99999999w",
            4,
            Parameter::Period,
            "period is too large: expected at most 3723w (71 years)",
        ),
        ("10/s burst 0", 12, Parameter::Burst, "burst 0 is too small: expected at least 1"),
        (
            "1/s burst 9007199254740992",
            11,
            Parameter::Burst,
            "burst 9007199254740992 is too large: expected at most 2251799813685247",
        ),
        (
            "9007199254740991/s",
            1,
            Parameter::Amount,
            "amount 9007199254740991 is too large: expected at most 2251799813685247",
        ),
        (
            "10/h sliding step 0s",
            19,
            Parameter::Step,
            "step 0us is too small: expected at least 1us",
        ),
        (
            "10/h sliding step 2h",
            19,
            Parameter::Step,
            "step 2h is too large: expected at most 1h, the period",
        ),
        (
            "10/h sliding step 1s",
            19,
            Parameter::Step,
            "step 1s is too fine: expected at least 3600ms, so that the period has at most 1000 steps",
        ),
        ("20 concurrent ttl 0s", 19, Parameter::Ttl, "ttl 0us is too small: expected at least 1us"),
        ("0 concurrent ttl 1s", 1, Parameter::Amount, "amount 0 is too small: expected at least 1"),
        (
            "100001/s log",
            1,
            Parameter::Amount,
            "amount 100001 is too large: expected at most 100000, because every hit is kept (`sliding` has no such bound)",
        ),
        (
            "100001 concurrent ttl 1s",
            1,
            Parameter::Amount,
            "amount 100001 is too large: expected at most 100000, because every lease is kept",
        ),
        (
            "10/s debt 9007199254740992",
            11,
            Parameter::Debt,
            "debt 9007199254740992 is too large: expected at most 4503599627370495",
        ),
        (
            "10/s log debt 100001",
            15,
            Parameter::Debt,
            "debt 100001 is too large: expected at most 100000",
        ),
        (
            "1000000007/day burst 2000000000000",
            22,
            Parameter::Burst,
            &format!("burst 2000000000000 {grid}"),
        ),
        ("1/day burst 100000", 13, Parameter::Burst, &format!("burst 100000 {slow}")),
        (
            "4503599627370495/day estimate",
            1,
            Parameter::Amount,
            &format!("amount 4503599627370495 {grid}"),
        ),
        ("1/day debt 100000", 12, Parameter::Debt, &format!("debt 100000 {slow}")),
        (
            "7/day burst 3 debt 4503599627370495",
            20,
            Parameter::Debt,
            &format!("debt 4503599627370495 {grid}"),
        ),
        (
            "10/day estimate debt 4503599627370495",
            22,
            Parameter::Debt,
            &format!("debt 4503599627370495 {grid}"),
        ),
    ] {
        let error = text.parse::<Limit>().expect_err(text);
        assert_eq!(error.to_string(), format!("column {column}: {message}"), "{text}");
        assert_eq!(
            (error.column(), error.limit_error().map(|error| error.parameter())),
            (column, Some(parameter)),
            "{text}"
        );
    }
}

/// The finest grid on which twice capacity and debt, in parts of a token, stay below 2^53 (three
/// amounts, in ticks).
#[test]
fn a_limit_uses_the_finest_exact_grid() {
    for (text, grid_us) in [
        ("10/s", 1),
        ("7/min", 1),
        ("1000000/s burst 1000000", 1),
        ("26003/day", 1), // 4 * 26003 * 86.4e9 is just below 2^53
        ("26069/day", 10),
        ("999983/day burst 1000000", 100),
        ("999983/day burst 10000000", 1_000),
        ("999983/day burst 10000000000", 1_000_000),
        ("999983/day burst 10000000000 debt 0", 1_000_000),
        ("34700/day estimate", 1), // 3 * 34700 * 86.4e9 is just below 2^53
        ("34800/day estimate", 10),
        ("34700000000/day estimate", 1_000_000),
        ("1000000000000/h window", 1),
        ("1000000000000/h sliding", 1),
    ] {
        assert_eq!(text.parse::<Limit>().expect(text).grid_us(), grid_us, "{text}");
    }
}

#[test]
fn too_many_limits_and_too_long_texts_are_refused() {
    let many = |n: usize| vec!["1/s"; n].join(";");
    assert_eq!(many(MAX_LIMITS).parse::<Limits>().unwrap().iter().count(), MAX_LIMITS);
    assert_eq!((many(MAX_LIMITS) + ";").parse::<Limits>().unwrap().iter().count(), MAX_LIMITS);
    let error = many(MAX_LIMITS + 1).parse::<Limits>().unwrap_err();
    assert_eq!(error.to_string(), r#"column 65: expected at most 16 limits, found "1""#);
    assert_eq!(Limits::new(vec!["1/s".parse().unwrap(); MAX_LIMITS + 1]), None);
    assert_eq!(Limits::new([]), None);
    assert!(format!("10/s{}", " ".repeat(4_092)).parse::<Limit>().is_ok());
    let error = format!("10/s{}", " ".repeat(4_093)).parse::<Limit>().unwrap_err();
    assert_eq!(error.to_string(), r#"column 1: expected at most 4096 bytes, found "4097 bytes""#);
    let error = "10/s; 5/m".parse::<Limit>().unwrap_err();
    assert_eq!(error.to_string(), r#"column 5: expected one limit and no more, found ";""#);
}

#[test]
fn what_every_limit_prints_parses_back() {
    for seed in 0..50_000 {
        let limit = draw::limit(&mut Seeded::new(seed));
        let text = limit.to_string();
        assert_eq!(text.parse::<Limit>().as_ref(), Ok(&limit), "{text}");
        assert_eq!(text.parse::<Limit>().unwrap().to_string(), text);
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 4_000, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn any_bucket_round_trips(amount in 1..1_u64 << 50, length in 1..1_u64 << 51, burst in any::<Option<u16>>(), debt in any::<Option<u8>>()) {
        let mut builder = Limit::bucket(amount, Period::micros(length));
        if let Some(burst) = burst {
            builder = builder.burst(burst.into());
        }
        if let Some(debt) = debt {
            builder = builder.debt(debt.into());
        }
        if let Ok(limit) = builder.build() {
            prop_assert_eq!(limit.to_string().parse::<Limit>(), Ok(limit));
        }
    }

    #[test]
    fn no_text_panics(text in ".{0,60}") {
        let _ = text.parse::<Limits>();
    }

    /// Texts that are nearly limits: an accepted one means what it prints.
    #[test]
    fn no_nearly_right_text_panics(words in prop::collection::vec(prop::sample::select(PIECES), 0..12)) {
        let text = words.concat();
        match text.parse::<Limits>() {
            Ok(limits) => prop_assert_eq!(limits.to_string().parse::<Limits>(), Ok(limits)),
            Err(error) => prop_assert!((1..=text.chars().count() + 1).contains(&error.column()), "{}: {}", text, error),
        }
    }
}

const PIECES: &[&str] = &[
    "10",
    "0",
    "7",
    "1_000",
    "18446744073709551615",
    "/",
    " per ",
    "s",
    "ms",
    "20s",
    "2 days",
    "µs",
    " ",
    ";",
    " bucket",
    " window",
    " sliding",
    " estimate",
    " log",
    " concurrent",
    " ttl ",
    " burst ",
    " step ",
    " lenient",
    " strict",
    " from first hit",
    " count rejected",
    " debt ",
    " by ",
    "-",
    ".",
    "é",
    "_",
];

#[test]
fn words_of_another_algorithm_say_where_they_belong() {
    let by = "`by` is no part of a limit: remove it here, and write it in a rule, as in by: [ip]";
    for (text, column, message) in [
        ("10/s by ip", 6, by),
        ("10/s burst 5 by ip", 14, by),
        (
            "20 concurrent ttl 30s burst 5",
            23,
            "concurrent has no burst: remove it, or write bucket",
        ),
        ("20 concurrent ttl 30s debt 5", 23, "concurrent has no debt: remove it"),
        ("20 concurrent ttl 30s count rejected", 23, "concurrent has no count rejected: remove it"),
        ("10/s window burst 5", 13, "window has no burst: remove it, or write bucket"),
        ("10/s log step 1s", 10, "log has no step: remove it, or write sliding"),
        ("10/s lenient", 6, "bucket has no lenient: remove it, or write sliding"),
        ("10/s from first hit", 6, "bucket has no from first hit: remove it, or write window"),
    ] {
        let error = text.parse::<Limits>().unwrap_err();
        assert_eq!(
            (error.column(), error.to_string()),
            (column, format!("column {column}: {message}")),
            "{text}"
        );
    }
}
