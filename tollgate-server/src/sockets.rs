//! Listening sockets: those that somebody else has opened for us, and our own.

use std::io;
use std::net::{SocketAddr, TcpListener};

use socket2::{Domain, Protocol, Socket, Type};

/// Connections that may wait to be accepted.
const BACKLOG: i32 = 4096;

/// Where a process listens. Sockets that were handed to it, by systemd or by its predecessor, are used before new ones
/// are opened, so that no client is refused in between; and those in use can be handed on.
#[derive(Debug, Default)]
pub struct Sockets {
    given: Vec<TcpListener>,
    used: Vec<TcpListener>,
}

impl Sockets {
    /// Of which some are open already.
    pub fn new(given: Vec<TcpListener>) -> Sockets {
        Sockets { given, used: Vec::new() }
    }

    /// A socket that listens on an address.
    ///
    /// # Errors
    /// If the system refuses.
    pub fn listen(&mut self, address: SocketAddr) -> io::Result<TcpListener> {
        let listener = match self.given.iter().position(|it| fits(it, address)) {
            Some(at) => self.given.remove(at),
            None => open(address)?,
        };
        listener.set_nonblocking(true)?;
        self.used.push(listener.try_clone()?);
        Ok(listener)
    }

    /// Those that nobody wanted: they are closed now.
    pub fn close_unused(&mut self) -> Vec<SocketAddr> {
        self.given.drain(..).filter_map(|it| it.local_addr().ok()).collect()
    }

    /// Those in use. They listen for as long as this value lives, whoever else has closed them.
    pub fn used(&self) -> &[TcpListener] {
        &self.used
    }
}

/// Port 0 is whichever there is.
fn fits(listener: &TcpListener, address: SocketAddr) -> bool {
    listener
        .local_addr()
        .is_ok_and(|its| its.ip() == address.ip() && (address.port() == 0 || its.port() == address.port()))
}

fn open(address: SocketAddr) -> io::Result<TcpListener> {
    let socket = Socket::new(Domain::for_address(address), Type::STREAM, Some(Protocol::TCP))?;
    // The address is free as soon as its last owner has gone.
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
    fn a_socket_that_was_given_is_used_before_one_is_opened() {
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
    fn a_socket_that_nobody_wants_is_closed() {
        let given = open(SocketAddr::from(([127, 0, 0, 1], 0))).unwrap();
        let address = given.local_addr().unwrap();
        let mut sockets = Sockets::new(vec![given]);
        assert_eq!(sockets.close_unused(), [address]);
        assert!(std::net::TcpStream::connect(address).is_err());
    }
}
