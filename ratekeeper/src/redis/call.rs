//! Requests in the queue of a connection, and the calls of the library in which they share.

use std::sync::Arc;

use ratekeeper_core::Time;
use smallvec::SmallVec;
use tokio::sync::oneshot;

use super::claim::{ClaimResult, PermitClaim};
use super::failures::FailureCause;
use super::library::Library;
use super::protocol::{self, PackedLimit};
use super::resp::{self, RespValue};
use super::store_error::StoreError;
use crate::store::Verdict;

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

impl CallError {
    /// The meaning of an error reply.
    pub(crate) fn of_reply(text: &[u8]) -> CallError {
        let text = String::from_utf8_lossy(text).into_owned();
        let mut words = text.split(' ');
        match (words.next(), words.next(), words.next()) {
            (Some(code @ ("MOVED" | "ASK")), Some(_), Some(address)) => {
                CallError::Redirected { address: address.to_owned(), is_ask: code == "ASK" }
            }
            (Some("TRYAGAIN"), ..) => CallError::TryAgain,
            _ => {
                let is_by_function = text.contains("@user_function");
                let reply = StoreError::ErrorReply(text);
                let is_about_key =
                    matches!(reply.cause(), Some(FailureCause::WrongType | FailureCause::Other));
                match is_about_key && is_by_function {
                    // The function failed on the key's value.
                    true => CallError::Failed(StoreError::UnexpectedReply),
                    false => CallError::Failed(reply),
                }
            }
        }
    }
}

/// Replies are boxed, because they are moved from task to task.
pub(crate) type ReplySender = oneshot::Sender<Result<Box<Reply>, CallError>>;

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

/// Requests that share one call.
pub(crate) struct Call {
    slot: u16,
    /// The hash slot is migrating to the node, so the call is preceded by ASKING.
    pub(crate) is_guest: bool,
    work: CallWork,
}

enum CallWork {
    Charges { at: Option<Time>, requests: Vec<ChargeRequest>, weight: usize },
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

/// The weight of the charges that share a call. Redis runs a call without interruption: 64 charges of weight 1 take
/// about a quarter of a millisecond.
const WEIGHT_MAX: usize = 64;
/// Claims that share a call. Each reads the permits of all processes: 16 claims with 100 processes take half a
/// millisecond.
pub(crate) const CLAIMS_MAX: usize = 16;

/// Groups requests of the same kind, time and hash slot into calls, in order. A request is never split.
pub(crate) fn calls(tasks: impl Iterator<Item = QueuedTask>) -> Vec<Call> {
    let mut calls: Vec<Call> = Vec::with_capacity(1);
    for QueuedTask { slot, is_guest, task, sender } in tasks {
        let work = match task {
            Task::Unlink(keys) => CallWork::Unlink { keys, sender },
            Task::Record { keys, arguments } => CallWork::Record { keys, arguments, sender },
            Task::Claim(claims) => {
                let last = calls.iter_mut().rev().find_map(|call| match &mut call.work {
                    CallWork::Claims(all) if call.slot == slot && call.is_guest == is_guest => Some(all),
                    _ => None,
                });
                let count =
                    |all: &[(Vec<PermitClaim>, _)]| all.iter().map(|(claims, _)| claims.len()).sum::<usize>();
                if let Some(all) = last.filter(|all| count(all) + claims.len() <= CLAIMS_MAX) {
                    all.push((claims, sender));
                    continue;
                }
                CallWork::Claims(vec![(claims, sender)])
            }
            Task::Charge { items, op, at } => {
                let added = items.iter().map(|item| item.limit.weight()).sum();
                let request = ChargeRequest { items, op, sender };
                // The last of them, because requests for the same key must stay in order.
                let last = calls.iter_mut().rev().find_map(|call| match &mut call.work {
                    CallWork::Charges { at: its, requests, weight }
                        if *its == at && call.slot == slot && call.is_guest == is_guest =>
                    {
                        Some((requests, weight))
                    }
                    _ => None,
                });
                if let Some((requests, weight)) = last.filter(|(_, weight)| **weight + added <= WEIGHT_MAX) {
                    requests.push(request);
                    *weight += added;
                    continue;
                }
                CallWork::Charges { at, requests: vec![request], weight: added }
            }
        };
        calls.push(Call { slot, is_guest, work });
    }
    calls
}

impl Call {
    /// Appends the command of the call.
    pub(crate) fn push_command(&self, library: &Library, out: &mut Vec<u8>) {
        if self.is_guest {
            resp::push_all(out, &[b"ASKING"]);
        }
        match &self.work {
            CallWork::Unlink { keys, .. } => {
                resp::push_command(out, 1 + keys.len());
                resp::push_argument(out, b"UNLINK");
                keys.iter().for_each(|key| resp::push_argument(out, key.as_bytes()));
            }
            CallWork::Record { keys, arguments, .. } => {
                push_function(out, &library.records, 1 + keys.len() + arguments.len());
                resp::push_number(out, keys.len());
                keys.iter().for_each(|key| resp::push_argument(out, key.as_bytes()));
                arguments.iter().for_each(|argument| resp::push_argument(out, argument));
            }
            CallWork::Claims(all) => {
                let claims = || all.iter().flat_map(|(claims, _)| claims);
                push_function(out, &library.concurrency, 1 + 2 * claims().count());
                PermitClaim::push_claims(out, claims());
            }
            CallWork::Charges { at, requests, .. } => {
                let items = || requests.iter().flat_map(|request| &request.items);
                let count = items().count();
                push_function(out, &library.charge, 1 + 2 * count + usize::from(at.is_some()));
                resp::push_number(out, count);
                items().for_each(|item| resp::push_argument(out, item.key.as_bytes()));
                // The longest charge is that of an inline bucket: 74 bytes.
                let mut text = Vec::with_capacity(80);
                for ChargeRequest { items, op, .. } in requests {
                    for (index, item) in items.iter().enumerate() {
                        text.clear();
                        match op {
                            ChargeOp::Refund(at) => text = item.limit.refund(item.cost, *at),
                            _ => {
                                let (is_peek, more) = (*op == ChargeOp::Peek, index + 1 < items.len());
                                item.limit.push_charge(&mut text, item.cost, is_peek, more);
                            }
                        }
                        resp::push_argument(out, &text);
                    }
                }
                if let Some(at) = at {
                    text.clear();
                    protocol::push_instant(&mut text, at.as_nanos());
                    resp::push_argument(out, &text);
                }
            }
        }
    }

    /// Answers each request with its part of the reply.
    pub(crate) fn reply(self, reply: &RespValue<'_>) {
        // A failed send means that the caller has given up.
        match (self.work, reply) {
            (CallWork::Unlink { sender, .. }, _) => {
                let _ = sender.send(Ok(Box::default()));
            }
            (CallWork::Record { sender, .. }, RespValue::Array(values)) => {
                let text = |value: &RespValue<'_>| match value {
                    RespValue::Bulk(text) => Some(text.to_vec()),
                    _ => None,
                };
                let records: Option<Vec<_>> = values.iter().map(text).collect();
                let reply = records.map(|records| Box::new(Reply { records, ..Reply::default() }));
                let _ = sender.send(reply.ok_or(CallError::Failed(StoreError::UnexpectedReply)));
            }
            (CallWork::Charges { requests, .. }, RespValue::Bulk(reply)) => {
                let mut rest = *reply;
                let now = protocol::take_instant(&mut rest).map(Time::from_nanos);
                for request in requests {
                    let reply = now.and_then(|now| request.parse_reply(&mut rest, now));
                    let _ = request.sender.send(reply.ok_or(CallError::Failed(StoreError::UnexpectedReply)));
                }
            }
            (CallWork::Claims(all), RespValue::Bulk(reply)) => {
                let mut rest = *reply;
                for (claims, sender) in all {
                    let claims: Option<Vec<_>> =
                        claims.iter().map(|_| ClaimResult::take(&mut rest)).collect();
                    let reply = claims.map(|claims| Box::new(Reply { claims, ..Reply::default() }));
                    let _ = sender.send(reply.ok_or(CallError::Failed(StoreError::UnexpectedReply)));
                }
            }
            (work, _) => {
                Call { work, ..self }.fail(&CallError::Failed(StoreError::UnexpectedReply));
            }
        }
    }

    pub(crate) fn fail(self, why: &CallError) {
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
    fn parse_reply(&self, rest: &mut &[u8], at: Time) -> Option<Box<Reply>> {
        if matches!(self.op, ChargeOp::Refund(_)) {
            self.items.iter().try_for_each(|_| PackedLimit::refunded(rest))?;
            return Some(Box::new(Reply { at, ..Reply::default() }));
        }
        let decisions = self.items.iter().map(|item| item.limit.decision(rest, at, item.cost));
        // All decisions are parsed even if one fails, so that the next request's begin at the right byte.
        let decisions: SmallVec<[_; 4]> = decisions.collect();
        let decisions: Option<SmallVec<_>> = decisions.into_iter().collect();
        Some(Box::new(Reply {
            verdict: Verdict { decisions: decisions?, ..Verdict::default() },
            at,
            ..Reply::default()
        }))
    }
}

/// Appends the head of a call of a function with this many arguments.
fn push_function(out: &mut Vec<u8>, name: &str, arguments: usize) {
    resp::push_command(out, 2 + arguments);
    resp::push_argument(out, b"FCALL");
    resp::push_argument(out, name.as_bytes());
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use ratekeeper_core::{EdgePolicy, Limit, WindowAlign};

    use super::*;

    const WINDOW: Duration = Duration::from_secs(60);

    /// Returns for each call the keys of its charges.
    fn keys_of_calls(limits: &[Limit], requests: usize) -> Vec<Vec<String>> {
        let limits: Vec<_> =
            limits.iter().map(|limit| Arc::new(PackedLimit::new(limit, limit.limit()))).collect();
        let tasks = (0..requests).map(|number| {
            let item =
                |limit: &Arc<PackedLimit>| Item { limit: limit.clone(), key: number.to_string(), cost: 1 };
            let items = limits.iter().map(item).collect();
            QueuedTask {
                slot: 0,
                is_guest: false,
                task: Task::Charge { items, op: ChargeOp::Charge, at: None },
                sender: oneshot::channel().0,
            }
        });
        let keys = |call: Call| match call.work {
            CallWork::Charges { requests, .. } => {
                requests.iter().flat_map(|request| &request.items).map(|item| item.key.clone()).collect()
            }
            _ => panic!("only charges were queued"),
        };
        calls(tasks).into_iter().map(keys).collect()
    }

    fn counter(buckets: u32) -> Limit {
        Limit::sliding_window_counter(100, WINDOW, buckets, EdgePolicy::Weigh).unwrap()
    }

    #[test]
    fn full_batch_of_light_charges_is_one_call() {
        let window = Limit::fixed_window(100, WINDOW, WindowAlign::Clock).unwrap();
        assert_eq!(keys_of_calls(&[window], 64).len(), 1);
        assert_eq!(keys_of_calls(&[counter(1)], 64).len(), 1);
    }

    #[test]
    fn heavy_charges_are_divided_among_calls_in_order() {
        let calls = keys_of_calls(&[counter(1024)], 64);
        assert!(calls.iter().all(|keys| keys.len() <= 3), "{calls:?}");
        let keys: Vec<_> = calls.concat();
        assert_eq!(keys, (0..64).map(|number| number.to_string()).collect::<Vec<_>>());
    }

    #[test]
    fn request_that_exceeds_the_weight_of_a_call_is_not_split() {
        let limits = vec![counter(1024); 5];
        let calls = keys_of_calls(&limits, 2);
        assert_eq!(calls, [vec!["0".to_owned(); 5], vec!["1".to_owned(); 5]]);
    }

    #[test]
    fn claims_are_divided_among_calls() {
        let claim = PermitClaim {
            key: "key".to_owned(),
            process: 1,
            number: 1,
            in_flight: 1,
            kept: 1,
            more: 0,
            max: 1,
            hold: WINDOW,
        };
        let tasks = [1, CLAIMS_MAX, 3, 4].map(|count| QueuedTask {
            slot: 0,
            is_guest: false,
            task: Task::Claim(vec![claim.clone(); count]),
            sender: oneshot::channel().0,
        });
        let claims = |call: Call| match call.work {
            CallWork::Claims(all) => all.iter().map(|(claims, _)| claims.len()).collect::<Vec<_>>(),
            _ => panic!("only claims were queued"),
        };
        let calls: Vec<_> = calls(tasks.into_iter()).into_iter().map(claims).collect();
        assert_eq!(calls, [vec![1], vec![CLAIMS_MAX], vec![3, 4]]);
    }
}
