//! Many checks in one call, over a memory store and under one limit.
//!
//! ```
//! use tidegate::batch::Prepared;
//! use tidegate::{Limit, Memory, Scope};
//! let limit: Limit = "10/s".parse()?;
//! let prepared: Prepared = Memory::new().prepare(&Scope::AdHoc, &limit);
//! let mut allowed = 0;
//! prepared.check_each(&[("user:7", 1), ("user:8", 2)], |_, is_allowed: bool| {
//!     allowed += usize::from(is_allowed);
//! });
//! assert_eq!(allowed, 2);
//! # Ok::<(), tidegate::ParseError>(())
//! ```

pub use crate::memory::prepared::{CheckResult, Prepared};
