//! Listening sockets: inherited from another process, or opened here.

use std::io;
use std::net::{SocketAddr, TcpListener};

use ratekeeper_config::Config;
use socket2::{Domain, Protocol, Socket, Type};

use super::error::StartError;

/// Connections that may wait to be accepted.
const BACKLOG: i32 = 4096;

/// The listening sockets of a process. Sockets inherited from systemd or from the predecessor are used before new
/// ones are opened, so that no connection is refused during a restart; sockets in use can be passed to a successor.
#[derive(Debug, Default)]
pub struct Sockets {
    inherited: Vec<TcpListener>,
    used: Vec<TcpListener>,
}

impl Sockets {
    /// Starts with the inherited sockets.
    pub fn new(inherited: Vec<TcpListener>) -> Sockets {
        Sockets { inherited, used: Vec::new() }
    }

    /// Returns a socket that listens on the address.
    ///
    /// # Errors
    /// Returns the operating system's error if the address cannot be bound.
    pub fn listen(&mut self, address: SocketAddr) -> io::Result<TcpListener> {
        let listener = match self.inherited.iter().position(|it| matches(it, address)) {
            Some(at) => self.inherited.remove(at),
            None => open(address)?,
        };
        listener.set_nonblocking(true)?;
        self.used.push(listener.try_clone()?);
        Ok(listener)
    }

    /// Closes the inherited sockets that were not used, and returns their addresses.
    pub fn close_unused(&mut self) -> Vec<SocketAddr> {
        self.inherited.drain(..).filter_map(|it| it.local_addr().ok()).collect()
    }

    /// The sockets in use. They listen as long as this value lives, even if other copies of them are closed.
    pub fn used(&self) -> &[TcpListener] {
        &self.used
    }
}

/// The listener on the current runtime, and its address.
pub(crate) fn into_tokio(listener: TcpListener) -> io::Result<(tokio::net::TcpListener, SocketAddr)> {
    listener.set_nonblocking(true)?;
    let listener = tokio::net::TcpListener::from_std(listener)?;
    let address = listener.local_addr()?;
    Ok((listener, address))
}

/// The setting with the address of a service.
#[derive(Clone, Copy, Debug)]
pub(crate) struct AddressSetting {
    pub(crate) name: &'static str,
    /// The address in a configuration; `None` if the service is not configured.
    pub(crate) address: fn(&Config) -> Option<SocketAddr>,
}

impl AddressSetting {
    /// Binds the address, if the service is configured.
    pub(crate) fn bind(
        self,
        config: &Config,
        sockets: &mut Sockets,
    ) -> Result<Option<BoundSocket>, StartError> {
        (self.address)(config).map(|address| BoundSocket::bind(self.name, address, sockets)).transpose()
    }
}

/// A socket that listens on the address of a setting.
#[derive(Debug)]
pub(crate) struct BoundSocket {
    pub(crate) setting: &'static str,
    address: SocketAddr,
    listener: TcpListener,
}

impl BoundSocket {
    pub(crate) fn bind(
        setting: &'static str,
        address: SocketAddr,
        sockets: &mut Sockets,
    ) -> Result<BoundSocket, StartError> {
        let listener = sockets.listen(address);
        let listener = listener.map_err(|error| StartError::Listen { setting, address, error })?;
        Ok(BoundSocket { setting, address, listener })
    }

    /// Starts to serve the socket, and names its setting if that fails.
    pub(crate) fn serve<T>(self, serve: impl FnOnce(TcpListener) -> io::Result<T>) -> Result<T, StartError> {
        let BoundSocket { setting, address, listener } = self;
        serve(listener).map_err(|error| StartError::Listen { setting, address, error })
    }
}

/// Port 0 matches any port.
fn matches(listener: &TcpListener, address: SocketAddr) -> bool {
    listener.local_addr().is_ok_and(|local| {
        local.ip() == address.ip() && (address.port() == 0 || local.port() == address.port())
    })
}

fn open(address: SocketAddr) -> io::Result<TcpListener> {
    let socket = Socket::new(Domain::for_address(address), Type::STREAM, Some(Protocol::TCP))?;
    // The address can be bound again as soon as its previous owner has closed it.
    socket.set_reuse_address(true)?;
    if address.is_ipv6() {
        socket.set_only_v6(true)?;
    }
    socket.bind(&address.into())?;
    socket.listen(BACKLOG)?;
    Ok(socket.into())
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test that cannot be set up has failed")]
mod tests {
    use super::*;

    #[test]
    fn inherited_socket_is_used_before_a_new_one_is_opened() {
        let any = SocketAddr::from(([127, 0, 0, 1], 0));
        let (one, other) = (open(any).unwrap(), open(any).unwrap());
        let (first, second) = (one.local_addr().unwrap(), other.local_addr().unwrap());
        let mut sockets = Sockets::new(vec![one, other]);
        assert_eq!(sockets.listen(second).unwrap().local_addr().unwrap(), second);
        assert!(sockets.listen(second).is_err(), "it is in use");
        assert_eq!(sockets.listen(any).unwrap().local_addr().unwrap(), first);
        let new = sockets.listen(any).unwrap().local_addr().unwrap();
        assert!(new != first && new != second);
        assert_eq!(sockets.used().len(), 3);
    }

    #[test]
    fn unused_inherited_socket_is_closed() {
        let inherited = open(SocketAddr::from(([127, 0, 0, 1], 0))).unwrap();
        let address = inherited.local_addr().unwrap();
        let mut sockets = Sockets::new(vec![inherited]);
        assert_eq!(sockets.close_unused(), [address]);
        assert!(std::net::TcpStream::connect(address).is_err());
    }
}
