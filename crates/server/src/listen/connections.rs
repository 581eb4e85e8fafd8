//! Connection limits per listener and per address, and the penalty after HTTP/2 abuse.
//!
//! An HTTP/2 connection that abuses the protocol ends with a GOAWAY that says why. A new connection
//! costs the server more than a request, so an abusive client that reconnects must not gain by it.
//! Therefore the slot of the connection stays taken for a while. Only the socket is kept, neither
//! read nor closed: a client that waits for the close waits, and one that does not soon has no slot
//! left. Each penalized slot of an address makes the next penalty longer, and above a number of them
//! the address is refused. Other addresses are not affected.

use std::collections::HashMap;
use std::net::IpAddr;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use tidegate::http::{DEFAULT_IPV6_PREFIX, Group, group};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, watch};
use tokio::time::sleep;

use super::SharedBounds;
use crate::observe::Observer;
use crate::observe::metrics::Refusal;
use crate::protocol::Protocol;

/// How long a slot is penalized, times the number of penalized slots of the address.
const PENALTY: Duration = Duration::from_secs(1);
/// The longest penalty.
const MAX_PENALTY: Duration = Duration::from_secs(60);
/// With this many penalized slots an address is refused; more if an address may have very many
/// connections, as a load balancer may.
const MAX_PENALIZED: usize = 16;
/// For such an address, the part of its connections that may be penalized.
const CONNECTIONS_PER_PENALIZED: usize = 64;

/// The connection limits of one listener.
pub(super) struct ConnectionLimits {
    protocol: Protocol,
    bounds: SharedBounds,
    files: Arc<Semaphore>,
    addresses: Addresses,
    observer: Observer,
}

/// The connection counts of this listener. Clones share them.
type Addresses = Arc<Mutex<ConnectionCounts>>;

/// Open connections, in all and by address. An IPv6 address counts as its /64, all of which one
/// client has.
#[derive(Debug, Default)]
struct ConnectionCounts {
    all: usize,
    by_ip: HashMap<Group, AddressCounts>,
}

/// The open connections of one address.
#[derive(Clone, Copy, Debug, Default)]
struct AddressCounts {
    open: usize,
    /// Penalized slots among them.
    penalized: u32,
}

impl ConnectionLimits {
    pub(super) fn new(
        protocol: Protocol,
        bounds: SharedBounds,
        files: Arc<Semaphore>,
        observer: Observer,
    ) -> Self {
        ConnectionLimits { protocol, bounds, files, addresses: Arc::default(), observer }
    }

    /// A slot for a connection from this address, if the limits allow it.
    pub(super) fn take(&self, ip: IpAddr) -> Result<ConnectionSlot, Refusal> {
        let ip = group(ip, DEFAULT_IPV6_PREFIX);
        let file = Arc::clone(&self.files).try_acquire_owned().map_err(|_| Refusal::Full)?;
        {
            let bounds = self.bounds.get();
            let (most, most_per_ip) = (bounds.max_connections, bounds.max_connections_per_ip);
            let mut counts = self.addresses.lock();
            if counts.all >= most {
                return Err(Refusal::Full);
            }
            let own = counts.by_ip.entry(ip).or_default();
            if own.open >= most_per_ip
                || own.penalized as usize
                    >= MAX_PENALIZED.max(most_per_ip / CONNECTIONS_PER_PENALIZED)
            {
                if own.open == 0 {
                    counts.by_ip.remove(&ip);
                }
                return Err(Refusal::FullForAddress);
            }
            own.open += 1;
            counts.all += 1;
        }
        self.observer.metrics().came(self.protocol);
        let (protocol, addresses, observer) =
            (self.protocol, Arc::clone(&self.addresses), self.observer.clone());
        Ok(ConnectionSlot { protocol, ip, addresses, observer, is_penalized: false, _file: file })
    }
}

/// One connection at a listener, counted until it is dropped.
#[derive(Debug)]
pub struct ConnectionSlot {
    pub(super) protocol: Protocol,
    ip: Group,
    addresses: Addresses,
    pub(super) observer: Observer,
    is_penalized: bool,
    _file: OwnedSemaphorePermit,
}

impl ConnectionSlot {
    /// Keeps the slot and the socket of an abusive client for the penalty, or until shutdown.
    pub(crate) async fn hold(mut self, socket: OwnedFd, shutdown: &mut watch::Receiver<bool>) {
        self.observer.metrics().refused(self.protocol, Refusal::Misuse);
        let long = self.penalize();
        tokio::select! {
            () = sleep(long) => {}
            _ = shutdown.wait_for(|down| *down) => {}
        }
        drop(socket);
    }

    fn penalize(&mut self) -> Duration {
        let mut counts = self.addresses.lock();
        let own = counts.by_ip.entry(self.ip).or_default();
        own.penalized += u32::from(!std::mem::replace(&mut self.is_penalized, true));
        PENALTY.saturating_mul(own.penalized).min(MAX_PENALTY)
    }
}

impl Drop for ConnectionSlot {
    fn drop(&mut self) {
        {
            let mut counts = self.addresses.lock();
            counts.all -= 1;
            if let Some(own) = counts.by_ip.get_mut(&self.ip) {
                own.open -= 1;
                own.penalized -= u32::from(self.is_penalized);
                if own.open == 0 {
                    counts.by_ip.remove(&self.ip);
                }
            }
        }
        self.observer.metrics().left(self.protocol);
    }
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;

    use super::super::Bounds;
    use super::*;

    fn limits(most_per_ip: usize) -> ConnectionLimits {
        let bounds = Bounds {
            max_connections: 100,
            max_connections_per_ip: most_per_ip,
            ..Bounds::default()
        };
        ConnectionLimits::new(
            Protocol::Http,
            bounds.into(),
            Arc::new(Semaphore::new(100)),
            Observer::default(),
        )
    }

    fn address(last: u8) -> IpAddr {
        Ipv4Addr::new(192, 0, 2, last).into()
    }

    #[test]
    fn addresses_of_one_ipv6_network_are_one_client_and_ipv4_addresses_are_each_their_own() {
        let limits = limits(2);
        let take = |ip: &str| limits.take(ip.parse().unwrap());
        let _here = [take("2001:db8::1").unwrap(), take("2001:db8:0:0:ffff::2").unwrap()];
        assert_eq!(take("2001:db8::3").unwrap_err(), Refusal::FullForAddress);
        assert!(take("2001:db8:0:1::3").is_ok(), "the next network");
        // A listener of both sees IPv4 addresses as IPv6, all of them in one /64.
        let _mapped = [take("::ffff:192.0.2.1").unwrap(), take("192.0.2.1").unwrap()];
        assert_eq!(take("::ffff:192.0.2.1").unwrap_err(), Refusal::FullForAddress);
        assert!(take("::ffff:192.0.2.2").is_ok());
        // A penalty holds for the network.
        let mut misused = take("2001:db8:0:2::1").unwrap();
        assert_eq!(misused.penalize(), PENALTY);
        assert_eq!(take("2001:db8:0:2::2").unwrap().penalize(), 2 * PENALTY);
    }

    #[test]
    fn penalties_grow_with_each_abusive_connection_of_an_address() {
        let limits = limits(80);
        let mut here: Vec<ConnectionSlot> =
            (0..70).map(|_| limits.take(address(1)).unwrap()).collect();
        let holds: Vec<u64> =
            here[..15].iter_mut().map(|place| place.penalize().as_secs()).collect();
        assert_eq!(holds, [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15]);
        assert_eq!(here[0].penalize(), 15 * PENALTY, "once more is not counted again");
        let well_behaved = limits.take(address(1)).unwrap();
        // All connections opened before can be penalized.
        let holds: Vec<u64> =
            here[15..].iter_mut().map(|place| place.penalize().as_secs()).collect();
        assert_eq!((holds[0], holds[44], holds[45], holds[54]), (16, 60, 60, 60));
        assert_eq!(
            limits.take(address(1)).unwrap_err(),
            Refusal::FullForAddress,
            "slots are free, but not for this address"
        );
        drop(well_behaved);
        let mut other = limits.take(address(2)).unwrap();
        assert_eq!(other.penalize(), PENALTY);
        // An address that may have very many connections may have more penalized ones.
        let many = self::limits(6400);
        let mut crowd: Vec<ConnectionSlot> =
            (0..99).map(|_| many.take(address(3)).unwrap()).collect();
        crowd.iter_mut().for_each(|place| _ = place.penalize());
        assert!(many.take(address(3)).is_ok());
        // When they end, penalties become shorter again.
        here.truncate(3);
        assert_eq!(limits.take(address(1)).unwrap().penalize(), 4 * PENALTY);
        assert_eq!(
            limits.take(address(1)).unwrap().penalize(),
            4 * PENALTY,
            "the one before has left"
        );
        drop((here, other));
        let left = limits.addresses.lock();
        assert!(left.all == 0 && left.by_ip.is_empty(), "nothing is kept of those who have left");
        assert_eq!(limits.files.available_permits(), 100);
    }

    #[tokio::test(start_paused = true)]
    async fn a_penalty_ends_after_its_time_or_at_shutdown() {
        let (close, mut shutdown) = watch::channel(false);
        let limits = limits(2);
        let socket = || OwnedFd::from(std::net::UdpSocket::bind("127.0.0.1:0").unwrap());
        let began = tokio::time::Instant::now();
        limits.take(address(1)).unwrap().hold(socket(), &mut shutdown).await;
        assert_eq!(began.elapsed(), PENALTY);
        close.send(true).unwrap();
        limits.take(address(1)).unwrap().hold(socket(), &mut shutdown).await;
        assert_eq!(began.elapsed(), PENALTY);
    }
}
