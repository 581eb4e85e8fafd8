//! `CL.THROTTLE` beside the real redis-cell: the same calls to both, and the same answers.
//!
//! Both read clocks of their own, a moment apart, so what they say in seconds may differ by one.
//! Everything else is equal. What differs on purpose is in docs/resp.md and in the tests at the
//! end.

use tidegate_server::config::Config;
use tidegate_server::{Options, start};
use tidegate_testkit::{Client, Flavor, Reply, Server, redis_cell};

/// The same commands for redis-cell and for us.
struct Both {
    cell: Client,
    own: Client,
}

impl Both {
    fn ask(&mut self, words: &[&str]) -> (Reply, Reply) {
        (self.cell.command(words).unwrap(), self.own.command(words).unwrap())
    }
}

fn with_both(test: impl FnOnce(&mut Both)) {
    let module = redis_cell();
    let server =
        Server::builder(Flavor::Redis7).arg("--loadmodule", module.to_str().unwrap()).start();
    let runtime =
        tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
    let config =
        Config::parse("listen: { http: off, resp: 127.0.0.1:0, grpc: off }\n", "test").unwrap();
    let running = runtime.block_on(start(config, Options::default())).unwrap();
    let connect = |port| Client::connect(port).unwrap();
    test(&mut Both { cell: connect(server.port()), own: connect(running.resp.unwrap().port()) });
    runtime.block_on(running.stop());
}

fn numbers(reply: &Reply) -> Vec<i64> {
    reply.array().iter().map(Reply::int).collect()
}

#[test]
fn random_calls_are_answered_alike() {
    with_both(|both| {
        let mut state = 0x0063_656c_6c20_6365_u64;
        let mut dice = move |bound: u64| {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            state % bound
        };
        for call in 0..5_000 {
            // A key has the same parameters always; one unit takes a hundred seconds or more, so
            // that no unit grows back between the calls.
            let key = dice(200);
            let (burst, count) = (key % 17, 1 + key % 5);
            let period = count * (100 + key);
            let quantity = match dice(10) {
                0 => 0,
                1 => -1,
                2 => i64::try_from(burst).unwrap() + 2,
                _ => 1 + i64::try_from(dice(burst + 1)).unwrap(),
            };
            let key_name = format!("k{key}");
            let (burst, count, period) = (burst.to_string(), count.to_string(), period.to_string());
            let peek = numbers(
                &both
                    .own
                    .command(&["CL.THROTTLE", &key_name, &burst, &count, &period, "0"])
                    .unwrap(),
            );
            if quantity <= 0 && peek[1] - peek[2] < 2 {
                continue; // this version of redis-cell refuses to write a key that is full again, even for a look
            }
            let words =
                ["CL.THROTTLE".to_owned(), key_name, burst, count, period, quantity.to_string()];
            let words: Vec<&str> = words.iter().map(String::as_str).collect();
            let (cell, own) = both.ask(&words);
            let (cell, own) = (numbers(&cell), numbers(&own));
            assert_eq!(
                cell[..3],
                own[..3],
                "call {call}, {words:?}: redis-cell says {cell:?}, we {own:?}"
            );
            for at in [3, 4] {
                let near = (cell[at] - own[at]).abs() <= 1 && (cell[at] < 0) == (own[at] < 0);
                assert!(near, "call {call}, {words:?}: redis-cell says {cell:?}, we {own:?}");
            }
        }
    });
}

#[test]
fn mistakes_are_answered_alike() {
    with_both(|both| {
        for words in [
            &["CL.THROTTLE"][..],
            &["CL.THROTTLE", "k"],
            &["CL.THROTTLE", "k", "1", "2"],
            &["CL.THROTTLE", "k", "1", "2", "3", "4", "5"],
            &["CL.THROTTLE", "k", "x", "y", "z"],
            &["CL.THROTTLE", "k", "1", "y", "0"],
            &["CL.THROTTLE", "k", "1", "2", "3.5"],
            &["CL.THROTTLE", "k", "1", "2", "3", ""],
            &["CL.THROTTLE", "k", "1", "2", "3", " 4"],
            &["CL.THROTTLE", "k", "1", "2", "3", "0x10"],
            &["CL.THROTTLE", "k", "1", "2", "3", "1e3"],
            &["CL.THROTTLE", "k", "9223372036854775808", "2", "3"],
        ] {
            let (Reply::Error(cell), Reply::Error(own)) = both.ask(words) else {
                panic!("{words:?} is no mistake")
            };
            // Later versions than the one of the crate registry say where the error comes from, and
            // so do we.
            let cell = cell.replace("Cell error: Store error: ", "Cell error: ");
            assert_eq!(cell.replace("Cell error: ", "Cell error: Store error: "), own, "{words:?}");
        }
        for words in [
            ["CL.THROTTLE", "a", "+5", "05", "+500", "+1"],
            ["cl.Throttle", "b", "5", "5", "500", "-0"],
        ] {
            let (cell, own) = both.ask(&words);
            assert_eq!(cell, own, "{words:?}");
        }
    });
}

/// Where we differ on purpose: what redis-cell says here is written down, so that we notice if it
/// changes.
#[test]
fn differences_are_those_that_are_meant() {
    with_both(|both| {
        // More is given back than was taken: never above full.
        assert_eq!(
            numbers(&both.own.command(&["CL.THROTTLE", "r", "4", "5", "500", "3"]).unwrap()),
            [0, 5, 2, -1, 300]
        );
        assert_eq!(
            numbers(&both.own.command(&["CL.THROTTLE", "r", "4", "5", "500", "-9"]).unwrap()),
            [0, 5, 5, -1, 0]
        );
        // Arithmetic that would overflow, and rates that mean nothing.
        for words in [
            ["CL.THROTTLE", "o", "9223372036854775807", "1", "60"],
            ["CL.THROTTLE", "o", "1", "1", "9223372036854775807"],
            ["CL.THROTTLE", "o", "-1", "30", "60"],
            ["CL.THROTTLE", "o", "5", "-30", "60"],
        ] {
            let reply = both.own.command(&words).unwrap();
            assert!(
                matches!(&reply, Reply::Error(text) if text.starts_with("Cell error: Store error: ")),
                "{words:?}: {reply:?}"
            );
        }
        // This version of redis-cell takes a rate of nothing; later ones and we do not.
        for words in [["CL.THROTTLE", "z", "1", "0", "3"], ["CL.THROTTLE", "z", "1", "2", "0"]] {
            let reply = both.own.command(&words).unwrap();
            assert_eq!(
                reply,
                Reply::Error("Cell error: Store error: Zero rates are not supported".into())
            );
        }
        // Above a thousand a second a denial still says a second.
        let fast = ["CL.THROTTLE", "fast", "0", "2000", "1"];
        let mut denied = None;
        for _ in 0..10_000 {
            let answer = numbers(&both.own.command(&fast).unwrap());
            if answer[0] == 1 {
                denied = Some(answer);
                break;
            }
        }
        assert_eq!(denied.expect("two in half a millisecond")[3], 1);
    });
}
