//! What the pages show is what the command prints.

use std::fs;
use std::path::{Path, PathBuf};

use crate::tidegate;

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// The words of a command line, as a shell would see them; only single quotes are needed here.
fn words(line: &str) -> Vec<String> {
    let mut words = Vec::new();
    for (index, part) in line.split('\'').enumerate() {
        if index % 2 == 1 {
            words.push(part.to_owned());
        } else {
            words.extend(part.split_whitespace().filter(|word| *word != "\\").map(str::to_owned));
        }
    }
    words
}

fn run(line: &str) -> String {
    // The README has the command for those who have not installed it.
    let words = words(
        line.strip_prefix("cargo run --release -- ")
            .map_or(line.to_owned(), |args| format!("tidegate {args}"))
            .as_str(),
    );
    let args: Vec<&str> = words.iter().skip(1).map(String::as_str).collect();
    let output = tidegate(&args).current_dir(root()).output().unwrap();
    String::from_utf8(output.stdout).unwrap() + &String::from_utf8(output.stderr).unwrap()
}

/// Every ```` ```console ```` block: a command after `$ `, and then its output.
#[test]
fn console_blocks_are_real() {
    for page in ["README.md", "docs/simulate.md"] {
        let text = fs::read_to_string(root().join(page)).unwrap();
        let blocks: Vec<&str> =
            text.split("```console\n").skip(1).map(|rest| rest.split("```").next().unwrap()).collect();
        assert!(!blocks.is_empty(), "{page} has no console blocks");
        for block in blocks {
            let (command, expected) = block.split_once('\n').unwrap();
            let command = command.strip_prefix("$ ").expect("a block begins with `$ `");
            let printed: String = run(command).lines().map(|line| format!("{}\n", line.trim_end())).collect();
            assert!(printed == expected, "{page}: {command}\nprints\n{printed}\nbut the page has\n{expected}");
        }
    }
}

#[test]
fn the_picture_is_what_its_command_draws() {
    let text = fs::read_to_string(root().join("docs/simulate.md")).unwrap();
    let command = text.split("```sh\n").skip(1).find(|block| block.contains("--format svg")).unwrap();
    let command = command.split("```").next().unwrap();
    let (command, path) = command.trim_end().split_once(" --out ").unwrap();
    let drawn = run(command);
    let kept = fs::read_to_string(root().join(path)).unwrap();
    assert!(drawn == kept, "run again: {command} --out {path}");
}
