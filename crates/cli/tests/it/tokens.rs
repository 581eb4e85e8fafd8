//! Tokens of `tidegate serve`: how long they are, and where they can be seen.

use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use tidegate_testkit::wait_until;

use crate::tidegate;

const LONG: Duration = Duration::from_secs(20);
/// One character less than is needed.
const SHORT: &str = "0123456789abcde";
const ADVICE: &str = "15 characters: expected at least 16 where other machines can connect; make one with `openssl rand -hex 32`, or listen on 127.0.0.1 alone";

fn serve(at: &str, words: &[&str], log: &Path, variable: Option<&str>) -> Child {
    let mut command = Command::new(env!("CARGO_BIN_EXE_tidegate"));
    command.args(["serve", "--http", at, "--grpc", "off", "--resp", "off"]).args(words);
    command.env_remove("TIDEGATE_TOKEN").envs(variable.map(|token| ("TIDEGATE_TOKEN", token)));
    command.stdout(Stdio::piped()).stderr(std::fs::File::create(log).unwrap()).spawn().unwrap()
}

/// Whether it became ready.
fn is_ready(server: &mut Child) -> bool {
    BufReader::new(server.stdout.take().unwrap())
        .lines()
        .map_while(Result::ok)
        .any(|line| line == "ready")
}

/// Stops it, so that every line of its log is written.
fn end(mut server: Child) {
    assert!(
        Command::new("kill").args(["-TERM", &server.id().to_string()]).status().unwrap().success()
    );
    assert!(server.wait().unwrap().success());
}

#[test]
fn a_short_token_is_refused_beyond_this_machine_at_the_start_and_when_it_changes() {
    let folder = tempfile::tempdir().unwrap();
    let (token, log) = (folder.path().join("token"), folder.path().join("log"));
    let file = ["--token-file", token.to_str().unwrap()];
    let said = || std::fs::read_to_string(&log).unwrap();

    std::fs::write(&token, format!("{SHORT}\n")).unwrap();
    for words in [&file[..], &["--token", SHORT], &["--token", SHORT, "--insecure"]] {
        let mut refused = serve("0.0.0.0:0", words, &log, None);
        assert!(!is_ready(&mut refused), "{words:?}");
        assert_eq!(refused.wait().unwrap().code(), Some(2));
        assert!(said().contains(&format!("error: the token for checks: {ADVICE}")), "{}", said());
    }
    let mut here = serve("127.0.0.1:0", &file, &log, None);
    assert!(is_ready(&mut here), "on this machine alone it may be short");
    end(here);

    std::fs::write(&token, format!("{SHORT}f\n")).unwrap();
    let mut server = serve("0.0.0.0:0", &file, &log, None);
    assert!(is_ready(&mut server), "{}", said());
    std::fs::write(&token, SHORT).unwrap();
    wait_until("the shorter one is refused", LONG, || said().contains("tokens refused"));
    let line = format!(
        "tokens refused; the last good one stays in force why=\"the token for checks: {ADVICE}\""
    );
    assert!(said().contains(&line), "{}", said());
    assert!(!said().contains(SHORT), "{}", said());
    end(server);

    let config = folder.path().join("tidegate.yaml");
    let listen = "rules: []\nlisten: { http: \"0.0.0.0:8080\", grpc: off, resp: off }";
    std::fs::write(&config, format!("{listen}\ntokens: {{ check_file: {} }}\n", token.display()))
        .unwrap();
    let validated = tidegate(&["validate", config.to_str().unwrap()]).output().unwrap();
    let text = String::from_utf8([validated.stdout, validated.stderr].concat()).unwrap();
    assert!(text.contains("tokens.check_file: ") && text.contains(ADVICE), "{text}");
}

#[test]
fn a_token_among_the_arguments_is_warned_about() {
    let folder = tempfile::tempdir().unwrap();
    let log = folder.path().join("log");
    let warning = "every user of this machine can see a token among the arguments of a process";
    for (words, variable, expected) in [
        (
            &["--token", "open-sesame"][..],
            None,
            vec!["option=--token advice=\"use --token-file FILE or TIDEGATE_TOKEN\""],
        ),
        (
            &["--token=open-sesame", "--admin-token", "open-too"],
            Some("other"),
            vec![
                "option=--token advice=\"use --token-file FILE or TIDEGATE_TOKEN\"",
                "option=--admin-token advice=\"use --admin-token-file FILE or TIDEGATE_ADMIN_TOKEN\"",
            ],
        ),
        (&[], Some("open-sesame"), vec![]),
    ] {
        let mut server = serve("127.0.0.1:0", words, &log, variable);
        assert!(is_ready(&mut server));
        end(server);
        let text = std::fs::read_to_string(&log).unwrap();
        let lines: Vec<&str> = text.lines().filter(|line| line.contains(warning)).collect();
        assert_eq!(lines.len(), expected.len(), "{words:?}: {text}");
        assert!(
            lines.iter().zip(expected).all(|(line, expected)| line.ends_with(expected)),
            "{text}"
        );
        assert!(!text.contains("open-sesame"), "{text}");
    }
}
