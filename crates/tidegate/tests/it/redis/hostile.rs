//! Keys that another program has written: a clear error or a strict repair, never a crash, never
//! unlimited.

use tidegate::redis::Redis;
use tidegate::{Check, Id, Limits, ManualClock, Op, Store, StoreError, Timestamp};
use tidegate_testkit::{Flavor, Reply, ScriptedPeer, Server};

use super::{assert_all_expire, at, runtime, store};
use crate::conformance::Random;

const LIMITS: [&str; 7] = [
    "5/s",
    "5/min window",
    "5/min window from first hit",
    "5/min estimate",
    "5/min sliding",
    "5/min log",
    "5 concurrent ttl 60s",
];

/// The names of all keys on the server.
fn names(server: &Server) -> Vec<Vec<u8>> {
    let reply = server.command(&["KEYS", "tg1:*"]);
    reply.array().iter().filter_map(bytes).collect()
}

fn bytes(reply: &Reply) -> Option<Vec<u8>> {
    match reply {
        Reply::Text(text) => Some(text.clone().into_bytes()),
        Reply::Bytes(bytes) => Some(bytes.clone()),
        _ => None,
    }
}

async fn take(redis: &Redis, limits: &Limits, id: Option<u64>) -> Result<bool, StoreError> {
    let mut check = Check::new().charge("victim", limits, 1);
    if let Some(id) = id {
        check = check.with_id(Id(id));
    }
    Ok(redis.decide(&check).await?.allowed())
}

#[test]
fn a_flood_of_attributes_is_an_error_and_no_overflow_of_the_stack() {
    let flood =
        |attributes: usize| format!("{}$1\r\na\r\n", "|0\r\n".repeat(attributes)).into_bytes();
    let greeting = b"%1\r\n+proto\r\n:3\r\n".to_vec();
    for parts in [
        vec![flood(1_000_000)],
        vec![flood(16_000)],
        vec![greeting.clone(), flood(1_000_000)],
        vec![greeting.clone(), flood(16_000)],
    ] {
        let peer = ScriptedPeer::start(parts);
        runtime().block_on(async {
            let redis = at(&peer.url()).build().unwrap();
            let error = take(&redis, &"1/s".parse().unwrap(), None).await.unwrap_err().to_string();
            assert!(error.contains("was refused: it has more than 64 attributes"), "{error}");
        });
    }
    tidegate_testkit::attacks_held("peers", 4);
}

#[test]
fn a_key_of_another_type_is_an_error_that_names_it() {
    let server = Server::start(Flavor::Redis7);
    runtime().block_on(async {
        for limit in LIMITS {
            let limits: Limits = limit.parse().unwrap();
            let redis = store(&server).build().unwrap();
            assert!(take(&redis, &limits, None).await.unwrap());
            let name = names(&server).remove(0);
            server.command(&[b"DEL".as_slice(), &name]);
            server.command(&[b"LPUSH".as_slice(), &name, b"x"]);
            let error = take(&redis, &limits, None).await.unwrap_err();
            let StoreError::Corrupt { key, .. } = &error else { panic!("{limit}: {error}") };
            assert!(key.ends_with(":victim"), "{error}");
            server.command(&["FLUSHALL"]);
        }
    });
}

#[test]
fn garbage_counts_as_used_up_and_expires() {
    let server = Server::start(Flavor::Redis7);
    runtime().block_on(async {
        for limit in LIMITS {
            for garbage in [
                "x",
                "12",
                "b",
                "some text that is longer than any state could be, at least of this kind",
            ] {
                let limits: Limits = limit.parse().unwrap();
                let redis = store(&server).witness_keys(0).build().unwrap();
                assert!(take(&redis, &limits, None).await.unwrap());
                let name = names(&server).remove(0);
                server.command(&[b"SET".as_slice(), &name, garbage.as_bytes()]);
                assert!(!take(&redis, &limits, None).await.unwrap(), "{limit}, {garbage:?}");
                assert_eq!(redis.stats().repairs, 1, "{limit}, {garbage:?}");
                assert_all_expire(&server); // it was written again, with an end
                assert!(!take(&redis, &limits, None).await.unwrap(), "{limit}, {garbage:?}");
                assert_eq!(
                    redis.stats().repairs,
                    1,
                    "{limit}, {garbage:?}: repaired once is enough"
                );
                server.command(&["FLUSHALL"]);
            }
        }
    });
}

/// Values with bytes changed, removed or added at random, and expiries removed: every call has an
/// answer or an error that names the key, and every later write sets an expiry.
#[test]
fn no_damage_crashes_the_script() {
    let server = Server::start(Flavor::Valkey9);
    runtime().block_on(async {
        let mut random = Random(7);
        let clock = ManualClock::new();
        clock.set(Timestamp::from_micros(1_700_000_000_000_000));
        let redis = store(&server).clock(clock.clone()).witness_keys(0).build().unwrap();
        for round in 0..4_000_u64 {
            let limits: Limits = random.pick(&LIMITS).parse().unwrap();
            let check = |op| {
                let check = Check::of(op).charge_named("rule", "victim", &limits, 1);
                if round % 2 == 0 { check.with_id(Id(1 + round % 5)) } else { check }
            };
            let op = *random.pick(&[
                Op::Check,
                Op::Check,
                Op::Take,
                Op::Refund,
                Op::Settle,
                Op::Release,
                Op::Debit,
            ]);
            let answer = redis.decide(&check(op)).await;
            assert!(answer.is_ok(), "round {round}, {op:?}, {limits:?}: {answer:?}");
            clock.set(clock.now().after_micros(random.below(2_000_000)));
            for name in names(&server) {
                let Some(mut value) = bytes(&server.command(&[b"GET".as_slice(), &name])) else {
                    continue;
                };
                if value.is_empty() {
                    continue;
                }
                match random.below(6) {
                    0 => value
                        .truncate(usize::try_from(random.below(1 + value.len() as u64)).unwrap()),
                    1 => value.extend_from_slice(&random.next().to_le_bytes()),
                    2 | 3 => {
                        let at = usize::try_from(random.below(value.len() as u64)).unwrap();
                        value[at] = random.next().to_le_bytes()[0];
                    }
                    _ => continue,
                }
                server.command(&[b"SET".as_slice(), &name, &value]);
            }
        }
        server.command(&["FLUSHALL"]);
        let limits: Limits = "5/s".parse().unwrap();
        assert!(take(&redis, &limits, None).await.unwrap());
        for name in names(&server) {
            server.command(&[b"PERSIST".as_slice(), &name]);
        }
        assert!(take(&redis, &limits, None).await.unwrap());
        assert_all_expire(&server);
    });
}

/// An expiry that another program removed (`PERSIST`) is set again by the next write, or, for a
/// window that is changed in place, after at most 64 more units. A key that is not used any more
/// stays.
#[test]
fn a_removed_expiry_is_back_within_a_few_writes() {
    let with_next = |limit: &str| -> (Limits, u32) { (limit.parse().unwrap(), 1) };
    let kinds = [
        with_next("100000/h"),
        with_next("100000/h estimate"),
        with_next("100000/h sliding"),
        with_next("100000/h log"),
        with_next("100000 concurrent ttl 1h"),
        ("100000/h window".parse().unwrap(), 64),
        ("100000/h window from first hit".parse().unwrap(), 64),
    ];
    for flavor in [Flavor::Redis62, Flavor::Valkey9] {
        let server = Server::start(flavor);
        runtime().block_on(async {
            let redis = store(&server).build().unwrap();
            let lasting = || server.keys_without_ttl("tg1:").len();
            for (limits, most) in &kinds {
                // At every position between two such writes, by one and by more; a log grows longer
                // than one read.
                for round in 0..40 {
                    let cost = [1, 1, 1, 3, 64, 100][round % 6];
                    for _ in 0..round * 7 % 65 + 1 {
                        let check = Check::new().charge("victim", limits, 1);
                        assert!(redis.decide(&check).await.unwrap().allowed());
                    }
                    let name = names(&server).remove(0);
                    server.command(&[b"PERSIST".as_slice(), &name]);
                    assert_eq!(lasting(), 1, "{flavor}, {limits:?}");
                    let mut writes = 0;
                    while lasting() > 0 {
                        assert!(
                            writes < *most,
                            "{flavor}, {limits:?}, round {round}: {writes} writes and still no end"
                        );
                        let check = Check::new().charge("victim", limits, cost);
                        assert!(redis.decide(&check).await.unwrap().allowed());
                        writes += 1;
                    }
                    let left = server.command(&[b"PTTL".as_slice(), &name]).int();
                    assert!(
                        (1..=2 * 3_600_000 + 1).contains(&left),
                        "{flavor}, {limits:?}: {left} ms"
                    );
                }
                server.command(&["FLUSHALL"]);
            }
        });
    }
}

/// A window of less than 64 gets its expiry back with the first hit of the next one.
#[test]
fn a_small_window_expires_again_when_the_next_one_begins() {
    let server = Server::start(Flavor::Redis8);
    runtime().block_on(async {
        let redis = store(&server).witness_keys(0).build().unwrap();
        for limit in ["3/200ms window", "3/200ms window from first hit"] {
            let limits: Limits = limit.parse().unwrap();
            while take(&redis, &limits, None).await.unwrap() {}
            server.command(&[b"PERSIST".as_slice(), &names(&server).remove(0)]);
            let again = || async { take(&redis, &limits, None).await.unwrap() };
            let began = std::time::Instant::now();
            while !again().await {
                assert!(
                    began.elapsed() < std::time::Duration::from_secs(10),
                    "{limit}: no next window"
                );
            }
            assert_all_expire(&server);
            server.command(&["FLUSHALL"]);
        }
    });
}

/// A forged state from far in the future does not lock a key for ever.
#[test]
fn a_state_from_the_future_ends_within_its_period() {
    let server = Server::start(Flavor::Redis8);
    runtime().block_on(async {
        for limit in LIMITS {
            let limits: Limits = limit.parse().unwrap();
            let clock = ManualClock::new();
            clock.set(Timestamp::from_secs(4_000_000_000));
            let redis = store(&server).clock(clock.clone()).witness_keys(0).build().unwrap();
            assert!(take(&redis, &limits, None).await.unwrap());
            clock.set(Timestamp::from_secs(1_700_000_000));
            assert!(!take(&redis, &limits, None).await.unwrap(), "{limit}");
            assert_eq!(redis.stats().repairs, 1, "{limit}");
            clock.set(Timestamp::from_secs(1_700_000_000 + 3 * 60));
            assert!(take(&redis, &limits, None).await.unwrap(), "{limit}");
            server.command(&["FLUSHALL"]);
        }
    });
}

/// Any timeout works, however long.
#[test]
fn the_longest_timeout_works() {
    let server = Server::start(Flavor::Redis7);
    runtime().block_on(async {
        let builder = store(&server)
            .timeout(std::time::Duration::MAX)
            .connect_timeout(std::time::Duration::MAX);
        let redis = builder.build().unwrap();
        assert!(take(&redis, &"5/s".parse().unwrap(), None).await.unwrap());
    });
}
