//! The system's allocator, told to ask for memory seldom and in large pieces.
//!
//! Each time it asks, the kernel locks the memory of the whole process, and whoever else looks at
//! that memory at the same time makes all threads wait: seen for up to four seconds
//! (`docs/decisions/0030-memory-in-large-pieces.md`). Memory that was asked for and is not touched
//! costs nothing.

#![allow(
    unsafe_code,
    reason = "there is no other way to tell it; it is three numbers, before any thread is started"
)]

/// Tells it, unless somebody else has told it otherwise by the environment.
#[cfg(all(target_os = "linux", target_env = "gnu"))]
pub(crate) fn take_large_pieces() {
    const MIB: i32 = 1 << 20;
    // What glibc calls them, and their numbers there.
    const TRIM_THRESHOLD: i32 = -1;
    const TOP_PAD: i32 = -2;
    const MMAP_THRESHOLD: i32 = -3;
    unsafe extern "C" {
        fn mallopt(parameter: i32, value: i32) -> i32;
    }
    let told =
        ["MALLOC_TOP_PAD_", "MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES"];
    if told.iter().any(|name| std::env::var_os(name).is_some()) {
        return;
    }
    for (parameter, value) in
        [(TOP_PAD, 16 * MIB), (TRIM_THRESHOLD, 64 * MIB), (MMAP_THRESHOLD, 32 * MIB)]
    {
        // SAFETY: it takes any two numbers; what it does not know it refuses, and then nothing
        // changes.
        unsafe { mallopt(parameter, value) };
    }
}

#[cfg(not(all(target_os = "linux", target_env = "gnu")))]
pub(crate) fn take_large_pieces() {}
