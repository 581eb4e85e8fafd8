//! A cluster forms, knows who serves what, and outlives its masters.

use tidegate_testkit::{Cluster, Flavor, Reply};

#[test]
fn every_flavor_forms_a_cluster() {
    Flavor::on_all(|flavor| {
        let cluster = Cluster::start(flavor);
        assert_eq!(cluster.nodes().len(), 6);
        for (slot, node) in [(0, 0), (5461, 0), (5462, 1), (10923, 1), (10924, 2), (16383, 2)] {
            assert_eq!(
                cluster.master_of(slot).port(),
                cluster.nodes()[node].port(),
                "{flavor}: slot {slot}"
            );
            assert_eq!(
                cluster.replica_of(slot).port(),
                cluster.nodes()[node + 3].port(),
                "{flavor}: slot {slot}"
            );
        }
        let slot = cluster.slot_of("user:7");
        assert_eq!(
            cluster.master_of(slot).command(&["SET", "user:7", "1"]),
            Reply::Text("OK".into())
        );
        let moved = cluster.replica_of(slot).command(&["GET", "user:7"]);
        let expected = format!("MOVED {slot} 127.0.0.1:{}", cluster.master_of(slot).port());
        assert_eq!(moved, Reply::Error(expected), "{flavor}");
        assert_eq!(cluster.keys_without_ttl("user:"), ["user:7"]);
    });
}

#[test]
fn the_url_names_three_nodes() {
    let cluster = Cluster::start(Flavor::Redis7);
    let [a, b, c, ..] = cluster.nodes() else { panic!("expected six nodes") };
    let hosts = [a, b, c].map(|node| format!("127.0.0.1:{}", node.port())).join(",");
    assert_eq!(cluster.url(), format!("redis+cluster://{hosts}"));
}

#[test]
fn a_failover_in_agreement_loses_nothing() {
    let cluster = Cluster::start(Flavor::Valkey9);
    let slot = cluster.slot_of("k");
    let (master, replica) = (cluster.master_of(slot), cluster.replica_of(slot));
    master.command(&["SET", "k", "v"]);
    assert_eq!(cluster.failover(slot).port(), replica.port());
    assert_eq!(cluster.master_of(slot).port(), replica.port());
    assert_eq!(cluster.replica_of(slot).port(), master.port());
    assert_eq!(replica.command(&["GET", "k"]), Reply::Text("v".into()));
}

#[test]
fn a_killed_master_is_replaced_and_comes_back_as_a_replica() {
    let cluster = Cluster::start(Flavor::Redis7);
    let replica = cluster.replica_of(0);
    let killed = cluster.kill_master_of(0);
    assert_eq!(cluster.wait_for_failover(0).port(), replica.port());
    killed.restart();
    cluster.wait_until_ok();
    assert_eq!(cluster.replica_of(0).port(), killed.port());
}

#[test]
fn a_stopped_master_is_replaced_and_obeys_when_it_goes_on() {
    let cluster = Cluster::start(Flavor::Valkey9);
    let (stopped, replica) = (cluster.master_of(16383), cluster.replica_of(16383));
    stopped.stop_signal();
    assert_eq!(cluster.wait_for_failover(16383).port(), replica.port());
    stopped.continue_signal();
    cluster.wait_until_ok();
    assert_eq!(cluster.replica_of(16383).port(), stopped.port());
}
