//! Writes the file under test once more for each of its orderings, with that one ordering left out:
//! the tests must notice.

use std::fmt::Write as _;
use std::path::Path;
use std::{env, fs};

const UNDER_TEST: &str = "../../crates/tidegate/src/sync/version.rs";

fn main() {
    println!("cargo::rerun-if-changed={UNDER_TEST}");
    println!("cargo::rerun-if-changed=build.rs");
    let here = env::var("CARGO_MANIFEST_DIR").expect("cargo says where");
    let text = fs::read_to_string(Path::new(&here).join(UNDER_TEST))
        .expect("the file under test can be read");
    let lines: Vec<&str> =
        text.lines().filter(|line| !line.trim_start().starts_with("//")).collect();
    let mut modules = String::new();
    let mut names = String::new();
    let mut number = 0;
    for (at, line) in lines.iter().enumerate() {
        let weaker = if line.trim_start().starts_with("fence(") {
            String::new()
        } else {
            line.replace("Ordering::Acquire", "Ordering::Relaxed")
                .replace("Ordering::Release", "Ordering::Relaxed")
        };
        if weaker == **line || line.starts_with("use ") {
            continue;
        }
        number += 1;
        let mut changed = lines.clone();
        changed[at] = &weaker;
        let function =
            lines[..at].iter().rev().find_map(|line| line.split("fn ").nth(1)).unwrap_or_default();
        let what =
            format!("{} in {}", line.trim(), function.split(['<', '(']).next().unwrap_or_default());
        let changed = changed.join("\n");
        writeln!(
            modules,
            "mod weaker_{number} {{\n#[allow(unused, clippy::all)] pub(super) mod version {{\n{changed}\n}}\n#[path = {scenarios:?}] pub(super) mod scenarios;\n}}",
            scenarios = Path::new(&here).join("src/scenarios.rs")
        )
        .expect("a string takes everything");
        write!(names, "({what:?}, weaker_{number}::scenarios::ALL), ")
            .expect("a string takes everything");
    }
    write!(modules, "const WEAKER: &[(&str, &[sound::scenarios::Scenario])] = &[{names}];")
        .expect("a string takes everything");
    let out = Path::new(&env::var("OUT_DIR").expect("cargo says where")).join("weaker.rs");
    fs::write(out, modules).expect("the weaker ones can be written");
}
