//! Random limits, operations and moments, biased to where things break: edges of windows and steps,
//! one microsecond on either side of them, costs that just fit and just do not, long idle gaps and
//! clocks that go back.

use tidegate_core::{Algorithm, Limit, LimitError, Op, Period, Retry, Timestamp, Verdict};
use tidegate_trace::Random;

/// Where random words come from.
pub(crate) trait Source {
    fn word(&mut self) -> u64;

    fn below(&mut self, n: u64) -> u64 {
        self.word() % n
    }

    /// Once in `n` times.
    fn once_in(&mut self, n: u64) -> bool {
        self.below(n) == n - 1
    }

    fn pick<T: Copy>(&mut self, choices: &[T]) -> T {
        choices[self.below(choices.len() as u64) as usize]
    }
}

/// An endless source of random words.
pub(crate) struct Seeded(Random);

impl Seeded {
    pub(crate) fn new(seed: u64) -> Self {
        Seeded(Random(seed))
    }
}

impl Source for Seeded {
    fn word(&mut self) -> u64 {
        self.0.next()
    }
}

/// Words that proptest made and can shrink; zeros after the last.
pub(crate) struct Words {
    words: Vec<u64>,
    next: usize,
}

impl Words {
    pub(crate) fn new(words: Vec<u64>) -> Self {
        Words { words, next: 0 }
    }
}

impl Source for Words {
    fn word(&mut self) -> u64 {
        self.next += 1;
        self.words.get(self.next - 1).copied().unwrap_or(0)
    }
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Kind {
    Bucket,
    Window,
    Sliding,
    Estimate,
    Log,
    Concurrent,
}

pub(crate) const KINDS: [Kind; 6] =
    [Kind::Bucket, Kind::Window, Kind::Sliding, Kind::Estimate, Kind::Log, Kind::Concurrent];

/// Any valid limit of any algorithm.
pub(crate) fn limit(source: &mut impl Source) -> Limit {
    let kind = source.pick(&KINDS);
    limit_of(source, kind)
}

/// Any valid limit of this algorithm.
pub(crate) fn limit_of(source: &mut impl Source, kind: Kind) -> Limit {
    for _ in 0..8 {
        if let Ok(limit) = attempt(source, kind) {
            return limit;
        }
    }
    let period = Period::micros(3);
    match kind {
        Kind::Bucket => Limit::bucket(2, period).build(),
        Kind::Window => Limit::window(2, period).build(),
        Kind::Sliding => Limit::sliding(2, period).build(),
        Kind::Estimate => Limit::estimate(2, period).build(),
        Kind::Log => Limit::log(2, period).build(),
        Kind::Concurrent => Limit::concurrent(2, period).build(),
    }
    .expect("small numbers are always exact")
}

fn attempt(source: &mut impl Source, kind: Kind) -> Result<Limit, LimitError> {
    macro_rules! finish {
        ($builder:expr) => {{
            let mut builder = $builder;
            if source.once_in(4) {
                builder = builder.debt(source.pick(&[0, 1, 2, 7, 1_000]));
            }
            if source.once_in(4) {
                builder = builder.count_rejected();
            }
            builder.build()
        }};
    }
    let (amount, length) = (amount(source), length(source));
    let period = Period::micros(length);
    match kind {
        Kind::Bucket => match source.below(3) {
            0 => finish!(Limit::bucket(amount, period)),
            1 => finish!(Limit::bucket(amount, period).burst(source.pick(&[1, 2, 3, 10, 1_000]))),
            _ => finish!(Limit::bucket(amount, period).burst(self::amount(source))),
        },
        Kind::Window if source.once_in(2) => {
            finish!(Limit::window(amount, period).from_first_hit())
        }
        Kind::Window => finish!(Limit::window(amount, period)),
        Kind::Sliding => {
            let mut builder = Limit::sliding(amount, period);
            if !source.once_in(4) {
                // Often one that does not divide the period.
                let cuts = 1 + source.pick(&[0, 0, 1, 2, 3, 6, 9, 30, 200]);
                let step = (length / cuts + source.below(3)).clamp(1, length);
                builder = builder.step(Period::micros(step));
            }
            if source.once_in(2) {
                builder = builder.lenient();
            }
            finish!(builder)
        }
        Kind::Estimate => finish!(Limit::estimate(amount, period)),
        Kind::Log => finish!(Limit::log(amount.min(100_000), period)),
        Kind::Concurrent => Limit::concurrent(amount.min(100_000), period).build(),
    }
}

fn amount(source: &mut impl Source) -> u64 {
    match source.below(8) {
        0..4 => 1 + source.below(6),
        4 => source.pick(&[10, 100, 240, 1_000]),
        5 => source.pick(&[999_983, 1_000_000, 26_003]),
        6 => 1 + source.below(5_000),
        _ => source.pick(&[10_000_000_000, 1 << 40, 3_000_000_007, (1 << 50) - 1]),
    }
}

fn length(source: &mut impl Source) -> u64 {
    match source.below(8) {
        0..3 => 1 + source.below(12),
        3 => source.pick(&[100, 1_000, 1_500, 4_096, 9_999]),
        4 => source.pick(&[1_000_000, 60_000_000, 999_983, 20_000_000]),
        5 => source.pick(&[3_600_000_000, 86_400_000_000, 604_800_000_000]),
        6 => 1 + source.below(3_000_000),
        _ => source.pick(&[(1 << 51) - 1, 1 << 50, 31_536_000_000_000, 7]),
    }
}

/// A time at which a history may start.
pub(crate) fn dawn(source: &mut impl Source) -> u64 {
    match source.below(8) {
        0 => 0,
        1 => source.below(50),
        2 => Timestamp::MAX.as_micros() - source.below(1_000_000),
        _ => 1_700_000_000_000_000 + source.below(1 << 45),
    }
}

/// The next time of a history: never before `now`.
pub(crate) fn later(source: &mut impl Source, limit: &Limit, last: &Verdict, now: u64) -> u64 {
    let algorithm = limit.algorithm();
    let period = algorithm.period_us();
    let interval = period / algorithm.amount();
    let step = match algorithm {
        Algorithm::Sliding(sliding) => sliding.step,
        _ => limit.grid_us(),
    };
    let near = |source: &mut dyn FnMut() -> u64, at: u64| (at + source() % 3).saturating_sub(1);
    let mut word = || source.word();
    let ahead = match word() % 20 {
        0..4 => 0,
        4 | 5 => 1,
        6 => near(&mut word, interval),
        7 => near(&mut word, period),
        8 => near(&mut word, step),
        9 => near(&mut word, last.reset_after_us),
        10 | 11 => near(&mut word, last.next_after_us),
        12 | 13 => near(&mut word, if let Retry::After(wait) = last.retry { wait } else { 1 }),
        14 => near(&mut word, period - now % period), // the edge of a window
        15 => near(&mut word, step - now % step),
        16 => word() % period,
        17 => near(&mut word, 2 * period),
        18 => word() % (3 * period),
        _ => period * 3 + word() % period,
    };
    (now + ahead).min(Timestamp::MAX.as_micros())
}

/// A moment that is sometimes before `now`.
pub(crate) fn any_time(source: &mut impl Source, limit: &Limit, last: &Verdict, now: u64) -> u64 {
    if !source.once_in(10) {
        return later(source, limit, last, now);
    }
    let period = limit.algorithm().period_us();
    let back = source.pick(&[1, 2, period / 2, period - 1, period, period + 1, 3 * period]);
    now.saturating_sub(back)
}

/// A cost close to what fits.
pub(crate) fn cost(source: &mut impl Source, limit: &Limit, last: &Verdict) -> u64 {
    let capacity = limit.capacity();
    match source.below(16) {
        0 => 0,
        1..6 => 1,
        6 | 7 => last.remaining,
        8 | 9 => last.remaining + 1,
        10 => capacity,
        11 => capacity + 1,
        12 => capacity + limit.debt() + source.below(2),
        13 => source.pick(&[u64::MAX, u64::MAX / 2, 1 << 53, 2]),
        _ => 1 + source.below(capacity),
    }
}

/// An operation that a model without ids can express.
pub(crate) fn op(source: &mut impl Source) -> Op {
    match source.below(16) {
        0..9 => Op::Check,
        9 => Op::Peek,
        10 | 11 => Op::Take,
        12 | 13 => Op::Debit,
        14 => Op::Refund,
        _ if source.once_in(4) => Op::Reset,
        _ => Op::Refund,
    }
}
