//! gRPC reflection: the names and messages of the service, for tools such as grpcurl.

use tonic_reflection::server::{Builder, Error};
use tonic_reflection::server::{v1, v1alpha};

/// The definitions in `proto/`, compiled. To compile them again, run in that folder:
/// `protoc --proto_path=. --include_imports --descriptor_set_out=rls.binpb envoy/service/ratelimit/v3/rls.proto`
const DESCRIPTOR_SET: &[u8] = include_bytes!("proto/rls.binpb");

fn builder() -> Builder<'static> {
    Builder::configure()
        .register_encoded_file_descriptor_set(DESCRIPTOR_SET)
        .register_encoded_file_descriptor_set(tonic_health::pb::FILE_DESCRIPTOR_SET)
}

/// The reflection service.
pub(super) fn service() -> Result<v1::ServerReflectionServer<impl v1::ServerReflection>, Error> {
    builder().build_v1()
}

/// The reflection service by its older name, which many tools still call first.
pub(super) fn service_v1alpha()
-> Result<v1alpha::ServerReflectionServer<impl v1alpha::ServerReflection>, Error> {
    builder().build_v1alpha()
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
