//! Removes the keys of a namespace, for simulations and tests.

use std::time::Duration;

use tokio::time::Instant;

use super::Redis;
use super::cross_slot::join_all;
use tidegate_redis_client::{Failure, FailureKind, NodeId, Outcome, Value};

/// The keys that one SCAN visits. A key has up to 1.2 kB, a reply up to a megabyte.
const SCAN_COUNT: &str = "500";
/// The timeout of one command.
const PATIENCE: Duration = Duration::from_secs(5);

/// An error of [`Redis::clear`]; some keys may have been removed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ClearError {
    /// The store has no namespace, so other stores may have written its keys.
    #[error("the store has no namespace: expected one, so that only its own keys are removed")]
    NoNamespace,
    /// A server did not answer. The remaining keys expire.
    #[error(transparent)]
    NoAnswer(#[from] Failure),
}

impl Redis {
    /// Removes every key of this store's namespace from all servers, and returns how many there
    /// were. Keys written meanwhile may stay.
    ///
    /// This store forgets the states that it remembers. Other processes that used the namespace do
    /// not, and may restore them: call this when no other process uses the namespace any more.
    ///
    /// # Errors
    /// If the store has no namespace, or a server does not answer.
    pub async fn clear(&self) -> Result<u64, ClearError> {
        if !self.shared.keys.has_namespace() {
            return Err(ClearError::NoNamespace);
        }
        // Namespaces have no characters that mean anything in a pattern.
        let pattern = format!("{}*", self.shared.keys.prefix());
        let mut removed = 0;
        for master in self.shared.router.masters(Instant::now() + PATIENCE).await? {
            let mut cursor = b"0".to_vec();
            loop {
                let words: [&[u8]; 6] = [
                    b"SCAN",
                    &cursor,
                    b"MATCH",
                    pattern.as_bytes(),
                    b"COUNT",
                    SCAN_COUNT.as_bytes(),
                ];
                let page = self.answer(&master, &words).await?;
                let (next, names) = read_page(&page).ok_or_else(|| {
                    Failure::local(
                        FailureKind::Protocol,
                        format!("{master} answered SCAN with something else"),
                    )
                })?;
                removed += self.unlink(&master, &names).await?;
                if next == b"0" {
                    break;
                }
                cursor = next.to_vec();
            }
        }
        self.shared.witness.forget();
        Ok(removed)
    }

    async fn unlink(&self, master: &NodeId, names: &[&[u8]]) -> Result<u64, Failure> {
        // In a cluster one command must not touch two slots.
        let in_one = if self.shared.router.is_cluster() { 1 } else { names.len().max(1) };
        let calls = names.chunks(in_one).map(|names| async move {
            let words: Vec<&[u8]> =
                [b"UNLINK".as_slice()].into_iter().chain(names.iter().copied()).collect();
            self.answer(master, &words).await
        });
        let mut removed = 0;
        for answer in join_all(calls).await {
            removed += u64::try_from(answer?.as_int().unwrap_or(0)).unwrap_or(0);
        }
        Ok(removed)
    }

    async fn answer(&self, node: &NodeId, words: &[&[u8]]) -> Result<Value, Failure> {
        match self.shared.router.command(node, words, Instant::now() + PATIENCE).await {
            Outcome::Applied(value) => Ok(value),
            Outcome::NotApplied(failure) | Outcome::Unknown(failure) => Err(failure),
        }
    }
}

/// The next cursor, and the keys.
fn read_page(page: &Value) -> Option<(&[u8], Vec<&[u8]>)> {
    let [cursor, names] = page.as_array()? else { return None };
    Some((
        cursor.as_bytes()?,
        names.as_array()?.iter().map(Value::as_bytes).collect::<Option<_>>()?,
    ))
}
