//! What the tests of all services share: a configuration from text, and its limits.

use ratekeeper::tower::{LayerBuilder, RatekeeperLayer};
use ratekeeper_config::{Config, Environment};

/// An environment without variables, and with files from disk.
struct TestEnvironment;

impl Environment for TestEnvironment {
    fn variable(&self, _: &str) -> Option<String> {
        None
    }

    fn file(&self, path: &str) -> Result<String, String> {
        std::fs::read_to_string(path).map_err(|error| error.to_string())
    }
}

pub(crate) fn parse(yaml: &str) -> Config {
    let mut config =
        ratekeeper_config::parse(yaml, &TestEnvironment).unwrap_or_else(|errors| panic!("{errors}\n{yaml}"));
    // Tests run at the same time: each has an admin listener on a free port.
    if let Some(admin) = &mut config.admin {
        admin.listen.set_port(0);
    }
    config
}

/// The limits of a configuration.
pub(crate) fn layer_builder(config: &Config) -> LayerBuilder {
    config.rules.rules().cloned().fold(RatekeeperLayer::builder(), LayerBuilder::rule)
}
