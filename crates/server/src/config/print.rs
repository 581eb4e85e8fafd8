//! A configuration as text that can be read again: what `--print-config` shows.
//!
//! Everything is written, defaults too, so that nobody has to know them. Tokens are not part of a
//! configuration, only the files they are in; a password in the URL of the store is three stars,
//! and a secret in it is left out, which a comment says.

use std::fmt::Write;
use std::net::SocketAddr;
use std::path::Path;

use tidegate::redis::RedisUrl;

use super::{Config, Envoy};
use crate::rules::{
    Budget, Condition, Cost, Failure, Measure, Missing, Mode, RequestPolicy, Rule, Settle,
    overflow_name,
};

impl Config {
    /// As YAML, which [`Config::parse`] reads as the same configuration, but for password and
    /// secret of the store.
    pub fn to_yaml(&self) -> String {
        let mut out = String::new();
        if self.hides_secret() {
            let _ = writeln!(out, "# the URL of the store has a secret, which is not shown");
        }
        let _ = writeln!(out, "store: {}", quoted(&self.shown_store()));
        if let Some(file) = &self.store_secret_file {
            let _ = writeln!(out, "store_secret_file: {}", path(file));
        }
        let memory = &self.memory;
        let overflow = overflow_name(memory.overflow);
        let _ = writeln!(
            out,
            "memory:\n  max_keys: {}\n  max_bytes: {}\n  overflow: {overflow}",
            memory.max_keys, memory.max_bytes
        );
        if let Some(file) = &memory.snapshot_file {
            let _ = writeln!(out, "  snapshot_file: {}", path(file));
        }
        let _ = writeln!(out, "  snapshot_secs: {}", memory.snapshot_every.as_secs());
        let _ = writeln!(out, "threads: {}", self.threads);
        let listen = &self.listen;
        let protocols = [
            ("http", listen.http),
            ("grpc", listen.grpc),
            ("resp", listen.resp),
            ("admin", listen.admin),
            ("proxy", listen.proxy),
        ];
        let _ = writeln!(out, "listen:");
        for (name, at) in protocols {
            let _ = writeln!(out, "  {name}: {}", protocol(at));
        }
        let clients = &self.clients;
        let proxies: Vec<String> =
            clients.trusted().networks().iter().map(|net| quoted(&net.to_string())).collect();
        let _ = writeln!(out, "trusted_proxies: [{}]", proxies.join(", "));
        let (header, prefix) = (quoted(clients.header_name()), clients.prefix());
        let _ = writeln!(out, "client_ip:\n  header: {header}\n  ipv6_prefix: {prefix}");
        let _ = writeln!(out, "on_store_failure: {}", failure(self.on_store_failure));
        let resilient = &self.resilience;
        let auto = |number: Option<u32>| {
            number.map_or_else(|| "auto".to_string(), |number| number.to_string())
        };
        let _ = writeln!(
            out,
            "resilience:\n  deadline_ms: {}\n  nodes: {}\n  lease_error_percent: {}\n  async_period_ms: {}\n  async_cap: {}\n  max_in_flight: {}",
            resilient.deadline.as_millis(),
            auto(resilient.nodes),
            resilient.lease_error_percent,
            resilient.async_period.as_millis(),
            auto(resilient.async_cap),
            resilient.max_in_flight
        );
        let _ = writeln!(out, "insecure: {}", self.insecure);
        if let Some(tls) = &self.tls {
            let _ = writeln!(out, "tls:\n  cert: {}\n  key: {}", path(&tls.cert), path(&tls.key));
            if let Some(file) = &tls.client_ca {
                let _ = writeln!(out, "  client_ca: {}", path(file));
            }
        }
        if self.tokens != Default::default() {
            let _ = writeln!(out, "tokens:");
            for (name, file) in
                [("check_file", &self.tokens.checks), ("admin_file", &self.tokens.admin)]
            {
                if let Some(file) = file {
                    let _ = writeln!(out, "  {name}: {}", path(file));
                }
            }
        }
        let bounds = &self.bounds;
        let _ = writeln!(
            out,
            "connections:\n  max: {}\n  max_per_ip: {}\n  idle_secs: {}",
            bounds.max_connections,
            bounds.max_connections_per_ip,
            bounds.idle.as_secs()
        );
        let log = &self.log;
        let _ = writeln!(
            out,
            "log:\n  level: {}\n  format: {}\n  denials_per_second: {}\n  show_keys: {}",
            quoted(log.level.name()),
            log.format.name(),
            log.denials_per_second,
            log.show_keys
        );
        let families = self.response_options.headers.to_string().replace(' ', ", ");
        let _ = writeln!(
            out,
            "http:\n  headers: [{families}]\n  denial: {}\n  deny_status: {}\n  hosts: [{}]",
            self.response_options.denial,
            self.response_options.deny_status,
            self.hosts.iter().map(|host| quoted(&host)).collect::<Vec<_>>().join(", ")
        );
        let RequestPolicy { paths, headers } = &self.requests;
        let _ = writeln!(
            out,
            "paths:\n  escaped_slashes: {}\n  dot_segments: {}",
            paths.escaped_slashes, paths.dot_segments
        );
        let underscores = if headers.keeps_underscores { "keep" } else { "drop" };
        let lists: Vec<String> = headers.lists.iter().map(|name| quoted(name)).collect();
        let _ = writeln!(
            out,
            "headers:\n  underscores: {underscores}\n  lists: [{}]",
            lists.join(", ")
        );
        self.print_envoy(&mut out);
        if let Some(proxy) = &self.proxy {
            out.push_str(&proxy.to_yaml());
        }
        if self.rules.iter().next().is_none() {
            let _ = writeln!(out, "rules: []");
        } else {
            let _ = writeln!(out, "rules:");
        }
        for one in self.rules.iter() {
            rule(&mut out, one);
        }
        out
    }

    fn print_envoy(&self, out: &mut String) {
        let Envoy { config, options } = &self.envoy;
        let _ = writeln!(out, "envoy:");
        if let Some(folder) = config {
            let _ = writeln!(out, "  config: {}", path(folder));
        }
        if options.count_rejected {
            let _ = writeln!(out, "  compat: count_rejected");
        }
        let overrides = match options.overrides {
            None => quoted("off"),
            Some(u32::MAX) => quoted("on"),
            Some(most) => most.to_string(),
        };
        let families = options
            .headers
            .map_or(String::new(), |families| families.to_string().replace(' ', ", "));
        let _ = writeln!(out, "  overrides: {overrides}\n  headers: [{families}]");
        if options.body {
            let _ = writeln!(out, "  body: problem");
        }
    }

    /// Whether the URL of the store brings a secret. Without it the same configuration keeps its
    /// state elsewhere.
    fn hides_secret(&self) -> bool {
        self.store.parse::<RedisUrl>().is_ok_and(|url| url.has_secret())
    }

    /// Where state is kept, without a password or a secret.
    pub fn shown_store(&self) -> String {
        match self.store.as_str() {
            "memory" => "memory".into(),
            // With the colon it is a URL again.
            url => match url.parse::<RedisUrl>() {
                Ok(url) => url.to_string().replacen("//***@", "//:***@", 1),
                Err(_) => "***".into(),
            },
        }
    }
}

fn rule(out: &mut String, rule: &Rule) {
    let _ = writeln!(out, "  - name: {}", quoted(&rule.name));
    if !rule.when.is_empty() {
        let _ = writeln!(out, "    when: {}", conditions(&rule.when));
    }
    if !rule.by.is_empty() {
        let by: Vec<String> = rule.by.iter().map(|name| quoted(name)).collect();
        let _ = writeln!(out, "    by: [{}]", by.join(", "));
    }
    if !rule.by.is_empty() || rule.missing != Missing::default() {
        let _ = writeln!(out, "    missing: {}", rule.missing.name());
    }
    let _ = writeln!(out, "    limit: {}", budget(&rule.budget));
    match &rule.cost {
        Cost::Fixed(units) => _ = writeln!(out, "    cost: {units}"),
        Cost::From { attribute, min, max } => {
            let _ = writeln!(
                out,
                "    cost: {{ from: {}, min: {min}, max: {max} }}",
                quoted(attribute)
            );
        }
    }
    if !rule.overrides.is_empty() {
        let _ = writeln!(out, "    overrides:");
    }
    for other in &rule.overrides {
        let _ = writeln!(
            out,
            "      - when: {}\n        limit: {}",
            conditions(&other.when),
            budget(&other.budget)
        );
    }
    let mode = match rule.mode {
        Mode::Enforce => "enforce",
        Mode::Shadow => "shadow",
    };
    let _ = writeln!(
        out,
        "    mode: {mode}\n    refunds: {}",
        quoted(if rule.refunds { "on" } else { "off" })
    );
    let _ = writeln!(out, "    sync: {}", rule.sync.name());
    if !rule.charge_when.is_empty() {
        let _ = writeln!(out, "    charge_when: {}", conditions(&rule.charge_when));
    }
    if let Some(Settle { by, per }) = &rule.settle {
        let by = match by {
            Measure::Bytes => "response_bytes".into(),
            Measure::Millis => "response_ms".into(),
            Measure::Header(name) => quoted(&format!("header.{name}")),
        };
        let _ = writeln!(out, "    settle: {{ by: {by}, per: {per} }}");
    }
    if let Some(status) = rule.deny_status {
        let _ = writeln!(out, "    deny_status: {status}");
    }
    if let Some(policy) = rule.overflow {
        let _ = writeln!(out, "    overflow: {}", overflow_name(policy));
    }
    if let Some(policy) = rule.on_store_failure {
        let _ = writeln!(out, "    on_store_failure: {}", failure(policy));
    }
}

fn conditions(when: &[Condition]) -> String {
    let pairs = when.iter().map(|condition| {
        let any_of: Vec<String> =
            condition.any_of.iter().map(|pattern| quoted(pattern.text())).collect();
        format!("{}: [{}]", quoted(&condition.attribute), any_of.join(", "))
    });
    format!("{{ {} }}", pairs.collect::<Vec<_>>().join(", "))
}

fn budget(budget: &Budget) -> String {
    match budget {
        Budget::Limits(limits) => quoted(&limits.to_string()),
        Budget::Unlimited => "unlimited".into(),
        Budget::Deny => "deny".into(),
        Budget::Exempt => "exempt".into(),
    }
}

fn failure(policy: Failure) -> &'static str {
    match policy {
        Failure::Open => "open",
        Failure::Closed => "closed",
        Failure::Local => "local",
    }
}

fn protocol(at: Option<SocketAddr>) -> String {
    at.map_or_else(|| quoted("off"), |at| quoted(&at.to_string()))
}

fn path(file: &Path) -> String {
    quoted(&file.to_string_lossy())
}

/// Text in double quotes. JSON's are YAML's.
fn quoted(text: &str) -> String {
    serde_json::Value::from(text).to_string()
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
        assert!(printed.starts_with("store: \"redis://:***@127.0.0.1:6390/3\"\n"), "{printed}");
        assert!(!printed.contains("sesame"));
        let secret = "store: redis+cluster://127.0.0.1?secret=open-sesame-0123456789\n";
        let printed = Config::parse(secret, "test").unwrap().to_yaml();
        let expected = "# the URL of the store has a secret, which is not shown\nstore: \"redis+cluster://127.0.0.1:6379\"\n";
        assert!(printed.starts_with(expected) && !printed.contains("sesame"), "{printed}");
        // A flag may say what no file can.
        let mut config = Config::without_file();
        config.store = "not a url with sesame".into();
        assert!(!config.to_yaml().contains("sesame"));
    }
}
