//! `cargo xtask`: everything that has to be done to this repository, by one command each.

mod attack;
mod mutants;
mod packages;
mod previous;
mod quick;
mod servers;
mod tidy;

use std::env;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};
use std::time::Instant;

const HELP: &str = "\
cargo xtask COMMAND

  test [--quick]      everything that must pass before a change lands: format, lints, tests,
                      documentation, examples, packages, simulator. Installs what is missing.
                      --quick: format, lints, tidy, unit tests, and one test of each protocol
                      and store; about three minutes once everything is compiled
  ci                  the same as test; continuous integration runs it
  tidy [PATH...]      checks what rustfmt and clippy do not: width, banned words, type names,
                      file length, import cycles, links, paths, lists and facts that stand
                      twice. With paths: prints only findings in these files and folders
  exact [--ops N]     compares N decisions per algorithm with an independent online checker
                      (default 1e9: minutes each); also: --algorithm NAME, --seed S
  loom                runs lock-free code in every order of threads, and shows for each memory
                      ordering that the tests fail without it
  sim [ARGS]          simulates nodes over a network and a server that fail, one seed after
                      the other (default 2000 seeds); see --help
  faults [ROW...]     injects faults into real processes under load and judges their answers:
                      F1, F2, ... or all; --list, --quick, --help
  attack [--long]     runs the tests that attack the built program and real backends, and counts
                      cases per class; --long runs a hundred times as many random cases
  mutants [AREA]      changes the deciding code in every way that cargo-mutants knows, and lists
                      the changes that no test notices; hours for all areas. Options after AREA
                      go to cargo-mutants, for example --jobs 2
  bench [ARGS]        measures beside rivals and bounds in one run (see tools/bench/README.md)
  servers [--bench]   installs the Redis and Valkey servers, gateways (nginx, Caddy, HAProxy,
                      Envoy) and clients that tests use into target/servers/, or into
                      TIDEGATE_SERVERS. --bench adds the module redis-cell
  packages            checks licences and banned packages with `cargo metadata`
  pictures            draws the pictures under docs/pictures/ again
";

fn main() -> ExitCode {
    let args: Vec<String> = env::args().skip(1).collect();
    let rest: Vec<&str> = args.iter().skip(1).map(String::as_str).collect();
    let result = match args.first().map(String::as_str) {
        Some("test" | "ci") => match rest[..] {
            [] => test(),
            ["--quick"] => test_quick(),
            _ => Err(format!("test {}: expected nothing or --quick", rest.join(" "))),
        },
        Some("exact") => exact(&rest),
        Some("loom") => loom(),
        Some("bench") => bench(&rest),
        Some("faults") => faults(&rest),
        Some("attack") => attack::run(&rest, &target(), &cargo_path(), |command| run(command))
            .map(|table| say(&table)),
        Some("mutants") => mutants::run(&rest, &target(), &cargo_path(), |command| run(command)),
        Some("servers") => servers::install(&rest),
        Some("packages") => packages::check(&root()),
        Some("sim") => sim(&rest),
        Some("pictures") => pictures(),
        Some("tidy") => tidy::run(&root(), &rest, say),
        Some("help" | "--help" | "-h") => {
            say(HELP);
            Ok(())
        }
        other => Err(format!(
            "unknown command {:?}: expected one of these\n\n{HELP}",
            other.unwrap_or("")
        )),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(problem) => {
            eprintln!("xtask: {problem}");
            ExitCode::FAILURE
        }
    }
}

fn test() -> Result<(), String> {
    let start = Instant::now();
    format_and_lints()?;
    step("packages: licences and bans", || packages::check(&root()))?;
    step("servers", || servers::install(&["--bench"]))?;
    let report = attack::Report::new(&target())?;
    step("tests", || {
        let mut command = Command::new(cargo_path());
        command.args(["test", "--workspace", "--all-features", "--all-targets"]);
        run(report.of(&mut command))
    })?;
    step("attacks that held", || report.table().map(|table| say(&table)))?;
    step("faults, the covering few", || {
        // As the tests were built, so nothing is built again.
        let mut command = Command::new(cargo_path());
        command.args([
            "test",
            "--workspace",
            "--all-features",
            "--test",
            "covering",
            "--",
            "--ignored",
            "--nocapture",
        ]);
        run(command)
    })?;
    step("examples", examples)?;
    step(
        "examples in the documentation",
        cargo(&["test", "--workspace", "--all-features", "--doc"]),
    )?;
    step("documentation", || {
        let doc = ["doc", "--workspace", "--all-features", "--no-deps", "--document-private-items"];
        run(Command::new(cargo_path()).args(doc).env("RUSTDOCFLAGS", "-D warnings"))
    })?;
    step("exactness, a short run", || exact(&["--ops", "2e6"]))?;
    step("every order of threads", loom)?;
    step("bench: lints", || run(in_bench(&["clippy", "--all-targets", "--", "-D", "warnings"])))?;
    step("fuzz targets: lints", || {
        run(in_fuzz(&["clippy", "--all-targets", "--", "-D", "warnings"]))
    })?;
    step("simulator: lints", || {
        run(cargo_in("sim", &["clippy", "--all-targets", "--", "-D", "warnings"]))
    })?;
    step("simulator: tests", || run(cargo_in("sim", &["test", "--quiet"])))?;
    step("simulator: 2000 seeds", || sim(&["--seeds", "2000"]))?;
    say(&format!("\neverything passed in {} s\n", start.elapsed().as_secs()));
    Ok(())
}

/// What is worth running after each change.
fn test_quick() -> Result<(), String> {
    let start = Instant::now();
    format_and_lints()?;
    step("servers", || servers::install(&["--bench"]))?;
    step("tests", || quick::tests(&cargo_path(), |command| run(command)))?;
    say(&format!("\nthe quick tests passed in {} s\n", start.elapsed().as_secs()));
    Ok(())
}

fn format_and_lints() -> Result<(), String> {
    need_component("fmt", "rustfmt")?;
    need_component("clippy", "clippy")?;
    step("format", cargo(&["fmt", "--all", "--check"]))?;
    step("tidy", || tidy::gate(&root(), say))?;
    step(
        "lints",
        cargo(&[
            "clippy",
            "--workspace",
            "--all-targets",
            "--all-features",
            "--",
            "-D",
            "warnings",
        ]),
    )
}

/// Every example of the library runs to its end.
fn examples() -> Result<(), String> {
    let folder = root().join("crates/tidegate/examples");
    let files =
        std::fs::read_dir(&folder).map_err(|error| format!("crates/tidegate/examples: {error}"))?;
    let mut names: Vec<String> = files
        .filter_map(|file| {
            file.ok()?.path().file_stem().map(|name| name.to_string_lossy().into_owned())
        })
        .collect();
    names.sort();
    if names.is_empty() {
        return Err("crates/tidegate/examples: expected at least one example".into());
    }
    // As the tests have built them: the same features and the same profile, so there is nothing
    // left to build.
    let build =
        ["build", "--quiet", "--workspace", "--all-features", "--examples", "--profile", "test"];
    run(Command::new(cargo_path()).args(build))?;
    for name in names {
        say(&format!("-- {name}\n"));
        run(&mut Command::new(target().join("debug/examples").join(&name)))?;
    }
    Ok(())
}

fn exact(args: &[&str]) -> Result<(), String> {
    let mut command = Command::new(cargo_path());
    command.args([
        "run",
        "--quiet",
        "--release",
        "-p",
        "tidegate-core",
        "--example",
        "exact",
        "--",
    ]);
    if !args.contains(&"--ops") {
        command.args(["--ops", "1e9"]);
    }
    run(command.args(args))
}

/// Files of the product, compiled with atomics that try every order.
fn loom() -> Result<(), String> {
    run(cargo_in("loom", &["clippy", "--all-targets", "--", "-D", "warnings"]))?;
    run(cargo_in("loom", &["test", "--quiet"]))
}

fn bench(args: &[&str]) -> Result<(), String> {
    let args = if args.is_empty() { &["memory"] } else { args };
    let mut command = in_bench(&["run", "--quiet", "--release", "--"]);
    run(command.args(args))
}

fn sim(args: &[&str]) -> Result<(), String> {
    let mut command = cargo_in("sim", &["run", "--quiet", "--"]);
    run(command.args(args))
}

/// Optimised, as the product is shipped.
fn faults(args: &[&str]) -> Result<(), String> {
    run(Command::new(cargo_path()).args([
        "build",
        "--quiet",
        "--release",
        "-p",
        "tidegate-cli",
        "-p",
        "tidegate-faults",
    ]))?;
    let target = target();
    // A row about two releases needs the one before.
    let rows: Vec<&&str> = args.iter().filter(|arg| arg.starts_with(['F', 'f'])).collect();
    let needed = rows.iter().any(|row| row.eq_ignore_ascii_case("F63"));
    let only_few = ["--quick", "--list", "--help", "-h"].iter().any(|option| args.contains(option));
    if needed || rows.is_empty() && !only_few {
        previous::build(&target)?;
    }
    run(Command::new(target.join("release/faults")).args(args))
}

fn in_bench(args: &[&str]) -> Command {
    cargo_in("bench", args)
}

/// The targets themselves run as tests of the server; here they are only compiled as programs of a
/// fuzzer.
fn in_fuzz(args: &[&str]) -> Command {
    cargo_in("fuzz", args)
}

fn cargo_in(folder: &str, args: &[&str]) -> Command {
    let mut command = Command::new(cargo_path());
    command.current_dir(root().join("tools").join(folder)).args(args);
    command
}

fn pictures() -> Result<(), String> {
    let script = root().join("docs/pictures/make");
    run(Command::new("bash").arg(script))
}

/// A step of a longer command, announced, so that a long command shows what it does.
fn step(name: &str, action: impl FnOnce() -> Result<(), String>) -> Result<(), String> {
    say(&format!("\n== {name}\n"));
    action().map_err(|problem| format!("{name}: {problem}"))
}

fn cargo<'a>(args: &'a [&'a str]) -> impl FnOnce() -> Result<(), String> + 'a {
    move || run(Command::new(cargo_path()).args(args))
}

fn cargo_path() -> String {
    env::var("CARGO").unwrap_or_else(|_| "cargo".into())
}

fn run(command: impl std::borrow::BorrowMut<Command>) -> Result<(), String> {
    let mut command = command;
    let command = command.borrow_mut();
    if command.get_current_dir().is_none() {
        command.current_dir(root());
    }
    let words: Vec<String> = std::iter::once(command.get_program())
        .chain(command.get_args())
        .map(|word| Path::new(word).file_name().unwrap_or(word).to_string_lossy().into_owned())
        .collect();
    let line = words.join(" ");
    match command.status() {
        Ok(status) if status.success() => Ok(()),
        Ok(status) => Err(format!("`{line}` failed: {status}")),
        Err(error) => Err(format!("`{line}` could not be started: {error}")),
    }
}

/// A part of the toolchain that `cargo SUBCOMMAND` needs: installed if it can be, otherwise named
/// with the command that would.
fn need_component(subcommand: &str, component: &str) -> Result<(), String> {
    let works = || {
        Command::new(cargo_path())
            .args([subcommand, "--version"])
            .output()
            .is_ok_and(|o| o.status.success())
    };
    if works() {
        return Ok(());
    }
    let _ = Command::new("rustup").args(["component", "add", component]).status();
    if works() {
        Ok(())
    } else {
        Err(format!("`cargo {subcommand}` is missing: run `rustup component add {component}`"))
    }
}

/// Where cargo builds.
fn target() -> PathBuf {
    env::var("CARGO_TARGET_DIR")
        .map_or_else(|_| root().join("target"), |folder| root().join(folder))
}

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .ancestors()
        .nth(2)
        .map(Path::to_path_buf)
        .unwrap_or_default()
}

#[allow(clippy::print_stdout, reason = "it is a command for people")]
fn say(text: &str) {
    print!("{text}");
}
