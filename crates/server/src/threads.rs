//! The number of threads that serve.

use std::str::FromStr;
use std::{fmt, io};

use tokio::runtime::{Builder, Runtime};

/// The most threads that can be configured.
pub const MAX_THREADS: usize = 1024;

/// The number of threads that serve. The default is `auto`: one for each core that this process may
/// use.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Threads(Option<usize>);

impl Threads {
    /// Builds a runtime with this number of threads, for [`start`](crate::start).
    ///
    /// # Errors
    /// If the operating system gives none.
    pub fn runtime(self) -> io::Result<Runtime> {
        let mut builder = Builder::new_multi_thread();
        if let Some(number) = self.0 {
            builder.worker_threads(number);
        }
        builder.enable_all().build()
    }
}

impl FromStr for Threads {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text.parse() {
            _ if text == "auto" => Ok(Threads(None)),
            Ok(number @ 1..=MAX_THREADS) => Ok(Threads(Some(number))),
            _ => {
                Err(format!("threads {text:?}: expected auto, or a number from 1 to {MAX_THREADS}"))
            }
        }
    }
}

impl fmt::Display for Threads {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            None => f.write_str("auto"),
            Some(number) => number.fmt(f),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_runtime_has_the_configured_number_of_threads() {
        for number in [1, 3] {
            let runtime = number.to_string().parse::<Threads>().unwrap().runtime().unwrap();
            assert_eq!(runtime.metrics().num_workers(), number);
        }
        assert_eq!(Threads::default(), "auto".parse().unwrap());
    }

    #[test]
    fn numbers_out_of_range_are_refused() {
        for text in ["", "0", "-1", "1025", "many", "2.5"] {
            let error = text.parse::<Threads>().unwrap_err();
            assert_eq!(
                error,
                format!("threads {text:?}: expected auto, or a number from 1 to 1024")
            );
        }
    }
}
