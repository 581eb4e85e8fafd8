//! Servers with TLS believe the certificates, and clients can too.

use std::path::Path;
use std::process::Output;

use tidegate_testkit::{Certs, Flavor, Reply, Server, redis_cli};

/// What `redis-cli PING` says with these options.
fn ping(server: &Server, host: &str, options: &[(&str, &Path)]) -> Output {
    let mut cli = redis_cli();
    cli.args(["-h", host, "-p", &server.port().to_string(), "--tls"]);
    for (name, value) in options {
        cli.arg(name).arg(value);
    }
    cli.arg("PING").output().expect("redis-cli can be started")
}

fn is_pong(output: &Output) -> bool {
    output.stdout == b"PONG\n"
}

#[test]
fn a_client_that_trusts_the_authority_is_answered() {
    for flavor in [Flavor::Redis7, Flavor::Redis8, Flavor::Valkey8] {
        let server = Server::builder(flavor).tls(&Certs::new()).start();
        assert_eq!(server.url(), format!("rediss://127.0.0.1:{}", server.port()));
        assert_eq!(
            server.command(&["PING"]),
            Reply::Text("PONG".into()),
            "the kit has a way in of its own"
        );
    }
    let (certs, others) = (Certs::new(), Certs::new());
    let server = Server::builder(Flavor::Redis7).tls(&certs).start();
    for host in ["127.0.0.1", "localhost"] {
        let output = ping(&server, host, &[("--cacert", &certs.ca())]);
        assert!(is_pong(&output), "{host}: {output:?}");
        let output = ping(&server, host, &[("--cacert", &others.ca())]);
        assert!(!is_pong(&output), "{host}: it trusts another authority: {output:?}");
    }
}

#[test]
fn mutual_tls_wants_a_certificate_of_the_client() {
    let (certs, others) = (Certs::new(), Certs::new());
    let server = Server::builder(Flavor::Redis7).mutual_tls(&certs).start();
    let with = |client: &Certs| {
        let (ca, cert, key) = (certs.ca(), client.client_cert(), client.client_key());
        is_pong(&ping(
            &server,
            "127.0.0.1",
            &[("--cacert", &ca), ("--cert", &cert), ("--key", &key)],
        ))
    };
    assert!(with(&certs));
    assert!(!with(&others), "it has a certificate of another authority");
    assert!(!is_pong(&ping(&server, "127.0.0.1", &[("--cacert", &certs.ca())])), "it has none");
}

#[test]
fn a_build_without_tls_says_so() {
    let panic =
        std::panic::catch_unwind(|| Server::builder(Flavor::Valkey9).tls(&Certs::new()).start())
            .unwrap_err();
    let message = panic.downcast_ref::<String>().unwrap();
    assert!(message.starts_with("valkey 9.1 has no TLS"), "{message}");
}
