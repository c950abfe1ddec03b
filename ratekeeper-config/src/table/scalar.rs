//! The kinds of values that are read by their row: numbers, durations, flags and words.

use std::time::Duration;

use ratekeeper_core::Rate;
use serde_json::{Value, json};

use super::as_code;
use super::kind::{Kind, Parsed, Typed};
use super::page::Page;
use super::schema::Definitions;
use crate::quantity::{self, bytes_text, duration_text, rate_text};
use crate::reader::Reader;
use crate::tree::Node;

pub(crate) const fn ms(count: u64) -> Duration {
    Duration::from_millis(count)
}

pub(crate) const fn secs(count: u64) -> Duration {
    Duration::from_secs(count)
}

pub(crate) const fn hours(count: u64) -> Duration {
    secs(3_600 * count)
}

pub(crate) const fn days(count: u64) -> Duration {
    hours(24 * count)
}

/// A duration.
#[derive(Clone, Copy)]
pub(crate) struct Time {
    /// What the duration is, for messages: `a timeout`.
    pub(crate) subject: &'static str,
    pub(crate) from: Duration,
    pub(crate) to: Duration,
}

impl Kind for Time {
    fn schema(&self, definitions: &mut Definitions) -> Value {
        let range = format!("From {} to {}.", duration_text(self.from), duration_text(self.to));
        json!({ "description": range, "$ref": definitions.duration() })
    }

    fn text(&self, _: &Page) -> String {
        format!("duration from `{}` to `{}`", duration_text(self.from), duration_text(self.to))
    }
}

impl Typed for Time {
    type Value = Duration;

    fn typed(&self, value: Duration) -> Value {
        json!(duration_text(value))
    }
}

impl Parsed for Time {
    fn parse(&self, reader: &mut Reader, node: &Node, _: &str) -> Option<Duration> {
        reader.parsed(node, |word| quantity::length(self.subject, word, self.from, self.to))
    }
}

/// A whole number in a range.
#[derive(Clone, Copy)]
pub(crate) struct Whole {
    pub(crate) from: u32,
    pub(crate) to: u32,
}

fn integer(from: u32, to: u32) -> Value {
    json!({ "type": "integer", "minimum": from, "maximum": to })
}

fn integer_text(from: u32, to: u32) -> String {
    if to == u32::MAX {
        format!("whole number, at least {from}")
    } else {
        format!("whole number from {from} to {to}")
    }
}

impl Kind for Whole {
    fn schema(&self, _: &mut Definitions) -> Value {
        integer(self.from, self.to)
    }

    fn text(&self, _: &Page) -> String {
        integer_text(self.from, self.to)
    }
}

impl Typed for Whole {
    type Value = u32;

    fn typed(&self, value: u32) -> Value {
        json!(value)
    }
}

impl Parsed for Whole {
    fn parse(&self, reader: &mut Reader, node: &Node, name: &str) -> Option<u32> {
        reader.number(node, name, self.from..=self.to)
    }
}

/// A number of units or requests that a limit allows. Zero would deny everything, which the message says.
#[derive(Clone, Copy)]
pub(crate) struct Count {
    pub(crate) to: u32,
}

impl Kind for Count {
    fn schema(&self, _: &mut Definitions) -> Value {
        integer(1, self.to)
    }

    fn text(&self, _: &Page) -> String {
        integer_text(1, self.to)
    }
}

impl Typed for Count {
    type Value = u32;

    fn typed(&self, value: u32) -> Value {
        json!(value)
    }
}

impl Parsed for Count {
    fn parse(&self, reader: &mut Reader, node: &Node, name: &str) -> Option<u32> {
        reader.parsed(node, |word| quantity::whole(name, word, self.to))
    }
}

/// `true` or `false`.
#[derive(Clone, Copy)]
pub(crate) struct Flag;

impl Kind for Flag {
    fn schema(&self, _: &mut Definitions) -> Value {
        json!({ "type": "boolean" })
    }

    fn text(&self, _: &Page) -> String {
        "`true`, `false`".to_owned()
    }

    fn is_flag(&self) -> bool {
        true
    }
}

impl Typed for Flag {
    type Value = bool;

    fn typed(&self, value: bool) -> Value {
        json!(value)
    }
}

impl Parsed for Flag {
    fn parse(&self, reader: &mut Reader, node: &Node, name: &str) -> Option<bool> {
        reader.yes_or_no(node, name)
    }
}

/// One of a few words, with their meanings in the code.
pub(crate) struct Words<T: 'static>(pub(crate) &'static [(&'static str, T)]);

impl<T> Clone for Words<T> {
    fn clone(&self) -> Words<T> {
        *self
    }
}

impl<T> Copy for Words<T> {}

impl<T: Sync> Kind for Words<T> {
    fn schema(&self, _: &mut Definitions) -> Value {
        let words: Vec<&str> = self.0.iter().map(|(word, _)| *word).collect();
        json!({ "enum": words })
    }

    fn text(&self, _: &Page) -> String {
        as_code(self.0.iter().map(|(word, _)| word))
    }
}

impl<T: Copy + PartialEq + Sync> Typed for Words<T> {
    type Value = T;

    fn typed(&self, value: T) -> Value {
        json!(crate::words::name(self.0, &value))
    }
}

impl<T: Copy + PartialEq + Sync> Parsed for Words<T> {
    fn parse(&self, reader: &mut Reader, node: &Node, name: &str) -> Option<T> {
        reader.choice(node, name, self.0)
    }
}

/// A rate: a number per unit or per duration.
#[derive(Clone, Copy)]
pub(crate) struct UnitsPerTime;

impl Kind for UnitsPerTime {
    fn schema(&self, definitions: &mut Definitions) -> Value {
        json!({ "$ref": definitions.rate() })
    }

    fn text(&self, _: &Page) -> String {
        "rate".to_owned()
    }
}

impl Typed for UnitsPerTime {
    type Value = Rate;

    fn typed(&self, value: Rate) -> Value {
        json!(rate_text(value))
    }
}

impl Parsed for UnitsPerTime {
    fn parse(&self, reader: &mut Reader, node: &Node, _: &str) -> Option<Rate> {
        reader.parsed(node, quantity::rate)
    }
}

/// An amount of memory in bytes.
#[derive(Clone, Copy)]
pub(crate) struct MemorySize;

impl Kind for MemorySize {
    fn schema(&self, _: &mut Definitions) -> Value {
        json!({ "type": "string" })
    }

    fn text(&self, _: &Page) -> String {
        "size".to_owned()
    }
}

impl Typed for MemorySize {
    type Value = usize;

    fn typed(&self, value: usize) -> Value {
        json!(bytes_text(value))
    }
}

impl Parsed for MemorySize {
    fn parse(&self, reader: &mut Reader, node: &Node, _: &str) -> Option<usize> {
        reader.parsed(node, quantity::bytes)
    }
}

/// A percentage from 0% to 100%.
#[derive(Clone, Copy)]
pub(crate) struct Percent;

impl Kind for Percent {
    fn schema(&self, _: &mut Definitions) -> Value {
        json!({ "type": "string", "pattern": "^([0-9]|[1-9][0-9]|100)%$" })
    }

    fn text(&self, _: &Page) -> String {
        "percentage from `0%` to `100%`".to_owned()
    }
}

impl Typed for Percent {
    type Value = u32;

    fn typed(&self, value: u32) -> Value {
        json!(format!("{value}%"))
    }
}

impl Parsed for Percent {
    fn parse(&self, reader: &mut Reader, node: &Node, name: &str) -> Option<u32> {
        reader.parsed(node, |word| quantity::percent(name, word))
    }
}
