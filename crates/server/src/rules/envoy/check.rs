//! Warnings about files of envoyproxy/ratelimit: what works, but is probably not intended.

use std::collections::HashSet;

use super::file::{DescriptorFile, DomainFile};
use crate::findings::Finding;
use crate::nearest::nearest;
use crate::parse::outline::Outline;
use crate::parse::outline::Step::{self, Item, Key};
use crate::rules::Pattern;
use crate::rules::regex::{self, Rewritten};

/// The findings about one file.
pub(super) fn findings(read: &DomainFile, outline: &Outline) -> Vec<Finding> {
    let mut found = Vec::new();
    if read.descriptors.is_empty() {
        let message = format!(
            "domain {:?} has no descriptors, so it limits nothing: add some, or remove the file",
            read.domain
        );
        found.push(Finding::warning(outline.value(&[Key("domain")]), message));
    }
    let mut names = HashSet::new();
    collect(&read.descriptors, &mut names);
    level(&read.descriptors, &read.domain, &[], outline, &names, &mut found);
    found
}

/// The names of all rate limits of the file.
fn collect<'a>(descriptors: &'a [DescriptorFile], names: &mut HashSet<&'a str>) {
    for descriptor in descriptors {
        names.extend(descriptor.rate_limit.as_ref().and_then(|limit| limit.name.as_deref()));
        collect(&descriptor.descriptors, names);
    }
}

/// The descriptors of one level, and those below.
fn level<'a>(
    descriptors: &'a [DescriptorFile],
    path: &str,
    steps: &[Step<'_>],
    outline: &Outline,
    names: &HashSet<&'a str>,
    found: &mut Vec<Finding>,
) {
    // Of wildcards under one key, the first in the file that matches counts.
    let mut wild: Vec<(&str, Pattern)> = Vec::new();
    for (index, descriptor) in descriptors.iter().enumerate() {
        let steps = [steps, &[Key("descriptors"), Item(index)]].concat();
        let at = |key| outline.value(&[&steps[..], &[Key(key)]].concat());
        let (key, own) = (&descriptor.key, format!("{path}.{}", descriptor.key));
        if let Some(value) = descriptor.value.as_deref().filter(|value| !value.is_empty()) {
            let about = if key == "path" {
                regex::PatternContext::Path
            } else {
                regex::PatternContext::Other
            };
            if let Some(rewritten) = regex::rewritten(value, about) {
                // Here only a star means something, and there are no lists.
                let advice = match &rewritten {
                    Rewritten::To(patterns)
                        if patterns.len() == 1 && !patterns[0].contains('?') =>
                    {
                        rewritten.advice()
                    }
                    _ => "write a descriptor for each value".into(),
                };
                let message = format!(
                    "{own}: value {value:?} looks like a regular expression: expected a value, in which * is any number of characters: {advice}"
                );
                found.push(Finding::warning(at("value"), message));
            }
            if value.contains('*')
                && let Ok(pattern) = Pattern::stars(value)
            {
                if let Some((_, before)) =
                    wild.iter().find(|(of, before)| of == key && before.covers(&pattern))
                {
                    let message = format!(
                        "{own}: value {value:?} is never reached: {:?} above it matches first; put the narrower one first",
                        before.text()
                    );
                    found.push(Finding::warning(at("value"), message));
                }
                wild.push((key, pattern));
            }
        }
        if let Some(limit) = &descriptor.rate_limit {
            for (number, other) in limit.replaces.iter().enumerate() {
                let Some(name) = other.name.as_deref().filter(|name| !names.contains(name)) else {
                    continue;
                };
                let hint = match nearest(name, names.iter().copied()) {
                    Some(right) => format!("did you mean {right}?"),
                    None => "expected the name of another rate_limit of this file".into(),
                };
                let steps =
                    [&steps[..], &[Key("rate_limit"), Key("replaces"), Item(number), Key("name")]]
                        .concat();
                let message =
                    format!("{own}: replaces {name:?}, which is the name of no rate_limit: {hint}");
                found.push(Finding::warning(outline.value(&steps), message));
            }
        }
        level(&descriptor.descriptors, &own, &steps, outline, names, found);
    }
}
