//! TLS: whom we trust, and who we are.

use tidegate_testkit::Certs;

use super::*;

#[tokio::test(flavor = "multi_thread")]
async fn a_server_is_trusted_by_its_authority_and_by_no_other() {
    let (certs, others) = (Certs::new(), Certs::new());
    for flavor in [Flavor::Redis7, Flavor::Redis8, Flavor::Valkey8] {
        let server = Server::builder(flavor).tls(&certs).password("s3cret").start();
        let base = server.url();
        echoes(&router(&format!("{base}?ca={}", certs.ca().display())), &echo(), "hello").await;
        echoes(&router(&format!("{base}?insecure=true")), &echo(), "hello").await;
        let by_name = base.replace("127.0.0.1", "localhost");
        echoes(&router(&format!("{by_name}?ca={}", certs.ca().display())), &echo(), "hello").await;

        let stranger = router(&format!("{base}?ca={}", others.ca().display()));
        let failure = not_applied(stranger.eval(&echo(), 0, NO_KEYS, &["x"], soon()).await);
        assert_eq!(failure.kind(), FailureKind::Tls, "{failure}");
        assert!(
            failure
                .to_string()
                .ends_with("its certificate is not signed by an authority that is trusted here"),
            "{failure}"
        );
        // The authorities of the system do not know it either.
        let failure = match Router::new(parsed(&base), Settings::default()) {
            Ok(router) => not_applied(router.eval(&echo(), 0, NO_KEYS, &["x"], soon()).await),
            Err(failure) => failure,
        };
        assert_eq!(failure.kind(), FailureKind::Tls, "{failure}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_client_certificate_is_shown_where_it_is_wanted() {
    let (certs, others) = (Certs::new(), Certs::new());
    for flavor in [Flavor::Redis7, Flavor::Redis8, Flavor::Valkey8] {
        let server = Server::builder(flavor).mutual_tls(&certs).start();
        let with = |cert: &Certs| {
            let (ca, cert, key) = (certs.ca(), cert.client_cert(), cert.client_key());
            format!(
                "{}?ca={}&cert={}&key={}",
                server.url(),
                ca.display(),
                cert.display(),
                key.display()
            )
        };
        echoes(&router(&with(&certs)), &echo(), "hello").await;
        for wrong in [with(&others), format!("{}?ca={}", server.url(), certs.ca().display())] {
            let failure =
                not_applied(router(&wrong).eval(&echo(), 0, NO_KEYS, &["x"], soon()).await);
            assert_eq!(failure.kind(), FailureKind::Tls, "{failure}");
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_certificate_that_is_replaced_is_used_from_the_next_connection_on() {
    let (certs, others) = (Certs::new(), Certs::new());
    let server = Server::builder(Flavor::Redis7).tls(&certs).start();
    let folder = tempfile::tempdir().unwrap();
    let ca = folder.path().join("ca.pem");
    std::fs::copy(others.ca(), &ca).unwrap();
    let router = router(&format!("{}?ca={}", server.url(), ca.display()));
    not_applied(router.eval(&echo(), 0, NO_KEYS, &["x"], soon()).await);
    std::fs::copy(certs.ca(), &ca).unwrap();
    let end = soon();
    while !matches!(router.eval(&echo(), 0, NO_KEYS, &["x"], soon()).await, Outcome::Applied(_)) {
        assert!(Instant::now() < end, "the new authority was not read");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

#[test]
fn files_that_are_missing_or_wrong_are_named() {
    let certs = Certs::new();
    let refused = |query: String| {
        Router::new(parsed(&format!("rediss://h?{query}")), Settings::default())
            .err()
            .expect("refused")
            .to_string()
    };
    let (ca, cert, key) = (certs.ca(), certs.client_cert(), certs.client_key());
    let text = refused("ca=/nowhere/ca.pem".into());
    assert_eq!(text, "ca \"/nowhere/ca.pem\": no such file: correct the path, or create it");
    let text = refused(format!("ca={}&cert=/nowhere/c.pem&key={}", ca.display(), key.display()));
    assert_eq!(text, "cert \"/nowhere/c.pem\": no such file: correct the path, or create it");
    let text = refused(format!("ca={}&cert={}&key=/nowhere/k.pem", ca.display(), cert.display()));
    assert_eq!(text, "key \"/nowhere/k.pem\": no such file: correct the path, or create it");
    let text = refused(format!("ca={}", key.display()));
    assert!(text.contains("no certificate in it: expected PEM with BEGIN CERTIFICATE"), "{text}");
    let text =
        refused(format!("ca={}&cert={}&key={}", ca.display(), cert.display(), cert.display()));
    assert!(text.contains("no private key in it: expected PEM with BEGIN PRIVATE KEY"), "{text}");
    let text = refused(format!("ca={}&cert={}&key={}", ca.display(), ca.display(), key.display()));
    assert!(text.ends_with(": the key does not belong to the certificate"), "{text}");
}

/// A certificate of a real server that cannot be one of this server: the problem, and what to do
/// about it.
#[tokio::test(flavor = "multi_thread")]
async fn a_certificate_that_is_not_the_servers_own_is_named_with_advice() {
    for (certs, problem, advice) in [
        (
            Certs::with_authority_as_server(),
            "its certificate is that of a certificate authority (CA:TRUE), not of a server",
            "Sign a server certificate with that authority",
        ),
        (
            Certs::for_server_called(&["redis.example", "10.1.2.3"]),
            "its certificate is for redis.example, 10.1.2.3, not for 127.0.0.1",
            "Write the host in the URL as the certificate names it, or give the server",
        ),
        (
            Certs::for_server_called(&[]),
            "its certificate is for no name, not for 127.0.0.1",
            "Write the host in the URL as the certificate names it, or give the server",
        ),
    ] {
        let server = Server::builder(Flavor::Redis7).tls(&certs).start();
        let url = format!("rediss://127.0.0.1:{}?ca={}", server.port(), certs.ca().display());
        let failure = not_applied(router(&url).eval(&echo(), 0, NO_KEYS, &["x"], soon()).await);
        assert_eq!((failure.kind(), failure.is_permanent()), (FailureKind::Tls, true), "{failure}");
        assert!(failure.to_string().ends_with(&format!(": {problem}")), "{failure}");
        assert!(failure.advice().starts_with(advice), "{failure}: {}", failure.advice());
    }
}

/// A plain server waits for the end of a command while a client waits for a handshake: both would
/// wait for ever.
#[tokio::test(flavor = "multi_thread")]
async fn a_server_without_tls_is_told_from_one_that_is_silent() {
    for password in [None, Some("s3cret")] {
        let server = match password {
            None => Server::start(Flavor::Redis7),
            Some(word) => Server::builder(Flavor::Redis7).password(word).start(),
        };
        let url = server.url().replace("redis://", "rediss://");
        let failure = not_applied(
            router(&format!("{url}?insecure=true")).eval(&echo(), 0, NO_KEYS, &["x"], soon()).await,
        );
        assert_eq!((failure.kind(), failure.is_permanent()), (FailureKind::Tls, true), "{failure}");
        assert!(failure.to_string().ends_with(": it answers without TLS"), "{failure}");
        assert_eq!(
            failure.advice(),
            "Write redis:// instead of rediss://, or name the port on which it speaks TLS."
        );
    }
    // A server that accepts and says nothing, in whatever protocol, is only silent.
    let silent = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("rediss://{}?insecure=true", silent.local_addr().unwrap());
    let failure = not_applied(router(&url).eval(&echo(), 0, NO_KEYS, &["x"], soon()).await);
    assert!(!failure.is_permanent(), "{failure}");
}
