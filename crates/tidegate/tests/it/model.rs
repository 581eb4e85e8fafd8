//! The naive model of the core's own tests as a store: keys that keep their whole history, and the
//! definitions over it.

use std::collections::HashMap;

use tidegate::{Check, Decision, Limits, Timestamp};

#[path = "../../../core/tests/it/naive/mod.rs"]
#[allow(clippy::cast_possible_truncation, reason = "it says itself why it may")]
mod naive;

#[path = "../../../core/tests/it/draw.rs"]
#[allow(dead_code, clippy::cast_possible_truncation, reason = "only limits are drawn here")]
mod draw;

use self::naive::{Asked, Naive};
use crate::conformance::{Identity, Random};

/// One to three limits of any kind, as the tests of the core draw them.
pub(crate) fn any_limits(random: &mut Random) -> Limits {
    let source = &mut draw::Seeded::new(random.next());
    let count = if random.below(2) == 0 { 1 } else { 1 + random.below(3) };
    Limits::new((0..count).map(|_| draw::limit(source))).unwrap()
}

/// One history per state. It knows everything but what becomes of a state whose limit has changed:
/// ask it only about keys that keep their limits.
#[derive(Default)]
pub(crate) struct Model {
    keys: HashMap<Identity, Naive>,
}

impl Model {
    pub(crate) fn decide(&mut self, check: &Check<'_>, now: Timestamp) -> Decision {
        let charges = check.charges().iter().map(|charge| (Identity::of(charge), charge));
        let mut keys: Vec<(Identity, Naive)> = charges
            .map(|(identity, charge)| {
                let key = self.keys.remove(&identity).unwrap_or_else(|| Naive::new(&charge.limit));
                assert_eq!(key.limit(), &charge.limit, "a key keeps its limit: {identity:?}");
                (identity, key)
            })
            .collect();
        let asked = keys.iter_mut().zip(check.charges());
        let asked = asked.map(|((_, key), charge)| Asked {
            key,
            cost: charge.cost,
            reserved: charge.reserved,
        });
        let (mut verdicts, allowed) =
            naive::decide(check.op(), check.id(), now.as_micros(), asked.collect());
        self.keys.extend(keys);
        let decision = match verdicts.len() {
            1 => Decision::of_one(verdicts.remove(0), allowed, now),
            _ => Decision::of_many(verdicts, allowed, now),
        };
        decision.with_id(check.id())
    }
}
