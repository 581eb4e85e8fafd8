//! `MULTI` and `EXEC` over RESP, beside a real Redis.

use tidegate_server::resp::{MAX_COMMAND_BYTES, MAX_QUEUED_BYTES, MAX_QUEUED_COMMANDS};
use tidegate_testkit::{Client, Flavor, Reply, Server};

use crate::listeners::Listeners;

fn ask(client: &mut Client, line: &str) -> Reply {
    client.command(&line.split(' ').collect::<Vec<_>>()).unwrap()
}

/// Sends all lines at once, then takes the answers.
fn pipeline(client: &mut Client, lines: &[&str]) -> Vec<Reply> {
    for line in lines {
        client.send(&line.split(' ').collect::<Vec<_>>()).unwrap();
    }
    lines.iter().map(|_| client.receive().unwrap()).collect()
}

fn numbers(reply: &Reply) -> Vec<i64> {
    reply.array().iter().map(Reply::int).collect()
}

#[test]
fn a_transaction_is_answered_as_redis_does() {
    let (listeners, server) = (Listeners::in_memory(""), Server::start(Flavor::Redis8));
    let conversations: [&[&str]; 14] = [
        &["MULTI", "PING", "ECHO a", "EXEC", "PING"],
        &["MULTI", "EXEC"],
        &["MULTI", "MULTI", "PING", "EXEC"],
        &["EXEC", "DISCARD", "UNWATCH"],
        &["MULTI", "PING", "DISCARD", "EXEC"],
        &["MULTI", "WATCH a", "PING", "EXEC"],
        &["MULTI", "ECHO", "PING", "EXEC", "PING"],
        &["MULTI", "DISCARD x", "PING", "EXEC"],
        &["MULTI", "PING", "EXEC x", "EXEC"],
        &["MULTI", "AUTH", "EXEC"],
        &["MULTI", "SELECT 9999", "SELECT 0", "EXEC"],
        &["MULTI", "UNWATCH", "UNWATCH x", "RESET", "EXEC", "PING"],
        &["MULTI x", "WATCH", "MULTI", "CONFIG", "EXEC"],
        &["multi", "ping", "Exec"],
    ];
    for lines in conversations {
        let (mut own, mut redis) = (listeners.resp(), server.client().unwrap());
        let expected: Vec<Reply> = lines.iter().map(|line| ask(&mut redis, line)).collect();
        let one_by_one: Vec<Reply> = lines.iter().map(|line| ask(&mut own, line)).collect();
        assert_eq!(one_by_one, expected, "{lines:?}");
        assert_eq!(pipeline(&mut listeners.resp(), lines), expected, "{lines:?} at once");
    }
    let (mut own, mut redis) = (listeners.resp(), server.client().unwrap());
    for client in [&mut own, &mut redis] {
        ask(client, "MULTI");
        assert!(
            matches!(ask(client, "NOPE a"), Reply::Error(text) if text.starts_with("ERR unknown command 'NOPE'"))
        );
        assert!(
            matches!(ask(client, "EXEC"), Reply::Error(text) if text.starts_with("EXECABORT "))
        );
    }
}

#[test]
fn checks_in_a_transaction_are_decided_in_order_when_it_runs() {
    let listeners = Listeners::in_memory("rules:\n  - { name: per-ip, by: [ip], limit: 2/min }\n");
    let (mut client, mut other) = (listeners.resp(), listeners.resp());
    let (check, throttle) = ("TG.CHECK k 3/min", "CL.THROTTLE k 1 1 60");
    ask(&mut client, "MULTI");
    for _ in 0..2 {
        assert_eq!(ask(&mut client, check), Reply::Text("QUEUED".into()));
    }
    assert_eq!(
        numbers(&ask(&mut other, check)),
        [1, 3, 2, 0, 20_000],
        "nothing was charged by queuing"
    );
    for line in
        [check, throttle, throttle, throttle, "TG.RULES ip 192.0.2.7", "TG.CHECK k 3/fortnight"]
    {
        assert_eq!(ask(&mut client, line), Reply::Text("QUEUED".into()));
    }
    let answers = ask(&mut client, "EXEC");
    let [first, second, third, throttled @ .., ruled, wrong] = answers.array() else {
        panic!("{answers:?}")
    };
    assert_eq!(numbers(first), [1, 3, 1, 0, 40_000]);
    assert_eq!(numbers(second), [1, 3, 0, 0, 60_000]);
    assert_eq!(numbers(third), [0, 3, 0, 20_000, 60_000]);
    assert_eq!(throttled.iter().map(|answer| numbers(answer)[0]).collect::<Vec<_>>(), [0, 0, 1]);
    assert_eq!(numbers(ruled), [1, 2, 1, 0, 30_000, 0]);
    assert!(matches!(wrong, Reply::Error(text) if text.contains("fortnight")), "{wrong:?}");
}

#[test]
fn a_large_transaction_is_answered_in_turns_and_one_too_large_is_refused() {
    let listeners = Listeners::in_memory("");
    let mut client = listeners.resp();
    for most in [MAX_QUEUED_COMMANDS, MAX_QUEUED_COMMANDS + 1] {
        ask(&mut client, "MULTI");
        let mut refused = 0;
        for _ in 0..most.div_ceil(100) {
            for _ in 0..100 {
                client.send(&["TG.CHECK", "many", "9000/h"]).unwrap();
            }
            let answers = (0..100).map(|_| client.receive().unwrap());
            refused += answers
                .filter(|answer| matches!(answer, Reply::Error(text) if text.contains("transaction=False")))
                .count();
        }
        let executed = ask(&mut client, "EXEC");
        if most == MAX_QUEUED_COMMANDS {
            let allowed: Vec<i64> =
                executed.array().iter().map(|answer| answer.array()[0].int()).collect();
            assert_eq!((allowed.len(), refused), (MAX_QUEUED_COMMANDS, 0));
            assert_eq!(allowed.iter().sum::<i64>(), 9000);
            assert!(allowed.is_sorted_by(|one, next| one >= next), "in order");
        } else {
            assert!(
                matches!(&executed, Reply::Error(text) if text.starts_with("EXECABORT ")),
                "{executed:?}"
            );
            assert_eq!(refused, 1, "said once");
        }
    }
    let long = "x".repeat(MAX_COMMAND_BYTES - 100);
    assert_eq!(ask(&mut client, "MULTI"), Reply::Text("OK".into()));
    for _ in 0..MAX_QUEUED_BYTES / MAX_COMMAND_BYTES {
        assert_eq!(client.command(&["ECHO", &long]).unwrap(), Reply::Text("QUEUED".into()));
    }
    assert!(
        matches!(client.command(&["ECHO", &long]).unwrap(), Reply::Error(text) if text.contains("1048576 bytes"))
    );
    assert!(
        matches!(ask(&mut client, "EXEC"), Reply::Error(text) if text.starts_with("EXECABORT "))
    );
    assert_eq!(ask(&mut client, "PING"), Reply::Text("PONG".into()));
}

#[test]
fn watch_says_that_there_is_nothing_to_watch() {
    let listeners = Listeners::in_memory("");
    let answer = ask(&mut listeners.resp(), "WATCH key");
    assert!(
        matches!(&answer, Reply::Error(text) if text.starts_with("ERR WATCH is not supported: ")),
        "{answer:?}"
    );
}
