//! Encodes a call of the script and decodes its answer; `lua/fast.lua` and `lua/state.lua` are the
//! other side.
//!
//! Numbers are below 2^53 and take seven bytes, most significant first. A larger cost never fits;
//! it is sent as the largest number, which never fits either.

use tidegate_core::algorithm::bucket::Level;
use tidegate_core::algorithm::estimate::Pair;
use tidegate_core::algorithm::window::Count;
use tidegate_core::{Algorithm, Done, EXACT, Id, Limit, Op, Reading, State, Timestamp, Verdict};

use super::keys::letter;
use crate::store::Charge;

/// The capacity for the longest charge: scale, options, state, seven numbers, and the time.
const LONGEST: usize = 96;
/// The script reads this many bytes of every call in one step: those of a window.
const SHORTEST: usize = 40;

/// The clock that decides a call.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum CallTime {
    /// The server's clock.
    Server,
    /// The caller's clock, at this time, which never goes back; see
    /// `tidegate_core::decide_on_store_clock`.
    Caller(Timestamp),
    /// The server's clock, assumed to be at this time: for tests of clock steps.
    StandIn(Timestamp),
}

impl CallTime {
    fn given(self) -> Option<Timestamp> {
        match self {
            CallTime::Server => None,
            CallTime::Caller(now) | CallTime::StandIn(now) => Some(now),
        }
    }
}

/// The part of a call that all its charges share.
#[derive(Clone, Copy, Debug)]
pub(crate) struct CallHead {
    pub(crate) op: Op,
    pub(crate) id: Option<Id>,
    /// The time at which it is decided.
    pub(crate) time: CallTime,
    /// Another slot denied it: store what a denied check stores.
    pub(crate) denied: bool,
}

impl CallHead {
    fn id(&self) -> Option<Id> {
        self.id.filter(|id| *id != Id::NONE)
    }

    /// The start of `ARGV[1]`, with capacity for a charge and the time.
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
            _ => unreachable!("the script has every operation"),
        };
        let flags = u8::from(self.time != CallTime::Server)
            | u8::from(self.id().is_some()) << 1
            | u8::from(self.denied) << 2
            | u8::from(charges > 1) << 3
            | u8::from(matches!(self.time, CallTime::StandIn(_))) << 4;
        let mut bytes = Vec::with_capacity(LONGEST);
        bytes.extend_from_slice(&[letter, flags]);
        bytes
    }

    /// The last argument, if the call has one: another number, and an id.
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
pub(crate) struct CallCharge<'a> {
    pub(crate) charge: &'a Charge<'a>,
    /// The moment of an earlier charge, to give back first.
    pub(crate) undo: Option<Timestamp>,
}

/// The arguments of a call. `seen` receives the index and the scale of a charge, and returns what
/// the witness remembers of its key.
pub(crate) fn arguments<'a>(
    head: &CallHead,
    parts: impl ExactSizeIterator<Item = CallCharge<'a>>,
    mut seen: impl FnMut(usize, &[u8]) -> Option<Vec<u8>>,
) -> Vec<Vec<u8>> {
    let charges = parts.len();
    let mut args = Vec::with_capacity(charges + 1);
    for (at, part) in parts.enumerate() {
        let mut bytes = if at == 0 { head.encode(charges) } else { Vec::with_capacity(LONGEST) };
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

/// The arguments of a call that decides checks of one charge at these costs, at least one, in order
/// and at one instant.
pub(crate) fn arguments_of_many(
    time: CallTime,
    charge: &Charge<'_>,
    costs: &[u64],
    seen: impl FnOnce(&[u8]) -> Option<Vec<u8>>,
) -> Vec<Vec<u8>> {
    let first = Charge { cost: costs.first().copied().unwrap_or(0), ..charge.clone() };
    let head = CallHead { op: Op::Check, id: None, time, denied: false };
    let mut seen = Some(seen);
    let recall = |_: usize, scale: &[u8]| seen.take().and_then(|seen| seen(scale));
    let mut args =
        arguments(&head, std::iter::once(CallCharge { charge: &first, undo: None }), recall);
    args[0][0] = b'm';
    if costs.len() > 1 {
        let mut rest = Vec::with_capacity(7 * costs.len());
        costs[1..].iter().for_each(|cost| push(&mut rest, *cost));
        args.push(rest);
    }
    args
}

/// The scale in which a limit counts.
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

/// Writes options and numbers of a charge, and what was seen of its key: the state, at a fixed
/// offset, then the epoch. The four rare numbers follow only if one of them is not its default.
fn push_numbers(bytes: &mut Vec<u8>, op: Op, part: &CallCharge<'_>, seen: Option<&[u8]>) {
    let CallCharge { charge, undo } = part;
    let limit = &charge.limit;
    // A settlement sends only the difference, and its sign.
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

/// The length of a state of fixed size; 0 for the other algorithms.
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

/// The answer of the script.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct ScriptAnswer {
    pub(crate) allowed: bool,
    pub(crate) now: Timestamp,
    pub(crate) charges: Vec<ChargeAnswer>,
}

/// The part of an answer for one charge.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct ChargeAnswer {
    pub(crate) fits: bool,
    pub(crate) granted: u64,
    pub(crate) booked_us: u64,
    pub(crate) reading: Reading,
    /// The moment of the charge, if this call made it.
    pub(crate) charged_at: Option<Timestamp>,
    /// Epoch and state for the witness; empty if the algorithm has no state of fixed size, or if
    /// the state was not stored.
    pub(crate) seen: Vec<u8>,
    /// The key had lost state, restored from the witness.
    pub(crate) restored: bool,
    /// The key held a value that Tidegate did not write, and was taken as used up.
    pub(crate) repaired: bool,
    /// How far the state was ahead of the server's clock, if it was rebased.
    pub(crate) rebased_us: Option<u64>,
}

impl ChargeAnswer {
    /// The verdict on the charge.
    pub(crate) fn verdict(
        &self,
        op: Op,
        charge: &Charge<'_>,
        allowed: bool,
        now: Timestamp,
    ) -> Verdict {
        let &ChargeAnswer { fits, granted, booked_us, .. } = self;
        // All or nothing: the full cost, even if it is more than the script can count and was
        // charged before under its id.
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

/// Bytes that are not an answer.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[error("the script answered something else than was asked")]
pub(crate) struct Garbled;

impl ScriptAnswer {
    /// Reads the answer to a call over these charges, in their order.
    pub(crate) fn decode<'c>(
        bytes: &[u8],
        mut charges: impl Iterator<Item = &'c Charge<'c>>,
    ) -> Result<ScriptAnswer, Garbled> {
        let mut bytes = Bytes(bytes);
        if bytes.0.len() == JUST_CHARGED {
            // A window charged now: the moment of its last charge is the time.
            let charge = charges.next().ok_or(Garbled)?;
            let now = Bytes(&bytes.0[14..]).moment()?;
            let charges = vec![fast_answer(&mut bytes, FAST_CHARGED, charge)?];
            return if bytes.0.is_empty() {
                Ok(ScriptAnswer { allowed: true, now, charges })
            } else {
                Err(Garbled)
            };
        }
        let kind = bytes.byte()?;
        let now = bytes.moment()?;
        let (allowed, answers) = match kind {
            DENIED | ALLOWED => (
                kind == ALLOWED,
                charges
                    .map(|charge| charge_answer(&mut bytes, &charge.limit))
                    .collect::<Result<_, _>>()?,
            ),
            FAST_PEEKED | FAST_CHARGED | FAST_DENIED => (
                kind != FAST_DENIED,
                vec![fast_answer(&mut bytes, kind, charges.next().ok_or(Garbled)?)?],
            ),
            _ => return Err(Garbled),
        };
        if bytes.0.is_empty() {
            Ok(ScriptAnswer { allowed, now, charges: answers })
        } else {
            Err(Garbled)
        }
    }
}

/// Reads the answers to many checks of one charge, as many as there are.
pub(crate) fn decode_many(bytes: &[u8], charge: &Charge<'_>) -> Result<Vec<ScriptAnswer>, Garbled> {
    let mut bytes = Bytes(bytes);
    let mut answers = Vec::new();
    while !bytes.0.is_empty() {
        let (kind, now) = (bytes.byte()?, bytes.moment()?);
        if kind != DENIED && kind != ALLOWED {
            return Err(Garbled);
        }
        answers.push(ScriptAnswer {
            allowed: kind == ALLOWED,
            now,
            charges: vec![charge_answer(&mut bytes, &charge.limit)?],
        });
    }
    Ok(answers)
}

/// The first byte of an answer: two of the general path, three of the fast path.
const DENIED: u8 = 0;
const ALLOWED: u8 = 1;
const FAST_PEEKED: u8 = 2;
const FAST_CHARGED: u8 = 3;
const FAST_DENIED: u8 = 4;
/// An answer of this length is only the state of a window; all others are longer.
const JUST_CHARGED: usize = 21;

/// The answer of the fast path: a state without a give-back, and nothing unusual.
fn fast_answer(
    bytes: &mut Bytes<'_>,
    kind: u8,
    charge: &Charge<'_>,
) -> Result<ChargeAnswer, Garbled> {
    let mut seen = vec![0; 7]; // the moment of the last give-back: never
    seen.extend_from_slice(bytes.0);
    let state = state(bytes, charge.limit.algorithm())?;
    Ok(ChargeAnswer {
        fits: kind != FAST_DENIED,
        granted: if kind == FAST_CHARGED { charge.cost.min(EXACT - 1) } else { 0 },
        booked_us: 0,
        charged_at: (kind == FAST_CHARGED).then(|| charged_at(&state)),
        reading: Reading::State(state),
        seen,
        restored: false,
        repaired: false,
        rebased_us: None,
    })
}

/// The moment of the last charge of a state of fixed size.
fn charged_at(state: &State) -> Timestamp {
    match state {
        State::Bucket { level, .. } => level.at,
        State::Window { count, .. } => count.start,
        State::Estimate { pair, .. } => pair.start,
        _ => Timestamp::EPOCH,
    }
}

fn charge_answer(bytes: &mut Bytes<'_>, limit: &Limit) -> Result<ChargeAnswer, Garbled> {
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
    Ok(ChargeAnswer {
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

/// Decodes what the witness remembers.
pub(crate) fn reading(seen: &[u8], limit: &Limit) -> Option<Reading> {
    let mut bytes = Bytes(seen);
    let _epoch = bytes.number().ok()?;
    state(&mut bytes, limit.algorithm()).ok().map(Reading::State)
}

/// Decodes a state of fixed size, in the scale of `algorithm`.
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

/// Bytes to read from the front.
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
