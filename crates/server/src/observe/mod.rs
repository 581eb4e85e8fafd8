//! What can be seen of the server: numbers, lines, and who is limited most.
//!
//! All of it happens between listeners and store, once: no listener records anything by itself. The
//! engine tells the [`Observer`] what was decided, the entrance of the listeners tells it who came.
//! On the way of a decision there is no lock and no allocation as long as it is allowed.

mod in_force;
pub mod log;
pub mod metrics;
mod pages;
pub mod top;

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use axum::body::Bytes;
use parking_lot::Mutex;
use serde::{Deserialize, Serialize};
use tidegate::{Check, Decision, Op, Scope, StoreError};

pub use self::in_force::InForce;
pub use self::log::{Format, Level, Log};
pub use self::metrics::{Metrics, Outcome};
use self::pages::Pages;
pub use self::top::Top;
use crate::backend::Backend;
use crate::parse::values;
use crate::protocol::Protocol;
use crate::ruling::Ruling;

/// How often in a second it is said why the store did not decide.
const MISSES_PER_SECOND: u64 = 3;

/// How often in a second it is said that a gateway asks in a way that cannot be answered.
const MISASKED_PER_SECOND: u64 = 1;

/// How often in a second the numbers are written anew.
const PAGES_PER_SECOND: u64 = 50;

/// What is to be told, and how.
#[derive(Clone, PartialEq, Eq, Debug, Deserialize, Serialize)]
#[serde(default, deny_unknown_fields)]
pub struct LogSettings {
    /// Which lines.
    #[serde(with = "values::text_or_off")]
    pub level: Level,
    /// In which form.
    #[serde(with = "values::text")]
    pub format: Format,
    /// Denials that are logged in a second; the rest is counted.
    pub denials_per_second: u32,
    /// Keys are shown as they are, in the log and among the most limited; otherwise only a keyed
    /// hash is.
    pub show_keys: bool,
}

impl Default for LogSettings {
    fn default() -> Self {
        LogSettings {
            level: Level::Info,
            format: Format::Human,
            denials_per_second: 10,
            show_keys: false,
        }
    }
}

/// Sees everything. Cheap to clone; clones see the same.
#[derive(Clone, Debug)]
pub struct Observer {
    inner: Arc<ObserverState>,
}

#[derive(Debug)]
struct ObserverState {
    log: Log,
    metrics: Metrics,
    top: Top,
    denials_per_second: AtomicU64,
    sampled: Sampled,
    failures: Sampled,
    misses: Sampled,
    misasked: Sampled,
    misnamed: Sampled,
    foreign: Sampled,
    guessed: Sampled,
    upstream: Sampled,
    written: Sampled,
    /// The numbers as they were told last.
    page: Mutex<Bytes>,
    pages: Pages,
}

impl Default for Observer {
    /// Counts, and says nothing.
    fn default() -> Self {
        Self::new(Log::silent(), &LogSettings::default())
    }
}

impl Observer {
    /// Writes to this log.
    pub fn new(log: Log, settings: &LogSettings) -> Self {
        Observer {
            inner: Arc::new(ObserverState {
                log,
                metrics: Metrics::default(),
                top: Top::new(settings.show_keys),
                denials_per_second: AtomicU64::new(settings.denials_per_second.into()),
                sampled: Sampled::default(),
                failures: Sampled::default(),
                misses: Sampled::default(),
                misasked: Sampled::default(),
                misnamed: Sampled::default(),
                foreign: Sampled::default(),
                guessed: Sampled::default(),
                upstream: Sampled::default(),
                written: Sampled::default(),
                page: Mutex::default(),
                pages: Pages::default(),
            }),
        }
    }

    /// Lines.
    pub fn log(&self) -> &Log {
        &self.inner.log
    }

    /// Numbers.
    pub fn metrics(&self) -> &Metrics {
        &self.inner.metrics
    }

    /// Who is limited most.
    pub fn top(&self) -> &Top {
        &self.inner.top
    }

    /// A check whose limits the caller brought was decided, or not.
    pub(crate) fn decided(
        &self,
        protocol: Protocol,
        check: &Check<'_>,
        result: &Result<Decision, StoreError>,
    ) {
        match result {
            Ok(decision) if decision.allowed() => {
                self.inner.metrics.decided(protocol, Outcome::Allowed)
            }
            Ok(decision) => {
                self.inner.metrics.decided(protocol, Outcome::Denied);
                if let (true, Some(charge)) =
                    (asks(check.op()), check.charges().get(decision.binding_index()))
                {
                    self.denied(protocol, name_of(&charge.subject.scope), &charge.subject.key);
                }
            }
            Err(error) => self.failed(protocol, error),
        }
    }

    /// Several requests were decided that arrived together.
    pub(crate) fn decided_together(
        &self,
        protocol: Protocol,
        began: Option<Instant>,
        allowed: u64,
        denied: u64,
    ) {
        let metrics = &self.inner.metrics;
        metrics.decided_some(protocol, Outcome::Allowed, allowed);
        metrics.decided_some(protocol, Outcome::Denied, denied);
        metrics.some_took(protocol, began, allowed + denied);
    }

    /// A request was decided by rules.
    pub(crate) fn ruled(&self, protocol: Protocol, op: Op, ruling: &Ruling) {
        let metrics = &self.inner.metrics;
        metrics.decided(protocol, if ruling.allowed { Outcome::Allowed } else { Outcome::Denied });
        if !asks(op) {
            return;
        }
        metrics.ruled(ruling);
        match (&ruling.refused_by, ruling.binding()) {
            _ if ruling.allowed => {}
            (Some(rule), _) => self.sample(protocol, &rule.name, None, self.inner.top.secs()),
            (None, Some((charge, _))) => self.denied(protocol, &charge.rule.name, &charge.key),
            (None, None) => {}
        }
    }

    /// There was no decision.
    pub(crate) fn failed(&self, protocol: Protocol, error: &StoreError) {
        let StoreError::Invalid(_) = error else {
            self.inner.metrics.decided(protocol, Outcome::Failed);
            self.inner.metrics.store_failed();
            if self.inner.failures.one_more(1, self.inner.top.secs()).is_some() {
                let why = self.why(error);
                self.inner.log.warn(
                    "the store has no answer",
                    &[("listener", &protocol.name()), ("why", &why)],
                );
            }
            return;
        };
        self.inner.metrics.decided(protocol, Outcome::Invalid);
    }

    /// The upstream of the proxy has no response.
    pub(crate) fn upstream_failed(
        &self,
        protocol: Protocol,
        upstream: &dyn std::fmt::Display,
        why: &dyn std::fmt::Display,
    ) {
        self.inner.metrics.refused(protocol, metrics::Refusal::Upstream);
        if let Some(left_out) = self.inner.upstream.one_more(1, self.inner.top.secs()) {
            let fields: [log::Field<'_>; 3] =
                [("upstream", upstream), ("why", why), ("left_out", &left_out)];
            self.inner.log.warn("the upstream has no response", &fields);
        }
    }

    /// Waits until a long page may be sent: so that asking for pages takes nothing from decisions.
    /// False if too many want one.
    pub(crate) async fn may_send_a_page(&self) -> bool {
        self.inner.pages.turn().await
    }

    /// The numbers as text. They are written anew some fifty times a second at most, one page at a
    /// time; whoever asks more often is told the last ones again.
    pub fn page(&self, store: &Backend) -> Bytes {
        let mut page = self.inner.page.lock();
        if page.is_empty()
            || self.inner.written.one_more(PAGES_PER_SECOND, self.inner.top.secs()).is_some()
        {
            *page = self.inner.metrics.text(store, self.inner.log.lost()).into();
        }
        page.clone()
    }

    /// Logs in another way from now on.
    pub fn set(&self, settings: &LogSettings) {
        self.inner.log.set(settings.level, settings.format);
        self.inner.top.set_show_keys(settings.show_keys);
        self.inner.denials_per_second.store(settings.denials_per_second.into(), Ordering::Relaxed);
    }

    /// A call to the store came to nothing, and this node decided alone. The reason is said a few
    /// times a second at most.
    pub fn missed(&self, error: &StoreError) {
        let Some(left_out) = self.inner.misses.one_more(MISSES_PER_SECOND, self.inner.top.secs())
        else {
            return;
        };
        let why = self.why(error);
        let fields: [log::Field<'_>; 2] = [("why", &why), ("left_out", &left_out)];
        self.inner
            .log
            .warn("the store did not decide", if left_out == 0 { &fields[..1] } else { &fields });
    }

    /// Why there was no decision; a key in it only as a hash, unless keys may be shown.
    fn why(&self, error: &StoreError) -> String {
        match error {
            StoreError::Corrupt { key, reason } if !self.inner.top.shows_keys() => {
                let key = self.inner.top.hashed("", key.as_bytes());
                format!(
                    "key {key} (log.show_keys shows it) holds something that Tidegate did not write: {reason}"
                )
            }
            error => error.to_string(),
        }
    }

    /// A gateway asked in a way that cannot be answered: nobody else would see why.
    pub(crate) fn misasked(&self, why: &str) {
        let Some(left_out) =
            self.inner.misasked.one_more(MISASKED_PER_SECOND, self.inner.top.secs())
        else {
            return;
        };
        let fields: [log::Field<'_>; 2] = [("why", &why), ("left_out", &left_out)];
        self.inner.log.warn(
            "a gateway cannot be answered",
            if left_out == 0 { &fields[..1] } else { &fields },
        );
    }

    /// A call brought only attributes that no rule looks at.
    pub(crate) fn misnamed(&self, protocol: Protocol, why: &str) {
        let Some(left_out) =
            self.inner.misnamed.one_more(MISASKED_PER_SECOND, self.inner.top.secs())
        else {
            return;
        };
        let fields: [log::Field<'_>; 3] =
            [("listener", &protocol.name()), ("why", &why), ("left_out", &left_out)];
        self.inner.log.warn(
            "a check brings unknown attributes",
            if left_out == 0 { &fields[..2] } else { &fields },
        );
    }

    /// A request was refused because a web page sent it, or because of the name that it was sent
    /// to.
    pub(crate) fn foreign(&self, protocol: Protocol, why: &dyn std::fmt::Display) {
        let Some(left_out) =
            self.inner.foreign.one_more(MISASKED_PER_SECOND, self.inner.top.secs())
        else {
            return;
        };
        let fields: [log::Field<'_>; 3] =
            [("listener", &protocol.name()), ("why", why), ("left_out", &left_out)];
        self.inner.log.warn(
            "a request of a browser is refused",
            if left_out == 0 { &fields[..2] } else { &fields },
        );
    }

    /// A token was not looked at, because too many wrong ones came before it. One line a minute
    /// says so.
    pub(crate) fn guessed(&self, protocol: Protocol, address: std::net::IpAddr) {
        let Some(left_out) = self.inner.guessed.one_more(1, self.inner.top.secs() / 60 + 1) else {
            return;
        };
        let fields: [log::Field<'_>; 3] =
            [("listener", &protocol.name()), ("address", &address), ("left_out", &left_out)];
        let fields = if left_out == 0 { &fields[..2] } else { &fields };
        self.inner
            .log
            .warn("too many wrong tokens: no token from there is looked at for a while", fields);
    }

    /// Somebody was denied something, by a rule or, if it has no name, by a limit that the caller
    /// brought.
    pub(crate) fn denied(&self, protocol: Protocol, rule: &str, key: &[u8]) {
        let secs = self.inner.top.secs();
        self.inner.top.denied(rule, key, secs);
        self.sample(protocol, rule, Some(key), secs);
    }

    /// Logs a denial, if not too many were logged within this second.
    fn sample(&self, protocol: Protocol, rule: &str, key: Option<&[u8]>, secs: u64) {
        if !self.inner.log.wants(Level::Info) {
            return;
        }
        let Some(left_out) = self
            .inner
            .sampled
            .one_more(self.inner.denials_per_second.load(Ordering::Relaxed), secs)
        else {
            return;
        };
        let key = match key {
            None => String::new(),
            Some(key) if self.inner.top.shows_keys() => String::from_utf8_lossy(key).into_owned(),
            Some(key) => self.inner.top.hashed(rule, key),
        };
        let fields: [log::Field<'_>; 4] = [
            ("listener", &protocol.name()),
            ("rule", &rule),
            ("key", &key),
            ("left_out", &left_out),
        ];
        self.inner.log.info("denied", if left_out == 0 { &fields[..3] } else { &fields });
    }
}

/// Whether somebody is denied something if the answer is no: not by a look, and not by giving back.
fn asks(op: Op) -> bool {
    matches!(op, Op::Check | Op::Take | Op::Debit)
}

/// The rule that limits a key; nothing if the caller does.
fn name_of<'a>(scope: &'a Scope<'_>) -> &'a str {
    match scope {
        Scope::Rule(name) => name,
        _ => "",
    }
}

/// At most so many a second, and how many were left out.
#[derive(Debug, Default)]
struct Sampled {
    second: AtomicU64,
    taken: AtomicU64,
    left_out: AtomicU64,
}

impl Sampled {
    /// Whether there is room for one more in this second; and then how many had none since the last
    /// that had.
    fn one_more(&self, most: u64, second: u64) -> Option<u64> {
        if self.second.load(Ordering::Relaxed) != second {
            self.second.store(second, Ordering::Relaxed);
            self.taken.store(0, Ordering::Relaxed);
        }
        if self.taken.load(Ordering::Relaxed) < most
            && self.taken.fetch_add(1, Ordering::Relaxed) < most
        {
            return Some(self.left_out.swap(0, Ordering::Relaxed));
        }
        self.left_out.fetch_add(1, Ordering::Relaxed);
        None
    }
}
