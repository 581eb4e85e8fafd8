//! Values and groups of options that several commands share.

use std::fmt;
use std::net::SocketAddr;
use std::path::PathBuf;

use tidegate_core::{Limits, ParseError};
use tidegate_server::auth::Secret;
use tidegate_server::observe;

pub(super) const STORE_VARIABLE: &str = "TIDEGATE_STORE";
pub(super) const STORE_HEADING: &str = "Store";
pub(super) const LISTENERS: &str = "Listeners";
pub(super) const SECURITY: &str = "Security";

/// A Tidegate server that decides.
#[derive(clap::Args, Debug)]
#[command(next_help_heading = "Server")]
pub(crate) struct ServerArgs {
    /// Send the request to a running `tidegate serve` at http://HOST:PORT or https://HOST:PORT,
    /// which uses its own store
    #[arg(long, value_name = "URL", env = "TIDEGATE_SERVER")]
    pub(crate) server: Option<String>,
    /// The bearer token for the server
    #[arg(long, value_name = "TOKEN", env = "TIDEGATE_TOKEN", hide_env_values = true)]
    #[arg(value_parser = secret)]
    pub(crate) token: Option<Secret>,
    /// A file with the token, which keeps it out of process lists; overrides TIDEGATE_TOKEN
    #[arg(long, value_name = "FILE", env = "TIDEGATE_TOKEN_FILE")]
    pub(crate) token_file: Option<PathBuf>,
    /// Trust the certificate authorities in this PEM file instead of those of the system
    #[arg(long, value_name = "FILE", requires = "server")]
    pub(crate) ca: Option<PathBuf>,
}

impl ServerArgs {
    /// The token, read from its file if one is named.
    pub(crate) fn token(&self) -> anyhow::Result<Option<Secret>> {
        match &self.token_file {
            Some(file) => Secret::read(file)
                .map(Some)
                .map_err(|problem| anyhow::anyhow!("--token-file {problem}")),
            None => Ok(self.token.clone()),
        }
    }
}

/// The store that keeps the state, if it is not this process.
#[derive(clap::Args, Debug)]
#[command(next_help_heading = STORE_HEADING)]
pub(crate) struct StoreArgs {
    /// The store: `memory` for this process (lost at exit), or the URL of a server: redis://,
    /// rediss://, redis+unix://, redis+sentinel:// or redis+cluster:// [default: memory]
    #[arg(long, value_name = "URL", value_parser = StoreUrl::read)]
    #[arg(env = STORE_VARIABLE, hide_env_values = true)]
    #[arg(default_value = "memory", hide_default_value = true)]
    pub(crate) store: StoreUrl,
}

/// The URL of a store, which may contain a password. It is parsed when the store is opened, because
/// clap repeats a value that it rejects.
#[derive(Clone)]
pub(crate) struct StoreUrl(pub(crate) String);

impl StoreUrl {
    #[allow(clippy::unnecessary_wraps, reason = "a parser may fail")]
    pub(super) fn read(text: &str) -> Result<Self, String> {
        Ok(StoreUrl(text.trim().to_owned()))
    }
}

impl fmt::Debug for StoreUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("StoreUrl(***)")
    }
}

/// Limits, and the text that they were parsed from.
#[derive(Clone, Debug)]
pub(crate) struct LimitText {
    pub(crate) text: String,
    pub(crate) limits: Limits,
}

/// Parses limits; an error shows the text with a caret under the column.
pub(crate) fn limit(text: &str) -> Result<LimitText, String> {
    match text.parse() {
        Ok(limits) => Ok(LimitText { text: text.trim().to_owned(), limits }),
        Err(error) => Err(point_at(text, &error)),
    }
}

/// An error message, and below it the text with a caret under the mistake.
pub(super) fn point_at(text: &str, error: &ParseError) -> String {
    let shown: String = text.chars().map(|c| if c.is_control() { ' ' } else { c }).collect();
    // A long text is cut off well before the mistake.
    let skipped = error.column().saturating_sub(61);
    let shown: String = shown.chars().skip(skipped).take(100).collect();
    format!(
        "{error}\n\n  {shown}\n  {caret:>width$}",
        caret = '^',
        width = error.column() - skipped
    )
}

pub(super) fn secret(text: &str) -> Result<Secret, String> {
    text.parse()
}

/// An integer, with an error message that says what is expected.
pub(super) fn number(text: &str) -> Result<u64, String> {
    text.parse().map_err(|_| "expected a whole number, 0 or more".to_string())
}

/// The level and the format of the log; what is `None` keeps its setting.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct LogArgs {
    pub(crate) level: Option<observe::Level>,
    pub(crate) format: Option<observe::Format>,
}

pub(super) fn log(text: &str) -> Result<LogArgs, String> {
    let mut log = LogArgs::default();
    for word in text.split(',').map(str::trim) {
        match (word.parse(), word.parse()) {
            (Ok(level), _) if log.level.is_none() => log.level = Some(level),
            (_, Ok(format)) if log.format.is_none() => log.format = Some(format),
            _ => {
                return Err(format!(
                    "{word:?}: expected off, error, warn, info or debug, and human or json, such as `warn,json`"
                ));
            }
        }
    }
    Ok(log)
}

/// An address to listen on, or none.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ListenAddress(pub(crate) Option<SocketAddr>);

pub(super) fn address(text: &str) -> Result<ListenAddress, String> {
    match text {
        "off" => Ok(ListenAddress(None)),
        address => address
            .parse()
            .map(|at| ListenAddress(Some(at)))
            .map_err(|_| tidegate_server::config::expected_address(address)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_caret_is_under_the_mistake() {
        assert!(limit("10/s; 5/x").unwrap_err().ends_with("\n\n  10/s; 5/x\n          ^"));
    }
}
