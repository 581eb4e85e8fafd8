//! A reset empties the budgets that it names, and no other.

use serde_json::{Value, json};
use tidegate::redis::Redis;
use tidegate_testkit::{Flavor, Reply, Server};

use crate::listeners::{Http, Listeners};

const RULES: &str = "\
rules:
  - name: per-user
    by: [user]
    limit: 2/h
    overrides:
      - { when: { tier: gold }, limit: 3/h window; 4/d sliding; 1000/w }
  - { name: per-page, when: { path: /v1/* }, by: [user, path], limit: 2/h }
  - { name: everyone, limit: 100/h }
  - { name: trial, mode: shadow, limit: 100/h }
  - { name: banned, when: { user: mallory }, limit: deny }
";

/// What is left of every limit that applies, by rule: `per-user 1`.
fn left(http: &mut Http, attributes: &Value) -> Vec<String> {
    let answer = http.post("/v1/peek", &json!({ "attributes": attributes, "cost": 0 }).to_string());
    let answer: Value = serde_json::from_str(&answer.body).unwrap();
    let charges = answer["charges"].as_array().unwrap();
    charges
        .iter()
        .map(|charge| format!("{} {}", charge["rule"].as_str().unwrap(), charge["remaining"]))
        .collect()
}

fn check(http: &mut Http, attributes: &Value) {
    let answer = http.post("/v1/check", &json!({ "attributes": attributes }).to_string());
    assert_eq!(answer.status, 200, "{}", answer.body);
}

fn reset(http: &mut Http, body: &Value) -> Value {
    let answer = http.post("/v1/reset", &body.to_string());
    assert_eq!(answer.status, 200, "{}", answer.body);
    serde_json::from_str(&answer.body).unwrap()
}

/// Over memory, over Redis, and with the resilience layer before Redis.
fn over_every_store(test: impl Fn(Listeners)) {
    test(Listeners::in_memory(RULES));
    let server = Server::start(Flavor::Redis7);
    let builder =
        |namespace: &str| Redis::builder(server.url().parse().unwrap()).namespace(namespace);
    test(Listeners::in_redis(RULES, builder("direct")));
    test(Listeners::resilient(RULES, builder("near")));
}

#[test]
fn one_budget_of_one_rule_is_reset_and_every_other_stays() {
    over_every_store(|listeners| {
        let mut http = listeners.http();
        let (ann, ben) = (json!({ "user": "ann" }), json!({ "user": "ben" }));
        check(&mut http, &ann);
        check(&mut http, &ben);
        let answer = reset(&mut http, &json!({ "rule": "per-user", "by": { "user": "ann" } }));
        assert_eq!(
            answer,
            json!({ "op": "reset", "reset": [{ "rule": "per-user", "by": { "user": "ann" } }] })
        );
        assert_eq!(left(&mut http, &ann), ["per-user 2", "everyone 98"]);
        assert_eq!(left(&mut http, &ben), ["per-user 1", "everyone 98"]);
    });
}

#[test]
fn a_rule_without_by_is_reset_by_its_name_alone() {
    let listeners = Listeners::in_memory(RULES);
    let mut http = listeners.http();
    let ann = json!({ "user": "ann" });
    check(&mut http, &ann);
    let answer = reset(&mut http, &json!({ "rule": "everyone" }));
    assert_eq!(answer["reset"], json!([{ "rule": "everyone", "by": {} }]));
    assert_eq!(left(&mut http, &ann), ["per-user 1", "everyone 100"]);
}

/// All limits of the override, though the call does not say that it applies.
#[test]
fn every_limit_of_every_override_is_reset() {
    over_every_store(|listeners| {
        let mut http = listeners.http();
        let gold = json!({ "user": "ann", "tier": "gold" });
        check(&mut http, &gold);
        assert_eq!(
            left(&mut http, &gold),
            ["per-user 2", "per-user 3", "per-user 999", "everyone 99"]
        );
        reset(&mut http, &json!({ "rule": "per-user", "by": { "user": "ann" } }));
        assert_eq!(
            left(&mut http, &gold),
            ["per-user 3", "per-user 4", "per-user 1000", "everyone 99"]
        );
    });
}

#[test]
fn attributes_reset_the_rules_whose_by_they_give_in_full() {
    over_every_store(|listeners| {
        let mut http = listeners.http();
        let page = json!({ "user": "ann", "path": "/v1/a" });
        check(&mut http, &page);
        let answer = reset(&mut http, &json!({ "attributes": { "user": "ann" } }));
        assert_eq!(answer["reset"], json!([{ "rule": "per-user", "by": { "user": "ann" } }]));
        assert_eq!(left(&mut http, &page), ["per-user 2", "per-page 1", "everyone 99"]);
        let answer = reset(&mut http, &json!({ "attributes": page }));
        let both = json!([
            { "rule": "per-user", "by": { "user": "ann" } },
            { "rule": "per-page", "by": { "user": "ann", "path": "/v1/a" } },
        ]);
        assert_eq!(answer["reset"], both);
        assert_eq!(left(&mut http, &page), ["per-user 2", "per-page 2", "everyone 99"]);
    });
}

#[test]
fn a_star_resets_every_rule_that_applies() {
    let listeners = Listeners::in_memory(RULES);
    let mut http = listeners.http();
    let page = json!({ "user": "ann", "path": "/v1/a" });
    check(&mut http, &page);
    let answer = reset(
        &mut http,
        &json!({ "rule": "*", "attributes": { "user": "ann", "path": "/other" } }),
    );
    let rules = answer["reset"].as_array().unwrap().iter().map(|one| one["rule"].as_str().unwrap());
    assert_eq!(rules.collect::<Vec<_>>(), ["per-user", "everyone", "trial"]);
    assert_eq!(left(&mut http, &page), ["per-user 2", "per-page 1", "everyone 100"]);
}

#[test]
fn every_mistake_is_told_and_resets_nothing() {
    let listeners = Listeners::in_memory(RULES);
    let mut http = listeners.http();
    let ann = json!({ "user": "ann" });
    check(&mut http, &ann);
    for (body, expected) in [
        (
            json!({ "rule": "per-usr" }),
            r#"rule "per-usr": there is no such rule; did you mean "per-user"?"#,
        ),
        (
            json!({ "rule": "quota" }),
            r#"rule "quota": there is no such rule; expected one of per-user, per-page, everyone, trial, banned"#,
        ),
        (
            json!({ "rule": "per-user" }),
            "by lacks user: rule per-user has one budget for each user",
        ),
        (
            json!({ "rule": "per-page", "by": { "user": "ann" } }),
            "by lacks path: rule per-page has one budget for each user and path",
        ),
        (
            json!({ "rule": "per-user", "by": { "usr": "ann" } }),
            r#"by has "usr", which is not in the by of rule per-user: did you mean "user"?"#,
        ),
        (
            json!({ "rule": "per-user", "by": { "user": "ann", "path": "/" } }),
            r#"by has "path", which is not in the by of rule per-user: expected user"#,
        ),
        (
            json!({ "rule": "everyone", "by": { "user": "ann" } }),
            r#"by has "user", which is not in the by of rule everyone: it has one budget for all requests, leave by out"#,
        ),
        (json!({ "rule": "banned" }), "rule banned has no limits: there is nothing to reset"),
        (
            json!({ "attributes": { "usr": "ann" } }),
            r#"nothing to reset: no rule with limits has a by whose attributes are all given (usr); instead of "usr", did you mean "user"?"#,
        ),
        (
            json!({ "attributes": { "path": "/v1/a" } }),
            "nothing to reset: no rule with limits has a by whose attributes are all given (path); per-user has user, per-page has user and path",
        ),
        (json!({ "rule": "*" }), r#"rule is "*": expected attributes beside it, and no by"#),
        (
            json!({ "rule": "per-user", "attributes": { "user": "ann" } }),
            r#"attributes stands beside rule "per-user": expected by, or "*" as the rule"#,
        ),
        (
            json!({ "by": { "user": "ann" } }),
            "by stands without a rule: expected rule, too, or attributes instead of by",
        ),
        (
            json!({ "rule": "per-user", "key": "ann", "limit": "1/s" }),
            "rule or by stands beside key or limit: expected one or the other",
        ),
        (
            json!({ "rule": "everyone", "cost": 3 }),
            "cost, reserved or id stands beside rule or attributes: a reset takes none",
        ),
        (json!({}), "rule is missing: expected rule and by, attributes, or key and limit"),
    ] {
        let answer = http.post("/v1/reset", &body.to_string());
        let problem: Value = serde_json::from_str(&answer.body).unwrap();
        assert_eq!((answer.status, problem["detail"].as_str()), (400, Some(expected)), "{body}");
    }
    let answer = http.post("/v1/check", r#"{"rule":"per-user","by":{"user":"ann"}}"#);
    assert!(
        answer
            .body
            .contains("rule and by are for /v1/reset: expected key and limit, or attributes"),
        "{answer:?}"
    );
    assert_eq!(left(&mut http, &ann), ["per-user 1", "everyone 99"]);
}

#[test]
fn a_batch_of_resets_has_one_result_each() {
    let listeners = Listeners::in_memory(RULES);
    let mut http = listeners.http();
    let answer = reset(
        &mut http,
        &json!({ "checks": [{ "rule": "everyone" }, { "rule": "nobody" }, { "key": "k", "limit": "1/s" }] }),
    );
    assert_eq!(answer["results"][0]["reset"], json!([{ "rule": "everyone", "by": {} }]));
    assert!(
        answer["results"][1]["error"].as_str().unwrap().starts_with("rule \"nobody\""),
        "{answer}"
    );
    assert_eq!(answer["results"][2]["reset"], json!([{ "key": "k", "limit": "1/s" }]));
}

#[test]
fn redis_clients_reset_the_same_budgets() {
    let listeners = Listeners::in_memory(RULES);
    let (mut http, mut resp) = (listeners.http(), listeners.resp());
    let mut listed =
        |words: &str| match resp.command(&words.split(' ').collect::<Vec<_>>()).unwrap() {
            Reply::Error(text) => vec![text],
            list => list
                .array()
                .iter()
                .map(|one| one.array().iter().map(Reply::text).collect::<Vec<_>>().join(" "))
                .collect(),
        };
    let page = json!({ "user": "ann", "path": "/v1/a" });
    check(&mut http, &page);
    assert_eq!(
        listed("TG.RESETRULE per-page user ann path /v1/a"),
        ["per-page user ann path /v1/a"]
    );
    assert_eq!(left(&mut http, &page), ["per-user 1", "per-page 2", "everyone 99"]);
    assert_eq!(listed("TG.RESETRULES user ann"), ["per-user user ann"]);
    assert_eq!(left(&mut http, &page), ["per-user 2", "per-page 2", "everyone 99"]);
    assert_eq!(listed("TG.RESETRULE * user ann"), ["per-user user ann", "everyone", "trial"]);
    assert_eq!(left(&mut http, &page), ["per-user 2", "per-page 2", "everyone 100"]);
    for (words, expected) in [
        ("TG.RESETRULE", "ERR expected TG.RESETRULE rule [attribute value ...]"),
        ("TG.RESETRULE per-user user", "ERR expected TG.RESETRULE rule [attribute value ...]"),
        ("TG.RESETRULE *", "ERR expected TG.RESETRULE * attribute value [attribute value ...]"),
        ("TG.RESETRULES", "ERR expected TG.RESETRULES attribute value [attribute value ...]"),
        (
            "TG.RESETRULE per-usr user ann",
            "ERR rule \"per-usr\": there is no such rule; did you mean \"per-user\"?",
        ),
    ] {
        assert_eq!(listed(words), [expected]);
    }
}

/// A client has all addresses of its IPv6 network: a check, an explanation and a reset by any of
/// them mean one budget.
#[test]
fn budgets_by_ip_are_those_of_the_ipv6_network_at_every_call() {
    let listeners = Listeners::in_memory("rules: [{ name: v6, by: [ip], limit: 2/h }]\n");
    let mut http = listeners.http();
    check(&mut http, &json!({ "ip": "2001:db8::5" }));
    check(&mut http, &json!({ "ip": "2001:DB8:0::6" }));
    assert_eq!(left(&mut http, &json!({ "ip": "2001:db8::7" })), ["v6 0"]);
    assert_eq!(left(&mut http, &json!({ "ip": "2001:db8:0:1::7" })), ["v6 2"], "another network");
    let explained = listeners
        .runtime
        .block_on(listeners.engine().explain(&[("ip", "2001:db8::8")], 1))
        .unwrap();
    assert_eq!(explained.allowed, Some(false), "{explained}");
    reset(&mut http, &json!({ "rule": "v6", "by": { "ip": "2001:db8::9" } }));
    assert_eq!(left(&mut http, &json!({ "ip": "2001:db8::5" })), ["v6 2"]);
    // The network as `/v1/top` shows it, and IPv4 within IPv6.
    check(&mut http, &json!({ "ip": "2001:db8::5" }));
    reset(&mut http, &json!({ "rule": "v6", "by": { "ip": "2001:db8::/64" } }));
    assert_eq!(left(&mut http, &json!({ "ip": "2001:db8::5" })), ["v6 2"]);
    check(&mut http, &json!({ "ip": "::ffff:192.0.2.7" }));
    assert_eq!(left(&mut http, &json!({ "ip": "192.0.2.7" })), ["v6 1"]);
}
