//! Which requests over HTTP can be judged, and what of them goes on: settings of the proxy and of
//! forward-auth.

use serde::{Deserialize, Deserializer, Serialize, Serializer};
use tidegate::http::PathPolicy;

use crate::parse::values;

/// What is refused or changed before rules see a request, so that the service gets what they have
/// judged.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct RequestPolicy {
    /// The section `paths`.
    pub paths: PathPolicy,
    /// The section `headers`.
    pub headers: HeaderPolicy,
}

/// Headers of requests.
#[derive(Clone, PartialEq, Eq, Debug, Default, Deserialize, Serialize)]
#[serde(default, deny_unknown_fields)]
pub struct HeaderPolicy {
    /// Whether names with `_` stay. CGI-like services read `X_Api_Key` as `X-Api-Key`.
    #[serde(rename = "underscores", with = "underscores")]
    pub keeps_underscores: bool,
    /// Headers that may have several lines though a rule looks at them: the lines are one list,
    /// joined by `, `. In lower case.
    #[serde(deserialize_with = "values::header_names")]
    pub lists: Vec<String>,
}

/// `keep` or `drop`.
mod underscores {
    use super::*;

    #[derive(Deserialize, Serialize)]
    #[serde(rename_all = "lowercase")]
    enum Underscores {
        Drop,
        Keep,
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<bool, D::Error> {
        Ok(matches!(Underscores::deserialize(from)?, Underscores::Keep))
    }

    #[expect(clippy::trivially_copy_pass_by_ref, reason = "serde passes fields by reference")]
    pub(super) fn serialize<S: Serializer>(keeps: &bool, to: S) -> Result<S::Ok, S::Error> {
        if *keeps { Underscores::Keep } else { Underscores::Drop }.serialize(to)
    }
}

impl HeaderPolicy {
    /// Whether the lines of a header are one list.
    pub fn is_list(&self, name: &str) -> bool {
        self.lists.iter().any(|own| own.eq_ignore_ascii_case(name))
    }
}
