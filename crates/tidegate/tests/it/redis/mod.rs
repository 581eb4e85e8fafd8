//! The Redis store, on real servers of every kind.

mod acl;
mod cancel;
mod clear;
mod clock;
mod cluster;
mod coalesce;
mod failover;
mod formats;
mod hostile;
mod hot;
mod inspect;
mod long;
mod loss;
mod refusals;
mod resilience;
mod secret;
mod sentinel;
mod transcripts;
mod twins;
mod witness;

use std::time::Duration;

use tidegate::redis::{Redis, RedisBuilder};
use tidegate::{Check, Decision, Limits, Op, Store, StoreError};
use tidegate_testkit::Server;
use tokio::runtime::Runtime;

/// A store on this server, with timeouts for a busy machine.
pub(crate) fn store(server: &Server) -> RedisBuilder {
    at(&server.url())
}

pub(crate) fn at(url: &str) -> RedisBuilder {
    Redis::builder(url.parse().unwrap()).timeout(Duration::from_secs(10))
}

pub(crate) fn runtime() -> Runtime {
    tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap()
}

/// Every key of Tidegate has an expiry.
pub(crate) fn assert_all_expire(server: &Server) {
    assert_eq!(server.keys_without_ttl("tg1:"), Vec::<String>::new());
}

pub(crate) fn limits(text: &str) -> Limits {
    text.parse().unwrap_or_else(|error| panic!("{text}: {error}"))
}

/// Charges one unit of `key`.
pub(crate) async fn ask(redis: &Redis, key: &str, limits: &Limits) -> Result<Decision, StoreError> {
    redis.decide(&Check::new().charge(key, limits, 1)).await
}

/// The units left of `key`.
pub(crate) async fn left(redis: &Redis, key: &str, limits: &Limits) -> u64 {
    redis.decide(&Check::of(Op::Peek).charge(key, limits, 1)).await.unwrap().remaining()
}
