//! A record that was kept as words is the same record; and whatever words are read, nothing panics.

use tidegate_core::{Charge, Id, Limit, Op, Record, Verdict, decide};

use super::{ask, ts};
use crate::draw::{self, KINDS, Seeded, Source};

/// Some time in the life of a key, with and without ids.
fn history(source: &mut Seeded, limit: &Limit, steps: u64, mut seen: impl FnMut(&Record, u64)) {
    let mut record = Record::default();
    let mut now = draw::dawn(source);
    let mut last: Verdict = ask(Op::Peek, limit, &mut record, now, 1);
    for _ in 0..steps {
        now = draw::any_time(source, limit, &last, now);
        let (op, cost) = (draw::op(source), draw::cost(source, limit, &last));
        let mut charge = Charge::new(limit, &mut record, cost);
        if source.once_in(2) {
            charge.id = Some(Id(1 + source.below(5)));
        }
        last = *decide(op, &mut [charge], ts(now)).binding();
        seen(&record, now);
    }
}

#[test]
fn a_record_is_read_as_it_was_written() {
    let mut source = Seeded::new(7);
    for round in 0..3_000 {
        let limit = draw::limit_of(&mut source, KINDS[round % KINDS.len()]);
        history(&mut source, &limit, 20, |record, _| {
            let mut words = vec![99];
            record.write(&mut words);
            words.push(77);
            let mut rest = &words[1..];
            assert_eq!(Record::read(&mut rest).as_ref(), Some(record), "{limit}: {words:?}");
            assert_eq!(rest, [77]);
            for end in 1..words.len() - 1 {
                assert_eq!(
                    Record::read(&mut &words[1..end]),
                    None,
                    "{limit}: {words:?} up to {end}"
                );
            }
        });
    }
}

#[test]
fn whatever_is_read_can_be_decided_with() {
    let mut source = Seeded::new(11);
    let (mut read, mut refused) = (0, 0);
    for round in 0..50_000 {
        let limit = draw::limit_of(&mut source, KINDS[round % KINDS.len()]);
        let mut kept = (Vec::new(), 0);
        history(&mut source, &limit, 6, |record, now| {
            kept = (Vec::new(), now);
            record.write(&mut kept.0);
        });
        let (mut words, now) = kept;
        for _ in 0..=source.below(3) {
            let place = source.below(words.len() as u64) as usize;
            let other = source.word();
            words[place] = match source.below(5) {
                0 => other,
                1 => words[place] ^ 1 << source.below(64),
                2 => source.pick(&[0, 1, (1 << 52) - 1, 1 << 52, (1 << 53) - 1, 1 << 53, u64::MAX]),
                3 => words[place].wrapping_add(1),
                _ => other >> source.below(64),
            };
        }
        let Some(mut record) = Record::read(&mut &words[..]) else {
            refused += 1;
            continue;
        };
        read += 1;
        let _ = record.idle_at();
        let other = draw::limit(&mut source);
        for limit in [&limit, &other, &limit] {
            for _ in 0..3 {
                let now = (now + source.below(1 << 40)).min((1 << 52) - 1);
                let _ = ask(draw::op(&mut source), limit, &mut record, now, 1 + source.below(4));
            }
        }
        let mut again = Vec::new();
        record.write(&mut again);
        // Not everything that comes of moments at the end of time can be read again.
        if let Some(same) = Record::read(&mut &again[..]) {
            assert_eq!(same, record, "{limit}: from {words:?}");
        }
    }
    assert!(read > 1_000 && refused > 1_000, "{read} read, {refused} refused");
}

/// Where each lease is one id's: a record with two of one id is not read.
#[test]
fn no_two_leases_that_are_read_have_one_id() {
    let limit: Limit = "9 concurrent ttl 1m".parse().unwrap();
    let written = |ids: [Option<Id>; 2]| {
        let mut record = Record::default();
        for id in ids {
            assert!(
                decide(
                    Op::Check,
                    &mut [Charge { id, ..Charge::new(&limit, &mut record, 1) }],
                    ts(7)
                )
                .allowed()
            );
        }
        let mut words = Vec::new();
        record.write(&mut words);
        words
    };
    let mut words = written([Some(Id(1_001)), Some(Id(1_002))]);
    assert!(Record::read(&mut &words[..]).is_some());
    *words.iter_mut().find(|word| **word == 1_002).unwrap() = 1_001;
    assert_eq!(Record::read(&mut &words[..]), None);
    assert!(
        Record::read(&mut &written([None, None])[..]).is_some(),
        "without an id there may be many"
    );
}
