//! `tidegate simulate`: runs a trace through several limits and shows what each would have done.
//!
//! One request at a time: [`source`] supplies it, each [`Contender`] decides it with its own state,
//! and a [`Report`] records the answer. The trace is never kept, so it may be longer than memory.
//! With `--store` a server decides, some hundred requests at a time: [`remote`].

mod contender;
mod generate;
mod jsonl;
mod progress;
mod remote;
mod source;
mod summary;
mod svg;
mod table;
mod timeline;
mod verify;

use std::fs::File;
use std::io::{self, BufWriter, Write};

use anyhow::{Context, Result, bail};
use tidegate_core::{Decision, Op};
use tidegate_trace::Expectation;

use self::contender::Contender;
use self::progress::Progress;
use self::remote::Elsewhere;
use self::source::Source;
use self::summary::Summary;
use self::verify::Verifier;
use super::Outcome;
use crate::args::{Format, LimitText, Simulate};
use crate::output::{self, Paint};

/// One request of a trace.
#[derive(Clone, PartialEq, Eq, Debug)]
struct Event {
    /// The line of the trace, or the number of the generated request, from 1.
    number: u64,
    at_us: u64,
    key: String,
    cost: u64,
    op: Op,
    expect: Option<Expectation>,
}

impl Event {
    /// Whether it requests units, unlike a peek, a refund or a reset.
    fn is_offer(&self) -> bool {
        self.cost > 0 && matches!(self.op, Op::Check | Op::Take | Op::Debit)
    }
}

/// What the result says about the trace.
struct Scene {
    title: String,
    /// The end of the trace, if it is known in advance.
    end_us: Option<u64>,
}

pub(crate) fn run(args: Simulate) -> Result<Outcome> {
    if let (Some(trace), Some(out)) = (&args.trace, &args.out)
        && let (Ok(trace), Ok(out)) = (trace.canonicalize(), out.canonicalize())
        && trace == out
    {
        bail!(
            "the result would overwrite the trace {}: expected another file after --out",
            trace.display()
        );
    }
    let mut source = match &args.trace {
        Some(path) => Source::open(path)?,
        None => Source::generate(&args.generated),
    };
    let limits = if args.limits.is_empty() { source.limits()? } else { args.limits };
    if limits.is_empty() {
        bail!(
            "no limit: expected --limit, as in --limit '10/s; 120/m', or a trace that begins with `# limit: 10/s`"
        );
    }
    let elsewhere = Elsewhere::open(&args.store.store)?;
    let format = args.format.or(if args.verify { None } else { Some(Format::Table) });
    let mut report = Report::new(format, args.out.as_deref(), &limits)?;
    let mut verifier = args.verify.then(|| Verifier::new(limits.len()));
    let mut contenders: Vec<Contender> =
        limits.into_iter().map(|limit| Contender::new(limit, report.observes())).collect();
    let mut progress = Progress::new(&source, report.covers_terminal());
    let mut answers = Answers { report: &mut report, verifier: &mut verifier };
    let fed = match &elsewhere {
        None => feed(&mut source, &mut contenders, &mut answers, &mut progress),
        Some(elsewhere) => {
            elsewhere.feed(&mut source, &mut contenders, &mut answers, &mut progress)
        }
    };
    progress.finish();
    if let Some(elsewhere) = elsewhere {
        elsewhere.clean_up();
    }
    match fed {
        // Answers before the error are valid and shown; a summary of half a trace is not.
        Err(error) => {
            report.flush()?;
            return Err(error);
        }
        Ok(0) => eprintln!("note: the trace has no requests"),
        Ok(_) => {}
    }
    report.finish(&source.scene(), &contenders)?;
    match verifier {
        Some(verifier) => verifier.finish(report.uses_stdout()),
        None => Ok(Outcome::Yes),
    }
}

fn feed(
    source: &mut Source,
    contenders: &mut [Contender],
    answers: &mut Answers<'_>,
    progress: &mut Progress,
) -> Result<u64> {
    let mut events = 0;
    while let Some(event) = source.next()? {
        events += 1;
        for (index, contender) in contenders.iter_mut().enumerate() {
            let decision = contender.decide(event);
            answers.add(index, event, contender, &decision)?;
        }
        progress.advance(source);
    }
    Ok(events)
}

/// The receivers of every answer.
struct Answers<'a> {
    report: &'a mut Report,
    verifier: &'a mut Option<Verifier>,
}

impl Answers<'_> {
    fn add(
        &mut self,
        index: usize,
        event: &Event,
        contender: &Contender,
        decision: &Decision,
    ) -> Result<()> {
        self.report.answer(index, event, decision)?;
        if let Some(verifier) = self.verifier {
            verifier.compare(event, contender, decision);
        }
        Ok(())
    }
}

/// The output of a simulation.
enum Report {
    /// None: only the result of `--verify` is shown.
    None,
    /// Written one by one.
    Jsonl { writer: jsonl::Writer, stdout: bool },
    /// Added up, and shown at the end.
    Summary { format: Format, out: Option<std::path::PathBuf>, summaries: Vec<Summary> },
}

impl Report {
    fn new(
        format: Option<Format>,
        out: Option<&std::path::Path>,
        limits: &[LimitText],
    ) -> Result<Self> {
        Ok(match format {
            None => Report::None,
            Some(Format::Jsonl) => Report::Jsonl {
                writer: jsonl::Writer::new(open(out)?, limits),
                stdout: out.is_none(),
            },
            Some(format) => {
                let summaries = limits.iter().map(|_| Summary::default()).collect();
                Report::Summary { format, out: out.map(Into::into), summaries }
            }
        })
    }

    /// Whether contenders must track how much they allow.
    fn observes(&self) -> bool {
        matches!(self, Report::Summary { .. })
    }

    /// Whether it writes to the terminal, where a progress bar would interfere.
    fn covers_terminal(&self) -> bool {
        matches!(self, Report::Jsonl { stdout: true, .. })
            && io::IsTerminal::is_terminal(&io::stdout())
    }

    /// Whether it writes to standard output.
    fn uses_stdout(&self) -> bool {
        match self {
            Report::None => false,
            Report::Jsonl { stdout, .. } => *stdout,
            Report::Summary { out, .. } => out.is_none(),
        }
    }

    fn answer(&mut self, index: usize, event: &Event, decision: &Decision) -> Result<()> {
        match self {
            Report::None => {}
            Report::Jsonl { writer, .. } => {
                writer.write(index, event, decision).context(WRITING)?
            }
            Report::Summary { summaries, .. } => summaries[index].add(event, decision),
        }
        Ok(())
    }

    fn flush(&mut self) -> Result<()> {
        match self {
            Report::Jsonl { writer, .. } => writer.flush().context(WRITING),
            _ => Ok(()),
        }
    }

    fn finish(&mut self, scene: &Scene, contenders: &[Contender]) -> Result<()> {
        self.flush()?;
        let Report::Summary { format, out, summaries } = self else { return Ok(()) };
        let text = match format {
            Format::Svg => svg::draw(scene, contenders, summaries),
            _ => {
                let paint = if out.is_none() { Paint::stdout() } else { Paint::plain() };
                table::draw(scene, contenders, summaries, paint)
            }
        };
        let mut writer = open(out.as_deref())?;
        writer.write_all(text.as_bytes()).and_then(|()| writer.flush()).context(WRITING)
    }
}

const WRITING: &str = "could not write the result";

fn open(out: Option<&std::path::Path>) -> Result<Box<dyn Write>> {
    Ok(match out {
        None => Box::new(output::stdout()),
        Some(path) => {
            let file = File::create(path)
                .with_context(|| format!("could not create {}", path.display()))?;
            Box::new(BufWriter::with_capacity(64 * 1024, file))
        }
    })
}
