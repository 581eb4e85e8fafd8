//! The keys of states in Redis: readable, injective, and in a slot that the store chooses.
//!
//! ```text
//! tg1:{Xy3_0a}ab0:user:7            ad hoc: algorithm, position, key
//! tg1:shop:{Qk91-z}r0:6:per-ip:…    of a rule, in the namespace `shop`: position, length of the
//! name, name, key
//! ```
//!
//! `tg1` is the version of the format. The text in braces decides the slot on a cluster: it is a
//! digest of the subject (rule and key, not position), so all limits of one subject share a slot,
//! and no text that a client sends appears there. The digest is keyed by the namespace and a
//! secret: a client that does not know the secret can neither compute the slot of a key nor search
//! for keys in one slot. Without a secret it can.

use siphasher::sip::SipHasher13;
use std::hash::Hasher;
use tidegate_core::Algorithm;

use crate::store::{Charge, Scope, Subject};
use tidegate_redis_client::{InvalidSecret, Secret, slot_of};

/// The version of the format, and the prefix of every key.
pub(crate) const VERSION: &str = "tg1:";
/// The longest namespace, in bytes.
pub const MAX_NAMESPACE_BYTES: usize = 64;

const ALPHABET: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_";

/// Makes the keys of one store. It has no `Debug`, which would show the key of the digest.
#[derive(Clone)]
pub(crate) struct Keys {
    prefix: String,
    /// The keyed digest before any input.
    digest: SipHasher13,
}

/// A namespace that is empty, too long, or has other characters than the allowed ones.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("namespace {0:?}: expected 1 to {MAX_NAMESPACE_BYTES} letters, digits, `.`, `_` or `-`")]
pub struct InvalidNamespace(pub(crate) String);

/// An invalid namespace or secret.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(transparent)]
pub(crate) enum InvalidKeys {
    Namespace(#[from] InvalidNamespace),
    Secret(#[from] InvalidSecret),
}

impl Keys {
    pub(crate) fn new(
        namespace: Option<&str>,
        secret: Option<&Secret>,
    ) -> Result<Self, InvalidKeys> {
        let secret = secret.map(Secret::checked).transpose()?.unwrap_or_default();
        let digest = keyed(namespace.unwrap_or_default(), secret);
        let Some(namespace) = namespace else { return Ok(Keys { prefix: VERSION.into(), digest }) };
        let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"._-".contains(&byte);
        if namespace.is_empty()
            || namespace.len() > MAX_NAMESPACE_BYTES
            || !namespace.bytes().all(plain)
        {
            return Err(
                InvalidNamespace(namespace.chars().take(MAX_NAMESPACE_BYTES).collect()).into()
            );
        }
        Ok(Keys { prefix: format!("{VERSION}{namespace}:"), digest })
    }

    /// The prefix of every key of this store.
    pub(crate) fn prefix(&self) -> &str {
        &self.prefix
    }

    /// Whether the store has a namespace.
    pub(crate) fn has_namespace(&self) -> bool {
        self.prefix != VERSION
    }

    /// The digest that decides the slot of a subject: the same in every process that shares
    /// namespace and secret. It need not be unique, because the rest of the key names the subject
    /// in full.
    pub(crate) fn tag(&self, subject: &Subject<'_>) -> SlotTag {
        let mut digest = self.digest;
        match &subject.scope {
            Scope::AdHoc => digest.write_u8(0),
            Scope::Rule(rule) => {
                digest.write_u8(1);
                digest.write(&(rule.len() as u64).to_le_bytes());
                digest.write(rule.as_bytes());
            }
        }
        digest.write(&subject.key);
        let bits = digest.finish();
        SlotTag(std::array::from_fn(|i| {
            ALPHABET[usize::try_from(bits >> (6 * i) & 63).unwrap_or(0)]
        }))
    }

    /// The key of a charge.
    pub(crate) fn name(&self, tag: SlotTag, charge: &Charge<'_>) -> Vec<u8> {
        let key = &*charge.subject.key;
        let mut name = Vec::with_capacity(self.prefix.len() + key.len() + 24);
        name.extend_from_slice(self.prefix.as_bytes());
        name.push(b'{');
        name.extend_from_slice(&tag.0);
        name.push(b'}');
        match &charge.subject.scope {
            Scope::AdHoc => {
                name.extend_from_slice(&[b'a', letter(charge.limit.algorithm())]);
                push_decimal(&mut name, u64::from(charge.position));
            }
            Scope::Rule(rule) => {
                name.push(b'r');
                push_decimal(&mut name, u64::from(charge.position));
                name.push(b':');
                push_decimal(&mut name, rule.len() as u64);
                name.push(b':');
                name.extend_from_slice(rule.as_bytes());
            }
        }
        name.push(b':');
        name.extend_from_slice(key);
        name
    }
}

/// A digest keyed by namespace and secret, separated by a NUL, which no namespace has.
fn keyed(namespace: &str, secret: &[u8]) -> SipHasher13 {
    let mut key = sha1_smol::Sha1::from("tidegate slots 1\0");
    key.update(namespace.as_bytes());
    key.update(b"\0");
    key.update(secret);
    let bytes = key.digest().bytes();
    let half = |from: usize| u64::from_le_bytes(std::array::from_fn(|i| bytes[from + i]));
    SipHasher13::new_with_keys(half(0), half(8))
}

/// The digest that decides the slot of a subject.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(crate) struct SlotTag([u8; 6]);

impl SlotTag {
    pub(crate) fn slot(self) -> u16 {
        slot_of(&self.0)
    }
}

/// The letter of an algorithm in keys and values.
pub(crate) fn letter(algorithm: &Algorithm) -> u8 {
    match algorithm {
        Algorithm::Bucket(_) => b'b',
        Algorithm::Window(_) => b'w',
        Algorithm::Sliding(_) => b's',
        Algorithm::Estimate(_) => b'e',
        Algorithm::Log(_) => b'l',
        Algorithm::Concurrent(_) => b'c',
    }
}

fn push_decimal(to: &mut Vec<u8>, number: u64) {
    to.extend_from_slice(itoa::Buffer::new().format(number).as_bytes());
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use proptest::prelude::*;
    use tidegate_testkit::{Flavor, Server};

    use super::*;

    fn charge<'a>(rule: Option<&'a str>, key: &'a [u8], limit: &str, position: u16) -> Charge<'a> {
        let scope = rule.map_or(Scope::AdHoc, |name| Scope::Rule(name.into()));
        let subject = Subject { scope, key: key.into() };
        Charge {
            subject,
            limit: limit.parse().unwrap(),
            position,
            cost: 1,
            reserved: 0,
            policy: Default::default(),
        }
    }

    const SECRET: &str = "a secret of at least sixteen bytes";

    fn keys(namespace: Option<&str>, secret: Option<&str>) -> Keys {
        Keys::new(namespace, secret.map(Secret::new).as_ref()).unwrap()
    }

    fn ad_hoc(key: &str) -> Subject<'_> {
        Subject { scope: Scope::AdHoc, key: key.as_bytes().into() }
    }

    fn name(charge: &Charge<'_>) -> Vec<u8> {
        let keys = keys(None, None);
        keys.name(keys.tag(&charge.subject), charge)
    }

    #[test]
    fn names_can_be_read() {
        let text = String::from_utf8(name(&charge(None, b"user:7", "10/s", 0))).unwrap();
        assert!(text.starts_with("tg1:{") && text.ends_with("}ab0:user:7"), "{text}");
        let text =
            String::from_utf8(name(&charge(Some("per-ip"), b"192.0.2.7", "10/s window", 12)))
                .unwrap();
        assert!(text.ends_with("}r12:6:per-ip:192.0.2.7"), "{text}");
    }

    #[test]
    fn all_limits_of_a_subject_share_a_slot() {
        let (a, b) = (charge(None, b"k", "10/s", 0), charge(None, b"k", "10/s log", 3));
        for keys in [keys(None, None), keys(Some("shop"), Some(SECRET))] {
            assert_eq!(keys.tag(&a.subject).slot(), keys.tag(&b.subject).slot());
        }
    }

    #[test]
    fn namespaces_and_secrets_are_checked() {
        assert_eq!(keys(Some("shop-1"), None).prefix(), "tg1:shop-1:");
        let message = |namespace: Option<&str>, secret: Option<&str>| {
            Keys::new(namespace, secret.map(Secret::new).as_ref()).err().unwrap().to_string()
        };
        for wrong in ["", "a:b", "{x}", "a b", &"n".repeat(65)] {
            assert!(message(Some(wrong), None).contains("expected 1 to 64 letters"));
        }
        for wrong in ["", "fifteen bytes..", &"s".repeat(513)] {
            let expected = format!("expected 16 to 512 bytes at random, found {}", wrong.len());
            assert_eq!(message(None, Some(wrong)), expected);
        }
        assert_eq!(format!("{:?}", Secret::new(SECRET)), "***");
    }

    /// The chi-squared statistic of these keys over 64 ranges of slots: about 63 if they are spread
    /// at random, above 130 about once in a million runs.
    fn unevenness(keys: &Keys, texts: &[String]) -> f64 {
        let mut slots: HashMap<u16, u32> = HashMap::new();
        for text in texts {
            *slots.entry(keys.tag(&ad_hoc(text)).slot() / 256).or_default() += 1;
        }
        let expected = f64::from(u32::try_from(texts.len()).unwrap()) / 64.0;
        (0..64)
            .map(|class| {
                (f64::from(*slots.get(&class).unwrap_or(&0)) - expected).powi(2) / expected
            })
            .sum()
    }

    /// Keys with braces, which would choose their slot, spread over the slots like any others.
    #[test]
    fn no_text_chooses_its_slot() {
        let texts: Vec<String> = (0..200_000).map(|n| format!("{{x}}:{n}:{{}}{{y")).collect();
        for (namespace, secret) in [(None, None), (Some("shop"), None), (None, Some(SECRET))] {
            let unevenness = unevenness(&keys(namespace, secret), &texts);
            assert!(unevenness < 130.0, "{namespace:?}, {secret:?}: {unevenness}");
        }
    }

    /// Keys found by a search for one slot, with this code, the namespace and another secret,
    /// spread like any others under a secret that the search does not know.
    #[test]
    fn keys_of_one_slot_cannot_be_found_without_the_secret() {
        const FOUND: usize = 1024;
        for (namespace, known) in
            [(None, None), (Some("shop"), Some("a secret of another store, or an old one"))]
        {
            let public = keys(namespace, known);
            let texts = (0_u64..)
                .map(|n| format!("user:{n}"))
                .filter(|text| public.tag(&ad_hoc(text)).slot() == 7);
            let texts: Vec<String> = texts.take(FOUND).collect();
            assert!(unevenness(&public, &texts) > 60_000.0, "one class has them all");
            for secret in [SECRET, "a secret of at least sixteen bytes.", "0123456789abcdef"] {
                let unevenness = unevenness(&keys(namespace, Some(secret)), &texts);
                assert!(unevenness < 130.0, "{namespace:?}, {secret}: {unevenness}");
            }
        }
    }

    /// The computed slot of a key is that of a real server, whatever the key has in it.
    #[test]
    fn slots_are_those_of_a_real_server() {
        const KEYS: usize = 100_000;
        const AT_ONCE: usize = 1000;
        for flavor in [Flavor::Redis7, Flavor::Valkey9] {
            let server = Server::builder(flavor).arg("--cluster-enabled", "yes").start();
            let mut client = server.client().unwrap();
            let mut bits = 1_u64;
            let mut random = || {
                bits = bits
                    .wrapping_mul(6_364_136_223_846_793_005)
                    .wrapping_add(1_442_695_040_888_963_407);
                usize::try_from(bits >> 33).unwrap()
            };
            let keys =
                [keys(None, None), keys(Some("shop"), None), keys(Some("shop"), Some(SECRET))];
            for _ in 0..KEYS / AT_ONCE {
                let mut expected = Vec::new();
                for _ in 0..AT_ONCE {
                    let mut text = |most| -> Vec<u8> {
                        (0..random() % most).map(|_| b"{}{}:ax0\0\r\n\xff"[random() % 12]).collect()
                    };
                    let (key, rule) = (text(12), String::from_utf8_lossy(&text(6)).into_owned());
                    let rule = (random() % 2 == 0).then_some(rule);
                    let charge =
                        charge(rule.as_deref(), &key, "1/s", u16::try_from(random() % 70).unwrap());
                    let keys = &keys[random() % 3];
                    let tag = keys.tag(&charge.subject);
                    let name = keys.name(tag, &charge);
                    client.send(&[b"CLUSTER".as_slice(), b"KEYSLOT", &name]).unwrap();
                    expected.push((tag.slot(), name));
                }
                for (slot, name) in expected {
                    let actual = client.receive().unwrap().int();
                    assert_eq!(actual, i64::from(slot), "{flavor}: {}", name.escape_ascii());
                }
            }
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(4096))]
        /// Different states have different keys, whatever the text.
        #[test]
        fn names_are_injective(
            a in (proptest::option::of("[a:0-9{}]{0,4}"), "[ab:0-9{}]{0,5}", 0..3_usize, 0..12_u16),
            b in (proptest::option::of("[a:0-9{}]{0,4}"), "[ab:0-9{}]{0,5}", 0..3_usize, 0..12_u16),
        ) {
            let limits = ["1/s", "1/s window", "1/s log"];
            // Of a rule, the algorithm is not part of the identity.
            let same = a.0 == b.0 && a.1 == b.1 && a.3 == b.3 && (a.0.is_some() || a.2 == b.2);
            for keys in [keys(None, None), keys(Some("shop"), Some(SECRET))] {
                let of = |(rule, key, limit, position): &(Option<String>, String, usize, u16)| {
                    let charge = charge(rule.as_deref(), key.as_bytes(), limits[*limit], *position);
                    keys.name(keys.tag(&charge.subject), &charge)
                };
                prop_assert_eq!(of(&a) == of(&b), same);
            }
        }
    }
}
