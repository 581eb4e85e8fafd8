//! Runs of the command: what it prints, where, and how it exits.

#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod check;
mod docs;
mod doctor;
mod explain;
mod floods;
mod greeting;
mod hostile_store;
mod limits;
mod mistakes;
mod proxy;
mod serve;
mod serve_store;
mod simulate;
mod snapshot;
mod store;
mod storm;
mod tokens;
mod validate;

use std::process::Output;

use assert_cmd::Command;

/// The command, in an environment that does not change what it prints.
fn tidegate(args: &[&str]) -> Command {
    let mut command = Command::cargo_bin("tidegate").unwrap();
    command
        .args(args)
        .env_remove("TIDEGATE_LIMIT")
        .env_remove("TIDEGATE_STORE")
        .env_remove("TIDEGATE_SERVER")
        .env_remove("TIDEGATE_TOKEN")
        .env_remove("TIDEGATE_TOKEN_FILE")
        .env_remove("TIDEGATE_CONFIG")
        .env_remove("NO_COLOR")
        .env("COLUMNS", "100");
    command
}

/// Runs the command with this standard input; returns exit code, standard output and error.
fn shown(args: &[&str], stdin: &str) -> String {
    let output = tidegate(args).write_stdin(stdin).output().unwrap();
    let Output { status, stdout, stderr } = output;
    let (stdout, stderr) = (String::from_utf8(stdout).unwrap(), String::from_utf8(stderr).unwrap());
    let code = status.code().expect("it exits by itself");
    let mut text = format!("exit {code}\n");
    for (name, stream) in [("stdout", stdout), ("stderr", stderr)] {
        if !stream.is_empty() {
            text += &format!("--- {name}\n{stream}");
        }
    }
    text
}

/// Standard output of a run that must succeed.
fn stdout(args: &[&str], stdin: &str) -> String {
    let output = tidegate(args).write_stdin(stdin).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

#[test]
fn help_teaches_with_examples() {
    let help = stdout(&["--help"], "");
    for word in ["check", "simulate", "limits", "doctor", "completions", "Examples:", "Exit codes:"]
    {
        assert!(help.contains(word), "{word} is missing in {help}");
    }
    for command in ["check", "simulate", "limits", "doctor", "proxy"] {
        let help = stdout(&[command, "--help"], "");
        assert!(help.contains("Examples:"), "{help}");
    }
}

#[test]
fn completions_are_printed_for_every_shell() {
    for shell in ["bash", "elvish", "fish", "powershell", "zsh"] {
        assert!(stdout(&["completions", shell], "").contains("simulate"), "{shell}");
    }
}

#[test]
fn mistakes_on_the_command_line_exit_with_2() {
    for args in [
        &[][..],
        &["nonsense"],
        &["check"],
        &["check", "k"],
        &["check", "k", "--limit", "10/s", "--cost", "-1"],
        &["check", "k", "--limit", "10/s", "--op", "get"],
        &["simulate", "--limit", "10/s", "--format", "xml"],
        &["simulate", "--limit", "10/s", "--rate", "0/s"],
        &["simulate", "--limit", "10/s", "--rate", "10/s window"],
        &["simulate", "--limit", "10/s", "--for", "0"],
        &["simulate", "--limit", "10/s", "--for", "10"],
        &["simulate", "--limit", "10/s", "--keys", "0"],
        &["simulate", "--limit", "10/s", "--trace", "-", "--rate", "10/s"],
        &["simulate", "--limit", "10/s", "--verify"],
        &["simulate", "--limit", "10/s", "--store", "nonsense"],
        &["check", "k", "--limit", "10/s", "--store", "redis://127.0.0.1:0"],
        &["check", "k", "--limit", "10/s", "--store", "redis://127.0.0.1", "--namespace", "a b"],
        &["doctor"],
        &["doctor", "--store", "memory"],
        &["doctor", "--store", "redis://127.0.0.1", "--samples", "-1"],
        &["limits"],
        &["limits", ""],
        &["completions", "tcsh"],
    ] {
        let output = tidegate(args).output().unwrap();
        assert_eq!(output.status.code(), Some(2), "{args:?}");
        assert!(output.stdout.is_empty(), "{args:?}");
        assert!(!output.stderr.is_empty(), "{args:?}");
    }
}
