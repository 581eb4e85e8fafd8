//! Topologies.
