//! The largest and the strangest numbers that can be written down: nothing panics, and the memory
//! store agrees with the core.

use tidegate::http::headers;
use tidegate::{Check, Id, Limit, ManualClock, Memory, Op, Period, Scope, Subject, Timestamp};

use crate::conformance::{Plain, Random, StepsBack};

const NUMBERS: &[u64] = &[
    0,
    1,
    2,
    3,
    7,
    999_983,
    100_000,
    100_001,
    1 << 20,
    (1 << 31) - 1,
    1 << 32,
    (1 << 50) + 1,
    (1 << 51) - 1,
    1 << 51,
    (1 << 52) - 1,
    1 << 52,
    (1 << 53) - 1,
    1 << 53,
    u64::MAX / 2,
    u64::MAX,
];

fn number(random: &mut Random) -> u64 {
    let number = *random.pick(NUMBERS);
    match random.below(4) {
        0 => number.saturating_sub(random.below(3)),
        1 => number.saturating_add(random.below(3)),
        2 => number >> random.below(40),
        _ => number,
    }
}

fn limit(random: &mut Random) -> Limit {
    loop {
        let (amount, period) = (number(random), Period::micros(number(random)));
        macro_rules! built {
            ($builder:expr) => {{
                let mut builder = $builder;
                if random.below(3) == 0 {
                    builder = builder.debt(number(random));
                }
                if random.below(3) == 0 {
                    builder = builder.count_rejected();
                }
                builder.build()
            }};
        }
        let built = match random.below(8) {
            0 => built!(Limit::bucket(amount, period)),
            1 => built!(Limit::bucket(amount, period).burst(number(random))),
            2 => built!(Limit::window(amount, period)),
            3 => built!(Limit::window(amount, period).from_first_hit()),
            4 => built!(Limit::sliding(amount, period).step(Period::micros(number(random)))),
            5 => built!(Limit::estimate(amount, period)),
            6 => built!(Limit::log(amount, period)),
            _ => Limit::concurrent(amount, period).build(),
        };
        match built {
            Ok(limit) => return limit,
            Err(error) => assert!(!error.to_string().is_empty()),
        }
    }
}

#[test]
fn nothing_panics_and_all_agree() {
    for seed in 0..60 {
        let mut random = Random(seed);
        let clock = ManualClock::new();
        let memory = Memory::builder().clock(clock.clone()).build();
        let mut plain = Plain::default();
        let limits: Vec<Limit> = (0..6).map(|_| limit(&mut random)).collect();
        let mut ids = vec![Id(0), Id(1), Id(u64::MAX)];
        let mut latest = 0;
        for step in 0..3_000 {
            let at = match random.below(6) {
                0 => number(&mut random),
                1 => clock.now().as_micros() + number(&mut random) % 1_000_000,
                2 => clock.now().as_micros() + (number(&mut random) >> 14),
                _ => clock.now().as_micros(),
            };
            latest = latest.max(Timestamp::from_micros(at).as_micros());
            // A store may forget what is idle, so time that goes back is not for this test; now and
            // then all begins anew.
            clock.set(Timestamp::from_micros(latest));
            let op = match random.below(12) {
                0..4 => Op::Check,
                4 => Op::Peek,
                5 => Op::Take,
                6 => Op::Debit,
                7 => Op::Refund,
                8 => Op::Settle,
                9 => Op::Release,
                10 => Op::Book { max_wait_us: number(&mut random) },
                _ => Op::Unbook { idle_at: Timestamp::from_micros(number(&mut random)) },
            };
            let mut check = Check::of(op);
            let cost = number(&mut random);
            let chosen: Vec<Limit> =
                (0..1 + random.below(2)).map(|_| *random.pick(&limits)).collect();
            let key = random.pick(&["a", "b"]);
            check = if random.below(2) == 0 {
                let scope = Scope::Rule("r".into());
                check.charge_subject(Subject { scope, key: key.as_bytes().into() }, &chosen, cost)
            } else {
                check.charge(*key, &chosen, cost)
            };
            if random.below(3) == 0 {
                ids.push(Id(random.next()));
                check = check.with_id(*random.pick(&ids));
            }
            if check.validate().is_err() {
                continue;
            }
            let expected = plain.decide(&check, clock.now(), StepsBack::Never);
            let decided = memory.decide(&check).unwrap();
            assert_eq!(decided, expected, "seed {seed}, step {step}, at {latest}: {check:?}");
            let named: Vec<(&str, &Limit)> =
                check.charges().iter().map(|charge| ("n", &charge.limit)).collect();
            assert!(!headers::of(&decided, &named, headers::HeaderFamilies::ALL).is_empty());
            // The fast path.
            let limit = random.pick(&limits);
            let check = Check::new().charge("fast", [limit], cost);
            let expected = *plain.decide(&check, clock.now(), StepsBack::Never).binding();
            let verdict = if random.below(2) == 0 {
                memory.check("fast", limit, cost)
            } else {
                memory.prepare(&Scope::AdHoc, limit).check("fast", cost)
            };
            assert_eq!(verdict, expected, "seed {seed}, step {step}, at {latest}: {check:?}");
        }
    }
}
