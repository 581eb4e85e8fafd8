//! What the connection layer promises, on real servers and through a proxy that breaks things.

mod breaks;
mod cancel;
mod cluster;
mod errors;
mod one;
mod outcome;
mod resp;
mod restarts;
mod sentinel;
#[cfg(feature = "tls")]
mod tls;
mod url;

use std::time::Duration;

use tidegate_testkit::{Flavor, Server};
use tokio::time::Instant;

use super::{Failure, FailureKind, NodeId, Outcome, RedisUrl, Router, Script, Settings, Value};

/// Long enough for a machine under load; tests assert separately what must be fast.
const PATIENCE: Duration = Duration::from_secs(60);
const NO_KEYS: &[&str] = &[];

fn soon() -> Instant {
    Instant::now() + PATIENCE
}

fn parsed(text: &str) -> RedisUrl {
    text.parse().unwrap_or_else(|error| panic!("{text}: {error}"))
}

fn router(text: &str) -> Router {
    Router::new(parsed(text), Settings::default()).unwrap()
}

/// A router that tolerates long silences.
fn patient(text: &str) -> Router {
    let settings = Settings { silence: PATIENCE, ..Settings::default() };
    Router::new(parsed(text), settings).unwrap()
}

/// A script that returns its argument.
fn echo() -> Script {
    Script::new("return ARGV[1]")
}

fn bulk(text: &str) -> Value {
    Value::Bulk(text.as_bytes().to_vec())
}

/// Runs `echo` and expects the answer.
async fn echoes(router: &Router, script: &Script, text: &str) {
    let outcome = router.eval(script, 0, NO_KEYS, &[text], soon()).await;
    assert_eq!(outcome, Outcome::Applied(bulk(text)));
}

async fn only_master(router: &Router) -> NodeId {
    let masters = router.masters(soon()).await.unwrap();
    let [master] = &masters[..] else { panic!("expected one master, found {masters:?}") };
    master.clone()
}

/// Runs a command on the only server.
async fn command(router: &Router, words: &[&str]) -> Outcome {
    let master = only_master(router).await;
    router.command(&master, words, soon()).await
}

fn not_applied(outcome: Outcome) -> Failure {
    match outcome {
        Outcome::NotApplied(failure) => failure,
        other => panic!("expected a call that was not applied, found {other:?}"),
    }
}

fn unknown(outcome: Outcome) -> Failure {
    match outcome {
        Outcome::Unknown(failure) => failure,
        other => panic!("expected a call that may have been applied, found {other:?}"),
    }
}

/// Polls until the condition holds.
async fn until(what: &str, condition: impl Fn() -> bool) {
    until_async(what, || std::future::ready(condition())).await;
}

/// The same for a condition that takes a call.
async fn until_async<F: Future<Output = bool>>(what: &str, condition: impl Fn() -> F) {
    let end = soon();
    while !condition().await {
        assert!(Instant::now() < end, "timed out waiting until {what}");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

/// Runs all concurrently.
async fn futures_of<I: IntoIterator, F>(items: I, start: impl Fn(I::Item) -> F) -> Vec<F::Output>
where
    F: Future<Output: Send + 'static> + Send + 'static,
{
    let tasks: Vec<_> = items.into_iter().map(|item| tokio::spawn(start(item))).collect();
    let mut outputs = Vec::new();
    for task in tasks {
        outputs.push(task.await.unwrap());
    }
    outputs
}

fn incr() -> Script {
    Script::new("redis.call('INCR', KEYS[1]) return ARGV[1]")
}

async fn call(router: &Router, script: &Script, nonce: &str, within: Duration) -> Outcome {
    router.eval(script, 0, &["tg:n"], &[nonce], Instant::now() + within).await
}

async fn until_applied(router: &Router, script: &Script) -> Duration {
    let start = Instant::now();
    until_async("calls are answered again", || async {
        matches!(call(router, script, "x", PATIENCE).await, Outcome::Applied(_))
    })
    .await;
    start.elapsed()
}

fn count(server: &Server) -> u64 {
    match server.command(&["GET", "tg:n"]) {
        tidegate_testkit::Reply::Text(text) => text.parse().unwrap(),
        _ => 0,
    }
}
