//! From which address a request comes.
//!
//! The peer of a connection is known for sure. Everything else was written down by somebody: each proxy adds the address
//! that it saw to the right of a header, and whoever sends the first request may have put anything to the left of it.
//! So the header counts only if the peer is a proxy that we trust, and it is read from the right:
//!
//! 1. The peer is not trusted: the peer is the client, whatever the headers say.
//! 2. Else all lines of the one header are read as one list, from right to left. Trusted addresses are skipped, and the
//!    first that is not trusted is the client. What stands to the left of it is never looked at.
//! 3. A hop that is no address (`unknown`, `_hidden`, nothing, garbage) ends the walk: whoever is behind it was not told,
//!    and the last good hop is the client. If there is none, that is the peer.
//! 4. The list is at its end and all were trusted, or there was no list: nobody told of a client, so it is the peer.
//!
//! Only the last [`HOPS_MAX`] hops are looked at, and a hop of more than [`HOP_BYTES_MAX`] bytes is garbage, so that a
//! request cannot make us work for what it sends.
//!
//! ```
//! use tollgate_rules::client::{Trust, parse_cidr};
//!
//! let trust = Trust::proxies([parse_cidr("10.0.0.0/8")?]);
//! let lines: [&[u8]; 2] = [b"6.6.6.6", b"203.0.113.7, 10.0.0.2"];
//! assert_eq!(trust.client([10, 0, 0, 1].into(), lines).to_string(), "203.0.113.7");
//! assert_eq!(trust.client([198, 51, 100, 9].into(), lines).to_string(), "198.51.100.9");
//! # Ok::<(), tollgate_rules::client::CidrError>(())
//! ```

use std::net::IpAddr;
use std::num::NonZeroU8;

pub use ipnet::IpNet;

mod address;
mod hops;
mod network;

pub use address::canonical;
pub(crate) use network::canonical_network;
pub use network::{CidrError, Grouping, parse_cidr};

/// How many hops are looked at, counted from the right. Real chains have two or three.
pub const HOPS_MAX: usize = 32;

/// A longer hop is garbage. An address needs less than 64 bytes; the other parameters of `Forwarded` may hold names.
pub const HOP_BYTES_MAX: usize = 1024;

/// The one header that says where a request comes from.
///
/// There is one and never a list of several to try: a proxy sets one of them, and lets through what a client puts into
/// the others.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Source {
    /// `X-Forwarded-For: 203.0.113.7, 10.0.0.2`
    #[default]
    XForwardedFor,
    /// `Forwarded: for=203.0.113.7;proto=https, for="[2001:db8::1]:4711"`, as in RFC 7239.
    Forwarded,
}

impl Source {
    /// The header's name, in lower case. Its lines are what [`Trust::client`] wants.
    pub fn header_name(self) -> &'static str {
        match self {
            Source::XForwardedFor => "x-forwarded-for",
            Source::Forwarded => "forwarded",
        }
    }
}

/// Whose word counts about where a request comes from. By default nobody's: the peer is the client.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Trust {
    proxies: Vec<IpNet>,
    source: Source,
    nth_from_right: Option<NonZeroU8>,
}

impl Trust {
    /// Trusts the proxies in these networks, by what they write into `X-Forwarded-For`.
    ///
    /// A network that clients are in does not belong here, and least of all `0.0.0.0/0`: who is trusted can choose an
    /// address.
    pub fn proxies(proxies: impl IntoIterator<Item = IpNet>) -> Trust {
        Trust { proxies: proxies.into_iter().map(canonical_network).collect(), ..Trust::default() }
    }

    /// Reads this header and no other.
    #[must_use]
    pub fn with_source(self, source: Source) -> Trust {
        Trust { source, ..self }
    }

    /// Takes the `n`th hop from the right, whoever the `n - 1` to the right of it are: for proxies whose addresses
    /// nobody can list.
    ///
    /// The peer must still be a trusted proxy. If there are fewer hops, the peer is the client; more than [`HOPS_MAX`]
    /// there never are. A client that finds a way around the outermost proxy can choose its address, so networks are
    /// the better choice wherever they are known.
    #[must_use]
    pub fn with_nth_from_right(self, n: NonZeroU8) -> Trust {
        Trust { nth_from_right: Some(n), ..self }
    }

    /// The header whose lines [`Trust::client`] wants.
    pub fn source(&self) -> Source {
        self.source
    }

    /// The client of a request that came from `peer`, in [`canonical`] form.
    ///
    /// `lines` are the values of all lines of the [`source`](Trust::source) header, in the order in which they came.
    /// To leave one out is to believe the wrong proxy.
    pub fn client<'a>(&self, peer: IpAddr, lines: impl IntoIterator<Item = &'a [u8]>) -> IpAddr {
        let peer = canonical(peer);
        if !self.trusts(peer) {
            return peer;
        }
        let mut last_good = peer;
        for (to_the_right, hop) in hops::from_right(lines, self.source).take(HOPS_MAX).enumerate() {
            let Some(address) = hop else { return last_good };
            let is_proxy = match self.nth_from_right {
                Some(n) => to_the_right + 1 < usize::from(n.get()),
                None => self.trusts(address),
            };
            if !is_proxy {
                return address;
            }
            last_good = address;
        }
        peer
    }

    /// Whether the word of a peer counts.
    pub fn trusts(&self, peer: IpAddr) -> bool {
        let address = canonical(peer);
        self.proxies.iter().any(|network| network.contains(&address))
    }
}
