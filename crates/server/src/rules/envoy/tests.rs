//! Which limit a descriptor has, and which files are refused.

use super::*;
use crate::rules::Budget;

const FILE: &str = "\
domain: edge
descriptors:
  - key: database
    value: users
    rate_limit: { unit: second, requests_per_unit: 500 }
  - key: database
    rate_limit: { unit: Minute, requests_per_unit: 10, name: any }
  - key: path
    value: /api/*
    share_threshold: true
    rate_limit: { limit: 100/min burst 20; 1000/h sliding }
  - key: path
    value: '*/health'
    rate_limit: { unlimited: true }
  - key: message_type
    value: marketing
    descriptors:
      - key: to_number
        shadow_mode: true
        rate_limit: { unit: day, requests_per_unit: 5, replaces: [{ name: any }] }
  - key: ip
    value: 192.0.2.1
  - key: ip
    rate_limit: { unit: week, requests_per_unit: 0 }
";

fn find(entries: &[(&str, &str)]) -> Option<(String, Budget, Vec<u8>)> {
    let mut domains = Domains::default();
    domains.add(FILE, "f").unwrap();
    let found = domains.find("edge", entries, 1)?;
    Some((found.limited.rule.name.to_string(), found.charge.budget, found.charge.key))
}

#[test]
fn descriptors_find_their_limit() {
    let name = |entries: &[(&str, &str)]| find(entries).map(|(name, _, _)| name);
    assert_eq!(name(&[("database", "users")]).as_deref(), Some("edge.database_users"));
    assert_eq!(name(&[("database", "orders")]).as_deref(), Some("edge.database"));
    assert_eq!(name(&[("path", "/api/x")]).as_deref(), Some("edge.path_/api/*"));
    assert_eq!(name(&[("path", "/x/health")]).as_deref(), Some("edge.path_*/health"));
    assert_eq!(
        name(&[("message_type", "marketing")]),
        None,
        "a limit counts only at its own depth"
    );
    let deep = [("message_type", "marketing"), ("to_number", "2061111111")];
    assert_eq!(name(&deep).as_deref(), Some("edge.message_type_marketing.to_number"));
    assert_eq!(name(&[("ip", "192.0.2.1")]), None, "a value without a limit is allowed");
    assert_eq!(find(&[("ip", "192.0.2.2")]).unwrap().1, Budget::Deny);
    assert_eq!(name(&[("unknown", "x")]), None);
}

#[test]
fn values_have_budgets_of_their_own_unless_shared() {
    let key = |entries: &[(&str, &str)]| find(entries).unwrap().2;
    assert_ne!(key(&[("database", "a")]), key(&[("database", "b")]));
    assert_eq!(key(&[("path", "/api/a")]), key(&[("path", "/api/b")]));
    assert_ne!(key(&[("database", &"a".repeat(2000))]), key(&[("database", &"a".repeat(2001))]));
    assert!(
        key(&[("database", &"a".repeat(2000))]).len() < 100,
        "a long key is kept by its digest"
    );
}

#[test]
fn limits_are_counted_and_values_may_look_like_numbers() {
    let mut domains = Domains::default();
    domains.add(FILE, "f").unwrap();
    assert_eq!(domains.limits(), 6);
    domains.add("domain: n\ndescriptors:\n  - key: port\n    value: 8080\n    detailed_metric: true\n    metadata: { to: { blue: 1 } }\n    rate_limit: { unit: HOUR, requests_per_unit: 3 }\n", "g").unwrap();
    let found = domains.find("n", &[("port", "8080")], 1).unwrap();
    assert_eq!(found.limited.stated, Some((3, Unit::Hour)));
    assert_eq!(found.limited.metadata.as_ref().unwrap()["to"]["blue"], 1);
    assert_eq!(Unit::of(&"30/min burst 30".parse().unwrap()), Some(Unit::Minute));
    assert_eq!(Unit::of(&"30/min burst 15".parse().unwrap()), None);
    assert_eq!(Unit::of(&"5/7d window".parse().unwrap()), Some(Unit::Week));
}

#[test]
fn mistakes_are_named() {
    for (text, expected) in [
        (
            "domain: a\ndescriptors:\n  - key: k\n    lmit: 3\n",
            "f:4:5: config error, unknown key 'lmit': expected ",
        ),
        ("domain: ''\n", "f: config file cannot have empty domain"),
        (
            "domain: a\ndescriptors:\n  - key: k\n    rate_limit: { unit: fortnight, requests_per_unit: 1 }\n",
            "f: invalid rate limit unit 'fortnight' at a.k: expected second, minute",
        ),
        (
            "domain: a\ndescriptors:\n  - { key: k }\n  - { key: k }\n",
            "f: duplicate descriptor composite key 'a.k'",
        ),
        ("domain: a\ndescriptors:\n  - value: k\n", "f: descriptor has empty key"),
        (
            "domain: a\ndescriptors:\n  - { key: path, value: /api, share_threshold: true }\n",
            "f: share_threshold can only be used with wildcard values (ending with '*'), but found key 'path_/api' at a.path_/api: add * to the value",
        ),
        (
            "domain: a\ndescriptors:\n  - { key: b, descriptors: [{ key: path, share_threshold: true }] }\n",
            "f: share_threshold can only be used with wildcard values (ending with '*'), but found key 'path' at a.b.path: ",
        ),
        (
            "domain: a\ndescriptors:\n  - { key: k, rate_limit: { unit: day, requests_per_unit: 1, replaces: [{ name: '' }] } }\n",
            "f: should not have an empty replaces entry: replaces[0].name at a.k is empty: expected the name of another rate_limit",
        ),
        (
            "domain: a\ndescriptors:\n  - { key: k, rate_limit: { unit: day, requests_per_unit: 1, replaces: [{ name: b }, {}] } }\n",
            "f: should not have an empty replaces entry: replaces[1].name at a.k is empty: ",
        ),
        (
            "domain: a\ndescriptors:\n  - { key: k, rate_limit: { unit: day, requests_per_unit: 1, name: b, replaces: [{ name: c }, { name: b }] } }\n",
            "f: replaces should not contain name of same descriptor, at a.k",
        ),
    ] {
        let error = Domains::default().add(text, "f").unwrap_err().to_string();
        assert!(error.starts_with(expected), "{text}\nsays {error}");
    }
    let mut twice = Domains::default();
    twice.add("domain: a\n", "f").unwrap();
    assert!(
        twice.add("domain: a\n", "g").unwrap_err().to_string().contains("duplicate domain 'a'")
    );
}
