//! Limits concurrent requests at the upstream: in total, and per client.
//!
//! A client (an IPv4 address, or the /64 of an IPv6 address) gets at most a share of the slots, so
//! no client can block the others. A request takes its slot when there is something to send: the
//! head alone, or the first piece of a body.

use std::collections::HashMap;
use std::sync::{Arc, Weak};
use std::time::Duration;

use parking_lot::Mutex;
use tidegate::http::Group;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::{Instant, timeout_at};

use super::upstream::ForwardError;

/// All slots of one proxy.
#[derive(Debug)]
pub(super) struct InFlight {
    all: Arc<Semaphore>,
    shares: Arc<Shares>,
}

/// The shares of clients that have a connection or a request.
#[derive(Debug)]
struct Shares {
    most: usize,
    by_client: Mutex<HashMap<Group, Weak<ClientShare>>>,
}

/// The slots of one client.
#[derive(Debug)]
pub(super) struct ClientShare {
    client: Group,
    free: Semaphore,
    home: Arc<Shares>,
}

/// The share that a connection used last. Most connections carry requests of one client, so this
/// saves the lookup.
#[derive(Debug, Default)]
pub(super) struct LastShare(Mutex<Option<Arc<ClientShare>>>);

/// The slot of one request; free again when it is dropped.
#[derive(Debug)]
pub(super) struct Slot {
    share: Arc<ClientShare>,
    _one: OwnedSemaphorePermit,
}

impl Drop for Slot {
    fn drop(&mut self) {
        self.share.free.add_permits(1);
    }
}

impl InFlight {
    /// A limit for all clients, and one for each.
    pub(super) fn new(all: usize, of_one_client: usize) -> Self {
        let all = all.min(Semaphore::MAX_PERMITS);
        let shares = Shares { most: of_one_client.min(all), by_client: Mutex::default() };
        InFlight { all: Arc::new(Semaphore::new(all)), shares: Arc::new(shares) }
    }

    /// The share of this client.
    pub(super) fn share(&self, client: Group, last: &LastShare) -> Arc<ClientShare> {
        let mut last = last.0.lock();
        match &*last {
            Some(share) if share.client == client => Arc::clone(share),
            _ => Arc::clone(last.insert(self.shares.of(client))),
        }
    }

    /// A slot, if one is free.
    pub(super) fn try_slot(&self, share: &Arc<ClientShare>) -> Option<Slot> {
        let own = share.free.try_acquire().ok()?;
        let one = Arc::clone(&self.all).try_acquire_owned().ok()?;
        own.forget();
        Some(Slot { share: Arc::clone(share), _one: one })
    }

    /// Waits for a slot, for at most `within`.
    pub(super) async fn slot(
        &self,
        share: &Arc<ClientShare>,
        within: Duration,
    ) -> Result<Slot, ForwardError> {
        if let Some(slot) = self.try_slot(share) {
            return Ok(slot);
        }
        let end = Instant::now() + within;
        let Ok(Ok(own)) = timeout_at(end, share.free.acquire()).await else {
            // It is the client's own limit only if other clients have free slots.
            let is_full = self.all.available_permits() == 0;
            return Err(if is_full {
                ForwardError::Busy
            } else {
                ForwardError::BusyForClient(self.shares.most)
            });
        };
        let Ok(Ok(one)) = timeout_at(end, Arc::clone(&self.all).acquire_owned()).await else {
            return Err(ForwardError::Busy);
        };
        own.forget();
        Ok(Slot { share: Arc::clone(share), _one: one })
    }
}

impl Shares {
    fn of(self: &Arc<Self>, client: Group) -> Arc<ClientShare> {
        let mut by_client = self.by_client.lock();
        if let Some(share) = by_client.get(&client).and_then(Weak::upgrade) {
            return share;
        }
        let share = Arc::new(ClientShare {
            client,
            free: Semaphore::new(self.most),
            home: Arc::clone(self),
        });
        by_client.insert(client, Arc::downgrade(&share));
        share
    }
}

impl Drop for ClientShare {
    fn drop(&mut self) {
        let mut by_client = self.home.by_client.lock();
        // The map may hold a newer share of the same client.
        if by_client.get(&self.client).is_some_and(|share| share.strong_count() == 0) {
            by_client.remove(&self.client);
        }
    }
}

#[cfg(test)]
mod tests {
    use tidegate::http::group;

    use super::*;

    const WITHIN: Duration = Duration::from_secs(5);

    fn client(ip: &str) -> Group {
        group(ip.parse().unwrap(), 64)
    }

    #[tokio::test(start_paused = true)]
    async fn a_client_gets_at_most_its_share() {
        let in_flight = InFlight::new(8, 2);
        let last = LastShare::default();
        let greedy = in_flight.share(client("192.0.2.1"), &last);
        assert!(Arc::ptr_eq(&greedy, &in_flight.share(client("192.0.2.1"), &LastShare::default())));
        let held = [in_flight.try_slot(&greedy).unwrap(), in_flight.try_slot(&greedy).unwrap()];
        assert!(in_flight.try_slot(&greedy).is_none());
        assert!(matches!(
            in_flight.slot(&greedy, WITHIN).await,
            Err(ForwardError::BusyForClient(2))
        ));
        // Addresses of one /64 are one client.
        let (one, other) = (client("2001:db8::1"), client("2001:db8::ffff:2"));
        let one = in_flight.share(one, &last);
        let others =
            [in_flight.try_slot(&one).unwrap(), in_flight.slot(&one, WITHIN).await.unwrap()];
        assert!(in_flight.try_slot(&in_flight.share(other, &last)).is_none());
        drop(held);
        assert!(in_flight.try_slot(&greedy).is_some());
        drop(others);
        assert_eq!(in_flight.all.available_permits(), 8);
    }

    #[tokio::test(start_paused = true)]
    async fn when_all_slots_are_taken_the_next_free_one_goes_to_a_waiting_request() {
        let in_flight = Arc::new(InFlight::new(2, 1));
        let shares = ["192.0.2.1", "192.0.2.2", "192.0.2.3"]
            .map(|ip| in_flight.share(client(ip), &LastShare::default()));
        let slots: Vec<Slot> =
            shares[..2].iter().map(|share| in_flight.try_slot(share).unwrap()).collect();
        for share in &shares {
            assert!(matches!(in_flight.slot(share, WITHIN).await, Err(ForwardError::Busy)));
        }
        let (waiting, third) = (Arc::clone(&in_flight), Arc::clone(&shares[2]));
        let waiting = tokio::spawn(async move { waiting.slot(&third, WITHIN).await.is_ok() });
        tokio::task::yield_now().await;
        drop(slots);
        assert!(waiting.await.unwrap());
    }

    #[test]
    fn shares_of_disconnected_clients_are_dropped() {
        let in_flight = InFlight::new(8, 2);
        for last in 0..100 {
            let share = in_flight.share(group([192, 0, 2, last].into(), 64), &LastShare::default());
            let slot = in_flight.try_slot(&share).unwrap();
            drop(share);
            assert_eq!(in_flight.shares.by_client.lock().len(), 1);
            drop(slot);
            assert_eq!(in_flight.shares.by_client.lock().len(), 0);
        }
    }
}
