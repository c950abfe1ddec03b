//! The client's address: a matrix of what proxies and attackers send, and properties for any input.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test that cannot be set up has failed")]

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::num::NonZeroU8;

use proptest::collection::vec;
use proptest::prelude::*;
use proptest::sample::select;
use ratekeeper_rules::client::{HOPS_MAX, IpNet, Source, TrustedProxies, canonical, parse_cidr};

use testbed::property::check;

const MATRIX: &str = include_str!("clients.txt");

#[test]
fn every_row_of_the_matrix_holds() {
    let rows = MATRIX.lines().enumerate().filter(|(_, row)| !row.is_empty() && !row.starts_with('#'));
    let mut count = 0;
    let mut wrong = Vec::new();
    for (index, row) in rows {
        count += 1;
        let columns: Vec<&str> = row.split('|').map(str::trim).collect();
        let [peer, trusted, source, lines, expected] = columns[..] else {
            panic!("line {}: a row has five columns: {row}", index + 1);
        };
        let client = client_of(peer, trusted, source, lines);
        if client != expected {
            wrong.push(format!("line {}: {client} and not {expected}: {row}", index + 1));
        }
    }
    assert!(wrong.is_empty(), "{} of {count} rows are wrong:\n{}", wrong.len(), wrong.join("\n"));
    assert!(count >= 200, "{count} rows are too few to cover what is sent");
}

fn client_of(peer: &str, trusted: &str, source: &str, lines: &str) -> String {
    let networks = trusted.split(' ').filter(|network| *network != "-").map(parse_cidr);
    let Ok(networks) = networks.collect::<Result<Vec<IpNet>, _>>() else { return "rejected".to_owned() };
    let (source, nth) = source.split_once(' ').map_or((source, None), |(source, nth)| (source, Some(nth)));
    let mut trust = TrustedProxies::proxies(networks).with_source(match source {
        "xff" => Source::XForwardedFor,
        "forwarded" => Source::Forwarded,
        other => panic!("no such source: {other}"),
    });
    if let Some(nth) = nth {
        trust = trust.with_nth_from_right(nth.trim_end_matches(char::is_alphabetic).parse().unwrap());
    }
    let lines = if lines == "-" { Vec::new() } else { split(&expanded(lines), b" // ") };
    trust.client(peer.parse().unwrap(), lines.iter().map(Vec::as_slice)).to_string()
}

/// Decodes the notation of the matrix: `<09>` is a byte, `<>` is empty, `<3 * ab>` is `ababab`.
fn expanded(notation: &str) -> Vec<u8> {
    let mut bytes = Vec::new();
    let mut rest = notation;
    while let Some((before, after)) = rest.split_once('<') {
        let (inside, after) = after.split_once('>').unwrap();
        bytes.extend_from_slice(before.as_bytes());
        match inside.split_once(" * ") {
            Some((times, text)) => bytes.extend(text.as_bytes().repeat(times.parse().unwrap())),
            None if inside.is_empty() => {}
            None => bytes.push(u8::from_str_radix(inside, 16).unwrap()),
        }
        rest = after;
    }
    bytes.extend_from_slice(rest.as_bytes());
    bytes
}

fn split(text: &[u8], separator: &[u8]) -> Vec<Vec<u8>> {
    let mut parts = vec![Vec::new()];
    let mut index = 0;
    while index < text.len() {
        if text[index..].starts_with(separator) {
            parts.push(Vec::new());
            index += separator.len();
        } else {
            parts.last_mut().unwrap().push(text[index]);
            index += 1;
        }
    }
    parts
}

#[test]
fn default_trusts_no_proxy_and_reads_x_forwarded_for() {
    let trust = TrustedProxies::default();
    assert_eq!(trust, TrustedProxies::proxies([]));
    assert_eq!(trust.source(), Source::XForwardedFor);
    assert_eq!(trust.source().header_name(), "x-forwarded-for");
    assert_eq!(trust.with_source(Source::Forwarded).source().header_name(), "forwarded");
}

#[test]
fn networks_from_other_parsers_are_canonicalized() {
    // The parser of `IpNet` does not have the checks of `parse_cidr`.
    let trust = TrustedProxies::proxies(["::ffff:10.0.0.0/104".parse().unwrap()]);
    assert_eq!(trust.client(PROXY, [&b"203.0.113.7"[..]]), CLIENT);
    // The mistake that `parse_cidr` rejects does not make any peer trusted either.
    let trust = TrustedProxies::proxies(["::ffff:10.0.0.0/8".parse().unwrap()]);
    assert_eq!(trust.client(PROXY, [&b"6.6.6.6"[..]]), PROXY);
    assert_eq!(trust.client(CLIENT, [&b"6.6.6.6"[..]]), CLIENT);
}

const PROXY: IpAddr = IpAddr::V4(Ipv4Addr::new(10, 0, 0, 1));
const CLIENT: IpAddr = IpAddr::V4(Ipv4Addr::new(203, 0, 113, 7));

fn addresses() -> impl Strategy<Value = IpAddr> {
    prop_oneof![
        any::<u32>().prop_map(|bits| Ipv4Addr::from(bits).into()),
        any::<u128>().prop_map(|bits| Ipv6Addr::from(bits).into()),
        any::<u32>().prop_map(|bits| Ipv4Addr::from(bits).to_ipv6_mapped().into()),
        // Many zero bits, as in real addresses.
        any::<(u32, u16)>()
            .prop_map(|(high, low)| Ipv6Addr::from((u128::from(high) << 96) | u128::from(low)).into()),
    ]
}

fn our_proxies() -> impl Strategy<Value = IpAddr> {
    prop_oneof![
        (0..1_u32 << 24).prop_map(|host| Ipv4Addr::from((10 << 24) | host).into()),
        (0..1_u128 << 120).prop_map(|host| Ipv6Addr::from((0xfd << 120) | host).into()),
    ]
}

fn strangers() -> impl Strategy<Value = IpAddr> {
    addresses().prop_map(canonical).prop_filter("one of our proxies", |address| !is_our_proxy(*address))
}

fn is_our_proxy(address: IpAddr) -> bool {
    match canonical(address) {
        IpAddr::V4(address) => address.octets()[0] == 10,
        IpAddr::V6(address) => address.octets()[0] == 0xfd,
    }
}

fn sources() -> impl Strategy<Value = Source> {
    select(vec![Source::XForwardedFor, Source::Forwarded])
}

fn our_trust(source: Source) -> TrustedProxies {
    TrustedProxies::proxies(["10.0.0.0/8", "fd00::/8"].map(|network| parse_cidr(network).unwrap()))
        .with_source(source)
}

/// A form of an address: in IPv6 form or not, in brackets, with a zone, a port, quotes, white space, in upper case.
fn spellings(address: IpAddr) -> impl Strategy<Value = String> {
    let ports = select(vec!["", ":0", ":443", ":65535"]);
    let zones = select(vec!["", "%eth0", "%25eth0"]);
    let spaces = select(vec!["", " ", "\t", "  \t"]);
    (0..4, ports, zones, spaces, any::<[bool; 2]>()).prop_map(
        move |(form, port, zone, space, [quoted, upper])| {
            let text = match (address, form) {
                (IpAddr::V4(address), 0 | 1) => format!("{address}{port}"),
                (IpAddr::V4(address), _) => {
                    let [.., high, low] = address.to_ipv6_mapped().segments();
                    match form {
                        2 => format!("[::ffff:{address}{zone}]{port}"),
                        _ => format!("0:0:0::ffff:{high:x}:{low:x}{zone}"),
                    }
                }
                (IpAddr::V6(address), 0) => format!("{address}{zone}"),
                (IpAddr::V6(address), 1) => format!("[{address}{zone}]{port}"),
                (IpAddr::V6(address), _) => {
                    let groups = address.segments().map(|group| format!("{group:04x}")).join(":");
                    if form == 2 { format!("{groups}{zone}") } else { format!("[{groups}{zone}]{port}") }
                }
            };
            let text = if upper { text.to_uppercase() } else { text };
            let quote = if quoted { "\"" } else { "" };
            format!("{space}{quote}{text}{quote}{space}")
        },
    )
}

/// One hop as a proxy writes it.
fn hop(source: Source, address: &str, name: &str, other: &str) -> String {
    match source {
        Source::XForwardedFor => address.to_owned(),
        Source::Forwarded => format!("{other}{name}={}", address.trim()),
    }
}

fn hops(addresses: impl Strategy<Value = IpAddr>, source: Source) -> impl Strategy<Value = String> {
    let others = select(vec!["", "proto=https;", "host=\"a,b;c\\\"\"; ", "By=\"[fd00::1]:80\";"]);
    let names = select(vec!["for", "For", "FOR"]);
    (addresses.prop_flat_map(spellings), names, others)
        .prop_map(move |(address, name, other)| hop(source, &address, name, other))
}

/// What an attacker might send: random bytes, and pieces of valid headers.
fn hostile_lines() -> impl Strategy<Value = Vec<Vec<u8>>> {
    let pieces: Vec<&[u8]> = vec![
        b",",
        b";",
        b"=",
        b"\"",
        b"\\",
        b"[",
        b"]",
        b":",
        b"%",
        b" ",
        b"\t",
        b"\0",
        b"\xff",
        b"for=",
        b"For=\"",
        b"by=",
        b"unknown",
        b"_x",
        b"6.6.6.6",
        b"10.0.0.2",
        b"fd00::2",
        b"::ffff:10.0.0.3",
        b"2001:db8::6",
        b", for=6.6.6.6",
        b", 10.0.0.9",
        b"\", for=\"6.6.6.6\"",
    ];
    let pieced = vec(select(pieces), 0..24).prop_map(|pieces| pieces.concat());
    vec(prop_oneof![4 => pieced, 1 => vec(any::<u8>(), 0..80)], 0..6)
}

fn slices(lines: &[Vec<u8>]) -> impl Iterator<Item = &[u8]> {
    lines.iter().map(Vec::as_slice)
}

#[test]
fn any_header_yields_a_canonical_client() {
    let ways = (sources(), proptest::option::of(1..=40_u8));
    check(&(addresses(), our_proxies(), hostile_lines(), ways), |(peer, proxy, lines, (source, nth))| {
        let mut trust = our_trust(source);
        if let Some(nth) = nth.and_then(NonZeroU8::new) {
            trust = trust.with_nth_from_right(nth);
        }
        for peer in [peer, proxy] {
            let client = trust.client(peer, slices(&lines));
            prop_assert_eq!(client, canonical(client));
        }
        Ok(())
    });
}

#[test]
fn untrusted_peer_is_always_the_client() {
    check(&(strangers(), hostile_lines(), sources()), |(peer, lines, source)| {
        prop_assert_eq!(our_trust(source).client(peer, slices(&lines)), peer);
        let mapped = if let IpAddr::V4(peer) = peer { peer.to_ipv6_mapped().into() } else { peer };
        prop_assert_eq!(our_trust(source).client(mapped, slices(&lines)), peer);
        Ok(())
    });
}

#[test]
fn hops_left_of_the_client_are_ignored() {
    let cases = sources().prop_flat_map(|source| {
        let client = strangers().prop_flat_map(move |client| (Just(client), hops(Just(client), source)));
        let proxies = vec(hops(our_proxies(), source), 0..HOPS_MAX - 1);
        (Just(source), our_proxies(), client, proxies, hostile_lines(), vec(any::<bool>(), HOPS_MAX))
    });
    check(&cases, |(source, peer, (client, client_hop), proxies, hostile, new_line)| {
        let mut lines = hostile;
        for (hop, new_line) in std::iter::once(&client_hop).chain(&proxies).zip(new_line) {
            match lines.last_mut() {
                // A proxy extends the existing line or adds another line.
                Some(line) if !new_line => line.extend([b",", hop.as_bytes()].concat()),
                _ => lines.push(hop.clone().into_bytes()),
            }
        }
        prop_assert_eq!(our_trust(source).client(peer, slices(&lines)), client);
        Ok(())
    });
}

#[test]
fn nth_hop_is_found_for_any_hops_to_its_left() {
    let cases = sources().prop_flat_map(|source| {
        let client = addresses().prop_flat_map(move |client| (Just(client), hops(Just(client), source)));
        let others = vec(hops(addresses(), source), 0..HOPS_MAX);
        (Just(source), our_proxies(), client, others, hostile_lines())
    });
    check(&cases, |(source, peer, (client, client_hop), others, hostile)| {
        let nth = u8::try_from(others.len() + 1).ok().and_then(NonZeroU8::new).unwrap();
        let ours = [vec![client_hop], others].concat().join(",");
        let mut lines = hostile;
        lines.push(ours.into_bytes());
        let found = our_trust(source).with_nth_from_right(nth).client(peer, slices(&lines));
        prop_assert_eq!(found, canonical(client));
        Ok(())
    });
}

#[test]
fn client_is_the_peer_or_was_reported_by_a_trusted_proxy() {
    // However broken the header, the client is never an address to the left of an untrusted hop or of garbage.
    check(&(our_proxies(), hostile_lines()), |(peer, lines)| {
        let client = our_trust(Source::XForwardedFor).client(peer, slices(&lines));
        let mut believed = vec![peer];
        for hop in lines.join(&b","[..]).rsplit(|b| *b == b',') {
            // For a header that contains only garbage the client is the peer, which does not occur in these lines.
            let alone = TrustedProxies::proxies([IpNet::from(PROXY)]).client(PROXY, [hop]);
            if alone == PROXY {
                break;
            }
            believed.push(alone);
            if !is_our_proxy(alone) {
                break;
            }
        }
        prop_assert!(believed.contains(&client), "{client} is not among {believed:?}");
        Ok(())
    });
}

#[test]
fn every_form_of_an_address_is_the_same_client() {
    let cases = (addresses(), sources()).prop_flat_map(|(address, source)| {
        (Just(address), Just(source), hops(Just(address), source), hops(Just(canonical(address)), source))
    });
    check(&cases, |(address, source, one, other)| {
        let trust = TrustedProxies::proxies([IpNet::from(PROXY)]).with_source(source);
        prop_assume!(canonical(address) != PROXY);
        for text in [one, other] {
            prop_assert_eq!(trust.client(PROXY, [text.as_bytes()]), canonical(address), "{}", text);
        }
        Ok(())
    });
}
