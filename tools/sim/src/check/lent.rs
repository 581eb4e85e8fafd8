//! What a node was lent of one rule: when it was granted, how much of it was spent or given back,
//! and until when it may be spent.

/// How long a lease lives.
const LIFE_US: u64 = 1_000_000;

#[derive(Debug, Default)]
pub(crate) struct Lent {
    grants: Vec<Grant>,
    /// Spent or not: an observer cannot know.
    perhaps: u64,
}

#[derive(Debug)]
struct Grant {
    id: u64,
    units: u64,
    left: u64,
    /// What the server was given back of it, and what of that it has lost.
    returned: u64,
    forgotten: u64,
    ends: u64,
    delivered: bool,
}

impl Lent {
    /// The server has granted units at this moment, of a window that lasts so long.
    pub(crate) fn granted(&mut self, id: u64, units: u64, now: u64, window_ends_in: Option<u64>) {
        let ends = now + LIFE_US.min(window_ends_in.unwrap_or(u64::MAX));
        self.grants.push(Grant {
            id,
            units,
            left: units,
            returned: 0,
            forgotten: 0,
            ends,
            delivered: false,
        });
    }

    pub(crate) fn delivered(&mut self, id: u64) {
        self.grants
            .iter_mut()
            .filter(|grant| grant.id == id)
            .for_each(|grant| grant.delivered = true);
    }

    pub(crate) fn knows(&self, id: u64) -> bool {
        self.grants.iter().any(|grant| grant.id == id)
    }

    /// Something was given back, so it cannot be spent any more. Says whether there was so much
    /// that had not been spent.
    pub(crate) fn returned(&mut self, id: u64, units: u64) -> bool {
        // More may be requested than there was, by a node that does not know how much it was.
        let most = self.grants.iter().filter(|grant| grant.id == id).map(|grant| grant.units).sum();
        let mut due = units.min(most);
        // What was put back after a request was denied may be under another id than it was taken
        // from.
        let (mut own, others): (Vec<_>, Vec<_>) =
            self.grants.iter_mut().partition(|grant| grant.id == id);
        for grant in &mut own {
            // The server may learn again what it has forgotten.
            let again = due.min(grant.forgotten);
            (grant.forgotten, due) = (grant.forgotten - again, due - again);
        }
        for grant in own.into_iter().chain(others) {
            let part = due.min(grant.left);
            (grant.left, due) = (grant.left - part, due - part);
            grant.returned += part;
        }
        due <= self.perhaps
    }

    /// The server has lost its last writes; how many of them is unknown.
    pub(crate) fn server_forgets(&mut self) {
        self.grants.iter_mut().for_each(|grant| grant.forgotten = grant.returned);
    }

    /// How much of it may be spent at this moment.
    pub(crate) fn live(&self, now: u64) -> u64 {
        self.grants.iter().filter(|grant| grant.lives(now)).map(|grant| grant.left).sum()
    }

    /// Spends what was lent and lives at this moment, the oldest first.
    ///
    /// # Errors
    /// If there is too little: how much there is.
    pub(crate) fn spend(&mut self, units: u64, now: u64) -> Result<(), u64> {
        let live = self.live(now);
        if live < units {
            return Err(live);
        }
        let mut due = units;
        for grant in self.grants.iter_mut().filter(|grant| grant.lives(now)) {
            let part = due.min(grant.left);
            (grant.left, due) = (grant.left - part, due - part);
        }
        Ok(())
    }

    /// Perhaps it was spent, perhaps not.
    pub(crate) fn perhaps(&mut self, units: u64) {
        self.perhaps += units;
    }
}

impl Grant {
    fn lives(&self, now: u64) -> bool {
        self.delivered && now < self.ends
    }
}
