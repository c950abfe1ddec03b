//! The client's address.
//!
//! Only the peer of a connection is certain. Each proxy appends the address that it saw to the right of a header, and
//! the sender of the request can put anything to the left of it. So the header counts only if the peer is a trusted
//! proxy, and it is read from the right:
//!
//! 1. If the peer is not trusted, the peer is the client, whatever the headers contain.
//! 2. Otherwise all lines of the one header are read as one list, from right to left. Trusted addresses are skipped,
//!    and the first untrusted one is the client. Hops to the left of it are never read.
//! 3. A hop that is not an address (`unknown`, `_hidden`, empty, garbage) ends the walk: the client behind it is
//!    unknown, so the last valid hop is the client, or the peer if there is none.
//! 4. If all hops are trusted, or there is no list, the client is unknown, so it is the peer.
//!
//! Only the last [`HOPS_MAX`] hops are read, and a hop of more than [`HOP_BYTES_MAX`] bytes is garbage, which bounds
//! the work per request.
//!
//! ```
//! use ratekeeper_rules::client::{TrustedProxies, parse_cidr};
//!
//! let trust = TrustedProxies::proxies([parse_cidr("10.0.0.0/8")?]);
//! let lines: [&[u8]; 2] = [b"6.6.6.6", b"203.0.113.7, 10.0.0.2"];
//! assert_eq!(trust.client([10, 0, 0, 1].into(), lines).to_string(), "203.0.113.7");
//! assert_eq!(trust.client([198, 51, 100, 9].into(), lines).to_string(), "198.51.100.9");
//! # Ok::<(), ratekeeper_rules::client::CidrError>(())
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

/// Maximum number of hops that are read, from the right. Real chains have two or three.
pub const HOPS_MAX: usize = 32;

/// Maximum length of a hop; a longer one is garbage. An address needs less than 64 bytes, but the other parameters of
/// `Forwarded` may contain names.
pub const HOP_BYTES_MAX: usize = 1024;

/// The header that contains the client's address.
///
/// It is a single header, never a list of candidates: a proxy sets one of them and forwards the others as the client
/// sent them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Source {
    /// `X-Forwarded-For: 203.0.113.7, 10.0.0.2`
    #[default]
    XForwardedFor,
    /// `Forwarded: for=203.0.113.7;proto=https, for="[2001:db8::1]:4711"`, as in RFC 7239.
    Forwarded,
}

impl Source {
    /// The header's name, in lower case. [`TrustedProxies::client`] expects its lines.
    pub fn header_name(self) -> &'static str {
        match self {
            Source::XForwardedFor => "x-forwarded-for",
            Source::Forwarded => "forwarded",
        }
    }
}

/// Trusted proxies, whose forwarding headers count. By default there are none, and the peer is the client.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TrustedProxies {
    proxies: Vec<IpNet>,
    source: Source,
    nth_from_right: Option<NonZeroU8>,
}

impl TrustedProxies {
    /// Whether no proxy is trusted.
    pub fn is_none(&self) -> bool {
        self.proxies.is_empty()
    }

    /// The networks of the trusted proxies.
    pub fn networks(&self) -> &[IpNet] {
        &self.proxies
    }

    /// Trusts the proxies in these networks, by their entries in `X-Forwarded-For`.
    ///
    /// Networks that contain clients do not belong here, least of all `0.0.0.0/0`: a trusted peer can choose its
    /// address.
    pub fn proxies(proxies: impl IntoIterator<Item = IpNet>) -> TrustedProxies {
        TrustedProxies {
            proxies: proxies.into_iter().map(canonical_network).collect(),
            ..TrustedProxies::default()
        }
    }

    /// Reads this header only.
    #[must_use]
    pub fn with_source(self, source: Source) -> TrustedProxies {
        TrustedProxies { source, ..self }
    }

    /// Takes the `n`th hop from the right as the client, without checking the `n - 1` hops to the right of it: for
    /// proxies whose addresses cannot be listed.
    ///
    /// The peer must still be a trusted proxy. If there are fewer hops, the peer is the client; at most [`HOPS_MAX`]
    /// hops are read. A client that bypasses the outermost proxy can choose its address, so prefer networks wherever
    /// they are known.
    #[must_use]
    pub fn with_nth_from_right(self, n: NonZeroU8) -> TrustedProxies {
        TrustedProxies { nth_from_right: Some(n), ..self }
    }

    /// The header whose lines [`TrustedProxies::client`] expects.
    pub fn source(&self) -> Source {
        self.source
    }

    /// The client of a request that came from `peer`, in [`canonical`] form.
    ///
    /// `lines` are the values of all lines of the [`source`](TrustedProxies::source) header, in order of arrival.
    /// Omitting a line means trusting the wrong proxy.
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

    /// Whether a peer is a trusted proxy.
    pub fn trusts(&self, peer: IpAddr) -> bool {
        let address = canonical(peer);
        self.proxies.iter().any(|network| network.contains(&address))
    }
}
