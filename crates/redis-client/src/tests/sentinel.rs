//! Sentinel: the client finds the primary, verifies its role, and follows a failover.

use tidegate_testkit::Sentinels;

use super::*;

fn incr() -> Script {
    Script::new("return redis.call('INCR', KEYS[1])")
}

async fn increment(router: &Router, script: &Script, deadline: Instant) -> Outcome {
    router.eval(script, 0, &["tg:n"], NO_KEYS, deadline).await
}

async fn until_served(router: &Router, script: &Script) -> Duration {
    let start = Instant::now();
    loop {
        let deadline = Instant::now() + Duration::from_millis(20);
        if let Outcome::Applied(_) = increment(router, script, deadline).await {
            return start.elapsed();
        }
        assert!(Instant::now() < deadline + Duration::from_secs(1), "a call outlived its deadline");
        assert!(start.elapsed() < PATIENCE, "no server applied the call: {:?}", router.counters());
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_primary_is_found_again_after_its_death() {
    for flavor in [Flavor::Redis7, Flavor::Valkey9] {
        let service = Sentinels::start(flavor);
        let router = router(&service.url());
        let script = incr();
        assert_eq!(
            increment(&router, &script, soon()).await,
            Outcome::Applied(Value::Int(1)),
            "{flavor}"
        );
        assert_eq!(only_master(&router).await.to_string(), "the primary of mymaster");

        let old = service.kill_master().port();
        until_served(&router, &script).await;
        assert_ne!(service.wait_for_failover().port(), old);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stalled_primary_is_left() {
    let service = Sentinels::start(Flavor::Redis8);
    let router = router(&service.url());
    let script = incr();
    increment(&router, &script, soon()).await;
    let old = service.master();
    old.stop_signal();
    until_served(&router, &script).await;
    assert_ne!(service.wait_for_failover().port(), old.port());
    // When it continues, Sentinel makes it a replica; no call writes to it meanwhile.
    old.continue_signal();
    service.wait_until_ok();
    until_served(&router, &script).await;
    let count = service.master().command(&["GET", "tg:n"]).text().parse::<i64>().unwrap();
    assert_eq!(increment(&router, &script, soon()).await, Outcome::Applied(Value::Int(count + 1)));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_planned_failover_is_followed() {
    let service = Sentinels::start(Flavor::Redis7);
    let router = router(&service.url());
    let script = incr();
    increment(&router, &script, soon()).await;
    let service = tokio::task::spawn_blocking(move || {
        service.failover();
        service
    });
    while !service.is_finished() {
        until_served(&router, &script).await;
    }
    let service = service.await.unwrap();
    until_served(&router, &script).await;
    let count = service.master().command(&["GET", "tg:n"]).text().parse::<i64>().unwrap();
    assert_eq!(increment(&router, &script, soon()).await, Outcome::Applied(Value::Int(count + 1)));
}

#[tokio::test(flavor = "multi_thread")]
async fn unavailable_sentinels_are_skipped() {
    let service = Sentinels::start(Flavor::Redis7);
    service.sentinels()[0].stop_signal();
    service.sentinels()[1].kill();
    let router = router(&service.url());
    assert_eq!(increment(&router, &incr(), soon()).await, Outcome::Applied(Value::Int(1)));
    service.sentinels()[0].continue_signal();
}

#[tokio::test(flavor = "multi_thread")]
async fn an_unknown_service_is_named() {
    let service = Sentinels::start(Flavor::Redis62);
    let url = service.url().replace("/mymaster", "/elsewhere");
    let failure = not_applied(increment(&router(&url), &incr(), soon()).await);
    assert_eq!(failure.kind(), FailureKind::Unresolved);
    assert!(failure.to_string().ends_with("knows no service named elsewhere"), "{failure}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_sentinel_that_names_a_replica_is_not_believed() {
    let service = Sentinels::start(Flavor::Redis7);
    // Demoted without the sentinels, which notice only after a while.
    let (master, replica) = (service.master(), service.replica());
    replica.command(&["REPLICAOF", "NO", "ONE"]);
    master.command(&["REPLICAOF", "127.0.0.1", &replica.port().to_string()]);
    let router = router(&service.url());
    match increment(&router, &incr(), soon()).await {
        Outcome::NotApplied(failure) => {
            assert_eq!(failure.kind(), FailureKind::ReadOnly, "{failure}");
            assert!(
                failure.to_string().contains("is to be the primary but says it is slave"),
                "{failure}"
            );
        }
        Outcome::Applied(_) => {} // The sentinels were faster.
        other => panic!("{other:?}"),
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_replaced_primary_that_still_takes_writes_is_left() {
    let service = Sentinels::start(Flavor::Redis7);
    let router = router(&service.url());
    let script = incr();
    increment(&router, &script, soon()).await;
    // The sentinels can no longer log in and take it for dead, but it still takes writes.
    let old = service.master();
    let mut client = old.client().unwrap();
    client.command(&["CONFIG", "SET", "requirepass", "pw"]).unwrap();
    let clients = client.command(&["CLIENT", "LIST"]).unwrap();
    for line in clients.text().lines().filter(|line| line.contains("name=sentinel-")) {
        let id = line.split(' ').next().unwrap().strip_prefix("id=").unwrap();
        client.command(&["CLIENT", "KILL", "ID", id]).unwrap();
    }
    let new = service.servers().iter().find(|server| server.port() != old.port()).unwrap();
    until_async("calls reach the new primary", || async {
        increment(&router, &script, soon()).await;
        // Its promotion closes the connections of its clients, this one included.
        let ask = |words: &[&str]| new.try_command(words).ok();
        let role =
            ask(&["INFO", "replication"]).is_some_and(|reply| reply.text().contains("role:master"));
        let before = ask(&["GET", "tg:n"]);
        let outcome = increment(&router, &script, soon()).await;
        let after = ask(&["GET", "tg:n"]);
        role && matches!(outcome, Outcome::Applied(_))
            && before.is_some()
            && after.is_some()
            && after != before
    })
    .await;
    assert!(
        client.command(&["INFO", "replication"]).unwrap().text().contains("role:master"),
        "the old primary still is one, too"
    );
}
