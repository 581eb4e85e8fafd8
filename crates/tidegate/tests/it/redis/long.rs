//! States longer than one read: a log of thousands of hits, a thousand steps, hundreds of leases.

use tidegate::{Check, Id, Limits, ManualClock, Op, Store, Timestamp};
use tidegate_testkit::{Flavor, Server};

use super::{assert_all_expire, runtime, store};
use crate::conformance::{Plain, Random, StepsBack};

#[test]
fn long_states_agree_too() {
    let server = Server::start(Flavor::Redis7);
    runtime().block_on(async {
        let limits: Vec<Limits> = [
            "3000/10s log",
            "2000/10s log count rejected",
            "5000/10s sliding step 10ms",
            "4000/10s sliding step 10ms lenient",
            "700 concurrent ttl 10s",
        ]
        .iter()
        .map(|limit| limit.parse().unwrap())
        .collect();
        let clock = ManualClock::new();
        let redis = store(&server).clock(clock.clone()).build().unwrap();
        let mut plain = Plain::default();
        let mut random = Random(11);
        let mut longest = 0;
        let mut now = 1_700_000_000_000_000;
        for step in 0..24_000_u64 {
            now += match random.below(4000) {
                0 => random.below(12_000_000),
                1..20 => random.below(100_000),
                _ => random.below(500),
            };
            clock.set(Timestamp::from_micros(now));
            let limits = random.pick(&limits);
            let (op, cost) = match random.below(100) {
                0..70 => (Op::Check, 1 + random.below(3)),
                70..80 => (Op::Take, random.below(40)),
                80..85 => (Op::Peek, random.below(400)),
                85..90 => (Op::Refund, random.below(30)),
                90..95 => (Op::Release, 1),
                95..97 => (Op::Settle, random.below(4)),
                _ => (Op::Debit, random.below(10)),
            };
            // Half of the runs use ids, which are later settled, refunded and released.
            let mut check = Check::of(op).charge("k", limits, cost);
            if random.below(3) == 0 {
                check = check.with_id(Id(1 + step.saturating_sub(random.below(300))));
            }
            let expected = plain.decide(&check, clock.now(), StepsBack::Never);
            let decided = redis.decide(&check).await.unwrap();
            assert_eq!(decided, expected, "step {step}: {check:?}");
            if step % 1000 == 0 {
                longest = longest.max(server.command(&["EVAL", LONGEST, "0"]).int());
            }
        }
        assert!(longest > 12_000, "the longest value has {longest} bytes: that is not long");
    });
    assert_all_expire(&server);
}

const LONGEST: &str = "local n = 0 for _, key in ipairs(redis.call('KEYS', 'tg1:*')) do \
     n = math.max(n, redis.call('STRLEN', key)) end return n";

/// The server does nothing else while a script runs: a large give-back must not read a long log hit
/// by hit.
#[test]
fn giving_back_from_a_long_log_does_not_read_it_hit_by_hit() {
    let server = Server::start(Flavor::Redis7);
    runtime().block_on(async {
        let limits: Limits = "3000/h log".parse().unwrap();
        let clock = ManualClock::new();
        let redis = store(&server).clock(clock.clone()).build().unwrap();
        for second in 0..2000 {
            clock.set(Timestamp::from_secs(1_700_000_000 + second));
            assert!(redis.decide(&Check::new().charge("k", &limits, 1)).await.unwrap().allowed());
        }
        server.command(&["CONFIG", "RESETSTAT"]);
        let refund = Check::of(Op::Refund).charge("k", &limits, 1990);
        let decision = redis.decide(&refund).await.unwrap();
        assert_eq!((decision.granted(), decision.remaining()), (1990, 2990));
        let stats = server.command(&["INFO", "commandstats"]).text().to_owned();
        let reads =
            stats.split("cmdstat_getrange:calls=").nth(1).and_then(|rest| rest.split(',').next());
        let reads: u32 = reads.expect("it reads ranges").parse().unwrap();
        assert!(reads < 100, "{reads} reads");
    });
}
