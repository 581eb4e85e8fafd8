//! Finds the primary of a service: queries Sentinel before each connection, and once a second
//! meanwhile.
//!
//! Every failover has a number, its epoch, which only grows. A sentinel that was partitioned from
//! the others may name a former primary with an old epoch: it is queried last and believed only if
//! no other sentinel has a newer epoch. A primary that was partitioned during a failover is left
//! when a sentinel names another with a newer epoch.

use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};
use std::time::Duration;

use parking_lot::Mutex;
use tokio::time::{Instant, sleep, timeout};

use super::address::Address;
use super::connect::{Profile, connect};
use super::counters::Counting;
use super::handshake::{Chat, introduce};
use super::outcome::{Failure, FailureKind, escaped};
use super::resp::Value;
use super::url::Host;

/// The timeout of one sentinel; there are others.
const PATIENCE: Duration = Duration::from_millis(300);
/// How long an answer is reused, so that connections that break together query once.
const GOOD_FOR: Duration = Duration::from_millis(100);
/// How often a sentinel is queried while the connection is up.
const WATCH_EVERY: Duration = Duration::from_secs(1);

/// The sentinels that watch a service.
pub(super) struct Sentinels {
    service: Arc<str>,
    /// Their login, which is not that of the servers.
    profile: Profile,
    /// In the order of queries: one that could not help moves to the end.
    hosts: Mutex<Vec<Host>>,
    /// The last answer. Locked during a query, so that there is one at a time.
    last: tokio::sync::Mutex<Option<(Instant, Result<Primary, Failure>)>>,
    /// The primary with the newest epoch so far.
    newest: Mutex<Option<Primary>>,
    watching: AtomicBool,
    counting: Arc<Counting>,
}

/// A primary that a sentinel named.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Primary {
    pub(super) host: Host,
    /// The number of the failover that made it the primary; 0 if there was none, or if the sentinel
    /// does not return it.
    pub(super) epoch: u64,
}

impl fmt::Debug for Sentinels {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Sentinels({})", self.service)
    }
}

impl Sentinels {
    pub(super) fn new(
        service: &str,
        hosts: Vec<Host>,
        profile: Profile,
        counting: Arc<Counting>,
    ) -> Self {
        Sentinels {
            service: service.into(),
            profile,
            hosts: Mutex::new(hosts),
            last: tokio::sync::Mutex::new(None),
            newest: Mutex::new(None),
            watching: AtomicBool::new(false),
            counting,
        }
    }

    pub(super) fn service(&self) -> &Arc<str> {
        &self.service
    }

    /// The primary that the first up-to-date sentinel names.
    pub(super) async fn primary(&self) -> Result<Primary, Failure> {
        let mut last = self.last.lock().await;
        if let Some((when, answer)) = &*last
            && when.elapsed() < GOOD_FOR
        {
            return answer.clone();
        }
        let answer = self.query_all().await;
        if let Ok(primary) = &answer {
            *self.newest.lock() = Some(primary.clone());
        }
        *last = Some((Instant::now(), answer.clone()));
        answer
    }

    /// Whether a failover since then has replaced `primary`.
    pub(super) fn is_replaced(&self, primary: &Primary) -> bool {
        let newest = self.newest.lock();
        newest
            .as_ref()
            .is_some_and(|newest| newest.epoch > primary.epoch && newest.host != primary.host)
    }

    async fn query_all(&self) -> Result<Primary, Failure> {
        self.counting.discoveries.one();
        let newest = self.newest.lock().as_ref().map_or(0, |newest| newest.epoch);
        let hosts = self.hosts.lock().clone();
        let (mut older, mut failure) = (None::<Primary>, None);
        for host in hosts {
            let address = Address::Tcp(host);
            let asked =
                timeout(PATIENCE, async { self.query(&mut self.open(&address).await?).await });
            match asked.await.unwrap_or_else(|_| Err(too_slow(&address))) {
                Ok(primary) if primary.epoch >= newest => return Ok(primary),
                Ok(primary) => {
                    self.query_last(&address);
                    if older.as_ref().is_none_or(|older| older.epoch < primary.epoch) {
                        older = Some(primary);
                    }
                }
                Err(other) => {
                    // Now and not after the loop, which may run out of time: then the next attempt
                    // begins with the others.
                    self.query_last(&address);
                    // An answer that does not help says more than no answer.
                    let better = |old: &Failure| is_answer(&other) || !is_answer(old);
                    if failure.as_ref().is_none_or(better) {
                        failure = Some(other);
                    }
                }
            }
        }
        // If all sentinels have older epochs, the service was set up anew.
        let none = || Failure::local(FailureKind::Unresolved, "there is no sentinel to ask");
        older.ok_or_else(|| failure.unwrap_or_else(none))
    }

    fn query_last(&self, address: &Address) {
        let mut hosts = self.hosts.lock();
        if let Some(index) = hosts.iter().position(|host| Address::Tcp(host.clone()) == *address) {
            hosts[index..].rotate_left(1);
        }
    }

    async fn open(&self, address: &Address) -> Result<Chat, Failure> {
        let stream = connect(address, &self.profile, &Mutex::default()).await?;
        let mut chat = Chat::new(stream, address);
        introduce(&mut chat, &self.profile.login, self.profile.protocol, &self.profile.client_name)
            .await?;
        Ok(chat)
    }

    async fn query(&self, chat: &mut Chat) -> Result<Primary, Failure> {
        // The epoch first: a failover in between then makes the answer look old, not the old
        // primary new.
        let epoch = match chat.ask(&["SENTINEL", "MASTER", &self.service]).await? {
            Ok(about) => epoch_of(&about),
            // No right, or an unknown service: the next reply says which.
            Err(_) => 0,
        };
        let answer = match chat.ask(&["SENTINEL", "GET-MASTER-ADDR-BY-NAME", &self.service]).await?
        {
            Ok(answer) => answer,
            Err(error) => return Err(chat.rejected("SENTINEL GET-MASTER-ADDR-BY-NAME", &error)),
        };
        let address = match answer.as_array() {
            Some([name, port]) => {
                name.as_str().zip(port.as_int().and_then(|port| u16::try_from(port).ok()))
            }
            _ => None,
        };
        match address.and_then(|(name, port)| Host::announced(name, port)) {
            Some(host) => Ok(Primary { host, epoch }),
            None => {
                let text = format!(
                    "sentinel {} knows no service named {}",
                    chat.address(),
                    escaped(&self.service)
                );
                Err(Failure::local(FailureKind::Unresolved, text))
            }
        }
    }

    /// Queries a sentinel once a second, as long as this value is alive.
    pub(super) fn watch(self: &Arc<Self>) {
        if !self.watching.swap(true, Ordering::Relaxed) {
            let watch = Watch(Arc::downgrade(self));
            tokio::spawn(async move { watch.run().await });
        }
    }
}

/// The background task of [`Sentinels::watch`]. If it ends with its runtime, the next connection
/// starts another.
struct Watch(Weak<Sentinels>);

impl Drop for Watch {
    fn drop(&mut self) {
        if let Some(sentinels) = self.0.upgrade() {
            sentinels.watching.store(false, Ordering::Relaxed);
        }
    }
}

impl Watch {
    async fn run(&self) {
        let mut chat = None;
        loop {
            sleep(WATCH_EVERY).await;
            let Some(sentinels) = self.0.upgrade() else { return };
            let Some(first) = sentinels.hosts.lock().first().cloned() else { return };
            let address =
                chat.as_ref().map_or(Address::Tcp(first), |chat: &Chat| chat.address().clone());
            let asked = timeout(PATIENCE, async {
                let chat = match &mut chat {
                    Some(chat) => chat,
                    none => none.insert(sentinels.open(&address).await?),
                };
                sentinels.query(chat).await
            });
            match asked.await.unwrap_or_else(|_| Err(too_slow(&address))) {
                Ok(primary) => {
                    let mut newest = sentinels.newest.lock();
                    if newest.as_ref().is_none_or(|newest| newest.epoch < primary.epoch) {
                        *newest = Some(primary);
                    }
                }
                Err(_) => {
                    chat = None;
                    sentinels.query_last(&address);
                }
            }
        }
    }
}

fn too_slow(address: &Address) -> Failure {
    let text = format!("sentinel {address} did not answer within {} ms", PATIENCE.as_millis());
    Failure::local(FailureKind::Timeout, text)
}

fn is_answer(failure: &Failure) -> bool {
    !matches!(
        failure.kind(),
        FailureKind::Refused | FailureKind::Timeout | FailureKind::Disconnected
    )
}

/// `config-epoch` from the reply to `SENTINEL MASTER`: a map in RESP3, a flat list in RESP2.
fn epoch_of(about: &Value) -> u64 {
    let epoch = match about {
        Value::Map(pairs) => pairs
            .iter()
            .find(|(name, _)| name.as_str() == Some("config-epoch"))
            .map(|(_, value)| value),
        Value::Array(words) => words
            .chunks_exact(2)
            .find(|pair| pair[0].as_str() == Some("config-epoch"))
            .map(|pair| &pair[1]),
        _ => None,
    };
    epoch.and_then(Value::as_int).and_then(|epoch| u64::try_from(epoch).ok()).unwrap_or(0)
}
