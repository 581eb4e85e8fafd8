//! A deterministic simulator: several nodes of the product over a network and a server that fail,
//! on one thread and a clock that is moved.
//!
//! One seed decides everything. [`plan`] draws the nodes, the requests and the faults;
//! [`world`] lets it happen; `check` looks whether all that is promised holds. Nodes are the real
//! library, from its store over Redis to the bytes on its connections; the server is a model that
//! runs the product's own scripts.
#![allow(
    clippy::cast_precision_loss,
    clippy::cast_possible_wrap,
    reason = "laws are judged with a tolerance"
)]

mod check;
mod net;
mod node;
pub mod plan;
pub mod random;
pub mod redis;
pub mod sabotage;
mod script;
pub mod shrink;
pub mod world;

pub use check::Failure;
