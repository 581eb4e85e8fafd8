//! `tidegate explain`: by the state of the store that the file names, or of a running server;
//! without either, only which rules apply.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::process::{Child, Command, Output, Stdio};

use tidegate_testkit::{Flavor, Server};

use crate::tidegate;

const RULES: &str = "\
rules:
  - { name: a, by: [ip], limit: 2/h }
  - { name: b, when: { method: POST }, limit: deny }
";

/// A running `tidegate serve`, killed at the end.
struct Serving {
    child: Child,
    http: String,
}

impl Serving {
    fn start(args: &[&str]) -> Serving {
        let mut child = Command::new(env!("CARGO_BIN_EXE_tidegate"))
            .args(["serve", "--http", "127.0.0.1:0", "--grpc", "off", "--resp", "off"])
            .args(args)
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut lines = BufReader::new(child.stdout.take().unwrap()).lines().map_while(Result::ok);
        let http = lines
            .find_map(|line| line.strip_prefix("http ").map(str::to_owned))
            .expect("a line about HTTP");
        let http = http.split_whitespace().next().unwrap().to_owned();
        assert!(lines.any(|line| line == "ready"));
        Serving { child, http }
    }

    fn url(&self) -> String {
        format!("http://{}", self.http)
    }

    /// One check, which must pass.
    fn check(&self, token: Option<&str>) {
        let mut stream = TcpStream::connect(&self.http).unwrap();
        let body = r#"{"attributes":{"ip":"192.0.2.7"}}"#;
        let token =
            token.map(|token| format!("Authorization: Bearer {token}\r\n")).unwrap_or_default();
        let length = body.len();
        write!(
            stream,
            "POST /v1/check HTTP/1.1\r\nHost: localhost\r\n{token}Content-Length: {length}\r\nConnection: close\r\n\r\n{body}"
        )
        .unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
    }
}

impl Drop for Serving {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Exit code, standard output, standard error.
fn run(args: &[&str], env: &[(&str, &str)]) -> (i32, String, String) {
    let Output { status, stdout, stderr } =
        tidegate(args).envs(env.iter().copied()).output().unwrap();
    (status.code().unwrap(), String::from_utf8(stdout).unwrap(), String::from_utf8(stderr).unwrap())
}

#[test]
fn the_store_that_the_file_names_is_asked() {
    let redis = Server::start(Flavor::Redis7);
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("rules.yaml");
    let path = file.to_str().unwrap();
    std::fs::write(&file, format!("store: {}\n{RULES}", redis.url())).unwrap();
    let (code, text, _) = run(&["explain", "--config", path, "ip=192.0.2.7"], &[]);
    assert_eq!(code, 0);
    assert_eq!(
        text,
        "a: applies to ip \"192.0.2.7\", costs 1\n    2/h: 2 of 2 left, would pass\nb: does not apply: there is no method, only \"POST\" matches\nthe request would pass\n"
    );
    let server = Serving::start(&["--config", path]);
    server.check(None);
    server.check(None);
    let (code, text, notes) = run(&["explain", "--config", path, "ip=192.0.2.7"], &[]);
    assert_eq!(code, 1, "{text}");
    assert!(
        text.contains("2/h: 0 of 2 left, would be denied for ")
            && text.ends_with("the request would be denied\n")
    );
    assert_eq!(notes, "");
}

#[test]
fn a_running_server_is_asked_with_a_token() {
    let folder = tempfile::tempdir().unwrap();
    let write = |name: &str, text: &str| {
        let file = folder.path().join(name);
        std::fs::write(&file, text).unwrap();
        file.to_str().unwrap().to_owned()
    };
    let (rules, checks, admin) =
        (write("rules.yaml", RULES), write("checks", "check-me\n"), write("admin", "admin-me\n"));
    let server = Serving::start(&[
        "--config",
        &rules,
        "--token-file",
        &checks,
        "--admin-token-file",
        &admin,
    ]);
    let url = server.url();
    let ask = ["explain", "--server", &url, "ip=192.0.2.7"];
    let with = |file: &str| run(&[&ask[..], &["--token-file", file]].concat(), &[]);
    let (code, text, _) = with(&admin);
    assert_eq!((code, text.ends_with("the request would pass\n")), (0, true), "{text}");
    server.check(Some("check-me"));
    server.check(Some("check-me"));
    let (code, text, _) = with(&admin);
    assert_eq!((code, text.ends_with("the request would be denied\n")), (1, true), "{text}");
    let by_environment = run(
        &["explain", "ip=192.0.2.7"],
        &[("TIDEGATE_SERVER", &url), ("TIDEGATE_TOKEN", "admin-me")],
    );
    assert_eq!((by_environment.0, by_environment.2.as_str()), (1, ""), "{by_environment:?}");
    // A file beside it is not read, with a note.
    let both =
        run(&[&ask[..], &["--token-file", &admin, "--config", "nowhere.yaml"]].concat(), &[]);
    assert_eq!(both.0, 1);
    assert!(both.2.contains("--config and --store have no effect"), "{both:?}");
    for (refused, status) in [(run(&ask, &[]), "401"), (with(&checks), "403")] {
        assert_eq!((refused.0, refused.1.as_str()), (2, ""));
        let expected = format!("{url} answered {status}");
        assert!(
            refused.2.contains(&expected) && refused.2.contains("--token-file FILE"),
            "{refused:?}"
        );
    }
    drop(server);
    let (code, text, problem) = with(&admin);
    assert_eq!((code, text.as_str()), (2, ""));
    assert!(problem.contains("Is it running there?"), "{problem}");
}

#[test]
fn a_store_in_memory_is_inside_the_server_and_nothing_is_said_about_it() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("rules.yaml");
    let path = file.to_str().unwrap();
    std::fs::write(&file, RULES).unwrap();
    let (code, text, notes) = run(&["explain", "--config", path, "ip=192.0.2.7"], &[]);
    assert_eq!(
        text,
        "a: applies to ip \"192.0.2.7\", costs 1\n    2/h\nb: does not apply: there is no method, only \"POST\" matches\nwhether the request would pass depends on what is used, which is not known here\n"
    );
    assert_eq!(code, 3);
    assert!(
        notes.contains("is inside the server: use --server http://HOST:PORT to see the state"),
        "{notes}"
    );
    // A rule that denies, denies whatever is used.
    let (code, text, notes) = run(&["explain", "--config", path, "method=POST"], &[]);
    assert_eq!(
        (code, text.ends_with("the request would be denied\n"), notes.as_str()),
        (1, true, ""),
        "{text}"
    );
    let (code, _, problem) = run(&["explain", "ip=192.0.2.7"], &[]);
    assert_eq!(code, 2);
    assert!(problem.contains("expected --config FILE, or --server URL"), "{problem}");
}

#[test]
fn a_store_without_an_answer_is_an_error() {
    let free = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("rules.yaml");
    std::fs::write(&file, format!("store: redis://127.0.0.1:{free}\n{RULES}")).unwrap();
    let (code, text, problem) =
        run(&["explain", "--config", file.to_str().unwrap(), "ip=192.0.2.7"], &[]);
    assert_eq!((code, text.as_str()), (2, ""));
    let expected = format!(
        "what is used is not known: store redis://127.0.0.1:{free}: the store did not answer"
    );
    assert!(problem.contains(&expected) && problem.contains("Is it running there?"), "{problem}");
}

#[test]
fn an_attribute_is_given_once() {
    let folder = tempfile::tempdir().unwrap();
    let rules = folder.path().join("tidegate.yaml");
    std::fs::write(&rules, "rules: [{ name: a, limit: 1/s }]\n").unwrap();
    let refused = run(
        &["explain", "--config", rules.to_str().unwrap(), "ip=192.0.2.7", "x=1", "ip=192.0.2.8"],
        &[],
    );
    assert_eq!(refused.0, 2, "{refused:?}");
    assert!(
        refused.2.contains("error: ip is there twice: expected each attribute once"),
        "{refused:?}"
    );
}
