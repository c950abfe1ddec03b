//! Where the configuration of `run` comes from.

use std::path::{Path, PathBuf};

use ratekeeper_config::Config;

use crate::args::Run;
use crate::demo;
use crate::environment::{FileEnvironment, Files};
use crate::error::CliError;
use crate::input::regular_file_text;
use crate::migrate;

/// The file in the current folder that is used if no other is given.
pub(crate) const FILE_DEFAULT: &str = "ratekeeper.yaml";
const FILE_VARIABLE: &str = "RATEKEEPER_CONFIG";

/// Where the configuration comes from.
#[derive(Clone, Debug)]
pub(crate) enum ConfigSource {
    /// The text of the demo.
    Demo(String),
    /// A file, files of envoyproxy/ratelimit in a folder, or both.
    Files { path: Option<PathBuf>, envoy: Option<PathBuf> },
}

/// The file that the arguments, the environment or the current folder name, in this order.
pub(crate) fn find_file(typed: Option<&Path>) -> Option<PathBuf> {
    let variable = || std::env::var_os(FILE_VARIABLE).filter(|it| !it.is_empty()).map(PathBuf::from);
    let default = || Some(PathBuf::from(FILE_DEFAULT)).filter(|it| it.exists());
    typed.map(Path::to_owned).or_else(variable).or_else(default)
}

pub(crate) fn no_file(help: &str) -> CliError {
    let message = format!(
        "no configuration file: there is no `{FILE_DEFAULT}` in this folder, and {FILE_VARIABLE} is not set"
    );
    CliError::usage(&message, help)
}

impl ConfigSource {
    /// The source that the arguments, the environment or the current folder name.
    pub(crate) fn find(args: &Run) -> Result<ConfigSource, CliError> {
        let path = find_file(args.config.as_deref().or(args.file.as_deref()));
        let envoy = args.envoy_config.clone();
        if path.is_none() && envoy.is_none() {
            return Err(no_file(
                "write `ratekeeper run FILE`, create a file with `ratekeeper init`, or try the demo with `ratekeeper`",
            ));
        }
        Ok(ConfigSource::Files { path, envoy })
    }

    /// The name in messages.
    pub(crate) fn name(&self) -> String {
        let shown = |path: &Path| path.display().to_string();
        match self {
            ConfigSource::Demo(_) => demo::NAME.to_owned(),
            ConfigSource::Files { path: Some(path), envoy: Some(folder) } => {
                format!("{} and {}", shown(path), shown(folder))
            }
            ConfigSource::Files { path, envoy } => {
                path.as_deref().or(envoy.as_deref()).map(shown).unwrap_or_default()
            }
        }
    }

    pub(crate) fn is_demo(&self) -> bool {
        matches!(self, ConfigSource::Demo(_))
    }

    fn path(&self) -> Option<&Path> {
        match self {
            ConfigSource::Demo(_) => None,
            ConfigSource::Files { path, .. } => path.as_deref(),
        }
    }

    /// Returns the text; adds every file read so far to `files`.
    fn text(&self, files: &mut Files) -> Result<String, CliError> {
        let (path, envoy) = match self {
            ConfigSource::Demo(text) => return Ok(text.clone()),
            ConfigSource::Files { path, envoy } => (path, envoy),
        };
        let mut text = match path {
            Some(path) => {
                files.record(path.clone());
                regular_file_text(path)?
            }
            None => migrate::HEAD.to_owned(),
        };
        if let Some(folder) = envoy {
            text.push('\n');
            text.push_str(&migrate::domains(folder, files)?);
        }
        Ok(text)
    }

    /// Returns the parsed configuration and every file read for it.
    pub(crate) fn read(&self) -> (Result<Config, CliError>, Files) {
        let mut files = Files::default();
        let text = match self.text(&mut files) {
            Ok(text) => text,
            Err(error) => return (Err(error), files),
        };
        let environment = FileEnvironment::of(self.path().unwrap_or(Path::new("")), files);
        let config = ratekeeper_config::parse(&text, &environment)
            .map_err(|errors| CliError::Config(Box::new(errors.in_file(&self.name()))));
        (config, environment.into_files())
    }
}
