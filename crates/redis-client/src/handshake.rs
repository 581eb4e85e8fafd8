//! The handshake of a connection: protocol, login, name, database, role.

use std::io;

use tokio::io::{AsyncReadExt, AsyncWriteExt};

use super::address::Address;
use super::connect::Profile;
use super::outcome::{Failure, FailureKind, escaped, rule};
use super::resp::{Scanner, Value, decode, put_command};
use super::stream::Stream;
use super::url::{Login, Protocol};

/// The largest reply in a handshake.
const MAX_GREETING: usize = 64 << 10;

/// A stream after its handshake.
pub(super) struct Greeted {
    pub(super) stream: Stream,
    /// Bytes read after the last reply.
    pub(super) early: Vec<u8>,
}

/// Runs the handshake over `stream`. With `must_be_primary`, a server that is a replica is a
/// failure.
pub(super) async fn greet(
    stream: Stream,
    profile: &Profile,
    address: &Address,
    must_be_primary: bool,
) -> Result<Greeted, Failure> {
    let mut chat = Chat::new(stream, address);
    introduce(&mut chat, &profile.login, profile.protocol, &profile.client_name).await?;
    if profile.database > 0 {
        let number = profile.database.to_string();
        if let Err(error) = chat.ask(&["SELECT", &number]).await? {
            return Err(chat.rejected(&format!("SELECT {number}"), &error));
        }
    }
    if must_be_primary {
        check_role(&mut chat).await?;
    }
    Ok(Greeted { stream: chat.stream, early: chat.input })
}

/// Logs in and sets the client name, in the newest protocol that both sides know.
pub(super) async fn introduce(
    chat: &mut Chat,
    login: &Login,
    protocol: Option<Protocol>,
    name: &str,
) -> Result<(), Failure> {
    let user = login.user.as_deref();
    if protocol != Some(Protocol::Resp2) {
        let mut words = vec!["HELLO", "3"];
        if let Some(password) = &login.password {
            words.extend(["AUTH", user.unwrap_or("default"), password]);
        }
        words.extend(["SETNAME", name]);
        match chat.ask(&words).await? {
            Ok(_) => return Ok(()),
            // The server, or a proxy before it, has no HELLO: fall back to RESP2, unless the URL
            // requires RESP3.
            Err(error) if protocol.is_none() && knows_no_hello(&error) => {}
            Err(error) => return Err(chat.rejected("HELLO", &error)),
        }
    }
    if let Some(password) = &login.password {
        let words: &[&str] = match user {
            Some(user) => &["AUTH", user, password],
            None => &["AUTH", password],
        };
        if let Err(error) = chat.ask(words).await? {
            return Err(chat.rejected("AUTH", &error));
        }
    }
    // Only a label in CLIENT LIST: a user without this right can do everything else.
    let named = chat.ask(&["CLIENT", "SETNAME", name]).await?;
    match named {
        Err(error)
            if matches!(rule(&error).kind, FailureKind::NoAuth | FailureKind::MaxClients) =>
        {
            Err(chat.rejected("CLIENT SETNAME", &error))
        }
        _ => Ok(()),
    }
}

/// Checks the role, because Sentinel may name a former primary. A user without the right to run
/// ROLE finds out at the first write.
async fn check_role(chat: &mut Chat) -> Result<(), Failure> {
    let role = match chat.ask(&["ROLE"]).await? {
        Ok(role) => role,
        Err(error) if rule(&error).kind == FailureKind::NoPerm => return Ok(()),
        Err(error) => return Err(chat.rejected("ROLE", &error)),
    };
    match role.as_array().and_then(|words| words.first()).and_then(Value::as_str) {
        Some("master") => Ok(()),
        other => {
            let found = escaped(other.unwrap_or("something else"));
            let text = format!("{} is to be the primary but says it is {found}", chat.address);
            Err(Failure::local(FailureKind::ReadOnly, text).passing())
        }
    }
}

fn knows_no_hello(error: &str) -> bool {
    let lower = error.to_ascii_lowercase();
    lower.starts_with("noproto") || lower.starts_with("err unknown command")
}

/// A new connection on which each command waits for its reply.
pub(super) struct Chat {
    stream: Stream,
    address: Address,
    input: Vec<u8>,
}

impl Chat {
    pub(super) fn new(stream: Stream, address: &Address) -> Self {
        Chat { stream, address: address.clone(), input: Vec::new() }
    }

    pub(super) fn address(&self) -> &Address {
        &self.address
    }

    /// Sends one command and waits for its reply.
    pub(super) async fn ask(&mut self, words: &[&str]) -> Result<Result<Value, String>, Failure> {
        let mut bytes = Vec::new();
        put_command(&mut bytes, words);
        // A server at its client limit replies before it reads, and closes. So the reply is read
        // even if the write fails.
        let written = async {
            self.stream.write_all(&bytes).await?;
            self.stream.flush().await
        };
        let written = written.await;
        let mut scanner = Scanner::default();
        loop {
            let found = scanner
                .scan(&self.input, MAX_GREETING)
                .map_err(|malformed| self.protocol(malformed))?;
            if let Some(length) = found {
                let value =
                    decode(&self.input[..length]).map_err(|malformed| self.protocol(malformed))?;
                self.input.drain(..length);
                match value {
                    Value::Push(_) => continue,
                    Value::Error(text) => return Ok(Err(text)),
                    value => return Ok(Ok(value)),
                }
            }
            match self.stream.read_buf(&mut self.input).await {
                Ok(0) => {
                    let closed =
                        io::Error::new(io::ErrorKind::UnexpectedEof, "the server closed it");
                    return Err(self.broken(&written.err().unwrap_or(closed)));
                }
                Ok(_) => {}
                Err(error) => return Err(self.broken(&error)),
            }
        }
    }

    /// The failure for an error reply to `command`, which is named without its arguments.
    pub(super) fn rejected(&self, command: &str, error: &str) -> Failure {
        Failure::said(rule(error).kind, error)
            .during(&format!("{} rejected {command}", self.address))
    }

    fn broken(&self, error: &io::Error) -> Failure {
        let why = escaped(&error.to_string());
        let text = format!("the connection to {} broke during the greeting: {why}", self.address);
        // A server that requires another certificate says so only now.
        #[cfg(feature = "tls")]
        if super::tls::is_about_tls(error) {
            return Failure::local(FailureKind::Tls, text);
        }
        Failure::local(FailureKind::Disconnected, text)
    }

    fn protocol(&self, malformed: super::resp::Malformed) -> Failure {
        let text = format!("the greeting of {} was refused: {malformed}", self.address);
        Failure::local(FailureKind::Protocol, text)
    }
}
