//! The product's file itself.

#[path = "../../../../crates/tidegate/src/memory/version.rs"]
pub(super) mod version;

#[path = "../scenarios.rs"]
pub(super) mod scenarios;
