//! Rules see the request that the upstream gets, with real servers that each parse requests in
//! their own way.

use std::fmt::Write;

use axum::body::Body;
use axum::http::{HeaderValue, Request};
use http_body_util::BodyExt;
use hyper::client::conn::http2;
use hyper_util::rt::{TokioExecutor, TokioIo};
use tidegate_testkit::{Backend, BackendKind, attacks_held, get};

use super::{FREE, Stage, Upstream, noting};

const USED_UP: &str = "\
rules:
  - { name: login, when: { path: /login }, limit: 1/h }
  - { name: search, when: { path: /v1/search }, limit: 1/h }
";

/// Targets that at least one server reads as `/login` or `/v1/search`, and their status with
/// `decode` and `resolve`.
const WAYS_AROUND: [(&str, u16); 14] = [
    ("/%2flogin", 429),
    ("/%2Flogin", 429),
    ("/x/..%2flogin", 429),
    ("/x/../login", 429),
    ("/x/%2e%2e/login", 429),
    ("/./login", 429),
    ("/v1%2fsearch", 429),
    ("/v1%2Fsearch?q=1", 429),
    ("/v1/chat/..;/search", 429),
    ("/v1/chat/%2e%2E%3Ba/search", 429),
    ("/v1\\search", 400),
    ("/v1%5csearch", 400),
    ("/login%00", 400),
    ("/v1/x\\..\\search", 400),
];

fn before(backend: &Backend, text: &str) -> Stage {
    Stage::before(&format!("http://{}", backend.address()), text)
}

#[test]
fn no_spelling_of_a_path_bypasses_its_rule() {
    for kind in BackendKind::ALL {
        let backend = Backend::start(kind);
        let reached = |target: &str| {
            let (status, body) = backend.get(target, &[]);
            status == 200 && !body.contains("resource: other")
        };
        let direct = WAYS_AROUND.iter().filter(|(target, _)| reached(target)).count();
        assert!(
            direct > 0,
            "{kind:?} reads none of them as a resource, so that this test shows nothing"
        );
        for (settings, is_default) in
            [("", true), ("paths: { escaped_slashes: decode, dot_segments: resolve }\n", false)]
        {
            let stage = before(&backend, &format!("{settings}{USED_UP}"));
            for path in ["/login", "/v1/search"] {
                let (status, body) = get(stage.at, path, &[]);
                assert!(
                    status == 200 && body.contains(&format!("resource: {path}\n")),
                    "{kind:?}: {status} {body}"
                );
                assert_eq!(get(stage.at, path, &[]).0, 429, "{kind:?}: {path} is used up");
                for same in [
                    path.replace('s', "%73"),
                    format!("/{path}"),
                    format!("{path};a=1"),
                    format!("{path}?q"),
                ] {
                    assert_eq!(get(stage.at, &same, &[]).0, 429, "{kind:?}: {same}");
                }
            }
            for (target, rewritten) in WAYS_AROUND {
                let (status, body) = get(stage.at, target, &[]);
                let expected = if is_default { 400 } else { rewritten };
                assert_eq!(status, expected, "{kind:?}: {target}: {body}");
                if expected == 400 {
                    assert!(
                        body.contains("\"detail\":\"path ") && body.contains("expected"),
                        "{body}"
                    );
                }
            }
        }
    }
    // With the settings of this test and without, beside four spellings of each of two paths that
    // rules know.
    attacks_held("judged", BackendKind::ALL.len() * 2 * (WAYS_AROUND.len() + 8));
}

#[test]
fn the_upstream_gets_the_target_that_rules_saw() {
    let (at, seen) = noting();
    let sent = |settings: &str, target: &str| {
        let stage = Stage::before(&format!("http://{at}"), &format!("{settings}{FREE}"));
        let status = get(stage.at, target, &[]).0;
        let head = seen.lock().unwrap().pop_back().map_or_else(String::new, |(head, _)| head);
        format!("{status} {}", head.split(' ').nth(1).unwrap_or("-"))
    };
    let rewriting = "paths: { escaped_slashes: decode, dot_segments: resolve }\n";
    let keeping = "paths: { escaped_slashes: keep, dot_segments: keep }\n";
    for (settings, target, expected) in [
        ("", "/a%20b;c//d?x=/../%2f", "200 /a%20b;c//d?x=/../%2f"),
        ("", "//a.example/b", "200 /a.example/b"),
        (rewriting, "/a%2fb/./..;x/c?x=%2f", "200 /a/c?x=%2f"),
        (keeping, "/a%2fb/../c%5c?x=1", "200 /a%2fb/../c%5c?x=1"),
        (keeping, "/a\\b", "400 -"),
        (keeping, "/a%00", "400 -"),
        ("paths: { escaped_slashes: keep }\n", "/a/..%2fb", "400 -"),
    ] {
        assert_eq!(sent(settings, target), expected, "{target} with {settings:?}");
    }
}

#[test]
fn white_space_around_a_value_makes_no_new_budget() {
    let upstream = Upstream::echoing();
    let stage = Stage::before(
        &upstream.h2c(),
        "rules: [{ name: key, by: [header.x-api-key], limit: 1/h }]\n",
    );
    let statuses = stage.runtime.block_on(async {
        let stream = tokio::net::TcpStream::connect(stage.at).await.unwrap();
        let (mut sender, connection) =
            http2::handshake(TokioExecutor::new(), TokioIo::new(stream)).await.unwrap();
        tokio::spawn(connection);
        let mut statuses = Vec::new();
        for key in [" KEY\t", "KEY", " KEY", "KEY ", "\tKEY", "  KEY  "] {
            let request = Request::get("http://a.example/")
                .header("x-api-key", HeaderValue::from_static(key));
            let response = sender.send_request(request.body(Body::empty()).unwrap()).await.unwrap();
            statuses.push(response.status().as_u16());
            let body = response.into_body().collect().await.unwrap().to_bytes();
            let echo = String::from_utf8(body.to_vec()).unwrap();
            // Over HTTP/2 the value arrives with the white space.
            assert!(statuses.len() > 1 || echo.contains("\nx-api-key: KEY\n"), "{echo:?}");
        }
        statuses
    });
    assert_eq!(statuses, [200, 429, 429, 429, 429, 429]);
    attacks_held("judged", 5);
}

const BY_NAME: &str = "\
rules:
  - { name: key, by: [header.x-api-key], missing: skip, limit: 1/h }
  - { name: session, by: [cookie.session], missing: skip, limit: 1/h }
  - { name: k, by: [query.k], missing: skip, limit: 1/h }
";

#[test]
fn repeated_attributes_of_a_rule_are_refused() {
    for kind in [BackendKind::Flask, BackendKind::Php, BackendKind::Go] {
        let backend = Backend::start(kind);
        let stage = before(&backend, BY_NAME);
        for (target, lines, same) in [
            ("/", &["X-Api-Key: KEY"][..], &[&["X-Api-Key: KEY"][..]][..]),
            (
                "/",
                &["Cookie: session=S"],
                &[
                    &["Cookie: session=\"S\""],
                    &["Cookie: a=\u{e9}; session=S"],
                    &["Cookie: session=%53"],
                ],
            ),
            ("/?k=K", &[], &[&[]]),
        ] {
            let (status, body) = get(stage.at, target, lines);
            assert!(
                status == 200
                    && (body.contains(": KEY\n")
                        || body.contains(": S\n")
                        || body.contains(": K\n")),
                "{kind:?} {body}"
            );
            for lines in same {
                assert_eq!(get(stage.at, target, lines).0, 429, "{kind:?}: {target} {lines:?}");
            }
        }
        for (target, lines, name) in [
            ("/", &["X-Api-Key: KEY", "X-Api-Key: r17"][..], "header x-api-key"),
            ("/", &["X-Api-Key: r17", "x-api-key: r17"], "header x-api-key"),
            ("/", &["Cookie: session=r1; session=S"], "cookie session"),
            ("/", &["Cookie: session=r1", "Cookie: session=\"S\""], "cookie session"),
            ("/?k=r1&k=K", &[], "query parameter k"),
            ("/?k=r1&%6b=K", &[], "query parameter k"),
        ] {
            let (status, body) = get(stage.at, target, lines);
            let expected = format!("{name} is there more than once: expected it once");
            assert!(
                status == 400 && body.contains(&expected),
                "{kind:?}: {target} {lines:?}: {status} {body}"
            );
        }
        // No rule uses these.
        let (status, _) =
            get(stage.at, "/?q=1&q=2", &["X-Other: 1", "X-Other: 2", "Cookie: a=1; a=2"]);
        assert_eq!(status, 200, "{kind:?}");
    }
}

#[test]
fn lines_of_a_list_header_are_one_value() {
    let (at, seen) = noting();
    let text =
        "headers: { lists: [X-Tags] }\nrules: [{ name: tags, by: [header.x-tags], limit: 1/h }]\n";
    let stage = Stage::before(&format!("http://{at}"), text);
    assert_eq!(get(stage.at, "/", &["X-Tags: a", "X-Tags: b, c"]).0, 200);
    let (head, _) = seen.lock().unwrap().pop_back().unwrap();
    assert!(head.to_ascii_lowercase().contains("\r\nx-tags: a, b, c\r\n"), "{head}");
    assert_eq!(get(stage.at, "/", &["X-Tags: a, b, c"]).0, 429, "it is the same list");
}

#[test]
fn headers_named_by_connection_are_removed_before_rules_see_them() {
    let backend = Backend::start(BackendKind::Flask);
    let stage = before(
        &backend,
        "rules: [{ name: key, by: [header.x-api-key], missing: share, limit: 1/h }]\n",
    );
    let ask = |key: &str| {
        let key = format!("X-Api-Key: {key}");
        // With `Connection: close`, which the client sends, there are two lines of it.
        get(stage.at, "/", &["Connection: X-Api-Key", &key])
    };
    let (status, body) = ask("r1");
    assert!(status == 200 && body.contains("\nkey: \n"), "the upstream does not see it: {body}");
    assert_eq!(ask("r2").0, 429, "all without a key share one budget");
    assert_eq!(get(stage.at, "/", &["X-Api-Key: r1"]).0, 200, "which is not that of the key");
    attacks_held("judged", 1);
}

#[test]
fn headers_with_underscores_are_not_forwarded() {
    let backend = Backend::start(BackendKind::Php);
    let rules = "rules: [{ name: key, by: [header.x-api-key], missing: share, limit: 100/h }]\n";
    let lines = ["X_Api_Key: KEY", "X_Forwarded_For: 192.0.2.1"];
    assert!(
        backend.get("/", &lines).1.contains("\nkey: KEY\nforwarded for: 192.0.2.1\n"),
        "PHP reads them as others"
    );
    let stage = before(&backend, rules);
    let (status, body) = get(stage.at, "/", &lines);
    assert!(status == 200 && body.contains("\nkey: \nforwarded for: 127.0.0.1\n"), "{body}");
    let stage = before(&backend, &format!("headers: {{ underscores: keep }}\n{rules}"));
    let (status, body) = get(stage.at, "/", &lines);
    assert!(status == 200 && body.contains("\nkey: KEY\nforwarded for: 127.0.0.1\n"), "{body}");
    attacks_held("judged", 1);
}

#[test]
fn a_cost_of_zero_from_a_request_counts_as_one() {
    let (at, _) = noting();
    let statuses = |cost: &str, header: &str| {
        let stage = Stage::before(
            &format!("http://{at}"),
            &format!("rules: [{{ name: a, limit: 4/h, cost: {cost} }}]\n"),
        );
        let mut statuses = String::new();
        for _ in 0..5 {
            write!(statuses, "{} ", get(stage.at, "/", &[header]).0).unwrap();
        }
        statuses
    };
    assert_eq!(statuses("{ from: header.x-cost, max: 100 }", "X-Cost: 0"), "200 200 200 200 429 ");
    assert_eq!(
        statuses("{ from: header.x-cost, min: 2, max: 100 }", "X-Cost: 0"),
        "200 200 429 429 429 "
    );
    assert_eq!(
        statuses("{ from: header.x-cost, min: 2, max: 100 }", "X-Other: 0"),
        "200 200 429 429 429 "
    );
    assert_eq!(
        statuses("{ from: header.x-cost, min: 0, max: 100 }", "X-Cost: 0"),
        "200 200 200 200 200 "
    );
    attacks_held("judged", 1);
}
