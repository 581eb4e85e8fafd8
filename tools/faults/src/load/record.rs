//! What was answered, and questions about it.

use std::fs::{self, File};
use std::io::{self, BufWriter, Write};
use std::path::Path;
use std::time::{Duration, Instant};

use tidegate_testkit::Absences;

use super::{Class, Stolen};

/// Who gave an answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Source {
    Store,
    Local,
    Fallback,
}

/// What became of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Outcome {
    Allowed,
    Denied,
    /// Another status.
    Error(u16),
    /// The connection ended before the answer.
    Broken,
    /// No process listened.
    Refused,
    /// No answer for seconds.
    Silent,
}

impl Outcome {
    pub(super) fn of(status: u16) -> Outcome {
        match status {
            200 => Outcome::Allowed,
            429 => Outcome::Denied,
            other => Outcome::Error(other),
        }
    }

    pub(crate) fn is_answer(self) -> bool {
        matches!(self, Outcome::Allowed | Outcome::Denied)
    }
}

#[derive(Clone, Copy, Debug)]
pub(crate) struct Answer {
    /// When it was sent, since the load began.
    pub(crate) asked: Duration,
    pub(crate) took: Duration,
    pub(crate) class: u8,
    pub(crate) key: u16,
    pub(crate) node: u8,
    pub(crate) outcome: Outcome,
    pub(crate) source: Option<Source>,
}

/// How often those who ask look whether something is due.
pub(super) const TICK: Duration = Duration::from_millis(1);

/// The class of requests about nothing.
const CONTROL: u8 = u8::MAX;

impl Answer {
    pub(super) fn new(asked: Duration, class: u8, key: u16, node: u8) -> Answer {
        Answer {
            asked,
            took: Duration::ZERO,
            class,
            key,
            node,
            outcome: Outcome::Silent,
            source: None,
        }
    }

    /// A request about nothing; of the node in memory, `node` is none of the others.
    pub(super) fn control(asked: Duration, node: u8) -> Answer {
        Answer::new(asked, CONTROL, 0, node)
    }

    pub(crate) fn end(&self) -> Duration {
        self.asked + self.took
    }

    pub(crate) fn allowed(&self) -> bool {
        self.outcome == Outcome::Allowed
    }
}

#[derive(Debug, Default)]
pub(crate) struct Record {
    mix: Vec<Class>,
    pub(super) open: usize,
    /// In the order in which they came.
    pub(crate) answers: Vec<Answer>,
    /// Of the node in memory.
    pub(crate) control: Vec<Answer>,
    /// Of the other nodes, about nothing.
    pub(crate) nothing: Vec<Answer>,
    nodes: u8,
    /// When those who ask had not run for a while, and for how long.
    pauses: Vec<(Duration, Duration)>,
    pub(crate) lasted: Duration,
    /// What the host took meanwhile.
    pub(crate) stolen: Stolen,
    /// When processors did not run, and when all of this began.
    pub(super) absences: Option<(Instant, Absences)>,
}

impl Record {
    pub(super) fn new(mix: Vec<Class>, nodes: u8) -> Record {
        Record { mix, nodes, ..Record::default() }
    }

    /// Those who ask run again, after a pause.
    pub(super) fn runs(&mut self, at: Duration, pause: Duration) {
        if pause > TICK * 2 {
            self.pauses.push((at, pause));
        }
    }

    /// How long those who ask did not run between these moments, and so read no answer.
    pub(crate) fn paused(&self, from: Duration, to: Duration) -> Duration {
        // An answer is noted when they run again.
        let then =
            self.pauses.iter().filter(|(at, pause)| *at >= from && at.saturating_sub(*pause) < to);
        then.map(|(at, pause)| (*at).min(to + TICK) - at.saturating_sub(*pause).max(from)).sum()
    }

    /// How long the host did not let processors run between these moments.
    pub(crate) fn absent(&self, from: Duration, to: Duration) -> Duration {
        let seen = self
            .absences
            .as_ref()
            .map(|(began, absences)| absences.within(*began + from, *began + to));
        seen.unwrap_or_default().max(self.stolen.within(from, to))
    }

    pub(super) fn add(&mut self, answer: Answer) {
        match answer.class {
            CONTROL if answer.node == self.nodes => self.control.push(answer),
            CONTROL => self.nothing.push(answer),
            _ => self.answers.push(answer),
        }
    }

    /// Writes everything down, for people who want to look closer.
    pub(crate) fn write(&self, file: &Path) -> io::Result<()> {
        fs::create_dir_all(file.parent().unwrap_or(Path::new(".")))?;
        let mut out = BufWriter::new(File::create(file)?);
        writeln!(out, "about,node,asked_us,took_us,key,outcome,source")?;
        for answer in self.answers.iter().chain(&self.nothing).chain(&self.control) {
            let about = match answer.class {
                CONTROL if answer.node == self.nodes => "memory",
                CONTROL => "nothing",
                class => self.mix[usize::from(class)].name,
            };
            let (asked, took) = (answer.asked.as_micros(), answer.took.as_micros());
            let source = answer.source.map_or(String::new(), |source| format!("{source:?}"));
            writeln!(
                out,
                "{about},{},{asked},{took},{},{:?},{source}",
                answer.node, answer.key, answer.outcome
            )?;
        }
        out.flush()
    }

    /// Requests that had no answer when the load ended.
    pub(crate) fn unanswered(&self) -> usize {
        self.open
    }

    pub(crate) fn class(&self, name: &str) -> (u8, &Class) {
        let at = self.mix.iter().position(|class| class.name == name);
        let at = at.unwrap_or_else(|| panic!("the load has a class {name:?}"));
        (u8::try_from(at).expect("few classes"), &self.mix[at])
    }

    /// The answers about one class, of all nodes.
    pub(crate) fn of(&self, name: &str) -> impl Iterator<Item = &Answer> {
        let (class, _) = self.class(name);
        self.answers.iter().filter(move |answer| answer.class == class)
    }

    /// The requests within this time.
    pub(crate) fn between(&self, from: Duration, to: Duration) -> impl Iterator<Item = &Answer> {
        self.answers.iter().filter(move |answer| answer.asked >= from && answer.asked < to)
    }
}

/// So many of a thousand took at most this long.
pub(crate) fn percentile<'a>(
    answers: impl Iterator<Item = &'a Answer>,
    per_mille: usize,
) -> Duration {
    let mut took: Vec<Duration> = answers.map(|answer| answer.took).collect();
    took.sort();
    took.get((took.len() * per_mille / 1000).min(took.len().saturating_sub(1)))
        .copied()
        .unwrap_or_default()
}
