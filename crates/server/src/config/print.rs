//! The effective configuration as a file that can be read again: what `--print-config` prints.
//!
//! The output has every setting of every section, defaults included, and what the rules state.
//! Tokens are not part of a configuration, only the files that have them. A password in the URL of
//! the store is printed as three stars; a secret in it is left out, with a comment.

use serde::Serializer;
use serde_saphyr::ser_options;
use tidegate::redis::RedisUrl;

use super::Config;

impl Config {
    /// Prints YAML that [`Config::parse`] reads as the same configuration, except for the password
    /// and the secret of the store.
    pub fn to_yaml(&self) -> String {
        let options = ser_options! { compact_list_indent: false, prefer_block_scalars: false };
        let text = serde_saphyr::to_string_with_options(self, options)
            .expect("a configuration is made of maps, lists and scalars");
        if self.hides_secret() {
            format!("# the URL of the store has a secret, which is not shown\n{text}")
        } else {
            text
        }
    }

    /// Whether the URL of the store has a secret. Without it the same configuration keeps its state
    /// elsewhere.
    fn hides_secret(&self) -> bool {
        self.store.parse::<RedisUrl>().is_ok_and(|url| url.has_secret())
    }

    /// Where state is kept, without a password or a secret.
    pub fn shown_store(&self) -> String {
        shown_store(&self.store)
    }
}

fn shown_store(store: &str) -> String {
    match store {
        "memory" => "memory".into(),
        // With the colon it is a URL again.
        url => match url.parse::<RedisUrl>() {
            Ok(url) => url.to_string().replacen("//***@", "//:***@", 1),
            Err(_) => "***".into(),
        },
    }
}

pub(super) fn as_shown_store<S: Serializer>(store: &str, to: S) -> Result<S::Ok, S::Error> {
    to.serialize_str(&shown_store(store))
}

#[cfg(test)]
mod tests {
    use super::*;

    const FULL: &str = r#"
store: redis://alice:sesame@127.0.0.1:6390/3
store_secret_file: /run/slots
memory: { max_keys: 1234, max_bytes: 5MiB, overflow: deny_new, snapshot_file: /var/lib/state, snapshot_secs: 30 }
threads: 3
listen: { http: "[::1]:8080", grpc: off, resp: 127.0.0.1:6380, admin: 127.0.0.1:9090 }
trusted_proxies: [10.0.0.0/8, "fd00::/8"]
client_ip: { header: Forwarded, ipv6_prefix: 56 }
on_store_failure: closed
resilience: { deadline_ms: 7, nodes: 3, lease_error_percent: 2, async_period_ms: 20, async_cap: 0, max_in_flight: 77 }
insecure: true
tls: { cert: "/etc/a b.pem", key: /etc/key.pem, client_ca: /etc/ca.pem }
tokens: { check_file: /run/check, admin_file: /run/admin }
connections: { max: 77, max_per_ip: 7, idle_secs: 30 }
log: { level: debug, format: json, denials_per_second: 3, show_keys: true }
http: { headers: [draft-7, github], denial: text, deny_status: 429, hosts: [Tidegate, "*.example.com"] }
paths: { escaped_slashes: decode, dot_segments: resolve }
headers: { underscores: keep, lists: [Accept, x-tags] }
envoy: { config: /etc/ratelimit, compat: count_rejected, overrides: 500, headers: [ietf], body: problem }
rules:
  - name: a
    when: { method: [GET, "!POST"], path: '/ä"\*', "header.x-y": "yes" }
    by: [ip, user]
    missing: deny
    limit: 10/s; 240/h sliding step 1m
    cost: { from: header.x-cost, min: 2, max: 9 }
    overrides:
      - { when: { user: "a: b # c" }, limit: unlimited }
      - { when: { user: "*" }, limit: deny }
    mode: shadow
    refunds: off
    on_store_failure: open
    overflow: allow_new
    sync: lease
    charge_when: { status: [401, 5*, 4xx, '!3XX'], header.x-counts: "yes" }
    settle: { by: header.X-Tokens, per: 3 }
    deny_status: 403
  - { name: b, limit: 20 concurrent ttl 30s, cost: 3, settle: response_bytes }
proxy: { upstream: "h2c://app:81/base", connect_ms: 7, answer_secs: 8, idle_secs: 9, upgraded_idle_secs: 10, min_body_bytes_per_second: 14, body_grace_secs: 15, max_in_flight: 11, max_in_flight_per_client: 10, keep: 12, keep_secs: 13 }
"#;

    #[test]
    fn what_is_printed_reads_as_the_same() {
        for text in [FULL, "", crate::BUILT_IN] {
            let config = Config::parse(text, "test").unwrap();
            let printed = config.to_yaml();
            let again = Config::parse(&printed, "printed")
                .unwrap_or_else(|error| panic!("{error}\n{printed}"));
            assert_eq!(again.to_yaml(), printed);
            let without_store = |mut config: Config| {
                config.store = "memory".into();
                format!("{config:?}")
            };
            assert_eq!(without_store(again), without_store(config), "{printed}");
        }
    }

    #[test]
    fn passwords_are_not_printed() {
        let printed = Config::parse(FULL, "test").unwrap().to_yaml();
        assert!(printed.starts_with("store: redis://:***@127.0.0.1:6390/3\n"), "{printed}");
        assert!(!printed.contains("sesame"));
        let secret = "store: redis+cluster://127.0.0.1?secret=open-sesame-0123456789\n";
        let printed = Config::parse(secret, "test").unwrap().to_yaml();
        let expected = "# the URL of the store has a secret, which is not shown\nstore: redis+cluster://127.0.0.1:6379\n";
        assert!(printed.starts_with(expected) && !printed.contains("sesame"), "{printed}");
        // A flag may say what no file can.
        let mut config = Config::without_file();
        config.store = "not a url with sesame".into();
        assert!(!config.to_yaml().contains("sesame"));
    }
}
