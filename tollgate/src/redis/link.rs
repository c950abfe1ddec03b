//! A connection to Redis, and the task that drives it.
//!
//! Requests that wait at the same time share one call: while a call is on its way, whoever comes queues up, and all of
//! them go with the next. When nobody waits, a request goes at once.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use ::redis::aio::MultiplexedConnection;
use ::redis::{Cmd, ErrorKind, RedisError, ServerErrorKind};
use smallvec::SmallVec;
use tokio::sync::{mpsc, oneshot};
use tollgate_core::Time;

use super::protocol::{self, Packed};
use super::server::Server;
use crate::store::Verdict;

/// Requests that may wait for one connection. When Redis is slow, more are turned away than memory is spent.
const QUEUE_MAX: usize = 1024;
/// Requests that share one call: a call of so many takes Redis about a quarter of a millisecond.
const BATCH_MAX: usize = 64;

/// The functions in Redis, under a name that changes with their text: versions do not get in each other's way.
#[derive(Debug)]
pub(crate) struct Library {
    pub(crate) text: String,
    pub(crate) charge: String,
}

impl Library {
    pub(crate) fn new() -> Library {
        let text = include_str!("library.lua");
        // FNV-1a: any hash that never changes will do.
        let hash = text.bytes().fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| {
            (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3)
        });
        let charge = format!("tollgate_{hash:016x}");
        Library { text: format!("#!lua name={charge}\n{}", text.replace("@charge@", &charge)), charge }
    }
}

/// Why Redis did not decide.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum StoreError {
    /// It did not answer in time.
    TimedOut,
    /// It has not answered for a while, and is not asked just now.
    Away,
    /// Too many requests wait for it.
    Busy,
    /// The connection failed, or could not be made.
    Unreachable(String),
    /// It answered with an error.
    Refused(String),
    /// It answered something else than a decision: another program has written to the key.
    Garbled,
}

impl fmt::Display for StoreError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            StoreError::TimedOut => write!(f, "Redis did not answer in time"),
            StoreError::Away => write!(f, "Redis has not answered for a while and is not asked just now"),
            StoreError::Busy => write!(f, "too many requests wait for Redis"),
            StoreError::Unreachable(why) => write!(f, "cannot reach Redis: {why}"),
            StoreError::Refused(why) => write!(f, "Redis answered with an error: {why}"),
            StoreError::Garbled => write!(
                f,
                "a key in Redis is not what was written to it; is another program using keys that begin with \
                 rate_limit:?"
            ),
        }
    }
}

impl std::error::Error for StoreError {}

/// A charge on its way.
#[derive(Debug)]
pub(crate) struct Item {
    pub(crate) limit: usize,
    pub(crate) key: String,
    pub(crate) cost: u32,
}

/// What one request asks.
#[derive(Debug)]
pub(crate) enum Ask {
    Charge {
        items: SmallVec<[Item; 2]>,
        is_look: bool,
        /// The server's own time unless given.
        at: Option<Time>,
        tell: oneshot::Sender<Result<Verdict, StoreError>>,
    },
    Forget {
        keys: Vec<String>,
        tell: oneshot::Sender<Result<(), StoreError>>,
    },
}

/// One connection's queue.
#[derive(Debug)]
pub(crate) struct Link {
    queue: mpsc::Sender<Ask>,
}

impl Link {
    /// Starts a driver on the current runtime. It ends when the link is dropped.
    pub(crate) fn new(
        server: Server,
        library: Arc<Library>,
        limits: Arc<[Packed]>,
        patience: Duration,
    ) -> Link {
        let (queue, asks) = mpsc::channel(QUEUE_MAX);
        tokio::spawn(Driver { server, library, limits, patience, connection: None }.run(asks));
        Link { queue }
    }

    pub(crate) fn ask(&self, ask: Ask) -> Result<(), StoreError> {
        self.queue.try_send(ask).map_err(|error| match error {
            mpsc::error::TrySendError::Full(_) => StoreError::Busy,
            mpsc::error::TrySendError::Closed(_) => {
                StoreError::Unreachable("its driver has ended".to_owned())
            }
        })
    }
}

struct Driver {
    server: Server,
    library: Arc<Library>,
    limits: Arc<[Packed]>,
    patience: Duration,
    connection: Option<MultiplexedConnection>,
}

impl Driver {
    async fn run(mut self, mut asks: mpsc::Receiver<Ask>) {
        let mut batch = Vec::new();
        while asks.recv_many(&mut batch, BATCH_MAX).await > 0 {
            for group in groups(std::mem::take(&mut batch)) {
                self.serve(group).await;
            }
        }
    }

    async fn serve(&mut self, group: Group) {
        match group {
            Group::Charges { at, requests } => {
                // Nobody waits any more: no connection is made for them.
                if requests.iter().all(|request| request.tell.is_closed()) {
                    return;
                }
                let connected = self.connect().await;
                // Whoever has given up is not charged.
                let requests: Vec<_> =
                    requests.into_iter().filter(|request| !request.tell.is_closed()).collect();
                if requests.is_empty() {
                    return;
                }
                let command = self.charge(at, &requests);
                let reply = match connected {
                    Ok(()) => self.call::<Vec<u8>>(&command).await,
                    Err(error) => Err(error),
                };
                match reply {
                    Ok(reply) => self.tell(&reply, requests),
                    Err(error) => {
                        for request in requests {
                            // If nobody is there to be told, nobody needs to know.
                            let _ = request.tell.send(Err(error.clone()));
                        }
                    }
                }
            }
            Group::Forget { keys, tell } => {
                let mut command = ::redis::cmd("UNLINK");
                command.arg(keys);
                let forgotten = match self.connect().await {
                    Ok(()) => self.call::<i64>(&command).await.map(|_| ()),
                    Err(error) => Err(error),
                };
                let _ = tell.send(forgotten);
            }
        }
    }

    fn charge(&self, at: Option<Time>, requests: &[Request]) -> Cmd {
        let mut command = ::redis::cmd("FCALL");
        command.arg(&self.library.charge).arg(requests.iter().map(|it| it.items.len()).sum::<usize>());
        for item in requests.iter().flat_map(|request| &request.items) {
            command.arg(&item.key);
        }
        let mut time = Vec::new();
        if let Some(at) = at {
            protocol::push_instant(&mut time, at.as_nanos());
        }
        command.arg(time);
        for Request { items, is_look, .. } in requests {
            for (index, item) in items.iter().enumerate() {
                let more = index + 1 < items.len();
                command.arg(self.limits[item.limit].charge(item.cost, *is_look, more));
            }
        }
        command
    }

    /// Hands each request its part of the reply.
    fn tell(&self, reply: &[u8], requests: Vec<Request>) {
        let mut rest = reply;
        let now = protocol::take_instant(&mut rest).map(Time::from_nanos);
        for request in requests {
            let decisions: Option<SmallVec<_>> = request
                .items
                .iter()
                .map(|item| self.limits[item.limit].decision(&mut rest, now?, item.cost))
                .collect();
            let verdict = decisions.map(|decisions| Verdict { decisions, ..Verdict::default() });
            let _ = request.tell.send(verdict.ok_or(StoreError::Garbled));
        }
    }

    /// Makes a connection if there is none.
    async fn connect(&mut self) -> Result<(), StoreError> {
        if self.connection.is_none() {
            let made = self.server.connect().await.map_err(|error| unreachable(&error))?;
            self.connection = Some(made);
        }
        Ok(())
    }

    /// Sends a command. After an answer that did not come in time the connection is dropped: the command may have been
    /// carried out, so it is never sent again.
    async fn call<T: ::redis::FromRedisValue>(&mut self, command: &Cmd) -> Result<T, StoreError> {
        let Some(connection) = &mut self.connection else { return Err(StoreError::TimedOut) };
        let calling = try_call(connection, &self.library, command);
        let error = match tokio::time::timeout(self.patience, calling).await {
            Ok(Ok(reply)) => return Ok(reply),
            Ok(Err(error)) => error,
            Err(_) => {
                self.connection = None;
                return Err(StoreError::TimedOut);
            }
        };
        let is_answer = matches!(error.kind(), ErrorKind::Server(_) | ErrorKind::Extension);
        if !is_answer || is_not_in_charge(&error) {
            self.connection = None;
        }
        Err(if is_answer { StoreError::Refused(error.to_string()) } else { unreachable(&error) })
    }
}

async fn try_call<T: ::redis::FromRedisValue>(
    connection: &mut MultiplexedConnection,
    library: &Library,
    command: &Cmd,
) -> Result<T, RedisError> {
    match command.query_async(connection).await {
        // A restarted server has forgotten the functions. It has not run anything, so this may be said again.
        Err(error) if error.to_string().contains("Function not found") => {
            let load = ["LOAD", "REPLACE", &library.text];
            ::redis::cmd("FUNCTION").arg(&load).query_async::<String>(connection).await?;
            command.query_async(connection).await
        }
        answer => answer,
    }
}

fn unreachable(error: &RedisError) -> StoreError {
    StoreError::Unreachable(error.to_string())
}

/// A server that is a replica now, or that is loading, or has lost its master: another connection may reach another.
fn is_not_in_charge(error: &RedisError) -> bool {
    matches!(
        error.kind(),
        ErrorKind::Server(
            ServerErrorKind::ReadOnly | ServerErrorKind::BusyLoading | ServerErrorKind::MasterDown
        )
    )
}

/// One request's part of a call.
struct Request {
    items: SmallVec<[Item; 2]>,
    is_look: bool,
    tell: oneshot::Sender<Result<Verdict, StoreError>>,
}

/// What goes in one call.
enum Group {
    Charges { at: Option<Time>, requests: Vec<Request> },
    Forget { keys: Vec<String>, tell: oneshot::Sender<Result<(), StoreError>> },
}

/// Puts requests together that are decided at the same time, in order.
fn groups(asks: Vec<Ask>) -> Vec<Group> {
    let mut groups = Vec::with_capacity(1);
    for ask in asks {
        match ask {
            Ask::Charge { items, is_look, at, tell } => {
                let request = Request { items, is_look, tell };
                match groups.last_mut() {
                    Some(Group::Charges { at: same, requests }) if *same == at => requests.push(request),
                    _ => groups.push(Group::Charges { at, requests: vec![request] }),
                }
            }
            Ask::Forget { keys, tell } => groups.push(Group::Forget { keys, tell }),
        }
    }
    groups
}
