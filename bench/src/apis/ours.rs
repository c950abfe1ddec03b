//! Ratekeeper, with all of its APIs open.

use std::error::Error;
use std::path::Path;

use testbed::process::{Folder, Running, free_port};

use super::grpc::Api;
use super::load::CheckFormat;
use super::{ApiCheck, ApiJob, ApiServer, listens_on};

pub(super) const CL_THROTTLE: &str = "ratekeeper, CL.THROTTLE";
pub(super) const CHECK: &str = "ratekeeper, RK.CHECK";
pub(super) const HTTP: &str = "ratekeeper, /v1/check";
pub(super) const GRPC: &str = "ratekeeper, ShouldRateLimit";

/// Starts the release binary, with metrics on.
pub(super) fn start(binary: &Path, folder: &Folder, job: ApiJob) -> Result<ApiServer, Box<dyn Error>> {
    let [resp, http, grpc, admin] = [free_port()?, free_port()?, free_port()?, free_port()?];
    let bucket = match job {
        ApiJob::Allowed => "{ capacity: 1000000, refill: 1000000/s }",
        ApiJob::Denied => "{ capacity: 2, refill: 1/h }",
    };
    let config = format!(
        "limits:
  per-user: {{ key: {{ header: X-User-Id }}, token_bucket: {bucket} }}
domains:
  edge:
    - {{ key: user, token_bucket: {bucket} }}
apis: {{ http: '127.0.0.1:{http}', envoy: '127.0.0.1:{grpc}', resp: '127.0.0.1:{resp}' }}
admin: 127.0.0.1:{admin}
"
    );
    let name = format!("ratekeeper-{}", job.name());
    let config = folder.write(&format!("{name}.yaml"), &config)?.display().to_string();
    let process = Running::start(folder, &name, binary, &["run", "--config", &config], resp)?;
    listens_on(&[http, grpc])?;

    // The first integer is 1 if CL.THROTTLE denies the request, and 1 if RK.CHECK allows it.
    let (limit, throttle_response, check_response) = match job {
        ApiJob::Allowed => (["999999", "1000000", "1"], "*5\r\n:0\r\n", "*6\r\n:1\r\n"),
        ApiJob::Denied => (["1", "1", "3600"], "*5\r\n:1\r\n", "*6\r\n:0\r\n"),
    };
    let throttle = CheckFormat::command(&["CL.THROTTLE"], &limit, throttle_response);
    let check = CheckFormat::command(&["RK.CHECK", "per-user"], &[], check_response);
    let post = CheckFormat::Http { path: "/v1/check", body: r#"{"limit":"per-user","key":"%s"}"#.to_owned() };
    let checks = vec![
        ApiCheck { name: CL_THROTTLE, port: resp, format: throttle },
        ApiCheck { name: CHECK, port: resp, format: check },
        ApiCheck { name: HTTP, port: http, format: post },
        ApiCheck { name: GRPC, port: grpc, format: CheckFormat::Grpc(Api::Envoy) },
    ];
    Ok(ApiServer { job, process, checks })
}
