//! `tidegate validate` and `tidegate explain`: a rules file, before it is used.

use std::io::Write;

use anyhow::Result;
use tidegate::{Memory, Op};
use tidegate_server::config::Config;
use tidegate_server::gate::{Backend, Gate};
use tidegate_server::rules::Budget;

use super::Outcome;
use crate::args;
use crate::output::{self, Paint};

/// Says whether a file is right.
pub(super) fn validate(args: &args::Validate) -> Result<Outcome> {
    let config = Config::load(&args.file)?;
    let mut out = output::stdout();
    let rules = config.rules.iter().count();
    writeln!(out, "{}: {rules} rules, nothing wrong", args.file.display())?;
    out.flush()?;
    Ok(Outcome::Yes)
}

/// Says which rules apply, and what they would answer.
pub(super) fn explain(args: &args::ExplainRules) -> Result<Outcome> {
    let config = Config::load(&args.config)?;
    let found = config.rules.matching(&args.attributes[..], args.cost)?;
    let (mut out, paint) = (output::stdout(), Paint::stdout());
    for rule in config.rules.iter() {
        let Some(own) = found.iter().find(|own| own.rule.name == rule.name) else {
            writeln!(out, "{}", paint.faint(format!("  {}: does not apply", rule.name)))?;
            continue;
        };
        let key =
            if rule.by.is_empty() { "everybody".into() } else { format!("{:?}", String::from_utf8_lossy(&own.key)) };
        let budget = match &own.budget {
            Budget::Limits(limits) => format!("{limits}, costs {}", own.cost),
            Budget::Unlimited => "unlimited".into(),
            Budget::Deny => "lets nothing pass".into(),
        };
        let shadow = if rule.mode == tidegate_server::rules::Mode::Shadow { " (shadow: denies nothing)" } else { "" };
        writeln!(out, "  {}: applies to {key}: {budget}{shadow}", paint.strong(rule.name.to_string()))?;
    }
    let gate = Gate::new(Backend::Memory(Memory::new()), config.rules);
    let runtime = tokio::runtime::Builder::new_current_thread().build()?;
    let ruling = runtime.block_on(gate.rule(Op::Peek, &args.attributes[..], args.cost, None))?;
    let word = if ruling.allowed { paint.good("would pass") } else { paint.bad("would be denied") };
    writeln!(out, "a first request {word}")?;
    out.flush()?;
    Ok(if ruling.allowed { Outcome::Yes } else { Outcome::No })
}
