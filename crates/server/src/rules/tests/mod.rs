//! Which rules apply to a request, what they charge and to which budget: rule by rule, without a
//! store.

mod envoy;

use std::sync::Arc;

use tidegate::memory::Overflow;
use tidegate::resilience::{OnFailure, Policy, SyncMode};

use super::*;

/// `10/s by user`, by any attribute.
fn rule(text: &str) -> Rule {
    let (limit, by) = text.split_once(" by ").unwrap_or((text, ""));
    let by = by.split(", ").filter(|name| !name.is_empty()).map(Arc::from).collect();
    Rule { by, ..Rule::in_one_line(limit).unwrap() }
}

fn condition(attribute: &str, any_of: &[&str]) -> Condition {
    Condition {
        attribute: attribute.into(),
        any_of: any_of.iter().map(|text| text.parse().unwrap()).collect(),
    }
}

/// `path=/v1/x user=ann`.
fn request(text: &str) -> Vec<(&str, &str)> {
    text.split_whitespace().map(|pair| pair.split_once('=').unwrap()).collect()
}

/// The names of the rules that decide a request, with their keys and costs.
fn matching(rules: &Rules, text: &str, cost: u64) -> String {
    let found = rules.matching(&request(text)[..], cost).unwrap();
    let shown = |one: &Match| {
        format!("{}:{}:{}", one.rule.name, String::from_utf8_lossy(&one.key), one.cost)
    };
    found.iter().map(shown).collect::<Vec<_>>().join(" ")
}

fn named(name: &str, budget: Budget) -> Rule {
    Rule { name: name.into(), budget, ..rule("1/s") }
}

#[test]
fn a_rule_applies_where_all_its_conditions_hold() {
    let when = vec![condition("path", &["/v1/*", "/v2/*"]), condition("method", &["!GET"])];
    let rules = Rules::new(vec![Rule { when, ..rule("10/s by user") }]);
    for (text, applies) in [
        ("path=/v1/x method=POST user=ann", true),
        ("path=/v2/x method=POST user=ann", true),
        ("path=/v3/x method=POST user=ann", false),
        ("path=/v1/x method=GET user=ann", false),
        ("path=/v1/x user=ann", false), // not even a negation holds of what is not there
    ] {
        assert_eq!(
            matching(&rules, text, 1),
            if applies { "everyone:ann:1" } else { "" },
            "{text}"
        );
    }
    let rule = rules.iter().next().unwrap();
    let unmet = |text: &str| {
        let request = request(text);
        let found = rule.unmet(&request[..]);
        found.map(|(condition, value)| {
            (condition.attribute.to_string(), value.map(|value| value.into_owned()))
        })
    };
    assert_eq!(unmet("path=/v1/x method=POST"), None);
    assert_eq!(unmet("path=/v1/x method=GET"), Some(("method".into(), Some("GET".into()))));
    assert_eq!(unmet("method=GET"), Some(("path".into(), None)), "the first of them");
}

#[test]
fn a_missing_attribute_shares_skips_or_denies() {
    for (missing, expected) in
        [(Missing::Share, "everyone::1"), (Missing::Skip, ""), (Missing::Deny, "everyone::1 user")]
    {
        let rules = Rules::new(vec![Rule { missing: Some(missing), ..rule("10/s by user") }]);
        for text in ["ip=192.0.2.7", "user="] {
            let found = rules.matching(&request(text)[..], 1).unwrap();
            let denies = found.iter().filter_map(|one| one.missing.as_deref());
            let shown = matching(&rules, text, 1)
                + &denies.map(|name| format!(" {name}")).collect::<String>();
            assert_eq!(shown, expected, "{missing:?}: {text}");
            let is_denied = found.iter().any(|one| one.budget == Budget::Deny);
            assert_eq!(is_denied, missing == Missing::Deny, "{missing:?}: {text}");
        }
        assert_eq!(matching(&rules, "user=ann", 1), "everyone:ann:1", "{missing:?}");
        // A rule that exempts has no budgets, whose key could be missing.
        let exempting = Rules::new(vec![Rule {
            missing: Some(missing),
            budget: Budget::Exempt,
            ..rule("10/s by user")
        }]);
        assert_eq!(matching(&exempting, "ip=192.0.2.7", 1), "everyone::1", "{missing:?}");
    }
}

#[test]
fn an_exemption_leaves_no_other_rule_unless_one_denies_outright() {
    let limited = |name: &str| Rule { name: name.into(), ..rule("1/s") };
    let exempt = || named("exempt", Budget::Exempt);
    let deny = |mode| Rule { mode, ..named("deny", Budget::Deny) };
    for (rules, expected) in [
        (vec![limited("a"), limited("b")], "a::1 b::1"),
        (vec![limited("a"), exempt(), limited("b")], "exempt::1"),
        (vec![exempt(), named("later", Budget::Exempt)], "exempt::1"),
        (vec![limited("a"), exempt(), deny(Mode::Enforce)], "a::1 exempt::1 deny::1"),
        (vec![limited("a"), exempt(), deny(Mode::Shadow)], "exempt::1"),
    ] {
        assert_eq!(matching(&Rules::new(rules.clone()), "", 1), expected);
        // The same if they come from two places.
        for middle in 0..rules.len() {
            let split = Rules::new(rules[..middle].to_vec()).and(&rules[middle..]);
            assert_eq!(matching(&split, "", 1), expected, "{middle}");
        }
        let all: Vec<&str> = rules.iter().map(|rule| &*rule.name).collect();
        let rules = Rules::new(rules.clone());
        let applying: Vec<Match> = rules.applying(&request("")[..], 1).unwrap();
        assert_eq!(
            applying.iter().map(|one| &*one.rule.name).collect::<Vec<_>>(),
            all,
            "all of them apply"
        );
    }
}

#[test]
fn a_cost_is_multiplied_or_read_within_its_bounds() {
    let cost = |cost: Cost, text: &str, asked| {
        let rules = Rules::new(vec![Rule { cost, ..rule("1/s") }]);
        rules.matching(&request(text)[..], asked).map(|found| found[0].cost)
    };
    let fixed = |asked| cost(Cost::Fixed(3), "", asked).unwrap();
    assert_eq!((fixed(0), fixed(1), fixed(2), fixed(u64::MAX)), (0, 3, 6, u64::MAX));
    let from = || Cost::From { attribute: "size".into(), min: 2, max: 9 };
    for (text, asked, expected) in [
        ("size=5", 1, 5),
        ("size=1", 1, 2),
        ("size=10", 1, 9),
        ("size=5", 0, 5),
        ("", 1, 2),
        ("", 5, 5),
        ("", 10, 9),
        ("", 0, 0), // a caller that takes nothing
    ] {
        assert_eq!(cost(from(), text, asked).unwrap(), expected, "{text:?}, asked for {asked}");
    }
    let error = cost(from(), "size=many", 1).unwrap_err();
    assert_eq!(
        error.to_string(),
        "size is \"many\": expected a whole number as the cost for rule everyone"
    );
    assert_eq!(error.for_client(), "size is \"many\": expected a whole number");
}

#[test]
fn the_first_override_that_holds_counts() {
    let other = |plan: &str, limit: &str| Override {
        when: vec![condition("plan", &[plan])],
        budget: Budget::Limits(limit.parse().unwrap()),
    };
    let overrides = vec![other("gold", "9/s"), other("g*", "5/s")];
    let rule = Arc::new(Rule { overrides, ..rule("1/s") });
    for (text, limit, index) in [
        ("plan=gold", "9/s", Some(0)),
        ("plan=green", "5/s", Some(1)),
        ("plan=blue", "1/s", None),
        ("", "1/s", None),
    ] {
        let (found, overridden) = rule.applied(&request(text)[..], 1).unwrap();
        assert_eq!(
            (found.budget, overridden),
            (Budget::Limits(limit.parse().unwrap()), index),
            "{text}"
        );
    }
}

/// All addresses of an IPv6 network are one client's. Nothing else is read as an address, whatever
/// it looks like.
#[test]
fn keys_by_address_are_keys_of_a_network() {
    let key = |by: &str, text: &str| {
        let rules = Rules::new(vec![rule(&format!("1/s by {by}"))]).with_ipv6_prefix(56);
        String::from_utf8(rules.matching(&request(text)[..], 1).unwrap().remove(0).key).unwrap()
    };
    for (by, text, expected) in [
        ("ip", "ip=2001:db8:1:2::7", "2001:db8:1::/56"),
        ("ip", "ip=::ffff:192.0.2.7", "192.0.2.7"),
        ("ip", "ip=192.0.2.7", "192.0.2.7"),
        ("ip", "ip=a:b", "a:b"),
        ("host", "host=2001:db8::7", "2001:db8::7"),
        ("host", "host=192.0.2.7", "192.0.2.7"),
        ("ip, host", "ip=2001:db8:1:2::7 host=a:1", "15:2001:db8:1::/563:a:1"),
        ("host, ip", "ip=2001:db8:1:2::7", "0:15:2001:db8:1::/56"),
    ] {
        assert_eq!(key(by, text), expected, "{text} by {by}");
    }
}

#[test]
fn only_a_rule_that_may_deny_outright_is_said_to() {
    let denying = Override { when: vec![condition("plan", &["none"])], budget: Budget::Deny };
    let unlimited =
        Override { when: vec![condition("plan", &["gold"])], budget: Budget::Unlimited };
    for (expected, rule) in [
        (false, rule("1/s by user")),
        (false, Rule { missing: Some(Missing::Skip), ..rule("1/s by user") }),
        (false, Rule { overrides: vec![unlimited.clone()], ..rule("1/s") }),
        (
            false,
            Rule { budget: Budget::Exempt, missing: Some(Missing::Deny), ..rule("1/s by user") },
        ),
        (true, Rule { budget: Budget::Deny, ..rule("1/s") }),
        (true, Rule { missing: Some(Missing::Deny), ..rule("1/s by user") }),
        (true, Rule { overrides: vec![unlimited, denying], ..rule("1/s") }),
    ] {
        assert_eq!(rule.can_deny_outright(), expected, "{rule:?}");
    }
}

#[test]
fn a_store_is_told_what_a_rule_says_about_it() {
    assert_eq!(rule("1/s").policy(), Policy::default());
    let strict = Rule {
        sync: SyncMode::Lease,
        on_store_failure: Some(Failure::Closed),
        overflow: Some(Overflow::DenyNew),
        ..rule("1/s")
    };
    let expected = Policy {
        sync: SyncMode::Lease,
        on_failure: Some(OnFailure::Closed),
        overflow: Some(Overflow::DenyNew),
    };
    assert_eq!(strict.policy(), expected);
    let words = [Failure::Open, Failure::Closed, Failure::Local]
        .map(|failure| OnFailure::from(failure).name());
    assert_eq!(words, ["open", "closed", "local"]);
}

#[test]
fn rules_know_what_they_look_at() {
    let rules =
        Rules::new(vec![Rule { when: vec![condition("path", &["/x"])], ..rule("1/s by ip") }]);
    assert!(rules.looks_at("path") && rules.looks_at("ip"));
    assert!(!rules.looks_at("user") && !rules.looks_at(""));
}

/// A response of which only the status is known.
struct Status(&'static str);

impl Attributes for Status {
    fn get(&self, name: &str) -> Option<Cow<'_, str>> {
        (name == "status").then_some(Cow::Borrowed(self.0))
    }
}

#[test]
fn a_response_counts_and_costs_as_its_rule_says() {
    let settle = |per| Settle { by: Measure::Bytes, per };
    for (per, measured, cost) in
        [(1, 7, 7), (1024, 0, 0), (1024, 1, 1), (1024, 1024, 1), (1024, 1025, 2)]
    {
        assert_eq!(settle(per).cost(measured), cost, "{measured} by {per}");
    }
    let plain = rule("1/s");
    let failed = Rule { charge_when: vec![condition("status", &["401"])], ..rule("1/s") };
    let measured = Rule { settle: Some(settle(1)), ..rule("1/s") };
    let leases = rule("5 concurrent ttl 1m");
    let counts = |rule: &Rule| [rule.counts(&Status("401")), rule.counts(&Status("200"))];
    assert_eq!((counts(&plain), counts(&failed)), ([true, true], [true, false]));
    for (rule, later, lease) in [
        (plain, false, false),
        (failed, true, false),
        (measured, true, false),
        (leases, false, true),
    ] {
        assert_eq!(rule.is_settled_later(), later, "{rule:?}");
        let found = Rules::new(vec![rule]).matching(&request("")[..], 1).unwrap().remove(0);
        assert_eq!((found.has_outcome(), found.is_lease()), (later || lease, lease), "{found:?}");
    }
}
