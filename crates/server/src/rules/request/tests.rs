//! Which attributes a request has, and which requests are refused.

use axum::http::HeaderValue;
use tidegate::http::ClientIp;

use super::*;

fn headers(lines: &[(&'static str, &str)]) -> HeaderMap {
    let mut headers = HeaderMap::new();
    for (name, value) in lines {
        headers.append(*name, HeaderValue::from_bytes(value.as_bytes()).unwrap());
    }
    headers
}

fn target(target: &str) -> Target<'_> {
    HttpRequest::target(target, &PathPolicy::KEEP).unwrap()
}

fn client(ip: &str) -> Client {
    ClientIp::of_peer().find(ip.parse().unwrap(), [])
}

#[test]
fn what_rules_may_ask_for() {
    // {"sub":"ann","tier":2,"paid":true,"roles":["a"]}
    let token =
        "eyJhbGciOiJub25lIn0.eyJzdWIiOiJhbm4iLCJ0aWVyIjoyLCJwYWlkIjp0cnVlLCJyb2xlcyI6WyJhIl19.x";
    let headers = headers(&[
        ("x-key", "a"),
        ("x-key", "b"),
        ("host", "limiter"),
        ("cookie", "a=1; session=s e"),
        ("cookie", "b = 2"),
        ("authorization", &format!("bearer {token}")),
    ]);
    let target = target("/v1//x/%2e%2e/%73earch;v=1?q=a%20b+c&%75ser=ann&user=bob&flag&e=#f?g");
    let request =
        HttpRequest::new(client("192.0.2.7"), "post", &target, "API.Example.com:443", &headers)
            .unwrap();
    for (name, value) in [
        ("ip", "192.0.2.7"),
        ("method", "POST"),
        ("path", "/v1/search"),
        ("host", "api.example.com"),
        ("header.x-key", "a, b"),
        ("header.X-Key", "a, b"),
        ("header.host", "api.example.com"),
        ("query.q", "a b c"),
        ("query.user", "ann"),
        ("query.flag", ""),
        ("query.e", ""),
        ("cookie.session", "s e"),
        ("cookie.b", "2"),
        ("bearer.sub", "ann"),
        ("bearer.tier", "2"),
        ("bearer.paid", "true"),
    ] {
        assert_eq!(request.get(name).as_deref(), Some(value), "{name}");
    }
    for name in [
        "user",
        "header.none",
        "query.Q",
        "query.g",
        "cookie.q",
        "bearer.roles",
        "bearer.none",
        "x.y",
    ] {
        assert_eq!(request.get(name), None, "{name}");
    }
    let digest = request.get("bearer").unwrap();
    assert!(digest.len() == 40 && !digest.contains("eyJ"), "{digest}");
}

#[test]
fn what_cannot_be_described_is_an_error() {
    let headers = HeaderMap::new();
    let long = format!("/{}", "a".repeat(9000));
    let longer = format!("/?{}", "a".repeat(MAX_URI_BYTES));
    for (method, target, host) in [
        ("", "/", "a"),
        ("GET /", "/", "a"),
        ("G\u{e9}T", "/", "a"),
        ("ABCDEFGHIJKLMNOPQRSTUVWXYZABCDEFG", "/", "a"),
        ("GET", "", "a"),
        ("GET", "v1/search", "a"),
        ("GET", "http://a/", "a"),
        ("GET", "**", "a"),
        ("GET", &long, "a"),
        ("GET", &longer, "a"),
        ("GET", "/", ""),
        ("GET", "/", "a, b"),
        ("GET", "/", "a/b"),
        ("GET", "/", &"a".repeat(600)),
    ] {
        let request = HttpRequest::target(target, &PathPolicy::KEEP).and_then(|target| {
            HttpRequest::new(client("192.0.2.7"), method, &target, host, &headers).map(drop)
        });
        assert!(request.is_err(), "{method} {host}");
    }
}

#[test]
fn strange_tokens_claim_nothing() {
    for token in ["", "a", "a.b", "a.b.c.d", "a.!!.c", "a.bnVsbA.c", "..", "a.eyJzdWIiOiJhbm4i.c"] {
        let headers = headers(&[("authorization", &format!("Bearer {token}"))]);
        let target = target("/");
        let request = HttpRequest::new(client("192.0.2.7"), "GET", &target, "a", &headers).unwrap();
        assert_eq!(request.get("bearer.sub"), None, "{token}");
    }
}

#[test]
fn cookies_are_read_one_by_one_and_in_one_spelling() {
    for (line, expected) in [
        ("session=S", Some("S")),
        ("session=\"S\"", Some("S")),
        ("session=\"\\123\"", Some("S")),
        ("session=\"a\\\"b\"", Some("a\"b")),
        ("session=\"\\053\\303\\251\"", Some("+\u{e9}")),
        ("session=\"\\400\"", Some("400")),
        ("session=%53+a", Some("S+a")),
        ("session=%53", Some("S")),
        ("a=\u{e9}; session=S", Some("S")),
        ("\u{e9}; session = S ; x", Some("S")),
        ("session=a+b=c", Some("a+b=c")),
        ("session", Some("")),
        ("Session=S; xsession=S", None),
    ] {
        let (headers, target) = (headers(&[("cookie", line)]), target("/"));
        let request = HttpRequest::new(client("192.0.2.7"), "GET", &target, "a", &headers).unwrap();
        assert_eq!(request.get("cookie.session").as_deref(), expected, "{line}");
    }
}

/// Most values are as they should be.
#[test]
fn what_has_no_escapes_is_not_copied() {
    for value in [&b"S"[..], b"\"S\"", b"a+b", b"\"a+b\""] {
        assert!(matches!(cookie_value(value), Cow::Borrowed(_)), "{value:?}");
    }
    assert!(matches!(decoded(b"abc", Plus::IsSpace), Cow::Borrowed("abc")));
    assert_eq!(decoded(b"a+b", Plus::IsSpace), "a b");
}

#[test]
fn only_a_bearer_is_a_bearer() {
    for (line, expected) in [
        ("Bearer t", true),
        ("BEARER  t", true),
        ("Bearer ", false),
        ("Bearer", false),
        ("Basic dDp0", false),
        ("Digest t=1", false),
        ("t", false),
    ] {
        let (headers, target) = (headers(&[("authorization", line)]), target("/"));
        let request = HttpRequest::new(client("192.0.2.7"), "GET", &target, "a", &headers).unwrap();
        assert_eq!(request.get("bearer").is_some(), expected, "{line}");
    }
}

#[test]
fn claims_are_read_up_to_a_length() {
    for (bytes, expected) in
        [(MAX_CLAIMS_BYTES / 4 * 3, Some("ann")), (MAX_CLAIMS_BYTES / 4 * 3 + 3, None)]
    {
        let (start, end) = ("{\"sub\":\"ann\",\"x\":\"", "\"}");
        let json = format!("{start}{}{end}", "x".repeat(bytes - start.len() - end.len()));
        let line = format!("Bearer a.{}.c", URL_SAFE_NO_PAD.encode(&json));
        let (headers, target) = (headers(&[("authorization", &line)]), target("/"));
        let request = HttpRequest::new(client("192.0.2.7"), "GET", &target, "a", &headers).unwrap();
        assert_eq!(request.get("bearer.sub").as_deref(), expected, "{bytes} bytes");
    }
}

#[test]
fn what_is_refused_is_named_and_cut() {
    let problem = |method: &str, text: &str, host: &str| {
        let headers = HeaderMap::new();
        let read = HttpRequest::target(text, &PathPolicy::default());
        let read = read.and_then(|target| {
            HttpRequest::new(client("192.0.2.7"), method, &target, host, &headers).map(drop)
        });
        read.map_err(|error| (error.is_too_long(), error.to_string()))
    };
    let longest = format!("/?{}", "q".repeat(MAX_URI_BYTES - 2));
    assert_eq!(problem("GET", &longest, "a"), Ok(()));
    for (method, target, host, is_long, expected) in [
        (
            "GET",
            &*format!("{longest}q"),
            "a",
            true,
            "a target of 16385 bytes: expected at most 16384",
        ),
        (
            "GET",
            &format!("/{}", "a".repeat(8192)),
            "a",
            true,
            "a path of 8193 bytes: expected at most 8192",
        ),
        ("GET", "/", &"a".repeat(513), true, "a host of 513 bytes: expected at most 512"),
        ("G(T", "/", "a", false, "method \"G(T\": expected 1 to 32 letters such as GET"),
        (
            "GET",
            "v1/search",
            "a",
            false,
            "target \"v1/search\": expected a path such as /v1/search?q=1",
        ),
        ("GET", "/", "a b", false, "host \"a b\": expected one host such as api.example.com:443"),
        ("GET", "/a%2fb", "a", false, "path \"/a%2fb\" has an escaped slash"),
    ] {
        let (long, message) = problem(method, target, host).unwrap_err();
        assert!(long == is_long && message.starts_with(expected), "{message}");
    }
    let (_, message) = problem(&"(".repeat(5000), "/", "a").unwrap_err();
    assert!(message.len() < 200 && message.contains(&"(".repeat(64)), "{message}");
}

#[test]
fn white_space_around_a_value_is_no_part_of_it() {
    let headers = headers(&[("x-key", " \tKEY\t "), ("authorization", "  Bearer t ")]);
    let target = target("/");
    let request = HttpRequest::new(client("192.0.2.7"), "GET", &target, "a", &headers).unwrap();
    assert_eq!(request.get("header.x-key").as_deref(), Some("KEY"));
    assert!(request.get("bearer").is_some());
}

#[test]
fn what_a_rule_looks_at_is_there_once() {
    let names = ["header.x-key", "header.accept", "cookie.session", "query.k", "bearer"];
    let names: Vec<std::sync::Arc<str>> = names.iter().map(|name| (*name).into()).collect();
    let named = Named::among(names.iter());
    let policy = HeaderPolicy { lists: vec!["accept".into()], ..HeaderPolicy::default() };
    let problem = |text: &str, lines: &[(&'static str, &str)]| {
        let (headers, target) = (headers(lines), target(text));
        let request = HttpRequest::new(client("192.0.2.7"), "GET", &target, "a", &headers).unwrap();
        request.check_repeated(&named, &policy).map_err(|repeated| repeated.to_string())
    };
    assert_eq!(
        problem("/?k=1&q=1&q=2", &[("x-key", "a"), ("x-other", "a"), ("x-other", "b")]),
        Ok(())
    );
    assert_eq!(
        problem(
            "/",
            &[("accept", "a"), ("accept", "b"), ("cookie", "a=1"), ("cookie", "session=1")]
        ),
        Ok(())
    );
    for (text, lines, expected) in [
        (
            "/",
            &[("x-key", "a"), ("x-key", "a")][..],
            "header x-key is there more than once: expected it once",
        ),
        (
            "/",
            &[("authorization", "Bearer a"), ("authorization", "Bearer b")],
            "header authorization is",
        ),
        ("/", &[("cookie", "session=r1; session=S")], "cookie session is"),
        (
            "/",
            &[("cookie", "session=r1"), ("cookie", "a=\u{e9};session=\"S\"")],
            "cookie session is",
        ),
        ("/", &[("cookie", "session; session=S")], "cookie session is"),
        ("/?k=r1&k=K", &[], "query parameter k is"),
        ("/?%6b=r1&a&k", &[], "query parameter k is"),
    ] {
        let problem = problem(text, lines).unwrap_err();
        assert!(problem.starts_with(expected), "{problem}");
    }
}
