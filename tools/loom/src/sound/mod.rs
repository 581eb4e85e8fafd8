//! The product's file itself.

#[path = "../../../../crates/tidegate/src/sync/version.rs"]
pub(super) mod version;

#[path = "../scenarios.rs"]
pub(super) mod scenarios;
