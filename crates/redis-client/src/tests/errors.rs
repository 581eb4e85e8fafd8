//! Every error reply, provoked on a real server.

use std::thread;

use tidegate_testkit::{Reply as KitReply, wait_until};

use super::*;

fn write() -> Script {
    Script::new("return redis.call('INCR', KEYS[1])")
}

async fn run(router: &Router) -> Outcome {
    router.eval(&write(), 0, &["tg:n"], NO_KEYS, soon()).await
}

/// Waits until calls are answered again.
async fn until_applied(router: &Router) {
    until_async("calls are answered again", || async {
        matches!(run(router).await, Outcome::Applied(_))
    })
    .await;
}

fn ok(reply: KitReply) {
    assert_eq!(reply, KitReply::Text("OK".into()));
}

/// Provokes an error by a setting, expects it, reverts the setting, and expects a reply.
async fn by_setting(name: &str, [bad, good]: [&str; 2], kind: FailureKind, mention: &str) {
    for flavor in Flavor::ALL {
        let server = Server::start(flavor);
        let router = router(&server.url());
        assert_eq!(run(&router).await, Outcome::Applied(Value::Int(1)), "{flavor}");
        ok(server.command(&["CONFIG", "SET", name, bad]));
        let failure = not_applied(run(&router).await);
        assert_eq!(failure.kind(), kind, "{flavor}: {failure}");
        assert!(failure.to_string().contains(mention), "{flavor}: {failure}");
        ok(server.command(&["CONFIG", "SET", name, good]));
        assert_eq!(
            run(&router).await,
            Outcome::Applied(Value::Int(2)),
            "{flavor}: it was not applied"
        );
        let counters = router.counters();
        assert_eq!((counters.connects, counters.retries), (1, 0), "{flavor}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn out_of_memory() {
    by_setting("maxmemory", ["1", "0"], FailureKind::Oom, "maxmemory").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn too_few_replicas() {
    by_setting(
        "min-replicas-to-write",
        ["2", "0"],
        FailureKind::NoReplicas,
        "min-replicas-to-write",
    )
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_that_cannot_persist() {
    for flavor in Flavor::ALL {
        let folder = tempfile::tempdir().unwrap();
        let server = Server::builder(flavor).arg("--dir", folder.path().to_str().unwrap()).start();
        let router = router(&server.url());
        assert_eq!(run(&router).await, Outcome::Applied(Value::Int(1)), "{flavor}");
        folder.close().unwrap();
        ok(server.command(&["CONFIG", "SET", "save", "3600 1"]));
        server.command(&["BGSAVE"]);
        wait_until("saving has failed", PATIENCE, || {
            server.command(&["INFO", "persistence"]).text().contains("rdb_last_bgsave_status:err")
        });
        let failure = not_applied(run(&router).await);
        assert_eq!(failure.kind(), FailureKind::Misconf, "{flavor}: {failure}");
        ok(server.command(&["CONFIG", "SET", "stop-writes-on-bgsave-error", "no"]));
        assert_eq!(run(&router).await, Outcome::Applied(Value::Int(2)), "{flavor}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_that_became_a_replica() {
    for flavor in Flavor::ALL {
        let server = Server::start(flavor);
        let router = router(&server.url());
        assert_eq!(run(&router).await, Outcome::Applied(Value::Int(1)), "{flavor}");
        ok(server.command(&["REPLICAOF", "127.0.0.1", "1"]));
        let start = Instant::now();
        while start.elapsed() < Duration::from_millis(350) {
            let failure = not_applied(run(&router).await);
            assert_eq!(failure.kind(), FailureKind::ReadOnly, "{flavor}: {failure}");
        }
        // It was looked for elsewhere, but not at every call.
        let counters = router.counters();
        assert!(counters.retries >= 1, "{flavor}: {counters:?}");
        assert!(counters.connects <= 6, "{flavor}: {counters:?}");
        ok(server.command(&["CONFIG", "SET", "replica-serve-stale-data", "no"]));
        let failure = not_applied(run(&router).await);
        assert_eq!(failure.kind(), FailureKind::MasterDown, "{flavor}: {failure}");
        ok(server.command(&["REPLICAOF", "NO", "ONE"]));
        assert_eq!(run(&router).await, Outcome::Applied(Value::Int(2)), "{flavor}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_address_that_leads_elsewhere_now_is_followed_without_a_failed_call() {
    let servers = [(); 2].map(|()| Server::builder(Flavor::Redis7).unix_socket().start());
    let folder = tempfile::tempdir().unwrap();
    let link = folder.path().join("socket");
    let lead_to = |server: &Server| {
        let _ = std::fs::remove_file(&link);
        std::os::unix::fs::symlink(server.socket_path().unwrap(), &link).unwrap();
    };
    lead_to(&servers[0]);
    let router = router(&format!("redis+unix://{}", link.display()));
    assert_eq!(run(&router).await, Outcome::Applied(Value::Int(1)));
    // Connections younger than this are not given up.
    tokio::time::sleep(Duration::from_millis(120)).await;
    ok(servers[0].command(&["REPLICAOF", "127.0.0.1", "1"]));
    lead_to(&servers[1]);
    let outcomes = futures_of(0..50, |_| {
        let router = router.clone();
        async move { run(&router).await }
    })
    .await;
    for outcome in outcomes {
        assert!(matches!(outcome, Outcome::Applied(_)), "{outcome:?}");
    }
    assert_eq!(servers[1].command(&["GET", "tg:n"]).text(), "50");
    assert_eq!(router.counters().connects, 2);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_that_is_loading() {
    for flavor in Flavor::ALL {
        let server = Server::start(flavor);
        let router = patient(&server.url());
        until_applied(&router).await;
        ok(server.command(&["DEBUG", "POPULATE", "10000", "key", "500"]));
        ok(server.command(&["CONFIG", "SET", "key-load-delay", "50"]));
        // Redis 6.2 does not have the last of these, and looks up every two megabytes.
        ok(server.command(&["CONFIG", "SET", "rdbcompression", "no"]));
        server.command(&["CONFIG", "SET", "loading-process-events-interval-bytes", "4096"]);
        thread::scope(|scope| {
            let reload = scope.spawn(|| server.command(&["DEBUG", "RELOAD"]));
            let runtime = tokio::runtime::Handle::current();
            let loading = tokio::task::block_in_place(|| {
                runtime.block_on(async {
                    let end = soon();
                    loop {
                        match run(&router).await {
                            Outcome::NotApplied(failure) => break failure,
                            Outcome::Applied(_) => {
                                assert!(Instant::now() < end && !reload.is_finished(), "{flavor}")
                            }
                            Outcome::Unknown(failure) => panic!("{flavor}: {failure}"),
                        }
                    }
                })
            });
            assert_eq!(loading.kind(), FailureKind::Loading, "{flavor}: {loading}");
            reload.join().unwrap();
        });
        until_applied(&router).await;
        assert_eq!(
            router.counters().connects,
            1,
            "{flavor}: a server that answers needs no new connection"
        );
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_that_is_busy_with_a_script() {
    for flavor in Flavor::ALL {
        let server = Server::builder(flavor).arg("--lua-time-limit", "50").start();
        let router = router(&server.url());
        until_applied(&router).await;
        let mut client = server.client().unwrap();
        let endless = thread::spawn(move || client.command(&["EVAL", "while true do end", "0"]));
        until_async("the server is busy", || async {
            match run(&router).await {
                Outcome::NotApplied(failure) => {
                    assert_eq!(failure.kind(), FailureKind::Busy, "{flavor}: {failure}");
                    true
                }
                _ => false,
            }
        })
        .await;
        ok(server.command(&["SCRIPT", "KILL"]));
        assert!(endless.join().unwrap().unwrap().is_error());
        until_applied(&router).await;
        assert_eq!(router.counters().connects, 1, "{flavor}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_user_who_may_not() {
    for flavor in Flavor::ALL {
        let server = Server::start(flavor);
        let user = |name: &str, rights: &[&str]| {
            ok(server.command(&[&["ACL", "SETUSER", name, "on", ">pw"], rights].concat()));
            router(&format!("redis://{name}:pw@127.0.0.1:{}", server.port()))
        };
        // Neither the command nor the key: certainly not applied.
        let failure = not_applied(run(&user("idle", &["~tg:*", "+get"])).await);
        assert_eq!(failure.kind(), FailureKind::NoPerm, "{flavor}: {failure}");
        let failure = not_applied(run(&user("elsewhere", &["~other:*", "+@all"])).await);
        assert_eq!(failure.kind(), FailureKind::NoPerm, "{flavor}: {failure}");
        // A command inside the script: it may have done something before.
        let failure = unknown(
            run(&user("reader", &["~tg:*", "+evalsha", "+eval", "+script|load", "+get"])).await,
        );
        assert_eq!(failure.kind(), FailureKind::NoPerm, "{flavor}: {failure}");
        let limited = user("limiter", &["~tg:*", "+evalsha", "+eval", "+script|load", "+incr"]);
        assert_eq!(run(&limited).await, Outcome::Applied(Value::Int(1)), "{flavor}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_password_that_was_set_and_a_login_that_was_withdrawn() {
    let server = Server::start(Flavor::Redis7);
    let router = router(&server.url());
    until_applied(&router).await;
    let mut client = server.client().unwrap();
    ok(client.command(&["CONFIG", "SET", "requirepass", "pw"]).unwrap());
    client.command(&["CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes"]).unwrap();
    until_async("the login is refused", || async {
        matches!(
            run(&router).await,
            Outcome::NotApplied(failure) if failure.kind() == FailureKind::NoAuth
        )
    })
    .await;
    let attempts = router.counters().failed_connects;
    assert!(attempts <= 2, "{attempts}");
    ok(client.command(&["CONFIG", "SET", "requirepass", ""]).unwrap());
    until_applied(&router).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn too_many_clients() {
    for flavor in Flavor::ALL {
        let server = Server::start(flavor);
        let mut others: Vec<_> = (0..8).map(|_| server.client().unwrap()).collect();
        for other in &mut others {
            other.command(&["PING"]).unwrap();
        }
        ok(others[0].command(&["CONFIG", "SET", "maxclients", "8"]).unwrap());
        for protocol in ["2", "3"] {
            let router = router(&format!("{}?protocol={protocol}", server.url()));
            let failure = not_applied(run(&router).await);
            assert_eq!(failure.kind(), FailureKind::MaxClients, "{flavor}: {failure}");
            assert!(failure.to_string().contains("maxclients"), "{failure}");
            let start = Instant::now();
            while start.elapsed() < Duration::from_millis(300) {
                not_applied(run(&router).await);
                tokio::task::yield_now().await;
            }
            let attempts = router.counters().failed_connects;
            assert!(attempts <= 10, "{flavor}: {attempts} attempts in 300 ms");
            ok(others[0].command(&["CONFIG", "SET", "maxclients", "20"]).unwrap());
            until_applied(&router).await;
            drop(router);
            let mut connected = || {
                others[0]
                    .command(&["INFO", "clients"])
                    .unwrap()
                    .text()
                    .contains("connected_clients:8\r")
            };
            wait_until("the connection of the router is closed", PATIENCE, &mut connected);
            ok(others[0].command(&["CONFIG", "SET", "maxclients", "8"]).unwrap());
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_key_of_another_type_and_a_script_that_fails() {
    for flavor in Flavor::ALL {
        let server = Server::start(flavor);
        let router = router(&server.url());
        server.command(&["LPUSH", "tg:n", "x"]);
        let failure = unknown(run(&router).await);
        assert_eq!(failure.kind(), FailureKind::WrongType, "{flavor}: {failure}");
        for text in ["return nil + 1", "error('boom')", "error({err='boom'})"] {
            let outcome = router.eval(&Script::new(text), 0, NO_KEYS, NO_KEYS, soon()).await;
            let failure = unknown(outcome);
            assert!(
                matches!(failure.kind(), FailureKind::Script | FailureKind::Other),
                "{flavor} {text}: {failure:?}"
            );
        }
        let failure =
            not_applied(router.eval(&Script::new("retur 1"), 0, NO_KEYS, NO_KEYS, soon()).await);
        assert_eq!(failure.kind(), FailureKind::Script, "{flavor}: {failure}");
        let failure = unknown(
            router
                .eval(
                    &Script::new("return redis.error_reply('MY own')"),
                    0,
                    NO_KEYS,
                    NO_KEYS,
                    soon(),
                )
                .await,
        );
        assert_eq!(failure.kind(), FailureKind::Other, "{flavor}: {failure}");
        let failure = not_applied(command(&router, &["NONSENSE", "s3cret"]).await);
        assert!(!failure.to_string().contains("s3cret"), "{failure}");
    }
}
