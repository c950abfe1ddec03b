//! The others: throttlecrab's server, which speaks the same protocol, and Redis, which counts and does not limit.

use std::error::Error;
use std::path::{Path, PathBuf};
use std::process::Command;

use super::Contender;
use crate::install::{debian, succeeds};
use testbed::process::{Folder, Running, free_port, target_folder};

pub(super) const THROTTLECRAB: &str = "throttlecrab, THROTTLE";
pub(super) const INCR: &str = "Redis, INCR";

/// The version that was compared last. Its licence is MIT.
const VERSION: &str = "0.4.40";

/// Starts them. Who does not take part, and why.
pub(super) fn start(folder: &Folder, contenders: &mut Vec<Contender>) -> Result<Vec<String>, Box<dyn Error>> {
    let port = free_port()?;
    let text = port.to_string();
    let arguments = ["--port", &text, "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"];
    let process = Running::start(folder, "redis", Path::new("redis-server"), &arguments, port)?;
    contenders.push(Contender { name: INCR, process, port, command: &["INCR", "user:__rand_int__"] });

    let program = match throttlecrab() {
        Ok(program) => program,
        Err(why) => return Ok(vec![format!("throttlecrab: {why}")]),
    };
    let port = free_port()?;
    let text = port.to_string();
    // Room for all keys from the start: otherwise it sweeps all of them again and again.
    let arguments =
        ["--redis", "--redis-host", "127.0.0.1", "--redis-port", &text, "--store-capacity", "100000"];
    let process = Running::start(folder, "throttlecrab", &program, &arguments, port)?;
    let command: &[&str] = &["THROTTLE", "user:__rand_int__", "1000000", "1000000", "1"];
    contenders.push(Contender { name: THROTTLECRAB, process, port, command });
    Ok(Vec::new())
}

/// Its server, built where we keep what is built.
fn throttlecrab() -> Result<PathBuf, Box<dyn Error>> {
    let root = target_folder()?.join("throttlecrab");
    let program = root.join("bin/throttlecrab-server");
    if !program.is_file() {
        // Its build looks for it.
        debian("protoc", "protobuf-compiler")?;
        eprintln!("installing throttlecrab-server into {}", root.display());
        let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
        let mut install = Command::new(cargo);
        install
            .args(["install", "--quiet", "--locked", "throttlecrab-server", "--version", VERSION, "--root"])
            .arg(&root)
            .arg("--target-dir")
            .arg(root.join("build"));
        if !succeeds(&mut install) {
            return Err("not installed; `cargo install throttlecrab-server` failed".into());
        }
    }
    Ok(program)
}
