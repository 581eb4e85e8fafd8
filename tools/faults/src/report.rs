//! What is printed.

use serde_json::{Map, Value, json};

use crate::judge::{Judged, RowOutcome, Verdict};
use crate::rows::{Kind, ROWS};

#[allow(clippy::print_stdout, reason = "it is a command for people")]
pub(crate) fn say(text: &str) {
    print!("{text}");
}

pub(crate) fn list() {
    say(
        "| Row | Fault | How it is injected | What must hold | How |\n| --- | --- | --- | --- | --- |\n",
    );
    for row in ROWS {
        let how = match &row.kind {
            Kind::Real(_) => "real processes".to_owned(),
            Kind::Net(_) => "real processes in a network of their own".to_owned(),
            Kind::Tests(tests) => {
                format!("tests: {}", tests.iter().map(|test| test.1).collect::<Vec<_>>().join(", "))
            }
        };
        let quick = if row.quick { " (quick)" } else { "" };
        say(&format!(
            "| {} | {} | {} | {} | {how}{quick} |\n",
            row.name, row.fault, row.inject, row.holds
        ));
    }
}

pub(crate) fn outcome(outcome: &RowOutcome, json: bool) {
    if json {
        return say(&format!("{}\n", to_json(outcome)));
    }
    say(&format!(
        "{:<4} {:<9} {} ({:.1} s)\n",
        outcome.row,
        outcome.verdict.name(),
        outcome.line,
        outcome.seconds
    ));
    for problem in &outcome.problems {
        say(&format!("               {problem}\n"));
    }
}

fn to_json(outcome: &RowOutcome) -> Value {
    let figures: Map<String, Value> =
        outcome.figures.iter().map(|(name, value)| (name.clone(), json!(value))).collect();
    json!({
        "row": outcome.row,
        "verdict": outcome.verdict.name(),
        "line": outcome.line,
        "figures": figures,
        "problems": outcome.problems,
        "seconds": outcome.seconds,
    })
}

/// What another process found out about a row.
pub(crate) fn from_json(text: &str) -> Option<(Judged, bool)> {
    let value: Value = serde_json::from_str(text.lines().last()?).ok()?;
    let figures = value["figures"]
        .as_object()?
        .iter()
        .filter_map(|(name, number)| Some((name.clone(), number.as_f64()?)));
    let problems =
        value["problems"].as_array()?.iter().filter_map(|text| text.as_str().map(str::to_owned));
    let judged = Judged {
        line: value["line"].as_str()?.to_owned(),
        figures: figures.collect(),
        problems: problems.collect(),
    };
    Some((judged, value["verdict"] == Verdict::Ok.name()))
}
