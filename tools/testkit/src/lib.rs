//! Real Redis and Valkey servers for tests, benches and examples, and ways to break them.
//!
//! Everything here blocks, panics with a sentence when something is wrong, and cleans up after
//! itself: a server that is dropped is killed, and one whose test program was aborted is killed by
//! the kernel.
//!
//! ```
//! use tidegate_testkit::{Flavor, Reply, Server};
//!
//! let server = Server::start(Flavor::Redis7);
//! assert_eq!(server.command(&["SET", "k", "v"]), Reply::Text("OK".into()));
//! assert!(server.url().starts_with("redis://127.0.0.1:"));
//! ```
//!
//! The programs come from `cargo xtask servers`. `README.md` has the tour.

mod absence;
mod attack;
mod awake;
mod backend;
mod builder;
mod certs;
mod cluster;
mod envoy;
mod flavor;
mod gateway;
mod port;
mod proxy;
mod resp;
mod scripted;
mod sentinel;
mod server;
mod shim;
mod spawn;
mod wait;

pub use absence::{AbsenceWatch, Absences};
pub use attack::{attack_cases, attacks_held};
pub use awake::Awake;
pub use backend::{Backend, BackendKind, get};
pub use builder::Builder;
pub use certs::Certs;
pub use cluster::Cluster;
pub use envoy::Envoy;
pub use flavor::{
    Flavor, node_client, openapi_validator, python_client, redis_benchmark, redis_cell, redis_cli,
};
pub use gateway::{Gateway, GatewayKind};
pub use proxy::{Counts, Fault, FaultProxy};
pub use resp::{Client, Reply};
pub use scripted::ScriptedPeer;
pub use sentinel::Sentinels;
pub use server::Server;
pub use shim::ClockShim;
pub use spawn::spawn;
pub use wait::wait_until;

#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Page;
