//! The peers: throttlecrab's server, which speaks the same protocols, and Redis, which counts without limiting.

use std::error::Error;
use std::path::{Path, PathBuf};

use testbed::process::{Folder, Running, free_port, target_folder};

use super::grpc::Api;
use super::load::CheckFormat;
use super::{ApiCheck, ApiJob, ApiServer, listens_on};
use crate::install::{cargo, debian, succeeds};

pub(super) const THROTTLECRAB: &str = "throttlecrab";
const INCR: &str = "Redis, INCR";

/// The version last compared. Its license is MIT.
const VERSION: &str = "0.4.40";

pub(super) fn redis(folder: &Folder) -> Result<ApiServer, Box<dyn Error>> {
    let port = free_port()?;
    let text = port.to_string();
    let arguments = ["--port", &text, "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"];
    let process = Running::start(folder, "redis", Path::new("redis-server"), &arguments, port)?;
    let checks = vec![ApiCheck { name: INCR, port, format: CheckFormat::command(&["INCR"], &[], ":") }];
    Ok(ApiServer { job: ApiJob::Allowed, process, checks })
}

/// Starts throttlecrab with all of its protocols open, as Ratekeeper has. Its limits are inline.
pub(super) fn start(program: &Path, folder: &Folder, job: ApiJob) -> Result<ApiServer, Box<dyn Error>> {
    let ports = [free_port()?, free_port()?, free_port()?];
    let [resp, http, grpc] = ports.map(|port| port.to_string());
    let host = "127.0.0.1";
    let arguments = [
        ["--redis", "--redis-host", host, "--redis-port", &resp],
        ["--http", "--http-host", host, "--http-port", &http],
        ["--grpc", "--grpc-host", host, "--grpc-port", &grpc],
    ];
    // Capacity for all keys from the start, because it otherwise sweeps all of them repeatedly; and no list of the
    // most denied keys, which Ratekeeper does not keep either.
    let arguments = [arguments.as_flattened(), &["--store-capacity", "100000", "--max-denied-keys", "0"]];
    let name = format!("throttlecrab-{}", job.name());
    let [resp, http, grpc] = ports;
    let process = Running::start(folder, &name, program, &arguments.concat(), resp)?;
    listens_on(&[http, grpc])?;

    let (limit, response) = match job {
        ApiJob::Allowed => (["1000000", "1000000", "1"], "*5\r\n:1\r\n"),
        ApiJob::Denied => (["2", "1", "3600"], "*5\r\n:0\r\n"),
    };
    let [burst, count, period] = limit;
    let body = format!(r#"{{"key":"%s","max_burst":{burst},"count_per_period":{count},"period":{period}}}"#);
    let formats = [
        (resp, CheckFormat::command(&["THROTTLE"], &limit, response)),
        (http, CheckFormat::Http { path: "/throttle", body }),
        (grpc, CheckFormat::Grpc(Api::Throttlecrab)),
    ];
    let checks = formats.map(|(port, format)| ApiCheck { name: THROTTLECRAB, port, format }).into();
    Ok(ApiServer { job, process, checks })
}

/// Returns throttlecrab's server, built below the target folder. The build takes minutes, so a quick run skips it.
pub(super) fn throttlecrab(is_quick: bool) -> Result<PathBuf, Box<dyn Error>> {
    let root = target_folder()?.join("throttlecrab");
    let program = root.join("bin/throttlecrab-server");
    if program.is_file() {
        return Ok(program);
    }
    if is_quick {
        return Err("not installed; a run that is not quick installs it".into());
    }
    // Its build script needs protoc.
    debian("protoc", "protobuf-compiler")?;
    eprintln!("installing throttlecrab-server into {}", root.display());
    let mut install = cargo();
    install
        .args(["install", "--quiet", "--locked", "throttlecrab-server", "--version", VERSION, "--root"])
        .arg(&root)
        .arg("--target-dir")
        .arg(root.join("build"));
    match succeeds(&mut install) {
        true => Ok(program),
        false => Err("not installed; `cargo install throttlecrab-server` failed".into()),
    }
}
