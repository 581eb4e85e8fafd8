//! The response to a check reports attributes that no rule uses, in every protocol: a misspelt name
//! is never silently a request without a limit.

use crate::listeners::Listeners;

const RULES: &str = "\
rules:
  - { name: per-user, by: [user], limit: 2/h }
  - { name: everyone, limit: 9/h }
";

#[test]
fn the_response_reports_that_no_attribute_is_known() {
    let listeners = Listeners::in_memory(RULES);
    let (mut http, mut resp) = (listeners.http(), listeners.resp());
    let warning = r#""warning":"no rule looks at the attribute \"usr\": did you mean \"user\"?""#;
    let misspelt = http.post("/v1/check", r#"{"attributes":{"usr":"a"}}"#);
    assert!(
        misspelt.status == 200 && misspelt.body.ends_with(&format!("{warning}}}")),
        "{misspelt:?}"
    );
    let batch = http.post(
        "/v1/check",
        r#"{"checks":[{"attributes":{"usr":"a"}},{"attributes":{"user":"a"}}]}"#,
    );
    assert_eq!(batch.body.matches("\"warning\":").count(), 1, "{batch:?}");
    // One that is known is enough: others may be for rules to come.
    let right = http.post("/v1/check", r#"{"attributes":{"user":"b","colour":"red"}}"#);
    assert!(right.status == 200 && !right.body.contains("warning"), "{right:?}");
    // A denial has it, too.
    let denied = http.post("/v1/check", r#"{"attributes":{"usr":"a"},"cost":9}"#);
    assert!(denied.status == 429 && denied.body.contains(warning), "{denied:?}");

    let answer = resp.command(&["TG.RULES", "usr", "a", "COST", "0", "AS", "MAP"]).unwrap();
    let words: Vec<String> = answer.array().iter().map(|word| format!("{word:?}")).collect();
    assert!(words.join(" ").contains("did you mean"), "{words:?}");
    let answer = resp.command(&["TG.RULES", "user", "c", "COST", "0", "AS", "MAP"]).unwrap();
    assert!(!format!("{answer:?}").contains("warning"), "{answer:?}");
}

#[test]
fn without_rules_the_response_reports_that_nothing_is_limited() {
    let listeners = Listeners::in_memory("rules: []\n");
    let answer = listeners.http().post("/v1/check", r#"{"attributes":{"user":"a"}}"#);
    let expected = r#"{"cost":1,"op":"check","allowed":true,"charges":[],"warning":"there are no rules, so nothing is limited"}"#;
    assert_eq!((answer.status, answer.body.as_str()), (200, expected));
}

#[test]
fn envoy_and_explanations_report_it_too() {
    let listeners = Listeners::in_memory(RULES);
    let mut http = listeners.http();
    let asked = |key: &str| {
        format!(
            r#"{{"domain":"edge","descriptors":[{{"entries":[{{"key":"{key}","value":"a"}}]}}]}}"#
        )
    };
    let misspelt = http.post("/json", &asked("usr"));
    let warning = r#"no rule looks at the attribute \"usr\": did you mean \"user\"?"#;
    assert!(
        misspelt.body.contains(&format!(r#""dynamicMetadata":{{"warning":"{warning}"}}"#)),
        "{misspelt:?}"
    );
    assert!(!http.post("/json", &asked("user")).body.contains("warning"));
    let explained = http.post("/v1/explain", r#"{"attributes":{"usr":"a"}}"#);
    assert!(explained.status == 200 && explained.body.contains(warning), "{explained:?}");
    assert!(!http.post("/v1/explain", r#"{"attributes":{"user":"a"}}"#).body.contains("warning"));
}

/// Of two values, one could be limited and the other be meant.
#[test]
fn an_attribute_is_there_once() {
    let listeners = Listeners::in_memory(RULES);
    let (mut http, mut resp) = (listeners.http(), listeners.resp());
    for (path, body, place) in [
        ("check", r#"{"attributes":{"user":"a","user":"b"}}"#, "attributes: \\\"user\\\""),
        ("check", r#"{"attributes":{"user":"a","x":"1","user":"a"}}"#, "\\\"user\\\""),
        (
            "check",
            r#"{"checks":[{"attributes":{"user":"a"}},{"attributes":{"u":"a","u":"b"}}]}"#,
            "\\\"u\\\"",
        ),
        ("reset", r#"{"rule":"per-user","by":{"user":"a","user":"b"}}"#, "\\\"user\\\""),
        ("reset", r#"{"attributes":{"user":"a","\u0075ser":"b"}}"#, "\\\"user\\\""),
        ("explain", r#"{"attributes":{"user":"a","user":"b"}}"#, "\\\"user\\\""),
    ] {
        let answer = http.post(&format!("/v1/{path}"), body);
        let expected = format!("{place} is there twice: expected each attribute once");
        assert!(answer.status == 400 && answer.body.contains(&expected), "{body}: {answer:?}");
    }
    for body in
        [r#"{"key":"a","key":"b","limit":"1/s"}"#, r#"{"attributes":{},"attributes":{"user":"a"}}"#]
    {
        let answer = http.post("/v1/check", body);
        assert!(
            answer.status == 400 && answer.body.contains("is there twice"),
            "{body}: {answer:?}"
        );
    }
    let entry = r#"{"entries":[{"key":"a","key":"b","value":"c"}]}"#;
    let answer = http.post("/json", &format!(r#"{{"domain":"d","descriptors":[{entry}]}}"#));
    assert!(answer.status == 400 && answer.body.contains("duplicate field `key`"), "{answer:?}");
    for command in [
        &["TG.RULES", "user", "a", "user", "b"][..],
        &["TG.RULES", "user", "a", "user", "b", "COST", "2"],
        &["TG.RESETRULE", "per-user", "user", "a", "user", "b"],
        &["TG.RESETRULE", "*", "user", "a", "user", "b"],
        &["TG.RESETRULES", "user", "a", "user", "b"],
    ] {
        let answer = format!("{:?}", resp.command(command));
        assert!(
            answer.contains("ERR attribute 'user' is there twice: expected each attribute once"),
            "{answer}"
        );
    }
    let answer = format!("{:?}", resp.command(&["TG.CHECK", "k", "9/s", "COST", "1", "COST", "9"]));
    assert!(answer.contains("ERR COST is there twice: expected each option once"), "{answer}");
    let answer = resp.command(&["TG.PEEK", "k", "9/s"]).unwrap();
    assert!(format!("{answer:?}").contains('9'), "nothing was taken: {answer:?}");
}
