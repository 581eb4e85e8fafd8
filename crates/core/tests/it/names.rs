//! Token bucket, leaky bucket and GCRA are one rule: three textbooks against three constructors,
//! equal at every step.

use tidegate_core::{Charge, Limit, Op, Period, Record, Retry, Timestamp, Verdict, decide};

use crate::draw::{self, Seeded, Source};

/// The textbook's answer: allowed, units left, wait for this cost, time until full.
type Answer = (bool, u128, u128, u128);

/// A fraction of a token is counted in parts of which a token has `period`, and a microsecond adds
/// `amount`.
#[derive(Clone, Copy)]
struct Numbers {
    amount: u128,
    period: u128,
    burst: u128,
}

/// Tokens are added evenly up to the burst; a request takes its cost in tokens.
struct TokenBucket {
    numbers: Numbers,
    tokens: u128,
    at: u128,
}

impl TokenBucket {
    fn ask(&mut self, now: u128, cost: u128) -> Answer {
        let Numbers { amount, period, burst } = self.numbers;
        let full = burst * period;
        self.tokens = (self.tokens + (now - self.at) * amount).min(full);
        self.at = now;
        let price = cost * period;
        let allowed = self.tokens >= price;
        let missing = price.saturating_sub(self.tokens);
        if allowed {
            self.tokens -= price;
        }
        (
            allowed,
            self.tokens / period,
            missing.div_ceil(amount),
            (full - self.tokens).div_ceil(amount),
        )
    }
}

/// A queue of the burst's length is emptied evenly; a request is added at its end, or overflows.
struct LeakyBucket {
    numbers: Numbers,
    queue: u128,
    at: u128,
}

impl LeakyBucket {
    fn ask(&mut self, now: u128, cost: u128) -> Answer {
        let Numbers { amount, period, burst } = self.numbers;
        self.queue = self.queue.saturating_sub((now - self.at) * amount);
        self.at = now;
        let longer = self.queue + cost * period;
        let allowed = longer <= burst * period;
        let overflow = longer.saturating_sub(burst * period);
        if allowed {
            self.queue = longer;
        }
        let space = (burst * period - self.queue) / period;
        (allowed, space, overflow.div_ceil(amount), self.queue.div_ceil(amount))
    }
}

/// The theoretical arrival time, in parts of which a microsecond has `amount`: a cell may be early
/// by the tolerance.
struct Gcra {
    numbers: Numbers,
    arrival: u128,
}

impl Gcra {
    fn ask(&mut self, now: u128, cost: u128) -> Answer {
        let Numbers { amount, period, burst } = self.numbers;
        let scaled = now * amount;
        let next = self.arrival.max(scaled) + cost * period;
        let latest = scaled + burst * period;
        let allowed = next <= latest;
        if allowed {
            self.arrival = next;
        }
        let ahead = self.arrival.saturating_sub(scaled);
        let left = (burst * period - ahead) / period;
        (allowed, left, next.saturating_sub(latest).div_ceil(amount), ahead.div_ceil(amount))
    }
}

/// The same fields from a verdict.
fn answer(verdict: &Verdict) -> Answer {
    let wait = match verdict.retry {
        Retry::Now => 0,
        Retry::After(wait) => u128::from(wait),
        Retry::Never => u128::MAX,
    };
    (verdict.allowed, u128::from(verdict.remaining), wait, u128::from(verdict.reset_after_us))
}

#[test]
fn three_names_are_one_rule() {
    for seed in 0..4_000 {
        let source = &mut Seeded::new(seed);
        let amount = 1 + source.pick(&[0, 1, 2, 6, 29, 999_982]);
        let length = source.pick(&[1, 7, 1_000, 60_000_000, 1_000_000, 86_400_000_000, 999_983]);
        let burst = 1 + source.below(30);
        let period = Period::micros(length);
        let limits = [
            Limit::token_bucket(amount, period).burst(burst).build().unwrap(),
            Limit::leaky_bucket(amount, period).capacity(burst).build().unwrap(),
            Limit::gcra(amount, period).burst(burst).build().unwrap(),
        ];
        assert_eq!(limits[0].grid_us(), 1);
        let mut records = [Record::default(), Record::default(), Record::default()];
        let (mut now, mut last) = (1_700_000_000_000_000, Verdict::default());
        let at = u128::from(now);
        let numbers = Numbers { amount: amount.into(), period: length.into(), burst: burst.into() };
        let mut tokens = TokenBucket { numbers, tokens: numbers.burst * numbers.period, at };
        let mut leaky = LeakyBucket { numbers, queue: 0, at };
        let mut gcra = Gcra { numbers, arrival: 0 };
        for step in 0..60 {
            now = draw::later(source, &limits[0], &last, now);
            let cost = draw::cost(source, &limits[0], &last).min(burst);
            let (time, price) = (u128::from(now), u128::from(cost));
            let books = [tokens.ask(time, price), leaky.ask(time, price), gcra.ask(time, price)];
            for (name, (limit, record)) in limits.iter().zip(&mut records).enumerate() {
                let charge = Charge::new(limit, record, cost);
                let decision = decide(Op::Check, &mut [charge], Timestamp::from_micros(now));
                last = *decision.binding();
                for book in books {
                    assert_eq!(
                        answer(&last),
                        book,
                        "{limit} by name {name}, seed {seed} step {step}: {cost} at {now}"
                    );
                }
            }
            assert_eq!(records[0], records[1]);
            assert_eq!(records[1], records[2]);
        }
    }
}
