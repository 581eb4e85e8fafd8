//! The messages are those of the `.proto` files, and bytes that are none do no harm.

use std::path::{Path, PathBuf};

use proptest::prelude::*;
use proptest::test_runner::{Config as Runs, TestRunner};
use prost::Message;
use prost_reflect::{
    DescriptorPool, DynamicMessage, FieldDescriptor, Kind, MessageDescriptor, Value,
};
use tidegate_server::grpc::SERVICE;
use tidegate_server::grpc::message::{RateLimitRequest, RateLimitResponse};
use tonic::Status;
use tonic::codec::{Codec, DecodeBuf, Decoder, EncodeBuf, Encoder};
use tonic::codegen::http::uri::PathAndQuery;

use super::{EDGE, Protocol};

fn crate_folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).to_path_buf()
}

fn compiled() -> prost_types::FileDescriptorSet {
    let proto = crate_folder().join("proto");
    protox::compile(["envoy/service/ratelimit/v3/rls.proto"], [proto]).unwrap()
}

/// `TIDEGATE_UPDATE=1 cargo test -p tidegate-server descriptors` writes it anew.
#[test]
fn the_compiled_descriptors_are_those_of_the_files() {
    let mut set = compiled();
    // Comments and places are of no use to whoever reflects.
    set.file.iter_mut().for_each(|file| file.source_code_info = None);
    let file = crate_folder().join("src/grpc/rls.bin");
    if std::env::var_os("TIDEGATE_UPDATE").is_some() {
        std::fs::write(&file, set.encode_to_vec()).unwrap();
    }
    let committed =
        prost_types::FileDescriptorSet::decode(&*std::fs::read(&file).unwrap()).unwrap();
    assert!(committed == set, "run TIDEGATE_UPDATE=1 cargo test -p tidegate-server descriptors");
}

/// A source of numbers for filling messages.
struct Choices(Vec<u8>, usize);

impl Choices {
    fn next(&mut self) -> u64 {
        self.1 += 1;
        self.0.get(self.1 - 1).copied().unwrap_or(0).into()
    }
}

/// A message filled by what the descriptor says, so by the `.proto` files alone.
fn filled(descriptor: &MessageDescriptor, choices: &mut Choices, depth: usize) -> DynamicMessage {
    let mut message = DynamicMessage::new(descriptor.clone());
    for field in descriptor.fields() {
        if choices.next().is_multiple_of(3) || depth > 4 {
            continue;
        }
        let value = if field.is_map() {
            continue; // the order of a map is not kept
        } else if field.is_list() {
            Value::List((0..choices.next() % 3).map(|_| single(&field, choices, depth)).collect())
        } else {
            single(&field, choices, depth)
        };
        message.set_field(&field, value);
    }
    message
}

fn single(field: &FieldDescriptor, choices: &mut Choices, depth: usize) -> Value {
    match field.kind() {
        Kind::Message(message) => Value::Message(filled(&message, choices, depth + 1)),
        Kind::Enum(_) => Value::EnumNumber(i32::try_from(choices.next() % 8).unwrap()),
        Kind::String => Value::String("é".repeat(usize::try_from(choices.next() % 4).unwrap())),
        Kind::Bytes => Value::Bytes(vec![7; usize::try_from(choices.next() % 4).unwrap()].into()),
        Kind::Bool => Value::Bool(choices.next() % 2 == 1),
        Kind::Double => Value::F64(f64::from(u32::try_from(choices.next()).unwrap())),
        Kind::Uint32 => Value::U32(u32::MAX - u32::try_from(choices.next()).unwrap()),
        Kind::Uint64 => Value::U64(u64::MAX - choices.next()),
        Kind::Int32 => Value::I32(i32::try_from(choices.next()).unwrap()),
        Kind::Int64 => Value::I64(i64::try_from(choices.next()).unwrap()),
        other => panic!("{other:?} is in no message"),
    }
}

#[test]
fn messages_are_read_and_written_as_the_files_say() {
    let pool = DescriptorPool::from_file_descriptor_set(compiled()).unwrap();
    let of = |name: &str| {
        pool.get_message_by_name(&format!("envoy.service.ratelimit.v3.{name}")).unwrap()
    };
    let (request, response) = (of("RateLimitRequest"), of("RateLimitResponse"));
    proptest!(Runs::with_cases(500), |(bytes in prop::collection::vec(any::<u8>(), 0..200))| {
        let read = |of: &MessageDescriptor, bytes: &[u8]| DynamicMessage::decode(of.clone(), bytes).unwrap();
        let asked = filled(&request, &mut Choices(bytes.clone(), 0), 0).encode_to_vec();
        let ours = RateLimitRequest::decode(&*asked).unwrap().encode_to_vec();
        prop_assert!(read(&request, &ours) == read(&request, &asked), "{ours:?} and {asked:?}");
        let said = filled(&response, &mut Choices(bytes, 0), 0).encode_to_vec();
        let ours = RateLimitResponse::decode(&*said).unwrap().encode_to_vec();
        prop_assert!(read(&response, &ours) == read(&response, &said), "{ours:?} and {said:?}");
    });
}

/// Sends bytes as they are.
#[derive(Default)]
struct Raw;

impl Codec for Raw {
    type Encode = Vec<u8>;
    type Decode = RateLimitResponse;
    type Encoder = Raw;
    type Decoder = Raw;

    fn encoder(&mut self) -> Raw {
        Raw
    }

    fn decoder(&mut self) -> Raw {
        Raw
    }
}

impl Encoder for Raw {
    type Item = Vec<u8>;
    type Error = Status;

    fn encode(&mut self, bytes: Vec<u8>, out: &mut EncodeBuf<'_>) -> Result<(), Status> {
        prost::bytes::BufMut::put_slice(out, &bytes);
        Ok(())
    }
}

impl Decoder for Raw {
    type Item = RateLimitResponse;
    type Error = Status;

    fn decode(&mut self, bytes: &mut DecodeBuf<'_>) -> Result<Option<RateLimitResponse>, Status> {
        RateLimitResponse::decode(bytes)
            .map(Some)
            .map_err(|error| Status::internal(error.to_string()))
    }
}

/// Bytes that are almost a request: one that is right, with some of it changed or cut off; or
/// anything.
fn almost() -> impl Strategy<Value = Vec<u8>> {
    let entries = prop::collection::vec(
        ("user|path|trial|api|[a-z]{0,3}", "vip|banned|/search|.{0,4}"),
        0..4,
    );
    let descriptor = (entries, any::<Option<u64>>(), any::<bool>(), any::<Option<(u32, i32)>>());
    let right = ("edge|other|", prop::collection::vec(descriptor, 0..4), any::<u32>()).prop_map(
        |(domain, all, hits_addend)| {
            let descriptors = all.into_iter().map(|(entries, hits, negative, limit)| {
                let pairs: Vec<(&str, &str)> =
                    entries.iter().map(|(key, value)| (&**key, &**value)).collect();
                let mut one = super::descriptor(&pairs);
                (one.hits_addend, one.is_negative_hits) = (hits, negative);
                one.limit = limit.map(|(requests_per_unit, unit)| super::Override {
                    requests_per_unit,
                    unit: unit % 9,
                });
                one
            });
            RateLimitRequest { domain, descriptors: descriptors.collect(), hits_addend }
                .encode_to_vec()
        },
    );
    let changed = (right.clone(), any::<prop::sample::Index>(), any::<u8>(), any::<bool>())
        .prop_map(|(mut bytes, at, byte, cut)| {
            if !bytes.is_empty() {
                let at = at.index(bytes.len());
                bytes[at] = byte;
                if cut {
                    bytes.truncate(at);
                }
            }
            bytes
        });
    prop_oneof![2 => right, 2 => changed, 1 => prop::collection::vec(any::<u8>(), 0..100)]
}

#[test]
fn whatever_bytes_are_sent_one_answer_comes_back() {
    let rules =
        "rules: [{ name: a, by: [user], limit: 5/s }, { name: b, mode: shadow, limit: 1/s }]\n";
    let protocol = Protocol::open(rules, EDGE);
    let path = PathAndQuery::try_from(format!("/{SERVICE}/ShouldRateLimit")).unwrap();
    let send = |bytes: Vec<u8>| {
        let (channel, path) = (protocol.channel.clone(), path.clone());
        protocol.runtime.block_on(async move {
            let mut client = tonic::client::Grpc::new(channel);
            client.ready().await.unwrap();
            client.unary(tonic::Request::new(bytes), path, Raw).await
        })
    };
    let mut runner = TestRunner::new(Runs::with_cases(1000));
    let result = runner.run(&almost(), |bytes| {
        let readable = RateLimitRequest::decode(&*bytes).is_ok();
        match send(bytes) {
            Ok(answer) => {
                let answer = answer.into_inner();
                prop_assert!(readable && answer.overall_code != 0);
                prop_assert!(answer.statuses.iter().all(|status| status.code != 0));
            }
            Err(status) => {
                let mistake =
                    if readable { tonic::Code::InvalidArgument } else { tonic::Code::Internal };
                prop_assert_eq!(status.code(), mistake, "{}", status);
            }
        }
        Ok(())
    });
    result.unwrap();
    assert!(
        send(super::request("edge", vec![super::descriptor(&[("user", "vip")])]).encode_to_vec())
            .is_ok()
    );
}
