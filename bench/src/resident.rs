//! Bytes per key: the growth of a process while a contender stores its keys.
//!
//! Each contender runs in a separate process, so that none reuses memory that another has freed. The caller holds one
//! key at a time; all other memory belongs to the contender's table.

use std::error::Error;
use std::process::Command;
use std::{env, fs, slice};

use clap::ValueEnum;

use crate::contenders::{Budget, ContenderKind, KeyType};
use crate::keys::Key;

/// Starts this program again to measure one contender.
pub(crate) fn measure(kind: ContenderKind, keys: usize) -> Result<u64, Box<dyn Error>> {
    let argument = kind.to_possible_value().ok_or("a contender without a name")?;
    let child = Command::new(env::current_exe()?)
        .args(["resident", argument.get_name(), &keys.to_string()])
        .output()?;
    if !child.status.success() {
        return Err(format!("{}: {}", kind.name(), String::from_utf8_lossy(&child.stderr)).into());
    }
    Ok(String::from_utf8(child.stdout)?.trim().parse()?)
}

/// Returns the growth of resident memory, in bytes, after a contender has stored `keys` keys of 16 bytes.
pub(crate) fn bytes_used(kind: ContenderKind, keys: usize) -> Result<u64, Box<dyn Error>> {
    // Exclude what a contender allocates once per process.
    let first = String::contender(kind, Budget::AMPLE, 1)?;
    first.decide_all(slice::from_ref(&String::numbered(0)));

    let before = resident_bytes()?;
    let contender = String::contender(kind, Budget::AMPLE, keys)?;
    for number in 0..keys as u64 {
        contender.decide_all(slice::from_ref(&String::numbered(number)));
    }
    Ok(resident_bytes()?.saturating_sub(before))
}

fn resident_bytes() -> Result<u64, Box<dyn Error>> {
    let status = fs::read_to_string("/proc/self/status")?;
    let kib = status
        .lines()
        .find_map(|line| line.strip_prefix("VmRSS:")?.trim().strip_suffix(" kB")?.parse::<u64>().ok())
        .ok_or("no VmRSS in /proc/self/status")?;
    Ok(kib * 1024)
}
