//! What docs/http.md and docs/resp.md show is what the listeners answer. `UPDATE_PAGES=1` writes
//! the answers into the pages instead.

use std::fs;
use std::path::{Path, PathBuf};

use tidegate_testkit::redis_cli;

use crate::listeners::Listeners;

fn page(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs").join(name)
}

/// The rules of a page: its first block of YAML.
fn rules(text: &str) -> &str {
    text.split("```yaml\n").nth(1).and_then(|rest| rest.split("```").next()).unwrap_or_default()
}

/// Goes through all blocks of this kind, in order, and compares each with what `answered` makes of
/// it.
fn every_block_is_real(name: &str, kind: &str, mut answered: impl FnMut(&str) -> String) {
    let file = page(name);
    let text = fs::read_to_string(&file).unwrap();
    let (mut new, mut rest, mut blocks) = (String::new(), text.as_str(), 0);
    let mark = format!("```{kind}\n");
    while let Some((before, after)) = rest.split_once(&mark) {
        let (block, after) = after.split_once("```").expect("a block ends");
        new = new + before + &mark + &answered(block) + "```";
        (rest, blocks) = (after, blocks + 1);
    }
    new += rest;
    assert!(blocks > 0, "{name} has no {kind} blocks");
    if std::env::var_os("UPDATE_PAGES").is_some() {
        fs::write(&file, new).unwrap();
    } else {
        let differs = new.lines().zip(text.lines()).find(|(new, old)| new != old);
        assert!(
            new == text,
            "{name} shows something else than is answered; run again with UPDATE_PAGES=1: {differs:?}"
        );
    }
}

/// A block is a line `METHOD PATH BODY`, and then the answer, without the date and the length.
#[test]
fn http_answers_as_the_page_says() {
    let text = fs::read_to_string(page("http.md")).unwrap();
    let listeners = Listeners::in_memory(rules(&text));
    let mut http = listeners.http();
    every_block_is_real("http.md", "http", |block| {
        let request = block.lines().next().unwrap();
        let (method, rest) = request.split_once(' ').unwrap();
        let (path, body) = rest.split_once(' ').unwrap_or((rest, ""));
        let length = body.len();
        http.send(&format!(
            "{method} {path} HTTP/1.1\r\nhost: localhost\r\ncontent-length: {length}\r\n\r\n{body}"
        ));
        let answer = http.receive().unwrap();
        let told = |line: &&str| !line.starts_with("content-length: ");
        let head: Vec<&str> = answer.own_head().into_iter().filter(told).collect();
        format!("{request}\n\n{}\n\n{}\n", head.join("\n"), answer.body.trim_end())
    });
}

/// A block is commands after `> `, or `3> ` in version 3 of the protocol, each with what redis-cli
/// prints.
#[test]
fn resp_answers_as_the_page_says() {
    let text = fs::read_to_string(page("resp.md")).unwrap();
    let listeners = Listeners::in_memory(rules(&text));
    every_block_is_real("resp.md", "console", |block| {
        let mut shown = String::new();
        for line in block.lines() {
            let (version, command) = match line.split_once("> ") {
                Some(("", command)) => (None, command),
                Some(("3", command)) => (Some("-3"), command),
                _ => continue,
            };
            let mut cli = redis_cli();
            cli.args(["-p", &listeners.resp.to_string(), "--no-raw"]).args(version);
            for (index, part) in command.split('"').enumerate() {
                match index % 2 {
                    1 => drop(cli.arg(part)),
                    _ => drop(cli.args(part.split_whitespace())),
                }
            }
            let output = cli.output().unwrap();
            shown = shown + line + "\n" + &String::from_utf8_lossy(&output.stdout);
        }
        shown
    });
}
