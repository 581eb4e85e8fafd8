//! The first words on a connection: who we are, which protocol, which database.

use tokio::io::{AsyncReadExt, AsyncWriteExt};

use super::dial::{Opened, Place, Profile, Stream};
use super::outcome::{Failure, FailureKind, escaped, rule};
use super::resp::{Scanner, Value, decode, put_command};
use super::url::{Login, Protocol};

/// The largest reply to a greeting.
const MAX_GREETING: usize = 64 << 10;

/// Greets the server behind `stream`.
pub(super) async fn greet(stream: Stream, profile: &Profile, place: &Place) -> Result<Opened, Failure> {
    let mut chat = Chat::new(stream, place);
    introduce(&mut chat, &profile.login, profile.protocol, &profile.client_name).await?;
    if profile.database > 0 {
        let number = profile.database.to_string();
        if let Err(error) = chat.ask(&["SELECT", &number]).await? {
            return Err(chat.rejected(&format!("SELECT {number}"), &error));
        }
    }
    Ok(Opened { stream: chat.stream, early: chat.input })
}

/// Says who we are, in the newest protocol that both sides know.
pub(super) async fn introduce(
    chat: &mut Chat<'_>,
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
            // A server, or something in between, that knows no HELLO. If RESP3 was asked for, nothing else will do.
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
    // Only to be recognised in CLIENT LIST; a user who may not do this may still do all that matters.
    let named = chat.ask(&["CLIENT", "SETNAME", name]).await?;
    match named {
        Err(error) if matches!(rule(&error).kind, FailureKind::NoAuth | FailureKind::MaxClients) => {
            Err(chat.rejected("CLIENT SETNAME", &error))
        }
        _ => Ok(()),
    }
}

fn knows_no_hello(error: &str) -> bool {
    let lower = error.to_ascii_lowercase();
    lower.starts_with("noproto") || lower.starts_with("err unknown command")
}

/// One question at a time on a new connection.
pub(super) struct Chat<'a> {
    stream: Stream,
    place: &'a Place,
    input: Vec<u8>,
}

impl<'a> Chat<'a> {
    pub(super) fn new(stream: Stream, place: &'a Place) -> Self {
        Chat { stream, place, input: Vec::new() }
    }

    /// Asks, and waits for the answer.
    pub(super) async fn ask(&mut self, words: &[&str]) -> Result<Result<Value, String>, Failure> {
        let mut bytes = Vec::new();
        put_command(&mut bytes, words);
        // A server that has no room for us answers before we ask, and closes. So whatever becomes of the question, the answer is read.
        let written = async {
            self.stream.write_all(&bytes).await?;
            self.stream.flush().await
        };
        let written = written.await;
        let mut scanner = Scanner::default();
        loop {
            let found = scanner.scan(&self.input, MAX_GREETING).map_err(|malformed| self.protocol(malformed))?;
            if let Some(length) = found {
                let value = decode(&self.input[..length]).map_err(|malformed| self.protocol(malformed))?;
                self.input.drain(..length);
                match value {
                    Value::Push(_) => continue,
                    Value::Error(text) => return Ok(Err(text)),
                    value => return Ok(Ok(value)),
                }
            }
            match self.stream.read_buf(&mut self.input).await {
                Ok(0) => {
                    let why = written.err().map_or_else(|| "the server closed it".into(), |error| error.to_string());
                    return Err(self.broken(&why));
                }
                Ok(_) => {}
                Err(error) => return Err(self.broken(&error.to_string())),
            }
        }
    }

    /// What to tell when the server answered `command` with an error. The command is named without its arguments.
    pub(super) fn rejected(&self, command: &str, error: &str) -> Failure {
        Failure::said(rule(error).kind, error).during(&format!("{} rejected {command}", self.place))
    }

    fn broken(&self, why: &str) -> Failure {
        let text = format!("the connection to {} broke during the greeting: {}", self.place, escaped(why));
        Failure::local(FailureKind::Disconnected, text)
    }

    fn protocol(&self, malformed: super::resp::Malformed) -> Failure {
        let text = format!("the greeting of {} was refused: {malformed}", self.place);
        Failure::local(FailureKind::Protocol, text)
    }
}
