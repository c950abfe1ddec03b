//! Runs everything that a file configures, until it is told to stop.

use std::io::{self, IsTerminal, Write};
use std::net::SocketAddr;
use std::path::Path;
use std::time::Duration;

use tokio::process::Child;
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::time::interval;
use tollgate::Memory;
use tollgate::redis::Redis;
use tollgate_config::{Config, Store, Timeouts};
use tollgate_server::gateway::{Gateway, StartError};
use tollgate_server::{Doors, Sockets, Stored, admin, demo};

use crate::args::Run;
use crate::descriptors;
use crate::failure::Failure;
use crate::handover;
use crate::input::config_text;
use crate::migrate;
use crate::outside::{Files, Surroundings};

/// What runs where no file is given.
const EXAMPLE: &str = include_str!("../../examples/gateway.yaml");
const EXAMPLE_NAME: &str = "examples/gateway.yaml, shipped with tollgate";
const DEMO_UPSTREAM: SocketAddr = SocketAddr::new(std::net::IpAddr::V4(std::net::Ipv4Addr::LOCALHOST), 8081);
const FORGOTTEN: &str =
    "the successor counts from zero: with `store: memory`, what each key has used ends with this process";
/// How often the file, and those that it refers to, are looked at, for those who do not send signals.
const LOOK_EVERY: Duration = Duration::from_secs(1);

pub(crate) fn run(args: &Run) -> Result<(), Failure> {
    let source = Source { path: args.config.as_deref(), envoy: args.envoy_config.as_deref() };
    let (config, files) = source.read();
    let config = config?;
    crate::log::start();
    descriptors::raise();
    let mut sockets = Sockets::new(handover::inherited()?);
    // By the time a successor is wanted, this path may hold another program; ours would have no path then.
    let program = std::env::current_exe();
    let program = program.map_err(|error| Failure::Input(format!("cannot find this program: {error}")))?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let runtime = runtime.map_err(|error| Failure::Input(format!("cannot start: {error}")))?;
    runtime.block_on(async {
        if source.is_example() {
            let unable = |error: io::Error| {
                Failure::Input(format!("cannot listen on {DEMO_UPSTREAM} for the demo upstream: {error}"))
            };
            let (address, serving) = sockets.listen(DEMO_UPSTREAM).and_then(demo::listen).map_err(unable)?;
            tokio::spawn(serving);
            say(&format!("demo upstream on http://{address}"));
        }
        match &config.store {
            Store::Memory { .. } => serve::<Memory>(&source, &config, files, sockets, &program).await,
            Store::Redis(_) => serve::<Redis>(&source, &config, files, sockets, &program).await,
        }
    })
}

/// Where the configuration comes from.
struct Source<'a> {
    path: Option<&'a Path>,
    /// A folder with files of Envoy's rate limit service.
    envoy: Option<&'a Path>,
}

impl Source<'_> {
    fn name(&self) -> String {
        let shown = |path: &Path| path.display().to_string();
        match (self.path, self.envoy) {
            (Some(path), Some(folder)) => format!("{} and {}", shown(path), shown(folder)),
            (path, folder) => path.or(folder).map_or(EXAMPLE_NAME.to_owned(), shown),
        }
    }

    /// Whether nothing was said of where it comes from.
    fn is_example(&self) -> bool {
        self.path.is_none() && self.envoy.is_none()
    }

    /// The text, and every file that was read for it until now.
    fn text(&self, files: &mut Files) -> Result<String, Failure> {
        let mut text = match (self.path, self.envoy) {
            (Some(path), _) => {
                files.note(path.to_owned());
                config_text(path)?
            }
            (None, Some(_)) => migrate::HEAD.to_owned(),
            (None, None) => EXAMPLE.to_owned(),
        };
        if let Some(folder) = self.envoy {
            text.push('\n');
            text.push_str(&migrate::domains(folder, files)?);
        }
        Ok(text)
    }

    /// What it says, and every file that was read for it.
    fn read(&self) -> (Result<Config, Failure>, Files) {
        let mut files = Files::default();
        let text = match self.text(&mut files) {
            Ok(text) => text,
            Err(failure) => return (Err(failure), files),
        };
        let surroundings = Surroundings::of(self.path.unwrap_or(Path::new("")), files);
        let config = tollgate_config::parse(&text, &surroundings)
            .map_err(|errors| Failure::Config(Box::new(errors.in_file(&self.name()))));
        (config, surroundings.into_files())
    }
}

async fn serve<S: Stored>(
    source: &Source<'_>,
    config: &Config,
    mut files: Files,
    mut sockets: Sockets,
    program: &Path,
) -> Result<(), Failure> {
    let listen =
        |kind| signal(kind).map_err(|error| Failure::Input(format!("cannot listen to signals: {error}")));
    let mut stop = [listen(SignalKind::terminate())?, listen(SignalKind::interrupt())?];
    let (mut hang_up, mut upgrade) = (listen(SignalKind::hangup())?, listen(SignalKind::user_defined2())?);
    let gateway = Gateway::<S>::start(config, &mut sockets).await.map_err(|error| cannot_start(&error))?;
    let doors = Doors::open(config, &mut sockets, &gateway).map_err(|error| cannot_start(&error))?;
    let watched = doors.watched(gateway.watched());
    let watching = config.admin.as_ref().map(|admin| admin.listen).map(|address| {
        sockets.listen(address).and_then(|listener| admin::listen(listener, watched)).map_err(|error| {
            Failure::Input(match error.kind() {
                io::ErrorKind::AddrInUse => format!(
                    "{address} is in use by another program; stop that, or write another `admin` in the file"
                ),
                _ => format!("cannot listen on {address} for `admin`: {error}"),
            })
        })
    });
    let watching = watching.transpose()?;
    for address in sockets.close_unused() {
        tracing::warn!(%address, "a socket was handed over that the file does not listen on");
    }
    descriptors::check(config);
    greet(source, config, gateway.addresses(), watching.as_ref().map(|(address, _)| *address));
    doors.addresses().iter().for_each(|(door, address)| greet_door(door, *address));
    let watching = watching.map(|(_, serving)| tokio::spawn(serving));
    handover::relieve_predecessor();
    let (mut looks, mut successor) = (interval(LOOK_EVERY), None);
    loop {
        tokio::select! {
            () = any(&mut stop) => break,
            _ = hang_up.recv() => files = reload(source, &gateway),
            _ = looks.tick() => if files.have_changed() {
                files = reload(source, &gateway);
            },
            _ = upgrade.recv(), if successor.is_none() => match handover::successor(program, &sockets) {
                Ok(child) => {
                    tracing::info!(pid = child.id(), "started a successor");
                    if matches!(config.store, Store::Memory { .. }) {
                        tracing::warn!("{FORGOTTEN}");
                    }
                    successor = Some(child);
                }
                Err(error) => tracing::error!(%error, "no successor can be started; this one goes on"),
            },
            status = ended(&mut successor) => {
                successor = None;
                tracing::error!(%status, "the successor ended before it was ready; this one goes on");
            }
        }
    }
    // Nobody is to wait in a queue that is served no more; a successor has sockets of its own.
    drop(sockets);
    if let (Some(watching), Some(_)) = (watching, successor) {
        watching.abort();
    }
    say("draining: no new connections, and requests that are under way end");
    let patience = config.gateway.as_ref().map_or(Timeouts::default(), |gateway| gateway.timeouts).drain;
    tokio::select! {
        ((), left) = async { tokio::join!(doors.close(patience), gateway.drain()) } => match left {
            0 => say("done"),
            left => say(&format!("done; {left} connections took longer than the file allows")),
        },
        () = any(&mut stop) => say("done at once, by a second signal"),
    }
    Ok(())
}

/// Until the successor has ended, if there is one.
async fn ended(successor: &mut Option<Child>) -> String {
    match successor {
        Some(child) => child.wait().await.map_or_else(|error| error.to_string(), |status| status.to_string()),
        None => std::future::pending().await,
    }
}

async fn any([one, other]: &mut [Signal; 2]) {
    tokio::select! {
        _ = one.recv() => {}
        _ = other.recv() => {}
    }
}

/// Goes on by what the files say now, if that is right. Those that were read for it.
fn reload<S: Stored>(source: &Source<'_>, gateway: &Gateway<S>) -> Files {
    let name = source.name();
    let (config, files) = source.read();
    match config {
        Ok(config) => match gateway.reload(&config) {
            Ok(()) => {
                tracing::info!(file = name, "reloaded");
                descriptors::check(&config);
            }
            Err(error) => tracing::error!(file = name, %error, "not reloaded; the old configuration goes on"),
        },
        Err(failure) => {
            gateway.kept_old();
            tracing::error!(file = name, error = %failure, "not reloaded; the old configuration goes on");
        }
    }
    files
}

fn cannot_start(error: &StartError) -> Failure {
    match error {
        StartError::NoGateway => Failure::Typed(error.to_string()),
        error => Failure::Input(error.to_string()),
    }
}

fn greet(source: &Source<'_>, config: &Config, addresses: &[SocketAddr], admin: Option<SocketAddr>) {
    say(&format!("configuration {}", source.name()));
    let listeners = config.gateway.iter().flat_map(|gateway| &gateway.listeners);
    for (listener, address) in listeners.zip(addresses) {
        let scheme = if listener.tls.is_some() { "https" } else { "http" };
        say(&format!("gateway on {scheme}://{address}"));
    }
    if let Some(admin) = admin {
        say(&format!("metrics and health on http://{admin}/metrics"));
    }
    if source.is_example()
        && let Some(address) = addresses.first()
    {
        let path = "/api/test";
        say(&format!("try it:  curl -i -H \"X-User-Id: user123\" http://localhost:{}{path}", address.port()));
    }
}

fn greet_door(door: &str, address: SocketAddr) {
    say(&match door {
        "http" => format!("limits asked over HTTP on http://{address}/v1/check"),
        "grpc" => format!("rate limit service for Envoy on {address}"),
        _ => format!("limits asked by clients of Redis on redis://{address}"),
    });
}

/// Tells people on a terminal; a machine gets a line like all others.
fn say(text: &str) {
    match io::stderr().is_terminal() {
        // If nobody is there to read it, there is nobody to tell.
        true => drop(writeln!(io::stderr(), "tollgate: {text}")),
        false => tracing::info!("{text}"),
    }
}
