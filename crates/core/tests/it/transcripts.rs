//! Replays every transcript through the bare rule: `decide`, and a map of records for a store.

use std::collections::HashMap;
use std::path::Path;
use std::{fs, iter};

use tidegate_core::{Algorithm, Charge, Decision, Id, Limits, Op, Record, decide};
use tidegate_trace::{Event, Line};

#[test]
fn every_transcript_holds() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../testdata/transcripts");
    let mut files = 0;
    let mut wrong = Vec::new();
    for entry in fs::read_dir(&folder).expect("the transcripts are in testdata/transcripts") {
        let path = entry.unwrap().path();
        if path.extension().is_some_and(|extension| extension == "txt") {
            files += 1;
            let name = path.file_name().unwrap().to_string_lossy().into_owned();
            wrong.extend(
                replay(&fs::read_to_string(&path).unwrap())
                    .iter()
                    .map(|what| format!("{name}: {what}")),
            );
        }
    }
    assert!(files > 0, "there are no transcripts in {}", folder.display());
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

/// What differs, line by line.
pub(crate) fn replay(text: &str) -> Vec<String> {
    let lines: Vec<(u64, Line<'_>)> =
        (1..).zip(text.lines()).map(|(n, text)| (n, Line::parse(text, n).unwrap())).collect();
    let limits = lines.iter().filter_map(|(_, line)| match line {
        Line::Limit { text, .. } => Some(*text),
        _ => None,
    });
    let (mut wrong, mut compared) = (Vec::new(), 0);
    for limit in limits {
        let limits: Limits = limit.parse().unwrap();
        let mut records = HashMap::new();
        for (number, line) in &lines {
            let Line::Event(event) = line else { continue };
            let decision = answer(&limits, &mut records, event, *number);
            if let Some(expect) = &event.expect {
                compared += 1;
                wrong.extend(
                    expect
                        .compare(&decision)
                        .err()
                        .map(|what| format!("line {number}: {limit}: {what}")),
                );
            }
        }
    }
    if compared == 0 {
        wrong.push("it names no limit, or expects nothing".into());
    }
    wrong
}

fn answer<'t>(
    limits: &Limits,
    records: &mut HashMap<&'t str, Vec<Record>>,
    event: &Event<'t>,
    number: u64,
) -> Decision {
    let fresh = || iter::repeat_with(Record::default).take(limits.as_slice().len()).collect();
    let records = records.entry(event.key).or_insert_with(fresh);
    let mut charges: Vec<Charge<'_>> = limits
        .iter()
        .zip(records)
        .map(|(limit, record)| {
            let lease =
                matches!(limit.algorithm(), Algorithm::Concurrent(_)) && event.op != Op::Refund;
            Charge { id: lease.then_some(Id(number)), ..Charge::new(limit, record, event.cost) }
        })
        .collect();
    decide(event.op, &mut charges, event.at)
}

/// The recipe with sub-buckets takes several identifiers of one request together: all of them or
/// none.
#[test]
fn two_identifiers_of_one_request_are_charged_together_or_not_at_all() {
    let limits: Limits =
        "10/m sliding step 10s lenient; 100/h sliding step 5m lenient".parse().unwrap();
    let (mut user, mut ip) =
        ([Record::default(), Record::default()], [Record::default(), Record::default()]);
    let mut ask = |at_s, weight, who: &str| {
        let (with_user, with_ip) = (who.contains("user"), who.contains("ip"));
        let of =
            |on: bool, records| limits.iter().zip::<&mut [Record]>(records).filter(move |_| on);
        let mut charges: Vec<Charge<'_>> = of(with_user, &mut user[..])
            .chain(of(with_ip, &mut ip[..]))
            .map(|(limit, record)| Charge::new(limit, record, weight))
            .collect();
        let decision = decide(Op::Check, &mut charges, tidegate_core::Timestamp::from_secs(at_s));
        (decision.allowed(), decision.remaining(), decision.retry().micros().unwrap() / 1_000_000)
    };
    assert_eq!(ask(5, 6, "user and ip"), (true, 4, 0));
    assert_eq!(ask(5, 4, "ip"), (true, 0, 0));
    assert_eq!(ask(15, 1, "user and ip"), (false, 0, 45)); // the address is full until 60s …
    assert_eq!(ask(15, 4, "user"), (true, 0, 0)); // … and the user was not charged for the attempt
    assert_eq!(ask(60, 6, "user and ip"), (true, 0, 0)); // 4 of the user's are in step 10s
    assert_eq!(ask(61, 1, "user and ip"), (false, 0, 9));
}
