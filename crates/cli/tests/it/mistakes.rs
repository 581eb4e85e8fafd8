//! Common mistakes, each with its full error message: `testdata/mistakes.txt`.
//!
//! The file is a list of commands as a shell runs them, each with the files it reads and everything
//! that it prints. `{NAMES}` stand for real servers. After a change that is meant,
//! `TIDEGATE_UPDATE=1 cargo test -p tidegate-cli --test it mistakes` writes what is printed now;
//! read it before it is committed.

use std::collections::HashSet;
use std::fmt::Write as _;
use std::net::TcpListener;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use tidegate_testkit::{Certs, Flavor, Server};

use crate::serve::Serving;

/// How many mistakes there are at least.
const AT_LEAST: usize = 40;

/// One mistake.
#[derive(Debug, Default)]
struct Mistake {
    /// The mistake, in words.
    title: String,
    /// Files, with their texts.
    files: Vec<(String, String)>,
    command: String,
    /// What it prints and how it exits.
    printed: String,
}

impl Mistake {
    fn text(&self) -> String {
        let mut text = format!("# {}\n", self.title);
        for (name, lines) in &self.files {
            let _ = writeln!(text, "file {name}");
            lines.lines().for_each(|line| _ = writeln!(text, "  | {line}"));
        }
        let _ = write!(text, "$ {}\n{}", self.command, self.printed);
        text
    }

    /// Reads all mistakes of a text that [`text`](Mistake::text) wrote.
    fn read(text: &str) -> Vec<Mistake> {
        let mut all: Vec<Mistake> = Vec::new();
        for line in text.lines() {
            if let Some(title) = line.strip_prefix("# ") {
                all.push(Mistake { title: title.into(), ..Mistake::default() });
                continue;
            }
            let Some(last) = all.last_mut() else { continue };
            if let Some(name) = line.strip_prefix("file ") {
                last.files.push((name.into(), String::new()));
            } else if let Some(line) = line.strip_prefix("  | ").or(line.strip_prefix("  |")) {
                let (_, text) = last.files.last_mut().expect("a file is named before its lines");
                *text += &format!("{line}\n");
            } else if let Some(command) = line.strip_prefix("$ ") {
                last.command = command.into();
            } else if !line.is_empty() {
                last.printed += &format!("{line}\n");
            }
        }
        all
    }
}

/// Servers for the mistakes, and a folder with the tools to call them.
struct Scene {
    folder: tempfile::TempDir,
    /// Names in commands and what they stand for.
    names: Vec<(&'static str, String)>,
    _servers: Vec<Server>,
    _serving: Vec<Serving>,
    _taken: TcpListener,
}

impl Scene {
    fn new() -> Scene {
        let folder = tempfile::tempdir().unwrap();
        let tool = |name: &str, program: &Path| {
            let file = folder.path().join(name);
            std::fs::write(&file, format!("#!/bin/sh\nexec '{}' \"$@\"\n", program.display()))
                .unwrap();
            std::fs::set_permissions(&file, PermissionsExt::from_mode(0o755)).unwrap();
        };
        tool("tidegate", Path::new(env!("CARGO_BIN_EXE_tidegate")));
        tool("redis-cli", Path::new(tidegate_testkit::redis_cli().get_program()));
        let certs = Certs::new();
        let copy =
            |from: PathBuf, name: &str| _ = std::fs::copy(from, folder.path().join(name)).unwrap();
        copy(certs.server_cert(), "cert.pem");
        copy(certs.server_key(), "key.pem");
        copy(certs.client_key(), "other-key.pem");
        copy(certs.ca(), "ca.pem");
        let (authority, renamed) =
            (Certs::with_authority_as_server(), Certs::for_server_called(&["redis.example"]));
        for (certs, name) in [(&authority, "authority"), (&renamed, "renamed")] {
            copy(certs.ca(), &format!("{name}-ca.pem"));
            copy(certs.server_cert(), &format!("{name}.pem"));
            copy(certs.server_key(), &format!("{name}.key"));
        }
        let plain = Server::start(Flavor::Redis7);
        let secret = Server::builder(Flavor::Redis7).password("sesame").start();
        let tls = Server::builder(Flavor::Redis7).tls(&certs).start();
        let tls_authority = Server::builder(Flavor::Redis7).tls(&authority).start();
        let tls_renamed = Server::builder(Flavor::Redis7).tls(&renamed).start();
        let replica = Server::start(Flavor::Redis7);
        replica.command(&["REPLICAOF", "127.0.0.1", &plain.port().to_string()]);
        let serving = Serving::start(&["--log", "off"]);
        let guarded = Serving::start(&["--log", "off", "--token", "open-sesame"]);
        let encrypted = |cert: &str, key: &str| {
            let at = |name: &str| folder.path().join(name).to_str().unwrap().to_owned();
            Serving::start(&["--log", "off", "--tls-cert", &at(cert), "--tls-key", &at(key)])
        };
        let https = encrypted("cert.pem", "key.pem");
        let https_authority = encrypted("authority.pem", "authority.key");
        let https_renamed = encrypted("renamed.pem", "renamed.key");
        let (taken, free) = (listener(), listener());
        let port = |at: &TcpListener| at.local_addr().unwrap().port().to_string();
        let of = |serving: &Serving, name: &str| serving.listeners[name].port().to_string();
        let names = vec![
            ("{REDIS}", plain.port().to_string()),
            ("{REDIS_PASSWORD}", secret.port().to_string()),
            ("{REDIS_TLS}", tls.port().to_string()),
            ("{REDIS_TLS_AUTHORITY}", tls_authority.port().to_string()),
            ("{REDIS_TLS_RENAMED}", tls_renamed.port().to_string()),
            ("{REDIS_REPLICA}", replica.port().to_string()),
            ("{HTTP}", of(&serving, "http")),
            ("{RESP}", of(&serving, "resp")),
            ("{HTTP_TOKEN}", of(&guarded, "http")),
            ("{HTTPS}", of(&https, "http")),
            ("{HTTPS_AUTHORITY}", of(&https_authority, "http")),
            ("{HTTPS_RENAMED}", of(&https_renamed, "http")),
            ("{TAKEN}", port(&taken)),
            ("{CLOSED}", port(&free)),
        ];
        drop(free);
        let servers = vec![plain, secret, tls, tls_authority, tls_renamed, replica];
        let serving = vec![serving, guarded, https, https_authority, https_renamed];
        Scene { folder, names, _servers: servers, _serving: serving, _taken: taken }
    }

    /// Makes a mistake; returns the output and the exit code.
    fn make(&self, mistake: &Mistake) -> String {
        for (name, text) in &mistake.files {
            std::fs::write(self.folder.path().join(name), self.filled(text)).unwrap();
        }
        let path = format!("{}:{}", self.folder.path().display(), std::env::var("PATH").unwrap());
        let mut shell = Command::new("sh");
        shell.args(["-c", &format!("timeout 20 {} 2>&1", self.filled(&mistake.command))]);
        shell
            .current_dir(self.folder.path())
            .stdin(Stdio::null())
            .env("PATH", path)
            .env("COLUMNS", "100");
        for name in
            ["TIDEGATE_STORE", "TIDEGATE_TOKEN", "TIDEGATE_CONFIG", "TIDEGATE_SERVER", "NO_COLOR"]
        {
            shell.env_remove(name);
        }
        let output = shell.output().unwrap();
        for (name, _) in &mistake.files {
            let _ = std::fs::remove_file(self.folder.path().join(name));
        }
        let mut text: String = String::from_utf8_lossy(&output.stdout).into_owned();
        for (name, value) in &self.names {
            text = text.replace(value, name);
        }
        // The time of a decision is another each time.
        if let Some((before, rest)) = text.clone().split_once("\"t_us\":") {
            text = format!(
                "{before}\"t_us\":1700000000000000{}",
                rest.trim_start_matches(|char: char| char.is_ascii_digit())
            );
        }
        // Clap ends every message with this.
        let text = text.replace("\nFor more information, try '--help'.\n", "");
        let lines: Vec<String> = text
            .lines()
            .map(str::trim_end)
            .map(|line| format!("> {line}").trim_end().to_owned())
            .collect();
        format!("{}\nexit {}\n", lines.join("\n"), output.status.code().unwrap())
    }

    fn filled(&self, text: &str) -> String {
        self.names.iter().fold(text.to_owned(), |text, (name, value)| text.replace(name, value))
    }
}

fn listener() -> TcpListener {
    TcpListener::bind("127.0.0.1:0").unwrap()
}

#[test]
fn every_mistake_gets_its_complete_message() {
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../testdata/mistakes.txt");
    let text = std::fs::read_to_string(&file).unwrap();
    let mistakes = Mistake::read(&text);
    assert!(
        mistakes.len() >= AT_LEAST,
        "{} mistakes: expected at least {AT_LEAST}",
        mistakes.len()
    );
    let titles: HashSet<&str> = mistakes.iter().map(|mistake| mistake.title.as_str()).collect();
    assert_eq!(titles.len(), mistakes.len(), "two mistakes have one title");
    let scene = Scene::new();
    let mut real = String::new();
    let mut wrong = Vec::new();
    for mistake in mistakes {
        let printed = scene.make(&mistake);
        if printed != mistake.printed {
            wrong.push(format!(
                "{}\n$ {}\nprints\n{printed}instead of\n{}",
                mistake.title, mistake.command, mistake.printed
            ));
        }
        real += &(Mistake { printed, ..mistake }.text() + "\n");
    }
    if std::env::var_os("TIDEGATE_UPDATE").is_some() {
        std::fs::write(&file, real.trim_end().to_owned() + "\n").unwrap();
        return;
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

/// What no message may have: words of Rust and its libraries, and a repeated cause.
#[test]
fn no_message_names_internals() {
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../testdata/mistakes.txt");
    let text = std::fs::read_to_string(file).unwrap();
    let inside = [
        "Option<",
        "Some(",
        "None)",
        "Err(",
        "DuplicateKeyPolicy",
        "OtherError",
        "u32",
        "u64",
        "invalid type",
        "invalid digit",
        "unit value",
        "variant",
        "scalar",
        "mapping start",
        "sequence start",
        "panicked",
        "unwrap",
        "serde",
        "rustls",
        "tokio",
        "::",
    ];
    for mistake in Mistake::read(&text) {
        for word in inside {
            let shown = mistake.printed.replace("[::", "").replace("'::1'", "");
            assert!(!shown.contains(word), "{}: {word:?} in\n{}", mistake.title, mistake.printed);
        }
        for line in mistake.printed.lines() {
            let causes: Vec<&str> = line.split(": ").filter(|cause| cause.len() > 12).collect();
            let distinct: HashSet<&&str> = causes.iter().collect();
            assert_eq!(
                distinct.len(),
                causes.len(),
                "{}: a cause is repeated: {line}",
                mistake.title
            );
        }
    }
}
