//! Finding the primary of a service: Sentinel is asked whenever a connection has to be made.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::time::{Instant, timeout};

use super::counters::Counting;
use super::dial::{Place, Profile, connect};
use super::driver::random_below;
use super::handshake::{Chat, introduce};
use super::outcome::{Failure, FailureKind, escaped};
use super::url::Host;

/// How long one sentinel may take. There are others.
const PATIENCE: Duration = Duration::from_millis(300);
/// How long an answer is good for. Several connections that break together ask once.
const GOOD_FOR: Duration = Duration::from_millis(100);

/// The sentinels that watch a service.
pub(super) struct Sentinels {
    service: Arc<str>,
    /// How to talk to them; their login is not that of the servers.
    profile: Profile,
    /// Who is asked first: the one that answered last.
    hosts: Mutex<Vec<Host>>,
    /// The last answer. Whoever asks holds it, so nobody asks at the same time.
    last: tokio::sync::Mutex<Option<(Instant, Result<Host, Failure>)>>,
    counting: Arc<Counting>,
}

impl fmt::Debug for Sentinels {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Sentinels({})", self.service)
    }
}

impl Sentinels {
    pub(super) fn new(service: &str, hosts: Vec<Host>, profile: Profile, counting: Arc<Counting>) -> Self {
        let last = tokio::sync::Mutex::new(None);
        Sentinels { service: service.into(), profile, hosts: Mutex::new(hosts), last, counting }
    }

    pub(super) fn service(&self) -> &Arc<str> {
        &self.service
    }

    /// Where the primary is, by the word of the first sentinel that knows.
    pub(super) async fn primary(&self) -> Result<Host, Failure> {
        let mut last = self.last.lock().await;
        if let Some((when, answer)) = &*last
            && when.elapsed() < GOOD_FOR
        {
            return answer.clone();
        }
        let answer = self.ask_all().await;
        *last = Some((Instant::now(), answer.clone()));
        answer
    }

    async fn ask_all(&self) -> Result<Host, Failure> {
        self.counting.discoveries.one();
        let hosts = self.hosts.lock().clone();
        let mut failure = None;
        for (index, host) in hosts.iter().enumerate() {
            let place = Place::Tcp(host.clone());
            let answer = timeout(PATIENCE, self.ask(&place)).await.unwrap_or_else(|_| {
                let text = format!("sentinel {place} did not answer within {} ms", PATIENCE.as_millis());
                Err(Failure::local(FailureKind::Timeout, text))
            });
            match answer {
                Ok(primary) => {
                    self.hosts.lock().swap(0, index);
                    return Ok(primary);
                }
                // A sentinel that answered but could not help says more than one that is away.
                Err(other) => {
                    let better = |old: &Failure| is_answer(&other) || !is_answer(old);
                    if failure.as_ref().is_none_or(better) {
                        failure = Some(other);
                    }
                }
            }
        }
        // Nobody knew. Next time somebody else is asked first, and not the same by every client.
        let mut hosts = self.hosts.lock();
        let many = hosts.len();
        hosts.rotate_left(random_below(many));
        Err(failure.unwrap_or_else(|| Failure::local(FailureKind::Unresolved, "there is no sentinel to ask")))
    }

    async fn ask(&self, place: &Place) -> Result<Host, Failure> {
        let stream = connect(place, &self.profile, &Mutex::default()).await?;
        let mut chat = Chat::new(stream, place);
        introduce(&mut chat, &self.profile.login, self.profile.protocol, &self.profile.client_name).await?;
        let answer = match chat.ask(&["SENTINEL", "GET-MASTER-ADDR-BY-NAME", &self.service]).await? {
            Ok(answer) => answer,
            Err(error) => return Err(chat.rejected("SENTINEL GET-MASTER-ADDR-BY-NAME", &error)),
        };
        let address = match answer.as_array() {
            Some([name, port]) => name.as_str().zip(port.as_int().and_then(|port| u16::try_from(port).ok())),
            _ => None,
        };
        match address {
            Some((name, port)) if !name.is_empty() && port > 0 => Ok(Host { name: name.into(), port }),
            _ => {
                let text = format!("sentinel {place} knows no service named {}", escaped(&self.service));
                Err(Failure::local(FailureKind::Unresolved, text))
            }
        }
    }
}

fn is_answer(failure: &Failure) -> bool {
    !matches!(failure.kind(), FailureKind::Refused | FailureKind::Timeout | FailureKind::Disconnected)
}
