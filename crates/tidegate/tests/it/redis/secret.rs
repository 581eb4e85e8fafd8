//! The secret that slots depend on: shared, the budgets are; not shared, neither are they; and it
//! is shown nowhere.

use tidegate::redis::inspect::Severity;
use tidegate_testkit::{Cluster, Flavor, Server};

use super::{ask, at, left, limits, runtime, store};

const SECRET: &str = "open-sesame-0123456789";

#[test]
fn whoever_shares_the_secret_shares_the_budgets() {
    let server = Server::start(Flavor::Valkey9);
    runtime().block_on(async {
        let limits = limits("5/h window");
        let plain = store(&server).build().unwrap();
        let secret = store(&server).secret(SECRET).build().unwrap();
        let in_url = at(&format!("{}?secret={SECRET}", server.url())).build().unwrap();
        // What is said to the builder counts instead of what is in the URL.
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

/// The slots that we compute are those of the cluster: nothing is redirected.
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
