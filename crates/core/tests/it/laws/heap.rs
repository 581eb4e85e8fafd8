//! What a record takes on the heap, as it says itself: a store counts this against its `max_bytes`.

use tidegate_core::{Charge, Id, Limit, Op, Record, decide};

use super::{check, ts};

const NOW: u64 = 1_700_000_000_000_000;

fn lease(op: Op, limit: &Limit, record: &mut Record, id: u64) {
    let _ =
        decide(op, &mut [Charge { id: Some(Id(id)), ..Charge::new(limit, record, 1) }], ts(NOW));
}

/// A lease takes four words in a list, and a block has one word of its own and an even number of
/// words. A tree holds at least five leases in each node of eleven places, and its inner nodes
/// twelve words more.
#[cfg(target_pointer_width = "64")]
#[test]
fn few_leases_take_a_list_and_many_take_two_trees() {
    let limit: Limit = "1000 concurrent ttl 1m".parse().unwrap();
    let mut record = Record::default();
    let mut id = 0;
    for (leases, bytes) in [
        (0, 0),
        (1, 48),
        (2, 80),
        (3, 144),
        (4, 144),
        (5, 272),
        (8, 272),
        (16, 528),
        (32, 1_040),
        // The pair of trees, 7 nodes each, of 464 and 288 bytes, and 2 inner nodes each, of 112
        // bytes.
        (33, 64 + (7 * 464 + 2 * 112) + (7 * 288 + 2 * 112)),
        (100, 64 + (20 * 464 + 4 * 112) + (20 * 288 + 4 * 112)),
    ] {
        while id < leases {
            id += 1;
            lease(Op::Check, &limit, &mut record, id);
        }
        assert_eq!(record.heap_bytes(), bytes, "{leases} leases");
    }
    // It does not change from one to the other at each lease around an edge.
    for left in (0..100).rev() {
        lease(Op::Release, &limit, &mut record, id - left);
        let is_list = record.heap_bytes() <= 1_040;
        assert_eq!(is_list, left <= 8, "{left} leases: {} bytes", record.heap_bytes());
    }
}

/// Leases without an id cannot be found by one, and are in one tree only.
#[cfg(target_pointer_width = "64")]
#[test]
fn leases_without_an_id_take_one_tree() {
    let limit: Limit = "1000 concurrent ttl 1m".parse().unwrap();
    let mut record = Record::default();
    for _ in 0..33 {
        assert!(check(&limit, &mut record, NOW, 1).allowed);
    }
    assert_eq!(record.heap_bytes(), 64 + (7 * 464 + 2 * 112));
}

/// The other lists double when they are full.
#[test]
fn entries_and_steps_take_what_they_hold_and_no_more_than_twice_that() {
    for text in ["1000/min log", "1000/min sliding step 100ms"] {
        let limit: Limit = text.parse().unwrap();
        let mut record = Record::default();
        assert_eq!(record.heap_bytes(), 0, "{text}");
        for held in 1..=500 {
            assert!(check(&limit, &mut record, NOW + held * 100_000, 1).allowed, "{text}");
            let (least, bytes) = (held as usize * 16, record.heap_bytes());
            assert!(
                bytes > least && bytes < 2 * least + 80,
                "{text}: {bytes} bytes for {held} of 16"
            );
        }
    }
    let limit: Limit = "1000/min".parse().unwrap();
    let mut record = Record::default();
    assert!(check(&limit, &mut record, NOW, 1).allowed);
    assert_eq!(record.heap_bytes(), 0, "a bucket has nothing on the heap");
    lease(Op::Check, &limit, &mut record, 1);
    assert!(record.heap_bytes() > 0, "a receipt has");
}

/// In a list and in trees: leases that differ make records that differ.
#[test]
fn records_are_equal_if_their_leases_are() {
    let limit: Limit = "1000 concurrent ttl 1m".parse().unwrap();
    for count in [1, 40] {
        let (mut one, mut same, mut other) =
            (Record::default(), Record::default(), Record::default());
        for id in 1..=count {
            lease(Op::Check, &limit, &mut one, id);
            lease(Op::Check, &limit, &mut same, id);
            lease(Op::Check, &limit, &mut other, if id == 1 { 99 } else { id });
        }
        assert_eq!(one, same, "{count}");
        assert_ne!(one, other, "{count}");
    }
}
