//! A real Envoy, in front of something.

use std::fs::{self, File};
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::process::{Child, Stdio};
use std::time::Duration;

use tempfile::TempDir;

use crate::flavor::envoy;
use crate::spawn::spawn;
use crate::wait::becomes_true;

/// How long Envoy may take until it listens. It takes about a second; a machine under load takes
/// longer.
const START: Duration = Duration::from_secs(60);

/// A running Envoy with one listener. It is killed when this is dropped.
#[derive(Debug)]
pub struct Envoy {
    child: Child,
    folder: TempDir,
    admin: SocketAddr,
    listener: SocketAddr,
}

impl Envoy {
    /// Starts Envoy with this configuration, which has one listener on port 0 and no `admin`, and
    /// comes back when it listens.
    ///
    /// # Panics
    /// If the program is missing or does not come up; with the end of its log.
    pub fn start(config: &str) -> Envoy {
        let folder = TempDir::new().expect("a temporary folder can be made");
        let at = |name: &str| folder.path().join(name);
        let admin = "admin: { address: { socket_address: { address: 127.0.0.1, port_value: 0 } } }";
        fs::write(at("envoy.yaml"), format!("{admin}\n{config}")).expect("a file can be written");
        // Envoy opens it again for the health check's events: both must append.
        let log =
            File::options().create(true).append(true).open(at("log")).expect("a file can be made");
        let child = spawn(&envoy(), |command| {
            command.arg("-c").arg(at("envoy.yaml")).arg("--admin-address-path").arg(at("admin"));
            command.args(["--concurrency", "1", "--disable-hot-restart", "-l", "warning"]);
            command
                .current_dir(folder.path())
                .stdin(Stdio::null())
                .stdout(Stdio::null())
                .stderr(Stdio::from(log));
        });
        let mut child = child.unwrap_or_else(|error| panic!("envoy could not be started: {error}"));
        let (mut found, mut ended) = (None, false);
        let up = becomes_true(START, || {
            ended = child.try_wait().is_ok_and(|status| status.is_some());
            let admin =
                fs::read_to_string(at("admin")).ok().and_then(|text| text.trim().parse().ok());
            found = admin.and_then(|admin| Some((admin, listener(admin)?)));
            ended || found.is_some()
        });
        match found {
            Some((admin, listener)) if up && !ended => Envoy { child, folder, admin, listener },
            _ => {
                let _ = child.kill().and_then(|()| child.wait());
                let log = fs::read_to_string(at("log")).unwrap_or_default();
                panic!("envoy does not come up:\n{log}");
            }
        }
    }

    /// Where it listens.
    pub fn address(&self) -> SocketAddr {
        self.listener
    }

    /// What it has counted under a name.
    ///
    /// # Panics
    /// If it does not answer.
    pub fn counter(&self, name: &str) -> u64 {
        let stats =
            ask(self.admin, &format!("/stats?usedonly&filter={name}")).expect("envoy answers");
        let line = stats.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(": "));
        line.and_then(|number| number.trim().parse().ok()).unwrap_or(0)
    }

    /// What it has logged.
    pub fn log(&self) -> String {
        fs::read_to_string(self.folder.path().join("log")).unwrap_or_default()
    }
}

impl Drop for Envoy {
    fn drop(&mut self) {
        let _ = self.child.kill().and_then(|()| self.child.wait());
    }
}

/// Where its listener is, once it is ready: a line `name::127.0.0.1:41234`.
fn listener(admin: SocketAddr) -> Option<SocketAddr> {
    if !ask(admin, "/ready")?.starts_with("LIVE") {
        return None;
    }
    ask(admin, "/listeners")?.lines().find_map(|line| line.split_once("::")?.1.trim().parse().ok())
}

fn ask(admin: SocketAddr, path: &str) -> Option<String> {
    let mut stream = TcpStream::connect(admin).ok()?;
    stream.set_read_timeout(Some(START)).ok()?;
    write!(stream, "GET {path} HTTP/1.1\r\nhost: envoy\r\nconnection: close\r\n\r\n").ok()?;
    let mut text = String::new();
    stream.read_to_string(&mut text).ok()?;
    let (head, body) = text.split_once("\r\n\r\n")?;
    if !head.to_ascii_lowercase().contains("transfer-encoding: chunked") {
        return Some(body.into());
    }
    let (mut rest, mut whole) = (body, String::new());
    while let Some((length, chunk)) = rest.split_once("\r\n") {
        let length = usize::from_str_radix(length.trim(), 16).ok().filter(|length| *length > 0);
        let Some(length) = length else { break };
        whole.push_str(chunk.get(..length)?);
        rest = chunk.get(length + 2..)?;
    }
    Some(whole)
}
