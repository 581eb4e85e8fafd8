//! A file of envoyproxy/ratelimit as it is written, and the tree that it becomes.

use std::sync::Arc;

use serde::Deserialize;
use serde_json::{Map, Value};
use tidegate::http::DEFAULT_IPV6_PREFIX;

use super::unit::UNITS;
use super::{DescriptorLimit, DescriptorNode, MAX_DEPTH, Unit};
use crate::nearest::nearest;
use crate::rules::{Budget, Cost, Mode, Pattern, Rule};

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct DomainFile {
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
    /// Accepted without effect: metrics never have keys.
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

impl DescriptorNode {
    pub(super) fn read(
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

/// The original's message for an unknown key, which users search for, followed by the right key.
pub(super) fn known(problem: &str) -> String {
    let known = problem
        .split_once(": unknown key \"")
        .and_then(|(place, rest)| Some((place, rest.split_once('"')?)));
    match known {
        Some((place, (key, hint))) => format!("{place}: config error, unknown key '{key}'{hint}"),
        None => problem.into(),
    }
}
