//! `cargo xtask attack`: every test that attacks the built program, and how many cases of each
//! class held.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Where tests report cases: see `attacks_held` in the testkit.
const REPORT: &str = "TIDEGATE_ATTACK_REPORT";
/// How many times as many random cases a long run tries.
const TIMES: &str = "TIDEGATE_ATTACK_TIMES";
/// By default a long run takes about half an hour on two cores.
const LONG: &str = "100";

/// A class of attacks, by the word that tests report it with.
const CLASSES: [(&str, &str); 9] = [
    (
        "judged",
        "requests that nginx, Flask, Go, Node or PHP read differently than a rule could, at the proxy",
    ),
    ("smuggling", "requests that two servers could read differently, at the proxy"),
    ("http2", "requests over HTTP/2 that are none, at the proxy"),
    (
        "floods",
        "frames of HTTP/2, connections and windows that cost the sender nothing, at the built program",
    ),
    (
        "mutated",
        "bytes of requests, files and snapshots with random changes, at everything that reads them",
    ),
    ("peers", "a Redis that answers without end"),
    ("keys", "floods of new keys, at the built program"),
    ("access", "web pages of other origins, and guesses of tokens"),
    ("slow", "clients that send or read slowly, or not at all"),
];

/// Programs with such tests, and which tests those are.
const TESTS: [(&str, &[&str]); 3] = [
    ("tidegate", &["redis::hostile", "readings"]),
    ("tidegate-server", &["fuzz::", "proxy::", "security::", "access::"]),
    ("tidegate-cli", &["floods::"]),
];

/// A run of the tests, of which the table is made.
pub(crate) struct Report(PathBuf);

impl Report {
    /// An empty one in the target folder.
    pub(crate) fn new(target: &Path) -> Result<Report, String> {
        let file = target.join("attack-report.tsv");
        std::fs::create_dir_all(target)
            .map_err(|error| format!("{}: {error}", target.display()))?;
        std::fs::write(&file, "").map_err(|error| format!("{}: {error}", file.display()))?;
        Ok(Report(file))
    }

    /// Has a command that runs tests report to it.
    pub(crate) fn of<'a>(&self, command: &'a mut Command) -> &'a mut Command {
        command.env(REPORT, &self.0)
    }

    /// The table; an error if a class has no cases, since then nothing was shown.
    pub(crate) fn table(&self) -> Result<String, String> {
        let text = std::fs::read_to_string(&self.0)
            .map_err(|error| format!("{}: {error}", self.0.display()))?;
        table(&text)
    }
}

/// Runs the tests alone, with `--long` on many more random cases.
pub(crate) fn run(
    args: &[&str],
    target: &Path,
    cargo: &str,
    run: impl Fn(&mut Command) -> Result<(), String>,
) -> Result<String, String> {
    let is_long = match args {
        [] => false,
        ["--long"] => true,
        other => return Err(format!("attack {}: expected nothing, or --long", other.join(" "))),
    };
    let report = Report::new(target)?;
    for (package, filters) in TESTS {
        let mut command = Command::new(cargo);
        command
            .args(["test", "--quiet", "-p", package, "--all-features", "--test", "it", "--"])
            .args(filters);
        if is_long {
            command.env(TIMES, LONG);
        }
        run(report.of(&mut command))?;
    }
    report.table()
}

fn table(report: &str) -> Result<String, String> {
    let mut cases: BTreeMap<&str, (usize, usize)> = BTreeMap::new();
    for line in report.lines() {
        let (class, count) = line
            .split_once('\t')
            .ok_or_else(|| format!("attack: {line:?}: expected class and count"))?;
        let count: usize =
            count.parse().map_err(|_| format!("attack: {line:?}: expected a number of cases"))?;
        if !CLASSES.iter().any(|(own, _)| *own == class) {
            return Err(format!(
                "attack: the class {class:?} is not listed in tools/xtask/src/attack.rs"
            ));
        }
        let sum = cases.entry(class).or_default();
        *sum = (sum.0 + 1, sum.1 + count);
    }
    let mut text = String::from("class      tests   cases held\n");
    for (class, what) in CLASSES {
        let Some((tests, held)) = cases.get(class) else {
            return Err(format!("attack: no test reported a case of {class} ({what})"));
        };
        let _ = writeln!(text, "{class:<10} {tests:>5} {held:>12}   {what}");
    }
    Ok(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_class_without_cases_fails_and_counts_are_summed() {
        let every: String = CLASSES.iter().map(|(class, _)| format!("{class}\t2\n")).collect();
        let shown = table(&format!("{every}slow\t40\n")).unwrap();
        assert!(
            shown.lines().any(|line| line.starts_with("slow") && line.contains(" 2           42 ")),
            "{shown}"
        );
        assert!(table("slow\t1\n").unwrap_err().contains("no test reported a case of"));
        assert!(table(&format!("{every}other\t1\n")).unwrap_err().contains("not listed"));
        assert!(table("slow 1\n").is_err() && table("slow\tx\n").is_err());
    }
}
