//! The kit tested by itself: what starts must run, what is broken must be broken as promised, what
//! ends must be gone.

mod cluster;
mod proxy;
mod sentinel;
mod server;
mod tls;
