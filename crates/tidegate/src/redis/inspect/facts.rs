//! Judges `INFO`, `CLUSTER INFO` and `CLUSTER SLOTS`.

use std::collections::HashMap;
use std::ops::RangeInclusive;

use super::{Finding, Severity, Topic};
use tidegate_redis_client::Value;

/// The oldest Redis that is supported: 6.2.
const OLDEST: (u32, u32) = (6, 2);
/// The number of slots of a cluster.
const SLOTS: u64 = 16_384;

/// The lines `name:value` of `INFO` and `CLUSTER INFO`.
pub(super) struct Info<'a> {
    lines: HashMap<&'a str, &'a str>,
}

impl<'a> Info<'a> {
    pub(super) fn parse(text: &'a str) -> Self {
        Info { lines: text.lines().filter_map(|line| line.trim_end().split_once(':')).collect() }
    }

    fn text(&self, name: &str) -> Option<&'a str> {
        self.lines.get(name).copied().filter(|text| !text.is_empty())
    }

    fn number(&self, name: &str) -> Option<u64> {
        self.text(name)?.parse().ok()
    }
}

/// The findings about `INFO`. `cluster` is whether the URL names a cluster.
pub(super) fn judge(info: &Info<'_>, cluster: bool) -> Vec<Finding> {
    let mut findings = vec![version(info), role(info), eviction(info), persistence(info)];
    findings.extend(replicas(info));
    if !cluster && info.number("cluster_enabled") == Some(1) {
        let found = "the server is part of a cluster, but the URL names a single server";
        let finding = Finding::new(Severity::Problem, Topic::Cluster, found)
            .because("It refuses all keys whose slots are on other servers.");
        findings
            .push(finding.advise(
                "Write redis+cluster:// instead of redis:// (rediss+cluster:// with TLS).",
            ));
    }
    findings
}

fn version(info: &Info<'_>) -> Finding {
    // Valkey and others also have the version of Redis that they imitate.
    for (field, name) in [
        ("valkey_version", "Valkey"),
        ("dragonfly_version", "Dragonfly"),
        ("garnet_version", "Garnet"),
    ] {
        if let Some(version) = info.text(field) {
            let found = format!("{name} {}", plain(version));
            return if name == "Valkey" {
                Finding::ok(Topic::Version, found)
            } else {
                untested(found)
            };
        }
    }
    let Some(version) = info.text("redis_version") else {
        return untested("the server does not say what it is".into());
    };
    let found = format!("Redis {}", plain(version));
    match numbers(version) {
        None => untested(found),
        Some(numbers) if numbers >= OLDEST => Finding::ok(Topic::Version, found),
        Some(_) => Finding::new(Severity::Problem, Topic::Version, found)
            .because("Tidegate needs Redis 6.2 or later, or Valkey; nothing older was ever tried.")
            .advise("Upgrade the server."),
    }
}

fn untested(found: String) -> Finding {
    Finding::new(Severity::Warning, Topic::Version, found)
        .because("Tidegate is tested with Redis and Valkey only. Others may run scripts differently.")
        .advise("Compare both before you rely on it: tidegate simulate --verify --store URL --trace FILE.")
}

/// The first two numbers of a version.
fn numbers(version: &str) -> Option<(u32, u32)> {
    let mut parts = version.split('.').map(|part| part.parse().ok());
    Some((parts.next()??, parts.next()??))
}

fn role(info: &Info<'_>) -> Finding {
    if info.number("loading") == Some(1) {
        return Finding::new(
            Severity::Problem,
            Topic::Role,
            "the server is still loading its data",
        )
        .because("Until it has, there are no decisions.")
        .advise("Wait, and look again.");
    }
    match info.text("role") {
        Some("master") => Finding::ok(Topic::Role, "it takes writes"),
        Some("slave") => Finding::new(Severity::Problem, Topic::Role, "it is a replica")
            .because("A replica takes no writes, so nothing can be counted on it.")
            .advise(
                "Name the primary, or let Sentinel find it: redis+sentinel://h1,h2,h3/service.",
            ),
        other => {
            let found = format!("its role is {}", plain(other.unwrap_or("not told")));
            Finding::new(Severity::Warning, Topic::Role, found)
                .because("Only a primary takes writes.")
        }
    }
}

fn eviction(info: &Info<'_>) -> Finding {
    let policy = plain(info.text("maxmemory_policy").unwrap_or("not told"));
    let bytes = info.number("maxmemory").unwrap_or(0);
    let evicted = info.number("evicted_keys").unwrap_or(0);
    if policy == "noeviction" {
        let full = if bytes == 0 {
            String::new()
        } else {
            format!("; beyond {} it refuses writes, and checks have no answer", megabytes(bytes))
        };
        return Finding::ok(Topic::Eviction, format!("noeviction{full}"));
    }
    let advice = "CONFIG SET maxmemory-policy noeviction, and the line `maxmemory-policy noeviction` in its configuration file. If the \
                  server is also a cache that must evict, give the limits a server of their own; volatile-ttl is the mildest of the others.";
    if bytes == 0 {
        let found = format!("{policy}, but maxmemory is 0: nothing is evicted");
        return Finding::new(Severity::Note, Topic::Eviction, found)
            .because("If somebody sets a maxmemory, keys in use may be dropped, and what they had used is forgotten.")
            .advise(advice);
    }
    let past = if evicted > 0 {
        format!("; {evicted} keys evicted since it started")
    } else {
        String::new()
    };
    let why = match &*policy {
        "volatile-ttl" => {
            "When its memory is full it drops the keys that would end soonest. That is the mildest way, but whoever's key is dropped \
             starts anew, as if nothing had been used."
        }
        _ => {
            "When its memory is full it drops keys that are in use. Whoever's key is dropped starts anew, as if nothing had been used, \
             unless a process that has seen more lately asks first."
        }
    };
    let found = format!("{policy} with a maxmemory of {}{past}", megabytes(bytes));
    Finding::new(Severity::Warning, Topic::Eviction, found).because(why).advise(advice)
}

fn persistence(info: &Info<'_>) -> Finding {
    if info.number("aof_enabled") == Some(1) {
        let fine = info.text("aof_last_write_status").is_none_or(|status| status == "ok");
        if fine {
            return Finding::ok(Topic::Persistence, "append-only file");
        }
        return Finding::new(
            Severity::Warning,
            Topic::Persistence,
            "append-only file, and the last write to it failed",
        )
        .because("A server that cannot persist soon takes no writes (MISCONF).")
        .advise("Look at its log and its disk.");
    }
    Finding::new(Severity::Note, Topic::Persistence, "no append-only file")
        .because(
            "After a crash the server knows at most its last snapshot. What was used since is restored only as far as processes that \
             still run have seen it.",
        )
        .advise("For limits over hours or days: `appendonly yes` and `appendfsync everysec`. For limits over seconds it does not matter.")
}

fn replicas(info: &Info<'_>) -> Option<Finding> {
    if info.text("role") != Some("master") {
        return None;
    }
    let count = info.number("connected_slaves")?;
    if count == 0 {
        let finding = Finding::new(Severity::Note, Topic::Replicas, "none").because(
            "Nobody takes over when this server is lost; until it is back there are no decisions.",
        );
        return Some(
            finding.advise("Where that matters: a replica, with Sentinel or in a cluster."),
        );
    }
    // The server has this line only if min-replicas-to-write is set.
    if info.number("min_slaves_good_slaves").is_some() {
        return Some(Finding::ok(
            Topic::Replicas,
            format!("{count}, and min-replicas-to-write is set"),
        ));
    }
    let finding = Finding::new(Severity::Note, Topic::Replicas, format!("{count}, and min-replicas-to-write is not set"))
        .because(
            "A primary that is cut off from everybody goes on admitting, beside the one that was put in its place, for as long as \
             somebody still asks it.",
        );
    Some(finding.advise("`min-replicas-to-write 1` and `min-replicas-max-lag 1` make it stop after a second or two."))
}

/// The finding about `CLUSTER INFO` of one server.
pub(super) fn judge_cluster(info: &Info<'_>) -> Finding {
    let state = plain(info.text("cluster_state").unwrap_or("not told"));
    let (assigned, fine) = (info.number("cluster_slots_assigned"), info.number("cluster_slots_ok"));
    if state == "ok" && assigned == Some(SLOTS) && fine == Some(SLOTS) {
        let masters = info.number("cluster_size").unwrap_or(0);
        return Finding::ok(
            Topic::Cluster,
            format!("ok: all {SLOTS} slots are served by {masters} servers"),
        );
    }
    let count = |number: Option<u64>| number.map_or("?".into(), |number| number.to_string());
    let found = format!(
        "{state}: {} of {SLOTS} slots have an owner, {} are served",
        count(assigned),
        count(fine)
    );
    Finding::new(Severity::Problem, Topic::Cluster, found)
        .because("Keys in slots that nobody serves have no decisions; with cluster-require-full-coverage, which is usual, no key has.")
        .advise("redis-cli --cluster check HOST:PORT says what is missing, and redis-cli --cluster fix HOST:PORT mends it.")
}

/// A range of slots and its master.
#[derive(Debug, PartialEq, Eq)]
pub(in crate::redis) struct SlotRange {
    pub(in crate::redis) master: String,
    pub(in crate::redis) slots: RangeInclusive<u16>,
}

/// The widest range of slots of each master, in which a test key is found fastest; from `CLUSTER
/// SLOTS`.
pub(in crate::redis) fn slot_ranges(slots: &Value) -> Vec<SlotRange> {
    let mut slot_ranges: Vec<SlotRange> = Vec::new();
    for shard in slots.as_array().unwrap_or_default() {
        let Some([first, last, master, ..]) = shard.as_array() else { continue };
        let slot = |value: &Value| value.as_int().and_then(|slot| u16::try_from(slot).ok());
        let (Some(first), Some(last)) = (slot(first), slot(last)) else { continue };
        let Some([host, port, ..]) = master.as_array() else { continue };
        let (Some(host), Some(port)) = (host.as_str(), port.as_int()) else { continue };
        let host = if host.contains(':') { format!("[{}]", plain(host)) } else { plain(host) };
        let (master, slots) = (format!("{host}:{port}"), first..=last);
        match slot_ranges.iter_mut().find(|shard| shard.master == master) {
            Some(shard) if shard.slots.len() < slots.len() => shard.slots = slots,
            Some(_) => {}
            None => slot_ranges.push(SlotRange { master, slots }),
        }
    }
    slot_ranges
}

/// A word of a server, made printable and short.
fn plain(word: &str) -> String {
    word.chars().take(40).map(|char| if char.is_ascii_graphic() { char } else { '?' }).collect()
}

fn megabytes(bytes: u64) -> String {
    match bytes {
        0..1_048_576 => format!("{bytes} bytes"),
        _ => format!("{} MB", bytes / 1_048_576),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(text: &str, judge: fn(&Info<'_>) -> Finding) -> (Severity, String) {
        let finding = judge(&Info::parse(text));
        assert!(
            finding.severity == Severity::Ok || !finding.why.is_empty(),
            "{text}: it matters, but the finding does not say why"
        );
        (finding.severity, finding.found)
    }

    #[test]
    fn versions_are_distinguished() {
        for (text, severity, found) in [
            ("redis_version:6.2.14", Severity::Ok, "Redis 6.2.14"),
            ("redis_version:7.0.15\r", Severity::Ok, "Redis 7.0.15"),
            ("redis_version:8.0.2", Severity::Ok, "Redis 8.0.2"),
            ("redis_version:10.0.0", Severity::Ok, "Redis 10.0.0"),
            ("redis_version:6.0.16", Severity::Problem, "Redis 6.0.16"),
            ("redis_version:5.0.14", Severity::Problem, "Redis 5.0.14"),
            ("redis_version:2.8", Severity::Problem, "Redis 2.8"),
            (
                "redis_version:7.2.4\nserver_name:valkey\nvalkey_version:9.0.0",
                Severity::Ok,
                "Valkey 9.0.0",
            ),
            (
                "redis_version:7.2.4\nserver_name:valkey\nvalkey_version:7.2.5",
                Severity::Ok,
                "Valkey 7.2.5",
            ),
            (
                "redis_version:7.4.0\ndragonfly_version:df-v1.27",
                Severity::Warning,
                "Dragonfly df-v1.27",
            ),
            ("redis_version:unstable", Severity::Warning, "Redis unstable"),
            ("redis_version:7", Severity::Warning, "Redis 7"),
            ("", Severity::Warning, "the server does not say what it is"),
        ] {
            assert_eq!(of(text, version), (severity, found.to_owned()), "{text}");
        }
    }

    #[test]
    fn only_noeviction_is_fine_and_without_a_maxmemory_nothing_is_urgent() {
        for (policy, maxmemory, severity, found) in [
            ("noeviction", 0, Severity::Ok, "noeviction"),
            (
                "noeviction",
                104_857_600,
                Severity::Ok,
                "noeviction; beyond 100 MB it refuses writes, and checks have no answer",
            ),
            (
                "allkeys-lru",
                0,
                Severity::Note,
                "allkeys-lru, but maxmemory is 0: nothing is evicted",
            ),
            (
                "allkeys-lru",
                104_857_600,
                Severity::Warning,
                "allkeys-lru with a maxmemory of 100 MB",
            ),
            (
                "volatile-lfu",
                1000,
                Severity::Warning,
                "volatile-lfu with a maxmemory of 1000 bytes",
            ),
            (
                "volatile-ttl",
                104_857_600,
                Severity::Warning,
                "volatile-ttl with a maxmemory of 100 MB",
            ),
        ] {
            let text =
                format!("maxmemory:{maxmemory}\r\nmaxmemory_policy:{policy}\r\nevicted_keys:0\r\n");
            assert_eq!(of(&text, eviction), (severity, found.to_owned()), "{policy}");
        }
        let text = "maxmemory:1000\nmaxmemory_policy:allkeys-random\nevicted_keys:17";
        assert!(of(text, eviction).1.ends_with("; 17 keys evicted since it started"));
        let mild = eviction(&Info::parse("maxmemory:1000\nmaxmemory_policy:volatile-ttl"));
        assert!(
            mild.why.contains("mildest") && mild.advice.contains("maxmemory-policy noeviction")
        );
    }

    #[test]
    fn replicas_and_loading_servers_take_no_writes() {
        assert_eq!(of("role:master", role).0, Severity::Ok);
        assert_eq!(of("role:slave\nmaster_link_status:up", role).0, Severity::Problem);
        assert_eq!(of("role:master\nloading:1", role).0, Severity::Problem);
        assert_eq!(of("", role).0, Severity::Warning);
    }

    #[test]
    fn replicas_are_counted() {
        let severity = |text| replicas(&Info::parse(text)).map(|finding| finding.severity);
        assert_eq!(severity("role:slave\nconnected_slaves:0"), None);
        assert_eq!(severity("role:master\nconnected_slaves:0"), Some(Severity::Note));
        assert_eq!(severity("role:master\nconnected_slaves:2"), Some(Severity::Note));
        assert_eq!(
            severity("role:master\nconnected_slaves:2\nmin_slaves_good_slaves:2"),
            Some(Severity::Ok)
        );
    }

    #[test]
    fn persistence_is_worth_a_note() {
        assert_eq!(of("aof_enabled:0", persistence).0, Severity::Note);
        assert_eq!(of("aof_enabled:1\naof_last_write_status:ok", persistence).0, Severity::Ok);
        assert_eq!(
            of("aof_enabled:1\naof_last_write_status:err", persistence).0,
            Severity::Warning
        );
    }

    #[test]
    fn a_cluster_is_well_if_all_slots_are_served() {
        let well = "cluster_state:ok\r\ncluster_slots_assigned:16384\r\ncluster_slots_ok:16384\r\ncluster_size:3\r\n";
        assert_eq!(
            of(well, judge_cluster),
            (Severity::Ok, "ok: all 16384 slots are served by 3 servers".into())
        );
        let ill = "cluster_state:fail\ncluster_slots_assigned:16384\ncluster_slots_ok:10923\ncluster_size:3";
        let found = "fail: 16384 of 16384 slots have an owner, 10923 are served";
        assert_eq!(of(ill, judge_cluster), (Severity::Problem, found.into()));
        assert_eq!(of("", judge_cluster).0, Severity::Problem);
    }

    #[test]
    fn a_node_of_a_cluster_that_is_taken_for_a_single_server_is_a_problem() {
        let judged =
            |cluster| judge(&Info::parse("redis_version:7.0.0\ncluster_enabled:1"), cluster);
        let about_clusters =
            |findings: Vec<Finding>| findings.iter().any(|finding| finding.topic == Topic::Cluster);
        assert!(about_clusters(judged(false)) && !about_clusters(judged(true)));
    }

    #[test]
    fn the_widest_range_of_each_master_is_used() {
        let text = |text: &str| Value::Bulk(text.into());
        let node = |host: &str, port| Value::Array(vec![text(host), Value::Int(port), text("id")]);
        let shard = |first, last, node: Value| {
            Value::Array(vec![Value::Int(first), Value::Int(last), node])
        };
        let slots = Value::Array(vec![
            shard(0, 0, node("10.0.0.1", 7000)),
            shard(1, 9000, node("::1", 7001)),
            shard(9001, 16_383, node("10.0.0.1", 7000)),
            Value::Int(7),
            shard(-1, 70_000, node("10.0.0.1", 7002)),
        ]);
        assert_eq!(
            slot_ranges(&slots),
            [
                SlotRange { master: "10.0.0.1:7000".into(), slots: 9001..=16_383 },
                SlotRange { master: "[::1]:7001".into(), slots: 1..=9000 },
            ]
        );
        assert_eq!(slot_ranges(&Value::Nil), []);
    }

    #[test]
    fn the_text_of_a_server_cannot_control_a_terminal() {
        let (_, found) = of(&format!("redis_version:7.0.\u{1b}[31m{}", "9".repeat(100)), version);
        assert_eq!(found, format!("Redis 7.0.?[31m{}", "9".repeat(31)));
    }
}
