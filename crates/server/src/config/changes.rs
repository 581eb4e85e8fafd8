//! Differences between the running configuration and the file that need a restart.

use std::collections::BTreeMap;

use serde_json::Value;

use super::Config;

/// Settings that change while the server runs. All others need a restart.
const LIVE: &[&str] = &[
    "rules",
    "http",
    "paths",
    "headers",
    "envoy.compat",
    "envoy.overrides",
    "envoy.headers",
    "envoy.body",
    "trusted_proxies",
    "client_ip",
    "log",
    "connections",
];

/// The value of a setting that a configuration does not have.
const UNSET: &str = "not set";

/// A setting that differs.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Change {
    /// Its path in the file: `listen.http`.
    pub(crate) setting: String,
    /// The running value.
    pub(crate) running: String,
    /// The value in the file.
    pub(crate) read: String,
}

/// The settings that need a restart and differ.
pub(crate) fn needing_restart(running: &Config, read: &Config) -> Vec<Change> {
    let (before, after) = (settings(running), settings(read));
    let names: std::collections::BTreeSet<&String> = before.keys().chain(after.keys()).collect();
    let value = |of: &BTreeMap<String, String>, name: &String| {
        of.get(name).cloned().unwrap_or_else(|| UNSET.into())
    };
    let mut changes: Vec<Change> = names
        .into_iter()
        .map(|name| Change {
            setting: name.clone(),
            running: value(&before, name),
            read: value(&after, name),
        })
        .filter(|change| change.running != change.read)
        .collect();
    // Passwords and secrets are not printed, so they are compared separately.
    if running.store != read.store && running.shown_store() == read.shown_store() {
        let (running, read) =
            (running.shown_store(), format!("{}, with other credentials", read.shown_store()));
        changes.push(Change { setting: "store".into(), running, read });
    }
    changes
}

/// All settings that need a restart, by their path in the file, as they are printed.
fn settings(config: &Config) -> BTreeMap<String, String> {
    let printed = serde_json::to_value(config).expect("a configuration is made of JSON's values");
    let mut found = BTreeMap::new();
    flatten(String::new(), &printed, &mut found);
    found
}

fn flatten(place: String, value: &Value, into: &mut BTreeMap<String, String>) {
    if LIVE.contains(&place.as_str()) {
        return;
    }
    match value {
        Value::Object(members) => {
            for (name, value) in members {
                flatten(
                    if place.is_empty() { name.clone() } else { format!("{place}.{name}") },
                    value,
                    into,
                );
            }
        }
        Value::String(text) => _ = into.insert(place, text.clone()),
        other => _ = into.insert(place, other.to_string()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_setting_that_needs_a_restart_is_named() {
        let base = "listen: { http: 127.0.0.1:8080 }\nrules: []\n";
        for (text, expected) in [
            (base, vec![]),
            (
                "listen: { http: 127.0.0.1:9090 }\n",
                vec![("listen.http", "127.0.0.1:8080", "127.0.0.1:9090")],
            ),
            (
                "listen: { http: 127.0.0.1:8080, grpc: off }\n",
                vec![("listen.grpc", "127.0.0.1:8081", "off")],
            ),
            (
                "store: redis://127.0.0.1:6390\n",
                vec![("store", "memory", "redis://127.0.0.1:6390")],
            ),
            ("threads: 3\n", vec![("threads", "auto", "3")]),
            ("memory: { max_keys: 7 }\n", vec![("memory.max_keys", "10000000", "7")]),
            ("resilience: { deadline_ms: 7 }\n", vec![("resilience.deadline_ms", "15", "7")]),
            ("on_store_failure: open\n", vec![("on_store_failure", "local", "open")]),
            (
                "tls: { cert: a.pem, key: b.pem }\n",
                vec![("tls.cert", UNSET, "a.pem"), ("tls.key", UNSET, "b.pem")],
            ),
            ("tokens: { check_file: /run/t }\n", vec![("tokens.check_file", UNSET, "/run/t")]),
            ("insecure: true\n", vec![("insecure", "false", "true")]),
            (
                "envoy: { config: /etc/rl, overrides: 5 }\n",
                vec![("envoy.config", UNSET, "/etc/rl")],
            ),
            ("trusted_proxies: [10.0.0.0/8]\nclient_ip: { ipv6_prefix: 56 }\n", vec![]),
            (
                "log: { level: debug, format: json }\nconnections: { max: 5 }\nhttp: { denial: text }\n",
                vec![],
            ),
            (
                "paths: { dot_segments: keep }\nheaders: { underscores: keep, lists: [accept] }\n",
                vec![],
            ),
            ("rules: [{ name: a, limit: 1/s }]\n", vec![]),
        ] {
            let changes = needing_restart(
                &Config::parse(base, "f").unwrap(),
                &Config::parse(text, "f").unwrap(),
            );
            let found: Vec<(&str, &str, &str)> = changes
                .iter()
                .map(|change| (&*change.setting, &*change.running, &*change.read))
                .collect();
            assert_eq!(found, expected, "{text}");
        }
    }

    #[test]
    fn another_password_is_a_change_that_shows_no_password() {
        let config = |password: &str| {
            Config::parse(&format!("store: redis://:{password}@h\n"), "f").unwrap()
        };
        let changes = needing_restart(&config("sesame"), &config("open"));
        assert_eq!(changes.len(), 1);
        assert_eq!(changes[0].read, "redis://:***@h:6379, with other credentials");
        assert!(!format!("{changes:?}").contains("sesame"));
        assert_eq!(needing_restart(&config("sesame"), &config("sesame")), []);
    }
}
