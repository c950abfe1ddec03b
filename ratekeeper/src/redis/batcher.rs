//! One connection to Redis, and the task that drives it.
//!
//! Concurrent requests share calls: requests that arrive while a call is in flight form the next batch; a lone
//! request is sent immediately. In a cluster, a call contains the keys of one hash slot, and the calls of several
//! hash slots are sent as one pipeline.

use std::collections::VecDeque;
use std::future::{pending, poll_fn};
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::Poll;
use std::time::Duration;

use tokio::runtime::Handle;
use tokio::sync::mpsc;
use tokio::time::{Instant, Sleep, sleep, timeout};

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
/// A connection that was not used for this long is verified, because a router may have dropped it silently.
const PING_EVERY: Duration = Duration::from_secs(15);
/// Requests that are sent together: in one call, unless they are heavy (`call.rs`).
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
    /// Starts a driver on a runtime. It ends when the connection is dropped.
    pub(crate) fn new(server: Server, options: ConnectionOptions, runtime: &Handle) -> Connection {
        let (queue, tasks) = mpsc::channel(QUEUE_MAX);
        let is_connected = Arc::new(AtomicBool::new(false));
        let driver =
            Driver { server, options, link: None, is_connected: is_connected.clone(), commands: Vec::new() };
        runtime.spawn(driver.run(tasks));
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
    /// Whether there is a link, for the threads that choose a connection.
    is_connected: Arc<AtomicBool>,
    /// Commands to be sent; kept for its memory.
    commands: Vec<u8>,
}

impl Drop for Driver {
    fn drop(&mut self) {
        self.disconnect();
    }
}

impl Driver {
    async fn run(mut self, mut tasks: mpsc::Receiver<QueuedTask>) {
        let mut batch = Vec::with_capacity(BATCH_MAX);
        let mut timer = Box::pin(sleep(PING_EVERY));
        let mut is_used = false;
        // Opening a connection takes longer than a request may wait, so it is opened in advance.
        let _ = self.connect().await;
        loop {
            match self.wait(&mut tasks, &mut batch, timer.as_mut()).await {
                Wake::Tasks(0) => return,
                Wake::Tasks(_) => {
                    self.serve(&mut batch).await;
                    is_used = true;
                }
                Wake::Closed => {
                    self.disconnect();
                    let _ = self.connect().await;
                }
                Wake::Timer if self.link.is_some() => {
                    if !std::mem::take(&mut is_used) {
                        self.verify().await;
                    }
                }
                Wake::Timer => {
                    let _ = self.connect().await;
                }
            }
            if timer.is_elapsed() || self.link.is_none() {
                let every = if self.link.is_some() { PING_EVERY } else { CONNECT_EVERY };
                timer.as_mut().reset(Instant::now() + every);
            }
        }
    }

    /// Waits for tasks, for the end of the connection, or for the timer.
    async fn wait(
        &mut self,
        tasks: &mut mpsc::Receiver<QueuedTask>,
        batch: &mut Vec<QueuedTask>,
        mut timer: Pin<&mut Sleep>,
    ) -> Wake {
        let closing = async {
            match &mut self.link {
                Some(link) => link.wait_closed().await,
                None => pending().await,
            }
        };
        let mut closing = pin!(closing);
        poll_fn(|context| {
            // First, so that no task is sent on a connection that has been closed.
            if closing.as_mut().poll(context).is_ready() {
                return Poll::Ready(Wake::Closed);
            }
            if let Poll::Ready(count) = tasks.poll_recv_many(context, batch, BATCH_MAX) {
                return Poll::Ready(Wake::Tasks(count));
            }
            timer.as_mut().poll(context).map(|()| Wake::Timer)
        })
        .await
    }

    /// Closes the connection if the server does not answer.
    async fn verify(&mut self) {
        if let Some(link) = &mut self.link
            && !matches!(timeout(self.options.deadline.max(TIMEOUT_MIN), link.ping()).await, Ok(Ok(())))
        {
            self.disconnect();
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

    fn disconnect(&mut self) {
        self.link = None;
        self.is_connected.store(false, Ordering::Relaxed);
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
        self.disconnect();
        if let Some(error) = error {
            calls.into_iter().for_each(|call| call.fail(&CallError::Failed(error.clone())));
        }
    }
}

/// What ends the wait of a driver.
enum Wake {
    /// As many tasks have arrived; none if the connection is not needed any more.
    Tasks(usize),
    /// The server has closed the connection.
    Closed,
    Timer,
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
            let role = if is_not_master(text) { NodeRole::Other } else { role };
            let error = CallError::of_reply(text);
            calls.drain(..).for_each(|call| call.fail(&error));
            return Ok(role);
        }
        self.send(calls).await?;
        match (role, self.receive(calls, false).await?) {
            (NodeRole::Master, NodeRole::Master) => Ok(NodeRole::Master),
            _ => Ok(NodeRole::Other),
        }
    }

    async fn send(&mut self, calls: &VecDeque<Call>) -> Result<(), LinkError> {
        self.commands.clear();
        calls.iter().for_each(|call| call.push_command(self.library, self.commands));
        let sent = self.link.send(self.commands).await;
        self.commands.clear();
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
    error.starts_with(b"ERR Function not found")
}

fn is_not_master(error: &[u8]) -> bool {
    [b"READONLY ".as_slice(), b"LOADING ", b"MASTERDOWN ", b"NOREPLICAS "]
        .iter()
        .any(|code| error.starts_with(code))
}
