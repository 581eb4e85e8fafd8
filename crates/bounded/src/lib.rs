//! Bounded input and waiting: [files] read up to a size, futures awaited up to a deadline.
//!
//! ```
//! use std::time::Duration;
//! use tidegate_bounded::in_time;
//! use tokio::time::Instant;
//! # #[tokio::main(flavor = "current_thread")] async fn main() {
//! let deadline = Instant::now() + Duration::from_millis(5);
//! assert_eq!(in_time(deadline, std::future::ready(7)).await, Some(7));
//! assert_eq!(in_time(deadline, std::future::pending::<()>()).await, None);
//! # }
//! ```

mod deadline;
pub mod files;

pub use deadline::in_time;
