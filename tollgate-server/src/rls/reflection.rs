//! What the service is called and takes, for tools that ask: gRPC calls it reflection.
//!
//! The types that we have do not describe themselves, so what Envoy's interface says is said again here, as far as it is
//! spoken: without the quotas, which Envoy does not read.

use prost_types::field_descriptor_proto::{Label, Type};
use prost_types::{
    DescriptorProto, EnumDescriptorProto, EnumValueDescriptorProto, FieldDescriptorProto,
    FileDescriptorProto, FileDescriptorSet, MessageOptions, MethodDescriptorProto, OneofDescriptorProto,
    ServiceDescriptorProto,
};
use tonic_reflection::server::Builder;
use tonic_reflection::server::v1::{ServerReflection, ServerReflectionServer};

/// The service that describes the others.
pub(super) fn service()
-> Result<ServerReflectionServer<impl ServerReflection>, tonic_reflection::server::Error> {
    Builder::configure()
        .register_file_descriptor_set(described())
        .register_encoded_file_descriptor_set(tonic_health::pb::FILE_DESCRIPTOR_SET)
        .build_v1()
}

/// A field's name, number and type. A type with a dot is that of a message, one with a colon before that of an enum.
type Field = (&'static str, i32, &'static str);

const DURATION: &[Field] = &[("seconds", 1, "int64"), ("nanos", 2, "int32")];
const UINT64_VALUE: &[Field] = &[("value", 1, "uint64")];
const STRUCT: &[Field] = &[("fields", 1, "*.google.protobuf.Struct.FieldsEntry")];
const STRUCT_ENTRY: &[Field] = &[("key", 1, "string"), ("value", 2, ".google.protobuf.Value")];
const LIST_VALUE: &[Field] = &[("values", 1, "*.google.protobuf.Value")];
const VALUE: &[Field] = &[
    ("null_value", 1, ":.google.protobuf.NullValue"),
    ("number_value", 2, "double"),
    ("string_value", 3, "string"),
    ("bool_value", 4, "bool"),
    ("struct_value", 5, ".google.protobuf.Struct"),
    ("list_value", 6, ".google.protobuf.ListValue"),
];
const DESCRIPTOR: &[Field] = &[
    ("entries", 1, "*.envoy.extensions.common.ratelimit.v3.RateLimitDescriptor.Entry"),
    ("limit", 2, ".envoy.extensions.common.ratelimit.v3.RateLimitDescriptor.RateLimitOverride"),
    ("hits_addend", 3, ".google.protobuf.UInt64Value"),
    ("is_negative_hits", 4, "bool"),
];
const ENTRY: &[Field] = &[("key", 1, "string"), ("value", 2, "string")];
const OVERRIDE: &[Field] =
    &[("requests_per_unit", 1, "uint32"), ("unit", 2, ":.envoy.type.v3.RateLimitUnit")];
const HEADER_VALUE: &[Field] = &[("key", 1, "string"), ("value", 2, "string"), ("raw_value", 3, "bytes")];
const REQUEST: &[Field] = &[
    ("domain", 1, "string"),
    ("descriptors", 2, "*.envoy.extensions.common.ratelimit.v3.RateLimitDescriptor"),
    ("hits_addend", 3, "uint32"),
];
const RESPONSE: &[Field] = &[
    ("overall_code", 1, ":.envoy.service.ratelimit.v3.RateLimitResponse.Code"),
    ("statuses", 2, "*.envoy.service.ratelimit.v3.RateLimitResponse.DescriptorStatus"),
    ("response_headers_to_add", 3, "*.envoy.config.core.v3.HeaderValue"),
    ("request_headers_to_add", 4, "*.envoy.config.core.v3.HeaderValue"),
    ("raw_body", 5, "bytes"),
    ("dynamic_metadata", 6, ".google.protobuf.Struct"),
];
const STATUS: &[Field] = &[
    ("code", 1, ":.envoy.service.ratelimit.v3.RateLimitResponse.Code"),
    ("current_limit", 2, ".envoy.service.ratelimit.v3.RateLimitResponse.RateLimit"),
    ("limit_remaining", 3, "uint32"),
    ("duration_until_reset", 4, ".google.protobuf.Duration"),
];
const LIMIT: &[Field] = &[
    ("requests_per_unit", 1, "uint32"),
    ("unit", 2, ":.envoy.service.ratelimit.v3.RateLimitResponse.RateLimit.Unit"),
    ("name", 3, "string"),
];
const CODES: &[(&str, i32)] = &[("UNKNOWN", 0), ("OK", 1), ("OVER_LIMIT", 2)];
const UNITS: &[(&str, i32)] = &[
    ("UNKNOWN", 0),
    ("SECOND", 1),
    ("MINUTE", 2),
    ("HOUR", 3),
    ("DAY", 4),
    ("MONTH", 5),
    ("YEAR", 6),
    ("WEEK", 7),
];
/// Those of limits that come along: a week is not among them.
const OWN_UNITS: usize = 7;

fn described() -> FileDescriptorSet {
    let mut value = message("Value", VALUE);
    value.oneof_decl = vec![OneofDescriptorProto { name: Some("kind".to_owned()), options: None }];
    value.field.iter_mut().for_each(|field| field.oneof_index = Some(0));
    let mut entry = message("FieldsEntry", STRUCT_ENTRY);
    entry.options = Some(MessageOptions { map_entry: Some(true), ..MessageOptions::default() });
    let structure = DescriptorProto { nested_type: vec![entry], ..message("Struct", STRUCT) };
    let structs = FileDescriptorProto {
        message_type: vec![structure, value, message("ListValue", LIST_VALUE)],
        enum_type: vec![enumeration("NullValue", &[("NULL_VALUE", 0)])],
        ..file("google/protobuf/struct.proto", "google.protobuf", &[])
    };
    let descriptor = DescriptorProto {
        nested_type: vec![message("Entry", ENTRY), message("RateLimitOverride", OVERRIDE)],
        ..message("RateLimitDescriptor", DESCRIPTOR)
    };
    let limit =
        DescriptorProto { enum_type: vec![enumeration("Unit", UNITS)], ..message("RateLimit", LIMIT) };
    let response = DescriptorProto {
        nested_type: vec![limit, message("DescriptorStatus", STATUS)],
        enum_type: vec![enumeration("Code", CODES)],
        ..message("RateLimitResponse", RESPONSE)
    };
    let method = MethodDescriptorProto {
        name: Some("ShouldRateLimit".to_owned()),
        input_type: Some(".envoy.service.ratelimit.v3.RateLimitRequest".to_owned()),
        output_type: Some(".envoy.service.ratelimit.v3.RateLimitResponse".to_owned()),
        ..MethodDescriptorProto::default()
    };
    let service = ServiceDescriptorProto {
        name: Some("RateLimitService".to_owned()),
        method: vec![method],
        options: None,
    };
    let (structs_name, duration_name) = ("google/protobuf/struct.proto", "google/protobuf/duration.proto");
    let wrappers_name = "google/protobuf/wrappers.proto";
    let (unit_name, header_name) = ("envoy/type/v3/ratelimit_unit.proto", "envoy/config/core/v3/base.proto");
    let descriptor_name = "envoy/extensions/common/ratelimit/v3/ratelimit.proto";
    FileDescriptorSet {
        file: vec![
            with(file(duration_name, "google.protobuf", &[]), message("Duration", DURATION)),
            with(file(wrappers_name, "google.protobuf", &[]), message("UInt64Value", UINT64_VALUE)),
            structs,
            FileDescriptorProto {
                enum_type: vec![enumeration("RateLimitUnit", &UNITS[..OWN_UNITS])],
                ..file(unit_name, "envoy.type.v3", &[])
            },
            with(file(header_name, "envoy.config.core.v3", &[]), message("HeaderValue", HEADER_VALUE)),
            with(
                file(descriptor_name, "envoy.extensions.common.ratelimit.v3", &[unit_name, wrappers_name]),
                descriptor,
            ),
            FileDescriptorProto {
                message_type: vec![message("RateLimitRequest", REQUEST), response],
                service: vec![service],
                ..file(
                    "envoy/service/ratelimit/v3/rls.proto",
                    "envoy.service.ratelimit.v3",
                    &[descriptor_name, header_name, structs_name, duration_name],
                )
            },
        ],
    }
}

fn file(name: &str, package: &str, needs: &[&str]) -> FileDescriptorProto {
    FileDescriptorProto {
        name: Some(name.to_owned()),
        package: Some(package.to_owned()),
        dependency: needs.iter().map(ToString::to_string).collect(),
        syntax: Some("proto3".to_owned()),
        ..FileDescriptorProto::default()
    }
}

fn with(file: FileDescriptorProto, message: DescriptorProto) -> FileDescriptorProto {
    FileDescriptorProto { message_type: vec![message], ..file }
}

fn message(name: &str, fields: &[Field]) -> DescriptorProto {
    DescriptorProto {
        name: Some(name.to_owned()),
        field: fields.iter().map(|(name, number, of)| field(name, *number, of)).collect(),
        ..DescriptorProto::default()
    }
}

fn field(name: &str, number: i32, of: &str) -> FieldDescriptorProto {
    let (label, of) = match of.strip_prefix('*') {
        Some(of) => (Label::Repeated, of),
        None => (Label::Optional, of),
    };
    let (of, named) = match of {
        "string" => (Type::String, None),
        "bytes" => (Type::Bytes, None),
        "bool" => (Type::Bool, None),
        "double" => (Type::Double, None),
        "int32" => (Type::Int32, None),
        "int64" => (Type::Int64, None),
        "uint32" => (Type::Uint32, None),
        "uint64" => (Type::Uint64, None),
        _ => match of.strip_prefix(':') {
            Some(of) => (Type::Enum, Some(of)),
            None => (Type::Message, Some(of)),
        },
    };
    FieldDescriptorProto {
        name: Some(name.to_owned()),
        number: Some(number),
        label: Some(label.into()),
        r#type: Some(of.into()),
        type_name: named.map(str::to_owned),
        ..FieldDescriptorProto::default()
    }
}

fn enumeration(name: &str, values: &[(&str, i32)]) -> EnumDescriptorProto {
    let value = |(name, number): &(&str, i32)| EnumValueDescriptorProto {
        name: Some((*name).to_owned()),
        number: Some(*number),
        options: None,
    };
    EnumDescriptorProto {
        name: Some(name.to_owned()),
        value: values.iter().map(value).collect(),
        ..EnumDescriptorProto::default()
    }
}
