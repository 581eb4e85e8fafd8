//! Sentinels find each other and replace a dead master.

use tidegate_testkit::{Flavor, Reply, Sentinels};

#[test]
fn every_flavor_is_watched_and_replaced() {
    Flavor::on_all(|flavor| {
        let sentinels = Sentinels::start(flavor);
        let hosts = sentinels.sentinels().iter().map(|node| format!("127.0.0.1:{}", node.port()));
        let hosts = hosts.collect::<Vec<_>>().join(",");
        assert_eq!(sentinels.url(), format!("redis+sentinel://{hosts}/mymaster"));
        assert_eq!(sentinels.master().port(), sentinels.servers()[0].port());

        let replica = sentinels.replica();
        let refused = replica.command(&["SET", "k", "v"]);
        assert!(
            matches!(&refused, Reply::Error(error) if error.starts_with("READONLY")),
            "{flavor}: {refused:?}"
        );
        sentinels.kill_master();
        assert_eq!(sentinels.wait_for_failover().port(), replica.port(), "{flavor}");
        assert_eq!(replica.command(&["SET", "k", "v"]), Reply::Text("OK".into()), "{flavor}");
    });
}

#[test]
fn master_and_replica_change_places_on_demand() {
    let sentinels = Sentinels::start(Flavor::Redis7);
    let (master, replica) = (sentinels.master(), sentinels.replica());
    assert_eq!(sentinels.failover().port(), replica.port());
    assert_eq!(sentinels.replica().port(), master.port());
}

#[test]
fn a_killed_master_comes_back_as_a_replica() {
    let sentinels = Sentinels::start(Flavor::Valkey9);
    let killed = sentinels.kill_master();
    sentinels.wait_for_failover();
    killed.restart();
    sentinels.wait_until_ok();
    assert_eq!(sentinels.replica().port(), killed.port());
}
