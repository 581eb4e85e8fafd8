//! `POST /json`: the same service for whoever has no gRPC.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};

use tidegate_server::config::Config;
use tidegate_server::{Options, start};

fn post(at: SocketAddr, body: &str) -> (u16, String) {
    let mut stream = TcpStream::connect(at).unwrap();
    let length = body.len();
    write!(
        stream,
        "POST /json HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\ncontent-length: {length}\r\n\r\n{body}"
    )
    .unwrap();
    let mut text = String::new();
    stream.read_to_string(&mut text).unwrap();
    let (head, body) = text.split_once("\r\n\r\n").unwrap();
    assert!(head.to_ascii_lowercase().contains("content-type: application/json"), "{head}");
    (head.split(' ').nth(1).unwrap().parse().unwrap(), body.into())
}

#[test]
fn protobuf_as_json_is_answered_with_the_same() {
    let folder = tempfile::tempdir().unwrap();
    let domain = "\
domain: edge
descriptors:
  - { key: user, rate_limit: { unit: year, requests_per_unit: 2, name: yearly } }
  - { key: trial, shadow_mode: true, rate_limit: { unit: year, requests_per_unit: 1 } }
  - { key: vip, rate_limit: { unlimited: true } }
";
    std::fs::write(folder.path().join("edge.yaml"), domain).unwrap();
    let config = format!(
        "listen: {{ http: 127.0.0.1:0, grpc: off, resp: off }}\nenvoy: {{ config: {:?}, headers: [github], body: problem }}\n",
        folder.path()
    );
    let runtime =
        tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
    let running = runtime
        .block_on(start(Config::parse(&config, "test").unwrap(), Options::default()))
        .unwrap();
    let at = running.http.unwrap();
    let ask = |descriptors: &str| {
        post(at, &format!(r#"{{"domain":"edge","descriptors":[{descriptors}]}}"#))
    };

    let user = r#"{"entries":[{"key":"user","value":"a"}]}"#;
    let (status, body) = ask(user);
    assert_eq!(status, 200);
    let limit = r#""currentLimit":{"name":"yearly","requestsPerUnit":2,"unit":"YEAR"}"#;
    assert!(body.contains(r#""overallCode":"OK""#) && body.contains(limit), "{body}");
    assert!(
        body.contains(r#""limitRemaining":1"#) && body.contains(r#""durationUntilReset":""#),
        "{body}"
    );
    assert!(body.contains(r#"{"key":"x-ratelimit-remaining","value":"1"}"#), "{body}");
    // Long numbers may come in quotes, names in either style, and what is null is not there.
    let both = r#"{"entries":[{"key":"user","value":"a"}],"hitsAddend":"1","limit":null},{"entries":[{"key":"vip","value":"v"}],"hits_addend":7,"is_negative_hits":false}"#;
    let (status, body) = ask(both);
    assert!(
        status == 200 && body.contains(r#"{"code":"OK","limitRemaining":4294967295}"#),
        "{body}"
    );
    let (status, body) = ask(user);
    assert_eq!(status, 429);
    assert!(body.contains(r#""code":"OVER_LIMIT""#) && !body.contains("limitRemaining"), "{body}");
    assert!(body.contains(r#""rawBody":"eyJ"#), "a body of bytes is written in base64: {body}");
    let trial = r#"{"entries":[{"key":"trial","value":"t"}]}"#;
    assert!(!ask(trial).1.contains("dynamicMetadata"));
    let (status, body) = ask(trial);
    assert!(
        status == 200 && body.contains(r#""dynamicMetadata":{"shadow":["edge.trial"]}"#),
        "{body}"
    );
    let own =
        r#"{"entries":[{"key":"user","value":"b"}],"limit":{"requestsPerUnit":1,"unit":"MONTH"}}"#;
    assert!(ask(own).1.contains(r#""currentLimit":{"requestsPerUnit":1,"unit":"MONTH"}"#));
    assert_eq!(ask(&own.replace("\"MONTH\"", "5")).0, 429, "a unit by its number");

    for (body, expected) in [
        ("", "EOF"),
        ("[]", "expected struct"),
        (r#"{"domain":"","descriptors":[{}]}"#, "rate limit domain must not be empty"),
        (r#"{"domain":"edge"}"#, "rate limit descriptor list must not be empty"),
        (r#"{"domain":"edge","descriptors":[{"entires":[]}]}"#, "unknown field `entires`"),
        (
            r#"{"domain":"edge","descriptors":[{}],"hitsAddend":4294967296}"#,
            "4294967296 is too large",
        ),
        (r#"{"domain":"edge","descriptors":[{"hitsAddend":-1}]}"#, "-1"),
        (
            r#"{"domain":"edge","descriptors":[{"limit":{"unit":"FORTNIGHT"}}]}"#,
            "expected SECOND, MINUTE",
        ),
        (r#"{"domain":"edge","descriptors":[{"limit":{}}]}"#, "descriptors[0].limit.unit is 0"),
    ] {
        let (status, answer) = post(at, body);
        assert!(
            status == 400 && answer.starts_with(r#"{"code":3,"message":""#),
            "{body} answered {status} {answer}"
        );
        assert!(answer.contains(expected), "{body} answered {answer}");
    }
    assert!(runtime.block_on(running.stop()));
}
