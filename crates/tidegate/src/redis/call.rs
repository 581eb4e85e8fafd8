//! The call of the script and its answer, as bytes. `lua/fast.lua` and `lua/state.lua` say the same
//! from the other side.
//!
//! Numbers are below 2^53 and take seven bytes, most significant first. Costs above that can never
//! fit; they are sent as the largest number, which never fits either.

use tidegate_core::algorithm::bucket::Level;
use tidegate_core::algorithm::estimate::Pair;
use tidegate_core::algorithm::window::Count;
use tidegate_core::{Algorithm, Done, EXACT, Id, Limit, Op, Reading, State, Timestamp, Verdict};

use super::keys::letter;
use crate::store::Charge;

/// The longest charge: a bucket's scale or an estimate's state, options, seven numbers, and the
/// time behind it.
const ROOM: usize = 96;
/// What the script reads of every call in one step: as much as the call of a window needs.
const SHORTEST: usize = 40;

/// Whose clock judges a call.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Time {
    /// The server's.
    Server,
    /// The caller's, which says this. Times that callers bring never go back: see
    /// `tidegate_core::decide_on_store_clock`.
    Caller(Timestamp),
    /// The server's, which is taken to say this: for tests of what happens when it steps.
    StandIn(Timestamp),
}

impl Time {
    fn given(self) -> Option<Timestamp> {
        match self {
            Time::Server => None,
            Time::Caller(now) | Time::StandIn(now) => Some(now),
        }
    }
}

/// What is the same for all charges of a call.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Head {
    pub(crate) op: Op,
    pub(crate) id: Option<Id>,
    /// The time it is judged at.
    pub(crate) time: Time,
    /// It was denied elsewhere: leave behind what a denied check leaves behind.
    pub(crate) denied: bool,
}

impl Head {
    fn id(&self) -> Option<Id> {
        self.id.filter(|id| *id != Id::NONE)
    }

    /// The beginning of `ARGV[1]`, with room for a charge and the time behind it.
    fn encode(&self, charges: usize) -> Vec<u8> {
        let letter = match self.op {
            Op::Check => b'c',
            Op::Peek => b'p',
            Op::Take => b't',
            Op::Debit => b'd',
            Op::Refund => b'r',
            Op::Reset => b'x',
            Op::Settle => b's',
            Op::Release => b'l',
            Op::Book { .. } => b'b',
            Op::Unbook { .. } => b'u',
            _ => unreachable!("the script knows every operation"),
        };
        let flags = u8::from(self.time != Time::Server)
            | u8::from(self.id().is_some()) << 1
            | u8::from(self.denied) << 2
            | u8::from(charges > 1) << 3
            | u8::from(matches!(self.time, Time::StandIn(_))) << 4;
        let mut bytes = Vec::with_capacity(ROOM);
        bytes.extend_from_slice(&[letter, flags]);
        bytes
    }

    /// The last argument, of the calls that have one: a number more, and an id.
    fn rest(&self) -> Option<Vec<u8>> {
        let more = match self.op {
            Op::Book { max_wait_us } => Some(max_wait_us),
            Op::Unbook { idle_at } => Some(idle_at.as_micros()),
            _ => None,
        };
        let id = self.id();
        if more.is_none() && id.is_none() {
            return None;
        }
        let mut bytes = Vec::with_capacity(15);
        push(&mut bytes, more.unwrap_or(0));
        if let Some(Id(id)) = id {
            bytes.extend_from_slice(&id.to_be_bytes());
        }
        Some(bytes)
    }
}

/// One charge of a call.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Part<'a> {
    pub(crate) charge: &'a Charge<'a>,
    /// The moment under which it was charged before: to be given back first.
    pub(crate) undo: Option<Timestamp>,
}

/// The arguments of a call. `seen` says what a witness remembers of the key of a charge, and is
/// told its place and scale.
pub(crate) fn arguments<'a>(
    head: &Head,
    parts: impl ExactSizeIterator<Item = Part<'a>>,
    mut seen: impl FnMut(usize, &[u8]) -> Option<Vec<u8>>,
) -> Vec<Vec<u8>> {
    let charges = parts.len();
    let mut args = Vec::with_capacity(charges + 1);
    for (at, part) in parts.enumerate() {
        let mut bytes = if at == 0 { head.encode(charges) } else { Vec::with_capacity(ROOM) };
        let from = bytes.len();
        push_scale(&mut bytes, &part.charge.limit);
        let seen = seen(at, &bytes[from..]);
        push_numbers(&mut bytes, head.op, &part, seen.as_deref());
        if at == 0 {
            bytes.resize(bytes.len().max(SHORTEST), 0);
            if let Some(now) = head.time.given() {
                push(&mut bytes, now.as_micros());
            }
        }
        args.push(bytes);
    }
    args.extend(head.rest());
    args
}

/// The arguments of a call that decides checks of one charge at these costs, one after the other at
/// one instant; there must be one.
pub(crate) fn arguments_of_many(
    time: Time,
    charge: &Charge<'_>,
    costs: &[u64],
    seen: impl FnOnce(&[u8]) -> Option<Vec<u8>>,
) -> Vec<Vec<u8>> {
    let first = Charge { cost: costs.first().copied().unwrap_or(0), ..charge.clone() };
    let head = Head { op: Op::Check, id: None, time, denied: false };
    let mut seen = Some(seen);
    let recall = |_: usize, scale: &[u8]| seen.take().and_then(|seen| seen(scale));
    let mut args = arguments(&head, std::iter::once(Part { charge: &first, undo: None }), recall);
    args[0][0] = b'm';
    if costs.len() > 1 {
        let mut rest = Vec::with_capacity(7 * costs.len());
        costs[1..].iter().for_each(|cost| push(&mut rest, *cost));
        args.push(rest);
    }
    args
}

/// The scale a limit counts in.
pub(crate) fn scale(limit: &Limit) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(16);
    push_scale(&mut bytes, limit);
    bytes
}

fn push_scale(bytes: &mut Vec<u8>, limit: &Limit) {
    bytes.push(letter(limit.algorithm()));
    match limit.algorithm() {
        Algorithm::Bucket(bucket) => {
            push(bytes, bucket.rate.p);
            push(bytes, bucket.rate.q);
            bytes.push(u8::try_from(bucket.rate.grid.ilog10()).unwrap_or(u8::MAX));
        }
        Algorithm::Window(window) => {
            push(bytes, window.period);
            bytes.push(u8::from(window.from_first_hit));
        }
        Algorithm::Sliding(sliding) => {
            push(bytes, sliding.period);
            push(bytes, sliding.step);
            bytes.push(u8::from(sliding.lenient));
        }
        Algorithm::Estimate(estimate) => push(bytes, estimate.period),
        Algorithm::Log(log) => push(bytes, log.period),
        Algorithm::Concurrent(_) => {}
    }
}

/// Options and numbers of a charge, and what was seen of its key: epoch and state, but the state
/// first, where it always is. What most limits do not have is there only if one of it is not what
/// the script takes it for.
fn push_numbers(bytes: &mut Vec<u8>, op: Op, part: &Part<'_>, seen: Option<&[u8]>) {
    let Part { charge, undo } = part;
    let limit = &charge.limit;
    // Of a settlement only the difference matters: how much is missing, or how much too much it
    // was.
    let (cost, missing) = match op {
        Op::Settle if charge.cost > charge.reserved => (charge.cost - charge.reserved, true),
        Op::Settle => (charge.reserved - charge.cost, false),
        _ => (charge.cost, false),
    };
    let extra = match limit.algorithm() {
        Algorithm::Estimate(estimate) => estimate.grid,
        Algorithm::Concurrent(concurrent) => concurrent.ttl,
        _ => 0,
    };
    let state_len = state_len(limit.algorithm());
    let seen = seen.filter(|seen| seen.len() == 7 + state_len);
    let rare =
        [limit.debt(), limit.algorithm().amount(), undo.map_or(0, Timestamp::as_micros), extra];
    let is_rare = rare != [0, limit.capacity(), 0, 0];
    let options = u8::from(limit.counts_rejected())
        | u8::from(undo.is_some()) << 1
        | u8::from(missing) << 2
        | u8::from(seen.is_some()) << 3
        | u8::from(is_rare) << 4;
    bytes.push(options);
    push(bytes, cost);
    push(bytes, limit.capacity());
    match seen.and_then(|seen| seen.split_at_checked(7)) {
        Some((epoch, state)) => {
            bytes.extend_from_slice(state);
            bytes.extend_from_slice(epoch);
        }
        None => bytes.resize(bytes.len() + state_len, 0),
    }
    if is_rare {
        rare.into_iter().for_each(|number| push(bytes, number));
    }
}

/// How long a short state is.
fn state_len(algorithm: &Algorithm) -> usize {
    match algorithm {
        Algorithm::Bucket(_) => 14,
        Algorithm::Window(_) => 21,
        Algorithm::Estimate(_) => 28,
        Algorithm::Sliding(_) | Algorithm::Log(_) | Algorithm::Concurrent(_) => 0,
    }
}

fn push(bytes: &mut Vec<u8>, number: u64) {
    bytes.extend_from_slice(&number.min(EXACT - 1).to_be_bytes()[1..]);
}

/// What the script answered.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Answer {
    pub(crate) allowed: bool,
    pub(crate) now: Timestamp,
    pub(crate) found: Vec<Found>,
}

/// What it found and did for one charge.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Found {
    pub(crate) fits: bool,
    pub(crate) granted: u64,
    pub(crate) booked_us: u64,
    pub(crate) reading: Reading,
    /// The moment under which it was charged, if this very call charged it.
    pub(crate) charged_at: Option<Timestamp>,
    /// What a witness should remember; empty if the algorithm has none, or if this is not what is
    /// kept.
    pub(crate) seen: Vec<u8>,
    /// Something had been lost and was restored from what a witness remembered.
    pub(crate) restored: bool,
    /// The key held something that Tidegate did not write, and was taken as used up.
    pub(crate) repaired: bool,
    /// The state was ahead of the server's clock by so much, and was rebased.
    pub(crate) rebased_us: Option<u64>,
}

impl Found {
    /// The numbers for the caller.
    pub(crate) fn verdict(
        &self,
        op: Op,
        charge: &Charge<'_>,
        allowed: bool,
        now: Timestamp,
    ) -> Verdict {
        let &Found { fits, granted, booked_us, .. } = self;
        // All or nothing: what was asked for, also if it is more than the script can count and was
        // known by its id.
        let granted = if matches!(op, Op::Check | Op::Debit | Op::Book { .. }) {
            charge.cost
        } else {
            granted
        };
        let done =
            Done { op, cost: charge.cost, reserved: charge.reserved, fits, granted, booked_us };
        self.reading.verdict(&charge.limit, &done, allowed, now)
    }
}

/// An answer that is not one.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[error("the script answered something else than was asked")]
pub(crate) struct Garbled;

impl Answer {
    /// Reads the answer to a call over these charges, in their order.
    pub(crate) fn decode<'c>(
        bytes: &[u8],
        mut charges: impl Iterator<Item = &'c Charge<'c>>,
    ) -> Result<Answer, Garbled> {
        let mut bytes = Bytes(bytes);
        if bytes.0.len() == JUST_CHARGED {
            // A window that was charged now: the moment of its last charge is the time.
            let charge = charges.next().ok_or(Garbled)?;
            let now = Bytes(&bytes.0[14..]).moment()?;
            let found = vec![simply_found(&mut bytes, CHARGED, charge)?];
            return if bytes.0.is_empty() {
                Ok(Answer { allowed: true, now, found })
            } else {
                Err(Garbled)
            };
        }
        let kind = bytes.byte()?;
        let now = bytes.moment()?;
        let (allowed, found) = match kind {
            DENIED | ALLOWED => (
                kind == ALLOWED,
                charges.map(|charge| found(&mut bytes, &charge.limit)).collect::<Result<_, _>>()?,
            ),
            LOOKED | CHARGED | SIMPLY_DENIED => (
                kind != SIMPLY_DENIED,
                vec![simply_found(&mut bytes, kind, charges.next().ok_or(Garbled)?)?],
            ),
            _ => return Err(Garbled),
        };
        if bytes.0.is_empty() { Ok(Answer { allowed, now, found }) } else { Err(Garbled) }
    }
}

/// Reads the answers to many checks of one charge, as many as there are.
pub(crate) fn decode_many(bytes: &[u8], charge: &Charge<'_>) -> Result<Vec<Answer>, Garbled> {
    let mut bytes = Bytes(bytes);
    let mut answers = Vec::new();
    while !bytes.0.is_empty() {
        let (kind, now) = (bytes.byte()?, bytes.moment()?);
        if kind != DENIED && kind != ALLOWED {
            return Err(Garbled);
        }
        answers.push(Answer {
            allowed: kind == ALLOWED,
            now,
            found: vec![found(&mut bytes, &charge.limit)?],
        });
    }
    Ok(answers)
}

/// What an answer begins with: that of the general part, or one of the three of a simple check.
const DENIED: u8 = 0;
const ALLOWED: u8 = 1;
const LOOKED: u8 = 2;
const CHARGED: u8 = 3;
const SIMPLY_DENIED: u8 = 4;
/// An answer of this length is the state of a window and nothing else; every other one is longer.
const JUST_CHARGED: usize = 21;

/// What a simple check found: a state that was never given anything back, and nothing unusual.
fn simply_found(bytes: &mut Bytes<'_>, kind: u8, charge: &Charge<'_>) -> Result<Found, Garbled> {
    let mut seen = vec![0; 7]; // the moment of the last give-back: never
    seen.extend_from_slice(bytes.0);
    let state = state(bytes, charge.limit.algorithm())?;
    Ok(Found {
        fits: kind != SIMPLY_DENIED,
        granted: if kind == CHARGED { charge.cost.min(EXACT - 1) } else { 0 },
        booked_us: 0,
        charged_at: (kind == CHARGED).then(|| charged_at(&state)),
        reading: Reading::State(state),
        seen,
        restored: false,
        repaired: false,
        rebased_us: None,
    })
}

/// The moment under which the last charge of a short state was made.
fn charged_at(state: &State) -> Timestamp {
    match state {
        State::Bucket { level, .. } => level.at,
        State::Window { count, .. } => count.start,
        State::Estimate { pair, .. } => pair.start,
        _ => Timestamp::EPOCH,
    }
}

fn found(bytes: &mut Bytes<'_>, limit: &Limit) -> Result<Found, Garbled> {
    let flags = bytes.byte()?;
    let rebased_us = if flags & 32 > 0 { Some(bytes.number()?) } else { None };
    let granted = bytes.number()?;
    let (mut booked_us, mut seen) = (0, Vec::new());
    let charged;
    let algorithm = limit.algorithm();
    let reading = match algorithm {
        Algorithm::Bucket(_) | Algorithm::Window(_) | Algorithm::Estimate(_) => {
            booked_us = bytes.number()?;
            let from = bytes.0;
            let _epoch = bytes.number()?;
            let state = state(bytes, algorithm)?;
            if flags & 16 == 0 {
                seen = from[..from.len() - bytes.0.len()].to_vec();
            }
            charged = charged_at(&state);
            Reading::State(state)
        }
        Algorithm::Sliding(_) | Algorithm::Log(_) | Algorithm::Concurrent(_) => {
            let used = bytes.number()?;
            let (retry_us, next_us, reset_us) = (bytes.number()?, bytes.number()?, bytes.number()?);
            charged = bytes.moment()?;
            Reading::Counted { used, retry_us, next_us, reset_us }
        }
    };
    let (fits, restored, repaired) = (flags & 1 > 0, flags & 2 > 0, flags & 4 > 0);
    let charged_at = (flags & 8 > 0).then_some(charged);
    Ok(Found {
        fits,
        granted,
        booked_us,
        reading,
        charged_at,
        seen,
        restored,
        repaired,
        rebased_us,
    })
}

/// What a witness remembers, read again.
pub(crate) fn reading(seen: &[u8], limit: &Limit) -> Option<Reading> {
    let mut bytes = Bytes(seen);
    let _epoch = bytes.number().ok()?;
    state(&mut bytes, limit.algorithm()).ok().map(Reading::State)
}

/// A short state, in the scale of `algorithm`.
fn state(bytes: &mut Bytes<'_>, algorithm: &Algorithm) -> Result<State, Garbled> {
    Ok(match *algorithm {
        Algorithm::Bucket(bucket) => {
            let (units, at) = (bytes.number()?, bytes.moment()?);
            State::Bucket { rate: bucket.rate, level: Level { units, at } }
        }
        Algorithm::Window(window) => {
            let (start, used, last) = (bytes.moment()?, bytes.number()?, bytes.moment()?);
            let (period, from_first_hit) = (window.period, window.from_first_hit);
            State::Window { period, from_first_hit, count: Count { start, last, used } }
        }
        Algorithm::Estimate(estimate) => {
            let (start, last) = (bytes.moment()?, bytes.moment()?);
            let (previous, current) = (bytes.number()?, bytes.number()?);
            State::Estimate {
                period: estimate.period,
                pair: Pair { start, last, previous, current },
            }
        }
        _ => return Err(Garbled),
    })
}

/// Bytes that are read from the front.
struct Bytes<'a>(&'a [u8]);

impl Bytes<'_> {
    fn byte(&mut self) -> Result<u8, Garbled> {
        let (first, rest) = self.0.split_first().ok_or(Garbled)?;
        self.0 = rest;
        Ok(*first)
    }

    fn number(&mut self) -> Result<u64, Garbled> {
        let (seven, rest) = self.0.split_at_checked(7).ok_or(Garbled)?;
        self.0 = rest;
        let number = seven.iter().fold(0, |number, byte| number << 8 | u64::from(*byte));
        if number < EXACT { Ok(number) } else { Err(Garbled) }
    }

    fn moment(&mut self) -> Result<Timestamp, Garbled> {
        Ok(Timestamp::from_micros(self.number()?))
    }
}
