//! `tidegate doctor`: inspects a store, and measures how long a decision takes.

use std::io::{self, Write};
use std::time::Duration;

use anyhow::{Result, bail};
use serde_json::{Value, json};
use tidegate::redis::Failure;
use tidegate::redis::inspect::{Finding, Inspection, RoundTrips, Severity, Times};
use tidegate::resilience::DEFAULT_DEADLINE;

use super::Outcome;
use super::store::{self, Remote};
use crate::args::Doctor;
use crate::output::{self, Paint, grouped, wrapped};

/// The longest time to measure, however slow the server is.
const MEASURING: Duration = Duration::from_secs(10);

pub(crate) fn run(args: &Doctor) -> Result<Outcome> {
    let set = |builder: tidegate::redis::RedisBuilder| match &args.namespace {
        Some(namespace) => builder.namespace(namespace),
        None => builder,
    };
    let Some(remote) = Remote::open(&args.store, set)? else {
        bail!(
            "--store memory: expected the URL of a server, as in redis://127.0.0.1; a store in this process needs no inspection"
        );
    };
    let inspection = remote.run(remote.redis.inspect());
    let inspection = inspection.map_err(|failure| store::no_server(&remote.shown, &failure))?;
    let deadline = args.deadline_ms.map_or(DEFAULT_DEADLINE, Duration::from_millis);
    let samples = usize::try_from(args.samples).unwrap_or(0);
    let measured = (samples > 0).then(|| remote.run(remote.redis.measure(samples, MEASURING)));
    let mut out = output::stdout();
    if args.json {
        writeln!(out, "{}", as_json(&remote.shown, &inspection, measured.as_ref(), deadline))?;
    } else {
        lines(&mut out, &remote.shown, &inspection, measured.as_ref(), deadline)?;
    }
    out.flush()?;
    let unmeasured = matches!(measured, Some(Err(_)));
    Ok(if inspection.worst() == Severity::Problem || unmeasured {
        Outcome::No
    } else {
        Outcome::Yes
    })
}

type Measured<'a> = Option<&'a Result<RoundTrips, Failure>>;

fn lines(
    out: &mut dyn Write,
    shown: &str,
    inspection: &Inspection,
    measured: Measured<'_>,
    deadline: Duration,
) -> io::Result<()> {
    let paint = Paint::stdout();
    let servers = match &inspection.servers[..] {
        // The URL above names it.
        [_] => String::new(),
        many => format!(": {}", many.join(", ")),
    };
    writeln!(out, "{}{servers}\n", paint.strong(shown))?;
    for finding in &inspection.findings {
        writeln!(
            out,
            "{}  {finding}{}",
            word(paint, finding.severity),
            paint.faint(where_(inspection, finding))
        )?;
        for more in [&finding.why, &finding.advice].into_iter().filter(|text| !text.is_empty()) {
            writeln!(out, "{}", wrapped(more, "         "))?;
        }
    }
    match measured {
        None => Ok(()),
        Some(Ok(trips)) => {
            writeln!(out, "\n           {:>9}   {:>9}   {:>9}", "p50", "p99", "max")?;
            for (name, times) in [("round trip", &trips.ping), ("decision", &trips.decision)] {
                let columns = [times.percentile(50), times.percentile(99), times.max()].map(millis);
                let [p50, p99, max] = columns;
                writeln!(out, "{name:10} {p50:>9}   {p99:>9}   {max:>9}")?;
            }
            writeln!(out, "\n{}", wrapped(&meaning(trips, deadline), ""))?;
            match trips.too_slow_for(deadline) {
                None => Ok(()),
                Some(slow) => writeln!(
                    out,
                    "\n{}  {}",
                    word(paint, Severity::Warning),
                    wrapped(&slow.to_string(), "         ").trim_start()
                ),
            }
        }
        Some(Err(_)) if inspection.worst() == Severity::Problem => {
            writeln!(out, "\nNothing was measured, because there are problems.")
        }
        Some(Err(failure)) => writeln!(out, "\n{}  not measured: {failure}", paint.bad("problem")),
    }
}

/// The severity, in its color and as wide as the others.
fn word(paint: Paint, severity: Severity) -> String {
    let word = format!("{:7}", severity.name());
    match severity {
        Severity::Ok => paint.good(word),
        Severity::Note => paint.faint(word),
        Severity::Warning => paint.caution(word),
        _ => paint.bad(word),
    }
}

/// The servers that a finding is about, if it is not about all.
fn where_(inspection: &Inspection, finding: &Finding) -> String {
    if finding.servers.len() == inspection.servers.len() {
        String::new()
    } else {
        format!(" ({})", finding.servers.join(", "))
    }
}

/// The measurements in a sentence or two.
fn meaning(trips: &RoundTrips, deadline: Duration) -> String {
    let (ping, decision) = (trips.ping.percentile(50), trips.decision.percentile(50));
    let more = decision.saturating_sub(ping);
    let per_second = 1_000_000 / decision.as_micros().max(1);
    let mut text = format!(
        "A decision takes {}, {} more than a bare round trip. A client that sends one request at a time gets {} decisions a \
         second; concurrent requests share round trips and get far more.",
        millis(decision),
        millis(more),
        grouped(u64::try_from(per_second).unwrap_or(u64::MAX)),
    );
    if trips.decision.percentile(99) > deadline {
        text += &format!(
            " One in a hundred takes longer than {} ms (resilience.deadline_ms), after which `tidegate serve` decides without the store.",
            deadline.as_millis()
        );
    }
    text
}

/// `0.18 ms`, rounded up.
fn millis(duration: Duration) -> String {
    let hundredths = duration.as_micros().div_ceil(10);
    format!("{}.{:02} ms", hundredths / 100, hundredths % 100)
}

fn as_json(
    shown: &str,
    inspection: &Inspection,
    measured: Measured<'_>,
    deadline: Duration,
) -> Value {
    let finding = |finding: &Finding| {
        json!({
            "severity": finding.severity.name(),
            "topic": finding.topic.name(),
            "servers": finding.servers,
            "found": finding.found,
            "why": finding.why,
            "advice": finding.advice,
        })
    };
    let micros = |duration: Duration| u64::try_from(duration.as_micros()).unwrap_or(u64::MAX);
    let times = |times: &Times| {
        json!({
            "samples": times.samples(),
            "p50_us": micros(times.percentile(50)),
            "p99_us": micros(times.percentile(99)),
            "max_us": micros(times.max()),
        })
    };
    let findings: Vec<Value> = inspection.findings.iter().map(finding).collect();
    let mut json = json!({
        "store": shown,
        "servers": inspection.servers,
        "worst": inspection.worst().name(),
        "findings": findings,
    });
    match measured {
        None => {}
        Some(Ok(trips)) => {
            json["round_trip"] = times(&trips.ping);
            json["decision"] = times(&trips.decision);
            json["deadline_ms"] = u64::try_from(deadline.as_millis()).unwrap_or(u64::MAX).into();
            if let Some(slow) = trips.too_slow_for(deadline) {
                json["slow"] = slow.to_string().into();
            }
        }
        Some(Err(failure)) => json["not_measured"] = failure.to_string().into(),
    }
    json
}
