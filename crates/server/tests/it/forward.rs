//! `/v1/auth` as gateways ask it: what they say is believed, what others say is not, and what is
//! missing is named.

use std::fmt::Write;
use std::net::SocketAddr;

use crate::listeners::{Answer, Listeners};

const RULES: &str = "\
trusted_proxies: [127.0.0.1, 10.0.0.0/8]
rules:
  - { name: per-ip, by: [ip], limit: 3/min }
  - { name: search, when: { method: POST, path: /search* }, by: [header.x-api-key], limit: 1/min }
  - { name: session, when: { path: /shop* }, by: [cookie.session, query.shop], limit: 1/min }
  - { name: people, when: { path: /me }, by: [bearer.sub], limit: 1/min }
  - { name: costly, when: { path: /export }, limit: 100/min, cost: { from: header.x-cost, max: 60 } }
  - { name: inside, when: { host: internal.example.com }, limit: deny }
  - { name: office, when: { ip: 2001:db8:7::/48 }, limit: deny }
  - { name: trial, mode: shadow, when: { path: /trial }, limit: 1/min }
";

/// Asks with these headers, a line each.
fn ask(at: SocketAddr, method: &str, headers: &str) -> Answer {
    let mut client = crate::listeners::Http::connect(at);
    let mut text = format!("{method} /v1/auth HTTP/1.1\r\nhost: localhost\r\n");
    for line in headers.lines().map(str::trim).filter(|line| !line.is_empty()) {
        write!(text, "{line}\r\n").unwrap();
    }
    client.send(&(text + "\r\n"));
    client.receive().expect("an answer")
}

/// As Caddy and Traefik ask.
fn asked(
    listeners: &Listeners,
    method: &str,
    host: &str,
    uri: &str,
    client: &str,
    more: &str,
) -> Answer {
    let headers = format!(
        "X-Forwarded-Method: {method}\nX-Forwarded-Proto: https\nX-Forwarded-Host: {host}\nX-Forwarded-Uri: {uri}\nX-Forwarded-For: {client}\n{more}"
    );
    ask(listeners.http, "GET", &headers)
}

fn header<'a>(answer: &'a Answer, name: &str) -> Option<&'a str> {
    answer.head.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(": "))
}

#[test]
fn who_may_pass_is_told_by_headers_and_who_may_not_by_a_short_answer() {
    let listeners = Listeners::in_memory(RULES);
    let ask = || asked(&listeners, "GET", "example.com", "/", "192.0.2.7", "");
    let answer = ask();
    assert_eq!((answer.status, answer.body.as_str()), (204, ""), "{answer:?}");
    assert_eq!(header(&answer, "ratelimit-policy"), Some("\"per-ip\";q=3;w=60"));
    assert_eq!(header(&answer, "ratelimit"), Some("\"per-ip\";r=2;t=20"));
    assert_eq!(
        (header(&answer, "x-ratelimit-remaining"), header(&answer, "retry-after")),
        (Some("2"), None)
    );
    assert_eq!(header(&answer, "cache-control"), Some("no-store"));
    assert_eq!((ask().status, ask().status), (204, 204));
    let answer = ask();
    assert_eq!((answer.status, header(&answer, "retry-after")), (429, Some("20")), "{answer:?}");
    assert_eq!(header(&answer, "ratelimit"), Some("\"per-ip\";r=0;t=20"));
    assert_eq!(header(&answer, "content-type"), Some("application/problem+json"));
    assert_eq!(
        answer.body,
        r#"{"type":"https://iana.org/assignments/http-problem-types#quota-exceeded","title":"Request cannot be satisfied as assigned quota has been exceeded","status":429,"detail":"Too many requests. Try again in 20 seconds.","violated-policies":["per-ip"],"retry_after_secs":20}"#
    );
    assert_eq!(
        asked(&listeners, "GET", "example.com", "/", "192.0.2.8", "").status,
        204,
        "everybody has a budget"
    );
}

#[test]
fn headers_and_denials_are_as_the_settings_and_the_client_say() {
    let listeners =
        Listeners::in_memory(&format!("http: {{ headers: [ietf], denial: json }}\n{RULES}"));
    let ask = |more: &str| asked(&listeners, "GET", "internal.example.com", "/", "192.0.2.7", more);
    let answer = ask("");
    assert_eq!(
        (answer.status, header(&answer, "content-type")),
        (403, Some("application/json")),
        "{answer:?}"
    );
    assert!(
        !answer.head.contains("ratelimit") && !answer.head.contains("retry-after"),
        "{answer:?}"
    );
    let passed = asked(&listeners, "GET", "example.com", "/", "192.0.2.7", "");
    assert!(
        header(&passed, "ratelimit").is_some() && !passed.head.contains("x-ratelimit"),
        "{passed:?}"
    );
    let answer = ask("Accept: text/plain");
    assert!(
        header(&answer, "content-type").is_some_and(|kind| kind.starts_with("text/plain")),
        "{answer:?}"
    );
}

#[test]
fn the_method_of_the_question_does_not_matter_and_no_body_is_read() {
    let listeners = Listeners::in_memory(RULES);
    let said = "X-Original-Method: GET\nX-Original-URI: /\nX-Forwarded-Host: a\nX-Forwarded-For: 192.0.2.7";
    for method in ["GET", "HEAD", "OPTIONS"] {
        assert_eq!(ask(listeners.http, method, said).status, 204, "{method}");
    }
    let denied = ask(listeners.http, "POST", &format!("{said}\nContent-Length: 0"));
    assert_eq!(denied.status, 429);
    let mut client = listeners.http();
    client.send(&format!(
        "PUT /v1/auth HTTP/1.1\r\nhost: a\r\n{}\r\ncontent-length: 9\r\n\r\n123456789",
        said.replace('\n', "\r\n")
    ));
    assert_eq!(client.receive().unwrap().status, 429);
}

#[test]
fn rules_see_the_request_that_the_gateway_was_sent() {
    let listeners = Listeners::in_memory(RULES);
    let mut last = 0;
    // Everybody is somebody else here, so that only the rule in question denies.
    let mut status = |method: &str, host: &str, uri: &str, more: &str| {
        last += 1;
        asked(&listeners, method, host, uri, &format!("198.51.100.{last}"), more).status
    };
    assert_eq!(status("POST", "a", "/search?q=1", "X-Api-Key: k"), 204);
    for (method, path) in [
        ("POST", "/search"),
        ("post", "//search"),
        ("POST", "/%73earch;v=1?free"),
        ("POST", "/search%3Bv=1"),
        ("POST", "/search#/free"),
    ] {
        assert_eq!(status(method, "a", path, "X-Api-Key: k"), 429, "{method} {path}");
    }
    assert_eq!(status("POST", "a", "/search", "X-Api-Key: other"), 204);
    assert_eq!(status("GET", "a", "/search", "X-Api-Key: k"), 204, "another method");
    assert_eq!(status("POST", "a", "/find?/search", "X-Api-Key: k"), 204, "a query is no path");
    for host in ["internal.example.com", "INTERNAL.example.com:8000", "internal.example.com."] {
        assert_eq!(status("GET", host, "/", ""), 403, "{host}");
    }
    assert_eq!(status("GET", "a", "/shop?shop=%31", "Cookie: a=b; session=x"), 204);
    assert_eq!(status("GET", "a", "/shop?z&shop=1", "Cookie: session=x"), 429);
    assert_eq!(status("GET", "a", "/shop?shop=2", "Cookie: session=x"), 204);
    // {"sub":"ann"}
    let token = "Authorization: Bearer eyJhbGciOiJub25lIn0.eyJzdWIiOiJhbm4ifQ.c2ln";
    assert_eq!((status("GET", "a", "/me", token), status("GET", "a", "/me", token)), (204, 429));
    assert_eq!(
        status("GET", "a", "/me", "Authorization: Bearer something"),
        204,
        "nobody in particular"
    );
    assert_eq!(status("GET", "a", "/export", "X-Cost: 99"), 204, "at most 60");
    assert_eq!(status("GET", "a", "/export", "X-Cost: 41"), 429);
    assert_eq!(status("GET", "a", "/export", "X-Cost: 40"), 204);
    assert_eq!(status("GET", "a", "/export", "X-Cost: much"), 400);
    assert_eq!(
        (status("GET", "a", "/trial", ""), status("GET", "a", "/trial", "")),
        (204, 204),
        "a shadow denies nothing"
    );
    // Networks of IPv6: a condition looks at the address, a budget is the network's.
    let from = |client: &str| asked(&listeners, "GET", "a", "/", client, "").status;
    assert_eq!(from("2001:db8:7:1::5"), 403);
    assert_eq!(
        [from("2001:db8::1"), from("2001:db8::2"), from("2001:db8::3"), from("2001:db8::4")],
        [204, 204, 204, 429]
    );
}

#[test]
fn targets_that_services_read_in_different_ways_are_refused_or_judged_as_the_settings_say() {
    let status = |listeners: &Listeners, uri: &str| {
        asked(listeners, "GET", "a", uri, "192.0.2.7", "").status
    };
    let rules = "trusted_proxies: [127.0.0.1]\nrules: [{ name: login, when: { path: /login }, limit: 1/h }]\n";
    let default = Listeners::in_memory(rules);
    let paths = "paths: { escaped_slashes: decode, dot_segments: resolve }\n";
    let rewriting = Listeners::in_memory(&format!("{paths}{rules}"));
    assert_eq!((status(&default, "/login"), status(&default, "/login")), (204, 429));
    assert_eq!((status(&rewriting, "/login"), status(&rewriting, "/login")), (204, 429));
    for (uri, judged) in [
        ("/%2flogin", 429),
        ("/x/..%2flogin", 429),
        ("/x/../login", 429),
        ("/x/..;a=1/login", 429),
        ("http://a/x/%2E%2e/login?q", 429),
        ("/x\\login", 400),
        ("/login%00", 400),
    ] {
        let answer = asked(&default, "GET", "a", uri, "192.0.2.7", "");
        assert!(answer.status == 400 && answer.body.contains("expected"), "{uri}: {answer:?}");
        assert_eq!(status(&rewriting, uri), judged, "{uri}");
    }
    let keeping = Listeners::in_memory(&format!(
        "paths: {{ escaped_slashes: keep, dot_segments: keep }}\n{rules}"
    ));
    assert_eq!(
        (status(&keeping, "/x/../login"), status(&keeping, "/./login")),
        (204, 429),
        "the service resolves them"
    );
    assert_eq!(status(&keeping, "/%2flogin"), 204, "the service does not decode it");
}

#[test]
fn what_a_rule_names_is_there_once_and_under_one_name() {
    let rules = "\
trusted_proxies: [127.0.0.1]
headers: { lists: [x-tags] }
rules:
  - { name: key, by: [header.x-api-key], missing: skip, limit: 1/h }
  - { name: session, by: [cookie.session], missing: skip, limit: 1/h }
  - { name: k, by: [query.k], missing: skip, limit: 1/h }
  - { name: tags, by: [header.x-tags], missing: skip, limit: 1/h }
";
    let listeners = Listeners::in_memory(rules);
    let ask = |uri: &str, more: &str| asked(&listeners, "GET", "a", uri, "192.0.2.7", more);
    for (uri, more) in [
        ("/", "X-Api-Key: K"),
        ("/", "Cookie: session=S"),
        ("/?k=K", ""),
        ("/", "X-Tags: a\nX-Tags: b"),
    ] {
        assert_eq!((ask(uri, more).status, ask(uri, more).status), (204, 429), "{uri} {more}");
    }
    for more in ["Cookie: session=\"S\"", "Cookie: a=\u{e9}; session=S", "X-Tags: a, b"] {
        assert_eq!(ask("/", more).status, 429, "{more}");
    }
    for (uri, more, expected) in [
        ("/", "X-Api-Key: K\nX-Api-Key: r17", "header x-api-key is there more than once"),
        ("/", "X-Api-Key: r17\nX_Api_Key: K", "header x_api_key is x-api-key to some services"),
        ("/", "X-Api-Key: r17\nConnection: x-api-key", "header Connection names x-api-key"),
        ("/", "Cookie: session=r1; session=S", "cookie session is there more than once"),
        ("/?k=r1&%6B=K", "", "query parameter k is there more than once"),
    ] {
        let answer = ask(uri, more);
        assert!(answer.status == 400 && answer.body.contains(expected), "{uri} {more}: {answer:?}");
    }
    let listeners =
        Listeners::in_memory(&rules.replace("headers: {", "headers: { underscores: keep,"));
    let more = "X-Api-Key: r17\nX_Api_Key: K";
    assert_eq!(asked(&listeners, "GET", "a", "/", "192.0.2.7", more).status, 204, "as it is set");
}

#[test]
fn the_client_is_the_last_that_somebody_trusted_has_seen() {
    let listeners = Listeners::in_memory(RULES);
    let from = |forwarded: &str| asked(&listeners, "GET", "a", "/", forwarded, "").status;
    for made_up in ["1.1.1.1, 192.0.2.7", "2.2.2.2, 192.0.2.7", "unknown, 192.0.2.7, 10.0.0.1"] {
        assert_eq!(from(made_up), 204, "{made_up}");
    }
    assert_eq!(from("3.3.3.3, 192.0.2.7"), 429, "whatever stands left of it");
    let victim = "192.0.2.9";
    assert_eq!(from(&format!("{victim}, 192.0.2.7")), 429);
    assert_eq!(from(victim), 204, "nobody else was charged");
    // Other headers that name an address are not believed.
    let more = "X-Real-IP: 4.4.4.4\nForwarded: for=5.5.5.5\nTrue-Client-IP: 6.6.6.6";
    assert_eq!(asked(&listeners, "GET", "a", "/", "192.0.2.7", more).status, 429);
}

#[test]
fn another_header_may_be_the_one_that_is_believed() {
    let listeners = Listeners::in_memory(&format!("client_ip: {{ header: forwarded }}\n{RULES}"));
    let ask = |more: &str| asked(&listeners, "GET", "a", "/", "1.1.1.1", more);
    let answer = ask("");
    assert!(answer.status == 400 && answer.body.contains("forwarded is missing"), "{answer:?}");
    let status = |client: &str| ask(&format!("Forwarded: for={client}")).status;
    assert_eq!([1, 2, 3, 4].map(|_| status("192.0.2.7")), [204, 204, 204, 429]);
    assert_eq!(status("192.0.2.8"), 204);
}

#[test]
fn what_a_gateway_forgets_or_lets_through_is_a_mistake_and_never_a_pass() {
    let listeners = Listeners::in_memory(RULES);
    let whole = "X-Forwarded-Method: GET\nX-Forwarded-Uri: /\nX-Forwarded-Host: a\nX-Forwarded-For: 192.0.2.7";
    for line in whole.lines() {
        let answer = ask(listeners.http, "GET", &whole.replace(line, ""));
        let name = line.split(':').next().unwrap().to_ascii_lowercase();
        assert!(
            answer.status == 400 && answer.body.contains(&format!("{name} is missing: expected")),
            "{answer:?}"
        );
    }
    let long = format!("X-Forwarded-Uri: /{}", "a".repeat(8192));
    for (line, instead) in [
        ("X-Forwarded-Uri: /", "X-Forwarded-Uri: /\nX-Original-URI: /free"),
        ("X-Forwarded-Uri: /", "X-Forwarded-Uri: /\nX-Forwarded-Uri: /free"),
        ("X-Forwarded-Uri: /", "X-Forwarded-Uri: /\nX-Original-URL: http://a/free"),
        ("X-Forwarded-Uri: /", "X-Forwarded-Uri: search"),
        ("X-Forwarded-Uri: /", &long),
        ("X-Forwarded-Method: GET", "X-Forwarded-Method: GET\nX-Original-Method: POST"),
        ("X-Forwarded-Method: GET", "X-Forwarded-Method: GET, POST"),
        ("X-Forwarded-Host: a", "X-Forwarded-Host: a\nX-Forwarded-Host: b"),
        ("X-Forwarded-Host: a", "X-Forwarded-Host: a, b"),
    ] {
        let answer = ask(listeners.http, "GET", &whole.replacen(line, instead, 1));
        assert!(answer.status == 400 && answer.body.contains("expected"), "{instead}: {answer:?}");
    }
    assert_eq!(ask(listeners.http, "GET", whole).status, 204, "and none of it was charged");
    assert_eq!(header(&ask(listeners.http, "GET", whole), "x-ratelimit-remaining"), Some("1"));
}

#[test]
fn only_trusted_peers_speak_for_others() {
    let whole = "X-Forwarded-Method: GET\nX-Forwarded-Uri: /\nX-Forwarded-Host: a\nX-Forwarded-For: 192.0.2.7";
    for rules in ["", "trusted_proxies: [10.0.0.0/8]\n"] {
        let listeners = Listeners::in_memory(rules);
        let answer = ask(listeners.http, "GET", whole);
        assert!(
            answer.status == 403 && answer.body.contains("expected a peer in trusted_proxies"),
            "{answer:?}"
        );
        assert!(
            !answer.body.contains("127.0.0.1"),
            "where the gateway is, is in the log: {answer:?}"
        );
        let mut client = listeners.http();
        client.send("GET /metrics HTTP/1.1\r\nhost: localhost\r\n\r\n");
        let page = client.receive().unwrap().body;
        assert!(
            page.lines().any(|line| line.contains("untrusted")
                && line.contains("http")
                && line.ends_with(" 1")),
            "{page}"
        );
    }
}

#[test]
fn the_token_of_the_protocol_has_a_header_of_its_own() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("token");
    std::fs::write(&file, "s3cret\n").unwrap();
    let whole = "X-Forwarded-Method: GET\nX-Forwarded-Uri: /\nX-Forwarded-Host: a\nX-Forwarded-For: 192.0.2.7";
    let with = |tokens: &str| {
        let file = file.display();
        Listeners::in_memory(&format!(
            "tokens: {{ {tokens}: {file} }}\n{}",
            RULES.replace("limit: 3/min", "limit: 100/min")
        ))
    };
    let status = |listeners: &Listeners, more: &str| {
        ask(listeners.http, "GET", &format!("{whole}\n{more}")).status
    };
    let listeners = with("check_file");
    assert_eq!(status(&listeners, "X-Tidegate-Token: s3cret"), 204);
    assert_eq!(
        status(&listeners, "X-Tidegate-Token: s3cret\nAuthorization: Bearer of-the-client"),
        204
    );
    let answer = ask(listeners.http, "GET", &format!("{whole}\nAuthorization: Bearer s3cret"));
    assert!(answer.status == 401 && answer.body.contains("X-Tidegate-Token"), "{answer:?}");
    assert_eq!(status(&listeners, "X-Tidegate-Token: guess"), 401);
    // Where only admin calls need one, what clients have for authorization is no guess at it,
    // however often it comes.
    let listeners = with("admin_file");
    for _ in 0..30 {
        assert_eq!(status(&listeners, "Authorization: Bearer of-the-client"), 204);
    }
}
