//! The secret of the slots: stores with the same secret share state, others do not, and no output
//! shows it.

use tidegate::redis::inspect::Severity;
use tidegate_testkit::{Cluster, Flavor, Server};

use super::{ask, at, left, limits, runtime, store};

const SECRET: &str = "open-sesame-0123456789";

#[test]
fn stores_with_one_secret_share_their_state() {
    let server = Server::start(Flavor::Valkey9);
    runtime().block_on(async {
        let limits = limits("5/h window");
        let plain = store(&server).build().unwrap();
        let secret = store(&server).secret(SECRET).build().unwrap();
        let in_url = at(&format!("{}?secret={SECRET}", server.url())).build().unwrap();
        // The builder overrides the URL.
        let other = at(&format!("{}?secret={SECRET}", server.url()))
            .secret("another-0123456789")
            .build()
            .unwrap();
        assert!(ask(&secret, "k", &limits).await.unwrap().allowed());
        assert_eq!(left(&in_url, "k", &limits).await, 4);
        assert_eq!(left(&plain, "k", &limits).await, 5);
        assert_eq!(left(&other, "k", &limits).await, 5);
        let error = store(&server).secret("sesame").build().unwrap_err();
        assert_eq!(error.to_string(), "secret: expected 16 to 512 bytes at random, found 6");
        let shown = format!("{:?} {secret:?} {in_url:?} {error:?}", store(&server).secret(SECRET));
        assert!(!shown.contains("sesame"), "{shown}");
    });
}

/// The computed slots are those of the cluster: nothing is redirected.
#[test]
fn a_cluster_finds_the_keys_of_a_secret() {
    let cluster = Cluster::start(Flavor::Redis7);
    runtime().block_on(async {
        let limits = limits("3/h; 5/h window");
        let redis = at(&cluster.url()).secret(SECRET).build().unwrap();
        for key in 0..200 {
            let key = format!("user:{key}");
            assert!(ask(&redis, &key, &limits).await.unwrap().allowed());
            assert_eq!(left(&redis, &key, &limits).await, 2);
        }
        assert_eq!(redis.stats().redirects, 0);
        assert!(redis.inspect().await.unwrap().worst() < Severity::Problem);
    });
}
