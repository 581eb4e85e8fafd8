//! The configuration of envoyproxy/ratelimit: domains, nested descriptors, wildcards, units.
//!
//! A request has a domain and descriptors, each a list of keys and values. The lookup of a
//! descriptor descends the tree of its domain entry by entry: to the node with exactly this key and
//! value, else to the first wildcard that matches, else to the node with the key only. It never
//! backtracks. The limit of the last node applies, if it has one.
//!
//! Unlike the original, `rate_limit` accepts `limit: 100/min burst 20`: any algorithm, and several
//! limits.

mod check;
mod file;
mod unit;

use std::collections::HashMap;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use serde_json::{Map, Value};
use tidegate::http::headers::HeaderFamilies;
use tidegate::store::MAX_KEY_BYTES;

use self::file::DomainFile;
pub use self::unit::Unit;
use super::{Match, Pattern, Rule};
use crate::digits;
use crate::findings::{self, ConfigError, Finding, MAX_FILE_BYTES};
use crate::parse::outline::Outline;
use crate::parse::yaml::located;

/// How deep descriptors may be nested. The YAML parser accepts 64 nested lists and maps, and each
/// level needs two.
pub const MAX_DEPTH: usize = 30;
/// The most files in a folder.
pub const MAX_FILES: usize = 1000;

/// All domains.
#[derive(Clone, Debug, Default)]
pub struct Domains {
    domains: HashMap<Box<str>, DescriptorNode>,
    /// Warnings about the files.
    warnings: Vec<Finding>,
}

/// A node of the tree of a domain.
#[derive(Clone, Debug, Default)]
struct DescriptorNode {
    /// Its children, by key.
    below: HashMap<Box<str>, Values>,
    limit: Option<Arc<DescriptorLimit>>,
    /// Whether all values of the wildcard share one budget.
    shared: bool,
}

/// Nodes with the same key, by value.
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

/// The limit of a node.
#[derive(Clone, Debug)]
pub struct DescriptorLimit {
    /// The limit as a rule.
    pub rule: Arc<Rule>,
    /// The `name` of the limit.
    pub name: Option<Arc<str>>,
    /// The names of limits that this one replaces if they also apply.
    pub replaces: Vec<Arc<str>>,
    /// Whether a request is rejected only if all limits of this kind are exceeded.
    pub quota: bool,
    /// Requests and unit as stated in the file, for the response.
    pub stated: Option<(u32, Unit)>,
    /// Metadata for the response of a request that is allowed.
    pub metadata: Option<Map<String, Value>>,
}

/// Options of the responses to Envoy.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct EnvoyOptions {
    /// Whether rejected requests are charged, as envoyproxy/ratelimit does: they take what is left,
    /// and the other descriptors are charged, too.
    pub count_rejected: bool,
    /// The most requests per unit of a limit in a request; such limits are ignored if `None`.
    pub overrides: Option<u32>,
    /// Headers that are added to the response to the client.
    pub headers: Option<HeaderFamilies>,
    /// Whether a denial has a body of the type `application/problem+json`.
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

/// The limit that applies to a descriptor.
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
    /// If one cannot be read or has an error.
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

    /// Warnings about the files.
    pub fn warnings(&self) -> &[Finding] {
        &self.warnings
    }

    /// The number of limits in all domains.
    pub fn limits(&self) -> usize {
        self.rules().count()
    }

    /// Adds the domain of one file.
    ///
    /// # Errors
    /// If it has an error, or its domain is already known.
    pub fn add(&mut self, text: &str, file: &str) -> Result<(), ConfigError> {
        let invalid = |problem: String| ConfigError::Invalid { file: file.into(), problem };
        let read: DomainFile = serde_saphyr::from_str(text)
            .map_err(|error| invalid(file::known(&located(&error, text))))?;
        if read.domain.trim().is_empty() {
            return Err(invalid(" config file cannot have empty domain".into()));
        }
        if self.domains.contains_key(read.domain.as_str()) {
            return Err(invalid(format!(" duplicate domain '{}' in config file", read.domain)));
        }
        let warnings = check::findings(&read, &Outline::of(text, file));
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

    /// The entries of one descriptor of this domain that has a limit, always the same one, as an
    /// example.
    pub fn example(&self, domain: &str) -> Option<Vec<(&str, &str)>> {
        self.domains.get(domain)?.example()
    }

    /// The rules of all domains.
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

/// The files of a folder that are read, in order.
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
    /// The key and the value.
    fn pair(&self) -> (&str, &str);
}

impl<K: AsRef<str>, V: AsRef<str>> Pair for (K, V) {
    fn pair(&self) -> (&str, &str) {
        (self.0.as_ref(), self.1.as_ref())
    }
}

/// The key of a descriptor with a limit of the request.
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

/// Appends a part after its length, so that no two lists have the same key.
fn put(key: &mut Vec<u8>, part: &str) {
    digits::push(key, part.len() as u64);
    key.push(b':');
    key.extend_from_slice(part.as_bytes());
}

/// A key that is too long for stores is replaced by its digest, so that it cannot escape its limit.
fn bounded(key: Vec<u8>) -> Vec<u8> {
    if key.len() <= MAX_KEY_BYTES {
        return key;
    }
    format!("sha1:{}", sha1_smol::Sha1::from(&key).digest()).into_bytes()
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
}

#[cfg(test)]
mod tests;
