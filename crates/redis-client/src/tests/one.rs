//! One server: scripts, commands, logins, databases, protocols.

use super::*;

#[tokio::test(flavor = "multi_thread")]
async fn a_script_runs_on_every_server_and_is_loaded_when_it_is_missing() {
    for flavor in Flavor::ALL {
        let server = Server::start(flavor);
        let router = router(&server.url());
        let script = echo();
        echoes(&router, &script, "first").await;
        echoes(&router, &script, "second").await;
        assert_eq!(router.counters().script_loads, 1, "{flavor}");
        server.command(&["SCRIPT", "FLUSH"]);
        echoes(&router, &script, "third").await;
        assert_eq!(router.counters().script_loads, 2, "{flavor}");
        assert_eq!(router.counters().connects, 1, "{flavor}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn commands_run_on_a_server_by_its_name() {
    let server = Server::start(Flavor::Redis7);
    let router = router(&server.url());
    assert_eq!(command(&router, &["PING"]).await, Outcome::Applied(Value::Simple("PONG".into())));
    assert_eq!(command(&router, &["GET", "nothing"]).await, Outcome::Applied(Value::Nil));
    let elsewhere = NodeId(super::super::address::Address::Unix("/elsewhere".into()));
    let failure = not_applied(router.command(&elsewhere, &["PING"], soon()).await);
    assert_eq!(failure.to_string(), "/elsewhere is not one of the servers");
    assert!(!router.is_cluster());
}

#[tokio::test(flavor = "multi_thread")]
async fn both_protocols_are_spoken() {
    for flavor in Flavor::ALL {
        let server = Server::start(flavor);
        for (option, protocol) in [("", 3), ("?protocol=3", 3), ("?protocol=2", 2)] {
            let router = router(&format!("{}{option}", server.url()));
            echoes(&router, &echo(), "hello").await;
            // A map is a map in RESP3 and a list in RESP2.
            let outcome = command(&router, &["CONFIG", "GET", "maxmemory"]).await;
            let expected = match protocol {
                3 => Value::Map(vec![(bulk("maxmemory"), bulk("0"))]),
                _ => Value::Array(vec![bulk("maxmemory"), bulk("0")]),
            };
            assert_eq!(outcome, Outcome::Applied(expected), "{flavor} {option}");
            let Outcome::Applied(name) = command(&router, &["CLIENT", "GETNAME"]).await else {
                panic!()
            };
            assert_eq!(name, bulk("tidegate"), "{flavor} {option}");
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn databases_are_kept_apart() {
    let server = Server::start(Flavor::Redis7);
    for database in ["", "/0", "/5"] {
        let router = router(&format!("{}{database}", server.url()));
        assert_eq!(
            command(&router, &["GET", "k"]).await,
            Outcome::Applied(Value::Nil),
            "{database}"
        );
        if database == "/5" {
            command(&router, &["SET", "k", "v"]).await;
        }
    }
    let mut client = server.client().unwrap();
    client.command(&["SELECT", "5"]).unwrap();
    assert_eq!(client.command(&["GET", "k"]).unwrap().text(), "v");

    let failure = not_applied(command(&router(&format!("{}/999", server.url())), &["PING"]).await);
    let text = failure.to_string();
    assert!(
        text.contains("rejected SELECT 999") && text.contains("DB index is out of range"),
        "{text}"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn unix_sockets_work_with_login_and_database() {
    for flavor in Flavor::ALL {
        let server = Server::builder(flavor).unix_socket().password("s3cret").start();
        let path = server.socket_path().unwrap();
        let router = router(&format!("redis+unix://{}?password=s3cret&db=3", path.display()));
        echoes(&router, &echo(), "hello").await;
        command(&router, &["SET", "k", "v"]).await;
        let mut client = server.client().unwrap();
        client.command(&["SELECT", "3"]).unwrap();
        assert_eq!(client.command(&["GET", "k"]).unwrap().text(), "v");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn passwords_and_users_are_accepted_in_both_protocols() {
    for flavor in Flavor::ALL {
        let server = Server::builder(flavor).password("p@ss:w/rd?").start();
        server.command(&[
            "ACL",
            "SETUSER",
            "limiter",
            "on",
            ">us%r",
            "~tg:*",
            "+evalsha",
            "+eval",
            "+script|load",
        ]);
        for protocol in ["2", "3"] {
            for login in [":p%40ss%3Aw%2Frd%3F", "default:p%40ss:w/rd%3F", "limiter:us%25r"] {
                let router = router(&format!(
                    "redis://{login}@127.0.0.1:{}?protocol={protocol}",
                    server.port()
                ));
                echoes(&router, &echo(), login).await;
            }
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_wrong_login_fails_immediately_and_is_not_tried_at_every_call() {
    for flavor in Flavor::ALL {
        let server = Server::builder(flavor).password("right").start();
        for (login, kind) in [
            ("", FailureKind::NoAuth),
            (":s3cret@", FailureKind::WrongPass),
            ("nobody:s3cret@", FailureKind::WrongPass),
        ] {
            for protocol in ["2", "3"] {
                let text =
                    format!("redis://{login}127.0.0.1:{}?protocol={protocol}", server.port());
                let router = router(&text);
                let failure = not_applied(router.eval(&echo(), 0, NO_KEYS, &["x"], soon()).await);
                assert_eq!(failure.kind(), kind, "{flavor} {text}: {failure}");
                assert!(!format!("{failure} {failure:?}").contains("s3cret"), "{failure}");
                // Calls fail with the known reason, without another attempt.
                let start = Instant::now();
                while start.elapsed() < Duration::from_millis(300) {
                    let failure =
                        not_applied(router.eval(&echo(), 0, NO_KEYS, &["x"], soon()).await);
                    assert_eq!(failure.kind(), kind);
                    tokio::task::yield_now().await;
                }
                assert_eq!(router.counters().failed_connects, 1, "{flavor} {text}");
            }
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn no_output_shows_a_password() {
    let server = Server::builder(Flavor::Redis7).password("other").start();
    // A server that repeats the arguments of a command it does not know, and one that is not there.
    let repeats = Server::builder(Flavor::Redis7).args("--rename-command", &["AUTH", ""]).start();
    for port in [server.port(), repeats.port(), 1] {
        for protocol in ["", "?protocol=2", "?protocol=3"] {
            let text = format!("redis://us3r:s3cret@127.0.0.1:{port}{protocol}");
            let url = parsed(&text);
            let router = Router::new(url.clone(), Settings::default()).unwrap();
            let failure = not_applied(router.eval(&echo(), 0, NO_KEYS, &["x"], soon()).await);
            let shown = format!("{url} {url:?} {failure} {failure:?} {:?}", router.counters());
            assert!(!shown.contains("s3cret") && !shown.contains("us3r"), "{shown}");
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn several_connections_share_the_work() {
    let server = Server::start(Flavor::Redis7);
    let settings = Settings { connections_per_node: 3, ..Settings::default() };
    let router = Router::new(parsed(&server.url()), settings).unwrap();
    let script = echo();
    echoes(&router, &script, "first").await;
    until("all are connected", || router.counters().connects == 3).await;
    for round in 0..30 {
        echoes(&router, &script, &round.to_string()).await;
    }
    let clients = server.command(&["CLIENT", "LIST"]);
    assert_eq!(clients.text().matches("cmd=evalsha").count(), 3, "{clients:?}");
    assert_eq!(router.counters().connects, 3);
    assert_eq!(router.counters().script_loads, 1);
}

#[test]
fn settings_that_make_no_sense_are_refused() {
    let refused = |change: fn(&mut Settings)| {
        let mut settings = Settings::default();
        change(&mut settings);
        Router::new(parsed("redis://h"), settings).err().expect("refused").to_string()
    };
    assert_eq!(refused(|s| s.connections_per_node = 0), "connections_per_node 0: expected 1 to 8");
    assert_eq!(refused(|s| s.connections_per_node = 9), "connections_per_node 9: expected 1 to 8");
    assert_eq!(refused(|s| s.max_in_flight = 0), "max_in_flight 0: expected 1 to 1048576");
    assert_eq!(refused(|s| s.timeout = Duration::ZERO), "timeout 0: expected more than nothing");
}

#[test]
fn a_router_outlives_the_runtime_it_was_first_used_in() {
    let server = Server::start(Flavor::Redis7);
    let router = router(&server.url());
    for round in 0..3 {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(echoes(&router, &echo(), &round.to_string()));
    }
    assert_eq!(router.counters().connects, 3);
}
