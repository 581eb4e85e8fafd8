//! What must hold for any bytes that a client sends, as functions that panic where it does not. The
//! targets in `tools/fuzz/` call them, and so does a test with inputs made from the same seeds.
//! Only there with the feature `fuzzing`.

use std::net::IpAddr;
use std::time::Duration;

use axum::http::{HeaderMap, HeaderName, HeaderValue};
use prost::Message;
use rustix::time::{ClockId, clock_gettime};
use tidegate::http::{ClientIp, Found};
use tidegate::redis::{Connect, Connecting, Link, Redis};
use tidegate::{Check, Limits, ManualClock, Memory, Store, Timestamp};
use tokio::io::{AsyncReadExt, AsyncWriteExt, duplex};
use tokio::sync::watch;

use crate::backend::Backend;
use crate::config::Config;
use crate::engine::Engine;
use crate::grpc::message::{RateLimitRequest, RateLimitResponse};
use crate::resp;
use crate::rules::envoy::Domains;
use crate::{grpc, http};

/// The longest that any input may take, in time of the processor.
const LONGEST: Duration = Duration::from_secs(5);

/// Measures the time that the processor spent on this thread: on a busy machine, the time on the
/// wall says more about the machine than about the input.
struct Stopwatch(Duration);

impl Stopwatch {
    fn start() -> Self {
        Stopwatch(spent())
    }

    fn check(&self) {
        let took = spent().saturating_sub(self.0);
        assert!(took < LONGEST, "the input took {took:?} of the processor");
    }
}

fn spent() -> Duration {
    let time = clock_gettime(ClockId::ThreadCPUTime);
    let (secs, nanos) = (u64::try_from(time.tv_sec), u32::try_from(time.tv_nsec));
    Duration::new(secs.unwrap_or_default(), nanos.unwrap_or_default())
}

/// A function that any bytes may be given to.
pub type Target = fn(&[u8]);

/// All targets and their names, as in `tools/fuzz/fuzz_targets/`.
pub const TARGETS: [(&str, Target); 11] = [
    ("resp", resp),
    ("json", json),
    ("rules", rules),
    ("envoy", envoy),
    ("rls", rls),
    ("limits", limits),
    ("xff_ip", xff_ip),
    ("forward", forward),
    ("snapshot_load", snapshot_load),
    ("redis_reply", redis_reply),
    ("redis_peer", redis_peer),
];

/// Bytes sent to the RESP listener in pieces: each complete command has one reply, wherever the
/// cuts are, and the reply is the one that the command has by itself.
///
/// The first byte says how large the pieces are.
pub fn resp(data: &[u8]) {
    let Some((first, stream)) = data.split_first() else { return };
    let expected = resp::count_commands(stream);
    let answers = block_on(async {
        let (protocol, client) = duplex(1 << 16);
        let (mut from, mut to) = tokio::io::split(client);
        let (stop, stopped) = watch::channel(false);
        let talk = tokio::spawn(resp::serve_in_memory(protocol, engine(), stopped));
        let piece = match first % 4 {
            0 => 1,
            1 => 1 + usize::from(first / 4),
            2 => 1000,
            _ => stream.len().max(1),
        };
        let mut answers = Vec::new();
        let mut buffer = [0; 4096];
        for piece in stream.chunks(piece) {
            // Replies are read while more is sent: the listener stops reading from a client that
            // does not read.
            let mut sent = 0;
            while sent < piece.len() {
                tokio::select! {
                    biased;
                    read = from.read(&mut buffer) => match read {
                        Ok(0) | Err(_) => break,
                        Ok(read) => answers.extend_from_slice(&buffer[..read]),
                    },
                    wrote = to.write(&piece[sent..]) => match wrote {
                        Ok(wrote) => sent += wrote,
                        Err(_) => break,
                    },
                }
            }
        }
        let _ = to.shutdown().await;
        let _ = from.read_to_end(&mut answers).await;
        let talked = talk.await;
        drop(stop);
        assert!(talked.is_ok(), "the connection's task panicked");
        answers
    });
    assert!(
        answers.len() <= stream.len() + 1024 * (expected + 1),
        "{} bytes of answers",
        answers.len()
    );
    let mut rest = &answers[..];
    let mut values = 0;
    while !rest.is_empty() {
        rest = after_value(rest, 0).unwrap_or_else(|| panic!("no value: {}", rest.escape_ascii()));
        values += 1;
    }
    assert_eq!(values, expected, "{} answered {}", stream.escape_ascii(), answers.escape_ascii());
    // Numbers of reservations and leases are drawn anew each time.
    let text = stream.to_ascii_uppercase();
    if ![&b"RESERVE"[..], b"LEASE"]
        .iter()
        .any(|word| text.windows(word.len()).any(|part| part == *word))
    {
        let alone = block_on(resp::answers_one_by_one(stream, engine()));
        assert_eq!(
            answers.escape_ascii().to_string(),
            alone.escape_ascii().to_string(),
            "{}",
            stream.escape_ascii()
        );
    }
}

/// What follows the first value; a reader of its own, which shares nothing with what writes.
fn after_value(bytes: &[u8], depth: usize) -> Option<&[u8]> {
    let end = bytes.windows(2).position(|two| two == b"\r\n")?;
    let (line, mut rest) = (std::str::from_utf8(&bytes[1..end]).ok()?, &bytes[end + 2..]);
    match bytes[0] {
        b'+' | b'-' if line.bytes().all(|byte| (b' '..=b'~').contains(&byte)) => Some(rest),
        b':' => line.parse::<i64>().ok().map(|_| rest),
        b'_' if line.is_empty() => Some(rest),
        b'$' if line == "-1" => Some(rest),
        b'$' => {
            let length: usize = line.parse().ok()?;
            rest.get(length..)?.strip_prefix(b"\r\n")
        }
        b'*' | b'%' if depth < 4 => {
            let each = if bytes[0] == b'%' { 2 } else { 1 };
            for _ in 0..each * line.parse::<usize>().ok()? {
                rest = after_value(rest, depth + 1)?;
            }
            Some(rest)
        }
        _ => None,
    }
}

/// A body for every path: an answer, always, that is JSON.
pub fn json(data: &[u8]) {
    let stopwatch = Stopwatch::start();
    block_on(async {
        let engine = engine();
        for (status, body) in http::answer_every_verb(&engine, data).await {
            assert!([200, 400, 403, 429].contains(&status), "{status}");
            assert!(
                serde_json::from_slice::<serde_json::Value>(&body).is_ok(),
                "{}",
                body.escape_ascii()
            );
        }
    });
    stopwatch.check();
}

/// A rules file: rules, or an error that says where.
pub fn rules(data: &[u8]) {
    let Ok(text) = std::str::from_utf8(data) else { return };
    let stopwatch = Stopwatch::start();
    match Config::parse(text, "file") {
        Ok(config) => {
            let request =
                [("ip", "192.0.2.7"), ("path", "/v1/search"), ("user", "ann"), ("cost", "7")];
            let _ = config.rules.matching(&request[..], 1);
        }
        Err(error) => assert!(error.to_string().starts_with("file:"), "{error}"),
    }
    stopwatch.check();
}

/// A file of envoyproxy/ratelimit: a domain, or an error that says where.
pub fn envoy(data: &[u8]) {
    let Ok(text) = std::str::from_utf8(data) else { return };
    let stopwatch = Stopwatch::start();
    let mut domains = Domains::default();
    match domains.add(text, "file") {
        Ok(()) => {
            for name in domains.names() {
                let _ = domains.find(name, &[("key", "value"), ("other", "value")], 1);
            }
        }
        Err(error) => assert!(!error.to_string().is_empty()),
    }
    stopwatch.check();
}

/// A message of Envoy's protocol, for a domain of rules and for one of its own configuration: no
/// message, an error, or an answer with a status for each descriptor that reads as it was written.
pub fn rls(data: &[u8]) {
    const DOMAIN: &str = "domain: edge\ndescriptors:\n  - key: user\n    rate_limit: { unit: minute, requests_per_unit: 3 }\n  - key: path\n    value: /x\n    descriptors: [{ key: user, rate_limit: { unlimited: true } }]\n";
    let stopwatch = Stopwatch::start();
    let Ok(request) = RateLimitRequest::decode(data) else { return };
    block_on(async {
        let engine = engine();
        let mut domains = Domains::default();
        domains.add(DOMAIN, "domain").expect("a domain that is right");
        engine.set_domains(domains);
        for domain in [None, Some("rules"), Some("edge")] {
            let mut request = request.clone();
            if let Some(domain) = domain {
                request.domain = domain.into();
            }
            let Ok(answer) = grpc::decide::decide(&engine, &request).await else { continue };
            assert_eq!(answer.statuses.len(), request.descriptors.len());
            let written = answer.encode_to_vec();
            assert!(
                written.len() <= 4096 * (request.descriptors.len() + 1),
                "{} bytes of an answer",
                written.len()
            );
            assert_eq!(RateLimitResponse::decode(&written[..]).as_ref(), Ok(&answer));
        }
    });
    stopwatch.check();
}

/// Limits in the notation: what is read is written again so that it means the same, and decides.
pub fn limits(data: &[u8]) {
    let Ok(text) = std::str::from_utf8(data) else { return };
    let Ok(limits) = text.parse::<Limits>() else { return };
    let written = limits.to_string();
    assert_eq!(written.parse::<Limits>().as_ref(), Ok(&limits), "{text:?} is written {written:?}");
    let check = tidegate::Check::new().charge("key", &limits, 1);
    let clock = ManualClock::new();
    clock.set(Timestamp::from_secs(1_700_000_000));
    let memory = Memory::builder().clock(clock).max_keys(100).build();
    assert!(memory.decide(&check).is_ok() || limits.as_slice().len() > 64, "{written}");
}

/// A snapshot. Its checksums are corrected first, because the loader reads nothing else of a block
/// with a wrong one. What is loaded can be saved and loaded again, and decides.
pub fn snapshot_load(data: &[u8]) {
    const HEADER: usize = 16;
    let mut file = data.to_vec();
    let mut at = 16;
    while let Some(header) = file.get(at..at + HEADER) {
        let length = u32::from_le_bytes([header[4], header[5], header[6], header[7]]) as usize;
        let from = at + HEADER;
        let bytes = &file[from..from.saturating_add(length).min(file.len())];
        let (checksum, next) = (crc32fast::hash(bytes).to_le_bytes(), from + bytes.len());
        file[at + 8..at + 12].copy_from_slice(&checksum);
        let own = crc32fast::hash(&file[at..at + 12]).to_le_bytes();
        file[at + 12..at + 16].copy_from_slice(&own);
        at = next;
    }
    let clock = ManualClock::new();
    clock.set(Timestamp::from_secs(1_700_000_000));
    let builder = Memory::builder().clock(clock.clone()).max_keys(1000);
    let Ok((memory, loaded)) = builder.clone().load(&mut &file[..]) else { return };
    assert_eq!(memory.len() as u64, loaded.keys, "{loaded:?}");
    let mut saved = Vec::new();
    let written = memory.save(&mut saved).expect("a list has room");
    assert_eq!(written.keys, loaded.keys);
    let (again, reloaded) = builder.load(&mut &saved[..]).expect("what was saved can be loaded");
    assert!(
        reloaded.is_complete() && reloaded.keys == loaded.keys,
        "{loaded:?}, then {reloaded:?}"
    );
    for limit in SAVED_LIMITS {
        let limit = limit.parse().expect("a limit");
        for step in 0..3 {
            let key = format!("key:{step}");
            assert_eq!(
                memory.check(&key, &limit, step),
                again.check(&key, &limit, step),
                "{limit}"
            );
            clock.advance(std::time::Duration::from_secs(1 + 7_000 * step));
        }
    }
}

/// What the seeds of [`snapshot_load`] were saved with: keys `key:0` to `key:2` under each.
pub const SAVED_LIMITS: [&str; 7] = [
    "100/d",
    "90/d window",
    "85/d window from first hit",
    "80/d sliding",
    "70/d estimate",
    "60/d log",
    "50 concurrent ttl 1d",
];

/// Who is trusted in [`xff_ip`] and [`forward`].
const TRUSTED: &str = "10.0.0.0/8, 127.0.0.1, 2001:db8::/32";

/// Lines of the header with the client's address: it is ignored from an untrusted peer, and nothing
/// further left changes what is found on the right.
///
/// The first byte selects the header and the peer.
pub fn xff_ip(data: &[u8]) {
    let Some((first, rest)) = data.split_first() else { return };
    let plain = first & 1 == 0;
    let clients = ClientIp::behind(TRUSTED.parse().expect("networks"));
    let clients =
        clients.header(if plain { "x-forwarded-for" } else { "forwarded" }).expect("a header");
    let lines: Vec<&[u8]> = rest.split(|byte| *byte == b'\n').collect();
    let untrusted: IpAddr = [198, 51, 100, 1].into();
    let found = clients.find(untrusted, lines.iter().copied());
    assert_eq!((found.ip(), found.found()), (untrusted, Found::Peer));
    let peer: IpAddr = if first & 2 == 0 {
        [10, 0, 0, 1].into()
    } else {
        [0x2001, 0xdb8, 0, 0, 0, 0, 0, 1].into()
    };
    let found = clients.find(peer, lines.iter().copied());
    assert_eq!(clients.trusts(found.ip()), found.found() != Found::Hop, "{found:?}");
    assert_eq!(found.ip(), found.ip().to_canonical(), "{found:?}");
    assert_ne!(found.found(), Found::Peer, "there is a line, so there is a hop");
    if plain {
        let joined = lines.join(&b","[..]);
        assert_eq!(clients.find(peer, [&joined[..]]), found, "several lines are one list");
    }
    if found.found() != Found::LastHop {
        // A hop further out can write anything.
        for lie in ["203.0.113.77", "for=203.0.113.77", "\"", "for=\"", "\\", ",,,", "10.0.0.2"] {
            let with = [&[lie.as_bytes()], &lines[..]].concat();
            assert_eq!(clients.find(peer, with), found, "{lie:?} before it");
            let longer = [lie.as_bytes(), b", ", lines[0]].concat();
            let with = [&[&longer[..]], &lines[1..]].concat();
            let other = clients.find(peer, with);
            // What was the end of the line may be a hop of its own now, if it could not be read for
            // want of an end.
            assert!(
                other == found || found.found() == Found::Unreadable,
                "{lie:?}: {other:?}, not {found:?}"
            );
        }
    }
}

/// Headers of a forward-auth request, one per line: each has a response, and only a complete
/// request can be allowed.
pub fn forward(data: &[u8]) {
    let mut headers = HeaderMap::new();
    for line in data.split(|byte| *byte == b'\n').take(100) {
        let Some(colon) = line.iter().position(|byte| *byte == b':') else { continue };
        let (name, value) = (
            HeaderName::from_bytes(&line[..colon]),
            HeaderValue::from_bytes(line[colon + 1..].trim_ascii()),
        );
        if let (Ok(name), Ok(value)) = (name, value) {
            headers.append(name, value);
        }
    }
    let said = |names: &[&str]| names.iter().any(|name| headers.contains_key(*name));
    let whole = said(&["x-forwarded-for"])
        && said(&["x-forwarded-method", "x-original-method"])
        && said(&["x-forwarded-uri", "x-original-uri", "x-original-url"])
        && said(&["x-forwarded-host", "x-original-url"]);
    let clients = ClientIp::behind(TRUSTED.parse().expect("networks"));
    let stopwatch = Stopwatch::start();
    block_on(async {
        let engine = engine();
        let status_of_untrusted =
            http::answer_to(&engine, clients.clone(), [198, 51, 100, 1].into(), headers.clone())
                .await;
        assert_eq!(status_of_untrusted, 403);
        let status =
            http::answer_to(&engine, clients, [127, 0, 0, 1].into(), headers.clone()).await;
        assert!(
            if whole { [204, 400, 403, 429].contains(&status) } else { status == 400 },
            "{status}: {headers:?}"
        );
    });
    stopwatch.check();
}

/// Replies of a Redis server: the same values or the same refusal however they are cut, bounded,
/// and written and read again the same.
///
/// The first byte says how large the pieces are.
pub fn redis_reply(data: &[u8]) {
    tidegate_redis_client::fuzzing::replies(data);
}

/// A Redis server that answers each piece that it reads with the next part of `data`, and then
/// closes: every call ends with an answer or an error, in time.
///
/// The first byte says what the server is to be, and a byte 0xff ends a part.
pub fn redis_peer(data: &[u8]) {
    let Some((first, script)) = data.split_first() else { return };
    let url = match first % 4 {
        0 | 1 => "redis://192.0.2.1:6379",
        2 => "redis+cluster://192.0.2.1:6379",
        _ => "redis+sentinel://192.0.2.1:26379/primary",
    };
    let stopwatch = Stopwatch::start();
    // Waits take no time: the clock goes on by itself when there is nothing to do.
    let runtime =
        tokio::runtime::Builder::new_current_thread().enable_time().start_paused(true).build();
    runtime.expect("a runtime").block_on(async {
        let url = url.parse().expect("an address of a store");
        let redis = Redis::builder(url)
            .connector(Scripted(script.into()))
            .seed(7)
            .build()
            .expect("a store");
        if first % 4 == 1 {
            if let Ok(found) = redis.inspect().await {
                assert!(!found.to_string().is_empty());
            }
            return;
        }
        for (key, limits) in
            [("one", "3/min"), ("two", "2/h; 5 concurrent ttl 1m"), ("one", "3/min")]
        {
            let limits: Limits = limits.parse().expect("limits");
            if let Err(error) = redis.decide(&Check::new().charge(key, &limits, 1)).await {
                let text = error.to_string();
                assert!(
                    !text.is_empty() && text.len() < 1 << 12 && !text.contains('\n'),
                    "{text:?}"
                );
            }
        }
    });
    stopwatch.check();
}

/// Every connection answers by the same script.
struct Scripted(std::sync::Arc<[u8]>);

impl Connect for Scripted {
    fn connect(&self, _: &str) -> Connecting {
        let (resilient, mut far) = duplex(1 << 12);
        let script = std::sync::Arc::clone(&self.0);
        tokio::spawn(async move {
            let mut commands = [0; 1 << 12];
            for part in script.split(|byte| *byte == 0xff) {
                match far.read(&mut commands).await {
                    Ok(1..) => {}
                    _ => return,
                }
                if far.write_all(part).await.is_err() {
                    return;
                }
            }
        });
        Box::pin(async move { Ok(Box::new(resilient) as Box<dyn Link>) })
    }
}

fn engine() -> Engine {
    const RULES: &str = "rules:\n  - { name: a, by: [user], limit: 3/min }\n  - { name: b, when: { path: /x* }, limit: deny }\n  - { name: c, mode: shadow, limit: 1/h }\n";
    let clock = ManualClock::new();
    clock.set(Timestamp::from_secs(1_700_000_000));
    let memory = Memory::builder().clock(clock).max_keys(1000).build();
    Engine::new(
        Backend::Memory(memory),
        Config::parse(RULES, "rules").expect("rules that are right").rules,
    )
}

fn block_on<T>(future: impl Future<Output = T>) -> T {
    thread_local! {
        static RUNTIME: tokio::runtime::Runtime =
            tokio::runtime::Builder::new_current_thread().enable_time().build().expect("a runtime");
    }
    RUNTIME.with(|runtime| runtime.block_on(future))
}
