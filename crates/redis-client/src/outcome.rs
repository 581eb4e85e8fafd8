//! The outcome of a call, and the one table that maps error replies to outcomes.
//!
//! An error reply says that the command certainly did not run, so that a retry is safe, or leaves
//! that open. [`rule`] decides it for every error reply; a failure without a reply is made by
//! [`Failure::local`].

use std::fmt;
use std::sync::Arc;

use super::resp::Value;

/// The outcome of a call.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// The server ran it; this is its reply.
    Applied(Value),
    /// The server certainly did not run it. A retry is safe.
    NotApplied(Failure),
    /// The server may have run it. A retry could charge twice.
    Unknown(Failure),
}

/// Why a call has no reply, in one sentence.
///
/// It never shows credentials. The text of a server is escaped and cut to 128 bytes.
#[derive(Clone, PartialEq, Eq)]
pub struct Failure {
    kind: FailureKind,
    text: Arc<str>,
    /// Sentinel or the cluster map will name another server, so a failure that would be permanent
    /// with a fixed address is not.
    passes: bool,
}

/// The kind of a [`Failure`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum FailureKind {
    /// The server does not have the script, and it could not be loaded.
    NoScript,
    /// The server is a replica and takes no writes.
    ReadOnly,
    /// The server has fewer replicas than `min-replicas-to-write` requires.
    NoReplicas,
    /// The server is a replica that has lost its primary.
    MasterDown,
    /// The server is still loading its data.
    Loading,
    /// The server is running a long script.
    Busy,
    /// The cluster does not serve the slot.
    ClusterDown,
    /// The slot has another owner, and following the redirects did not reach it.
    Moved,
    /// The slot is being moved, and its new owner did not answer.
    Ask,
    /// The slot is being moved and its keys are on both sides.
    TryAgain,
    /// The keys of one script are in different slots.
    CrossSlot,
    /// The server requires credentials, or refuses connections from this address.
    NoAuth,
    /// The server does not accept the credentials.
    WrongPass,
    /// The user may not run this command or touch this key.
    NoPerm,
    /// The server does not have the database that the URL names.
    NoDatabase,
    /// The server does not know a command that is needed: `EVALSHA`, `SCRIPT`, or one that the
    /// script calls.
    Unsupported,
    /// The URL names another kind of deployment: a single server where there is a cluster, or the
    /// reverse.
    Topology,
    /// The server is out of memory.
    Oom,
    /// The server cannot persist and therefore takes no writes.
    Misconf,
    /// The server has reached `maxclients`.
    MaxClients,
    /// A key holds a value of another type.
    WrongType,
    /// The script failed.
    Script,
    /// The server refused the connection.
    Refused,
    /// The name of the server has no address.
    Unresolved,
    /// The TLS handshake failed.
    Tls,
    /// The connection broke.
    Disconnected,
    /// No reply before the deadline.
    Timeout,
    /// Too many calls are waiting for this server.
    Overloaded,
    /// The bytes received are not a reply.
    Protocol,
    /// Anything else; the text says what.
    Other,
}

impl Failure {
    /// The kind of failure.
    pub fn kind(&self) -> FailureKind {
        self.kind
    }

    /// Whether only a change of configuration, here or on the server, can fix it: wrong
    /// credentials, missing rights, a database that does not exist, a replica at a fixed address, a
    /// certificate that is not trusted, no scripting.
    pub fn is_permanent(&self) -> bool {
        use FailureKind as K;
        let permanent = matches!(
            self.kind,
            K::NoAuth
                | K::WrongPass
                | K::NoPerm
                | K::NoDatabase
                | K::Unsupported
                | K::Topology
                | K::Tls
                | K::ReadOnly
                | K::MasterDown
        );
        permanent && !self.passes
    }

    /// Whether the server answers but takes no writes: a [permanent](Failure::is_permanent)
    /// failure, or a temporary state of the server or the cluster.
    pub fn is_refusal(&self) -> bool {
        use FailureKind as K;
        let takes_no_writes = matches!(
            self.kind,
            K::Oom | K::Misconf | K::NoReplicas | K::ReadOnly | K::MasterDown | K::ClusterDown
        );
        takes_no_writes || self.is_permanent()
    }

    /// What to do about it; empty where the text of the failure says enough.
    pub fn advice(&self) -> &'static str {
        advice(self.kind, &self.text)
    }

    /// A failure that is not an error reply. `text` must be a sentence without credentials.
    pub fn local(kind: FailureKind, text: impl Into<Arc<str>>) -> Self {
        Failure { kind, text: text.into(), passes: false }
    }

    /// The failure of an error reply.
    pub(super) fn said(kind: FailureKind, text: &str) -> Self {
        let said = escaped(text);
        Failure::local(kind, format!("{}: \"{said}\"", sentence(kind)))
    }

    /// The same, prefixed with the operation.
    pub(super) fn during(&self, what: &str) -> Self {
        Failure { text: format!("{what}: {}", self.text).into(), ..self.clone() }
    }

    /// The same, not permanent because Sentinel or the cluster map will name another server.
    pub(super) fn passing(self) -> Self {
        Failure { passes: true, ..self }
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

impl fmt::Debug for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}({:?})", self.kind, &*self.text)
    }
}

impl std::error::Error for Failure {}

/// What the router does about an error reply, besides returning it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Then {
    /// Nothing: a retry would meet the same.
    GiveUp,
    /// Load the script and run it again.
    Load,
    /// Retry on the node that the error names, and update the map.
    Follow,
    /// Retry on the node that the error names, once.
    Ask,
    /// Find the server that takes writes, and retry there once.
    Rediscover,
    /// Wait briefly and retry once; the map of the cluster may have changed, too. The cause is
    /// often brief: in a planned failover, nodes may learn that the old primary gave up its slots
    /// before they learn the new owner.
    Wait,
    /// Retire the connection, so that the next one logs in again.
    Reconnect,
}

/// A row of the table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Ruling {
    pub(super) kind: FailureKind,
    /// Whether the command certainly did not run.
    pub(super) not_applied: bool,
    pub(super) then: Then,
}

/// The table: the meaning of each error reply.
///
/// A script that fails half-way may have written. But some errors can only meet a script at its
/// first write: whether a server is a replica, is out of memory, cannot persist or lacks replicas
/// is settled before a script starts and does not change until it ends. So these mean *not applied*
/// even when a script raised them.
pub(super) fn rule(error: &str) -> Ruling {
    use FailureKind as K;
    let (code, in_script) = code_of(error);
    let (kind, not_applied, then) = match code {
        "NOSCRIPT" => (K::NoScript, true, Then::Load),
        "READONLY" => (K::ReadOnly, true, Then::Rediscover),
        "MASTERDOWN" => (K::MasterDown, true, Then::Rediscover),
        "NOREPLICAS" => (K::NoReplicas, true, Then::GiveUp),
        "OOM" => (K::Oom, true, Then::GiveUp),
        "MISCONF" => (K::Misconf, true, Then::GiveUp),
        "LOADING" => (K::Loading, true, Then::GiveUp),
        "BUSY" => (K::Busy, true, Then::GiveUp),
        "CLUSTERDOWN" => (K::ClusterDown, !in_script, Then::Wait),
        "MOVED" => (K::Moved, !in_script, Then::Follow),
        "ASK" => (K::Ask, !in_script, Then::Ask),
        "TRYAGAIN" => (K::TryAgain, !in_script, Then::GiveUp),
        "CROSSSLOT" => (K::CrossSlot, !in_script, Then::GiveUp),
        "NOAUTH" => (K::NoAuth, !in_script, Then::Reconnect),
        "DENIED" => (K::NoAuth, true, Then::GiveUp),
        "WRONGPASS" => (K::WrongPass, true, Then::GiveUp),
        "NOPERM" => (K::NoPerm, !in_script, Then::GiveUp),
        // The error value of a `pcall` does not say that it comes from a script.
        "WRONGTYPE" => (K::WrongType, false, Then::GiveUp),
        _ if in_script && lacks_permission(error) => (K::NoPerm, false, Then::GiveUp),
        _ if in_script && is_unknown_command(error) => (K::Unsupported, false, Then::GiveUp),
        _ if in_script => (K::Script, false, Then::GiveUp),
        "ERR" => match error {
            _ if starts(error, "ERR max number of clients") => (K::MaxClients, true, Then::GiveUp),
            // The command did not run.
            _ if starts(error, "ERR unknown command") => (K::Unsupported, true, Then::GiveUp),
            _ if starts(error, "ERR unknown subcommand") => (K::Unsupported, true, Then::GiveUp),
            _ if starts(error, "ERR This instance has cluster support disabled") => {
                (K::Topology, true, Then::GiveUp)
            }
            _ if starts(error, "ERR DB index is out of range") => {
                (K::NoDatabase, true, Then::GiveUp)
            }
            _ if starts(error, "ERR invalid DB index") => (K::NoDatabase, true, Then::GiveUp),
            _ if starts(error, "ERR SELECT is not allowed in cluster mode") => {
                (K::NoDatabase, true, Then::GiveUp)
            }
            _ if starts(error, "ERR wrong number of arguments") => (K::Other, true, Then::GiveUp),
            _ if starts(error, "ERR Error compiling script") => (K::Script, true, Then::GiveUp),
            _ if starts(error, "ERR invalid password") => (K::WrongPass, true, Then::GiveUp),
            _ if starts(error, "ERR AUTH <password> called without") => {
                (K::WrongPass, true, Then::GiveUp)
            }
            _ if starts(error, "ERR Client sent AUTH, but no password") => {
                (K::WrongPass, true, Then::GiveUp)
            }
            _ => (K::Other, false, Then::GiveUp),
        },
        // An unknown error may occur at any point of a command.
        _ => (K::Other, false, Then::GiveUp),
    };
    Ruling { kind, not_applied, then }
}

/// Whether a script lacked a permission.
fn lacks_permission(error: &str) -> bool {
    error.contains("ACL failure in script") || error.contains("The user executing the script can't")
}

/// Whether a script called a command that the server does not have: `Unknown Redis command
/// called from Lua script` (6.2), `Unknown Redis command called from script` (7.0 and later),
/// `Unknown command called from script` (Valkey).
pub fn is_unknown_command(error: &str) -> bool {
    error.contains("Unknown Redis command called from")
        || error.contains("Unknown command called from")
}

fn starts(text: &str, prefix: &str) -> bool {
    text.get(..prefix.len()).is_some_and(|start| start.eq_ignore_ascii_case(prefix))
}

/// The code of an error, and whether a script raised it.
///
/// From Redis 7 on an error keeps its code and says at its end where in the script it was raised.
/// Redis 6.2 begins with `ERR Error running script` and has the code, if any, further in.
fn code_of(error: &str) -> (&str, bool) {
    fn first(text: &str) -> &str {
        text.split([' ', '\r', '\n']).next().unwrap_or("")
    }
    if starts(error, "ERR Error running script") {
        let words = error.split(": ").skip(1).map(|part| first(part.trim_start_matches('-')));
        let mut codes = words
            .filter(|word| word.len() > 2 && word.bytes().all(|byte| byte.is_ascii_uppercase()));
        return (codes.next().unwrap_or("ERR"), true);
    }
    (first(error), error.contains("on @user_script:") || error.starts_with("ERR user_script"))
}

/// The beginning of a failure, before the text of the server.
fn sentence(kind: FailureKind) -> &'static str {
    use FailureKind as K;
    match kind {
        K::NoScript => "the server does not have the script",
        K::ReadOnly => "the server is a replica and takes no writes",
        K::NoReplicas => "the server has too few replicas to take writes (min-replicas-to-write)",
        K::MasterDown => "the server is a replica that has lost its primary",
        K::Loading => "the server is still loading its data",
        K::Busy => "the server is busy with a long script",
        K::ClusterDown => "the cluster does not serve this slot",
        K::Moved => "the slot lives on another node",
        K::Ask => "the slot is being moved to another node",
        K::TryAgain => "the slot is being moved and its keys are on both sides",
        K::CrossSlot => "the keys of one call are in different slots",
        K::NoAuth => "the server wants credentials",
        K::WrongPass => "the server does not accept the user or password",
        K::NoPerm => "the user lacks a permission",
        K::NoDatabase => "the server does not have this database",
        K::Unsupported => "the server does not know a command that is needed",
        K::Topology => "the URL names another kind of deployment than the server is",
        K::Oom => "the server is out of memory (maxmemory)",
        K::Misconf => "the server cannot persist its data and takes no writes",
        K::MaxClients => "the server has as many clients as it may have (maxclients)",
        K::WrongType => "a key holds a value of another type",
        K::Script => "the script failed",
        K::Refused => "the server refused the connection",
        K::Unresolved => "the name of the server has no address",
        K::Tls => "TLS failed",
        K::Disconnected => "the connection broke",
        K::Timeout => "no answer in time",
        K::Overloaded => "too many calls are waiting",
        K::Protocol => "the server does not speak RESP",
        K::Other => "the server answered with an error",
    }
}

/// What to do about a failure.
fn advice(kind: FailureKind, text: &str) -> &'static str {
    use FailureKind as K;
    match kind {
        K::Refused => {
            "Is it running there? `redis-server --port 6379` or `valkey-server --port 6379` starts one; another address goes into \
             the URL: redis://HOST:PORT."
        }
        K::Unresolved => {
            "Is the name right? For Sentinel, the name of the service follows the hosts: redis+sentinel://HOST/SERVICE."
        }
        K::NoAuth => {
            "Put user and password into the URL: redis://USER:PASSWORD@HOST, or redis://:PASSWORD@HOST without a user. \
             TIDEGATE_STORE keeps it out of the list of processes."
        }
        K::WrongPass => {
            "Check user and password. Characters such as @ : / ? # % are percent-encoded in a URL: p@ss is written p%40ss."
        }
        K::Tls if text.contains("without TLS") || text.contains("does not speak TLS") => {
            "Write redis:// instead of rediss://, or name the port on which it speaks TLS."
        }
        K::Tls if text.contains("not signed by an authority") => {
            "Name the file with the certificate of the authority that signed it: rediss://HOST?ca=FILE."
        }
        K::Tls if text.contains("of the client") || text.contains("client's certificate") => {
            "Give it a certificate that it accepts: rediss://HOST?cert=FILE&key=FILE."
        }
        K::Tls if text.contains(", not for ") || text.contains("another name") => {
            "Write the host in the URL as the certificate names it, or give the server a certificate for this host."
        }
        K::Tls if text.contains("(CA:TRUE)") => {
            "Sign a server certificate with that authority and set Redis to use it; leave ?ca= as it is."
        }
        K::Tls if text.contains("has expired") => "Renew the certificate of the server.",
        K::Tls if text.contains("not valid yet") => {
            "Set the clock of this machine, or wait until the certificate is valid."
        }
        K::Tls => {
            "`openssl s_client -connect HOST:PORT` shows the server's certificate and which versions and ciphers it accepts."
        }
        K::Timeout => "Is the address right, and no firewall in between?",
        K::Disconnected | K::Protocol => {
            "Does it speak another protocol there? A server with TLS is rediss://; Sentinel is redis+sentinel://."
        }
        K::NoPerm => "`tidegate doctor --store URL` names the rights that are missing.",
        K::NoDatabase => {
            "The number of the database follows the host: redis://HOST/0. A cluster has database 0 only; `databases` in redis.conf \
             says how many a single server has."
        }
        K::Unsupported if text.contains("rejected SENTINEL") => {
            "It is not a sentinel, which usually listens on port 26379; a server is redis://."
        }
        K::Unsupported => {
            "Decisions are scripts: the server has to know EVALSHA, SCRIPT LOAD and the commands that scripts call (TIME, GET, SET, \
             GETRANGE, SETRANGE, APPEND, STRLEN, DEL, PEXPIRE) under their own names: remove rename-command for them."
        }
        K::Moved | K::CrossSlot => "It is part of a cluster: write redis+cluster://.",
        K::Topology if text.contains("cluster support disabled") => {
            "It is a single server: write redis:// instead of redis+cluster://."
        }
        K::Topology => "It is part of a cluster: write redis+cluster://.",
        K::ReadOnly | K::MasterDown => {
            "It is a replica. Name the primary, or let Sentinel find it: redis+sentinel://H1,H2,H3/SERVICE."
        }
        K::ClusterDown => {
            "Assign every slot to a node that is up: `redis-cli --cluster check HOST:PORT` names the slots that no node serves, \
             `redis-cli --cluster fix HOST:PORT` assigns them."
        }
        K::Oom => {
            "Give the server more memory (CONFIG SET maxmemory), or take something away from it."
        }
        K::Misconf => "Look at the server's log and its disk: it cannot write its snapshot.",
        K::NoReplicas => "Bring its replicas back: min-replicas-to-write asks for them.",
        _ => "",
    }
}

/// The longest text of a server to show, in bytes.
const MAX_SAID: usize = 128;

/// Printable, on one line, and short. A server that does not know a command repeats its arguments,
/// which may be credentials: they are left out.
pub(super) fn escaped(text: &str) -> String {
    let text = text.find(", with args beginning with").map_or(text, |at| &text[..at]);
    // The digest of the script helps no reader.
    let text = text.find(" script: ").map_or(text, |at| &text[..at]);
    let mut out = String::new();
    for char in text.chars() {
        let before = out.len();
        match char {
            '"' => out.push('\''),
            ' '..='~' => out.push(char),
            _ => out.extend(char.escape_default()),
        }
        if out.len() > MAX_SAID {
            out.truncate(before.min(MAX_SAID - 3));
            out.push_str("...");
            break;
        }
    }
    out
}
