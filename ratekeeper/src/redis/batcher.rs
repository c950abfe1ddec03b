//! One connection to Redis, and the task that drives it.
//!
//! Concurrent requests share calls: requests that arrive while a call is in flight form the next batch; a lone
//! request is sent immediately. In a cluster, a call contains the keys of one hash slot, and the calls of several
//! hash slots are sent as one pipeline.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use ::redis::aio::MultiplexedConnection;
use ::redis::{Cmd, ErrorKind, Pipeline, RedisError, RedisResult, ServerErrorKind, Value};
use ratekeeper_core::Time;
use smallvec::SmallVec;
use tokio::sync::{mpsc, oneshot};

use super::claim::{ClaimResult, PermitClaim};
use super::failures::{FailureCause, error_text};
use super::protocol::{self, PackedLimit};
use super::server::Server;
use crate::store::Verdict;

/// Requests that may wait for one connection. If Redis is slow, further requests fail, which bounds memory.
const QUEUE_MAX: usize = 1024;
/// Shortest time to wait for a reply before the connection is closed, even if callers have a shorter deadline: a
/// brief pause of the server must not cost a reconnect.
const TIMEOUT_MIN: Duration = Duration::from_millis(100);
/// Interval of connection attempts while no request needs the connection.
const CONNECT_EVERY: Duration = Duration::from_millis(500);
/// Requests that share one call: a full batch takes Redis about a quarter of a millisecond.
const BATCH_MAX: usize = 64;

/// The functions in Redis. Their names contain a hash of their text, so different versions can run side by side.
#[derive(Debug)]
pub(crate) struct Library {
    pub(crate) text: String,
    pub(crate) charge: String,
    pub(crate) concurrency: String,
    pub(crate) records: String,
}

impl Library {
    pub(crate) fn new() -> Library {
        let text = concat!(
            include_str!("library.lua"),
            include_str!("concurrency.lua"),
            include_str!("records.lua")
        );
        // FNV-1a, because the hash must never change.
        let hash = text.bytes().fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| {
            (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3)
        });
        let [charge, concurrency, records] =
            ["", "concurrency_", "records_"].map(|part| format!("ratekeeper_{part}{hash:016x}"));
        let text = text
            .replace("@charge@", &charge)
            .replace("@concurrency@", &concurrency)
            .replace("@records@", &records);
        Library { text: format!("#!lua name={charge}\n{text}"), charge, concurrency, records }
    }
}

/// Why Redis did not decide.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum StoreError {
    /// Redis did not answer in time.
    TimedOut,
    /// The circuit breaker is open: Redis has not answered for a while and is not called.
    CircuitOpen,
    /// Too many requests wait for Redis.
    Overloaded,
    /// The connection could not be opened.
    Unreachable(String),
    /// The connection failed before the reply arrived.
    ConnectionLost(String),
    /// Redis replied with an error.
    ErrorReply(String),
    /// The reply is not a decision: another program has written to the key.
    UnexpectedReply,
}

impl fmt::Display for StoreError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            StoreError::TimedOut => write!(f, "Redis did not answer in time"),
            StoreError::CircuitOpen => {
                write!(f, "the circuit breaker is open: Redis has not answered for a while")
            }
            StoreError::Overloaded => write!(f, "too many requests wait for Redis"),
            StoreError::Unreachable(why) => write!(f, "cannot reach Redis: {why}"),
            StoreError::ConnectionLost(why) => write!(f, "the connection to Redis failed: {why}"),
            StoreError::ErrorReply(why) => write!(f, "Redis answered with an error: {why}"),
            StoreError::UnexpectedReply => write!(f, "a key in Redis has a value of a wrong type or format"),
        }?;
        match self.cause().and_then(FailureCause::help) {
            Some(help) => write!(f, "; {help}"),
            None => Ok(()),
        }
    }
}

impl std::error::Error for StoreError {}

/// A charge to be sent.
#[derive(Clone, Debug)]
pub(crate) struct Item {
    pub(crate) limit: Arc<PackedLimit>,
    pub(crate) key: String,
    pub(crate) cost: u32,
}

/// The reply to a request, with the time of the decision by the server's clock.
#[derive(Clone, Debug, Default)]
pub(crate) struct Reply {
    pub(crate) verdict: Verdict,
    pub(crate) at: Time,
    /// The result of each claim, or None if its key holds a foreign value.
    #[cfg_attr(not(feature = "tower"), allow(dead_code, reason = "only the middleware counts permits"))]
    pub(crate) claims: Vec<Option<ClaimResult>>,
    /// Values of records.
    pub(crate) records: Vec<Vec<u8>>,
}

/// Why a request was not executed.
#[derive(Clone, Debug)]
pub(crate) enum CallError {
    Failed(StoreError),
    /// Another node has the keys; with `is_ask` for this request only, because the hash slot is migrating to it.
    Redirected {
        address: String,
        is_ask: bool,
    },
    /// The keys are split between two nodes while their hash slot migrates.
    TryAgain,
}

pub(crate) type ReplySender = oneshot::Sender<Result<Reply, CallError>>;

/// A request in the queue.
#[derive(Debug)]
pub(crate) struct QueuedTask {
    /// The hash slot of all its keys; always 0 without a cluster.
    pub(crate) slot: u16,
    /// The hash slot is migrating to this node, so the call is preceded by ASKING.
    pub(crate) is_guest: bool,
    pub(crate) task: Task,
    pub(crate) sender: ReplySender,
}

/// The operation on a charge.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ChargeOp {
    Charge,
    /// Decides without charging.
    Peek,
    /// Refunds a charge made at this time by the server's clock, or at an unknown time.
    Refund(Option<Time>),
}

pub(crate) type Items = SmallVec<[Item; 2]>;

#[derive(Clone, Debug)]
pub(crate) enum Task {
    Charge {
        items: Items,
        op: ChargeOp,
        /// Replaces the server's clock.
        at: Option<Time>,
    },
    Unlink(Vec<String>),
    /// The concurrency permits that this process claims.
    #[cfg_attr(not(feature = "tower"), allow(dead_code, reason = "only the middleware counts permits"))]
    Claim(Vec<PermitClaim>),
    /// Reads or writes records.
    Record {
        keys: Vec<String>,
        arguments: Vec<Vec<u8>>,
    },
}

/// The queue of one connection.
#[derive(Debug)]
pub(crate) struct Connection {
    queue: mpsc::Sender<QueuedTask>,
    is_connected: Arc<AtomicBool>,
}

/// Configuration shared by all connections.
#[derive(Clone, Debug)]
pub(crate) struct ConnectionOptions {
    pub(crate) library: Arc<Library>,
    /// How long callers wait.
    pub(crate) deadline: Duration,
}

impl Connection {
    /// Starts a driver on the current runtime. It ends when the connection is dropped.
    pub(crate) fn new(server: Server, options: ConnectionOptions) -> Connection {
        let (queue, tasks) = mpsc::channel(QUEUE_MAX);
        let is_connected = Arc::new(AtomicBool::new(false));
        let driver = Driver { server, options, connection: None, is_connected: is_connected.clone() };
        tokio::spawn(driver.run(tasks));
        Connection { queue, is_connected }
    }

    pub(crate) fn is_connected(&self) -> bool {
        self.is_connected.load(Ordering::Relaxed)
    }

    pub(crate) fn enqueue(&self, task: QueuedTask) -> Result<(), StoreError> {
        self.queue.try_send(task).map_err(|error| match error {
            mpsc::error::TrySendError::Full(_) => StoreError::Overloaded,
            mpsc::error::TrySendError::Closed(_) => StoreError::driver_ended(),
        })
    }
}

impl StoreError {
    pub(crate) fn driver_ended() -> StoreError {
        StoreError::Unreachable("the task of the connection has ended".to_owned())
    }
}

struct Driver {
    server: Server,
    options: ConnectionOptions,
    connection: Option<MultiplexedConnection>,
    is_connected: Arc<AtomicBool>,
}

impl Driver {
    async fn run(mut self, mut tasks: mpsc::Receiver<QueuedTask>) {
        let mut batch = Vec::new();
        // Opening a connection takes longer than a request may wait, so it is opened in advance.
        let _ = self.connect().await;
        loop {
            let receiving = tasks.recv_many(&mut batch, BATCH_MAX);
            let received = match self.connection {
                Some(_) => Ok(receiving.await),
                None => tokio::time::timeout(CONNECT_EVERY, receiving).await,
            };
            match received {
                Ok(0) => return,
                Ok(_) => self.serve(std::mem::take(&mut batch)).await,
                Err(_) => {
                    let _ = self.connect().await;
                }
            }
            self.is_connected.store(self.connection.is_some(), Ordering::Relaxed);
        }
    }

    async fn serve(&mut self, mut tasks: Vec<QueuedTask>) {
        // Requests whose caller has given up are neither charged nor a reason to connect.
        tasks.retain(|task| !task.sender.is_closed());
        if tasks.is_empty() {
            return;
        }
        let connected = self.connect().await;
        tasks.retain(|task| !task.sender.is_closed());
        let calls = calls(tasks);
        match connected {
            Ok(()) if calls.is_empty() => {}
            Ok(()) => self.call(calls).await,
            Err(error) => calls.into_iter().for_each(|call| call.fail(&CallError::Failed(error.clone()))),
        }
    }

    /// Opens a connection if there is none.
    async fn connect(&mut self) -> Result<(), StoreError> {
        if self.connection.is_none() {
            let made = self.server.connect().await;
            self.connection = Some(made.map_err(|error| StoreError::Unreachable(error_text(&error)))?);
            self.is_connected.store(true, Ordering::Relaxed);
        }
        Ok(())
    }

    /// Sends calls and answers their requests. If a reply does not arrive in time, the connection is closed; the
    /// calls may have been executed, so they are never sent again.
    async fn call(&mut self, calls: Vec<Call>) {
        let Some(connection) = &mut self.connection else { return };
        let calling = send(connection, &self.options, &calls);
        let timeout = self.options.deadline.max(TIMEOUT_MIN);
        let replies = match tokio::time::timeout(timeout, calling).await {
            Ok(Ok(replies)) => replies,
            failed => {
                self.connection = None;
                let error = match failed {
                    Ok(Err(error)) => StoreError::ConnectionLost(error_text(&error)),
                    _ => StoreError::TimedOut,
                };
                calls.into_iter().for_each(|call| call.fail(&CallError::Failed(error.clone())));
                return;
            }
        };
        for (call, reply) in calls.into_iter().zip(replies) {
            match reply {
                Ok(reply) => call.reply(&reply),
                Err(error) => {
                    if is_not_master(&error) {
                        self.connection = None;
                    }
                    call.fail(&call_error(&error));
                }
            }
        }
    }
}

/// Sends all calls as one pipeline. Calls that fail because the functions are not loaded are repeated after loading
/// them.
async fn send(
    connection: &mut MultiplexedConnection,
    options: &ConnectionOptions,
    calls: &[Call],
) -> RedisResult<Vec<RedisResult<Value>>> {
    let mut replies = send_once(connection, options, calls.iter()).await?;
    // A restarted server has lost the functions and has not executed the calls, so they can be repeated.
    let is_unknown = |reply: &RedisResult<Value>| {
        reply.as_ref().is_err_and(|error| error.to_string().contains("Function not found"))
    };
    let unknown: Vec<usize> = (0..replies.len()).filter(|&index| is_unknown(&replies[index])).collect();
    if !unknown.is_empty() {
        let load = ["LOAD", "REPLACE", &options.library.text];
        ::redis::cmd("FUNCTION").arg(&load).query_async::<String>(connection).await?;
        let again = unknown.iter().map(|&index| &calls[index]);
        for (index, reply) in unknown.iter().zip(send_once(connection, options, again).await?) {
            replies[*index] = reply;
        }
    }
    Ok(replies)
}

async fn send_once<'a>(
    connection: &mut MultiplexedConnection,
    options: &ConnectionOptions,
    calls: impl Iterator<Item = &'a Call>,
) -> RedisResult<Vec<RedisResult<Value>>> {
    let mut pipeline = Pipeline::new();
    pipeline.ignore_errors();
    for call in calls {
        if call.is_guest {
            pipeline.cmd("ASKING").ignore();
        }
        pipeline.add_command(call.command(options));
    }
    pipeline.query_async(connection).await
}

/// The server is a replica now, is loading, or has lost its master: a new connection may reach another server.
fn is_not_master(error: &RedisError) -> bool {
    matches!(
        error.kind(),
        ErrorKind::Server(
            ServerErrorKind::ReadOnly | ServerErrorKind::BusyLoading | ServerErrorKind::MasterDown
        )
    )
}

fn call_error(error: &RedisError) -> CallError {
    match (error.kind(), error.redirect_node()) {
        (ErrorKind::Server(kind), Some((address, _))) => {
            CallError::Redirected { address: address.to_owned(), is_ask: kind == ServerErrorKind::Ask }
        }
        (ErrorKind::Server(ServerErrorKind::TryAgain), _) => CallError::TryAgain,
        _ => {
            let reply = StoreError::ErrorReply(error_text(error));
            let is_about_key = matches!(reply.cause(), Some(FailureCause::WrongType | FailureCause::Other));
            match is_about_key && error.to_string().contains("@user_function") {
                // The function failed on the key's value.
                true => CallError::Failed(StoreError::UnexpectedReply),
                false => CallError::Failed(reply),
            }
        }
    }
}

/// Requests that share one call.
struct Call {
    slot: u16,
    is_guest: bool,
    work: CallWork,
}

enum CallWork {
    Charges { at: Option<Time>, requests: Vec<ChargeRequest> },
    Unlink { keys: Vec<String>, sender: ReplySender },
    Claims(Vec<(Vec<PermitClaim>, ReplySender)>),
    Record { keys: Vec<String>, arguments: Vec<Vec<u8>>, sender: ReplySender },
}

/// The charges of one request in a call.
struct ChargeRequest {
    items: Items,
    op: ChargeOp,
    sender: ReplySender,
}

/// Groups requests of the same kind, time and hash slot into calls, in order.
fn calls(tasks: Vec<QueuedTask>) -> Vec<Call> {
    let mut calls: Vec<Call> = Vec::with_capacity(1);
    for QueuedTask { slot, is_guest, task, sender } in tasks {
        let work = match task {
            Task::Unlink(keys) => CallWork::Unlink { keys, sender },
            Task::Record { keys, arguments } => CallWork::Record { keys, arguments, sender },
            Task::Claim(claims) => {
                let same = calls.iter_mut().find_map(|call| match &mut call.work {
                    CallWork::Claims(all) if call.slot == slot && call.is_guest == is_guest => Some(all),
                    _ => None,
                });
                if let Some(all) = same {
                    all.push((claims, sender));
                    continue;
                }
                CallWork::Claims(vec![(claims, sender)])
            }
            Task::Charge { items, op, at } => {
                let request = ChargeRequest { items, op, sender };
                let same = calls.iter_mut().find_map(|call| match &mut call.work {
                    CallWork::Charges { at: its, requests }
                        if *its == at && call.slot == slot && call.is_guest == is_guest =>
                    {
                        Some(requests)
                    }
                    _ => None,
                });
                if let Some(requests) = same {
                    requests.push(request);
                    continue;
                }
                CallWork::Charges { at, requests: vec![request] }
            }
        };
        calls.push(Call { slot, is_guest, work });
    }
    calls
}

impl Call {
    fn command(&self, options: &ConnectionOptions) -> Cmd {
        match &self.work {
            CallWork::Unlink { keys, .. } => {
                let mut command = ::redis::cmd("UNLINK");
                command.arg(keys);
                command
            }
            CallWork::Record { keys, arguments, .. } => {
                let mut command = ::redis::cmd("FCALL");
                command.arg(&options.library.records).arg(keys.len()).arg(keys).arg(arguments);
                command
            }
            CallWork::Claims(all) => {
                let mut command = ::redis::cmd("FCALL");
                command.arg(&options.library.concurrency);
                PermitClaim::push_all(&mut command, all.iter().flat_map(|(claims, _)| claims));
                command
            }
            CallWork::Charges { at, requests } => {
                let mut command = ::redis::cmd("FCALL");
                let items = || requests.iter().flat_map(|request| &request.items);
                command.arg(&options.library.charge).arg(items().count());
                for item in items() {
                    command.arg(&item.key);
                }
                for ChargeRequest { items, op, .. } in requests {
                    for (index, item) in items.iter().enumerate() {
                        command.arg(match op {
                            ChargeOp::Refund(at) => item.limit.refund(item.cost, *at),
                            _ => item.limit.charge(item.cost, *op == ChargeOp::Peek, index + 1 < items.len()),
                        });
                    }
                }
                if let Some(at) = at {
                    let mut time = Vec::new();
                    protocol::push_instant(&mut time, at.as_nanos());
                    command.arg(time);
                }
                command
            }
        }
    }

    /// Answers each request with its part of the reply.
    fn reply(self, reply: &Value) {
        // A failed send means that the caller has given up.
        match (self.work, reply) {
            (CallWork::Unlink { sender, .. }, _) => {
                let _ = sender.send(Ok(Reply::default()));
            }
            (CallWork::Record { sender, .. }, Value::Array(values)) => {
                let text = |value: &Value| match value {
                    Value::BulkString(text) => Some(text.clone()),
                    _ => None,
                };
                let records: Option<Vec<_>> = values.iter().map(text).collect();
                let reply = records.map(|records| Reply { records, ..Reply::default() });
                let _ = sender.send(reply.ok_or(CallError::Failed(StoreError::UnexpectedReply)));
            }
            (CallWork::Charges { requests, .. }, Value::BulkString(reply)) => {
                let mut rest = reply.as_slice();
                let now = protocol::take_instant(&mut rest).map(Time::from_nanos);
                for request in requests {
                    let reply = now.and_then(|now| request.parse_reply(&mut rest, now));
                    let _ = request.sender.send(reply.ok_or(CallError::Failed(StoreError::UnexpectedReply)));
                }
            }
            (CallWork::Claims(all), Value::BulkString(reply)) => {
                let mut rest = reply.as_slice();
                for (claims, sender) in all {
                    let claims: Option<Vec<_>> =
                        claims.iter().map(|_| ClaimResult::take(&mut rest)).collect();
                    let reply = claims.map(|claims| Reply { claims, ..Reply::default() });
                    let _ = sender.send(reply.ok_or(CallError::Failed(StoreError::UnexpectedReply)));
                }
            }
            (work, _) => {
                Call { work, ..self }.fail(&CallError::Failed(StoreError::UnexpectedReply));
            }
        }
    }

    fn fail(self, why: &CallError) {
        match self.work {
            CallWork::Unlink { sender, .. } | CallWork::Record { sender, .. } => {
                let _ = sender.send(Err(why.clone()));
            }
            CallWork::Claims(all) => all.into_iter().for_each(|(_, sender)| {
                let _ = sender.send(Err(why.clone()));
            }),
            CallWork::Charges { requests, .. } => {
                for request in requests {
                    let _ = request.sender.send(Err(why.clone()));
                }
            }
        }
    }
}

impl ChargeRequest {
    fn parse_reply(&self, rest: &mut &[u8], at: Time) -> Option<Reply> {
        if matches!(self.op, ChargeOp::Refund(_)) {
            self.items.iter().try_for_each(|_| PackedLimit::refunded(rest))?;
            return Some(Reply { at, ..Reply::default() });
        }
        let decisions = self.items.iter().map(|item| item.limit.decision(rest, at, item.cost));
        // All decisions are parsed even if one fails, so that the next request's begin at the right byte.
        let decisions: SmallVec<[_; 4]> = decisions.collect();
        let decisions: Option<SmallVec<_>> = decisions.into_iter().collect();
        Some(Reply {
            verdict: Verdict { decisions: decisions?, ..Verdict::default() },
            at,
            ..Reply::default()
        })
    }
}
