//! The laws: what holds for every limit of every algorithm, whatever happens.

mod answers;
mod bounds;
mod change;
mod clock;
mod heap;
mod kernels;
mod quiet;
mod refunds;
mod rules;
mod store_clock;
mod together;
mod words;

use tidegate_core::{Charge, Limit, Op, Record, Timestamp, Verdict, decide};

fn ts(micros: u64) -> Timestamp {
    Timestamp::from_micros(micros)
}

fn ask(op: Op, limit: &Limit, record: &mut Record, at: u64, cost: u64) -> Verdict {
    *decide(op, &mut [Charge::new(limit, record, cost)], ts(at)).binding()
}

fn check(limit: &Limit, record: &mut Record, at: u64, cost: u64) -> Verdict {
    ask(Op::Check, limit, record, at, cost)
}

/// What a check would say, from a copy.
fn peek(limit: &Limit, record: &Record, at: u64, cost: u64) -> Verdict {
    ask(Op::Peek, limit, &mut record.clone(), at, cost)
}
