//! Runs everything that a file configures, until it is told to stop.

use std::io::{self, Write};
use std::net::SocketAddr;
use std::path::Path;
use std::time::{Duration, SystemTime};

use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::time::interval;
use tollgate::Memory;
use tollgate::redis::Redis;
use tollgate_config::{Config, Store};
use tollgate_server::gateway::{Gateway, StartError};
use tollgate_server::{Stored, admin, demo};

use crate::args::Run;
use crate::failure::Failure;
use crate::input::config_text;
use crate::outside::Surroundings;

/// What runs where no file is given.
const EXAMPLE: &str = include_str!("../../examples/gateway.yaml");
const EXAMPLE_NAME: &str = "examples/gateway.yaml, shipped with tollgate";
const DEMO_UPSTREAM: SocketAddr =
    SocketAddr::new(std::net::IpAddr::V4(std::net::Ipv4Addr::LOCALHOST), 8081);
/// How often the file is looked at, for those who do not send signals.
const LOOK_EVERY: Duration = Duration::from_secs(1);

pub(crate) fn run(args: &Run) -> Result<(), Failure> {
    let source = Source { path: args.config.as_deref() };
    let config = source.read()?;
    crate::log::start();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let runtime = runtime.map_err(|error| Failure::Input(format!("cannot start: {error}")))?;
    runtime.block_on(async {
        if source.path.is_none() {
            let unable = |error: io::Error| {
                Failure::Input(format!("cannot listen on {DEMO_UPSTREAM} for the demo upstream: {error}"))
            };
            let (address, serving) = demo::listen(DEMO_UPSTREAM).await.map_err(unable)?;
            tokio::spawn(serving);
            say(&format!("demo upstream on http://{address}"));
        }
        match &config.store {
            Store::Memory { .. } => serve::<Memory>(&source, &config).await,
            Store::Redis(_) => serve::<Redis>(&source, &config).await,
        }
    })
}

/// Where the configuration comes from.
struct Source<'a> {
    path: Option<&'a Path>,
}

impl Source<'_> {
    fn name(&self) -> String {
        self.path.map_or(EXAMPLE_NAME.to_owned(), |path| path.display().to_string())
    }

    fn read(&self) -> Result<Config, Failure> {
        let (text, folder) = match self.path {
            Some(path) => (config_text(path)?, path),
            None => (EXAMPLE.to_owned(), Path::new("")),
        };
        tollgate_config::parse(&text, &Surroundings::of(folder))
            .map_err(|errors| Failure::Config(Box::new(errors.in_file(&self.name()))))
    }

    /// Changes whenever the file does.
    fn version(&self) -> Option<(SystemTime, u64)> {
        let about = std::fs::metadata(self.path?).ok()?;
        Some((about.modified().ok()?, about.len()))
    }
}

async fn serve<S: Stored>(source: &Source<'_>, config: &Config) -> Result<(), Failure> {
    let gateway = Gateway::<S>::start(config).await.map_err(|error| cannot_start(&error))?;
    let watching = match config.admin {
        Some(address) => Some(admin::listen(address, gateway.watched()).await.map_err(|error| {
            Failure::Input(format!("cannot listen on {address}: {error}; write another `admin` in the file"))
        })?),
        None => None,
    };
    greet(source, gateway.addresses(), watching.as_ref().map(|(address, _)| *address));
    if let Some((_, serving)) = watching {
        tokio::spawn(serving);
    }
    let listen = |kind| signal(kind).map_err(|error| Failure::Input(format!("cannot listen to signals: {error}")));
    let mut stop = [listen(SignalKind::terminate())?, listen(SignalKind::interrupt())?];
    let mut hang_up = listen(SignalKind::hangup())?;
    let (mut looks, mut version) = (interval(LOOK_EVERY), source.version());
    loop {
        tokio::select! {
            () = any(&mut stop) => break,
            _ = hang_up.recv() => reload(source, &gateway),
            _ = looks.tick() => {
                let now = source.version();
                // A file that is gone for a moment is being replaced.
                if now.is_some() && now != version {
                    version = now;
                    reload(source, &gateway);
                }
            }
        }
    }
    say("draining: no new connections, and requests that are under way end");
    match gateway.drain().await {
        0 => say("done"),
        left => say(&format!("done; {left} connections took longer than the file allows")),
    }
    Ok(())
}

async fn any([one, other]: &mut [Signal; 2]) {
    tokio::select! {
        _ = one.recv() => {}
        _ = other.recv() => {}
    }
}

fn reload<S: Stored>(source: &Source<'_>, gateway: &Gateway<S>) {
    let name = source.name();
    match source.read() {
        Ok(config) => match gateway.reload(&config) {
            Ok(()) => tracing::info!(file = name, "reloaded"),
            Err(error) => tracing::error!(file = name, %error, "not reloaded; the old configuration goes on"),
        },
        Err(failure) => {
            tracing::error!(file = name, "not reloaded; the old configuration goes on");
            failure.tell();
        }
    }
}

fn cannot_start(error: &StartError) -> Failure {
    match error {
        StartError::NoGateway => Failure::Typed(error.to_string()),
        error => Failure::Input(error.to_string()),
    }
}

fn greet(source: &Source<'_>, addresses: &[SocketAddr], admin: Option<SocketAddr>) {
    say(&format!("configuration {}", source.name()));
    for address in addresses {
        say(&format!("gateway on http://{address}"));
    }
    if let Some(admin) = admin {
        say(&format!("metrics and health on http://{admin}/metrics"));
    }
    if source.path.is_none()
        && let Some(address) = addresses.first()
    {
        let path = "/api/test";
        say(&format!("try it:  curl -i -H \"X-User-Id: user123\" http://localhost:{}{path}", address.port()));
    }
}

/// Talk goes to stderr.
fn say(text: &str) {
    // If nobody is there to read it, there is nobody to tell.
    let _ = writeln!(io::stderr(), "tollgate: {text}");
}
