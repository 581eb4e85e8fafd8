//! The configuration of envoyproxy/ratelimit, read into the same model: domains, nested
//! descriptors, wildcards, units.
//!
//! A request names a domain and brings descriptors, each a list of keys and values. A descriptor
//! walks down its domain's tree entry by entry: the node with exactly this key and value, else the
//! first wildcard that matches, else the node with the key alone; it never goes back. The limit of
//! the node it ends at counts, if it has one.
//!
//! Beyond the original, `rate_limit` may say `limit: 100/min burst 20`: any notation, several
//! windows, any algorithm.

use std::collections::HashMap;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use serde::Deserialize;
use serde_json::{Map, Value};
use tidegate::http::DEFAULT_IPV6_PREFIX;
use tidegate::http::headers::Families;
use tidegate::store::MAX_KEY_BYTES;
use tidegate::{Algorithm, Limit, Limits, Period};

use super::{Budget, Cost, Match, Mode, Pattern, Rule, envoy_check};
use crate::digits;
use crate::findings::{self, ConfigError, Finding, MAX_FILE_BYTES};
use crate::nearest::nearest;
use crate::parse::outline::Outline;
use crate::parse::yaml::located;

/// How deep descriptors may be nested. The parser of YAML takes 64 lists and maps within one
/// another, of which each level needs two.
pub const MAX_DEPTH: usize = 30;
/// How many files a folder may have.
pub const MAX_FILES: usize = 1000;

/// All domains.
#[derive(Clone, Debug, Default)]
pub struct Domains {
    domains: HashMap<Box<str>, DescriptorNode>,
    /// What in the files works, but is hardly meant.
    warnings: Vec<Finding>,
}

/// One place in a domain's tree.
#[derive(Clone, Debug, Default)]
struct DescriptorNode {
    /// What is below it, by key.
    below: HashMap<Box<str>, Values>,
    limit: Option<Arc<DescriptorLimit>>,
    /// All values that the wildcard matches share one budget.
    shared: bool,
}

/// Places with the same key, by value.
#[derive(Clone, Debug, Default)]
struct Values {
    exact: HashMap<Box<str>, DescriptorNode>,
    /// Values with `*` in them, in the order of the file.
    wild: Vec<(Pattern, DescriptorNode)>,
    /// Any other value.
    bare: Option<Box<DescriptorNode>>,
}

impl DescriptorNode {
    fn example(&self) -> Option<Vec<(&str, &str)>> {
        let mut steps: Vec<(&str, &str, &DescriptorNode)> = Vec::new();
        for (key, values) in &self.below {
            steps.extend(values.exact.iter().map(|(value, node)| (&**key, &**value, node)));
            steps.extend(values.bare.iter().map(|node| (&**key, "a", &**node)));
        }
        steps.sort_by_key(|(key, value, _)| (*key, *value));
        steps.into_iter().find_map(|(key, value, node)| {
            let below = if node.limit.is_some() { Some(Vec::new()) } else { node.example() };
            below.map(|below| std::iter::once((key, value)).chain(below).collect())
        })
    }
}

/// A node with a limit.
#[derive(Clone, Debug)]
pub struct DescriptorLimit {
    /// The rule it is in Tidegate's model.
    pub rule: Arc<Rule>,
    /// The name it gave itself.
    pub name: Option<Arc<str>>,
    /// Rules of these names that also match the request are dropped.
    pub replaces: Vec<Arc<str>>,
    /// It does not reject by itself, only together with all others of its kind.
    pub quota: bool,
    /// As the file says it, for the answer.
    pub stated: Option<(u32, Unit)>,
    /// What to tell the proxy while there is something left.
    pub metadata: Option<Map<String, Value>>,
}

/// How requests in Envoy's protocol are answered, beyond what the domains say.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct EnvoyOptions {
    /// What is rejected takes what is left, and one descriptor's rejection does not spare the
    /// others: as envoyproxy/ratelimit counts.
    pub count_rejected: bool,
    /// The most requests per unit that a limit in the request may ask for; none: such limits are
    /// ignored.
    pub overrides: Option<u32>,
    /// Headers to add to the answer to the client, beside those that Envoy makes.
    pub headers: Option<Families>,
    /// Whether a denial brings a body: `application/problem+json`.
    pub body: bool,
}

impl Default for EnvoyOptions {
    fn default() -> Self {
        EnvoyOptions {
            count_rejected: false,
            overrides: Some(u32::MAX),
            headers: None,
            body: false,
        }
    }
}

/// A unit of time, by its number in the protocol.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[allow(missing_docs, reason = "they say what they are")]
pub enum Unit {
    Second = 1,
    Minute = 2,
    Hour = 3,
    Day = 4,
    Month = 5,
    Year = 6,
    Week = 7,
}

impl Unit {
    const ALL: [Unit; 7] =
        [Unit::Second, Unit::Minute, Unit::Hour, Unit::Day, Unit::Month, Unit::Year, Unit::Week];

    /// How long it is; a month is 30 days, a year 365.
    pub fn period(self) -> Period {
        match self {
            Unit::Second => Period::SECOND,
            Unit::Minute => Period::MINUTE,
            Unit::Hour => Period::HOUR,
            Unit::Day => Period::DAY,
            Unit::Week => Period::WEEK,
            Unit::Month => Period::days(30),
            Unit::Year => Period::days(365),
        }
    }

    /// The unit of this number.
    pub fn from_number(number: i32) -> Option<Unit> {
        Self::ALL.into_iter().find(|unit| *unit as i32 == number)
    }

    fn from_word(word: &str) -> Option<Unit> {
        Some(match word.to_ascii_lowercase().as_str() {
            "second" => Unit::Second,
            "minute" => Unit::Minute,
            "hour" => Unit::Hour,
            "day" => Unit::Day,
            "week" => Unit::Week,
            "month" => Unit::Month,
            "year" => Unit::Year,
            _ => return None,
        })
    }

    /// The unit in which a client can plan with a limit: its period, or the time to fill a bucket,
    /// if that is one.
    pub fn of(limit: &Limit) -> Option<Unit> {
        let period_us = match limit.algorithm() {
            Algorithm::Bucket(bucket) => bucket.fill_us(),
            Algorithm::Concurrent(_) => return None,
            other => other.period_us(),
        };
        Self::ALL.into_iter().find(|unit| unit.period().as_micros() == period_us)
    }

    /// So many per unit, in windows counted from the epoch; nothing at all if it is none.
    pub fn budget(self, requests: u32) -> Budget {
        let limit = Limit::window(u64::from(requests), self.period()).build();
        limit.map_or(Budget::Deny, |limit| Budget::Limits(Limits::from(limit)))
    }
}

/// The words for units.
const UNITS: [&str; 7] = ["second", "minute", "hour", "day", "week", "month", "year"];

/// What a descriptor came to.
#[derive(Clone, Debug)]
pub struct DescriptorMatch {
    /// Its limit.
    pub limited: Arc<DescriptorLimit>,
    /// What to charge.
    pub charge: Match,
}

impl Domains {
    /// Reads every `*.yaml` file of a folder.
    ///
    /// # Errors
    /// If one cannot be read or says something that cannot be.
    pub fn load(folder: &Path) -> Result<Domains, ConfigError> {
        let unreadable =
            |path: &Path, why| ConfigError::Unreadable { file: path.display().to_string(), why };
        let files = files(folder).map_err(|source| unreadable(folder, source))?;
        if files.len() > MAX_FILES {
            let problem = format!(" {} files: expected at most {MAX_FILES}", files.len());
            return Err(ConfigError::Invalid { file: folder.display().to_string(), problem });
        }
        let mut domains = Domains::default();
        for path in files {
            let file = path.display().to_string();
            let bytes = std::fs::metadata(&path).map_err(|source| unreadable(&path, source))?.len();
            if bytes > MAX_FILE_BYTES {
                return Err(ConfigError::TooLarge { file, bytes });
            }
            let text = tidegate_bounded::files::read_text_file(&path, MAX_FILE_BYTES)
                .map_err(|source| unreadable(&path, source))?;
            domains.add(&text, &file)?;
        }
        if domains.domains.is_empty() {
            let message = "no *.yaml files in the folder: nothing is configured";
            domains.warnings.push(Finding::warning(folder.display().to_string(), message));
        }
        findings::sort(&mut domains.warnings);
        Ok(domains)
    }

    /// What in the files works, but is hardly meant.
    pub fn warnings(&self) -> &[Finding] {
        &self.warnings
    }

    /// How many limits there are in all domains together.
    pub fn limits(&self) -> usize {
        self.rules().count()
    }

    /// Adds the domain of one file.
    ///
    /// # Errors
    /// If it says something that cannot be, or its domain is known already.
    pub fn add(&mut self, text: &str, file: &str) -> Result<(), ConfigError> {
        let invalid = |problem: String| ConfigError::Invalid { file: file.into(), problem };
        let read: File =
            serde_saphyr::from_str(text).map_err(|error| invalid(known(&located(&error, text))))?;
        if read.domain.trim().is_empty() {
            return Err(invalid(" config file cannot have empty domain".into()));
        }
        if self.domains.contains_key(read.domain.as_str()) {
            return Err(invalid(format!(" duplicate domain '{}' in config file", read.domain)));
        }
        let warnings = envoy_check::findings(&read, &Outline::of(text, file));
        let root = DescriptorNode::read(read.descriptors, &read.domain, 0)
            .map_err(|problem| invalid(format!(" {problem}")))?;
        self.domains.insert(read.domain.into(), root);
        self.warnings.extend(warnings);
        Ok(())
    }

    /// Whether there is such a domain.
    pub fn contains(&self, domain: &str) -> bool {
        self.domains.contains_key(domain)
    }

    /// Names of all domains, sorted.
    pub fn names(&self) -> Vec<&str> {
        let mut names: Vec<&str> = self.domains.keys().map(|name| &**name).collect();
        names.sort_unstable();
        names
    }

    /// The entries of a descriptor that has a limit in this domain, always the same one: an example
    /// for people.
    pub fn example(&self, domain: &str) -> Option<Vec<(&str, &str)>> {
        self.domains.get(domain)?.example()
    }

    /// The rules of all of them.
    pub fn rules(&self) -> impl Iterator<Item = &Arc<Rule>> {
        let mut open: Vec<&DescriptorNode> = self.domains.values().collect();
        std::iter::from_fn(move || {
            let node = open.pop()?;
            open.extend(node.below());
            Some(node.limit.as_ref().map(|limited| &limited.rule))
        })
        .flatten()
    }

    /// The limit of a descriptor, if there is one.
    pub fn find(&self, domain: &str, entries: &[impl Pair], cost: u64) -> Option<DescriptorMatch> {
        let mut node = self.domains.get(domain)?;
        let mut key = Vec::with_capacity(64);
        put(&mut key, domain);
        for entry in entries {
            let (name, value) = entry.pair();
            let values = node.below.get(name)?;
            let mut counted = value;
            node = if let Some(next) = values.exact.get(value) {
                next
            } else if let Some((pattern, next)) =
                values.wild.iter().find(|(pattern, _)| pattern.matches(value))
            {
                if next.shared {
                    counted = pattern.text();
                }
                next
            } else {
                values.bare.as_deref()?
            };
            put(&mut key, name);
            put(&mut key, counted);
        }
        let limited = Arc::clone(node.limit.as_ref()?);
        let charge = Match {
            rule: Arc::clone(&limited.rule),
            key: bounded(key),
            budget: limited.rule.budget.clone(),
            cost,
            missing: None,
        };
        Some(DescriptorMatch { limited, charge })
    }
}

/// The files of a folder that count, in order.
pub(crate) fn files(folder: &Path) -> io::Result<Vec<PathBuf>> {
    let entries = std::fs::read_dir(folder)?.collect::<Result<Vec<_>, _>>()?;
    let mut files: Vec<PathBuf> = entries
        .into_iter()
        .map(|entry| entry.path())
        .filter(|path| path.extension().is_some_and(|end| end == "yaml" || end == "yml"))
        .collect();
    files.sort();
    Ok(files)
}

/// A key and its value.
pub trait Pair {
    /// Both.
    fn pair(&self) -> (&str, &str);
}

impl<K: AsRef<str>, V: AsRef<str>> Pair for (K, V) {
    fn pair(&self) -> (&str, &str) {
        (self.0.as_ref(), self.1.as_ref())
    }
}

/// The key of a descriptor under a limit that the request brought.
pub(crate) fn override_key<'a>(
    domain: &str,
    entries: impl Iterator<Item = (&'a str, &'a str)>,
) -> Vec<u8> {
    let mut key = Vec::with_capacity(64);
    put(&mut key, domain);
    for (name, value) in entries {
        put(&mut key, name);
        put(&mut key, value);
    }
    bounded(key)
}

/// With its length before it, so that no two lists make the same key.
fn put(key: &mut Vec<u8>, part: &str) {
    digits::push(key, part.len() as u64);
    key.push(b':');
    key.extend_from_slice(part.as_bytes());
}

/// What a caller chooses must not make a key that no store takes, and so escape its limit: a long
/// key is kept by its digest.
fn bounded(key: Vec<u8>) -> Vec<u8> {
    if key.len() <= MAX_KEY_BYTES {
        return key;
    }
    format!("sha1:{}", sha1_smol::Sha1::from(&key).digest()).into_bytes()
}

/// The original's words for a key it does not know, which people search for, and the right key
/// after them.
fn known(problem: &str) -> String {
    let known = problem
        .split_once(": unknown key \"")
        .and_then(|(place, rest)| Some((place, rest.split_once('"')?)));
    match known {
        Some((place, (key, hint))) => format!("{place}: config error, unknown key '{key}'{hint}"),
        None => problem.into(),
    }
}

impl DescriptorNode {
    fn below(&self) -> impl Iterator<Item = &DescriptorNode> {
        self.below.values().flat_map(|values| {
            values
                .exact
                .values()
                .chain(values.wild.iter().map(|(_, node)| node))
                .chain(values.bare.as_deref())
        })
    }

    fn read(
        descriptors: Vec<DescriptorFile>,
        path: &str,
        depth: usize,
    ) -> Result<DescriptorNode, String> {
        if depth > MAX_DEPTH {
            return Err(format!("descriptors of {path} are nested more than {MAX_DEPTH} deep"));
        }
        let mut node = DescriptorNode::default();
        for descriptor in descriptors {
            if descriptor.key.trim().is_empty() {
                return Err(format!("descriptor has empty key, below {path}"));
            }
            let own = match &descriptor.value {
                Some(value) if !value.is_empty() => format!("{path}.{}_{value}", descriptor.key),
                _ => format!("{path}.{}", descriptor.key),
            };
            let is_wild = descriptor.value.as_deref().is_some_and(|value| value.contains('*'));
            if descriptor.share_threshold && !is_wild {
                // The original's words, which people search for. Its key is the last part of the
                // path.
                let key = own.get(path.len() + 1..).unwrap_or(&own);
                return Err(format!(
                    "share_threshold can only be used with wildcard values (ending with '*'), but found key '{key}' at {own}: add * to the value or remove share_threshold"
                ));
            }
            let mut child = DescriptorNode::read(descriptor.descriptors, &own, depth + 1)?;
            child.shared = descriptor.share_threshold;
            if let Some(limit) = descriptor.rate_limit {
                child.limit = Some(Arc::new(DescriptorLimit {
                    metadata: descriptor.metadata,
                    ..limit.checked(&own, descriptor.shadow_mode, descriptor.quota_mode)?
                }));
            }
            let values = node.below.entry(descriptor.key.into()).or_default();
            let known = match descriptor.value.filter(|value| !value.is_empty()) {
                Some(value) if value.contains('*') => {
                    let pattern =
                        Pattern::stars(&value).map_err(|error| format!("{own}: {error}"))?;
                    let known = values.wild.iter().any(|(known, _)| *known == pattern);
                    values.wild.push((pattern, child));
                    known
                }
                Some(value) => values.exact.insert(value.into(), child).is_some(),
                None => values.bare.replace(Box::new(child)).is_some(),
            };
            if known {
                return Err(format!("duplicate descriptor composite key '{own}'"));
            }
        }
        Ok(node)
    }
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct File {
    pub(super) domain: String,
    #[serde(default)]
    pub(super) descriptors: Vec<DescriptorFile>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct DescriptorFile {
    #[serde(default)]
    pub(super) key: String,
    #[serde(default)]
    pub(super) value: Option<String>,
    #[serde(default)]
    pub(super) descriptors: Vec<DescriptorFile>,
    #[serde(default)]
    pub(super) rate_limit: Option<LimitFile>,
    #[serde(default)]
    shadow_mode: bool,
    #[serde(default)]
    quota_mode: bool,
    #[serde(default)]
    share_threshold: bool,
    /// Metrics here never carry keys, so this asks for nothing.
    #[serde(default, rename = "detailed_metric")]
    _detailed_metric: bool,
    #[serde(default, rename = "value_to_metric")]
    _value_to_metric: bool,
    #[serde(default)]
    metadata: Option<Map<String, Value>>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct LimitFile {
    #[serde(default)]
    unit: Option<String>,
    #[serde(default)]
    requests_per_unit: Option<u32>,
    #[serde(default)]
    unlimited: bool,
    #[serde(default)]
    pub(super) name: Option<String>,
    #[serde(default)]
    pub(super) replaces: Vec<Replaced>,
    #[serde(default)]
    limit: Option<String>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Replaced {
    #[serde(default)]
    pub(super) name: Option<String>,
}

impl LimitFile {
    fn checked(self, path: &str, shadow: bool, quota: bool) -> Result<DescriptorLimit, String> {
        let unit = match &self.unit {
            Some(word) => Some(Unit::from_word(word).ok_or_else(|| {
                let hint = match nearest(word, UNITS) {
                    Some(right) => format!("did you mean {right}?"),
                    None => format!("expected {}", UNITS.join(", ")),
                };
                format!("invalid rate limit unit '{word}' at {path}: {hint}")
            })?),
            None => None,
        };
        let (budget, stated) = match (self.unlimited, self.limit, unit) {
            (true, None, None) => (Budget::Unlimited, None),
            (true, _, _) => {
                return Err(format!(
                    "should not specify rate limit unit when unlimited, at {path}"
                ));
            }
            (false, Some(text), None) => {
                let limits =
                    text.parse().map_err(|error| format!("limit {text:?} at {path}: {error}"))?;
                (Budget::Limits(limits), None)
            }
            (false, Some(_), Some(_)) => {
                return Err(format!("{path} has a limit and a unit: expected one of them"));
            }
            (false, None, Some(unit)) => {
                let requests = self.requests_per_unit.unwrap_or(0);
                (unit.budget(requests), Some((requests, unit)))
            }
            (false, None, None) => return Err(format!("invalid rate limit unit '' at {path}")),
        };
        let rule = Rule {
            name: path.into(),
            when: Vec::new(),
            by: Vec::new(),
            missing: Default::default(),
            budget,
            cost: Cost::Fixed(1),
            overrides: Vec::new(),
            mode: if shadow { Mode::Shadow } else { Mode::Enforce },
            refunds: true,
            on_store_failure: None,
            sync: Default::default(),
            overflow: None,
            charge_when: Vec::new(),
            settle: None,
            deny_status: None,
            ipv6_prefix: DEFAULT_IPV6_PREFIX,
        };
        let name: Option<Arc<str>> = self.name.map(Into::into);
        let mut replaces: Vec<Arc<str>> = Vec::with_capacity(self.replaces.len());
        for (at, other) in self.replaces.into_iter().enumerate() {
            match other.name.filter(|name| !name.trim().is_empty()) {
                Some(name) => replaces.push(name.into()),
                None => {
                    return Err(format!(
                        "should not have an empty replaces entry: replaces[{at}].name at {path} is empty: expected the name of another rate_limit"
                    ));
                }
            }
        }
        if name.is_some() && replaces.iter().any(|other| Some(other) == name.as_ref()) {
            return Err(format!("replaces should not contain name of same descriptor, at {path}"));
        }
        Ok(DescriptorLimit { rule: Arc::new(rule), name, replaces, quota, stated, metadata: None })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const FILE: &str = "\
domain: edge
descriptors:
  - key: database
    value: users
    rate_limit: { unit: second, requests_per_unit: 500 }
  - key: database
    rate_limit: { unit: Minute, requests_per_unit: 10, name: any }
  - key: path
    value: /api/*
    share_threshold: true
    rate_limit: { limit: 100/min burst 20; 1000/h sliding }
  - key: path
    value: '*/health'
    rate_limit: { unlimited: true }
  - key: message_type
    value: marketing
    descriptors:
      - key: to_number
        shadow_mode: true
        rate_limit: { unit: day, requests_per_unit: 5, replaces: [{ name: any }] }
  - key: ip
    value: 192.0.2.1
  - key: ip
    rate_limit: { unit: week, requests_per_unit: 0 }
";

    fn find(entries: &[(&str, &str)]) -> Option<(String, Budget, Vec<u8>)> {
        let mut domains = Domains::default();
        domains.add(FILE, "f").unwrap();
        let found = domains.find("edge", entries, 1)?;
        Some((found.limited.rule.name.to_string(), found.charge.budget, found.charge.key))
    }

    #[test]
    fn descriptors_find_their_limit() {
        let name = |entries: &[(&str, &str)]| find(entries).map(|(name, _, _)| name);
        assert_eq!(name(&[("database", "users")]).as_deref(), Some("edge.database_users"));
        assert_eq!(name(&[("database", "orders")]).as_deref(), Some("edge.database"));
        assert_eq!(name(&[("path", "/api/x")]).as_deref(), Some("edge.path_/api/*"));
        assert_eq!(name(&[("path", "/x/health")]).as_deref(), Some("edge.path_*/health"));
        assert_eq!(
            name(&[("message_type", "marketing")]),
            None,
            "a limit counts only at its own depth"
        );
        let deep = [("message_type", "marketing"), ("to_number", "2061111111")];
        assert_eq!(name(&deep).as_deref(), Some("edge.message_type_marketing.to_number"));
        assert_eq!(name(&[("ip", "192.0.2.1")]), None, "a value without a limit is allowed");
        assert_eq!(find(&[("ip", "192.0.2.2")]).unwrap().1, Budget::Deny);
        assert_eq!(name(&[("unknown", "x")]), None);
    }

    #[test]
    fn values_have_budgets_of_their_own_unless_shared() {
        let key = |entries: &[(&str, &str)]| find(entries).unwrap().2;
        assert_ne!(key(&[("database", "a")]), key(&[("database", "b")]));
        assert_eq!(key(&[("path", "/api/a")]), key(&[("path", "/api/b")]));
        assert_ne!(
            key(&[("database", &"a".repeat(2000))]),
            key(&[("database", &"a".repeat(2001))])
        );
        assert!(
            key(&[("database", &"a".repeat(2000))]).len() < 100,
            "a long key is kept by its digest"
        );
    }

    #[test]
    fn limits_are_counted_and_values_may_look_like_numbers() {
        let mut domains = Domains::default();
        domains.add(FILE, "f").unwrap();
        assert_eq!(domains.limits(), 6);
        domains.add("domain: n\ndescriptors:\n  - key: port\n    value: 8080\n    detailed_metric: true\n    metadata: { to: { blue: 1 } }\n    rate_limit: { unit: HOUR, requests_per_unit: 3 }\n", "g").unwrap();
        let found = domains.find("n", &[("port", "8080")], 1).unwrap();
        assert_eq!(found.limited.stated, Some((3, Unit::Hour)));
        assert_eq!(found.limited.metadata.as_ref().unwrap()["to"]["blue"], 1);
        assert_eq!(Unit::of(&"30/min burst 30".parse().unwrap()), Some(Unit::Minute));
        assert_eq!(Unit::of(&"30/min burst 15".parse().unwrap()), None);
        assert_eq!(Unit::of(&"5/7d window".parse().unwrap()), Some(Unit::Week));
    }

    #[test]
    fn mistakes_are_named() {
        for (text, expected) in [
            (
                "domain: a\ndescriptors:\n  - key: k\n    lmit: 3\n",
                "f:4:5: config error, unknown key 'lmit': expected ",
            ),
            ("domain: ''\n", "f: config file cannot have empty domain"),
            (
                "domain: a\ndescriptors:\n  - key: k\n    rate_limit: { unit: fortnight, requests_per_unit: 1 }\n",
                "f: invalid rate limit unit 'fortnight' at a.k: expected second, minute",
            ),
            (
                "domain: a\ndescriptors:\n  - { key: k }\n  - { key: k }\n",
                "f: duplicate descriptor composite key 'a.k'",
            ),
            ("domain: a\ndescriptors:\n  - value: k\n", "f: descriptor has empty key"),
            (
                "domain: a\ndescriptors:\n  - { key: path, value: /api, share_threshold: true }\n",
                "f: share_threshold can only be used with wildcard values (ending with '*'), but found key 'path_/api' at a.path_/api: add * to the value",
            ),
            (
                "domain: a\ndescriptors:\n  - { key: b, descriptors: [{ key: path, share_threshold: true }] }\n",
                "f: share_threshold can only be used with wildcard values (ending with '*'), but found key 'path' at a.b.path: ",
            ),
            (
                "domain: a\ndescriptors:\n  - { key: k, rate_limit: { unit: day, requests_per_unit: 1, replaces: [{ name: '' }] } }\n",
                "f: should not have an empty replaces entry: replaces[0].name at a.k is empty: expected the name of another rate_limit",
            ),
            (
                "domain: a\ndescriptors:\n  - { key: k, rate_limit: { unit: day, requests_per_unit: 1, replaces: [{ name: b }, {}] } }\n",
                "f: should not have an empty replaces entry: replaces[1].name at a.k is empty: ",
            ),
            (
                "domain: a\ndescriptors:\n  - { key: k, rate_limit: { unit: day, requests_per_unit: 1, name: b, replaces: [{ name: c }, { name: b }] } }\n",
                "f: replaces should not contain name of same descriptor, at a.k",
            ),
        ] {
            let error = Domains::default().add(text, "f").unwrap_err().to_string();
            assert!(error.starts_with(expected), "{text}\nsays {error}");
        }
        let mut twice = Domains::default();
        twice.add("domain: a\n", "f").unwrap();
        assert!(
            twice.add("domain: a\n", "g").unwrap_err().to_string().contains("duplicate domain 'a'")
        );
    }
}
