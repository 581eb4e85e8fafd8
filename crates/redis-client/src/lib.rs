//! The connection layer: commands go to the server that owns a slot, and every one ends as applied,
//! not applied, or unknown.
//!
//! In reading order: [`Router`] is what the store holds. It knows the [`node`]s of a topology, each
//! a few [`conn`]ections that many callers share. A task per connection, [`driver`], connects;
//! while a connection is up, [`serving`] is the only one that touches the socket. What replies and
//! failures mean stands in one table, [`outcome`].
//!
//! ```text
//!  caller            caller           caller
//!    | eval            | eval           |            encode into one buffer, under a short lock
//!    +--------+--------+--------+-------+
//!             v                 |
//!       queue of a connection   |  a place in line each; a caller that goes away leaves its place
//!             |                 |
//!       driver: one write for all that wait, one read for all that came back
//!             |
//!           server
//! ```
//!
//! What holds of every call:
//!
//! - It ends by its deadline, whatever the server, the network or the driver do.
//! - *Not applied* means that no byte of it was given to the socket, or that the server said so.
//!   Only such a call is tried again, once.
//! - A caller gets its own reply or none. Places in line are given up only by the driver, when the
//!   reply has come.
//! - Queues, replies, redirects, attempts to connect and the places in line are bounded.

mod chance;
mod cluster;
mod conn;
mod counters;
mod dial;
mod driver;
#[cfg(feature = "fuzzing")]
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
#[cfg(feature = "redis-tls")]
mod tls;
#[cfg(feature = "redis-tls")]
mod tls_problem;
mod url;

#[cfg(test)]
mod tests;

use std::time::Duration;

pub(crate) use chance::Chance;
pub(crate) use counters::Counters;
pub(crate) use dial::Connector;
pub use dial::{Connect, Connecting, Link};
pub(crate) use node::NodeId;
pub use outcome::{Failure, FailureKind};
pub(crate) use outcome::{Outcome, is_unknown_command};
pub(crate) use resp::Value;
pub(crate) use router::Router;
pub(crate) use script::Script;
pub(crate) use slot::slot_of;
#[cfg(feature = "redis-tls")]
pub use tls_problem::{described as rustls_problem, no_pem, pem_problem, tls_problem};
pub(crate) use url::Secret;
pub use url::{InvalidSecret, RedisUrl, RedisUrlError};

/// How to connect, and what may be waited for and kept. [`Router::new`] refuses what makes no
/// sense.
#[derive(Clone, Debug)]
pub(crate) struct Settings {
    /// How long one call may take, everything included. [`Router::deadline`] counts from now.
    pub(crate) timeout: Duration,
    /// How long connecting may take, from the name of the server to its greeting.
    pub(crate) connect_timeout: Duration,
    /// How long a server may say nothing to calls that wait, before the connection counts as dead.
    pub(crate) silence: Duration,
    /// After how long without calls the server is asked whether it is still there.
    pub(crate) ping_every: Duration,
    /// Connections to each server: 1 to [`MAX_CONNECTIONS`].
    pub(crate) connections_per_node: usize,
    /// Calls that may wait on one connection, queued or unanswered.
    pub(crate) max_in_flight: usize,
    /// Bytes of calls that may wait to be sent on one connection.
    pub(crate) max_queued_bytes: usize,
    /// The largest reply to a script.
    pub(crate) max_script_reply: usize,
    /// The largest reply to a command of [`Router::command`].
    pub(crate) max_command_reply: usize,
    /// What the connections are called on the server.
    pub(crate) client_name: String,
    /// Who makes streams, if they are not to be sockets.
    pub(crate) connector: Option<Connector>,
    /// Where chance comes from.
    pub(crate) chance: Chance,
}

/// The most connections to one server.
pub(crate) const MAX_CONNECTIONS: usize = 8;

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
