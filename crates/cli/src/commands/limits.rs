//! `tidegate limits`: what a limit means, in plain words and in numbers.

use std::io::{self, Write};

use anyhow::Result;
use tidegate_core::{Algorithm, Charge, Limit, Op, Record, Timestamp, decide};

use super::{Outcome, json_string};
use crate::args;
use crate::output::{self, Paint, grouped, human, units, wrapped};

pub(crate) fn run(args: &args::Limits) -> Result<Outcome> {
    let facts: Vec<Facts> = args.limit.limits.iter().map(Facts::of).collect();
    let mut out = output::stdout();
    if args.json {
        json(&mut out, &facts)?
    } else {
        sentences(&mut out, &facts)?
    }
    out.flush()?;
    Ok(Outcome::Yes)
}

/// The properties of one limit.
struct Facts {
    limit: Limit,
    explanation: String,
    /// After the full capacity is taken: how long until any unit is back.
    next_after_us: u64,
    /// After the full capacity is taken: how long until all units are back.
    full_after_us: u64,
}

impl Facts {
    fn of(limit: &Limit) -> Self {
        let mut record = Record::default();
        let mut everything = [Charge::new(limit, &mut record, limit.capacity())];
        let emptied = decide(Op::Check, &mut everything, Timestamp::EPOCH);
        let verdict = emptied.binding();
        let (next_after_us, full_after_us) = (verdict.next_after_us, verdict.reset_after_us);
        Facts {
            limit: *limit,
            explanation: explain(limit, full_after_us),
            next_after_us,
            full_after_us,
        }
    }
}

/// A limit in a sentence or two.
fn explain(limit: &Limit, full_after_us: u64) -> String {
    let algorithm = limit.algorithm();
    let (amount, period) = (grouped(algorithm.amount()), human(algorithm.period_us()));
    let mut text = match algorithm {
        Algorithm::Bucket(bucket) => format!(
            "A bucket that holds {} and regrows {amount} every {}, evenly. A request passes if its cost is there; an \
             empty bucket is full again after {}.",
            units(bucket.capacity),
            every(&period),
            human(full_after_us),
        ),
        Algorithm::Window(window) if window.from_first_hit => format!(
            "At most {amount} in a window of {period} that begins with the first request after the last window ended. Then \
             all of it is available again.",
        ),
        Algorithm::Window(_) => format!(
            "At most {amount} in each window of {period}, counted by the clock from the Unix epoch. When a window ends, \
             all of it is available again.",
        ),
        Algorithm::Sliding(sliding) => {
            let (step, when) =
                (human(sliding.step), if sliding.lenient { "early" } else { "late" });
            let span = if sliding.lenient { "in about" } else { "in any span of" };
            format!(
                "At most {amount} {span} {period}, counted in steps of {step}. What was taken in a step is available again \
                 together, up to one step {when}.",
            )
        }
        Algorithm::Estimate(_) => format!(
            "About {amount} in any span of {period}: what was taken in the previous window of the clock counts by the part of it \
             that the span still covers.",
        ),
        Algorithm::Log(_) => format!(
            "At most {amount} in any span of {period}, exactly: every request is kept with its time and counts for {period}.",
        ),
        Algorithm::Concurrent(_) => format!(
            "At most {amount} in flight: a request holds its units until it releases them, or for {period} if it never does.",
        ),
    };
    if limit.counts_rejected() {
        text +=
            " Denied requests count as well, so a client that keeps hammering stays locked out.";
    }
    text
}

/// `minute` and not `1 min`.
fn every(period: &str) -> &str {
    const WORDS: [(&str, &str); 4] =
        [("1 s", "second"), ("1 min", "minute"), ("1 h", "hour"), ("1 d", "day")];
    WORDS.iter().find(|(short, _)| *short == period).map_or(period, |(_, word)| word)
}

/// Explains the worst case.
fn why(limit: &Limit) -> &'static str {
    let worst = limit.worst_case();
    match limit.algorithm() {
        Algorithm::Bucket(_) => "a full burst, and what regrows before the period is over",
        Algorithm::Window(_) if worst > limit.capacity() => {
            "the end of one window and the beginning of the next"
        }
        Algorithm::Sliding(_) if worst > limit.capacity() => {
            "a step is dropped while others of its period are still to come"
        }
        Algorithm::Estimate(_) => "late in one window, and late in the next",
        _ => "never more",
    }
}

fn sentences(out: &mut dyn Write, facts: &[Facts]) -> io::Result<()> {
    let paint = Paint::stdout();
    if facts.len() > 1 {
        let least = facts.iter().map(|facts| facts.limit.capacity()).min().unwrap_or(0);
        let together = format!(
            "{} limits that are decided together: a request passes if all of them allow it, and is then charged to all of \
             them. One request can take at most {}.",
            facts.len(),
            units(least)
        );
        writeln!(out, "{}\n", wrapped(&together, ""))?;
    }
    for (index, facts) in facts.iter().enumerate() {
        if index > 0 {
            writeln!(out)?;
        }
        let limit = &facts.limit;
        writeln!(out, "{}", paint.strong(limit))?;
        writeln!(out, "{}\n", wrapped(&facts.explanation, "  "))?;
        let mut row = |name: &str, value: String| {
            writeln!(out, "  {} {value}", paint.faint(format!("{name:12}")))
        };
        row("capacity", units(limit.capacity()))?;
        let within = match limit.algorithm() {
            Algorithm::Concurrent(_) => "in flight".to_owned(),
            algorithm => format!("within {}", human(algorithm.period_us())),
        };
        row("worst case", format!("{} {within}: {}", units(limit.worst_case()), why(limit)))?;
        let (next, full) = (human(facts.next_after_us), human(facts.full_after_us));
        row("emptied", format!("something is back after {next}, everything after {full}"))?;
        if limit.debt() > 0 {
            row("debt", format!("debits may go {} below empty", units(limit.debt())))?;
        }
        let grid = match limit.grid_us() {
            1 => "judged to the microsecond".to_owned(),
            grid => format!(
                "judged in ticks of {}: its numbers are exact on no finer clock",
                human(grid)
            ),
        };
        row("clock", grid)?;
    }
    Ok(())
}

fn json(out: &mut dyn Write, facts: &[Facts]) -> io::Result<()> {
    out.write_all(b"[")?;
    for (index, facts) in facts.iter().enumerate() {
        let limit = &facts.limit;
        let algorithm = limit.algorithm();
        let comma = if index > 0 { "," } else { "" };
        let (text, name) = (json_string(&limit.to_string()), algorithm.name());
        write!(
            out,
            r#"{comma}{{"limit":{text},"algorithm":"{name}","amount":{}"#,
            algorithm.amount()
        )?;
        write!(out, r#","period_us":{},"capacity":{}"#, algorithm.period_us(), limit.capacity())?;
        write!(out, r#","worst_case":{},"debt":{}"#, limit.worst_case(), limit.debt())?;
        write!(
            out,
            r#","counts_rejected":{},"grid_us":{}"#,
            limit.counts_rejected(),
            limit.grid_us()
        )?;
        write!(
            out,
            r#","next_after_us":{},"full_after_us":{}"#,
            facts.next_after_us, facts.full_after_us
        )?;
        write!(out, r#","explanation":{}}}"#, json_string(&facts.explanation))?;
    }
    writeln!(out, "]")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_algorithm_is_explained() {
        let all = "10/s; 30/min burst 15; 240/h window; 5/20s window from first hit; 240/h sliding step 1m; 1/s sliding lenient; \
                   1000/day estimate; 5/20s log count rejected; 20 concurrent ttl 30s; 999983/day burst 10000000000";
        let limits: tidegate_core::Limits = all.parse().unwrap();
        let explanations: Vec<String> =
            limits.iter().map(|limit| Facts::of(limit).explanation).collect();
        assert!(explanations.iter().all(|explanation| explanation.ends_with('.')));
        for (index, explanation) in explanations.iter().enumerate() {
            assert!(!explanations[..index].contains(explanation), "said twice: {explanation}");
        }
    }
}
