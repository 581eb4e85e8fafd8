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
    let elsewhere = NodeId(super::super::dial::Place::Unix("/elsewhere".into()));
    let failure = not_applied(router.command(&elsewhere, &["PING"], soon()).await);
    assert_eq!(failure.to_string(), "/elsewhere is not one of the servers");
    assert!(!router.is_cluster());
}
