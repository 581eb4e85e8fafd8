//! Rules that are only tried out.

use tidegate::redis::Redis;
use tidegate_testkit::{Flavor, Server};

use crate::listeners::Listeners;

/// What is only tried out must not fail what counts.
#[test]
fn a_rule_in_shadow_mode_that_cannot_be_decided_denies_nothing() {
    let server = Server::start(Flavor::Valkey9);
    let rules = "\
rules:
  - { name: real, by: [user], limit: 3/h }
  - { name: trial, by: [user], mode: shadow, limit: 3/h }
";
    let listeners = Listeners::in_redis(rules, Redis::builder(server.url().parse().unwrap()));
    let mut http = listeners.http();
    let ask = r#"{"attributes":{"user":"7"}}"#;
    let first = http.post("/v1/check", ask);
    assert!(first.status == 200 && first.body.contains("trial"), "{first:?}");
    // Somebody else has put a list where the state of the trial was.
    let names = server.command(&["KEYS", "*trial*"]);
    let name = names.array()[0].text();
    server.command(&["DEL", name]);
    server.command(&["RPUSH", name, "x"]);
    for remaining in [1, 0] {
        let answer = http.post("/v1/check", ask);
        assert_eq!(answer.status, 200, "{answer:?}");
        assert!(answer.body.contains(&format!(r#""remaining":{remaining}"#)), "{answer:?}");
    }
    assert_eq!(http.post("/v1/check", ask).status, 429);
}
