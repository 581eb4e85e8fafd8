//! Observability: metrics, the log, and the most limited keys.
//!
//! The engine reports decisions to the [`Observer`], and the acceptor reports connections, so no
//! protocol records decisions itself. Recording an allowed decision takes no lock and does not
//! allocate.

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

/// Lines per second about calls that the store did not decide.
const MISSES_PER_SECOND: u64 = 3;

/// Lines per second about requests of gateways that cannot be answered.
const MISASKED_PER_SECOND: u64 = 1;

/// How often per second the page of metrics is rendered.
const PAGES_PER_SECOND: u64 = 50;

/// The section `log` of the configuration.
#[derive(Clone, PartialEq, Eq, Debug, Deserialize, Serialize)]
#[serde(default, deny_unknown_fields)]
pub struct LogSettings {
    /// The least important level that is logged.
    #[serde(with = "values::text_or_off")]
    pub level: Level,
    /// The form of lines.
    #[serde(with = "values::text")]
    pub format: Format,
    /// The most denials that are logged per second; the rest is counted.
    pub denials_per_second: u32,
    /// Whether the log and the most limited keys show keys as they are; otherwise they show a keyed
    /// hash.
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

/// Records metrics, log lines and the most limited keys. Clones share them.
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
    /// The page of metrics as it was rendered last.
    page: Mutex<Bytes>,
    pages: Pages,
}

impl Default for Observer {
    /// Records metrics, and logs nothing.
    fn default() -> Self {
        Self::new(Log::disabled(), &LogSettings::default())
    }
}

impl Observer {
    /// An observer that writes to this log.
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

    /// The log.
    pub fn log(&self) -> &Log {
        &self.inner.log
    }

    /// The metrics.
    pub fn metrics(&self) -> &Metrics {
        &self.inner.metrics
    }

    /// The most limited keys.
    pub fn top(&self) -> &Top {
        &self.inner.top
    }

    /// Records the result of a check with limits of the caller.
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

    /// Records the results of requests that were decided as a batch.
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

    /// Records the result of a check against the rules.
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

    /// Records an error of a check.
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

    /// Records that the upstream of the proxy did not respond.
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

    /// Waits until a long page may be sent, so that pages do not delay decisions. False if too many
    /// requests wait.
    pub(crate) async fn may_send_a_page(&self) -> bool {
        self.inner.pages.turn().await
    }

    /// The metrics as text. They are rendered at most fifty times a second; other requests get the
    /// last page.
    pub fn page(&self, store: &Backend) -> Bytes {
        let mut page = self.inner.page.lock();
        if page.is_empty()
            || self.inner.written.one_more(PAGES_PER_SECOND, self.inner.top.secs()).is_some()
        {
            *page = self.inner.metrics.text(store, self.inner.log.lost()).into();
        }
        page.clone()
    }

    /// Changes what is logged, and how.
    pub fn set(&self, settings: &LogSettings) {
        self.inner.log.set(settings.level, settings.format);
        self.inner.top.set_show_keys(settings.show_keys);
        self.inner.denials_per_second.store(settings.denials_per_second.into(), Ordering::Relaxed);
    }

    /// Logs why a call to the store failed and this node decided locally, a few times a second at
    /// most.
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

    /// Why there was no decision. A key in it is hashed unless keys may be shown.
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

    /// Logs why a request of a gateway cannot be answered: gateways do not show the response.
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

    /// Logs a check with attributes that no rule uses.
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

    /// Logs a request that was refused because a web page sent it, or because of its `Host`.
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

    /// Logs, once a minute, that tokens are not compared after too many wrong ones.
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

    /// Records a denial by a rule or, if the name is empty, by a limit of the caller.
    pub(crate) fn denied(&self, protocol: Protocol, rule: &str, key: &[u8]) {
        let secs = self.inner.top.secs();
        self.inner.top.denied(rule, key, secs);
        self.sample(protocol, rule, Some(key), secs);
    }

    /// Logs a denial, unless too many were logged in this second.
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

/// Whether a negative result is a denial: peeking and refunding deny nothing.
fn asks(op: Op) -> bool {
    matches!(op, Op::Check | Op::Take | Op::Debit)
}

/// The rule that limits a key; empty for a limit of the caller.
fn name_of<'a>(scope: &'a Scope<'_>) -> &'a str {
    match scope {
        Scope::Rule(name) => name,
        _ => "",
    }
}

/// Limits log lines per second, and counts those that are left out.
#[derive(Debug, Default)]
struct Sampled {
    second: AtomicU64,
    taken: AtomicU64,
    left_out: AtomicU64,
}

impl Sampled {
    /// Whether one more line may be logged in this second; if so, how many were left out since the
    /// last one.
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
