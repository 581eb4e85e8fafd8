//! tidegate
pub mod clock;
pub mod memory;
pub mod store;

pub use clock::{Clock, ManualClock, SystemClock};
pub use memory::{Memory, MemoryBuilder, Overflow};
pub use store::{Check, Store, StoreError};
pub use tidegate_core::*;
