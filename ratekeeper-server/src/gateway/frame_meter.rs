//! Counts the HTTP/2 frames of a client connection against their bound.

use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use tokio::io::ReadBuf;

use super::client_timeouts::ConnectionActivity;
use crate::runtime::frame_bound::FrameBound;
use crate::runtime::observed_stream::{PolledIo, StreamObserver};

/// Counts the frames of an HTTP/2 connection. Above the bound, it reads nothing more and marks its activity as a flood.
#[derive(Debug)]
pub(crate) struct FrameMeter {
    bound: FrameBound,
    activity: Arc<ConnectionActivity>,
}

impl FrameMeter {
    pub(crate) fn new(activity: Arc<ConnectionActivity>) -> FrameMeter {
        FrameMeter { bound: FrameBound::new(now(&activity)), activity }
    }
}

fn now(activity: &ConnectionActivity) -> Duration {
    Duration::from_millis(activity.now().as_millis())
}

impl StreamObserver for FrameMeter {
    fn before_read(&mut self, _: &mut ReadBuf<'_>) -> Option<PolledIo<()>> {
        self.activity.is_flood().then_some(Poll::Pending)
    }

    fn after_read(&mut self, context: &mut Context<'_>, bytes: &[u8], read: PolledIo<()>) -> PolledIo<()> {
        if self.bound.is_flood(bytes, || now(&self.activity)) {
            self.activity.set_flood();
            context.waker().wake_by_ref();
        }
        read
    }

    fn after_write(&mut self, _: &mut Context<'_>, written: PolledIo<usize>) -> PolledIo<usize> {
        self.bound.count_written(&written);
        written
    }
}
