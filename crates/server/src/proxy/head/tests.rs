//! What reaches the upstream, header by header.

use axum::http::Request;

use super::*;

fn prepared(lines: &[(&str, &str)], trusted: &str) -> HeaderMap {
    let mut request = Request::builder().uri("/");
    for (name, value) in lines {
        request = request.header(*name, *value);
    }
    let clients = ClientIp::behind(trusted.parse().unwrap());
    let (mut head, ()) = request.body(()).unwrap().into_parts();
    let peer = ConnectionPeer::new("10.0.0.9".parse().unwrap(), true);
    let host = host(&RequestHead::of(&mut head), &peer).unwrap();
    let trailers = clean(&mut head.headers, &peer, &clients, &HeaderPolicy::default());
    prepare(&mut RequestHead::of(&mut head), host.as_ref(), &peer, trailers).unwrap();
    head.headers
}

fn joined(headers: &HeaderMap, name: &str) -> String {
    headers.get_all(name).iter().map(|line| line.to_str().unwrap()).collect::<Vec<_>>().join(" | ")
}

#[test]
fn hop_by_hop_headers_are_removed() {
    let headers = prepared(
        &[
            ("host", "a.example"),
            ("connection", "close, X-Own , keep-alive"),
            ("connection", "content-length, host"),
            ("x-own", "1"),
            ("keep-alive", "timeout=5"),
            ("te", "gzip, trailers"),
            ("proxy-authorization", "Basic x"),
            ("proxy-connection", "keep-alive"),
            ("transfer-encoding", "chunked"),
            ("upgrade", "h2c"),
            ("http2-settings", "x"),
            ("expect", "100-continue"),
            ("trailer", "x-sum"),
            ("content-length", "3"),
            ("x-kept", "1"),
        ],
        "",
    );
    let mut names: Vec<&str> = headers.keys().map(HeaderName::as_str).collect();
    names.sort_unstable();
    let expected = [
        "forwarded",
        "host",
        "te",
        "trailer",
        "via",
        "x-forwarded-for",
        "x-forwarded-host",
        "x-forwarded-proto",
        "x-kept",
    ];
    assert_eq!(names, expected);
    assert_eq!(headers["te"], "trailers");
    assert_eq!(headers["via"], "1.1 tidegate");
}

#[test]
fn cookie_crumbs_become_one_line() {
    let headers =
        prepared(&[("host", "a"), ("cookie", "a=1"), ("cookie", " "), ("cookie", "b=2; c=3 ")], "");
    assert_eq!(joined(&headers, "cookie"), "a=1; b=2; c=3");
    assert_eq!(joined(&prepared(&[("host", "a"), ("cookie", "a=1;b=2")], ""), "cookie"), "a=1;b=2");
}

#[test]
fn a_message_has_one_length_and_none_beside_a_transfer_coding() {
    for (lines, expected) in [
        (&[("content-length", "5")][..], "5"),
        (&[("content-length", "5"), ("content-length", "5")][..], "5"),
        (&[("content-length", "5, 5")][..], "5"),
        (&[("content-length", "5"), ("transfer-encoding", "chunked")][..], ""),
    ] {
        let mut response = axum::http::Response::builder();
        for (name, value) in lines {
            response = response.header(*name, *value);
        }
        let mut headers = response.body(()).unwrap().into_parts().0.headers;
        strip(&mut headers, |_| false);
        one_length(&mut headers);
        assert_eq!(joined(&headers, "content-length"), expected, "{lines:?}");
    }
}

#[test]
fn only_trusted_proxies_identify_clients() {
    let said = [
        ("host", "a.example:8443"),
        ("x-forwarded-for", "192.0.2.1"),
        ("x-forwarded-for", "192.0.2.2"),
        ("x-forwarded-proto", "http"),
        ("x-forwarded-host", "b.example"),
        ("x-forwarded-port", "1"),
        ("x-real-ip", "192.0.2.1"),
        ("forwarded", "for=192.0.2.1"),
    ];
    let headers = prepared(&said, "");
    assert_eq!(joined(&headers, "x-forwarded-for"), "10.0.0.9");
    assert_eq!(joined(&headers, "x-forwarded-proto"), "https");
    assert_eq!(joined(&headers, "x-forwarded-host"), "a.example:8443");
    assert_eq!(joined(&headers, "forwarded"), "for=10.0.0.9;host=\"a.example:8443\";proto=https");
    assert_eq!(joined(&headers, "x-real-ip") + &joined(&headers, "x-forwarded-port"), "");
    let headers = prepared(&said, "10.0.0.0/8");
    assert_eq!(joined(&headers, "x-forwarded-for"), "192.0.2.1, 192.0.2.2, 10.0.0.9");
    assert_eq!(joined(&headers, "x-forwarded-proto"), "http");
    assert_eq!(joined(&headers, "x-forwarded-host"), "b.example");
    assert_eq!(
        joined(&headers, "forwarded"),
        "for=192.0.2.1, for=10.0.0.9;host=\"a.example:8443\";proto=https"
    );
    assert_eq!(joined(&headers, "x-real-ip"), "192.0.2.1");
}

#[test]
fn headers_with_underscores_are_removed_by_default() {
    let cleaned = |trusted: &str, keeps_underscores| {
        let mut headers = HeaderMap::new();
        for name in [
            "x_api_key",
            "x_forwarded_for",
            "x_real_ip",
            "x-forwarded_proto",
            "x_forwarde",
            "x-api-key",
        ] {
            headers.insert(
                HeaderName::from_bytes(name.as_bytes()).unwrap(),
                HeaderValue::from_static("1"),
            );
        }
        let clients = ClientIp::behind(trusted.parse().unwrap());
        let policy = HeaderPolicy { keeps_underscores, ..HeaderPolicy::default() };
        clean(
            &mut headers,
            &ConnectionPeer::new("10.0.0.9".parse().unwrap(), true),
            &clients,
            &policy,
        );
        let mut names: Vec<&str> = headers.keys().map(HeaderName::as_str).collect();
        names.sort_unstable();
        names.join(" ")
    };
    assert_eq!(cleaned("", false), "x-api-key");
    assert_eq!(cleaned("10.0.0.0/8", false), "x-api-key");
    assert_eq!(
        cleaned("", true),
        "x-api-key x_api_key x_forwarde",
        "an untrusted peer identifies no client"
    );
    assert_eq!(cleaned("10.0.0.0/8", true).split(' ').count(), 6);
}

#[test]
fn connection_options_remove_nothing_that_a_trusted_proxy_set() {
    let said = [
        ("connection", "X-Forwarded-For, X-Api-Key"),
        ("x-forwarded-for", "192.0.2.1"),
        ("x-api-key", "1"),
    ];
    let headers = prepared(&[&[("host", "a.example")], &said[..]].concat(), "10.0.0.0/8");
    assert_eq!(joined(&headers, "x-forwarded-for"), "192.0.2.1, 10.0.0.9");
    assert_eq!(joined(&headers, "x-api-key"), "");
}

#[test]
fn lines_of_a_list_become_one_line() {
    let mut headers = HeaderMap::new();
    for value in ["a, b ", "c", " d"] {
        headers.append("x-tags", HeaderValue::from_static(value));
        headers.append("x-other", HeaderValue::from_static(value));
    }
    let policy = HeaderPolicy { lists: vec!["x-tags".into()], ..HeaderPolicy::default() };
    clean(
        &mut headers,
        &ConnectionPeer::new("10.0.0.9".parse().unwrap(), true),
        &ClientIp::of_peer(),
        &policy,
    );
    assert_eq!(joined(&headers, "x-tags"), "a, b, c, d");
    assert_eq!(joined(&headers, "x-other"), "a, b | c | d");
}

#[test]
fn a_request_has_one_valid_host() {
    let of = |uri: &str, version, hosts: &[&str]| {
        let mut request = Request::builder().uri(uri).version(version);
        for one in hosts {
            request = request.header("host", *one);
        }
        let (mut head, ()) = request.body(()).unwrap().into_parts();
        let peer = ConnectionPeer::new("10.0.0.9".parse().unwrap(), true);
        match host(&RequestHead::of(&mut head), &peer) {
            Ok(host) => host.map_or("-".into(), |host| host.to_str().unwrap().to_string()),
            Err((status, _)) => status.as_u16().to_string(),
        }
    };
    let (http1, http2, http10) = (Version::HTTP_11, Version::HTTP_2, Version::HTTP_10);
    for (uri, version, hosts, expected) in [
        ("/", http1, &["a"][..], "a"),
        ("/", http1, &[][..], "400"),
        ("/", http10, &[][..], "-"),
        ("/", http1, &["a", "a"][..], "400"),
        ("/", http1, &["a b"][..], "400"),
        ("/", http1, &["a/b"][..], "400"),
        ("/", http1, &["u@a"][..], "400"),
        ("http://b/", http1, &["a"][..], "b"),
        ("http://u@b/", http1, &["a"][..], "400"),
        ("http://b/", http2, &["a"][..], "400"),
        ("http://b/", http2, &["B"][..], "b"),
        ("http://b/", http2, &[][..], "b"),
    ] {
        assert_eq!(of(uri, version, hosts), expected, "{uri} {version:?} {hosts:?}");
    }
}

#[test]
fn request_loops_are_stopped() {
    let (mut head, ()) = Request::builder().uri("/").body(()).unwrap().into_parts();
    for _ in 0..MAX_PASSES {
        via(&mut head.headers, Version::HTTP_11).unwrap();
    }
    assert_eq!(via(&mut head.headers, Version::HTTP_11).unwrap_err().0, StatusCode::LOOP_DETECTED);
}

#[test]
fn upgrades_need_both_headers_and_http_1_1() {
    let of = |version, connection: &str, upgrade: &str| {
        let request = Request::builder()
            .version(version)
            .header("connection", connection)
            .header("upgrade", upgrade);
        let (head, ()) = request.body(()).unwrap().into_parts();
        super::upgrade(&head).is_some()
    };
    assert!(of(Version::HTTP_11, "keep-alive, Upgrade", "websocket"));
    assert!(!of(Version::HTTP_11, "keep-alive", "websocket"));
    assert!(!of(Version::HTTP_11, "upgrade", "h2c"));
    assert!(!of(Version::HTTP_11, "upgrade", "websocket, H2C"));
    assert!(!of(Version::HTTP_10, "upgrade", "websocket"));
}

#[test]
fn targets_follow_the_base_path() {
    let of = |uri: &str, base: &str| target(&uri.parse().unwrap(), base).unwrap().to_string();
    assert_eq!(of("/a?b", ""), "/a?b");
    assert_eq!(of("http://h", ""), "/");
    assert_eq!(of("/a?b", "/base"), "/base/a?b");
}
