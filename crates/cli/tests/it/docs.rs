//! Pages show the real output of commands.

use std::fs;
use std::path::{Path, PathBuf};

use crate::serve::Serving;
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
        let blocks: Vec<&str> = text
            .split("```console\n")
            .skip(1)
            .map(|rest| rest.split("```").next().unwrap())
            .collect();
        assert!(!blocks.is_empty(), "{page} has no console blocks");
        for block in blocks.into_iter().filter(|block| !needs_a_server(block)) {
            let (command, expected) = block.split_once('\n').unwrap();
            let command = command.strip_prefix("$ ").expect("a block begins with `$ `");
            let printed: String =
                run(command).lines().map(|line| format!("{}\n", line.trim_end())).collect();
            assert!(
                printed == expected,
                "{page}: {command}\nprints\n{printed}\nbut the page has\n{expected}"
            );
        }
    }
}

/// Blocks that start or call a server are tested by [`the_transcript_of_a_server_is_real`].
fn needs_a_server(block: &str) -> bool {
    ["$ cargo run --release -- serve", "$ curl", "$ redis-cli"]
        .iter()
        .any(|start| block.starts_with(start))
}

/// The README's server is started and called as the page says, with free ports and the times of the
/// page.
#[test]
fn the_transcript_of_a_server_is_real() {
    let text = fs::read_to_string(root().join("README.md")).unwrap();
    let blocks: Vec<&str> =
        text.split("```console\n").skip(1).map(|rest| rest.split("```").next().unwrap()).collect();
    let mut blocks = blocks.into_iter().filter(|block| needs_a_server(block));
    let (start, asked) = (blocks.next().unwrap(), blocks.next().unwrap());
    let serving = Serving::with_grpc("127.0.0.1:0", &[]);
    let [http, grpc, resp] =
        ["http", "grpc", "resp"].map(|protocol| serving.listeners[protocol].to_string());
    let port = resp.rsplit(':').next().unwrap();
    let real = serving.greeting.replace(&http, "127.0.0.1:8080").replace(&grpc, "127.0.0.1:8081");
    let real = real.replace(&resp, "127.0.0.1:6380");
    let real = real.replace(&format!("-p {port}"), "-p 6380");
    assert_eq!(format!("$ cargo run --release -- serve\n{real}"), start);
    for shown in asked.split("$ ").skip(1) {
        let (command, shown) = shown.split_once('\n').unwrap();
        let words = words(&command.replace("127.0.0.1:8080", &http));
        assert_eq!(words[0], "curl");
        let output = std::process::Command::new("curl").arg("-sS").args(&words[1..]).output();
        let output = output.expect("`apt-get install curl` installs it");
        let printed = String::from_utf8(output.stdout).unwrap().replace('\r', "");
        assert!(is_shown_as(&printed, shown), "{command}\nprints\n{printed}\nnot\n{shown}");
    }
}

/// Whether the page shows this output: `…` stands for any text, and times for the same times or a
/// few seconds less, since the page's commands follow each other without a pause.
fn is_shown_as(printed: &str, shown: &str) -> bool {
    let mut real = printed.to_owned();
    for earlier in 25..30 {
        real = real.replace(&format!(";t={earlier}\n"), ";t=30\n");
        real = real.replace(&format!("retry-after: {earlier}\n"), "retry-after: 30\n");
    }
    let real = match real.split_once("\"t_us\":") {
        Some((before, rest)) => format!("{before}\"t_us\":1700000000000000{}", &rest[16..]),
        None => real,
    };
    let mut rest = real.as_str();
    shown.trim_end().split('…').enumerate().all(|(index, part)| {
        let at = rest.find(part);
        let is_found = at.is_some_and(|at| index > 0 || at == 0);
        rest = at.map_or("", |at| &rest[at + part.len()..]);
        is_found
    })
}

#[test]
fn what_a_page_leaves_out_is_marked() {
    let printed = "HTTP/1.1 200 OK\nratelimit: \"a\";r=0;t=29\ndate: x\n\n{\"t_us\":1795035346066418,\"b\":1}";
    assert!(is_shown_as(
        printed,
        "HTTP/1.1 200 OK\nratelimit: \"a\";r=0;t=30\n…\n{\"t_us\":1700000000000000,…}\n"
    ));
    assert!(!is_shown_as(printed, "HTTP/1.1 200 OK\nratelimit: \"a\";r=1;t=30\n…"));
    assert!(!is_shown_as(printed, "ratelimit: \"a\";r=0;t=30\n…"));
}

#[test]
fn the_picture_is_what_its_command_draws() {
    let text = fs::read_to_string(root().join("docs/simulate.md")).unwrap();
    let command =
        text.split("```sh\n").skip(1).find(|block| block.contains("--format svg")).unwrap();
    let command = command.split("```").next().unwrap();
    let (command, path) = command.trim_end().split_once(" --out ").unwrap();
    let drawn = run(command);
    let kept = fs::read_to_string(root().join(path)).unwrap();
    assert!(drawn == kept, "run again: {command} --out {path}");
}

/// The complete file of docs/configuration.md is one, and the table has every option and variable
/// of `serve`.
#[test]
fn the_page_on_configuration_is_true() {
    let page = fs::read_to_string(root().join("docs/configuration.md")).unwrap();
    let file = page.split("```yaml\n").nth(1).unwrap().split("```").next().unwrap();
    let printed =
        tidegate(&["serve", "--config", "-", "--print-config"]).write_stdin(file).output().unwrap();
    assert!(printed.status.success(), "{}", String::from_utf8_lossy(&printed.stderr));
    let help = tidegate(&["serve", "--help"]).output().unwrap();
    let help = String::from_utf8(help.stdout).unwrap();
    let (mut options, mut variables) = (Vec::new(), Vec::new());
    for word in help.split(|c: char| !(c.is_ascii_alphanumeric() || c == '-' || c == '_')) {
        match word.strip_prefix("--") {
            Some("help" | "") => {}
            Some(_) => options.push(word),
            None if word.starts_with("TIDEGATE_") => variables.push(word),
            None => {}
        }
    }
    assert!(options.len() > 15 && variables.len() > 12, "{help}");
    for option in options {
        assert!(page.contains(&format!("| `{option}")), "{option} is not in the table");
    }
    for variable in variables {
        assert!(page.contains(&format!("| `{variable}` |")), "{variable} is not in the table");
    }
}
