//! The connection to Redis and Valkey: a command goes to the server that owns its slot, and every
//! call ends as applied, not applied, or unknown.
//!
//! One server, Sentinel and Cluster, over TCP, TLS or unix sockets, chosen by a [`RedisUrl`]. Many
//! callers share few connections; their commands are pipelined.
//!
//! ```no_run
//! use tidegate_redis_client::{Outcome, Router, Script, Settings, slot_of};
//! # async fn example() -> Result<(), Box<dyn std::error::Error>> {
//! let router = Router::new("redis://127.0.0.1/".parse()?, Settings::default())?;
//! let script = Script::new("return redis.call('INCRBY', KEYS[1], ARGV[1])");
//! let slot = slot_of(b"visits");
//! match router.eval(&script, slot, &["visits"], &["3"], router.deadline()).await {
//!     Outcome::Applied(value) => println!("{:?} visits", value.as_int()),
//!     Outcome::NotApplied(failure) => println!("{failure}; it is safe to try again"),
//!     Outcome::Unknown(failure) => println!("{failure}; trying again may count twice"),
//! }
//! # Ok(()) }
//! ```
//!
//! In reading order: `router.rs` sends calls to the nodes of a topology (`node.rs`), each with a few
//! connections (`conn/`) that many callers share. A task per connection (`driver.rs`) connects and
//! reconnects; while a connection is up, only `serving.rs` touches the socket. `outcome.rs` is the
//! one table of what replies and failures mean.
//!
//! ```text
//!  caller            caller           caller
//!    | eval            | eval           |            encode into one buffer, under a short lock
//!    +--------+--------+--------+-------+
//!             v                 |
//!       queue of a connection   |  an entry per call; a cancelled call leaves its entry behind
//!             |                 |
//!       driver: one write for all queued calls, one read for all replies
//!             |
//!           server
//! ```
//!
//! What holds of every call:
//!
//! - It ends by its deadline, whatever the server, the network or the driver do.
//! - *Not applied* means that no byte of it was given to the socket, or that the server said so.
//!   Only such a call is tried again, once.
//! - A caller gets its own reply or none. Only the driver frees the entry of a sent call, when its
//!   reply has arrived.
//! - Queues, replies, redirects, attempts to connect and entries are bounded.

mod chance;
mod cluster;
mod conn;
mod counters;
mod dial;
mod driver;
#[cfg(feature = "fuzzing")]
#[doc(hidden)]
pub mod fuzzing;
mod handshake;
mod node;
mod outcome;
mod resp;
mod router;
mod script;
mod sentinel;
mod serving;
mod slot;
#[cfg(feature = "tls")]
mod tls;
#[cfg(feature = "tls")]
pub mod tls_problem;
mod url;

#[cfg(test)]
mod tests;

use std::time::Duration;

pub use chance::Chance;
pub use counters::Counters;
pub use dial::{Connect, Connecting, Connector, Link};
pub use node::NodeId;
pub use outcome::{Failure, FailureKind, Outcome, is_unknown_command};
pub use resp::Value;
pub use router::Router;
pub use script::Script;
pub use slot::slot_of;
pub use url::{InvalidSecret, RedisUrl, RedisUrlError, Secret};

/// How to connect, and what may be waited for and kept. [`Router::new`] refuses what makes no
/// sense.
#[derive(Clone, Debug)]
pub struct Settings {
    /// How long one call may take, everything included. [`Router::deadline`] counts from now.
    pub timeout: Duration,
    /// How long connecting may take, from the name of the server to its greeting.
    pub connect_timeout: Duration,
    /// How long a server may say nothing to calls that wait, before the connection counts as dead.
    pub silence: Duration,
    /// After how long without calls the server is asked whether it is still there.
    pub ping_every: Duration,
    /// Connections to each server: 1 to [`MAX_CONNECTIONS`].
    pub connections_per_node: usize,
    /// Calls that may wait on one connection, queued or unanswered.
    pub max_in_flight: usize,
    /// Bytes of calls that may wait to be sent on one connection.
    pub max_queued_bytes: usize,
    /// The largest reply to a script.
    pub max_script_reply: usize,
    /// The largest reply to a command of [`Router::command`].
    pub max_command_reply: usize,
    /// What the connections are called on the server.
    pub client_name: String,
    /// Who makes streams, if they are not to be sockets.
    pub connector: Option<Connector>,
    /// Where chance comes from.
    pub chance: Chance,
}

/// The most connections to one server.
pub const MAX_CONNECTIONS: usize = 8;

impl Default for Settings {
    fn default() -> Self {
        Settings {
            timeout: Duration::from_millis(100),
            connect_timeout: Duration::from_secs(1),
            silence: Duration::from_secs(1),
            ping_every: Duration::from_secs(10),
            connections_per_node: 1,
            max_in_flight: 4096,
            max_queued_bytes: 16 << 20,
            max_script_reply: 64 << 10,
            max_command_reply: 1 << 20,
            client_name: "tidegate".into(),
            connector: None,
            chance: Chance::default(),
        }
    }
}
