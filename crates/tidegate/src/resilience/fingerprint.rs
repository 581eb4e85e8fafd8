//! Fingerprints: keyed hashes that name the state of a charge, as in the stores.
//!
//! A client that chooses keys cannot make two of them collide, and no key is kept as text except
//! where a later call needs it.

use std::hash::{Hash, Hasher};

use siphasher::sip128::{Hasher128, SipHasher13};
use tidegate_core::Limit;

use crate::store::{Charge, Scope};

/// The hash that names the state of a charge.
pub(crate) type Fingerprint = u128;

/// Computes fingerprints with a secret key.
#[derive(Debug)]
pub(crate) struct Fingerprints {
    secret: (u64, u64),
}

impl Fingerprints {
    pub(crate) fn new(secret: (u64, u64)) -> Self {
        Fingerprints { secret }
    }

    pub(crate) fn of(&self, charge: &Charge<'_>) -> Fingerprint {
        let mut hasher = SipHasher13::new_with_keys(self.secret.0, self.secret.1);
        match &charge.subject.scope {
            Scope::AdHoc => hasher.write(charge.limit.algorithm().name().as_bytes()),
            Scope::Rule(name) => {
                hasher.write(name.as_bytes());
                hasher.write_u8(0xff);
            }
        }
        hasher.write_u16(charge.position);
        hasher.write(&charge.subject.key);
        hasher.finish128().as_u128()
    }

    /// A hash that differs when the limit has changed.
    pub(crate) fn limit(&self, limit: &Limit) -> u64 {
        let mut hasher = SipHasher13::new_with_keys(self.secret.1, self.secret.0);
        limit.hash(&mut hasher);
        hasher.finish128().h1
    }
}
