//! A store in a file: whole, damaged, cut off, from elsewhere.

use std::io::{self, Read, Write};
use std::sync::Mutex;

use tidegate::memory::{LoadError, Loaded};
use tidegate::store::Deciding;
use tidegate::{Check, Limit, ManualClock, Memory, Store, Timestamp};

use crate::conformance::{StepsBack, Trial};

/// A store that is written, forgotten and read again before every decision.
struct Reborn {
    clock: ManualClock,
    memory: Mutex<Memory>,
}

impl Store for Reborn {
    fn decide<'a>(&'a self, check: &'a Check<'a>) -> Deciding<'a> {
        let mut memory = self.memory.lock().unwrap();
        let mut file = Vec::new();
        let saved = memory.save(&mut file).unwrap();
        assert_eq!((saved.keys, saved.bytes), (memory.len() as u64, file.len() as u64));
        let (again, loaded) = load(&self.clock, &file).unwrap();
        assert!(loaded.is_complete(), "{loaded:?}");
        assert_eq!(loaded.keys + loaded.idle, saved.keys);
        *memory = again;
        let decision = Memory::decide(&memory, check);
        Box::pin(async move { Ok(decision?) })
    }
}

fn load(clock: &ManualClock, file: &[u8]) -> Result<(Memory, Loaded), LoadError> {
    Memory::builder().clock(clock.clone()).max_keys(4096).load(&mut &*file)
}

#[tokio::test]
async fn a_store_that_is_read_again_before_every_decision_conforms() {
    for seed in 0..6 {
        let clock = ManualClock::new();
        let memory = Memory::builder().clock(clock.clone()).max_keys(1024).build();
        let reborn = Reborn { clock: clock.clone(), memory: Mutex::new(memory) };
        let stores: &[(&str, &dyn Store)] = &[("reborn", &reborn)];
        let trial = Trial {
            stores,
            clock: &clock,
            forget: None,
            steps_back: StepsBack::Never,
            steady: false,
            model: false,
            seed,
        };
        trial.run(3_000).await;
    }
}

fn today() -> ManualClock {
    let clock = ManualClock::new();
    clock.set(Timestamp::from_secs(1_700_000_000));
    clock
}

/// A few keys of every kind, and what is left of each.
fn small() -> (ManualClock, Vec<u8>, Vec<(String, Limit, u64)>) {
    let clock = today();
    let memory = Memory::builder().clock(clock.clone()).max_keys(4096).build();
    let limits = [
        "100/h",
        "90/h window",
        "80/h sliding",
        "70/h estimate",
        "60/h log",
        "50 concurrent ttl 1h",
    ];
    let mut keys = Vec::new();
    for (number, text) in limits.iter().cycle().take(18).enumerate() {
        let (key, limit): (String, Limit) = (format!("key:{number}"), text.parse().unwrap());
        let remaining = memory.check(&key, &limit, 1 + number as u64).remaining;
        keys.push((key, limit, remaining));
    }
    let mut file = Vec::new();
    memory.save(&mut file).unwrap();
    (clock, file, keys)
}

/// Every key is as it was, or as if never seen; says how many are as they were.
fn kept(memory: &Memory, keys: &[(String, Limit, u64)]) -> usize {
    let left = |(key, limit, was): &(String, Limit, u64)| {
        let remaining = memory.check(key, limit, 0).remaining;
        assert!(
            remaining == *was || remaining == limit.capacity(),
            "{key}, {limit}: {remaining}, was {was}"
        );
        remaining == *was
    };
    keys.iter().filter(|key| left(key)).count()
}

#[test]
fn every_flipped_bit_is_noticed_and_costs_no_more_than_its_block() {
    let (clock, file, keys) = small();
    let (memory, loaded) = load(&clock, &file).unwrap();
    assert!(loaded.is_complete() && loaded.keys == 18, "{loaded:?}");
    assert_eq!(kept(&memory, &keys), 18);
    let mut partly = 0;
    for place in 0..file.len() {
        for bit in 0..8 {
            let mut file = file.clone();
            file[place] ^= 1 << bit;
            if let Ok((memory, loaded)) = load(&clock, &file) {
                assert!(!loaded.is_complete(), "byte {place}, bit {bit}: {loaded:?}");
                let kept = kept(&memory, &keys);
                assert_eq!(kept as u64, loaded.keys, "byte {place}, bit {bit}: {loaded:?}");
                partly += usize::from((1..18).contains(&kept));
            }
        }
    }
    assert!(partly > 1_000, "{partly} times some were there and some not");
}

#[test]
fn a_truncated_snapshot_is_read_to_its_end() {
    let (clock, file, keys) = small();
    let mut last = 0;
    for length in 0..file.len() {
        match load(&clock, &file[..length]) {
            Ok((memory, loaded)) => {
                assert!(loaded.truncated && !loaded.is_complete(), "{length} bytes: {loaded:?}");
                let kept = kept(&memory, &keys);
                assert!(kept >= last, "{length} bytes: {kept} keys, with less it was {last}");
                last = kept;
            }
            Err(LoadError::NotASnapshot | LoadError::Damaged) => {
                assert_eq!(last, 0, "{length} bytes")
            }
            Err(error) => panic!("{length} bytes: {error}"),
        }
    }
    assert_eq!(last, 18, "all but the end is enough for all keys");
}

#[test]
fn other_files_are_refused_with_a_reason() {
    let (clock, file, _) = small();
    let mut later = file.clone();
    later[8] = 3;
    let mut other = file.clone();
    other[0] = b'T';
    for (file, expected) in [
        (&b""[..], "is not a snapshot: expected `tidegate` at its beginning"),
        (&b"tide"[..], "is not a snapshot: expected `tidegate` at its beginning"),
        (&other[..], "is not a snapshot: expected `tidegate` at its beginning"),
        (&later[..], "has version 3 of the format: expected 2"),
        (&file[..20], "is damaged at its beginning: nothing of it can be read"),
    ] {
        assert_eq!(load(&clock, file).unwrap_err().to_string(), expected);
    }
}

/// A clock that is behind the one of then: usage is kept, and drains from now on.
#[test]
fn usage_from_the_future_counts_from_now_on() {
    let (clock, file, keys) = small();
    for back in [1, 2, 61, 86_400] {
        clock.set(Timestamp::from_secs(1_700_000_000 - back));
        let (memory, loaded) = load(&clock, &file).unwrap();
        assert!(loaded.is_complete(), "{back} s back: {loaded:?}");
        assert_eq!(kept(&memory, &keys), 18, "{back} s back");
        assert_eq!(loaded.rebased > 0, back > 1, "{back} s back: {loaded:?}");
    }
    // A bucket that was full in an hour is as full now, and drains from now on.
    let limit: Limit = "2/min".parse().unwrap();
    clock.set(Timestamp::from_secs(1_700_003_600));
    let memory = Memory::builder().clock(clock.clone()).build();
    assert!(memory.check("k", &limit, 2).allowed);
    let mut file = Vec::new();
    memory.save(&mut file).unwrap();
    clock.set(Timestamp::from_secs(1_700_000_000));
    let (memory, loaded) = load(&clock, &file).unwrap();
    assert_eq!((loaded.keys, loaded.rebased), (1, 1));
    assert_eq!(memory.check("k", &limit, 1).retry.micros(), Some(30_000_000));
    clock.advance(std::time::Duration::from_secs(30));
    assert!(memory.check("k", &limit, 1).allowed);
}

/// Whatever its headers say: sixteen bytes each that claim to be limits, and have the wrong
/// checksum.
#[test]
fn damaged_limits_take_no_memory() {
    let (clock, file, _) = small();
    let mut damaged = file[..16 + 16 + 24].to_vec();
    for _ in 0..1_000 {
        let mut header: Vec<u8> =
            [2_u32, 0, 1].iter().flat_map(|number| number.to_le_bytes()).collect();
        header.extend(crc32fast::hash(&header).to_le_bytes());
        damaged.extend(header);
    }
    damaged.extend(&file[16 + 16 + 24..]);
    let (memory, loaded) = load(&clock, &damaged).unwrap();
    assert_eq!(loaded.damaged_blocks, 1_000);
    // Those that are kept whole need no limit.
    assert_eq!((memory.len() as u64, loaded.lost), (loaded.keys, 18 - loaded.keys), "{loaded:?}");
    assert_eq!(loaded.keys, 12);
}

/// A disk that cannot be read from somewhere on.
struct Broken<'a>(&'a [u8]);

impl Read for Broken<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        if self.0.is_empty() { Err(io::Error::other("broken")) } else { self.0.read(buffer) }
    }
}

#[test]
fn a_read_error_keeps_the_blocks_before_it() {
    let (clock, file, keys) = small();
    let mut broken = Broken(&file[..file.len() - 4]);
    let (memory, loaded) = Memory::builder().clock(clock).load(&mut broken).unwrap();
    assert!(loaded.truncated && loaded.keys == 18, "{loaded:?}");
    assert_eq!(kept(&memory, &keys), 18);
}

/// A reader that counts the requested bytes, and ends immediately.
struct Counting<'a>(&'a [u8], usize);

impl Read for Counting<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        self.1 = self.1.max(buffer.len());
        self.0.read(buffer)
    }
}

#[test]
fn nothing_is_allocated_because_a_header_claims_it() {
    let (clock, file, _) = small();
    // Magic, version, the first block; then a header of keys that claims 64 MiB and has the right
    // checksum.
    let mut claims = file[..16 + 16 + 24].to_vec();
    let mut header: Vec<u8> =
        [3_u32, 64 << 20, 0].iter().flat_map(|number| number.to_le_bytes()).collect();
    header.extend(crc32fast::hash(&header).to_le_bytes());
    claims.extend(header);
    let mut reader = Counting(&claims, 0);
    let (memory, loaded) = Memory::builder().clock(clock).load(&mut reader).unwrap();
    assert!(loaded.truncated && memory.is_empty());
    assert!(reader.1 < 1 << 20, "{} bytes in one call", reader.1);
}

#[test]
fn lost_keys_are_counted_and_idle_ones_not_restored() {
    let clock = today();
    let memory = Memory::builder().clock(clock.clone()).build();
    let (hour, second): (Limit, Limit) = ("1/h".parse().unwrap(), "1/s".parse().unwrap());
    for number in 0..1_000 {
        assert!(memory.allows(&format!("hour:{number}"), &hour, 1));
        assert!(memory.allows(&format!("second:{number}"), &second, 1));
    }
    let mut file = Vec::new();
    memory.save(&mut file).unwrap();
    clock.advance(std::time::Duration::from_secs(2));
    let (_, loaded) = Memory::builder().clock(clock.clone()).load(&mut &file[..]).unwrap();
    assert_eq!((loaded.keys, loaded.idle, loaded.lost), (1_000, 1_000, 0));
    let (few, loaded) =
        Memory::builder().clock(clock.clone()).max_keys(100).load(&mut &file[..]).unwrap();
    assert_eq!((few.len() as u64, loaded.keys + loaded.lost), (loaded.keys, 1_000));
    assert!(loaded.keys <= 100 && loaded.keys > 80, "{loaded:?}");
    let (small, loaded) =
        Memory::builder().clock(clock).max_bytes(16 << 10).load(&mut &file[..]).unwrap();
    assert!(
        loaded.lost > 0 && small.allocated_bytes() < 1 << 20,
        "{loaded:?}, {} bytes",
        small.allocated_bytes()
    );
}

#[test]
fn many_keys_and_large_ones_come_in_several_blocks() {
    let clock = today();
    let memory = Memory::builder().clock(clock.clone()).max_keys(1).build();
    let limit: Limit = "100000/d log".parse().unwrap();
    for _ in 0..100_000 {
        assert!(memory.allows("one", &limit, 1));
        clock.advance(std::time::Duration::from_micros(1));
    }
    let mut file = Vec::new();
    let saved = memory.save(&mut file).unwrap();
    assert!(saved.bytes > 100_000 * 16, "{saved:?}");
    let (again, loaded) = Memory::builder().clock(clock.clone()).load(&mut &file[..]).unwrap();
    assert!(loaded.is_complete() && !again.allows("one", &limit, 1));

    let memory = Memory::builder().clock(clock.clone()).build();
    let limit: Limit = "1/d".parse().unwrap();
    let keys: Vec<(String, u64)> =
        (0..200_000).map(|number| (format!("user:{number}"), 1)).collect();
    assert!(keys.iter().all(|(key, cost)| memory.allows(key, &limit, *cost)));
    let mut file = Vec::new();
    memory.save(&mut file).unwrap();
    let (again, loaded) = Memory::builder().clock(clock).load(&mut &file[..]).unwrap();
    assert!(loaded.is_complete() && loaded.keys == 200_000, "{loaded:?}");
    assert!(keys.iter().all(|(key, cost)| !again.allows(key, &limit, *cost)));
}

/// A disk that is full after so many bytes.
struct Full(usize);

impl Write for Full {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let written = bytes.len().min(self.0);
        self.0 -= written;
        if written == 0 { Err(io::ErrorKind::StorageFull.into()) } else { Ok(written) }
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[test]
fn a_full_disk_is_an_error_and_nothing_else() {
    let (clock, file, keys) = small();
    let (memory, _) = load(&clock, &file).unwrap();
    for room in 0..file.len() {
        assert_eq!(memory.save(&mut Full(room)).unwrap_err().kind(), io::ErrorKind::StorageFull);
    }
    assert_eq!(kept(&memory, &keys), 18);
}
