//! The notation: `240/h sliding step 1m` ↔ [`Limit`], and several joined by `;` ↔ [`Limits`].
//!
//! ```text
//! limits  = limit { ";" limit }
//! limit   = amount ( "/" | "per" ) [ number ] unit [ algorithm ] { option }
//!         | amount "concurrent" "ttl" number unit
//! option  = "burst" n | "step" [ number ] unit | "lenient" | "strict" | "from first hit" | "count rejected" | "debt" n
//! unit    = us | ms | s | m | min | h | d | day | w | week, also written out and in the plural
//! ```
//! Case does not matter, and spaces are optional. A limit displays in its shortest canonical form,
//! which parses back.

mod error;
mod hint;
mod parser;

use alloc::sync::Arc;
use alloc::vec::Vec;
use core::fmt;

pub use error::ParseError;

use crate::algorithm::Algorithm;
use crate::limit::Limit;
use crate::time::Period;

/// The most limits in one text.
pub const MAX_LIMITS: usize = 16;

/// One limit or several that are decided together: `10/s; 120/m`. Never empty, cheap to clone.
///
/// ```
/// use tidegate_core::Limits;
/// let limits: Limits = "10/s; 120/m; 240/h sliding step 1m".parse()?;
/// assert_eq!(limits.iter().count(), 3);
/// assert_eq!(limits.to_string().parse::<Limits>()?, limits);
/// # Ok::<(), tidegate_core::ParseError>(())
/// ```
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct Limits(Arc<[Limit]>);

impl Limits {
    /// Joins several limits; `None` if there are none or more than [`MAX_LIMITS`].
    pub fn new(limits: impl IntoIterator<Item = Limit>) -> Option<Self> {
        let limits: Vec<Limit> = limits.into_iter().take(MAX_LIMITS + 1).collect();
        (!limits.is_empty() && limits.len() <= MAX_LIMITS).then(|| Limits(limits.into()))
    }

    /// The limits, in the order of the text.
    pub fn iter(&self) -> core::slice::Iter<'_, Limit> {
        self.0.iter()
    }

    /// The limits as a slice, in the order of the text.
    pub fn as_slice(&self) -> &[Limit] {
        &self.0
    }
}

impl From<Limit> for Limits {
    fn from(limit: Limit) -> Self {
        Limits(Arc::new([limit]))
    }
}

impl<'a> IntoIterator for &'a Limits {
    type Item = &'a Limit;
    type IntoIter = core::slice::Iter<'a, Limit>;
    fn into_iter(self) -> Self::IntoIter {
        self.iter()
    }
}

impl fmt::Display for Limits {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, limit) in self.iter().enumerate() {
            if index > 0 {
                f.write_str("; ")?;
            }
            write!(f, "{limit}")?;
        }
        Ok(())
    }
}

impl fmt::Display for Limit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let algorithm = self.algorithm();
        write!(f, "{}", algorithm.amount())?;
        if let Algorithm::Concurrent(concurrent) = algorithm {
            return write!(f, " concurrent ttl {}", Period::micros(concurrent.ttl));
        }
        match Period::micros(algorithm.period_us()).in_largest_unit() {
            (1, unit) => write!(f, "/{unit}")?,
            (n, unit) => write!(f, "/{n}{unit}")?,
        }
        match algorithm {
            Algorithm::Bucket(bucket) if bucket.capacity != bucket.amount => {
                write!(f, " burst {}", bucket.capacity)?
            }
            Algorithm::Bucket(_) => {}
            other => write!(f, " {}", other.name())?,
        }
        match algorithm {
            Algorithm::Window(window) if window.from_first_hit => f.write_str(" from first hit")?,
            Algorithm::Sliding(sliding) => {
                write!(f, " step {}", Period::micros(sliding.step))?;
                if sliding.lenient {
                    f.write_str(" lenient")?;
                }
            }
            _ => {}
        }
        if self.counts_rejected() {
            f.write_str(" count rejected")?;
        }
        if self.debt() != self.capacity() {
            write!(f, " debt {}", self.debt())?;
        }
        Ok(())
    }
}
