//! How many are here, from where, and who has to stay a while because of how he ended.
//!
//! A connection of HTTP/2 that misuses it ends with a GOAWAY that says why. If that were all,
//! whoever is thrown out would come again at once, and a new connection costs the server more than
//! a request. So its place stays taken for a while: of the connection nothing is kept but the
//! socket, which is neither read nor closed, and whoever waits for its end waits. Who does not wait
//! has soon no place left: each that his address has in this state makes the next one stay longer,
//! and when they are too many nobody comes in from there. Nobody else has to wait for anything.

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

/// How long a place stays taken after misuse, for each that the address has in this state.
const HOLD: Duration = Duration::from_secs(1);
/// But no longer than this.
const MAX_HOLD: Duration = Duration::from_secs(60);
/// So many of one address in this state, and nobody else from there comes in; more if an address
/// may have very many connections, as that of a load balancer may.
const MAX_HELD: usize = 16;
/// One in so many of its connections.
const HELD_OF: usize = 64;

/// The places at one listener.
pub(super) struct Places {
    protocol: Protocol,
    bounds: SharedBounds,
    files: Arc<Semaphore>,
    addresses: Addresses,
    observer: Observer,
}

/// The connections of this listener. Clones are the same.
type Addresses = Arc<Mutex<Here>>;

/// How many connections there are, in all and by address. An IPv6 address counts as its /64: a
/// client that has one has them all.
#[derive(Debug, Default)]
struct Here {
    all: usize,
    by_ip: HashMap<Group, Own>,
}

/// The connections of one address.
#[derive(Clone, Copy, Debug, Default)]
struct Own {
    here: usize,
    /// Of these, those that are only kept from coming again.
    held: u32,
}

impl Places {
    pub(super) fn new(
        protocol: Protocol,
        bounds: SharedBounds,
        files: Arc<Semaphore>,
        observer: Observer,
    ) -> Self {
        Places { protocol, bounds, files, addresses: Arc::default(), observer }
    }

    /// A place for somebody from this address, if there is one.
    pub(super) fn take(&self, ip: IpAddr) -> Result<Place, Refusal> {
        let ip = group(ip, DEFAULT_IPV6_PREFIX);
        let file = Arc::clone(&self.files).try_acquire_owned().map_err(|_| Refusal::Full)?;
        {
            let bounds = self.bounds.get();
            let (most, most_per_ip) = (bounds.max_connections, bounds.max_connections_per_ip);
            let mut here = self.addresses.lock();
            if here.all >= most {
                return Err(Refusal::Full);
            }
            let own = here.by_ip.entry(ip).or_default();
            if own.here >= most_per_ip || own.held as usize >= MAX_HELD.max(most_per_ip / HELD_OF) {
                if own.here == 0 {
                    here.by_ip.remove(&ip);
                }
                return Err(Refusal::FullForAddress);
            }
            own.here += 1;
            here.all += 1;
        }
        self.observer.metrics().came(self.protocol);
        let (protocol, addresses, observer) =
            (self.protocol, Arc::clone(&self.addresses), self.observer.clone());
        Ok(Place { protocol, ip, addresses, observer, is_held: false, _file: file })
    }
}

/// One place at a listener; given back when it is dropped.
#[derive(Debug)]
pub struct Place {
    pub(super) protocol: Protocol,
    ip: Group,
    addresses: Addresses,
    pub(super) observer: Observer,
    is_held: bool,
    _file: OwnedSemaphorePermit,
}

impl Place {
    /// Keeps the place, and the socket of whoever misused it, for a while or until the house
    /// closes.
    pub(crate) async fn hold(mut self, socket: OwnedFd, shutdown: &mut watch::Receiver<bool>) {
        self.observer.metrics().refused(self.protocol, Refusal::Misuse);
        let long = self.begin_hold();
        tokio::select! {
            () = sleep(long) => {}
            _ = shutdown.wait_for(|down| *down) => {}
        }
        drop(socket);
    }

    fn begin_hold(&mut self) -> Duration {
        let mut here = self.addresses.lock();
        let own = here.by_ip.entry(self.ip).or_default();
        own.held += u32::from(!std::mem::replace(&mut self.is_held, true));
        HOLD.saturating_mul(own.held).min(MAX_HOLD)
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        {
            let mut here = self.addresses.lock();
            here.all -= 1;
            if let Some(own) = here.by_ip.get_mut(&self.ip) {
                own.here -= 1;
                own.held -= u32::from(self.is_held);
                if own.here == 0 {
                    here.by_ip.remove(&self.ip);
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

    fn places(most_per_ip: usize) -> Places {
        let bounds = Bounds {
            max_connections: 100,
            max_connections_per_ip: most_per_ip,
            ..Bounds::default()
        };
        Places::new(
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
        let places = places(2);
        let take = |ip: &str| places.take(ip.parse().unwrap());
        let _here = [take("2001:db8::1").unwrap(), take("2001:db8:0:0:ffff::2").unwrap()];
        assert_eq!(take("2001:db8::3").unwrap_err(), Refusal::FullForAddress);
        assert!(take("2001:db8:0:1::3").is_ok(), "the next network");
        // A listener of both sees IPv4 addresses as IPv6, all of them in one /64.
        let _mapped = [take("::ffff:192.0.2.1").unwrap(), take("192.0.2.1").unwrap()];
        assert_eq!(take("::ffff:192.0.2.1").unwrap_err(), Refusal::FullForAddress);
        assert!(take("::ffff:192.0.2.2").is_ok());
        // A penalty holds for the network.
        let mut misused = take("2001:db8:0:2::1").unwrap();
        assert_eq!(misused.begin_hold(), HOLD);
        assert_eq!(take("2001:db8:0:2::2").unwrap().begin_hold(), 2 * HOLD);
    }

    #[test]
    fn who_comes_again_and_again_stays_longer_each_time_and_others_do_not() {
        let places = places(80);
        let mut here: Vec<Place> = (0..70).map(|_| places.take(address(1)).unwrap()).collect();
        let holds: Vec<u64> =
            here[..15].iter_mut().map(|place| place.begin_hold().as_secs()).collect();
        assert_eq!(holds, [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15]);
        assert_eq!(here[0].begin_hold(), 15 * HOLD, "once more is not counted again");
        let well_behaved = places.take(address(1)).unwrap();
        // Those who came before can all be held.
        let holds: Vec<u64> =
            here[15..].iter_mut().map(|place| place.begin_hold().as_secs()).collect();
        assert_eq!((holds[0], holds[44], holds[45], holds[54]), (16, 60, 60, 60));
        assert_eq!(
            places.take(address(1)).unwrap_err(),
            Refusal::FullForAddress,
            "there are places, but not for them"
        );
        drop(well_behaved);
        let mut other = places.take(address(2)).unwrap();
        assert_eq!(other.begin_hold(), HOLD);
        // Where very many may come from one address, more are held before the others are kept out.
        let many = self::places(6400);
        let mut crowd: Vec<Place> = (0..99).map(|_| many.take(address(3)).unwrap()).collect();
        crowd.iter_mut().for_each(|place| _ = place.begin_hold());
        assert!(many.take(address(3)).is_ok());
        // As they leave, the address is believed again.
        here.truncate(3);
        assert_eq!(places.take(address(1)).unwrap().begin_hold(), 4 * HOLD);
        assert_eq!(
            places.take(address(1)).unwrap().begin_hold(),
            4 * HOLD,
            "the one before has left"
        );
        drop((here, other));
        let left = places.addresses.lock();
        assert!(left.all == 0 && left.by_ip.is_empty(), "nothing is kept of those who have left");
        assert_eq!(places.files.available_permits(), 100);
    }

    #[tokio::test(start_paused = true)]
    async fn a_place_is_held_for_its_time_or_until_the_house_closes() {
        let (close, mut shutdown) = watch::channel(false);
        let places = places(2);
        let socket = || OwnedFd::from(std::net::UdpSocket::bind("127.0.0.1:0").unwrap());
        let began = tokio::time::Instant::now();
        places.take(address(1)).unwrap().hold(socket(), &mut shutdown).await;
        assert_eq!(began.elapsed(), HOLD);
        close.send(true).unwrap();
        places.take(address(1)).unwrap().hold(socket(), &mut shutdown).await;
        assert_eq!(began.elapsed(), HOLD);
    }
}
