//! `/openapi.json` is true: a real validator accepts it, every path is in it, and every example is
//! answered as it says.

use std::collections::BTreeSet;
use std::io::Write;
use std::process::Stdio;

use serde_json::Value;
use tidegate_server::{BUILT_IN, http};
use tidegate_testkit::openapi_validator;

use crate::listeners::{Answer, Listeners};

fn ask(method: &str, path: &str, body: &str) -> Answer {
    let listeners = Listeners::in_memory(BUILT_IN);
    let mut client = listeners.http();
    let length = body.len();
    client.send(&format!(
        "{} {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {length}\r\n\r\n{body}",
        method.to_ascii_uppercase()
    ));
    client.receive().expect("an answer")
}

fn description() -> Value {
    serde_json::from_str(&ask("get", "/openapi.json", "").body).unwrap()
}

#[test]
fn a_validator_accepts_it_and_every_example_fits_its_schema() {
    let script = r##"
import json, sys
from openapi_spec_validator import validate
from jsonschema import Draft202012Validator
page = json.load(sys.stdin)
validate(page)
examples = 0
def look(node):
    global examples
    if isinstance(node, dict):
        if "schema" in node and "examples" in node:
            whole = {**node["schema"], "components": page["components"]}
            for example in node["examples"].values():
                Draft202012Validator(whole).validate(example["value"])
                examples += 1
        for value in node.values():
            look(value)
    elif isinstance(node, list):
        for value in node:
            look(value)
look(page["paths"])
print(examples)
"##;
    let mut python = openapi_validator()
        .args(["-c", script])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    write!(python.stdin.take().unwrap(), "{}", description()).unwrap();
    let output = python.wait_with_output().unwrap();
    let examples: u32 =
        String::from_utf8(output.stdout).unwrap().trim().parse().expect("the validator accepts it");
    assert!(output.status.success() && examples > 30, "{examples} examples");
}

#[test]
fn every_path_is_described_and_no_other() {
    let described: BTreeSet<(String, String)> = description()["paths"]
        .as_object()
        .unwrap()
        .iter()
        .flat_map(|(path, item)| {
            item.as_object().unwrap().keys().map(move |method| (method.clone(), path.clone()))
        })
        .collect();
    let answered: BTreeSet<(String, String)> =
        http::paths().into_iter().map(|(method, path)| (method.to_owned(), path)).collect();
    assert_eq!(described, answered);
}

/// Where an answer of this status has examples: of any kind.
fn examples(response: &Value) -> Vec<(String, Value)> {
    let kinds = response["content"].as_object().into_iter().flatten();
    let named = kinds.flat_map(|(_, kind)| kind["examples"].as_object().into_iter().flatten());
    named.map(|(name, example)| (name.clone(), example["value"].clone())).collect()
}

#[test]
fn every_example_is_answered_as_it_says() {
    let page = description();
    let mut asked = 0;
    for (path, item) in page["paths"].as_object().unwrap() {
        for (method, operation) in item.as_object().unwrap() {
            let requests = examples(&operation["requestBody"]);
            for (status, response) in operation["responses"].as_object().unwrap() {
                for (name, expected) in examples(response) {
                    let body = requests
                        .iter()
                        .find(|(own, _)| *own == name)
                        .map(|(_, body)| body.to_string());
                    assert!(body.is_some() || method == "get", "{path}: nobody asks {name:?}");
                    let answer = ask(method, path, &body.unwrap_or_default());
                    assert_eq!(
                        answer.status.to_string(),
                        *status,
                        "{path} {name}: {}",
                        answer.body
                    );
                    let found = serde_json::from_str(&answer.body)
                        .unwrap_or(Value::from(answer.body.as_str()));
                    assert_eq!(found, expected, "{path} {name}");
                    asked += 1;
                }
            }
            for (name, _) in requests {
                let told = operation["responses"].as_object().unwrap().values();
                assert!(
                    told.flat_map(examples).any(|(own, _)| own == name),
                    "{path}: {name:?} has no answer"
                );
            }
        }
    }
    assert!(asked >= 20, "{asked} examples");
}
