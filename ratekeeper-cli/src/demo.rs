//! The demo: the built-in example in front of a small upstream.
//!
//! Its ports are those of the example. A port that another program uses is replaced by a free one, so that the demo
//! runs on any machine.

use std::io;
use std::net::{Ipv4Addr, SocketAddr, TcpListener};

use ratekeeper_server::Sockets;

use crate::error::CliError;

/// The configuration of the demo.
const EXAMPLE: &str = include_str!("../../examples/gateway.yaml");
pub(crate) const NAME: &str = "examples/gateway.yaml (built in)";

const GATEWAY: SocketAddr = local(8080);
const UPSTREAM: SocketAddr = local(8081);
const ADMIN: SocketAddr = local(9180);

const fn local(port: u16) -> SocketAddr {
    SocketAddr::new(std::net::IpAddr::V4(Ipv4Addr::LOCALHOST), port)
}

#[derive(Debug)]
pub(crate) struct Demo {
    /// The configuration.
    pub(crate) text: String,
    /// The socket of the upstream.
    pub(crate) upstream: TcpListener,
    /// Addresses of the example that another program uses.
    pub(crate) in_use: Vec<SocketAddr>,
}

impl Demo {
    /// Chooses the addresses and opens the upstream's.
    pub(crate) fn start(inherited: Vec<TcpListener>) -> Result<(Demo, Sockets), CliError> {
        let mut in_use = Vec::new();
        let mut available = |address: SocketAddr| {
            // A predecessor listens on the sockets that it hands over.
            let is_inherited = inherited.iter().any(|it| it.local_addr().is_ok_and(|it| it == address));
            if is_inherited || is_available(address) {
                return address;
            }
            in_use.push(address);
            local(0)
        };
        let (gateway, upstream, admin) = (available(GATEWAY), available(UPSTREAM), available(ADMIN));
        let mut sockets = Sockets::new(inherited);
        let opened = sockets.listen(upstream).and_then(|it| Ok((it.local_addr()?, it)));
        let (address, upstream) = opened.map_err(|error| {
            CliError::Input(format!("cannot listen on {upstream} for the demo upstream: {error}"))
        })?;
        Ok((Demo { text: text(gateway, address, admin), upstream, in_use }, sockets))
    }
}

/// Errors other than an address in use are reported when the address is opened.
fn is_available(address: SocketAddr) -> bool {
    !TcpListener::bind(address).is_err_and(|error| error.kind() == io::ErrorKind::AddrInUse)
}

/// The example with these addresses.
fn text(gateway: SocketAddr, upstream: SocketAddr, admin: SocketAddr) -> String {
    let text = EXAMPLE.replace(&format!("listen: {GATEWAY}"), &format!("listen: {gateway}"));
    let text = text.replace(&format!("http://{UPSTREAM}"), &format!("http://{upstream}"));
    format!("{text}\nadmin: {admin}\n")
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test that cannot be set up has failed")]

    use std::path::Path;

    use super::*;
    use crate::environment::{FileEnvironment, Files};

    #[test]
    fn addresses_are_those_of_the_example_if_they_are_free() {
        let environment = FileEnvironment::of(Path::new(""), Files::default());
        let parsed = |text: &str| ratekeeper_config::parse(text, &environment).unwrap();
        let (demo, example) = (parsed(&text(GATEWAY, UPSTREAM, ADMIN)), parsed(EXAMPLE));
        assert_eq!(ratekeeper_config::explain(&demo), ratekeeper_config::explain(&example));
    }

    #[test]
    fn addresses_in_use_are_replaced() {
        let environment = FileEnvironment::of(Path::new(""), Files::default());
        let config = ratekeeper_config::parse(&text(local(1), local(2), local(3)), &environment).unwrap();
        let gateway = config.gateway.unwrap();
        assert_eq!(gateway.listeners[0].address, local(1));
        assert_eq!(gateway.upstreams[0].addresses[0].port, 2);
        assert_eq!(config.admin.unwrap().listen, local(3));
        let holder = TcpListener::bind(local(0)).unwrap();
        assert!(!is_available(holder.local_addr().unwrap()));
    }
}
