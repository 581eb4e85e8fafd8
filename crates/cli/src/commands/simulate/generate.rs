//! Generated traffic. The same arguments give the same trace on every machine, because the
//! arithmetic uses integers only.

use tidegate_core::Op;
use tidegate_trace::{Micros, Random};

use super::{Event, Scene};
use crate::args::{Generated, Pattern, Rate};
use crate::output::grouped;

/// How many times the rate an attacker sends.
const ATTACK: u64 = 10;
/// The key of an attacker.
const ATTACKER: &str = "attacker";

pub(super) struct Generator {
    rate: Rate,
    pattern: Pattern,
    length_us: u64,
    seed: u64,
    keys: u64,
    random: Random,
    /// How many requests were made, without the attacker's.
    made: u64,
    /// How many the attacker made.
    attacks: u64,
    /// For `poisson`: how many mean gaps have passed, times 2^32.
    passed: u128,
    /// When the next honest request comes.
    next_us: Option<u64>,
    event: Event,
}

impl Generator {
    pub(super) fn new(args: &Generated) -> Self {
        let Generated { rate, pattern, length_us, seed, keys, cost } = *args;
        let event =
            Event { number: 0, at_us: 0, key: String::new(), cost, op: Op::Check, expect: None };
        let random = Random(seed);
        let mut generator = Generator {
            rate,
            pattern,
            length_us,
            seed,
            keys,
            random,
            made: 0,
            attacks: 0,
            passed: 0,
            next_us: None,
            event,
        };
        generator.next_us = generator.moment();
        generator
    }

    pub(super) fn scene(&self) -> Scene {
        let Rate { amount, period_us } = self.rate;
        let period = Micros(period_us).to_string();
        let unit = period.strip_prefix('1').filter(|unit| unit.starts_with(char::is_alphabetic));
        let mut title = format!("{amount}/{}", unit.unwrap_or(&period));
        title += &format!(" {} for {}", self.pattern.name(), Micros(self.length_us));
        if self.pattern == Pattern::Poisson {
            title += &format!(", seed {}", self.seed);
        }
        if self.keys > 1 {
            title += &format!(", {} keys", grouped(self.keys));
        }
        if self.event.cost != 1 {
            title += &format!(", cost {}", grouped(self.event.cost));
        }
        Scene { title, end_us: Some(self.length_us) }
    }

    /// About how many requests there will be.
    pub(super) fn expected(&self) -> u64 {
        let honest = u128::from(self.rate.amount) * u128::from(self.length_us)
            / u128::from(self.rate.period_us);
        let attack =
            if self.pattern == Pattern::Attack { honest / 3 * u128::from(ATTACK) } else { 0 };
        u64::try_from(honest + attack).unwrap_or(u64::MAX)
    }

    /// How many there have been.
    pub(super) fn made(&self) -> u64 {
        self.event.number
    }

    pub(super) fn next(&mut self) -> Option<&Event> {
        let attack_us = self.attack_moment();
        let honest = self.next_us.map(|at| (at, false));
        let attack = attack_us.map(|at| (at, true));
        let (at_us, attacks) = [honest, attack].into_iter().flatten().min()?;
        self.event.number += 1;
        self.event.at_us = at_us;
        self.event.key.clear();
        if attacks {
            self.event.key.push_str(ATTACKER);
            self.attacks += 1;
            return Some(&self.event);
        }
        let user = match self.pattern {
            Pattern::Poisson => below(&mut self.random, self.keys),
            _ => self.made % self.keys,
        };
        self.event.key = format!("user-{}", user + 1);
        self.made += 1;
        self.next_us = self.moment();
        Some(&self.event)
    }

    /// When the next honest request comes, if that is before the end.
    fn moment(&mut self) -> Option<u64> {
        let Rate { amount, period_us } = self.rate;
        let at_us = match self.pattern {
            Pattern::Constant | Pattern::Attack => spread(self.made, period_us, amount),
            Pattern::Burst => {
                // Two periods' worth within a tenth of a period, half before and half after every
                // second end of a period.
                let (cycle, place) = (self.made / (2 * amount), self.made % (2 * amount));
                let start = period_us - period_us / 20;
                cycle.checked_mul(2 * period_us)?.checked_add(start)?
                    + spread(place, period_us / 10, 2 * amount)
            }
            Pattern::Poisson => {
                self.passed += u128::from(exponential(&mut self.random));
                let micros = (self.passed * u128::from(period_us) / u128::from(amount)) >> 32;
                u64::try_from(micros).ok()?
            }
        };
        (at_us < self.length_us).then_some(at_us)
    }

    fn attack_moment(&self) -> Option<u64> {
        if self.pattern != Pattern::Attack {
            return None;
        }
        let third = self.length_us / 3;
        let at_us = third + spread(self.attacks, self.rate.period_us, self.rate.amount * ATTACK);
        (at_us < 2 * third).then_some(at_us)
    }
}

/// The moment of the `n`th of so many that come evenly in a period; rounded down, and never
/// drifting.
fn spread(n: u64, period_us: u64, amount: u64) -> u64 {
    u64::try_from(u128::from(n) * u128::from(period_us) / u128::from(amount)).unwrap_or(u64::MAX)
}

/// A number below `n`, evenly.
fn below(random: &mut Random, n: u64) -> u64 {
    u64::try_from((u128::from(random.next()) * u128::from(n)) >> 64).expect("it is below n")
}

/// Exponentially distributed with mean 1, times 2^32, by von Neumann's comparison method:
/// exact, and without a logarithm, whose last digit differs from machine to machine.
///
/// Draw numbers as long as each is smaller than the one before. If their count is odd, the
/// first one is the fraction of the answer; if not, add one to the whole part and begin again.
fn exponential(random: &mut Random) -> u64 {
    let mut whole = 0;
    loop {
        let first = random.next();
        let mut last = first;
        let mut count = 1;
        loop {
            let next = random.next();
            if next >= last {
                break;
            }
            last = next;
            count += 1;
        }
        if count % 2 == 1 {
            return (whole << 32) + (first >> 32);
        }
        whole += 1;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Mean 1 and variance 1, and e^-1 of them above 1: within five standard errors of a million.
    #[test]
    fn gaps_are_exponentially_distributed() {
        let mut random = Random(7);
        let gaps: Vec<f64> =
            (0..1_000_000).map(|_| exponential(&mut random) as f64 / f64::from(u32::MAX)).collect();
        let mean = gaps.iter().sum::<f64>() / 1e6;
        let variance = gaps.iter().map(|gap| (gap - mean).powi(2)).sum::<f64>() / 1e6;
        let above = gaps.iter().filter(|gap| **gap > 1.0).count() as f64 / 1e6;
        assert!((mean - 1.0).abs() < 0.005, "{mean}");
        assert!((variance - 1.0).abs() < 0.015, "{variance}");
        assert!((above - (-1.0_f64).exp()).abs() < 0.0025, "{above}");
    }

    #[test]
    fn the_largest_arguments_do_not_overflow() {
        let most = crate::args::MAX_RATE;
        for pattern in [Pattern::Constant, Pattern::Burst, Pattern::Poisson, Pattern::Attack] {
            for (amount, period_us) in [(most, 1), (1, (1 << 51) - 1), (most, (1 << 51) - 1)] {
                let rate = Rate { amount, period_us };
                let args = Generated {
                    rate,
                    pattern,
                    length_us: (1 << 52) - 1,
                    seed: u64::MAX,
                    keys: u64::MAX,
                    cost: 1,
                };
                let mut generator = Generator::new(&args);
                for _ in 0..1_000 {
                    let _ = generator.next();
                }
                assert!(generator.expected() > 0);
            }
        }
    }
}
