//! One server: starting, talking, stopping, killing.

use std::fs;
use std::io::Read;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use tidegate_testkit::{Client, Flavor, Reply, Server, wait_until};

const SOON: Duration = Duration::from_secs(10);

fn text(text: &str) -> Reply {
    Reply::Text(text.into())
}

#[test]
fn every_flavor_starts_and_says_which_version_it_is() {
    for (flavor, field) in [
        (Flavor::Redis62, "redis_version:6.2."),
        (Flavor::Redis7, "redis_version:7.0."),
        (Flavor::Redis8, "redis_version:8.0."),
        (Flavor::Valkey8, "valkey_version:8.1."),
        (Flavor::Valkey9, "valkey_version:9.1."),
    ] {
        let server = Server::start(flavor);
        let info = server.command(&["INFO", "server"]);
        assert!(info.text().contains(field), "{flavor}: {}", info.text());
        assert_eq!(server.url(), format!("redis://127.0.0.1:{}", server.port()));
        assert_eq!(
            server.command(&["CONFIG", "GET", "save"]),
            Reply::Array(vec![text("save"), text("")])
        );
    }
}

#[test]
fn replies_keep_their_types() {
    let server = Server::start(Flavor::Redis7);
    assert_eq!(server.command(&["SET", "k", "v"]), text("OK"));
    assert_eq!(server.command(&["GET", "k"]), text("v"));
    assert_eq!(server.command(&["GET", "none"]), Reply::Nil);
    assert_eq!(server.command(&["INCRBY", "n", "-7"]), Reply::Int(-7));
    assert_eq!(server.command(&[&b"SET"[..], b"b", b"\xff\x00"]), text("OK"));
    assert_eq!(server.command(&["GET", "b"]), Reply::Bytes(vec![0xff, 0]));
    assert_eq!(server.command(&["MGET", "k", "none"]), Reply::Array(vec![text("v"), Reply::Nil]));
    let wrong = server.command(&["LPUSH", "k", "x"]);
    assert!(matches!(&wrong, Reply::Error(error) if error.starts_with("WRONGTYPE")), "{wrong:?}");
    let long = "x".repeat(1 << 20);
    assert_eq!(server.command(&["ECHO", &long]).text(), long);
}

#[test]
fn an_option_of_the_test_takes_the_place_of_the_kits_own() {
    let server = Server::builder(Flavor::Redis62)
        .arg("--maxclients", "5")
        .arg("--appendonly", "yes")
        .start();
    assert_eq!(server.command(&["CONFIG", "GET", "maxclients"]).array()[1], text("5"));
    assert_eq!(server.command(&["CONFIG", "GET", "appendonly"]).array()[1], text("yes"));
}

#[test]
fn a_unix_socket_and_a_password_are_in_the_url() {
    let server = Server::builder(Flavor::Valkey9).unix_socket().password("tide").start();
    let socket = server.socket_path().unwrap();
    assert_eq!(server.url(), format!("redis+unix://{}?pass=tide", socket.display()));
    assert_eq!(server.command(&["PING"]), text("PONG"));
    let foreign = Client::connect_unix(&socket).unwrap().command(&["PING"]).unwrap();
    assert!(matches!(&foreign, Reply::Error(error) if error.starts_with("NOAUTH")), "{foreign:?}");
    assert!(Client::connect(server.port()).is_err(), "it listens on no port");

    let server = Server::builder(Flavor::Redis7).password("tide").start();
    assert_eq!(server.url(), format!("redis://:tide@127.0.0.1:{}", server.port()));
    assert_eq!(server.command(&["PING"]), text("PONG"));
}

#[test]
fn a_stopped_server_answers_only_when_it_goes_on() {
    let server = Server::start(Flavor::Redis7);
    let mut client = server.client().unwrap();
    server.stop_signal();
    client.send(&["PING"]).unwrap();
    let state = fs::read_to_string(format!("/proc/{}/stat", server.pid())).unwrap();
    assert!(state.contains(") T "), "{state}");
    server.continue_signal();
    assert_eq!(client.receive().unwrap(), text("PONG"));
}

#[test]
fn a_killed_server_comes_back_empty_on_the_same_port() {
    let server = Server::start(Flavor::Redis8);
    let (port, pid) = (server.port(), server.pid());
    server.command(&["SET", "k", "v"]);
    server.kill();
    assert!(server.try_command(&["PING"]).is_err());
    server.restart();
    assert_eq!(server.port(), port);
    assert_ne!(server.pid(), pid);
    assert_eq!(server.command(&["GET", "k"]), Reply::Nil);
}

#[test]
fn a_server_that_saves_has_its_keys_after_a_restart() {
    let saving = Server::builder(Flavor::Valkey9)
        .arg("--appendonly", "yes")
        .arg("--appendfsync", "always")
        .start();
    saving.command(&["SET", "k", "v"]);
    saving.restart();
    assert_eq!(saving.command(&["GET", "k"]), text("v"));
}

#[test]
fn immortal_keys_are_found() {
    for flavor in Flavor::ALL {
        let server = Server::start(flavor);
        let mut client = server.client().unwrap();
        for n in 0..2500 {
            client.command(&["SET", &format!("tg:{n}"), "1", "PX", "600000"]).unwrap();
        }
        assert_eq!(server.keys_without_ttl("tg:"), Vec::<String>::new());
        for key in ["tg:old", "tg:*", "tg:2", "other"] {
            client.command(&["SET", key, "1"]).unwrap();
        }
        assert_eq!(server.keys_without_ttl("tg:"), ["tg:*", "tg:2", "tg:old"]);
    }
}

#[test]
fn a_dropped_server_is_gone_with_its_folder() {
    let server = Server::start(Flavor::Redis62);
    let (pid, folder) = (server.pid(), server.folder().to_owned());
    drop(server);
    assert!(!Path::new(&format!("/proc/{pid}")).exists());
    assert!(!folder.exists());
}

#[test]
fn a_server_that_cannot_start_shows_its_log() {
    let start = || Server::builder(Flavor::Redis7).arg("--maxmemory", "plenty").start();
    let panic = std::panic::catch_unwind(start).unwrap_err();
    let message = panic.downcast_ref::<String>().unwrap();
    assert!(
        message.contains("redis 7.0 did not start") && message.contains("maxmemory"),
        "{message}"
    );
}

/// The threads of tests end before their program does; a server that another owner still holds must
/// not end with them.
#[test]
fn a_server_outlives_the_thread_that_started_it() {
    let server = std::thread::spawn(|| Server::start(Flavor::Redis62)).join().unwrap();
    assert_eq!(server.command(&["PING"]), text("PONG"));
}

/// Runs this test program again as a child whose only test starts a server and waits, and kills it.
#[test]
fn no_server_outlives_an_aborted_test_program() {
    let note = tempfile::NamedTempFile::new().unwrap();
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "server::starts_a_server_and_waits", "--ignored"])
        .env("TIDEGATE_TESTKIT_NOTE", note.path())
        .stdin(Stdio::piped())
        .spawn()
        .unwrap();
    let note = || fs::read_to_string(note.path()).unwrap();
    wait_until("the other program has started its server", SOON, || note().ends_with('\n'));
    let note = note();
    let (pid, folder) = note.trim().split_once(' ').unwrap();
    let server = format!("/proc/{pid}/stat");
    assert!(Path::new(&server).exists());
    child.kill().unwrap();
    child.wait().unwrap();
    // The process that adopted the dead server may not have reaped it yet.
    let is_gone = || {
        fs::read_to_string(&server)
            .ok()
            .is_none_or(|stat| stat.contains(") Z ") || stat.contains(") X "))
    };
    wait_until("the server is gone", SOON, is_gone);
    // No owner was left to do that.
    fs::remove_dir_all(folder).unwrap();
}

#[test]
#[ignore = "it is the other program of no_server_outlives_an_aborted_test_program"]
fn starts_a_server_and_waits() {
    let Some(note) = std::env::var_os("TIDEGATE_TESTKIT_NOTE") else { return };
    let server = Server::start(Flavor::Redis62);
    fs::write(note, format!("{} {}\n", server.pid(), server.folder().display())).unwrap();
    // It ends when the test does, should that not get to kill it.
    let _ = std::io::stdin().read(&mut [0]);
}
