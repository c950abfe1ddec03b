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

use super::claim::{Claim, Claimed};
use super::protocol::{self, Packed};
use super::server::Server;
use crate::store::Verdict;

/// Requests that may wait for one connection. If Redis is slow, further requests fail, which bounds memory.
const QUEUE_MAX: usize = 1024;
/// Shortest time to wait for a reply before the connection is closed, even if callers have a shorter deadline: a
/// brief pause of the server must not cost a reconnect.
const PATIENCE_MIN: Duration = Duration::from_millis(100);
/// Interval of connection attempts while no request needs the connection.
const CONNECT_EVERY: Duration = Duration::from_millis(500);
/// Requests that share one call: a full batch takes Redis about a quarter of a millisecond.
const BATCH_MAX: usize = 64;

/// The functions in Redis. Their names contain a hash of their text, so different versions can run side by side.
#[derive(Debug)]
pub(crate) struct Library {
    pub(crate) text: String,
    pub(crate) charge: String,
    pub(crate) slots: String,
    pub(crate) records: String,
}

impl Library {
    pub(crate) fn new() -> Library {
        let text =
            concat!(include_str!("library.lua"), include_str!("slots.lua"), include_str!("records.lua"));
        // FNV-1a, because the hash must never change.
        let hash = text.bytes().fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| {
            (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3)
        });
        let [charge, slots, records] =
            ["", "slots_", "records_"].map(|part| format!("ratekeeper_{part}{hash:016x}"));
        let text =
            text.replace("@charge@", &charge).replace("@slots@", &slots).replace("@records@", &records);
        Library { text: format!("#!lua name={charge}\n{text}"), charge, slots, records }
    }
}

/// Why Redis did not decide.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum StoreError {
    /// Redis did not answer in time.
    TimedOut,
    /// The circuit breaker is open: Redis has not answered for a while and is not called.
    Away,
    /// Too many requests wait for Redis.
    Busy,
    /// The connection could not be opened.
    Unreachable(String),
    /// The connection failed before the reply arrived.
    Lost(String),
    /// Redis replied with an error.
    Refused(String),
    /// The reply is not a decision: another program has written to the key.
    Garbled,
}

impl fmt::Display for StoreError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            StoreError::TimedOut => write!(f, "Redis did not answer in time"),
            StoreError::Away => write!(f, "Redis has not answered for a while and is not asked just now"),
            StoreError::Busy => write!(f, "too many requests wait for Redis"),
            StoreError::Unreachable(why) => write!(f, "cannot reach Redis: {why}"),
            StoreError::Lost(why) => write!(f, "the connection to Redis failed: {why}"),
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

/// A charge to be sent.
#[derive(Clone, Debug)]
pub(crate) struct Item {
    pub(crate) limit: Arc<Packed>,
    pub(crate) key: String,
    pub(crate) cost: u32,
}

/// The reply to a request, with the time of the decision by the server's clock.
#[derive(Clone, Debug, Default)]
pub(crate) struct Told {
    pub(crate) verdict: Verdict,
    pub(crate) at: Time,
    /// The result of each claim, or None if its key holds a foreign value.
    #[cfg_attr(not(feature = "tower"), allow(dead_code, reason = "only the middleware counts slots"))]
    pub(crate) claimed: Vec<Option<Claimed>>,
    /// Values of records.
    pub(crate) records: Vec<Vec<u8>>,
}

/// Why a request was not executed.
#[derive(Clone, Debug)]
pub(crate) enum NotDone {
    Failed(StoreError),
    /// Another node has the keys; with `this_time` for this request only, because the hash slot is migrating to it.
    Elsewhere {
        address: String,
        this_time: bool,
    },
    /// The keys are split between two nodes while their hash slot migrates.
    Between,
}

pub(crate) type Tell = oneshot::Sender<Result<Told, NotDone>>;

/// A request in the queue.
#[derive(Debug)]
pub(crate) struct Ask {
    /// The hash slot of all its keys; always 0 without a cluster.
    pub(crate) slot: u16,
    /// The hash slot is migrating to this node, so the call is preceded by ASKING.
    pub(crate) is_guest: bool,
    pub(crate) task: Task,
    pub(crate) tell: Tell,
}

/// The operation on a charge.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum What {
    Make,
    /// Decides without charging.
    Look,
    /// Refunds a charge made at this time by the server's clock, or at an unknown time.
    GiveBack(Option<Time>),
}

pub(crate) type Items = SmallVec<[Item; 2]>;

#[derive(Clone, Debug)]
pub(crate) enum Task {
    Charge {
        items: Items,
        what: What,
        /// Replaces the server's clock.
        at: Option<Time>,
    },
    Forget(Vec<String>),
    /// The concurrency permits that this process claims.
    #[cfg_attr(not(feature = "tower"), allow(dead_code, reason = "only the middleware counts slots"))]
    Claim(Vec<Claim>),
    /// Reads or writes records.
    Record {
        keys: Vec<String>,
        arguments: Vec<Vec<u8>>,
    },
}

/// The queue of one connection.
#[derive(Debug)]
pub(crate) struct Link {
    queue: mpsc::Sender<Ask>,
    is_connected: Arc<AtomicBool>,
}

/// Configuration shared by all links.
#[derive(Clone, Debug)]
pub(crate) struct Common {
    pub(crate) library: Arc<Library>,
    /// How long callers wait.
    pub(crate) deadline: Duration,
}

impl Link {
    /// Starts a driver on the current runtime. It ends when the link is dropped.
    pub(crate) fn new(server: Server, common: Common) -> Link {
        let (queue, asks) = mpsc::channel(QUEUE_MAX);
        let is_connected = Arc::new(AtomicBool::new(false));
        let driver = Driver { server, common, connection: None, is_connected: is_connected.clone() };
        tokio::spawn(driver.run(asks));
        Link { queue, is_connected }
    }

    pub(crate) fn is_connected(&self) -> bool {
        self.is_connected.load(Ordering::Relaxed)
    }

    pub(crate) fn ask(&self, ask: Ask) -> Result<(), StoreError> {
        self.queue.try_send(ask).map_err(|error| match error {
            mpsc::error::TrySendError::Full(_) => StoreError::Busy,
            mpsc::error::TrySendError::Closed(_) => StoreError::driver_has_ended(),
        })
    }
}

impl StoreError {
    pub(crate) fn driver_has_ended() -> StoreError {
        StoreError::Unreachable("its driver has ended".to_owned())
    }
}

struct Driver {
    server: Server,
    common: Common,
    connection: Option<MultiplexedConnection>,
    is_connected: Arc<AtomicBool>,
}

impl Driver {
    async fn run(mut self, mut asks: mpsc::Receiver<Ask>) {
        let mut batch = Vec::new();
        // Opening a connection takes longer than a request may wait, so it is opened in advance.
        let _ = self.connect().await;
        loop {
            let receiving = asks.recv_many(&mut batch, BATCH_MAX);
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

    async fn serve(&mut self, mut asks: Vec<Ask>) {
        // Requests whose caller has given up are neither charged nor a reason to connect.
        asks.retain(|ask| !ask.tell.is_closed());
        if asks.is_empty() {
            return;
        }
        let connected = self.connect().await;
        asks.retain(|ask| !ask.tell.is_closed());
        let calls = calls(asks);
        match connected {
            Ok(()) if calls.is_empty() => {}
            Ok(()) => self.call(calls).await,
            Err(error) => calls.into_iter().for_each(|call| call.tell_all(&NotDone::Failed(error.clone()))),
        }
    }

    /// Opens a connection if there is none.
    async fn connect(&mut self) -> Result<(), StoreError> {
        if self.connection.is_none() {
            let made = self.server.connect().await;
            self.connection = Some(made.map_err(|error| StoreError::Unreachable(error.to_string()))?);
            self.is_connected.store(true, Ordering::Relaxed);
        }
        Ok(())
    }

    /// Sends calls and answers their requests. If a reply does not arrive in time, the connection is closed; the
    /// calls may have been executed, so they are never sent again.
    async fn call(&mut self, calls: Vec<Call>) {
        let Some(connection) = &mut self.connection else { return };
        let calling = send(connection, &self.common, &calls);
        let patience = self.common.deadline.max(PATIENCE_MIN);
        let replies = match tokio::time::timeout(patience, calling).await {
            Ok(Ok(replies)) => replies,
            failed => {
                self.connection = None;
                let error = match failed {
                    Ok(Err(error)) => StoreError::Lost(error.to_string()),
                    _ => StoreError::TimedOut,
                };
                calls.into_iter().for_each(|call| call.tell_all(&NotDone::Failed(error.clone())));
                return;
            }
        };
        for (call, reply) in calls.into_iter().zip(replies) {
            match reply {
                Ok(reply) => call.tell(&reply),
                Err(error) => {
                    if is_not_in_charge(&error) {
                        self.connection = None;
                    }
                    call.tell_all(&not_done(&error));
                }
            }
        }
    }
}

/// Sends all calls as one pipeline. Calls that fail because the functions are not loaded are repeated after loading
/// them.
async fn send(
    connection: &mut MultiplexedConnection,
    common: &Common,
    calls: &[Call],
) -> RedisResult<Vec<RedisResult<Value>>> {
    let mut replies = send_once(connection, common, calls.iter()).await?;
    // A restarted server has lost the functions and has not executed the calls, so they can be repeated.
    let is_unknown = |reply: &RedisResult<Value>| {
        reply.as_ref().is_err_and(|error| error.to_string().contains("Function not found"))
    };
    let unknown: Vec<usize> = (0..replies.len()).filter(|&index| is_unknown(&replies[index])).collect();
    if !unknown.is_empty() {
        let load = ["LOAD", "REPLACE", &common.library.text];
        ::redis::cmd("FUNCTION").arg(&load).query_async::<String>(connection).await?;
        let again = unknown.iter().map(|&index| &calls[index]);
        for (index, reply) in unknown.iter().zip(send_once(connection, common, again).await?) {
            replies[*index] = reply;
        }
    }
    Ok(replies)
}

async fn send_once<'a>(
    connection: &mut MultiplexedConnection,
    common: &Common,
    calls: impl Iterator<Item = &'a Call>,
) -> RedisResult<Vec<RedisResult<Value>>> {
    let mut pipeline = Pipeline::new();
    pipeline.ignore_errors();
    for call in calls {
        if call.is_guest {
            pipeline.cmd("ASKING").ignore();
        }
        pipeline.add_command(call.command(common));
    }
    pipeline.query_async(connection).await
}

/// The server is a replica now, is loading, or has lost its master: a new connection may reach another server.
fn is_not_in_charge(error: &RedisError) -> bool {
    matches!(
        error.kind(),
        ErrorKind::Server(
            ServerErrorKind::ReadOnly | ServerErrorKind::BusyLoading | ServerErrorKind::MasterDown
        )
    )
}

fn not_done(error: &RedisError) -> NotDone {
    match (error.kind(), error.redirect_node()) {
        (ErrorKind::Server(kind), Some((address, _))) => {
            NotDone::Elsewhere { address: address.to_owned(), this_time: kind == ServerErrorKind::Ask }
        }
        (ErrorKind::Server(ServerErrorKind::TryAgain), _) => NotDone::Between,
        // The function failed on the key's value, unless the error is a missing permission.
        _ if error.to_string().contains("@user_function") && !error.to_string().contains("ACL failure") => {
            NotDone::Failed(StoreError::Garbled)
        }
        _ => NotDone::Failed(StoreError::Refused(error.to_string())),
    }
}

/// Requests that share one call.
struct Call {
    slot: u16,
    is_guest: bool,
    work: Work,
}

enum Work {
    Charges { at: Option<Time>, requests: Vec<Request> },
    Forget { keys: Vec<String>, tell: Tell },
    Claims(Vec<(Vec<Claim>, Tell)>),
    Record { keys: Vec<String>, arguments: Vec<Vec<u8>>, tell: Tell },
}

/// The charges of one request in a call.
struct Request {
    items: Items,
    what: What,
    tell: Tell,
}

/// Groups requests of the same kind, time and hash slot into calls, in order.
fn calls(asks: Vec<Ask>) -> Vec<Call> {
    let mut calls: Vec<Call> = Vec::with_capacity(1);
    for Ask { slot, is_guest, task, tell } in asks {
        let work = match task {
            Task::Forget(keys) => Work::Forget { keys, tell },
            Task::Record { keys, arguments } => Work::Record { keys, arguments, tell },
            Task::Claim(claims) => {
                let same = calls.iter_mut().find_map(|call| match &mut call.work {
                    Work::Claims(all) if call.slot == slot && call.is_guest == is_guest => Some(all),
                    _ => None,
                });
                if let Some(all) = same {
                    all.push((claims, tell));
                    continue;
                }
                Work::Claims(vec![(claims, tell)])
            }
            Task::Charge { items, what, at } => {
                let request = Request { items, what, tell };
                let same = calls.iter_mut().find_map(|call| match &mut call.work {
                    Work::Charges { at: its, requests }
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
                Work::Charges { at, requests: vec![request] }
            }
        };
        calls.push(Call { slot, is_guest, work });
    }
    calls
}

impl Call {
    fn command(&self, common: &Common) -> Cmd {
        match &self.work {
            Work::Forget { keys, .. } => {
                let mut command = ::redis::cmd("UNLINK");
                command.arg(keys);
                command
            }
            Work::Record { keys, arguments, .. } => {
                let mut command = ::redis::cmd("FCALL");
                command.arg(&common.library.records).arg(keys.len()).arg(keys).arg(arguments);
                command
            }
            Work::Claims(all) => {
                let mut command = ::redis::cmd("FCALL");
                command.arg(&common.library.slots);
                Claim::push_all(&mut command, all.iter().flat_map(|(claims, _)| claims));
                command
            }
            Work::Charges { at, requests } => {
                let mut command = ::redis::cmd("FCALL");
                let items = || requests.iter().flat_map(|request| &request.items);
                command.arg(&common.library.charge).arg(items().count());
                for item in items() {
                    command.arg(&item.key);
                }
                for Request { items, what, .. } in requests {
                    for (index, item) in items.iter().enumerate() {
                        command.arg(match what {
                            What::GiveBack(at) => item.limit.refund(item.cost, *at),
                            _ => item.limit.charge(item.cost, *what == What::Look, index + 1 < items.len()),
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
    fn tell(self, reply: &Value) {
        // A failed send means that the caller has given up.
        match (self.work, reply) {
            (Work::Forget { tell, .. }, _) => {
                let _ = tell.send(Ok(Told::default()));
            }
            (Work::Record { tell, .. }, Value::Array(values)) => {
                let text = |value: &Value| match value {
                    Value::BulkString(text) => Some(text.clone()),
                    _ => None,
                };
                let records: Option<Vec<_>> = values.iter().map(text).collect();
                let told = records.map(|records| Told { records, ..Told::default() });
                let _ = tell.send(told.ok_or(NotDone::Failed(StoreError::Garbled)));
            }
            (Work::Charges { requests, .. }, Value::BulkString(reply)) => {
                let mut rest = reply.as_slice();
                let now = protocol::take_instant(&mut rest).map(Time::from_nanos);
                for request in requests {
                    let told = now.and_then(|now| request.told(&mut rest, now));
                    let _ = request.tell.send(told.ok_or(NotDone::Failed(StoreError::Garbled)));
                }
            }
            (Work::Claims(all), Value::BulkString(reply)) => {
                let mut rest = reply.as_slice();
                for (claims, tell) in all {
                    let claimed: Option<Vec<_>> = claims.iter().map(|_| Claimed::take(&mut rest)).collect();
                    let told = claimed.map(|claimed| Told { claimed, ..Told::default() });
                    let _ = tell.send(told.ok_or(NotDone::Failed(StoreError::Garbled)));
                }
            }
            (work, _) => {
                Call { work, ..self }.tell_all(&NotDone::Failed(StoreError::Garbled));
            }
        }
    }

    fn tell_all(self, why: &NotDone) {
        match self.work {
            Work::Forget { tell, .. } | Work::Record { tell, .. } => {
                let _ = tell.send(Err(why.clone()));
            }
            Work::Claims(all) => all.into_iter().for_each(|(_, tell)| {
                let _ = tell.send(Err(why.clone()));
            }),
            Work::Charges { requests, .. } => {
                for request in requests {
                    let _ = request.tell.send(Err(why.clone()));
                }
            }
        }
    }
}

impl Request {
    fn told(&self, rest: &mut &[u8], at: Time) -> Option<Told> {
        if matches!(self.what, What::GiveBack(_)) {
            self.items.iter().try_for_each(|_| Packed::refunded(rest))?;
            return Some(Told { at, ..Told::default() });
        }
        let told = self.items.iter().map(|item| item.limit.decision(rest, at, item.cost));
        // All decisions are parsed even if one fails, so that the next request's begin at the right byte.
        let told: SmallVec<[_; 4]> = told.collect();
        let decisions: Option<SmallVec<_>> = told.into_iter().collect();
        Some(Told { verdict: Verdict { decisions: decisions?, ..Verdict::default() }, at, ..Told::default() })
    }
}
