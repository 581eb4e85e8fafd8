//! `tidegate check`: one decision, for people or for programs.

use std::io::{self, Write};

use anyhow::Result;
use tidegate::{Check, Memory, Store};
use tidegate_core::{Decision, Op, Retry, Verdict};

use super::client;
use super::store::{self, Remote};
use super::{Outcome, json_string, write_numbers};
use crate::args;
use crate::output::{self, Paint, grouped, human, units};

pub(crate) fn run(args: &args::Check) -> Result<Outcome> {
    let check = Check::of(args.op.op()).charge(&args.key, &args.limit.limits, args.cost);
    let (decision, place) = decided(args, &check)?;
    let place = place.as_deref();
    let mut out = output::stdout();
    if args.json {
        json(&mut out, args, place, &check, &decision)?;
    } else {
        sentences(&mut out, args, &check, &decision)?;
        if let Some(place) = place {
            writeln!(out, "  {}", Paint::stdout().faint(format!("decided by {place}")))?;
        }
    }
    out.flush()?;
    Ok(if decision.allowed() { Outcome::Yes } else { Outcome::No })
}

/// The decision, and the server that made it, if any.
fn decided(args: &args::Check, check: &Check<'_>) -> Result<(Decision, Option<String>)> {
    if let Some(url) = &args.server.server {
        return Ok((client::check(url, args, check.op().name())?, Some(url.clone())));
    }
    let remote = Remote::open(&args.store.store, |builder| match &args.namespace {
        Some(namespace) => builder.namespace(namespace),
        None => builder,
    })?;
    Ok(match remote {
        None => (Memory::new().decide(check)?, None),
        Some(remote) => {
            let decision = remote.run(remote.redis.decide(check)).map_err(store::explained)?;
            (decision, Some(remote.shown))
        }
    })
}

fn json(
    out: &mut dyn Write,
    args: &args::Check,
    place: Option<&str>,
    check: &Check<'_>,
    decision: &Decision,
) -> io::Result<()> {
    let (key, limit) = (json_string(&args.key), json_string(&args.limit.text));
    let (t_us, cost, op) = (decision.at().as_micros(), args.cost, check.op().name());
    write!(out, r#"{{"t_us":{t_us},"key":{key},"cost":{cost},"op":"{op}","limit":{limit},"#)?;
    write_numbers(out, decision.allowed(), decision.binding())?;
    out.write_all(br#","charges":["#)?;
    for (index, (charge, verdict)) in check.charges().iter().zip(decision.charges()).enumerate() {
        let comma = if index > 0 { "," } else { "" };
        let binding = index == decision.binding_index();
        let (limit, amount, cost) =
            (json_string(&charge.limit.to_string()), verdict.amount, charge.cost);
        write!(
            out,
            r#"{comma}{{"limit":{limit},"amount":{amount},"cost":{cost},"binding":{binding},"#
        )?;
        write_numbers(out, verdict.allowed, verdict)?;
        out.write_all(b"}")?;
    }
    out.write_all(b"]")?;
    if let Some(place) = place {
        write!(out, r#","store":{}"#, json_string(place))?;
    }
    writeln!(out, "}}")
}

fn sentences(
    out: &mut dyn Write,
    args: &args::Check,
    check: &Check<'_>,
    decision: &Decision,
) -> io::Result<()> {
    let paint = Paint::stdout();
    let word = if decision.allowed() { paint.good("allowed") } else { paint.bad("denied") };
    writeln!(out, "{word}: {}", what(args, check.op(), decision))?;
    let limits: Vec<String> =
        check.charges().iter().map(|charge| charge.limit.to_string()).collect();
    let width = limits.iter().map(|limit| limit.chars().count()).max().unwrap_or(0);
    for (index, (limit, verdict)) in limits.iter().zip(decision.charges()).enumerate() {
        let padded = format!("{limit:width$}");
        let note = if limits.len() > 1 && index == decision.binding_index() {
            "  <- this one binds"
        } else {
            ""
        };
        writeln!(out, "  {}  {}{}", paint.strong(padded), numbers(verdict), paint.faint(note))?;
    }
    Ok(())
}

/// What was done, in a sentence.
fn what(args: &args::Check, op: Op, decision: &Decision) -> String {
    let (key, cost, granted) =
        (args.key.escape_debug(), units(args.cost), units(decision.granted()));
    match (op, decision.allowed()) {
        (_, _) if args.cost == 0 && !matches!(op, Op::Reset) => {
            format!("{key} requested nothing; its state was read")
        }
        (Op::Peek, true) => format!("{key} could take {cost} now; nothing was taken"),
        (Op::Take, true) => format!("{key} requested {cost} and took {granted}"),
        (Op::Refund, _) => format!("{granted} of {cost} were returned to {key}"),
        (Op::Reset, _) => format!("the state of {key} was deleted"),
        (_, true) => format!("{key} took {cost}"),
        (Op::Debit, false) => format!("{key} requested {cost}, beyond the debt; nothing was taken"),
        (_, false) => format!("{key} requested {cost}; nothing was taken"),
    }
}

fn numbers(verdict: &Verdict) -> String {
    let mut text = format!("{} of {} left", grouped(verdict.remaining), grouped(verdict.amount));
    match verdict.retry {
        Retry::Now => {}
        Retry::After(micros) => text += &format!(", try again in {}", human(micros)),
        Retry::Never => text += ", can never pass: it costs more than the limit holds",
    }
    if verdict.reset_after_us > 0 {
        text += &format!(", full again in {}", human(verdict.reset_after_us));
    }
    text
}
