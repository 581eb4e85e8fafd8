//! The faults, one row each, by the numbers of the catalogue.

mod catalogue;
mod failing;
mod failover;
mod forgetful;
mod host;
mod network;
mod nodes;
mod surges;

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::PathBuf;
use std::process::Command;
use std::time::{Duration, Instant};

pub(crate) use self::catalogue::ROWS;
use crate::args::Args;
use crate::judge::{Judged, RowOutcome, Verdict};
use crate::report;
use crate::stage::beside;

/// One fault of the catalogue.
pub(crate) struct Row {
    pub(crate) name: &'static str,
    pub(crate) fault: &'static str,
    pub(crate) inject: &'static str,
    pub(crate) holds: &'static str,
    /// Whether it is among the few that continuous integration runs.
    pub(crate) quick: bool,
    pub(crate) kind: Kind,
}

pub(crate) enum Kind {
    /// Real processes.
    Real(fn(&Context) -> Judged),
    /// Real processes in a network of their own.
    Net(fn(&Context) -> Judged),
    /// Tests that prove it completely: the arguments of `cargo test`, and a name.
    Tests(&'static [(&'static [&'static str], &'static str)]),
}

/// What a row may depend on.
pub(crate) struct Context {
    pub(crate) seed: u64,
    pub(crate) strict: bool,
    quick: bool,
    /// Requests a second, as usual.
    pub(crate) rate: u64,
    /// The file in which every answer is written down, if that is wanted.
    pub(crate) record: Option<PathBuf>,
}

impl Context {
    fn new(row: &Row, args: &Args) -> Context {
        let record = args.record.as_ref().map(|folder| folder.join(row.name).with_extension("csv"));
        let mut context =
            Context { seed: args.seed, strict: args.strict, quick: args.quick, rate: 0, record };
        context.rate = context.scaled(4000);
        context
    }

    /// So many requests a second, or a quarter of that in a short run.
    pub(crate) fn scaled(&self, rate: u64) -> u64 {
        if self.quick { rate / 4 } else { rate }
    }

    /// A budget that the usual load has used up after a second and a half.
    pub(crate) fn tight(&self) -> u64 {
        self.rate * 3 / 50
    }
}

pub(crate) fn millis(ms: u64) -> Duration {
    Duration::from_millis(ms)
}

/// Plays a row.
pub(crate) fn play(row: &'static Row, args: &Args) -> RowOutcome {
    let began = Instant::now();
    let (verdict, judged) = match &row.kind {
        Kind::Real(play) => real(row, *play, args),
        Kind::Net(play) if args.inside => real(row, *play, args),
        Kind::Net(_) => in_a_network(row, args),
        Kind::Tests(tests) => by_tests(tests),
    };
    let Judged { line, figures, problems } = judged;
    RowOutcome {
        row: row.name,
        verdict,
        line,
        figures,
        problems,
        seconds: began.elapsed().as_secs_f64(),
    }
}

fn real(row: &Row, play: fn(&Context) -> Judged, args: &Args) -> (Verdict, Judged) {
    let context = Context::new(row, args);
    match catch_unwind(AssertUnwindSafe(|| play(&context))) {
        Ok(judged) if judged.problems.is_empty() => (Verdict::Ok, judged),
        Ok(judged) => (Verdict::Failed, judged),
        Err(panic) => {
            let text = panic.downcast_ref::<String>().cloned();
            let text = text.or_else(|| panic.downcast_ref::<&str>().map(|text| (*text).to_owned()));
            failed("it came to no end".into(), text.unwrap_or_default())
        }
    }
}

/// Plays it by another process of this program whose network is its own: whatever is done to it
/// affects no other process and ends with it.
fn in_a_network(row: &Row, args: &Args) -> (Verdict, Judged) {
    let mut command = Command::new("unshare");
    if !rustix::process::getuid().is_root() {
        command.args(["--user", "--map-root-user"]);
    }
    command
        .args(["--net", "--mount", "--", "sh", "-c", r#"ip link set lo up && exec "$0" "$@""#])
        .arg(beside("faults"));
    command.args([row.name, "--inside", "--json", "--seed", &args.seed.to_string()]);
    if let Some(folder) = &args.record {
        command.arg("--record").arg(folder);
    }
    command.args(args.strict.then_some("--strict")).args(args.quick.then_some("--quick"));
    match command.output() {
        Ok(output) => match report::from_json(&String::from_utf8_lossy(&output.stdout)) {
            Some((judged, true)) => (Verdict::Ok, judged),
            Some((judged, false)) => (Verdict::Failed, judged),
            None => failed(
                "no network of its own".into(),
                String::from_utf8_lossy(&output.stderr).into_owned(),
            ),
        },
        Err(error) => failed(
            "no network of its own".into(),
            format!("unshare: {error}; `apt-get install util-linux`"),
        ),
    }
}

fn by_tests(tests: &[(&[&str], &str)]) -> (Verdict, Judged) {
    let cargo = std::env::var("CARGO").unwrap_or_else(|_| "cargo".into());
    for (place, name) in tests {
        let mut command = Command::new(&cargo);
        command.args(["test", "--quiet", "--all-features"]).args(*place).arg(name);
        command.current_dir(concat!(env!("CARGO_MANIFEST_DIR"), "/../.."));
        match command.output() {
            Ok(output) if output.status.success() && ran_one(&output.stdout) => {}
            Ok(output) => {
                let text = [output.stdout, output.stderr].concat();
                return failed(
                    format!("tests: {name}"),
                    String::from_utf8_lossy(&text).into_owned(),
                );
            }
            Err(error) => return failed(format!("tests: {name}"), error.to_string()),
        }
    }
    let names: Vec<&str> = tests.iter().map(|test| test.1).collect();
    (Verdict::Ok, of_line(format!("tests passed: {}", names.join(", "))))
}

/// A test that was renamed is not a test that passed.
fn ran_one(output: &[u8]) -> bool {
    String::from_utf8_lossy(output)
        .lines()
        .any(|line| line.starts_with("test result: ok. ") && !line.contains("ok. 0 passed"))
}

fn of_line(line: String) -> Judged {
    Judged { line, figures: Vec::new(), problems: Vec::new() }
}

fn failed(line: String, problem: String) -> (Verdict, Judged) {
    (Verdict::Failed, Judged { line, figures: Vec::new(), problems: vec![problem] })
}
