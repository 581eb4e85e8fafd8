//! The Redis store, on real servers of every kind.

mod acl;
mod clear;
mod hostile;
mod inspect;
mod long;
mod topologies;
mod twins;
mod witness;

use std::time::Duration;

use tidegate::{Redis, RedisBuilder};
use tidegate_testkit::Server;
use tokio::runtime::Runtime;

/// A store on this server, patient enough for a busy machine.
pub(crate) fn store(server: &Server) -> RedisBuilder {
    at(&server.url())
}

pub(crate) fn at(url: &str) -> RedisBuilder {
    Redis::builder(url.parse().unwrap()).timeout(Duration::from_secs(10))
}

pub(crate) fn runtime() -> Runtime {
    tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap()
}

/// Nothing Tidegate writes may stay for ever.
pub(crate) fn assert_all_expire(server: &Server) {
    assert_eq!(server.keys_without_ttl("tg1:"), Vec::<String>::new());
}
