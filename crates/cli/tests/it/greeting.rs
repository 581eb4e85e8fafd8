//! The output of `serve` and `proxy` on start: what is enforced and where, and commands that work
//! as printed.

use std::io::{BufRead, BufReader};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};

use tidegate_testkit::{Certs, Flavor, Server};

/// A started server, killed when it is dropped.
struct Started {
    process: Child,
    lines: Vec<String>,
}

impl Started {
    /// Starts `tidegate` with these arguments and waits until it is ready.
    fn with(words: &[&str], token: Option<&str>) -> Started {
        let mut command = Command::new(env!("CARGO_BIN_EXE_tidegate"));
        command
            .args(words)
            .env_remove("TIDEGATE_STORE")
            .envs(token.map(|token| ("TIDEGATE_TOKEN", token)));
        let mut process = command.stdout(Stdio::piped()).stderr(Stdio::null()).spawn().unwrap();
        let lines = BufReader::new(process.stdout.take().unwrap()).lines().map_while(Result::ok);
        let lines: Vec<String> = lines.take_while(|line| line != "ready").collect();
        Started { process, lines }
    }

    fn line(&self, name: &str) -> &str {
        let line = self.lines.iter().find(|line| line.starts_with(&format!("{name} ")));
        line.unwrap_or_else(|| panic!("a line about {name} is missing: {:?}", self.lines))
    }

    /// The command in a line.
    fn command(&self, name: &str) -> &str {
        self.line(name).split_once("    ").expect("an address and a command").1
    }
}

impl Drop for Started {
    fn drop(&mut self) {
        let _ = self.process.kill().and_then(|()| self.process.wait());
    }
}

/// What a shell prints for a command, with `redis-cli` in its path.
fn shell(command: &str, tools: &Path, token: Option<&str>) -> String {
    let path = format!("{}:{}", tools.display(), std::env::var("PATH").unwrap());
    let mut shell = Command::new("sh");
    shell.args(["-c", &command.replacen("curl", "curl -sS", 1)]).env("PATH", path);
    let output = shell.envs(token.map(|token| ("TIDEGATE_TOKEN", token))).output().unwrap();
    let printed = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(
        output.status.success(),
        "{command}\n{printed}{}",
        String::from_utf8_lossy(&output.stderr)
    );
    printed
}

const LISTENERS: [&str; 8] = [
    "--http",
    "127.0.0.1:0",
    "--grpc",
    "127.0.0.1:0",
    "--resp",
    "127.0.0.1:0",
    "--admin",
    "127.0.0.1:0",
];

/// Runs every printed command as it is: plain, with tokens from a file or a variable, with TLS,
/// with both.
#[test]
fn the_commands_at_the_start_work_as_printed() {
    let folder = tempfile::tempdir().unwrap();
    let (tool, redis_cli) = (folder.path().join("redis-cli"), tidegate_testkit::redis_cli());
    std::fs::write(
        &tool,
        format!("#!/bin/sh\nexec '{}' \"$@\"\n", redis_cli.get_program().display()),
    )
    .unwrap();
    std::fs::set_permissions(&tool, PermissionsExt::from_mode(0o755)).unwrap();
    let (certs, token) = (Certs::new(), folder.path().join("it's a token"));
    std::fs::write(&token, "open-sesame\n").unwrap();
    let token = token.to_str().unwrap();
    let (cert, key) = (certs.server_cert(), certs.server_key());
    let tls = ["--tls-cert", cert.to_str().unwrap(), "--tls-key", key.to_str().unwrap()];
    let file = ["--token-file", token];
    let cases: [(&[&str], Option<&str>, &str); 5] = [
        (&[], None, "grpcurl -plaintext -d "),
        (&file, None, "grpcurl -plaintext -H \"Authorization: Bearer $(cat '"),
        (
            &[],
            Some("close-sesame"),
            "grpcurl -plaintext -H \"Authorization: Bearer $TIDEGATE_TOKEN\" -d ",
        ),
        (&tls, None, "grpcurl -insecure -d "),
        (
            &[&tls[..], &file[..]].concat(),
            None,
            "grpcurl -insecure -H \"Authorization: Bearer $(cat '",
        ),
    ];
    for (more, variable, grpc) in cases {
        // A second shell has neither the option nor the variable.
        let has_variable = variable.is_some();
        let started =
            Started::with(&[&["serve", "--log", "off"], &LISTENERS[..], more].concat(), variable);
        assert_eq!(
            started.lines.iter().any(|line| line.starts_with("token  put it into TIDEGATE_TOKEN")),
            has_variable
        );
        let run = |name: &str| shell(started.command(name), folder.path(), variable);
        let answer = run("http");
        assert!(
            answer.contains(r#""rule":"per-ip""#) && answer.contains(r#""allowed":true"#),
            "{more:?}: {answer}"
        );
        assert_eq!(run("resp"), "0\n16\n15\n-1\n2\n", "{more:?}");
        assert!(run("admin").contains("tidegate_info{version="), "{more:?}");
        // No package registry has grpcurl, so only its arguments are checked.
        assert!(started.command("grpc").starts_with(grpc), "{}", started.command("grpc"));
    }
}

#[test]
fn the_start_says_which_file_how_many_rules_and_which_store() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("tidegate.yaml");
    let start = |text: &str, command: &str, more: &[&str]| {
        std::fs::write(&file, text).unwrap();
        let config = ["--config", file.to_str().unwrap(), "--log", "off"];
        Started::with(&[&[command], &config[..], more].concat(), None)
    };
    let shown = file.display();
    let only_http = ["--http", "127.0.0.1:0", "--grpc", "off", "--resp", "off"];
    let rules = "rules:\n  - { name: a, by: [api_key], missing: share, limit: 5/s }\n  - { name: b, limit: 9/s }\n";
    let started = start(rules, "serve", &only_http);
    assert_eq!(started.line("rules"), format!("rules  {shown}: 2 rules"));
    assert_eq!(started.line("store"), "store  memory");
    let try_it = started.command("http");
    assert!(
        try_it.contains(r#"{"attributes":{"api_key":"a"}}"#),
        "an attribute that the rules know: {try_it}"
    );

    // The output counts warnings; the log has their text.
    let settle = "rules: [{ name: a, limit: 5/s, settle: response_bytes }]\n";
    let started = start(settle, "serve", &only_http);
    assert_eq!(started.line("rules"), format!("rules  {shown}: 1 rule; 1 warning, see the log"));

    // Credentials are not shown. For an unavailable store, the output says how limits are enforced.
    let server = Server::builder(Flavor::Redis7).password("sesame").start();
    let store = server.url();
    let started = start(&format!("store: {store}\n{rules}"), "serve", &only_http);
    let port = store.rsplit(':').next().unwrap().trim_end_matches('/');
    assert_eq!(started.line("store"), format!("store  redis://:***@127.0.0.1:{port}"));
    drop(started);
    server.kill();
    let started = start(&format!("store: {store}\n{rules}"), "serve", &only_http);
    let line = started.line("store");
    let expected = ": unreachable; enforced meanwhile: each limit in full on this node (1 node, assumed: the store was never reached)";
    assert!(line.ends_with(expected) && !line.contains("sesame"), "{line}");

    let proxy =
        ["--listen", "127.0.0.1:0", "--upstream", "http://127.0.0.1:1", "--limit", "7/s by ip"];
    let rules = "rules:\n  - { name: a, by: [ip], limit: 5/s }\n  - { name: b, limit: 9/s }\n";
    let started = start(rules, "proxy", &proxy);
    assert_eq!(started.line("rules"), format!("rules  {shown}: 2 rules, and 1 of --limit"));
    assert!(started.command("proxy").starts_with("curl -i http://127.0.0.1:"));
}

/// Without rules, the output shows a request that the first domain limits, or a limit from the
/// caller.
#[test]
fn without_rules_the_start_shows_a_request_that_is_limited() {
    let folder = tempfile::tempdir().unwrap();
    let (domains, file) = (folder.path().join("domains"), folder.path().join("tidegate.yaml"));
    std::fs::create_dir(&domains).unwrap();
    std::fs::write(&file, "rules: []\n").unwrap();
    let nested = "domain: edge\ndescriptors:\n  - key: path\n    value: /login\n    descriptors:\n      - { key: user, rate_limit: { unit: minute, requests_per_unit: 3 } }\n";
    std::fs::write(domains.join("edge.yaml"), nested).unwrap();
    let serve = [
        "serve",
        "--log",
        "off",
        "--config",
        file.to_str().unwrap(),
        "--http",
        "127.0.0.1:0",
        "--resp",
        "off",
    ];
    let with = ["--envoy-config", domains.to_str().unwrap(), "--grpc", "127.0.0.1:0"];
    let started = Started::with(&[&serve[..], &with].concat(), None);
    let descriptor = r#""descriptors":[{"entries":[{"key":"path","value":"/login"},{"key":"user","value":"a"}]}]"#;
    assert!(started.command("grpc").contains(descriptor), "{}", started.command("grpc"));
    let answer = shell(started.command("http"), folder.path(), None);
    assert!(answer.contains(r#""limitRemaining":2"#), "{answer}");
    let started = Started::with(&[&serve[..], &["--grpc", "off"]].concat(), None);
    let answer = shell(started.command("http"), folder.path(), None);
    assert!(answer.contains(r#""remaining":9"#), "{answer}");
}
