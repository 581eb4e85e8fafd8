//! Configures the system allocator to request memory from the kernel rarely and in large pieces.
//!
//! Each request locks the address space of the process. If another process inspects that memory at
//! the same time, all threads wait, for up to four seconds in measurements
//! (`docs/decisions/0030-memory-in-large-pieces.md`). Memory that is requested but not touched
//! costs nothing.

#![allow(
    unsafe_code,
    reason = "mallopt has no safe wrapper; it gets three numbers, before any thread starts"
)]

/// Sets the sizes, unless the environment configures the allocator.
#[cfg(all(target_os = "linux", target_env = "gnu"))]
pub(crate) fn take_large_pieces() {
    const MIB: i32 = 1 << 20;
    // Names and numbers as in glibc's malloc.h.
    const TRIM_THRESHOLD: i32 = -1;
    const TOP_PAD: i32 = -2;
    const MMAP_THRESHOLD: i32 = -3;
    unsafe extern "C" {
        fn mallopt(parameter: i32, value: i32) -> i32;
    }
    let variables =
        ["MALLOC_TOP_PAD_", "MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES"];
    if variables.iter().any(|name| std::env::var_os(name).is_some()) {
        return;
    }
    for (parameter, value) in
        [(TOP_PAD, 16 * MIB), (TRIM_THRESHOLD, 64 * MIB), (MMAP_THRESHOLD, 32 * MIB)]
    {
        // SAFETY: mallopt accepts any two numbers, and ignores parameters that it does not know.
        unsafe { mallopt(parameter, value) };
    }
}

#[cfg(not(all(target_os = "linux", target_env = "gnu")))]
pub(crate) fn take_large_pieces() {}
