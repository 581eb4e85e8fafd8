//! `tidegate validate` and `tidegate explain`: a rules file, before it is used.

use std::io::Write;

use anyhow::{Context, Result};
use tidegate::{Memory, Redis};
use tidegate_server::config::Config;
use tidegate_server::gate::{Backend, Gate};
use tidegate_server::rules::envoy::Domains;

use super::Outcome;
use crate::args;
use crate::output::{self, Paint};

/// Says whether a file is right.
pub(super) fn validate(args: &args::Validate) -> Result<Outcome> {
    let mut out = output::stdout();
    if args.file.is_dir() {
        let domains = Domains::load(&args.file)?;
        let (count, limits) = (domains.names().len(), domains.limits());
        writeln!(out, "{}: {count} domains with {limits} limits, nothing wrong", args.file.display())?;
        out.flush()?;
        return Ok(Outcome::Yes);
    }
    let config = Config::load(&args.file)?;
    let rules = config.rules.iter().count();
    writeln!(out, "{}: {rules} rules, nothing wrong", args.file.display())?;
    out.flush()?;
    Ok(Outcome::Yes)
}

/// Says which rules apply and why, and what they would answer.
pub(super) fn explain(args: &args::ExplainRules) -> Result<Outcome> {
    let config = Config::load(&args.config)?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let explanation = runtime.block_on(async {
        let store = match args.store.as_deref() {
            None | Some("memory") => Backend::Memory(Memory::new()),
            Some(url) => Backend::Redis(Redis::new(url).context("--store")?),
        };
        anyhow::Ok(Gate::new(store, config.rules).explain(&args.attributes[..], args.cost).await?)
    })?;
    let (mut out, paint) = (output::stdout(), Paint::stdout());
    for line in explanation.to_string().lines() {
        let line = if line.contains(": does not apply") { paint.faint(line.to_string()) } else { line.to_string() };
        writeln!(out, "{line}")?;
    }
    out.flush()?;
    Ok(if explanation.allowed { Outcome::Yes } else { Outcome::No })
}
