//! `tidegate doctor`, on real servers.

use insta::assert_snapshot;
use serde_json::Value;
use tidegate_testkit::{Certs, Cluster, Flavor, Server};

use crate::{shown, tidegate};

/// The output without ports, versions and times, which differ from run to run.
fn examined(url: &str, more: &[&str]) -> String {
    let text = shown(&[&["doctor", "--samples", "0", "--store", url], more].concat(), "");
    let mut lines = Vec::new();
    for line in text.lines() {
        let line = match line.split_once("version: ").and_then(|(before, version)| {
            Some(format!("{before}version: {} N", version.split_once(' ')?.0))
        }) {
            Some(line) => line,
            None if line.contains("round-trip: ") => "ok       round-trip: N ms at best".into(),
            None => line.to_owned(),
        };
        lines.push(line);
    }
    lines.join("\n")
}

fn without_port(text: &str, server: &Server) -> String {
    text.replace(&server.port().to_string(), "PORT")
}

#[test]
fn a_healthy_server_is_told_line_by_line() {
    let redis = Server::start(Flavor::Redis7);
    assert_snapshot!(without_port(&examined(&redis.url(), &[]), &redis), @"
    exit 0
    --- stdout
    redis://127.0.0.1:PORT

    ok       version: Redis N
    ok       role: it takes writes
    ok       eviction: noeviction
    note     persistence: no append-only file
             After a crash the server knows at most its last snapshot. What was used since is restored
             only as far as processes that still run have seen it.
             For limits over hours or days: `appendonly yes` and `appendfsync everysec`. For limits
             over seconds it does not matter.
    note     replicas: none
             Nobody takes over when this server is lost; until it is back there are no decisions.
             Where that matters: a replica, with Sentinel or in a cluster.
    ok       clock: within a second of this machine's
    ok       round-trip: N ms at best
    ok       rights: all that decisions need
    ok       decision: a look, a charge and a reset were answered
    ");
    // Valkey gets the same text.
    let valkey = Server::builder(Flavor::Valkey9).arg("--appendonly", "yes").start();
    assert_snapshot!(without_port(&examined(&valkey.url(), &[]), &valkey), @"
    exit 0
    --- stdout
    redis://127.0.0.1:PORT

    ok       version: Valkey N
    ok       role: it takes writes
    ok       eviction: noeviction
    ok       persistence: append-only file
    note     replicas: none
             Nobody takes over when this server is lost; until it is back there are no decisions.
             Where that matters: a replica, with Sentinel or in a cluster.
    ok       clock: within a second of this machine's
    ok       round-trip: N ms at best
    ok       rights: all that decisions need
    ok       decision: a look, a charge and a reset were answered
    ");
}

#[test]
fn a_cluster_is_told_once_for_all_its_servers() {
    let cluster = Cluster::start(Flavor::Redis7);
    let mut text = examined(&cluster.url(), &[]);
    for node in cluster.nodes() {
        text = without_port(&text, node);
    }
    assert_snapshot!(text, @"
    exit 0
    --- stdout
    redis+cluster://127.0.0.1:PORT,127.0.0.1:PORT,127.0.0.1:PORT: 127.0.0.1:PORT, 127.0.0.1:PORT, 127.0.0.1:PORT

    ok       version: Redis N
    ok       role: it takes writes
    ok       eviction: noeviction
    note     persistence: no append-only file
             After a crash the server knows at most its last snapshot. What was used since is restored
             only as far as processes that still run have seen it.
             For limits over hours or days: `appendonly yes` and `appendfsync everysec`. For limits
             over seconds it does not matter.
    note     replicas: 1, and min-replicas-to-write is not set
             A primary that is cut off from everybody goes on admitting, beside the one that was put in
             its place, for as long as somebody still asks it.
             `min-replicas-to-write 1` and `min-replicas-max-lag 1` make it stop after a second or two.
    ok       clock: within a second of this machine's
    ok       round-trip: N ms at best
    ok       cluster: ok: all 16384 slots are served by 3 servers
    ok       rights: all that decisions need
    ok       decision: a look, a charge and a reset were answered
    ");
}

#[test]
fn an_evicting_policy_is_a_warning_and_no_reason_to_fail() {
    let server = Server::builder(Flavor::Redis7)
        .arg("--maxmemory", "100mb")
        .arg("--maxmemory-policy", "volatile-lru");
    let server = server.start();
    let text = examined(&server.url(), &[]);
    let (_, text) = text.split_once("role: it takes writes\n").unwrap();
    assert!(examined(&server.url(), &[]).starts_with("exit 0\n"));
    assert_snapshot!(text.split_once("\nnote").unwrap().0, @"
    warning  eviction: volatile-lru with a maxmemory of 100 MB
             When its memory is full it drops keys that are in use. Whoever's key is dropped starts
             anew, as if nothing had been used, unless a process that has seen more lately asks first.
             CONFIG SET maxmemory-policy noeviction, and the line `maxmemory-policy noeviction` in its
             configuration file. If the server is also a cache that must evict, give the limits a
             server of their own; volatile-ttl is the mildest of the others.
    ");
}

#[test]
fn missing_rights_are_problems_with_the_line_that_grants_them() {
    let server = Server::start(Flavor::Valkey9);
    server.command(&[
        "ACL",
        "SETUSER",
        "weak",
        "on",
        ">s3cret",
        "~tg1:*",
        "-@all",
        "+evalsha",
        "+script|load",
        "+get",
        "+set",
    ]);
    let url = server.url().replace("://", "://weak:s3cret@");
    let text = shown(&["doctor", "--store", &url], "");
    assert_snapshot!(without_port(&text, &server), @"
    exit 1
    --- stdout
    redis://***@127.0.0.1:PORT

    note     rights: the user may not run INFO
             What it would have told was not looked at. Decisions do not need it.
             To have it looked at: ACL SETUSER <user> +info
    problem  rights: the user may not run time, getrange, strlen, setrange, append, pexpire, del
             The script calls these commands with the rights of whoever runs it.
             ACL SETUSER <user> +time +getrange +strlen +setrange +append +pexpire +del. All that is
             needed: +evalsha +script|load +time +get +set +getrange +setrange +append +strlen +del
             +pexpire ~tg1:*

    Nothing was measured, because there are problems.
    ");
}

#[test]
fn what_keeps_us_out_is_told_with_what_to_do() {
    let server = Server::builder(Flavor::Redis7).password("s3cret").start();
    let port = server.port();
    let mut told = String::new();
    for url in [
        format!("redis://127.0.0.1:{port}"),
        format!("redis://:wr0ng@127.0.0.1:{port}"),
        format!("redis+cluster://:s3cret@127.0.0.1:{port}"),
    ] {
        told += &shown(&["doctor", "--store", &url], "");
    }
    server.kill();
    told += &shown(&["doctor", "--store", &format!("redis://127.0.0.1:{port}")], "");
    assert!(!told.contains("wr0ng") && !told.contains("s3cret"), "{told}");
    assert_snapshot!(without_port(&told, &server), @r#"
    exit 2
    --- stderr
    error: redis://127.0.0.1:PORT: 127.0.0.1:PORT rejected HELLO: the server wants credentials: "NOAUTH HELLO must be called with the client already authenticated, otherwise the HELLO AUTH <user> <pass> option can be used ..."
    Put user and password into the URL: redis://USER:PASSWORD@HOST, or redis://:PASSWORD@HOST without a user. TIDEGATE_STORE keeps it out of the list of processes.
    exit 2
    --- stderr
    error: redis://***@127.0.0.1:PORT: 127.0.0.1:PORT rejected HELLO: the server does not accept the user or password: "WRONGPASS invalid username-password pair or user is disabled."
    Check user and password. Characters such as @ : / ? # % are percent-encoded in a URL: p@ss is written p%40ss.
    exit 2
    --- stderr
    error: redis+cluster://***@127.0.0.1:PORT: 127.0.0.1:PORT rejected CLUSTER SLOTS: the URL names another kind of deployment than the server is: "ERR This instance has cluster support disabled"
    It is a single server: write redis:// instead of redis+cluster://.
    exit 2
    --- stderr
    error: redis://127.0.0.1:PORT: no connection to 127.0.0.1:PORT: Connection refused
    Is it running there? `redis-server --port 6379` or `valkey-server --port 6379` starts one; another address goes into the URL: redis://HOST:PORT.
    "#);
}

#[test]
fn a_certificate_of_an_unknown_authority_is_told_with_what_to_do() {
    let certs = Certs::new();
    let server = Server::builder(Flavor::Redis7).tls(&certs).start();
    let output = tidegate(&["doctor", "--store", &server.url()]).output().unwrap();
    let error = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(2), "{error}");
    assert!(error.contains("rediss://HOST?ca=FILE"), "{error}");
    let url = format!("{}?ca={}", server.url(), certs.ca().display());
    let fine = examined(&url, &[]);
    assert!(fine.starts_with("exit 0\n"), "{fine}");
}

/// Errors about the URL do not show the password, wherever it is.
#[test]
fn passwords_are_not_shown() {
    for url in [
        "redis://user:s3cret@host:99999",
        "redis://user:s3cret@host:x",
        "redis://user:s3cret@/",
        "user:s3cret@host",
        "redis://user:s3cret",
        "http://user:s3cret@host",
    ] {
        for command in
            [&["doctor"][..], &["check", "k", "--limit", "1/s"], &["simulate", "--limit", "1/s"]]
        {
            let text = shown(&[command, &["--store", url]].concat(), "");
            assert!(text.starts_with("exit 2\n") && !text.contains("s3cret"), "{text}");
        }
        let output = tidegate(&["doctor"]).env("TIDEGATE_STORE", url).output().unwrap();
        assert!(!String::from_utf8_lossy(&output.stderr).contains("s3cret"));
    }
    let help = tidegate(&["check", "--help"])
        .env("TIDEGATE_STORE", "redis://:s3cret@host")
        .output()
        .unwrap();
    assert!(!String::from_utf8_lossy(&help.stdout).contains("s3cret"));
}

#[test]
fn json_has_the_findings_and_the_measurements() {
    let server = Server::start(Flavor::Redis8);
    let output = tidegate(&["doctor", "--json", "--samples", "20"])
        .env("TIDEGATE_STORE", server.url())
        .output()
        .unwrap();
    assert_eq!(output.status.code(), Some(0));
    let json: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!((&json["worst"], &json["store"]), (&"note".into(), &server.url().into()));
    let finding = &json["findings"][0];
    assert_eq!((&finding["topic"], &finding["severity"]), (&"version".into(), &"ok".into()));
    for measured in ["round_trip", "decision"] {
        let times = &json[measured];
        assert_eq!(times["samples"], 20);
        assert!(times["p50_us"].as_u64().unwrap() <= times["max_us"].as_u64().unwrap());
    }
}

#[test]
fn measurements_are_put_into_words() {
    let server = Server::start(Flavor::Redis62);
    let text = shown(&["doctor", "--samples", "20", "--store", &server.url()], "");
    assert!(text.contains("round trip ") && text.contains("\ndecision "), "{text}");
    assert!(text.contains("more than a bare round trip"), "{text}");
    assert!(!text.contains('\u{1b}'), "colors are for terminals");
}
