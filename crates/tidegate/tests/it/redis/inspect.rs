//! The startup check, on healthy and unhealthy servers.

use std::time::Duration;

use tidegate::redis::FailureKind;
use tidegate::redis::inspect::{Finding, Inspection, Severity, Topic};
use tidegate_testkit::{Cluster, Flavor, Sentinels, Server, wait_until};

use super::{assert_all_expire, at, runtime};

fn inspect(url: &str) -> Inspection {
    runtime().block_on(async { at(url).build().unwrap().inspect().await.unwrap() })
}

/// The finding on a topic.
fn on(inspection: &Inspection, topic: Topic) -> &Finding {
    inspection
        .findings
        .iter()
        .find(|finding| finding.topic == topic)
        .unwrap_or_else(|| panic!("{topic:?}: {inspection}"))
}

#[test]
fn a_fresh_server_has_nothing_worse_than_notes() {
    Flavor::on_all(|flavor| {
        let server = Server::start(flavor);
        let inspection = inspect(&server.url());
        assert_eq!(inspection.worst(), Severity::Note, "{inspection}");
        for topic in [
            Topic::Version,
            Topic::Role,
            Topic::Eviction,
            Topic::Rights,
            Topic::Decision,
            Topic::Clock,
        ] {
            assert_eq!(on(&inspection, topic).severity, Severity::Ok, "{flavor}: {inspection}");
        }
        let name = if flavor == Flavor::Valkey9 { "Valkey 9." } else { "Redis " };
        assert!(on(&inspection, Topic::Version).found.starts_with(name), "{inspection}");
        assert_all_expire(&server);
        let empty = || server.command(&["DBSIZE"]).int() == 0;
        wait_until("the test keys are gone", Duration::from_secs(5), empty);
    });
}

#[test]
fn a_server_that_lacks_nothing_has_not_even_notes() {
    let start = |server: tidegate_testkit::Builder| server.arg("--repl-diskless-sync-delay", "0");
    let primary = start(Server::builder(Flavor::Redis8))
        .arg("--appendonly", "yes")
        .arg("--min-replicas-to-write", "1");
    let primary = primary.start();
    let replica = start(Server::builder(Flavor::Redis8)).start();
    replica.command(&["REPLICAOF", "127.0.0.1", &primary.port().to_string()]);
    let replicated =
        || primary.command(&["INFO", "replication"]).text().contains("min_slaves_good_slaves:1");
    wait_until("the replica follows", Duration::from_secs(20), replicated);
    let inspection = inspect(&primary.url());
    assert_eq!(inspection.worst(), Severity::Ok, "{inspection}");

    let inspection = inspect(&replica.url());
    assert_eq!(on(&inspection, Topic::Role).severity, Severity::Problem, "{inspection}");
}

#[test]
fn an_evicting_policy_is_a_warning_that_names_it_and_the_better_one() {
    let server = Server::builder(Flavor::Redis7)
        .arg("--maxmemory", "100mb")
        .arg("--maxmemory-policy", "allkeys-lru");
    let server = server.start();
    let inspection = inspect(&server.url());
    let finding = on(&inspection, Topic::Eviction);
    assert_eq!(
        (finding.severity, finding.found.as_str()),
        (Severity::Warning, "allkeys-lru with a maxmemory of 100 MB")
    );
    assert!(
        finding.advice.starts_with("CONFIG SET maxmemory-policy noeviction"),
        "{}",
        finding.advice
    );
    server.command(&["CONFIG", "SET", "maxmemory", "0"]);
    assert_eq!(on(&self::inspect(&server.url()), Topic::Eviction).severity, Severity::Note);
}

#[test]
fn a_server_that_is_full_has_no_decision() {
    let server = Server::builder(Flavor::Redis7).arg("--maxmemory", "1").start();
    let inspection = inspect(&server.url());
    let finding = on(&inspection, Topic::Decision);
    assert_eq!(finding.severity, Severity::Problem, "{inspection}");
    assert!(
        finding.found.contains("out of memory") && finding.advice.contains("maxmemory"),
        "{inspection}"
    );
}

#[test]
fn a_cluster_is_checked_node_by_node() {
    let cluster = Cluster::start(Flavor::Redis7);
    let inspection = inspect(&cluster.url());
    assert_eq!(inspection.servers.len(), 3);
    assert!(inspection.worst() <= Severity::Note, "{inspection}");
    for topic in [Topic::Version, Topic::Cluster, Topic::Rights, Topic::Decision] {
        let finding = on(&inspection, topic);
        assert_eq!((finding.severity, finding.servers.len()), (Severity::Ok, 3), "{inspection}");
    }
    assert_eq!(
        on(&inspection, Topic::Cluster).found,
        "ok: all 16384 slots are served by 3 servers"
    );
    assert_eq!(cluster.keys_without_ttl("tg1:"), Vec::<String>::new());

    let as_single = inspect(&cluster.nodes()[0].url());
    assert_eq!(on(&as_single, Topic::Cluster).severity, Severity::Problem, "{as_single}");
    assert!(on(&as_single, Topic::Cluster).advice.contains("redis+cluster://"), "{as_single}");
}

#[test]
fn the_primary_behind_sentinel_is_checked() {
    let sentinels = Sentinels::start(Flavor::Redis7);
    let inspection = inspect(&sentinels.url());
    assert!(inspection.worst() <= Severity::Note, "{inspection}");
    assert!(on(&inspection, Topic::Replicas).found.starts_with("1"), "{inspection}");
}

#[test]
fn without_a_server_the_check_fails() {
    let server = Server::builder(Flavor::Valkey9).password("s3cret").start();
    let failed = |url: &str| {
        runtime().block_on(async { at(url).build().unwrap().inspect().await.unwrap_err() })
    };
    let port = server.port();
    for (url, kind) in [
        (format!("redis://127.0.0.1:{port}"), FailureKind::NoAuth),
        (format!("redis://:wrong-secret@127.0.0.1:{port}"), FailureKind::WrongPass),
        (format!("redis+cluster://:s3cret@127.0.0.1:{port}"), FailureKind::Topology),
        (format!("redis+sentinel://:s3cret@127.0.0.1:{port}/service"), FailureKind::NoAuth),
    ] {
        let failure = failed(&url);
        assert_eq!(failure.kind(), kind, "{url}: {failure}");
        assert!(!failure.to_string().contains("secret"), "{failure}");
    }
    server.kill();
    assert_eq!(failed(&format!("redis://127.0.0.1:{port}")).kind(), FailureKind::Refused);
}

#[test]
fn round_trips_are_measured() {
    let server = Server::start(Flavor::Redis62);
    runtime().block_on(async {
        let redis = at(&server.url()).build().unwrap();
        let trips = redis.measure(50, Duration::from_secs(60)).await.unwrap();
        for times in [&trips.ping, &trips.decision] {
            assert_eq!(times.samples(), 50);
            assert!(
                Duration::ZERO < times.percentile(50)
                    && times.percentile(50) <= times.percentile(99)
            );
            assert!(times.percentile(99) <= times.max());
        }
        // The time bounds the measurement, whatever the number of samples.
        let trips = redis.measure(usize::MAX, Duration::ZERO).await.unwrap();
        assert_eq!(trips.ping.samples(), 1);
        redis.prepare().await.unwrap();
        assert_eq!(redis.stats().script_loads, 2, "the script, and the one that tries out rights");
    });
}
