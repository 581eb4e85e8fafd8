//! A wall clock that is wrong by as much as a test wants, for any program that asks the system's
//! library for the time.

use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::process::Command;

use tempfile::TempDir;

/// Lies to a program about the wall clock: it is ahead by as many seconds as it was set last.
/// Clocks that only run forward are left alone.
#[derive(Debug)]
pub struct ClockShim {
    folder: TempDir,
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

impl ClockShim {
    /// Compiles it.
    ///
    /// # Panics
    /// If there is no compiler for C, with the command that installs one.
    pub fn build() -> ClockShim {
        let folder = tempfile::Builder::new()
            .prefix("tidegate-shim-")
            .tempdir()
            .expect("a temporary folder can be made");
        let path = |name: &str| folder.path().join(name).display().to_string();
        fs::write(path("shim.c"), SOURCE).expect("a temporary file can be written");
        let cc = Command::new("cc")
            .args(["-shared", "-fPIC", "-O1", "-o", &path("shim.so"), &path("shim.c"), "-ldl"])
            .status();
        let cc =
            cc.expect("`cc`, which Rust itself needs to link, is there: run `apt-get install gcc`");
        assert!(cc.success(), "cc: {cc}");
        let ahead = File::create(path("ahead")).expect("a temporary file can be made");
        let shim = ClockShim { folder, ahead };
        shim.set(0);
        shim
    }

    /// What a program must find in its environment.
    pub fn environment(&self) -> [(&'static str, String); 2] {
        let path = |name: &str| self.folder.path().join(name).display().to_string();
        [("LD_PRELOAD", path("shim.so")), ("SHIM_FILE", path("ahead"))]
    }

    /// From now on the clock is ahead by so many seconds, or behind.
    pub fn set(&self, seconds: i64) {
        self.ahead
            .write_all_at(&seconds.to_ne_bytes(), 0)
            .expect("a temporary file can be written");
    }
}
