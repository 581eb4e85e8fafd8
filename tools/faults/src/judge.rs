//! Whether a row was as it must be.
//!
//! Bounds on counts are exact, always. Bounds on time are as they are meant with `--strict`, on a
//! quiet machine; otherwise a multiple of that, so that only what has really gone wrong fails: a
//! wait without end, a store that is never found again.

use std::time::Duration;

use crate::load::{Answer, Outcome, Record, Source, percentile};
use crate::rows::Context;
use crate::stage::{Change, Run};

/// No client waits longer for a decision, whatever happens to the store.
pub(crate) const HARD: Duration = Duration::from_millis(20);
/// How long nodes wait for the store.
const DEADLINE: Duration = tidegate::resilience::DEFAULT_DEADLINE;
/// What happened is looked at by pieces of this.
const SLICE: Duration = Duration::from_millis(50);
/// On a machine that is not quiet, this many times a bound, and at least [`PATIENT`].
const GENEROUS: u32 = 10;
const PATIENT: Duration = Duration::from_secs(3);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Verdict {
    Ok,
    Failed,
}

impl Verdict {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Verdict::Ok => "ok",
            Verdict::Failed => "FAIL",
        }
    }
}

/// What came of a row.
pub(crate) struct RowOutcome {
    pub(crate) row: &'static str,
    pub(crate) verdict: Verdict,
    pub(crate) line: String,
    pub(crate) figures: Vec<(String, f64)>,
    /// What was not as it must be.
    pub(crate) problems: Vec<String>,
    pub(crate) seconds: f64,
}

/// What a row found out, before it is known which row it was.
pub(crate) struct Judged {
    pub(crate) line: String,
    pub(crate) figures: Vec<(String, f64)>,
    pub(crate) problems: Vec<String>,
}

pub(crate) struct Judge<'a> {
    context: &'a Context,
    run: &'a Run,
    told: Vec<String>,
    figures: Vec<(String, f64)>,
    problems: Vec<String>,
}

impl<'a> Judge<'a> {
    pub(crate) fn new(context: &'a Context, run: &'a Run) -> Self {
        Judge { context, run, told: Vec::new(), figures: Vec::new(), problems: Vec::new() }
    }

    /// The verdict, after a few words on what was done.
    pub(crate) fn end(self, what: &str) -> Judged {
        let line = format!("{what}: {}", self.told.join(", "));
        Judged { line, figures: self.figures, problems: self.problems }
    }

    /// Something that must hold.
    pub(crate) fn holds(&mut self, holds: bool, otherwise: impl FnOnce() -> String) {
        if !holds {
            self.problems.push(otherwise());
        }
    }

    pub(crate) fn say(&mut self, text: impl Into<String>) {
        self.told.push(text.into());
    }

    pub(crate) fn figure(&mut self, name: &str, value: f64) {
        self.figures.push((name.to_owned(), value));
    }

    /// Every request had an answer, allowed or denied.
    pub(crate) fn no_errors(&mut self) {
        let record = &self.run.record;
        let wrong: Vec<&Answer> =
            record.answers.iter().filter(|answer| !answer.outcome.is_answer()).collect();
        let errors = wrong.len() + record.unanswered();
        self.say(format!("{errors} errors of {}", record.answers.len() + record.unanswered()));
        self.figure("errors", errors as f64);
        self.holds(errors == 0, || {
            format!("{errors} requests had no answer; the first: {:?}", wrong.first())
        });
    }

    /// No client waited longer than the hard bound, beyond what the machine itself added at that
    /// moment; and whatever befalls the store, a node is no slower with requests about nothing than
    /// one without a store.
    pub(crate) fn latency(&mut self) {
        let record = &self.run.record;
        let longest =
            |answers: &[Answer]| answers.iter().map(|answer| answer.took).max().unwrap_or_default();
        let (max, noise) =
            (longest(&record.answers), longest(&record.control).max(longest(&record.nothing)));
        let mut worst: Option<(Duration, Answer)> = None;
        for answer in record.answers.iter().filter(|answer| answer.took > HARD) {
            let excess = self.excess(answer);
            if worst.is_none_or(|(most, _)| excess > most) {
                worst = Some((excess, *answer));
            }
        }
        let p99 = percentile(record.answers.iter(), 990);
        self.say(format!("p99 {}, max {} (no-op {})", ms(p99), ms(max), ms(noise)));
        self.figure("p99_ms", to_ms(p99));
        self.figure("max_ms", to_ms(max));
        self.figure("noop_max_ms", to_ms(noise));
        let stolen = record.stolen.share();
        self.figure("stolen", stolen);
        if stolen > 0.01 {
            self.say(format!("the host took {:.0} % of the processors", 100.0 * stolen));
        }
        // Of those for which the machine was there.
        let there = |answer: &&Answer| record.absent(answer.asked, answer.end()) < HARD / 10;
        let [own, control] = [&record.nothing, &record.control]
            .map(|answers| percentile(answers.iter().filter(there), 990));
        self.time(
            "p99 of the no-op is beyond that of a node in memory by",
            own.saturating_sub(control),
            HARD,
        );
        if let Some((excess, answer)) = worst {
            self.figure("excess_ms", to_ms(excess));
            let bound = self.bound(HARD);
            self.holds(excess <= bound, || {
                format!(
                    "{} longer than the machine made it; at most {} may be: {answer:?}",
                    ms(excess),
                    ms(bound)
                )
            });
        }
    }

    /// How much longer it took than any request about nothing beside it, to the same node or the
    /// one in memory, than processors did not run at all, and than those who ask did not: what is
    /// not the machine's.
    fn excess(&self, answer: &Answer) -> Duration {
        let record = &self.run.record;
        let own = record.nothing.iter().filter(|own| own.node == answer.node);
        let beside = own
            .chain(&record.control)
            .filter(|own| own.asked <= answer.end() && own.end() >= answer.asked);
        let noise = beside.map(|own| own.took).max().unwrap_or_default();
        let (from, to) = (answer.asked, answer.end());
        answer.took.saturating_sub(noise.max(record.absent(from, to)).max(record.paused(from, to)))
    }

    /// From `from` on, until `to`, the store is not heard: within this long every node says that it
    /// is not called any more, and later requests do not wait.
    pub(crate) fn open_after(&mut self, from: Duration, to: Duration, bound: Duration) {
        let first = |own: &Vec<Change>| {
            own.iter().find_map(|change| match change {
                Change::Opened(at) if (from..to).contains(at) => Some(*at),
                _ => None,
            })
        };
        let opened: Option<Vec<Duration>> = self.run.changes.iter().map(first).collect();
        let Some(open) = opened.and_then(|all| all.into_iter().max()) else {
            return self.problems.push("a breaker did not open".into());
        };
        let record = &self.run.record;
        // What they say is rounded.
        let (open, since) = (open.saturating_sub(from), open + Duration::from_millis(1));
        let nothing = || record.nothing.iter().filter(|own| (since..to).contains(&own.asked));
        let [after, noise] =
            [percentile(record.between(since, to), 990), percentile(nothing(), 990)];
        let [longest, longest_noise] =
            [percentile(record.between(since, to), 1000), percentile(nothing(), 1000)];
        self.say(format!(
            "open after {}, then p99 {} (no-op {}) and max {} (no-op {})",
            ms(open),
            ms(after),
            ms(noise),
            ms(longest),
            ms(longest_noise)
        ));
        self.figure("open_after_ms", to_ms(open));
        self.figure("open_p99_ms", to_ms(after));
        self.figure("open_noop_p99_ms", to_ms(noise));
        self.time("the breaker opened after", open, bound);
        let more = after.saturating_sub(noise);
        self.time(
            "once the breaker is open, p99 is beyond that of the no-op by",
            more,
            Duration::from_millis(1),
        );
    }

    /// The store decides again after `go`, and from then on nearly everything: of every twentieth
    /// of a second nine tenths. A later twentieth in which requests about nothing took as long as a
    /// call to the store may take, and no breaker was open, says something about the machine only.
    pub(crate) fn back(&mut self, go: Duration, bound: Duration) {
        self.back_of(go, bound, |_| true);
    }

    pub(crate) fn back_of(
        &mut self,
        go: Duration,
        bound: Duration,
        which: impl Fn(&Answer) -> bool,
    ) {
        let end = self.run.record.lasted;
        let of = |answers: &mut dyn Iterator<Item = &Answer>| {
            let answers: Vec<&Answer> =
                answers.filter(|answer| which(answer) && answer.source.is_some()).collect();
            let alone =
                answers.iter().filter(|answer| answer.source == Some(Source::Fallback)).count();
            (answers.len(), alone)
        };
        let after = self.run.record.between(go, end).filter(|answer| which(answer));
        let first = after.filter(|a| a.source == Some(Source::Store)).map(|a| a.end() - go).min();
        let Some(first) = first else {
            return self.problems.push("the store never decided again".into());
        };
        let (mut settled, mut slice) = (go, go);
        let (mut told, mut of_the_machine) = (Vec::new(), 0);
        while slice < end {
            let (all, alone) = of(&mut self.run.record.between(slice, slice + SLICE));
            if alone * 10 > all {
                let (noise, open) =
                    (self.noise(slice, SLICE), self.run.is_open(slice, slice + SLICE));
                if noise < DEADLINE || open || slice < go + first {
                    settled = slice + SLICE;
                } else {
                    of_the_machine += 1;
                }
                let open = if open { ", breaker open" } else { "" };
                told.push(format!(
                    "{alone} of {all} from {} on (machine {}{open})",
                    ms(slice - go),
                    ms(noise)
                ));
            }
            slice += SLICE;
        }
        let settled = settled - go;
        self.say(format!("back after {}, in sync after {}", ms(first), ms(settled)));
        if of_the_machine > 0 {
            self.say(format!("{of_the_machine} twentieths were the machine's"));
        }
        self.figure("back_ms", to_ms(first));
        self.figure("in_sync_ms", to_ms(settled));
        self.figure("slices_of_the_machine", f64::from(of_the_machine));
        self.time("the store was back after", first, bound);
        // On a busy machine single answers are late at any time, whatever the store does.
        if self.context.strict {
            self.holds(settled <= bound, || {
                format!(
                    "in sync after {}; at most {}. Decided alone: {}",
                    ms(settled),
                    ms(bound),
                    told.join(", ")
                )
            });
            self.holds(settled + SLICE < end - go, || "the store was not back at the end".into());
        }
    }

    /// When requests about nothing were first answered in time again, from `go` on: all earlier
    /// requests are answered then.
    pub(crate) fn caught_up(&mut self, go: Duration) -> Duration {
        let (end, mut slice) = (self.run.record.lasted, go);
        while slice < end && self.noise(slice, SLICE) >= DEADLINE {
            slice += SLICE;
        }
        self.say(format!("caught up after {}", ms(slice - go)));
        self.figure("caught_up_ms", to_ms(slice - go));
        self.holds(slice < end, || "earlier requests were not answered until the end".into());
        slice
    }

    /// The longest that a request about nothing took which was under way then, or that processors
    /// did not run.
    fn noise(&self, from: Duration, lasted: Duration) -> Duration {
        let Record { nothing, control, .. } = &self.run.record;
        let then = nothing
            .iter()
            .chain(control)
            .filter(|own| own.asked < from + lasted && own.end() >= from);
        then.map(|own| own.took)
            .max()
            .unwrap_or_default()
            .max(self.run.record.absent(from, from + lasted))
    }

    /// Of each key of a class no more passed than this.
    pub(crate) fn admitted(&mut self, class: &str, bound: u64) {
        let most = (0..self.run.record.class(class).1.keys)
            .map(|key| self.passed(class, key, |_| true))
            .max();
        let most = most.unwrap_or(0);
        self.say(format!("admitted {most} ≤ {bound}"));
        self.figure(&format!("{class}_admitted"), most as f64);
        self.figure(&format!("{class}_bound"), bound as f64);
        self.holds(most <= bound, || {
            format!("{most} passed of a key of {class:?}, and at most {bound} may")
        });
    }

    /// Of budgets that do not come back: the store allowed no more than there is, and nodes alone
    /// no more than their shares together.
    pub(crate) fn budgets(&mut self, class: &str, amount: u64) {
        self.admitted(class, 2 * amount.max(self.run.nodes));
        let shares = amount.max(self.run.nodes);
        for key in 0..self.run.record.class(class).1.keys {
            let by_store =
                self.passed(class, key, |answer| answer.source != Some(Source::Fallback));
            let alone = self.passed(class, key, |answer| answer.source == Some(Source::Fallback));
            self.holds(by_store <= amount, || {
                format!("{class}:{key}: the store allowed {by_store} of {amount}")
            });
            self.holds(alone <= shares, || {
                format!("{class}:{key}: the nodes without a store allowed {alone} of {shares}")
            });
        }
    }

    /// Of budgets of which the store lost something between `from` and `to`: beyond what there is
    /// passes no more than what no node knew of that asked before the one that knew best, and what
    /// was on its way.
    pub(crate) fn lost(&mut self, class: &str, amount: u64, from: Duration, to: Duration) {
        let nodes = u8::try_from(self.run.nodes).expect("few nodes");
        let (mut most, mut beyond) = (0, 0);
        for key in 0..self.run.record.class(class).1.keys {
            let of = |answer: &&Answer| answer.key == key && answer.source == Some(Source::Store);
            let by_store: Vec<&Answer> = self.run.record.of(class).filter(of).collect();
            let on_their_way =
                by_store.iter().filter(|a| a.asked < from && a.end() >= from).count();
            let first = |node| {
                by_store.iter().filter(|a| a.node == node && a.asked >= to).map(|a| a.end()).min()
            };
            // When every node has told the store what it knew; a node that never did had nothing to
            // tell.
            let told = (0..nodes)
                .map(|node| first(node).unwrap_or(self.run.record.lasted))
                .max()
                .unwrap_or_default();
            let before = by_store
                .iter()
                .filter(|a| a.allowed() && a.end() >= from && a.asked <= told)
                .count();
            let passed = by_store.iter().filter(|a| a.allowed()).count() as u64;
            let unseen = (on_their_way + before) as u64;
            self.holds(passed <= amount + unseen, || {
                format!("{class}:{key}: the store allowed {passed} of {amount}; at most {unseen} beyond may be unseen")
            });
            most = most.max(unseen);
            beyond = beyond.max(passed.saturating_sub(amount));
            let alone = self.passed(class, key, |answer| answer.source == Some(Source::Fallback));
            let shares = amount.max(self.run.nodes);
            self.holds(alone <= shares, || {
                format!("{class}:{key}: the nodes without a store allowed {alone} of {shares}")
            });
        }
        self.say(format!("{beyond} ≤ {most} beyond what there is"));
        self.figure("beyond", beyond as f64);
        self.figure("beyond_bound", most as f64);
        self.admitted(class, 2 * amount + most);
    }

    /// How many passed of a key.
    pub(crate) fn passed(&self, class: &str, key: u16, which: impl Fn(&Answer) -> bool) -> u64 {
        self.run.record.of(class).filter(|a| a.key == key && a.allowed() && which(a)).count() as u64
    }

    /// Nothing is charged twice: of each budget the store has charged what it allowed, and at most
    /// what had no answer besides. `left` says what is left of a key.
    pub(crate) fn charged_once(
        &mut self,
        class: &str,
        amount: u64,
        mut left: impl FnMut(&str) -> u64,
    ) {
        let (_, keys) = self.run.record.class(class);
        for (key, name) in (0..keys.keys).map(|key| (key, keys.key(key))).collect::<Vec<_>>() {
            let charged = amount - left(&name).min(amount);
            let by_store = self.passed(class, key, |answer| answer.source == Some(Source::Store));
            let alone = self
                .run
                .record
                .of(class)
                .filter(|a| a.key == key && a.source != Some(Source::Store))
                .count();
            let most = by_store + alone as u64;
            self.holds((by_store..=most).contains(&charged), || {
                format!(
                    "{name}: {charged} are charged, and between {by_store} and {most} can have been"
                )
            });
        }
        self.say("charged once");
    }

    /// A counter shows it, by at least so many.
    pub(crate) fn counted(&mut self, name: &str, least: f64) {
        let found = self.run.metrics.get(name);
        self.figure(name, found);
        self.holds(found >= least, || {
            format!("{name} is {found}, and at least {least} was expected")
        });
    }

    /// A counter shows at most so many.
    pub(crate) fn at_most(&mut self, name: &str, most: f64) {
        let found = self.run.metrics.get(name);
        self.figure(name, found);
        self.holds(found <= most, || format!("{name} is {found}, and at most {most} was expected"));
    }

    /// How many of the requests within this time the nodes decided without the store.
    pub(crate) fn alone(&mut self, what: &str, from: Duration, to: Duration) -> f64 {
        let asked: Vec<&Answer> = self.run.record.between(from, to).collect();
        let alone = asked.iter().filter(|answer| answer.source == Some(Source::Fallback)).count();
        let share = alone as f64 / asked.len().max(1) as f64;
        self.say(format!("{what} {:.1} % alone", 100.0 * share));
        self.figure(&format!("alone {what}"), share);
        share
    }

    /// The same of those twentieths of a second in which the machine answered requests about
    /// nothing in time.
    pub(crate) fn alone_while_quiet(&mut self, from: Duration, to: Duration) -> f64 {
        let (mut all, mut alone, mut slice) = (0, 0, from);
        while slice < to {
            if self.noise(slice, SLICE) < DEADLINE {
                let answers = self.run.record.between(slice, slice + SLICE);
                let (asked, lonely) = answers.fold((0, 0), |(asked, lonely), answer| {
                    (asked + 1, lonely + usize::from(answer.source == Some(Source::Fallback)))
                });
                (all, alone) = (all + asked, alone + lonely);
            }
            slice += SLICE;
        }
        let share = alone as f64 / all.max(1) as f64;
        self.say(format!("{:.1} % of {all} while the machine was quiet", 100.0 * share));
        share
    }

    /// A time within its bound.
    pub(crate) fn time(&mut self, what: &str, took: Duration, bound: Duration) {
        let bound = self.bound(bound);
        self.holds(took <= bound, || format!("{what} {}; at most {}", ms(took), ms(bound)));
    }

    /// Requests of these kinds of failures.
    pub(crate) fn failures(&self, which: impl Fn(Outcome) -> bool) -> usize {
        self.run.record.answers.iter().filter(|answer| which(answer.outcome)).count()
    }

    fn bound(&self, meant: Duration) -> Duration {
        if self.context.strict { meant } else { (meant * GENEROUS).max(PATIENT) }
    }
}

pub(crate) fn to_ms(time: Duration) -> f64 {
    time.as_secs_f64() * 1000.0
}

pub(crate) fn ms(time: Duration) -> String {
    match to_ms(time) {
        ms if ms < 10.0 => format!("{ms:.1} ms"),
        ms => format!("{ms:.0} ms"),
    }
}
