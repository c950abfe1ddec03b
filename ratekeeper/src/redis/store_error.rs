//! Why Redis did not decide.

use std::fmt;

use super::failures::FailureCause;

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

impl StoreError {
    pub(crate) fn driver_ended() -> StoreError {
        StoreError::Unreachable("the task of the connection has ended".to_owned())
    }
}
