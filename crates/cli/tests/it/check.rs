//! `tidegate check`

use insta::assert_snapshot;

use crate::{shown, stdout, tidegate};

#[test]
fn an_allowed_request_exits_with_0_and_says_which_limit_binds() {
    assert_snapshot!(shown(&["check", "user:7", "--limit", "10/s; 120/m"], ""), @"
    exit 0
    --- stdout
    allowed: user:7 took 1 unit
      10/s   9 of 10 left, full again in 100 ms  <- this one binds
      120/m  119 of 120 left, full again in 500 ms
    ");
}

#[test]
fn a_denied_request_exits_with_1_and_says_why() {
    assert_snapshot!(shown(&["check", "user:7", "--limit", "10/s; 120/m", "--cost", "11"], ""), @"
    exit 1
    --- stdout
    denied: user:7 requested 11 units; nothing was taken
      10/s   10 of 10 left, can never pass: it costs more than the limit holds  <- this one binds
      120/m  120 of 120 left
    ");
}

#[test]
fn every_operation_is_reported_in_a_sentence() {
    let told: String = ["check", "PEEK", "take", "debit", "refund", "reset"]
        .map(|op| {
            shown(
                &["check", "user:7", "--limit", "30/min burst 15", "--cost", "20", "--op", op],
                "",
            )
        })
        .concat();
    assert_snapshot!(told, @"
    exit 1
    --- stdout
    denied: user:7 requested 20 units; nothing was taken
      30/m burst 15  15 of 15 left, can never pass: it costs more than the limit holds
    exit 1
    --- stdout
    denied: user:7 requested 20 units; nothing was taken
      30/m burst 15  15 of 15 left, can never pass: it costs more than the limit holds
    exit 0
    --- stdout
    allowed: user:7 requested 20 units and took 15 units
      30/m burst 15  0 of 15 left, full again in 30 s
    exit 0
    --- stdout
    allowed: user:7 took 20 units
      30/m burst 15  0 of 15 left, full again in 40 s
    exit 0
    --- stdout
    allowed: 0 units of 20 units were returned to user:7
      30/m burst 15  15 of 15 left
    exit 0
    --- stdout
    allowed: the state of user:7 was deleted
      30/m burst 15  15 of 15 left
    ");
}

#[test]
fn a_bad_limit_is_shown_with_a_caret() {
    assert_snapshot!(shown(&["check", "user:7", "--limit", "10/s; 5/x"], ""), @r#"
    exit 2
    --- stderr
    error: invalid value '10/s; 5/x' for '--limit <LIMIT>': column 9: expected a period such as s, 20s or 2 days, in us, ms, s, m, h, d or w, found "x"

      10/s; 5/x
              ^

    For more information, try '--help'.
    "#);
}

#[test]
fn a_key_that_no_store_would_take_is_an_error() {
    assert_snapshot!(shown(&["check", &"k".repeat(1025), "--limit", "10/s"], ""), @"
    exit 2
    --- stderr
    error: a key of 1025 bytes: expected at most 1024
    ");
}

#[test]
fn json_has_the_keys_of_jsonl_and_every_charge() {
    let text =
        stdout(&["check", "a \"key\"", "--limit", " 10/s; 120/m ", "--cost", "3", "--json"], "");
    let json: serde_json::Value = serde_json::from_str(&text).unwrap();
    assert!(json["t_us"].as_u64().unwrap() > 1_700_000_000_000_000, "the clock is the machine's");
    let text = text.replacen(&json["t_us"].to_string(), "T", 1);
    assert_snapshot!(text, @r#"{"t_us":T,"key":"a \"key\"","cost":3,"op":"check","limit":"10/s; 120/m","allowed":true,"granted":3,"remaining":7,"retry_after_us":0,"reset_after_us":300000,"next_after_us":100000,"charges":[{"limit":"10/s","amount":10,"cost":3,"binding":true,"allowed":true,"granted":3,"remaining":7,"retry_after_us":0,"reset_after_us":300000,"next_after_us":100000},{"limit":"120/m","amount":120,"cost":3,"binding":false,"allowed":true,"granted":3,"remaining":117,"retry_after_us":0,"reset_after_us":1500000,"next_after_us":500000}]}"#);
}

#[test]
fn json_of_what_can_never_pass_has_null_and_exits_with_1() {
    let output =
        tidegate(&["check", "k", "--limit", "1/s", "--cost", "2", "--json"]).output().unwrap();
    let json: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(output.status.code(), Some(1));
    assert_eq!(
        (&json["allowed"], &json["retry_after_us"]),
        (&false.into(), &serde_json::Value::Null)
    );
}

#[test]
fn the_limit_may_come_from_the_environment() {
    let output = tidegate(&["check", "k", "--json"]).env("TIDEGATE_LIMIT", "7/s").output().unwrap();
    let json: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!((&json["limit"], &json["remaining"]), (&"7/s".into(), &6.into()));
}

#[test]
fn an_empty_key_and_a_negative_cost_are_named() {
    for (args, expected) in [
        (["check", "", "--limit", "10/s", "--cost", "1"], "a value is required for '<KEY>'"),
        (["check", "k", "--limit", "10/s", "--cost", "-1"], "invalid value '-1' for '--cost <N>'"),
    ] {
        let output = crate::tidegate(&args).output().unwrap();
        let error = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(2));
        assert!(error.contains(expected), "{error}");
    }
}
