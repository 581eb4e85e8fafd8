//! Which requests over HTTP can be judged, and what of them goes on: settings of the proxy and of
//! forward-auth.

use tidegate::http::PathPolicy;

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
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct HeaderPolicy {
    /// Whether names with `_` stay. CGI-like services read `X_Api_Key` as `X-Api-Key`.
    pub keeps_underscores: bool,
    /// Headers that may have several lines though a rule looks at them: the lines are one list,
    /// joined by `, `. In lower case.
    pub lists: Vec<String>,
}

impl HeaderPolicy {
    /// Whether the lines of a header are one list.
    pub fn is_list(&self, name: &str) -> bool {
        self.lists.iter().any(|own| own.eq_ignore_ascii_case(name))
    }
}
