//! How a server is to be started.

use std::fs;
use std::path::Path;

use crate::{Certs, Flavor, Server};

/// How often another port is tried if another process took the chosen one.
const PORTS: usize = 5;

/// Relative to the server's folder, in which it runs.
pub(crate) const SOCKET: &str = "socket";
const SENTINEL: &str = "sentinel.conf";

/// A server that is not quite as usual. See [`Server::builder`].
#[derive(Clone, Debug)]
pub struct Builder {
    pub(crate) flavor: Flavor,
    pub(crate) password: Option<String>,
    pub(crate) listen: Listen,
    /// Options with their values.
    args: Vec<Vec<String>>,
    pub(crate) environment: Vec<(String, String)>,
    /// What runs the program instead of the system, such as valgrind, with its options.
    pub(crate) under: Vec<String>,
    bus: bool,
    sentinel: Option<String>,
}

/// Where clients come in.
#[derive(Clone, Debug)]
pub(crate) enum Listen {
    Tcp,
    /// And on no port.
    Unix,
    /// And on a Unix socket for the kit, which cannot speak TLS.
    Tls {
        certs: Certs,
        /// Whether clients have to show a certificate.
        mutual: bool,
    },
}

impl Builder {
    pub(crate) fn new(flavor: Flavor) -> Builder {
        Builder {
            flavor,
            password: None,
            listen: Listen::Tcp,
            args: Vec::new(),
            environment: Vec::new(),
            under: Vec::new(),
            bus: false,
            sentinel: None,
        }
    }

    /// Adds an option, such as `("--maxclients", "5")`. It takes the place of the kit's own choice
    /// for that option.
    pub fn arg(self, name: &str, value: &str) -> Builder {
        self.args(name, &[value])
    }

    /// The same for an option with several values, such as `("--replicaof", &["127.0.0.1",
    /// "6379"])`.
    ///
    /// # Panics
    /// If the name does not begin with two dashes.
    #[track_caller]
    pub fn args(mut self, name: &str, values: &[&str]) -> Builder {
        assert!(name.starts_with("--"), "option {name:?}: expected it to begin with two dashes");
        self.args.push([&[name], values].concat().into_iter().map(str::to_owned).collect());
        self
    }

    /// Has the program run by another one, such as `["valgrind", "--tool=callgrind"]`, which must
    /// become it.
    pub fn under(mut self, words: &[&str]) -> Builder {
        self.under = words.iter().map(|word| (*word).to_owned()).collect();
        self
    }

    /// Sets an environment variable for the program.
    pub fn env(mut self, name: &str, value: &str) -> Builder {
        self.environment.push((name.to_owned(), value.to_owned()));
        self
    }

    /// Clients must know this password. The kit's own commands do.
    pub fn password(mut self, password: &str) -> Builder {
        self.password = Some(password.to_owned());
        self
    }

    /// Listens on a Unix socket and on no port.
    pub fn unix_socket(mut self) -> Builder {
        self.listen = Listen::Unix;
        self
    }

    /// Listens with TLS and nothing else. Clients need not show a certificate.
    ///
    /// # Panics
    /// If this build of the server has no TLS: see [`Flavor::has_tls`].
    #[track_caller]
    pub fn tls(self, certs: &Certs) -> Builder {
        self.listen_with_tls(certs, false)
    }

    /// The same, and clients have to show a certificate of the same authority.
    ///
    /// # Panics
    /// If this build of the server has no TLS: see [`Flavor::has_tls`].
    #[track_caller]
    pub fn mutual_tls(self, certs: &Certs) -> Builder {
        self.listen_with_tls(certs, true)
    }

    #[track_caller]
    fn listen_with_tls(mut self, certs: &Certs, mutual: bool) -> Builder {
        assert!(
            self.flavor.has_tls(),
            "{} has no TLS: expected a flavor whose `has_tls` is true",
            self.flavor
        );
        self.listen = Listen::Tls { certs: certs.clone(), mutual };
        self
    }

    /// Keeps the port of the cluster's bus as well.
    pub(crate) fn cluster_node(mut self) -> Builder {
        self.bus = true;
        self
    }

    /// A replica gets everything immediately, instead of after five seconds in case another one
    /// comes, and hears from its master every second instead of every ten; until it has heard, a
    /// cluster does not count it.
    pub(crate) fn follows_at_once(self) -> Builder {
        self.arg("--repl-diskless-sync-delay", "0").arg("--repl-ping-replica-period", "1")
    }

    /// A sentinel, with these lines in its file. Options make no sense then.
    pub(crate) fn sentinel(mut self, lines: &str) -> Builder {
        self.sentinel = Some(lines.to_owned());
        self
    }

    /// Starts it, and comes back when it answers.
    ///
    /// # Panics
    /// If the program is missing or does not come up; with its log.
    #[track_caller]
    pub fn start(self) -> Server {
        for left in (0..PORTS).rev() {
            match Server::try_start(self.clone(), self.bus) {
                Ok(server) => return server,
                Err(log) if left > 0 && log.contains("Address already in use") => {}
                Err(log) => panic!("{} did not start:\n{log}", self.flavor),
            }
        }
        unreachable!("the last try returns or panics")
    }

    /// The arguments of the program: the kit's choices, then the test's, which win.
    pub(crate) fn command_line(&self, port: u16, folder: &Path) -> Vec<String> {
        if let Some(lines) = &self.sentinel {
            let file = folder.join(SENTINEL);
            // A sentinel keeps in its file what it has learnt, so one that starts again finds its
            // own.
            if !file.exists() {
                fs::write(&file, format!("bind 127.0.0.1\nport {port}\n{lines}"))
                    .expect("a temporary file can be written");
            }
            return [SENTINEL, "--sentinel"].map(str::to_owned).into();
        }
        let mut line = vec![
            ("--bind", "127.0.0.1".to_owned()),
            ("--save", String::new()),
            ("--appendonly", "no".into()),
        ];
        match &self.listen {
            Listen::Tcp => line.push(("--port", port.to_string())),
            Listen::Unix => line.extend([("--port", "0".into()), ("--unixsocket", SOCKET.into())]),
            Listen::Tls { certs, mutual } => {
                let path = |path: &Path| path.display().to_string();
                line.extend([
                    ("--port", "0".into()),
                    ("--unixsocket", SOCKET.into()),
                    ("--tls-port", port.to_string()),
                    ("--tls-ca-cert-file", path(&certs.ca())),
                    ("--tls-cert-file", path(&certs.server_cert())),
                    ("--tls-key-file", path(&certs.server_key())),
                    ("--tls-auth-clients", if *mutual { "yes" } else { "no" }.into()),
                ]);
            }
        }
        if self.flavor != Flavor::Redis62 {
            // Since Redis 7 it must be allowed; before, it always was.
            line.push(("--enable-debug-command", "local".into()));
        }
        if let Some(password) = &self.password {
            line.push(("--requirepass", password.clone()));
        }
        line.retain(|(name, _)| !self.args.iter().any(|words| words[0] == *name));
        let own = line.into_iter().flat_map(|(name, value)| [name.to_owned(), value]);
        own.chain(self.args.iter().flatten().cloned()).collect()
    }
}
