//! Every fault of the proxy does what its name says, and no more.

use std::io::{ErrorKind, Read, Write};
use std::net::{Ipv4Addr, TcpStream};
use std::time::{Duration, Instant};

use tidegate_testkit::{Client, Fault, FaultProxy, Flavor, Reply, Server, wait_until};

const SOON: Duration = Duration::from_secs(10);
const PING: &[u8] = b"*1\r\n$4\r\nPING\r\n";
const PONG: &[u8] = b"+PONG\r\n";

fn setup() -> (Server, FaultProxy) {
    let server = Server::start(Flavor::Redis7);
    let proxy = FaultProxy::with_seed(&server, 7);
    (server, proxy)
}

fn pong() -> Reply {
    Reply::Text("PONG".into())
}

/// A connection whose bytes are seen as they are.
fn raw(proxy: &FaultProxy) -> TcpStream {
    let stream =
        TcpStream::connect((Ipv4Addr::LOCALHOST, proxy.port())).expect("the proxy listens");
    stream.set_nodelay(true).expect("an option can be set");
    stream.set_read_timeout(Some(SOON)).expect("an option can be set");
    stream
}

/// How often the server counted.
fn count(server: &Server) -> Reply {
    server.command(&["GET", "n"])
}

#[test]
fn what_passes_is_counted() {
    let (server, proxy) = setup();
    assert_eq!(proxy.url(), format!("redis://127.0.0.1:{}", proxy.port()));
    assert_ne!(proxy.port(), server.port());
    let mut client = Client::connect(proxy.port()).unwrap();
    let long = "x".repeat(1 << 20);
    assert_eq!(client.command(&["ECHO", &long]).unwrap().text(), long);
    assert_eq!(client.command(&["PING"]).unwrap(), pong());
    let counts = proxy.counts();
    assert_eq!((counts.connections, counts.open, counts.faults), (1, 1, 0));
    assert_eq!(
        counts.request_bytes,
        (b"*2\r\n$4\r\nECHO\r\n$1048576\r\n\r\n".len() + (1 << 20) + PING.len()) as u64
    );
    assert_eq!(counts.reply_bytes, (b"$1048576\r\n\r\n".len() + (1 << 20) + PONG.len()) as u64);
    drop(client);
    wait_until("the connection has ended", SOON, || proxy.counts().open == 0);
}

#[test]
fn a_delay_is_at_least_as_long_as_it_says_and_calls_that_overlap_share_it() {
    let (_server, proxy) = setup();
    let mut client = Client::connect(proxy.port()).unwrap();
    client.command(&["PING"]).unwrap();
    let (request, reply) = (Duration::from_millis(200), Duration::from_millis(300));
    proxy.set(Fault::Delay { request, reply, jitter: Duration::from_millis(1) });
    let start = Instant::now();
    for sent in 1..=20 {
        client.send(&["PING"]).unwrap();
        // A little later each, so that they are pieces of their own.
        while start.elapsed() < sent * Duration::from_millis(1) {}
    }
    for _ in 0..20 {
        assert_eq!(client.receive().unwrap(), pong());
    }
    let took = start.elapsed();
    assert!(took >= request + reply, "{took:?}");
    assert!(took < 10 * reply, "they were late one after the other: {took:?}");
}

#[test]
fn stalled_replies_come_when_the_stall_is_over() {
    let (server, proxy) = setup();
    let mut client = Client::connect(proxy.port()).unwrap();
    proxy.set(Fault::StallReplies);
    client.send(&["INCR", "n"]).unwrap();
    wait_until("the server has counted", SOON, || count(&server) == Reply::Text("1".into()));
    assert_eq!(proxy.counts().reply_bytes, 0);
    proxy.set(Fault::Pass);
    assert_eq!(client.receive().unwrap(), Reply::Int(1));
}

#[test]
fn stalled_requests_come_when_the_stall_is_over() {
    let (server, proxy) = setup();
    let mut client = Client::connect(proxy.port()).unwrap();
    client.command(&["PING"]).unwrap();
    let before = proxy.counts().request_bytes;
    proxy.set(Fault::StallRequests);
    client.send(&["INCR", "n"]).unwrap();
    assert_eq!(server.command(&["PING"]), pong(), "the server itself is well");
    assert_eq!((count(&server), proxy.counts().request_bytes), (Reply::Nil, before));
    proxy.set(Fault::Pass);
    assert_eq!(client.receive().unwrap(), Reply::Int(1));
}

#[test]
fn a_swallowed_reply_is_lost_and_the_connection_goes_on() {
    let (server, proxy) = setup();
    let mut client = Client::connect(proxy.port()).unwrap();
    proxy.once(Fault::SwallowReplies);
    client.send(&["INCR", "n"]).unwrap();
    wait_until("the reply was swallowed", SOON, || proxy.counts().faults == 1);
    assert_eq!(client.command(&["INCR", "n"]).unwrap(), Reply::Int(2));
    assert_eq!(count(&server), Reply::Text("2".into()));
}

#[test]
fn a_cut_is_before_or_after_the_server_has_done_it() {
    let (server, proxy) = setup();
    for (fault, counted) in
        [(Fault::CutBeforeRequest, Reply::Nil), (Fault::CutAfterRequest, Reply::Text("1".into()))]
    {
        let mut client = Client::connect(proxy.port()).unwrap();
        proxy.once(fault);
        let error = client.command(&["INCR", "n"]).unwrap_err();
        assert!(
            matches!(error.kind(), ErrorKind::UnexpectedEof | ErrorKind::ConnectionReset),
            "{fault:?}: {error}"
        );
        assert_eq!(count(&server), counted, "{fault:?}");
        let mut next = Client::connect(proxy.port()).unwrap();
        assert_eq!(next.command(&["PING"]).unwrap(), pong(), "{fault:?} was once");
    }
}

#[test]
fn a_reply_can_be_cut_short() {
    let (_server, proxy) = setup();
    let mut stream = raw(&proxy);
    proxy.once(Fault::CutInReply { bytes: 3 });
    stream.write_all(PING).unwrap();
    let mut seen = Vec::new();
    stream.read_to_end(&mut seen).unwrap();
    assert_eq!(seen, b"+PO");
}

#[test]
fn a_dripped_reply_is_whole_and_comes_in_crumbs() {
    let (_server, proxy) = setup();
    let mut stream = raw(&proxy);
    let pause = Duration::from_millis(5);
    proxy.set(Fault::Drip { bytes: 2, pause });
    let start = Instant::now();
    stream.write_all(PING).unwrap();
    let mut seen = [0; PONG.len()];
    stream.read_exact(&mut seen).unwrap();
    assert_eq!(seen, PONG);
    assert!(start.elapsed() >= 3 * pause, "four crumbs have three pauses between them");
}

#[test]
fn garbage_is_as_long_as_the_reply_and_the_seed_decides_it() {
    let (server, first) = setup();
    let garbage = |proxy: &FaultProxy| {
        proxy.set(Fault::Garbage);
        let mut stream = raw(proxy);
        stream.write_all(PING).unwrap();
        let mut seen = [0; PONG.len()];
        stream.read_exact(&mut seen).unwrap();
        seen
    };
    let seen = garbage(&first);
    assert!(seen != *PONG && !seen[0].is_ascii(), "{seen:?}");
    assert_eq!(garbage(&FaultProxy::with_seed(&server, 7)), seen);
    assert_ne!(garbage(&FaultProxy::with_seed(&server, 8)), seen);
    assert_ne!(garbage(&first), seen, "it is another connection");
    first.set(Fault::Garbage);
    assert_eq!(
        Client::connect(first.port()).unwrap().command(&["PING"]).unwrap_err().kind(),
        ErrorKind::InvalidData
    );
}

#[test]
fn sometimes_is_a_share_that_the_seed_decides() {
    let server = Server::start(Flavor::Redis7);
    let lost = |seed| {
        let proxy = FaultProxy::with_seed(&server, seed);
        proxy.sometimes(25, Fault::CutAfterRequest);
        let call = |_| Client::connect(proxy.port()).unwrap().command(&["PING"]).is_err();
        (0..200).map(call).collect::<Vec<bool>>()
    };
    let first = lost(1);
    let share = first.iter().filter(|lost| **lost).count();
    assert!((30..=70).contains(&share), "{share} of 200");
    assert_eq!(lost(1), first);
    assert_ne!(lost(2), first);
}

#[test]
fn who_is_refused_cannot_connect_and_who_is_connected_stays() {
    let (_server, proxy) = setup();
    let mut client = Client::connect(proxy.port()).unwrap();
    assert_eq!(client.command(&["PING"]).unwrap(), pong());
    for _ in 0..20 {
        proxy.set(Fault::Refuse);
        assert_eq!(Client::connect(proxy.port()).unwrap_err().kind(), ErrorKind::ConnectionRefused);
        assert_eq!(client.command(&["PING"]).unwrap(), pong());
        proxy.set(Fault::Pass);
        assert_eq!(Client::connect(proxy.port()).unwrap().command(&["PING"]).unwrap(), pong());
    }
    proxy.cut();
    assert!(client.command(&["PING"]).is_err());
    assert_eq!(Client::connect(proxy.port()).unwrap().command(&["PING"]).unwrap(), pong());
}

#[test]
fn a_proxy_in_front_of_a_dead_server_closes_what_it_accepts() {
    let (server, proxy) = setup();
    let mut client = Client::connect(proxy.port()).unwrap();
    assert_eq!(client.command(&["PING"]).unwrap(), pong());
    server.kill();
    assert!(client.command(&["PING"]).is_err(), "the server's end is passed on");
    assert!(Client::connect(proxy.port()).unwrap().command(&["PING"]).is_err());
    server.restart();
    assert_eq!(Client::connect(proxy.port()).unwrap().command(&["PING"]).unwrap(), pong());
}

#[test]
fn a_dropped_proxy_is_closed_even_while_it_stalls_or_delays() {
    let hour = Duration::from_secs(3600);
    for fault in [
        Fault::Pass,
        Fault::StallReplies,
        Fault::StallRequests,
        Fault::Refuse,
        Fault::Delay { request: hour, reply: hour, jitter: hour },
        Fault::Drip { bytes: 1, pause: hour },
    ] {
        let (_server, proxy) = setup();
        let mut client = Client::connect(proxy.port()).unwrap();
        assert_eq!(client.command(&["PING"]).unwrap(), pong());
        proxy.set(fault);
        client.send(&["PING"]).unwrap();
        let start = Instant::now();
        drop(proxy);
        assert!(start.elapsed() < SOON, "{fault:?}");
        // Some of a reply may have been under way.
        wait_until("the connection is closed", SOON, || client.receive().is_err());
    }
}

#[test]
fn many_clients_at_once_get_their_own_replies() {
    let (_server, proxy) = setup();
    std::thread::scope(|scope| {
        for name in 0..32 {
            let port = proxy.port();
            scope.spawn(move || {
                let mut client = Client::connect(port).unwrap();
                for call in 0..20 {
                    let word = format!("{name}:{call}");
                    assert_eq!(client.command(&["ECHO", &word]).unwrap(), Reply::Text(word));
                }
            });
        }
    });
    let counts = proxy.counts();
    assert_eq!((counts.connections, counts.faults), (32, 0));
}

#[test]
fn a_fault_that_lasts_cannot_be_once() {
    let (_server, proxy) = setup();
    let once = std::panic::AssertUnwindSafe(|| proxy.once(Fault::Refuse));
    let message = std::panic::catch_unwind(once).unwrap_err().downcast::<String>().unwrap();
    assert_eq!(*message, "Refuse lasts until another fault is set: expected `set`");
}
