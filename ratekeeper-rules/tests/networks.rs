//! Networks in a configuration, and the networks that clients are counted in.
#![allow(clippy::unwrap_used, reason = "a test that cannot be set up has failed")]

use std::net::IpAddr;

use ratekeeper_rules::client::{Grouping, parse_cidr};

#[test]
fn networks_are_parsed_to_canonical_form() {
    for (typed, canonical) in [
        ("10.0.0.0/8", "10.0.0.0/8"),
        (" 10.0.0.0/8\n", "10.0.0.0/8"),
        ("10.0.0.5/32", "10.0.0.5/32"),
        ("0.0.0.0/0", "0.0.0.0/0"),
        ("2001:db8::/32", "2001:db8::/32"),
        ("2001:DB8:0::/32", "2001:db8::/32"),
        ("::/0", "::/0"),
        // An address is a network of one.
        ("10.0.0.5", "10.0.0.5/32"),
        ("2001:db8::1", "2001:db8::1/128"),
        ("::1", "::1/128"),
        // IPv4 in IPv6 form is IPv4.
        ("::ffff:10.0.0.0/104", "10.0.0.0/8"),
        ("::ffff:a00:0/104", "10.0.0.0/8"),
        ("::ffff:10.0.0.5/128", "10.0.0.5/32"),
        ("::ffff:10.0.0.5", "10.0.0.5/32"),
        ("::ffff:0:0/96", "0.0.0.0/0"),
        // Similar addresses are not IPv4.
        ("::10.0.0.5", "::a00:5/128"),
        ("64:ff9b::/96", "64:ff9b::/96"),
        ("::/80", "::/80"),
    ] {
        let network = parse_cidr(typed).map(|network| network.to_string());
        assert_eq!(network.as_deref(), Ok(canonical), "{typed}");
    }
}

#[test]
fn invalid_network_is_rejected_with_help() {
    let in_full = "write an IP address in full and a prefix, as in `10.0.0.0/8` or `2001:db8::/32`";
    let to_32 = "write a whole number from 0 to 32 after the slash";
    let to_128 = "write a whole number from 0 to 128 after the slash";
    let not_one = "is not a network";
    let no_fit = "has a prefix that does not fit";
    let host_bits = "has bits set to the right of its prefix";
    let all_ipv4 = "is an IPv4 address in IPv6 form, and its prefix takes in all of IPv4";
    for (typed, what, instead) in [
        ("10.0.0.5/8", host_bits, "write `10.0.0.0/8` or `10.0.0.5/32`"),
        ("10.0.0.5/0", host_bits, "write `0.0.0.0/0` or `10.0.0.5/32`"),
        ("10.0.0.1/31", host_bits, "write `10.0.0.0/31` or `10.0.0.1/32`"),
        ("2001:db8::1/64", host_bits, "write `2001:db8::/64` or `2001:db8::1/128`"),
        ("::ffff:10.0.0.5/104", host_bits, "write `10.0.0.0/8` or `10.0.0.5/32`"),
        // proxy-addr (CVE-2026-90711) trusted all of IPv4 here.
        ("::ffff:10.0.0.0/8", all_ipv4, "write `10.0.0.0/8`"),
        ("::ffff:10.0.0.5/8", all_ipv4, "write `10.0.0.0/8`"),
        ("::ffff:a00:0/8", all_ipv4, "write `10.0.0.0/8`"),
        ("::ffff:10.0.0.0/32", all_ipv4, "write `10.0.0.0/32`"),
        ("::ffff:10.0.0.0/33", all_ipv4, "write it as an IPv4 network"),
        ("::ffff:10.0.0.0/95", all_ipv4, "write it as an IPv4 network"),
        ("::ffff:0:0/0", all_ipv4, "write `0.0.0.0/0`"),
        ("10.0.0.0/33", no_fit, to_32),
        ("10.0.0.0/256", no_fit, to_32),
        ("10.0.0.0/", no_fit, to_32),
        ("10.0.0.0/-8", no_fit, to_32),
        ("10.0.0.0/+8", no_fit, to_32),
        ("10.0.0.0/08", no_fit, to_32),
        ("10.0.0.0/8/8", no_fit, to_32),
        ("10.0.0.0/ 8", no_fit, to_32),
        ("10.0.0.0/255.0.0.0", no_fit, to_32),
        ("2001:db8::/129", no_fit, to_128),
        ("", not_one, in_full),
        ("/8", not_one, in_full),
        ("10/8", not_one, in_full),
        ("10.0.0/8", not_one, in_full),
        ("010.0.0.0/8", not_one, in_full),
        ("10.0.0.*", not_one, in_full),
        ("10.0.0.1:80", not_one, in_full),
        ("10.0.0.1-10.0.0.9", not_one, in_full),
        ("[2001:db8::]/32", not_one, in_full),
        ("fe80::1%eth0", not_one, in_full),
        ("localhost", not_one, in_full),
    ] {
        let error = parse_cidr(typed).unwrap_err();
        assert_eq!(error.what(), format!("`{typed}` {what}"));
        assert_eq!(error.instead(), instead, "{typed}");
        assert_eq!(error.to_string(), format!("`{typed}` {what}; {instead}"));
    }
}

#[test]
fn error_message_truncates_and_escapes_its_input() {
    let error = parse_cidr(&"7".repeat(1_000_000)).unwrap_err();
    assert_eq!(error.what(), format!("`{}…` is not a network", "7".repeat(40)));
    let error = parse_cidr("\u{1b}[2J/8").unwrap_err();
    assert_eq!(error.what(), "`\\u{1b}[2J/8` is not a network");
}

fn key(ipv6_prefix: u8, client: &str) -> String {
    Grouping::by_ipv6_prefix(ipv6_prefix).unwrap().network(client.parse().unwrap()).to_string()
}

#[test]
fn ipv4_is_counted_by_address_and_ipv6_by_network() {
    for (prefix, client, network) in [
        (64, "203.0.113.7", "203.0.113.7/32"),
        (64, "0.0.0.0", "0.0.0.0/32"),
        (64, "2001:db8:1:2:3:4:5:6", "2001:db8:1:2::/64"),
        (64, "2001:db8:1:2::", "2001:db8:1:2::/64"),
        (64, "2001:DB8:1:2:FFFF:FFFF:FFFF:FFFF", "2001:db8:1:2::/64"),
        (64, "2001:db8:1:3::", "2001:db8:1:3::/64"),
        (32, "2001:db8:1:2:3:4:5:6", "2001:db8::/32"),
        (48, "2001:db8:1:2:3:4:5:6", "2001:db8:1::/48"),
        (56, "2001:db8:1:2ff:3:4:5:6", "2001:db8:1:200::/56"),
        (128, "2001:db8:1:2:3:4:5:6", "2001:db8:1:2:3:4:5:6/128"),
        // A prefix for IPv6 does not affect IPv4.
        (32, "203.0.113.7", "203.0.113.7/32"),
        (128, "203.0.113.7", "203.0.113.7/32"),
        // express-rate-limit (CVE-2026-30827) counted all of these as one.
        (64, "::ffff:203.0.113.7", "203.0.113.7/32"),
        (64, "::ffff:cb00:7108", "203.0.113.8/32"),
        (56, "::ffff:203.0.113.7", "203.0.113.7/32"),
        // An IPv4 client behind a translator has the same budget as without one.
        (64, "64:ff9b::203.0.113.7", "203.0.113.7/32"),
        (128, "64:ff9b::cb00:7107", "203.0.113.7/32"),
        // An address that merely ends in an IPv4 address is not counted by bits that its owner chooses.
        (64, "2001:db8:1:2::203.0.113.7", "2001:db8:1:2::/64"),
        (64, "64:ff9b:1::203.0.113.7", "64:ff9b:1::/64"),
        (64, "64:ff9b::1:203.0.113.7", "64:ff9b::/64"),
        (64, "::203.0.113.7", "::/64"),
    ] {
        assert_eq!(key(prefix, client), network, "{client} by /{prefix}");
    }
}

#[test]
fn default_prefix_is_64_and_prefixes_outside_32_to_128_are_rejected() {
    let client: IpAddr = "2001:db8:1:2:3:4:5:6".parse().unwrap();
    assert_eq!(Grouping::default().network(client).to_string(), "2001:db8:1:2::/64");
    for bits in 0..=u8::MAX {
        assert_eq!(Grouping::by_ipv6_prefix(bits).is_some(), (32..=128).contains(&bits), "{bits}");
    }
}
