//! A store that sends invalid replies: the process survives, and reports what is wrong.

use std::io::{Read, Write};
use std::net::TcpStream;

use tidegate_testkit::ScriptedPeer;

use crate::serve::Serving;
use crate::{shown, tidegate};

/// A server's reply to `HELLO 3`.
const GREETING: &[u8] = b"%3\r\n+server\r\n+redis\r\n+proto\r\n:3\r\n+role\r\n+master\r\n";

/// Attributes without end, and as many as fit into one reply: to the greeting, and to what follows
/// it.
fn floods() -> [(&'static str, ScriptedPeer); 4] {
    let flood = |attributes: usize| format!("{}+OK\r\n", "|0\r\n".repeat(attributes)).into_bytes();
    let peer = |parts: Vec<Vec<u8>>| ScriptedPeer::start(parts);
    [
        ("a million before the greeting", peer(vec![flood(1_000_000)])),
        ("a greeting of 64 KiB", peer(vec![flood(16_000)])),
        ("a million later", peer(vec![GREETING.to_vec(), flood(1_000_000)])),
        ("a reply of 64 KiB later", peer(vec![GREETING.to_vec(), flood(16_000)])),
    ]
}

#[test]
fn doctor_survives_a_flood_of_attributes_and_names_it() {
    for (name, peer) in floods() {
        let text = shown(&["doctor", "--samples", "0", "--store", &peer.url()], "");
        assert!(text.starts_with("exit 2\n"), "{name}: {text}");
        assert!(text.contains("was refused: it has more than 64 attributes"), "{name}: {text}");
    }
}

#[test]
fn a_check_survives_a_flood_of_attributes_and_names_it() {
    for (name, peer) in floods() {
        let output =
            tidegate(&["check", "k", "--limit", "1/s", "--store", &peer.url()]).output().unwrap();
        let text = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(2), "{name}: {text}");
        assert!(text.contains("was refused: it has more than 64 attributes"), "{name}: {text}");
    }
}

#[test]
fn a_server_survives_a_flood_of_attributes_and_goes_on_answering() {
    for (name, peer) in floods() {
        let serving = Serving::start(&["--store", &peer.url(), "--log", "off"]);
        for _ in 0..3 {
            let mut client = TcpStream::connect(serving.listeners["resp"]).unwrap();
            client.write_all(b"CL.THROTTLE user:7 15 30 60\r\nQUIT\r\n").unwrap();
            let mut text = String::new();
            client.read_to_string(&mut text).unwrap();
            // Decided without the store: it is one that gives no answers.
            assert!(
                text.starts_with("*5\r\n:0\r\n:16\r\n") && text.ends_with("+OK\r\n"),
                "{name}: {text}"
            );
        }
    }
}
