//! Clients and targets of requests: the tables in `testdata/http/`, and laws that hold of any text.

use std::borrow::Cow;
use std::net::IpAddr;

use proptest::prelude::*;
use tidegate::http::{
    ClientIp, DotSegments, EscapedSlashes, Found, MAX_PATH_BYTES, PathPolicy, TrustedProxies,
    group, normal_host, normal_path,
};

/// The rows of a table, each with its number and both sides of the arrow.
fn rows(table: &str) -> impl Iterator<Item = (usize, &str, &str)> {
    table
        .lines()
        .enumerate()
        .filter(|(_, line)| !line.trim().is_empty() && !line.starts_with('#'))
        .map(|(index, line)| {
            let (left, right) = line.rsplit_once("->").unwrap_or((line, ""));
            (index + 1, left, right.trim())
        })
}

/// Writes out `{TEXT}*N`, `{TEXT}+N` and `{tab}`.
fn written_out(text: &str) -> String {
    let text = text.replace("{tab}", "\t");
    let Some((before, rest)) = text.split_once('{') else { return text };
    let (piece, rest) = rest.split_once('}').unwrap();
    let (between, rest) =
        if let Some(rest) = rest.strip_prefix('*') { (", ", rest) } else { ("", &rest[1..]) };
    let end = rest.find(|char: char| !char.is_ascii_digit()).unwrap_or(rest.len());
    let times: usize = rest[..end].parse().unwrap();
    format!("{before}{}{}", vec![piece; times].join(between), &rest[end..])
}

fn word(found: Found) -> &'static str {
    match found {
        Found::Peer => "peer",
        Found::Hop => "hop",
        Found::LastHop => "last",
        Found::Unreadable => "unreadable",
        Found::TooManyHops => "many",
    }
}

#[test]
fn clients_are_found_as_the_table_says() {
    let mut trusted = TrustedProxies::none();
    let mut believed = "x-forwarded-for".to_string();
    let mut vectors = 0;
    for (number, left, right) in rows(include_str!("../../../../testdata/http/client-ip.txt")) {
        if let Some(list) = left.strip_prefix("trust:") {
            trusted = list.parse().unwrap();
            continue;
        }
        if let Some(name) = left.strip_prefix("believe:") {
            believed = name.trim().to_lowercase();
            continue;
        }
        let clients = ClientIp::behind(trusted.clone()).header(&believed).unwrap();
        let mut parts = left.split(" |");
        let peer = parts.next().unwrap().trim();
        let peer: IpAddr = peer.split('%').next().unwrap().parse().unwrap();
        let lines: Vec<(String, String)> = parts
            .map(|line| {
                let line = line.strip_prefix(' ').unwrap_or(line);
                let named =
                    ["X-Forwarded-For: ", "Forwarded: ", "X-Real-IP: "].iter().find_map(|name| {
                        Some((name.trim_end_matches(": ").to_lowercase(), line.strip_prefix(name)?))
                    });
                let (name, value) = named.unwrap_or((believed.clone(), line));
                (name, written_out(value.trim_end_matches(' ')))
            })
            .collect();
        let own =
            lines.iter().filter(|(name, _)| *name == believed).map(|(_, value)| value.as_bytes());
        let client = clients.find(peer, own.collect::<Vec<_>>());
        assert_eq!(
            format!("{} {}", client.ip(), word(client.found())),
            right,
            "line {number}: {left}"
        );
        #[cfg(feature = "http")]
        {
            let mut headers = http::HeaderMap::new();
            for (name, value) in &lines {
                let name: http::HeaderName = name.parse().unwrap();
                headers.append(name, http::HeaderValue::from_bytes(value.as_bytes()).unwrap());
            }
            assert_eq!(clients.find_in(peer, &headers), client, "line {number}, from headers");
        }
        vectors += 1;
    }
    assert!(vectors >= 150, "{vectors} vectors");
}

/// Each address may be written with blanks around it, up to a length.
#[test]
fn a_hop_is_read_up_to_1024_bytes() {
    let clients = ClientIp::behind("10.0.0.0/8".parse().unwrap());
    for (bytes, expected) in
        [(1_024, ("192.0.2.7", Found::Hop)), (1_025, ("10.0.0.1", Found::Unreadable))]
    {
        let line = format!("203.0.113.9,{:>bytes$}", "192.0.2.7");
        let client = clients.find("10.0.0.1".parse().unwrap(), [line.as_bytes()]);
        assert_eq!((&*client.ip().to_string(), client.found()), expected, "{bytes} bytes");
    }
}

#[test]
fn addresses_share_a_budget_as_the_table_says() {
    for (number, left, right) in rows(include_str!("../../../../testdata/http/groups.txt")) {
        let (address, prefix) = left.trim().split_once(' ').unwrap();
        let key = group(address.parse().unwrap(), prefix.parse().unwrap());
        assert_eq!(key.to_string(), right, "line {number}: {left}");
    }
}

#[test]
fn paths_have_one_spelling() {
    let mut vectors = 0;
    for (number, left, right) in rows(include_str!("../../../../testdata/http/paths.txt")) {
        let path = left.strip_suffix(' ').unwrap().replace("<empty>", "");
        let normal = normal_path(&path).unwrap();
        assert_eq!(normal, right, "line {number}: {left}");
        assert_eq!(
            normal_path(&normal).unwrap(),
            right,
            "line {number}: the normal form of a normal form is itself"
        );
        vectors += 1;
    }
    assert!(vectors >= 80, "{vectors} vectors");
    let long = "/x".repeat(MAX_PATH_BYTES / 2);
    assert_eq!(normal_path(&long).unwrap(), long);
    let error = normal_path(&format!("{long}y")).unwrap_err();
    assert_eq!(error.to_string(), "a path of 8193 bytes: expected at most 8192");
    assert!(normal_path(&format!("/x?{long}")).is_ok(), "a long query is no long path");
}

/// Most paths are as they should be: no copy is made of them.
#[test]
fn a_path_that_is_normal_is_not_copied() {
    for path in ["/", "/v1/search", "/v1/search?q=/../x", "/a.b/c~d/", "/A:b@c/1,2", "*"] {
        let normal = normal_path(path).unwrap();
        assert!(matches!(normal, Cow::Borrowed(_)), "{path}: {normal}");
    }
    let policy =
        PathPolicy { escaped_slashes: EscapedSlashes::Decode, dot_segments: DotSegments::Resolve };
    for target in ["/v1/search", "/v1/search?q=%2f", "/v1/%73earch", "/a//b?c", "*"] {
        let read = policy.read(target).unwrap();
        assert!(matches!(read.sent, Cow::Borrowed(_)), "{target}: goes on as it came");
    }
}

#[test]
fn hosts_have_one_spelling() {
    for (number, left, right) in rows(include_str!("../../../../testdata/http/hosts.txt")) {
        let normal = normal_host(left.trim()).unwrap();
        assert_eq!(normal, right, "line {number}: {left}");
        assert_eq!(normal_host(&normal).unwrap(), right, "line {number}, again");
    }
    assert!(normal_host(&"x".repeat(512)).is_ok());
    assert!(normal_host(&"x".repeat(513)).unwrap_err().to_string().contains("a host of 513 bytes"));
}

#[test]
fn invalid_settings_name_the_value() {
    let clients = || ClientIp::of_peer();
    assert!(clients().header("x forwarded").unwrap_err().to_string().contains("\"x forwarded\""));
    assert!(clients().header("").is_err());
    assert!(
        clients().header(&"x".repeat(256)).is_ok() && clients().header(&"x".repeat(257)).is_err()
    );
    assert_eq!(
        clients().ipv6_prefix(31).unwrap_err().to_string(),
        "an IPv6 prefix of 31 bits: expected 32 to 128"
    );
    assert!(clients().ipv6_prefix(129).is_err());
    assert_eq!(
        clients()
            .ipv6_prefix(56)
            .unwrap()
            .find("2001:db8::1".parse().unwrap(), [])
            .group()
            .to_string(),
        "2001:db8::/56"
    );
}

#[test]
fn settings_can_be_read_back() {
    let trusted: TrustedProxies = "10.0.0.0/8, 2001:db8::1".parse().unwrap();
    let clients = ClientIp::behind(trusted.clone());
    assert_eq!(
        (clients.header_name(), clients.prefix(), clients.trusted()),
        ("x-forwarded-for", 64, &trusted)
    );
    let clients = clients.header("CF-Connecting-IP").unwrap().ipv6_prefix(56).unwrap();
    assert_eq!((clients.header_name(), clients.prefix()), ("cf-connecting-ip", 56));
    assert!(!trusted.is_empty() && TrustedProxies::none().is_empty());
    let networks: Vec<_> =
        trusted.networks().iter().map(|one| (one.address().to_string(), one.prefix())).collect();
    assert_eq!(networks, [("10.0.0.0".to_string(), 8), ("2001:db8::1".to_string(), 128)]);
}

/// One of the ways in which a character can be written that all mean the same.
fn spelling() -> impl Strategy<Value = (char, u8)> {
    (
        prop::sample::select(('a'..='z').chain("AZ09-._~:@!$&'()*+,=".chars()).collect::<Vec<_>>()),
        0..4u8,
    )
}

proptest! {
    /// RFC 3986, section 6.2.2: escapes, their case and dot segments make no difference.
    #[test]
    fn equivalent_paths_are_the_same(segments in prop::collection::vec((prop::collection::vec(spelling(), 1..6), 0..6u8), 1..6)) {
        let (mut plain, mut odd) = (String::new(), String::new());
        for (chars, before) in &segments {
            let text: String = chars.iter().map(|(char, _)| *char).collect();
            if text == "." || text == ".." {
                continue;
            }
            odd.push_str(match before { 0 => "/x/..", 1 => "/.", 2 => "/", 3 => "/%2E", 4 => "/y/%2e.;v", _ => "" });
            plain.push('/');
            odd.push('/');
            plain.push_str(&text);
            for (char, how) in chars {
                match how {
                    0 => odd.push_str(&format!("%{:02x}", u32::from(*char))),
                    1 => odd.push_str(&format!("%{:02X}", u32::from(*char))),
                    _ => odd.push(*char),
                }
            }
        }
        let expected = if plain.is_empty() { "/" } else { &plain };
        prop_assert_eq!(normal_path(&plain).unwrap(), expected);
        prop_assert_eq!(normal_path(&odd).unwrap(), expected, "{}", odd);
    }

    /// Every normalized path has one spelling and no parent segments.
    #[test]
    fn any_text_has_a_normal_form(path in "[/.%;a25eEfF?é \\\\]{0,40}") {
        let normal = normal_path(&path).unwrap().into_owned();
        prop_assert_eq!(normal_path(&normal).unwrap(), normal.as_str());
        prop_assert!(normal.starts_with('/') && normal.is_ascii(), "{}", normal);
        prop_assert!(!normal.contains("//") && !normal.split('/').any(|segment| segment == "." || segment == ".."), "{}", normal);
        prop_assert!(normal.len() <= 3 * path.len() + 1);
    }

    /// Whatever stands in the header, the client is the peer, a trusted hop or the right-most other
    /// one; and nothing that is put before it changes that.
    #[test]
    fn what_a_client_writes_does_not_move_it(
        lie in "[0-9a-f.:,;=\"\\\\ \\[\\]for_unkw]{0,60}",
        forwarded in any::<bool>(),
        proxies in 0..4usize,
    ) {
        let name = if forwarded { "forwarded" } else { "x-forwarded-for" };
        let clients = ClientIp::behind("10.0.0.0/8".parse().unwrap()).header(name).unwrap();
        let hop = |address: &str| if forwarded { format!("for={address}") } else { address.to_string() };
        let mut line = format!("{lie},{}", hop("192.0.2.7"));
        for _ in 0..proxies {
            line.push_str(&format!(", {}", hop("10.0.0.2")));
        }
        let client = clients.find("10.0.0.1".parse().unwrap(), [line.as_bytes()]);
        prop_assert_eq!((client.ip().to_string(), client.found()), ("192.0.2.7".to_string(), Found::Hop), "{}", line);
    }

    /// Any bytes are read to an end.
    #[test]
    fn any_bytes_are_read(line in prop::collection::vec(any::<u8>(), 0..200), forwarded in any::<bool>()) {
        let name = if forwarded { "forwarded" } else { "x-forwarded-for" };
        let clients = ClientIp::behind("0.0.0.0/0".parse().unwrap()).header(name).unwrap();
        let _ = clients.find("10.0.0.1".parse().unwrap(), [&line[..]]);
    }
}
