//! Files made to exhaust the reader, and randomly damaged files.
#![allow(clippy::unwrap_used, reason = "a test that cannot be set up has failed")]

use std::time::Duration;

use proptest::prelude::*;
use ratekeeper::{Clock, SystemClock, Time};
use ratekeeper_config::envoy::{DEPTH_MAX, DESCRIPTORS_MAX};
use ratekeeper_config::{
    ADDRESSES_MAX, ERRORS_MAX, HEADER_EDITS_MAX, LIMITS_MAX, LISTENERS_MAX, OVERRIDES_MAX, ROUTES_MAX,
    TEXT_BYTES_MAX, UPSTREAMS_MAX,
};

use crate::common::{examples, read};

/// Maximum CPU time per file. Debug builds check overflows and get more than the promised time.
const TIME_MAX: Duration = Duration::from_millis(if cfg!(debug_assertions) { 1_000 } else { 100 });

/// CPU time of this thread if the system reports it, otherwise elapsed time.
fn spent(clock: &SystemClock) -> Duration {
    let text = std::fs::read_to_string("/proc/thread-self/schedstat").ok();
    let nanos = text.and_then(|text| text.split(' ').next()?.parse().ok());
    nanos.map_or_else(|| clock.now().saturating_since(Time::EPOCH), Duration::from_nanos)
}

/// The result of a file, and the time it took. Messages have a bounded size for any input.
fn timed(name: &str, yaml: &str) -> (Result<(), String>, Duration) {
    let clock = SystemClock::new();
    let begin = spent(&clock);
    let result = read(yaml).map(|_| ()).map_err(|errors| (errors.iter().len(), errors.to_string()));
    let took = spent(&clock) - begin;
    if let Err((errors, message)) = &result {
        assert!(
            *errors <= ERRORS_MAX && message.len() < 2_000 * ERRORS_MAX,
            "{name}: {} bytes",
            message.len()
        );
        assert!(message.lines().all(|line| line.chars().count() < 1_000), "{name}: {message}");
    }
    (result.map_err(|(_, message)| message), took)
}

fn many(count: usize, one: impl Fn(usize) -> String) -> String {
    (0..count).map(one).collect()
}

#[test]
fn resource_exhaustion_files_fail_quickly() {
    let laughs =
        many(10, |n| format!("  a{}: &a{} [{}]\n", n + 1, n + 1, vec![format!("*a{n}"); 10].join(", ")));
    let merges = many(200, |n| {
        format!("  m{}: &m{} {{ <<: [{}] }}\n", n + 1, n + 1, vec![format!("*m{n}"); 9].join(", "))
    });
    let limits = |count| format!("limits:\n{}", many(count, |n| format!(" {n}: {{token_bucket: }}\n")));
    let bombs = [
        ("laughs", format!("limits:\n  a0: &a0 [lol]\n{laughs}")),
        ("merges", format!("limits:\n  m0: &m0 {{ token_bucket: }}\n{merges}")),
        (
            "one alias often",
            format!("limits: {{ a: &a {{ token_bucket: }}, {} }}", many(90_000, |n| format!("{n}: *a,"))),
        ),
        ("brackets", "[".repeat(TEXT_BYTES_MAX)),
        ("braces", "{a: ".repeat(TEXT_BYTES_MAX / 4)),
        ("dashes", "- ".repeat(TEXT_BYTES_MAX / 2)),
        ("questions", "? ".repeat(TEXT_BYTES_MAX / 2)),
        ("commas", ",".repeat(TEXT_BYTES_MAX)),
        ("commas in a list", format!("limits: [{}]", "a,".repeat(TEXT_BYTES_MAX / 2 - 10))),
        ("quotes", "\"".repeat(TEXT_BYTES_MAX)),
        ("colons", ": ".repeat(TEXT_BYTES_MAX / 2)),
        ("at signs", format!("store: {}", "://:@".repeat(TEXT_BYTES_MAX / 5 - 2))),
        ("limits", limits(40_000)),
        ("100 000 limits", limits(100_000)),
        ("unknown names", many(100_000, |n| format!("n{n}: 1\n"))),
        ("unknown names in a line", format!("{{{}}}", many(90_000, |n| format!("n{n}: 1, ")))),
        ("numbers in a line", format!("store: {{ memory: {{ max_keys: [{}] }} }}", "1, ".repeat(100_000))),
        (
            "unknown parameters",
            format!("limits: {{ a: {{ {} }} }}", many(80_000, |n| format!("token_bucke{n}: , "))),
        ),
        ("networks", format!("client: {{ trusted_proxies: [{}] }}", "1.2.3, ".repeat(100_000))),
        (
            "unknown limits",
            format!(
                "{}gateway: {{ routes: {{ id: a, upstream: http://h, limits: [{}] }} }}",
                limits(LIMITS_MAX),
                many(80_000, |n| format!("l{n}, "))
            ),
        ),
        (
            "descriptors",
            format!("domains:\n  d:\n{}", many(10_000, |n| format!("  - {{key: k, value: {n}}}\n"))),
        ),
        (
            "descriptors in descriptors",
            format!("domains: {{ d: {} }}", "{key: k, descriptors: [".repeat(20_000)),
        ),
        (
            "descriptors by an alias",
            format!(
                "domains:\n  d: &d [{{key: k, fixed_window: }}]\n{}",
                many(40_000, |n| format!("  d{n}: *d\n"))
            ),
        ),
        (
            "routes",
            format!(
                "gateway:\n  routes:\n{}",
                many(20_000, |n| format!("  - {{id: {n}, upstream: http://h, limits: all}}\n"))
            ),
        ),
        (
            "overrides",
            format!(
                "limits: {{ a: {{ token_bucket: , overrides: [{}] }} }}",
                "{when: {}, unlimited: true},".repeat(20_000)
            ),
        ),
        (
            "upstreams",
            format!(
                "gateway:\n  upstreams:\n{}",
                many(8_000, |n| format!("    u{n}: {{addresses: http://h}}\n"))
            ),
        ),
        (
            "addresses",
            format!("gateway: {{ upstreams: {{ a: {{ addresses: [{}] }} }} }}", "http://h, ".repeat(40_000)),
        ),
        (
            "unknown upstreams",
            format!(
                "gateway:\n  upstreams:\n{}  routes:\n{}",
                many(1_000, |n| format!("    u{n}: {{addresses: http://h}}\n")),
                many(1_000, |n| format!("  - {{id: r{n}, limits: all, upstream: {}}}\n", "x".repeat(300)))
            ),
        ),
        (
            "headers",
            format!(
                "gateway: {{ routes: {{ id: a, limits: all, upstream: http://h, request_headers: {{ set: {{ {} }}, remove: [{}] }} }} }}",
                many(10_000, |n| format!("a{n}: 1, ")),
                "b, ".repeat(20_000)
            ),
        ),
        ("listeners", format!("gateway: {{ listen: [{}] }}", "127.0.0.1:80, ".repeat(40_000))),
        ("twice", format!("limits:\n{}", " a: {token_bucket: }\n".repeat(40_000))),
        ("secrets", format!("store: {{ redis: {{ secret: {} }} }}", "${A".repeat(300_000))),
        (
            "names that are alike",
            format!(
                "limits:\n{}gateway: {{ routes: {{ id: a, upstream: http://h, limits: [{}] }} }}",
                many(LIMITS_MAX, |n| format!(" {}{n}: {{token_bucket: }}\n", "a".repeat(80))),
                many(ERRORS_MAX, |n| format!("{}{n}, ", "b".repeat(80)))
            ),
        ),
        (
            "long names of routes",
            format!(
                "limits: {{ a: {{ token_bucket: , cost: {{ routes: {{ {} }} }} }} }}\ngateway:\n  routes:\n{}",
                many(ERRORS_MAX / 2, |n| format!("{}{n}: 1, ", "b".repeat(64))),
                many(ROUTES_MAX, |n| format!(
                    "  - {{ id: {}{n}, upstream: http://h, limits: all }}\n",
                    "a".repeat(700)
                ))
            ),
        ),
        (
            "blank lines above mistakes",
            format!(
                "limits:\n{}{}",
                "\n".repeat(990_000),
                many(ERRORS_MAX, |n| format!(" n{n}: {{x: 1}}\n"))
            ),
        ),
        ("a long line", format!("limits: {{ a: {{ token_bucket: }}, {}b: }}", " ".repeat(900_000))),
    ];
    check_soon(&bombs, true);
}

/// Reads all files and prints the time of each: `cargo test --release -- --nocapture` shows it.
fn check_soon(files: &[(&str, String)], are_wrong: bool) {
    let mut slow = Vec::new();
    for (name, yaml) in files {
        let (result, took) = timed(name, yaml);
        assert_eq!(result.is_err(), are_wrong, "{name}: {result:?}");
        println!("{took:>12?} {:>8} bytes: {name}", yaml.len());
        slow.extend((took > TIME_MAX).then(|| format!("{name} took {took:?}")));
    }
    assert!(slow.is_empty(), "{slow:?}");
}

/// Mistakes with expensive suggestions: names similar to a thousand others, and lists of them.
#[test]
fn suggestions_take_bounded_time() {
    let limits = |one: &dyn Fn(usize) -> String| format!("limits:\n{}", many(LIMITS_MAX, one));
    let routes = |one: &dyn Fn(usize) -> String| format!("gateway:\n  routes:\n{}", many(ROUTES_MAX, one));
    // As many characters as are compared: the same ones in a different order.
    let turned = |n: usize| {
        let mut letters: Vec<char> =
            "abcdefghijklmnopqrstuvwxyz-ABCDEFGHIJKLMNOPQRSTUVWXYZ".chars().collect();
        letters.rotate_left(n % 53);
        format!("{}{n:04}", letters.into_iter().collect::<String>())
    };
    let (long, longer) = ("x".repeat(100), "x".repeat(400));
    check_soon(
        &[
            (
                // This case once took eight seconds: a hundred names were each compared with a thousand long ones.
                "unknown routes with long names",
                limits(&|n| format!(" l{n}: {{token_bucket: , cost: {{routes: {{q{n}{longer}: 2}}}}}}\n"))
                    + &routes(&|n| format!("  - {{id: r{n}{longer}, upstream: http://h, limits: all}}\n")),
            ),
            (
                "unknown routes with the same letters",
                limits(&|n| {
                    format!(" l{n}: {{token_bucket: , cost: {{routes: {{{}: 2}}}}}}\n", turned(n + 7))
                }) + &routes(&|n| format!("  - {{id: {}x, upstream: http://h, limits: all}}\n", turned(n))),
            ),
            (
                "unknown limits with the same letters",
                limits(&|n| format!(" {}: {{token_bucket: }}\n", turned(n)))
                    + &routes(&|n| {
                        format!("  - {{id: {n}, upstream: http://h, limits: [{}y]}}\n", turned(n + 7))
                    }),
            ),
            (
                "unknown parameters everywhere",
                limits(&|n| format!(" l{n}: {{tokn_bucket: , ky: ip, \"a{long}\": 1}}\n")),
            ),
            (
                "networks that are none",
                format!("limits: {{a: {{token_bucket: , deny: [{}]}}}}", "1.2.3.4/2,".repeat(49_000)),
            ),
            (
                "headers that are none",
                format!(
                    "limits: {{a: {{token_bucket: , when: {{header: {{{}}}}}}}}}",
                    many(20_000, |n| format!("\"X {n}\": a, "))
                ),
            ),
            ("names twice", format!("limits: {{{}}}", " a: 1,".repeat(24_000))),
        ],
        true,
    );
}

/// Valid files of the maximum size.
#[test]
fn large_valid_files_are_read_quickly() {
    let limits = |one: &dyn Fn(usize) -> String| format!("limits:\n{}", many(LIMITS_MAX, one));
    let routes = |one: &dyn Fn(usize) -> String| format!("gateway:\n  routes:\n{}", many(ROUTES_MAX, one));
    let network = |n: usize| format!("{}.{}.{}.0/24,", n >> 16 & 255, n >> 8 & 255, n & 255);
    let path = "a/".repeat(430);
    let descriptor = |n: usize| {
        format!(
            "  - {{key: k, value: v{n}*, share: true, name: n{n}, fixed_window: {{limit: {}, window: 30d, align: clock}}}}\n",
            n + 1
        )
    };
    check_soon(
        &[
            ("networks", format!("limits: {{a: {{token_bucket: , deny: [{}]}}}}", many(49_000, network))),
            ("proxies", format!("client: {{trusted_proxies: [{}]}}\nlimits:\n", many(49_000, network))),
            (
                "limits and routes",
                limits(&|n| format!(" l{n}: {{token_bucket: }}\n"))
                    + &routes(&|n| format!("  - {{id: {n}, upstream: http://h, limits: all}}\n")),
            ),
            (
                "routes with long paths",
                routes(&|n| format!("  - {{id: {n}, path: /{path}**, upstream: http://h, limits: all}}\n")),
            ),
            (
                "overrides for many keys",
                format!(
                    "limits: {{a: {{key: {{header: X}}, token_bucket: , overrides: [{}]}}}}",
                    many(OVERRIDES_MAX, |n| {
                        format!("{{key: [{}], unlimited: true}},", many(40, |m| format!("k{n}x{m},")))
                    })
                ),
            ),
            ("descriptors", format!("domains:\n  d:\n{}", many(DESCRIPTORS_MAX, descriptor))),
            (
                "descriptors with long names around them",
                format!(
                    "domains:\n  d:\n  - key: {}\n    descriptors:\n{}",
                    "x".repeat(800_000),
                    many(DESCRIPTORS_MAX - 1, |n| format!(
                        "    - {{key: {n}, token_bucket: , replaces: [a, b]}}\n"
                    ))
                ),
            ),
            (
                "bodies",
                limits(&|n| {
                    format!(" l{n}: {{token_bucket: , deny_response: {{body: {}}}}}\n", "x".repeat(900))
                }),
            ),
        ],
        false,
    );
}

/// Terminals interpret control characters: they could clear the screen or show a different text.
#[test]
fn messages_contain_no_control_characters() {
    let mut count = 0;
    for yaml in [
        r#"limits: { "a\e[2J": { token_bucket: } }"#,
        r#"limits: { "a\e[2J": { token_bucket: , token_bukcet: } }"#,
        r#"limits: { a: { "\e[2J": 1, token_bucket: { refill: "\e[2J/" } } }"#,
        r#"limits: { a: { fixed_window: { limit: "\e", window: "1\e", align: "\e" }, shadow: "\e" } }"#,
        r#"limits: { a: { token_bucket: , when: { path: "\e[2J" } } }"#,
        r#"limits: { a: { token_bucket: , when: { path: "/{\e}", host: "\e", method: "\e", client: "\e" } } }"#,
        r#"limits: { a: { token_bucket: , when: { header: { "\e": 1 } }, allow: "1.2.3.4/\e" } }"#,
        r#"limits: { a: { token_bucket: , key: { header: "\e", fallback: "de\eny" } } }"#,
        r#"limits: { a: { token_bucket: , key: "\e-", cost: "\e", lease: "\e", on_store_failure: "\e" } }"#,
        r#"limits: { a: { token_bucket: , ban: { after: "\e", within: "\e", for: "1\e" } } }"#,
        r#"limits: { a: { token_bucket: , deny_response: { status: "\e", content_type: "\e" } } }"#,
        r#"limits: { a: { token_bucket: , cost: { routes: { "r\e": 1 } } } }
gateway: { listen: "\e", routes: [{ id: "r\e[", limits: all, upstream: "\e" }] }"#,
        r#"limits: { "a\e[2J": { token_bucket: } }
gateway: { routes: [{ id: r, upstream: http://h, limits: ["a\e[2", other] }] }"#,
        r#"store: { memory: { max_bytes: "1\e", when_full: "\e", max_keys: "\e" } }"#,
        r#"store: { redis: { address: "re\edis://h", secret: { file: "\e" }, deadline: "\e" } }"#,
        r#"client: { trusted_proxies: "\e", source: "\e", ipv6_prefix: "\e" }"#,
        r#"jwt: { keys: "{", algorithms: "\e", header: "\e" }"#,
        r#"{ "\e": 1, "\e": 2 }"#,
        "limits: *a\u{9b}",
        "limits: !a\u{9b} b",
    ] {
        let message = read(yaml).expect_err(yaml).to_string();
        count += 1;
        assert!(
            !message.contains(|c: char| c.is_control() && c != '\n'),
            "{yaml}\n{}",
            message.escape_debug()
        );
    }
    assert_eq!(count, 20);
}

#[test]
fn bounds_are_inclusive_and_reported() {
    let limits = |count| format!("limits:\n{}", many(count, |n| format!(" l{n}: {{ token_bucket: }}\n")));
    assert_eq!(read(&limits(LIMITS_MAX)).unwrap().rules.rules().len(), LIMITS_MAX);
    let routes = |count| {
        format!(
            "gateway:\n  routes:\n{}",
            many(count, |n| format!("  - {{ id: r{n}, limits: all, upstream: http://h }}\n"))
        )
    };
    assert_eq!(read(&routes(ROUTES_MAX)).unwrap().gateway.unwrap().routes.len(), ROUTES_MAX);
    let overrides = |count| {
        format!(
            "limits: {{ a: {{ token_bucket: , overrides: [{}] }} }}",
            "{ when: {}, unlimited: true }, ".repeat(count)
        )
    };
    assert!(read(&overrides(OVERRIDES_MAX)).is_ok());
    let routed = |fields: String| {
        format!("gateway: {{ {fields}, routes: [{{ id: a, limits: all, upstream: http://h }}] }}")
    };
    let listeners =
        |count| routed(format!("listen: [{}]", many(count, |n| format!("127.0.0.1:{}, ", n + 10_000))));
    assert_eq!(read(&listeners(LISTENERS_MAX)).unwrap().gateway.unwrap().listeners.len(), LISTENERS_MAX);
    let upstreams = |count| {
        routed(format!("upstreams: {{ {} }}", many(count, |n| format!("u{n}: {{ addresses: http://h }}, "))))
    };
    assert_eq!(read(&upstreams(UPSTREAMS_MAX)).unwrap().gateway.unwrap().upstreams.len(), UPSTREAMS_MAX + 1);
    let addresses = |count| {
        let addresses = many(count, |n| format!("http://h{n}, "));
        routed(format!("upstreams: {{ a: {{ addresses: [{addresses}] }} }}"))
    };
    assert!(read(&addresses(ADDRESSES_MAX)).is_ok());
    let edits = |count| {
        format!(
            "gateway: {{ routes: {{ id: a, limits: all, upstream: http://h, response_headers: {{ remove: [{}] }} }} }}",
            many(count, |n| format!("x{n}, "))
        )
    };
    assert!(read(&edits(HEADER_EDITS_MAX)).is_ok());
    let descriptors = |count| {
        format!("domains: {{ d: [{}] }}", many(count, |n| format!("{{ key: k{n}, token_bucket: }}, ")))
    };
    assert_eq!(read(&descriptors(DESCRIPTORS_MAX)).unwrap().domains[0].descriptors.len(), DESCRIPTORS_MAX);
    let deep = |count| {
        format!("domains: {{ d: {}[]{} }}", "{ key: k, descriptors: ".repeat(count), "}".repeat(count))
    };
    assert!(read(&deep(DEPTH_MAX - 1)).is_ok());
    for (yaml, message) in [
        (descriptors(DESCRIPTORS_MAX + 1), "there are more than 2000 descriptors"),
        (deep(DEPTH_MAX), "descriptors are nested more than 10 levels deep"),
        (listeners(LISTENERS_MAX + 1), "too many listeners: 65 of at most 64"),
        (upstreams(UPSTREAMS_MAX + 1), "too many upstreams: 1001 of at most 1000"),
        (addresses(ADDRESSES_MAX + 1), "too many addresses: 1001 of at most 1000"),
        (edits(HEADER_EDITS_MAX + 1), "too many header edits: 65 of at most 64"),
        (limits(LIMITS_MAX + 1), "too many limits: 1001 of at most 1000"),
        (routes(ROUTES_MAX + 1), "too many routes: 1001 of at most 1000"),
        (overrides(OVERRIDES_MAX + 1), "too many overrides: 1001 of at most 1000"),
        (" ".repeat(TEXT_BYTES_MAX + 1), "the text has 1000001 bytes; the maximum is 1000000"),
    ] {
        let errors = read(&yaml).unwrap_err();
        assert_eq!(errors.iter().map(|error| error.message()).collect::<Vec<_>>(), [message]);
    }
    for (yaml, help) in [
        (listeners(LISTENERS_MAX + 1), "listen on all addresses of a port, as in `0.0.0.0:8080`"),
        (upstreams(UPSTREAMS_MAX + 1), "write several `addresses` in one upstream"),
        (addresses(ADDRESSES_MAX + 1), "write several upstreams"),
    ] {
        let errors = read(&yaml).unwrap_err();
        assert_eq!(errors.iter().map(|error| error.help()).collect::<Vec<_>>(), [help]);
    }
    let value = |bytes: usize| {
        let value = "v".repeat(bytes);
        format!(
            "gateway: {{ routes: {{ id: a, limits: all, upstream: http://h, request_headers: {{ set: {{ X-A: {value} }} }} }} }}"
        )
    };
    assert!(read(&value(4_096)).is_ok());
    let errors = read(&value(4_097)).unwrap_err();
    let message = "the value has 4097 bytes; the maximum is 4096";
    assert_eq!(errors.iter().map(|error| error.message()).collect::<Vec<_>>(), [message]);
}

#[test]
fn number_of_reported_errors_is_bounded() {
    let mistakes = |count: usize| read(&many(count, |n| format!("n{n}: 1\n"))).unwrap_err();
    assert_eq!(
        (mistakes(ERRORS_MAX - 1).iter().len(), mistakes(ERRORS_MAX - 1).is_cut()),
        (ERRORS_MAX - 1, false)
    );
    let errors = mistakes(ERRORS_MAX + 50);
    assert_eq!((errors.iter().len(), errors.is_cut()), (ERRORS_MAX, true));
    assert!(errors.to_string().ends_with("\n\nthere may be more errors: reading stopped after 100"));
}

/// A random edit of a file.
#[derive(Clone, Debug)]
enum Edit {
    Remove { at: usize, chars: usize },
    Insert { at: usize, text: String },
    Copy { at: usize, chars: usize, to: usize },
    SwapLines { one: usize, other: usize },
    Cut { at: usize },
}

fn edit() -> impl Strategy<Value = Edit> {
    let at = 0_usize..8_000;
    let noise = prop_oneof![
        "\\PC{0,6}",
        prop::sample::select(vec![
            "{", "}", "[", "]", ":", ": ", "- ", "&a ", "*a", "<<: *a", "\n", "\r\n", "\t", "\"", "'", "|\n",
            ">", "#", "---\n", "~", "!!str ", "? ", "0", "-1", "ip", "key: ", "${", "한", "\u{feff}",
            "\u{85}", "\u{2028}", "\0",
        ])
        .prop_map(str::to_owned),
    ];
    prop_oneof![
        (at.clone(), 1_usize..40).prop_map(|(at, chars)| Edit::Remove { at, chars }),
        (at.clone(), noise).prop_map(|(at, text)| Edit::Insert { at, text }),
        (at.clone(), 1_usize..200, at.clone()).prop_map(|(at, chars, to)| Edit::Copy { at, chars, to }),
        (0_usize..150, 0_usize..150).prop_map(|(one, other)| Edit::SwapLines { one, other }),
        at.prop_map(|at| Edit::Cut { at }),
    ]
}

fn edited(text: &str, edit: &Edit) -> String {
    let mut chars: Vec<char> = text.chars().collect();
    let within = |at: usize| at % (chars.len() + 1);
    match edit {
        Edit::Remove { at, chars: count } => {
            let from = within(*at);
            let to = chars.len().min(from + count);
            chars.drain(from..to);
        }
        Edit::Insert { at, text } => {
            let at = within(*at);
            chars.splice(at..at, text.chars());
        }
        Edit::Copy { at, chars: count, to } => {
            let (from, to) = (within(*at), within(*to));
            let copied: Vec<char> = chars[from..].iter().take(*count).copied().collect();
            chars.splice(to..to, copied);
        }
        Edit::SwapLines { one, other } => {
            let mut lines: Vec<&str> = text.lines().collect();
            let count = lines.len().max(1);
            if !lines.is_empty() {
                lines.swap(one % count, other % count);
            }
            return lines.join("\n");
        }
        Edit::Cut { at } => chars.truncate(within(*at)),
    }
    chars.into_iter().collect()
}

proptest! {
    #![proptest_config(testbed::property::cases(3_000))]

    /// Errors of any file have a position inside the file.
    #[test]
    fn errors_of_random_edits_have_valid_positions(which in 0_usize..10, edits in prop::collection::vec(edit(), 1..6)) {
        let examples = examples();
        let text = examples[which % examples.len()].1.replace("${REDIS_PASSWORD}", "hunter2");
        let text = edits.iter().fold(text, |text, edit| edited(&text, edit));
        if let Err(errors) = read(&text) {
            for error in errors.iter() {
                let lines: Vec<&str> = text.split(['\n', '\r']).collect();
                prop_assert!((1..=lines.len()).contains(&error.line()), "{error}");
                let longest = lines.iter().map(|line| line.chars().count()).max().unwrap();
                prop_assert!((1..=longest + 1).contains(&error.column()), "{error}");
                prop_assert!(!error.message().is_empty() && !error.help().is_empty());
            }
        }
    }
}
