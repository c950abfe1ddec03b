//! One connection to Redis, and the task that drives it.
//!
//! Concurrent requests share calls: requests that arrive while a call is in flight form the next batch; a lone
//! request is sent immediately. In a cluster, a call contains the keys of one hash slot, and the calls of several
//! hash slots are sent as one pipeline.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use tokio::sync::mpsc;
use tokio::time::timeout;

use super::call::{Call, CallError, QueuedTask, calls};
use super::library::Library;
use super::link::{Link, LinkError};
use super::resp::{self, RespValue};
use super::server::Server;
use super::store_error::StoreError;

/// Requests that may wait for one connection. If Redis is slow, further requests fail, which bounds memory.
const QUEUE_MAX: usize = 1024;
/// Shortest time to wait for a reply before the connection is closed, even if callers have a shorter deadline: a
/// brief pause of the server must not cost a reconnect.
const TIMEOUT_MIN: Duration = Duration::from_millis(100);
/// Interval of connection attempts while no request needs the connection.
const CONNECT_EVERY: Duration = Duration::from_millis(500);
/// Requests that share one call: a full batch takes Redis about a quarter of a millisecond.
const BATCH_MAX: usize = 64;
/// The memory for commands that a connection keeps: a full batch of charges has about 12 kB.
const COMMAND_BYTES_KEPT: usize = 32 << 10;

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
    /// Connections of each runtime to a server; by default one for each of its threads.
    pub(crate) connections: Option<usize>,
}

impl Connection {
    /// Starts a driver on the current runtime. It ends when the connection is dropped.
    pub(crate) fn new(server: Server, options: ConnectionOptions) -> Connection {
        let (queue, tasks) = mpsc::channel(QUEUE_MAX);
        let is_connected = Arc::new(AtomicBool::new(false));
        let driver =
            Driver { server, options, link: None, is_connected: is_connected.clone(), commands: Vec::new() };
        tokio::spawn(driver.run(tasks));
        Connection { queue, is_connected }
    }

    pub(crate) fn is_connected(&self) -> bool {
        self.is_connected.load(Ordering::Relaxed)
    }

    /// Whether the runtime of the driver has shut down.
    pub(crate) fn has_ended(&self) -> bool {
        self.queue.is_closed()
    }

    pub(crate) fn enqueue(&self, task: QueuedTask) -> Result<(), StoreError> {
        self.queue.try_send(task).map_err(|error| match error {
            mpsc::error::TrySendError::Full(_) => StoreError::Overloaded,
            mpsc::error::TrySendError::Closed(_) => StoreError::driver_ended(),
        })
    }
}

struct Driver {
    server: Server,
    options: ConnectionOptions,
    link: Option<Link>,
    is_connected: Arc<AtomicBool>,
    /// Commands to be sent; kept for its memory.
    commands: Vec<u8>,
}

impl Drop for Driver {
    fn drop(&mut self) {
        self.is_connected.store(false, Ordering::Relaxed);
    }
}

impl Driver {
    async fn run(mut self, mut tasks: mpsc::Receiver<QueuedTask>) {
        let mut batch = Vec::with_capacity(BATCH_MAX);
        // Opening a connection takes longer than a request may wait, so it is opened in advance.
        let _ = self.connect().await;
        loop {
            let receiving = tasks.recv_many(&mut batch, BATCH_MAX);
            let received = match self.link {
                Some(_) => Ok(receiving.await),
                None => timeout(CONNECT_EVERY, receiving).await,
            };
            match received {
                Ok(0) => return,
                Ok(_) => self.serve(&mut batch).await,
                Err(_) => {
                    let _ = self.connect().await;
                }
            }
            self.is_connected.store(self.link.is_some(), Ordering::Relaxed);
        }
    }

    async fn serve(&mut self, tasks: &mut Vec<QueuedTask>) {
        // Requests whose caller has given up are neither charged nor a reason to connect.
        tasks.retain(|task| !task.sender.is_closed());
        if tasks.is_empty() {
            return;
        }
        let mut connected = Ok(());
        if self.link.is_none() {
            connected = self.connect().await;
            tasks.retain(|task| !task.sender.is_closed());
        }
        let calls = calls(tasks.drain(..));
        match connected {
            Ok(()) if calls.is_empty() => {}
            Ok(()) => self.call(calls.into()).await,
            Err(error) => calls.into_iter().for_each(|call| call.fail(&CallError::Failed(error.clone()))),
        }
    }

    /// Opens a connection if there is none.
    async fn connect(&mut self) -> Result<(), StoreError> {
        if self.link.is_none() {
            let link = self.server.connect().await;
            self.link = Some(link.map_err(|error| StoreError::Unreachable(error.to_string()))?);
            self.is_connected.store(true, Ordering::Relaxed);
        }
        Ok(())
    }

    /// Sends calls and answers their requests. If a reply does not arrive in time, the connection is closed; the
    /// calls may have been executed, so they are never sent again.
    async fn call(&mut self, mut calls: VecDeque<Call>) {
        let Some(link) = &mut self.link else { return };
        let exchange = Exchange { link, library: &self.options.library, commands: &mut self.commands };
        let error = match timeout(self.options.deadline.max(TIMEOUT_MIN), exchange.run(&mut calls)).await {
            Ok(Ok(NodeRole::Master)) => return,
            // A new connection may reach another server.
            Ok(Ok(NodeRole::Other)) => None,
            Ok(Err(error)) => Some(StoreError::ConnectionLost(error.to_string())),
            Err(_) => Some(StoreError::TimedOut),
        };
        self.link = None;
        if let Some(error) = error {
            calls.into_iter().for_each(|call| call.fail(&CallError::Failed(error.clone())));
        }
    }
}

/// Whether a server can decide: others are replicas, are loading, or have lost their master.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum NodeRole {
    Master,
    Other,
}

/// Calls that are sent as one pipeline.
struct Exchange<'a> {
    link: &'a mut Link,
    library: &'a Library,
    commands: &'a mut Vec<u8>,
}

impl Exchange<'_> {
    /// Sends the calls, and removes each when it is answered. Calls that fail because the functions are not loaded
    /// are repeated after loading them.
    async fn run(mut self, calls: &mut VecDeque<Call>) -> Result<NodeRole, LinkError> {
        self.send(calls).await?;
        let role = self.receive(calls, true).await?;
        if calls.is_empty() {
            return Ok(role);
        }
        // A restarted server has lost the functions and has not executed the calls.
        self.commands.clear();
        resp::push_all(self.commands, &[b"FUNCTION", b"LOAD", b"REPLACE", self.library.text.as_bytes()]);
        self.link.send(self.commands).await?;
        if let RespValue::Error(text) = self.link.receive().await? {
            let error = CallError::of_reply(text);
            calls.drain(..).for_each(|call| call.fail(&error));
            return Ok(role);
        }
        self.send(calls).await?;
        self.receive(calls, false).await
    }

    async fn send(&mut self, calls: &VecDeque<Call>) -> Result<(), LinkError> {
        self.commands.clear();
        calls.iter().for_each(|call| call.push_command(self.library, self.commands));
        let sent = self.link.send(self.commands).await;
        self.commands.shrink_to(COMMAND_BYTES_KEPT);
        sent
    }

    /// Receives the replies of all calls. Those for which the functions are not loaded stay, if they `may_repeat`.
    async fn receive(&mut self, calls: &mut VecDeque<Call>, may_repeat: bool) -> Result<NodeRole, LinkError> {
        let mut role = NodeRole::Master;
        for _ in 0..calls.len() {
            if calls.front().is_some_and(|call| call.is_guest) {
                // The reply to ASKING.
                self.link.receive().await?;
            }
            let reply = self.link.receive().await?;
            let Some(call) = calls.pop_front() else { break };
            match &reply {
                RespValue::Error(text) if may_repeat && is_unknown_function(text) => calls.push_back(call),
                RespValue::Error(text) => {
                    if is_not_master(text) {
                        role = NodeRole::Other;
                    }
                    call.fail(&CallError::of_reply(text));
                }
                reply => call.reply(reply),
            }
        }
        Ok(role)
    }
}

fn is_unknown_function(error: &[u8]) -> bool {
    error == b"ERR Function not found"
}

fn is_not_master(error: &[u8]) -> bool {
    [b"READONLY ".as_slice(), b"LOADING ", b"MASTERDOWN "].iter().any(|code| error.starts_with(code))
}
