//! Removes what a store has written, for simulations and tests.

use std::time::Duration;

use tokio::time::Instant;

use super::Redis;
use super::cross_slot::join_all;
use tidegate_redis_client::{Failure, FailureKind, NodeId, Outcome, Value};

/// How many keys a server looks at in one go. Names have up to 1.2 kB, and an answer up to a
/// megabyte.
const AT_ONCE: &str = "500";
/// How long one command may take.
const PATIENCE: Duration = Duration::from_secs(5);

/// The keys of a store were not removed, or not all of them.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ClearError {
    /// Without a namespace the keys of everybody would be removed.
    #[error("the store has no namespace: expected one, so that nobody else's keys are removed")]
    NoNamespace,
    /// A server had no answer. What is left ends by itself.
    #[error(transparent)]
    NoAnswer(#[from] Failure),
}

impl Redis {
    /// Removes every key of this store's namespace from all servers, and says how many there were.
    /// What is written meanwhile may stay.
    ///
    /// This store forgets what it has seen of them. Other processes that have used them do not, and
    /// may restore what they have seen: this is for namespaces that nobody uses any more.
    ///
    /// # Errors
    /// If the store has no namespace, or a server has no answer.
    pub async fn clear(&self) -> Result<u64, ClearError> {
        if !self.inner.keys.has_namespace() {
            return Err(ClearError::NoNamespace);
        }
        // Namespaces have no characters that mean anything in a pattern.
        let pattern = format!("{}*", self.inner.keys.prefix());
        let mut removed = 0;
        for master in self.inner.router.masters(Instant::now() + PATIENCE).await? {
            let mut cursor = b"0".to_vec();
            loop {
                let words: [&[u8]; 6] =
                    [b"SCAN", &cursor, b"MATCH", pattern.as_bytes(), b"COUNT", AT_ONCE.as_bytes()];
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
        self.inner.witness.forget();
        Ok(removed)
    }

    async fn unlink(&self, master: &NodeId, names: &[&[u8]]) -> Result<u64, Failure> {
        // In a cluster one command must not touch two slots.
        let in_one = if self.inner.router.is_cluster() { 1 } else { names.len().max(1) };
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
        match self.inner.router.command(node, words, Instant::now() + PATIENCE).await {
            Outcome::Applied(value) => Ok(value),
            Outcome::NotApplied(failure) | Outcome::Unknown(failure) => Err(failure),
        }
    }
}

/// The next cursor, and keys.
fn read_page(page: &Value) -> Option<(&[u8], Vec<&[u8]>)> {
    let [cursor, names] = page.as_array()? else { return None };
    Some((
        cursor.as_bytes()?,
        names.as_array()?.iter().map(Value::as_bytes).collect::<Option<_>>()?,
    ))
}
