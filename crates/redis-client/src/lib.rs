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
//! In reading order: `router.rs` sends calls to the nodes of a topology (`node.rs`), each with a
//! few connections (`conn/`) that many callers share. A task per connection (`conn/driver.rs`)
//! connects and reconnects; while a connection is up, only `conn/serving.rs` touches the socket.
//! Opening one takes `stream.rs`, `tls.rs`, `connect.rs`, `handshake.rs`, `sentinel.rs` and
//! `dial.rs`, each using those before it. `outcome.rs` is the one table of what replies and
//! failures mean.
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
//! - *Not applied* means that no byte of it was written to the socket, or that the server said so.
//!   Only such a call is retried, once.
//! - A caller gets its own reply or none. Only the driver frees the entry of a sent call, when its
//!   reply has arrived.
//! - Queues, replies, redirects, attempts to connect and entries are bounded.

mod address;
mod chance;
mod cluster;
mod conn;
mod connect;
mod counters;
mod dial;
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
mod slot;
mod stream;
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
pub use node::NodeId;
pub use outcome::{Failure, FailureKind, Outcome, is_unknown_command};
pub use resp::Value;
pub use router::Router;
pub use script::Script;
pub use slot::slot_of;
pub use stream::{Connect, Connecting, Connector, Link};
pub use url::{InvalidSecret, RedisUrl, RedisUrlError, Secret};

/// Timeouts and bounds of the connections. [`Router::new`] refuses values that cannot work.
#[derive(Clone, Debug)]
pub struct Settings {
    /// The longest time of one call, everything included; see [`Router::deadline`].
    pub timeout: Duration,
    /// The longest time to connect, from name lookup to the end of the handshake.
    pub connect_timeout: Duration,
    /// The time without a byte, while calls wait, after which the connection counts as dead.
    pub silence: Duration,
    /// The idle time after which the connection sends a PING.
    pub ping_every: Duration,
    /// Connections to each server: 1 to [`MAX_CONNECTIONS`].
    pub connections_per_node: usize,
    /// The most calls on one connection, queued or unanswered.
    pub max_in_flight: usize,
    /// The most bytes of unsent calls on one connection.
    pub max_queued_bytes: usize,
    /// The largest reply to a script, in bytes.
    pub max_script_reply: usize,
    /// The largest reply to a command of [`Router::command`], in bytes.
    pub max_command_reply: usize,
    /// The name of the connections in `CLIENT LIST`.
    pub client_name: String,
    /// Opens streams instead of sockets.
    pub connector: Option<Connector>,
    /// The random numbers for jitter and for the order in which nodes are queried.
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
