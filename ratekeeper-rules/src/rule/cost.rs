//! How many units a request costs.

use crate::request::Request;

/// What a request costs: at least 1, because a request of cost 0 would never be denied.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Cost {
    /// The same for every request.
    Fixed(u32),
    /// The number in a header; the largest if there are several lines.
    Header {
        /// Its name, in lower case.
        name: String,
        /// Cost if the header is missing or not a number.
        default: u32,
        /// Upper bound; larger numbers are reduced to it.
        max: u32,
    },
    /// By route name.
    Routes {
        /// Route names and costs.
        costs: Vec<(String, u32)>,
        /// Cost on all other routes.
        default: u32,
    },
}

impl Cost {
    pub(super) fn of(&self, request: &impl Request) -> u32 {
        let cost = match self {
            Cost::Fixed(cost) => *cost,
            Cost::Header { name, default, max } => {
                // A client may send its own line in addition to the one that a proxy adds.
                let costs =
                    request.header(name).map(|value| number(value).map_or(*default, |it| it.min(*max)));
                costs.max().unwrap_or(*default)
            }
            Cost::Routes { costs, default } => {
                let cost = costs.iter().find(|(route, _)| route == request.route());
                cost.map_or(*default, |(_, cost)| *cost)
            }
        };
        cost.max(1)
    }
}

/// The number in a header value, if it is one; a number above `u32::MAX` becomes `u32::MAX`.
fn number(value: &[u8]) -> Option<u32> {
    let digits = value.trim_ascii();
    if digits.is_empty() || !digits.iter().all(u8::is_ascii_digit) {
        return None;
    }
    Some(std::str::from_utf8(digits).ok()?.parse().unwrap_or(u32::MAX))
}
