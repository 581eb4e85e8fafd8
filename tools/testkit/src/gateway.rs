//! Real nginx, Caddy, HAProxy and Traefik before a service. (Envoy has [a file of its
//! own](crate::Envoy).)

use std::fs::{self, File};
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::path::Path;
use std::process::{Child, Stdio};
use std::time::Duration;

use tempfile::TempDir;

use crate::flavor::installed;
use crate::port::Port;
use crate::spawn::spawn;
use crate::wait::becomes_true;

/// How long a gateway may take until it listens. It takes a moment; a machine under load takes
/// longer.
const START: Duration = Duration::from_secs(30);

/// Which gateway.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum GatewayKind {
    /// nginx 1.22.
    Nginx,
    /// Caddy 2.6.
    Caddy,
    /// HAProxy 2.6, with Lua.
    Haproxy,
    /// Traefik 3.7.
    Traefik,
}

impl GatewayKind {
    fn program(self) -> &'static str {
        match self {
            GatewayKind::Nginx => "nginx",
            GatewayKind::Caddy => "caddy",
            GatewayKind::Haproxy => "haproxy",
            GatewayKind::Traefik => "traefik",
        }
    }

    /// What its configuration is called.
    pub fn file(self) -> &'static str {
        match self {
            GatewayKind::Nginx => "nginx.conf",
            GatewayKind::Caddy => "Caddyfile",
            GatewayKind::Haproxy => "haproxy.cfg",
            GatewayKind::Traefik => "traefik-dynamic.yaml",
        }
    }
}

/// A running gateway that listens on one port of 127.0.0.1. It is killed when this is dropped.
#[derive(Debug)]
pub struct Gateway {
    child: Child,
    folder: TempDir,
    port: Port,
}

impl Gateway {
    /// Starts a gateway with the configuration in `folder`, and with all that lies beside it. In
    /// the configuration, and nowhere else, `:8000` is where the gateway listens and becomes a port
    /// of its own; `changes` says what else becomes what, as a user would edit it. Comes back when
    /// it listens.
    ///
    /// # Panics
    /// If the program is missing, with the command that installs it; or if it does not come up,
    /// with its log.
    pub fn start(kind: GatewayKind, folder: &Path, changes: &[(&str, &str)]) -> Gateway {
        let (port, own) = (Port::free(false), edited(kind, folder, changes));
        // Where Traefik says whether it has read its routes.
        let api = Port::free(false);
        let at = |name: &str| own.path().join(name);
        let file = at(kind.file());
        let text = fs::read_to_string(&file).expect("it was just written");
        fs::write(&file, text.replace(":8000", &format!(":{}", port.number())))
            .expect("a file can be written");
        let log = File::create(at("log")).expect("a file can be made");
        let child = spawn(&installed(kind.program()), |command| {
            match kind {
                GatewayKind::Nginx => command
                    .args([
                        "-e",
                        "stderr",
                        "-g",
                        "daemon off; master_process off; pid nginx.pid;",
                        "-c",
                    ])
                    .arg(at(kind.file()))
                    .arg("-p")
                    .arg(own.path()),
                GatewayKind::Caddy => command
                    .args(["run", "--adapter", "caddyfile", "--config", kind.file()])
                    .env("HOME", own.path()),
                // As a service manager starts it: from another folder.
                GatewayKind::Haproxy => command.args(["-db", "-f"]).arg(&file),
                GatewayKind::Traefik => command
                    .arg(format!("--entrypoints.web.address=127.0.0.1:{}", port.number()))
                    .arg(format!("--entrypoints.traefik.address=127.0.0.1:{}", api.number()))
                    .args(["--api.insecure=true", "--global.checknewversion=false"])
                    .arg(format!("--providers.file.filename={}", kind.file())),
            };
            let error = log.try_clone().expect("a file has a second handle");
            let folder = if kind == GatewayKind::Haproxy { Path::new("/") } else { own.path() };
            command.current_dir(folder).stdin(Stdio::null()).stdout(log).stderr(error);
        });
        let child = child.unwrap_or_else(|error| panic!("{kind:?} could not be started: {error}"));
        let mut gateway = Gateway { child, folder: own, port };
        let up = becomes_true(START, || {
            gateway.has_ended()
                || TcpStream::connect(gateway.address()).is_ok()
                    && (kind != GatewayKind::Traefik || has_routes(api.number()))
        });
        assert!(up && !gateway.has_ended(), "{kind:?} does not come up:\n{}", gateway.log());
        gateway
    }

    /// What `haproxy -c`, `nginx -t` or `caddy validate` prints about the configuration in `folder`
    /// after these changes; an error if it is refused.
    ///
    /// # Errors
    /// If the configuration is refused, with what was printed.
    ///
    /// # Panics
    /// If the program is missing.
    pub fn check(
        kind: GatewayKind,
        folder: &Path,
        changes: &[(&str, &str)],
    ) -> Result<String, String> {
        let own = edited(kind, folder, changes);
        let mut command = std::process::Command::new(installed(kind.program()));
        match kind {
            GatewayKind::Nginx => command
                .arg("-t")
                .arg("-c")
                .arg(own.path().join(kind.file()))
                .arg("-p")
                .arg(own.path()),
            GatewayKind::Caddy => {
                command.args(["validate", "--adapter", "caddyfile", "--config", kind.file()])
            }
            GatewayKind::Haproxy => command.args(["-c", "-f", kind.file()]),
            GatewayKind::Traefik => panic!("Traefik has no command that checks a file"),
        };
        let output = command
            .current_dir(own.path())
            .env("HOME", own.path())
            .output()
            .expect("the program runs");
        let printed =
            String::from_utf8_lossy(&[output.stdout, output.stderr].concat()).into_owned();
        if output.status.success() { Ok(printed) } else { Err(printed) }
    }

    fn has_ended(&mut self) -> bool {
        self.child.try_wait().is_ok_and(|status| status.is_some())
    }

    /// Where it listens.
    pub fn address(&self) -> SocketAddr {
        SocketAddr::from(([127, 0, 0, 1], self.port.number()))
    }

    /// What it has logged.
    pub fn log(&self) -> String {
        fs::read_to_string(self.folder.path().join("log")).unwrap_or_default()
    }
}

impl Drop for Gateway {
    fn drop(&mut self) {
        let _ = self.child.kill().and_then(|()| self.child.wait());
    }
}

/// Whether Traefik's API knows the router of the example. Traefik listens before it has read its
/// routes, and answers 404 until then.
fn has_routes(api: u16) -> bool {
    let Ok(mut stream) = TcpStream::connect(("127.0.0.1", api)) else { return false };
    let request = "GET /api/http/routers/app@file HTTP/1.0\r\n\r\n";
    let mut answer = [0; 12];
    stream.write_all(request.as_bytes()).is_ok()
        && stream.read_exact(&mut answer).is_ok()
        && answer.ends_with(b" 200")
}

/// A copy of a folder in which the configuration alone is changed. nginx also gets folders that it
/// may write to.
fn edited(kind: GatewayKind, folder: &Path, changes: &[(&str, &str)]) -> TempDir {
    let own = TempDir::new().expect("a temporary folder can be made");
    for entry in fs::read_dir(folder)
        .unwrap_or_else(|error| panic!("{}: {error}", folder.display()))
        .flatten()
    {
        let Ok(mut text) = fs::read_to_string(entry.path()) else { continue };
        if entry.file_name() == kind.file() {
            for (from, to) in changes {
                text = text.replace(from, to);
            }
        }
        if entry.file_name() == "nginx.conf" {
            let mut folders = String::from("http {\n    access_log off;\n");
            for name in ["client_body", "proxy", "fastcgi", "uwsgi", "scgi"] {
                folders += &format!("    {name}_temp_path temp_{name};\n");
            }
            text = text.replacen("http {\n", &folders, 1);
        }
        fs::write(own.path().join(entry.file_name()), text).expect("a file can be written");
    }
    own
}
