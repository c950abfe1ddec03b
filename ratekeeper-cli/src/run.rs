//! Runs the configured gateway and APIs until a stop signal.

use std::io::{self, IsTerminal, Write};
use std::net::SocketAddr;
use std::path::Path;
use std::time::Duration;

use ratekeeper::Memory;
use ratekeeper::redis::Redis;
use ratekeeper_config::{Config, Store, Timeouts};
use ratekeeper_server::gateway::{Gateway, StartError};
use ratekeeper_server::{Apis, Backend, Sockets, admin, demo};
use tokio::process::Child;
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::time::interval;

use crate::args::Run;
use crate::descriptors;
use crate::failure::CliError;
use crate::handover;
use crate::input::config_text;
use crate::migrate;
use crate::outside::{Files, Surroundings};

/// The default configuration.
const EXAMPLE: &str = include_str!("../../examples/gateway.yaml");
const EXAMPLE_NAME: &str = "examples/gateway.yaml, shipped with ratekeeper";
const DEMO_UPSTREAM: SocketAddr = SocketAddr::new(std::net::IpAddr::V4(std::net::Ipv4Addr::LOCALHOST), 8081);
const FORGOTTEN: &str =
    "the successor starts with empty counters: `store: memory` is not shared between processes";
/// How often the configuration files are polled for changes, for deployments that do not send SIGHUP.
const LOOK_EVERY: Duration = Duration::from_secs(1);

pub(crate) fn run(args: &Run) -> Result<(), CliError> {
    let source = Source { path: args.config.as_deref(), envoy: args.envoy_config.as_deref() };
    let (config, files) = source.read();
    let config = config?;
    crate::log::start();
    warn(&config, &source.name());
    descriptors::raise();
    let mut sockets = Sockets::new(handover::inherited()?);
    // Resolved now: by the time of an upgrade the path may hold another program, and the current one may have no
    // path.
    let program = std::env::current_exe();
    let program = program.map_err(|error| CliError::Input(format!("cannot find this program: {error}")))?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let runtime = runtime.map_err(|error| CliError::Input(format!("cannot start: {error}")))?;
    runtime.block_on(async {
        if source.is_example() {
            let unable = |error: io::Error| {
                CliError::Input(format!("cannot listen on {DEMO_UPSTREAM} for the demo upstream: {error}"))
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

    /// Returns true if neither a file nor a folder is given.
    fn is_example(&self) -> bool {
        self.path.is_none() && self.envoy.is_none()
    }

    /// Returns the text; adds every file read so far to `files`.
    fn text(&self, files: &mut Files) -> Result<String, CliError> {
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

    /// Returns the parsed configuration and every file read for it.
    fn read(&self) -> (Result<Config, CliError>, Files) {
        let mut files = Files::default();
        let text = match self.text(&mut files) {
            Ok(text) => text,
            Err(failure) => return (Err(failure), files),
        };
        let surroundings = Surroundings::of(self.path.unwrap_or(Path::new("")), files);
        let config = ratekeeper_config::parse(&text, &surroundings)
            .map_err(|errors| CliError::Config(Box::new(errors.in_file(&self.name()))));
        (config, surroundings.into_files())
    }
}

async fn serve<S: Backend>(
    source: &Source<'_>,
    config: &Config,
    mut files: Files,
    mut sockets: Sockets,
    program: &Path,
) -> Result<(), CliError> {
    let listen =
        |kind| signal(kind).map_err(|error| CliError::Input(format!("cannot listen to signals: {error}")));
    let mut stop = [listen(SignalKind::terminate())?, listen(SignalKind::interrupt())?];
    let (mut hang_up, mut upgrade) = (listen(SignalKind::hangup())?, listen(SignalKind::user_defined2())?);
    let gateway = Gateway::<S>::start(config, &mut sockets).await.map_err(|error| cannot_start(&error))?;
    let apis = Apis::open(config, &mut sockets, &gateway).map_err(|error| cannot_start(&error))?;
    let watched = apis.status(gateway.status());
    let watching = config.admin.as_ref().map(|admin| admin.listen).map(|address| {
        sockets.listen(address).and_then(|listener| admin::listen(listener, watched)).map_err(|error| {
            CliError::Input(match error.kind() {
                io::ErrorKind::AddrInUse => format!(
                    "{address} is in use by another program; stop that, or write another `admin` in the file"
                ),
                _ => format!("cannot listen on {address} for `admin`: {error}"),
            })
        })
    });
    let watching = watching.transpose()?;
    for address in sockets.close_unused() {
        tracing::warn!(%address, "inherited socket ignored: no listener has this address");
    }
    descriptors::check(config);
    greet(source, config, gateway.addresses(), watching.as_ref().map(|(address, _)| *address));
    apis.addresses().iter().for_each(|(api, address)| greet_api(api, *address));
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
                    tracing::info!(pid = child.id(), "successor started");
                    if matches!(config.store, Store::Memory { .. }) {
                        tracing::warn!("{FORGOTTEN}");
                    }
                    successor = Some(child);
                }
                Err(error) => tracing::error!(%error, "successor not started, still serving"),
            },
            status = ended(&mut successor) => {
                successor = None;
                tracing::error!(%status, "successor exited before it was ready, still serving");
            }
        }
    }
    // Close the sockets so that no client waits in an accept queue that is no longer served; a successor has its own
    // copies.
    drop(sockets);
    if let (Some(watching), Some(_)) = (watching, successor) {
        watching.abort();
    }
    say("draining: no new connections; requests in flight finish");
    let patience = config.gateway.as_ref().map_or(Timeouts::default(), |gateway| gateway.timeouts).drain;
    tokio::select! {
        ((), left) = async { tokio::join!(apis.close(patience), gateway.drain()) } => match left {
            0 => say("done"),
            left => say(&format!("done; {left} connections took longer than the file allows")),
        },
        () = any(&mut stop) => say("stopped immediately by a second signal"),
    }
    Ok(())
}

/// Waits until the successor exits; forever if there is none.
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

/// Applies the current configuration files if they are valid, else keeps the old configuration. Returns the files
/// read.
fn reload<S: Backend>(source: &Source<'_>, gateway: &Gateway<S>) -> Files {
    let name = source.name();
    let (config, files) = source.read();
    match config {
        Ok(config) => match gateway.reload(&config) {
            Ok(()) => {
                tracing::info!(file = name, "configuration reloaded");
                warn(&config, &name);
                descriptors::check(&config);
            }
            Err(error) => {
                tracing::error!(file = name, %error, "configuration not reloaded, the old one stays active");
            }
        },
        Err(failure) => {
            gateway.count_failed_reload();
            tracing::error!(file = name, error = %failure, "configuration not reloaded, the old one stays active");
        }
    }
    files
}

/// Logs the warnings of a configuration.
fn warn(config: &Config, name: &str) {
    for warning in &config.warnings {
        let at = format!("{name}:{}:{}", warning.line(), warning.column());
        tracing::warn!(%at, help = warning.help(), "{}", warning.message());
    }
}

fn cannot_start(error: &StartError) -> CliError {
    match error {
        StartError::NoGateway => CliError::Typed(error.to_string()),
        error => CliError::Input(error.to_string()),
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

fn greet_api(api: &str, address: SocketAddr) {
    say(&match api {
        "http" => format!("limits asked over HTTP on http://{address}/v1/check"),
        "envoy" => format!("rate limit service for Envoy on {address}"),
        _ => format!("limits asked by clients of Redis on redis://{address}"),
    });
}

/// Prints to a terminal; otherwise writes a log line.
fn say(text: &str) {
    match io::stderr().is_terminal() {
        // A failed write is ignored: there is no other channel to report it on.
        true => drop(writeln!(io::stderr(), "ratekeeper: {text}")),
        false => tracing::info!("{text}"),
    }
}
