//! `tidegate simulate`
// Long because most of it is printed tables.

use std::collections::BTreeMap;
use std::fs;
use std::io::{BufRead, BufReader, Read};
use std::path::Path;
use std::process::{Command, Stdio};

use assert_cmd::cargo::CommandCargoExt;
use insta::assert_snapshot;
use serde_json::Value;

use crate::{shown, stdout, tidegate};

const KEYS: [&str; 11] = [
    "t_us",
    "key",
    "cost",
    "op",
    "limit",
    "allowed",
    "granted",
    "remaining",
    "retry_after_us",
    "reset_after_us",
    "next_after_us",
];

fn jsonl(args: &[&str], trace: &str) -> Vec<Value> {
    let args = [&["simulate", "--format", "jsonl"], args].concat();
    stdout(&args, trace).lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

#[test]
fn jsonl_has_one_object_for_each_event_and_limit_in_that_order() {
    let trace = "0 a 2\n499ms a\n0.5s a 3 take  # as much as fits\n600ms b 3\n";
    let args = [
        "simulate",
        "--limit",
        "2/s",
        "--limit",
        " 2/s window;100/h ",
        "--trace",
        "-",
        "--format",
        "jsonl",
    ];
    assert_snapshot!(shown(&args, trace), @r#"
    exit 0
    --- stdout
    {"t_us":0,"key":"a","cost":2,"op":"check","limit":"2/s","allowed":true,"granted":2,"remaining":0,"retry_after_us":0,"reset_after_us":1000000,"next_after_us":500000}
    {"t_us":0,"key":"a","cost":2,"op":"check","limit":"2/s window;100/h","allowed":true,"granted":2,"remaining":0,"retry_after_us":0,"reset_after_us":1000000,"next_after_us":1000000}
    {"t_us":499000,"key":"a","cost":1,"op":"check","limit":"2/s","allowed":false,"granted":0,"remaining":0,"retry_after_us":1000,"reset_after_us":501000,"next_after_us":1000}
    {"t_us":499000,"key":"a","cost":1,"op":"check","limit":"2/s window;100/h","allowed":false,"granted":0,"remaining":0,"retry_after_us":501000,"reset_after_us":501000,"next_after_us":501000}
    {"t_us":500000,"key":"a","cost":3,"op":"take","limit":"2/s","allowed":true,"granted":1,"remaining":0,"retry_after_us":0,"reset_after_us":1000000,"next_after_us":500000}
    {"t_us":500000,"key":"a","cost":3,"op":"take","limit":"2/s window;100/h","allowed":false,"granted":0,"remaining":0,"retry_after_us":500000,"reset_after_us":500000,"next_after_us":500000}
    {"t_us":600000,"key":"b","cost":3,"op":"check","limit":"2/s","allowed":false,"granted":0,"remaining":2,"retry_after_us":null,"reset_after_us":0,"next_after_us":0}
    {"t_us":600000,"key":"b","cost":3,"op":"check","limit":"2/s window;100/h","allowed":false,"granted":0,"remaining":2,"retry_after_us":null,"reset_after_us":0,"next_after_us":0}
    "#);
}

#[test]
fn jsonl_keys_are_always_the_same_and_in_order() {
    for line in
        stdout(&["simulate", "--format", "jsonl", "--limit", "5/s", "--for", "2s"], "").lines()
    {
        let mut rest = line;
        for key in KEYS {
            let (_, after) = rest
                .split_once(&format!("\"{key}\":"))
                .unwrap_or_else(|| panic!("{key} in {line}"));
            rest = after;
        }
        let object: BTreeMap<String, Value> = serde_json::from_str(line).unwrap();
        assert_eq!(object.len(), KEYS.len(), "{line}");
    }
}

#[test]
fn every_operation_can_be_in_a_trace() {
    let trace = "0 a 4 CHECK\n0 a 1 peek\n0 a 4 Take\n0 a 3 debit\n0 a 2 refund\n0 a 1 reset\n";
    let rows: Vec<String> = jsonl(&["--limit", "5/s", "--trace", "-"], trace)
        .iter()
        .map(|row| {
            format!(
                "{} {} granted {} remaining {}",
                row["op"], row["allowed"], row["granted"], row["remaining"]
            )
        })
        .collect();
    assert_snapshot!(rows.join("\n"), @r#"
    "check" true granted 4 remaining 1
    "peek" true granted 0 remaining 1
    "take" true granted 1 remaining 0
    "debit" true granted 3 remaining 0
    "refund" true granted 2 remaining 0
    "reset" true granted 0 remaining 5
    "#);
}

#[test]
fn an_impossible_cost_is_an_answer() {
    let rows = jsonl(&["--limit", "2/s", "--trace", "-"], "0 a 3\n0 a 18446744073709551615\n");
    for row in &rows {
        assert_eq!((&row["allowed"], &row["retry_after_us"]), (&false.into(), &Value::Null));
    }
    assert_eq!(rows.len(), 2);
}

#[test]
fn bad_syntax_is_an_error_with_the_line_after_valid_output() {
    let args = ["simulate", "--limit", "2/s", "--trace", "-", "--format", "jsonl"];
    assert_snapshot!(shown(&args, "0 a\n# fine\n1s a x\n2s a\n"), @r#"
    exit 2
    --- stdout
    {"t_us":0,"key":"a","cost":1,"op":"check","limit":"2/s","allowed":true,"granted":1,"remaining":1,"retry_after_us":0,"reset_after_us":500000,"next_after_us":500000}
    --- stderr
    error: standard input: line 3, column 6: cost: expected a whole number, found "x"
    "#);
    let args = ["simulate", "--limit", "2/s", "--trace", "-"];
    assert_snapshot!(shown(&args, "0 a\n5 a\n"), @r#"
    exit 2
    --- stderr
    error: standard input: line 2, column 1: time: expected a unit after 5 (us, ms, s, m, h or d), found "5"
    "#);
}

#[test]
fn bytes_that_are_not_text_and_endless_lines_are_errors_with_the_line() {
    let run = |bytes: Vec<u8>| {
        let output = tidegate(&["simulate", "--limit", "2/s", "--trace", "-"])
            .write_stdin(bytes)
            .output()
            .unwrap();
        assert_eq!(output.status.code(), Some(2));
        String::from_utf8(output.stderr).unwrap()
    };
    assert!(run(b"0 a\n0 \xff\n".to_vec()).contains("line 2: expected UTF-8"));
    assert!(run(vec![b'0'; 1 << 20]).contains("line 1: longer than 65536 bytes"));
    assert!(
        run(format!("0 {}\n", "k".repeat(1025)).into()).contains("line 1: a key of 1025 bytes")
    );
}

#[test]
fn carriage_returns_byte_order_marks_and_a_missing_last_newline_do_not_matter() {
    let rows = jsonl(&["--limit", "2/s", "--trace", "-"], "\u{feff}0 a\r\n\r\n1s a 2\r\n2s b");
    let seen: Vec<_> = rows
        .iter()
        .map(|row| (row["t_us"].as_u64().unwrap(), row["key"].as_str().unwrap()))
        .collect();
    assert_eq!(seen, [(0, "a"), (1_000_000, "a"), (2_000_000, "b")]);
}

#[test]
fn time_that_goes_back_is_fed_as_it_is() {
    let rows = jsonl(&["--limit", "2/s", "--trace", "-"], "10s a 2\n5s a\n5s b\n10.5s a\n");
    let seen: Vec<_> =
        rows.iter().map(|row| (row["t_us"].as_u64(), row["allowed"].as_bool())).collect();
    let expected = [(10_000_000, true), (5_000_000, false), (5_000_000, true), (10_500_000, true)];
    assert_eq!(seen, expected.map(|(at, allowed)| (Some(at), Some(allowed))));
    assert_eq!(rows[1]["retry_after_us"], 500_000);
}

#[test]
fn a_look_does_not_move_the_time_of_a_key() {
    // Peeked at when it is idle, then asked earlier: what was taken at 0 still counts.
    let rows = jsonl(&["--limit", "2/s", "--trace", "-"], "0 a 2\n1h a 1 peek\n0.25s a\n");
    assert_eq!((&rows[2]["allowed"], &rows[2]["retry_after_us"]), (&false.into(), &250_000.into()));
}

#[test]
fn leases_in_a_trace_live_for_their_ttl() {
    let rows = jsonl(
        &["--limit", "2 concurrent ttl 10s", "--trace", "-"],
        "0 a\n3s a\n5s a\n10s a\n10s a 1 refund\n10s a\n",
    );
    let allowed: Vec<_> = rows.iter().map(|row| row["allowed"].as_bool().unwrap()).collect();
    assert_eq!(allowed, [true, true, false, true, true, true]);
}

#[test]
fn a_limit_written_twice_is_charged_twice() {
    let rows = jsonl(&["--limit", "10/s; 10/s", "--trace", "-"], "0 a 3\n");
    assert_eq!(rows[0]["remaining"], 4);
}

#[test]
fn the_table_compares_limits_side_by_side() {
    let args = [
        "simulate",
        "--limit",
        "10/s",
        "--limit",
        "10/s window",
        "--rate",
        "20/s",
        "--pattern",
        "burst",
        "--for",
        "10s",
    ];
    assert_snapshot!(shown(&args, ""), @"
    exit 0
    --- stdout
    20/s burst for 10s

    limit         offered   allowed   denied   share   longest denial   first denial   most in one period
    10/s              200        50      150   25.0%      30 in a row       at 975ms   10 in 1s
    10/s window       200       100      100   50.0%      10 in a row       at 975ms   20 in 1s

    10/s
      allowed |    ▄         ▄         ▄         ▄         ▄     |
      denied  |    ▄█        ▄█        ▄█        ▄█        ▄█    |

    10/s window
      allowed |    ▄▄        ▄▄        ▄▄        ▄▄        ▄▄    |
      denied  |    ▄▄        ▄▄        ▄▄        ▄▄        ▄▄    |
               0                                              10s
               one column is 200 ms, a full one 20 units
    ");
}

#[test]
fn the_table_tells_units_from_requests_and_counts_other_operations() {
    let trace = "0 a 5\n1s a 700\n1s a 900 take\n2s a 1 peek\n3s a 5 refund\n";
    assert_snapshot!(shown(&["simulate", "--limit", "600/s; 1000/m log", "--trace", "-"], trace), @"
    exit 0
    --- stdout
    standard input

    limit               offered   allowed   denied   share   units asked   units granted   longest denial   first denial   most in one period
    600/s; 1000/m log         3         2        1   66.6%          1605             605       1 in a row          at 1s   600 in 1s; 605 in 1m

    Besides, 2 lines asked for nothing: looks, refunds and resets.

    600/s; 1000/m log
      allowed |▁                                                 ▃|
      denied  |                                                  ▅|
               0                                             1.02s
               one column is 20 ms, a full one 1 600 units
    ");
}

#[test]
fn an_empty_trace_has_an_empty_table_and_picture() {
    assert_snapshot!(shown(&["simulate", "--limit", "10/s", "--trace", "-"], "# nothing\n"), @"
    exit 0
    --- stdout
    standard input

    limit   offered   allowed   denied   share   longest denial   first denial   most in one period
    10/s          0         0        0       -                -              -   0 in 1s
    --- stderr
    note: the trace has no requests
    ");
    assert!(
        stdout(&["simulate", "--limit", "10/s", "--trace", "-", "--format", "svg"], "")
            .ends_with("</svg>\n")
    );
}

#[test]
fn without_a_limit_the_trace_says_it() {
    let trace = "# limit: 2/s\n# limit: 2/s window\n0 a 2 -> allow\n0 a -> deny\n";
    let limits: Vec<String> = jsonl(&["--trace", "-"], trace)
        .iter()
        .map(|row| row["limit"].as_str().unwrap().to_owned())
        .collect();
    assert_eq!(limits, ["2/s", "2/s window", "2/s", "2/s window"]);
    let given: Vec<Value> = jsonl(&["--trace", "-", "--limit", "9/s"], trace);
    assert!(given.iter().all(|row| row["limit"] == "9/s"));
}

#[test]
fn limits_that_are_missing_wrong_or_late_are_errors() {
    assert_snapshot!(shown(&["simulate", "--trace", "-"], "0 a\n"), @"
    exit 2
    --- stderr
    error: no limit: expected --limit, as in --limit '10/s; 120/m', or a trace that begins with `# limit: 10/s`
    ");
    assert_snapshot!(shown(&["simulate", "--trace", "-"], "# hello\n#  limit: 10/x\n0 a\n"), @r#"
    exit 2
    --- stderr
    error: standard input: line 2: the limit that begins at column 11: column 4: expected a period such as s, 20s or 2 days, in us, ms, s, m, h, d or w, found "x"

      10/x
         ^
    "#);
    assert_snapshot!(shown(&["simulate", "--trace", "-"], "# limit: 10/s\n0 a\n# limit: 11/s\n"), @"
    exit 2
    --- stderr
    error: standard input: line 3: expected every `# limit:` line before the first request
    ");
    assert_snapshot!(shown(&["simulate"], ""), @"
    exit 2
    --- stderr
    error: no limit: expected --limit, as in --limit '10/s; 120/m', or a trace that begins with `# limit: 10/s`
    ");
}

#[test]
fn verify_is_silent_about_what_holds_and_says_what_differs() {
    let good = "# limit: 2/s\n0 a 2 -> allow remaining 0 reset 1s\n0 a -> deny retry 500ms\n";
    assert_snapshot!(shown(&["simulate", "--trace", "-", "--verify"], good), @"
    exit 0
    --- stdout
    2 answers by 1 limit: all as expected
    ");
    let bad = "# limit: 2/s\n# limit: 2/s log\n0 a 2 -> allow remaining 1\n0 a -> deny retry 500ms\n1s a -> deny retry never\n";
    assert_snapshot!(shown(&["simulate", "--trace", "-", "--verify"], bad), @"
    exit 1
    --- stderr
    line 3: 2/s: expected remaining 1 but got 0
    line 3: 2/s log: expected remaining 1 but got 0
    line 4: 2/s log: expected retry 500ms but got 1s
    line 5: 2/s: expected deny but got allow, expected retry never but got 0
    line 5: 2/s log: expected deny but got allow, expected retry never but got 0
    5 of 6 answers by 2 limits are not as expected
    ");
    assert_snapshot!(shown(&["simulate", "--trace", "-", "--verify", "--limit", "2/s"], "0 a\n"), @"
    exit 2
    --- stderr
    error: nothing to verify: no line says what to expect, as in `0 user:7 -> allow remaining 9`
    ");
}

#[test]
fn verify_may_come_with_a_result() {
    let good = "# limit: 2/s\n0 a -> allow\n";
    assert_snapshot!(shown(&["simulate", "--trace", "-", "--verify", "--format", "jsonl"], good), @r#"
    exit 0
    --- stdout
    {"t_us":0,"key":"a","cost":1,"op":"check","limit":"2/s","allowed":true,"granted":1,"remaining":1,"retry_after_us":0,"reset_after_us":500000,"next_after_us":500000}
    --- stderr
    1 answer by 1 limit: all as expected
    "#);
}

#[test]
fn every_transcript_holds() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../testdata/transcripts");
    let mut files = 0;
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.extension().is_some_and(|extension| extension == "txt") {
            files += 1;
            let text = stdout(&["simulate", "--verify", "--trace", path.to_str().unwrap()], "");
            assert!(text.ends_with("all as expected\n"), "{}: {text}", path.display());
        }
    }
    assert!(files > 0);
}

#[test]
fn generated_traces_have_the_rate_and_are_the_same_for_a_seed() {
    let trace = |args: &[&str]| jsonl(&[&["--limit", "1/s"], args].concat(), "");
    let times =
        |rows: &[Value]| rows.iter().map(|row| row["t_us"].as_u64().unwrap()).collect::<Vec<_>>();

    let constant = times(&trace(&["--rate", "3/s", "--for", "1s"]));
    assert_eq!(constant, [0, 333_333, 666_666]);

    let burst = times(&trace(&["--rate", "20/s", "--pattern", "burst", "--for", "4s"]));
    assert_eq!((burst.len(), burst[0], burst[39]), (80, 950_000, 1_047_500));
    assert_eq!(burst[40], 2_950_000);

    let poisson = |seed| {
        times(&trace(&["--rate", "1000/s", "--pattern", "poisson", "--for", "10s", "--seed", seed]))
    };
    let one = poisson("1");
    assert_eq!(one, poisson("1"));
    assert_ne!(one, poisson("2"));
    // 10 000 are expected, give or take a hundred; the first ones are the same on every machine.
    assert!((9_600..10_400).contains(&one.len()), "{}", one.len());
    assert_snapshot!(format!("{:?}", &one[..5]), @"[566, 2443, 5509, 5632, 6148]");
}

#[test]
fn an_attack_comes_from_one_key_in_the_middle_third() {
    let args = [
        "--limit",
        "1/s",
        "--rate",
        "10/s",
        "--pattern",
        "attack",
        "--for",
        "9s",
        "--keys",
        "2",
        "--cost",
        "3",
    ];
    let rows = jsonl(&args, "");
    let (attack, honest): (Vec<&Value>, Vec<&Value>) =
        rows.iter().partition(|row| row["key"] == "attacker");
    assert_eq!((attack.len(), honest.len()), (300, 90));
    assert!(
        attack.iter().all(|row| (3_000_000..6_000_000).contains(&row["t_us"].as_u64().unwrap()))
    );
    assert!(honest.iter().all(|row| row["key"] == "user-1" || row["key"] == "user-2"));
    assert!(rows.iter().all(|row| row["cost"] == 3));
    assert!(rows.is_sorted_by_key(|row| row["t_us"].as_u64()));
}

#[test]
fn the_picture_is_well_formed_and_has_a_panel_for_each_limit() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("a.svg");
    let args = [
        "simulate",
        "--limit",
        "10/s",
        "--limit",
        "10/s window",
        "--pattern",
        "burst",
        "--format",
        "svg",
        "--out",
    ];
    let printed = stdout(&[&args[..], &[path.to_str().unwrap()]].concat(), "");
    assert_eq!(printed, "", "the result is in the file");
    let svg = fs::read_to_string(path).unwrap();
    assert!(svg.starts_with("<svg xmlns=") && svg.ends_with("</svg>\n"));
    assert_eq!(svg.matches(r#"class="limit""#).count(), 2);
    assert!(svg.contains(">20 within 1s, limit 10<"), "the fixed window bursts at its edge");
    assert!(svg.contains(">10 within 1s, limit 10<"), "the bucket does not");
    assert!(svg.contains("prefers-color-scheme:dark"));
    // Every tag is closed: what is opened and not closed in place is closed later.
    let open = svg.matches('<').count() - svg.matches("</").count() - svg.matches("/>").count();
    assert_eq!(open, svg.matches("</").count());
    assert!(!svg.contains("NaN") && !svg.contains("inf"));
}

#[test]
fn what_cannot_be_opened_is_an_error_that_names_it() {
    let folder = tempfile::tempdir().unwrap();
    let missing = folder.path().join("missing.txt");
    let run = |args: &[&str]| {
        let output = tidegate(&[&["simulate", "--limit", "1/s"], args].concat()).output().unwrap();
        assert_eq!(output.status.code(), Some(2));
        String::from_utf8(output.stderr).unwrap()
    };
    assert!(run(&["--trace", missing.to_str().unwrap()]).contains("missing.txt"));
    assert!(run(&["--trace", folder.path().to_str().unwrap()]).contains("it is a directory"));
    assert!(run(&["--out", missing.join("x").to_str().unwrap()]).contains("could not create"));
}

#[test]
fn a_bad_trace_leaves_the_old_picture_alone() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("old.svg");
    fs::write(&path, "old").unwrap();
    let args = [
        "simulate",
        "--limit",
        "1/s",
        "--trace",
        "-",
        "--format",
        "svg",
        "--out",
        path.to_str().unwrap(),
    ];
    assert_eq!(tidegate(&args).write_stdin("x\n").output().unwrap().status.code(), Some(2));
    assert_eq!(fs::read_to_string(&path).unwrap(), "old");
}

#[test]
fn the_result_never_overwrites_the_trace() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("trace.txt");
    fs::write(&path, "0 a\n").unwrap();
    let path = path.to_str().unwrap();
    let output =
        tidegate(&["simulate", "--limit", "1/s", "--trace", path, "--out", path]).output().unwrap();
    assert_eq!(output.status.code(), Some(2));
    assert_eq!(fs::read_to_string(path).unwrap(), "0 a\n");
}

#[test]
fn a_reader_that_has_seen_enough_is_no_error() {
    let mut child = Command::cargo_bin("tidegate").unwrap();
    child.args([
        "simulate",
        "--limit",
        "1/s",
        "--rate",
        "1000000/s",
        "--for",
        "1d",
        "--format",
        "jsonl",
    ]);
    let mut child = child.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let mut first = String::new();
    BufReader::new(child.stdout.take().unwrap()).read_line(&mut first).unwrap();
    assert!(first.starts_with("{\"t_us\":0,"));
    let mut stderr = String::new();
    child.stderr.take().unwrap().read_to_string(&mut stderr).unwrap();
    assert_eq!((child.wait().unwrap().code(), stderr.as_str()), (Some(0), ""));
}
