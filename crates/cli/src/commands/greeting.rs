//! The output of `serve` and `proxy` on start: what is enforced, over which store, and for each
//! listener a command to try it.

use std::borrow::Cow;
use std::io::{self, Write};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::path::{Path, PathBuf};

use serde_json::json;
use tidegate_server::config::Config;
use tidegate_server::grpc::SERVICE;
use tidegate_server::rules::Rule;
use tidegate_server::{Running, StoreProblem, store_problem};

use crate::output::counted;

/// The part of the output that is known before the start.
pub(super) struct Greeting {
    /// The file that the rules are from; `None` for the built-in rules.
    file: Option<PathBuf>,
    rules: Vec<String>,
    rules_of_options: usize,
    warnings: usize,
    /// The folder with the configuration of envoyproxy/ratelimit.
    domains: Option<PathBuf>,
    /// The store without credentials.
    store: String,
    /// An attribute that the rules use.
    attribute: String,
    token: Token,
    tls: Tls,
}

/// Where the example commands find the token for checks.
enum Token {
    None,
    File(PathBuf),
    /// In the environment, or on the command line, which is not repeated in the output.
    Variable,
}

enum Tls {
    Off,
    On,
    /// Clients need a certificate of this authority.
    WithClients(PathBuf),
}

impl Greeting {
    /// The greeting of a server with this configuration, read from `file`; `has_token` if an option
    /// or a variable has the token.
    pub(super) fn new(config: &Config, file: Option<&Path>, has_token: bool) -> Self {
        let names = |rule: &std::sync::Arc<Rule>| -> Vec<String> {
            let conditions = rule.when.iter().map(|condition| condition.attribute.to_string());
            rule.by.iter().map(ToString::to_string).chain(conditions).collect()
        };
        let known: Vec<String> = config.rules.iter().flat_map(names).collect();
        let attribute = match known.first() {
            Some(first) if !known.iter().any(|name| name == "ip") => first.clone(),
            _ => "ip".into(),
        };
        Greeting {
            file: file.map(Path::to_path_buf),
            rules: config.rules.iter().map(|rule| rule.name.to_string()).collect(),
            rules_of_options: 0,
            warnings: config.warnings().len(),
            domains: config.envoy.config.clone(),
            store: config.shown_store(),
            attribute,
            token: match &config.tokens.checks {
                _ if has_token => Token::Variable,
                Some(file) => Token::File(file.clone()),
                None => Token::None,
            },
            tls: match &config.tls {
                None => Tls::Off,
                Some(files) => files.client_ca.clone().map_or(Tls::On, Tls::WithClients),
            },
        }
    }

    /// Adds the rules of `--limit`.
    pub(super) fn with_rules_of_options(mut self, config: &Config, rules: &[Rule]) -> Self {
        self.rules_of_options = rules.len();
        self.warnings += config.warnings_of_options(rules).len();
        self
    }

    /// Writes what is enforced, where each listener is, and `ready`.
    pub(super) fn write(&self, out: &mut dyn Write, running: &Running) -> io::Result<()> {
        writeln!(out, "rules  {}", self.rules())?;
        if let Some(folder) = &self.domains {
            let domains = running.engine().domains();
            let (count, limits) = (domains.names().len(), domains.limits());
            writeln!(
                out,
                "envoy  {}: {}, {}",
                folder.display(),
                counted(count, "domain"),
                counted(limits, "limit")
            )?;
        }
        let problem = store_problem(running.engine());
        match &problem {
            None => writeln!(out, "store  {}", self.store)?,
            Some(StoreProblem { state, enforced, .. }) => {
                writeln!(out, "store  {}: {state}; enforced meanwhile: {enforced}", self.store)?;
            }
        }
        if let Tls::WithClients(file) = &self.tls {
            writeln!(
                out,
                "tls    clients need a certificate of {}: put its files for CERT and KEY",
                file.display()
            )?;
        }
        if matches!(self.token, Token::Variable) {
            writeln!(
                out,
                "token  put it into TIDEGATE_TOKEN in the shell in which you try the commands below"
            )?;
        }
        self.listeners(out, running)?;
        match problem {
            Some(problem) if problem.denies => {
                writeln!(
                    out,
                    "not ready: requests are denied until the store decides; /readyz says when"
                )
            }
            _ => writeln!(out, "ready"),
        }
    }

    fn listeners(&self, out: &mut dyn Write, running: &Running) -> io::Result<()> {
        let scheme = if matches!(self.tls, Tls::Off) { "http" } else { "https" };
        let curl = format!("curl{}", self.curl_tls());
        let has_rules = !self.rules.is_empty() || self.rules_of_options > 0;
        let descriptor = {
            let domains = running.engine().domains();
            let name = domains.names().first().map(ToString::to_string);
            name.and_then(|name| {
                domains.example(&name).map(|entries| envoy_request(&name, &entries))
            })
        };
        if let Some(at) = running.http {
            let (token, url) = (self.header(), format!("{scheme}://{}", reached(at)));
            let (body, path) = match &descriptor {
                Some(request) if !has_rules => (request.clone(), "/json"),
                _ if has_rules => (
                    json!({ "attributes": { &*self.attribute: self.value() } }).to_string(),
                    "/v1/check",
                ),
                _ => (json!({ "key": "user:7", "limit": "10/s" }).to_string(), "/v1/check"),
            };
            writeln!(out, "http   {at}    {curl}{token} -d '{body}' {url}{path}")?;
        }
        if let Some(at) = running.grpc {
            let tls = match &self.tls {
                Tls::Off => "-plaintext",
                Tls::On => "-insecure",
                Tls::WithClients(_) => "-insecure -cert CERT -key KEY",
            };
            let request = descriptor
                .unwrap_or_else(|| envoy_request("edge", &[(&*self.attribute, self.value())]));
            let (token, to) = (self.header(), reached(at));
            writeln!(
                out,
                "grpc   {at}    grpcurl {tls}{token} -d '{request}' {to} {SERVICE}/ShouldRateLimit"
            )?;
        }
        if let Some(at) = running.resp {
            let (to, port) = (reached(at).ip(), at.port());
            let tls = match &self.tls {
                Tls::Off => "",
                Tls::On => " --tls --insecure",
                Tls::WithClients(_) => " --tls --insecure --cert CERT --key KEY",
            };
            // Not as an option, which process lists would show.
            let token = self
                .token_in_shell()
                .map_or(String::new(), |token| format!("REDISCLI_AUTH=\"{token}\" "));
            writeln!(
                out,
                "resp   {at}    {token}redis-cli -h {to} -p {port}{tls} CL.THROTTLE user:7 15 30 60"
            )?;
        }
        if let Some(at) = running.proxy {
            writeln!(out, "proxy  {at}    {curl} -i {scheme}://{}/", reached(at))?;
        }
        if let Some(at) = running.admin {
            writeln!(
                out,
                "admin  {at}    {curl}{} {scheme}://{}/metrics",
                self.header(),
                reached(at)
            )?;
        }
        Ok(())
    }

    fn rules(&self) -> String {
        let count = self.rules.len();
        let mut text = match &self.file {
            Some(file) if file == Path::new("-") => {
                format!("standard input: {}", counted(count, "rule"))
            }
            Some(file) => format!("{}: {}", file.display(), counted(count, "rule")),
            None if count > 0 => {
                format!(
                    "{} built in ({}); --config FILE brings yours",
                    counted(count, "rule"),
                    self.rules.join(", ")
                )
            }
            None if self.rules_of_options > 0 => {
                counted(self.rules_of_options, "rule") + " of --limit"
            }
            None => "none".into(),
        };
        if self.file.is_some() && self.rules_of_options > 0 {
            text += &format!(", and {} of --limit", self.rules_of_options);
        }
        if self.warnings > 0 {
            text += &format!("; {}, see the log", counted(self.warnings, "warning"));
        }
        text
    }

    /// An example value of the attribute.
    fn value(&self) -> &'static str {
        match self.attribute.as_str() {
            "ip" => "192.0.2.7",
            "path" => "/",
            "method" => "GET",
            _ => "a",
        }
    }

    /// The token as a shell expression.
    fn token_in_shell(&self) -> Option<String> {
        match &self.token {
            Token::None => None,
            Token::File(file) => Some(format!("$(cat {})", in_shell(&file.to_string_lossy()))),
            Token::Variable => Some("$TIDEGATE_TOKEN".into()),
        }
    }

    fn header(&self) -> String {
        self.token_in_shell()
            .map_or(String::new(), |token| format!(" -H \"Authorization: Bearer {token}\""))
    }

    fn curl_tls(&self) -> &'static str {
        match &self.tls {
            Tls::Off => "",
            Tls::On => " -k",
            Tls::WithClients(_) => " -k --cert CERT --key KEY",
        }
    }
}

/// A request about one descriptor, in Envoy's format.
fn envoy_request(domain: &str, entries: &[(&str, &str)]) -> String {
    let entries: Vec<_> =
        entries.iter().map(|(key, value)| json!({ "key": key, "value": value })).collect();
    format!("{{\"domain\":{},\"descriptors\":{}}}", json!(domain), json!([{ "entries": entries }]))
}

/// The address at which a command on this machine reaches a listener; loopback for a listener on
/// all addresses.
fn reached(at: SocketAddr) -> SocketAddr {
    let ip = match at.ip() {
        ip if !ip.is_unspecified() => ip,
        IpAddr::V4(_) => Ipv4Addr::LOCALHOST.into(),
        IpAddr::V6(_) => Ipv6Addr::LOCALHOST.into(),
    };
    SocketAddr::new(ip, at.port())
}

/// Quotes a word for a shell, within double quotes and `$( )`.
fn in_shell(word: &str) -> Cow<'_, str> {
    let plain = |char: char| char.is_ascii_alphanumeric() || "/._-+:@%,".contains(char);
    if !word.is_empty() && word.chars().all(plain) {
        return word.into();
    }
    format!("'{}'", word.replace('\'', "'\\''")).into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_listener_on_all_addresses_is_reached_over_loopback() {
        for (at, expected) in [
            ("0.0.0.0:8080", "127.0.0.1:8080"),
            ("[::]:8080", "[::1]:8080"),
            ("192.0.2.1:80", "192.0.2.1:80"),
        ] {
            assert_eq!(reached(at.parse().unwrap()), expected.parse().unwrap());
        }
    }

    #[test]
    fn words_are_quoted_where_a_shell_would_split_them() {
        assert_eq!(in_shell("/run/token"), "/run/token");
        assert_eq!(in_shell("/run/my token"), "'/run/my token'");
        assert_eq!(in_shell("it's"), r"'it'\''s'");
    }
}
