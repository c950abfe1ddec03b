//! Runs the configured gateway and APIs until a stop signal.

use std::io;
use std::path::Path;

use ratekeeper::Memory;
use ratekeeper::redis::Redis;
use ratekeeper_config::{Config, Store};
use ratekeeper_server::{Backend, LogStyle, Server, ServiceAddress, Sockets, StartError};
use tokio::process::Child;
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::time::Instant;

use crate::args::{LogArgs, Run};
use crate::banner;
use crate::config_reader::ConfigReader;
use crate::config_source::ConfigSource;
use crate::demo::Demo;
use crate::environment::Files;
use crate::error::{CliError, reason};
use crate::handover;
use crate::log::{self, EventLog};
use crate::open_files;
use crate::validate;

/// Runs what a configuration file configures.
pub(crate) fn run(args: &Run) -> Result<(), CliError> {
    start(&ConfigSource::find(args)?, args.log, Sockets::new(handover::inherited_sockets()?), None)
}

/// Runs the built-in example in front of a small upstream.
pub(crate) fn demo(args: LogArgs) -> Result<(), CliError> {
    let (demo, sockets) = Demo::start(handover::inherited_sockets()?)?;
    start(&ConfigSource::Demo(demo.text.clone()), args, sockets, Some(demo))
}

fn start(source: &ConfigSource, log: LogArgs, sockets: Sockets, demo: Option<Demo>) -> Result<(), CliError> {
    let (config, files) = source.read();
    let config = config?;
    let styles = Styles { events: log::style(log, &io::stderr()), requests: log::style(log, &io::stdout()) };
    let log = log::start(styles.events)
        .map_err(|error| CliError::Input(format!("cannot start the log: {}", reason(&error))))?;
    log_warnings(&config, &source.name(), styles.events, &log);
    open_files::raise();
    // Resolved now: by the time of an upgrade the path may hold another program, and the current one may have no
    // path.
    let program = std::env::current_exe();
    let program = program.map_err(|error| CliError::Input(format!("cannot find this program: {error}")))?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let runtime = runtime.map_err(|error| CliError::Input(format!("cannot start the runtime: {error}")))?;
    runtime.block_on(async {
        let mut listening = Vec::new();
        if let Some(demo) = demo {
            for address in demo.in_use {
                tracing::warn!(%address, "address in use by another program, using a free port");
            }
            let served = ratekeeper_server::demo::listen(demo.upstream);
            let (address, serving) = served
                .map_err(|error| CliError::Input(format!("cannot start the demo upstream: {error}")))?;
            tokio::spawn(serving);
            let url = format!("http://{address}");
            listening.push(ServiceAddress { service: "demo upstream", address, url });
        }
        let process = Process { source, config: &config, styles, program: &program, log: &log };
        match &config.store {
            Store::Memory { .. } => process.run::<Memory>(files, sockets, listening).await,
            Store::Redis(_) => process.run::<Redis>(files, sockets, listening).await,
        }
    })
}

/// How the two logs are written.
#[derive(Clone, Copy)]
struct Styles {
    events: LogStyle,
    requests: LogStyle,
}

struct Process<'a> {
    source: &'a ConfigSource,
    config: &'a Config,
    styles: Styles,
    program: &'a Path,
    log: &'a EventLog,
}

impl Process<'_> {
    async fn run<S: Backend>(
        &self,
        files: Files,
        mut sockets: Sockets,
        mut listening: Vec<ServiceAddress>,
    ) -> Result<(), CliError> {
        let Process { source, config, styles, program, log } = *self;
        let listen =
            |kind| signal(kind).map_err(|error| CliError::Input(format!("cannot handle signals: {error}")));
        let mut stop = [listen(SignalKind::terminate())?, listen(SignalKind::interrupt())?];
        let (mut hang_up, mut upgrade) =
            (listen(SignalKind::hangup())?, listen(SignalKind::user_defined2())?);
        let server = Server::<S>::start(config, &mut sockets, styles.requests);
        let server = server.await.map_err(|error| cannot_start(&error))?;
        for address in sockets.close_unused() {
            tracing::warn!(%address, "inherited socket ignored: no listener has this address");
        }
        open_files::check(config);
        listening.splice(0..0, server.addresses());
        self.announce(&listening);
        handover::stop_predecessor();
        let (traffic, started) = (server.traffic(), Instant::now());
        let reader = ConfigReader::start(source.clone(), files);
        let mut reader = reader.map_err(|error| {
            CliError::Input(format!("cannot watch the configuration: {}", reason(&error)))
        })?;
        let mut successor = None;
        loop {
            tokio::select! {
                () = any(&mut stop) => break,
                _ = hang_up.recv() => reader.request(),
                config = reader.next() => self.reload(config, &server),
                _ = upgrade.recv(), if successor.is_none() => match handover::start_successor(program, &sockets) {
                    Ok(child) => {
                        tracing::info!(pid = child.id(), "successor started");
                        if matches!(config.store, Store::Memory { .. }) {
                            tracing::warn!("the successor starts with empty counters: `store: memory` is not shared");
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
        if successor.is_some() {
            server.close_admin();
        }
        if matches!(styles.events, LogStyle::Human { .. }) {
            // A terminal shows `^C` at the begin of this line.
            log.print("\n".to_owned());
        }
        tracing::info!("graceful shutdown started: no new connections, requests in flight finish");
        tokio::select! {
            open = server.drain() => match open {
                0 => tracing::info!("shut down"),
                open => tracing::warn!(open, "shut down; some connections were still open after the drain timeout"),
            },
            () = any(&mut stop) => tracing::warn!("stopped immediately by a second signal"),
        }
        if matches!(styles.events, LogStyle::Human { .. }) {
            log.print(banner::summary(&traffic(), started.elapsed(), config.gateway.is_some()));
        }
        Ok(())
    }

    /// Applies a configuration if it is valid, else keeps the old one.
    fn reload<S: Backend>(&self, config: Result<Config, CliError>, server: &Server<S>) {
        let name = self.source.name();
        match config {
            Ok(config) => match server.reload(&config) {
                Ok(()) => {
                    tracing::info!(
                        file = name,
                        config = validate::summary(&config),
                        "configuration reloaded"
                    );
                    log_warnings(&config, &name, self.styles.events, self.log);
                    open_files::check(&config);
                }
                Err(error) => {
                    tracing::error!(file = name, %error, "configuration not reloaded, the old one stays active");
                }
            },
            Err(failure) => {
                server.count_failed_reload();
                if let LogStyle::Human { .. } = self.styles.events {
                    tracing::error!(file = name, "configuration not reloaded, the old one stays active");
                    self.log.print_below(&failure.to_string());
                } else {
                    tracing::error!(file = name, error = %failure, "configuration not reloaded, the old one stays active");
                }
            }
        }
    }

    /// Prints the banner, or logs the same as events.
    fn announce(&self, listening: &[ServiceAddress]) {
        let name = self.source.name();
        if matches!(self.styles.events, LogStyle::Human { .. }) {
            let has_access_log = self.config.gateway.as_ref().is_some_and(|it| it.access_log);
            let first = listening.first().filter(|_| self.source.is_demo());
            let demo_port = first.map(|gateway| gateway.address.port());
            self.log.print(banner::banner(&name, listening, demo_port, has_access_log));
            return;
        }
        tracing::info!(file = name, "configuration loaded");
        for ServiceAddress { service, url, .. } in listening {
            tracing::info!(service, url, "listening");
        }
    }
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

/// Logs the warnings of a configuration; for people, with the marked lines.
fn log_warnings(config: &Config, name: &str, style: LogStyle, log: &EventLog) {
    for warning in &config.warnings {
        if let LogStyle::Human { .. } = style {
            log.print(format!("{}\n\n", warning.clone().in_file(name)));
            continue;
        }
        let position = format!("{name}:{}:{}", warning.line(), warning.column());
        tracing::warn!(position, help = warning.help(), "{}", warning.message());
    }
}

fn cannot_start(error: &StartError) -> CliError {
    match error {
        StartError::NoService => CliError::Usage(error.to_string()),
        StartError::Listen { setting, address, error } if error.kind() == io::ErrorKind::AddrInUse => {
            CliError::in_use(*address, setting)
        }
        StartError::Listen { setting, address, error } => {
            CliError::Input(format!("cannot listen on {address} for `{setting}`: {}", reason(error)))
        }
        error => CliError::Input(error.to_string()),
    }
}
