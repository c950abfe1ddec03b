//! gRPC reflection: the names and messages of the service, for tools such as grpcurl.

use tonic_reflection::server::v1::{ServerReflection, ServerReflectionServer};
use tonic_reflection::server::{Builder, Error};

/// The definitions in `proto/`, compiled. To compile them again, run in that folder:
/// `protoc --proto_path=. --include_imports --descriptor_set_out=rls.binpb envoy/service/ratelimit/v3/rls.proto`
const DESCRIPTOR_SET: &[u8] = include_bytes!("proto/rls.binpb");

/// The reflection service.
pub(super) fn service() -> Result<ServerReflectionServer<impl ServerReflection>, Error> {
    Builder::configure()
        .register_encoded_file_descriptor_set(DESCRIPTOR_SET)
        .register_encoded_file_descriptor_set(tonic_health::pb::FILE_DESCRIPTOR_SET)
        .build_v1()
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use prost::Message;
    use prost_types::FileDescriptorSet;

    use super::DESCRIPTOR_SET;

    #[test]
    fn descriptor_set_is_the_compiled_proto_folder() {
        let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/src/envoy/proto");
        let compiled = Command::new("protoc")
            .current_dir(folder)
            .args(["--proto_path=.", "--include_imports", "--descriptor_set_out=/dev/stdout"])
            .arg("envoy/service/ratelimit/v3/rls.proto")
            .output()
            .expect("protoc is needed: install protobuf-compiler");
        assert!(compiled.status.success(), "{}", String::from_utf8_lossy(&compiled.stderr));
        let [checked_in, compiled] =
            [DESCRIPTOR_SET, &compiled.stdout].map(|bytes| FileDescriptorSet::decode(bytes).unwrap());
        assert_eq!(checked_in, compiled);
    }
}
