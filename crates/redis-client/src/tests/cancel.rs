//! Cancelled calls, at every stage.

use std::future::Future;
use std::pin::pin;
use std::task::{Context, Poll, Waker};

use super::*;

/// Polls a call this many times and drops it; returns its outcome if it was ready before.
async fn dropped_after(polls: usize, call: impl Future<Output = Outcome>) -> Option<Outcome> {
    let mut call = pin!(call);
    for _ in 0..polls {
        if let Poll::Ready(outcome) =
            std::future::poll_fn(|context| Poll::Ready(call.as_mut().poll(context))).await
        {
            return Some(outcome);
        }
        tokio::task::yield_now().await;
    }
    None
}

#[tokio::test(flavor = "multi_thread")]
async fn no_call_reads_the_reply_of_a_cancelled_one() {
    for flavor in Flavor::ALL {
        let server = Server::start(flavor);
        let router = router(&server.url());
        let script = Script::new("redis.call('INCR', KEYS[1]) return ARGV[1]");
        let callers = (0..32).map(|caller: u64| {
            let (router, script) = (router.clone(), script.clone());
            tokio::spawn(async move {
                let mut random = caller * 2 + 1;
                let mut finished = 0;
                for number in 0..500 {
                    let nonce = format!("{caller}:{number}");
                    let args = [nonce.as_str()];
                    let call = router.eval(&script, 0, &["tg:n"], &args, soon());
                    random = random
                        .wrapping_mul(6_364_136_223_846_793_005)
                        .wrapping_add(1_442_695_040_888_963_407);
                    let outcome = match random >> 60 {
                        0..4 => Some(call.await),
                        // After some time rather than some polls.
                        4..8 => {
                            let patience = Duration::from_micros(random >> 50 & 511);
                            tokio::time::timeout(patience, call).await.ok()
                        }
                        polls => dropped_after(usize::try_from(polls - 8).unwrap(), call).await,
                    };
                    if let Some(outcome) = outcome {
                        assert_eq!(outcome, Outcome::Applied(bulk(&nonce)));
                        finished += 1;
                    }
                }
                finished
            })
        });
        let mut finished = 0;
        for caller in callers.collect::<Vec<_>>() {
            finished += caller.await.unwrap();
        }
        assert!(finished > 1000, "{flavor}: only {finished} of 16000 calls were finished");
        assert_eq!(router.counters().connects, 1, "{flavor}");
        // Replies arrive in order: with this one all earlier ones have arrived.
        let last = router.eval(&script, 0, &["tg:n"], &["last"], soon()).await;
        assert_eq!(last, Outcome::Applied(bulk("last")), "{flavor}");
        // All entries are free again: `max_in_flight` calls fit.
        let outcomes = futures_of(0..4096, |number| {
            let (router, script) = (router.clone(), script.clone());
            async move { router.eval(&script, 0, &["tg:n"], &[number.to_string()], soon()).await }
        })
        .await;
        for (number, outcome) in outcomes.into_iter().enumerate() {
            assert_eq!(outcome, Outcome::Applied(bulk(&number.to_string())), "{flavor}");
        }
    }
}

#[tokio::test(flavor = "current_thread")]
async fn a_call_that_is_dropped_before_it_was_sent_is_not_sent() {
    let server = Server::start(Flavor::Redis7);
    let router = router(&server.url());
    let script = Script::new("return redis.call('INCR', KEYS[1])");
    let call = || router.eval(&script, 0, &["tg:n"], NO_KEYS, soon());
    assert_eq!(call().await, Outcome::Applied(Value::Int(1)));
    // On one thread the driver cannot run between these two lines.
    for _ in 0..1000 {
        let mut call = pin!(call());
        assert!(call.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_pending());
    }
    assert_eq!(call().await, Outcome::Applied(Value::Int(2)));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_cancelled_load_is_taken_over_by_the_next_call() {
    let server = Server::start(Flavor::Redis7);
    let router = router(&server.url());
    for polls in 0..12 {
        server.command(&["SCRIPT", "FLUSH"]);
        let script = echo();
        let args = ["gone"];
        dropped_after(polls, router.eval(&script, 0, NO_KEYS, &args, soon())).await;
        echoes(&router, &script, "next").await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn dropping_the_router_closes_its_connections() {
    let server = Server::start(Flavor::Redis7);
    let router = router(&server.url());
    echoes(&router, &echo(), "hello").await;
    let clone = router.clone();
    drop(router);
    echoes(&clone, &echo(), "still here").await;
    drop(clone);
    until("no client is connected", || {
        !server.command(&["CLIENT", "LIST"]).text().contains("name=tidegate")
    })
    .await;
}
