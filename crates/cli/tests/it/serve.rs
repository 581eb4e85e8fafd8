//! `tidegate serve`, `validate` and `explain`, as they are run.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::process::{Command, Stdio};

use crate::tidegate;

#[test]
fn serve_says_where_it_listens_answers_and_stops_when_told() {
    let mut server = Command::new(env!("CARGO_BIN_EXE_tidegate"))
        .args(["serve", "--http", "127.0.0.1:0", "--resp", "127.0.0.1:0"])
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(server.stdout.take().unwrap()).lines().map_while(Result::ok);
    let address = |line: String| line.split_whitespace().nth(1).unwrap().to_string();
    let (http, resp) = (address(lines.next().unwrap()), address(lines.next().unwrap()));
    assert_eq!(lines.next().as_deref(), Some("ready"));
    let ask = |address: &str, text: &str| {
        let mut stream = TcpStream::connect(address).unwrap();
        stream.write_all(text.as_bytes()).unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        answer
    };
    let body = r#"{"attributes":{"ip":"192.0.2.7"}}"#;
    let request = format!(
        "POST /v1/check HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {}\r\n\r\n{body}",
        body.len()
    );
    let answer = ask(&http, &request);
    assert!(answer.starts_with("HTTP/1.1 200") && answer.contains(r#""rule":"per-ip""#), "{answer}");
    assert_eq!(ask(&resp, "CL.THROTTLE user:7 15 30 60\r\nQUIT\r\n"), "*5\r\n:0\r\n:16\r\n:15\r\n:-1\r\n:2\r\n+OK\r\n");
    assert!(Command::new("kill").args(["-TERM", &server.id().to_string()]).status().unwrap().success());
    assert!(server.wait().unwrap().success());
}

#[test]
fn files_are_validated_and_explained() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("rules.yaml");
    let path = file.to_str().unwrap();
    std::fs::write(
        &file,
        "rules:\n  - { name: a, by: [ip], limit: 2/s }\n  - { name: b, when: { method: POST }, limit: deny }\n",
    )
    .unwrap();
    tidegate(&["validate", path]).assert().success();
    let explained = tidegate(&["explain", "--config", path, "ip=192.0.2.7"]).assert().success();
    let text = String::from_utf8(explained.get_output().stdout.clone()).unwrap();
    assert_eq!(text, "  a: applies to \"192.0.2.7\": 2/s, costs 1\n  b: does not apply\na first request would pass\n");
    tidegate(&["explain", "--config", path, "method=POST"]).assert().code(1);
    std::fs::write(&file, "rules:\n  - { name: a, lmit: 2/s }\n").unwrap();
    let wrong = tidegate(&["validate", path]).assert().code(2);
    let text = String::from_utf8(wrong.get_output().stderr.clone()).unwrap();
    assert!(text.contains("rules.yaml:2:") && text.contains("lmit"), "{text}");
}
