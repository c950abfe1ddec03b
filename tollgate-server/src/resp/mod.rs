//! The door for those who speak the protocol of Redis: any of its clients asks limits here as it would ask redis-cell.
//!
//! ```text
//! $ redis-cli -p 6380 CL.THROTTLE user:alice 14 30 60
//! 1) (integer) 0     it may pass
//! 2) (integer) 15    of so many
//! 3) (integer) 14    so many are left
//! 4) (integer) -1    there is nothing to wait for
//! 5) (integer) 2     in so many seconds all are there again
//! ```
//!
//! | command | is told |
//! |---|---|
//! | `CL.THROTTLE key max_burst count period [quantity]` | as by redis-cell: 0 if it may pass and 1 if not; the limit, which is `max_burst` + 1; what remains; seconds to wait, -1 if it may pass or never will; seconds until all is there again |
//! | `THROTTLE key max_burst count period [quantity]` | as by throttlecrab: 1 if it may pass and 0 if not; the limit, which is `max_burst`; what remains; seconds until all is there again; seconds to wait, 0 if it may pass, -1 if it never will |
//! | `TG.CHECK limit [key [cost [key ...]]]` | 1 if it may pass and 0 if not; the limit; what remains; milliseconds to wait, -1 if it may pass or never will; milliseconds until all is there again; milliseconds to wait before it goes on, where a limit delays |
//!
//! The first two bring their limit along: a bucket that gets `count` back in `period` seconds, one by one. The third asks a
//! limit of the configuration by its name. If its key has several parts, the first stands before the cost and the others
//! behind it, and if it has none, the key is empty or left out. A key that the limit always denies is told a limit of 0, and
//! one for which it has none a limit of -1. Quantities and costs are 1 where nothing is said, and 0 asks and takes nothing.
//! All times are rounded up, so that nobody who waits for so long comes too early. If the store is away and the policy is
//! that nothing passes then, the error `UNAVAILABLE` is told.
//!
//! A client may also say `PING`, `ECHO`, `HELLO`, `AUTH`, `COMMAND`, `CLIENT`, `SELECT 0`, `INFO`, `QUIT` and `RESET`, as
//! clients do when they connect. Commands may come many at a time: all that have come are answered, in their order, with one
//! write.
//!
//! | file | what it does |
//! |---|---|
//! | [`wire`] | bytes -> commands |
//! | `connection` | reads, has answered, writes; nobody is waited for forever |
//! | `session`, `known` | who a client is, which commands there are |
//! | `ask` | a command -> a question to a limit -> numbers |
//! | `together` | what is asked at the same time |
//! | `reply` | replies -> bytes |

mod ask;
mod connection;
mod counts;
mod known;
mod reply;
mod session;
mod together;
pub mod wire;

use std::io;
use std::net::SocketAddr;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::sleep;
use tollgate::Store;
use tollgate::tower::RateLimitLayer;
use tollgate_config::Secret;

pub use self::counts::Counts;

/// When there are no more file descriptors, it is no use to ask again at once.
const NO_DESCRIPTORS_PAUSE: Duration = Duration::from_millis(50);

/// What is behind the door. It is looked at again and again, so that a new configuration counts from the next command on.
pub trait Behind: Send + Sync + 'static {
    /// Where the states of keys are.
    type Store: Store + Send + Sync + 'static;

    /// The limits that can be asked, if there are any now.
    fn limits(&self) -> Option<RateLimitLayer<Self::Store>>;

    /// How many of them have names that can be asked for: the first so many. Others belong to descriptors.
    fn named_limits(&self) -> usize;

    /// What those have to know who ask. Whoever has said it once is not asked again.
    fn token(&self) -> Option<Secret>;

    /// How many connections there may be.
    fn max_connections(&self) -> usize;
}

/// How long a client may keep us waiting. If it takes longer, its connection is closed.
#[derive(Clone, Debug)]
pub struct Patience {
    /// With nothing to say.
    pub idle: Duration,
    /// From the first byte of a command to its last.
    pub command: Duration,
    /// To take what it has asked for.
    pub write: Duration,
}

impl Default for Patience {
    fn default() -> Patience {
        let short = Duration::from_secs(10);
        Patience { idle: Duration::from_secs(300), command: short, write: short }
    }
}

/// What a door needs.
#[derive(Debug)]
pub struct Door<B> {
    /// What is behind it.
    pub behind: Arc<B>,
    /// Where is counted what happens.
    pub counts: Arc<Counts>,
    /// How long clients may keep us waiting.
    pub patience: Patience,
    /// Turns true when the door is to close: what is on its way by then is answered, and nothing else is.
    pub draining: watch::Receiver<bool>,
}

/// What all connections have in common.
type Shared<B> = Door<B>;

/// Answers commands on a socket of [`Sockets`](crate::Sockets), until the door is closed and everybody has been answered.
///
/// # Errors
/// If the socket does not work.
pub fn listen<B: Behind>(
    listener: std::net::TcpListener,
    door: Door<B>,
) -> io::Result<(SocketAddr, impl Future<Output = ()> + Send)> {
    listener.set_nonblocking(true)?;
    let listener = TcpListener::from_std(listener)?;
    let address = listener.local_addr()?;
    Ok((address, serve(listener, Arc::new(door))))
}

/// Ends when the door is about to close.
async fn drained(mut draining: watch::Receiver<bool>) {
    // If nobody is left who could tell, it is over, too.
    let _ = draining.wait_for(|is_draining| *is_draining).await;
}

async fn serve<B: Behind>(listener: TcpListener, shared: Arc<Shared<B>>) {
    let mut draining = pin!(drained(shared.draining.clone()));
    let mut connections = JoinSet::new();
    loop {
        tokio::select! {
            biased;
            // One that has panicked has ended nobody but itself.
            Some(_) = connections.join_next() => {}
            accepted = listener.accept() => match accepted {
                Ok((stream, _)) => enter(&mut connections, &shared, stream),
                // A client that is gone already is nothing to wait for.
                Err(error) if matches!(
                    error.kind(),
                    io::ErrorKind::ConnectionAborted | io::ErrorKind::ConnectionReset
                ) => {}
                Err(error) => {
                    tracing::warn!(%error, "no connection can be accepted");
                    sleep(NO_DESCRIPTORS_PAUSE).await;
                }
            },
            () = &mut draining => break,
        }
    }
    drop(listener);
    while connections.join_next().await.is_some() {}
}

fn enter<B: Behind>(connections: &mut JoinSet<()>, shared: &Arc<Shared<B>>, stream: TcpStream) {
    if connections.len() >= shared.behind.max_connections() {
        shared.counts.turn_away();
        // If it does not fit into an empty socket, the client learns it from the end of the connection.
        let _ = stream.try_write(b"-ERR max number of clients reached\r\n");
        return;
    }
    // A connection that cannot be told to hurry is slow, not broken.
    let _ = stream.set_nodelay(true);
    let (open, number) = shared.counts.enter();
    let shared = shared.clone();
    connections.spawn(async move {
        let _open = open;
        connection::run(shared, stream, number).await;
    });
}
