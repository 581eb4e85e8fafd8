//! Settings outside of rules that cannot work, or probably do not do what was intended.

use tidegate::redis::RedisUrl;

use super::super::Config;
use super::patterns::host_bits;
use crate::findings::Finding;
use crate::parse::outline::Step::{Item, Key};
use crate::protocol::Protocol;

impl Config {
    pub(super) fn check_settings(&self, found: &mut Vec<Finding>) {
        if self.outline.is_empty() {
            found.push(Finding::warning(
                self.outline.file(),
                "the file is empty: nothing is configured; expected settings such as `rules:`",
            ));
        } else if !self.outline.has(&[Key("rules")]) && self.envoy.config.is_none() {
            found.push(Finding::warning(
                self.outline.file(),
                "no rules: only limits that callers bring are enforced; write `rules: []` if that is meant",
            ));
        }
        if self.store != "memory"
            && let Err(error) = self.store.parse::<RedisUrl>()
        {
            // The error does not show parts of the URL that could be a password.
            found.push(Finding::error(
                self.outline.value(&[Key("store")]),
                format!("{error}; or memory"),
            ));
        }
        for number in 0..self.outline.items(&[Key("trusted_proxies")]) {
            let steps = [Key("trusted_proxies"), Item(number)];
            let Some(text) = self.outline.scalar(&steps).map(str::trim) else { continue };
            let advice = host_bits(text).or_else(|| {
                let is_everything = text.ends_with("/0");
                is_everything.then(|| {
                    "every client can claim any address: expected the networks of your proxies"
                        .into()
                })
            });
            if let Some(advice) = advice {
                found.push(Finding::warning(
                    self.outline.value(&steps),
                    format!("trusted_proxies: {text:?}: {advice}"),
                ));
            }
        }
        self.check_listeners(found);
    }

    /// Listeners that `serve` would refuse.
    fn check_listeners(&self, found: &mut Vec<Finding>) {
        let listen = &self.listen;
        let listeners = [
            (Protocol::Http, listen.http),
            (Protocol::Grpc, listen.grpc),
            (Protocol::Resp, listen.resp),
            (Protocol::Admin, listen.admin),
            (Protocol::Proxy, listen.proxy.filter(|_| self.proxy.is_some())),
        ];
        let knows_clients = self.tokens.checks.is_some()
            || self.is_given_token
            || self.tls.as_ref().is_some_and(|tls| tls.client_ca.is_some());
        for (at, (listener, address)) in listeners.iter().enumerate() {
            let Some(address) = address else { continue };
            let name = listener.name();
            let place = || self.outline.value(&[Key("listen"), Key(name)]);
            let same = listeners[..at]
                .iter()
                .find(|(_, other)| *other == Some(*address) && address.port() != 0);
            if let Some((other, _)) = same {
                let other = other.name();
                let message = format!(
                    "listen.{name}: {address} is the address of listen.{other}, too: expected another port, in the file or by an option"
                );
                // Options can override the address.
                found.push(Finding::warning(place(), message));
            }
            let is_open = !address.ip().is_loopback()
                && *listener != Protocol::Proxy
                && !knows_clients
                && !self.insecure;
            if is_open {
                let message = format!(
                    "listen.{name}: {address} would accept any client, which serve refuses unless a token is given: write tokens.check_file, tls.client_ca, or `insecure: true` if that is meant"
                );
                found.push(Finding::warning(place(), message));
            }
        }
    }
}
