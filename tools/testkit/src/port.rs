//! Ports that stay ours, even while the server behind them is down.
//!
//! Binding port 0 and letting go leaves a gap in which any process may take the port, above all the
//! kernel for an outgoing connection. So ports are chosen below the range that the kernel gives
//! out, and each is reserved by a locked file for as long as it is held, so that test programs that
//! run side by side do not choose the same.

use std::collections::hash_map::RandomState;
use std::fs::{self, File};
use std::hash::BuildHasher;
use std::net::{Ipv4Addr, TcpListener};

/// Linux gives out ports from 32768 on. The bus of a cluster node is 10000 above its port, and
/// below that too.
const FIRST: u16 = 10_000;
const COUNT: u16 = 12_000;

/// How far a cluster node's second port is from its first.
pub(crate) const BUS: u16 = 10_000;

/// A port on 127.0.0.1 that no process listened on when it was chosen. It is released when this is
/// dropped.
#[derive(Debug)]
pub(crate) struct Port {
    number: u16,
    _reserved: Vec<File>,
}

impl Port {
    /// One that is free now. With `bus`, the port 10000 above is free too.
    pub(crate) fn free(bus: bool) -> Port {
        let start = RandomState::new().hash_one(std::process::id()) % u64::from(COUNT);
        let start = u16::try_from(start).expect("it is less than a u16");
        for step in 0..COUNT {
            let number = FIRST + (start + step) % COUNT;
            let wanted = if bus { &[number, number + BUS][..] } else { &[number][..] };
            if let Some(reserved) = wanted.iter().map(|number| reserve(*number)).collect() {
                return Port { number, _reserved: reserved };
            }
        }
        panic!("no port is free between {FIRST} and {}", FIRST + COUNT);
    }

    pub(crate) fn number(&self) -> u16 {
        self.number
    }
}

fn reserve(number: u16) -> Option<File> {
    // Of this user, since a user cannot lock what belongs to another.
    let user = rustix::process::getuid().as_raw();
    let folder = std::env::temp_dir().join(format!("tidegate-ports-{user}"));
    fs::create_dir_all(&folder).unwrap_or_else(|error| panic!("{}: {error}", folder.display()));
    let file = File::create(folder.join(number.to_string())).ok()?;
    file.try_lock().ok()?;
    TcpListener::bind((Ipv4Addr::LOCALHOST, number)).ok().inspect(close)?;
    Some(file)
}

/// Closes a port in all processes. Closing our end is not enough: a process that another thread has
/// just forked has an end too until it becomes another program, and who connects meanwhile would be
/// accepted.
pub(crate) fn close(listener: &TcpListener) {
    let _ = rustix::net::shutdown(listener, rustix::net::Shutdown::Both);
}
