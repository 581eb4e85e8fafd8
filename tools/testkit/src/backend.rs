//! Real web servers as upstreams: Flask under gunicorn, Go's ServeMux, Node, PHP and nginx.
//!
//! Each has two resources, `/login` and `/v1/search`, and answers with the one that was reached and
//! with the path, header `X-Api-Key`, query parameter `k` and cookie `session` that it read. They
//! differ in how they read them, which is what the tests are about.

use std::fs::File;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};
use std::time::Duration;

use tempfile::TempDir;

use crate::flavor::installed;
use crate::gateway::{Gateway, GatewayKind};
use crate::port::Port;
use crate::spawn::spawn;
use crate::wait::becomes_true;

/// How long a server may take until it listens, on a machine under load.
const START: Duration = Duration::from_secs(60);
/// How long an answer may take.
const ANSWER: Duration = Duration::from_secs(30);

/// Which server.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum BackendKind {
    /// nginx 1.22.
    Nginx,
    /// Flask 3.1 under gunicorn.
    Flask,
    /// Go 1.19, net/http with its ServeMux.
    Go,
    /// Node, with `new URL`.
    Node,
    /// PHP 8.2, its own server.
    Php,
}

impl BackendKind {
    /// All of them.
    pub const ALL: [BackendKind; 5] = [
        BackendKind::Nginx,
        BackendKind::Flask,
        BackendKind::Go,
        BackendKind::Node,
        BackendKind::Php,
    ];
}

/// A running server that listens on one port of 127.0.0.1. It is killed when this is dropped.
#[derive(Debug)]
pub struct Backend {
    kind: BackendKind,
    running: Running,
}

#[derive(Debug)]
enum Running {
    Gateway(Gateway),
    Program { child: Child, folder: TempDir, port: Port },
}

impl Backend {
    /// Starts a server, and comes back when it listens.
    ///
    /// # Panics
    /// If the program is missing, with the command that installs it; or if it does not come up,
    /// with its log.
    pub fn start(kind: BackendKind) -> Backend {
        if kind == BackendKind::Nginx {
            let running = Running::Gateway(Gateway::start(GatewayKind::Nginx, &file("nginx"), &[]));
            return Backend { kind, running };
        }
        let (port, folder) =
            (Port::free(false), TempDir::new().expect("a temporary folder can be made"));
        let at = format!("127.0.0.1:{}", port.number());
        let log = File::create(folder.path().join("log")).expect("a file can be made");
        let program = match kind {
            BackendKind::Flask => "python3".into(),
            BackendKind::Node => "node".into(),
            BackendKind::Php => installed("php"),
            _ => installed("go-backend").join("server"),
        };
        let child = spawn(&program, |command| {
            match kind {
                BackendKind::Flask => command
                    .env("PYTHONPATH", installed("python-backends"))
                    .env("PYTHONDONTWRITEBYTECODE", "1")
                    .args(["-m", "gunicorn", "--workers", "1", "--threads", "4", "--bind", &at])
                    .arg("--chdir")
                    .arg(file(""))
                    .arg("flask_app:app"),
                BackendKind::Node => command.arg(file("server.js")).arg(&at),
                BackendKind::Php => command.args(["-n", "-S", &at]).arg(file("index.php")),
                _ => command.arg(&at),
            };
            let error = log.try_clone().expect("a file has a second handle");
            command.current_dir(folder.path()).stdin(Stdio::null()).stdout(log).stderr(error);
        });
        let child = child.unwrap_or_else(|error| panic!("{kind:?} could not be started: {error}"));
        let mut backend = Backend { kind, running: Running::Program { child, folder, port } };
        let up = becomes_true(START, || {
            backend.has_ended() || TcpStream::connect(backend.address()).is_ok()
        });
        assert!(up && !backend.has_ended(), "{kind:?} does not come up:\n{}", backend.log());
        backend
    }

    /// Which server it is.
    pub fn kind(&self) -> BackendKind {
        self.kind
    }

    /// Where it listens.
    pub fn address(&self) -> SocketAddr {
        match &self.running {
            Running::Gateway(gateway) => gateway.address(),
            Running::Program { port, .. } => SocketAddr::from(([127, 0, 0, 1], port.number())),
        }
    }

    /// The answer to a `GET` of this target, byte for byte as it is written here, with these header
    /// lines: its status, and its body.
    ///
    /// # Panics
    /// If there is no answer.
    pub fn get(&self, target: &str, lines: &[&str]) -> (u16, String) {
        get(self.address(), target, lines)
    }

    fn has_ended(&mut self) -> bool {
        match &mut self.running {
            Running::Gateway(_) => false,
            Running::Program { child, .. } => child.try_wait().is_ok_and(|status| status.is_some()),
        }
    }

    /// What it has logged.
    pub fn log(&self) -> String {
        match &self.running {
            Running::Gateway(gateway) => gateway.log(),
            Running::Program { folder, .. } => {
                std::fs::read_to_string(folder.path().join("log")).unwrap_or_default()
            }
        }
    }
}

impl Drop for Backend {
    fn drop(&mut self) {
        if let Running::Program { child, .. } = &mut self.running {
            // gunicorn ends its workers on SIGTERM, and leaves them alone when it is
            // killed.
            if self.kind == BackendKind::Flask
                && let Some(id) =
                    i32::try_from(child.id()).ok().and_then(rustix::process::Pid::from_raw)
            {
                let _ = rustix::process::kill_process(id, rustix::process::Signal::TERM);
                let _ =
                    becomes_true(START, || child.try_wait().is_ok_and(|status| status.is_some()));
            }
            let _ = child.kill().and_then(|()| child.wait());
        }
    }
}

/// Sends a `GET` whose target and header lines are as they are written here, and reads the answer:
/// its status, and its body.
///
/// # Panics
/// If there is no answer.
pub fn get(at: SocketAddr, target: &str, lines: &[&str]) -> (u16, String) {
    let mut stream = TcpStream::connect(at).unwrap_or_else(|error| panic!("{at}: {error}"));
    stream.set_read_timeout(Some(ANSWER)).expect("a connection has a timeout");
    let mut request = format!("GET {target} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n");
    for line in lines {
        request += &format!("{line}\r\n");
    }
    stream.write_all((request + "\r\n").as_bytes()).unwrap_or_else(|error| panic!("{at}: {error}"));
    let mut answer = Vec::new();
    let ended = stream.read_to_end(&mut answer);
    let answer = String::from_utf8_lossy(&answer).into_owned();
    let status = answer.get(9..12).and_then(|status| status.parse().ok());
    let status = status.unwrap_or_else(|| panic!("GET {target} is answered {answer:?}, {ended:?}"));
    let (head, body) = answer.split_once("\r\n\r\n").unwrap_or((&answer, ""));
    let is_chunked = head.to_ascii_lowercase().contains("\r\ntransfer-encoding: chunked");
    (status, if is_chunked { without_chunks(body) } else { body.into() })
}

/// A body without the sizes of its chunks, as far as it came.
fn without_chunks(mut body: &str) -> String {
    let mut out = String::new();
    while let Some((size, rest)) = body.split_once("\r\n") {
        let size = usize::from_str_radix(size.split(';').next().unwrap_or_default().trim(), 16)
            .unwrap_or(0);
        let Some(chunk) = rest.get(..size).filter(|chunk| !chunk.is_empty()) else { break };
        out += chunk;
        body = rest[size..].strip_prefix("\r\n").unwrap_or_default();
    }
    out
}

/// A file of this folder.
fn file(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("backends").join(name)
}
