//! The arguments of the command.

use std::path::PathBuf;

use crate::rows::{ROWS, Row};

pub(crate) const HELP: &str = "\
cargo xtask faults [ROW...] [OPTIONS]

Does to real processes under load what each ROW (F1, F2, ...) is about, and judges what they answered. All rows unless some are named.

  --list       the rows: the fault, how it is injected, what must hold
  --quick      the rows that cover most, with less load and shorter (what continuous integration runs)
  --strict     bounds on time as they are meant, for a quiet machine, whose processors are kept awake (`chrt`, of util-linux);
               otherwise they are generous. Bounds on counts are always exact
  --seed N     where chance begins; 1 unless told
  --json       one object for each row
  --record DIR writes every request and its answer to DIR/ROW.csv

Exit code 1 if a row fails. Rows that need a network of their own need root, or a kernel that lets users have namespaces, and `nft`.
";

pub(crate) enum Wish {
    Help,
    List,
    Run,
}

pub(crate) struct Args {
    pub(crate) wish: Wish,
    names: Vec<String>,
    pub(crate) quick: bool,
    pub(crate) strict: bool,
    pub(crate) seed: u64,
    pub(crate) json: bool,
    /// Where every answer is written down.
    pub(crate) record: Option<PathBuf>,
    /// This process is already in a network of its own.
    pub(crate) inside: bool,
}

impl Args {
    pub(crate) fn parse(words: &[String]) -> Result<Args, String> {
        let mut args = Args {
            wish: Wish::Run,
            names: Vec::new(),
            quick: false,
            strict: false,
            seed: 1,
            json: false,
            record: None,
            inside: false,
        };
        let mut words = words.iter();
        while let Some(word) = words.next() {
            match word.as_str() {
                "--help" | "-h" => args.wish = Wish::Help,
                "--list" => args.wish = Wish::List,
                "--quick" => args.quick = true,
                "--strict" => args.strict = true,
                "--json" => args.json = true,
                "--inside" => args.inside = true,
                "--record" => {
                    let folder = words.next().ok_or("--record: expected a folder")?;
                    args.record = Some(folder.into());
                }
                "--seed" => {
                    let number = words.next().map_or("", String::as_str);
                    args.seed = number
                        .parse()
                        .map_err(|_| format!("--seed: expected a number, found {number:?}"))?;
                }
                option if option.starts_with('-') => {
                    return Err(format!(
                        "unknown option {option:?}: expected one of these\n\n{HELP}"
                    ));
                }
                name => {
                    let name = name.to_uppercase();
                    if !ROWS.iter().any(|row| row.name == name) {
                        return Err(format!(
                            "there is no row {name:?}: `cargo xtask faults --list` has them all"
                        ));
                    }
                    args.names.push(name);
                }
            }
        }
        Ok(args)
    }

    /// The rows to run, in the order of the catalogue.
    pub(crate) fn rows(&self) -> impl Iterator<Item = &'static Row> {
        ROWS.iter().filter(|row| match &self.names[..] {
            [] => row.quick || !self.quick,
            names => names.iter().any(|name| name == row.name),
        })
    }
}
