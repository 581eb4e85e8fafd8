//! The metrics in the text format of Prometheus.

use std::fmt::Write;
use std::sync::atomic::{AtomicU64, Ordering};

use tidegate::resilience::{BreakerState, ResilienceStats};

use super::labels::{Outcome, Refusal, Reloaded, Stall};
use super::{BUCKETS, Histogram, Metrics, RuleCounts, Shard, Snapshots};
use crate::backend::Backend;
use crate::protocol::Protocol;

impl Metrics {
    /// All metrics as text: a few hundred lines, and two per rule.
    pub fn text(&self, store: &Backend, log_lines_lost: u64) -> String {
        let mut page = Page(String::with_capacity(16 << 10));
        self.decisions(&mut page);
        self.of_rules(&mut page);
        self.of_protocols(&mut page);
        self.of_the_store(&mut page, store);
        self.of_the_process(&mut page, log_lines_lost);
        page.0
    }

    fn decisions(&self, page: &mut Page) {
        page.head("tidegate_decisions_total", "counter", "Checks by protocol and outcome.");
        for protocol in Protocol::OUTER {
            for outcome in Outcome::ALL {
                let of = |shard: &Shard| {
                    shard.decisions[protocol as usize][outcome as usize].load(Ordering::Relaxed)
                };
                let count = self.shards.iter().map(of).sum::<u64>();
                let labels =
                    format!(r#"protocol="{}",outcome="{}""#, protocol.name(), outcome.name());
                page.line("tidegate_decisions_total", &labels, count);
            }
        }
        page.head(
            "tidegate_decision_seconds",
            "histogram",
            "Time of a check in the engine; with a store in memory one in 64 is timed.",
        );
        for protocol in Protocol::OUTER {
            let labels = format!(r#"protocol="{}""#, protocol.name());
            page.histogram(
                "tidegate_decision_seconds",
                &labels,
                self.shards.iter().map(|shard| &shard.protocols[protocol as usize]),
            );
        }
    }

    fn of_rules(&self, page: &mut Page) {
        let rules = self.rules.load();
        let mut names: Vec<_> = rules.iter().collect();
        names.sort_by(|a, b| a.0.cmp(b.0));
        let parts = [
            (false, "tidegate_rule_decisions_total", "Decisions of each enforced rule."),
            (
                true,
                "tidegate_shadow_decisions_total",
                "Decisions of each rule in shadow mode, which are not enforced.",
            ),
        ];
        for (shadow, metric, help) in parts {
            page.head(metric, "counter", help);
            let mut line = |name: &str, counts: &RuleCounts| {
                let (allowed, denied) = counts.read();
                page.line(
                    metric,
                    &format!(r#"rule="{}",outcome="allowed""#, escaped(name)),
                    allowed,
                );
                page.line(metric, &format!(r#"rule="{}",outcome="denied""#, escaped(name)), denied);
            };
            for (name, counts) in names.iter().filter(|(_, counts)| counts.shadow == shadow) {
                line(name, counts);
            }
            if !shadow && self.other.read() != (0, 0) {
                line("other", &self.other);
            }
        }
    }

    fn of_protocols(&self, page: &mut Page) {
        page.head("tidegate_connections", "gauge", "Open connections of a listener.");
        for protocol in Protocol::OUTER {
            page.line(
                "tidegate_connections",
                &format!(r#"protocol="{}""#, protocol.name()),
                self.connections(protocol),
            );
        }
        page.head("tidegate_connections_total", "counter", "Connections that a listener accepted.");
        for protocol in Protocol::OUTER {
            let accepted = self.protocols[protocol as usize].accepted.load(Ordering::Relaxed);
            page.line(
                "tidegate_connections_total",
                &format!(r#"protocol="{}""#, protocol.name()),
                accepted,
            );
        }
        page.head(
            "tidegate_refused_total",
            "counter",
            "Connections and requests that a listener did not serve, by reason.",
        );
        for protocol in Protocol::OUTER {
            for why in Refusal::ALL {
                let count =
                    self.protocols[protocol as usize].refused[why as usize].load(Ordering::Relaxed);
                let labels = format!(r#"protocol="{}",reason="{}""#, protocol.name(), why.name());
                page.line("tidegate_refused_total", &labels, count);
            }
        }
        page.single(
            "tidegate_accept_errors_total",
            "counter",
            "Errors of accept(), for example without file descriptors.",
            &self.accept_errors,
        );
    }

    fn of_the_store(&self, page: &mut Page, store: &Backend) {
        let name = if matches!(store, Backend::Memory(_)) { "memory" } else { "redis" };
        page.head(
            "tidegate_store_seconds",
            "histogram",
            "Time of a call to the store; in memory one call in 64 is timed.",
        );
        page.histogram(
            "tidegate_store_seconds",
            &format!(r#"store="{name}""#),
            self.shards.iter().map(|shard| &shard.store),
        );
        let (failed, answered) =
            (self.failed_at.load(Ordering::Relaxed), self.answered_at.load(Ordering::Relaxed));
        page.head(
            "tidegate_store_up",
            "gauge",
            "1 if the store decides; 0 if it is unreachable or refuses.",
        );
        page.line(
            "tidegate_store_up",
            &format!(r#"store="{name}""#),
            u8::from(!store.is_degraded() && (failed == 0 || answered > failed)),
        );
        if let Backend::Memory(memory) = store {
            page.head("tidegate_store_keys", "gauge", "Keys in the store.");
            page.line("tidegate_store_keys", "", memory.len());
            page.head("tidegate_store_bytes", "gauge", "Bytes the store has allocated.");
            page.line("tidegate_store_bytes", "", memory.allocated_bytes());
            page.head("tidegate_store_max_bytes", "gauge", "Bytes the store may allocate.");
            page.line("tidegate_store_max_bytes", "", memory.max_bytes());
            page.head(
                "tidegate_store_overflows_total",
                "counter",
                "Charges of new keys while the store was full.",
            );
            page.line("tidegate_store_overflows_total", "", memory.without_room());
            let number = |number: &AtomicU64| number.load(Ordering::Relaxed);
            let Snapshots { saved, failed, bytes, at, micros } = &self.snapshots;
            page.head("tidegate_snapshots_total", "counter", "Snapshots by result.");
            for (result, count) in [("ok", saved), ("failed", failed)] {
                page.line(
                    "tidegate_snapshots_total",
                    &format!(r#"result="{result}""#),
                    number(count),
                );
            }
            page.head(
                "tidegate_snapshot_timestamp_seconds",
                "gauge",
                "When the last snapshot was written; 0 if none was.",
            );
            page.line("tidegate_snapshot_timestamp_seconds", "", number(at));
            page.head("tidegate_snapshot_bytes", "gauge", "Bytes of the last snapshot.");
            page.line("tidegate_snapshot_bytes", "", number(bytes));
            page.head("tidegate_snapshot_duration_seconds", "gauge", "Time of the last snapshot.");
            page.line("tidegate_snapshot_duration_seconds", "", number(micros) as f64 / 1e6);
        }
        if let Backend::Redis(redis) | Backend::Resilient(_, redis) = store {
            let stats = redis.stats();
            for (event, count) in [
                ("call", stats.calls),
                ("coalesced", stats.coalesced),
                ("regression", stats.regressions),
                ("clock_regression", stats.clock_regressions),
                ("repair", stats.repairs),
                ("reconnect", stats.reconnects),
                ("retry", stats.retries),
                ("redirect", stats.redirects),
                ("script_load", stats.script_loads),
                ("timeout", stats.timeouts),
            ] {
                if event == "call" {
                    page.head(
                        "tidegate_store_events_total",
                        "counter",
                        "Events of the connection to the store.",
                    );
                }
                page.line("tidegate_store_events_total", &format!(r#"event="{event}""#), count);
            }
        }
        if let Backend::Resilient(resilient, _) = store {
            resilience(page, &resilient.stats());
        }
    }

    fn of_the_process(&self, page: &mut Page, log_lines_lost: u64) {
        page.head("tidegate_reloads_total", "counter", "Reloads of changed files, by result.");
        for what in Reloaded::ALL {
            for (at, result) in ["ok", "failed"].into_iter().enumerate() {
                let count = self.reloads[what as usize][at].load(Ordering::Relaxed);
                page.line(
                    "tidegate_reloads_total",
                    &format!(r#"what="{}",result="{result}""#, what.name()),
                    count,
                );
            }
        }
        page.head(
            "tidegate_config_in_force",
            "gauge",
            "1 if the content of all files is in force; 0 if a file is refused or a setting needs a restart.",
        );
        page.line("tidegate_config_in_force", "", u8::from(self.in_force.is_whole()));
        page.single(
            "tidegate_panics_total",
            "counter",
            "Requests and tasks that panicked. Expected: 0.",
            &self.panics,
        );
        page.single(
            "tidegate_task_restarts_total",
            "counter",
            "Restarts of background tasks.",
            &self.restarts,
        );
        page.head(
            "tidegate_stalls_total",
            "counter",
            "Stalls of the event loop or of the store in memory, of more than 100 ms. Expected: 0.",
        );
        for what in Stall::ALL {
            let count = self.stalls[what as usize].load(Ordering::Relaxed);
            page.line("tidegate_stalls_total", &format!(r#"what="{}""#, what.name()), count);
        }
        page.head(
            "tidegate_log_lines_lost_total",
            "counter",
            "Lines of the log that were dropped because the queue was full.",
        );
        page.line("tidegate_log_lines_lost_total", "", log_lines_lost);
        page.head("tidegate_uptime_seconds", "gauge", "Time since the start.");
        page.line("tidegate_uptime_seconds", "", self.started.elapsed().as_secs());
        page.head("tidegate_info", "gauge", "What is running.");
        page.line("tidegate_info", concat!(r#"version=""#, env!("CARGO_PKG_VERSION"), r#"""#), 1);
    }
}

/// Metrics of the resilience layer.
fn resilience(page: &mut Page, stats: &ResilienceStats) {
    let open = u8::from(stats.breaker == BreakerState::Open);
    for (name, help, value) in [
        (
            "tidegate_breaker_open",
            "1 if the store is not called: it does not answer, or refuses permanently.",
            u64::from(open),
        ),
        ("tidegate_store_calls_in_flight", "Concurrent calls to the store.", stats.in_flight),
        ("tidegate_leases", "Keys with a lease of this node.", stats.leases),
        (
            "tidegate_lease_units_held",
            "Units of leases that are not spent yet.",
            stats.lease_units_held,
        ),
        (
            "tidegate_unsynced_units",
            "Units that were allowed locally and are not charged yet.",
            stats.unsynced_units,
        ),
        ("tidegate_nodes", "Number of nodes by which limits are divided.", stats.nodes),
    ] {
        page.head(name, "gauge", help);
        page.line(name, "", value);
    }
    page.head("tidegate_mode_changes_total", "counter", "State changes of the circuit breaker.");
    for (to, count) in [("open", stats.opened), ("closed", stats.closed)] {
        page.line("tidegate_mode_changes_total", &format!(r#"to="{to}""#), count);
    }
    page.head(
        "tidegate_local_decisions_total",
        "counter",
        "Local decisions by a cached denial, a lease or asynchronous charging.",
    );
    for (kind, count) in
        [("denial", stats.denied_here), ("lease", stats.spent_here), ("async", stats.async_here)]
    {
        page.line("tidegate_local_decisions_total", &format!(r#"kind="{kind}""#), count);
    }
    page.head(
        "tidegate_fallback_decisions_total",
        "counter",
        "Local decisions because the store did not answer.",
    );
    for (outcome, count) in [("allowed", stats.fallback_allowed), ("denied", stats.fallback_denied)]
    {
        page.line("tidegate_fallback_decisions_total", &format!(r#"outcome="{outcome}""#), count);
    }
    page.head(
        "tidegate_store_missed_total",
        "counter",
        "Checks that the store did not decide, by reason.",
    );
    for (reason, count) in
        [("no_answer", stats.misses), ("breaker", stats.not_called), ("overload", stats.overloads)]
    {
        page.line("tidegate_store_missed_total", &format!(r#"reason="{reason}""#), count);
    }
    page.head("tidegate_lease_units_total", "counter", "Units of leases by what happened to them.");
    for (fate, count) in [
        ("granted", stats.lease_units_granted),
        ("spent", stats.lease_units_spent),
        ("returned", stats.lease_units_returned),
        ("expired", stats.lease_units_expired),
    ] {
        page.line("tidegate_lease_units_total", &format!(r#"fate="{fate}""#), count);
    }
    page.head(
        "tidegate_synced_units_total",
        "counter",
        "Units that were charged after they were allowed locally.",
    );
    page.line("tidegate_synced_units_total", "", stats.synced_units);
    page.head(
        "tidegate_fail_open_total",
        "counter",
        "Requests that were allowed without a charge because a rule fails open.",
    );
    page.line("tidegate_fail_open_total", "", stats.fail_open);
}

/// The text as far as it is written.
struct Page(String);

impl Page {
    fn head(&mut self, name: &str, kind: &str, help: &str) {
        let _ = write!(self.0, "# HELP {name} {help}\n# TYPE {name} {kind}\n");
    }

    fn line(&mut self, name: &str, labels: &str, value: impl std::fmt::Display) {
        _ = if labels.is_empty() {
            writeln!(self.0, "{name} {value}")
        } else {
            writeln!(self.0, "{name}{{{labels}}} {value}")
        };
    }

    fn single(&mut self, name: &str, kind: &str, help: &str, value: &AtomicU64) {
        self.head(name, kind, help);
        self.line(name, "", value.load(Ordering::Relaxed));
    }

    fn histogram<'a>(
        &mut self,
        name: &str,
        labels: &str,
        parts: impl Iterator<Item = &'a Histogram>,
    ) {
        let (mut buckets, mut sum_ns) = ([0u64; BUCKETS + 1], 0u64);
        for part in parts {
            for (sum, own) in buckets.iter_mut().zip(&part.buckets) {
                *sum += own.load(Ordering::Relaxed);
            }
            sum_ns = sum_ns.saturating_add(part.sum_ns.load(Ordering::Relaxed));
        }
        let mut count = 0;
        for (at, bucket) in buckets.iter().enumerate() {
            count += bucket;
            let bound = if at < BUCKETS { seconds(1000 << at) } else { "+Inf".into() };
            self.line(&format!("{name}_bucket"), &format!(r#"{labels},le="{bound}""#), count);
        }
        self.line(&format!("{name}_sum"), labels, seconds(sum_ns));
        self.line(&format!("{name}_count"), labels, count);
    }
}

/// Nanoseconds as a decimal number of seconds, exactly.
fn seconds(ns: u64) -> String {
    let text = format!("{}.{:09}", ns / 1_000_000_000, ns % 1_000_000_000);
    text.trim_end_matches('0').trim_end_matches('.').to_string()
}

/// The value of a label: names of rules need no escaping, those of Envoy's files may.
fn escaped(name: &str) -> String {
    name.replace('\\', r"\\").replace('"', "\\\"").replace('\n', "\\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn seconds_are_written_exactly() {
        for (ns, expected) in
            [(0, "0"), (1000, "0.000001"), (1_500_000_000, "1.5"), (1_000 << 19, "0.524288")]
        {
            assert_eq!(seconds(ns), expected);
        }
    }
}
