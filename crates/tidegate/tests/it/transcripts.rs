//! Replays every transcript through the memory store, with a clock that is set to the time of each
//! line.

#![allow(clippy::unwrap_used, reason = "a test may panic")]

use std::fs;
use std::path::Path;

use tidegate::{Check, Decision, ManualClock, Memory};
use tidegate_core::{Algorithm, Id, Limits, Op};
use tidegate_trace::Line;

#[test]
fn every_transcript_holds() {
    let mut memory: Option<(Memory, ManualClock)> = None;
    holds_for(|begins, check, at| {
        if begins {
            let clock = ManualClock::new();
            memory = Some((Memory::builder().clock(clock.clone()).max_keys(10_000).build(), clock));
        }
        let (memory, clock) = memory.as_ref().unwrap();
        clock.set(at);
        memory.decide(check).unwrap()
    });
}

/// Replays all transcripts through `decide`. Its first argument is true at the start of a
/// transcript: then it must forget all state.
pub(crate) fn holds_for(mut decide: impl FnMut(bool, &Check<'_>, tidegate::Timestamp) -> Decision) {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../testdata/transcripts");
    let mut files = 0;
    let mut wrong = Vec::new();
    for entry in fs::read_dir(&folder).expect("the transcripts are in testdata/transcripts") {
        let path = entry.unwrap().path();
        if path.extension().is_some_and(|extension| extension == "txt") {
            files += 1;
            let name = path.file_name().unwrap().to_string_lossy().into_owned();
            let text = fs::read_to_string(&path).unwrap();
            wrong.extend(replay(&text, &mut decide).iter().map(|what| format!("{name}: {what}")));
        }
    }
    assert!(files > 0, "there are no transcripts in {}", folder.display());
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

/// What differs, line by line.
fn replay(
    text: &str,
    decide: &mut impl FnMut(bool, &Check<'_>, tidegate::Timestamp) -> Decision,
) -> Vec<String> {
    let lines: Vec<(u64, Line<'_>)> =
        (1..).zip(text.lines()).map(|(n, text)| (n, Line::parse(text, n).unwrap())).collect();
    let limits = lines.iter().filter_map(|(_, line)| match line {
        Line::Limit { text, .. } => Some(*text),
        _ => None,
    });
    let (mut wrong, mut compared) = (Vec::new(), 0);
    for limit in limits {
        let limits: Limits = limit.parse().unwrap();
        let leases =
            limits.iter().any(|limit| matches!(limit.algorithm(), Algorithm::Concurrent(_)));
        let mut begins = true;
        for (number, line) in &lines {
            let Line::Event(event) = line else { continue };
            let mut check = Check::of(event.op).charge(event.key, &limits, event.cost);
            if leases && event.op != Op::Refund {
                check = check.with_id(Id(*number));
            }
            let decision = decide(std::mem::take(&mut begins), &check, event.at);
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
