//! The names under which states are kept in Redis: readable, injective, and in the slot that we choose.
//!
//! ```text
//! tg1:{Xy3_0a}ab0:user:7            ad hoc: algorithm, position, key
//! tg1:shop:{Qk91-z}r0:6:per-ip:…    of a rule, in the namespace `shop`: position, length of the name, name, key
//! ```
//!
//! `tg1` is the version of the format. What stands in braces decides the slot on a cluster: it is a digest of the
//! subject (rule and key, not position), so all limits of one subject are in one slot, and no text a caller sends gets there.

use siphasher::sip::SipHasher13;
use std::hash::Hasher;
use tidegate_core::Algorithm;

use super::wire::slot_of;
use crate::store::{Charge, Scope, Subject};

/// The version of the format, and the beginning of every key.
pub(crate) const VERSION: &str = "tg1:";
/// The longest namespace.
pub const MAX_NAMESPACE_BYTES: usize = 64;

const ALPHABET: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_";

/// Makes the names of one store.
#[derive(Clone, Debug)]
pub(crate) struct Keys {
    prefix: String,
}

/// A namespace that cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("namespace {0:?}: expected 1 to {MAX_NAMESPACE_BYTES} letters, digits, `.`, `_` or `-`")]
pub struct InvalidNamespace(pub(crate) String);

impl Keys {
    pub(crate) fn new(namespace: Option<&str>) -> Result<Self, InvalidNamespace> {
        let Some(namespace) = namespace else { return Ok(Keys { prefix: VERSION.into() }) };
        let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"._-".contains(&byte);
        if namespace.is_empty() || namespace.len() > MAX_NAMESPACE_BYTES || !namespace.bytes().all(plain) {
            return Err(InvalidNamespace(namespace.chars().take(MAX_NAMESPACE_BYTES).collect()));
        }
        Ok(Keys { prefix: format!("{VERSION}{namespace}:") })
    }

    /// What every key of this store begins with.
    pub(crate) fn prefix(&self) -> &str {
        &self.prefix
    }

    /// Whether its keys are apart from those of others.
    pub(crate) fn has_namespace(&self) -> bool {
        self.prefix != VERSION
    }

    /// The key of one charge.
    pub(crate) fn name(&self, tag: Tag, charge: &Charge<'_>) -> Vec<u8> {
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

/// What decides the slot of a subject.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(crate) struct Tag([u8; 6]);

impl Tag {
    /// The digest is the same in every process that shares the store, so it is not secret: it spreads keys, it does not hide
    /// them. Which key is meant is said in full by the rest of the name.
    pub(crate) fn of(subject: &Subject<'_>) -> Tag {
        let mut digest = SipHasher13::new_with_keys(0x7469_6465_6761_7465, 0x7367_2f31_0000_0000);
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
        Tag(std::array::from_fn(|i| ALPHABET[usize::try_from(bits >> (6 * i) & 63).unwrap_or(0)]))
    }

    pub(crate) fn slot(self) -> u16 {
        slot_of(&self.0)
    }
}

/// The letter by which an algorithm is known in keys and values.
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
    let mut digits = [0; 20];
    let mut at = digits.len();
    let mut rest = number;
    loop {
        at -= 1;
        digits[at] = b"0123456789"[usize::try_from(rest % 10).unwrap_or(0)];
        rest /= 10;
        if rest == 0 {
            break;
        }
    }
    to.extend_from_slice(&digits[at..]);
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
        Charge { subject, limit: limit.parse().unwrap(), position, cost: 1, reserved: 0 }
    }

    fn name(charge: &Charge<'_>) -> Vec<u8> {
        Keys::new(None).unwrap().name(Tag::of(&charge.subject), charge)
    }

    #[test]
    fn names_can_be_read() {
        let text = String::from_utf8(name(&charge(None, b"user:7", "10/s", 0))).unwrap();
        assert!(text.starts_with("tg1:{") && text.ends_with("}ab0:user:7"), "{text}");
        let text = String::from_utf8(name(&charge(Some("per-ip"), b"192.0.2.7", "10/s window", 12))).unwrap();
        assert!(text.ends_with("}r12:6:per-ip:192.0.2.7"), "{text}");
    }

    #[test]
    fn all_limits_of_a_subject_share_a_slot() {
        let (a, b) = (charge(None, b"k", "10/s", 0), charge(None, b"k", "10/s log", 3));
        assert_eq!(Tag::of(&a.subject).slot(), Tag::of(&b.subject).slot());
    }

    #[test]
    fn namespaces_are_checked() {
        assert_eq!(Keys::new(Some("shop-1")).unwrap().prefix(), "tg1:shop-1:");
        for wrong in ["", "a:b", "{x}", "a b", &"n".repeat(65)] {
            assert!(Keys::new(Some(wrong)).unwrap_err().to_string().contains("expected 1 to 64 letters"));
        }
    }

    /// Keys that try to choose their slot by braces spread over the slots like any others.
    #[test]
    fn no_text_chooses_its_slot() {
        let mut slots: HashMap<u16, u32> = HashMap::new();
        let keys = 200_000_u32;
        for n in 0..keys {
            let key = format!("{{x}}:{n}:{{}}{{y");
            *slots.entry(Tag::of(&charge(None, key.as_bytes(), "1/s", 0).subject).slot() / 256).or_default() += 1;
        }
        // 64 classes: the sum of squared deviations is around 63, and above 130 about once in a million tries.
        let expected = f64::from(keys) / 64.0;
        let chi: f64 = slots.values().map(|&n| (f64::from(n) - expected).powi(2) / expected).sum();
        assert!(slots.len() == 64 && chi < 130.0, "{chi}");
    }

    /// What we take for the slot of a key is what a server takes for it, whatever is in its text.
    #[test]
    fn slots_are_those_of_a_real_server() {
        const KEYS: usize = 100_000;
        const AT_ONCE: usize = 1000;
        for flavor in [Flavor::Redis7, Flavor::Valkey9] {
            let server = Server::builder(flavor).arg("--cluster-enabled", "yes").start();
            let mut client = server.client().unwrap();
            let mut bits = 1_u64;
            let mut random = || {
                bits = bits.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                usize::try_from(bits >> 33).unwrap()
            };
            let keys = [Keys::new(None).unwrap(), Keys::new(Some("shop")).unwrap()];
            for _ in 0..KEYS / AT_ONCE {
                let mut expected = Vec::new();
                for _ in 0..AT_ONCE {
                    let mut text = |most| -> Vec<u8> {
                        (0..random() % most).map(|_| b"{}{}:ax0\0\r\n\xff"[random() % 12]).collect()
                    };
                    let (key, rule) = (text(12), String::from_utf8_lossy(&text(6)).into_owned());
                    let rule = (random() % 2 == 0).then_some(rule);
                    let charge = charge(rule.as_deref(), &key, "1/s", u16::try_from(random() % 70).unwrap());
                    let tag = Tag::of(&charge.subject);
                    let name = keys[random() % 2].name(tag, &charge);
                    client.send(&[b"CLUSTER".as_slice(), b"KEYSLOT", &name]).unwrap();
                    expected.push((tag.slot(), name));
                }
                for (slot, name) in expected {
                    let told = client.receive().unwrap().int();
                    assert_eq!(told, i64::from(slot), "{flavor}: {}", name.escape_ascii());
                }
            }
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(4096))]
        /// Different states have different names, whatever is in the text.
        #[test]
        fn names_are_injective(
            a in (proptest::option::of("[a:0-9{}]{0,4}"), "[ab:0-9{}]{0,5}", 0..3_usize, 0..12_u16),
            b in (proptest::option::of("[a:0-9{}]{0,4}"), "[ab:0-9{}]{0,5}", 0..3_usize, 0..12_u16),
        ) {
            let limits = ["1/s", "1/s window", "1/s log"];
            let of = |(rule, key, limit, position): &(Option<String>, String, usize, u16)| {
                name(&charge(rule.as_deref(), key.as_bytes(), limits[*limit], *position))
            };
            // Of a rule, the algorithm is not part of the identity.
            let same = a.0 == b.0 && a.1 == b.1 && a.3 == b.3 && (a.0.is_some() || a.2 == b.2);
            prop_assert_eq!(of(&a) == of(&b), same);
        }
    }
}
