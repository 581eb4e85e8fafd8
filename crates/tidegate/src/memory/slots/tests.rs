use std::collections::BTreeMap;

use super::super::arena::length_of;
use tidegate_trace::Random;

use super::*;

/// The second of four tables, so that a write out of bounds shows in the others.
fn table() -> Slots {
    Slots::new(Arc::new(Arena::new(4, usize::MAX, Arc::default())), 1)
}

fn put(slots: &mut Slots, hash: Hash, low: u64) {
    match slots.find(hash) {
        Ok(index) => slots.set(index, low, 1),
        Err(_) => {
            if slots.is_nearly_full() {
                slots.rebuild(0, |_| false);
            }
            let Err(index) = slots.find(hash) else { panic!("it was not there") };
            slots.insert(index, SlotEntry { hash, low, high: 1 });
        }
    }
}

#[test]
fn every_slot_has_its_own_memory() {
    let (shards, slots) = (4, 1_000);
    let mut places: Vec<_> =
        (0..shards).flat_map(|shard| (0..slots).map(move |index| locate(shard, index))).collect();
    assert!(places.iter().all(|(chunk, position)| *position < shards * length_of(*chunk)));
    places.sort_unstable();
    places.dedup();
    assert_eq!(places.len(), shards * slots);
    for index in 0..slots {
        let (chunk, position) = locate(3, index);
        assert_eq!(position - 3 * length_of(chunk), index - end_before(chunk));
    }
}

#[test]
fn many_keys_with_the_last_home_are_found() {
    let mut slots = table();
    for step in 0..1_000 {
        put(&mut slots, Hash { order: u64::MAX - step * step % 977, other: step }, step);
    }
    assert_eq!(slots.len(), 1_000);
    for step in 0..1_000 {
        let index = slots.find(Hash { order: u64::MAX - step * step % 977, other: step }).unwrap();
        assert_eq!(slots.get(index).low, step);
        slots.remove(index);
    }
    assert_eq!(slots.len(), 0);
}

#[test]
fn an_insertion_replaces_the_next_idle_key() {
    let mut random = Random(77);
    let (mut slots, mut map) = (table(), BTreeMap::new());
    for step in 0..1_000u64 {
        let hash = Hash { order: random.next() & 0xff << 56, other: random.next() };
        put(&mut slots, hash, step);
        map.insert(hash, step);
    }
    let mut replaced = 0;
    for step in 1_000..3_000u64 {
        let hash = Hash { order: random.next() & 0xff << 56, other: random.next() };
        let Err(index) = slots.find(hash) else { panic!("it was not there") };
        let mut taken_out = None;
        let is_in = slots.replace(index, SlotEntry { hash, low: step, high: 1 }, |entry| {
            let idle = entry.low % 3 == 0;
            taken_out = idle.then_some(entry.hash);
            idle
        });
        assert_eq!(is_in, taken_out.is_some());
        if let Some(gone) = taken_out {
            assert!(gone > hash && map.remove(&gone).is_some_and(|low| low % 3 == 0));
            map.insert(hash, step);
            replaced += 1;
        }
        assert_eq!(slots.len(), map.len());
    }
    assert!(replaced > 300, "{replaced}");
    for (hash, low) in &map {
        assert_eq!(slots.find(*hash).map(|index| slots.get(index).low), Ok(*low));
    }
}

#[test]
fn the_table_agrees_with_an_ordered_map() {
    for spread in [u64::MAX, 1 << 40, 255] {
        let mut random = Random(0x1234_5678 ^ spread);
        let (mut slots, mut map) = (table(), BTreeMap::new());
        for step in 0..20_000u64 {
            // Few distinct hashes, some of them with equal order: long runs.
            let hash = Hash { order: random.next() & spread, other: random.next() & 3 };
            if random.next().is_multiple_of(3) {
                if let Ok(index) = slots.find(hash) {
                    slots.remove(index);
                }
                map.remove(&hash);
            } else {
                put(&mut slots, hash, step);
                map.insert(hash, step);
            }
            assert_eq!(slots.len(), map.len());
            if step % 997 == 0 {
                for (hash, low) in &map {
                    assert_eq!(slots.find(*hash).map(|index| slots.get(index).low), Ok(*low));
                }
            }
        }
        let odd = |entry: &SlotEntry| entry.low % 2 == 1;
        slots.sweep(0, usize::MAX, odd);
        map.retain(|_, low| *low % 2 == 0);
        assert_eq!(slots.len(), map.len());
        slots.rebuild(0, |slot| slot.low % 4 == 2);
        map.retain(|_, low| *low % 4 == 0);
        assert_eq!(slots.len(), map.len());
        assert!(map.keys().all(|hash| slots.find(*hash).is_ok()));
    }
}
