//! Arguments of `tidegate validate`.

use std::path::PathBuf;

/// Check a configuration file, or a folder with the configuration of envoyproxy/ratelimit, before
/// you use it.
///
/// Prints all findings in one run, by line and column, with what to write instead. Reads the files
/// that the configuration names and connects to its store, without charging any key. `tidegate
/// serve` refuses a configuration with errors. Warnings are settings that work but are probably not
/// intended; `serve` logs them when it reads the file.
#[derive(clap::Args, Debug)]
#[command(after_help = "\
Examples:
  tidegate validate tidegate.yaml
  tidegate validate --strict --offline tidegate.yaml     # for CI: no secrets, no store

Exit codes: 0 no errors, 2 errors.")]
pub(crate) struct Validate {
    /// The configuration file, or the folder
    pub(crate) file: PathBuf,
    /// Treat warnings as errors
    #[arg(long)]
    pub(crate) strict: bool,
    /// Check the text alone: read no other files (tokens, certificates, secrets, folders), and do
    /// not connect to the store
    #[arg(long)]
    pub(crate) offline: bool,
}
