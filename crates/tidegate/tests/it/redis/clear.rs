//! A store can remove its own keys, and no others.

use tidegate::redis::{ClearError, Redis};
use tidegate::{Check, Limits, Store};
use tidegate_testkit::{Cluster, Flavor, Server};

use super::{at, runtime, store};

async fn write(redis: &Redis, keys: usize) {
    let limits: Limits = "100/day; 5/h log".parse().unwrap();
    for key in 0..keys {
        let key = key.to_string();
        assert!(redis.decide(&Check::new().charge(&key, &limits, 1)).await.unwrap().allowed());
    }
}

#[test]
fn only_the_keys_of_the_namespace_are_removed() {
    Flavor::on_all(|flavor| {
        let server = Server::start(flavor);
        runtime().block_on(async {
            let (shop, shopping) =
                (store(&server).namespace("shop"), store(&server).namespace("shop-2"));
            let (shop, shopping, bare) =
                (shop.build().unwrap(), shopping.build().unwrap(), store(&server).build().unwrap());
            for redis in [&shop, &shopping, &bare] {
                write(redis, 700).await;
            }
            server.command(&["SET", "other-program", "x"]);
            assert_eq!(server.command(&["DBSIZE"]).int(), 3 * 1400 + 1);
            assert_eq!(shop.clear().await.unwrap(), 1400, "{flavor}");
            assert_eq!(server.command(&["DBSIZE"]).int(), 2 * 1400 + 1);
            assert_eq!(shop.clear().await.unwrap(), 0);
            // The removal is deliberate: this store does not restore the keys.
            let limits: Limits = "100/day".parse().unwrap();
            let decision = shop.decide(&Check::new().charge("0", &limits, 100)).await.unwrap();
            assert!(decision.allowed(), "{flavor}: {decision:?}");
            assert_eq!(shop.stats().regressions, 0);
        });
    });
}

#[test]
fn without_a_namespace_nothing_is_removed() {
    let server = Server::start(Flavor::Redis7);
    runtime().block_on(async {
        let redis = store(&server).build().unwrap();
        write(&redis, 3).await;
        let error = redis.clear().await.unwrap_err();
        assert!(matches!(error, ClearError::NoNamespace), "{error}");
        assert_eq!(server.command(&["DBSIZE"]).int(), 6);
    });
}

#[test]
fn all_servers_of_a_cluster_are_cleared() {
    let cluster = Cluster::start(Flavor::Valkey9);
    runtime().block_on(async {
        let redis = at(&cluster.url()).namespace("shop").build().unwrap();
        write(&redis, 300).await;
        let there = || {
            cluster.nodes()[..3]
                .iter()
                .map(|node| node.command(&["DBSIZE"]).int())
                .collect::<Vec<_>>()
        };
        assert!(
            there().iter().all(|keys| *keys > 0) && there().iter().sum::<i64>() == 600,
            "{:?}",
            there()
        );
        assert_eq!(redis.clear().await.unwrap(), 600);
        assert_eq!(there(), [0, 0, 0]);
    });
}
