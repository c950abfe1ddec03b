//! Reads the configuration again when its files change, or on request.
//!
//! It does so on its own thread: a file system that does not respond must not stop the gateway.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError, mpsc};
use std::time::Duration;

use ratekeeper_config::Config;
use tokio::sync::mpsc as async_mpsc;
use tokio::time::Instant;

use crate::config_source::ConfigSource;
use crate::environment::Files;
use crate::error::CliError;

/// How often the files are polled for changes, for deployments that do not send SIGHUP.
const POLL_EVERY: Duration = Duration::from_secs(1);
/// Time to read the files, until a reload counts as failed.
const READ_TIMEOUT: Duration = Duration::from_secs(10);

pub(crate) struct ConfigReader {
    requests: mpsc::Sender<()>,
    configs: async_mpsc::Receiver<Result<Config, CliError>>,
    /// When the thread began to read, if it is reading.
    begin: Arc<Mutex<Option<Instant>>>,
    /// The read that was reported as too slow.
    slow: Option<Instant>,
}

fn lock(begin: &Mutex<Option<Instant>>) -> MutexGuard<'_, Option<Instant>> {
    begin.lock().unwrap_or_else(PoisonError::into_inner)
}

impl ConfigReader {
    /// Starts the thread. `files` are those read so far.
    pub(crate) fn start(source: ConfigSource, mut files: Files) -> std::io::Result<ConfigReader> {
        let (requests, requested) = mpsc::channel();
        let (read, configs) = async_mpsc::channel(1);
        let begin = Arc::new(Mutex::new(None));
        let reading = Arc::clone(&begin);
        std::thread::Builder::new().name("config-reader".to_owned()).spawn(move || {
            loop {
                let is_requested = match requested.recv_timeout(POLL_EVERY) {
                    Ok(()) => true,
                    Err(mpsc::RecvTimeoutError::Timeout) => false,
                    Err(mpsc::RecvTimeoutError::Disconnected) => return,
                };
                *lock(&reading) = Some(Instant::now());
                let config = (is_requested || files.have_changed()).then(|| {
                    let (config, read) = source.read();
                    files = read;
                    config
                });
                *lock(&reading) = None;
                if let Some(config) = config
                    && read.blocking_send(config).is_err()
                {
                    return;
                }
            }
        })?;
        Ok(ConfigReader { requests, configs, begin, slow: None })
    }

    /// Reads the configuration even if no file has changed.
    pub(crate) fn request(&self) {
        // The thread ends only after this reader.
        let _ = self.requests.send(());
    }

    /// Waits for the next configuration. Returns an error if the files cannot be read in time.
    pub(crate) async fn next(&mut self) -> Result<Config, CliError> {
        loop {
            match tokio::time::timeout(POLL_EVERY, self.configs.recv()).await {
                Ok(Some(config)) => return config,
                Ok(None) => std::future::pending().await,
                Err(_) => {
                    let begin = *lock(&self.begin);
                    if begin.is_some_and(|it| it.elapsed() >= READ_TIMEOUT) && begin != self.slow {
                        self.slow = begin;
                        let message = format!("the files were not read within {} s", READ_TIMEOUT.as_secs());
                        return Err(CliError::Input(message));
                    }
                }
            }
        }
    }
}
