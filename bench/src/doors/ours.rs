//! Our door, in a process of its own.

use std::error::Error;
use std::sync::Arc;
use std::time::Duration;

use tokio::runtime::Runtime;
use tokio::sync::watch;
use tollgate::tower::RateLimitLayer;
use tollgate::tower::key::{Key, Part};
use tollgate::tower::rule::Rule;
use tollgate::{Limit, Memory, Rate, Style};
use tollgate_config::Secret;
use tollgate_server::Sockets;
use tollgate_server::resp::{Behind, Counts, Door, Patience, listen};

use super::Contender;
use testbed::process::{Folder, Running, free_port};

pub(super) const CL_THROTTLE: &str = "tollgate, CL.THROTTLE";
pub(super) const CHECK: &str = "tollgate, TG.CHECK";

/// The same limits for as long as it runs.
struct Fixed(RateLimitLayer);

impl Behind for Fixed {
    type Store = Memory;

    fn limits(&self) -> Option<RateLimitLayer> {
        Some(self.0.clone())
    }

    fn token(&self) -> Option<Secret> {
        None
    }

    fn max_connections(&self) -> usize {
        1_000
    }
}

/// Serves until the process is killed.
pub(crate) fn serve(port: u16) -> Result<(), Box<dyn Error>> {
    let rate = Rate::new(1_000_000, Duration::from_secs(1))?;
    let limit = Limit::token_bucket(1_000_000, rate, Style::Smooth)?;
    let rule = Rule::new("plenty", limit).key(Key::of(Part::header("X-User-Id")));
    let layer = RateLimitLayer::builder().rule(rule).build()?;
    let (_draining, draining) = watch::channel(false);
    let counts = Arc::new(Counts::default());
    let door = Door { behind: Arc::new(Fixed(layer)), counts, patience: Patience::default(), draining };
    let runtime = Runtime::new()?;
    let _in_it = runtime.enter();
    let listener = Sockets::default().listen(([127, 0, 0, 1], port).into())?;
    let (_, serving) = listen(listener, door)?;
    runtime.block_on(serving);
    Ok(())
}

/// A process for each of the commands.
pub(super) fn start(folder: &Folder) -> Result<Vec<Contender>, Box<dyn Error>> {
    let program = std::env::current_exe()?;
    let commands: [(&str, &[&str]); 2] = [
        (CL_THROTTLE, &["CL.THROTTLE", "user:__rand_int__", "999999", "1000000", "1"]),
        (CHECK, &["TG.CHECK", "plenty", "user:__rand_int__"]),
    ];
    let start = |(name, command)| {
        let port = free_port()?;
        let process = Running::start(folder, "tollgate", &program, &["resp-door", &port.to_string()], port)?;
        Ok(Contender { name, process, port, command })
    };
    commands.into_iter().map(start).collect()
}
