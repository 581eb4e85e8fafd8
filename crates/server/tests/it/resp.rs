//! The RESP listener, through a socket.

use std::io::{Read, Write};
use std::time::Duration;

use tidegate::{ManualClock, Memory, Timestamp};
use tidegate_server::backend::Backend;
use tidegate_server::engine::Engine;
use tidegate_server::resp::{Auth, MAX_COMMAND_BYTES, RespSettings, serve};
use tidegate_server::rules::Rules;
use tidegate_testkit::{Client, Reply, wait_until};
use tokio::net::TcpListener;
use tokio::runtime::Runtime;
use tokio::sync::watch;

struct Protocol {
    port: u16,
    clock: ManualClock,
    engine: Engine,
    down: watch::Sender<bool>,
    runtime: Runtime,
    served: tokio::task::JoinHandle<std::io::Result<()>>,
}

fn protocol(auth: Auth, rules: &str) -> Protocol {
    protocol_with(auth, rules, RespSettings::default())
}

fn protocol_with(auth: Auth, rules: &str, settings: RespSettings) -> Protocol {
    let clock = ManualClock::new();
    clock.set(Timestamp::from_secs(1_700_000_000));
    let memory = Memory::builder().clock(clock.clone()).build();
    let rules = if rules.is_empty() {
        Rules::default()
    } else {
        tidegate_server::config::Config::parse(rules, "test").unwrap().rules
    };
    let engine = Engine::new(Backend::Memory(memory), rules);
    let (down, shutdown) = watch::channel(false);
    let runtime =
        tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
    let listener = runtime.block_on(TcpListener::bind("127.0.0.1:0")).unwrap();
    let port = listener.local_addr().unwrap().port();
    let served = runtime.spawn(serve(listener, engine.clone(), auth, settings, shutdown));
    Protocol { port, clock, engine, down, runtime, served }
}

impl Protocol {
    fn client(&self) -> Client {
        Client::connect(self.port).unwrap()
    }
}

fn ask(client: &mut Client, line: &str) -> Reply {
    client.command(&line.split(' ').collect::<Vec<_>>()).unwrap()
}

fn numbers(client: &mut Client, line: &str) -> Vec<i64> {
    match ask(client, line) {
        Reply::Array(parts) => parts.iter().map(Reply::int).collect(),
        other => panic!("{line} answered {other:?}"),
    }
}

fn error(client: &mut Client, line: &str) -> String {
    match ask(client, line) {
        Reply::Error(text) => text,
        other => panic!("{line} answered {other:?}"),
    }
}

#[test]
fn cl_throttle_answers_like_redis_cell() {
    let protocol = protocol(Auth::default(), "");
    let mut client = protocol.client();
    assert_eq!(numbers(&mut client, "CL.THROTTLE u 15 30 60"), [0, 16, 15, -1, 2]);
    assert_eq!(numbers(&mut client, "cl.throttle new 15 30 60 0"), [0, 16, 16, -1, 0]);
    assert_eq!(numbers(&mut client, "CL.THROTTLE big 4 5 50 6"), [1, 5, 5, -1, 0]);
    assert_eq!(numbers(&mut client, "CL.THROTTLE r 4 5 50 3"), [0, 5, 2, -1, 30]);
    assert_eq!(numbers(&mut client, "CL.THROTTLE r 4 5 50 -1"), [0, 5, 3, -1, 20]);
    assert_eq!(numbers(&mut client, "CL.THROTTLE r 4 5 50 -99"), [0, 5, 5, -1, 0]);
    assert_eq!(numbers(&mut client, "CL.THROTTLE d 4 5 50 4"), [0, 5, 1, -1, 40]);
    assert_eq!(numbers(&mut client, "CL.THROTTLE d 4 5 50 2"), [1, 5, 1, 10, 40]);
    protocol.clock.advance(Duration::from_secs(10));
    assert_eq!(numbers(&mut client, "CL.THROTTLE d 4 5 50 2"), [0, 5, 0, -1, 50]);
    assert_eq!(numbers(&mut client, "CL.THROTTLE d 4 5 50 0"), [0, 5, 0, -1, 50]);
    for (line, expected) in [
        (
            "CL.THROTTLE u",
            "Cell error: Store error: Usage: cl.throttle <key> <max_burst> <count per period> <period> [<quantity>]",
        ),
        ("CL.THROTTLE u x 30 60", "Cell error: Store error: Couldn't parse as integer: x"),
        ("CL.THROTTLE u 1 0 60", "Cell error: Store error: Zero rates are not supported"),
        ("CL.THROTTLE u 1 30 0", "Cell error: Store error: Zero rates are not supported"),
    ] {
        assert_eq!(error(&mut client, line), expected);
    }
    assert!(error(&mut client, "CL.THROTTLE u -1 30 60").contains("expected a positive number"));
    assert!(error(&mut client, "CL.THROTTLE u 9223372036854775807 1 60").starts_with("Cell error"));
}

#[test]
fn every_operation_has_its_command() {
    let protocol = protocol(Auth::default(), "");
    let mut client = protocol.client();
    assert_eq!(numbers(&mut client, "TG.CHECK k 10/min COST 3"), [1, 10, 7, 0, 18_000]);
    assert_eq!(numbers(&mut client, "TG.PEEK k 10/min COST 8"), [0, 10, 7, 6_000, 18_000]);
    assert_eq!(numbers(&mut client, "TG.TAKE k 10/min COST 9"), [1, 10, 0, 0, 60_000, 7]);
    assert_eq!(numbers(&mut client, "TG.DEBIT k 10/min COST 1"), [1, 10, 0, 0, 66_000]);
    assert_eq!(numbers(&mut client, "TG.REFUND k 10/min COST 4"), [1, 10, 3, 0, 42_000, 4]);
    assert_eq!(numbers(&mut client, "TG.RESET k 10/min"), [1, 10, 10, 0, 0]);
    assert_eq!(numbers(&mut client, "TG.CHECK k 10/min COST 11")[3], -1);
    let reserved = numbers(&mut client, "TG.RESERVE k 10/min COST 5");
    assert_eq!(reserved[..3], [1, 10, 5]);
    let settled =
        numbers(&mut client, &format!("TG.SETTLE k 10/min COST 2 RESERVED 5 ID {}", reserved[5]));
    assert_eq!((settled[2], settled[5]), (8, 3));
    let lease = client.command(&["TG.LEASE", "k", "1 concurrent ttl 30s"]).unwrap();
    let id = lease.array()[5].int().to_string();
    assert_eq!(
        client.command(&["TG.CHECK", "k", "1 concurrent ttl 30s"]).unwrap().array()[0].int(),
        0
    );
    assert_eq!(
        client.command(&["TG.RELEASE", "k", "1 concurrent ttl 30s", "ID", &id]).unwrap().array()[5]
            .int(),
        1
    );
    assert!(error(&mut client, "TG.CHECK k 10/fortnight").contains("10/fortnight"));
    assert!(
        error(&mut client, "TG.CHECK k 10/s COST 1e3")
            .contains("COST is '1e3': expected a whole number")
    );
    assert!(error(&mut client, "TG.CHECK k").contains("expected TG."));
    assert!(error(&mut client, "TG.NONSENSE k 1/s").contains("expected TG.CHECK"));
}

#[test]
fn rules_decide_over_attributes() {
    let protocol = protocol(
        Auth::default(),
        "rules:\n  - { name: a, by: [ip], limit: 2/min }\n  - { name: b, limit: 3/min }\n",
    );
    let mut client = protocol.client();
    assert_eq!(numbers(&mut client, "TG.RULES ip 192.0.2.1"), [1, 2, 1, 0, 30_000, 0]);
    assert_eq!(numbers(&mut client, "TG.RULES ip 192.0.2.1")[..3], [1, 2, 0]);
    assert_eq!(numbers(&mut client, "TG.RULES ip 192.0.2.1")[0], 0);
    assert_eq!(
        numbers(&mut client, "TG.RULES ip 192.0.2.2 COST 1")[0],
        1,
        "a denial takes nothing from anybody"
    );
    assert!(error(&mut client, "TG.RULES ip").contains("expected TG.RULES attribute value"));
}

#[test]
fn clients_are_greeted() {
    let protocol = protocol(Auth::default(), "");
    let mut client = protocol.client();
    assert_eq!(ask(&mut client, "PING"), Reply::Text("PONG".into()));
    assert_eq!(ask(&mut client, "ECHO hi"), Reply::Text("hi".into()));
    assert_eq!(ask(&mut client, "CLIENT SETNAME me"), Reply::Text("OK".into()));
    assert_eq!(ask(&mut client, "CLIENT GETNAME"), Reply::Text("me".into()));
    assert_eq!(ask(&mut client, "SELECT 0"), Reply::Text("OK".into()));
    assert!(error(&mut client, "SELECT 1").contains("out of range"));
    assert_eq!(ask(&mut client, "CONFIG GET save"), Reply::Array(vec![]));
    assert_eq!(ask(&mut client, "COMMAND DOCS"), Reply::Array(vec![]));
    assert!(matches!(ask(&mut client, "HELLO 2"), Reply::Array(parts) if parts.len() == 14));
    assert!(error(&mut client, "EVAL x 0").contains("unknown command"));
    assert_eq!(ask(&mut client, "QUIT"), Reply::Text("OK".into()));
    assert!(client.command(&["PING"]).is_err());
}

#[test]
fn tokens_open_the_protocol() {
    let protocol = protocol(Auth { checks: Some("open".into()), admin: Some("sesame".into()) }, "");
    let mut client = protocol.client();
    assert!(error(&mut client, "PING").starts_with("NOAUTH"));
    assert!(error(&mut client, "AUTH wrong").starts_with("WRONGPASS"));
    assert_eq!(ask(&mut client, "AUTH open"), Reply::Text("OK".into()));
    assert_eq!(numbers(&mut client, "TG.CHECK k 1/s")[0], 1);
    assert!(error(&mut client, "TG.RESET k 1/s").starts_with("NOPERM"));
    assert_eq!(error(&mut client, "TG.RESETRULE a"), "NOPERM TG.RESETRULE needs the admin token");
    assert_eq!(
        error(&mut client, "TG.RESETRULES a b"),
        "NOPERM TG.RESETRULES needs the admin token"
    );
    assert_eq!(ask(&mut client, "AUTH default sesame"), Reply::Text("OK".into()));
    assert_eq!(numbers(&mut client, "TG.RESET k 1/s")[0], 1);
}

#[test]
fn pipelines_are_answered_in_order_and_to_the_end() {
    let protocol = protocol(Auth::default(), "");
    let mut client = protocol.client();
    for n in 0..1000 {
        client.send(&["ECHO", &n.to_string()]).unwrap();
    }
    protocol.down.send(true).unwrap(); // whatever has arrived is answered
    for n in 0..1000 {
        match client.receive() {
            Ok(reply) => assert_eq!(reply, Reply::Text(n.to_string())),
            Err(_) => break,
        }
    }
    protocol.runtime.block_on(protocol.served).unwrap().unwrap();
}

/// Commands that look like the one before are not parsed anew; what comes between them must not be
/// taken for them.
#[test]
fn commands_that_look_alike_are_answered_by_what_they_say() {
    let protocol = protocol(Auth::default(), "");
    let command = |words: &str| {
        let words: Vec<&str> = words.split(' ').collect();
        let each: String =
            words.iter().map(|word| format!("${}\r\n{word}\r\n", word.len())).collect();
        format!("*{}\r\n{each}", words.len())
    };
    let (four, nine, none) =
        ("CL.THROTTLE k 4 30 60 1", "CL.THROTTLE k 9 30 60 1", "CL.THROTTLE k 4 00 60 1");
    let line = |words: &str| format!("{words}\r\n");
    let steps = [
        (command(four), ":5"),
        (command(four), ":5"),
        (command(nine), ":10"),
        (command(nine), ":10"),
        (command(four), ":5"),
        (line(nine), ":10"), // as people type it
        (command(four), ":5"),
        (command(none), "-Cell error"),
        (command(none), "-Cell error"),
        (command(four), ":5"),
        (command("CL.THROTTLE k 4 30 60 0"), ":5"),
        (command("TG.CHECK k 4/s"), ":4"),
        (command("TG.CHECK k 9/s"), ":9"),
        (command("TG.CHECK k 9/s"), ":9"),
        (command("CL.THROTTLE kk 4 30 60 1"), ":5"),
        (command("CL.THROTTLe kk 9 30 60 1"), ":10"),
        (command("RESET"), "+RESET"),
        (command(four), ":5"),
    ];
    // In one write, one by one, and in pieces that end anywhere.
    let all: String = steps.iter().map(|(bytes, _)| bytes.as_str()).collect();
    let whole = vec![all.clone()];
    let each = steps.iter().map(|(bytes, _)| bytes.clone()).collect();
    let pieces =
        all.as_bytes().chunks(37).map(|piece| String::from_utf8(piece.to_vec()).unwrap()).collect();
    for writes in [whole, each, pieces] {
        let mut stream = std::net::TcpStream::connect(("127.0.0.1", protocol.port)).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
        stream.set_nodelay(true).unwrap();
        for write in &writes {
            stream.write_all(write.as_bytes()).unwrap();
        }
        stream.shutdown(std::net::Shutdown::Write).unwrap();
        let mut answers = String::new();
        stream.read_to_string(&mut answers).unwrap();
        let mut lines = answers.split("\r\n");
        for (asked, expected) in &steps {
            let first = lines.next().unwrap();
            let told = match first {
                "*5" => lines.by_ref().take(5).collect::<Vec<_>>()[1], // the limit
                other => other,
            };
            assert!(
                told.starts_with(expected),
                "{asked:?} in {} writes is answered {told:?}",
                writes.len()
            );
        }
        assert_eq!(lines.next(), Some(""), "nothing else is said");
    }
}

#[test]
fn a_command_has_at_most_128_kib() {
    let protocol = protocol(Auth::default(), "");
    let fits = "x".repeat(MAX_COMMAND_BYTES - 100);
    assert_eq!(protocol.client().command(&["ECHO", &fits]).unwrap(), Reply::Text(fits));
    let mut client = protocol.client();
    client.send(&["ECHO", &"x".repeat(MAX_COMMAND_BYTES)]).unwrap();
    let refused = client.receive().unwrap();
    assert_eq!(
        refused,
        Reply::Error("ERR Protocol error: a command of more than 131072 bytes".into())
    );
    assert!(client.receive().is_err(), "it is closed");
}

/// Unfinished commands and queues of transactions are held within one budget; connections that need
/// none of it do not notice.
#[test]
fn what_connections_have_begun_has_a_budget() {
    const BUDGET: usize = 1 << 20;
    let settings = RespSettings {
        max_pending_bytes: BUDGET,
        patience: Duration::from_secs(60),
        ..RespSettings::default()
    };
    let protocol = protocol_with(Auth::default(), "", settings);
    let mut small = protocol.client();
    let long = "x".repeat(100_000);
    // Each begins a command of a hundred thousand bytes, and goes on when it is known whether it
    // was let.
    let begin = || {
        let mut stream = std::net::TcpStream::connect(("127.0.0.1", protocol.port)).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
        stream
            .write_all(
                format!("PING\r\n*2\r\n$4\r\nECHO\r\n$100000\r\n{}", &long[..90_000]).as_bytes(),
            )
            .unwrap();
        stream
    };
    let mut begun: Vec<_> = (0..40).map(|_| begin()).collect();
    let end = |stream: &mut std::net::TcpStream| {
        let _ = stream.write_all(format!("{}\r\nQUIT\r\n", &long[90_000..]).as_bytes());
        let mut answer = Vec::new();
        let _ = stream.read_to_end(&mut answer);
        String::from_utf8(answer).unwrap()
    };
    // Ten fit, whose buffers have grown to 128 KiB; each has 32 KiB of its own.
    let refused = || {
        let text = protocol.engine.observer().metrics().text(protocol.engine.store(), 0);
        let line = text.lines().find_map(|line| {
            line.strip_prefix(r#"tidegate_refused_total{protocol="resp",reason="full"} "#)
        });
        line.unwrap().parse::<usize>().unwrap()
    };
    wait_until("the others are refused", Duration::from_secs(60), || refused() == 30);
    for _ in 0..100 {
        assert_eq!(ask(&mut small, "PING"), Reply::Text("PONG".into()));
        assert_eq!(numbers(&mut small, "TG.PEEK k 10/min")[0], 1);
    }
    let answers: Vec<String> = begun.iter_mut().map(end).collect();
    let count = |start: &str| answers.iter().filter(|answer| answer.starts_with(start)).count();
    let done = count("+PONG\r\n$100000\r\n");
    assert_eq!(
        (done, count("+PONG\r\n-ERR all connections together hold 1048576 bytes of unfinished")),
        (10, 30)
    );
    // What they held is there again. Transactions take from the same budget.
    // The error follows the answer to the command that was too much.
    let (mut queued, mut open) = (0, Vec::new());
    'clients: for _ in 0..40 {
        let mut client = protocol.client();
        assert_eq!(ask(&mut client, "MULTI"), Reply::Text("OK".into()));
        for _ in 0..6 {
            match client.command(&["ECHO", &long[..25_000]]).unwrap() {
                Reply::Text(text) if text == "QUEUED" => queued += 25_000,
                Reply::Error(text) if text.starts_with("ERR all connections together hold ") => {
                    assert!(client.receive().is_err(), "it is closed");
                    break 'clients;
                }
                other => panic!("{other:?}"),
            }
        }
        open.push(client);
    }
    assert!((BUDGET / 2..3 * BUDGET).contains(&queued), "{queued} bytes were queued");
    assert_eq!(ask(&mut small, "PING"), Reply::Text("PONG".into()));
    assert_eq!(ask(&mut open[0], "EXEC").array().len(), 6);
}
