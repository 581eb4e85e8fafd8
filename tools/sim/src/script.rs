//! Reads the calls of the product's script and its answers, as an observer between node and server
//! who shares no code with either.

use tidegate::{Algorithm, Limit};

use crate::redis::keys_and_args;

/// One decision that a server made.
#[derive(Clone, Debug)]
pub(crate) struct Done {
    pub(crate) op: u8,
    pub(crate) id: Option<u64>,
    pub(crate) allowed: bool,
    /// What the server's clock said.
    pub(crate) wall_us: u64,
    pub(crate) charges: Vec<Charged>,
}

#[derive(Clone, Debug)]
pub(crate) struct Charged {
    pub(crate) key: Vec<u8>,
    pub(crate) cost: u64,
    /// Units that were granted, or given back.
    pub(crate) granted: u64,
    /// It was charged by this very call.
    pub(crate) new: bool,
    /// Of a window, when it began.
    pub(crate) start: Option<u64>,
    /// Its state was ahead of the server's clock, and was rebased.
    pub(crate) rebased: bool,
}

/// A bucket or window as it is kept, in whole units and parts of them.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Kept {
    Bucket { used: f64 },
    Window { start: u64, period: u64, used: u64 },
}

impl Kept {
    /// How much of the limit is in use at a moment.
    pub(crate) fn used(&self, wall_us: u64) -> f64 {
        match *self {
            Kept::Bucket { used } => used,
            Kept::Window { start, period, used } => {
                if wall_us < start + period {
                    used as f64
                } else {
                    0.0
                }
            }
        }
    }
}

/// Reads what is kept under a key. A bucket drains by the limit of the caller: one that another
/// limit wrote is carried over to theirs as it stood then, and without such a limit, as it was
/// written.
pub(crate) fn kept(value: &[u8], wall_us: u64, asked: Option<&Limit>) -> Option<Kept> {
    let mut bytes = Bytes(value);
    match bytes.byte()? {
        b'b' => {
            let (p, q, grid) =
                (bytes.number()?, bytes.number()?, 10_u64.pow(u32::from(bytes.byte()?)));
            let (units, at) = (bytes.number()?, bytes.number()?);
            let (drains, token, tick) = match asked.map(Limit::algorithm) {
                Some(Algorithm::Bucket(bucket)) => (bucket.rate.p, bucket.rate.q, bucket.rate.grid),
                _ => (p, q, grid),
            };
            let drained = (wall_us.saturating_sub(at) / tick * drains) as f64 / token as f64;
            Some(Kept::Bucket { used: (units as f64 / q as f64 - drained).max(0.0) })
        }
        b'w' => {
            let (period, _, start) = (bytes.number()?, bytes.byte()?, bytes.number()?);
            let used = bytes.number()?;
            Some(Kept::Window { start, period, used })
        }
        _ => None,
    }
}

/// The decisions of a call; none if it is another command, or was answered by an error.
pub(crate) fn decisions(words: &[Vec<u8>], answer: &[u8]) -> Option<Vec<Done>> {
    let (keys, args) = keys_and_args(words)?;
    let first = args.first()?;
    let op = *first.first()?;
    let mut asked = Vec::with_capacity(keys.len());
    for (at, key) in keys.iter().enumerate() {
        let text = if at == 0 { first.get(2..)? } else { args.get(at)? };
        let letter = *text.first()?;
        let scale = match letter {
            b'b' | b's' => 16,
            b'w' => 9,
            b'e' | b'l' => 8,
            b'c' => 1,
            _ => return None,
        };
        let mut numbers = Bytes(text.get(scale + 1..)?);
        asked.push((key, letter, numbers.number()?));
    }
    let rest = args.get(keys.len()).map_or(&[][..], |rest| rest);
    let mut bytes = Bytes(answer);
    if op == b'm' {
        let (key, letter, cost) = *asked.first()?;
        let mut costs = vec![cost];
        let mut more = Bytes(rest);
        while let Some(cost) = more.number() {
            costs.push(cost);
        }
        let one = |cost: u64| {
            let (allowed, wall_us) = (bytes.byte()? == 1, bytes.number()?);
            let charged = found(&mut bytes, key, letter, cost)?;
            Some(Done { op: b'c', id: None, allowed, wall_us, charges: vec![charged] })
        };
        return costs.into_iter().map(one).collect();
    }
    let id = rest.get(7..15).and_then(|id| id.try_into().ok()).map(u64::from_be_bytes);
    if answer.len() == 21 {
        // Nothing but the state of a window: it was charged, at the moment that is its last.
        let (key, _, cost) = *asked.first()?;
        let (start, _, wall_us) = (bytes.number()?, bytes.number()?, bytes.number()?);
        let charged = Charged {
            key: key.clone(),
            cost,
            granted: cost,
            new: true,
            start: Some(start),
            rebased: false,
        };
        return Some(vec![Done { op, id, allowed: true, wall_us, charges: vec![charged] }]);
    }
    let (kind, wall_us) = (bytes.byte()?, bytes.number()?);
    if kind >= 2 {
        let (key, letter, cost) = *asked.first()?;
        let start = if letter == b'w' { bytes.number() } else { None };
        let (granted, new) = (if kind == 3 { cost } else { 0 }, kind == 3);
        let charged = Charged { key: key.clone(), cost, granted, new, start, rebased: false };
        return Some(vec![Done { op, id, allowed: kind != 4, wall_us, charges: vec![charged] }]);
    }
    let charges: Option<Vec<Charged>> =
        asked.into_iter().map(|(key, letter, cost)| found(&mut bytes, key, letter, cost)).collect();
    Some(vec![Done { op, id, allowed: kind == 1, wall_us, charges: charges? }])
}

fn found(bytes: &mut Bytes<'_>, key: &[u8], letter: u8, cost: u64) -> Option<Charged> {
    let flags = bytes.byte()?;
    let rebased = flags & 32 > 0;
    if rebased {
        let _ahead_us = bytes.number()?;
    }
    let granted = bytes.number()?;
    let numbers = match letter {
        b'b' => 4,
        b'w' => 5,
        b'e' => 6,
        _ => 5,
    };
    let mut start = None;
    for at in 0..numbers {
        let number = bytes.number()?;
        if letter == b'w' && at == 2 {
            start = Some(number);
        }
    }
    Some(Charged { key: key.to_vec(), cost, granted, new: flags & 8 > 0, start, rebased })
}

/// Bytes that are read from the front.
struct Bytes<'a>(&'a [u8]);

impl Bytes<'_> {
    fn byte(&mut self) -> Option<u8> {
        let (first, rest) = self.0.split_first()?;
        self.0 = rest;
        Some(*first)
    }

    fn number(&mut self) -> Option<u64> {
        let (seven, rest) = self.0.split_at_checked(7)?;
        self.0 = rest;
        Some(seven.iter().fold(0, |number, byte| number << 8 | u64::from(*byte)))
    }
}

/// The rule that a key belongs to, by its name: `…}r0:2:r1:k` is of rule `r1`.
pub(crate) fn rule_of(key: &[u8]) -> Option<usize> {
    let text = std::str::from_utf8(key).ok()?;
    let name = text.split_once('}')?.1.split(':').nth(2)?;
    name.strip_prefix('r')?.parse().ok()
}
