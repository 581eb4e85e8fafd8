//! One server of its own for a test.

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard};
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process};
use tempfile::TempDir;

use crate::builder::{Listen, SOCKET};
use crate::port::Port;
use crate::spawn::spawn;
use crate::wait::becomes_true;
use crate::{Builder, Client, Flavor, Reply};

/// How long a server may take until it answers. A start takes some 20 ms; a machine under load
/// takes longer.
const START: Duration = Duration::from_secs(20);

/// A running server with an empty folder and a port of its own. It is killed when this is dropped.
///
/// Nothing is saved (`--save '' --appendonly no`) unless the builder says otherwise.
#[derive(Debug)]
pub struct Server {
    setup: Builder,
    port: Port,
    folder: TempDir,
    child: Mutex<Option<Child>>,
    stopped: AtomicBool,
}

/// In the server's folder.
const LOG: &str = "log";

impl Server {
    /// Starts a server and comes back when it answers.
    ///
    /// # Panics
    /// If the program is missing or does not come up; with the end of its log.
    pub fn start(flavor: Flavor) -> Server {
        Server::builder(flavor).start()
    }

    /// Starts a server that is not quite as usual:
    ///
    /// ```
    /// # use tidegate_testkit::{Flavor, Server};
    /// let server =
    ///     Server::builder(Flavor::Valkey9).arg("--maxmemory", "3mb").unix_socket().start();
    /// # assert!(server.socket_path().unwrap().exists());
    /// ```
    pub fn builder(flavor: Flavor) -> Builder {
        Builder::new(flavor)
    }

    /// What a client is given to find the server.
    pub fn url(&self) -> String {
        let password = self.setup.password.as_deref();
        let who = password.map_or_else(String::new, |password| format!(":{password}@"));
        match self.setup.listen {
            Listen::Tcp => format!("redis://{who}127.0.0.1:{}", self.port()),
            Listen::Tls { .. } => format!("rediss://{who}127.0.0.1:{}", self.port()),
            Listen::Unix => {
                let query =
                    password.map_or_else(String::new, |password| format!("?pass={password}"));
                format!("redis+unix://{}{query}", self.folder.path().join(SOCKET).display())
            }
        }
    }

    /// Which server it is.
    pub fn flavor(&self) -> Flavor {
        self.setup.flavor
    }

    /// The port on 127.0.0.1. It stays the same over a restart.
    pub fn port(&self) -> u16 {
        self.port.number()
    }

    /// The Unix socket, if it listens on one. (One with TLS does, for the kit.)
    pub fn socket_path(&self) -> Option<PathBuf> {
        (!matches!(self.setup.listen, Listen::Tcp)).then(|| self.folder.path().join(SOCKET))
    }

    /// The folder it runs in, with whatever it saves.
    pub fn folder(&self) -> &Path {
        self.folder.path()
    }

    /// Whether it runs: it was not killed and has not ended by itself. A stopped one runs.
    pub fn is_running(&self) -> bool {
        self.child().as_mut().is_some_and(|child| matches!(child.try_wait(), Ok(None)))
    }

    /// Whether it answers: it runs and was not stopped.
    pub fn is_awake(&self) -> bool {
        self.is_running() && !self.stopped.load(Ordering::SeqCst)
    }

    /// The id of the process.
    ///
    /// # Panics
    /// If it was killed.
    #[track_caller]
    pub fn pid(&self) -> u32 {
        self.child().as_ref().expect("the server is running").id()
    }

    /// Everything it has logged.
    pub fn log(&self) -> String {
        String::from_utf8_lossy(&fs::read(self.folder.path().join(LOG)).unwrap_or_default())
            .into_owned()
    }

    /// Stops it where it is (`SIGSTOP`): connections stay open and nothing is answered.
    ///
    /// Comes back when it has really stopped.
    #[track_caller]
    pub fn stop_signal(&self) {
        self.stopped.store(true, Ordering::SeqCst);
        self.signal(Signal::STOP);
        let stat = format!("/proc/{}/stat", self.pid());
        // The state is the letter after the name, which is in parentheses. Without /proc the signal
        // must do.
        let stopped = || {
            fs::read_to_string(&stat)
                .ok()
                .is_none_or(|stat| stat.rsplit(')').next().unwrap_or("").contains('T'))
        };
        assert!(becomes_true(START, stopped), "the server did not stop");
    }

    /// Lets it go on (`SIGCONT`).
    #[track_caller]
    pub fn continue_signal(&self) {
        self.signal(Signal::CONT);
        self.stopped.store(false, Ordering::SeqCst);
    }

    /// Kills it (`SIGKILL`): what it had not saved is lost, and connections break. The port stays
    /// reserved.
    pub fn kill(&self) {
        if let Some(mut child) = self.child().take() {
            child.kill().and_then(|()| child.wait()).expect("a child can be killed and waited for");
            self.stopped.store(false, Ordering::SeqCst);
        }
    }

    /// Kills it if it runs, starts it again on the same port and in the same folder, and comes back
    /// when it answers.
    ///
    /// # Panics
    /// If it does not come up; with the end of its log.
    #[track_caller]
    pub fn restart(&self) {
        self.kill();
        if let Err(log) = self.spawn() {
            panic!("{} did not start again:\n{log}", self.setup.flavor);
        }
    }

    /// Sends one command over a connection of its own and gives the reply, which may be an error.
    ///
    /// # Panics
    /// If there is no reply.
    #[track_caller]
    pub fn command(&self, words: &[impl AsRef<[u8]>]) -> Reply {
        self.try_command(words).unwrap_or_else(|error| {
            let words: Vec<_> =
                words.iter().map(|word| String::from_utf8_lossy(word.as_ref())).collect();
            panic!("{words:?}: no reply: {error}")
        })
    }

    /// The same for a server that may be down.
    pub fn try_command(&self, words: &[impl AsRef<[u8]>]) -> io::Result<Reply> {
        self.client()?.command(words)
    }

    /// A connection that has said the password, if there is one.
    pub fn client(&self) -> io::Result<Client> {
        let mut client = match self.socket_path() {
            Some(path) => Client::connect_unix(&path)?,
            None => Client::connect(self.port())?,
        };
        if let Some(password) = &self.setup.password {
            match client.command(&["AUTH", password])? {
                Reply::Error(error) => {
                    return Err(io::Error::new(io::ErrorKind::PermissionDenied, error));
                }
                _ => return Ok(client),
            }
        }
        Ok(client)
    }

    /// The keys that begin with `prefix` and would stay for ever, in order. There should be none.
    #[track_caller]
    pub fn keys_without_ttl(&self, prefix: &str) -> Vec<String> {
        let search = || -> io::Result<BTreeSet<String>> {
            let mut client = self.client()?;
            let (mut found, mut cursor) = (BTreeSet::new(), "0".to_owned());
            loop {
                let page = client.command(&["SCAN", &cursor, "COUNT", "1000"])?;
                let [next, keys] = page.array() else {
                    panic!("SCAN: expected a cursor and keys, found {page:?}")
                };
                for key in keys.array() {
                    let key = match key {
                        Reply::Text(text) => text.as_bytes(),
                        Reply::Bytes(bytes) => bytes,
                        other => panic!("SCAN: expected keys, found {other:?}"),
                    };
                    // -1 is a key without a TTL; -2 is one that has gone meanwhile.
                    if key.starts_with(prefix.as_bytes())
                        && client.command(&[b"PTTL", key])? == Reply::Int(-1)
                    {
                        found.insert(String::from_utf8_lossy(key).into_owned());
                    }
                }
                cursor = next.text().to_owned();
                if cursor == "0" {
                    return Ok(found);
                }
            }
        };
        search().unwrap_or_else(|error| panic!("SCAN: no reply: {error}")).into_iter().collect()
    }

    /// Without an answer, what comes back is the log.
    pub(crate) fn try_start(setup: Builder, bus: bool) -> Result<Server, String> {
        let mut folder = tempfile::Builder::new();
        folder.prefix("tidegate-");
        // In memory, where there is such a place: a server waits for what it writes there, and what
        // is tested is not the disk.
        let in_memory = folder.tempdir_in("/dev/shm").ok();
        let folder =
            in_memory.unwrap_or_else(|| folder.tempdir().expect("a temporary folder can be made"));
        let (child, stopped) = (Mutex::new(None), AtomicBool::new(false));
        let server = Server { setup, port: Port::free(bus), folder, child, stopped };
        server.spawn().map(|()| server)
    }

    fn child(&self) -> MutexGuard<'_, Option<Child>> {
        // A test that panicked while it held the child has not broken it, and the child must still
        // be killed.
        self.child.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }

    #[track_caller]
    fn signal(&self, signal: Signal) {
        let child = self.child();
        let pid = Pid::from_child(child.as_ref().expect("the server is running"));
        kill_process(pid, signal).expect("a child can be sent a signal");
    }

    /// Starts the program and waits until it answers. What comes back if it does not is the log.
    fn spawn(&self) -> Result<(), String> {
        let program = self.setup.flavor.program();
        let log = File::options().create(true).append(true).open(self.folder.path().join(LOG));
        let log = log.expect("a file can be made in a temporary folder");
        let mut words = self.setup.under.iter().map(PathBuf::from).chain([program.clone()]);
        let first = words.next().unwrap_or(program);
        let child = spawn(&first, |command| {
            command
                .args(words.by_ref())
                .args(self.setup.command_line(self.port(), self.folder.path()));
            command.envs(self.setup.environment.iter().map(|(name, value)| (name, value)));
            let errors = log.try_clone().expect("a file can be opened twice");
            command.current_dir(self.folder.path()).stdin(Stdio::null()).stdout(log).stderr(errors);
        })
        .map_err(|error| format!("{}: {error}", first.display()))?;
        *self.child() = Some(child);

        let mut exited = false;
        let up = becomes_true(START, || {
            exited = !self.is_running();
            exited || self.answers()
        });
        if up && !exited {
            return Ok(());
        }
        self.kill();
        Err(self.log())
    }

    fn answers(&self) -> bool {
        match self.try_command(&["PING"]) {
            Ok(Reply::Text(pong)) => pong == "PONG",
            // It answers: with a password that only the test knows, from an option or from a file.
            Ok(Reply::Error(error)) => error.starts_with("NOAUTH"),
            _ => false,
        }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.kill();
    }
}
