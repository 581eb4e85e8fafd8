//! Sentinel: the primary is found, made sure of, and looked for again when it changes.

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
        assert!(start.elapsed() < PATIENCE, "nobody served the call: {:?}", router.counters());
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_primary_is_found_and_found_again_after_it_died() {
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
async fn a_primary_that_only_stalls_is_left_as_well() {
    let service = Sentinels::start(Flavor::Redis8);
    let router = router(&service.url());
    let script = incr();
    increment(&router, &script, soon()).await;
    let old = service.master();
    old.stop_signal();
    until_served(&router, &script).await;
    assert_ne!(service.wait_for_failover().port(), old.port());
    // When it goes on it is told to follow the new one. Nobody writes to it meanwhile.
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
async fn sentinels_that_are_away_are_passed_over() {
    let service = Sentinels::start(Flavor::Redis7);
    service.sentinels()[0].stop_signal();
    service.sentinels()[1].kill();
    let router = router(&service.url());
    assert_eq!(increment(&router, &incr(), soon()).await, Outcome::Applied(Value::Int(1)));
    service.sentinels()[0].continue_signal();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_service_that_nobody_knows_is_named() {
    let service = Sentinels::start(Flavor::Redis62);
    let url = service.url().replace("/mymaster", "/elsewhere");
    let failure = not_applied(increment(&router(&url), &incr(), soon()).await);
    assert_eq!(failure.kind(), FailureKind::Unresolved);
    assert!(failure.to_string().ends_with("knows no service named elsewhere"), "{failure}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_sentinel_that_names_a_replica_is_not_believed() {
    let service = Sentinels::start(Flavor::Redis7);
    // Demoted behind the sentinels' back; they will notice, but not at once.
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
        Outcome::Applied(_) => {} // They were quicker.
        other => panic!("{other:?}"),
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_primary_that_was_replaced_behind_its_back_is_left() {
    let service = Sentinels::start(Flavor::Redis7);
    let router = router(&service.url());
    let script = incr();
    increment(&router, &script, soon()).await;
    // The sentinels can no longer log in, so to them it is dead. To us it is well, and it takes
    // writes as before.
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
        // Whoever makes it the primary closes the connections of its clients, ours among them.
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
        "both are, and yet"
    );
}
