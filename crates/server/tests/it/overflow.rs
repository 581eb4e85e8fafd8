//! Overflow policies of rules, in a full store.

use crate::listeners::Listeners;

#[test]
fn a_rule_may_have_an_overflow_of_its_own() {
    let listeners = Listeners::in_small_memory(
        "\
rules:
  - { name: first, when: { what: first }, by: [user], limit: 3/h }
  - { name: shared, when: { what: shared }, by: [user], limit: 2/h }
  - { name: passes, when: { what: passes }, by: [user], limit: 3/h, overflow: allow_new }
  - { name: denies, when: { what: denies }, by: [user], limit: 3/h, overflow: deny_new }
",
    );
    let mut http = listeners.http();
    let mut passed = |what: &str| {
        let asks =
            (0..5).map(|user| format!(r#"{{"attributes":{{"what":"{what}","user":"{user}"}}}}"#));
        asks.map(|ask| http.post("/v1/check", &ask).status).filter(|status| *status == 200).count()
    };
    // The first user has the only place, and the other four share one budget.
    assert_eq!(passed("first"), 4);
    assert_eq!([passed("shared"), passed("passes"), passed("denies")], [2, 5, 0]);
}
