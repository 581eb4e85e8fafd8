//! Reading text that users write: YAML with the place of every value, and messages of parsers in
//! the user's terms.

pub(crate) mod messages;
pub(crate) mod outline;
pub(crate) mod values;
pub(crate) mod yaml;
