//! Client addresses: headers of untrusted peers are ignored, and printed networks parse back to themselves.

use std::net::IpAddr;
use std::num::NonZeroU8;

use ratekeeper_rules::client::{Grouping, IpNet, Source, TrustedProxies, canonical, parse_cidr};

use super::input::Input;

/// Checks header lines, networks, a peer and a network's text from the bytes. Texts end at 0xff, which none of them
/// contains.
pub(crate) fn check(bytes: &[u8]) {
    let mut input = Input::new(bytes);
    check_cidr(&String::from_utf8_lossy(input.until(0xff)));

    let source = input.one_of(&[Source::XForwardedFor, Source::Forwarded]);
    let nth = NonZeroU8::new(input.below(5));
    let peer = input.address();
    let mut networks: Vec<IpNet> = (0..input.below(3)).filter_map(|_| network(&mut input)).collect();
    if input.below(4) != 0 {
        // Most peers are trusted, because untrusted ones exercise little code.
        networks.push(peer.into());
    }
    let before = input.until(0xff);
    let mut lines: Vec<&[u8]> = Vec::new();
    while !input.is_empty() {
        lines.push(input.until(0xff));
    }

    let trusts = |address: IpAddr| networks.iter().any(|network| holds(*network, address));
    let plain = TrustedProxies::proxies(networks.clone()).with_source(source);
    for trust in [nth.map(|nth| plain.clone().with_nth_from_right(nth)), Some(plain)].into_iter().flatten() {
        let client = trust.client(peer, lines.iter().copied());
        assert_eq!(client, canonical(client), "not canonical");
        if !trusts(peer) {
            assert_eq!(client, canonical(peer), "a stranger was believed");
        }
        if !trusts(client) {
            let with_more = std::iter::once(before).chain(lines.iter().copied());
            assert_eq!(
                trust.client(peer, with_more),
                client,
                "something to the left of the client was believed"
            );
        }
        if source == Source::XForwardedFor && !lines.is_empty() {
            assert_eq!(trust.client(peer, [&*lines.join(&b","[..])]), client, "several lines are one list");
        }
        check_grouping(client);
    }
    assert_eq!(
        TrustedProxies::default().client(peer, lines.iter().copied()),
        canonical(peer),
        "no proxy is trusted"
    );
}

fn network(input: &mut Input<'_>) -> Option<IpNet> {
    let address = input.address();
    let bits = if address.is_ipv4() { 32 } else { 128 };
    IpNet::new(address, input.byte() % (bits + 1)).ok()
}

/// Returns true if a network contains an address, either in IPv4 or IPv6 form, compared bit by bit.
fn holds(network: IpNet, address: IpAddr) -> bool {
    let (mut of_network, mut prefix) = (network.addr(), network.prefix_len());
    if of_network.is_ipv6() && canonical(of_network).is_ipv4() && prefix >= 96 {
        (of_network, prefix) = (canonical(of_network), prefix - 96);
    }
    let bits = |address: IpAddr| match address {
        IpAddr::V4(address) => (false, u128::from(u32::from(address)) << 96),
        IpAddr::V6(address) => (true, u128::from(address)),
    };
    let ((is_ipv6, ours), (is_ipv6_too, theirs)) = (bits(of_network), bits(canonical(address)));
    let counted = !u128::MAX.checked_shr(prefix.into()).unwrap_or(0);
    is_ipv6 == is_ipv6_too && (ours ^ theirs) & counted == 0
}

fn check_cidr(typed: &str) {
    match parse_cidr(typed) {
        Ok(network) => {
            assert_eq!(network, network.trunc(), "bits to the right of the prefix");
            assert_eq!(parse_cidr(&network.to_string()), Ok(network), "it reads as it is printed");
            let as_typed = typed.trim().split('/').next().and_then(|address| address.parse().ok());
            assert!(as_typed.is_some_and(|address: IpAddr| network.contains(&canonical(address))));
        }
        Err(error) => {
            assert!(!error.what().is_empty() && !error.instead().is_empty());
            let message = error.to_string();
            assert!(super::is_harmless(&message) && message.chars().count() < 1_000, "{message:?}");
        }
    }
}

fn check_grouping(client: IpAddr) {
    let mut wider = IpNet::from(canonical(client));
    for bits in Grouping::IPV6_PREFIXES.rev() {
        let Some(grouping) = Grouping::by_ipv6_prefix(bits) else { continue };
        let network = grouping.network(client);
        assert_eq!(grouping.network(network.addr()), network, "the network of a network is itself");
        let is_translated = client.is_ipv6() && network.addr().is_ipv4();
        assert!(is_translated || network.contains(&wider), "{network} has lost a part of {wider}");
        wider = network;
    }
}
