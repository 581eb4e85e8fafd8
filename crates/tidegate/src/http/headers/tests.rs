//! Decisions and limits beside the headers they become.

use super::*;
use tidegate_core::{Charge, Limits, Op, Record, Timestamp, decide};

fn denied(limit: &Limit, cost: u64) -> Decision {
    let mut record = Record::default();
    let now = Timestamp::from_secs(100);
    let _ = decide(Op::Check, &mut [Charge::new(limit, &mut record, limit.capacity())], now);
    decide(Op::Check, &mut [Charge::new(limit, &mut record, cost)], now)
}

#[test]
fn policies_name_quota_and_window() {
    // limit => RateLimit-Policy
    for (text, expected) in [
        ("100/min", r#""x";q=100;w=60"#),
        ("100/min burst 20", r#""x";q=20;w=12"#),
        ("7/min burst 1", r#""x";q=1;w=9"#), // a bucket's time to fill is rounded up
        ("1000/day estimate", r#""x";q=1000;w=86400"#),
        ("10/1500ms window", r#""x";q=10"#), // not whole seconds: no window rather than a wrong one
        ("20 concurrent ttl 30s", r#""x";q=20"#),
    ] {
        assert_eq!(policy(&[("x", &text.parse().unwrap())]), expected, "{text}");
    }
}

#[test]
fn draft_7_is_about_the_binding_limit() {
    let limits: Limits = "10/s; 100/min window; 20 concurrent ttl 30s".parse().unwrap();
    let mut records: [Record; 3] = Default::default();
    let mut charges: Vec<Charge<'_>> = limits
        .into_iter()
        .zip(&mut records)
        .map(|(limit, record)| Charge::new(limit, record, 3))
        .collect();
    let decision = decide(Op::Check, &mut charges, Timestamp::from_secs(100));
    let names = ["a", "b", "c"];
    let named: Vec<(&str, &Limit)> = names.into_iter().zip(&limits).collect();
    let headers = of(&decision, &named, HeaderFamilies::DRAFT_7);
    assert_eq!(headers[0], ("RateLimit-Policy", "10;w=1, 100;w=60, 20".into()));
    assert_eq!(headers[1], ("RateLimit", "limit=10, remaining=7, reset=1".into()));
    assert_eq!(headers.len(), 2);
}

#[test]
fn retry_after_is_rounded_up_and_never_zero() {
    for (text, cost, expected) in [
        ("10/s", 1, Some(1)),           // 100 ms
        ("1/2s", 1, Some(2)),           // exactly 2 s
        ("2/3s", 1, Some(2)),           // 1.5 s
        ("10/s", 11, None),             // never
        ("60/h window", 1, Some(3500)), // the hour ends at 3600, it is second 100
    ] {
        assert_eq!(
            retry_after_secs(&denied(&text.parse().unwrap(), cost)),
            expected,
            "{text} cost {cost}"
        );
    }
}

#[test]
fn a_full_budget_has_no_time_of_more() {
    let limit: Limit = "10/s".parse().unwrap();
    let idle =
        decide(Op::Peek, &mut [Charge::new(&limit, &mut Record::default(), 1)], Timestamp::EPOCH);
    assert_eq!(rate_limit([("x", idle.binding())]), r#""x";r=10"#);
    assert_eq!(retry_after_secs(&idle), None);
}

#[test]
fn extreme_numbers_of_a_store_do_not_overflow() {
    let extreme = Verdict {
        reset_after_us: u64::MAX,
        next_after_us: u64::MAX,
        remaining: u64::MAX,
        ..Verdict::default()
    };
    let decision = Decision::of_one(extreme, false, Timestamp::MAX);
    let limit: Limit = "10/s".parse().unwrap();
    assert_eq!(reset_epoch_secs(&decision), u64::MAX.div_ceil(SECOND_US));
    assert!(!of(&decision, &[("x", &limit)], HeaderFamilies::ALL).is_empty());
}

#[test]
fn hostile_names_cannot_leave_their_quotes() {
    let limit: Limit = "10/s".parse().unwrap();
    let name = "a\"b\\c\r\nSet-Cookie: x=1\u{e9}%";
    assert_eq!(policy(&[(name, &limit)]), r#""a\"b\\c%0D%0ASet-Cookie: x=1%C3%A9%25";q=10;w=1"#);
    let headers = of(&denied(&limit, 1), &[(name, &limit)], HeaderFamilies::ALL);
    assert!(
        headers.iter().all(|(_, value)| value.bytes().all(|b| (b' '..=b'~').contains(&b))),
        "{headers:?}"
    );
}

#[test]
fn github_headers_are_about_the_binding_charge() {
    let (a, b): (Limit, Limit) = ("10/s".parse().unwrap(), "3/min window".parse().unwrap());
    let (mut ra, mut rb) = (Record::default(), Record::default());
    let now = Timestamp::from_secs(90);
    let decision =
        decide(Op::Check, &mut [Charge::new(&a, &mut ra, 1), Charge::new(&b, &mut rb, 1)], now);
    let headers = of(&decision, &[("burst", &a), ("minute", &b)], HeaderFamilies::GITHUB);
    let expected = [
        ("Limit", "3"),
        ("Remaining", "2"),
        ("Used", "1"),
        ("Reset", "120"),
        ("Resource", "minute"),
    ];
    for ((name, value), (suffix, expected)) in headers.iter().zip(expected) {
        assert_eq!((name.trim_start_matches("X-RateLimit-"), value.as_str()), (suffix, expected));
    }
}
