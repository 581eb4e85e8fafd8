//! A server that loses what it knew: how much is admitted twice, with a witness and without. (`witness.rs` has the stale
//! replica; the failovers of clusters and sentinels are beside.)

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use tidegate::{Limits, Redis};
use tidegate_testkit::{Flavor, Server, wait_until};
use tokio::runtime::Runtime;

use super::{ask, assert_all_expire, limits, runtime, store};

const PATIENCE: Duration = Duration::from_secs(60);
/// What every limit here allows, and how much of it is used before the loss.
const AMOUNT: u64 = 100;
const BEFORE: u64 = 70;
const LIMITS: [&str; 4] =
    ["1/h burst 100", "100/1000d window", "100/1000d window from first hit", "100/1000d estimate"];

/// How many of `tries` calls are admitted. Whoever has no answer, because the connection is being made again, asks again.
async fn admitted(redis: &Redis, limits: &Limits, tries: u64) -> u64 {
    let (mut admitted, mut asked) = (0, 0);
    let end = tokio::time::Instant::now() + PATIENCE;
    while asked < tries {
        match ask(redis, "k", limits).await {
            Ok(decision) => {
                admitted += u64::from(decision.allowed());
                asked += 1;
            }
            Err(error) => assert!(tokio::time::Instant::now() < end, "{error}"),
        }
    }
    admitted
}

/// Uses some, loses everything, and asks again: with a witness, and without.
#[allow(clippy::print_stdout, reason = "what was measured, for whoever runs it with --nocapture")]
fn lose(server: &Server, name: &str, text: &str, lose: impl Fn(&Runtime)) {
    let runtime = runtime();
    let limits = limits(text);
    for witness in [1000, 0] {
        let redis = store(server).namespace(format!("w{witness}")).witness_keys(witness);
        let redis = runtime.block_on(async { redis.build() }).unwrap();
        assert_eq!(runtime.block_on(admitted(&redis, &limits, BEFORE)), BEFORE);
        lose(&runtime);
        let after = runtime.block_on(admitted(&redis, &limits, 2 * AMOUNT));
        let over = (BEFORE + after).saturating_sub(AMOUNT);
        let regressions = redis.stats().regressions;
        println!("{name}, {text}, witness of {witness} keys: {over} too many, {regressions} regressions");
        let expected = if witness > 0 { (0, 1) } else { (BEFORE, 0) };
        assert_eq!((over, regressions), expected, "{name}, {text}, witness of {witness} keys");
        assert_all_expire(server);
    }
}

#[test]
fn a_flush_is_noticed_and_made_good() {
    let server = Server::start(Flavor::Redis8);
    for limit in LIMITS {
        lose(&server, "FLUSHALL", limit, |_| {
            server.command(&["FLUSHALL"]);
        });
        server.command(&["FLUSHALL"]);
    }
}

#[test]
fn a_restart_with_nothing_is_noticed_and_made_good() {
    let server = Server::start(Flavor::Redis62);
    for limit in LIMITS {
        lose(&server, "kill and restart", limit, |_| server.restart());
        server.command(&["FLUSHALL"]);
    }
}

#[test]
fn an_eviction_is_noticed_and_made_good() {
    let server = Server::builder(Flavor::Redis7).arg("--maxmemory-policy", "volatile-lru").start();
    for limit in LIMITS {
        lose(&server, "eviction", limit, |_| {
            server.command(&["CONFIG", "SET", "maxmemory", "6mb"]);
            let mut client = server.client().unwrap();
            let junk = "x".repeat(20_000);
            let mut n = 0;
            wait_until("our key is evicted", PATIENCE, || {
                for _ in 0..50 {
                    n += 1;
                    client.command(&["SET", &format!("junk:{n}"), &junk, "EX", "1000"]).unwrap();
                }
                server.command(&["KEYS", "tg1:*"]).array().is_empty()
            });
            // Once is enough: what is written from now on stays.
            server.command(&["CONFIG", "SET", "maxmemory", "0"]);
        });
        server.command(&["FLUSHALL"]);
    }
}

/// The clock of the server jumps a month ahead for a moment: whatever ended before that is thrown away, and when the
/// clock is right again it would have counted for long.
#[test]
fn a_clock_that_jumps_ahead_and_back_is_noticed_and_made_good() {
    let folder = tempfile_folder();
    let shim = Shim::build(&folder.0);
    let server = Server::builder(Flavor::Redis7).env("LD_PRELOAD", &shim.library).env("SHIM_FILE", &shim.file).start();
    for limit in ["100/day window from first hit", "1/h burst 100"] {
        lose(&server, "clock ahead and back", limit, |_| {
            shim.set(Duration::from_secs(30 * 86_400));
            wait_until("everything has expired", PATIENCE, || server.command(&["DBSIZE"]).int() == 0);
            shim.set(Duration::ZERO);
            wait_until("the server has seen it", PATIENCE, || shim.is_right(&server));
        });
        server.command(&["FLUSHALL"]);
    }
}

/// A clock that goes back: what was used counts from later on, so nothing is minted; by more than an hour nobody can tell it
/// from nonsense, and it counts as used up.
#[test]
fn a_clock_that_goes_back_mints_nothing() {
    let folder = tempfile_folder();
    let shim = Shim::build(&folder.0);
    let server = Server::builder(Flavor::Redis8).env("LD_PRELOAD", &shim.library).env("SHIM_FILE", &shim.file).start();
    let runtime = runtime();
    for (ahead, expected, repairs) in [(1800, AMOUNT - BEFORE, 0), (7200, 0, 1)] {
        for limit in LIMITS.iter().filter(|limit| !limit.contains("1000d") || limit.contains("first hit")) {
            let limits = limits(limit);
            shim.set(Duration::from_secs(ahead));
            wait_until("the server has seen it", PATIENCE, || !shim.is_right(&server));
            let redis = runtime.block_on(async { store(&server).witness_keys(0).build() }).unwrap();
            assert_eq!(runtime.block_on(admitted(&redis, &limits, BEFORE)), BEFORE);
            shim.set(Duration::ZERO);
            wait_until("the server has seen it", PATIENCE, || shim.is_right(&server));
            let after = runtime.block_on(admitted(&redis, &limits, 2 * AMOUNT));
            assert_eq!((after, redis.stats().repairs), (expected, repairs), "{limit}, {ahead} s back");
            assert_all_expire(&server);
            server.command(&["FLUSHALL"]);
        }
    }
}

/// Lies to a server about the wall clock: it is ahead by as much as a file says, in seconds.
struct Shim {
    library: String,
    file: String,
    ahead: File,
}

const SOURCE: &str = r#"
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <time.h>

static volatile long *ahead;

__attribute__((constructor)) static void open_file(void) {
    int file = open(getenv("SHIM_FILE"), O_RDONLY);
    ahead = mmap(NULL, sizeof(long), PROT_READ, MAP_SHARED, file, 0);
    if (ahead == MAP_FAILED) abort();
}

int clock_gettime(clockid_t clock, struct timespec *now) {
    static int (*real)(clockid_t, struct timespec *);
    if (!real) real = dlsym(RTLD_NEXT, "clock_gettime");
    int result = real(clock, now);
    if (clock == CLOCK_REALTIME && ahead) now->tv_sec += *ahead;
    return result;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone) {
    struct timespec exact;
    clock_gettime(CLOCK_REALTIME, &exact);
    now->tv_sec = exact.tv_sec;
    now->tv_usec = exact.tv_nsec / 1000;
    return 0;
}

time_t time(time_t *to) {
    struct timespec exact;
    clock_gettime(CLOCK_REALTIME, &exact);
    if (to) *to = exact.tv_sec;
    return exact.tv_sec;
}
"#;

impl Shim {
    fn build(folder: &Path) -> Shim {
        let path = |name: &str| folder.join(name).display().to_string();
        std::fs::write(path("shim.c"), SOURCE).unwrap();
        let cc = Command::new("cc")
            .args(["-shared", "-fPIC", "-O1", "-o", &path("shim.so"), &path("shim.c"), "-ldl"])
            .status();
        let cc = cc.expect("`cc`, which Rust itself needs to link, is there: run `apt-get install gcc`");
        assert!(cc.success(), "cc: {cc}");
        let ahead = File::create(path("ahead")).unwrap();
        ahead.write_all_at(&0_u64.to_ne_bytes(), 0).unwrap();
        Shim { library: path("shim.so"), file: path("ahead"), ahead }
    }

    fn set(&self, ahead: Duration) {
        self.ahead.write_all_at(&ahead.as_secs().to_ne_bytes(), 0).unwrap();
    }

    /// Whether the server's clock is the machine's, give or take a minute.
    fn is_right(&self, server: &Server) -> bool {
        let told: u64 = server.command(&["TIME"]).array()[0].text().parse().unwrap();
        let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap().as_secs();
        told.abs_diff(now) < 60
    }
}

/// A folder that goes when this is dropped.
struct Folder(std::path::PathBuf);

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

fn tempfile_folder() -> Folder {
    use std::hash::{BuildHasher, RandomState};
    let name = format!("tidegate-shim-{:x}", RandomState::new().hash_one(std::process::id()));
    let folder = std::env::temp_dir().join(name);
    std::fs::create_dir(&folder).unwrap();
    Folder(folder)
}
