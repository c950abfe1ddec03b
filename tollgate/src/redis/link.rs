//! A connection to Redis, and the task that drives it.
//!
//! Requests that wait at the same time share one call: while a call is on its way, whoever comes queues up, and all of
//! them go with the next. When nobody waits, a request goes at once. In a cluster a call has the keys of one slot, and
//! the calls of several slots go together.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use ::redis::aio::MultiplexedConnection;
use ::redis::{Cmd, ErrorKind, Pipeline, RedisError, RedisResult, ServerErrorKind, Value};
use smallvec::SmallVec;
use tokio::sync::{mpsc, oneshot};
use tollgate_core::Time;

use super::claim::{Claim, Claimed};
use super::protocol::{self, Packed};
use super::server::Server;
use crate::store::Verdict;

/// Requests that may wait for one connection. When Redis is slow, more are turned away than memory is spent.
const QUEUE_MAX: usize = 1024;
/// How long an answer is waited for before its connection is given up, however soon those who ask give up: a server that
/// pauses for a moment need not be connected to anew.
const PATIENCE_MIN: Duration = Duration::from_millis(100);
/// How often a connection is tried for that nobody asks for.
const CONNECT_EVERY: Duration = Duration::from_millis(500);
/// Requests that share one call: a call of so many takes Redis about a quarter of a millisecond.
const BATCH_MAX: usize = 64;

/// The functions in Redis, under a name that changes with their text: versions do not get in each other's way.
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
        // FNV-1a: any hash that never changes will do.
        let hash = text.bytes().fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| {
            (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3)
        });
        let [charge, slots, records] =
            ["", "slots_", "records_"].map(|part| format!("tollgate_{part}{hash:016x}"));
        let text =
            text.replace("@charge@", &charge).replace("@slots@", &slots).replace("@records@", &records);
        Library { text: format!("#!lua name={charge}\n{text}"), charge, slots, records }
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
    /// A connection could not be made.
    Unreachable(String),
    /// The connection failed before the answer came.
    Lost(String),
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

/// A charge on its way.
#[derive(Clone, Debug)]
pub(crate) struct Item {
    pub(crate) limit: Arc<Packed>,
    pub(crate) key: String,
    pub(crate) cost: u32,
}

/// What was decided about a request, and when by the server's clock.
#[derive(Clone, Debug, Default)]
pub(crate) struct Told {
    pub(crate) verdict: Verdict,
    pub(crate) at: Time,
    /// Of each claim, unless its key is not what was written to it.
    #[cfg_attr(not(feature = "tower"), allow(dead_code, reason = "only the middleware counts slots"))]
    pub(crate) claimed: Vec<Option<Claimed>>,
    /// What was remembered.
    pub(crate) records: Vec<Vec<u8>>,
}

/// Why a request was not carried out.
#[derive(Clone, Debug)]
pub(crate) enum NotDone {
    Failed(StoreError),
    /// The keys are with another node of the cluster, or this time only: they are on their way there.
    Elsewhere {
        address: String,
        this_time: bool,
    },
    /// Some of the keys are on their way to another node.
    Between,
}

pub(crate) type Tell = oneshot::Sender<Result<Told, NotDone>>;

/// What one request asks.
#[derive(Debug)]
pub(crate) struct Ask {
    /// The slot of all of its keys. Without a cluster it is always the same.
    pub(crate) slot: u16,
    /// The node is asked although the slot is not its own yet.
    pub(crate) is_guest: bool,
    pub(crate) task: Task,
    pub(crate) tell: Tell,
}

/// What is done with a charge.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum What {
    Make,
    /// Only says what it would do.
    Look,
    /// Undoes one that was made at that time by the server's clock, or at one that is not known.
    GiveBack(Option<Time>),
}

pub(crate) type Items = SmallVec<[Item; 2]>;

#[derive(Clone, Debug)]
pub(crate) enum Task {
    Charge {
        items: Items,
        what: What,
        /// The server's own time unless given.
        at: Option<Time>,
    },
    Forget(Vec<String>),
    /// How many slots this process wants to have.
    #[cfg_attr(not(feature = "tower"), allow(dead_code, reason = "only the middleware counts slots"))]
    Claim(Vec<Claim>),
    /// Remembers something, or says what is remembered.
    Record {
        keys: Vec<String>,
        arguments: Vec<Vec<u8>>,
    },
}

/// One connection's queue.
#[derive(Debug)]
pub(crate) struct Link {
    queue: mpsc::Sender<Ask>,
    is_connected: Arc<AtomicBool>,
}

/// What all links have in common.
#[derive(Clone, Debug)]
pub(crate) struct Common {
    pub(crate) library: Arc<Library>,
    /// How long those who ask wait.
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
        // A connection takes longer to make than a request may wait, so it is there before one comes.
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
        // If nobody waits any more, no connection is made for them; and whoever has given up is not charged.
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

    /// Makes a connection if there is none.
    async fn connect(&mut self) -> Result<(), StoreError> {
        if self.connection.is_none() {
            let made = self.server.connect().await;
            self.connection = Some(made.map_err(|error| StoreError::Unreachable(error.to_string()))?);
            self.is_connected.store(true, Ordering::Relaxed);
        }
        Ok(())
    }

    /// Sends calls, and tells everybody. After an answer that did not come in time the connection is dropped: the calls
    /// may have been carried out, so they are never sent again.
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

/// Sends all calls at once. One that finds no functions is sent again once they are loaded.
async fn send(
    connection: &mut MultiplexedConnection,
    common: &Common,
    calls: &[Call],
) -> RedisResult<Vec<RedisResult<Value>>> {
    let mut replies = send_once(connection, common, calls.iter()).await?;
    // A restarted server has forgotten the functions. It has not run anything, so this may be said again.
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

/// A server that is a replica now, or that is loading, or has lost its master: another connection may reach another.
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
        // Our function did not get along with what is in the key, unless it is not allowed to do what it does.
        _ if error.to_string().contains("@user_function") && !error.to_string().contains("ACL failure") => {
            NotDone::Failed(StoreError::Garbled)
        }
        _ => NotDone::Failed(StoreError::Refused(error.to_string())),
    }
}

/// Requests that go in one call.
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

/// One request's part of a call.
struct Request {
    items: Items,
    what: What,
    tell: Tell,
}

/// Puts requests together that are decided at the same time, in order.
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
                            What::GiveBack(at) => item.limit.give_back(item.cost, *at),
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

    /// Hands each request its part of the reply.
    fn tell(self, reply: &Value) {
        // If nobody is there to be told, nobody needs to know.
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
            self.items.iter().try_for_each(|_| Packed::given_back(rest))?;
            return Some(Told { at, ..Told::default() });
        }
        let told = self.items.iter().map(|item| item.limit.decision(rest, at, item.cost));
        // All are read, so that the next begins at its own.
        let told: SmallVec<[_; 4]> = told.collect();
        let decisions: Option<SmallVec<_>> = told.into_iter().collect();
        Some(Told { verdict: Verdict { decisions: decisions?, ..Verdict::default() }, at, ..Told::default() })
    }
}
