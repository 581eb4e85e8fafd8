//! A flood of keys, under every algorithm, takes no more memory than `max_bytes` and a constant: by
//! the numbers of the allocator and of the kernel.
//!
//! Each flood is a process of its own: what a process has freed does not always go back to the
//! system.
//!
//! ```sh
//! cargo test -p tidegate --test allocated
//! ```

#![allow(clippy::print_stdout, reason = "the figures are its output")]
#![allow(clippy::unwrap_used, reason = "a test may panic")]
#![allow(
    unsafe_code,
    reason = "there is no other way to ask the allocator; it takes nothing and returns ten numbers"
)]

/// What a store may take beside `max_bytes`; `docs/operations.md` says it.
#[cfg(all(target_os = "linux", target_env = "gnu"))]
const CONSTANT: usize = 4 << 20;

#[cfg(all(target_os = "linux", target_env = "gnu"))]
fn main() {
    // A flood: which one, and within how many bytes.
    let words: Vec<String> = std::env::args().skip(1).collect();
    if let [word, number, max_bytes] = &words[..]
        && word == "flood"
    {
        return flood::run(number.parse().unwrap(), max_bytes.parse().unwrap());
    }
    println!(
        "{:>36} {:>10} {:>9} {:>9} {:>9} {:>9}",
        "MiB of", "max_bytes", "counted", "malloc", "resident", "keys"
    );
    for max_bytes in [4 << 20, 64 << 20] {
        for number in 0..flood::FLOODS.len() {
            let own = std::env::current_exe().unwrap();
            let mut child = std::process::Command::new(own);
            let output = child
                .args(["flood", &number.to_string(), &max_bytes.to_string()])
                .output()
                .unwrap();
            let text = String::from_utf8(output.stdout).unwrap();
            assert!(output.status.success(), "{text}{}", String::from_utf8_lossy(&output.stderr));
            print!("{text}");
        }
    }
}

/// Other systems have other allocators, without these numbers.
#[cfg(not(all(target_os = "linux", target_env = "gnu")))]
fn main() {}

#[cfg(all(target_os = "linux", target_env = "gnu"))]
mod flood {
    use std::sync::atomic::{AtomicU64, Ordering};

    use tidegate::{Check, Id, Limits, ManualClock, Memory, Timestamp};

    use super::CONSTANT;

    /// How many charges find no room before a flood is over.
    const BEYOND: u64 = 50_000;
    const THREADS: u64 = 4;

    /// Limits, and whether each call has an id or a limit of its own.
    pub(crate) const FLOODS: [(&str, Kind); 13] = [
        ("10/d", Kind::Plain),
        ("10/d", Kind::WithId),
        ("10/d", Kind::OwnLimit),
        ("10/d window", Kind::Plain),
        ("10/d window", Kind::OwnLimit),
        ("10/d window from first hit", Kind::Plain),
        ("10/d estimate", Kind::Plain),
        ("10/d sliding", Kind::Plain),
        ("10/d log", Kind::Plain),
        ("10/d log", Kind::ManyHits),
        ("5 concurrent ttl 1d", Kind::Plain),
        ("5 concurrent ttl 1d", Kind::WithId),
        ("1000 concurrent ttl 1d", Kind::ManyHits),
    ];

    #[derive(Clone, Copy, PartialEq, Eq, Debug)]
    pub(crate) enum Kind {
        Plain,
        WithId,
        OwnLimit,
        /// Two hundred hits with ids on each key.
        ManyHits,
    }

    pub(crate) fn run(number: usize, max_bytes: usize) {
        let (text, kind) = FLOODS[number];
        let clock = ManualClock::new();
        clock.set(Timestamp::from_secs(1_700_000_000));
        let memory = Memory::builder().clock(clock).max_bytes(max_bytes).build();
        let limits: Limits = text.parse().unwrap();
        let (malloc, resident) = (in_use(), resident_bytes());
        let next = AtomicU64::new(0);
        std::thread::scope(|scope| {
            for _ in 0..THREADS {
                scope.spawn(|| {
                    while memory.without_room() < BEYOND {
                        let number = next.fetch_add(1, Ordering::Relaxed);
                        hit(&memory, &limits, kind, number);
                    }
                });
            }
        });
        let malloc = in_use().saturating_sub(malloc);
        let resident = resident_bytes().saturating_sub(resident);
        let (counted, keys) = (memory.allocated_bytes(), memory.len());
        let mib = |bytes: usize| bytes as f64 / f64::from(1 << 20);
        println!(
            "{text:>25} {:>10} {:>10} {:>9.2} {:>9.2} {:>9.2} {keys:>9}",
            format!("{kind:?}"),
            max_bytes >> 20,
            mib(counted),
            mib(malloc),
            mib(resident)
        );
        assert!(
            counted <= max_bytes + CONSTANT / 4,
            "{text} {kind:?}: more is counted than may be"
        );
        assert!(
            malloc <= counted + CONSTANT / 4,
            "{text} {kind:?}: more is allocated than is counted"
        );
        assert!(resident <= max_bytes + CONSTANT, "{text} {kind:?}: more is resident than may be");
        assert!(counted >= max_bytes / 2, "{text} {kind:?}: much of it cannot be used");
    }

    fn hit(memory: &Memory, limits: &Limits, kind: Kind, number: u64) {
        let (key, own);
        let (limits, key) = match kind {
            Kind::OwnLimit => {
                let window = limits.to_string().contains("window");
                let text = format!("{}/d{}", 10 + number, if window { " window" } else { "" });
                own = text.parse::<Limits>().unwrap();
                key = format!("key:{number}");
                (&own, &key)
            }
            Kind::ManyHits => {
                key = format!("key:{}", number / 200);
                (limits, &key)
            }
            Kind::Plain | Kind::WithId => {
                key = format!("key:{number}");
                (limits, &key)
            }
        };
        let check = Check::new().charge(key, limits, 1);
        let has_id = matches!(kind, Kind::WithId | Kind::ManyHits);
        let check = if has_id { check.with_id(Id(number + 1)) } else { check };
        let _ = memory.decide(&check).unwrap();
    }

    /// What the allocator has given to this process and not had back, with what it needs itself.
    fn in_use() -> usize {
        /// `struct mallinfo2` of `malloc.h`.
        #[repr(C)]
        struct Info {
            before: [usize; 4],
            mapped: usize,
            between: [usize; 2],
            in_use: usize,
            behind: [usize; 2],
        }
        unsafe extern "C" {
            safe fn mallinfo2() -> Info;
        }
        let Info { mapped, in_use, .. } = mallinfo2();
        mapped + in_use
    }

    fn resident_bytes() -> usize {
        let status = std::fs::read_to_string("/proc/self/status").unwrap();
        let line = status.lines().find_map(|line| line.strip_prefix("RssAnon:")).unwrap();
        line.trim().trim_end_matches(" kB").parse::<usize>().unwrap() << 10
    }
}
