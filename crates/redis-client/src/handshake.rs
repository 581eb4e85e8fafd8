//! The first words on a connection: who we are, which protocol, which database.

use std::io;

use tokio::io::{AsyncReadExt, AsyncWriteExt};

use super::dial::{Opened, Place, Profile, Stream};
use super::outcome::{Failure, FailureKind, escaped, rule};
use super::resp::{Scanner, Value, decode, put_command};
use super::url::{Login, Protocol};

/// The largest reply to a greeting.
const MAX_GREETING: usize = 64 << 10;

/// Greets the server behind `stream`, and makes sure that it takes writes if it is to be a
/// `primary`.
pub(super) async fn greet(
    stream: Stream,
    profile: &Profile,
    place: &Place,
    primary: bool,
) -> Result<Opened, Failure> {
    let mut chat = Chat::new(stream, place);
    introduce(&mut chat, &profile.login, profile.protocol, &profile.client_name).await?;
    if profile.database > 0 {
        let number = profile.database.to_string();
        if let Err(error) = chat.ask(&["SELECT", &number]).await? {
            return Err(chat.rejected(&format!("SELECT {number}"), &error));
        }
    }
    if primary {
        check_role(&mut chat).await?;
    }
    Ok(Opened { stream: chat.stream, early: chat.input, primary: None })
}

/// Says who we are, in the newest protocol that both sides know.
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
            // A server, or something in between, that knows no HELLO. If RESP3 was asked for,
            // nothing else will do.
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
    // Only to be recognised in CLIENT LIST; a user who may not do this may still do all that
    // matters.
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

/// What Sentinel says may be old news. A user who may not ask finds out at the first write.
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
            let text = format!("{} is to be the primary but says it is {found}", chat.place);
            Err(Failure::local(FailureKind::ReadOnly, text).passing())
        }
    }
}

fn knows_no_hello(error: &str) -> bool {
    let lower = error.to_ascii_lowercase();
    lower.starts_with("noproto") || lower.starts_with("err unknown command")
}

/// One question at a time on a new connection.
pub(super) struct Chat {
    stream: Stream,
    place: Place,
    input: Vec<u8>,
}

impl Chat {
    pub(super) fn new(stream: Stream, place: &Place) -> Self {
        Chat { stream, place: place.clone(), input: Vec::new() }
    }

    pub(super) fn place(&self) -> &Place {
        &self.place
    }

    /// Asks, and waits for the answer.
    pub(super) async fn ask(&mut self, words: &[&str]) -> Result<Result<Value, String>, Failure> {
        let mut bytes = Vec::new();
        put_command(&mut bytes, words);
        // A server that has no room for us answers before we ask, and closes. So whatever becomes
        // of the question, the answer is read.
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

    /// What to tell when the server answered `command` with an error. The command is named without
    /// its arguments.
    pub(super) fn rejected(&self, command: &str, error: &str) -> Failure {
        Failure::said(rule(error).kind, error).during(&format!("{} rejected {command}", self.place))
    }

    fn broken(&self, error: &io::Error) -> Failure {
        let why = escaped(&error.to_string());
        let text = format!("the connection to {} broke during the greeting: {why}", self.place);
        // A server that wants another certificate says so only now.
        #[cfg(feature = "tls")]
        if super::tls::is_about_tls(error) {
            return Failure::local(FailureKind::Tls, text);
        }
        Failure::local(FailureKind::Disconnected, text)
    }

    fn protocol(&self, malformed: super::resp::Malformed) -> Failure {
        let text = format!("the greeting of {} was refused: {malformed}", self.place);
        Failure::local(FailureKind::Protocol, text)
    }
}
