//! Real Redis and Valkey servers for tests, benches and examples, and ways to break them.
//!
//! Everything here blocks, panics with a sentence when something is wrong, and cleans up after itself: a server that
//! is dropped is killed, and one whose test program was aborted is killed by the kernel.
//!
//! ```
//! use tidegate_testkit::{Flavor, Reply, Server};
//!
//! let server = Server::start(Flavor::Redis7);
//! assert_eq!(server.command(&["SET", "k", "v"]), Reply::Text("OK".into()));
//! assert!(server.url().starts_with("redis://127.0.0.1:"));
//! ```
//!
//! The programs come from `cargo xtask servers`. `docs/testing.md` has the whole tour.

mod cluster;
mod flavor;
mod port;
mod resp;
mod server;
mod spawn;
mod wait;

pub use cluster::Cluster;
pub use flavor::Flavor;
pub use resp::{Client, Reply};
pub use server::{Builder, Server};
pub use wait::wait_until;
