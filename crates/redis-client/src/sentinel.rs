//! Finding the primary of a service: Sentinel is asked whenever a connection has to be made, and
//! once a second in between.
//!
//! Every failover has a number, its epoch, which only grows. A sentinel that was cut off from the
//! others may name an old primary, in good faith and with an old epoch: it is asked last and
//! believed only if nobody knows better. And a primary that was replaced without being told,
//! because it was cut off itself, is left when a sentinel names another with a newer epoch.

use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};
use std::time::Duration;

use parking_lot::Mutex;
use tokio::time::{Instant, sleep, timeout};

use super::counters::Counting;
use super::dial::{Place, Profile, connect};
use super::handshake::{Chat, introduce};
use super::outcome::{Failure, FailureKind, escaped};
use super::resp::Value;
use super::url::Host;

/// How long one sentinel may take. There are others.
const PATIENCE: Duration = Duration::from_millis(300);
/// How long an answer is good for. Several connections that break together ask once.
const GOOD_FOR: Duration = Duration::from_millis(100);
/// How often a sentinel is asked while all is well.
const WATCH_EVERY: Duration = Duration::from_secs(1);

/// The sentinels that watch a service.
pub(super) struct Sentinels {
    service: Arc<str>,
    /// How to talk to them; their login is not that of the servers.
    profile: Profile,
    /// In the order in which they are asked: who could not help goes to the end.
    hosts: Mutex<Vec<Host>>,
    /// The last answer. Whoever asks holds it, so nobody asks at the same time.
    last: tokio::sync::Mutex<Option<(Instant, Result<Primary, Failure>)>>,
    /// The newest that anybody has named.
    newest: Mutex<Option<Primary>>,
    watching: AtomicBool,
    counting: Arc<Counting>,
}

/// A primary, as a sentinel named it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Primary {
    pub(super) host: Host,
    /// The number of the failover that made it one. 0 if none did, or if the sentinel does not tell
    /// us.
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

    /// The primary, by the word of the first sentinel that is up to date.
    pub(super) async fn primary(&self) -> Result<Primary, Failure> {
        let mut last = self.last.lock().await;
        if let Some((when, answer)) = &*last
            && when.elapsed() < GOOD_FOR
        {
            return answer.clone();
        }
        let answer = self.ask_all().await;
        if let Ok(primary) = &answer {
            *self.newest.lock() = Some(primary.clone());
        }
        *last = Some((Instant::now(), answer.clone()));
        answer
    }

    /// Whether there has been a failover since `primary` was named, and another is the primary now.
    pub(super) fn is_replaced(&self, primary: &Primary) -> bool {
        let newest = self.newest.lock();
        newest
            .as_ref()
            .is_some_and(|newest| newest.epoch > primary.epoch && newest.host != primary.host)
    }

    async fn ask_all(&self) -> Result<Primary, Failure> {
        self.counting.discoveries.one();
        let newest = self.newest.lock().as_ref().map_or(0, |newest| newest.epoch);
        let hosts = self.hosts.lock().clone();
        let (mut older, mut failure) = (None::<Primary>, None);
        for host in hosts {
            let place = Place::Tcp(host);
            let asked = timeout(PATIENCE, async { self.ask(&mut self.call(&place).await?).await });
            match asked.await.unwrap_or_else(|_| Err(too_slow(&place))) {
                Ok(primary) if primary.epoch >= newest => return Ok(primary),
                Ok(primary) => {
                    self.ask_last(&place);
                    if older.as_ref().is_none_or(|older| older.epoch < primary.epoch) {
                        older = Some(primary);
                    }
                }
                Err(other) => {
                    // At once, because there may be no time left to ask everybody: then the next
                    // attempt begins with the others.
                    self.ask_last(&place);
                    // A sentinel that answered but could not help says more than one that is away.
                    let better = |old: &Failure| is_answer(&other) || !is_answer(old);
                    if failure.as_ref().is_none_or(better) {
                        failure = Some(other);
                    }
                }
            }
        }
        // If everybody has gone back to older numbers the service was set up anew.
        let nobody = || Failure::local(FailureKind::Unresolved, "there is no sentinel to ask");
        older.ok_or_else(|| failure.unwrap_or_else(nobody))
    }

    fn ask_last(&self, place: &Place) {
        let mut hosts = self.hosts.lock();
        if let Some(index) = hosts.iter().position(|host| Place::Tcp(host.clone()) == *place) {
            hosts[index..].rotate_left(1);
        }
    }

    async fn call(&self, place: &Place) -> Result<Chat, Failure> {
        let stream = connect(place, &self.profile, &Mutex::default()).await?;
        let mut chat = Chat::new(stream, place);
        introduce(&mut chat, &self.profile.login, self.profile.protocol, &self.profile.client_name)
            .await?;
        Ok(chat)
    }

    async fn ask(&self, chat: &mut Chat) -> Result<Primary, Failure> {
        // The epoch first: a failover in between then makes the answer look old, not the old
        // primary new.
        let epoch = match chat.ask(&["SENTINEL", "MASTER", &self.service]).await? {
            Ok(about) => epoch_of(&about),
            // We may not ask, or it does not know the service; the next answer tells.
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
        match address.and_then(|(name, port)| Host::told(name, port)) {
            Some(host) => Ok(Primary { host, epoch }),
            None => {
                let text = format!(
                    "sentinel {} knows no service named {}",
                    chat.place(),
                    escaped(&self.service)
                );
                Err(Failure::local(FailureKind::Unresolved, text))
            }
        }
    }

    /// Asks a sentinel now and then whether the primary is still the same, as long as anybody holds
    /// this.
    pub(super) fn watch(self: &Arc<Self>) {
        if !self.watching.swap(true, Ordering::Relaxed) {
            let watch = Watch(Arc::downgrade(self));
            tokio::spawn(async move { watch.run().await });
        }
    }
}

/// The task that watches. Should it end with its runtime, the next connection starts another.
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
            let place = chat.as_ref().map_or(Place::Tcp(first), |chat: &Chat| chat.place().clone());
            let asked = timeout(PATIENCE, async {
                let chat = match &mut chat {
                    Some(chat) => chat,
                    none => none.insert(sentinels.call(&place).await?),
                };
                sentinels.ask(chat).await
            });
            match asked.await.unwrap_or_else(|_| Err(too_slow(&place))) {
                Ok(primary) => {
                    let mut newest = sentinels.newest.lock();
                    if newest.as_ref().is_none_or(|newest| newest.epoch < primary.epoch) {
                        *newest = Some(primary);
                    }
                }
                Err(_) => {
                    chat = None;
                    sentinels.ask_last(&place);
                }
            }
        }
    }
}

fn too_slow(place: &Place) -> Failure {
    let text = format!("sentinel {place} did not answer within {} ms", PATIENCE.as_millis());
    Failure::local(FailureKind::Timeout, text)
}

fn is_answer(failure: &Failure) -> bool {
    !matches!(
        failure.kind(),
        FailureKind::Refused | FailureKind::Timeout | FailureKind::Disconnected
    )
}

/// `config-epoch` of what `SENTINEL MASTER` tells: a map in RESP3, names and values in turn in
/// RESP2.
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
