//! Limits how many tokens can be guessed: per address, and by all addresses together.
//!
//! A guess is a wrong token that no client has sent before. Sending a wrong token again reveals
//! nothing, so a client with an old token costs one guess and not one per request. When an address
//! has used up its guesses, its tokens are not compared, not even right ones; otherwise it could
//! continue to guess. There are two exceptions: a connection that has shown the right token stays
//! admitted, and an address that has shown one does not depend on the guesses of other addresses. →
//! `docs/decisions/0047-browsers-and-guesses.md`

use std::hash::{BuildHasher, RandomState};
use std::net::IpAddr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use tidegate::Scope;
use tidegate::batch::Prepared;
use tidegate::{Limit, Memory, Period};

/// Guesses of one address in a minute.
pub const PER_ADDRESS: u64 = 10;
/// Guesses of all addresses together in a minute.
pub const ALL_TOGETHER: u64 = 600;
/// The most addresses with counted guesses. Each has cost one of [`ALL_TOGETHER`] in the last
/// minute.
const ADDRESSES: usize = 10_000;
/// The most wrong tokens, and addresses with a right one, that are kept.
const REMEMBERED: usize = 4096;

/// The state of guesses. Its size does not depend on clients.
pub(crate) struct Guesses {
    per_address: Prepared,
    all_together: Prepared,
    wrong: Marks,
    right: Marks,
}

/// What the response to a token may reveal.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum GuessVerdict {
    /// Whether it is right.
    Verdict,
    /// Nothing, for this time.
    Nothing(Duration),
}

impl Default for Guesses {
    fn default() -> Self {
        Self::over(Memory::builder)
    }
}

impl Guesses {
    fn over(memory: impl Fn() -> tidegate::MemoryBuilder) -> Self {
        let limit = |amount| {
            Limit::bucket(amount, Period::MINUTE).build().expect("a constant that is a valid limit")
        };
        Guesses {
            per_address: memory()
                .max_keys(ADDRESSES)
                .build()
                .prepare(&Scope::AdHoc, &limit(PER_ADDRESS)),
            all_together: memory().max_keys(1).build().prepare(&Scope::AdHoc, &limit(ALL_TOGETHER)),
            wrong: Marks::default(),
            right: Marks::default(),
        }
    }

    /// What the response to a client at `peer` may reveal about its token.
    pub(crate) fn judge(&self, peer: IpAddr, token: &[u8], is_right: bool) -> GuessVerdict {
        let network = Network::of(peer);
        if !is_right && self.wrong.has(token) {
            return GuessVerdict::Verdict;
        }
        let cost = u64::from(!is_right);
        let is_known = self.right.has(network.as_ref());
        // No address is counted before there is a guess for it, so the table of addresses is never
        // full.
        let mut answer =
            if is_known { GuessVerdict::Verdict } else { left(&self.all_together, &[], 0) };
        if answer == GuessVerdict::Verdict {
            answer = left(&self.per_address, network.as_ref(), cost);
        }
        if answer == GuessVerdict::Verdict && !is_known {
            answer = left(&self.all_together, &[], cost);
        }
        match answer {
            GuessVerdict::Verdict if is_right => self.right.set(network.as_ref()),
            GuessVerdict::Verdict => self.wrong.set(token),
            GuessVerdict::Nothing(_) => {}
        }
        answer
    }

    /// Forgets wrong tokens after a change: one of them may be right now.
    pub(crate) fn forget_tokens(&self) {
        self.wrong.clear();
        self.right.clear();
    }
}

/// Whole seconds to wait, at least one.
pub(crate) fn seconds(wait: Duration) -> u64 {
    wait.as_millis().div_ceil(1000).max(1).try_into().unwrap_or(u64::MAX)
}

/// The message for a token that was not compared.
pub(crate) fn advice(wait: Duration) -> String {
    format!(
        "too many wrong tokens: no token is looked at now; send it again in {} s",
        seconds(wait)
    )
}

/// Charges `cost` guesses, and returns whether that was allowed; without a cost, whether a guess is
/// left.
fn left(prepared: &Prepared, key: &[u8], cost: u64) -> GuessVerdict {
    let verdict = prepared.check(key, cost);
    if verdict.allowed && (cost > 0 || verdict.remaining > 0) {
        return GuessVerdict::Verdict;
    }
    GuessVerdict::Nothing(verdict.next_after())
}

/// An IPv4 address, or the /64 of an IPv6 address: the network of one client.
#[derive(Clone, Copy)]
enum Network {
    V4([u8; 4]),
    V6([u8; 8]),
}

impl Network {
    fn of(peer: IpAddr) -> Self {
        match peer.to_canonical() {
            IpAddr::V4(address) => Network::V4(address.octets()),
            IpAddr::V6(address) => {
                let [a, b, c, d, e, f, g, h, ..] = address.octets();
                Network::V6([a, b, c, d, e, f, g, h])
            }
        }
    }
}

impl AsRef<[u8]> for Network {
    fn as_ref(&self) -> &[u8] {
        match self {
            Network::V4(bytes) => bytes,
            Network::V6(bytes) => bytes,
        }
    }
}

/// A lossy set of byte strings: a keyed hash selects the slot of each, and a new string replaces
/// the one in its slot.
struct Marks {
    places: Box<[AtomicU64]>,
    hasher: RandomState,
}

impl Default for Marks {
    fn default() -> Self {
        Marks {
            places: (0..REMEMBERED).map(|_| AtomicU64::new(0)).collect(),
            hasher: RandomState::new(),
        }
    }
}

impl Marks {
    fn place(&self, bytes: &[u8]) -> (&AtomicU64, u64) {
        let hash = self.hasher.hash_one(bytes) | 1; // 0 is nothing
        let at = usize::try_from(hash >> 32).unwrap_or(0) % self.places.len();
        (&self.places[at], hash)
    }

    fn has(&self, bytes: &[u8]) -> bool {
        let (place, hash) = self.place(bytes);
        place.load(Ordering::Relaxed) == hash
    }

    fn set(&self, bytes: &[u8]) {
        let (place, hash) = self.place(bytes);
        place.store(hash, Ordering::Relaxed);
    }

    fn clear(&self) {
        self.places.iter().for_each(|place| place.store(0, Ordering::Relaxed));
    }
}

#[cfg(test)]
mod tests {
    use tidegate::{ManualClock, Timestamp};

    use super::*;

    const HERE: IpAddr = IpAddr::V4(std::net::Ipv4Addr::new(192, 0, 2, 7));

    fn guesses() -> (Guesses, ManualClock) {
        let clock = ManualClock::new();
        clock.set(Timestamp::from_secs(1_700_000_000));
        let own = clock.clone();
        (Guesses::over(move || Memory::builder().clock(own.clone())), clock)
    }

    fn guess(guesses: &Guesses, peer: IpAddr, number: u64) -> bool {
        guesses.judge(peer, format!("wrong-{number}").as_bytes(), false) == GuessVerdict::Verdict
    }

    fn knows(guesses: &Guesses, peer: IpAddr) -> bool {
        guesses.judge(peer, b"right", true) == GuessVerdict::Verdict
    }

    #[test]
    fn an_address_has_ten_guesses_a_minute_and_then_waits_six_seconds_for_each() {
        let (guesses, clock) = guesses();
        assert!((0..PER_ADDRESS).all(|number| guess(&guesses, HERE, number)));
        let second = Duration::from_secs(1);
        assert_eq!(guesses.judge(HERE, b"wrong-10", false), GuessVerdict::Nothing(6 * second));
        // Otherwise the right one could be found by guessing on.
        assert_eq!(guesses.judge(HERE, b"right", true), GuessVerdict::Nothing(6 * second));
        assert!(knows(&guesses, [192, 0, 2, 8].into()), "other addresses are not affected");
        clock.advance(5 * second);
        assert_eq!(guesses.judge(HERE, b"right", true), GuessVerdict::Nothing(second));
        clock.advance(second);
        assert!((0..100).all(|_| knows(&guesses, HERE)), "a right token costs nothing");
        assert!(guess(&guesses, HERE, 10) && !guess(&guesses, HERE, 11));
    }

    #[test]
    fn a_wrong_token_is_one_guess_however_often_it_is_sent() {
        let (guesses, _) = guesses();
        for number in 0..1000_u32 {
            assert!(guess(&guesses, HERE, 7), "{number}");
            // All clients of a fleet have the same old token.
            assert!(
                guess(&guesses, IpAddr::from((0x0a00_0000 + number).to_be_bytes()), 7),
                "{number}"
            );
        }
        assert!((0..7).all(|number| guess(&guesses, HERE, number)), "nine are left");
        guesses.forget_tokens();
        assert!(guess(&guesses, HERE, 7) && guess(&guesses, HERE, 8) && !guess(&guesses, HERE, 9));
    }

    #[test]
    fn networks_of_ipv6_guess_as_one_address() {
        let (guesses, _) = guesses();
        let address = |number: u64| format!("2001:db8:0:7::{number:x}").parse::<IpAddr>().unwrap();
        assert!((0..PER_ADDRESS).all(|number| guess(&guesses, address(number), number)));
        assert!(!guess(&guesses, address(99), 99));
        assert!(guess(&guesses, "2001:db8:0:8::1".parse().unwrap(), 99));
        // An address of IPv4 is the same over a listener of IPv6.
        assert!((0..PER_ADDRESS).all(|number| guess(
            &guesses,
            "::ffff:192.0.2.7".parse().unwrap(),
            100 + number
        )));
        assert!(!guess(&guesses, HERE, 200));
    }

    #[test]
    fn all_addresses_together_are_limited_except_those_that_knew_a_token() {
        let (guesses, clock) = guesses();
        assert!(knows(&guesses, HERE));
        let admitted = (0..10_000_u32)
            .filter(|number| {
                guess(
                    &guesses,
                    IpAddr::from((0x0a00_0000_u32 + number).to_be_bytes()),
                    (*number).into(),
                )
            })
            .count();
        assert_eq!(admitted, 600);
        let new = IpAddr::from([203, 0, 113, 1]);
        assert!(!knows(&guesses, new));
        assert!(knows(&guesses, HERE), "it does not depend on others");
        assert!((0..PER_ADDRESS).all(|number| guess(&guesses, HERE, 20_000 + number)));
        assert!(!guess(&guesses, HERE, 30_000), "but has no more guesses than others");
        clock.advance(Duration::from_millis(100));
        assert!(knows(&guesses, new), "the next one is soon there");
    }
}
