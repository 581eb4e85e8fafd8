//! The messages of Envoy's rate limit service, as `proto/` has them.
//!
//! Written by hand: they are few, they do not change, and so nobody needs a compiler for them. A
//! test fills messages by the `.proto` files and compares what these types read and write.

#![allow(missing_docs, reason = "they are documented in the .proto files")]

use prost::{Enumeration, Message, Oneof};
use prost_types::{Duration, Struct, Timestamp};

use crate::rules::envoy::Pair;

/// A request for a decision.
#[derive(Clone, PartialEq, Message)]
pub struct RateLimitRequest {
    #[prost(string, tag = "1")]
    pub domain: String,
    #[prost(message, repeated, tag = "2")]
    pub descriptors: Vec<Descriptor>,
    #[prost(uint32, tag = "3")]
    pub hits_addend: u32,
}

/// One list of keys and values.
#[derive(Clone, PartialEq, Message)]
pub struct Descriptor {
    #[prost(message, repeated, tag = "1")]
    pub entries: Vec<Entry>,
    #[prost(message, optional, tag = "2")]
    pub limit: Option<Override>,
    #[prost(message, optional, tag = "3")]
    pub hits_addend: Option<u64>,
    #[prost(bool, tag = "4")]
    pub is_negative_hits: bool,
}

/// A key and its value.
#[derive(Clone, PartialEq, Eq, Hash, Message)]
pub struct Entry {
    #[prost(string, tag = "1")]
    pub key: String,
    #[prost(string, tag = "2")]
    pub value: String,
}

impl Pair for Entry {
    fn pair(&self) -> (&str, &str) {
        (&self.key, &self.value)
    }
}

/// A limit that the request brings.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Message)]
pub struct Override {
    #[prost(uint32, tag = "1")]
    pub requests_per_unit: u32,
    #[prost(enumeration = "UnitNumber", tag = "2")]
    pub unit: i32,
}

/// What is answered.
#[derive(Clone, PartialEq, Message)]
pub struct RateLimitResponse {
    #[prost(enumeration = "Code", tag = "1")]
    pub overall_code: i32,
    #[prost(message, repeated, tag = "2")]
    pub statuses: Vec<DescriptorStatus>,
    #[prost(message, repeated, tag = "3")]
    pub response_headers_to_add: Vec<HeaderValue>,
    #[prost(message, repeated, tag = "4")]
    pub request_headers_to_add: Vec<HeaderValue>,
    #[prost(bytes = "vec", tag = "5")]
    pub raw_body: Vec<u8>,
    #[prost(message, optional, tag = "6")]
    pub dynamic_metadata: Option<Struct>,
    #[prost(message, optional, tag = "7")]
    pub quota: Option<Quota>,
}

/// What is answered to one descriptor.
#[derive(Clone, PartialEq, Eq, Hash, Message)]
pub struct DescriptorStatus {
    #[prost(enumeration = "Code", tag = "1")]
    pub code: i32,
    #[prost(message, optional, tag = "2")]
    pub current_limit: Option<CurrentLimit>,
    #[prost(uint32, tag = "3")]
    pub limit_remaining: u32,
    #[prost(message, optional, tag = "4")]
    pub duration_until_reset: Option<Duration>,
    #[prost(message, optional, tag = "5")]
    pub quota: Option<Quota>,
}

/// The limit that counts.
#[derive(Clone, PartialEq, Eq, Hash, Message)]
pub struct CurrentLimit {
    #[prost(uint32, tag = "1")]
    pub requests_per_unit: u32,
    #[prost(enumeration = "UnitNumber", tag = "2")]
    pub unit: i32,
    #[prost(string, tag = "3")]
    pub name: String,
}

/// What a client may take without asking again.
#[derive(Clone, PartialEq, Eq, Hash, Message)]
pub struct Quota {
    #[prost(uint32, tag = "1")]
    pub requests: u32,
    #[prost(oneof = "Expiration", tags = "2")]
    pub expiration_specifier: Option<Expiration>,
    #[prost(string, tag = "3")]
    pub id: String,
}

/// Until when.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Oneof)]
pub enum Expiration {
    #[prost(message, tag = "2")]
    ValidUntil(Timestamp),
}

/// A header.
#[derive(Clone, PartialEq, Eq, Hash, Message)]
pub struct HeaderValue {
    #[prost(string, tag = "1")]
    pub key: String,
    #[prost(string, tag = "2")]
    pub value: String,
    #[prost(bytes = "vec", tag = "3")]
    pub raw_value: Vec<u8>,
}

/// The overall verdict.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug, Enumeration)]
#[repr(i32)]
pub enum Code {
    Unknown = 0,
    Ok = 1,
    OverLimit = 2,
}

/// A unit of time on the wire, which may also be none.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug, Enumeration)]
#[repr(i32)]
pub enum UnitNumber {
    Unknown = 0,
    Second = 1,
    Minute = 2,
    Hour = 3,
    Day = 4,
    Month = 5,
    Year = 6,
    Week = 7,
}

impl UnitNumber {
    const ALL: [(UnitNumber, &'static str); 8] = [
        (UnitNumber::Unknown, "UNKNOWN"),
        (UnitNumber::Second, "SECOND"),
        (UnitNumber::Minute, "MINUTE"),
        (UnitNumber::Hour, "HOUR"),
        (UnitNumber::Day, "DAY"),
        (UnitNumber::Month, "MONTH"),
        (UnitNumber::Year, "YEAR"),
        (UnitNumber::Week, "WEEK"),
    ];

    /// As it is written in JSON.
    pub fn name(self) -> &'static str {
        Self::ALL.into_iter().find(|(unit, _)| *unit == self).map_or("UNKNOWN", |(_, name)| name)
    }

    /// The unit of this name.
    pub fn from_name(name: &str) -> Option<UnitNumber> {
        Self::ALL.into_iter().find(|(_, own)| *own == name).map(|(unit, _)| unit)
    }
}
