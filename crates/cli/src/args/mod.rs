//! The command line: arguments of each command, and the values that they parse to.
//!
//! Every mistake that can be found without running a command is found here.

mod check;
mod doctor;
mod explain;
mod limits;
mod proxy;
mod serve;
mod simulate;
mod validate;
mod values;

use clap::{Parser, Subcommand};
use clap_complete::Shell;

pub(crate) use self::check::Check;
pub(crate) use self::doctor::Doctor;
pub(crate) use self::explain::Explain;
pub(crate) use self::limits::Limits;
pub(crate) use self::proxy::Proxy;
pub(crate) use self::serve::Serve;
#[cfg(test)]
pub(crate) use self::simulate::MAX_RATE;
pub(crate) use self::simulate::{Format, Generated, Pattern, Rate, Simulate};
pub(crate) use self::validate::Validate;
pub(crate) use self::values::{LimitText, ServerArgs, StoreUrl, limit};

/// An exact rate limiter: check keys, simulate limits before you enforce them, and see what a limit
/// means.
#[derive(Parser, Debug)]
#[command(name = "tidegate", version, max_term_width = 110, after_help = EXAMPLES)]
pub(crate) struct Args {
    #[command(subcommand)]
    pub(crate) command: Command,
}

const EXAMPLES: &str = "\
Examples:
  tidegate limits '30/min burst 15'
      Explain a limit and its worst case.

  tidegate simulate --limit '10/s' --limit '10/s window' --rate 20/s --pattern burst --for 10s
      Compare a bucket and a fixed window on the same traffic.

  tidegate check user:7 --limit '10/s; 120/m' --cost 3 --json
      Print one decision as JSON.

  tidegate doctor --store redis://127.0.0.1
      Inspect a store, and measure how long a decision takes.

A limit is `amount/period [algorithm] [options]`, several joined by `;`:
  10/s                           a bucket that holds 10 and regrows 10 a second
  30/min burst 15                a bucket that holds 15
  240/h window                   a fixed window; also `window from first hit`
  240/h sliding step 1m          a window that slides in steps; also `lenient`
  1000/day estimate              two windows, the previous one weighted
  5/20s log                      every request kept; also `count rejected`
  20 concurrent ttl 30s          leases in flight

Exit codes: 0 allowed or done, 1 denied or not as expected, 2 usage or error.";

#[derive(Subcommand, Debug)]
pub(crate) enum Command {
    Check(Check),
    Simulate(Box<Simulate>),
    Limits(Limits),
    Doctor(Doctor),
    Serve(Box<Serve>),
    Proxy(Box<Proxy>),
    Validate(Validate),
    Explain(Explain),
    /// Print a completion script for a shell
    #[command(after_help = "\
Example:
  tidegate completions bash > /etc/bash_completion.d/tidegate")]
    Completions {
        /// The shell that the script is for
        shell: Shell,
    },
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    #[test]
    fn the_command_line_is_consistent() {
        Args::command().debug_assert();
    }
}
