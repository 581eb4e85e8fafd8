//! From an address to a connection that is ready for commands.

use std::fmt;
use std::net::SocketAddr;
use std::sync::Arc;

use parking_lot::Mutex;

use super::address::Address;
use super::connect::{Profile, connect};
use super::handshake::{self, Greeted};
use super::outcome::Failure;
use super::sentinel::{Primary, Sentinels};
use super::stream::Stream;

/// Opens connections to one address.
pub(super) struct Dialer {
    address: Address,
    profile: Arc<Profile>,
    /// Name the primary, where the address is a service.
    sentinels: Option<Arc<Sentinels>>,
    /// The addresses of the last name lookup, used when a lookup fails.
    known: Mutex<Vec<SocketAddr>>,
}

/// A connection after its handshake.
pub(super) struct Opened {
    pub(super) stream: Stream,
    /// Bytes read after the last reply of the handshake.
    pub(super) early: Vec<u8>,
    /// The primary that Sentinel named.
    pub(super) primary: Option<Primary>,
}

impl fmt::Display for Dialer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.address.fmt(f)
    }
}

impl Dialer {
    pub(super) fn new(
        address: Address,
        profile: Arc<Profile>,
        sentinels: Option<Arc<Sentinels>>,
    ) -> Self {
        Dialer { address, profile, sentinels, known: Mutex::default() }
    }

    /// Connects and runs the handshake. The caller bounds the time.
    pub(super) async fn open(&self) -> Result<Opened, Failure> {
        let Some(sentinels) = &self.sentinels else {
            let stream = connect(&self.address, &self.profile, &self.known).await?;
            let Greeted { stream, early } =
                handshake::greet(stream, &self.profile, &self.address, false).await?;
            return Ok(Opened { stream, early, primary: None });
        };
        let primary = sentinels.primary().await?;
        let address = Address::Tcp(primary.host.clone());
        // The next primary has other addresses, so none are kept.
        let stream = connect(&address, &self.profile, &Mutex::default()).await?;
        let Greeted { stream, early } =
            handshake::greet(stream, &self.profile, &address, true).await?;
        sentinels.watch();
        Ok(Opened { stream, early, primary: Some(primary) })
    }

    /// Whether another server has replaced `primary`.
    pub(super) fn is_replaced(&self, primary: Option<&Primary>) -> bool {
        primary
            .zip(self.sentinels.as_ref())
            .is_some_and(|(primary, sentinels)| sentinels.is_replaced(primary))
    }
}
