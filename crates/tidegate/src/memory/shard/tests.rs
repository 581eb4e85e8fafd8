use super::*;

#[test]
fn a_key_added_behind_the_search_is_found_when_idle() {
    const MOST: usize = 2 * SEARCH;
    // Among the last that the first piece of a search looks at.
    const PASSED: u64 = SEARCH as u64 - 8;
    let limits = Interned::new(usize::MAX, Arc::default());
    let (day, second): (Limit, Limit) = ("1/d".parse().unwrap(), "1/s".parse().unwrap());
    let mut shard = Shard::new(Arc::new(Arena::new(1, usize::MAX, Arc::default())), 0);
    let add = |shard: &mut Shard, place: u64, limit: &Limit, now: Timestamp| {
        let hash = Hash { order: place << 50, other: place };
        let mut record = Record::default();
        let charge = tidegate_core::Charge::new(limit, &mut record, 1);
        assert!(tidegate_core::decide(tidegate_core::Op::Check, &mut [charge], now).allowed());
        let Err(index) = shard.find(hash) else { panic!("it was not there") };
        shard.add(hash, index, record, limit, &limits, now);
    };
    let has_room = |shard: &mut Shard, now: Timestamp| {
        if shard.len() >= MOST {
            shard.look_for_idle(&limits, now);
        }
        shard.len() < MOST
    };
    for place in 1..=MOST as u64 {
        add(&mut shard, place, &day, Timestamp::EPOCH);
    }
    // After the first step of a search, a key that it has passed is replaced by another one
    // that is soon idle.
    assert!(!has_room(&mut shard, Timestamp::EPOCH));
    let index = shard.find(Hash { order: PASSED << 50, other: PASSED }).unwrap();
    let _ = shard.take(index, &limits);
    shard.put(index, Record::default(), &day, &limits, Timestamp::EPOCH);
    assert!(has_room(&mut shard, Timestamp::EPOCH));
    add(&mut shard, PASSED, &second, Timestamp::EPOCH);
    for _ in 0..10 {
        assert!(!has_room(&mut shard, Timestamp::EPOCH));
    }
    let later = Timestamp::from_secs(2);
    assert!((0..10).any(|_| has_room(&mut shard, later)));
}
